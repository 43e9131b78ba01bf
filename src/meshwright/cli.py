"""The command line. JAX is imported inside the commands only: help is quick, and the number of virtual CPU devices, which
JAX reads when it starts, can still be set. What a command prints for people goes to stdout, progress and refusals to stderr;
with `--json` stdout holds one JSON object (`docs/cli.md`) and nothing else.

Exit status: 0, or 1 if a comparison failed, or 2 if the request was refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .errors import PlanError

app = typer.Typer(
    name="meshwright", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Finds the fastest way to run a JAX training step on a cluster, and runs it.",
)  # fmt: skip

Target = Annotated[
    str, typer.Argument(help="A reference model (`meshwright models`), or file.py:function returning (step, arguments).")
]
GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Samples a step; the target's own by default.")]
Microbatches = Annotated[int | None, typer.Option(help="Into how many parts the batch is cut; the fewest that fit.")]
MemoryPerDevice = Annotated[str | None, typer.Option(help="Bytes a device may use: 16e9, 16GB, 15GiB.")]
MeshShape = Annotated[str | None, typer.Option(help="Logical mesh: 2,4 or data=2,model=4; all are tried by default.")]
Zero = Annotated[int | None, typer.Option(help="ZeRO stage 0 to 3 for every parameter; chosen for each by default.")]
Remat = Annotated[str | None, typer.Option(help="none or layer; chosen by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

_VIRTUAL_DEVICES = 8
_FORCED = "xla_force_host_platform_device_count"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
      argv: the arguments; those of the process by default.
    """
    app(args=list(argv) if argv is not None else None, prog_name="meshwright")


def _version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


@app.command()
def plan(
    target: Target,
    cluster: Annotated[str, typer.Option(help="local, a preset with its number of hosts (p3.16xlarge:8), or a file.toml.")],
    global_batch: GlobalBatch = None,
    microbatches: Microbatches = None,
    memory_per_device: MemoryPerDevice = None,
    mesh: MeshShape = None,
    zero: Zero = None,
    remat: Remat = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for the search.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan for TARGET on a cluster, and explain it."""
    with _refusals(), _quiet(as_json):
        options = _choices(microbatches, memory_per_device, mesh, zero, remat)
        with _progress() as tell:
            tell("starting JAX")
            provide_devices(_VIRTUAL_DEVICES)
            from .planning import plan_for
            from .targets import load_target

            tell(f"tracing and planning {target}")
            loaded = load_target(target, global_batch=global_batch)
            planning = plan_for(
                loaded.step, loaded.example_args, cluster=cluster, time_limit_seconds=time_limit, **options
            )
        if out is not None:
            planning.plan.save(out)
    from .report.document import plan_document, planning_words
    from .report.explain import explain_plan

    if as_json:
        _print_json(plan_document(target, planning.plan, planning))
        return
    print(explain_plan(planning.plan, considered=planning.considered))
    print(f"\nPlanned in {planning_words(planning)}" + (f"; written to {out}" if out is not None else ""))
