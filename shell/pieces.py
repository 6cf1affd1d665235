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
chapter 05's recomputing, may begin before the first layer only, whose input is not in that memory yet."""
import sys
from functools import partial

import torch

SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512   # rows; the kernels of more take longer than their launches


class Pieces:
    """The graphs of a model, and the memory that all of them read and write."""

    def __init__(self, model):
        self.model, self.sizes, self.graphs = model, SIZES, {}      # rows -> its L + 1 graphs
        self.inputs, self.stream = None, torch.cuda.Stream()        # the stream is that of captures

    def layers(self, rows: int):
        """-> the layers of a pass of so many rows: pieces; the model's own for more rows than graphs have, or
        where a device has no memory for graphs."""
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
            graphs[0].replay()
        self.out[rows].copy_(attend(self.q[rows], self.k[rows], self.v[rows]))   # [T, H, hd]
        graphs[index + 1].replay()
        return self.inputs[index + 1, rows]                                      # [T, D]

    def idle(self, interrupted):
        """Capture the sizes below those that were seen: of requests that decode together, one ends first."""
        for size in self.sizes:
            if self.graphs and size < max(self.graphs) and not interrupted():
                self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> bool:
        """Capture the graphs of a size once -> whether they are there."""
        try:
            if self.inputs is None:
                self.allocate()
            if size not in self.graphs:
                self.graphs[size] = [self.captured(at, size) for at in range(len(self.model.layers) + 1)]
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            print(f"There are no CUDA graphs here ({why}): kernels are launched one by one.", file=sys.stderr)
            self.sizes, self.graphs, self.inputs = (), {}, None     # never again
        return size in self.graphs

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
        with torch.cuda.stream(self.stream):
            self.compute(index, size)
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")   # others may query
            try:
                self.compute(index, size)
            finally:
                graph.capture_end()
        compute.wait_stream(self.stream)
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
