"""The command line.

JAX is imported inside the commands only: help is quick, and the number of virtual CPU devices, which JAX reads when it
starts, can still be set. What is meant for people goes to stdout, progress and refusals to stderr; with `--json` stdout
holds one JSON object (`docs/cli.md`) and nothing else.

Exit status: 0; 1 if a comparison failed; 2 if the request was refused.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_output import print_json, progress, refusals, stdout_for_json, write
from .cli_values import parse_bytes, parse_mesh, parse_stages, parse_submeshes
from .errors import PlanError

app = typer.Typer(
    name="meshwright", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Finds the fastest way to run a JAX training step on a cluster, and runs it.",
)  # fmt: skip

_Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="A model of `meshwright models`, or file.py:function for (step, arguments)."),
]
_GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Samples a step; the target's own by default.")]
_Sequence = Annotated[int | None, typer.Option(min=1, help="Positions a sample of a reference model; else its own.")]
_Attention = Annotated[
    str | None,
    typer.Option(
        metavar="plain|fused", help="A reference model's attention; fused by default if devices have a kernel."
    ),
]
_Microbatches = Annotated[int | None, typer.Option(help="Parts the batch is cut into; else the fastest number.")]
_Memory = Annotated[str | None, typer.Option(metavar="BYTES", help="What a device may use: 16e9, 16GB, 15GiB.")]
_Mesh = Annotated[str | None, typer.Option(help="Logical mesh: 2,4 or data=2,model=4; else the best of all.")]
_Zero = Annotated[int | None, typer.Option(help="ZeRO stage of every parameter, 0 to 3; else the best for each.")]
_Remat = Annotated[str | None, typer.Option(help="none, selective or layer; else what is best.")]
_Reduction = Annotated[str | None, typer.Option(help="How microbatches' losses combine, mean or sum; else as read.")]
_Schedule = Annotated[str | None, typer.Option(help="Of several stages, as in docs/schedules.md; else the best.")]
_Preset = Annotated[str | None, typer.Option(metavar="NAME", help='Hold the plan to a preset: "megatron(tp=8, pp=2)".')]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

# New objects before a young garbage collection, young ones before a middle one, and middle ones before a full one.
_GARBAGE_THRESHOLDS = (50_000, 500, 100)

_VIRTUAL_DEVICES = 8
_MOST_VIRTUAL = 256
_FORCED = "xla_force_host_platform_device_count"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
      argv: the arguments; those of the process by default.
    """
    if argv is None:  # the process is this command's alone
        # A search makes millions of small objects that live as long as it does: to look at all of them again with
        # Python's own thresholds, and once more at the end, is a tenth of the time.
        gc.set_threshold(*_GARBAGE_THRESHOLDS)
        atexit.register(gc.freeze)
    app(args=None if argv is None else list(argv), prog_name="meshwright")


def _version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    target: _Target,
    cluster: Annotated[
        str, typer.Option(help="local, a preset with its hosts (p3.16xlarge:8), or a file.toml.")
    ] = "local",
    global_batch: _GlobalBatch = None,
    sequence: _Sequence = None,
    attention: _Attention = None,
    microbatches: _Microbatches = None,
    memory_per_device: _Memory = None,
    mesh: _Mesh = None,
    zero: _Zero = None,
    remat: _Remat = None,
    reduction: _Reduction = None,
    stages: Annotated[str, typer.Option(help="Pipeline stages: a number, or auto for the best.")] = "auto",
    schedule: _Schedule = None,
    submeshes: Annotated[
        str | None, typer.Option(metavar="2,2,4", help="Devices of each stage, in order; else the best.")
    ] = None,
    preset: _Preset = None,
    padding: Annotated[bool, typer.Option(help="Whether dims that mesh axes do not divide may be padded.")] = True,
    refine: Annotated[
        str | None, typer.Option(metavar="measure|compile", help="Run or compile the best few, keep the fastest.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Have the plan compiled for the cluster, with none of its devices here.")
    ] = False,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Search by a method of the literature (docs/searches.md).")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for the search.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: _Json = False,
) -> None:
    """Find the fastest plan for TARGET on a cluster, and explain it."""
    with refusals(), stdout_for_json(as_json), progress() as tell:
        options = _choices(microbatches, memory_per_device, mesh, zero, remat, reduction)
        tell("starting")
        provide_devices(_VIRTUAL_DEVICES)
        from .planning.plan_for import plan_for
        from .targets import load_target

        loaded = load_target(target, global_batch=global_batch, sequence=sequence, attention=attention, cluster=cluster)
        tell(f"planning {target} for {cluster}")
        planning = plan_for(
            loaded.step, loaded.example_args, cluster=cluster, time_limit_seconds=time_limit,
            stages=parse_stages(stages), schedule=schedule, preset=preset, refine=refine, method=method,
            check="compile" if check else None, padding=padding,
            submeshes=None if submeshes is None else parse_submeshes(submeshes),
            tell=lambda text: tell(f"{target} on {cluster}: {text}"), **options,
        )  # fmt: skip
        if out is not None:
            planning.plan.save(out)
    if as_json:
        from .documents import plan_document

        print_json(plan_document(target, planning))
        return
    from .report.explain import explain_plan
    from .report.table import format_seconds

    width = shutil.get_terminal_size().columns
    print(
        explain_plan(
            planning.plan, considered=planning.considered, alternatives=planning.alternatives, width=width,
        )
    )  # fmt: skip
    print(
        f"\nPlanned in {format_seconds(planning.seconds)}: tracing {format_seconds(planning.trace_seconds)}, "
        f"solving {format_seconds(planning.solve_seconds)}" + (f"; written to {out}" if out is not None else "")
    )
    predicted = planning.plan.predicted
    if predicted is not None and preset is None and not isfinite(predicted.optimality_gap):
        print("No bound is known: nothing says how far this plan is from the best")
    if planning.seconds > time_limit and refine is None and predicted is not None and predicted.optimality_gap > 0:
        print(f"The time limit of {format_seconds(time_limit)} was over: more time may find a faster plan")


