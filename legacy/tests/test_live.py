"""What the page is told of an engine: its memories block by block, events, pictures, and comparisons, in every chapter."""
import io
import json
import re
import threading
from collections import Counter
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy import app, live
from legacy.tests.conftest import chapter, make_engine, write_model
from legacy.tests.test_app import INFO, Serving, another, client_of, error_of, events, eventually

NAMES = {"01": "01_baseline", "02": "02_paged_kv", "03": "03_cpu_offload",
         "07": "07_tiered_storage", "08": "08_hybrid_blocks"}
STORY = "It was a long story, and it began with a letter that nobody had written. " * 3


def make(number: str, model, folder, **more):
    """A chapter's engine, with a link so fast that whatever is kept is brought back."""
    module, fast = chapter(NAMES[number]), dict(bytes_per_second=1e12)
    options = {"01": {}, "02": dict(blocks=64), "03": dict(blocks=64, cpu_blocks=128, **fast),
               "07": dict(blocks=64, cpu_blocks=128, prefetch_threshold=1, prefetch_policy="wait_complete", **fast),
               "08": dict(max_running=4, **fast)}[number]
    engine = module.Engine(model.model, model.tokenizer, model.end_tokens, **options, **more)
    if number == "07":
        engine.attach(chapter("legacy.backends").open_backend(f"file:{folder}"), "files")
    return engine


@pytest.fixture(params=list(NAMES))
def number(request):
    return request.param


@pytest.fixture
def engine(number, tiny_engine, plain_engine, tmp_path):
    made = make(number, plain_engine if number == "08" else tiny_engine, tmp_path)
    yield made
    made.close()
    made.release()


def states_of(tier: dict) -> list[tuple[str, tuple]]:
    """[(state, ids)] of every block."""
    found = [(state, tuple(ids)) for state, count, ids in tier["runs"] for _ in range(count)]
    assert len(found) == tier["blocks"]
    return found


# 1. Tiers --------------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 3), max_size=2, unique=True)), max_size=60))
def test_runs_are_the_blocks(blocks):
    numpy = pytest.importorskip("numpy")
    tier = live.Tier("device", "Device", numpy.array([state for state, _ in blocks], numpy.int64),
                     {number: ids for number, (_, ids) in enumerate(blocks) if ids})
    told = json.loads(json.dumps(tier.as_json()))
    assert states_of(told) == [(live.WORDS[state], tuple(ids)) for state, ids in blocks]
    assert all(one[::2] != other[::2] for one, other in zip(told["runs"], told["runs"][1:])), "neighbours that are equal"


@given(st.lists(st.tuples(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20))), max_size=8))
def test_a_key_keeps_its_place_while_it_is_there(moments):
    keys, places = live.Keys(), {}
    for there, in_flight in moments:
        names = {number: bytes([number]) for number in there | in_flight}
        tier = keys.tier("storage", "Storage", map(names.get, there), map(names.get, in_flight), None, {})
        now = {tier.describe(block)[0]: block for block, state in enumerate(tier.states) if state != live.FREE}
        assert now.keys() == set(names.values())
        for number, key in names.items():
            assert tier.states[now[key]] == (live.IN_FLIGHT if number in in_flight else live.CACHED)
        assert all(now[key] == block for key, block in places.items() if key in now), "a key has moved"
        assert len(tier.states) <= max(len(one | other) for one, other in moments), "places that are free are not used again"
        places = now


class Watched:
    """Steps an engine, and looks at its tiers after every step and every forward pass."""

    def __init__(self, engine):
        self.engine, self.seen = engine, Counter()
        for name in ("forward", "tap"):
            setattr(engine, name, partial(self.watched, getattr(engine, name)))

    def watched(self, function, *arguments):
        self.look()
        return function(*arguments)

    def look(self):
        for tier in self.engine.tiers():
            told = tier.as_json()
            assert sum(count for _, count, _ in told["runs"]) == told["blocks"]
            self.seen.update((tier.name, state) for state, _, _ in told["runs"])
        self.seen.update(request["state"] for request in self.engine.who())

    def answer(self, *asked: dict):
        requests = [request for one in asked for request in self.engine.submit(**one)]
        self.look()
        while self.engine.step():
            self.look()
        if hasattr(self.engine, "flush"):
            self.engine.flush()
        self.look()
        return [request.outcome for request in requests]


