"""The link between device memory and host memory: a GPU's, or a modelled one (`--link`)."""
import torch

from common.cuda_link import Link
from common.link import BlockPairs
from common.requests import in_words
from shell import cli, warn_once
from shell.checkpoint import ModelError
from shell.copy_kernels import limited_stream, queue_blocks
from shell.modelled_link import Bandwidth, LikeA100, ModelledLink, leave_a_core, speed


def add_options(parser):
    """Add the options of every chapter with a second tier in host memory.

    Returns: the group of options that set the size of host memory, of which one may be given."""
    size, number = parser.add_mutually_exclusive_group(), cli.bounded(int, 0, 1 << 26)
    size.add_argument("--cpu-blocks", type=number, metavar="N", help="blocks in host memory (4 x device's)")
    parser.add_argument("--always-restore", action="store_true", help="load even if computing is faster")
    add_link(parser)
    return size


def add_link(parser):
    words = "speed of the modelled link, without a GPU; auto (default): as for an A100"
    parser.add_argument("--link", type=speed, default="auto", metavar="GB/S", help=words)


def host_blocks(model, arguments, block_bytes: int) -> int:
    """Return the number of blocks in host memory: --cpu-blocks, if that option is given.

    Default: 4 x --gpu-blocks. Without --gpu-blocks: 4 x --max-running x the blocks of the longest context.
    The default is never more than a quarter of free host memory."""
    context = -(-model.config.max_position_embeddings // arguments.block_size)  # blocks
    useful, cpu = 4 * (arguments.gpu_blocks or arguments.max_running * context), torch.device("cpu")
    return cli.blocks_that_fit(arguments.cpu_blocks, useful, block_bytes, cpu, "--cpu-blocks")


def bandwidth(model, asked: Bandwidth | None = None) -> Bandwidth | None:
    """Return the modelled link's bandwidth, or None with CUDA, where the link is real. Raises ModelError."""
    if model.device.type != "cuda":
        return asked or LikeA100(model)
    if asked:
        raise ModelError("--link is for machines without a GPU, and this machine has one; leave --link out.")


def connect(name: str, clock, bandwidth=None, wake=lambda: None, background=False, beside=None):
    """Return one direction of the link: the GPU's, or without a GPU a modelled one.

    `bandwidth`: of a modelled link, a Bandwidth or bytes/s. `beside`: the model that computes little while
    a modelled link copies (`leave_a_core`). The other arguments: see the two classes."""
    if clock.device.type == "cuda":
        return CheckedLink(name, clock)
    link = ModelledLink(name, clock, bandwidth, wake, background)
    if beside:
        leave_a_core(link, beside)
    return link


class CheckedLink(Link):
    """A GPU's link whose kernel copies scattered blocks (shell/copy_kernels.py). It checks this kernel once,
    at the start.

    `backend`: "direct" (the copy engine) or "kernel"; None: choose for each copy. If the check fails, or if a
    copy by the kernel raises later, the copy engine copies all blocks from then on, and one line says so."""

    def __init__(self, name: str, clock):
        super().__init__(name, clock, limited_stream())
        self.checked = False
        try:
            self.check()
            self.backend, self.checked = None, True
        except Exception as error:
            self.distrust(error)

    def copy_blocks(self, to, out_of, pairs: BlockPairs):
        """Queue a copy of blocks. If the kernel raises an exception, the copy engine makes this copy and,
        unless only memory was short, all later ones."""
        try:
            queue_blocks(to, out_of, pairs, self.backend)
        except Exception as error:
            if not self.checked or self.backend == "direct":
                raise
            queue_blocks(to, out_of, pairs, "direct")
            if not isinstance(error, torch.OutOfMemoryError):
                self.distrust(error)

    def check(self):
        """Copy scattered blocks to the GPU and back, one way by the kernel and the other way by the copy
        engine. Raises an exception if they arrive changed, or if a copy fails."""
        here, there = [4, 1, 6], [5, 0, 3]
        places = BlockPairs(there, here), BlockPairs(here, there)
        host = torch.arange(1 << 10).view(8, -1).pin_memory()
        for backends in ("kernel", "direct"), ("direct", "kernel"):
            device, back = torch.zeros_like(host).to(self.clock.device), torch.zeros_like(host).pin_memory()
            for self.backend, to, out_of, blocks in zip(backends, (device, back), (host, device), places):
                super().copy(to, out_of, "a copy by a kernel", blocks).wait()
            if not torch.equal(back[here], host[here]):
                raise ValueError("blocks arrive changed")

    def distrust(self, error: Exception):
        """Copy all blocks by the copy engine from now on, and print why."""
        self.backend = "direct"
        words = f"The kernel cannot copy between host memory and the GPU ({in_words(error)})"
        warn_once(f"{words}: scattered blocks are copied one by one, and take longer.")