@app.command()
def compare(
    target: _Target,
    cluster: Annotated[
        str, typer.Option(help="local, a preset with its hosts (p3.16xlarge:8), or a file.toml.")
    ] = "local",
    global_batch: _GlobalBatch = None,
    attention: _Attention = None,
    microbatches: _Microbatches = None,
    memory_per_device: _Memory = None,
    reduction: _Reduction = None,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for all searches together.")] = 120.0,
    as_json: _Json = False,
) -> None:
    """Price the best plan for TARGET beside data parallelism, ZeRO, Megatron, GPipe and the other presets."""
    with refusals(), stdout_for_json(as_json), progress() as tell:
        options = _choices(microbatches, memory_per_device, None, None, None, reduction)
        tell("starting")
        provide_devices(_VIRTUAL_DEVICES)
        from .compare import compare as compare_plans, comparison_document, comparison_text
        from .targets import load_target

        loaded = load_target(target, global_batch=global_batch, attention=attention, cluster=cluster)
        compared = compare_plans(
            loaded.step, loaded.example_args, cluster=cluster, time_limit_seconds=time_limit,
            tell=lambda text: tell(f"{target} on {cluster}: {text}"),
            **{name: value for name, value in options.items() if value is not None},
        )  # fmt: skip
    if as_json:
        print_json(comparison_document(target, compared))
        return
    print(comparison_text(compared))


@app.command()
def searches(
    target: _Target,
    cluster: Annotated[
        str, typer.Option(help="local, a preset with its hosts (p3.16xlarge:8), or a file.toml.")
    ] = "local",
    global_batch: _GlobalBatch = None,
    attention: _Attention = None,
    microbatches: _Microbatches = None,
    memory_per_device: _Memory = None,
    mesh: _Mesh = None,
    zero: _Zero = None,
    remat: _Remat = None,
    reduction: _Reduction = None,
    stages: Annotated[str, typer.Option(help="Pipeline stages: a number, or auto for the best.")] = "auto",
    methods: Annotated[str | None, typer.Option(metavar="NAME,NAME", help="Which; else all that apply.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for each method.")] = 60.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the best step over time.")] = None,
    as_json: _Json = False,
) -> None:
    """Run the search methods of the literature on one problem, under the same costs, for the same time each."""
    with refusals(), stdout_for_json(as_json), progress() as tell:
        options = _choices(microbatches, memory_per_device, mesh, zero, remat, reduction)
        tell("starting")
        provide_devices(_VIRTUAL_DEVICES)
        from .searches import run_searches, searches_document, searches_svg, searches_text
        from .targets import load_target

        loaded = load_target(target, global_batch=global_batch, attention=attention, cluster=cluster)
        searched = run_searches(
            loaded.step, loaded.example_args, cluster=cluster, stages=parse_stages(stages), seed=seed,
            methods=None if methods is None else [name.strip() for name in methods.split(",")],
            time_limit_seconds=time_limit, tell=lambda text: tell(f"{target} on {cluster}: {text}"), **options,
        )  # fmt: skip
        if out is not None:
            write(out, searches_svg(f"{target} on {cluster}", searched))
    if as_json:
        print_json(searches_document(target, searched))
        return
    print(searches_text(searched))


