"""The command line of every chapter: run the demo, answer one prompt, or start the server."""
import argparse
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch

from common.requests import Request, RequestError
from shell import charts, checkpoint, exit_process, handle_signals, interrupt, lesson, limits, to_json
from shell.frontend import Frontend, result_json


def bounded(kind, low, high):
    """Return an argparse type: a number of `kind` (int or float) from `low` to `high`."""
    def parse(string):
        with suppress(ValueError):
            if low <= (value := kind(string)) <= high:
                return value
        number = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{string!r} is not a {number} from {low} to {high}")
    return parse


def moved(value: str, command: str):
    """Return an argparse type that refuses `value`, and says which command has it now."""
    def parse(string):
        if string == value:
            raise argparse.ArgumentTypeError(f"{value} is a script of its own: run {command}")
        return string
    return parse


def parser_for(doc: str, add_arguments=lambda parser: None) -> argparse.ArgumentParser:
    """Return the parser of every chapter's options. `add_arguments(parser)` adds the chapter's own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; --help lists the options\n")
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--demo", action="store_true", help="run the lesson's demo, about a minute")
    what.add_argument("--prompt", metavar="TEXT", help="answer TEXT and exit")
    add("--host", default="127.0.0.1", help="the server's address (default: this machine only)")
    add("--port", type=bounded(int, 0, 65535), default=5000, help="the server's port (default 5000; 0: any)")
    add("--model", default="classroom",
        help="classroom (default), tinyllama, FOLDER, OWNER/NAME on the hub, or random:NAME")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where the model runs (auto)")
    add("--dtype", default="auto", choices=("auto", *checkpoint.DTYPES), help="dtype of all numbers (auto)")
    add("--max-tokens", type=bounded(int, 1, 1 << 20), default=128, help="tokens per answer (default 128)")
    add("--explain", action="store_true", help="print a line for each event of a step")
    add("--same-bits", action="store_true",
        help="on a CPU, compute each request with the bits that it has alone; decoding takes longer")
    add("--rounds", type=bounded(int, 1, 1000), default=3, help="timed rounds in the demo (default 3)")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--trace", type=Path, metavar="FILE", help="write a timeline for Perfetto or chrome://tracing")
    add_arguments(parser)
    return parser


def main(doc, chapter: str, add_arguments, make_engine, demo, load=checkpoint.load):
    """Run a chapter from the command line.

    add_arguments(parser)               adds the chapter's own options
    make_engine(model, arguments)       returns the chapter's engine, and prints its pools to stderr
    demo(model, frontend, arguments)    prints the demo; returns (report for --json, timelines for --trace)
    load(name, dtype, device, same_bits=)  loads the model: checkpoint.load, or a variant of it (08 and 09)
    """
    arguments = parser_for(doc, add_arguments).parse_args()
    limits.limit_threads()
    for name in "stdout", "stderr":                 # None if the parent closed it
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="replace")        # a terminal without UTF-8 shows ?
    try:
        run(doc, chapter, arguments, make_engine, demo, load)
    except BrokenPipeError:         # `shell.settings` handles it
        raise
    except KeyboardInterrupt as error:
        exit_process(128 + (error.args or (signal.SIGINT,))[0])
    except Exception as error:
        words = limits.shortage(error, vars(arguments))
        if not words and not isinstance(error, (checkpoint.ModelError, RequestError, OSError)):
            raise
        sys.exit(f"{chapter}: {words or ' '.join(str(error).split())}")         # in one line


def run(doc: str | None, chapter: str, arguments, make_engine, demo, load):
    # 1. Fail now, not after a minute of work
    for path in filter(None, (arguments.json, arguments.trace)):
        there = os.path.lexists(path)
        path.open("a").close()
        if not there:           # do not leave an empty file if the run fails
            path.unlink()
    if arguments.prompt is None and not arguments.demo:
        from shell import server  # imported here: only the server needs Flask
        listener = server.listen(arguments.host, arguments.port)

    # 2. The model
    asked = arguments.model, arguments.dtype, arguments.device
    model, tokenizer, end_tokens = load(*asked, same_bits=arguments.same_bits)
    frontend = Frontend(model, tokenizer, end_tokens)
    info = dict(chapter=chapter, model=arguments.model, dtype=str(model.dtype)[6:],
                device=torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu")

    # 3. The demo makes its own engines; the server and --prompt use one engine
    if arguments.demo:
        handle_signals(interrupt)       # from now on there are files and threads to clean up
        lesson.prepare(arguments)
        report, timelines = demo(model, frontend, arguments)
        report |= dict(bits=lesson.BITS) if model.same_bits else {}
    else:
        engine = make_engine(model, arguments)
        frontend.fields = engine.fields
        handle_signals(interrupt)
        try:
            if arguments.prompt is None:
                info["title"] = (doc or chapter).partition("\n")[0]
                return server.serve(listener, server.Server(engine, frontend, info))
            result = answer(engine, frontend.request(arguments.prompt, max_tokens=arguments.max_tokens))
            print(f"{result.text * engine.explain}\n\n{summary(result)}")     # --explain's lines came first
        finally:
            engine.close()
            if dropped := engine.counts["writes_dropped"]:
                print(f"Storage was slow, full or broken: {dropped} writes were dropped.", file=sys.stderr)
        report, timelines = result_json(result), [result.timeline]

    # 4. The files of --json and --trace
    if arguments.json:
        arguments.json.write_text(to_json({**info, **report}, indent=1) + "\n")
    if arguments.trace:
        charts.write_trace(timelines, arguments.trace)


def answer(engine, request: Request) -> Request:
    """Step the engine until a request has its answer, and print the text as it is decoded.

    Returns: the finished request. Raises the request's error."""
    engine.submit(request)
    while not request.pieces.empty() or request.outcome is None:
        if request.pieces.empty():
            engine.step()
        elif isinstance(piece := request.pieces.get(), Exception):
            raise piece
        elif isinstance(piece, str) and not engine.explain:
            print(piece, end="", flush=True)
    return request


def summary(result: Request) -> str:
    prompt, cached, new = result.usage.values()
    tbt = "" if result.tbt_ms is None else f", TBT {result.tbt_ms:.1f} ms"
    return "\n".join([f"{prompt} prompt tokens, {cached} of them cached ({result.source}); {new} new; "
                      f"TTFT {result.ttft_ms:.1f} ms{tbt}", *result.decisions])


def blocks_that_fit(asked: int | None, useful: int, block_bytes: int, device, option: str) -> int:
    """Return the number of blocks of a pool. Raises ModelError if they do not fit.

    `asked`: the user's number; None means `useful` blocks, but at most 80 % of a GPU's free memory, or 25 %
    of the host's. `option`: the option that an error names."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else limits.free_host_memory()
    pinned = not on_gpu and torch.cuda.is_initialized()     # host memory on a machine with a GPU

    def most(share: float) -> int:
        size = int(min(free * share, 1 << 62))
        return (1 << size.bit_length() - 1 if pinned else size) // block_bytes      # pinned: a power of two

    blocks = max(1, min(useful, most(0.8 if on_gpu else 0.25))) if asked is None else asked
    if blocks > most(0.9):      # the forward pass needs memory too
        words = ", rounded up to a power of two" if pinned else ""
        raise checkpoint.ModelError(
            f"{blocks} blocks take {blocks * block_bytes / 1e9:.1f} GB{words}, but {free / 1e9:.1f} GB are "
            f"free; choose at most {option} {most(0.9)}.")
    return blocks
