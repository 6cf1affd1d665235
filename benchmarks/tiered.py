"""Chapter 07: three tiers under one radix tree, beside no cache at all.

    python -m benchmarks.tiered                                         all; results in benchmarks/results/
    python -m benchmarks.tiered --only mix --model classroom

Claims, each with its own function below:
    mix          conversations behind documents of 1,024 tokens go on, in any order. The device holds two of them, host memory
                 three, and the documents are in storage (files, which the operating system holds in memory), as another
                 process has left them; every question is new. Against computing everything again TTFT is at least 75 % lower
                 and throughput at least 3 times higher on the default link (published: up to 80 % and 6 times). It is at least
                 0.9 of what the tiers' bounds allow: for each request the slower of link and storage, with what came over
                 them, and a layer's share of the question behind that; but no less than the same question with everything on
                 the device.
    admission    a hit from any tier is never slower than computing, also over a slow link and from storage of 1 MB/s.
    match        finding the prefix of a prompt of 4,096 tokens in a tree of 100,000 pages takes less than 1 ms, and does not
                 grow with the number of conversations; the memory of the tree.
    layouts      what the layouts of host memory cost on both ways: to storage and back, and to the device's layers.

--histories sets the lengths of `admission` and, the longest of them, of the documents of `mix`.

The three engines of the mix take turns; so do the ways of the others.
"""
import gc
import importlib
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import offload as offload_benchmark  # noqa: E402
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread  # noqa: E402
from common.llama import LlamaConfig  # noqa: E402
from legacy import backends, bidirectional  # noqa: E402
from legacy import link as links  # noqa: E402

tiered = importlib.import_module("07_tiered_storage")
MODELS = {"match": ["no model"], "layouts": ["random:small", "classroom"], "admission": ["classroom"],
          "mix": ["classroom", "random:small"]}
SIZE = 16                                                       # tokens of a page
CONVERSATIONS, TURNS, DOCUMENT, QUESTION, ANSWER = 6, 3, 1024, 64, 8                    # of the mix; tokens
ON_DEVICE, ON_HOST = 2, 3                                       # conversations
PLATFORMS = ("a100", "h800")
HISTORIES = (512, 1024, 2048)                                   # of admission