@app.command()
def schemes(
    target: _Target,
    cluster: Annotated[
        str, typer.Option(help="local, a preset with its hosts (p3.16xlarge:8), or a file.toml.")
    ] = "local",
    global_batch: _GlobalBatch = None,
    attention: _Attention = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Parts the batch is cut into; else one, and of pipelines up to four a rank.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Ranks of pipelines; else as many as suit, at most four.")] = None,
    as_json: _Json = False,
) -> None:
    """Show what every parallelism sends and holds for TARGET: by the formulas of the literature, and counted."""
    with refusals(), stdout_for_json(as_json), progress() as tell:
        tell("starting")
        provide_devices(_VIRTUAL_DEVICES)
        from .schemes import analyse, schemes_document, schemes_text
        from .targets import load_target

        loaded = load_target(target, global_batch=global_batch, attention=attention, cluster=cluster)
        analysed = analyse(
            loaded.step, loaded.example_args, cluster=cluster, microbatches=microbatches, stages=stages,
            tell=lambda text: tell(f"{target} on {cluster}: {text}"),
        )  # fmt: skip
    if as_json:
        print_json(schemes_document(target, cluster, analysed))
        return
    print(schemes_text(analysed))


@app.command()
def simulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by `meshwright plan --out`.")],
    trace: Annotated[Path | None, typer.Option(metavar="OUT.json", help="Write a trace for ui.perfetto.dev.")] = None,
    as_json: _Json = False,
) -> None:
    """Show what every stage of a saved plan does when, as predicted."""
    with refusals():
        from .plan.io import load_plan
        from .report.trace import write_trace
        from .simulate import simulate_plan

        timeline = simulate_plan(load_plan(plan))
        if trace is not None:
            try:
                write_trace(timeline, trace)
            except OSError as error:
                raise PlanError(
                    refused="to write the trace", got=f"{type(error).__name__}: {error.strerror}",
                    needed="a file to write", where=str(trace), try_="another path",
                ) from error  # fmt: skip
    from .documents import timeline_document
    from .report.timeline import timeline_text

    if as_json:
        print_json(timeline_document(timeline))
        return
    print(timeline_text(timeline))
    if trace is not None:
        print(f"\ntrace written to {trace}: open it at ui.perfetto.dev or in chrome://tracing")


@app.command()
def verify(
    target: _Target,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many local devices to use; eight virtual ones where there is only a CPU."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Compile for these machines, which need not be here, and do not run."),
    ] = None,
    global_batch: _GlobalBatch = None,
    attention: _Attention = None,
    microbatches: _Microbatches = None,
    memory_per_device: _Memory = None,
    mesh: _Mesh = None,
    zero: _Zero = None,
    remat: _Remat = None,
    reduction: _Reduction = None,
    stages: Annotated[str | None, typer.Option(help="Pipeline stages: a number, or auto for the best.")] = None,
    schedule: _Schedule = None,
    preset: _Preset = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="Run this plan (`meshwright plan --out`) without a search.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Run TARGET on the local devices, or compile it for others, and compare what was predicted with what happens."""
    with refusals(), stdout_for_json(as_json), progress() as tell:
        options = _choices(microbatches, memory_per_device, mesh, zero, remat, reduction)
        options |= {"schedule": schedule, "preset": preset}
        if stages is not None:
            options["stages"] = parse_stages(stages)
        tell("starting")
        provide_devices(devices or _VIRTUAL_DEVICES)
        from .targets import load_target
        from .verify import verify as run

        loaded = load_target(target, global_batch=global_batch, attention=attention, cluster=cluster)
        verification = run(
            loaded, devices=devices, cluster=cluster, plan=plan, tell=lambda text: tell(f"{target}: {text}"), **options
        )
    from .documents import verification_document, verification_text

    if as_json:
        print_json(verification_document(verification))
    else:
        print(verification_text(verification))
    raise typer.Exit(0 if verification.passed else 1)


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(metavar="CLUSTER.toml", help="Write the cluster to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of a minute in the place of one.")] = False,
    as_json: _Json = False,
) -> None:
    """Measure the local devices, and fit a cluster to plan with to what was seen."""
    with refusals(), stdout_for_json(as_json):
        provide_devices(_VIRTUAL_DEVICES)
        from .calibrate.command import run

        text = run(out=out, quick=quick, as_json=as_json)
    print(text)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 30,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="The devices are four stages.")] = False,
) -> None:
    """Train a small GPT on eight devices and on one, and compare the losses."""
    with refusals():
        provide_devices(_VIRTUAL_DEVICES)
        from .demo import run_demo

        agree = run_demo(steps=steps, pipeline=pipeline)
    raise typer.Exit(0 if agree else 1)


