"""A chapter with the stub engine, for tests of the command line."""
import sys
import time
from pathlib import Path

if str(ROOT := Path(__file__).resolve().parent.parent.parent) not in sys.path:
    sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    import shell.start  # noqa: F401

from shell import cli, server
from tests.support.stub import Engine


def add_arguments(parser):
    parser.add_argument("--pause", type=cli.bounded(float, 0, 60), default=0.0, help="seconds per token")
    parser.add_argument("--ending", type=float, default=server.EXIT_SECONDS, help="seconds that a server waits for a step")


def make_engine(model, arguments):
    print("KV pool: 64 blocks", file=sys.stderr)
    engine = Engine(model, pause=arguments.pause, max_running=1)
    engine.explain, server.EXIT_SECONDS = arguments.explain, arguments.ending
    return engine


def demo(model, frontend, arguments):
    request = frontend.request("Hello", max_tokens=arguments.max_tokens)
    result = make_engine(model, arguments).generate([request])[0]
    print(result.text, flush=True)
    time.sleep(arguments.pause)
    return dict(link=None, verified=True, rows=[result.usage]), [result.timeline]


if __name__ == "__main__":
    cli.main(__doc__, "stub", add_arguments, make_engine, demo)
