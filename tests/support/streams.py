"""A GPU that is not there: run code written for CUDA on a CPU, in any order that its streams allow.

    with emulate("late copies", seed=1) as gpu:     # device="cuda" and torch.cuda.* mean the emulated device
        ...                                         # code under test, unchanged
    gpu.waits, gpu.copies, gpu.errors               # where the host waited, what was copied, what failed

An operation on device memory is put at the end of the current stream and runs later: when the host waits for
it, when an event is asked for, or when the schedule likes. A stream keeps its order; between streams only
events order anything. So a wait that is missing gives a wrong number in some schedule:

    late            nothing runs before the host waits for it
    early           everything runs at once
    late copies     the compute stream runs as far as events let it, the others are late
    late compute    the other way round
    random          any stream runs a little further now and then, by the seed

Memory holds NaN (integers: -1) from its allocation until an operation has written it, and again from its
death on, in the order of the stream that it was allocated in; then the next tensor may get it, as from
PyTorch's caching allocator. `record_stream` delays both. Pinned memory is read and written when a copy runs.

A tensor of the device is a DeviceTensor: PyTorch hands every operation on it to `__torch_dispatch__`, on any
thread. Its numbers lie in ordinary memory that the emulator owns (`raw`); queued items hold `raw`, and not
the tensor. Shapes are found by running each new kind of call once on other memory of the same shape.

Not covered: several devices, graphs, autograd (it ends the process), resizing `out=`, speed, and whatever
depends on the kernels of a GPU.
"""

import contextlib
import functools
import random
import threading
import time
from collections import defaultdict, deque
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SCHEDULES = "late", "early", "late copies", "late compute", "random"
LATE = 0.02  # seconds that a thread waits before what it waits for is run

# 1. Streams, and who runs next -----------------------------------------------------------------


