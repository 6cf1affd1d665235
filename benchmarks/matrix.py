"""The matrix: chapters 06 to 08, and what a user would otherwise pick, answer the same requests on one model and one link.

    python -m benchmarks.matrix                                     both workloads; results in benchmarks/results/
    python -m benchmarks.matrix --only conversations --systems 01,07,dynamic --json FILE

Workloads, generated and seeded:
    conversations   people talk with the model. Published means of ShareGPT are 66.8 tokens in and 358.8 out a turn, and half of
                    the conversations have histories over 2.5K tokens (HCache, sections 2.3 and 6.1); turns are drawn from
                    log-normal distributions with these means, because few are very long, and a conversation goes on until its
                    last turn finds a history drawn from one with that median, or for MOST_TURNS. Conversations arrive as a
                    Poisson process, and the next turn comes 30 s after an answer. All lengths and the 30 s are multiplied by
                    --scale.
    documents       questions about documents of half a context, with short answers, arrive as a Poisson process (HCache,
                    section 6.4). Which document is asked about follows Zipf's law with the exponents of SKEWS; 0 is uniform.
                    The device's blocks hold 15 % of the documents. All of them were read before the clock starts.

All systems get the same token ids. Answers are greedy, of given length, with no end of text; a history holds the answers of
chapter 01, which always goes first, so that it is the same for everybody also where 16-bit rounding would part the answers.
`equal_tokens` says how many tokens of the answers are those of chapter 01.

Systems: chapters 06 and 07 have the same number of blocks on the device, too few for all, and the same link; what they keep
beside that, host memory and storage have room for. In chapter 06 storage is as fast as the link; in chapter 07 host memory holds
half of everything and files the rest. Chapter 08 is another case: its weights are in host memory and come over the link in every
step, its blocks too, with room for all of them, and it computes more tokens in a step. Chapters 02 to 05 in conversations are in
benchmarks/outside.py. The peers are `generate` of transformers,
eager, one request at a time in the order of arrival, as is chapter 01: neither has a scheduler. A peer that keeps its caches
keeps them all on the device, or with offloading in host memory, however large they grow, and cuts a cache back to what the next
prompt begins with.

TTFT counts from arrival, waiting included. TBT is the mean time between the tokens of an answer after the first. Throughput is
over the time in which somebody waits or is answered. `limit` compares the median request with what this machine allows: TTFT with
its uncached tokens' products at the measured matrix rate, or with what it restored over the link, whichever is longer; TBT with
reading all weights and its own keys and values from memory (in chapter 08, with the weights' way over the link).
`kept_bytes_per_token` is what all tiers hold at the end, over all tokens there were. Peak memory is what a system adds to the
weights that were loaded before; None where nobody tells.
"""
import argparse
import gc
import importlib
import math
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path

import numpy
import torch
from tqdm import tqdm
from transformers import DynamicCache, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from legacy import app, backends, baseline, bidirectional, live, paged  # noqa: E402
from legacy import link as links  # noqa: E402

from benchmarks import baseline as baseline_benchmark  # noqa: E402
from benchmarks.baseline import RESULTS, Memory, device_name, spread, write  # noqa: E402
from benchmarks.limits import matrix_rate, memory_bandwidth  # noqa: E402
from benchmarks.reference import reference_model, set_imports_aside  # noqa: E402
from common import checkpoint  # noqa: E402

tiered, hybrid = importlib.import_module("07_tiered_storage"), importlib.import_module("08_hybrid_blocks")

IN, OUT, HISTORY, PAUSE = 66.8, 358.8, 2500, 30.0               # tokens of a turn, in the mean; in the median; seconds
MOST_TURNS = 10                                                 # of a conversation: nobody waits for one that never ends
TURN_SPREAD, HISTORY_SPREAD = 0.8, 0.4                          # deviations of the logarithms, which nobody has published
DOCUMENTS, SHORT = 20, (8, 24)                                  # of the second workload; tokens of a question or an answer
SKEWS, HELD = (0.0, 1.0, 2.0), 0.15                             # Zipf's exponents; the share of documents that the device holds
RATES = {"conversations": 4.0, "documents": 5.0}                # arrivals a second
BLOCK, RUNNING = 16, 64                                         # tokens; requests that may run at once
NAMES = {"01": "01 recompute", "06": "06 both ends", "07": "07 three tiers", "08": "08 hybrid blocks",
         "recompute": "transformers, recompute", "dynamic": "transformers, dynamic cache kept",
         "static": "transformers, static cache kept", "offloaded": "transformers, offloaded cache kept"}


