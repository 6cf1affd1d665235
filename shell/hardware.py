"""The link between device memory and host memory: a GPU's, or a modelled one (`--link`)."""
import sys
from functools import cache

import torch

from common.cuda_link import Link
from common.link import BlockPairs
from common.requests import in_words
from shell.checkpoint import ModelError
from shell.modelled_link import Bandwidth, LikeA100, ModelledLink, speed


def add_option(parser):
    words = "speed of the modelled link, without a GPU; auto (default): as for an A100"
    parser.add_argument("--link", type=speed, default="auto", metavar="GB/S", help=words)


def bandwidth(model, asked: Bandwidth | None = None) -> Bandwidth | None:
    """Return the modelled link's bandwidth, or None with CUDA, where the link is real. Raises ModelError."""
    if model.device.type != "cuda":
        return asked or LikeA100(model)
    if asked:
        raise ModelError("--link is for machines without a GPU, and this machine has one; leave --link out.")


warn_once = cache(print)    # print the same line once


def connect(name: str, clock, bandwidth=None, wake=lambda: None, background=False) -> Link | ModelledLink:
    """Return one direction of the link: the GPU's, or without a GPU a modelled one.

    `bandwidth`: of a modelled link, a Bandwidth or bytes/s. The other arguments: see the two classes."""
    if clock.device.type != "cuda":
        return ModelledLink(name, clock, bandwidth, wake, background)
    link = Link(name, clock)
    check_kernels(link)
    return link


def check_kernels(link: Link):
    """Check once that the copy kernel works; if not, let the copy engine copy all blocks.

    Scattered blocks are copied to the GPU and back, one way by the kernel and the other way by the copy
    engine, and then compared."""
    here, there = [4, 1, 6], [5, 0, 3]
    places = BlockPairs(there, here), BlockPairs(here, there)
    try:
        host = torch.arange(1 << 10).view(8, -1).pin_memory()
        for backends in ("kernel", "direct"), ("direct", "kernel"):
            device, back = torch.zeros_like(host).to(link.clock.device), torch.zeros_like(host).pin_memory()
            for link.backend, to, out_of, blocks in zip(backends, (device, back), (host, device), places):
                link.copy(to, out_of, "a copy by a kernel", blocks).wait()
            if not torch.equal(back[here], host[here]):
                raise ValueError("blocks arrive changed")
        link.backend = None
    except Exception as error:
        link.backend = "direct"
        words = f"The kernel cannot copy between host memory and the GPU ({in_words(error)})"
        warn_once(f"{words}: scattered blocks are copied one by one, and take longer.", file=sys.stderr)