TIERS = {"01": ["device"], "02": ["device"], "03": ["device", "host"],
         "07": ["device", "host", "storage"], "08": ["act-device", "act-host", "kv-host"]}


@pytest.mark.parametrize("number", list(NAMES)[1:])
def test_every_block_is_in_the_state_that_the_pool_says(number, engine):
    """Requests with a common beginning, and what they leave behind."""
    assert [tier.name for tier in engine.tiers()] == TIERS[number]
    watched = Watched(engine)
    first, second = watched.answer(dict(prompt=STORY, max_tokens=20), dict(prompt=STORY[:130] + "?", max_tokens=4))
    again, = watched.answer(dict(prompt=STORY, max_tokens=3))
    assert (first.id, second.id, again.id) == (1, 2, 3)
    states = {state for known in watched.seen if isinstance(known, tuple) for state in known[1:]}
    assert {"free", "in use", "cached", "reserved"} <= states, states
    assert {"waiting", "decode"} <= watched.seen.keys()

    device = states_of(engine.tiers()[0].as_json())
    pool = engine.pool
    if number != "08":
        for block, (state, ids) in enumerate(device):
            assert state == ("cached" if pool.prefixes[block] is not None else "free") and ids == ()
    running, = engine.submit(prompt=STORY, max_tokens=9)
    other, = engine.submit(prompt=STORY, max_tokens=9)
    while not (running.answer.tokens and other.answer.tokens):
        engine.step()
    tiers = [tier.as_json() for tier in engine.tiers()]
    blocks = [state for tier in tiers if number == "08" or tier["name"] == "device" for state in states_of(tier)]
    common = set(running.table) & set(other.table)
    assert common, "nothing is shared"
    for block, (state, ids) in enumerate(blocks):
        holders = tuple(request.id for request in (running, other) if block in request.table)
        assert ids == holders
        expected = "shared" if len(holders) > 1 else "in use" if holders else state
        assert state == expected and (holders or state in ("free", "cached"))
    assert {request["id"]: request["state"] for request in engine.who()} == {running.id: "decode", other.id: "decode"}
    while engine.step():
        pass


