"""The page of all chapters: its routes, and its descriptions of requests, pools and storage.

HTTP threads run these functions, also during a step. They copy lists before they use them, and a reply may
mix the state before a step with the state after it."""
import random
import re
from functools import partial
from itertools import islice
from weakref import WeakKeyDictionary

from flask import Flask, abort, request, send_from_directory

from common.requests import Request
from shell import charts, lesson, openai
from shell.frontend import check_fields
from shell.guards import read_body

MAX_CONVERSATIONS = 26             # conversations with a letter of their own on the page
EXAMPLE = 1500                     # tokens of the page's example document
TREE_ROWS = 60                     # nodes of chapter 07's tree that the page shows


# 1. State ---------------------------------------------------------------------------------------------------

def look(server, numbers: WeakKeyDictionary, last: dict) -> dict:
    """Describe requests, pools, storage, counters and the last answers, for GET /state.

    `numbers`, `last`: see `owners`."""
    engine, completed, running = server.engine, list(server.engine.completed), list(server.engine.running)
    waiting = [asked for asked in list(server.open) if asked.outcome is None and asked not in running]
    owner = owners(completed + running + waiting, numbers, last)
    requests, tables = [], [(list(asked.table), asked.computed) for asked in running]
    for asked in running + waiting:
        state = "waiting" if asked in waiting else "decode" if asked.new else "prefill"
        requests.append(dict(
            id=asked.id, state="restoring" if asked.restoration else state, found=dict(asked.found),
            prompt_tokens=asked.prompt_tokens, computed=min(asked.computed, asked.prompt_tokens),
            new_tokens=len(asked.new), conversation=numbers[asked]))
    pools = {name: dict(blocks=pool.size, block_bytes=pool.block_bytes,
                        states=block_states(pool, tables if name == "device" else []),
                        owners={at: owner[key] for key, at in list(pool.block_of.items()) if key in owner})
             for name, pool in engine.pools.items()}
    shown = "id", "source", "found", "decisions", "usage", "ttft_ms", "tbt_ms"
    finished = [dict({name: getattr(asked, name) for name in shown}, conversation=numbers[asked],
                     version=len(asked.timeline.spans)) for asked in completed]
    info, cache = dict(server.info, context=server.frontend.context), server.cache
    storage = None
    if hasattr(cache, "tree"):                  # chapter 07, with or without storage
        kept = cache.storage
        pages = [page for node in cache.tree.nodes() if node.stored for page in node.pages]
        storage = dict(name=kept and str(kept), silent=bool(kept and kept.silent), pages=len(pages),
                       tree=list(islice(tree_rows(cache.tree.root, owner), TREE_ROWS)),
                       owners={at: owner[key] for at, key in enumerate(pages) if key in owner},
                       reading=len(cache.reading), writing=len(cache.writing))
    return dict(info=info, requests=requests, pools=pools, storage=storage, counters=charts.counters(engine),
                finished=finished)


def tree_rows(node, owner: dict, depth: int = 0):
    """Yield a row for each node below `node`, parents before children.

    `owner`: page -> number of its conversation, from `owners`."""
    for child in list(node.children.values()):
        tiers = dict(device=child.device, host=child.host_blocks, storage=child.stored)
        yield dict(depth=depth, pages=len(child.pages), owner=owner.get(child.pages[-1], -1),
                   tiers=[name for name, present in tiers.items() if present])
        yield from tree_rows(child, owner, depth + 1)


def owners(requests: list[Request], numbers: WeakKeyDictionary, last: dict) -> dict:
    """Number the conversations of `requests`.

    A request belongs to the conversation whose last prompt its own prompt begins with. If there is none, it
    begins a new one. `numbers`: request -> number of its conversation. `last`: number -> (prompt, block keys)
    of its last request. Both are updated.

    Returns: block key -> number of its conversation, or 0 if several conversations have the block."""
    for asked in [one for one in requests if one not in numbers]:
        begun = {number: len(prompt) for number, (prompt, _) in list(last.items())
                 if asked.tokens[:len(prompt)] == prompt}
        numbers[asked] = number = max(begun, key=begun.get, default=max(last, default=0) + 1)
        last[number] = asked.tokens[:asked.prompt_tokens], asked.chain
        last.pop(number - MAX_CONVERSATIONS, None)
    owner = {}
    for number, (_, chain) in list(last.items()):
        owner.update({block_key: 0 if block_key in owner else number for block_key in list(chain)})
    return owner


