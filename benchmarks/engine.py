"""Measure chapters 02 and 03; compared systems run in turn.

    python -m benchmarks.engine                                   all; results in benchmarks/results/
    python -m benchmarks.engine --only burst --model classroom

throughput   16 requests at once, each 32 tokens of prompt and 32 of answer, against the same in chapter 01,
             one by one.
host         TTFT behind a history in host memory, beside a history on the device and a computed one. The
             bound of a restoration is its bytes over the link's bandwidth. The bound of TTFT is the longer of
             that time and of the TTFT of a device hit, plus one layer's share of the shorter one.
burst        30 questions at once about one document of 1,024 tokens that the device has evicted: it is
             restored once (03) or computed once (02).
capacity     how many different blocks a device of 64 and a host of 256 hold. The text behind chapter 03 adds
             them up: 320. Chapter 03 keeps a copy of each block of the device in host memory.
bits         decoding and prefill with --same-bits, over the same without it; on a processor only.
same         with --same-bits: logits of two turns of four conversations, the second one restored, that equal
             those of chapter 01.
"""

import random
import statistics
import time
from functools import partial

from benchmarks import measure, planned, tables
from benchmarks.measure import draw, ratio, spread, ttft
from benchmarks.planned import offload, paged
from common.requests import Request
from shell import checkpoint, hardware, lesson

HISTORIES = 1024, 1984  # tokens
QUESTION, DOCUMENT, CROWD = 32, 1024, 30  # tokens, tokens, requests
# Requests at once, tokens of each prompt and of each answer
COST = (1, 60, 24), (1, 500, 24), (1, 900, 24), (16, 60, 24), (16, 400, 12), (1, 512, 1), (1, 1000, 1)


