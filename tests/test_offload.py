"""Chapter 03: which blocks are copied to host memory and when, and how they are restored."""

import random

import pytest

from common import estimates
from common.cache import Match
from common.link import Transfer
from common.requests import Request
from shell import charts
from shell.frontend import check_fields
from tests.support import engines
from tests.support.engines import ORACLE, ask, ask_and_evict, check_pools, draw, evict, make, wait_until_idle

offload = engines.offload
BLOCK = 16 * engines.tiny_model().config.kv_numbers_per_token * 4  # bytes per block


class Lane:
    """Replaces a link's copies: records each transfer, and copies at once or when a test calls `deliver`."""

    def __init__(self, link, at_once=True):
        self.link, self.at_once, self.sent, self.waiting, self.failing = link, at_once, [], [], False
        link.copy = self.copy

    def copy(self, dst, src, label, pairs):
        dst = [dst[to : to + count] for to, _, count in pairs.runs]
        src = [src[at : at + count] for _, at, count in pairs.runs]
        transfer = Transfer(self.link.name, label, sum(piece.nbytes for piece in dst))
        self.sent.append((transfer, dst))
        self.waiting.append((transfer, dst, src))
        if self.at_once:
            self.deliver()
        return transfer

    def deliver(self, count: int = 1 << 30):
        for transfer, dst, src in self.waiting[:count]:
            for to, out_of in zip(dst, src, strict=True):
                to.copy_(out_of)
            transfer.finish(transfer.issued, transfer.issued, OSError("broken") if self.failing else None)
        del self.waiting[:count]
        self.link.wake()

    @property
    def labels(self):
        return [transfer.label for transfer, _ in self.sent]


def engine_for(host: int = 64, blocks: int = 64, save=True, load=True, cache=offload.HostCache, **options):
    """Return (engine, its cache, save lane, load lane). `save`, `load`: True if the lane copies at once."""
    engine = make(cache := cache(host, 2e9), blocks, **options)
    return engine, cache, Lane(cache.save_link, save), Lane(cache.load_link, load)


PROMPT = draw(random.Random(0), 100)  # 6 blocks and 4 tokens

# 1. Out ----------------------------------------------------------------------------------------

def test_blocks_are_saved_as_they_fill():
    engine, cache, save, _ = engine_for(token_budget=40)
    engine.submit(request := Request(PROMPT, 30))
    for _ in range(31):
        engine.step()
        assert request.outcome is None and engine.counts["swap_outs"] == request.computed // 16
    assert save.labels == ["save 2", "save 3", "save 1", "save 1", "save 1"], "saves after 40, 80, 100, 112 and 128 tokens"
    wait_until_idle(engine)
    assert len(cache.host.find(request.chain)) == 8
    saves = [span.label for span in request.timeline.spans if span.lane == "save"]
    assert saves == save.labels, "a save is in its request's timeline"
    check_pools(engine)
    cache.host.make_room(cache.host.size - 2)
    assert len(cache.host.find(request.chain)) == 2, "a chain that was saved in several copies is evicted from its tail, too"


def test_a_block_is_saved_once():
    engine, cache, save, _ = engine_for(save=False)
    for _ in range(2):
        ask(engine, PROMPT)
        assert not cache.host.block_of, "blocks are not found before they have arrived"
    engine.generate([Request(PROMPT[:64] + draw(random.Random(seed), 36), 2) for seed in (1, 2)])
    save.deliver()
    evict(engine)
    ask(engine, PROMPT)
    check_pools(engine)
    assert save.labels == ["save 6", "save 2", "save 2"] and len(cache.host.block_of) == 10


def test_a_conversation_continues_in_adjacent_host_blocks():
    engine, cache, _, load = engine_for()
    first, other = ask(engine, PROMPT), ask(engine, draw(random.Random(2), 60))
    wait_until_idle(engine)
    cache.host.evict([cache.host.block_of[block_key] for block_key in other.chain])  # these blocks were after those of `first`
    turn = ask_and_evict(engine, first.tokens + draw(random.Random(3), 60), 2)
    assert ask(engine, turn.tokens).found == {"cpu": 160}
    assert [len(pieces) for _, pieces in load.sent] == [1, 1, 1], "each layer is one copy"


