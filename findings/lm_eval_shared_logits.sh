#!/usr/bin/env bash
# lm-eval 0.4.13 (transformers 5.24.0, torch 2.13.0 on a CPU): with `logits_cache`, which is on by default, a request
# gets the log-likelihood of its last token at an earlier place, if another request cuts the same text earlier.
#
# Expected: `loglikelihood` gives the log-probability of a continuation, the same one that a plain pass gives, and
# the same one for each request alone. Batches, left truncation and rolling windows do so.
# Seen: requests whose tokens agree, but for the last one, share one pass, that of the longest continuation.
# `HFLM._loglikelihood_tokens` (models/huggingface.py) then picks the shorter continuation's tokens from the first
# rows of the shared logits. They belong to the last rows. `is_greedy` looks at the last rows, so the two parts of
# one answer speak of different places. Winogrande has such pairs: the harness once stopped there with an error (its
# issue 2984), and the repair left this. With `logits_cache=False` all is right.
#
#     context of 10 words, continuation of 3: -19.583, greedy False  (plain pass -19.583, asked alone -19.583)
#     context of 12 words, continuation of 1:  -5.120, greedy True   (plain pass  -3.006, asked alone  -3.006)
#     context of 12 words, continuation of 1:  -4.665, greedy False  (plain pass  -5.360, asked alone  -5.360)
#     context of 11 words, continuation of 2: -11.097, greedy False  (plain pass  -9.095, asked alone  -9.095)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile "lm-eval[hf]==0.4.13" transformers==5.24.0
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
torch.set_grad_enabled(False)
words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{number}" for number in range(4, 300)]
splitter = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", bos_token="<s>",
                                    eos_token="</s>", unk_token="<unk>")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()
torch.manual_seed(0)
for weight in model.parameters():
    if weight.dim() > 1:
        weight.normal_(0, 0.15)

text = torch.randint(4, 300, (12,), generator=torch.Generator().manual_seed(3)).tolist()
best = int(model(torch.tensor([text])).logits[0, -1].argmax())  # the model's own next token
requests = [(text[:10], text[10:] + [7]), (text, [best]), (text, [8]), (text[:11], text[11:] + [best])]


def plain(context, end):
    rows = model(torch.tensor([context + end])[:, :-1]).logits[0].log_softmax(-1)[-len(end):]
    return float(rows.gather(1, torch.tensor(end)[:, None]).sum()), bool((rows.argmax(-1) == torch.tensor(end)).all())


def ask(requests, **options):
    spoken = [(" ".join(words[token] for token in context), " " + " ".join(words[token] for token in end))
              for context, end in requests]
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=one, idx=place)
             for place, one in enumerate(spoken)]
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, **options).loglikelihood(asked, disable_tqdm=True)


together, off = ask(requests), ask(requests, logits_cache=False)
for request, answer, other in zip(requests, together, off):
    right, alone = plain(*request), ask([request])[0]
    print(f"context of {len(request[0])} words, continuation of {len(request[1])}: {answer[0]:8.3f}, greedy "
          f"{answer[1]!s:5}  (plain pass {right[0]:8.3f}, asked alone {alone[0]:8.3f}, without the cache {other[0]:8.3f})")
    assert max(abs(right[0] - alone[0]), abs(right[0] - other[0])) < 1e-3, "the behaviour has changed"
    assert right[1] == answer[1], "the behaviour has changed"
    assert (abs(answer[0] - right[0]) < 1e-3) == (len(request[1]) == 3), "the behaviour has changed"
PY
