"""The planner's plans and how long they take, row by row, beside a record of an earlier version.

    python benchmarks/golden_plans.py --quick
    python benchmarks/golden_plans.py --only 'gpt3-1.3b/*,alpa/moe:*'
    python benchmarks/golden_plans.py --against ../before/src --wall
    python benchmarks/golden_plans.py --record benchmarks/golden_plans.json

A row is one `meshwright plan` command from a cold start. The rows are the cases of `planning_time.py` (those of
`--tight` too) and `quality.py`, the models of `alpa_suite.py` within the time that our plan has there, and models on a
few devices, each with one stage and with any number of stages. A name is target/cluster/samples/stages.

Prints one JSON object: for each row what was measured, its step, wall-clock, CPU and memory ratio to the record, and
what is wrong with it. Exit status 1 if anything is: a step of more than 1.005 times the recorded one, a command that
fails and did not, or with `--wall` more than 1.25 times the wall-clock time. A step of a model that has a row with one
stage and a row with any number may take no longer than the better of both searches, where that plan has one stage too.

Wall-clock times of two machines or two days are not comparable: `--against SRC` runs each row with the package in that
folder as well, in turns, and takes all ratios but that of the step from these runs. `--quick` runs the rows that took
less than 12 CPU seconds, about 10 s each. `--record FILE` writes rows as they are done, and runs only those that FILE
does not have.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import alpa_suite
import planning_time
import quality

HERE = Path(__file__).resolve().parent

MOST_STEP, MOST_WALL = 1.005, 1.25

# CPU seconds of a row of `--quick`, seconds after which a command is stopped, and between two looks at its memory.
QUICK_SECONDS, LATE_SECONDS, LOOK_SECONDS = 12.0, 900.0, 0.5

NOTE = (
    "wall_seconds are indicative: the machine was busy with other work. --against judges them. staged_step_seconds: of "
    "meshwright.planning.stages.plan_stages for one submesh of all devices, which no command reached at that commit."
)

# With one stage, and with any number: models that fill the memory of these devices or are nearly too small for them.
FEW_DEVICES = (
    ("gpt3-125m", "p3.16xlarge:1", 64),
    ("gpt3-350m", "p3.16xlarge:1", 256),
    ("gpt3-350m", "dgx-a100-40:1", 64),
    ("gpt3-760m", "p3.16xlarge:1", 256),
    ("gpt3-1.3b", "p3.16xlarge:1", 256),
    ("gpt3-2.6b", "p3.16xlarge:2", 256),
    ("llama3-8b", "dgx-a100-80:1", 64),
    ("moe-2.4b", "p3.16xlarge:1", None),
    ("wresnet-500m", "p3.16xlarge:1", None),
    ("unet-470m", "p3.16xlarge:1", None),
)

# A model of Alpa's suite, which sets its activations, as a target.
ALPA_TARGET = """
from meshwright import zoo
def make():
    target = zoo.build({model!r}, dtype={dtype!r})
    return target.step, (target.example_state, target.example_batch)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A command.

    Args:
      name: target/cluster/samples/stages, or alpa/cell/stages.
      options: of `meshwright plan`.
      files: that the options name, as texts.
    """

    name: str
    options: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()


def row_of(target: str, cluster: str, batch: int | None, stages: str = "auto") -> Row:
    """The row of a target of the zoo, its attention with scores in memory, as rows were recorded."""
    samples = ("--global-batch", str(batch)) if batch is not None else ()
    return Row(
        name=f"{target}/{cluster}/{batch or 'own'}/{stages}",
        options=(target, "--cluster", cluster, "--stages", stages, "--attention", "plain", *samples),
    )


def alpa_row(cell: str) -> Row:
    """The row of a cell of Alpa's suite."""
    family, published = alpa_suite.CELLS[cell]
    target = ALPA_TARGET.format(model=published.model, dtype=alpa_suite.DTYPES[family])
    seconds = alpa_suite.PLAN_SHARE * alpa_suite.CELL_SECONDS
    return Row(
        name=f"alpa/{cell}/auto",
        options=(
            "alpa_target.py:make", "--cluster", "cluster.toml", "--stages", "auto", "--time-limit", f"{seconds:g}",
        ),
        files=(("alpa_target.py", target), ("cluster.toml", alpa_suite.v100s(published.devices).to_toml())),
    )  # fmt: skip