def test_adjacent_blocks_are_copied_in_one_piece_and_counted():
    engine, cache, save, load = engine_for(blocks=40)
    for _ in range(2):
        ask_and_evict(engine, PROMPT)
    assert save.labels == ["save 6"] and load.labels == ["layer 0", "layer 1", "layer 2"]
    counts = charts.counters(engine)
    assert (counts["swap_outs"], counts["bytes_out"]) == (6, 6 * BLOCK) == (counts["swap_ins"], counts["bytes_in"])
    assert (counts["host_blocks"], counts["host_cached"], counts["host_free"]) == (64, 6, 58)
    assert counts["restored_tokens"] == counts["cpu_hit_tokens"] == 96
    assert (counts["gpu_hits"], counts["cpu_hits"], counts["misses"]) == (0, 1, 1)
    engine.pool.release(engine.pool.allocate(40)[::2])  # every other block is free
    assert ORACLE.judge(back := ask(engine, PROMPT)) == "equal" and back.found == {"cpu": 96}
    assert [len(pieces) for _, pieces in load.sent] == [1, 1, 1, 6, 6, 6], "there is one transfer per layer in each case"


# 2. In -----------------------------------------------------------------------------------------

class Following(offload.HostCache):
    """A HostCache in which a layer arrives only after the input of the layer before it was computed."""

    def attach(self, engine):
        super().attach(engine)
        self.seen = []

    def restore(self, request, restoration, match):
        for transfer in super().restore(request, restoration, match):
            if transfer.label == "layer 0":
                self.lane.deliver(1)
            yield transfer

    def save_layer(self, layer, hidden, batch):
        if self.lane.sent:
            self.seen.append((layer, len(hidden), [transfer.ready for transfer, _ in self.lane.sent]))
            self.lane.deliver(1)


def test_the_forward_pass_follows_the_copies_by_one_layer(monkeypatch):
    monkeypatch.setattr(estimates, "MAX_WAIT", 5.0)  # a question that waited for all layers would wait forever
    engine, cache, _, load = engine_for(load=False, cache=Following)
    cache.lane = load
    ask_and_evict(engine, PROMPT)
    request = ask(engine, PROMPT + [5, 6, 7], 1)
    assert cache.seen == [(0, 7, [True, False, False]), (1, 7, [True, True, False]), (2, 7, [True, True, True])]
    assert request.found == {"cpu": 96} and not engine.counts["failed_restorations"] and ORACLE.judge(request) == "equal"
    layers = [span.label for span in request.timeline.spans if span.lane == "load"]
    assert layers == ["layer 0", "layer 1", "layer 2"]


def test_blocks_on_the_device_are_not_loaded():
    engine, _, _, load = engine_for()
    chain = ask(engine, PROMPT).chain
    wait_until_idle(engine)
    engine.pool.evict([engine.pool.block_of[block_key] for block_key in chain[4:6]])
    request = ask(engine, PROMPT)
    assert request.found == {"gpu": 64, "cpu": 32} and request.source == "mixed"
    assert sum(transfer.bytes for transfer, _ in load.sent) == 2 * BLOCK and ORACLE.judge(request) == "equal"


def test_a_match_covers_whole_blocks_before_the_last_token():
    engine, cache, _, load = engine_for(load=False)
    request = ask(engine, PROMPT[:97], 1)
    wait_until_idle(engine)
    asked = Request(PROMPT[:96], 1, chain=request.chain)
    match = cache.match(asked)
    assert isinstance(match, Match) and (match.tokens, len(match.blocks)) == (80, 5)
    assert match.seconds == cache.load_link.seconds(5 * BLOCK, 3)
    asked.computed = 32
    assert cache.match(asked).tokens == 48
    assert cache.match(Request(draw(random.Random(5), 60), 1)) is None


# 3. Eviction on the host -----------------------------------------------------------------------

A, B, C = (draw(random.Random(seed), 65) for seed in (6, 7, 8))  # four blocks each


