"""The models of Alpa's evaluation on its clusters: our plans, Alpa's published ones, and presets, under our costs.

    python benchmarks/alpa_suite.py --only gpt:8,moe:4 --markdown
    python benchmarks/alpa_suite.py --results alpa_suite_rows --cell-seconds 900

Prints one JSON object: what was run, with which versions, and a row for each cell, that is for each family of models
(gpt, moe, wresnet) and number of V100s (AWS p3.16xlarge, 25 Gb/s between hosts, 1 to 64 of them): the plan that
`meshwright plan` gives, the published one, and every preset that `meshwright compare` tries, each with the predicted
seconds of a step of its best plan, with what it takes at least where presets before it take no more, or with the
reason why there is none. `--markdown` prints the rows as a table. Exit status 1 if anything is, or may be,
faster than our plan by prediction, or a cell failed.

Each cell is a process of its own with a time limit. With `--results` its row is kept in that folder, and a cell whose
row is there is not run again.

The published plans are those of alpa-projects/alpa, `benchmark/alpa/suite_manual_gpt.py`, `suite_manual_moe.py` and
`suite_wresnet.py` at commit b8078a9f: the layers of each stage (of Alpa's own clustering into so many layers), its
devices and logical mesh, the microbatches, 1F1B, and for GPT that each layer is rematerialised. What Alpa left to its
own solver, the layouts inside a stage, is left to ours: a published plan is as good here as its stages can be. Like our
own it is written out, and has to fit by what its programs hold.

Not the same as Alpa's: parameters and optimizer state are float32 here (activations float16 for GPT and MoE), there
float16 with float32 copies; layers are cut by our clustering. TFLOPS are model FLOPs: forward and backward once;
the suite's own figures count the rematerialised forward as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from quality import faster, fates

from meshwright import zoo
from meshwright.cluster import Cluster, load_cluster
from meshwright.errors import MemoryExceeded, PlanError, size_words
from meshwright.lowering.written_out import written_out
from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.planning.refine import MARGIN, held_bytes
from meshwright.planning.request import Planning, PlanOptions
from meshwright.presets import Preset
from meshwright.presets.candidates import candidates_for
from meshwright.program.staged import staged_program
from meshwright.program.traces import Traces, traces_of
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.driver import StageRequest, search_stages
from meshwright.search.prices.least_work import least_work_seconds

# How often a published plan is searched with less memory until its programs fit.
ATTEMPTS = 3

# Seconds for a cell, and the share of them for our plan and for the published one, each; presets have what is left.
CELL_SECONDS, PLAN_SHARE = 600.0, 0.2

# No preset takes more.
PRESET_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A plan of Alpa's suite.

    Args:
      model: name in the zoo.
      microbatches: in a step; 0 where no plan was published.
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
        Published(model="moe-380m", microbatches=0, layers=(), meshes=((1,),)),
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


CELLS = {f"{family}:{one.devices}": (family, one) for family, suite in SUITE.items() for one in suite}


def described(plan: Plan, layers: int) -> dict[str, Any]:
    """A plan in a few words."""
    assert plan.predicted is not None
    return {
        "seconds": plan.predicted.step_seconds,
        "tflops_per_gpu": plan.predicted.tflops_per_device,
        "stages": _stages(plan, layers),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "bubble": plan.predicted.bubble_fraction,
        "most_gib": max(held_bytes(plan)) / 2**30,
    }


def _stages(plan: Plan, layers: int) -> list[str]:
    """Of each stage layers x devices, its logical mesh, and R where it is rematerialised."""
    found = []
    for stage in plan.stages:
        count = stage.layers[1] - stage.layers[0] if len(plan.stages) > 1 else layers
        shape = "x".join(str(size) for _, size in stage.mesh)
        found.append(f"{count}x{len(stage.devices)} ({shape}){' R' if stage.rematerialised else ''}")
    return found


def row(name: str, *, seconds: float) -> dict[str, Any]:
    """One cell.

    Args:
      name: family and number of GPUs.
      seconds: for all of it.
    """
    family, published = CELLS[name]
    start = time.perf_counter()
    target = zoo.build(published.model, dtype=DTYPES[family])
    traces, args, cluster = (
        traces_of(target.step),
        (target.example_state, target.example_batch),
        v100s(published.devices),
    )
    found: dict[str, Any] = {
        "cell": name, "model": published.model, "gpus": published.devices, "parameters": target.parameters,
        "global_batch": jax.tree.leaves(target.example_batch)[0].shape[0], "activations": DTYPES[family],
    }  # fmt: skip
    try:
        planning = plan_for(traces, args, cluster=cluster, stages=None, time_limit_seconds=PLAN_SHARE * seconds)
    except MemoryExceeded as error:
        found["ours"] = {"refused": str(error)}
    else:
        ours = planning.plan
        found["ours"] = described(ours, max(stage.layers[1] for stage in ours.stages))
        found["ours"]["planning_seconds"] = planning.seconds
    found["alpa"] = _published(published, traces, args, cluster, PLAN_SHARE * seconds)
    found["presets"] = _presets(traces, args, cluster, start + seconds)
    found["seconds"] = time.perf_counter() - start
    return found


def _published(
    published: Published, traces: Traces, args: tuple[Any, ...], cluster: Cluster, seconds: float
) -> dict[str, Any]:
    """The published plan under our costs, or why there is none."""
    if not published.microbatches:
        return {"refused": "no plan was published"}
    program = traces.program(args, microbatches=published.microbatches)
    staged = staged_program(program, layers=sum(published.layers), exactly=True)
    names, meshes = ("x", "y"), [_plain(shape) for shape in published.meshes]
    usable = limit = cluster.device.usable_memory_bytes
    held = 0.0
    try:
        for _ in range(ATTEMPTS):
            result = search_stages(
                StageRequest(
                    programs=[staged], parameters=parameter_infos(program), cluster=cluster.with_memory_limit(limit),
                    layers=published.layers, submeshes=published.submeshes, schedules=("one_f_one_b",),
                    stage_meshes=[(names[: len(m)], m) for m in meshes], remat=published.remat,
                    time_limit_seconds=seconds,
                )
            )  # fmt: skip
            plan = written_out(result.plan, result.program, cluster.device.compiler)
            held = MARGIN * max(held_bytes(plan))
            if held <= usable:
                return described(plan, sum(published.layers))
            limit -= held - usable
        return {"refused": f"its programs hold {size_words(held)} of {size_words(usable)}"}
    except PlanError as error:
        return {"refused": str(error)}


def _presets(
    traces: Traces, args: tuple[Any, ...], cluster: Cluster, deadline: float
) -> dict[str, dict[str, float | str]]:
    """Of each preset the predicted seconds of its best plan, what it takes at least, or why there is none.

    A preset is planned as far as it may be faster than those before it; interleaved stages are tried, not bounded. Of
    one that is not looked at before the time is over no more is known than that it does all arithmetic.
    """

    def plan(preset: Preset, than_seconds: float, left_seconds: float) -> Planning:
        options = PlanOptions(cluster=cluster, preset=preset, time_limit_seconds=min(left_seconds, PRESET_SECONDS))
        return faster(traces, args, options, than_seconds=than_seconds)

    # PipeDream answers another question: its gradients are of older weights.
    presets = [preset for preset in candidates_for(cluster) if preset.schedule != "pipedream"]
    found, told = fates(presets, plan, deadline=deadline), dict[str, dict[str, float | str]]()
    least_seconds = least_work_seconds(traces.program(args).graph, 1, cluster)
    for preset in presets:
        fate = found.get(preset, least_seconds)
        if isinstance(fate, Planning):
            told[str(preset)] = {"seconds": fate.step_seconds}
        elif isinstance(fate, PlanError):
            told[str(preset)] = {"refused": str(fate)}
        else:
            told[str(preset)] = {"at_least": fate}
    return told


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A mesh without its axes of one device, which split nothing."""
    return tuple(size for size in shape if size > 1) or (1,)


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """A row with what is faster than our plan in it."""
    if "failed" in found:
        return {**found, "never_worse": False}
    priced = {name: one["seconds"] for name, one in found["presets"].items() if "seconds" in one}
    # Whatever was not planned takes at least so long.
    bounds = {name: one["at_least"] for name, one in found["presets"].items() if "at_least" in one}
    best = min(priced, key=lambda name: priced[name], default=None)
    others = {**priced, **({"alpa": found["alpa"]["seconds"]} if "seconds" in found["alpa"] else {})}
    ours = found["ours"].get("seconds", np.inf)  # where nothing fits, nothing else may
    return {
        **found,
        "best_preset": best,
        "faster_than_alpa": others["alpa"] / ours if "alpa" in others else None,
        "faster_than_presets": priced[best] / ours if best is not None else None,
        "faster_than_ours": {name: seconds for name, seconds in others.items() if seconds < ours * (1 - 1e-9)},
        "presets_unknown": sum(least < min(ours * (1 - 1e-9), priced.get(best, np.inf)) for least in bounds.values()),
        "best_preset_is_best": min(bounds.values(), default=np.inf) >= priced.get(best, np.inf),
        "never_worse": min((*others.values(), *bounds.values()), default=np.inf) >= ours * (1 - 1e-9),
    }