@app.command()
def reshard(
    cases: Annotated[Path, typer.Option(metavar="FILE.json", help="Moves between meshes, as in docs/resharding.md.")],
    as_json: _Json = False,
) -> None:
    """Plan the moves of FILE.json between meshes, and compare with the lower bound and the published algorithms."""
    with refusals(), progress() as tell:
        from .resharding.cases import read_cases, report, report_table

        reports = []
        for case in read_cases(cases):
            tell(f"resharding {case.name}")
            reports.append(report(case))
    if as_json:
        print_json({"schema": 1, "cases": reports})
        return
    from .report.table import format_seconds, format_table

    heads, rows = report_table(reports, show=format_seconds)
    print(format_table(heads, rows, left=1))


# What stands after SCRIPT is the script's, also what looks like an option.
@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file that calls meshwright.initialize().")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="The script's own.")] = None,
    processes: Annotated[int, typer.Option(help="How many processes, all on this machine.")] = 1,
    devices_per_process: Annotated[
        int | None, typer.Option(help="Virtual CPU devices of each, or GPUs where this machine has any.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Where process-N.log are written; else a new folder.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="S", help="End the run after S seconds.")] = None,
    port: Annotated[int | None, typer.Option(help="Of the coordinator on 127.0.0.1; else a free one.")] = None,
) -> None:
    """Run SCRIPT in several processes on this machine; if one fails, all end and its error is shown."""
    with refusals():
        from .launch import run

        result = run(
            script, arguments or (), processes=processes, devices_per_process=devices_per_process, log_dir=log_dir,
            timeout_seconds=timeout, port=port, tell=lambda line: print(line, flush=True),
        )  # fmt: skip
    if result.exit_status:
        print(f"meshwright: {result.problem}", file=sys.stderr)
    print(f"meshwright: logs in {result.processes[0].log.parent}", file=sys.stderr)
    raise typer.Exit(result.exit_status)


@app.command()
def models(as_json: _Json = False) -> None:
    """List the reference models by family, with parameters, model FLOPs and where their shapes are from."""
    from . import zoo
    from .zoo.listing import show_models

    show_models(zoo.entries(), as_json=as_json)


@app.command()
def clusters() -> None:
    """List the cluster presets; each is one host, and preset:8 is eight of them."""
    from .cluster import load_cluster, preset_names
    from .report.table import format_bytes, format_table

    rows = []
    for name in preset_names():
        host = load_cluster(name).hosts[0]
        rows.append((name, host.device.kind, str(host.devices), format_bytes(host.device.memory_bytes)))
    print(format_table(("preset", "device", "devices a host", "memory of a device"), rows, left=2))


def provide_devices(count: int) -> None:
    """Give JAX's CPU backend `count` virtual devices. To be called before JAX starts.

    A number that the environment forces already is left alone, and accelerators are not affected.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if count > _MOST_VIRTUAL:  # XLA starts threads for each, and ends the process when it gets none
        raise PlanError(
            refused=f"a run on {count} devices", got=f"{count} virtual ones on this machine",
            needed=f"at most {_MOST_VIRTUAL}", where="--devices", try_=f"--devices {_VIRTUAL_DEVICES}",
        )  # fmt: skip
    if not Path("/dev/nvidia0").exists():  # JAX's plugin for GPUs would print that it finds none
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if _FORCED not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_FORCED}={count}".strip()


def _choices(
    microbatches: int | None,
    memory_per_device: str | None,
    mesh: str | None,
    zero: int | None,
    remat: str | None,
    reduction: str | None,
) -> dict[str, Any]:
    return {
        "microbatches": microbatches,
        "memory_per_device": None if memory_per_device is None else parse_bytes(memory_per_device),
        "mesh": None if mesh is None else parse_mesh(mesh),
        "zero": zero,
        "remat": remat,
        "reduction": reduction,
    }
