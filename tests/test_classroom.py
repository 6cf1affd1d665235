"""The classroom model: its training text, its training, and the shipped weights."""

import random
import re

import pytest
import torch
from conftest import ROOT, load

from models.classroom import train
from models.classroom.facts import Level
from models.classroom.train import HARD, Rows, evaluate, train_tokenizer
from shell import checkpoint
from tests.support.engines import baseline

FOLDER = ROOT / "models" / "classroom"


@pytest.fixture(scope="module")
def rows():
    return Rows(train_tokenizer())


@pytest.fixture
def small(monkeypatch):
    """Make training short: three layers and few steps."""
    small = {**train.CONFIG, "num_hidden_layers": 3, "intermediate_size": 64}
    monkeypatch.setattr(train, "CONFIG", small)
    monkeypatch.setattr(train, "STAGES", [(0.0005, 64, 2, 0.5, Level()), (0.001, 128, 2, 0.5, HARD)])


def test_training_uses_the_shipped_tokenizer_and_chat_template(rows):
    shipped = checkpoint.read_tokenizer(FOLDER)
    text = "The code of the gate is 4821. Zoë, 😀!"
    assert shipped.encode(text) == rows.tokenizer.encode(text).ids
    assert shipped.backend_tokenizer.get_vocab_size() == 1024 and shipped.backend_tokenizer.decode(shipped.encode(text)) == text
    assert len(shipped.encode("4821")) == 4
    for role in ("system", "user", "assistant"):
        written = shipped.apply_chat_template([dict(role=role, content="Hello!")])
        assert shipped.encode(written) == rows.message(role, "Hello!")


def test_the_loss_counts_the_assistants_words_only(rows):
    ids, weights = rows.row(random.Random(0), 300, Level())
    counted = [token for token, weight in zip(ids, weights) if weight == 1.0]
    spoken, whole = (rows.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in (counted, ids))
    answers = re.findall(r"<\|assistant\|>\n(.*?</s>)", whole)
    assert answers and spoken.startswith("".join(answers))


def test_training_twice_gives_the_same_model_and_lowers_the_loss(rows, small):
    first, second = (train.train(rows, "cpu") for _ in range(2))
    weights = [checkpoint.weights(model) for model in (first, second)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    batch = rows.batch("one batch", 4, 64, Level())
    train.initialize(second)
    after, before = (train.update(model, train.optimizers_of(model), *batch, 0.0) for model in (first, second))
    assert after < before


def test_the_shipped_model_is_small_and_answers_from_its_context(rows):
    """Each question counts once."""
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
    model, _, _ = checkpoint.load("classroom", device="cpu")
    scores = evaluate(model, rows, history=256, conversations=12)
    right, asked = scores.pop("all")
    assert right / asked >= 0.9 and [sum(column) for column in zip(*scores.values())] == [right, asked]


def test_the_model_answers_as_its_readme_says():
    examples = re.findall(r"^> (.+)\n> → (.+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(examples) >= 5
    frontend, messages = load("classroom"), []
    engine = baseline.Engine(frontend.model)
    for question, answer in examples:
        messages.append(dict(role="user", content=question))
        (request,) = engine.generate([frontend.request(messages=messages)])
        assert request.text == answer
        messages.append(dict(role="assistant", content=answer))