def block_states(pool, tables: list[tuple[list[int], int]]) -> str:
    """Return one letter per block of a pool.

    . free; - cached: unreferenced, and found by its key; r reserved: in a block table, and not written yet;
    u in use; s shared by several requests; f in flight: referenced, but in no block table.

    `tables`: the block tables of running requests, each with the number of computed tokens."""
    states = ["f" if held else "." if key is None else "-" for held, key in zip(pool.references, pool.key_of)]
    for table, computed in tables:
        for index, block in enumerate(table):
            alone = "u" if index * pool.block_size < computed else "r"
            states[block] = "s" if states[block] in "urs" else alone
    return "".join(states)


# 2. Routes --------------------------------------------------------------------------------------------------

def add_routes(app: Flask, server):
    """Add the page, and the routes that the page and other programs use.

    `server`: the Server of shell/server.py.

    PUT /storage must not open module:Class: everybody who can reach the port could run code with it."""
    engine, cache, tiers = server.engine, server.cache, list(server.engine.pools)
    words = "file:DIR, redis://HOST:PORT/N or unix://PATH; give module:Class with --storage at the start"
    tier = {"tier": (tiers.__contains__, f"one of {', '.join(tiers) or 'none'}")}
    place = {"url": (lambda url: isinstance(url, str) and re.match(r"file:|(rediss?|unix)://", url), words),
             "config": openai.OBJECT}

    app.add_url_rule("/", "page", partial(send_from_directory, app.root_path, "page.html"))
    app.add_url_rule("/state", "state", partial(look, server, WeakKeyDictionary(), {}))

    @app.get("/example")
    def example():
        """Return a document that fits in every pool, and questions about it."""
        tokens = [pool.size * pool.block_size for pool in engine.pools.values()]
        tokens = min(EXAMPLE, min([server.frontend.context, *tokens]) * 3 // 4)
        document = lesson.document(server.frontend, random.Random(0), tokens, lesson.SECRET)
        names = re.findall(r"(\w+) lives in", document) or ["Anna"]
        where = f"Where does {min(names, key=names.count)} live?"       # ask for the rarest name
        return dict(document=document, questions=[where, lesson.QUESTION])

    @app.get("/timelines/<int:number>")
    def timeline(number: int):
        for asked in list(engine.completed):
            if asked.id == number:
                return dict(spans=charts.spans(asked.timeline), plan=asked.timeline.plan)
        abort(404, f"The timeline of request {number} is not kept; GET /state lists those kept.")

    @app.post("/evict")
    def evict():
        asked = check_fields(read_body(), tier, needed="tier")
        return dict(evicted=server.between_steps(partial(engine.evict, asked["tier"])))

    @app.route("/storage", methods=["GET", "PUT", "DELETE"])
    def storage():
        """Show, attach or detach the storage of chapter 07's Cache."""
        if not hasattr(cache, "tree"):
            abort(404, "This chapter has no storage to attach; see GET / and GET /health.")
        if request.method != "GET":             # open it on this thread: it may take 1 s
            put = request.method == "PUT"
            opened = cache.open_storage(**check_fields(read_body(), place, needed="url")) if put else None
            server.between_steps(partial(cache.attach_storage, opened))
        kept = cache.storage
        rate = kept and server.between_steps(kept.speed)        # only the engine's thread may read it
        said = dict(silent=kept.silent, behind=kept.is_backlogged, gbps=rate / 1e9) if kept else {}
        counters = charts.ZERO_COUNTS | charts.counters(engine)
        return dict(storage=kept and str(kept), **said, counters=counters)
