"""Make models/classroom: generate the text, train the tokenizer and the model, write the folder, and evaluate the model.

    python -m models.classroom.train                            train, write, evaluate
    python -m models.classroom.train --evaluate                 evaluate the shipped folder only

A row of training text is one conversation. During training, rows grow from 256 to 2,048 tokens, and their text gets harder
(STAGES). In the loss the assistant's tokens have weight 1, all other tokens REST_WEIGHT. Muon (Jordan et al., 2024) trains
the matrices; AdamW trains the embedding and the norms.
"""
import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from common.llama import Llama
from models.classroom.facts import Level
from models.classroom.text import Conversation, general_question
from shell import checkpoint
from shell.config import read_config
from shell.random_models import CHAT_TEMPLATE, SPECIAL

CONTEXT = 2048
REST_WEIGHT = 0.07
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=1024, hidden_size=256, intermediate_size=384,
    num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4, head_dim=64, hidden_act="silu",
    max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True,
    bos_token_id=0, eos_token_id=1, torch_dtype="bfloat16")

HARD = Level(document=12, two_word=0.3, digits=0.5, invented=0.2, corrections=0.04)
# (million tokens at the end of the stage, tokens per row, rows per step, share of drill rows, level)
STAGES = [
    (1.5, 256, 16, 0.4, Level(document=8)),
    (3.0, 512, 8, 0.25, Level(document=14, two_word=0.15, digits=0.3, invented=0.1, corrections=0.03)),
    (4.0, 1024, 4, 0.25, replace(HARD, document=36)),
    (5.9, 2048, 2, 0.25, replace(HARD, document=72)),
]
MUON_RATE, ADAM_RATE, MOMENTUM = 0.008, 1.5e-3, 0.95
MATCH = 2.0                        # how sharply the initial induction heads select a token
DECAY_FROM = 0.6                   # after this share of all tokens the learning rate falls linearly to a twentieth


# 1. Tokenizer and rows ---------------------------------------------------------------------------------------

