"""The whole matrix: what is asked of all systems, how it is driven and counted, and that they answer as chapter 01 does."""
import random
import statistics
import time
from collections import Counter

import numpy
import pytest
import torch

from benchmarks import baseline as baseline_benchmark
from benchmarks import matrix
from benchmarks.matrix import Alone, Asked, Talk, Workload
from common import checkpoint
from legacy.tests.conftest import chapter

LIMITS = dict(matrix_flops_per_second=1e11, memory_bytes_per_second=1e10, link_bytes_per_second=1e9)
OURS = [key for key in matrix.NAMES if key.isdigit()]


# What is asked ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def many() -> Workload:
    """400 conversations of the published lengths, which no context cuts short."""
    return matrix.conversations(400, 1.0, 2.0, 1 << 20, 1000, 0)


def histories(workload: Workload) -> list[int]:
    """Tokens that the last turns find."""
    return [sum(len(question) + new for question, new in talk.turns[:-1]) for talk in workload.talks]


def test_lengths_are_near_the_published_ones(many):
    turns = [turn for talk in many.talks for turn in talk.turns]
    assert statistics.mean(len(question) for question, _ in turns) == pytest.approx(66.8, rel=0.08)
    assert statistics.mean(new for _, new in turns) == pytest.approx(358.8, rel=0.08)
    assert statistics.median(histories(many)) == pytest.approx(2500, rel=0.08)
    assert many.pause == 30.0
    lengths = sorted(new for _, new in turns)
    assert lengths[-1] > 5 * statistics.mean(lengths) > 5 * lengths[len(lengths) // 2], "the tail is not long"


def test_scale_multiplies_lengths_and_pause(many):
    small = matrix.conversations(400, 0.2, 2.0, 1 << 20, 1000, 0)
    assert statistics.median(histories(small)) == pytest.approx(500, rel=0.08)
    assert small.pause == pytest.approx(6.0)
    assert len(small.talks) == len(many.talks)


def test_conversations_arrive_as_a_poisson_process(many):
    arrivals = [talk.arrival for talk in many.talks]
    gaps = numpy.diff(arrivals)
    assert arrivals[0] == 0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.5, rel=0.15)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15), "as long as their spread is in a Poisson process"
    assert (gaps > 0.5).mean() == pytest.approx(numpy.exp(-1), abs=0.06)


@pytest.mark.parametrize("make", [matrix.conversations, matrix.documents])
def test_a_seed_gives_the_same_again_and_another_seed_something_else(make):
    def asked(seed):
        workload = make(20, 0.5, 3.0, 2048, 1000, seed)
        return workload.documents, [(talk.arrival, talk.subject, talk.beginning, talk.turns) for talk in workload.talks]
    assert asked(3) == asked(3)
    assert asked(3) != asked(4)


@pytest.mark.parametrize("scale", [0.01, 0.2, 1.0, 10.0])
def test_no_conversation_outgrows_the_context(scale):
    workload = matrix.conversations(60, scale, 1.0, 512, 300, 1)
    for talk in workload.talks:
        assert 1 <= len(talk.turns) <= matrix.MOST_TURNS and talk.tokens <= 512
        for question, new in talk.turns:
            assert question and new >= 2 and all(5 <= token < 300 for token in question)
    assert workload.longest == max(talk.tokens for talk in workload.talks)


def test_popularity_follows_zipf_and_nothing_else_changes():
    workloads = {zipf: matrix.documents(4000, zipf, 8.0, 512, 300, 0) for zipf in matrix.SKEWS}
    for zipf, workload in workloads.items():
        counts = Counter(talk.subject for talk in workload.talks)
        shares = numpy.array([rank ** -zipf for rank in range(1, matrix.DOCUMENTS + 1)])
        for rank, share in enumerate(shares / shares.sum()):
            assert counts[rank] / 4000 == pytest.approx(share, abs=0.02), (zipf, rank)
    first = workloads[0.0]
    assert [len(document) for document in first.documents] == [256] * matrix.DOCUMENTS
    for workload in workloads.values():
        assert workload.documents == first.documents
        assert [talk.arrival for talk in workload.talks] == [talk.arrival for talk in first.talks]
        for talk in workload.talks:
            assert talk.beginning is workload.documents[talk.subject] and len(talk.turns) == 1