class Bench(offload_benchmark.Bench):
    """Engines over one directory, on memory that was touched before."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None):
        self.name, self.rounds, self.folder = name, rounds, tempfile.TemporaryDirectory(prefix="benchmark-")
        self.document = histories[-1] if histories else DOCUMENT
        if name != "no model":
            super().__init__(name, dtype, device, rounds, histories or HISTORIES, 8 * QUESTION)

    def engine(self, storage: bool = True, **options):
        engine = tiered.Engine(self.model, self.tokenizer, frozenset(), block_size=SIZE, **options)
        for memory in (engine.pool.kv, engine.host.kv):
            memory.zero_()
        if storage:
            engine.attach(backends.open_backend(f"file:{self.folder.name}/pages"), "files")
        return engine


def ask(engine, prompt: list[int], new: int = 1):
    return tiered.answer(engine, prompt=prompt, max_tokens=new)


def mix(bench: Bench) -> dict:
    longest = bench.document + TURNS * (QUESTION + ANSWER)
    pages, documents = -(-longest // SIZE), [bench.prompt(bench.document) for _ in range(CONVERSATIONS)]
    known = bench.engine(blocks=CONVERSATIONS * 2 * pages, cpu_blocks=2 * pages)            # everything stays on its device
    for document in documents:                                  # the other process
        ask(known, document + [0])
        known.flush()
    known.detach()
    none = bench.engine(storage=False, blocks=2 * pages, cpu_blocks=0)
    ways = {platform: bench.engine(
        blocks=ON_DEVICE * pages, cpu_blocks=ON_HOST * pages, max_running=1,
        bytes_per_second=links.bandwidth(bench.model, "auto", platform)) for platform in PLATFORMS}
    for engine in ways.values():
        ask(engine, bench.prompt(256), 2)                       # how fast is prefill?
    rng, rows = random.Random(0), {platform: [] for platform in PLATFORMS}
    for _ in tqdm(range(bench.rounds), desc=f"mix {bench.name}", unit="round"):
        order = [rng.sample(range(CONVERSATIONS), CONVERSATIONS) for _ in range(TURNS)]
        asked = {(number, turn): bench.prompt(QUESTION) for number in range(CONVERSATIONS) for turn in range(TURNS)}
        taken = {"none": go_on(none, documents, asked, order), "known": go_on(known, documents, asked, order)}
        for platform, engine in ways.items():
            tiered.forget(engine)
            taken[platform] = go_on(engine, documents, asked, order)
        tokens = {tuple(tuple(request.outcome.tokens) for request in requests) for requests, _ in taken.values()}
        assert len(tokens) == 1 or bench.model.dtype != torch.float32, "the tokens differ"
        for platform, engine in ways.items():
            requests, seconds = taken[platform]
            ttft = {way: statistics.mean(request.outcome.ttft_ms for request in requests)
                    for way, (requests, _) in taken.items()}
            bounds = [bound(engine, request, direct) for request, direct in zip(requests, taken["known"][0])]
            found = {what: sum(request.pages[what] for request in requests) for what in tiered.TIERS}
            rows[platform].append(dict(
                ttft_ms=ttft[platform], none_ms=ttft["none"], on_device_ms=ttft["known"], lower=1 - ttft[platform] / ttft["none"],
                throughput=taken["none"][1] / seconds, of_bound=statistics.mean(bounds) / ttft[platform],
                **{what: count / sum(found.values()) for what, count in found.items()}))
    return dict(
        conversations=CONVERSATIONS, turns=TURNS, document_tokens=bench.document, question_tokens=QUESTION, answer_tokens=ANSWER,
        rows=[dict(platform=platform, link=str(ways[platform].load_link), **{
            what: spread([sample[what] for sample in samples]) for what in samples[0]}) for platform, samples in rows.items()],
        claimed=dict(lower=0.75, throughput=3.0, of_bound=0.9), published=dict(lower=0.8, throughput=6.0))


def go_on(engine, documents, asked, order) -> tuple[list, float]:
    """-> the requests, one after the other, and the seconds that all took. An engine without host memory keeps nothing."""
    histories, requests, began = [list(document) for document in documents], [], time.perf_counter()
    for turn, numbers in enumerate(order):
        for number in numbers:
            histories[number] += asked[number, turn]
            requests.append(ask(engine, histories[number], ANSWER))
            histories[number] += requests[-1].outcome.tokens
            if not engine.host.size:
                tiered.forget(engine)
    seconds = time.perf_counter() - began
    engine.flush()
    return requests, seconds


def bound(engine, request, direct) -> float:
    """Milliseconds in which no way over these tiers could have been faster."""
    size, question, layers = engine.pool.kv[:, :, 0].nbytes, direct.outcome.ttft_ms, len(engine.model.layers)
    loaded, read = request.pages["cpu_hits"] + request.pages["storage_hits"], request.pages["storage_hits"]
    link = loaded * size / engine.load_link.speed() * 1e3
    return max(question, max(link, (engine.storage.seconds(read) or 0.0) * 1e3) + question / layers * bool(loaded))


def admission(bench: Bench) -> dict:
    pages, rows = bench.histories[-1] // SIZE + 8, []
    options = dict(blocks=2 * pages, cpu_blocks=2 * pages)
    default = links.bandwidth(bench.model)
    histories = {length: bench.prompt(length) for length in bench.histories}
    engines = {"computed": bench.engine(storage=False, blocks=2 * pages, cpu_blocks=0, bytes_per_second=default),
               "device": bench.engine(storage=False, **options, bytes_per_second=default),
               "host": bench.engine(storage=False, **options, bytes_per_second=default),
               "host, link 50 times slower": bench.engine(storage=False, **options, bytes_per_second=default / 50),
               "storage": bench.engine(**options, bytes_per_second=default),
               "storage, 1 MB/s": bench.engine(**options, bytes_per_second=default)}
    engines["host, link 50 times slower"].worth_keeping = lambda blocks: True               # it is there, whatever it is worth
    engines["storage, 1 MB/s"].storage.bandwidth = bidirectional.Bandwidth((8.0,))
    for length, history in histories.items():
        taken = {way: [] for way in engines}
        for engine in engines.values():
            tiered.forget(engine)
            ask(engine, history)
            engine.flush()
        for _ in tqdm(range(bench.rounds + 1), desc=f"admission {length}", unit="round"):
            prompt = history + bench.prompt(QUESTION)
            for way, engine in engines.items():
                if way.startswith(("computed", "storage")):
                    tiered.forget(engine)
                elif way.startswith("host"):
                    tiered.offload.empty(engine)
                taken[way].append(ask(engine, prompt))
                engine.flush()
        for way, requests in taken.items():
            ratios = [request.outcome.ttft_ms / computed.outcome.ttft_ms
                      for request, computed in zip(requests, taken["computed"])]
            rows.append(dict(history_tokens=length, way=way, source=requests[-1].source, cached_tokens=requests[-1].cached_tokens,
                             first=ratios[0], ratio=spread(ratios[1:])))
    return dict(link=str(engines["host"].load_link), rows=rows, at_most=1.0)


def match(bench: Bench, pages: int = 100_000, prompt_tokens: int = 4096) -> dict:
    """The same number of pages in 100 to 10,000 conversations behind a common beginning, of which one has the prompt."""
    config = LlamaConfig(vocab_size=1 << 15, hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, head_dim=2)
    rows, rng = [], random.Random(0)
    for conversations in (100, 1000, 10_000):
        device, cpu = torch.device("cpu"), torch.float32
        pool = tiered.DevicePages(config, pages + prompt_tokens // SIZE, SIZE, cpu, device)
        tree = tiered.HiRadixTree(pool, tiered.HostPages(config, 1, SIZE, cpu, device, "page_first"), "benchmark")
        system, each = [rng.randrange(1 << 15) for _ in range(32 * SIZE)], pages // conversations
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(conversations):
            tokens = tiered.as_bytes(system + [rng.randrange(1 << 15) for _ in range(each * SIZE)])
            table, hits = [], [page for node in tree.match("", tokens) for page in node.device]
            for page in hits:
                pool.share(page)
            table = hits + pool.allocate(len(tokens) // tree.id_bytes - len(hits))
            tree.insert("", tokens, table)
            pool.release(table)
            del tokens, table, hits
        size = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        held, nodes = sum(map(tree.pages, tree.nodes())), tree.size
        prompt = system + [rng.randrange(1 << 15) for _ in range(prompt_tokens - len(system))]
        table = pool.allocate(prompt_tokens // SIZE)
        for end in range(len(system) // SIZE + 1, prompt_tokens // SIZE + 1):    # the worst case: a node for every page
            found, _ = tree.insert("", tiered.as_bytes(prompt[:end * SIZE]), table[:end])
        samples = []
        for _ in range(200):
            began = time.perf_counter()
            path = tree.match("", tiered.as_bytes(prompt))
            samples.append((time.perf_counter() - began) * 1e3)
        assert sum(map(tree.pages, path)) == prompt_tokens // SIZE, "the prompt is not in the tree"
        rows.append(dict(conversations=conversations, pages=held, nodes=nodes, bytes_per_page=size / held,
                         match_ms=spread(samples)))
    return dict(prompt_tokens=prompt_tokens, prompt_nodes=len(path), rows=rows, at_most_ms=1.0)


def layouts(bench: Bench, pages: int = 32) -> dict:
    """A run of pages: to storage that costs nothing but the copy, and back; and to all layers of the device, as the link
    copies."""
    config, dtype, cpu = bench.model.config, bench.model.dtype, torch.device("cpu")
    pools = {layout: tiered.HostPages(config, 2 * pages, SIZE, dtype, cpu, layout) for layout in tiered.LAYOUTS}
    device, tokens = torch.zeros(config.num_hidden_layers, 2, pages, SIZE, config.num_key_value_heads, config.head_dim,
                                 dtype=dtype), bytes(4 * SIZE)
    taken = {layout: {what: [] for what in ("write", "read", "load")} for layout in pools}
    for pool in pools.values():
        pool.kv.copy_(torch.randn(pool.kv.shape))
    for number in range(bench.rounds + 1):
        for layout, pool in pools.items():
            times, kept = taken[layout], []
            began = time.perf_counter()
            values = [pool.value(place, tokens) for place in range(pages)]
            times["write"].append(time.perf_counter() - began)
            kept = [bytes(value) for value in values]
            began = time.perf_counter()
            assert all(pool.fill(pages + place, tokens, value) for place, value in enumerate(kept))
            times["read"].append(time.perf_counter() - began)
            assert torch.equal(pool.kv[:pages], pool.kv[pages:]), "what came back is not what was written"
            began = time.perf_counter()
            for index in range(config.num_hidden_layers):
                links.move(device[index], pool.kv[:pages, index].transpose(0, 1))
            times["load"].append(time.perf_counter() - began)
            assert torch.equal(device.permute(2, 0, 1, 3, 4, 5), pool.kv[:pages])
    rows = []
    for layout, pool in pools.items():
        rows.append(dict(layout=layout, **pool.copies(pages), **{
            f"{what}_us_per_page": spread([seconds / pages * 1e6 for seconds in times[1:]])
            for what, times in taken[layout].items()}, **{
            f"{what}_over_layer_first": spread([own / first for own, first in zip(times[1:], taken["layer_first"][what][1:])])
            for what, times in taken[layout].items()}))
    return dict(pages=pages, rows=rows)


def show(what: str, model: str, found: dict):
    def text(figures, unit=""):
        return f"{figures['median']:.2f}{unit} ({figures['min']:.2f} to {figures['max']:.2f})"
    print(f"\n{what}, {model}")
    for row in found["rows"]:
        if what == "mix":
            print(f"    {row['platform']}, {row['link']}: TTFT {text(row['ttft_ms'], ' ms')}, no cache "
                  f"{text(row['none_ms'], ' ms')}, all on the device {text(row['on_device_ms'], ' ms')}\n"
                  f"      TTFT lower by {text(row['lower'])}, throughput "
                  f"{text(row['throughput'], 'x')}, of the bound {text(row['of_bound'])}; L1 {row['gpu_hits']['median']:.0%}, "
                  f"L2 {row['cpu_hits']['median']:.0%}, L3 {row['storage_hits']['median']:.0%}")
        elif what == "admission":
            print(f"    {row['history_tokens']:5} tokens, {row['way']:26} {row['source']:12} of computing {text(row['ratio'])}; "
                  f"the first time {row['first']:.2f}")
        elif what == "match":
            print(f"    {row['conversations']:6} conversations, {row['pages']} pages, {row['nodes']} nodes: "
                  f"{text(row['match_ms'], ' ms')}; {row['bytes_per_page']:.0f} bytes a page")
        else:
            print(f"    {row['layout']:18} a page to storage {row['storage_copies']:3} pieces, "
                  f"{text(row['write_us_per_page'], ' us')}, from it {text(row['read_us_per_page'], ' us')}; to a layer "
                  f"{row['layer_copies']:5} pieces, {text(row['load_us_per_page'], ' us')} a page for all")
    sys.stdout.flush()


if __name__ == "__main__":
    paged_benchmark.run("tiered", __doc__, MODELS, globals(), Bench, show)
