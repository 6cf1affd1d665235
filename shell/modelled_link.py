"""The link of a machine without a GPU: `--link`, and how fast it is by default."""
import time

import torch

from common.link import LATENCY, PIECE, Bandwidth
from common.speed import ROWS, fastest_layer
from shell import cli
from shell.checkpoint import ModelError

# Seconds to project hidden states of Llama-2-7B on an A100, over seconds to move them: even at 24 GB/s
# (HCache, EuroSys '25, section 6.1), and the link has 32
A100 = 32 / 24


def add_option(parser):
    words = "without a GPU, the modelled link's speed; auto (default): what an A100's would be here"
    parser.add_argument("--link", type=speed, default="auto", metavar="GB/S", help=words)


def bandwidth(model, asked: Bandwidth | None = None) -> Bandwidth | None:
    """Return the modelled link's; None with CUDA, where the link is real. Raises ModelError."""
    if model.device.type != "cuda":
        return asked or LikeA100(model)
    if asked:
        raise ModelError("--link models a link on machines without a GPU, and here is one; leave it out.")


class LikeA100(Bandwidth):
    """As slow for this processor as PCIe 4 is for an A100: restoring a layer from hidden states takes,
    against their transfer, what it takes for Llama-2-7B there. Like hardware it stays as it is; only a
    measurement that finds the processor faster raises it."""

    def __init__(self, model):
        super().__init__(0.0)
        self.model, self.tokens = model, min(ROWS, model.config.max_position_embeddings)
        self.states = self.tokens * model.config.hidden_size * model.dtype.itemsize     # bytes of a layer
        self.measure()

    def measure(self, interrupt=lambda: None) -> float:
        seconds = time_projecting(self.model, self.tokens, interrupt)
        self.value = max(self.value, A100 * self.states / seconds)
        return self.value

    def __str__(self):
        return f"{super().__str__()}, as for an A100: restoring a layer takes {A100:.2f} times its transfer"


@torch.inference_mode()
def time_projecting(model, tokens: int, interrupt=lambda: None) -> float:
    """-> seconds to bring a layer of so many tokens back from hidden states: to project them, and to write
    K and V to the slots of a table. All layers in order, as a restoration does it: none is in a cache yet."""
    config, device = model.config, model.device
    hidden = torch.randn(tokens, config.hidden_size, device=device).to(model.dtype)  # [T, D]
    rotation = model.rotary(torch.arange(tokens, device=device))  # [T, 1, hd] each
    slots = torch.randperm(tokens, device=device)  # [T]
    shape = 2, tokens, config.num_key_value_heads, config.head_dim
    keys, values = torch.empty(shape, dtype=model.dtype, device=device)  # [T, KVH, hd] each

    def run(lap):
        for layer in model.layers:
            lap()
            k, v = layer.project_kv(hidden, rotation)
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)

    return fastest_layer(run, device, interrupt)


def speed(string: str) -> Bandwidth | None:
    """An argparse type: auto, GB/s, or several and how long each lasts: 0.1:2:0.5@0.1."""
    if string == "auto":
        return None
    number, (speeds, at, seconds) = cli.bounded(float, 1e-6, 1e6), string.partition("@")
    values = [1e9 * number(speed) for speed in speeds.split(":")]
    if len(values) == 1:
        return Bandwidth(values[0])
    return Trace(values, number(seconds) if at else 0.1)


class Trace(Bandwidth):
    """One bandwidth after the other, each for `seconds`, from time `began` on, again and again."""

    def __init__(self, values: list[float], seconds: float):
        self.values, self.seconds, self.began = values, seconds, time.perf_counter()

    @property
    def value(self) -> float:
        """The bandwidth of now."""
        return self.values[self.slot(time.perf_counter()) % len(self.values)]

    def slot(self, at: float) -> int:
        return int((at - self.began) // self.seconds)

    def arrival(self, start: float, size: int, pieces: int = 0) -> float:
        at = start + LATENCY + pieces * PIECE
        slot = self.slot(at)
        while True:
            rate, end = self.values[slot % len(self.values)], self.began + (slot + 1) * self.seconds
            if size <= rate * (end - at):
                return at + size / rate
            size, at, slot = size - rate * max(0.0, end - at), max(at, end), slot + 1

    def __str__(self):
        values = ":".join(f"{value / 1e9:.3g}" for value in self.values)
        return f"modelled link, {values} GB/s, {self.seconds:.3g} s each"
