"""What the benchmarks of the chapters share that still stand on the frozen copies in legacy/: a model with prompts of random tokens,
timing, and the command line. (Chapters 02 and 03 themselves: benchmarks/engine.py.)"""
import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint  # noqa: E402
from legacy import app, baseline, paged  # noqa: E402

CHUNK = 128                                     # tokens, a multiple of those of all chapters' chunks


class Bench:
    """A model, both engines on it without an end of text, and prompts of random tokens."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None):
        self.name, self.rounds, self.histories, self.rng = name, rounds, histories, random.Random(0)
        self.model, self.tokenizer, _ = checkpoint.load(name, dtype, device)
        self.alone = baseline.Engine(self.model, self.tokenizer, frozenset())

    def engine(self, **options):
        return paged.Engine(self.model, self.tokenizer, frozenset(), **options)

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(5, self.model.config.vocab_size) for _ in range(tokens)]


def timed(what, *arguments, **named):
    """Call it -> seconds, what it returned."""
    began = time.perf_counter()
    result = what(*arguments, **named)
    return time.perf_counter() - began, result


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: '1024,2048' -> tokens, the shortest first; whole chunks of every chapter."""
    found = tuple(sorted({app.bounded(int, CHUNK, 1 << 20)(part) for part in text.split(",")}))
    if any(tokens % CHUNK for tokens in found):
        raise argparse.ArgumentTypeError(f"{text!r} are not multiples of {CHUNK}")
    return found


def parser_for(benchmark: str, doc: str, models: dict[str, list[str]], options: dict[str, dict]) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line; `options` is what it takes beside what all take: option -> argparse's words."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=models, help="only this claim")
    parser.add_argument("--model", help="only on this model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=5)
    parser.add_argument("--histories", type=lengths, metavar="TOKENS,...", help="only these lengths, in tokens")
    parser.add_argument("--json", type=Path, help=f"where the results go (default benchmarks/results/{benchmark}-DEVICE.json)")
    for option, words in options.items():
        parser.add_argument(option, **words)
    return parser


def run(benchmark: str, doc: str, models: dict[str, list[str]], claims: dict, bench_on, show,
        options: dict[str, dict] | None = None):
    """The command line of a benchmark. models: claim -> the models it is measured on; claims: claim -> its function of a
    Bench; bench_on(name, dtype, device, rounds, histories) -> the Bench, which gets what was asked of `options` by name."""
    arguments = parser_for(benchmark, doc, models, options or {}).parse_args()
    set_imports_aside()
    more, found = {name: getattr(arguments, name) for name in (option.removeprefix("--") for option in options or ())}, []
    for what, names in models.items():
        for name in [arguments.model] if arguments.model else names:
            if arguments.only in (None, what):
                with one_sentence():
                    device = checkpoint.pick_device(arguments.device)
                    bench = bench_on(name, arguments.dtype, device, arguments.rounds, arguments.histories, **more)
                found.append({"claim": what, "model": name, **claims[what](bench)})
                show(what, name, found[-1])
                write(benchmark, device, arguments.json, dtype=arguments.dtype, rounds=arguments.rounds, found=found)
                del bench
