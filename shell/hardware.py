"""The link between device and host memory: a GPU's, or the model that stands for it (`--link`)."""
import sys
from functools import cache

import torch

from common.cuda_link import Link
from common.link import BlockPairs
from common.requests import in_words
from shell.checkpoint import ModelError
from shell.modelled_link import Bandwidth, LikeA100, ModelledLink, speed


def add_option(parser):
    words = "without a GPU, the modelled link's speed; auto (default): what an A100's would be here"
    parser.add_argument("--link", type=speed, default="auto", metavar="GB/S", help=words)


def bandwidth(model, asked: Bandwidth | None = None) -> Bandwidth | None:
    """Return the modelled link's; None with CUDA, where the link is real. Raises ModelError."""
    if model.device.type != "cuda":
        return asked or LikeA100(model)
    if asked:
        raise ModelError("--link models a link on machines without a GPU, and here is one; leave it out.")


warn_once = cache(print)    # the same words to the same file


def connect(name: str, clock, bandwidth=None, wake=lambda: None, background=False) -> Link | ModelledLink:
    """-> one direction of the link: the GPU's; where there is none, one of so many bytes/s."""
    if clock.device.type != "cuda":
        return ModelledLink(name, clock, bandwidth, wake, background)
    link = Link(name, clock)
    check_kernels(link)
    return link


def check_kernels(link: Link):
    """Copy scattered blocks to the GPU and back, by a kernel one way and by the copy engine the other. If
    they arrive changed, or if that raises, the link leaves all blocks to the copy engine."""
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
        words = f"No kernel copies between host memory and the GPU ({in_words(error)})"
        warn_once(f"{words}: blocks that lie apart are copied one by one, and take longer.", file=sys.stderr)
