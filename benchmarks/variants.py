"""What chapters 04 and 05 leave out because it loses, each beside what they do: one model, in turn.

    python -m benchmarks.variants                                  all; results in benchmarks/results/
    python -m benchmarks.variants --only divisions --model random:small --histories 1024

layouts      Chunks in which the layers of a token lie together, against chapter 04's, in which the tokens of
             a layer do: restoring from host memory and from files, and saving.
saving       TBT of 1, 4 and 16 that decode, over nothing kept: in two stages (chapter 04); directly, a copy
             for each run of rows and each layer; and so to a file too, before the next step (Figure 14).
divisions    TTFT and restoration over three links: chapter 05's plan; the paper's closed form; the naive
             hybrid, which recomputes and loads but knows no hidden states; hidden states alone (HCache-O:
             chapter 04); K and V alone (03); and tokens divided instead of layers, rounded to a tile or not
             (Figure 13). All plans are made from the same costs.
directories  The same history from files in 1, 2 and 4 directories, each as fast as an SSD would be against
             this processor (Figure 11 d to f). 03: K and V in files.
crossover    Tokens per second restored and computed, against the history's length, and the length from which
             restoring is the faster: measured, and as the engine's own estimates say.

Figures are HCache's (EuroSys '25). Each row says what was restored; all ways must answer alike.
"""

import argparse
import importlib
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint, cli, lesson  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import Request  # noqa: E402
from common.restoring import Cache  # noqa: E402
from common.store import CHUNK, Directory, Storage, StoredChunks  # noqa: E402
from tools.on_paper import token_wise  # noqa: E402

CHAPTERS = "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free"
paged, offload, hidden_states, bubble_free = map(importlib.import_module, CHAPTERS)
HiddenCache, PlannedCache = hidden_states.HiddenCache, bubble_free.PlannedCache
MODELS = {"classroom": [1024], "random:small": [1024]}  # and histories
LINKS = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}
QUESTION = 32  # tokens
ALONE = 299  # a token that no question begins with
TILE = 128  # rows, for which products are fast
SSD, PCIE = 6.9 / 24, 32 / 24  # over the speed at which Llama-2-7B's projecting and reading are even (6.1.3)

# 1. Asking, and what was restored --------------------------------------------------------------

def draw(rng, model, tokens: int) -> list[int]:
    return [rng.randrange(300, model.config.vocab_size) for _ in range(tokens)]