def all_rows() -> dict[str, Row]:
    """Each once, by name."""
    large = [*planning_time.CASES, *planning_time.TIGHT, *quality.CASES]
    rows = [row_of(case.target, case.cluster, case.batch) for case in large]
    rows += [row_of(*few, stages) for few in FEW_DEVICES for stages in ("1", "auto")]
    rows += [alpa_row(cell) for cell in alpa_suite.CELLS]
    return {row.name: row for row in rows}


def measured(row: Row, source: Path) -> dict[str, Any]:
    """Run a command.

    Args:
      row: the command.
      source: folder that has the package.
    """
    command = [sys.executable, "-m", "meshwright", "plan", *row.options, "--json"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(source)}
    resident = looked = 0.0
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        for name, text in row.files:
            (Path(folder) / name).write_text(text)
        begun = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=errors, env=env, start_new_session=True)
        try:
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                seconds = time.perf_counter() - begun
                if seconds > LATE_SECONDS:
                    os.killpg(process.pid, signal.SIGKILL)
                if seconds > looked + LOOK_SECONDS:
                    resident, looked = max(resident, resident_bytes(process.pid)), seconds
                time.sleep(0.02)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds, (_, status, usage) = time.perf_counter() - begun, ended
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = {
            "status": process.returncode, "wall_seconds": round(seconds, 2), "load": load,
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "resident_bytes": peak, "resident_bytes_of_all": max(peak, round(resident)),
        }  # fmt: skip
        if process.returncode:
            return {**found, "failed": errors.read().strip()[-600:]}
        return {**found, **described(json.load(out))}


