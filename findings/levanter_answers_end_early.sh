#!/usr/bin/env bash
# marin-levanter 0.2.20.dev202606180959 (jax 0.10.2 on a CPU): answers end early, without a word, because the engine counts
# its rounds in whole calls.
#
# Expected: `generate` gives as many tokens as `max_num_tokens` allows, if prompt and answer fit into `max_seq_len`.
# `max_rounds` is documented as a matter of throughput and latency, and `max_tokens_per_round` as the size of a step.
# Seen: `InferenceEngine.generate` (levanter/inference/engine.py) makes at most `max_seq_len // max_rounds` calls of
# `max_rounds` steps each. The remainder is lost: with the default of 32 rounds and room for 60 tokens, every answer ends
# after 33. With more rounds than room there is only the token of the prefill. And it takes each step for one token of every
# answer, so with `max_tokens_per_round` below the number of prompts the answers end at a share of their length. The tokens
# are right as far as they go. Nothing is raised, no warning is logged, and the result does not say that an answer is cut.
# (The server of this package calls each answer finished with "stop".)
#
#     room for 60, 32 rounds, one prompt: 33 of 50 tokens
#     room for 60, 64 rounds, one prompt: 1 of 50 tokens
#     room for 60, 20 rounds, one prompt: 50 of 50 tokens
#     room for 64, 32 rounds, one prompt: 50 of 50 tokens
#     room for 64, 32 rounds, 4 prompts, 1 token a round: 17 17 17 17 of 50 tokens
# (Llama with two layers and random weights in float32, a prompt of 5 tokens, compared with a loop without a cache.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps marin-levanter==0.2.20.dev202606180959 \
    marin-haliax==0.2.20.dev202606180959 marin-fray==0.2.20.dev202606180959 marin-rigging==0.2.20.dev202606180959 \
    marin-iris==0.2.20.dev202606180959 marin-finelog==0.2.12.dev202606181017 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 \
    equinox==0.13.8 flax==0.12.8 jaxtyping==0.3.11 transformers==4.57.6 tokenizers==0.22.2 GitPython==3.2.1 Jinja2==3.1.6 \
    MarkupSafe==3.0.4 PyYAML==6.0.4 Pygments==2.21.0 absl-py==2.5.1 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 \
    aiosignal==1.4.0 annotated-types==0.8.0 anyio==4.16.0 aqtp==0.9.0 attrs==26.1.0 botocore==1.43.117 braceexpand==0.1.7 \
    certifi==2026.10.19.post1 cffi==2.1.1 charset-normalizer==3.5.3 chex==0.1.92 click==8.5.1 cloudpickle==3.1.3 \
    connect-python==0.9.0 cryptography==50.0.2 datasets==4.8.5 dill==0.4.1 draccus==0.11.6 etils==1.15.0 filelock==3.32.7 \
    frozenlist==1.8.0 fsspec==2026.2.0 gcsfs==2026.2.0 gitdb==4.0.12 google-api-core==2.44.0 google-auth==2.63.0 \
    google-cloud-core==2.8.0 google-cloud-storage-control==1.17.0 google-cloud-storage==3.17.1 google-cloud-tpu==1.28.0 \
    google-resumable-media==2.11.0 googleapis-common-protos==1.76.0 grpc-google-iam-v1==0.14.6 grpcio-status==1.85.3 \
    grpcio==1.85.3 httpx==0.28.1 huggingface_hub==0.36.2 humanfriendly==10.0 idna==3.20 jmespath==1.1.0 jmp==0.0.4 \
    mergedeep==1.3.4 ml_dtypes==0.6.0 msgpack==1.2.4 multidict==7.2.1 multiprocess==0.70.19 mypy_extensions==1.2.0 \
    opentelemetry-api==1.45.2 opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp-common==0.66b2 \
    opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 \
    opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 opt_einsum==3.4.0 \
    optax==0.2.6 packaging==26.4 pandas==3.1.1 platformdirs==4.14.8 propcache==0.5.4 protobuf==7.37.0rc1 pyarrow==26.0.1 \
    pydantic==2.14.4 pydantic_core==2.50.5 pyqwest==0.12.0 python-dateutil==2.9.0.post0 pytimeparse==1.1.10 \
    regex==2026.11.19 requests==2.34.2 rich==15.0.0 safetensors==0.6.2 simplejson==4.3.0 six==1.17.0 smmap==5.0.3 \
    substrait==0.24.2 tblib==3.2.2 tensorstore==0.1.81 toolz==1.2.0 tqdm-loggable==0.4.1 tqdm==4.70.1 \
    typing-inspect==0.9.0 typing-inspection==0.4.5 typing_extensions==4.16.0 urllib3==2.8.0 uvicorn==0.54.0 \
    wadler_lindig==0.1.8 wandb==0.31.0 watchfiles==1.3.0 xxhash==4.1.0 yarl==1.25.1 zstandard==0.25.0 2> "$work/log" \
    || { tail -n 5 "$work/log"; exit 1; }
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import logging

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

NEW = 50
rng = np.random.default_rng(0)
model = LlamaLMHeadModel.init(hax.Axis("vocab", 128), LlamaConfig(
    max_seq_len=64, hidden_dim=64, intermediate_dim=96, num_layers=2, num_heads=4, num_kv_heads=2),
    key=jax.random.PRNGKey(0))
model = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32)
                     if getattr(leaf, "ndim", 0) > 1 else leaf, model)
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = warnings.append


class Numbers:
    """The engine only needs it for its log."""

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


@jax.jit
def logits(tokens):
    return model(hax.named(tokens, "position"), attn_mask=AttentionMask.causal(), key=None).array


prompt = rng.integers(1, 128, 5).tolist()
right = list(prompt)
for _ in range(NEW):
    right.append(int(logits(jnp.asarray(right + [0] * (64 - len(right))))[len(right) - 1].argmax()))
right = right[len(prompt):]
wanted = SeqDecodingParams(
    max_num_tokens=jnp.array(len(prompt) + NEW, jnp.int32), stop_tokens=None, temperature=jnp.array(0.0),
    top_p=jnp.array(1.0), key=jax.random.PRNGKey(0))
logging.getLogger("levanter.inference.engine").addHandler(handler)
for room, rounds, prompts, step, seen in ((60, 32, 1, None, [33]), (60, 64, 1, None, [1]), (60, 20, 1, None, [50]),
                                          (64, 32, 1, None, [50]), (64, 32, 4, 1, [17] * 4)):
    engine = InferenceEngine.from_model_with_config(model, Numbers(), InferenceEngineConfig(
        max_seq_len=room, max_rounds=rounds, max_tokens_per_round=step, page_size=32, max_seqs=4, max_pages=16,
        max_queued_tokens=64, compute_dtype=jnp.float32))
    answers = engine.generate([Request(prompt, number, wanted, 1) for number in range(prompts)]).tokens
    lengths = [len(answer) for answer in answers]
    print(f"room for {room}, {rounds} rounds, " + (f"{prompts} prompts, {step} token a round: " if step else "one prompt: ")
          + " ".join(map(str, lengths)), f"of {NEW} tokens")
    assert lengths == seen and all(answer == right[:len(answer)] for answer in answers), "the behaviour has changed"
    assert not warnings, "the behaviour has changed"
PY
