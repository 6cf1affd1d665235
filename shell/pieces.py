"""Launch a layer at once, with CUDA graphs of everything between two attentions.

A kernel launch costs the host 10 to 22 us, and a layer has about twenty. One graph of the whole pass would
need only one launch, but chapters must run code between two layers. They make the pass wait for a history
that is still being copied, and they read the layer's input. Besides, attention has another shape in each
pass. So attention stays eager, and the rest is captured:

    eager      before_layer(l); write K and V of layer l; attend
    graph      the rest of layer l, and layer l + 1 up to its attention: norm, q, k, v, rotation

A graph has fixed memory and a fixed number of rows. A pass is padded to the next size. The padding rows are
computed and never read; no operation in a graph mixes rows.

The contract of that memory: the next pass or capture overwrites q, k, v and the inputs of layers. To keep one
of them, or to copy it to the host, first copy it on the compute stream (chapter 04). A pass inside another
pass, as when chapter 05 recomputes, must begin before the first layer, whose input is not in that memory yet.

The graphs of each size are compared with eager execution before their first use. If a graph differs or
raises, at that time or later, the model runs eagerly from then on."""
import sys
from contextlib import ExitStack
from functools import partial

import torch

from common.requests import in_words

SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512   # rows; with more, kernels take longer than launches


class Pieces:
    """The CUDA graphs of a model, and the memory that all of them read and write."""

    def __init__(self, model):
        self.model, self.sizes, self.graphs = model, SIZES, {}      # rows -> its L + 1 graphs
        self.inputs, self.stream = None, torch.cuda.Stream()        # the stream on which graphs are captured

    def layers(self, rows: int):
        """Return the layers for a pass of `rows` rows, to be called like llama.Layer.

        They replay graphs. If no graph has enough rows, or if graphs do not work, they are the model's
        own."""
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None or not self.capture(size):
            return self.model.layers
        depth, graphs = len(self.model.layers), self.graphs[size]
        return [partial(self.run, index, slice(0, rows), graphs) for index in range(depth)]

    def run(self, index: int, rows: slice, graphs: list, hidden, rotation, attend):
        """Run attention of layer `index`, and the graph up to the next layer's attention.

        Called like llama.Layer."""
        if index == 0:
            self.inputs[0, rows].copy_(hidden)                                   # [T, D]
            for kept, turn in zip(self.rotation, rotation):
                kept[rows].copy_(turn)                                           # [T, 1, hd]
            self.replay(0, rows, graphs)
        self.out[rows].copy_(attend(self.q[rows], self.k[rows], self.v[rows]))   # [T, H, hd]
        self.replay(index + 1, rows, graphs)
        return self.inputs[index + 1, rows]                                      # [T, D]

    def replay(self, index: int, rows: slice, graphs: list):
        """Replay one graph. If that raises, run this piece and all later ones eagerly."""
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
        """Capture smaller sizes while the engine is idle, because a batch shrinks as its requests finish.

        `interrupted()`: True when the engine has work again."""
        for size in self.sizes:
            if self.graphs and size < max(self.graphs) and not interrupted():
                self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> bool:
        """Capture and check the graphs of a size, if this is not done yet.

        Returns: True if they can be used."""
        try:
            if self.inputs is None:
                self.allocate()
            if size not in self.graphs:
                self.graphs[size] = [self.captured(at, size) for at in range(len(self.model.layers) + 1)]
                self.check(size)
        except Exception as error:
            self.give_up(error)
            self.inputs = None      # free the memory, which others may need
        return size in self.graphs

    def check(self, size: int):
        """Compare the graphs of a size with eager execution, on random inputs. Raises ArithmeticError.

        Each graph runs before the same piece runs eagerly, so a graph that does nothing leaves old numbers
        and is noticed. The results need not be bit-equal: in a graph cuBLAS may choose another algorithm,
        with another order of summation and, in 16 bits, other rounding. They may differ by the square root of
        the dtype's epsilon, relative to the largest number; a wrong graph differs by about as much as that
        number. The inputs are small, so that they do not hide an error in what a layer adds to them."""
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
                if not (ours - eager).abs().max() <= tolerance * eager.abs().max():     # NaN fails, too
                    raise ArithmeticError("a graph's result differs from that of its kernels")

    def allocate(self):
        """Allocate the graphs' memory for the largest size. Raises RuntimeError if it does not fit."""
        config, rows, head = self.model.config, self.sizes[-1], self.model.config.head_dim
        where = dict(dtype=self.model.dtype, device=self.model.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.rotation = torch.zeros(2, rows, 1, head, **where)
        self.q, self.out = torch.zeros(2, rows, config.num_attention_heads, head, **where)
        self.k, self.v = torch.zeros(2, rows, config.num_key_value_heads, head, **where)
        self.inputs = torch.zeros(config.num_hidden_layers + 1, rows, config.hidden_size, **where)

    def captured(self, index: int, size: int):
        """Capture the graph that ends before the attention of layer `index`, or at the end of the pass.

        The piece runs once before the capture, because libraries choose kernels and allocate memory in their
        first run, and a capture forbids that."""
        graph, compute = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream), ExitStack() as at_end:
            # Even after an error, because the memory may be freed next
            at_end.callback(compute.wait_stream, self.stream)
            self.compute(index, size)
            # Other threads may query events
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            at_end.callback(graph.capture_end)
            self.compute(index, size)
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
