"""Chapter 02 against chapter 01 and against `transformers`, each pair interleaved in one run.

    python -m benchmarks.paged                                    all; results in benchmarks/results/
    python -m benchmarks.paged --only throughput --model classroom

Claims, each with its own function below:
    tbt          one sequence at 2,048 tokens of context: at most 1.10 times chapter 01's TBT on random:tinyllama, 1.3
                 times on random:small. Measured token by token in turn, for blocks in one run, for a prefix shared
                 with an earlier request (two runs), and for blocks scattered over the pool.
    throughput   16 requests of 32 tokens in and 64 out: at least 5 times the tokens per second of chapter 01 one after
                 another, and at least those of `transformers` generate on the same prompts as one batch.
    waste        of the demo's 32 conversations in blocks of 16: under 4 %.
    hit          TTFT of a question behind a cached system prompt of 1,024 tokens: at least 8 times lower.
    allocator    what a step costs besides the model, at 64 running requests: under 50 microseconds a request; and
                 admission, which must not grow with the number of cached blocks.
    host         scheduling, building the batch, drawing tokens and writing text: under 10 % of a decode step of classroom, in
                 chapter 01 and with 1, 4 and 16 requests in chapter 02; and what tokenising a prompt takes, in such steps.

--histories sets the context of `tbt` and the system prompt of `hit`, the longest of them.
"""
import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, reference_model, set_imports_aside  # noqa: E402
from common import checkpoint  # noqa: E402
from legacy import app, baseline, paged  # noqa: E402

MODELS = {"tbt": ["random:tinyllama", "random:small"], "throughput": ["classroom", "random:tinyllama"],
          "waste": ["classroom"], "hit": ["classroom", "random:small"], "allocator": ["random:tiny"],
          "host": ["classroom"]}
CHUNK = 128                                     # tokens, a multiple of those of all chapters' chunks
MOST_TBT = {"random:tinyllama": 1.10, "random:small": 1.3}


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


