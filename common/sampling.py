"""Draw the next token of each request in a step. A seed gives the same tokens whoever runs beside: noise is
drawn as torch.multinomial does, over probabilities in falling order, and the largest p / noise wins.
Without a seed a single point on the sum of all shares decides."""
from collections import defaultdict

import numpy
import torch

RUN = 128          # tokens whose shares are added first
OWN = 1 << 63      # seeds from here on are drawn by us: nobody can ask for the same tokens again


def likeliest(logits) -> list[int]:
    """logits [R, V] -> the likeliest token of each row, the first of several; -1 where one is NaN or infinite
    (minus infinity is a token that cannot follow). Wait for a GPU once."""
    at = logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.float().numpy().argmax(-1))   # [R]
    return at.where(logits.gather(1, at[:, None])[:, 0].isfinite(), -1).tolist()


def sample(requests: list, logits, tokens: list[int]) -> list[int]:
    """The next token of each request: of `tokens`, the likeliest in its row of logits [R, V], or one drawn at
    its temperature among the top_k likeliest, and of these among as few as have a share of top_p."""
    alike, tokens = defaultdict(list), list(tokens)
    for row, request in enumerate(requests):
        if request.temperature and tokens[row] >= 0:
            draw = by_share if request.seed >= OWN else by_rank
            draw = among_likeliest if request.top_k or request.top_p < 1 else draw
            alike[draw, request.top_k].append(row)
    for (draw, top_k), rows in alike.items():
        try:
            drawn = [*map(int, draw([requests[row] for row in rows], logits[rows], top_k))]
        except Exception as error:      # of these alone, whatever it is: see Line.answer
            drawn = [error] * len(rows)
        for row, token in zip(rows, drawn):
            tokens[row] = token
    return tokens


def cooled(requests, logits):
    """-> logits [B, V] over the temperatures; none is so small that they overflow."""
    temperatures = [[max(request.temperature, 1e-30)] for request in requests]
    return logits / torch.tensor(temperatures, dtype=logits.dtype).to(logits.device)


def uniform(request, count: int):
    """-> [count] random numbers u; -log(1 - u) is the noise of torch.multinomial."""
    return torch.empty(count, dtype=torch.double).uniform_(generator=request.generator)


def by_share(requests, logits, _):
    """Draw from all: a point on the sum of all shares lies in a run of tokens, and there in the share of one.
    Nothing is sorted."""
    shares = cooled(requests, logits.float()).softmax(-1)                           # [B, V]
    if lacking := -shares.shape[1] % RUN:
        shares = torch.nn.functional.pad(shares, (0, lacking))
    runs = shares.unflatten(1, (-1, RUN))                                           # [B, V / RUN, RUN]
    sums = runs.sum(-1).cumsum(-1, dtype=torch.double)                              # [B, V / RUN]
    points = torch.stack([uniform(request, 1) for request in requests]).to(sums) * sums[:, -1:]     # [B, 1]
    run = torch.searchsorted(sums, points, right=True).clamp_(max=sums.shape[1] - 1)
    within = runs.take_along_dim(run[..., None], 1)[:, 0].cumsum(-1, dtype=torch.double)            # [B, RUN]
    points = (points - sums.gather(1, run) + within[:, -1:]).clamp_(min=0)
    found = run * RUN + torch.searchsorted(within, points, right=True)
    return found.clamp_(max=logits.shape[1] - 1)[:, 0].tolist()


def by_rank(requests, logits, _):
    """Draw from all as if they were sorted. Only a rank with less noise than each likelier one can win: about
    ln V of them, whose logits are found by partitioning."""
    for request, row, values in zip(requests, logits, logits.float().cpu().numpy()):
        noise, ranks, found, rest = uniform(request, len(row)).numpy(), [len(row)], [], -values
        while ranks[-1]:                                    # from the least likely
            ranks.append(noise[: ranks[-1]].argmin())
            rest = numpy.partition(rest, ranks[-1])[: ranks[-1] + 1]
            found.append(rest[-1])
        less = (numpy.array(found, float) - found[-1]) / max(request.temperature, 1e-30)
        best = (numpy.exp(-less) / -numpy.log1p(-noise[ranks[1:]])).argmax()
        equal = numpy.flatnonzero(values == -found[best])
        yield equal[0] if len(equal) == 1 else row.topk(len(row)).indices[ranks[best + 1]]


def among_likeliest(requests, logits, top_k, windows=(64, 1024)):
    """Draw among the top_k likeliest; for top_p alone, in a window of the likeliest that reaches it."""
    count = min(top_k or len(logits[0]), len(logits[0]))
    size = min(count, *windows[:1]) if not top_k and windows else count
    some = logits if size < count else logits[:, :1]
    totals = cooled(requests, some - some.amax(-1, True).float()).exp_().sum(-1, True)              # [B, 1]
    found = torch.cat([side.double() for side in (*logits.topk(size), totals)], 1).cpu()
    best, order, totals = found.split([size, size, 1], 1)                           # [B, size], and [B, 1]
    shares = cooled(requests, best - best[:, :1]).exp_()
    shares /= totals if size < count else shares.sum(-1, True)
    for row, (request, share, sums) in enumerate(zip(requests, shares, shares.cumsum(-1))):
        if size < count and sums[-1] < request.top_p:
            yield from among_likeliest([request], logits[row : row + 1], 0, windows[1:])
            continue
        share[1:][(sums - share)[1:] >= request.top_p] = 0          # the likeliest is always kept
        rank = (share / -torch.log1p(-uniform(request, size))).argmax()
        if size < count and request.seed < OWN:             # its numbers and ranks are those of all tokens
            uniform(request, count - size)
            if (best[row] == best[row, rank]).sum() + (rank == size - 1) > 1:
                order[row] = logits[row].topk(count).indices[:size]
        yield order[row, rank]
