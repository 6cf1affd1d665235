"""The command line that every chapter gets: the demo, one answer, or the server."""
import argparse
import json
import math
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from common import checkpoint, server
from common.requests import Frontend, RequestError, text
from common.timeline import write_trace


def bounded(kind, low, high):
    """An argparse type: a number of `kind` from `low` to `high`."""
    def parse(string):
        try:
            value = kind(string)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            number = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{string!r} is not a {number} from {low} to {high}")
        return value
    return parse


def readable(string: str) -> str:
    """An argparse type: some text."""
    if not string or not text(string):
        raise argparse.ArgumentTypeError("it must be text in UTF-8, and not empty")
    return string


def parser_for(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; --help lists the options\n")
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--demo", action="store_true", help="the lesson, in under a minute")
    what.add_argument("--prompt", type=readable, metavar="TEXT", help="answer TEXT once and end")
    add("--host", default="127.0.0.1", help="address of the server (default: this machine only)")
    add("--port", type=bounded(int, 0, 65535), default=5000, help="of the server (default 5000, 0: any)")
    add("--allow-evict", action="store_true", help="let other machines evict cached blocks too (POST /evict)")
    add("--model", default="classroom",
        help="classroom (default), tinyllama, FOLDER, OWNER/NAME on the hub, or random:NAME")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--plain-weights", action="store_true", help="on a CPU, do not reorder the weights for oneDNN")
    add("--max-tokens", type=bounded(int, 1, 1 << 20), default=128, help="length of an answer (default 128)")
    add("--temperature", type=bounded(float, 0, 100), default=0.0, help="0 (default) is greedy")
    add("--top-p", type=bounded(float, 1e-6, 1), default=1.0)
    add("--top-k", type=bounded(int, 0, 1 << 20), default=0)
    add("--seed", type=bounded(int, 0, (1 << 63) - 1), default=None)
    add("--stop", type=readable, action="append", metavar="TEXT",
        help="end the answer before TEXT; may be repeated")
    add("--explain", action="store_true", help="print a line for each thing that a step does")
    add("--json", type=Path, metavar="FILE", help="write the numbers of the demo or of the answer")
    add("--trace", type=Path, metavar="FILE", help="write the timeline, for Perfetto or chrome://tracing")
    add("--svg", type=Path, metavar="FILE", help="write the timeline as a picture, the last one of a demo")
    return parser


def main(doc: str, chapter: str, add_arguments, make_engine, demo, compare=None, max_waiting: int = 256):
    """Run a chapter from the command line.

    add_arguments(parser)               adds the chapter's own options
    make_engine(model, arguments)       returns its engine, and prints its pools to stderr
    demo(model, frontend, arguments)    prints the lesson; returns (report for --json, timelines)
    compare(arguments)                  returns {name: (make_engine, evict its device?)}, for the page
    """
    parser = parser_for(doc)
    add_arguments(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # whoever is told to end leaves nothing behind
    sys.stdout.reconfigure(errors="replace")        # a terminal without UTF-8 shows ?, and the answer goes on
    try:
        run(chapter, arguments, make_engine, demo, compare, max_waiting)
    except BrokenPipeError:         # `... | head` has seen enough
        os._exit(1)
    except (checkpoint.ModelError, RequestError, OSError) as error:
        sys.exit(f"{chapter}: {' '.join(str(error).split())}")         # in one line
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)               # at once: requests in other threads may be inside a long product


def run(chapter: str, arguments, make_engine, demo, compare, max_waiting: int):
    # 1. What cannot work fails now, not after a minute of work
    files = [path for path in (arguments.json, arguments.trace, arguments.svg) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise OSError("--json, --trace and --svg name the same file; give each its own.")
    for path in files:
        try:
            path.open("a").close()
        except OSError as error:
            raise OSError(f"Cannot write '{path}' ({error.strerror}); choose another file.") from None
    serving = not arguments.demo and arguments.prompt is None
    listener = server.listen(arguments.host, arguments.port) if serving else None

    # 2. The model
    model, tokenizer, end_tokens = checkpoint.load(arguments.model, arguments.dtype, arguments.device,
                                                   reorder=not arguments.plain_weights)
    frontend = Frontend(model, tokenizer, end_tokens)
    info = dict(chapter=chapter, model=arguments.model, dtype=str(model.dtype)[6:],
                device=torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu")

    # 3. The demo makes its own engines
    if arguments.demo:
        report, timelines = demo(model, frontend, arguments)
        return write(arguments, {**info, **report}, timelines, f"{chapter}, {arguments.model}")
    engine = make_engine(model, arguments)
    engine.explain = arguments.explain
    frontend.fields = engine.fields
    try:
        if serving:
            ways = compare(arguments) if compare else {}
            ways = {name: (partial(make, model, arguments), evict) for name, (make, evict) in ways.items()}
            return server.serve(listener, server.Server(engine, frontend, info, max_waiting, ways),
                                arguments.allow_evict)
        request = frontend.request(
            arguments.prompt, max_tokens=arguments.max_tokens, temperature=arguments.temperature,
            top_p=arguments.top_p, top_k=arguments.top_k, seed=arguments.seed, stop=arguments.stop)
        for piece in engine.stream(request):
            if isinstance(piece, str):
                print(piece, end="", flush=True)
        print(f"\n\n{piece.summary()}")
    finally:
        engine.close()
    write(arguments, {**info, **piece.as_json()}, [piece.timeline], f"{chapter}, {arguments.model}")


def write(arguments, report: dict, timelines: list, title: str):
    """Write what --json, --trace and --svg ask for."""
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.trace:
        write_trace(timelines, arguments.trace)
    if arguments.svg:
        if not timelines:
            raise OSError(f"There is no timeline to draw in '{arguments.svg}'; leave --svg out here.")
        arguments.svg.write_text(timelines[-1].svg(title), encoding="utf-8")


def blocks_that_fit(asked: int | None, useful: int, block_bytes: int, device, option: str) -> int:
    """Return `asked` blocks, or by default the `useful` ones, at most 80 % of a GPU's free memory or a quarter of
    the host's. Raises ModelError if they do not fit."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else checkpoint.free_host_memory()
    blocks = asked if asked is not None else max(1, int(min(useful, free * (0.8 if on_gpu else 0.25) // block_bytes)))
    if blocks * block_bytes > free:
        raise checkpoint.ModelError(
            f"{blocks} blocks take {blocks * block_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; choose at most "
            f"{option} {int(free // block_bytes)}.")
    return blocks
