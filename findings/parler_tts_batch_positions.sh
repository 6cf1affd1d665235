#!/usr/bin/env bash
# parler-tts 0.2.3 (transformers 4.46.1, torch 2.13.0 on a CPU): a shorter text in a batch gets the positions of its padding,
# with RoPE too.
#
# Expected: texts are filled up in front, as the package advises, and the padding is masked. With sinusoidal positions, padding
# takes positions, as a remark in the code says. For RoPE the code says that it takes none. So with RoPE a text should get the
# same logits alone and in a batch.
# Seen: the positions are always taken from `cache_position`, before the branch for RoPE could take them from the mask, so that
# branch is never reached. In self-attention this does no harm, because RoPE depends only on distances. But the decoder also
# turns the queries for the description by their positions, and not the keys there. So the shorter text reads its description at
# other angles, from the first token on. If the caller gives the positions without the padding, the logits are as alone. Nothing
# warns. (modeling_parler_tts.py: `ParlerTTSDecoder.forward`, `ParlerTTSAttention.forward`.)
#
#     RoPE: the longer text 0.00 off, the shorter text 1.80 off, with positions of its own 0.00 off
#     sinusoidal: the longer text 0.00 off, the shorter text 3.30 off
# (The decoder with two layers and random weights, texts of 7 and 4 tokens. The largest difference of a logit, in units of their
# standard deviation. The codec is not loaded.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.2.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==4.46.1 tokenizers==0.20.3 huggingface-hub==0.36.2 \
    safetensors==0.8.0 regex==2026.11.19 sentencepiece==0.2.3 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps parler-tts==0.2.3 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
from unittest import mock

import torch

sys.modules["dac"] = sys.modules["dac.model"] = mock.MagicMock(DAC=object)  # the codec is not needed here
from parler_tts.configuration_parler_tts import ParlerTTSDecoderConfig
from parler_tts.modeling_parler_tts import ParlerTTSForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
books, steps = 3, 12
for name, rope in (("RoPE", True), ("sinusoidal", False)):
    torch.manual_seed(0)
    model = ParlerTTSForCausalLM(ParlerTTSDecoderConfig(
        vocab_size=70, max_position_embeddings=128, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4, hidden_size=32,
        num_codebooks=books, pad_token_id=64, bos_token_id=65, rope_embeddings=rope, dropout=0.0)).eval()
    for key, weight in model.named_parameters():
        if weight.dim() > 1 and "embed_positions" not in key:
            weight.normal_(0, 0.2)
    codes, sound = torch.randint(0, 64, (2 * books, steps)), torch.ones(2, steps, dtype=torch.long)
    text, described = torch.randn(2, 7, 32), torch.randn(2, 6, 32)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])

    def logits(rows, first, **positions):
        """Of some rows, with the text from a token on."""
        out = model(codes.reshape(2, books, steps)[rows].flatten(0, 1), attention_mask=sound[rows], use_cache=False,
                    encoder_hidden_states=described[rows], prompt_hidden_states=text[rows, first:],
                    prompt_attention_mask=mask[rows, first:], **positions).logits
        return out.reshape(len(sound[rows]), books, -1, out.size(-1))[:, :, -steps:]

    together = logits(slice(0, 2), 0)
    longer, shorter = logits(slice(0, 1), 0)[0], logits(slice(1, 2), 3)[0]
    off = [float((a - b).abs().max() / together.std()) for a, b in ((together[0], longer), (together[1], shorter))]
    words = f"{name}: the longer text {off[0]:.2f} off, the shorter text {off[1]:.2f} off"
    if rope:
        own = (torch.cat([mask, sound], 1).cumsum(1) - 1).clamp(min=0)
        own = float((logits(slice(0, 2), 0, position_ids=own)[1] - shorter).abs().max() / together.std())
        words += f", with positions of its own {own:.2f} off"
        assert own < 1e-3, "the behaviour has changed"
    print(words)
    assert off[0] < 1e-3 and off[1] > 0.3, "the behaviour has changed"
PY
