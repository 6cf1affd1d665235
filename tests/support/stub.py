"""A stub engine without a model, for tests of the server and the command line.

Its answer repeats the prompt's tokens, one token per request and step. `hold()` makes the next step wait until `let()`.
`hold_after(n)` allows n more steps that compute. The next step raises `error`, if it is set. With `explain` it prints
the thread of each step, and whether `close` was called during a step."""
import importlib
import threading
import time

from common.prefixes import BlockKey
from common.requests import RequestQueue

paged = importlib.import_module("02_paged_kv")


class Engine(RequestQueue):
    fields = {"cache_salt": (lambda v: isinstance(v, str) and len(v) <= 256, "at most 256 characters")}

    def __init__(self, model=None, blocks: int = 64, max_running: int = 4, pause: float = 0.0):
        super().__init__(capacity=16 * blocks or None)
        self.model, self.max_running, self.pause = model, max_running, pause
        self.pools = {name: paged.BlockPool(blocks, 16) for name in ("device", "host") if blocks}
        for pool in self.pools.values():
            pool.block_bytes = 1024  # the pools have no memory
        self.gate, self.error, self.closed = threading.Event(), None, False
        self.left, self.asleep, self.asked = None, False, []
        self.stepping = False
        self.gate.set()

    def hold(self):
        self.gate.clear()

    def hold_after(self, steps: int | None):
        self.left = steps
        self.gate.set()

    def let(self):
        self.hold_after(None)

    @property
    def held(self) -> bool:
        return not self.gate.is_set()

    def submit(self, request):
        super().submit(request)
        self.asked.append(request)

    def step(self):
        self.stepping = True
        self.gate.wait()
        self.counts["steps"] += 1
        self.log_event("step", self.running, words=f"on {threading.current_thread().name}")
        self.take_arrivals()
        while self.waiting and len(self.running) < self.max_running:
            self.admit(self.waiting.popleft())
        if self.running and self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.gate.clear()
                self.gate.wait()
        if self.error:
            error, self.error = self.error, None
            raise error
        for request in list(self.running):
            began, label = time.perf_counter(), "decode" if request.new else f"prefill {request.pending}"
            time.sleep(self.pause)
            request.computed = request.next = len(request.tokens)
            request.timeline.add("compute", label, began, time.perf_counter())
            prompt = request.tokens[:request.prompt_tokens]
            said = [token for token in prompt if token not in request.end_tokens]
            request.push(said[len(request.new) % len(said)])
            if request.finish_reason:
                self.finish(request)
        if not self.busy:
            self.asleep = not self.wake.is_set()
            self.wake.wait()
            self.asleep = False
            self.wake.clear()
        self.stepping = False

    def admit(self, request):
        if pool := self.pools.get("device"):
            pool.evict(list(pool.cached))
            blocks = pool.num_blocks(request.prompt_tokens + request.max_tokens)
            request.table = pool.allocate(min(blocks, pool.available), after=-1)  # the pool's first blocks
        request.decisions.append("nothing was offered: the prompt is computed")
        self.running.append(request)

    def release(self, request):
        for block in request.table:
            self.pools["device"].register(block, BlockKey(None, (), b""))
            self.pools["device"].release([block])

    def close(self):
        self.closed = True
        self.log_event("close", self.running, words="in a step" if self.stepping else "between steps")
