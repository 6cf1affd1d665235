"""Chapter 06: computing from the front while loading from the back, beside only computing and only loading.

    python -m benchmarks.bidirectional                                  all; results in benchmarks/results/
    python -m benchmarks.bidirectional --only grid --model classroom

Claims, each with its own function below:
    grid         a question of 16 tokens behind a history of 1,024 to 8,192 in storage. Loading takes 4, 2, 1 and 0.25 times as
                 long as computing does when nobody else computes; the request gets all of each step's token budget, a half, and
                 a tenth, and real requests take the rest. Both at once is never slower than the better of the two, but for the
                 run's noise, and at equal speeds with all of the budget at least 1.8 times faster; it takes at most 1.08 times
                 the bound, in which two opposite pointers over the measured costs of whole chunks meet. The reductions of TTFT
                 stand beside the paper's best: 68.1 % of only computing and 94.6 % of only loading.
    histories    on one device (as fast as computing 2,048 tokens, or the middle one of --histories), the share of chunks that is
                 computed falls as the history grows (Figure 5b).
    looking      to look whether the next chunk is there takes less than 1 % of computing one (Figure 7).
    eight_bit    the same at equal speeds with K and V in 8 bit: how much faster, and what is lost.

Every way has the same history, in turn. Storage is modelled: files that the operating system holds in memory, and then a
wait. Long histories have fewer rounds than --rounds, down to one: see ROUNDS, and `rounds` in the results. In the grid, computing
alone is measured before, which warms up.
"""
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import offload as offload_benchmark  # noqa: E402
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread  # noqa: E402

bidirectional = importlib.import_module("06_bidirectional")
CHUNK, QUESTION = 128, 16                                       # tokens
MODELS = {"looking": ["random:small", "classroom"], "eight_bit": ["classroom"], "histories": ["classroom"],
          "grid": ["classroom", "random:small"]}
HISTORIES = (1024, 2048, 4096, 8192)
SLOWNESS = (4.0, 2.0, 1.0, 0.25)                                # loading / computing
SHARES = (1.0, 0.5, 0.1)                                        # of each step's token budget
ROUNDS = {"classroom": {4096: 3, 8192: 2}, "random:small": {1024: 2, 2048: 1, 4096: 1, 8192: 1}}        # at most
OPTIONS = {"--share": dict(type=float, choices=SHARES, action="append", help="only with this share of each step's budget")}
# (share, slowness): on random:small a round of all cells of all histories would take two hours
CELLS = {("random:small", 2048): [(share, slowness) for share in SHARES[:2] for slowness in SLOWNESS],
         ("random:small", 4096): [(1.0, 1.0), (1.0, 0.25)], ("random:small", 8192): [(1.0, 1.0), (1.0, 0.25)]}


