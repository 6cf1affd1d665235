#!/usr/bin/env bash
# nemo_toolkit 3.0.0 (torch 2.13.0 on a CPU): a streaming Conformer with an unlimited left context loses its look-ahead, and with
# stacking a sound loses a frame if a longer one is beside it.
#
# Expected: with att_context_style="chunked_limited" a Conformer gives the same frames in portions, with its caches, as for the whole
# sound. A left context of -1 is unlimited, and max_context of setup_streaming_params then says how many frames the cache holds. In a
# batch a sound gets as many frames as alone.
# Seen: a limited left context is exact. With -1 it depends on max_context. The mask of a portion counts its chunks from the start of
# the cache. A limited context has to be a multiple of the chunk, and this is checked, but max_context has not. If it is none, the
# borders of the chunks lie within a portion, and its frames do not see those to their right. That is so for every chunk that does
# not divide max_context, as for the default of 10000 and a look-ahead of 2, 5 or 6. (With this default and the default of
# pos_emb_max_len an error is raised instead.) With subsampling="stacking" the frames of each row are counted with the padding of
# the longest one: a whole number of frames there means that the rest of a shorter sound is cut off. Without a warning in both cases.
# (conformer_encoder.py: `_create_masks`, `setup_streaming_params`; subsampling.py: `StackingSubsampling.forward`.)
#
#     seed 0, 24 frames, a look-ahead of 2: left context 24: 0.00 off; unlimited, max_context 24: 0.00 off, 25: 1.45
#         off, 26: 1.43 off, 27: 0.00 off, 100: 1.45 off
#         frames of sounds of 38 and 23 steps: dw_striding, beside one of 48 steps [10, 6], alone [10, 6];
#             dw_striding, beside one of 49 steps [10, 6], alone [10, 6]; stacking, beside one of 48 steps [9, 5],
#             alone [10, 6]; stacking, beside one of 49 steps [10, 6], alone [10, 6]
#     seed 1, 24 frames, a look-ahead of 2: left context 24: 0.00 off; unlimited, max_context 24: 0.00 off, 25: 1.15
#         off, 26: 1.11 off, 27: 0.00 off, 100: 1.15 off
#         (frames as above)
# (Two layers with random weights. The largest difference of a number, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps nemo_toolkit==3.0.0 audioread==3.1.0 decorator==5.3.1 msgpack==1.2.4 pooch==1.9.0 pycparser==3.12 jinja2==3.1.6 \
    markupsafe==3.0.4 pyyaml==6.0.4 StrEnum==0.4.15 annotated-types==0.8.0 antlr4-python3-runtime==4.9.3 anyio==4.16.0 \
    attrs==26.1.0 braceexpand==0.1.7 certifi==2026.10.19.post1 cffi==2.1.1 charset-normalizer==3.5.3 click==8.5.1 \
    cloudpickle==3.1.3 colorama==0.4.6 cytoolz==1.2.0 datasets==5.2.0 dill==0.4.1 einops==0.8.2 filelock==4.3.1 \
    fsspec==2025.12.0 h11==0.16.0 httpcore2==2.16.2 httpx2==2.16.2 huggingface_hub==2.4.0 hydra-core==1.3.2 idna==3.20 \
    intervaltree==3.2.1 joblib==1.6.0 kaldialign==0.12.0 lazy-loader==0.6 lhotse==1.33.0 librosa==0.11.0 \
    lightning-utilities==0.15.3 lightning==2.4.0 llvmlite==0.50.0 ml_dtypes==0.6.0 mpmath==1.3.0 multiprocess==0.70.19 \
    narwhals==2.29.0 numba==0.68.1 nv-one-logger-core==2.3.1 nv-one-logger-pytorch-lightning-integration==2.3.1 \
    nv-one-logger-training-telemetry==2.3.1 omegaconf==2.3.0 onnx==1.23.2 overrides==7.7.0 packaging==24.2 pandas==3.1.1 \
    pillow==13.0.0 protobuf==7.36.2 pyarrow==26.0.1 pydantic==2.14.4 pydantic_core==2.50.5 python-dateutil==2.9.0.post0 \
    pytorch-lightning==2.6.6 regex==2026.11.19 requests==2.34.2 rich==15.0.0 safetensors==0.8.0 scikit-learn==1.9.1 scipy==1.17.1 \
    sentencepiece==0.2.3 six==1.17.0 sniffio==1.3.1 sortedcontainers==2.4.0 soundfile==0.14.0 threadpoolctl==3.8.0 \
    tokenizers==0.23.3 toml==0.10.2 toolz==1.2.0 torchmetrics==1.9.0 tqdm==4.70.1 transformers==5.24.0 \
    truststore==0.10.5 typing-inspection==0.4.5 urllib3==2.8.0 webdataset==1.0.2 wrapt==2.5.2 xxhash==4.1.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import logging
