"""Print how much of each prompt is found in a Redis server that has room for half of what is written.

    python -m benchmarks.redis_policies

Forty conversations have five turns each; recent ones are more likely to go on. Each turn looks up the pages of its
prompt, writes the missing ones, and marks all as used, as chapter 07 does. A page is found if the server has it and
all pages before it. A conversation grows from 24 to 56 pages. The pages that a turn adds cannot be found in that
turn, so at most 72 % could be found."""

import hashlib
import random
import statistics
from itertools import takewhile

from benchmarks.real_storage import redis_server
from shell.backends import RedisBackend

POLICIES, TALKS, TURNS, PAGE = ("volatile-ttl", "allkeys-lru", "volatile-lru", "noeviction"), 40, 5, bytes(1 << 15)


class WithoutExpiry(RedisBackend):
    """Values that never expire. Their use is marked by TOUCH."""

    def exists(self, keys):
        with self.client.pipeline(transaction=False) as pipeline:
            for key in reversed(keys):
                pipeline.touch("kv:" + key)
            return [found == 1 for found in reversed(pipeline.execute())]


def order(rng: random.Random):
    """Yield the numbers of the conversations, five times each."""
    recent, left = rng.sample(range(TALKS), TALKS), [TURNS] * TALKS
    while recent:
        talk = recent.pop(min(int(rng.expovariate(1 / 12)), len(recent) - 1))
        left[talk] -= 1
        recent = [talk] * (left[talk] > 0) + recent
        yield talk


def found(backend: RedisBackend, policy: str, seed: int) -> float:
    """Return the share of the prompts' pages that are found under an eviction policy."""
    chains, hits, client = [[] for _ in range(TALKS)], [], backend.client
    client.flushall()
    room = TALKS * (24 + 8 * (TURNS - 1)) * len(PAGE) // 2
    client.config_set("maxmemory", client.info("memory")["used_memory"] + room)
    client.config_set("maxmemory-policy", policy)
    for talk in order(random.Random(seed)):
        chain, new = chains[talk], 8 if chains[talk] else 24
        chain += [hashlib.sha256(b"%d %d" % (talk, len(chain) + page)).hexdigest() for page in range(new)]
        there = backend.exists(chain)
        hits.append((len([*takewhile(bool, there)]), len(chain)))
        missing = [key for key, known in zip(chain, there) if not known]
        for at in range(0, len(missing), 4):
            try:
                backend.set(missing[at : at + 4], [PAGE] * len(missing[at : at + 4]))
            except backend.full:
                break
        backend.exists(chain)
    return sum(hit for hit, _ in hits) / sum(pages for _, pages in hits)


def main():
    print("| `maxmemory-policy` | values never expire (earlier versions) | values expire one after the other |\n|---|---|---|")
    with redis_server() as url:
        for policy in POLICIES:
            shares = [[found(kind(url), policy, seed) for seed in range(5)] for kind in (WithoutExpiry, RedisBackend)]
            print(f"| `{policy}` | " + " | ".join(f"{statistics.median(share):.0%}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