class Stream:
    """A queue of items: functions, or (another stream, number of its items that must be over first)."""

    def __init__(self, device=None, priority=0, **_):
        self.gpu, self.queue, self.issued, self.done = Gpu.now, deque(), 0, 0

    def wait_event(self, event):
        if event.at is not None:
            self.gpu.put(event.at, self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        self.gpu.wait("stream", self)

    def query(self) -> bool:
        return self.gpu.ask(self, self.issued)


class Event:
    def __init__(self, enable_timing=False, **_):
        self.timing, self.at, self.time = enable_timing, None, None

    def record(self, stream=None):
        stream = stream or Gpu.now.current
        self.at = stream, stream.gpu.put(functools.partial(self.pass_by, time.perf_counter), stream)

    def pass_by(self, clock):
        self.time = clock()

    def wait(self, stream=None):
        (stream or Gpu.now.current).wait_event(self)

    def query(self) -> bool:
        return self.at is None or self.at[0].gpu.ask(*self.at)

    def synchronize(self):
        if self.at is not None:
            self.at[0].gpu.wait("event", *self.at)

    def elapsed_time(self, other) -> float:
        over = all(at and at[0].done >= at[1] for at in (self.at, other.at))
        if not (self.timing and other.timing and over):
            raise RuntimeError("CUDA error: an event without timing, or one that is not over")
        return 1e3 * (other.time - self.time)


class Gpu:
    """The device. `copies`: (direction, bytes) of each copy between it and the host; `errors`: what queued
    operations have raised, which on a GPU would end the process."""

    now = None

    def __init__(self, schedule: str, seed: int):
        Gpu.now = self
        self.schedule, self.rng, self.lock = schedule, random.Random(f"{schedule} {seed}"), threading.RLock()
        self.own, self.thread = threading.local(), threading.get_ident()  # what is each thread's own; the first
        self.default, self.allocator, self.free = Stream(), Stream(), defaultdict(list)
        self.copies, self.errors, self.dead, self.busy = [], [], deque(), {}  # busy: streams with a queue
        self.refuses = False

    @property
    def current(self) -> Stream:
        return getattr(self.own, "stream", self.default)

    @property
    def waits(self) -> list[str]:
        """What has made the calling thread wait, in order."""
        return self.own.__dict__.setdefault("waits", [])

    def put(self, item, stream: Stream) -> int:
        """Queue an item -> its number in the stream."""
        with self.lock:
            self.bury()
            number = self.append(item, stream)
            if self.schedule != "late" or self.allocator in self.busy:
                self.run_ahead()
        return number

    def append(self, item, stream: Stream) -> int:
        stream.queue.append(item)
        stream.issued += 1
        self.busy[stream] = None
        return stream.issued

    def run_next(self, stream: Stream):
        item = stream.queue.popleft()
        if not stream.queue:
            del self.busy[stream]
        if callable(item):
            try:
                item()
            except Exception as error:
                self.errors.append(error)
        stream.done += 1

    def runnable(self) -> list[Stream]:
        """-> streams whose next item waits for nothing."""
        heads = [(stream, stream.queue[0]) for stream in self.busy]
        return [stream for stream, head in heads if callable(head) or head[0].done >= head[1]]

    @torch.inference_mode()
    def run_ahead(self):
        """Run what the schedule runs though nobody waits for it; poison what is dead soon in all."""
        if self.schedule == "random":
            while self.rng.random() < 0.6 and (streams := self.runnable()):
                self.run_next(self.rng.choice(streams))
            return
        computes, copies = {"early": (True, True), "late copies": (True, False),
                            "late compute": (False, True)}.get(self.schedule, (False, False))  # fmt: skip
        may = lambda one: computes if one is self.default else copies or one is self.allocator  # noqa: E731
        while streams := list(filter(may, self.runnable())):
            for stream in streams:
                self.run_next(stream)

    def reach(self, stream: Stream, number: int):
        """Run what must be over before the stream has come so far, and no more."""
        if stream.done >= number:
            return
        with self.lock, torch.inference_mode():
            while stream.done < number:
                if not callable(stream.queue[0]):
                    self.reach(*stream.queue[0])
                self.run_next(stream)

    def wait(self, why: str, stream: Stream | None = None, number: int | None = None):
        """Make the host wait; for what was asked to be waited for, not if it is over."""
        stream, asked_for = stream or self.current, why in ("event", "stream", "device")
        number = stream.issued if number is None else number
        if stream.done < number or not asked_for:
            self.waits.append(why)
        if self.refuses and not asked_for and why != "pageable copy":
            raise RuntimeError(f"called a synchronizing CUDA operation ({why})")
        if threading.get_ident() != self.thread and self.schedule != "early":
            time.sleep(LATE)  # so that what waits on a thread hurries no copy
        self.reach(stream, number)

    def ask(self, stream: Stream, number: int) -> bool:
        """The host asks whether a stream has come so far: often it has not yet, after some asking it has."""
        if stream.done < number and self.rng.random() < 0.04:
            self.reach(stream, number)
        return stream.done >= number

    def set_debug_mode(self, mode):
        self.refuses = mode in ("error", 2)

    def synchronize(self, device=None):
        with self.lock:
            self.bury()
        self.wait("device")
        for stream in list(self.busy):
            self.reach(stream, stream.issued)

    # Memory

    def allocate(self, layout: tuple) -> "DeviceTensor":
        """-> a tensor that holds rubbish, in new memory or in what died in this stream before."""
        stream, size = self.current, size_of(layout)
        with self.lock:
            self.bury()
            free = self.free[stream, size]
            if free and self.rng.random() < 0.5:  # else what is read too early may be right by chance
                base = free.pop()
            else:
                base = FULL((size,), 255, dtype=torch.uint8)
        raw = base.view(layout[2]).as_strided(*layout[:2])
        return DeviceTensor.on(raw, Memory(self, base, stream), layout)

    def bury(self):
        """Poison what has died: behind all that its stream has been given, and where it was recorded."""
        while self.dead:
            base, stream, recorded = self.dead.popleft()
            if not recorded:
                self.append(functools.partial(base.fill_, 255), stream)
                self.free[stream, len(base)].append(base)
                continue
            for other in {stream, *recorded}:
                self.append((other, other.issued), self.allocator)
            self.append(functools.partial(self.return_memory, base, stream), self.allocator)

    def return_memory(self, base, stream: Stream):
        base.fill_(255)
        self.free[stream, len(base)].append(base)


class Memory:
    """What the tensors that share one storage hold: with the last of them it dies."""

    def __init__(self, gpu: Gpu, base: torch.Tensor, stream: Stream):
        self.gpu, self.base, self.stream, self.recorded = gpu, base, stream, set()

    def __del__(self):
        self.gpu.dead.append((self.base, self.stream, self.recorded))


# 2. Tensors ------------------------------------------------------------------------------------

FULL, TO, aten = torch.full, torch.Tensor.to, torch.ops.aten
MAKE = torch.Tensor._make_wrapper_subclass
WAITING = {"nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "argwhere", "bincount"}
NOT_WAITING = {"is_pinned", "is_same_size", "_fused_sdp_choice", "result_type", "is_floating_point"}
INDEXING = {"getitem", "setitem", "index", "index_put_"}  # take indices from the host, and wait for them


def layout_of(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


@functools.cache
def size_of(layout: tuple) -> int:
    """-> bytes of memory, a power of two."""
    shape, strides, dtype = layout
    last = sum((length - 1) * stride for length, stride in zip(shape, strides))
    return 1 << max(9, ((last + 1) * dtype.itemsize - 1).bit_length()) if 0 not in shape else 512


class DeviceTensor(torch.Tensor):
    """A tensor of the device. `raw`: its numbers, as they are now."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def on(raw: torch.Tensor, memory: Memory, layout=None) -> "DeviceTensor":
        shape, strides, dtype = layout = layout or layout_of(raw)
        made = MAKE(DeviceTensor, shape, strides=strides, dtype=dtype, device=CUDA)
        made.raw, made.memory, made.form = raw, memory, layout
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and not (type(args[0]) is type(args[1]) is DeviceTensor):
            return copy(*args, **(kwargs or {}))
        if kind_of(func) == "view":
            return views(func(args[0].raw, *args[1:], **(kwargs or {})), args[0])
        return run(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        self.raw, self.memory, self.form = other.raw, other.memory, other.form

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self):
        Gpu.now.wait("tolist")
        return self.raw.tolist()

    # PyTorch's own ask for a guard of the device, which a build for CPUs lacks

    def contiguous(self):
        return aten.contiguous.default(self)

    def nonzero(self):
        return aten.nonzero.default(self)

    def copy_(self, source, non_blocking=False):
        return aten.copy_.default(self, source, non_blocking)

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    __index__ = __int__

    def __getitem__(self, index):
        return run(getitem, (self, index if isinstance(index, tuple) else (index,)), {})

    def __setitem__(self, index, value):
        if isinstance(value, torch.Tensor) and type(value) is not DeviceTensor and value.dim():
            return self[index].copy_(value)
        run(setitem, (self, index if isinstance(index, tuple) else (index,), value), {})


def getitem(tensor, index):
    return tensor[tuple(index)]


def setitem(tensor, index, value):
    tensor[tuple(index)] = value


@functools.cache
def kind_of(func) -> str:
    """Whether a call makes a view, makes the host wait, or writes to an argument: "" if it may be none."""
    if func in (getitem, setitem):
        return "write" if func is setitem else ""
    name, schema = func._opname, func._schema
    if func.namespace == "mkldnn":
        raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend.")
    others = [each for each in schema.returns if "Tensor" not in str(each.type)]
    if name in WAITING or others and name not in NOT_WAITING:
        return "wait"
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
        return "write"
    return "view" if func.is_view and not func._can_decompose() else ""


def lowered(value, key: list, indexing: bool):
    """Device tensors in an argument -> their numbers; add all but the numbers to `key`. Raises RuntimeError
    for tensors of the host."""
    kind = type(value)
    if kind is DeviceTensor:
        key.append(value.form)
        return value.raw
    if kind is list or kind is tuple:
        key.append(len(value))
        return [lowered(each, key, indexing) for each in value]
    if isinstance(value, torch.Tensor):
        key.append(layout_of(value))
        if value.dim() and not (indexing and not value.is_floating_point()):
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!")
        if value.dim():
            Gpu.now.wait("index from the host")
        return value.clone()
    key += (kind, value.start, value.stop, value.step) if kind is slice else (kind, value)
    return value


def views(raws, source: DeviceTensor):
    """-> tensors over the same memory; PyTorch wants them to be inference tensors only if that one is."""
    with torch.inference_mode(source.is_inference()):
        if isinstance(raws, torch.Tensor):
            return DeviceTensor.on(raws, source.memory)
        return type(raws)(DeviceTensor.on(raw, source.memory) for raw in raws)


def run(func, args, kwargs):
    """Queue an operation -> its results, which hold rubbish until it has run."""
    gpu, name, kind = Gpu.now, getattr(func, "_opname", func.__name__), kind_of(func)
    if (device := kwargs.get("device")) is not None:  # of new_empty, zeros_like and so on
        kwargs = {**kwargs, "device": CPU}
    key = [func, *kwargs]
    given = [lowered(value, key, name in INDEXING) for value in args]
    named = {word: lowered(value, key, False) for word, value in kwargs.items()}
    if name in INDEXING and any(isinstance(each, (list, torch.Tensor)) for each in given[1]):
        masks = [getattr(each, "dtype", None) == torch.bool for each in given[1]]
        if any(isinstance(each, list) for each in given[1]) or any(masks):
            gpu.wait("indices")  # a list goes over, a mask is counted
        kind = kind or ("wait" if any(masks) else "")
    if kind == "wait":
        gpu.wait(name)
        return tree_map_only(torch.Tensor, filled, func(*given, **named))
    if device is not None and device.type == "cpu":
        return func(*given, **named)
    key = tuple(key)
    if (way := PLANS.get(key)) is None:
        way = PLANS[key] = plan(func, given, named)
    if kind == "write":
        gpu.put(functools.partial(func, *given, **named), gpu.current)
        return kwargs.get("out", args[0]) if way else None
    if way == "view":
        return views(func(*given, **named), args[0])
    outs = [gpu.allocate(layout) for layout in way[1]]
    if "empty" not in name:
        gpu.put(functools.partial(compute, func, given, named, [out.raw for out in outs]), gpu.current)
    return outs if way[0] else outs[0]


def compute(func, given, named, raws):
    results = func(*given, **named)
    for raw, result in zip(raws, [results] if isinstance(results, torch.Tensor) else results):
        raw.copy_(result)


PLANS: dict = {}  # a call, without numbers -> (whether it returns several, layouts), "view", or for a write


@torch.inference_mode()
def plan(func, given, named):
    """Run a call on other memory of the same layout, to see what it returns. Raises what is wrong with it."""
    given, named = tree_map_only(torch.Tensor, stand_in, (given, named))
    results = func(*given, **named)
    if kind_of(func) == "write":
        return results is not None
    outs = [results] if isinstance(results, torch.Tensor) else results
    both = *outs[:1], *given[:1]
    if all(isinstance(each, torch.Tensor) for each in both):
        if len({each.untyped_storage()._cdata for each in both}) == 1:
            return "view"
    return outs is results, [layout_of(out) for out in outs]


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    made = FULL((size_of(layout_of(tensor)),), 0, dtype=torch.uint8).view(tensor.dtype)
    made = made.as_strided(tensor.shape, tensor.stride())
    return made.fill_(1) if tensor.is_floating_point() else made


def filled(host: torch.Tensor) -> DeviceTensor:
    """-> a tensor with these numbers, which a kernel of the device makes."""
    made = Gpu.now.allocate(layout_of(host))
    Gpu.now.put(functools.partial(made.raw.copy_, host), Gpu.now.current)
    return made


# 3. Between host and device --------------------------------------------------------------------


def is_pinned(tensor, device=None) -> bool:
    return type(tensor) is not DeviceTensor and getattr(tensor.untyped_storage(), "pinned", False)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


def copy(to, source, non_blocking=False):
    """Queue a copy. The host waits if it must, or if its side is pageable or not contiguous (PyTorch makes a
    pageable copy of that first)."""
    gpu, upload = Gpu.now, type(to) is DeviceTensor
    host = source if upload else to
    alike = to.dtype == source.dtype and to.shape == source.shape
    straight = alike and host.is_contiguous() and is_pinned(host)
    expanded = source.raw.expand(to.shape) if not upload else source.expand(to.shape)
    if upload and not straight:
        if non_blocking:
            gpu.wait("pageable copy")
        expanded = TO(expanded, to.dtype, copy=True)
    gpu.copies.append(("to the device" if upload else "to the host", to.numel() * to.element_size()))
    gpu.put(functools.partial((to.raw if upload else to).copy_, expanded), gpu.current)
    if not non_blocking:
        gpu.wait("blocking copy")
    elif not upload and not straight:
        gpu.wait("pageable copy")
    return to


def to(tensor, *args, **kwargs):
    """Tensor.to, between host and device too."""
    parsed = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **parsed)
    kind, dtype = device.type if device else tensor.device.type, dtype or tensor.dtype
    if kind == tensor.device.type or "meta" in (kind, tensor.device.type):
        return TO(tensor, dtype) if kind == "cuda" else TO(tensor, *args, **kwargs)
    if type(tensor) is DeviceTensor:
        tensor = TO(tensor, dtype)
    strides = (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()
    if kind == "cuda":
        return copy(Gpu.now.allocate((tensor.shape, strides, dtype)), tensor, non_blocking)
    out = torch.empty_strided(tensor.shape, strides, dtype=dtype)
    return copy(pinned(out) if non_blocking else out, tensor, non_blocking)


# 4. The device in place of torch.cuda ----------------------------------------------------------

MADE_BY_KERNELS = "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"


def factory(name: str):
    """-> torch.empty, torch.tensor and so on, which know pinned memory and the device."""
    original = getattr(torch, name)

    def make(*args, device=None, pin_memory=False, **kwargs):
        if pin_memory:
            return pinned(original(*args, **kwargs))
        if device is None or name == "empty" or torch.device(device).type != "cuda":
            return original(*args, device=device, **kwargs)
        made = original(*args, **kwargs)
        return filled(made) if name in MADE_BY_KERNELS else made.to(CUDA)

    return make


def empty(size, strides=None, *, dtype=None, **_):
    strides = strides or torch.empty(size, device="meta").stride()
    return Gpu.now.allocate((torch.Size(size), tuple(strides), dtype or torch.get_default_dtype()))


@contextlib.contextmanager
def on_stream(stream):
    own, before = Gpu.now.own, Gpu.now.current
    own.stream = stream or before
    try:
        yield
    finally:
        own.stream = before


@contextlib.contextmanager
def emulate(schedule: str = "late", seed: int = 0):
    """-> a Gpu, which is the device "cuda" until the end of the block. Then all that is queued runs."""
    gpu = Gpu(schedule, seed)
    cuda = dict(
        Stream=Stream, Event=Event, stream=on_stream, current_stream=lambda device=None: gpu.current,
        default_stream=lambda device=None: gpu.default, synchronize=gpu.synchronize, _lazy_init=lambda: None,
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda device: None,
        mem_get_info=lambda device=None: (8 << 30, 8 << 30), get_device_name=lambda device=None: "emulated",
        is_bf16_supported=lambda *_: True, is_initialized=lambda: True, empty_cache=lambda: None,
        set_sync_debug_mode=gpu.set_debug_mode, _sleep=lambda cycles: gpu.put(int, gpu.current),
    )  # fmt: skip
    methods = dict(
        to=to, cuda=lambda tensor, *_, **options: tensor.to(CUDA, **options),
        cpu=lambda tensor: tensor.to(CPU),
        pin_memory=lambda tensor: pinned(tensor.clone()), is_pinned=is_pinned,
        record_stream=lambda tensor, stream: tensor.memory.recorded.add(stream),
    )  # fmt: skip
    functions = {name: factory(name) for name in ("empty", "tensor", "as_tensor", *MADE_BY_KERNELS)}
    functions["_has_compatible_shallow_copy_type"] = lambda one, other: type(one) is type(other)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")  # for what PyTorch's own functions allocate
    library.impl("empty_strided", empty, "CUDA")
    try:
        with mock.patch.multiple(torch.cuda, create=True, **cuda), mock.patch.multiple(torch, **functions):
            with mock.patch.multiple(torch.Tensor, **methods), torch.no_grad():
                yield gpu
                gpu.synchronize()
    finally:
        library._destroy()
        Gpu.now = None
