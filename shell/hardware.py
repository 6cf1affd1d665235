"""The link between device and host memory: a GPU's, or the model that stands for it (`--link`)."""
from common.cuda_link import Link
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


def connect(name: str, clock, bandwidth=None, wake=lambda: None, background=False) -> Link | ModelledLink:
    """-> one direction of the link: the GPU's; where there is none, one of so many bytes/s."""
    if clock.device.type == "cuda":
        return Link(name, clock)
    return ModelledLink(name, clock, bandwidth, wake, background)