def run_cell(name: str, *, seconds: float) -> dict[str, Any]:
    """A cell in a process of its own."""
    command = [sys.executable, __file__, "--cell", name, "--cell-seconds", str(seconds)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            # What has begun when the time is over is finished: searches end soon after their own limits.
            done = subprocess.run(command, stdout=out, stderr=errors, timeout=1.5 * seconds + 60, check=False)
        except subprocess.TimeoutExpired:
            return {"cell": name, "model": CELLS[name][1].model, "gpus": CELLS[name][1].devices, "failed": "too late"}
        out.seek(0)
        errors.seek(0)
        if done.returncode:
            failed = errors.read().strip()[-600:]
            return {"cell": name, "model": CELLS[name][1].model, "gpus": CELLS[name][1].devices, "failed": failed}
        return json.load(out)


def rows(names: Sequence[str], folder: Path | None, *, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of cells, from the folder where they are there."""
    for name in names:
        kept = folder / f"{name.replace(':', '-')}.json" if folder is not None else None
        if kept is not None and kept.exists():
            yield judged(json.loads(kept.read_text()))
            continue
        found = run_cell(name, seconds=seconds)
        if kept is not None and "failed" not in found:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found, indent=1))
        yield judged(found)


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "| model | GPUs | ours, seconds a step | TFLOPS a GPU | published, seconds a step | ours faster by "
        "| best preset, seconds a step | ours faster by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        if "failed" in one:
            lines.append(f"| {one['model']} | {one['gpus']} | failed | | | | | |")
            continue
        ours, alpa, best = one["ours"], one["alpa"], one["best_preset"]
        if "seconds" in alpa:
            published = f"{_runs(alpa['stages'])}, {alpa['microbatches']} mb: {alpa['seconds']:.4g}"
        else:
            published = "none" if alpa["refused"].startswith("no plan") else "does not fit"
        cells = [
            one["model"], str(one["gpus"]),
            f"{_runs(ours['stages'])}, {ours['microbatches']} mb, {ours['schedule']}: {ours['seconds']:.4g}"
            if "seconds" in ours else "does not fit",
            f"{ours['tflops_per_gpu']:.1f}" if "seconds" in ours else "", published, _factor(one["faster_than_alpa"]),
            "none" if best is None else f"{best}: {one['presets'][best]['seconds']:.4g}",
            _factor(one["faster_than_presets"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _factor(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _runs(stages: Sequence[str]) -> str:
    """Stages, equal neighbours in one word."""
    runs: list[list[str]] = []
    for stage in stages:
        if runs and runs[-1][0] == stage:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(f"{len(run)} of {run[0]}" if len(run) > 1 else run[0] for run in runs)


def main() -> int:
    """Run the cells asked for and print their rows; 1 if anything is faster than ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells such as gpt:8, or families, comma-separated; all if none")
    parser.add_argument("--results", type=Path, help="folder that keeps rows, and from which known ones are taken")
    parser.add_argument("--cell-seconds", type=float, default=CELL_SECONDS, help="time limit of a cell")
    parser.add_argument("--markdown", action="store_true", help="print a table in place of JSON")
    parser.add_argument("--cell", choices=sorted(CELLS), help="run this cell in this process and print its row alone")
    given = parser.parse_args()
    if given.cell:
        print(json.dumps(row(given.cell, seconds=given.cell_seconds)))
        return 0
    only = [name for name in given.only.split(",") if name]
    unknown = [name for name in only if name not in CELLS and name not in SUITE]
    if unknown:
        parser.error(f"--only {unknown[0]}: no cell or family; there are {', '.join((*SUITE, *CELLS))}")
    names = [name for name in CELLS if not only or name in only or name.split(":")[0] in only]
    found = []
    for one in rows(names, given.results, seconds=given.cell_seconds):
        found.append(one)
        words = one.get("failed")
        if words is None:
            ours = f"{one['ours']['seconds']:.4g} s" if "seconds" in one["ours"] else "does not fit"
            words = f"{ours}, faster: {one['faster_than_ours'] or 'nothing'}"
        if one.get("presets_unknown"):
            words += f", {one['presets_unknown']} presets unknown: --cell-seconds was over"
        print(f"{one['model']} on {one['gpus']}: {words}", file=sys.stderr)
    document = {
        "what": "predicted seconds of a step: ours, Alpa's published plan and presets, under our costs",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "rows": found,
    }
    print(markdown(found) if given.markdown else json.dumps(document, indent=1))
    return 0 if all(one["never_worse"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
