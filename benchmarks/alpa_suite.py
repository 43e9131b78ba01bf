"""The models of Alpa's evaluation on its clusters: our plan beside the plan that Alpa published, under our costs.

    python benchmarks/alpa_suite.py --family gpt --devices 8,16 --time-limit 60

Prints one JSON object: what was run, with which versions, and a row for each number of V100s (AWS p3.16xlarge, 25 Gb/s
between hosts). A row says of our plan and of the published one the stages (layers x devices, logical mesh), the
microbatches, the schedule and the predicted seconds of a step, or why the published plan does not fit; and with
`--presets N` the predicted seconds of the first N parallelisms of the literature (`meshwright.compare`) with as many
microbatches as published. Exit status 1 if ours is predicted to be slower than any of them anywhere.

The published plans are those of alpa-projects/alpa, `benchmark/alpa/suite_manual_gpt.py`, `suite_manual_moe.py` and
`suite_wresnet.py` at commit b8078a9f: the layers of each stage (of Alpa's own clustering into so many layers), its
devices and logical mesh, the microbatches, 1F1B, and for GPT that each layer is rematerialised. What Alpa left to its
own solver, the layouts inside a stage, is left to ours: a published plan is as good here as its stages can be.

Not the same as Alpa's: parameters and optimizer state are float32 here (activations float16 for GPT and MoE), there
float16 with float32 copies; layers are cut by our clustering. TFLOPS are model FLOPs: forward and backward once;
the suite's own figures count the rematerialised forward as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshwright import zoo
from meshwright.cluster import Cluster, load_cluster
from meshwright.compare import candidates_for
from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.planning import plan_for
from meshwright.presets import Preset
from meshwright.program.staged import staged_program
from meshwright.program.trace import Program, trace_program
from meshwright.search.parameters import parameter_infos
from meshwright.search.pipeline import StageRequest, StageSearchResult, search_stages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A plan of Alpa's suite.

    Args:
      model: name in the zoo.
      microbatches: in a step.
      layers: of each stage.
      meshes: the shape of each stage's logical mesh.
      remat: "layer", or None where nothing is said of it: the better.
    """

    model: str
    microbatches: int
    layers: tuple[int, ...]
    meshes: tuple[tuple[int, ...], ...]
    remat: str | None = "layer"

    @property
    def devices(self) -> int:
        """Of all stages."""
        return sum(self.submeshes)

    @property
    def submeshes(self) -> tuple[int, ...]:
        """Devices of each stage."""
        return tuple(int(np.prod(shape)) for shape in self.meshes)