def byte_level(words: models.BPE) -> Tokenizer:
    """Return a byte-level tokenizer that makes each digit a token of its own."""
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer on generated conversations."""
    rng = random.Random("tokenizer")

    def texts():
        for _ in range(6000):
            conversation = Conversation(rng, HARD)
            for _ in range(10):
                turn = conversation.next_turn()
                yield turn.user + "\n" + turn.assistant

    tokenizer = byte_level(models.BPE())
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


class Rows:
    """Makes rows of training text: token ids, and a loss weight for each."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.roles = {role: tokenizer.encode(f"<|{role}|>\n").ids for role in ("system", "user", "assistant")}
        self.end = tokenizer.encode("</s>\n").ids

    def message(self, role: str, text: str) -> list[int]:
        """Return the token ids of one message."""
        return self.roles[role] + self.tokenizer.encode(text).ids + self.end

    def row(self, rng: random.Random, length: int, level: Level):
        """Make a row of one conversation, cut at `length` + 1 tokens. Returns: (ids, weights)."""
        conversation = Conversation(rng, level)
        ids = self.message("system", conversation.system) if conversation.system else []
        return self.dialogue(ids, conversation.next_turn, length)

    def quiz(self, rng: random.Random, length: int, level: Level):
        """Make a row of questions that need no history. Returns: (ids, weights)."""
        return self.dialogue([], lambda: general_question(rng), length)

    def dialogue(self, ids: list[int], next_turn, length: int):
        """Append turns to `ids` until there are `length` + 1 tokens. Returns: (ids, weights)."""
        weights, head = [REST_WEIGHT] * len(ids), len(self.roles["assistant"])
        while len(ids) <= length:
            turn = next_turn()
            user, assistant = self.message("user", turn.user), self.message("assistant", turn.assistant)
            ids += user + assistant
            weights += [REST_WEIGHT] * (len(user) + head) + [1.0] * (len(assistant) - head - 1) + [REST_WEIGHT]
        return ids[:length + 1], weights[:length + 1]

    def recital(self, rng: random.Random, length: int, level: Level):
        """Make a row that repeats a few facts in changing order. It teaches recall faster than a conversation: here one token
        in 8 needs recall, there one in 25. Returns: (ids, weights)."""
        conversation = Conversation(rng, level)
        facts = [fact for fact in (conversation.new_fact() for _ in range(rng.randint(3, max(5, length // 24)))) if fact]
        ids = self.tokenizer.encode(" ".join(fact.statement for fact in facts)).ids + self.end
        weights = [REST_WEIGHT] * len(ids)
        while len(ids) <= length:
            rng.shuffle(facts)
            again = self.tokenizer.encode(" ".join(fact.answer for fact in facts)).ids + self.end
            ids += again
            weights += [1.0] * len(again)
        return ids[:length + 1], weights[:length + 1]

    def echo(self, rng: random.Random, length: int, level: Level):
        """Make a row of random tokens that repeat: the simplest exercise in recall. Returns: (ids, weights)."""
        ids = [rng.randrange(len(SPECIAL), CONFIG["vocab_size"]) for _ in range(rng.randint(8, 64))]
        weights = [0.0] * len(ids) + [1.0] * (length + 1)
        return (ids * (length // len(ids) + 1) + ids)[:length + 1], weights[:length + 1]

    def batch(self, seed: str, rows: int, length: int, level: Level, drill: float = 0.0):
        """Make a batch in which a share `drill` of the rows is recital, echo or quiz. Returns: inputs, targets and weights,
        [rows, length] each."""
        rng = random.Random(seed)
        kinds = rng.choices((self.row, self.recital, self.echo, self.quiz),
                            (1 - drill, drill * 0.5, drill * 0.2, drill * 0.3), k=rows)
        ids, weights = map(torch.tensor, zip(*(kind(rng, length, level) for kind in kinds)))  # [rows, length + 1] each
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]


# 2. The model on whole rows ----------------------------------------------------------------------------------

def forward(model: Llama, tokens):
    """Compute the logits [B * T, V] of tokens [B, T], with the engine's own layers and plain causal attention."""
    rows, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(rows)                      # [B * T]

    def attend(q, k, v):
        q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v))        # [B, H, T, hd]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)                        # [B, H, T, hd]
        return out.transpose(1, 2).flatten(0, 1)                                             # [B * T, H, hd]

    rotation = model.rotary(positions)                                                       # [B * T, 1, hd] each
    hidden = model.embed(tokens.flatten())                                                   # [B * T, D]
    for layer in model.layers:
        hidden = layer(hidden, rotation, attend)
    return model.logits(hidden)                                                              # [B * T, V]


# 3. Training -------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """The optimizer Muon: momentum, then the nearest orthogonal matrix. It differs from torch.optim.Muon in two points. It
    computes in the weights' own dtype, because bfloat16 takes seconds a step on a processor without instructions for it. It
    updates all matrices of the same shape together."""

    @torch.no_grad()
    def step(self):
        """Update all matrices from their gradients."""
        (group,), by_shape = self.param_groups, {}
        for matrix in group["params"]:
            velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
            velocity.lerp_(matrix.grad, 1 - MOMENTUM)
            by_shape.setdefault(matrix.shape, []).append((matrix, matrix.grad.lerp(velocity, MOMENTUM)))  # Nesterov
        for (rows, columns), pairs in by_shape.items():
            matrices, gradients = zip(*pairs)
            for matrix, update in zip(matrices, orthogonalize(torch.stack(gradients))):
                matrix.mul_(1 - group["lr"] * 0.01)
                matrix.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonalize(matrices):
    """Set the singular values of matrices [N, rows, columns] to about one, by the quintic iteration of Jordan et al.
    Returns: [N, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


@torch.no_grad()
def initialize(model: Llama):
    """Initialize the weights with small random numbers and with rough induction heads (Olsson et al., 2022), which gradient
    descent is slow to find.

    Layer 0: head n attends to the token n + 1 positions back, and adds it to the hidden state of its own position. Layer 1:
    head n attends to the positions to which layer 0's head n has added the current token. It copies the token at such a
    position, which stands n + 1 positions after an earlier occurrence of the current token."""
    generator = torch.Generator().manual_seed(0)
    config, layers = model.config, model.layers
    hd, hidden = config.head_dim, config.hidden_size
    for weight in model.parameters():
        weight.copy_(torch.ones(weight.shape) if weight.ndim == 1
                     else torch.randn(weight.shape, generator=generator) * 0.02)
    everywhere = torch.randn(hidden, generator=generator).sign()   # a direction that all embeddings share
    model.embedding.add_((0.02 * everywhere).to(model.embedding))

    for layer in layers:                                           # untrained layers add nothing to their input
        layer.down_proj.weight.zero_()
        layer.o_proj.weight.zero_()
    orthogonal = lambda size: torch.linalg.qr(torch.randn(size, size, generator=generator))[0]  # noqa: E731
    reads, writes = orthogonal(hidden), orthogonal(hidden)         # [D, D]; each head uses hd rows of them
    frequencies = config.rotary_frequencies()                      # [hd/2]
    fast = (frequencies > 0.02).float()                            # [hd/2], pairs that distinguish neighbouring positions
    slow = (frequencies < 0.02).float().repeat(2)                  # [hd], numbers that hardly depend on the distance
    for head in range(config.num_attention_heads):
        rows, value = (slice(begin + head * hd, begin + (head + 1) * hd) for begin in (0, hidden))
        angle = frequencies * (head + 1)
        looks_from = torch.cat((fast * angle.cos(), -fast * angle.sin()))     # [hd]
        looked_at = torch.cat((fast, torch.zeros_like(fast)))                 # [hd]
        layers[0].q_proj.weight[rows] = 9 * torch.outer(looks_from, everywhere) / hidden
        layers[0].kv_proj.weight[rows] = 9 * torch.outer(looked_at, everywhere) / hidden
        layers[0].kv_proj.weight[value] = 0.5 * reads[rows]
        layers[0].o_proj.weight[:, rows] = 0.1 * writes[rows].T
        mix = orthogonal(hd) * slow[:, None]                                  # [hd, hd]
        layers[1].q_proj.weight[rows] = MATCH * mix @ reads[rows]             # query: the current token
        layers[1].kv_proj.weight[rows] = MATCH * mix @ writes[rows]           # key: the token that layer 0 wrote
        layers[1].o_proj.weight[:, rows] = 0.5 * layers[1].kv_proj.weight[value].T   # output: the token at that position


def optimizers_of(model: Llama) -> list:
    """Return Muon for the matrices, and AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not model.embedding]
    others = [weight for weight in model.parameters() if weight.ndim == 1 or weight is model.embedding]
    return [Muon(matrices, dict(lr=MUON_RATE)),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)]


def update(model: Llama, optimizers: list, inputs, targets, weights, rate: float) -> float:
    """Train one step. `rate`: share of the full learning rates. Returns: the weighted loss."""
    inputs, targets, weights = (each.to(model.device) for each in (inputs, targets.flatten(), weights.flatten()))
    losses = F.cross_entropy(forward(model, inputs), targets, reduction="none")              # [B * T]
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, full in zip(optimizers, (MUON_RATE, ADAM_RATE)):
        optimizer.param_groups[0]["lr"] = full * rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def learning_rate(tokens: int, total: int) -> float:
    """Return the share of the full learning rate after `tokens` of `total` tokens: a short warm-up, then 1, then a linear
    fall to a twentieth."""
    decay = min(1.0, (1 - tokens / total) / (1 - DECAY_FROM))
    return min(1.0, (tokens + 1e4) / 1e5) * max(0.05, decay)


def train(rows: Rows, device: str) -> Llama:
    """Train a new model through all STAGES."""
    model = Llama(read_config(CONFIG), torch.float32, device)
    initialize(model)
    optimizers, total, step = optimizers_of(model), int(STAGES[-1][0] * 1e6), 0
    with tqdm(total=total, unit="token", unit_scale=True) as bar:
        for until, length, count, drill, level in STAGES:
            while bar.n < until * 1e6:
                batch = rows.batch(f"train {step}", count, length, level, drill)
                bar.set_postfix(loss=update(model, optimizers, *batch, learning_rate(bar.n, total)))
                bar.update(count * length)
                step += 1
    return model


# 4. Evaluation -----------------------------------------------------------------------------------------------

@torch.inference_mode()
def evaluate(model: Llama, rows: Rows, history: int, conversations: int, questions: int = 6) -> dict[str, list[int]]:
    """Ask `questions` questions in each held-out conversation, after at least `history` tokens. An answer is right if each
    of its tokens, with the end token, is the most likely one. Greedy decoding would then write this answer.

    Returns: kind of question, or "all" -> [right answers, questions]."""
    level, scores = replace(HARD, document=max(HARD.document, history // 24)), {"all": [0, 0]}
    for number in range(conversations):
        conversation = Conversation(random.Random(f"held out {number}"), level)
        ids, answers = [], []
        while len(answers) < questions:
            turn = conversation.next_turn()
            user, assistant = rows.message("user", turn.user), rows.message("assistant", turn.assistant)
            begin, end = len(ids) + len(user) + len(rows.roles["assistant"]), len(ids) + len(user) + len(assistant)
            if end > CONTEXT:
                break
            if turn.kind and len(ids) >= history:
                answers.append((turn.kind, begin, end - 1))            # the end token counts, the newline does not
            ids += user + assistant
        tokens = torch.tensor(ids, device=model.device)                # [T]
        best = forward(model, tokens[None]).argmax(-1)                 # [T]
        for kind, begin, end in answers:
            right = torch.equal(best[begin - 1:end - 1], tokens[begin:end])
            for score in scores["all"], scores.setdefault(kind, [0, 0]):
                score[0] += right
                score[1] += 1
    return scores


# 5. The folder -----------------------------------------------------------------------------------------------

def write(folder: Path, config: dict, weights: dict, tokenizer: Tokenizer, chat_template: str):
    """Write a folder in Hugging Face layout: config.json, model.safetensors in bfloat16, and tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16().contiguous().cpu() for name, tensor in weights.items()},
              folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    begin, end = (tokenizer.id_to_token(config[name]) for name in ("bos_token_id", "eos_token_id"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end,
                            chat_template=chat_template).save_pretrained(folder)


def report(name: str):
    """Print the README's table: how often a model is right, for each kind of question and two lengths of history."""
    model, tokenizer, _ = checkpoint.load(name)
    columns = [evaluate(model, Rows(tokenizer.backend_tokenizer), history, 150) for history in (512, 1536)]
    print("| question | 512 tokens of history | 1536 tokens of history |\n|---|---|---|")
    for kind in sorted(set().union(*columns)):
        counts = [scores.get(kind, (0, 0)) for scores in columns]
        print(f"| {kind} | " + " | ".join(f"{right / max(1, asked):.1%} of {asked}" for right, asked in counts) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=checkpoint.CLASSROOM, help="folder of the model")
    parser.add_argument("--evaluate", action="store_true", help="do not train, only evaluate the folder")
    arguments = parser.parse_args()
    if not arguments.evaluate:
        tokenizer = train_tokenizer()
        model = train(Rows(tokenizer), checkpoint.pick_device("auto"))
        write(arguments.out, CONFIG, checkpoint.weights(model), tokenizer, CHAT_TEMPLATE)
    report(str(arguments.out))


if __name__ == "__main__":
    main()