def test_the_device_holds_a_part_of_what_is_asked(many):
    small, documents = matrix.conversations(50, 0.2, 1.0, 2048, 1000, 0), matrix.documents(100, 0.0, 8.0, 2048, 1000, 0)
    for workload in (many, small, documents):
        held = workload.device_blocks() * matrix.BLOCK
        assert 2 * workload.longest <= held < workload.tokens / 3
    assert 3 <= documents.device_blocks() * matrix.BLOCK / 1024 < 4, "15 % of 20 documents"
    assert documents.tokens == sum(map(len, documents.documents)) + sum(
        len(question) + new for talk in documents.talks for question, new in talk.turns)


# How it is driven ------------------------------------------------------------------------------------------------

class Echo(Alone):
    """Answers at once, with one token again and again, and remembers what it was asked."""

    def __init__(self, token: int):
        super().__init__()
        self.token, self.seen = token, []

    def answer(self, asked: Asked):
        self.seen.append(asked)
        asked.tokens = [self.token] * asked.new
        asked.first = time.perf_counter()
        asked.last = time.perf_counter()


def talks(count: int = 2, turns: int = 3) -> Workload:
    return Workload("conversations", [
        Talk(0.0, number, [], [([10 * number + turn] * 2, 3) for turn in range(turns)]) for number in range(count)], 0.01)


def test_every_turn_sends_all_that_was_said_with_the_answers_of_whoever_was_first():
    workload, answers, first, second = talks(), {}, Echo(7), Echo(8)
    over = matrix.play(first, workload, answers)
    assert len(over) == 6 and answers == {(talk, turn): [7] * 3 for talk in range(2) for turn in range(3)}
    matrix.play(second, workload, answers)
    for system in (first, second):
        prompts = {(asked.talk, asked.turn): asked.prompt for asked in system.seen}
        assert prompts[1, 2] == [10, 10, 7, 7, 7, 11, 11, 7, 7, 7, 12, 12]
        assert prompts[0, 0] == [0, 0]
    assert [asked.tokens for asked in second.seen] == [[8] * 3] * 6, "what it answered itself is what is compared"


def test_a_turn_arrives_a_pause_after_the_answer_and_waiting_counts():
    workload, system = talks(), Echo(7)
    over = {(asked.talk, asked.turn): asked for asked in matrix.play(system, workload, {})}
    for (talk, turn), asked in over.items():
        assert turn == 0 or asked.arrival == over[talk, turn - 1].last + workload.pause
        assert asked.first >= asked.arrival
    assert over[0, 0].arrival == over[1, 0].arrival, "both came at once"
    assert over[1, 0].first >= over[0, 0].last and over[1, 0].ttft_ms >= over[0, 0].ttft_ms, "the second waited for the first"


def test_who_fails_is_not_passed_over():
    bench = matrix.Bench("random:tiny", "float32", "cpu", link=1.0)
    workload = Workload("conversations", [Talk(0.0, 0, [], [([5] * 30, 8)])], 0.0)
    with bench.make("07", workload, 40) as system:
        system.engine.model = None
        with pytest.raises(AttributeError):
            matrix.play(system, workload, {})


# All systems -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bench() -> matrix.Bench:
    return matrix.Bench("random:tiny", "float32", "cpu", link=0.5)


@pytest.fixture(scope="module")
def conversed(bench) -> list[dict]:
    rng = random.Random(0)
    workload = Workload("conversations", [
        Talk(0.02 * number, number, [], [(matrix.tokens(rng, rng.randint(30, 90), 512), rng.randint(3, 9)) for _ in range(3)])
        for number in range(5)], 0.02)
    return matrix.compare(bench, workload, list(matrix.NAMES), 1, 0, LIMITS)


def test_all_systems_answer_as_chapter_01(conversed):
    assert [row["system"] for row in conversed] == list(matrix.NAMES.values())
    *rows, offloaded = conversed
    assert offloaded["not_run"] == "Without a GPU there is no other memory to offload to."
    new = rows[0]["equal_tokens"].split()[-1]
    assert int(new) > 50
    for row in rows:
        assert row["equal_tokens"] == f"{new} of {new}", row["system"]
        assert row["kind"] == ("peer" if row["system"].startswith("transformers") else "ours")
        for what in ("ttft_ms", "tbt_ms"):
            assert 0 < row[what]["p50"] <= row[what]["p95"] <= row[what]["p99"] <= max(row[what]["samples"])
            assert len(row[what]["samples"]) == 15
        assert row["tokens_per_second"]["median"] > 0 and all(0 < share for share in row["limit"].values())