import torch
from nemo.collections.asr.modules import ConformerEncoder

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def build(seed, **options):
    torch.manual_seed(seed)
    encoder = ConformerEncoder(
        feat_in=16, n_layers=2, d_model=32, n_heads=4, conv_kernel_size=5, dropout=0.0, dropout_pre_encoder=0.0, dropout_emb=0.0,
        dropout_att=0.0, subsampling_conv_channels=16, **options).eval()
    for weight in encoder.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
    return encoder


def stream(encoder, sound):
    """In portions of the size that the encoder asks for, with its caches."""
    channel, time, length = encoder.get_initial_cache_state(batch_size=1)
    parts = []
    for portion in sound.split(encoder.streaming_cfg.chunk_size, -1):
        part, _, channel, time, length = encoder.cache_aware_stream_step(
            processed_signal=portion, processed_signal_length=torch.tensor([portion.size(-1)]), cache_last_channel=channel,
            cache_last_time=time, cache_last_channel_len=length)
        parts.append(part)
    return torch.cat(parts, -1)


for seed in (0, 1):
    off = {}
    for left in (24, -1):
        encoder = build(seed, subsampling="stacking", subsampling_factor=2, att_context_style="chunked_limited",
                        att_context_size=[left, 2], conv_context_size="causal", conv_norm_type="layer_norm")
        sound = torch.randn(1, 16, 48)
        right = encoder(audio_signal=sound, length=torch.tensor([48]))[0]
        for context in (24, 25, 26, 27, 100):
            encoder.setup_streaming_params(max_context=context)
            off[left, context] = float((stream(encoder, sound) - right).abs().max() / right.std())
    print(f"seed {seed}, 24 frames, a look-ahead of 2: left context 24: {off[24, 24]:.2f} off; unlimited, max_context",
          ", ".join(f"{context}: {error:.2f} off" for (left, context), error in off.items() if left < 0))
    for (left, context), error in off.items():
        assert error > 0.3 if left < 0 and context % 3 else error < 1e-3, "the behaviour has changed"
    frames = {}
    for kind in ("dw_striding", "stacking"):
        encoder = build(seed, subsampling=kind, subsampling_factor=4)
        sounds, lengths = torch.randn(3, 16, 48), torch.tensor([48, 38, 23])
        alone = [int(encoder(audio_signal=sounds[row:row + 1, :, :n], length=lengths[row:row + 1])[1]) for row, n in enumerate(lengths)]
        for longest in (48, 49):
            batch = torch.nn.functional.pad(sounds, (0, 1))[..., :longest]
            frames[kind, longest] = encoder(audio_signal=batch, length=torch.tensor([longest, 38, 23]))[1].tolist()[1:], alone[1:]
    print("    frames of sounds of 38 and 23 steps:", "; ".join(
        f"{kind}, beside one of {longest} steps {found}, alone {right}" for (kind, longest), (found, right) in frames.items()))
    assert all((found == right) == (kind != "stacking" or longest == 49) for (kind, longest), (found, right) in frames.items())
PY
