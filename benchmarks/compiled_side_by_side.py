"""The planned step beside the same step as an expert writes it, by the target's own compiler, which needs no device.

    python benchmarks/compiled_side_by_side.py --only 'gpt3-350m*'
    python benchmarks/compiled_side_by_side.py --record side.json

A row is a model of the zoo, a cluster and a batch. Hand-written are the step under plain `jax.jit`, its state, batch
and, in transformers, the input of every norm given shardings, and XLA's partitioner does the rest:

* *data parallel*: the state whole on every device, the batch split over all;
* *fsdp*: each array of the state split on its largest dim that divides, the batch over all devices;
* *megatron tp=K*: the projections of attention and feed-forward split by heads and hidden units over K devices, the
  embedding by vocabulary, the batch over the others; models of transformer layers only.

One that does not fit is compiled with its layers rematerialised as well.

Ours is the plan of one stage that `plan_for(check="compile")` returns. It needs the compiler of the cluster (`make
setup-tpu`; docs/compilers.md). Layers are a scan where the model has that form, so that compiling takes seconds.

Prints one JSON object: for each row and contender, on one device in one step, the compiler's cycles of all kernels (0
on GPUs), the peak, bytes of collectives by kind, the bytes of those that nothing runs beside, and compile seconds; a
contender that the compiler refuses has its words. `ratios` compares ours with the hand-written one of the fewest cycles
(GPUs: of the lowest peak); `geometric_mean` is over the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright import zoo
from meshwright._jax.hlo import read_compiled
from meshwright._jax.hlo_schedule import read_schedule
from meshwright.compilers.facts import compiled_traffic
from meshwright.compilers.targets import target_devices
from meshwright.runtime.executable import executable
from meshwright.zoo import decoder, gpt, moe

# Model, cluster, samples. A model named `NAME-scan` has its layers as a scan.
ROWS: tuple[tuple[str, str, int], ...] = (
    ("gpt3-125m-scan", "tpu-v5e:8", 32),
    ("gpt3-350m-scan", "tpu-v5e:8", 64),
    ("gpt3-350m-scan", "tpu-v6e:8", 128),
    ("gpt3-760m-scan", "tpu-v4:16", 64),
    ("gpt3-1.3b-scan", "tpu-v5p:8", 64),
    ("gpt3-2.6b-scan", "tpu-v5p:16", 64),
    ("llama3-8b", "tpu-v5p:32", 32),
    ("wresnet-250m", "tpu-v5e:8", 256),
    ("unet-470m", "tpu-v5p:8", 128),
    ("moe-380m", "tpu-v5e:8", 64),
    ("gpt3-1.3b-scan", "dgx-h100:1", 64),
    ("llama3-8b", "dgx-h100:4", 32),
)

_TENSOR_PARALLEL = (2, 4, 8)

# Of Megatron-LM (Shoeybi et al. 2019): the dim of each parameter that is split, counted from the last, by the end of
# its path; a stacked layer has one dim more in front.
_MEGATRON = {
    "attention/qkv": -2, "attention/qkv_bias": -2, "attention/out": -3,
    "feed_forward/in": -1, "feed_forward/in_bias": -1, "feed_forward/out": -2, "feed_forward/gate_in": -1,
    "embedding/tokens": -2, "head": -1,
}  # fmt: skip
# With groups of query heads.
_GROUPED = {
    "attention/query": -3, "attention/query_bias": -3, "attention/key_value": -2, "attention/key_value_bias": -2,
    "attention/out": -4, "embedding": -2,
}  # fmt: skip


def target_of(name: str, batch: int, *, remat: bool = False) -> zoo.Target:
    """The model of a row."""
    if not name.endswith("-scan"):
        return zoo.build(name, global_batch=batch, remat=remat)
    return gpt.build(replace(gpt.CONFIGS[name.removesuffix("-scan")], scan=True, global_batch=batch), remat=remat)


@contextmanager
def _constrained(rows: NamedSharding) -> Iterator[None]:
    """Inside, what a transformer normalises has this sharding: the line that its author would write in the model."""
    norms = [(gpt, "layer_norm"), (moe, "layer_norm"), (decoder, "rms_norm")]
    plain = [getattr(module, name) for module, name in norms]

    def held(norm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda params, x: norm(params, jax.lax.with_sharding_constraint(x, rows))

    for (module, name), norm in zip(norms, plain, strict=True):
        setattr(module, name, held(norm))
    try:
        yield
    finally:
        for (module, name), norm in zip(norms, plain, strict=True):
            setattr(module, name, norm)


def _path(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)


def _fsdp(devices: int) -> Callable[[str, Any], PartitionSpec]:
    def spec(_: str, leaf: Any) -> PartitionSpec:
        dims = [dim for dim, size in enumerate(leaf.shape) if size % devices == 0]
        if not dims:
            return PartitionSpec()
        largest = max(dims, key=lambda dim: leaf.shape[dim])
        return PartitionSpec(*(("data", "model") if dim == largest else None for dim in range(leaf.ndim)))

    return spec


def _megatron(degree: int, table: dict[str, int]) -> Callable[[str, Any], PartitionSpec]:
    def spec(path: str, leaf: Any) -> PartitionSpec:
        for end, dim in table.items():
            if path.endswith("/" + end) and leaf.ndim >= -dim and leaf.shape[dim] % degree == 0:
                return PartitionSpec(*("model" if one == leaf.ndim + dim else None for one in range(leaf.ndim)))
        return PartitionSpec()

    return spec


def by_hand(target: zoo.Target, devices: list[Any]) -> Iterator[tuple[str, Callable[[zoo.Target], Any]]]:
    """Each hand-written step by name: a function that lowers it for the devices."""
    count = len(devices)
    state, batch = target.example_state, target.example_batch
    paths = {_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    ways = [("data parallel", 1, lambda path, leaf: PartitionSpec()), ("fsdp", 1, _fsdp(count))]
    if any(path.endswith("attention/out") for path in paths):
        grouped = any(path.endswith("attention/query") for path in paths)
        table = {**_MEGATRON, **_GROUPED} if grouped else _MEGATRON
        ways += [(f"megatron tp={k}", k, _megatron(k, table)) for k in _TENSOR_PARALLEL if count % k == 0]
    for name, degree, spec in ways:
        mesh = Mesh(np.array(devices).reshape(count // degree, degree), ("data", "model"))
        rows = NamedSharding(mesh, PartitionSpec("data" if degree > 1 else ("data", "model")))
        of_state = jax.tree_util.tree_map_with_path(
            lambda path, leaf, mesh=mesh, spec=spec: NamedSharding(mesh, spec(_path(path), leaf)), state
        )
        of_batch = jax.tree.map(lambda _, rows=rows: rows, batch)

        def lower(target: zoo.Target, rows: Any = rows, of_state: Any = of_state, of_batch: Any = of_batch) -> Any:
            step = jax.jit(
                lambda state, batch: target.step(state, batch), in_shardings=(of_state, of_batch),
                out_shardings=(of_state, None), donate_argnums=0,
            )  # fmt: skip
            with _constrained(rows):
                return step.trace(state, batch).lower()

        yield name, lower


def facts(lower: Callable[[], Any]) -> dict[str, Any]:
    """What the compiler says of a program."""
    begun = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).partition("\n")[0][:200]}
    seconds = time.perf_counter() - begun
    found, schedule = read_compiled(compiled), read_schedule(compiled.as_text())
    exposed = [one for one in schedule.collectives if not one.kernels]
    return {
        "cycles": schedule.cycles,
        "peak_bytes": found.peak_bytes,
        "collective_bytes": {kind: one.bytes for kind, one in compiled_traffic([(found, 1)]).items()},
        "exposed_bytes": sum(one.count * one.bytes for one in exposed),
        "rematerialised": found.rematerialised,
        "compile_seconds": seconds,
    }


def measured(row: tuple[str, str, int], known: dict[str, Any], keep: Callable[[], None]) -> dict[str, Any]:
    """All contenders of a row.

    Args:
      row: one of `ROWS`.
      known: contenders by name that have been compiled; what is compiled now is added.
      keep: called whenever one is.
    """
    model, name, batch = row
    target = target_of(model, batch)
    begun = time.perf_counter()
    found = mw.plan_for(
        target.step, (target.example_state, target.example_batch), cluster=name, stages=1, donate=0, check="compile"
    )
    planned = time.perf_counter() - begun
    devices = target_devices(found.cluster, found.plan)
    ours = executable(found.program, found.plan, devices)
    lowerings: dict[str, Callable[[zoo.Target], Any]] = {"planned": lambda _: ours.lower()}
    for way, lower in {**lowerings, **dict(by_hand(target, devices))}.items():
        if way in known:
            continue
        found_facts = facts(lambda lower=lower: lower(target))
        if "refused" in found_facts and way != "planned":
            again = facts(lambda lower=lower: lower(target_of(model, batch, remat=True)))
            found_facts = {**again, "rematerialised_layers": True}
        known[way] = found_facts
        keep()
        print(name, way, json.dumps(known[way]), file=sys.stderr, flush=True)
    contenders = known
    written = {way: one for way, one in contenders.items() if way != "planned" and "refused" not in one}
    result = {"contenders": contenders, "planning_seconds": planned, "step_seconds": found.step_seconds, "done": True}
    if not written or "refused" in contenders["planned"]:
        return result
    key = "cycles" if contenders["planned"]["cycles"] else "peak_bytes"
    best = min(written, key=lambda way: written[way][key])
    ratios = {
        which: contenders["planned"][which] / written[best][which]
        for which in ("cycles", "peak_bytes", "exposed_bytes", "compile_seconds")
        if written[best][which]
    }
    lowest = min(one["peak_bytes"] for one in written.values())
    return {**result, "best": best, "ratios": {**ratios, "lowest_peak": contenders["planned"]["peak_bytes"] / lowest}}


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="MODEL/CLUSTER, or patterns of them, separated by semicolons")
    parser.add_argument("--record", type=Path, help="write the rows to this file, and run only those it does not have")
    asked = parser.parse_args()
    known = json.loads(asked.record.read_text()) if asked.record and asked.record.exists() else {}

    def keep() -> None:
        if asked.record:
            asked.record.write_text(json.dumps(known, indent=1))

    for row in ROWS:
        name = "/".join(map(str, row))
        if not any(fnmatchcase(name, pattern + "*") for pattern in asked.only.split(";")):
            continue
        have = known.setdefault(name, {"contenders": {}})
        if not have.get("done"):
            have.update(measured(row, have["contenders"], keep))
            keep()
            print(name, json.dumps(have.get("ratios")), file=sys.stderr, flush=True)
    each = [row["ratios"] for row in known.values() if "ratios" in row]
    means = {
        which: statistics.geometric_mean(one[which] for one in each if which in one)
        for which in ("cycles", "peak_bytes", "lowest_peak", "compile_seconds")
        if any(which in one for one in each)
    }
    print(json.dumps({"rows": known, "geometric_mean": means}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