def test_what_is_kept_is_what_the_chapters_say(conversed, bench):
    rows = {row["system"]: row for row in conversed}
    kv = bench.model.config.kv_numbers_per_token * 4
    for name in ("01 recompute", "transformers, recompute"):
        assert rows[name]["kept_bytes_per_token"] == 0 and rows[name]["cached_share"] == 0
    for name in ("06 both ends", "07 three tiers"):
        assert rows[name]["kept_bytes"].keys() == {"device", "host", "storage"}
    assert rows["06 both ends"]["kept_bytes"]["storage"] > 0
    assert 0.9 * kv < rows["transformers, dynamic cache kept"]["kept_bytes_per_token"] <= kv
    assert rows["transformers, static cache kept"]["kept_bytes_per_token"] == kv, "all that was reserved"
    for name in ("08 hybrid blocks", "transformers, dynamic cache kept", "transformers, static cache kept"):
        assert rows[name]["cached_share"] > 0.3, f"{name} has room for everything"


def test_documents_are_known_before_the_clock_starts(bench, monkeypatch):
    monkeypatch.setattr(matrix, "DOCUMENTS", 4)
    workload = matrix.documents(8, 0.0, 100.0, 256, 512, 0)
    rows = matrix.compare(bench, workload, ["01", "07", "dynamic", "static"], 2, 0, LIMITS)
    for row in rows:
        same, _, total = row["equal_tokens"].split()
        assert same == total and len(row["ttft_ms"]["samples"]) == 16, "two rounds"
        assert len(row["tokens_per_second"]["samples"]) == 2
    shares = {row["system"]: row["cached_share"] for row in rows}
    assert shares["transformers, dynamic cache kept"] > 0.8 and shares["transformers, static cache kept"] > 0.8


@pytest.mark.parametrize("key", ["dynamic", "static"])
def test_a_kept_cache_is_cut_back_to_what_the_next_prompt_begins_with(bench, key, monkeypatch):
    rng = random.Random(1)
    document, questions = matrix.tokens(rng, 60, 512), [matrix.tokens(rng, 9, 512) for _ in range(2)]
    workload = Workload("documents", [Talk(0.0, 0, document, [(question, 12)]) for question in questions], 0.0, [document])

    def second_answer() -> Asked:
        system = bench.peer(key, workload)
        for question in questions:
            system.submit(Asked(0, 0, 0, document + question, 12, 0.0))
            asked, = system.step()
        return asked
    alone = chapter("01_baseline").Engine(bench.model, bench.tokenizer, frozenset())
    right = alone.generate(prompt=document + questions[1], max_tokens=12).tokens
    asked = second_answer()
    assert asked.tokens == right and asked.cached == 60
    monkeypatch.setattr(matrix, "shorten", lambda cache, length, held: None)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):         # with the first question's states in it
        assert second_answer().tokens == right


# How it is counted -----------------------------------------------------------------------------------------------

def test_percentiles():
    found = matrix.percentiles([float(number) for number in range(101)])
    assert (found["p50"], found["p95"], found["p99"]) == (50, 95, 99) and len(found["samples"]) == 101
    assert matrix.percentiles([3.0])["p99"] == 3


def turn(arrival: float, last: float) -> Asked:
    return Asked(0, 0, 0, [], 2, arrival, arrival, last)


def test_nobody_is_busy_while_nobody_waits():
    assert matrix.busy_seconds([turn(1, 2), turn(1.5, 3), turn(1.6, 1.8), turn(10, 11)]) == pytest.approx(3)


def test_the_least_time_is_the_slower_of_link_and_processor(bench):
    least, config = matrix.Least(bench, LIMITS), bench.model.config
    plain, _, _ = checkpoint.load("random:tiny", "float32", "cpu", reorder=False)
    layers = sum(parameter.numel() for layer in plain.layers for parameter in layer.parameters() if parameter.ndim == 2)
    head = config.hidden_size * config.vocab_size
    asked = Asked(0, 0, 0, [5] * 100, 20, 0.0, cached=60)
    assert least.ttft_ms(asked) == pytest.approx(1e3 * (2 * layers * 40 + 2 * head) / 1e11)
    asked.restored = 1e7
    assert least.ttft_ms(asked) == pytest.approx(10)
    read = 4 * (layers + head + 110 * config.kv_numbers_per_token)
    assert least.tbt_ms(asked) == pytest.approx(1e3 * read / 1e10)
    assert least.tbt_ms(asked, streamed=1e8) == pytest.approx(100), "chapter 08: the weights come over the link"