def engine_of(model, tokens: int, restoring: bool = True):
    """Return an engine with room for `tokens` on the device. With `restoring` it has chapter 03's host memory
    for twice as many, and restores every hit."""
    blocks = -(-tokens // 16)
    cache = offload.HostCache(2 * blocks, hardware.bandwidth(model)) if restoring else None
    return planned.engine_of(model, blocks, cache, always=True)


def throughput(model, arguments):
    """Yield one row: tokens per second of chapters 01 and 02."""
    engines = {"01": paged.baseline.Engine(model), "02": engine_of(model, 16 * 64, restoring=False)}
    rng = random.Random(0)

    def rate(which: str) -> float:
        prompts, engine = [draw(rng, model, 32) for _ in range(16)], engines[which]
        began = time.perf_counter()
        for group in [prompts] if which == "02" else [[prompt] for prompt in prompts]:
            engine.generate([Request(prompt, 32) for prompt in group])
        return 16 * 32 / (time.perf_counter() - began)

    taken = lesson.in_turn({which: partial(rate, which) for which in engines}, arguments.rounds)
    yield dict(tokens_per_second={which: spread(samples) for which, samples in taken.items()},
               ratio=ratio(taken["02"], taken["01"]))  # fmt: skip


def host(model, arguments):
    """Yield a row for each length of history: TTFT of a host hit, a device hit, and computing."""
    rng = random.Random(0)
    for length in HISTORIES:
        engine, history = engine_of(model, 3 * 2048), draw(rng, model, length)
        size = length // 16 * engine.pool.block_bytes
        lesson.ask(engine, history)

        def hit(evict: str, engine=engine, history=history) -> Request:
            lesson.wait_until_idle(engine)
            time.sleep(0.2)  # as if the request came after a pause
            return lesson.ask(engine, history + draw(rng, model, QUESTION), 1, evict)

        def computed(engine=engine, length=length) -> Request:
            prompt = draw(rng, model, length + QUESTION)
            return engine.generate([Request(prompt, 1, options=dict(offload_after=False))])[0]

        ways = {"host": partial(hit, "device"), "device": partial(hit, ""), "computed": computed}
        taken = lesson.in_turn(ways, arguments.rounds)
        link = engine.lower_tier.cache.load_link
        speed = link.bandwidth.value if link.modelled else link.speed()
        link_ms, loaded, direct, layers = 1e3 * size / speed, ttft(taken["host"]), ttft(taken["device"]), len(model.layers)
        computed_ms = ttft(taken["computed"])
        yield dict(
            history=length, bytes_restored=size, link_gbps=speed / 1e9, link_ms=link_ms,
            ttft_ms=spread(loaded), device_hit_ms=spread(direct), computed_ms=spread(computed_ms),
            over_computing=ratio(loaded, computed_ms), over_device=ratio(loaded, direct), computed_over_device=ratio(computed_ms, direct),
            computed_over_link=statistics.median(computed_ms) / link_ms, block_ms=16 * link_ms / length,
            ttft_over_bound_ms=spread([ms - max(link_ms + hit / layers, hit + link_ms / layers) for ms, hit in zip(loaded, direct)]))  # fmt: skip
        engine.close()


def burst(model, arguments):
    """Yield a row for chapters 02 and 03: mean TTFT of a crowd that asks about one evicted document."""
    rng, room = random.Random(0), 2 * (DOCUMENT + CROWD * 2 * QUESTION)
    for chapter in ("02", "03"):
        engine, document = engine_of(model, room, restoring=chapter == "03"), draw(rng, model, DOCUMENT)
        lesson.ask(engine, document)

        def crowd(evict: str, engine=engine, document=document) -> tuple[float, int]:
            lesson.wait_until_idle(engine, evict)
            before = engine.counts["bytes_in"]
            asked = engine.generate([Request(document + draw(rng, model, QUESTION), 1) for _ in range(CROWD)])
            return statistics.mean(ttft(asked)), engine.counts["bytes_in"] - before

        def alone(engine=engine, document=document) -> tuple[float, int]:
            return lesson.ask(engine, document + draw(rng, model, 1), 1, "device").ttft_ms, 0

        ways = {"evicted": partial(crowd, "device"), "device": partial(crowd, ""), "one": alone}
        taken = lesson.in_turn(ways, arguments.rounds)
        evicted, device, one = ([ms for ms, _ in each] for each in taken.values())
        yield dict(chapter=chapter, bytes_restored=taken["evicted"][-1][1], ratio=ratio(evicted, list(map(sum, zip(device, one)))))
        engine.close()


def capacity(model, arguments, on_device: int = 64, on_host: int = 256):
    """Yield one row: the different blocks that are found after twice as many were computed."""
    engine, rng = planned.engine_of(model, on_device, offload.HostCache(on_host, hardware.bandwidth(model))), random.Random(0)
    for _ in range(2 * (on_device + on_host) // 32):
        lesson.ask(engine, draw(rng, model, 32 * 16))
    lesson.wait_until_idle(engine)
    found = set().union(*(pool.block_of for pool in engine.pools.values()))
    yield dict(on_device=on_device, on_host=on_host, different=len(found))
    engine.close()


def same(model, arguments):
    """Yield a row for each of chapters 02 to 05; 05 has a plan of all three ways."""
    model, *_ = checkpoint.load(arguments.name, str(model.dtype)[6:], arguments.device, same_bits=True)
    third, rng, link, observe = len(model.layers) // 3, random.Random(0), hardware.bandwidth(model), Request.observe
    plan, alone = "R" * third + "H" * third + "K" * (len(model.layers) - 2 * third), paged.baseline.Engine(model)
    caches = {"02": None, "03": offload.HostCache(256, link), "04": planned.hidden_states.HiddenCache(256, link),
              "05": planned.planned.PlannedCache(256, link, plan=plan)}  # fmt: skip
    Request.observe = lesson.keep_logits
    try:
        for chapter, cache in caches.items():
            engine, talks, asked = planned.engine_of(model, 256, cache, always=True), [draw(rng, model, 90 + 37 * talk) for talk in range(4)], []
            for _ in range(2):
                asked += (turn := engine.generate([Request(talk, 8) for talk in talks]))
                talks = [request.tokens + draw(rng, model, 9) for request in turn]
                lesson.wait_until_idle(engine, "device")
            again = alone.generate([Request(ours.tokens[: ours.prompt_tokens], 8) for ours in asked])
            rows = [both for ours, theirs in zip(asked, again) for both in zip(ours.logits, theirs.logits)]  # [V] each
            yield dict(chapter=chapter, bytes_restored=engine.counts["bytes_in"], compared=sum(len(ours) for ours, _ in rows),
                       equal=sum(int((ours == theirs).sum()) for ours, theirs in rows))  # fmt: skip
            engine.close()
    finally:
        Request.observe = observe


def bits(model, arguments):
    """Yield a row for each case: times of a model with --same-bits over those of the same model without it."""
    rng, asked = random.Random(0), (arguments.name, str(model.dtype)[6:], arguments.device)
    models = {"without": model, "with": checkpoint.load(*asked, same_bits=True)[0]}

    def taken_ms(which: str, requests: int, tokens: int, new: int) -> float:
        engine = engine_of(models[which], requests * (tokens + new + 16), restoring=False)
        answered = engine.generate([Request(draw(rng, model, tokens), new) for _ in range(requests)])
        return statistics.median(one.tbt_ms or one.ttft_ms for one in answered)

    for case in COST if model.device.type == "cpu" else ():
        taken = lesson.in_turn({which: partial(taken_ms, which, *case) for which in models}, arguments.rounds)
        yield dict(zip(("requests", "tokens", "new"), case), ms=spread(taken["without"]), ratio=ratio(taken["with"], taken["without"]))


PARTS = {part.__name__: (part, ["classroom"]) for part in (throughput, burst, capacity, bits, same)}
PARTS["host"] = host, ["classroom", "random:long"]


def report(found: list[dict]) -> str:
    burst = tables.grouped(tables.rows(found, "burst"), ("chapter",), "model")
    many = [f"16 requests at once, against one after another in chapter 01 ({row['model']}): "
            f"{tables.with_spread(row['ratio'], 'x')} the tokens per second."
            for row in tables.rows(found, "throughput")]  # fmt: skip
    kept = [f"A device of {row['on_device']} blocks and a host of {row['on_host']} hold {row['different']} different ones (the text behind 03: the sum)."
            for row in tables.rows(found, "capacity")]  # fmt: skip
    return tables.paragraphs(
        *many, *kept,
        tables.table(
            "**The same bits** ({model}, `--same-bits`): logits of restored conversations that equal those of chapter 01.",
            {"chapter": "{chapter}", "restored": "{bytes_restored:MB}", "equal, of": "{equal:,} of {compared:,}"}, tables.rows(found, "same")),
        tables.table(
            "**What `--same-bits` costs**: milliseconds per token, or of a prefill, and the ratio with the option.",
            {"model": "{model}", "requests at once": "{requests}", "behind": "{tokens:,}", "tokens": "{new}",
             "without": "{ms:ms}", "with / without": "{ratio:spread}"}, tables.rows(found, "bits")),
        tables.table(
            "**30 questions at once about one document** of 1,024 tokens, which 02 computes and 03 restores once: their mean TTFT "
            "over the sum of their mean TTFT with the document on the device and the TTFT of one question alone.",
            {"chapter": "{chapter}", **tables.across(burst, {"": "{ratio:spread}"})}, burst),
        tables.table(
            "**A question behind a history in host memory** (03). HCache, Figure 4: computing takes 20 to 26 times as long as a history "
            "on the device, and K and V from storage 6.5 to 13 times. The text behind chapter 03 has 170 ms on the device, 180 ms in "
            "host memory and 285 ms computed; a copy of 0.1 ms for each block; and computing 32 tokens takes 500 times as long as copying them.", {
            "model, history": "{model}, {history:,}", "restored": "{bytes_restored:MB}", "link, GB/s": "{link_gbps:.3f}",
            "TTFT": "{ttft_ms:ms}", "on the device": "{device_hit_ms:ms}",
            "computed": "{computed_ms:ms}", "TTFT / computed": "{over_computing:spread}", "TTFT / on the device": "{over_device:spread}",
            "computed / on the device": "{computed_over_device:spread}", "link": "{link_ms:ms}",
            "TTFT - bound, ms": "{ttft_over_bound_ms:spread}", "a block": "{block_ms:ms}", "computed / link": "{computed_over_link:n}",
        }, tables.rows(found, "host")))  # fmt: skip


if __name__ == "__main__":
    measure.run("engine", PARTS, report, measure.parser(__doc__, PARTS, rounds=5).parse_args())