def kept(engine, prompt) -> int:
    """Return how many blocks of a prompt are in host memory."""
    wait_until_idle(engine)
    return len(engine.lower_tier.cache.host.find(engine.block_keys.extend([], prompt)))


@pytest.mark.parametrize("asked, blocks", [([A, B, C], [2, 4, 4]), ([A, B, A, C], [4, 2, 4])])
def test_the_tail_of_the_least_recently_used_conversation_is_evicted(asked, blocks):
    """A hit on the device also counts as use of the blocks in host memory."""
    engine, _, _, _ = engine_for(host=10)
    for prompt in asked:
        request = ask(engine, prompt)
        wait_until_idle(engine)
    assert [kept(engine, prompt) for prompt in (A, B, C)] == blocks
    assert request.source == "miss" and ask(engine, A).source == "gpu_hit"


@pytest.mark.parametrize("budget", [16, 48, 512])
def test_a_chain_does_not_evict_its_own_head(budget):
    """A host pool of five blocks keeps the first five blocks, without a gap, however steps divide the prompt."""
    engine, *_ = engine_for(5, token_budget=budget)
    ask(engine, draw(random.Random(9), 70))  # four blocks of another conversation, which may be evicted
    wait_until_idle(engine)
    ask(engine, PROMPT + A + B)
    assert kept(engine, PROMPT + A + B) == 5


def test_offload_after_false_saves_no_block():
    engine, _, save, _ = engine_for()
    ask(engine, PROMPT, offload_after=False)
    assert not save.sent and kept(engine, PROMPT) == 0
    ask(engine, PROMPT)
    assert save.labels == ["save 6"], "a request without the option has all of its blocks saved"
    assert check_fields(dict(offload_after=False), engine.fields) == dict(offload_after=False)
    with pytest.raises(Exception, match="offload_after must be true or false"):
        check_fields(dict(offload_after="no"), engine.fields)


def test_blocks_of_two_requests_are_saved_in_the_same_step():
    engine, _, save, _ = engine_for(save=False)
    engines.submit(engine, Request(A, 1), Request(B, 1), steps=1)
    assert save.labels == ["save 4", "save 4"]


def test_a_block_is_not_saved_without_its_parent():
    """Otherwise `match` could not find it: here the first blocks leave host memory while the request runs."""
    engine = make(cache := offload.HostCache(2, 1e9))
    engines.submit(engine, request := Request(PROMPT, 40), steps=2)
    cache.drain()
    assert len(cache.host.cached) == 2
    cache.host.evict(cache.host.cached)
    engines.until_over(engine, request)
    assert kept(engine, request.tokens[:-1]) == len(cache.host.block_of) == 2


def test_an_exception_in_one_callback_stops_no_other_and_no_closing(caplog):
    engine, over, seen = make(cache := offload.HostCache(6, 1e9)), Transfer("load", "nothing"), []
    over.finish(0.0, 0.0)
    for number in range(2):
        then = lambda arrived, number=number: seen.append(1 / number)  # noqa: E731
        cache.hold("load", [over], given=[(engine.pool, engine.pool.allocate(1))], then=then)
    check_pools(engine)
    assert seen == [1.0] and "ZeroDivisionError" in caplog.text
    for raises, closes in ("load_link", "save_link"), ("save_link", "load_link"):
        cache = make(offload.HostCache(6, 1e9)).lower_tier.cache
        getattr(cache, raises).close = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            cache.close()
        assert getattr(cache, closes).closed.is_set()


@pytest.mark.parametrize("steps, by", [(1, "step"), (4, "request")])
def test_a_failed_copy_is_made_again(steps, by):
    """If the request still runs, the next step repeats the copy. If it has ended, the next request does."""
    engine, cache, save, _ = engine_for(save=False)
    save.failing = True
    engines.submit(engine, Request(PROMPT, 4), steps=steps)
    save.deliver()
    save.failing = False
    for _ in range(2):
        engine.step() if by == "step" else check_pools(engine)
    assert bool(cache.saving) == (by == "step") and not cache.host.block_of, "a copy that failed is forgotten"
    ask(engine, PROMPT)
    assert save.labels == ["save 6"] * 2 and not cache.host.block_of, "blocks are copied again, and not found before they have arrived"
