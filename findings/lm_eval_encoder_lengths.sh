#!/usr/bin/env bash
# lm-eval 0.4.13 (transformers 5.24.0, torch 2.13.0 on a CPU): an encoder-decoder model writes more tokens than
# `max_gen_toks`, and how many depends on the longest prompt of the batch.
#
# Expected: `generate_until` with `max_gen_toks` of 12 gives at most 12 new tokens, and the same ones for a prompt
# alone and beside others.
# Seen: `HFLM.generate_until` (models/huggingface.py) gives `generate` a `max_length` of the padded prompt's length
# plus `max_gen_toks`. For a decoder alone that is right. In an encoder-decoder model `max_length` counts the
# decoder's tokens only, so T5 writes the prompt's length more. In a batch it is the length of the longest prompt,
# and so the answer that is scored changes with the batch size and with the other prompts. BART's answer also
# begins with other tokens: `tok_batch_encode` pads on the left for an encoder too, and BART counts the padding.
#
#     Llama: new tokens alone 10 12 12 in a batch 10 12 12 - the same answers: True True True - the same beginnings: True
#     T5:    new tokens alone 15 31 71 in a batch 71 71 71 - the same answers: False False True - the same beginnings: True
#     BART:  new tokens alone 15 31 71 in a batch 71 71 71 - the same answers: False False True - the same beginnings: False
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
from transformers import (BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{number}" for number in range(4, 300)]
splitter = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", bos_token="<s>",
                                    eos_token="</s>", unk_token="<unk>")
ends = dict(vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0)
kinds = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        **ends)),
    "T5": lambda: T5ForConditionalGeneration(T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4, decoder_start_token_id=0, **ends)),
    "BART": lambda: BartForConditionalGeneration(BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_start_token_id=2, forced_eos_token_id=None, **ends)),
}
draw = torch.Generator().manual_seed(3)
prompts = [" ".join(words[token] for token in torch.randint(4, 300, (many,), generator=draw).tolist())
           for many in (4, 20, 60)]
for name, build in kinds.items():
    model = build().eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.15)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=128)

    def ask(*prompts):
        options = {"until": ["</s>"], "max_gen_toks": 12}
        return harness.generate_until([
            Instance(request_type="generate_until", doc={}, arguments=(prompt, options), idx=place)
            for place, prompt in enumerate(prompts)], disable_tqdm=True)

    alone, batch = [ask(prompt)[0] for prompt in prompts], ask(*prompts)
    same = [one == two for one, two in zip(alone, batch)]
    begins = all(two.startswith(one) for one, two in zip(alone, batch))
    print(f"{name + ':':6} new tokens alone", *(len(one.split()) for one in alone), "in a batch",
          *(len(one.split()) for one in batch), "- the same answers:", *same, "- the same beginnings:", begins)
    assert (max(len(one.split()) for one in alone + batch) > 12) == (name != "Llama"), "the behaviour has changed"
    assert all(same) == (name == "Llama") and begins == (name != "BART"), "the behaviour has changed"
PY
