"""Sample the next token of a request.

One uniform number is compared with the running sum of the tokens' probabilities: the first token at which the
sum reaches the number is the sample. Each request's row is summed by itself, in double precision, so the
sample does not depend on the other requests of the batch."""
import torch

WINDOW = 1024      # tokens to sort at first; top_k and top_p mostly keep fewer


def likeliest(logits) -> list[int]:
    """Return the likeliest token of each row of logits [R, V]. Of equally likely tokens, it is the one with
    the lowest id.

    The result is -1 for a row whose largest logit is NaN or infinite. (Other logits may be minus infinity,
    which marks a token that cannot follow.) On a GPU, this call waits for the device once."""
    at = logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.float().numpy().argmax(-1))   # [R]
    return at.where(logits.gather(1, at[:, None])[:, 0].isfinite(), -1).tolist()


def draw(logits, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw a token from the logits [V] of one request.

    `top_k` keeps the k likeliest tokens (0: all). Of these, `top_p` keeps the likeliest, until their
    probabilities add up to the part `top_p` of the k tokens' sum. Of equal tokens the lowest ids stay."""
    u = 1 - torch.rand(1, dtype=torch.double, generator=generator).to(logits.device)    # above 0, up to 1
    shares = (logits.float() / max(temperature, 1e-30)).softmax(-1)                     # [V]
    if not 0 < top_k < len(shares) and top_p >= 1:
        upto = shares.cumsum(0, dtype=torch.double)
        return int(torch.searchsorted(upto, u * upto[-1]))
    ids = likely_ids(shares, top_k or len(shares), top_p)
    upto = shares[ids].cumsum(0, dtype=torch.double)
    return int(ids[torch.searchsorted(upto, u * upto[-1])])


def likely_ids(shares, top_k: int, top_p: float):
    """-> the ids that `top_k` and then `top_p` keep of the shares [V], the likeliest first."""
    ids, goal = torch.arange(len(shares), device=shares.device), top_p * shares.sum(dtype=torch.double)
    window = ids[shares >= shares.topk(min(WINDOW, len(ids))).values[-1]]               # WINDOW ids, or more
    if top_k <= len(window) or top_k >= len(ids) and shares[window].sum(dtype=torch.double) >= goal:
        ids = window
    ids = ids[shares[ids].argsort(descending=True, stable=True)][:top_k]
    upto = shares[ids].cumsum(0, dtype=torch.double)
    goal = goal if top_k >= len(shares) else top_p * upto[-1]
    return ids[: int(torch.searchsorted(upto, goal.clamp(max=upto[-1]))) + 1]
