"""A layer in one launch: CUDA graphs of what lies between two attentions.

A launch costs the host 10 to 22 us, and a layer needs about twenty. A graph of the whole pass would be one
launch, and forbid what chapters do between two layers: order the pass behind a history that is on its way,
and look at the layer's input. (And attention has another shape in each pass.) So the rest becomes a graph:

    eager      before_layer(l); write K and V of layer l; attend
    graph      what follows in layer l, and what precedes attention in l + 1: norm, q, k, v, rotation

A graph has fixed memory and a fixed number of rows. A pass is padded to the next size: rows behind its own
are computed and never read, and every operation in a graph keeps rows apart.

The contract of that memory: the next pass, or capture, overwrites q, k, v and the layers' inputs. Before you
keep one or send it to the host, copy it on the compute stream (chapter 04). A pass within a pass, such as
chapter 05's recomputing, may begin before the first layer only, whose input is not in that memory yet.

No graph is trusted: those of each size are compared with eager execution before their first use. If one
differs or raises, then or later, the model is computed eagerly from then on."""
import sys
from functools import partial

import torch

from common.requests import in_words

SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512   # rows; the kernels of more take longer than their launches


class Pieces:
    """The graphs of a model, and the memory that all of them read and write."""

    def __init__(self, model):
        self.model, self.sizes, self.graphs = model, SIZES, {}      # rows -> its L + 1 graphs
        self.inputs, self.stream = None, torch.cuda.Stream()        # the stream is that of captures

    def layers(self, rows: int):
        """-> the layers of a pass of so many rows: pieces; the model's own for more rows than graphs have, or
        where graphs do not work."""
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None or not self.capture(size):
            return self.model.layers
        depth, graphs = len(self.model.layers), self.graphs[size]
        return [partial(self.run, index, slice(0, rows), graphs) for index in range(depth)]

    def run(self, index: int, rows: slice, graphs: list, hidden, rotation, attend):
        """Called like a `llama.Layer`: attend, and replay all up to the next layer's attention."""
        if index == 0:
            self.inputs[0, rows].copy_(hidden)                                   # [T, D]
            for kept, turn in zip(self.rotation, rotation):
                kept[rows].copy_(turn)                                           # [T, 1, hd]
            self.replay(0, rows, graphs)
        self.out[rows].copy_(attend(self.q[rows], self.k[rows], self.v[rows]))   # [T, H, hd]
        self.replay(index + 1, rows, graphs)
        return self.inputs[index + 1, rows]                                      # [T, D]

    def replay(self, index: int, rows: slice, graphs: list):
        """Replay a graph of a pass. If that raises, compute this piece and all later ones eagerly."""
        if self.sizes:
            try:
                return graphs[index].replay()
            except Exception as error:
                self.give_up(error)
        self.compute(index, rows.stop)

    def give_up(self, error: Exception):
        """Use no graphs from now on, and print why."""
        self.sizes, self.graphs = (), {}
        words = f"No CUDA graphs are used ({in_words(error)}): kernels are launched one by one"
        print(f"{words}, and tokens take longer.", file=sys.stderr)

    def idle(self, interrupted):
        """Capture the sizes below those that were seen: of requests that decode together, one ends first."""
        for size in self.sizes:
            if self.graphs and size < max(self.graphs) and not interrupted():
                self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> bool:
        """Capture the graphs of a size once, and check them -> whether they are there."""
        try:
            if self.inputs is None:
                self.allocate()
            if size not in self.graphs:
                self.graphs[size] = [self.captured(at, size) for at in range(len(self.model.layers) + 1)]
                self.check(size)
        except Exception as error:
            self.give_up(error)
            self.inputs = None      # on a full device others need that memory
        return size in self.graphs

    def check(self, size: int):
        """Compare the graphs of a size with eager execution, given random numbers. Raises ArithmeticError.

        Each graph runs before its piece does, so that one which does nothing leaves other numbers. They need
        not be equal: cuBLAS may choose another algorithm in a graph, which adds in another order and, in 16
        bits, rounds between two sums. Half of a dtype's digits must agree, measured by the largest number. A
        wrong graph differs by about that number. (Inputs are small beside what a layer adds to them, so they
        do not hide it.)"""
        generator = torch.Generator(self.model.device).manual_seed(0)
        tolerance = torch.finfo(self.model.dtype).eps ** 0.5
        for index, graph in enumerate(self.graphs[size]):
            for side in (self.rotation, self.out, self.inputs[max(0, index - 1)]):
                side.normal_(0.0, 0.01, generator=generator)
            made = [side[:size] for side in (self.q, self.k, self.v, self.inputs[index])]
            graph.replay()
            replayed = [side.clone() for side in made]
            self.compute(index, size)
            for ours, eager in zip(replayed, made):
                if not (ours - eager).abs().max() <= tolerance * eager.abs().max():     # nor is NaN
                    raise ArithmeticError("a graph's result differs from that of its kernels")

    def allocate(self):
        """Allocate what the graphs read and write, for most rows. Raises RuntimeError if it does not fit."""
        config, rows, head = self.model.config, self.sizes[-1], self.model.config.head_dim
        where = dict(dtype=self.model.dtype, device=self.model.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.rotation = torch.zeros(2, rows, 1, head, **where)
        self.q, self.out = torch.zeros(2, rows, config.num_attention_heads, head, **where)
        self.k, self.v = torch.zeros(2, rows, config.num_key_value_heads, head, **where)
        self.inputs = torch.zeros(config.num_hidden_layers + 1, rows, config.hidden_size, **where)

    def captured(self, index: int, size: int):
        """-> the graph that ends before the attention of layer `index`, or ends the pass. It is run once
        before: libraries choose kernels and take memory then, which a capture forbids."""
        graph, compute = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        try:
            with torch.cuda.stream(self.stream):
                self.compute(index, size)
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")   # others may query
                try:
                    self.compute(index, size)
                finally:
                    graph.capture_end()
        finally:
            compute.wait_stream(self.stream)    # whatever was raised: what it writes to may be freed next
        return graph

    def compute(self, index: int, size: int):
        layers, rows = self.model.layers, slice(0, size)
        if index:
            hidden = layers[index - 1].after_attention(self.inputs[index - 1, rows], self.out[rows])
            self.inputs[index, rows].copy_(hidden)
        if index < len(layers):
            made = layers[index].before_attention(self.inputs[index, rows], self.rotation[:, rows].unbind())
            for kept, side in zip((self.q, self.k, self.v), made):
                kept[rows].copy_(side)