def test_chapter_01_shows_what_is_reserved_and_what_is_written(tiny_engine):
    engine = another(tiny_engine, prefill_chunk=64)
    seen, forward = [], engine.forward

    def watched(*arguments):
        seen.append((engine.tiers()[0].as_json(), engine.who()))
        return forward(*arguments)
    engine.forward = watched
    assert engine.tiers()[0].as_json()["runs"] == []
    result = engine.generate(STORY, max_tokens=20)
    prompt = result.usage["prompt_tokens"]
    blocks = -(-(prompt + 20) // 16)
    assert all(tier["blocks"] == blocks for tier, _ in seen) and result.id == 1
    written = [dict((state, count) for state, count, _ in tier["runs"]).get("in use", 0) for tier, _ in seen]
    assert written == sorted(written) and written[0] == 0 and written[-1] == -(-(prompt + len(result.tokens) - 2) // 16)
    assert seen[0][1][0]["state"] == "prefill" and seen[-1][1][0]["state"] == "decode"
    assert seen[-1][1][0]["new_tokens"] == len(result.tokens) - 2
    assert engine.tiers()[0].as_json()["runs"] == [] and engine.who() == []


MOVING = {"03": [("device", "in flight"), ("host", "in flight")],
          "07": [("device", "in flight"), ("host", "in flight")]}
SOURCES = {"02": "miss", "03": "cpu_hit", "07": "cpu_hit"}


@pytest.mark.parametrize("number", ["02", "03", "07"])
def test_what_travels_is_in_flight_and_what_was_evicted_comes_back(number, engine, monkeypatch):
    for name in ("seconds_to_load", "seconds_to_restore"):
        if hasattr(engine, name):
            monkeypatch.setattr(engine, name, lambda *_, **__: 1e-12)
    watched = Watched(engine)
    watched.answer(dict(prompt=STORY, max_tokens=2))
    client = client_of(engine)
    evicted = client.post("/evict", json=dict(tier="device")).json["evicted"]
    assert evicted == len(STORY.encode()) // 16 or evicted > 4
    assert engine.tiers()[0].as_json()["runs"] == [["free", 64, ()]]
    watched.answer(dict(prompt=STORY, max_tokens=2))
    result, request = engine.over[-1]
    assert result.source == SOURCES[number]
    for seen in MOVING.get(number, []):
        assert seen in watched.seen, watched.seen
    plan = engine.drawn(request)
    said = plan.words()
    assert said and ElementTree.fromstring(client.get(f"/timelines/{result.id}.svg").data).tag.endswith("svg")


def holder(**fields):
    """A request as far as tiers know it: its first block is computed."""
    return SimpleNamespace(id=7, saved=1, computed=16, source="miss", cached_tokens=16,
                           answer=SimpleNamespace(tokens=[], prompt_tokens=60), **{"restoration": None, **fields})


def device_states(engine, table: list[int]) -> list[str]:
    states = states_of(engine.tiers()[0].as_json())
    return [states[block][0] for block in table]


@pytest.fixture
def held(engine):
    """-> an engine, and four blocks of the device that are held, by nobody that it knows."""
    table = engine.pool.allocate(4)
    yield engine, table
    engine.running.clear()
    engine.pool.release(table)


@pytest.mark.parametrize("number", ["02", "03", "07"])
def test_what_is_not_computed_yet_is_reserved_and_what_is_being_restored_says_so(number, held):
    engine, table = held
    engine.running = [holder(table=table)]
    assert device_states(engine, table) == ["in use", *["reserved"] * 3] and engine.who()[0]["state"] == "prefill"
    engine.running = [holder(table=table, restoration=iter(()))]
    # A transfer says what comes, and there is none
    assert device_states(engine, table) == ["in use", *["reserved"] * 3] and engine.who()[0]["state"] == "restoring"


@pytest.mark.parametrize("number", ["07"])
def test_pages_that_came_from_storage_are_no_longer_in_flight(engine):
    places = engine.host.allocate(3)
    engine.prefetches = [SimpleNamespace(places=places, arrived=2, keys=[f"{at:064x}" for at in range(5)])]
    _, host, storage = (states_of(tier.as_json()) for tier in engine.tiers())
    assert [host[place][0] for place in places] == ["in use", "in use", "in flight"]
    assert [state for state, _ in storage] == ["in flight"] and engine.tiers()[2].describe(0)[0] == bytes.fromhex(f"{2:064x}")
    engine.prefetches = []
    engine.host.release(places)


@pytest.mark.parametrize("number", ["03", "07"])
def test_what_only_the_device_has_goes_down_before_it_is_evicted(number, engine, monkeypatch):
    monkeypatch.setattr(engine, "seconds_to_load", lambda *_, **__: 1e-12)
    if number == "07":
        engine.write_policy = "write_back"
        engine.detach()
    Watched(engine).answer(dict(prompt=STORY, max_tokens=2, **(dict(offload_after=False) if number == "03" else {})))
    assert not engine.host.cached and engine.pool.cached
    assert client_of(engine).post("/evict", json={}).json["evicted"] > 4
    assert not engine.pool.cached and len(engine.host.cached) > 4
    Watched(engine).answer(dict(prompt=STORY, max_tokens=2))
    assert engine.over[-1][0].source == "cpu_hit"


@pytest.mark.parametrize("number", list(NAMES)[1:4])
def test_blocks_are_told_with_their_tokens_and_keys(number, engine):
    result, = Watched(engine).answer(dict(prompt=STORY, max_tokens=2))
    tokens, client = engine.encode(STORY, None)[0], client_of(engine)
    told = [client.get(f"/blocks/device/{block}").json for block in range(64)]
    cached = [one for one in told if one["state"] == "cached"]
    full = [tokens[start:start + 16] for start in range(0, len(tokens) - 15, 16)]
    assert sorted(one["text"] for one in cached) == sorted(engine.tokenizer.decode(part) for part in full)
    assert all(re.fullmatch("[0-9a-f]{64}", one["key"]) and one["tokens"] == 16 and not one["requests"] for one in cached)
    assert len({one["key"] for one in cached}) == len(cached)
    assert all(one["key"] is None and one["text"] is None and one["tokens"] == 0 for one in told if one["state"] == "free")
    for where in ("host", "storage"):
        if where in TIERS[number]:
            there = [client.get(f"/blocks/{where}/{block}").json for block, (state, _) in enumerate(
                next(states_of(tier.as_json()) for tier in engine.tiers() if tier.name == where)) if state == "cached"]
            assert all(re.fullmatch("[0-9a-f]{64}", one["key"]) for one in there)
            assert there, "nothing is kept there"
    far = client.get(f"/blocks/device/{cached[0]['block']}", environ_base=dict(REMOTE_ADDR="192.0.2.7")).json
    assert far["text"] is None and "own machine" in far["note"] and far["key"]
    for path in ("/blocks/device/64", "/blocks/attic/0"):
        assert "GET /events" in error_of(client.get(path), 404)["message"]


def test_a_block_that_is_being_written_is_told_as_far_as_it_is_written(tiny_engine):
    engine = make("02", tiny_engine, None)
    request, = engine.submit(prompt=[5] * 20, max_tokens=4)
    engine.step()
    client, (full, last) = client_of(engine), request.table
    assert request.computed == 20
    told = client.get(f"/blocks/device/{last}").json
    assert told["tokens"] == 4 and told["key"] is None and told["requests"] == [request.id] and told["state"] == "in use"
    assert client.get(f"/blocks/device/{full}").json["tokens"] == 16
    engine.cancel(request)
    engine.step()


# 2. Events -------------------------------------------------------------------------------------------------------

class Page:
    """Reads a Feed as a page does."""

    def __init__(self, feed, hello=None):
        self.gone, self.lines, self.told = False, feed.events(hello or {}, lambda: self.gone), []

    def read(self) -> list[dict]:
        """The next lines -> what is new."""
        new = [json.loads(line.removeprefix("data: ")) for line in next(self.lines).split("\n\n") if line.startswith("data: ")]
        self.told += new
        return new

    def until(self, kind: str):
        while not any(kind in one for one in self.told):
            self.read()
        return [one[kind] for one in self.told if kind in one]


@pytest.fixture
def quick(monkeypatch):
    """Pages look as often as they can."""
    for name in ("LOOK", "IDLE_LOOK", "NOTICE"):
        monkeypatch.setattr(live, name, 1e-3)


def test_a_page_hears_hello_and_then_what_changes(tiny_engine, quick):
    engine = make("02", tiny_engine, None)
    feed = live.Feed(engine)
    page = Page(feed, dict(chapter="here"))
    assert page.read() == [dict(hello=dict(chapter="here"))] and feed.pages == 1
    assert {kind for one in page.read() for kind in one} == {"requests", "counters", "memory"}
    request, = engine.submit(prompt="Hello", max_tokens=3)
    news = page.read()
    assert dict(requests=engine.who()) in json.loads(json.dumps(news)) and not any("memory" in one for one in news)
    while engine.step():
        pass
    said = page.until("finished")[0]
    result = request.outcome
    assert (said["id"], said["source"], said["usage"], said["ttft_ms"]) == (1, "miss", result.usage, result.ttft_ms)
    assert re.fullmatch(r"until the first token: compute idle \d+%", said["words"])
    count = len(page.until("finished"))
    result.timeline.add("save", "late", result.timeline.began, result.timeline.began + 1)
    while len(page.until("finished")) == count:
        page.read()
    assert page.told[-1]["finished"]["version"] == said["version"] + 1
    page.gone = True
    with pytest.raises(StopIteration):
        page.read()
    assert feed.pages == 0


def test_who_comes_to_an_idle_engine_is_noticed_before_the_next_look_is_due(tiny_engine, monkeypatch):
    monkeypatch.setattr(live, "IDLE_LOOK", 1e9)
    engine = make("02", tiny_engine, None)
    page, request = Page(live.Feed(engine)), []
    page.read()
    page.read()
    timer = threading.Timer(0.05, lambda: request.extend(engine.submit(prompt="Hello", max_tokens=3)))
    timer.start()
    assert any(one.get("requests") for one in page.read()) and request
    engine.cancel(request[0])
    engine.step()
    page.lines.close()


def test_silence_is_broken_now_and_then_and_the_end_of_the_engine_ends_a_page(tiny_engine, quick, monkeypatch):
    monkeypatch.setattr(live, "SILENCE", 0.05)
    engine = make("02", tiny_engine, None)
    feed = live.Feed(engine)
    page = Page(feed)
    page.read()
    page.read()
    assert next(page.lines) == ": still here\n\n"
    engine.close()
    with pytest.raises(StopIteration):
        page.read()
    assert feed.pages == 0


def test_pages_share_one_look_and_a_closed_page_costs_nothing(tiny_engine, monkeypatch):
    engine, looks = make("02", tiny_engine, None), []
    tiers = engine.tiers
    monkeypatch.setattr(engine, "tiers", lambda: looks.append(1) or tiers())
    monkeypatch.setattr(live, "LOOK", 1e9)                          # a look stays new
    feed = live.Feed(engine)
    feed.due = -1e12
    pages = [Page(feed) for _ in range(5)]
    for page in pages:
        page.read()
        assert len(page.read()) == 3
    assert len(looks) == 1
    for page in pages:
        page.lines.close()
    assert feed.pages == 0
    engine.submit(prompt="Hello", max_tokens=3)
    while engine.step():
        pass
    assert len(looks) == 1, "somebody looked for nobody"


def test_who_has_many_blocks_is_looked_at_less_often(tiny_engine, monkeypatch):
    engine, now, looks = make("02", tiny_engine, None), [0.0], []
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    tiers = engine.tiers

    def slow():
        looks.append(now[0])
        now[0] += 2.0
        return tiers()
    monkeypatch.setattr(engine, "tiers", slow)
    feed = live.Feed(engine)
    while now[0] < 100:
        feed.look()
        now[0] += 0.25
    assert 2.0 * len(looks) <= 100 * live.SHARE + 2.0 and len(looks) >= 4


def test_the_last_eight_are_told_to_who_comes_later(tiny_engine, quick):
    engine = another(tiny_engine)
    for _ in range(10):
        engine.generate("Hello", max_tokens=1)
    page = Page(live.Feed(engine))
    page.read()
    page.read()
    assert [said["id"] for said in page.until("finished")] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert "GET /events" in error_of(client_of(engine).get("/timelines/1.svg"), 404)["message"]


def test_events_over_a_socket(tiny_engine, quick):
    """The page's own request; who hangs up is noticed though nothing changes, and too many are refused."""
    import http.client
    engine = make("02", tiny_engine, None)
    with Serving(engine) as port:
        def connect(**headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/events", headers=headers)
            return connection, connection.getresponse()
        connection, response = connect()
        assert response.status == 200 and response.getheader("Content-Type").startswith("text/event-stream")
        lines = iter(response.readline, b"")
        assert next(lines) == b"retry: 1000\n"
        hello = next(json.loads(line[6:])["hello"] for line in lines if line.startswith(b"data: "))
        assert {name: hello[name] for name in INFO} == INFO
        assert hello["evict"] is True and hello["compare"] == dict(measure="TTFT")
        assert [example["name"] for example in hello["examples"]] == list(engine.examples())
        other = connect()
        threads = threading.active_count()
        response.close()
        connection.close()
        eventually(lambda: threading.active_count() < threads)
        other[1].close()
        other[0].close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "PAGES", 0)
        assert "close one" in error_of(client_of(engine).get("/events"), 429)["message"]
        foreign = client_of(engine).post("/evict", json={}, headers=dict(Origin="http://elsewhere.example"))
        said = error_of(foreign, 403)["message"]
        assert "this machine; ask from there" in said and "token" not in said, "chapter 02 has no such option"
    own = client_of(engine).post("/evict", json={}, headers=dict(Origin="http://localhost"))
    assert own.status_code == 200 and own.json == dict(evicted=0)
    assert "device" in error_of(client_of(engine).post("/evict", json=dict(tier="host")), 400)["message"]


def test_an_engine_that_cannot_be_looked_at_is_told(tiny_engine, quick):
    engine = another(tiny_engine)

    def tiers():
        raise RuntimeError("a defect")
    engine.tiers = tiers
    told = client_of(engine).get("/events").get_data(as_text=True).split("\n\n")
    assert "inside the server" in json.loads(told[-2].removeprefix("data: "))["error"]["message"]


# 3. Examples and comparisons -------------------------------------------------------------------------------------

def test_examples_fit_the_context(engine):
    examples = engine.examples()
    assert 2 <= len(examples) <= 4
    for prompt in examples.values():
        assert 0 < len(engine.encode(prompt, None)[0]) < engine.context


WAYS = {"01": ["miss", "miss", "miss"], "02": ["miss", "gpu_hit"], "03": ["miss", "cpu_hit", "cpu_hit", "gpu_hit"],
        "07": ["miss", "storage_hit", "cpu_hit", "gpu_hit"], "08": ["miss"] * 5}


@pytest.fixture(scope="module")
def slow_engine(tmp_path_factory):
    """On a model with which computing takes many times longer than to bring back: it has wide layers and one narrow KV head."""
    return make_engine(write_model(tmp_path_factory.mktemp("models") / "slow", max_position_embeddings=512, hidden_size=256,
                                   intermediate_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=1,
                                   head_dim=16), reorder=False)


def test_a_comparison_answers_in_every_way_with_the_tokens_of_chapter_01(
        number, plain_engine, slow_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "ROUNDS", 2)
    model, prompt = (plain_engine, STORY[:150]) if number in ("01", "02", "08") else (slow_engine, STORY * 2)
    engine = make(number, model, tmp_path)
    before = dict(engine.counts)
    told = events(client_of(engine).post("/compare", json=dict(prompt=prompt, max_tokens=4)))
    *progress, table = told
    rows = table["rows"]
    assert table["measure"] == ("TBT" if number == "08" else "TTFT") and table["disturbed"] is False
    assert [one["progress"]["done"] for one in progress] == list(range(len(progress)))
    assert len(progress) == sum(1 + row["samples"] for row in rows) and all(1 <= row["samples"] <= 2 for row in rows)
    assert {one["progress"]["way"] for one in progress} == {row["way"] for row in rows}
    assert all(row["equal"] for row in rows)
    assert [row["source"] for row in rows] == WAYS[number]
    for row in rows:
        shown = row["tbt_ms"] if number == "08" else row["ttft_ms"]
        assert 0 < row["min_ms"] <= shown <= row["max_ms"]
    assert (table["link"] is None) == (number in ("01", "02"))
    assert engine.counts == before and not engine.over, "it asked the engine that serves"
    engine.close()
    engine.release()


def test_others_who_ask_meanwhile_disturb_a_comparison(tiny_engine):
    engine = another(tiny_engine)
    with ExitStack() as stack, closing(live.compare(engine, [5, 6, 7], 2, stack)) as told:
        next(told)
        engine.generate("Hello", max_tokens=1)
        assert list(told)[-1]["disturbed"] is True


def test_who_was_there_before_disturbs_it_too(tiny_engine):
    engine = make("02", tiny_engine, None)
    engine.submit(prompt="Hello", max_tokens=3)
    with ExitStack() as stack:
        assert list(live.compare(engine, [5, 6, 7], 2, stack))[-1]["disturbed"] is True
    while engine.step():
        pass
    with ExitStack() as stack:
        assert list(live.compare(engine, [5, 6, 7], 2, stack))[-1]["disturbed"] is False


def test_answers_of_one_token_have_no_time_between_tokens(tiny_engine):
    engine = another(tiny_engine)
    engine.compared = "TBT"
    with ExitStack() as stack:
        rows = list(live.compare(engine, [5, 6, 7], 1, stack))[-1]["rows"]
    for row in rows:
        assert (row["tbt_ms"], row["min_ms"], row["max_ms"], row["samples"]) == (None, None, None, 0) and row["ttft_ms"] > 0


def test_a_comparison_ends_with_the_server(tiny_engine):
    engine, gone = another(tiny_engine), []
    ways = engine.ways
    engine.ways = lambda prompt, new, stack: stack.callback(gone.append, 1) and ways(prompt, new, stack)
    response = client_of(engine).post("/compare", json=dict(prompt="Hello"), buffered=False)
    told = response.iter_encoded()
    next(told)
    engine.close()
    assert "shutting down" in json.loads(list(told)[-1].removeprefix(b"data: "))["error"]["message"] and gone == [1]


def test_a_way_that_answers_otherwise_is_told(tiny_engine):
    engine = another(tiny_engine)
    right = engine.generate(prompt=[5, 6, 7], max_tokens=3)
    wrong = SimpleNamespace(**{**vars(right), "tokens": [right.tokens[0] + 1, *right.tokens[1:]]})
    engine.ways = lambda *_: {"right": lambda: right, "wrong": lambda: wrong}
    with ExitStack() as stack:
        rows = list(live.compare(engine, [5, 6, 7], 3, stack))[-1]["rows"]
    assert [(row["way"], row["equal"]) for row in rows] == [("right", True), ("wrong", False)]


def test_a_slow_comparison_is_content_with_fewer_rounds(tiny_engine, monkeypatch):
    engine = another(tiny_engine)
    now = iter(range(0, 10**6, 6))                                  # every look at the clock finds it six seconds later
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    with ExitStack() as stack:
        rows = list(live.compare(engine, [5, 6, 7], 2, stack))[-1]["rows"]
    assert {row["samples"] for row in rows} == {1}


def test_comparisons_run_one_at_a_time_and_end_with_who_asked(tiny_engine):
    engine = another(tiny_engine)
    client, go_on, gone = client_of(engine), threading.Event(), []
    ways = engine.ways

    def waiting(prompt, new, stack):
        stack.callback(gone.append, 1)
        return {name: (lambda way=way: go_on.wait(60) and way()) for name, way in ways(prompt, new, stack).items()}
    engine.ways = waiting
    first = client.post("/compare", json=dict(prompt="Hello"), buffered=False)
    stream = first.iter_encoded()
    assert b"progress" in next(stream)
    assert "Another comparison" in error_of(client.post("/compare", json=dict(prompt="Hello")), 429)["message"]
    stream.close()
    first.close()
    assert gone == [1]
    go_on.set()
    assert "rows" in events(client.post("/compare", json=dict(prompt="Hello")))[-1]


@pytest.mark.parametrize("body,words", [
    (dict(), "either prompt or messages"), (dict(prompt="x" * 300), "shorten the prompt"), (dict(prompt=""), "empty"),
    (dict(prompt="x", max_tokens=1), "from 2 to 64"), (dict(prompt="x", max_tokens=65), "from 2 to 64"),
    (dict(prompt="x", temperature=1), "Unknown field"), (dict(prompt=7), "a string"), ([], "JSON object")])
def test_a_wrong_comparison_is_refused_in_a_sentence(tiny_engine, body, words):
    client = client_of(another(tiny_engine))
    assert words in error_of(client.post("/compare", json=body), 400)["message"]
    assert "rows" in events(client.post("/compare", json=dict(prompt="Hello", max_tokens=2)))[-1]      # and the next one runs


def test_what_a_comparison_has_no_memory_for_is_told(tiny_engine):
    from common.checkpoint import ModelError
    engine = another(tiny_engine)

    def ways(*_):
        raise ModelError("3 blocks take 9.0 GB and 1.0 GB are free; choose a smaller model.")
    engine.ways = ways
    client = client_of(engine)
    for _ in range(2):
        told, = events(client.post("/compare", json=dict(prompt="Hello")))
        assert "are free" in told["error"]["message"] and told["error"]["type"] == "invalid_request_error"


# 4. --svg --------------------------------------------------------------------------------------------------------

def test_a_picture_is_written_with_the_plan_above_the_lanes(tiny_folder, tmp_path, monkeypatch):
    paged = chapter("02_paged_kv")
    monkeypatch.setattr("sys.argv", ["02", "--model", str(tiny_folder), "--prompt", STORY[:60], "--max-tokens", "3",
                                     "--gpu-blocks", "32", "--svg", str(tmp_path / "picture.svg")])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO()))
    app.main(paged.__doc__, "02_paged_kv", paged.add_arguments, paged.make_engine, None)
    picture = (tmp_path / "picture.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "The blocks of the prompt" in picture and "compute" in picture and STORY[:20] not in picture


def test_two_files_of_one_name_are_refused_before_anything_is_done(tiny_folder, tmp_path, monkeypatch):
    paged = chapter("02_paged_kv")
    monkeypatch.setattr("sys.argv", ["02", "--model", str(tiny_folder), "--prompt", "x", "--json", str(tmp_path / "one"),
                                     "--svg", str(tmp_path / "." / "one")])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit, match="name the same file; give each its own"):
        app.main(paged.__doc__, "02_paged_kv", paged.add_arguments, paged.make_engine, None)
    assert not (tmp_path / "one").exists()
