"""Chapter 08: four policies for what the context of a large batch is kept as, with all weights in host memory.

    python -m benchmarks.hybrid_blocks                                  all; results in benchmarks/results/
    python -m benchmarks.hybrid_blocks --model random:small --platform 4090

Claims, for batches of 32 to 128 requests with contexts of 128 to 1,024 tokens:
    bound        hybrid reaches at least 0.9 of the throughput that link and processor allow, in every cell: a step takes at most
                 1.12 times the bound, and both lanes are busy for at least 85 % of it
    gain         in its best cell at least 1.5 times the throughput of kv-only and 1.3 times that of act-only, on the larger
                 model 1.1 times that of static; nowhere slower than the best of them
The bound is that of Costs, measured before on the same machine: of all divisions of the context into ACT blocks on the device,
ACT blocks in the host and KV blocks, the one for which the slower lane ends first. CAPTURE's 2.19 times is against FlexGen, which
is other code; here all policies run on one code path, where no gain over kv-only can be more than what the bounds allow.

What is measured are decode steps. The context is not computed but filled in (what the numbers are does not change how long they
take), and the model is cut to LAYERS layers, which are all alike: a step of the whole model takes as much longer as it has more
of them. The device has as much memory as all weights of the whole model take. The policies take turns, two steps each, of
which the second counts. Without a GPU the link is modelled.
"""
import argparse
import importlib
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint  # noqa: E402
from legacy import app  # noqa: E402
from legacy import link as links  # noqa: E402
from tools import random_models  # noqa: E402

hybrid = importlib.import_module("08_hybrid_blocks")
LAYERS, STEPS = 2, 2
BATCHES, CONTEXTS = (32, 64, 128), (128, 256, 512, 1024)
GRID = [(batch, context) for batch in BATCHES for context in CONTEXTS]
MODELS = {"random:small": GRID, "random:tinyllama-mha": [(32, 128), (32, 512), (128, 256)]}     # where a cell takes minutes


class Filled(hybrid.Run):
    """A batch whose context is there, as if it had been computed."""

    def __init__(self, engine, prompts: list[list[int]], new: int):
        super().__init__(engine, prompts, new)
        for request in list(engine.waiting):
            engine.waiting.remove(request)
            request.table = engine.pool.allocate(engine.pool.needed(len(request.tokens)))
            request.computed, request.saved, request.source = len(request.tokens) - 1, len(request.table), "miss"
            engine.running.append(request)


class Bench:
    def __init__(self, name: str, dtype: str, device: str, platform: str):
        self.name, self.device = name, checkpoint.pick_device(device)
        random_models.random_config(name)                          # which refuses what is none
        hidden, intermediate, self.layers, *rest = random_models.GEOMETRIES[name.removeprefix("random:")]
        random_models.GEOMETRIES["cut"] = hidden, intermediate, LAYERS, *rest
        self.model, self.tokenizer, _ = checkpoint.load("random:cut", dtype, device, on_host=True)
        torch_device = hybrid.torch.device(self.device)
        self.speed = links.bandwidth(self.model, "auto", platform, torch_device)
        self.engine = partial(hybrid.Engine, self.model, self.tokenizer, frozenset(), device=torch_device,
                              bytes_per_second=self.speed)

    def options(self, lengths: list[int]) -> dict:
        """Costs, and bytes of device memory, so that the cut model's device holds as many blocks as that of the whole one, which
        has as much memory as its weights take."""
        engine = self.engine(lengths=lengths)
        layer = engine.model.host_bytes // LAYERS
        limit = self.layers * layer + engine.model.device_bytes - 2 * layer
        blocks = max(0, limit - engine.device_bytes) // (engine.act_bytes // LAYERS * self.layers)
        return dict(lengths=lengths, costs=engine.costs, device_memory=engine.device_bytes + blocks * engine.act_bytes)

    def cell(self, batch: int, context: int, rounds: int) -> dict:
        new = STEPS * rounds + 2
        prompts, lengths = [[5 + number] * context for number in range(batch)], [context + new] * batch
        options = self.options(lengths)
        runs = {policy: Filled(self.engine(policy=policy, **options), prompts, new) for policy in hybrid.POLICIES}
        for number in range(rounds):
            for run in runs.values():
                run.turn(STEPS)
        costs, ours = runs["hybrid"].engine.costs, runs["hybrid"].seconds
        bounds = {policy: run.bound(costs) for policy, run in runs.items() if policy != "static"}
        found = dict(batch=batch, context=context, device_blocks=runs["hybrid"].engine.room.device, costs=costs._asdict(),
                     bound_seconds=bounds, policies={},
                     possible_gain={policy: bounds[policy] / bounds["hybrid"] for policy in ("kv-only", "act-only")})
        for policy, run in runs.items():
            row = run.row(costs)
            whole = row["tokens_per_second"] * LAYERS / self.layers
            found["policies"][policy] = dict(row, step_seconds=spread(run.seconds), whole_model_tokens_per_second=whole)
        found["gain"] = {policy: spread([theirs / mine for theirs, mine in zip(runs[policy].seconds, ours)])
                         for policy in hybrid.POLICIES[1:]}
        found["measured_over_bound"] = spread([mine / bounds["hybrid"] for mine in ours])
        for run in runs.values():
            run.engine.close()
        return found


def show(found: dict):
    mine, gain, possible = found["policies"]["hybrid"], found["gain"], found["possible_gain"]
    blocks = f"{mine['act_device']}+{mine['act_host']} : {mine['kv_host']}"
    print(f"  {found['batch']:4} x {found['context']:5} {blocks:>18} {mine['whole_model_tokens_per_second']:9.2f} tokens/s  "
          f"{found['measured_over_bound']['median']:5.2f} of the bound, busy {mine['compute_busy']:4.0%} "
          f"{mine['link_busy']:4.0%}  " + "  ".join(
              f"{policy} {gain[policy]['median']:.2f}" + (f" (of {possible[policy]:.2f})" if policy in possible else "")
              for policy in gain), flush=True)


def cell(string: str) -> tuple[int, int]:
    """An argparse type."""
    batch, context = map(int, string.split("x"))
    return batch, context


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this model, random:NAME")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16, with which a cell takes a third of the time")
    parser.add_argument("--platform", choices=links.PLATFORMS, action="append",
                        help="only with a link like this GPU's (default a100, 4090)")
    parser.add_argument("--cell", type=cell, action="append", metavar="BATCHxCONTEXT", help="only this cell, such as 64x512")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=5)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/hybrid_blocks-DEVICE.json)")
    arguments = parser.parse_args()
    device, grids = checkpoint.pick_device(arguments.device), []
    set_imports_aside()
    for name in [arguments.model] if arguments.model else MODELS:
        for platform in arguments.platform or ("a100", "4090"):
            bench = Bench(name, arguments.dtype, device, platform)
            grids.append(dict(model=name, dtype=str(bench.model.dtype)[6:], platform=platform, layers=LAYERS, cells=[],
                              link_bytes_per_second=bench.speed))
            print(f"\n{name} {grids[-1]['dtype']}, link like {platform}'s: batch x context, ACT blocks on the device + in the "
                  "host : KV blocks, hybrid's throughput, and its gains (of what the bounds allow)", flush=True)
            for batch, context in tqdm(arguments.cell or MODELS.get(name, GRID), desc=f"{name} {platform}", unit="cell"):
                grids[-1]["cells"].append(bench.cell(batch, context, arguments.rounds))
                show(grids[-1]["cells"][-1])
                write("hybrid_blocks", device, arguments.json, grids=grids)


if __name__ == "__main__":
    with one_sentence():
        main()
