"""How well and how fast other people's training programs are planned, as they are published.

    MESHWRIGHT_PROGRAMS=../public python benchmarks/public_programs.py
    MESHWRIGHT_PROGRAMS=../public python benchmarks/public_programs.py --only 'gemma3_*' --presets

The folder that the environment variable names has the public repositories, each in a folder of its name; what they are,
and at which version, is at the top of each file of `benchmarks/programs`, which makes a train step of a program of
shapes alone. None of that code is part of this repository. What it imports has to be installed.

Runs `meshwright plan` for each on its cluster, one after the other, each in a process of its own and from a cold start,
with any number of stages and the default time limit. Prints one JSON object: for each the wall-clock and CPU seconds of
the whole command, the seconds of tracing, its largest resident memory, the step and the gap of the plan, its stages,
and the seconds that are wanted. With `--presets` also what `meshwright compare` finds in its default time limit: the
best preset, and what a step takes with it. Exit status 1 if a command fails or takes longer than wanted, if a gap is
more than 2 %, or if a preset is faster than the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import golden_plans
import planning_time

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"

MOST_GAP = 0.02

# Seconds of the whole command that are wanted for programs of up to four thousand million parameters, and above.
SMALL_SECONDS, LARGE_SECONDS = 30.0, 60.0

# The seconds of a preset and of a plan are of one cost model, and differ by rounding.
SAME = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to plan.

    Args:
      file: of `benchmarks/programs`, without its ending.
      name: the function in it that makes the step.
      cluster: of `meshwright plan`.
      batch: samples a step.
      wanted_seconds: of wall-clock time for the whole command.
    """

    file: str
    name: str
    cluster: str
    batch: int = 64
    wanted_seconds: float = SMALL_SECONDS

    @property
    def options(self) -> tuple[str, ...]:
        """Of `meshwright plan` and `meshwright compare`."""
        target = HERE / "programs" / f"{self.file}.py"
        return f"{target}:{self.name}", "--cluster", self.cluster, "--global-batch", str(self.batch)


PROGRAMS = (
    Program(file="gemma", name="gemma3_1b", cluster="tpu-v5e:8"),
    Program(file="gemma", name="gemma3_4b", cluster="tpu-v5e:32"),
    Program(file="gemma", name="gemma3_12b", cluster="tpu-v5p:32", wanted_seconds=LARGE_SECONDS),
    Program(file="gemma", name="gemma3_27b", cluster="tpu-v5p:64", wanted_seconds=LARGE_SECONDS),
    Program(file="maxtext_decoders", name="llama2_7b", cluster="dgx-h100:4", wanted_seconds=LARGE_SECONDS),
    Program(file="maxtext_decoders", name="llama2_7b_unscanned", cluster="dgx-h100:4", wanted_seconds=LARGE_SECONDS),
    Program(file="maxtext_decoders", name="mixtral_8x7b", cluster="dgx-h100:4", wanted_seconds=LARGE_SECONDS),
    Program(file="maxtext_decoders", name="mixtral_8x7b_unscanned", cluster="dgx-h100:4", wanted_seconds=LARGE_SECONDS),
    Program(file="gptj", name="gptj_6b", cluster="dgx-a100-80:2", wanted_seconds=LARGE_SECONDS),
    Program(file="nanogpt", name="gpt2_medium", cluster="dgx-a100-40:1"),
    Program(file="nanogpt", name="gpt2_xl", cluster="dgx-a100-40:1"),
    Program(file="nanogpt", name="gpt2_xl", cluster="dgx-h100:1"),
    Program(file="nanogpt", name="gpt2_xl", cluster="tpu-v5e:16"),
    Program(file="bert", name="bert_large", cluster="dgx-a100-40:1", batch=256),
    Program(file="unet", name="unet", cluster="dgx-a100-40:2", batch=256),
    Program(file="vit", name="vit_l16", cluster="dgx-h100:4", batch=4096),
    Program(file="vit", name="vit_g14", cluster="tpu-v5e:32", batch=4096),
    Program(file="siglip", name="siglip_b16", cluster="tpu-v5e:32", batch=16384),
    Program(file="paligemma", name="paligemma_3b", cluster="tpu-v5e:16", batch=256),
    Program(file="paligemma", name="paligemma_3b_loop", cluster="dgx-a100-40:1", batch=64),
    Program(file="qwen3", name="qwen3_8b", cluster="dgx-h100:4", wanted_seconds=LARGE_SECONDS),
)


def planned(program: Program) -> dict[str, Any]:
    """What `meshwright plan` says, and what it took."""
    row = golden_plans.Row(name=program.name, options=program.options)
    return golden_plans.measured(row, SOURCE)


def compared(program: Program) -> dict[str, Any]:
    """The best preset of `meshwright compare`, and what *auto* takes there."""
    command = [sys.executable, "-m", "meshwright", "compare", *program.options, "--json"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SOURCE)}
    begun = time.perf_counter()
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    seconds = round(time.perf_counter() - begun, 2)
    if ended.returncode:
        return {"compare_seconds": seconds, "compare_failed": ended.stderr.strip()[-600:]}
    auto, *presets = json.loads(ended.stdout)["plans"]
    feasible = [one for one in presets if one["feasible"]]
    best = min(feasible, key=lambda one: one["predicted"]["step_seconds"], default=None)
    return {
        "compare_seconds": seconds, "presets": len(presets), "feasible_presets": len(feasible),
        "auto_step_seconds": auto["predicted"]["step_seconds"] if auto["feasible"] else None,
        "best_preset": best["name"] if best is not None else None,
        "best_preset_step_seconds": best["predicted"]["step_seconds"] if best is not None else None,
    }  # fmt: skip


def wrong_with(row: dict[str, Any]) -> list[str]:
    """What is not as wanted."""
    if row["status"]:
        return ["the command failed"]
    wrong, gap, preset = [], row["optimality_gap"], row.get("best_preset_step_seconds")
    if row["wall_seconds"] > row["wanted_seconds"]:
        wrong.append(f"{row['wall_seconds']} s, {row['wanted_seconds']:g} wanted")
    if gap is None or gap > MOST_GAP:
        wrong.append(f"a gap of {gap}")
    if preset is not None and row["step_seconds"] > SAME * preset:
        wrong.append(f"{row['best_preset']} is faster: {preset:.4g} s")
    return [*wrong, *(["compare failed"] if "compare_failed" in row else [])]


def main() -> int:
    """Plan all programs and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", help="names or name/cluster, comma-separated, with * and ?")
    parser.add_argument("--presets", action="store_true", help="also compare with all presets")
    given = parser.parse_args()
    where, rows = planning_time.machine(), []
    for program in PROGRAMS:
        names = (program.name, f"{program.name}/{program.cluster}")
        if not any(fnmatchcase(name, pattern) for name in names for pattern in given.only.split(",")):
            continue
        row = {**asdict(program), **planned(program), **(compared(program) if given.presets else {})}
        row["wrong"] = wrong_with(row)
        rows.append(row)
        print(f"{program.name} on {program.cluster}: {row['wrong'] or 'as wanted'}", file=sys.stderr, flush=True)
    print(json.dumps({"machine": where, "programs": rows}, indent=2))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
