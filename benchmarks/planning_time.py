"""How long planning takes, as a user sees it: the whole command, from a cold start.

    python benchmarks/planning_time.py
    python benchmarks/planning_time.py --only gpt3-39b,gpt3-175b --growth
    python benchmarks/planning_time.py --tight
    python benchmarks/planning_time.py --zoo --only qwen3-32b

Runs `meshwright plan` for large models on large clusters, one after the other, each in a process of its own, and prints
one JSON object: for each the wall-clock seconds, the CPU seconds, the largest resident memory, what the plan is
predicted to do, and the seconds that are wanted (Alpa reports 2,393 s of search for the first on its own cluster). With
`--growth` also gpt3-39b with 12, 24, 48 and 96 layers, and on 8, 16, 32 and 64 hosts; with `--tight`, in the place of
the large ones, smaller models on so few devices that memory binds, most of them with a Python loop over their layers;
with `--zoo` every reference model of at most 70B parameters that is not tiny, on 128 H100s.
Exit status 1 if a command fails or takes longer than wanted. To time it on two cores of a machine of more: `taskset -c
0,1 python ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command to be timed.

    Args:
      target: of `meshwright plan`.
      cluster: of `meshwright plan`.
      batch: samples a step; None for the target's own.
      wanted_seconds: of wall-clock time; None where nothing is promised.
    """

    target: str
    cluster: str
    batch: int | None = None
    wanted_seconds: float | None = None


CASES = (
    Case(target="gpt3-39b", cluster="p3.16xlarge:8", batch=1024, wanted_seconds=10),
    Case(target="gpt3-175b", cluster="dgx-a100-80:128", wanted_seconds=30),
    Case(target="gpt3-1t", cluster="selene:384", wanted_seconds=60),
    Case(target="llama3-405b", cluster="dgx-h100:2048", batch=2048, wanted_seconds=90),
    # Of the size of Alpa's largest; its state alone is more than the 16 GB devices of p3.16xlarge hold.
    Case(target="moe-70b", cluster="p3dn.24xlarge:8", wanted_seconds=20),
    Case(target="wresnet-13b", cluster="p3.16xlarge:8", wanted_seconds=20),
)

# Alpa's smaller sizes, and gpt3-175b on an eighth of the devices: nothing is promised here.
TIGHT = (
    Case(target="gpt3-1.3b", cluster="p3.16xlarge:1", batch=1024),
    Case(target="gpt3-2.6b", cluster="p3.16xlarge:1", batch=1024),
    Case(target="gpt3-6.7b", cluster="p3.16xlarge:2", batch=1024),
    Case(target="gpt3-15b", cluster="p3.16xlarge:4", batch=1024),
    Case(target="moe-2.4b", cluster="p3.16xlarge:1"),
    Case(target="moe-27b", cluster="p3.16xlarge:4"),
    Case(target="wresnet-2b", cluster="p3.16xlarge:1"),
    Case(target="wresnet-6.8b", cluster="p3.16xlarge:4"),
    Case(target="gpt3-175b", cluster="dgx-a100-80:16"),
)

# llama3-70b has 70.6e9 parameters.
_LARGEST_OF_ZOO = 71e9

GROWTH = tuple(Case(target="gpt3-39b", cluster=f"p3.16xlarge:{hosts}", batch=1024) for hosts in (8, 16, 32, 64))

# The same layer, more often.
DEEPER = """
import dataclasses
from meshwright.zoo.gpt import CONFIGS, build
def make():
    target = build(dataclasses.replace(CONFIGS["gpt3-39b"], layers={layers}))
    return target.step, (target.example_state, target.example_batch)
"""


def of_the_zoo() -> tuple[Case, ...]:
    """Every reference model of at most 70B parameters that is not tiny."""
    from meshwright import zoo

    full = (name for name in zoo.names() if not name.endswith("-tiny"))
    small = (name for name in full if zoo.build(name).parameters <= _LARGEST_OF_ZOO)
    return tuple(Case(target=name, cluster="dgx-h100:16", wanted_seconds=30) for name in small)


def timed(case: Case, target: str) -> dict[str, object]:
    """Run one command."""
    command = [sys.executable, "-m", "meshwright", "plan", target, "--cluster", case.cluster, "--json"]
    command += ["--global-batch", str(case.batch)] if case.batch is not None else []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        out.seek(0)
        errors.seek(0)
        row: dict[str, object] = {**asdict(case), "target": case.target}
        row |= {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "resident_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }
        if os.waitstatus_to_exitcode(status):
            return {**row, "in_time": False, "failed": errors.read().strip()[-600:]}
        plan = json.load(out)
    predicted, stages = plan["predicted"], plan["stages"]
    return {
        **row,
        "in_time": case.wanted_seconds is None or seconds <= case.wanted_seconds,
        "devices": plan["devices"],
        "predicted": {name: predicted[name] for name in ("step_seconds", "tflops_per_device", "bubble_fraction")},
        "optimality_gap": plan["planning"]["optimality_gap"],
        "microbatches": plan["microbatches"],
        "schedule": plan["schedule"],
        "stages": [f"{len(s['devices'])} devices {'x'.join(map(str, s['mesh'].values()))}" for s in stages],
    }


def processor() -> str:
    """Its name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def is_shared() -> bool:
    """Whether Python calls itself in a shared library, which takes longer."""
    try:
        return "/libpython" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    return {
        "processor": processor(), "load": os.getloadavg()[0],
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": f"{platform.python_version()}{' in a shared library' * is_shared()}", "jax": version("jax"),
    }  # fmt: skip


def main() -> int:
    """Time all cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="targets, comma-separated; all if none")
    parser.add_argument("--growth", action="store_true", help="also with more layers, and on more hosts")
    parser.add_argument("--tight", action="store_true", help="models that memory binds, in the place of large ones")
    parser.add_argument(
        "--zoo", action="store_true", help="every reference model up to 70B, in the place of large ones"
    )
    given = parser.parse_args()
    only = {name for name in given.only.split(",") if name}
    where, rows = machine(), []
    for case in of_the_zoo() if given.zoo else TIGHT if given.tight else CASES:
        if not only or case.target in only:
            rows.append(timed(case, case.target))
            print(f"{case.target} on {case.cluster}: {rows[-1]['seconds']} s", file=sys.stderr)
    growth: dict[str, list[dict[str, object]]] = {}
    if given.growth:
        growth["devices"] = [timed(case, case.target) for case in GROWTH]
        growth["layers"] = []
        for layers in (12, 24, 48, 96):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "deeper.py"
                file.write_text(DEEPER.format(layers=layers))
                case = Case(target=f"gpt3-39b with {layers} layers", cluster="p3.16xlarge:32")
                growth["layers"].append(timed(case, f"{file}:make"))
    print(json.dumps({"machine": where, "cases": rows, "growth": growth}, indent=2))
    return 0 if all(row["in_time"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