def tbt(bench: Bench, new: int = 33) -> dict:
    context = min(bench.model.config.max_position_embeddings, max(bench.histories or (1 << 30,)))
    prompt, cases = bench.prompt(context - new), {}
    engine = bench.engine(blocks=3 * context // 16)
    for case in ("one run", "shared prefix", "scattered"):
        if case == "scattered":
            engine = bench.engine(blocks=3 * context // 16)
            order = list(engine.pool.free)
            bench.rng.shuffle(order)
            engine.pool.free = type(engine.pool.free).fromkeys(order)
        pieces = bench.alone.stream(prompt=prompt, max_tokens=new)
        next(pieces)                                            # prefill, and the first token
        request, = engine.submit(prompt=prompt, max_tokens=new)
        while not request.answer.tokens:
            assert engine.step(), request.outcome               # or it has failed
        theirs, ours = [], []
        for _ in range(new - 1):
            theirs.append(timed(next, pieces)[0] * 1e3)
            ours.append(timed(engine.step)[0] * 1e3)
        *_, result = pieces
        assert result.tokens == request.outcome.tokens or bench.model.dtype != torch.float32, "the tokens differ"
        ratio = spread([b / a for a, b in zip(theirs, ours)])
        cases[case] = dict(contiguous_ms=spread(theirs), paged_ms=spread(ours), ratio=ratio)
    return dict(context=context, new_tokens=new, at_most=MOST_TBT.get(bench.name), cases=cases)


def throughput(bench: Bench, requests: int = 16, tokens: int = 32, new: int = 64) -> dict:
    reference = reference_model(bench.name, bench.model.dtype, bench.model.device.type)
    reference.generation_config.eos_token_id = None
    engine, rates, same = bench.engine(blocks=2 * requests * (tokens + new) // 16), {}, 0
    for number in tqdm(range(bench.rounds + 1), desc=f"throughput {bench.name}", unit="round"):
        prompts = [bench.prompt(tokens) for _ in range(requests)]
        batch = torch.tensor(prompts, device=bench.model.device)                                # [B, T]
        some = prompts[:4]                                      # one after another, four tell as much as sixteen
        alone, results = timed(lambda some: [bench.alone.generate(prompt=prompt, max_tokens=new) for prompt in some], some)
        together, run = timed(paged.run_together, engine, [dict(prompt=prompt, max_tokens=new) for prompt in prompts])
        padded, _ = timed(reference.generate, batch, attention_mask=torch.ones_like(batch), max_new_tokens=new,
                          min_new_tokens=new, do_sample=False, pad_token_id=0)
        if number:                                              # the first is the warm-up
            for what, seconds, answers in (("chapter 01", alone, len(some)), ("chapter 02", together, requests),
                                           ("transformers", padded, requests)):
                rates.setdefault(what, []).append(answers * new / seconds)
            same += sum(one.tokens == request.outcome.tokens for one, request in zip(results, run.requests))
    ratio = {what: spread([a / b for a, b in zip(rates["chapter 02"], rates[what])]) for what in ("chapter 01", "transformers")}
    return dict(requests=requests, prompt_tokens=tokens, new_tokens=new,
                tokens_per_second={what: spread(taken) for what, taken in rates.items()}, ratio=ratio,
                at_least={"chapter 01": 5, "transformers": 1}, equal_answers=same, compared=4 * bench.rounds)


def waste(bench: Bench) -> dict:
    engine, rng = bench.engine(token_budget=1 << 20), random.Random(0)
    mix = [paged.conversation(engine, rng, engine.context // (24, 12, 6, 4)[number % 4]) for number in range(paged.CONVERSATIONS)]
    run = paged.run_together(engine, [dict(messages=messages, max_tokens=32) for messages in mix])
    slots = run.held * engine.pool.block_size
    return dict(conversations=len(mix), tokens=run.tokens, slots=slots, waste=1 - run.tokens / slots, at_most=0.04,
                contiguous_waste=1 - run.tokens / (len(mix) * engine.context))


def hit(bench: Bench, system: int = 1024, question: int = 16) -> dict:
    room = (bench.model.config.max_position_embeddings - question - 1) // CHUNK * CHUNK
    system = min(max(bench.histories or (system,)), room)
    engine, shared, hits, misses = bench.engine(), bench.prompt(system), [], []
    for number in range(bench.rounds + 1):
        asked = dict(prompt=shared + bench.prompt(question), max_tokens=1)
        miss, = paged.run_together(engine, [dict(asked, cache_salt=str(number))]).requests
        cached, = paged.run_together(engine, [asked]).requests
        if number:                                              # the first fills the cache
            assert cached.cached_tokens == system and miss.cached_tokens == 0
            hits.append(cached.outcome.ttft_ms)
            misses.append(miss.outcome.ttft_ms)
    return dict(system_tokens=system, question_tokens=question, hit_ms=spread(hits), miss_ms=spread(misses),
                ratio=spread([b / a for a, b in zip(hits, misses)]), at_least=8)


def host(bench: Bench, context: int = 512, steps: int = 60) -> dict:
    """A decode step less its forward pass."""
    rows, alone = [], bench.alone
    for running in (0, 1, 4, 16):                               # 0: chapter 01
        forwards, engine = [], bench.engine(blocks=running * (context // 16 + steps // 16 + 2)) if running else alone
        engine.forward = noting(engine.forward, forwards)
        prompts = [bench.prompt(context) for _ in range(max(1, running))]
        if running:
            requests, step = [engine.submit(prompt=prompt, max_tokens=steps + 9)[0] for prompt in prompts], engine.step
            while not all(request.answer.tokens for request in requests):
                assert engine.step(), requests[0].outcome       # or they have failed
        else:
            pieces = engine.stream(prompt=prompts[0], max_tokens=steps + 9)
            step = partial(next, pieces)
            step()                                              # prefill, and the first token
        forwards.clear()
        whole = [timed(step)[0] for _ in range(steps)][5:]
        own = [seconds - forward for seconds, forward in zip(whole, forwards[5:])]
        rows.append(dict(chapter="02" if running else "01", running=max(1, running),
                         step_ms=spread([each * 1e3 for each in whole]), own_us=spread([each * 1e6 for each in own]),
                         share=spread([a / b for a, b in zip(own, whole)])))
        del engine.forward
    text = " ".join(baseline.TURNS) * 4
    taken = [timed(bench.alone.encode, None, [dict(role="user", content=text)]) for _ in range(bench.rounds + 1)][1:]
    return dict(context=context, rows=rows, at_most=0.10, tokenising=dict(
        tokens=len(taken[0][1][0]), ms=spread([seconds * 1e3 for seconds, _ in taken])))


def noting(what, samples: list):
    """`what`, which also notes the seconds of each call in `samples`."""
    def call(*arguments):
        seconds, result = timed(what, *arguments)
        samples.append(seconds)
        return result
    return call


def allocator(bench: Bench, running: int = 64, steps: int = 100) -> dict:
    """The model is left out: logits are zeros. A step's cost is then all that happens on the host besides it."""
    report = {}
    for context in (32, 384):
        engine = bench.engine(blocks=running * (context + steps) // 16 + running, max_running=running)
        engine.forward = lambda batch: torch.zeros(len(batch.last_rows), bench.model.config.vocab_size)
        requests = [engine.submit(prompt=bench.prompt(context), max_tokens=steps)[0] for _ in range(running)]
        while not all(request.answer.tokens for request in requests):
            assert engine.step(), requests[0].outcome           # or they have failed
        scheduling, whole = [], []
        engine.schedule = noting(engine.schedule, scheduling)
        while len(engine.running) == running and len(whole) < steps // 2:
            whole.append(timed(engine.step)[0])
        per_request = [[seconds / running * 1e6 for seconds in samples] for samples in (scheduling, whole)]
        report[f"{context} tokens of context"] = dict(
            scheduling_us=spread(per_request[0]), step_without_model_us=spread(per_request[1]))
    admission = {}
    for cached in (1 << 10, 1 << 13, 1 << 16):
        engine = bench.engine(blocks=cached + 64)
        engine.forward = lambda batch: torch.zeros(len(batch.last_rows), bench.model.config.vocab_size)
        root = engine.prefixes.salted("")
        for block in engine.pool.allocate(cached):
            engine.pool.register(block, engine.prefixes.extend(root, [block] * 16))
            engine.pool.release([block])
        samples = []
        for _ in range(200):
            request, = engine.submit(prompt=bench.prompt(40), max_tokens=1)
            samples.append(timed(engine.step)[0] * 1e6)
        admission[f"{cached} cached blocks"] = spread(samples)
    return dict(running=running, per_request_step=report, at_most_us=50, admission_us=admission)


def show(what: str, model: str, found: dict):
    def line(label, figures, unit=""):
        print(f"    {label:28}{figures['median']:10.2f}{unit}   ({figures['min']:.2f} to {figures['max']:.2f})")
    print(f"\n{what}, {model}")
    if what == "tbt":
        for case, figures in found["cases"].items():
            line(f"{case}, ratio to chapter 01", figures["ratio"])
        print(f"    claimed: at most {found['at_most']}")
    elif what == "throughput":
        for engine, figures in found["tokens_per_second"].items():
            line(engine, figures, " tokens/s")
        for engine, figures in found["ratio"].items():
            line(f"against {engine}", figures)
        print(f"    claimed: at least 5 and 1; {found['equal_answers']} of {found['compared']} answers equal chapter 01's")
    elif what == "waste":
        print(f"    {found['waste']:.1%} in blocks, claimed: at most 4 %; {found['contiguous_waste']:.1%} in reservations")
    elif what == "host":
        for row in found["rows"]:
            line(f"chapter {row['chapter']}, {row['running']} running: own", row["own_us"], " us")
            line("  share of the step", row["share"])
        line(f"tokenising {found['tokenising']['tokens']} tokens", found["tokenising"]["ms"], " ms")
        print(f"    claimed: under {found['at_most']:.0%}")
    elif what == "hit":
        line("TTFT hit", found["hit_ms"], " ms")
        line("TTFT miss", found["miss_ms"], " ms")
        line("ratio", found["ratio"])
        print("    claimed: at least 8")
    else:
        for context, figures in found["per_request_step"].items():
            line(context + ", scheduling", figures["scheduling_us"], " us")
            line(context + ", all", figures["step_without_model_us"], " us")
        for cached, figures in found["admission_us"].items():
            line("admission, " + cached, figures, " us")
        print("    claimed: at most 50 us per request and step; admission does not grow")
    sys.stdout.flush()


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


if __name__ == "__main__":
    run("paged", __doc__, MODELS, globals(), Bench, show)