# 1. What is asked ------------------------------------------------------------------------------------------------

@dataclass
class Talk:
    """Turns, one behind the other: each sends all that was said before it."""
    arrival: float                 # of the first turn, in seconds from the beginning
    subject: int                   # which conversation or document this is: who keeps a cache for each finds it by this
    beginning: list[int]           # tokens of the document
    turns: list[tuple[list[int], int]]                          # tokens of the question; how many of the answer

    @property
    def tokens(self) -> int:
        """At its end."""
        return len(self.beginning) + sum(len(question) + new for question, new in self.turns)


@dataclass
class Workload:
    name: str
    talks: list[Talk]
    pause: float                   # seconds from an answer to the next turn
    documents: list[list[int]] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.talks)

    @property
    def longest(self) -> int:
        return max(talk.tokens for talk in self.talks)

    @property
    def tokens(self) -> int:
        """All there are, those of a document once."""
        return sum(map(len, self.documents)) + sum(talk.tokens - len(talk.beginning) for talk in self.talks)

    def device_blocks(self) -> int:
        """So few that conversations or documents are evicted, and yet enough for two requests."""
        held = HELD * len(self.documents) * self.longest if self.documents else self.tokens / 5
        return max(2 * -(-self.longest // BLOCK) + 2, math.ceil(held / BLOCK))

    def lengths(self) -> list[int]:
        """Of the requests for which there must be room at once, if nothing is to be evicted."""
        if self.documents:
            return [self.longest] * min(RUNNING, len(self.documents) + 8)
        return sorted((talk.tokens for talk in self.talks), reverse=True)


def log_normal(rng: random.Random, median: float, deviation: float) -> float:
    return median * math.exp(rng.gauss(0, deviation))


def conversations(count: int, scale: float, rate: float, context: int, vocabulary: int, seed: int) -> Workload:
    rng, arrival, talks = random.Random(f"{seed} conversations"), 0.0, []
    middle = math.exp(-TURN_SPREAD ** 2 / 2)                    # of a log-normal distribution, its median over its mean
    for subject in range(count):
        history = scale * (log_normal(rng, HISTORY, HISTORY_SPREAD) - (IN + OUT) / 2)   # that the last turn finds, or half a turn
        turns, found, said = [], -1, 0                                                  # more
        while found < history and len(turns) < MOST_TURNS:
            question, new = (max(least, round(log_normal(rng, scale * mean * middle, TURN_SPREAD)))
                             for mean, least in ((IN, 1), (OUT, 2)))
            if said + question + new > context:
                if turns:
                    break
                question = min(question, context // 2)                                  # one turn at least
                new = min(new, context - question)
            turns.append((tokens(rng, question, vocabulary), new))
            found, said = said, said + question + new
        talks.append(Talk(arrival, subject, [], turns))
        arrival += rng.expovariate(rate)
    return Workload("conversations", talks, PAUSE * scale)


def documents(count: int, zipf: float, rate: float, context: int, vocabulary: int, seed: int) -> Workload:
    """`count` questions. The documents, the arrivals and the questions are the same for all exponents."""
    rng, arrival, talks = random.Random(f"{seed} documents"), 0.0, []
    texts = [tokens(rng, context // 2, vocabulary) for _ in range(DOCUMENTS)]
    weights = [(rank + 1) ** -zipf for rank in range(DOCUMENTS)]
    asked = random.Random(f"{seed} popularity").choices(range(DOCUMENTS), weights, k=count)
    for subject in asked:
        question = tokens(rng, rng.randint(*SHORT), vocabulary)
        talks.append(Talk(arrival, subject, texts[subject], [(question, rng.randint(*SHORT))]))
        arrival += rng.expovariate(rate)
    return Workload("documents", talks, 0.0, texts)


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(5, vocabulary) for _ in range(count)]


@dataclass(eq=False)
class Asked:
    """One turn, and what became of it. Times in seconds of time.perf_counter()."""
    talk: int
    turn: int
    subject: int | None            # None: nobody will come back to it
    prompt: list[int]
    new: int
    arrival: float
    first: float = 0.0             # when its first token was there, and its last
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0                # tokens of the prompt that were not computed
    restored: float = 0.0          # bytes that came over the link for it

    @property
    def ttft_ms(self) -> float:
        return (self.first - self.arrival) * 1e3

    @property
    def tbt_ms(self) -> float:
        return (self.last - self.first) / (self.new - 1) * 1e3


def play(system, workload: Workload, answers: dict[tuple[int, int], list[int]], bar=None) -> list[Asked]:
    """The workload in real time -> all turns. `answers` of (talk, turn) are what histories hold; who is the first writes them."""
    due, over, histories, began = [], [], [list(talk.beginning) for talk in workload.talks], time.perf_counter()
    for number, talk in enumerate(workload.talks):
        heappush(due, (began + talk.arrival, number, 0))
    while due or system.busy():
        # 1. Who has arrived stands in line, whenever that is noticed
        while due and due[0][0] <= time.perf_counter():
            arrival, number, turn = heappop(due)
            talk, (question, new) = workload.talks[number], workload.talks[number].turns[turn]
            histories[number] += question
            system.submit(Asked(number, turn, talk.subject, list(histories[number]), new, arrival))
        # 2. One step; whoever is answered comes back after a pause
        if not system.busy():
            time.sleep(max(0.0, due[0][0] - time.perf_counter()))
            continue
        for asked in system.step():
            over.append(asked)
            histories[asked.talk] += answers.setdefault((asked.talk, asked.turn), asked.tokens)
            if asked.turn + 1 < len(workload.talks[asked.talk].turns):
                heappush(due, (asked.last + workload.pause, asked.talk, asked.turn + 1))
            if bar is not None:
                bar.update()
    return over


# 2. Who answers --------------------------------------------------------------------------------------------------

class Alone:
    """One request at a time, in the order of arrival."""
    def __init__(self):
        self.line: deque[Asked] = deque()

    def submit(self, asked: Asked):
        self.line.append(asked)

    def busy(self) -> bool:
        return bool(self.line)

    def step(self) -> list[Asked]:
        """Answer the first in line."""
        asked = self.line.popleft()
        self.answer(asked)
        return [asked]

    def kept(self) -> dict[str, int]:
        """Bytes of state that each tier holds."""
        return {}

    def flush(self):
        """Wait until nothing is on its way."""


class Recompute(Alone):
    """Chapter 01."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def answer(self, asked: Asked):
        began = time.perf_counter()
        result = self.engine.generate(prompt=asked.prompt, max_tokens=asked.new)
        asked.first = began + result.ttft_ms / 1e3
        asked.last, asked.tokens = asked.first + result.tbt_ms * (asked.new - 1) / 1e3, result.tokens


class Peer(Alone):
    """`generate` of transformers, with a cache for each subject that `make(length)` gives, or none that is kept."""

    def __init__(self, model, lengths: dict[int, int], tier: str = "device", make=None):
        super().__init__()
        self.model, self.lengths, self.tier, self.make = model, lengths, tier, make
        self.caches: dict[int, tuple[object, list[int]]] = {}                   # subject -> cache, and the tokens in it

    def answer(self, asked: Asked):
        cache, options = None, {}
        if self.make and asked.subject is not None:
            cache, known = self.caches.pop(asked.subject, (None, []))
            asked.cached = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, asked.prompt[:-1])))
            if cache is None:
                cache = self.make(self.lengths[asked.subject])
            elif asked.cached < len(known):
                shorten(cache, asked.cached, len(known))
            options["past_key_values"] = cache
        times, asked.tokens = baseline_benchmark.generate(self.model, asked.prompt, asked.new, **options)
        asked.first, asked.last = times[0], times[-1]
        if cache is not None:                                                   # the last token was not read
            self.caches[asked.subject] = cache, (asked.prompt + asked.tokens)[:-1]
        if self.tier == "host":
            asked.restored = asked.cached * self.bytes_per_token()

    def bytes_per_token(self) -> float:
        return sum(map(size_of, self.caches.values())) / sum(len(known) for _, known in self.caches.values())

    def kept(self) -> dict[str, int]:
        return {self.tier: sum(map(size_of, self.caches.values()))} if self.caches else {}


def shorten(cache, length: int, held: int):
    """Of a cache that holds `held` tokens the first `length` stay."""
    if isinstance(cache, StaticCache):
        for layer in cache.layers:
            layer.keys[:, :, length:], layer.values[:, :, length:] = 0, 0       # [1, KVH, S, hd] each
            layer.cumulative_length.fill_(length)
    else:
        cache.crop(length - held)


def size_of(kept) -> int:
    cache, _ = kept
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Batching:
    """An engine of chapters 06 to 08, stepped as its own thread would."""

    def __init__(self, engine):
        self.engine, self.asked = engine, {}                                    # asked: request -> Asked

    def submit(self, asked: Asked):
        request, = self.engine.submit(prompt=asked.prompt, max_tokens=asked.new)
        self.asked[request] = asked

    def busy(self) -> bool:
        return self.engine.busy()

    def step(self) -> list[Asked]:
        if not self.engine.step() and self.engine.busy():
            self.engine.rest()
        over = [request for request in self.asked if request.outcome is not None]
        return [self.take(request, self.asked.pop(request)) for request in over]

    def take(self, request, asked: Asked) -> Asked:
        if isinstance(request.outcome, Exception):
            raise request.outcome
        asked.first, asked.last = request.answer.times[0], request.answer.times[-1]
        asked.tokens, asked.cached = request.answer.tokens, request.cached_tokens
        asked.restored = self.restored(request)
        return asked

    def restored(self, request) -> float:
        """Bytes that came over the link before its prompt was computed."""
        if found := getattr(request, "blocks", None):                           # chapter 07
            return (found["cpu_hits"] + found["storage_hits"]) * self.engine.pool.kv[:, :, 0].nbytes
        if isinstance(self.engine, hybrid.Engine):                              # all weights, whatever it was
            return self.engine.model.host_bytes
        report = getattr(request.outcome, "restoration", None)                  # chapter 06
        return report["bytes"] if report else 0

    def kept(self) -> dict[str, int]:
        sizes = {}
        for tier in self.engine.tiers():
            held = int(((tier.states != live.FREE) & (tier.states != live.RESERVED) & (tier.states != live.IN_FLIGHT)).sum())
            sizes[tier.name] = held * (tier.block_bytes or 0)
        if isinstance(self.engine, tiered.Engine):                              # of storage the page shows the last pages only
            sizes["storage"] = self.engine.storage.backend.files.bytes
        return sizes

    def flush(self):
        while self.engine.busy():
            self.engine.step()
            self.engine.rest()
        if hasattr(self.engine, "flush"):
            self.engine.flush()


# 3. What they share ----------------------------------------------------------------------------------------------

class Bench:
    """The models, and one link for all. `make` gives a system with room for a workload, and takes it away again."""

    def __init__(self, name: str, dtype: str, device: str, link: float | str = "auto", platform: str = "a100"):
        self.name, self.device = name, device
        self.model, self.tokenizer, _ = checkpoint.load(name, dtype, device)
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.speed = links.bandwidth(self.model, link, platform)                # None with CUDA
        self.costs = None                                                       # of chapter 08, measured once

    @cached_property
    def reference(self):
        model = reference_model(self.name, self.model.dtype, self.model.device.type)
        model.generation_config.eos_token_id = None
        return model

    @cached_property
    def on_host(self):
        return checkpoint.load(self.name, self.dtype, self.device, on_host=True)[0]

    @cached_property
    def limits(self) -> dict:
        return {"matrix_flops_per_second": matrix_rate(self.model.dtype, self.device),
                "memory_bytes_per_second": memory_bandwidth(self.device), "link_bytes_per_second": self.link_speed}

    @cached_property
    def link_speed(self) -> float:
        clock = paged.Clock(self.model.device)
        return self.speed or links.Link("load", clock).speed()

    def load(self, key: str):
        """What the system needs beside the model, so that its memory is not the system's. Raises ModelError where the system
        cannot run."""
        if key == "offloaded" and self.device != "cuda":
            raise checkpoint.ModelError("Without a GPU there is no other memory to offload to.")
        if key == "08":
            assert self.on_host is not None
        elif not key.isdigit():
            assert self.reference is not None

    @contextmanager
    def make(self, key: str, workload: Workload, blocks: int):
        """-> the system. Raises ModelError if it does not fit into memory."""
        with ExitStack() as stack:
            yield self.systems(key, workload, blocks, stack)

    def systems(self, key: str, workload: Workload, blocks: int, stack: ExitStack):
        parts = self.model, self.tokenizer, frozenset()
        if not key.isdigit():
            return self.peer(key, workload)
        if key == "01":
            return Recompute(baseline.Engine(*parts))
        # All that is ever said, in blocks, and what is on its way
        rounded = workload.tokens // BLOCK + 2 * workload.turns + len(workload.documents) + 2 * RUNNING
        options = dict(max_running=RUNNING, max_waiting=len(workload.talks) + 1)
        small = dict(options, blocks=blocks, block_size=BLOCK)
        if key == "08":
            engine = hybrid.Engine(self.on_host, *parts[1:], BLOCK, **options, device=self.model.device, costs=self.costs,
                                   lengths=workload.lengths(), bytes_per_second=self.speed)
            self.costs = engine.costs
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True)))
            limit = shutil.disk_usage(folder).free / 2
            bandwidth = self.speed and bidirectional.Bandwidth((self.speed * 8 / 1e6,))
            if key == "06":
                engine = bidirectional.Engine(*parts, **small, directories=(folder,), disk_limit=limit, bandwidth=bandwidth,
                                              bytes_per_second=self.speed)
            else:
                engine = tiered.Engine(*parts, **small, cpu_blocks=max(2 * blocks, rounded // 2), bytes_per_second=self.speed)
                engine.attach(backends.open_backend(f"file:{folder}/pages", dict(limit_gb=limit / 1e9)), "files", bandwidth)
        stack.callback(engine.release)
        stack.callback(engine.close)
        return Batching(engine)

    def peer(self, key: str, workload: Workload) -> Peer:
        lengths = {}
        for talk in workload.talks:
            lengths[talk.subject] = max(talk.tokens, lengths.get(talk.subject, 0))
        for subject, document in enumerate(workload.documents):
            lengths[subject] = max(len(document) + 3, lengths.get(subject, 0))
        config = self.reference.config
        make = {"recompute": None, "dynamic": lambda length: DynamicCache(config=config),
                "static": lambda length: StaticCache(config=config, max_cache_len=length),
                "offloaded": lambda length: DynamicCache(config=config, offloading=True)}[key]
        return Peer(self.reference, lengths, "host" if key == "offloaded" else "device", make)

    def run(self, key: str, workload: Workload, blocks: int, answers: dict, seed: int) -> dict:
        """One system answers it all -> all turns, what is kept in the end, and the peak of memory. Raises ModelError."""
        self.load(key)
        memory = Memory(self.model.device)
        with self.make(key, workload, blocks) as system:
            # Before the clock starts: everything has run once, and all documents have been read, the most popular last
            rng = random.Random(f"{seed} warm-up")
            prompts = [(None, tokens(rng, min(256, workload.longest // 2), self.model.config.vocab_size)) for _ in range(2)]
            for subject, prompt in prompts + [(subject, [*text, 5]) for subject, text in enumerate(workload.documents)][::-1]:
                system.submit(Asked(-1, 0, subject, prompt, 2, 0.0))
                while system.busy():
                    system.step()
                system.flush()
            with tqdm(total=workload.turns, desc=NAMES[key], unit="turn", leave=False) as bar:
                over = play(system, workload, answers, bar)
            system.flush()
            found = dict(asked=over, kept=system.kept(), peak=memory.added())
            del system
        gc.collect()
        return found


# 4. What came of it ----------------------------------------------------------------------------------------------

def percentiles(samples: list[float]) -> dict:
    """Linear between the samples."""
    return dict(zip(("p50", "p95", "p99"), map(float, numpy.percentile(samples, (50, 95, 99)))), samples=samples)


class Least:
    """What a request takes at least on this machine, in milliseconds."""

    def __init__(self, bench: Bench, limits: dict):
        config, self.limits = bench.model.config, limits
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.layers = config.num_hidden_layers * config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        self.head = config.hidden_size * config.vocab_size
        self.kv_numbers, self.itemsize = config.kv_numbers_per_token, bench.model.dtype.itemsize

    def ttft_ms(self, asked: Asked) -> float:
        flops = 2 * self.layers * (len(asked.prompt) - asked.cached) + 2 * self.head            # logits of the last token only
        return 1e3 * max(flops / self.limits["matrix_flops_per_second"], asked.restored / self.limits["link_bytes_per_second"])

    def tbt_ms(self, asked: Asked, streamed: float = 0.0) -> float:
        """`streamed`: bytes that come over the link for every token."""
        cached = (len(asked.prompt) + asked.new / 2) * self.kv_numbers
        read = (self.layers + self.head + cached) * self.itemsize
        return 1e3 * max(read / self.limits["memory_bytes_per_second"], streamed / self.limits["link_bytes_per_second"])


def busy_seconds(turns: list[Asked]) -> float:
    """In which somebody waits or is answered."""
    seconds, end = 0.0, 0.0
    for arrival, last in sorted((asked.arrival, asked.last) for asked in turns):
        seconds += max(0.0, last - max(arrival, end))
        end = max(end, last)
    return seconds


def summary(key: str, rounds: list[dict], answers: dict, workload: Workload, least: Least) -> dict:
    turns = [asked for found in rounds for asked in found["asked"]]
    same = sum(a == b for asked in turns for a, b in zip(asked.tokens, answers[asked.talk, asked.turn]))
    streamed = turns[0].restored if key == "08" else 0.0        # there, the weights
    peaks, kept = [found["peak"] for found in rounds], rounds[-1]["kept"]
    return {
        "system": NAMES[key], "kind": "ours" if key.isdigit() else "peer",
        "ttft_ms": percentiles([asked.ttft_ms for asked in turns]), "tbt_ms": percentiles([asked.tbt_ms for asked in turns]),
        "tokens_per_second": spread([sum(asked.new for asked in found["asked"]) / busy_seconds(found["asked"])
                                     for found in rounds]),
        "kept_bytes_per_token": sum(kept.values()) / workload.tokens, "kept_bytes": kept,
        "peak_memory_bytes": None if None in peaks else max(peaks),
        "cached_share": sum(asked.cached for asked in turns) / sum(len(asked.prompt) for asked in turns),
        "restored_bytes": sum(asked.restored for asked in rounds[-1]["asked"]),
        "limit": {"ttft_share": float(numpy.median([least.ttft_ms(asked) / asked.ttft_ms for asked in turns])),
                  "tbt_share": float(numpy.median([least.tbt_ms(asked, streamed) / asked.tbt_ms for asked in turns]))},
        "equal_tokens": f"{same} of {sum(asked.new for asked in turns)}"}


MEASURES = {"TTFT p50": lambda row: row["ttft_ms"]["p50"], "TTFT p99": lambda row: row["ttft_ms"]["p99"],
            "TBT p50": lambda row: row["tbt_ms"]["p50"], "TBT p99": lambda row: row["tbt_ms"]["p99"],
            "busy time a token": lambda row: 1e3 / row["tokens_per_second"]["median"]}


def where_peers_win(systems: list[dict]) -> list[dict]:
    """Of our systems that are slower than the best peer by more than 2 %: by which measure, and both in milliseconds."""
    rows = [row for row in systems if "not_run" not in row]
    lost, peers = [], [row for row in rows if row["kind"] == "peer"]
    for row in (row for row in rows if row["kind"] == "ours" and peers):
        for measure, value in MEASURES.items():
            best = min(peers, key=value)
            if value(row) > 1.02 * value(best):
                lost.append(dict(system=row["system"], measure=measure, ms=value(row), peer=best["system"], peer_ms=value(best)))
    return lost


def table(systems: list[dict]) -> str:
    lines = [f"Where a peer is faster: {lost['measure']} of {lost['system']}, {lost['ms']:.2f} ms, against "
             f"{lost['peer_ms']:.2f} ms of {lost['peer']}" for lost in where_peers_win(systems)]
    lines.append(f"{'':37}{'TTFT ms':>22}{'TBT ms':>22}{'':>10}{'kept':>9}{'peak':>9}{'':>8}{'of the limit':>14}\n{'':37}"
                 + f"{'p50':>8}{'p95':>7}{'p99':>7}" * 2 + f"{'tokens/s':>10}{'B/token':>9}{'MB':>9}{'cached':>8}"
                 f"{'TTFT':>7}{'TBT':>7}   tokens equal to chapter 01's")
    for row in systems:
        if "not_run" in row:
            lines.append(f"  {row['system']:35}not run: {row['not_run']}")
            continue
        times = "".join(f"{row[what][name]:{width}.1f}" for what in ("ttft_ms", "tbt_ms")
                        for name, width in (("p50", 8), ("p95", 7), ("p99", 7)))
        peak = "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e6:.0f}"
        lines.append(f"  {row['system']:35}{times}{row['tokens_per_second']['median']:10.1f}{row['kept_bytes_per_token']:9.0f}"
                     f"{peak:>9}{row['cached_share']:8.0%}{row['limit']['ttft_share']:7.0%}{row['limit']['tbt_share']:7.0%}   "
                     + row["equal_tokens"])
    return "\n".join(lines)


def compare(bench: Bench, workload: Workload, keys: list[str], rounds: int, seed: int, limits: dict) -> list[dict]:
    """All systems answer the workload, in turns -> a row of each."""
    answers, found, failed, blocks = {}, {key: [] for key in keys}, {}, workload.device_blocks()
    for number in range(rounds):
        turn = keys[:1] + keys[:0:-1] if number % 2 else keys           # chapter 01 first, the others there and back
        for key in (key for key in turn if key not in failed):
            try:
                found[key].append(bench.run(key, workload, blocks, answers, seed))
            except (checkpoint.ModelError, torch.OutOfMemoryError) as error:
                failed[key] = str(error).splitlines()[0]
    least = Least(bench, limits)
    return [{"system": NAMES[key], "kind": "ours" if key.isdigit() else "peer", "not_run": failed[key]} if key in failed else
            summary(key, found[key], answers, workload, least) for key in keys]


def describe(workload: Workload) -> dict:
    """What was asked, in numbers."""
    turns = [turn for talk in workload.talks for turn in talk.turns]
    return dict(requests=len(turns), tokens=workload.tokens, longest=workload.longest, device_blocks=workload.device_blocks(),
                block_tokens=BLOCK, mean_question_tokens=float(numpy.mean([len(question) for question, _ in turns])),
                mean_answer_tokens=float(numpy.mean([new for _, new in turns])))


def measure_conversations(bench: Bench, arguments, keys: list[str]) -> dict:
    config = bench.model.config
    workload = conversations(arguments.conversations, arguments.scale, arguments.rate or RATES["conversations"],
                             config.max_position_embeddings, config.vocab_size, arguments.seed)
    histories = [talk.tokens - len(talk.turns[-1][0]) - talk.turns[-1][1] for talk in workload.talks]
    asked = dict(describe(workload), conversations=len(workload.talks), pause_seconds=workload.pause,
                 median_history_tokens=float(numpy.median(histories)))
    print(f"\n{asked['conversations']} conversations, {asked['requests']} turns of {asked['mean_question_tokens']:.1f} tokens in "
          f"and {asked['mean_answer_tokens']:.1f} out in the mean, histories of {asked['median_history_tokens']:.0f} tokens in "
          f"the median;\n{workload.pause:.1f} s between turns; the device holds {asked['device_blocks'] * BLOCK} of "
          f"{asked['tokens']} tokens", flush=True)
    systems = compare(bench, workload, keys, arguments.rounds, arguments.seed, bench.limits)
    print(table(systems), flush=True)
    return dict(asked=asked, systems=systems, peer_faster=where_peers_win(systems))


def measure_documents(bench: Bench, arguments, keys: list[str]) -> dict:
    skews, config = [], bench.model.config
    for zipf in SKEWS:
        workload = documents(2 * arguments.conversations, zipf, arguments.rate or RATES["documents"],
                             config.max_position_embeddings, config.vocab_size, arguments.seed)
        asked = dict(describe(workload), documents=DOCUMENTS, document_tokens=len(workload.documents[0]))
        print(f"\n{asked['requests']} questions about {DOCUMENTS} documents of {asked['document_tokens']} tokens, Zipf {zipf:g}; "
              f"the device holds {asked['device_blocks'] * BLOCK} tokens", flush=True)
        systems = compare(bench, workload, keys, arguments.rounds, arguments.seed, bench.limits)
        skews.append(dict(zipf=zipf, asked=asked, systems=systems, peer_faster=where_peers_win(systems)))
        print(table(systems), flush=True)
    return dict(skews=skews)


# 5. Main ---------------------------------------------------------------------------------------------------------

def system_keys(string: str) -> list[str]:
    """An argparse type: some of NAMES with commas between them. Chapter 01 is always there, and first."""
    wanted = [key.strip() for key in string.split(",")]
    if unknown := [key for key in wanted if key not in NAMES]:
        raise argparse.ArgumentTypeError(f"there is no system {unknown[0]!r}: choose from {', '.join(NAMES)}")
    return [key for key in NAMES if key == "01" or key in wanted]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("conversations", "documents"), help="only this workload")
    parser.add_argument("--model", default="classroom")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--systems", type=system_keys, default=list(NAMES), metavar="KEY,...",
                        help=f"only these, and chapter 01 (of {', '.join(NAMES)})")
    parser.add_argument("--scale", type=app.bounded(float, 1e-3, 10), default=0.2,
                        help="of ShareGPT's lengths and of the pause between turns (default 0.2)")
    parser.add_argument("--conversations", type=app.bounded(int, 1, 10_000), default=50, metavar="N",
                        help="conversations; of the other workload, half of the questions (default 50)")
    parser.add_argument("--rate", type=app.bounded(float, 1e-3, 1e4), metavar="R",
                        help=f"arrivals a second (default {RATES['conversations']:g}, and {RATES['documents']:g} questions)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=1)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/matrix-WORKLOAD-DEVICE.json)")
    links.add_arguments(parser)
    arguments = parser.parse_args(arguments)
    if arguments.json and not arguments.only:
        parser.error("--json takes the results of one workload; say which with --only.")
    try:
        device = checkpoint.pick_device(arguments.device)
        set_imports_aside()
        bench = Bench(arguments.model, arguments.dtype, device, arguments.link, arguments.platform)
    except checkpoint.ModelError as error:
        parser.error(str(error))
    for name, measure in (("conversations", measure_conversations), ("documents", measure_documents)):
        if arguments.only in (None, name):
            found = measure(bench, arguments, arguments.systems)
            write("matrix", device, arguments.json or RESULTS / f"matrix-{name}-{device_name(device)}.json",
                  workload=name, model=arguments.model, dtype=bench.dtype, scale=arguments.scale, seed=arguments.seed,
                  rounds=arguments.rounds, link=dict(modelled=bench.speed is not None, gbps=bench.link_speed / 1e9),
                  limits=bench.limits, **found)


if __name__ == "__main__":
    main()