def resident_bytes(session: int) -> float:
    """What the processes of a session hold together; 0 where the system does not say.

    Memory that a copy of a process shares with it counts once. So do files (the libraries): their share would depend
    on who else on this machine has them open.
    """
    anonymous, files = 0.0, 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {name: 1024.0 * int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
        anonymous += sizes["Pss_Anon"]
        files = max(files, sizes["Rss"] - sizes["Anonymous"])
    return anonymous + files


def described(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What `meshwright plan --json` says, in short."""
    held: Counter[tuple[int, ...]] = Counter()
    for stage in plan["stages"]:
        held[tuple(stage["devices"])] += stage["memory_bytes"]["total"]
    told = [f"{len(s['devices'])} ({'x'.join(map(str, s['mesh'].values()))}) {s['remat']}" for s in plan["stages"]]
    runs = [(len(list(run)), stage) for stage, run in groupby(told)]
    options = "".join(f" {name}={value}" for name, value in sorted(plan["schedule_options"].items()))
    stages = ", ".join(f"{count} of {stage}" if count > 1 else stage for count, stage in runs)
    return {
        "step_seconds": plan["predicted"]["step_seconds"],
        "memory_bytes": max(held.values()),
        "optimality_gap": plan["planning"]["optimality_gap"],
        "planning_seconds": round(plan["planning"]["seconds"], 2),
        "trace_seconds": round(plan["planning"]["trace_seconds"], 2),
        "stages": len(plan["stages"]),
        "strategy": f"{plan['microbatches']} microbatches, {plan['schedule']}{options}: {stages}",
    }


def most_step_seconds(name: str, golden: Mapping[str, Any]) -> float | None:
    """What a step is held to; None where there was no plan.

    Args:
      name: of the row.
      golden: recorded rows. What the staged search found when it was asked for one stage, which no command did, is
        `staged_step_seconds` in rows of one stage.
    """
    model, _, stages = name.rpartition("/")
    one, any_number = golden.get(f"{model}/1", {}), golden.get(f"{model}/auto", {})
    known = [golden[name].get("step_seconds"), one.get("step_seconds"), one.get("staged_step_seconds")]
    known += [any_number.get("step_seconds")] if stages == "auto" or any_number.get("stages") == 1 else []
    return min((seconds for seconds in known if seconds is not None), default=None)


def judged(
    name: str, row: Mapping[str, Any], golden: Mapping[str, Any], *, against: Mapping[str, Any] | None, wall: bool
) -> dict[str, Any]:
    """A row with its ratios and what is wrong with it.

    Args:
      name: of the row.
      row: as measured.
      golden: recorded rows.
      against: as measured with another version, in the same run.
      wall: whether to judge the wall-clock time.
    """
    known = golden.get(name)
    before = against if against is not None else known
    names = {"wall": "wall_seconds", "cpu": "cpu_seconds", "memory": "resident_bytes_of_all"}
    ratios = {f"{short}_ratio": row[name] / before[name] if before else None for short, name in names.items()}
    most = most_step_seconds(name, golden) if known else None
    step = row["step_seconds"] / most if most is not None and "step_seconds" in row else None
    wrong = []
    if row["status"] and (known is None or row["status"] != known["status"]):
        wrong.append("fails")
    if step is not None and step > MOST_STEP:
        wrong.append(f"a step takes {step:.4f} times as long")
    if wall and ratios["wall_ratio"] is not None and ratios["wall_ratio"] > MOST_WALL:
        wrong.append(f"the command takes {ratios['wall_ratio']:.2f} times as long")
    return {"name": name, "step_ratio": step, **ratios, "wrong": wrong, **row, "against": against}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst ratios, the median one of time, and what is wrong."""
    found: dict[str, Any] = {"rows": len(rows)}
    for ratio in ("step_ratio", "wall_ratio", "cpu_ratio", "memory_ratio"):
        those = [row for row in rows if row[ratio] is not None]
        if those:
            worst = max(those, key=lambda row: row[ratio])
            median = statistics.median(row[ratio] for row in those)
            found[ratio] = {"worst": worst[ratio], "of": worst["name"], "median": median}
    return {**found, "wrong": {row["name"]: row["wrong"] for row in rows if row["wrong"]}}


def document(rows: Any, **more: Any) -> str:
    """What is printed or recorded."""
    versions = {"command": shlex.join(["python", *sys.argv]), "machine": planning_time.machine()}
    return json.dumps({**versions, **more, "rows": rows}, indent=1) + "\n"


def record(rows: Sequence[Row], file: Path) -> int:
    """Run the rows that a file does not have and write them to it."""
    kept: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() else {}
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    for row in rows:
        if row.name not in kept:
            kept[row.name] = measured(row, HERE.parent / "src")
            print(f"{row.name}: {kept[row.name]}", file=sys.stderr)
            new = file.with_suffix(".new")
            new.write_text(document(kept, commit=commit, note=NOTE))
            new.replace(file)
    return 0


def main() -> int:
    """Run the rows asked for, and record or judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    parser.add_argument("--golden", type=Path, default=HERE / "golden_plans.json", help="what was recorded")
    parser.add_argument("--only", default="*", help="names or patterns of names, comma-separated")
    parser.add_argument("--quick", action="store_true", help=f"rows recorded with less than {QUICK_SECONDS:g} CPU s")
    parser.add_argument("--against", type=Path, help="the src folder of another version, to be run in turns")
    parser.add_argument("--wall", action="store_true", help="judge wall-clock times")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    given = parser.parse_args()
    if given.wall and given.jobs > 1:
        parser.error("--wall with --jobs: rows that run together take longer")
    patterns, rows = given.only.split(","), all_rows()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            parser.error(f"--only {pattern}: no such row; there are {', '.join(rows)}")
    asked = [row for name, row in rows.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    sources = [HERE.parent / "src", *([given.against.resolve()] if given.against else [])]
    for source in sources:  # or the first row would be slower
        compileall.compile_dir(source, quiet=1)
    if given.record:
        return record(asked, given.record)
    golden = json.loads(given.golden.read_text())["rows"]
    if given.quick:
        asked = [row for row in asked if golden.get(row.name, {}).get("cpu_seconds", 0.0) < QUICK_SECONDS]

    def run(row: Row) -> dict[str, Any]:
        turns = [*enumerate(sources)][:: -1 if asked.index(row) % 2 else 1]  # each version is first in half the rows
        taken = {number: measured(row, source) for number, source in turns}
        one = judged(row.name, taken[0], golden, against=taken.get(1), wall=given.wall)
        ratios = {name: one[name] for name in ("step_ratio", "wall_ratio", "cpu_ratio", "memory_ratio")}
        print(f"{row.name}: {ratios} {'; '.join(one['wrong'])}", file=sys.stderr)
        return one

    with ThreadPoolExecutor(given.jobs) as pool:
        found = list((pool.map if given.jobs > 1 else map)(run, asked))
    print(document(found, summary=summary(found)), end="")
    return 1 if any(row["wrong"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
