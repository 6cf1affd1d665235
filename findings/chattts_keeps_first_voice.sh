#!/usr/bin/env bash
# chattts 0.2.5 (torch 2.13.0 on a CPU): after a text of several sentences, all later calls of `infer` speak with its voice, and
# with its first sentence in their prompt.
#
# Expected: `infer` starts anew at each call. So the same text with the same seed gives the same sound.
# Seen: to keep the voice, a text of several sentences takes the sound of its first sentence as a sample of the voice, and that
# sentence's words as the sample's text. Both are written into the parameters that the caller gave. If he gave none, these are
# the default ones, which are made once, when the program starts. So each later call, of whatever user, gets that sample and
# those words in front of its own text. They are never replaced either, since a sample is there already. Parameters that a
# caller made himself are changed in the same way. Nothing is raised.
# (ChatTTS/core.py: `_infer` and the default values of `infer`.)
#
#     seed 0: the model gets (['[Stts][empty_spk][speed_5]good morning[Ptts]'], 0); after a text of two sentences
#         (['[Stts][empty_spk]my secret is. [speed_5]good morning[Ptts]'], 12); equal sounds before True, afterwards False
# (A small model with random weights, made from the package's own parts, two seeds. The number is the length of the voice's
# sample in codes. The encoder for that sample is replaced, since it needs libraries for sound.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.23.0 scipy==1.17.1 einops==0.8.2 requests==2.34.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile pybase16384==0.3.9 numba==0.68.1 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps chattts==0.2.5 vocos==0.1.0 2> "$work/log"
FOLDER="$work" "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

from transformers import BertTokenizerFast, LlamaConfig, LlamaModel

for name in ("encodec", "vector_quantize_pytorch", "torchaudio", "torchaudio.functional", "torchaudio.functional.functional"):
    sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))  # not needed here: no sound is read
import ChatTTS
import numpy as np
import torch
from ChatTTS.model import DVAE, GPT, Embed, Speaker, Tokenizer
from vocos import Vocos
from vocos.heads import ISTFTHead
from vocos.models import VocosBackbone

logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
SIZE, CODES, LETTERS = 64, 40, "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[Stts]", "[Ptts]", "[spk_emb]", "[empty_spk]", "[speed_5]", "[Sbreak]", "[Pbreak]", "[Ebreak]", "[break_0]"]

def build(seed):
    torch.manual_seed(seed)
    chat = ChatTTS.Chat()
    chat.device = chat.device_gpt = torch.device("cpu")
    folder = os.environ["FOLDER"]
    with open(folder + "/vocab.txt", "w") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SPECIAL, *LETTERS, ".",
                              *("##" + x for x in LETTERS)]))
    words = BertTokenizerFast(vocab_file=folder + "/vocab.txt")
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    words.save_pretrained(folder)
    chat.tokenizer = Tokenizer(folder)
    layers = dict(hidden_size=SIZE, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=1024)
    sizes = dict(hidden_size=SIZE, num_audio_tokens=CODES, num_text_tokens=100)
    vars(chat.config.gpt).update(sizes)
    chat.embed = Embed(*sizes.values(), 4).eval()
    chat.gpt = GPT(dict(layers, **sizes, num_vq=4), chat.embed).eval()
    chat.gpt.gpt = LlamaModel(LlamaConfig(vocab_size=32, **layers)).eval()
    for weight in chat.gpt.gpt.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    chat.decoder = DVAE(dict(idim=SIZE // 2, odim=64, hidden=32, n_layer=1, bn_dim=16), dim=SIZE, device=chat.device).eval()
    chat.vocos = Vocos(torch.nn.Identity(), VocosBackbone(100, 32, 48, 1), ISTFTHead(32, 1024, 256, padding="center")).eval()
    chat.speaker = Speaker(SIZE, chat.config.spk_stat, chat.device)
    chat.dvae = mock.Mock(sample_audio=lambda sound: voice_code(sound))  # in the place of the encoder of a voice's sound
    return chat

def voice_code(sound):
    return torch.from_numpy(np.abs(sound[:48]) * 1e6).long().view(4, 12) % (CODES - 1)

for seed in (0, 1):
    chat = build(seed)
    old = ChatTTS.Chat.infer.__defaults__[-1]  # what `infer` takes if no params_infer_code are given
    vars(old).update(temperature=1e-4, min_new_token=24, max_new_token=24, show_tqdm=False, manual_seed=3, spk_smp=None,
                     txt_smp=None)
    encode, heard = chat.tokenizer.encode, []

    def watched(text, *args, prompt=None, **options):
        heard.append((list(text), 0 if prompt is None else prompt.shape[1]))
        return encode(text, *args, prompt=prompt, **options)

    chat.tokenizer.encode = watched  # only to see what the model gets

    def infer(text, **options):
        heard.clear()
        sound = chat.infer(text, skip_refine_text=True, do_text_normalization=False, do_homophone_replacement=False, **options)
        return sound[0], heard[-1]

    first, prompt = infer("good morning")
    again, _ = infer("good morning")
    infer("my secret is. we are late. ")
    later, changed = infer("good morning")
    print(f"seed {seed}: the model gets {prompt}; after a text of two sentences {changed}; equal sounds before "
          f"{np.array_equal(first, again)}, afterwards {first.shape == later.shape and np.allclose(first, later)}")
    own = ChatTTS.Chat.InferCodeParams(max_new_token=24, min_new_token=24, show_tqdm=False, manual_seed=3)
    infer("my secret is. we are late. ", params_infer_code=own)
    assert own.spk_smp is not None and own.txt_smp is not None, "the behaviour has changed"
    assert np.array_equal(first, again) and prompt[1] == 0 < changed[1] and "secret" in changed[0][0], "the behaviour has changed"
    assert not (first.shape == later.shape and np.allclose(first, later)), "the behaviour has changed"
PY
