"""Sample the next token of each request in a step.

The tokens are the leaves of a tree, in the order of their ids, and each node has RUN children. A draw starts
at the root. At each level, one random number of the request selects a child, in proportion to the children's
probabilities.

Why is one random number for the whole vocabulary not enough? It would be compared with sums of the
probabilities of all earlier tokens. These sums depend on the other requests in the batch, because a matrix
product of another size rounds differently. With 49,152 tokens in float32, one draw in 500 differed when other
requests were in the batch."""
import torch
import torch.nn.functional as F

RUN = 16           # children per node
LEVELS = 6         # random numbers per token: enough for RUN ** LEVELS tokens
WINDOW = 128       # sort only the 128 likeliest tokens, because most draws need no more


def likeliest(logits) -> list[int]:
    """Return the likeliest token of each row of logits [R, V]. Of equally likely tokens, it is the one with
    the lowest id.

    The result is -1 for a row whose largest logit is NaN or infinite. (Other logits may be minus infinity,
    which marks a token that cannot follow.) On a GPU, this call waits for the device once."""
    at = logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.float().numpy().argmax(-1))   # [R]
    return at.where(logits.gather(1, at[:, None])[:, 0].isfinite(), -1).tolist()


def sample(requests: list, logits, tokens: list[int]) -> list[int | Exception]:
    """Replace a row's likeliest token by a sampled one, if the row's request has a temperature.

    `tokens`: the likeliest token of each row of logits [R, V]. A request's top_k keeps the k likeliest
    tokens. Its top_p then keeps the fewest of these whose probabilities add up to the share top_p of their
    sum. Of equally likely tokens the lowest ids are kept.

    Returns: for each row a token, or the exception that ends its request."""
    tokens, size, ways = list(tokens), logits.shape[1], {draw: {}, draw_among_likeliest: {}}
    for row, request in enumerate(requests):
        if request.temperature and tokens[row] >= 0:
            try:
                u = 1 - torch.rand(LEVELS, dtype=torch.double, generator=request.generator)
                top_k, top_p = min(request.top_k or size, size), max(request.top_p, 1e-9)
                way = draw_among_likeliest if top_k < size or top_p < 1 else draw
                ways[way][row] = max(request.temperature, 1e-30), *u.tolist(), top_k, top_p
            except Exception as error:
                tokens[row] = error
    for way, rows in ways.items():
        if rows:
            asked = torch.tensor([*rows.values()], dtype=torch.double).to(logits.device)    # [B, 3 + LEVELS]
            own = logits.index_select(0, torch.tensor([*rows]).to(logits.device)).float()   # [B, V]
            drawn = way((own / asked[:, :1].float()).softmax(-1), *asked[:, 1:].split([LEVELS, 1, 1], 1))
            for row, token in zip(rows, drawn.tolist()):
                tokens[row] = token
    return tokens


def draw(shares, u, *_):
    """Draw a token from each row of the probabilities `shares` [B, V] -> [B].

    `u` [B, LEVELS]: random numbers above 0 and up to 1."""
    levels = []
    while not levels or levels[-1].shape[1] > 1:        # from the leaves to the root
        levels.append(F.pad(shares, (0, -shares.shape[1] % RUN)).unflatten(1, (-1, RUN)))       # [B, N, RUN]
        shares = levels[-1].sum(-1, dtype=torch.double)
    found = torch.zeros_like(u[:, :1], dtype=torch.long)
    for children, number in zip(reversed(levels), u.split(1, 1)):
        upto = children.take_along_dim(found[..., None], 1)[:, 0].cumsum(-1, dtype=torch.double)    # [B, RUN]
        found = RUN * found + torch.searchsorted(upto, number * upto[:, -1:])
    return found[:, 0]


def draw_among_likeliest(shares, u, top_k, top_p):
    """Draw from the tokens that top_k [B, 1] and top_p [B, 1] keep -> [B].

    Most rows keep only tokens that are among the WINDOW likeliest ones. For these rows, sort the window
    and draw with one random number. For each other row, `keep` searches the whole vocabulary, and `draw`
    draws."""
    count = min(WINDOW, shares.shape[1])
    ids = shares.topk(count, sorted=False).indices.sort(-1).values                      # [B, WINDOW]
    window, order = shares.gather(1, ids).sort(dim=-1, descending=True, stable=True)    # equal ones by id
    upto, last = window.cumsum(-1, dtype=torch.double), top_k.long().clamp(max=count) - 1
    totals = shares.sum(-1, True, dtype=torch.double).where(top_k == shares.shape[1], torch.inf)    # [B, 1]
    totals = upto.gather(1, last).where(top_k <= count, totals)     # infinite: not known from the window
    last = last.minimum(torch.searchsorted(upto, top_p * totals))                       # [B, 1]: a rank
    kept = window.where(torch.arange(count, device=ids.device) <= last, 0)
    upto = torch.zeros_like(upto).scatter_(1, order, kept.double()).cumsum(-1)          # by id
    tokens = ids.gather(1, torch.searchsorted(upto, u[:, :1] * upto[:, -1:]))[:, 0]
    for row in (window.gather(1, last) == window[:, -1:])[:, 0].nonzero()[:, 0].tolist():
        kept = shares[row]
        if top_k[row] < len(kept):
            kept = keep(kept, top_k[row], torch.ones_like)
        kept = keep(kept, top_p[row] * kept.sum(dtype=torch.double), torch.positive)
        tokens[row] = draw(kept[None], u[row, None])
    return tokens


def keep(shares, goal, measure):
    """Keep the fewest of `shares` [V], the largest first, whose weights add up to `goal` [1]. Set the others
    to 0.

    `measure(shares)`: the weights [V]. Each weight is 1 for top_k, and the share itself for top_p.

    The method is a radix select, which sorts nothing. It groups the shares by ten bits of their numbers at a
    time, the highest bits first, and adds up the weights of each group to find the group of the smallest kept
    share."""
    bits, weights = shares.view(torch.int32), measure(shares).double()
    at = torch.arange(len(shares), device=shares.device)        # candidates for the smallest kept share
    for shift in 20, 10, 0:
        digits = 1023 - (bits[at] >> shift & 1023).long()       # 0 for the largest shares
        upto = F.pad(weights.new_zeros(1024).scatter_add_(0, digits, weights[at]).cumsum(0), (1, 0))
        found = torch.searchsorted(upto, goal.minimum(upto[-1:])) - 1   # digits of the smallest kept share
        goal, at = goal - upto[found], at[digits == found]
    kept = shares.where(shares > shares[at[0]], 0)
    first = at[weights[at].cumsum(0) - weights[at] < goal]      # of equal shares, keep the lowest ids
    kept[first] = shares[first]
    return kept