def _equal(model: str, microbatches: int, layers: int, stages: int, mesh: tuple[int, ...], **more: Any) -> Published:
    """Stages of as many layers each, on equal meshes."""
    return Published(
        model=model, microbatches=microbatches, layers=(layers // stages,) * stages, meshes=(mesh,) * stages, **more
    )


SUITE: dict[str, tuple[Published, ...]] = {
    "gpt": (
        _equal("gpt3-350m", 512, 6, 1, (1, 1)),
        _equal("gpt3-760m", 128, 6, 2, (1, 1)),
        _equal("gpt3-1.3b", 128, 6, 2, (2, 1)),
        Published(model="gpt3-2.6b", microbatches=128, layers=(2, 2, 4), meshes=((2, 1), (2, 1), (4, 1))),
        _equal("gpt3-6.7b", 64, 8, 2, (2, 4)),
        _equal("gpt3-15b", 128, 16, 4, (2, 4)),
        _equal("gpt3-39b", 1024, 16, 16, (1, 4)),
    ),
    "moe": (
        # The page names no plan for one GPU.
        _equal("moe-690m", 32, 8, 1, (2, 1), remat=None),
        _equal("moe-1.3b", 32, 8, 2, (2, 1), remat=None),
        _equal("moe-2.4b", 32, 8, 2, (4, 1), remat=None),
        _equal("moe-10b", 16, 8, 2, (8, 1), remat=None),
        _equal("moe-27b", 128, 8, 8, (4, 1), remat=None),
        _equal("moe-70b", 64, 8, 8, (8, 1), remat=None),
    ),
    "wresnet": (
        _equal("wresnet-250m", 24, 16, 1, (1, 1), remat=None),
        _equal("wresnet-500m", 24, 16, 1, (2, 1), remat=None),
        _equal("wresnet-1b", 24, 16, 1, (4, 1), remat=None),
        Published(model="wresnet-2b", microbatches=24, layers=(8, 8), meshes=((4, 1), (1, 4)), remat=None),
        Published(model="wresnet-4b", microbatches=32, layers=(5, 4, 7), meshes=((4, 1), (4, 1), (8, 1)), remat=None),
        Published(model="wresnet-6.8b", microbatches=32, layers=(5, 4, 4, 3), meshes=((8, 1),) * 4, remat=None),
        Published(
            model="wresnet-13b", microbatches=38, layers=(4, 4, 4, 4, 4, 4, 5, 4), meshes=((1, 8),) * 8, remat=None
        ),
    ),
}

# Activations, as the suite has them.
DTYPES = {"gpt": "float16", "moe": "float16", "wresnet": "float32"}


def v100s(devices: int) -> Cluster:
    """So many GPUs: a part of one host, or whole hosts."""
    if devices >= 8:
        return load_cluster(f"p3.16xlarge:{devices // 8}")
    host = load_cluster("p3.16xlarge").hosts[0]
    return Cluster(name=f"{devices} of p3.16xlarge", hosts=(dataclasses.replace(host, devices=devices),))


def described(result: StageSearchResult) -> dict[str, Any]:
    """A plan in a few words."""
    plan = result.plan
    assert plan.predicted is not None
    return {
        "seconds": plan.predicted.step_seconds,
        "tflops_per_gpu": plan.predicted.tflops_per_device,
        "stages": _stages(plan, len(result.program.layers)),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "bubble": plan.predicted.bubble_fraction,
        "most_gib": max(stage.memory.total for stage in plan.stages) / 2**30,
        "search_seconds": result.seconds,
        "integer_programs": result.solves,
    }


def _stages(plan: Plan, layers: int) -> list[str]:
    """Of each stage layers x devices, its logical mesh, and R where it is rematerialised."""
    found = []
    for stage in plan.stages:
        count = stage.layers[1] - stage.layers[0] if len(plan.stages) > 1 else layers
        shape = "x".join(str(size) for _, size in stage.mesh)
        found.append(f"{count}x{len(stage.devices)} ({shape}){' R' if stage.rematerialised else ''}")
    return found


def row(
    published: Published, *, factors: Sequence[float], layers: int, presets: int, time_limit: float
) -> dict[str, Any]:
    """One model on its GPUs: the published plan under our costs, ours, and presets."""
    family = next(name for name, rows in SUITE.items() if published in rows)
    target = zoo.build(published.model, dtype=DTYPES[family])
    cluster = v100s(published.devices)
    batch = jax.tree.leaves(target.example_batch)[0].shape[0]
    programs: dict[int, Program] = {}

    def program(count: int) -> Program:
        if count not in programs:
            args = (target.example_state, target.example_batch)
            programs[count] = trace_program(target.step, args, microbatches=count)
        return programs[count]

    start = time.perf_counter()
    theirs = program(published.microbatches)
    infos = parameter_infos(theirs)
    cut_as_theirs = staged_program(theirs, layers=sum(published.layers), exactly=True)
    names, meshes = ("x", "y"), [_plain(shape) for shape in published.meshes]
    found: dict[str, Any] = {
        "family": family, "model": published.model, "gpus": published.devices, "parameters": target.parameters,
        "global_batch": batch, "activations": DTYPES[family],
    }  # fmt: skip
    try:
        result = search_stages(
            StageRequest(
                programs=[cut_as_theirs], parameters=infos, cluster=cluster, layers=published.layers,
                submeshes=published.submeshes, stage_meshes=[(names[: len(m)], m) for m in meshes],
                schedules=("one_f_one_b",), remat=published.remat, time_limit_seconds=time_limit,
            )
        )  # fmt: skip
        found["alpa"] = described(result)
    except PlanError as error:
        found["alpa"] = {"refused": str(error)}
    counts = sorted({int(published.microbatches * factor) for factor in factors})
    # The published stages are among those that ours may choose: their clustering is one of the programs.
    ours = [staged_program(program(count), layers=layers) for count in counts if count >= 1 and batch % count == 0]
    if len(cut_as_theirs.layers) != layers:
        ours.append(cut_as_theirs)
    result = search_stages(
        StageRequest(programs=ours, parameters=infos, cluster=cluster, time_limit_seconds=time_limit)
    )
    found["ours"] = described(result)
    found["considered"] = list(result.considered)
    found["presets"] = dict(
        priced(preset, target, cluster, microbatches=published.microbatches, time_limit=time_limit)
        for preset in candidates_for(cluster)[:presets]
    )
    found["seconds"] = time.perf_counter() - start
    if "seconds" in found["alpa"]:
        found["speed_up"] = found["alpa"]["seconds"] / found["ours"]["seconds"]
    return found


def priced(
    preset: Preset, target: Any, cluster: Cluster, *, microbatches: int, time_limit: float
) -> tuple[str, float | str]:
    """A preset's name with the predicted seconds of its plan, or with the reason why there is none."""
    try:
        planning = plan_for(
            target.step, (target.example_state, target.example_batch), cluster=cluster, preset=preset,
            microbatches=microbatches, time_limit_seconds=time_limit,
        )  # fmt: skip
    except PlanError as error:
        return str(preset), str(error)
    assert planning.plan.predicted is not None
    return str(preset), planning.plan.predicted.step_seconds


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A mesh without its axes of one device, which split nothing."""
    return tuple(size for size in shape if size > 1) or (1,)


def rows(family: str, devices: Sequence[int], **limits: Any) -> Iterator[dict[str, Any]]:
    """The rows asked for."""
    for published in SUITE[family]:
        if published.devices in devices:
            yield row(published, **limits)


def _beaten(found: dict[str, Any]) -> bool:
    """Whether some other plan of a row is predicted to be faster than ours."""
    others = [found["alpa"].get("seconds", np.inf), *(s for s in found["presets"].values() if isinstance(s, float))]
    return min(others) < found["ours"]["seconds"] * (1 - 1e-9)


def main() -> int:
    """Run the rows asked for and print them; 1 if a published plan is faster than ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(SUITE), default="gpt")
    parser.add_argument("--devices", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--layers", type=int, default=16, help="the most layers of our plans")
    parser.add_argument(
        "--factors", type=lambda text: [float(n) for n in text.split(",")], default=[1.0],
        help="our numbers of microbatches, as multiples of the published one",
    )  # fmt: skip
    parser.add_argument("--presets", type=int, default=0, help="how many presets to price as well")
    given = parser.parse_args()
    found = []
    limits = {"factors": given.factors, "layers": given.layers, "presets": given.presets}
    for one in rows(given.family, given.devices, time_limit=given.time_limit, **limits):
        found.append(one)
        theirs = one["alpa"].get("seconds")
        print(
            f"{one['model']} on {one['gpus']}: ours {one['ours']['seconds']:.4g} s, "
            + (f"published {theirs:.4g} s" if theirs is not None else "published does not fit"),
            file=sys.stderr,
        )
    document = {
        "what": "predicted seconds of a step: ours, and Alpa's published plan under our costs",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "rows": found,
    }
    print(json.dumps(document, indent=1))
    return 1 if any(_beaten(one) for one in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
