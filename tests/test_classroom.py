"""The text, the training and the shipped classroom model."""

import random
import re

import pytest
import torch
from conftest import ROOT, chapter, load

from common import checkpoint
from tools import train_classroom
from tools.classroom_text import Conversation, Level
from tools.train_classroom import HARD, Rows, Trainer, evaluate, train_tokenizer

FOLDER = ROOT / "models" / "classroom"


@pytest.fixture(scope="module")
def rows():
    return Rows(train_tokenizer())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(
        train_classroom, "CONFIG", {**train_classroom.CONFIG, "num_hidden_layers": 3, "intermediate_size": 64}
    )


def test_no_question_has_two_answers_unless_the_fact_was_corrected():
    for seed in range(20):
        conversation, said = Conversation(random.Random(seed), HARD), {}
        for _ in range(60):
            turn = conversation.next_turn()
            if turn.kind not in ("", "world", "sum", "talk"):
                assert said.get(turn.user, turn.assistant) == turn.assistant or turn.kind == "corrected"
                said[turn.user] = turn.assistant


def test_every_asked_fact_was_told_before():
    conversation, told = Conversation(random.Random(1), HARD), ""
    for _ in range(100):
        turn = conversation.next_turn()
        if turn.kind not in ("", "world", "sum", "talk"):
            assert turn.assistant.replace("Your ", "My ") in told
        told += turn.user + "\n"


def test_the_tokenizer_is_the_shipped_one_and_splits_digits(rows):
    shipped = checkpoint.read_tokenizer(FOLDER)
    text = "The code of the gate is 4821. Zoë, 😀!"
    assert shipped.encode(text) == rows.tokenizer.encode(text).ids
    assert len(shipped) == 1024 and shipped.decode(shipped.encode(text)) == text
    assert len(shipped.encode("4821")) == 4


def test_rows_are_what_the_chat_template_writes(rows):
    shipped = checkpoint.read_tokenizer(FOLDER)
    for role in ("system", "user", "assistant"):
        assert shipped.apply_chat_template(
            [dict(role=role, content="Hello!")], return_dict=False
        ) == rows.message(role, "Hello!")


def test_the_loss_counts_the_words_of_the_assistant_and_the_end_of_its_answer(rows):
    ids, weights = rows.row(random.Random(0), 300, Level())
    spoken = rows.tokenizer.decode(
        [token for token, weight in zip(ids, weights) if weight == 1.0], skip_special_tokens=False
    )
    whole = rows.tokenizer.decode(ids, skip_special_tokens=False)
    answers = re.findall(r"<\|assistant\|>\n(.*?</s>)", whole)
    assert answers and spoken.startswith("".join(answers))


def test_training_that_was_stopped_goes_on_as_if_it_was_not(rows, small, tmp_path):
    def step(trainer):
        return trainer.update(*rows.batch(f"{trainer.step}", 2, 32, Level(), 0.5), 0.5)

    straight, stopped = Trainer(tmp_path / "a", "cpu"), Trainer(tmp_path / "b", "cpu")
    losses = [step(straight) for _ in range(4)]
    assert [step(stopped) for _ in range(2)] == losses[:2]
    stopped.save()
    resumed = Trainer(tmp_path / "b", "cpu")
    assert (resumed.step, resumed.tokens) == (2, 128)
    assert [step(resumed) for _ in range(2)] == losses[2:]
    assert all(torch.equal(a, b) for a, b in zip(resumed.masters, straight.masters))


def test_training_lowers_the_loss(rows, small, tmp_path):
    trainer = Trainer(tmp_path, "cpu")
    batch = rows.batch("one batch", 4, 64, Level())
    losses = [trainer.update(*batch, 1.0) for _ in range(15)]
    assert losses[-1] < losses[0] / 2


def test_an_untrained_model_scores_nothing_and_every_question_counts_once(rows, small, tmp_path):
    scores = evaluate(Trainer(tmp_path, "cpu").model, rows, history=64, conversations=3, questions=2)
    assert sum(right for right, _ in scores.values()) == 0
    assert sum(asked for _, asked in scores.values()) == 6


def test_the_shipped_model_is_small_and_answers_from_its_context(rows):
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
    model, _, _ = checkpoint.load("classroom", device="cpu")
    scores = evaluate(model, rows, history=256, conversations=12)
    right, asked = (sum(column) for column in zip(*scores.values()))
    assert right / asked >= 0.9


def readme_examples() -> list[tuple[str, str]]:
    """The lines `> question` / `answer` of the model's README."""
    return re.findall(r"^> (.+)\n> → (.+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)


def test_the_readme_has_examples():
    assert len(readme_examples()) >= 5


def test_the_model_answers_as_its_readme_says():
    baseline = chapter("01_baseline")
    frontend, messages = load("classroom"), []
    engine = baseline.Engine(frontend.model)
    for question, answer in readme_examples():
        messages.append(dict(role="user", content=question))
        (request,) = engine.generate([frontend.request(messages=messages)])
        assert request.outcome.text == answer
        messages.append(dict(role="assistant", content=answer))