class Bench(offload_benchmark.Bench):
    """Engines over one directory, on memory that was touched before."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None,
                 share: list[float] | None = None):
        super().__init__(name, dtype, device, rounds, histories or HISTORIES, 2 * CHUNK)
        self.folder, self.shares = tempfile.TemporaryDirectory(prefix="benchmark-"), share or SHARES
        self.texts = {}

    def engine(self, longest: int | None = None, **options):
        longest = longest or self.histories[-1]
        engine = bidirectional.Engine(self.model, self.tokenizer, frozenset(), blocks=2 * longest // 16 + 256, block_size=16,
                                      chunk=CHUNK, directories=(Path(self.folder.name),), **options)
        for memory in (engine.pool.kv, engine.loader.buffers.memory, engine.writer.buffers.memory):
            memory.zero_()
        return engine

    def kept(self, engine, tokens: int) -> list[int]:
        """A history of so many tokens, in storage."""
        history = self.texts.setdefault(tokens, self.prompt(tokens))
        bidirectional.ask(engine, prompt=history + self.prompt(QUESTION), max_tokens=1)
        return history


def ask(engine, prompt: list[int], mode: str, share: float = 1.0):
    return bidirectional.ask(engine, share, prompt=prompt, max_tokens=1, mode=mode, save=False)


def computing(engine, prompt: list[int], rounds: int = 3) -> float:
    """-> seconds to compute all chunks of the prompt, when nobody else computes."""
    return statistics.median(bidirectional.seconds_computed(engine, ask(engine, prompt, "compute").restored)[-1]
                             for _ in range(rounds))


def as_slow(engine, tokens: int, seconds: float):
    """Storage that takes so long for so many tokens."""
    engine.loader.bandwidth = bidirectional.Bandwidth((tokens // CHUNK * engine.loader.chunk_bytes * 8 / 1e6 / seconds,))


def grid(bench: Bench) -> dict:
    engine, rows = bench.engine(), []
    for tokens in bench.histories:
        history, rounds = bench.kept(engine, tokens), min(bench.rounds, ROUNDS.get(bench.name, {}).get(tokens, bench.rounds))
        cells = CELLS.get((bench.name, tokens), [(share, slowness) for share in SHARES for slowness in SLOWNESS])
        cells = [cell for cell in cells if cell[0] in bench.shares]
        prompt, tokens_of = history + bench.prompt(QUESTION), set()
        compute_seconds = computing(engine, prompt, min(3, rounds))
        taken = {cell: [] for cell in cells}
        for _ in tqdm(range(rounds), desc=f"{bench.name} {tokens}", unit="round"):
            for share in dict.fromkeys(share for share, _ in cells):
                alone = ask(engine, prompt, "compute", share)
                computed = bidirectional.seconds_computed(engine, alone.restored)
                for cell in (cell for cell in cells if cell[0] == share):
                    as_slow(engine, tokens, cell[1] * compute_seconds)
                    loading, both = ask(engine, prompt, "load", share), ask(engine, prompt, "both", share)
                    tokens_of |= {tuple(request.outcome.tokens) for request in (alone, loading, both)}
                    loaded = bidirectional.seconds_loaded(loading.restored)
                    assert len(loaded) == len(computed) == tokens // CHUNK + 1, "a chunk was not where it should be"
                    report = both.outcome.restoration
                    taken[cell].append(dict(
                        compute=alone.outcome.ttft_ms, load=loading.outcome.ttft_ms, both=both.outcome.ttft_ms,
                        bound=bidirectional.meet(computed, loaded)[0] * 1e3, restoration=report["ms"],
                        computed=report["computed"]))
        assert len(tokens_of) == 1 or bench.model.dtype != torch.float32, "the tokens differ"
        for (share, slowness), samples in taken.items():
            def ratio(a, b, samples=samples):
                return spread([a(sample) / b(sample) for sample in samples])
            rows.append(dict(
                history_tokens=tokens, gpu_share=share, load_over_compute=slowness, rounds=rounds, chunks=tokens // CHUNK,
                mbps=tokens // CHUNK * engine.loader.chunk_bytes * 8 / 1e6 / (slowness * compute_seconds),
                **{f"{way}_ms": spread([sample[way] for sample in samples]) for way in ("compute", "load", "both")},
                restoration_ms=spread([sample["restoration"] for sample in samples]),
                computed_chunks=statistics.median(sample["computed"] for sample in samples),
                over_better=ratio(lambda s: min(s["compute"], s["load"]), lambda s: s["both"]),
                over_compute=ratio(lambda s: s["compute"], lambda s: s["both"]),
                over_load=ratio(lambda s: s["load"], lambda s: s["both"]),
                over_bound=ratio(lambda s: s["restoration"], lambda s: s["bound"])))
    reductions = {way: [1 - 1 / row[f"over_{way}"]["median"] for row in rows] for way in ("compute", "load")}
    return dict(link=str(engine.load_link), storage="modelled", chunk_tokens=CHUNK, question_tokens=QUESTION, rows=rows,
                reduction={way: dict(mean=statistics.mean(found), best=max(found)) for way, found in reductions.items()},
                at_least_at_equal_speeds=1.8, at_most_of_bound=1.08, paper=dict(compute=0.681, load=0.946))


def histories(bench: Bench) -> dict:
    engine, rows = bench.engine(), []
    middle = bench.histories[(len(bench.histories) - 1) // 2]
    history = bench.kept(engine, middle) + bench.prompt(QUESTION)
    as_slow(engine, middle, computing(engine, history))
    for tokens in bench.histories:
        prompt, found = bench.kept(engine, tokens) + bench.prompt(QUESTION), []
        for number in range(bench.rounds + 1):
            both, alone = ask(engine, prompt, "both"), ask(engine, prompt, "compute")
            if number:
                found.append((both.outcome.restoration["computed"] * CHUNK / tokens,
                              both.outcome.ttft_ms / alone.outcome.ttft_ms))
        rows.append(dict(history_tokens=tokens, computed_share=spread([share for share, _ in found]),
                         ttft_over_compute=spread([ratio for _, ratio in found])))
    return dict(link=str(engine.load_link), storage=engine.storage, as_fast_at_tokens=middle, rows=rows)


def looking(bench: Bench, tokens: int = 2048) -> dict:
    tokens = min(tokens, bench.histories[-1])
    engine, looks, steps = bench.engine(tokens), [], []
    prompt = bench.kept(engine, tokens) + bench.prompt(QUESTION)
    as_slow(engine, tokens, 4 * computing(engine, prompt))
    advance = engine.advance

    def timed(*arguments):
        began = time.perf_counter()
        found = advance(*arguments)
        looks.append((time.perf_counter() - began) * 1e6)
        return found
    engine.advance = timed
    for _ in range(bench.rounds):
        restoration = ask(engine, prompt, "both").restored
        steps += [(ended - began) * 1e6 * CHUNK / count for _, count, began, ended in restoration.steps]
    return dict(link=str(engine.load_link), look_us=spread(looks), chunk_us=spread(steps),
                share=statistics.median(looks) / statistics.median(steps), at_most=0.01)


def eight_bit(bench: Bench, tokens: int = 2048) -> dict:
    tokens = min(tokens, bench.histories[-1])
    exact, small, rows = bench.engine(tokens), bench.engine(tokens, kv_bits=8), []
    prompt = bench.kept(exact, tokens) + bench.prompt(QUESTION)
    bidirectional.ask(small, prompt=prompt, max_tokens=1)
    seconds = computing(exact, prompt)
    computed = bidirectional.kv_of(exact, prompt)
    ask(small, prompt, "load")
    error = (bidirectional.kv_of(small, prompt) - computed).abs().max().item()
    for slowness in SLOWNESS:
        as_slow(exact, tokens, slowness * seconds)
        small.loader.bandwidth = exact.loader.bandwidth
        ratios = [ask(exact, prompt, "both").outcome.ttft_ms / ask(small, prompt, "both").outcome.ttft_ms
                  for _ in range(bench.rounds + 1)][1:]
        rows.append(dict(load_over_compute=slowness, faster_than_exact=spread(ratios)))
    return dict(link=str(exact.load_link), rows=rows, chunk_bytes=[way.loader.chunk_bytes for way in (exact, small)],
                largest_kv_error=error, largest_kv=computed.abs().max().item())


def show(what: str, model: str, found: dict):
    def text(figures):
        return f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"
    print(f"\n{what}, {model} ({found['link']})")
    if what == "looking":
        print(f"    a look {text(found['look_us'])} us, a chunk {text(found['chunk_us'])} us: {found['share']:.3%}; claimed: "
              f"under {found['at_most']:.0%}")
    for row in found.get("rows", ()):
        if what == "histories":
            print(f"    {row['history_tokens']:5} tokens: {row['computed_share']['median']:.1%} computed, TTFT "
                  f"{text(row['ttft_over_compute'])} of only computing")
        elif what == "eight_bit":
            print(f"    loading / computing {row['load_over_compute']:4}: {text(row['faster_than_exact'])} times as fast")
        else:
            compute, load, both = (row[f"{way}_ms"]["median"] for way in ("compute", "load", "both"))
            print(f"    {row['history_tokens']:5} tokens, {row['rounds']} rounds, share {row['gpu_share']:3}, "
                  f"loading {row['load_over_compute']:4}: "
                  f"compute {compute:8.0f} ms, load {load:8.0f}, both {both:8.0f}: {text(row['over_better'])} times as fast as "
                  f"the better; {row['computed_chunks']:.0f} of {row['chunks']} computed; of the bound {text(row['over_bound'])}")
    if what == "eight_bit":
        print(f"    a chunk of {found['chunk_bytes'][1]} bytes, exact {found['chunk_bytes'][0]}; largest error "
              f"{found['largest_kv_error']:.2g}, largest K or V {found['largest_kv']:.2g}")
    for way, paper in found.get("paper", {}).items():
        reduction = found["reduction"][way]
        print(f"    TTFT less than only {way}: by {reduction['mean']:.1%} on average, {reduction['best']:.1%} at best; in the "
              f"paper {paper:.1%} at best")
    sys.stdout.flush()


if __name__ == "__main__":
    paged_benchmark.run("bidirectional", __doc__, MODELS, globals(), Bench, show, OPTIONS)