@contextmanager
def engines_of(model, caches: dict, tokens: int):
    """An engine for each Cache. Of a history of so many tokens two fit: one may still be leaving."""
    engines = {name: paged.Engine(paged.Runner(model, tokens // 8 + 32), cache, always_restore=True)
               for name, cache in caches.items()}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def once(engine, prompt: list[int], pools=("device",)) -> dict:
    """Ask when the engine has lost what is in these pools -> what was restored. `files`: the operating system
    does not hold them any more."""
    lesson.settle(engine)
    for pool in pools:
        if pool != "files":
            engine.evict(pool)
            continue
        for storage in engine.cache.storage.storages:
            for path in Path(storage.backend.folder).iterdir():
                with open(path, "rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(hidden_states.PAUSE_BEFORE)
    before = engine.counts["bytes_in"]
    request = lesson.ask(engine, prompt)
    computed = [span.label for span in request.timeline.spans if span.lane == "compute"]
    return dict(ttft_ms=request.outcome.ttft_ms, new=request.new,
                projected=sum(label.startswith("layer") for label in computed),
                tokens=request.cached_tokens - request.found.get("gpu", 0),
                bytes=engine.counts["bytes_in"] - before)


def compare(engines: dict, history: list[int], rounds: int, rng, *bases: str, pools=("device",)) -> dict:
    """Ask all engines in turn, in each round the same question behind the same history -> name -> figures,
    and how many times as long it took as `bases` did in the same round. Restoration: TTFT of a single token
    behind the history."""
    model = next(iter(engines.values())).model
    for engine in engines.values():
        once(engine, history)  # compute it, and keep it

    def ask(engine, questions) -> dict:
        alone = once(engine, history + [ALONE], pools)
        return dict(once(engine, next(questions), pools), restore_ms=alone["ttft_ms"])

    questions = [history + draw(rng, model, QUESTION) for _ in range(rounds + 1)]
    asks = {name: partial(ask, engine, iter(questions)) for name, engine in engines.items()}
    taken = lesson.in_turn(asks, rounds)
    alike = [len({tuple(found["new"]) for found in answers}) == 1 for answers in zip(*taken.values())]
    ways = {}
    for name, each in taken.items():
        ways[name] = {what: min(found[what] for found in each) for what in ("tokens", "bytes", "projected")}
        for what in "ttft_ms", "restore_ms":
            ways[name][what] = spread([found[what] for found in each])
            for base in bases:
                pairs = [found[what] / other[what] for found, other in zip(each, taken[base])]
                ways[name][f"{what[:-3]}_over_{base}"] = spread(pairs)
        ways[name]["answered_alike"] = f"{sum(alike)} of {len(alike)}"
    return ways


def bytes_of_states(model, tokens: int) -> int:
    """Of one layer."""
    return tokens * model.config.hidden_size * model.dtype.itemsize


def even_speed(model, tokens: int) -> float:
    """Bytes per second at which a layer's states travel as long as they are projected."""
    with engines_of(model, {"": HiddenCache(1, 1e9)}, tokens) as engines:
        return bytes_of_states(model, tokens) / engines[""].cache.seconds_to_project(tokens)


def modelled(model, speed: float) -> float | None:
    """With a GPU the link is as fast as it is."""
    return None if model.device.type == "cuda" else speed


def chunks_of(tokens: int) -> int:
    """As many of chapter 04's as hold the K and V of a history, and some questions."""
    return 2 * tokens // CHUNK + 16


# 2. Chunks in which the layers of a token lie together -----------------------------------------

class LayerMajor(HiddenCache):
    """Chapter 04's, which notes what stage two costs."""

    def attach(self, engine):
        self.sorting = []  # seconds of a host thread, of each job
        super().attach(engine)

    def scatter(self, store, transfer, *rest):
        transfer.wait()
        began = time.thread_time()
        super().scatter(store, transfer, *rest)
        self.sorting.append(time.thread_time() - began)


class TokenMajor(LayerMajor):
    """As they are computed: a row of a chunk is a token, all its layers. To restore a layer is to pick a
    piece out of each row."""

    def keep(self, layers, name, of_blocks=()):
        super().keep(layers, name, of_blocks)
        shape = self.chunks, CHUNK, len(layers), self.model.config.hidden_size
        chunks = links.host_memory(shape, self.model.dtype, self.model.device, "The chunk memory")
        self.store.parts = chunks.unbind(2)  # of [chunks, 64, L, D], a layer each: [chunks, 64, D]
        self.store.arrays = [links.as_integers(part) for part in self.store.parts]


class TokenMajorDirectory(Directory):
    """A file for a chunk, whose rows are tokens, all their layers, and then the layers' checksums: to read a
    layer is to read 64 pieces."""

    def set(self, keys, values):
        if keys:
            rows = [numpy.frombuffer(value, numpy.uint8, offset=4).reshape(CHUNK, -1) for value in values]
            content = numpy.stack(rows, 1).tobytes() + b"".join([value[:4] for value in values])  # [64, L, ...]
            super().set([keys[0][:60]], [content])
            self.index.update(keys)
            self.layers = len(keys)

    def get(self, keys):
        values = []
        for index, key in enumerate(keys):
            layer = int.from_bytes(bytes.fromhex(key[60:]), "little")
            with open(self.path(key[:60]), "rb", buffering=0) as file:
                row = (os.fstat(file.fileno()).st_size - 4 * self.layers) // CHUNK // self.layers
                value = memoryview(self.buffers.setdefault(index, bytearray(4 + CHUNK * row)))
                os.preadv(file.fileno(), [value[:4]], CHUNK * self.layers * row + 4 * layer)
                for token in range(CHUNK):
                    piece = value[4 + token * row : 4 + (token + 1) * row]
                    os.preadv(file.fileno(), [piece], row * (token * self.layers + layer))
            values.append(value)
        return values


def layouts(model, tokens: int, rounds: int, running: int = 16):
    rng, link = random.Random(0), links.bandwidth(model)
    kinds = {"layer-major": (LayerMajor, Directory), "token-major": (TokenMajor, TokenMajorDirectory)}
    for place, pools in {"host memory": ["device"], "files": ["device", "host", "files"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            caches = {}
            for name, (kind, directory) in kinds.items():
                stored = StoredChunks(Storage(directory(f"{folder}/{name}", 100))) if place == "files" else None
                caches[name] = kind(chunks_of(tokens) + running, link, stored)
            with engines_of(model, caches, max(tokens, 128 * running)) as engines:
                ways = compare(engines, draw(rng, model, tokens), rounds, rng, "layer-major", pools=pools)
                save = partial(save_decoded, rng=rng, running=running)
                ways_to_save = {name: partial(save, engine) for name, engine in engines.items()}
                saved = lesson.in_turn(ways_to_save, rounds)
        for name, way in ways.items():
            pieces = tokens if name == "token-major" else tokens // CHUNK
            speeds = caches[name].storage.storages[0].speeds if caches[name].storage else []
            ratios = [one / other for (one, _), (other, _) in zip(saved[name], saved["layer-major"])]
            way |= dict(pieces_a_layer=pieces, bytes_a_piece=bytes_of_states(model, tokens) // pieces,
                        read_gbps=statistics.median(speeds) / 1e9 if speeds else None,
                        save_ms=spread([ms for ms, _ in saved[name]]), saved_bytes=saved[name][0][1],
                        save_over=spread(ratios))
        yield dict(history_tokens=tokens, place=place, running=running, ways=ways)


def save_decoded(engine, rng, running: int) -> tuple[float, int]:
    """`running` requests decode a chunk each -> ms of stage two, of all its threads, and bytes kept."""
    lesson.settle(engine)
    engine.evict("device")
    engine.evict("host")
    engine.cache.sorting.clear()
    before = engine.counts["bytes_out"]
    engine.generate([Request(draw(rng, engine.model, 16), CHUNK) for _ in range(running)])
    lesson.settle(engine)
    return 1e3 * sum(engine.cache.sorting), engine.counts["bytes_out"] - before


# 3. Saving without a snapshot ------------------------------------------------------------------

class Direct(HiddenCache):
    """After each step each run of rows of each layer goes straight to its chunk, in a copy of its own."""

    def save(self, batch):
        super().save(batch)
        if self.rows:
            self.flush()

    def flush(self):
        noted, states = self.rows, self.step  # of one step, [T, D] a layer
        self.forget_steps()
        moves, touched = self.store.fill(noted)
        transfers = []
        for part, rows in enumerate(states):
            for move in moves:
                if move.source:
                    before = self.store.parts[part][move.source.number, : move.at]
                    transfers.append(self.copy_rows(part, move.chunk.number, 0, before))
                here = rows[move.places[0] : move.places[0] + len(move.places)]  # [n, D]
                transfers.append(self.copy_rows(part, move.chunk.number, move.at, here))
        if moves:
            # The states are not freed before all are copied
            then = lambda arrived, states=states: self.on_saved(transfers[-1], moves, arrived)  # noqa: E731
            self.hold("save", transfers, (self.store.pool, touched), then=then)
        self.counts["copies_out"] += len(transfers)
        self.counts["bytes_out"] += sum(transfer.bytes for transfer in transfers)
        self.store.pool.release(touched)

    def copy_rows(self, part: int, chunk: int, at: int, rows):
        """Order the copy of rows [n, D] of one layer to a chunk, from row `at` on -> its Transfer."""
        return self.save_link.copy(self.store.parts[part][chunk, at : at + len(rows)], rows, "states")


class DirectToFile(Direct):
    """The same, and to a file as large as the chunk memory; the next step waits until it is on the disk."""

    def attach(self, engine):
        self.file, self.writes = tempfile.TemporaryFile(), []
        super().attach(engine)

    def copy_rows(self, part, chunk, at, rows):
        transfer = super().copy_rows(part, chunk, at, rows)
        array = self.store.arrays[part][chunk, at : at + len(rows)]
        self.writes.append((transfer, array, ((part * self.chunks + chunk) * CHUNK + at) * array[0].nbytes))
        return transfer

    def flush(self):
        super().flush()
        for transfer, array, at in self.writes:
            transfer.wait()
            os.pwrite(self.file.fileno(), array, at)
        os.fdatasync(self.file.fileno())
        self.writes.clear()


def saving(model, tokens: int, rounds: int, new: int = 100):
    """`tokens` is not used: the prompts are short, and what is decoded is kept."""
    rng, link = random.Random(0), links.bandwidth(model)
    kinds = {"two stages": HiddenCache, "direct": Direct, "direct to a file": DirectToFile}
    for running in (1, 4, 16):
        caches = {name: kind(4 * running + 8, link) for name, kind in kinds.items()}
        with engines_of(model, {"nothing": Cache(), **caches}, 256 * running) as engines:

            def tbt(engine, running=running) -> float:
                lesson.settle(engine)
                engine.evict("device")
                requests = engine.generate([Request(draw(rng, model, 32), new) for _ in range(running)])
                return statistics.mean(request.outcome.tbt_ms for request in requests)

            taken = lesson.in_turn({name: partial(tbt, engine) for name, engine in engines.items()}, rounds)
            counts = {name: engine.counts for name, engine in engines.items()}
        noted = "bytes_out", "copies_out", "dropped_chunks"
        ways = {name: dict(tbt_ms=spread(samples), **{what: counts[name][what] for what in noted})
                for name, samples in taken.items()}
        for name, base in [(name, base) for name in kinds for base in ("nothing", "two stages")]:
            ratios = [one / other for one, other in zip(taken[name], taken[base])]
            ways[name][f"tbt_over_{base}"] = spread(ratios)
        yield dict(running=running, new_tokens=new, ways=ways)


# 4. Other divisions ----------------------------------------------------------------------------

def naive_plan(layers: int, costs) -> str:
    """The best of recomputing and loading, without hidden states (section 6.3.1)."""
    plans = ["R" * recompute + "K" * (layers - recompute) for recompute in range(layers)]
    return min(plans, key=lambda plan: bubble_free.plan_seconds(plan, costs))


class TokenWise(PlannedCache):
    """Tokens are divided, not layers: in every layer those before `first` are recomputed, those from `last`
    on are loaded as K and V, and the others are projected. A layer is there when all of that is."""

    def __init__(self, chunks, bandwidth, layers: int, first: int, last: int):
        super().__init__(chunks, bandwidth, plan="H" * layers)
        self.first, self.last, self.front = first, last, None

    def adopt(self, letters):
        """Keep everything: what comes back of it is what is divided."""
        layers = range(len(letters))
        self.chunks = self.chunk_budget // (CHUNK * hidden_states.bytes_per_token(self.model))
        self.keep(layers[1:], "tokens", [(layer, side) for layer in layers for side in (0, 1)])
        self.store.letters, states = letters, len(self.layers)
        self.store.rows = [part.flatten(0, 1) for part in self.store.parts]
        self.store.parts_of = {layer: [states + 2 * layer, states + 2 * layer + 1] for layer in layers}

    def restore(self, request, restoration, match):
        self.request, model = request, self.model
        with torch.inference_mode():
            front = Request(request.tokens[: self.first], 1, table=request.table)
            tokens = torch.tensor(front.tokens, dtype=torch.long, device=model.device)
            self.front = model.embed(tokens)  # [first, D]
            if self.first:
                self.batch = paged.Batch(self.pool, [(front, self.first)])
                self.rotation = model.rotary(self.batch.positions)  # [T, 1, hd] each
        try:
            yield from HiddenCache.restore(self, request, restoration, match)
        finally:
            self.front = None

    def fetch(self, part, numbers, label):
        """Order the rows of a layer's states that are projected, behind the K and V that are loaded."""
        if self.last < CHUNK * len(numbers):
            runs = self.runs(self.request, numbers[self.last // CHUNK :], self.last, CHUNK * len(numbers))
            self.fetch_kv(int(label.split()[1]), self.store, runs, label)  # one lane: it is there before
        landed = torch.empty(len(numbers), *part.shape[1:], dtype=part.dtype, device=self.model.device)
        into, out_of = [], []
        for index, number in enumerate(numbers):
            rows = slice(max(0, self.first - CHUNK * index), max(0, self.last - CHUNK * index))
            if rows.start < min(CHUNK, rows.stop):
                into.append(landed[index, rows])  # [n, D]
                out_of.append(part[number, rows])
        transfer = self.load_link.copy(into, out_of, label)
        self.counts["bytes_in"] += transfer.bytes
        return landed.flatten(0, 1), transfer

    @torch.inference_mode()
    def project(self, layer, hidden, positions, slots):
        if self.front is None:  # it is being measured
            return super().project(layer, hidden, positions, slots)
        if self.first and layer + 1 < len(self.model.layers):
            attend = self.batch.attend(layer)
            self.front = self.model.layers[layer](self.front, self.rotation, attend)  # [first, D]
        elif self.first:
            super().project(layer, self.front, positions[: self.first], slots[: self.first])
        rows = slice(self.first, self.last if layer else None)  # the embedding is there, of all tokens
        if len(hidden[rows]):
            super().project(layer, hidden[rows], positions[rows], slots[rows])


def planned_engine(model, tokens: int, share: float):
    """Chapter 05 over a link on which a layer's states take `share` times as long to transfer as to project,
    as it measures that itself: within 10 %, or after five tries as it is -> its engine, and the costs."""
    for left in reversed(range(5)):
        cache = PlannedCache(chunks_of(tokens), modelled(model, even_speed(model, tokens) / share))
        engine = paged.Engine(paged.Runner(model, tokens // 8 + 32), cache, always_restore=True)
        costs = cache.costs(0, tokens)
        if not left or not cache.load_link.modelled or 0.9 < costs.load_states / costs.project / share < 1.1:
            return engine, costs
        engine.close()


def divisions(model, tokens: int, rounds: int):
    rng, layers, chunks = random.Random(0), len(model.layers), chunks_of(tokens)
    for words, share in LINKS.items() if modelled(model, 1.0) else [("the link as it is", 1.0)]:
        planned, costs = planned_engine(model, tokens, share)
        speed = planned.cache.bandwidth
        others = {"closed form": bubble_free.closed_form(layers, costs), "naive": naive_plan(layers, costs)}
        plans = {"05": planned.cache.store.letters, **others, "04": "R" + "H" * (layers - 1)}
        plans["03"] = "K" * layers
        splits = {name: token_wise(costs, layers, tokens, step)
                  for name, step in {"tokens": 1, "tokens, rounded": TILE}.items()}
        caches = {name: PlannedCache(chunks, speed, plan=letters) for name, letters in others.items()}
        caches |= {"04": HiddenCache(chunks, speed), "03": offload.HostCache(tokens // 8, speed)}
        caches |= {name: TokenWise(chunks, speed, layers, *split) for name, split in splits.items()}
        with engines_of(model, caches, tokens) as engines:
            ways = compare({"05": planned, **engines}, draw(rng, model, tokens), rounds, rng, "05", "03")
        planned.close()
        for name, letters in plans.items():
            ways[name] |= dict(plan=letters, predicted_ms=1e3 * bubble_free.plan_seconds(letters, costs))
        for name, (first, last) in splits.items():
            ways[name]["plan"] = f"{first} R, {last - first} H, {tokens - last} K"
        yield dict(history_tokens=tokens, link=words, ways=ways, gbps=planned.cache.load_link.speed() / 1e9,
                   transfer_over_projecting=costs.load_states / costs.project, said=share,
                   costs_ms={name: 1e3 * cost for name, cost in costs._asdict().items()},
                   bound_ms=1e3 * bubble_free.bound_seconds(layers, costs))


# 5. Directories --------------------------------------------------------------------------------

def throttled(directories: list[Path], speed: float) -> StoredChunks:
    """Files that each directory reads at most at `speed` bytes/s."""
    speed = links.Bandwidth(speed)
    return StoredChunks(*(Storage(Directory(str(path), 100), str(path), speed) for path in directories))


def directories(model, tokens: int, rounds: int):
    rng, layers, even = random.Random(0), len(model.layers), even_speed(model, tokens)
    with engines_of(model, {"": PlannedCache(1, modelled(model, PCIE * even))}, tokens) as engines:
        linked, link = engines[""].cache.costs(0, tokens), engines[""].cache.load_link.speed()
    for count in (1, 2, 4):
        slower = link / min(link, count * SSD * even)
        costs = linked._replace(load_states=slower * linked.load_states, load_kv=slower * linked.load_kv)
        # Chapter 05's planner knows the link, and not how fast files are: it is told
        plans = {"03": "K" * layers, "04": "R" + "H" * (layers - 1)}
        plans["05"] = bubble_free.best_plan(layers, costs)
        with tempfile.TemporaryDirectory() as folder:
            caches = {}
            for name, letters in plans.items():
                stored = throttled([Path(folder) / name / str(number) for number in range(count)], SSD * even)
                caches[name] = PlannedCache(chunks_of(tokens), modelled(model, PCIE * even), stored, letters)
            with engines_of(model, caches, tokens) as engines:
                ways = compare(engines, draw(rng, model, tokens), rounds, rng, "03", pools=["device", "host"])
        for name, letters in plans.items():
            ways[name] |= dict(plan=letters, predicted_ms=1e3 * bubble_free.plan_seconds(letters, costs),
                               read_gbps=statistics.median(caches[name].store.speeds) / 1e9)
        yield dict(history_tokens=tokens, directories=count, gbps_each=SSD * even / 1e9, link_gbps=link / 1e9,
                   reading_over_projecting=costs.load_states / costs.project, ways=ways)


# 6. From which length on restoring is the faster -----------------------------------------------

def crossing(points: list[tuple[int, float]]) -> float | None:
    """(tokens, how much longer restoring takes than computing), by length -> the length from which it is the
    faster at all that follow, interpolated; the first one if always, None if not at the last."""
    found, before = None, None
    for tokens, longer in points:
        if longer > 0:
            found = None
        elif found is None:
            found = tokens
            if before:
                found -= (tokens - before[0]) * longer / (longer - before[1])
        before = tokens, longer
    return found


def crossover(model, tokens: int, rounds: int):
    rng, lengths = random.Random(0), sorted({64, 128, 256, 512, tokens})
    history, speeds = draw(rng, model, tokens), {"the link as it is": None}
    if modelled(model, 1.0):
        with engines_of(model, {"": offload.HostCache(1, 1e9)}, tokens) as engines:
            kv = 512 * model.config.kv_numbers_per_token * model.dtype.itemsize
            even = kv / engines[""].restorer.seconds_to_compute(0, 512)
        speeds = {"like an A100's": links.bandwidth(model).value, "even with computing at 512 tokens": even}
    for words, speed in speeds.items():
        caches = {"03": offload.HostCache(tokens // 8, speed), "04": HiddenCache(chunks_of(tokens), speed),
                  "05": PlannedCache(chunks_of(tokens), speed)}
        measured = {name: [] for name in caches}
        with engines_of(model, {**caches, "computed": Cache()}, tokens) as engines:
            for engine in engines.values():
                once(engine, history)
            for length in lengths:
                ways = compare(engines, history[:length], rounds, rng)
                computed = ways.pop("computed")
                for name, way in ways.items():
                    request = Request(history[:length] + [300], 1)
                    engines[name].extend(request)
                    estimate = caches[name].match(request).seconds
                    compute = engines[name].restorer.seconds_to_compute(0, length)
                    measured[name].append(dict(
                        way, history_tokens=length, computed_ttft_ms=computed["ttft_ms"]["median"],
                        restored_per_second=1e3 * length / way["restore_ms"]["median"],
                        computed_per_second=1e3 * length / computed["restore_ms"]["median"],
                        estimated_ms=[1e3 * estimate, 1e3 * compute]))
        for name, rows in measured.items():
            longer = [row["ttft_ms"]["median"] - row["computed_ttft_ms"] for row in rows]
            said = [row["estimated_ms"][0] - row["estimated_ms"][1] for row in rows]
            yield dict(chapter=name, link=words, gbps=caches[name].load_link.speed() / 1e9, lengths=rows,
                       plan=caches[name].store.letters if name == "05" else None,
                       faster_from=dict(measured=crossing(list(zip(lengths, longer))),
                                        estimated=crossing(list(zip(lengths, said)))))


# 7. Main ---------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (layouts, saving, divisions, directories, crossover)}


def main():
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--only", choices=PARTS, nargs="+")
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--histories", type=cli.bounded(int, 256, 1 << 20), nargs="+", help="tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments, found = parser.parse_args(), []
    for name in [arguments.model] if arguments.model else MODELS:
        model, *_ = checkpoint.load(name, arguments.dtype, arguments.device)
        set_imports_aside()
        for part in arguments.only or PARTS:
            found.append(dict(claim=part, model=name, rows=[]))
            for tokens in arguments.histories or MODELS.get(name, [1024]):
                for row in PARTS[part](model, tokens // CHUNK * CHUNK, arguments.rounds):
                    print(part, name, row, "\n", flush=True)
                    found[-1]["rows"].append(row)
    write("variants", model.device.type, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