def row(system: str, kind: str, milliseconds: float) -> dict:
    times = dict(p50=milliseconds, p95=milliseconds, p99=milliseconds)
    return dict(system=system, kind=kind, ttft_ms=times, tbt_ms=dict(times), tokens_per_second=dict(median=1e3 / milliseconds),
                kept_bytes_per_token=0.0, peak_memory_bytes=None, cached_share=0.0, limit=dict(ttft_share=0.5, tbt_share=0.5),
                equal_tokens="1 of 1")


def test_where_we_lose_stands_first():
    absent = dict(system="c", kind="peer", not_run="No.")
    systems = [row("slow", "ours", 3.0), row("even", "ours", 2.01), row("a", "peer", 4.0), row("b", "peer", 2.0), absent]
    lost = matrix.where_peers_win(systems)
    assert {(each["system"], each["peer"], each["ms"], each["peer_ms"]) for each in lost} == {("slow", "b", 3.0, 2.0)}
    assert [each["measure"] for each in lost] == list(matrix.MEASURES)
    lines = matrix.table(systems).splitlines()
    assert all(line.startswith("Where a peer is faster: ") for line in lines[:len(lost)])
    assert lines[-1].split() == ["c", "not", "run:", "No."]
    assert not matrix.where_peers_win([row("slow", "ours", 3.0)])


def test_memory_is_what_was_added_at_the_peak():
    memory = baseline_benchmark.Memory(torch.device("cpu"))
    if memory.base is None:
        pytest.skip("this operating system does not tell")
    numbers = torch.ones(1 << 24)
    del numbers
    assert memory.added() >= 60 << 20
    assert baseline_benchmark.Memory(torch.device("cpu")).added() < 60 << 20, "the peak begins anew"


# The command line ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, said", [
    ("--json found.json", "say which with --only"), ("--systems 01,09", "there is no system '09': choose from 01, 06"),
    ("--model random:none", "No geometry 'random:none'"), ("--scale 0", "is not a number from 0.001 to 10"),
    ("--only tokens", "invalid choice: 'tokens'"), ("--device tpu", "Unknown device 'tpu'"),
    ("--rate -1", "is not a number from"), ("--conversations 0", "is not a whole number from 1 to 10000")])
def test_wrong_options_are_refused_in_a_sentence(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        matrix.main(options.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_chapter_01_is_always_there_and_first():
    assert matrix.system_keys("dynamic, 06") == ["01", "06", "dynamic"]
    assert matrix.system_keys("01") == ["01"] and OURS == ["01", "06", "07", "08"]


# Chapters 01 and 02 alone, against transformers ------------------------------------------------------------------

def test_the_yardsticks_case_has_all_caches(monkeypatch):
    monkeypatch.setattr(baseline_benchmark, "memory_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(baseline_benchmark, "matrix_rate", lambda dtype, device: 1e11)
    case = baseline_benchmark.compare("random:tiny", "float32", 1.4, "cpu", 2, 4)
    assert case["peers"]["offloaded"] == {"not_run": "needs a GPU"}
    for what in ("dynamic", "static"):
        assert case["peers"][what]["equal_tokens"] == case["equal_tokens"] == case["paged"]["equal_tokens"] == 4
        for unit in ("ttft", "tbt"):
            theirs, ours = (case["peers"][what][f"{unit}_ms"]["samples"], case[f"{unit}_ms"]["ours"]["samples"])
            assert case["peers"][what]["ours_over"]["01"][unit]["samples"] == [b / a for a, b in zip(ours, theirs)]
            paged = case["paged"][f"{unit}_ms"]["samples"]
            assert case["paged"][f"{unit}_ratio"][what]["samples"] == [b / a for a, b in zip(paged, theirs)]
    assert case["tbt_ratio"] == case["peers"]["dynamic"]["ours_over"]["01"]["tbt"]
    tbt, ttft = case["tbt_ms"]["ours"]["median"] / 1e3, case["ttft_ms"]["ours"]["median"] / 1e3
    assert case["share_of_bandwidth"] == pytest.approx(case["decode_bytes_per_token"] / tbt / 1e10)
    assert case["share_of_matrix_rate"] == pytest.approx(case["prefill_flops"] / ttft / 1e11)
    assert case["prompt_tokens"] == 508 and case["decode_bytes_per_second"] == pytest.approx(case["decode_bytes_per_token"] / tbt)
