"""Draw what a chapter's objects hold or do, as text.

    python -m tools.figure 02          two block tables that point into one pool
    python -m tools.figure 03          one step: the calls between engine, driver, Cache and link
    python -m tools.figure 07          a radix tree before and after a split, with the tiers of each node

Each figure runs an engine with random weights, or a tree, and prints its contents.
"""

import argparse
import importlib
import sys
from itertools import groupby

from common import cache as contract
from common.prefixes import BlockKeys
from common.requests import Request
from shell import checkpoint, lesson
from shell.lower_tier import restorer
from shell.modelled_link import Bandwidth

paged, offload, tiered = map(importlib.import_module, ("02_paged_kv", "03_cpu_offload", "07_tiered_storage"))
PROMPT = list(range(100, 140))  # tokens


def make_engine(lower_tier=lambda model: None):
    model = checkpoint.load("random:tiny")[0]
    return paged.Engine(paged.Runner(model, 8), lower_tier(model))


def block_tables() -> str:
    """Return the tables of lesson 02's requests A and B, and the blocks to which their entries point."""
    engine = make_engine()
    for more in range(200, 210), range(300, 305):
        engine.submit(Request([*PROMPT, *more], max_tokens=20))
        engine.step()
    a, b = ([f"entry {one.table.index(n)}" if n in one.table else "" for n in range(8)] for one in engine.running)
    rows = [("A's table", a), ("", ["v" * bool(entry) for entry in a]), ("the pool", [f"[block {n}]" for n in range(8)])]
    rows += [("references", engine.pool.references), ("", ["^" * bool(entry) for entry in b]), ("B's table", b)]
    return "\n".join(f"{name:11}{''.join(str(cell).center(9) for cell in row)}".rstrip() for name, row in rows)


def way_of_a_request() -> str:
    """Return the calls of the step that restores 32 tokens and computes the first token of the answer. The
    verbs of common/cache.py that chapter 03 does not override are left out."""
    cache, calls = offload.HostCache(blocks=8, bandwidth=1e9), []
    engine = make_engine(lambda model: restorer(model, cache, always=True))
    engine.generate([Request(PROMPT, max_tokens=1)])
    lesson.wait_until_idle(engine, "device")  # when host memory has the blocks, evict them from the device
    boxes = [id(engine), id(engine.lower_tier), id(cache), id(cache.load_link)]

    def record(frame, event, _):
        code, own, caller = frame.f_code, id(frame.f_locals.get("self")), frame.f_back
        if event == "call" and own in boxes[1:] and code.co_filename != contract.__file__:
            while id(caller.f_locals.get("self")) not in boxes:
                caller = caller.f_back
            box = boxes.index(id(caller.f_locals["self"]))
            if boxes[box + 1 :][:1] == [own]:
                calls.append((box, f"{code.co_name} {frame.f_locals.get('index', '')}".strip()))

    cache.load_link.bandwidth = Bandwidth(1.0, 1e9, seconds=1.0)  # no layer arrives before the forward pass waits
    engine.submit(Request(PROMPT, max_tokens=1))
    sys.setprofile(record)
    engine.step()
    sys.setprofile(None)
    engine.close()
    lines, at = ["[Engine]                 [Restorer]               [HostCache]              [link]"], None
    for (box, name), same in groupby(calls):
        times = len(list(same))
        lines += [] if box == at else ["   " + f"{'|':25}" * box]
        lines[-1] += f"|- {name} {f'{times} times ' * (times > 1)}".ljust(24, "-") + ">"
        at = box + 1
    return "\n".join(lines)


def tree_of_pages() -> str:
    """Return the tree of lesson 07 with one conversation, with two, and after evictions."""
    tree, block_keys = tiered.HiRadixTree(), BlockKeys("figure", 1)
    one, other = (block_keys.extend([], tokens) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8]))
    steps = [("one conversation", one, "L1 L2 L3"), ("another parts from it after p2", other[2:], "L1")]
    steps += [("the device evicts p5 and p6", one[4:], "L2 L3"), ("host memory evicts p6", one[5:], "L3")]
    text = []
    for title, pages, tiers in steps:
        for node in tree.change(pages):
            node.device, node.stored = "L1" in tiers, "L3" in tiers
            node.host_blocks = [0] * len(node.pages) * ("L2" in tiers)
        text += [f"{title}:", *branch(tree.root, "    "), ""]
    return "\n".join(text[:-1])


def branch(node, indent: str):
    """Yield a line for each node below `node`: its pages, and the tiers that hold them."""
    for child in node.children.values():
        pages = " ".join(f"p{page.tokens[0]}" for page in child.pages)
        tiers = " L1" * child.device + " L2" * bool(child.host_blocks) + " L3" * child.stored
        yield f"{indent}[{pages}:{tiers}]"
        yield from branch(child, indent + "    ")


def printed(words: list[str]) -> str:
    """Return the figure that a command prints."""
    figures = {"02": block_tables, "03": way_of_a_request, "07": tree_of_pages}
    parser = argparse.ArgumentParser(prog="python -m tools.figure", description="Draw a figure of a lesson.")
    parser.add_argument("chapter", choices=figures)
    return figures[parser.parse_args(words).chapter]()


if __name__ == "__main__":
    print(printed(sys.argv[1:]))
