"""Moves between hosts with limited NICs, measured: ours beside send/recv, local all-gather and the lower bound.

    sudo python benchmarks/resharding_network.py [--only C03 pipeline] [--mebibytes 32] [--mbit 200] [--repeat 3]
                                                 [--algorithms ours] [--json FILE] [--markdown FILE]

Every host is a process in a network namespace of its own, joined by a bridge; `tc tbf` limits what each sends and
receives, and where a case says so the traffic of all of them together (through one `ifb` device). The tensors of the
cases keep their layouts and are scaled to the given size. A last row, `pipeline`, is a train step of three stages on
unequal neighbouring meshes, its values moved by our plans and by the naive transport. Needs Linux, root, `ip`, `tc` and
`unshare`; says so and ends with status 0 where they are missing. Prints the table, or writes it and one JSON object to
files; status 1 if ours takes more than 1.25 times the bound, or more than 1.05 times another where the model has that
at more than 1.1 times ours. The model of the others is of what is run, all messages at once and sharing NICs fairly;
what they take under exclusive ports, one message after the other, is in the JSON beside it. Where data is relayed the
tensor is twice as large. What each case took is said as it ends.

A move is timed from a barrier of all processes to the next, compiled and connected before; the median is taken. The
limits are measured too, by one plain transfer between two hosts: seconds of the model are for that rate, not for the
one asked for. About ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resharding_compared import local_all_gather, seconds_of, send_recv
from resharding_hosts import hosts, missing, run_children

_OTHERS = {"send_recv": send_recv, "local_all_gather": local_all_gather}
_WITHIN = 1.25
_LATENCY_SECONDS = 1e-3
# A tensor that takes longer over one NIC is moved once by the algorithms that ours is compared with.
_LONG_SECONDS = 1.0
# Rounds that are timed to learn what one costs.
_TIMED = 65
# How often: the number of chunks hangs on what they cost, and one time in ten it is off by several times.
_OFTEN = 5
# What measurements of one thing differ by.
_NOISE = 1.05
# Runs that are not timed: compiled in the first, and in the second memory still grows.
_WARM = 2


# The cases


def scaled(case: dict[str, Any], mebibytes: float) -> dict[str, Any]:
    """The case with its first dim cut so that the tensor has about this size, every block still whole."""
    shape, item = list(case["shape"]), case["item"]
    rest = math.prod(shape[1:])
    parts = math.lcm(*(math.prod(case[side]["shape"]) for side in ("src", "dst")))
    target = mebibytes * 2**20 / item
    while rest > target / parts and len(shape) > 1:  # the later dims are too large by themselves
        largest = max(range(1, len(shape)), key=lambda d: shape[d])
        shape[largest] //= 2
        rest = math.prod(shape[1:])
    shape[0] = max(parts, round(target / rest / parts) * parts)
    return {**case, "shape": shape}


def host_count(case: dict[str, Any]) -> int:
    return 1 + max(device // case[side]["per_host"] for side in ("src", "dst") for device in devices_of(case[side]))


def devices_of(mesh: dict[str, Any]) -> list[int]:
    import numpy as np

    if "dev" in mesh:
        return np.array(mesh["dev"]).ravel().tolist()
    return list(range(mesh["first"], mesh["first"] + math.prod(mesh["shape"])))


# In a child


def child(job: dict[str, Any]) -> None:
    """Measure every case and algorithm; process 0 writes what it measured."""
    import jax

    import meshwright as mw

    mw.initialize(timeout_seconds=300)
    from meshwright.runtime.agree import agree, exchange_texts
    from meshwright.runtime.resharding.lanes import LANES

    everybody = list(range(jax.process_count()))

    def barrier() -> float:
        exchange_texts("here", among=everybody, about="the benchmark", timeout_seconds=600)
        return time.perf_counter()

    rate, latency = _plain(job, barrier)
    # With relays two lanes pay it at the same time, and a relay's first chunk takes twice as long, as they share its
    # NIC: the best number of chunks is that of a fourth of it.
    latency = json.loads(agree(lambda: json.dumps(latency / LANES), about="the latency", timeout_seconds=600))
    cases = [{**case, "latency_seconds": latency} for case in job["cases"]]
    _say(job, f"{len(everybody)} hosts: {rate / 1e6:.2f} MB/s a NIC, {latency * 1e3:.2f} ms a round")
    found: dict[str, Any] = {
        "measured_Bps": rate, "measured_latency_seconds": latency,
        "cases": [_measured(case, job, rate, barrier) for case in cases],
    }  # fmt: skip
    if job["pipeline"]:
        found["pipeline"] = _pipeline(job, barrier)
    if jax.process_index() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    barrier()


def _say(job: dict[str, Any], text: str) -> None:
    """On the screen of who started the hosts; by process 0."""
    import jax

    if jax.process_index() == 0:
        os.write(job["screen"], f"{text}\n".encode())


def _measured(case: dict[str, Any], job: dict[str, Any], rate: float, barrier: Any) -> dict[str, Any]:
    """One case, by each algorithm, checked to the bit."""
    import jax
    import numpy as np

    value, movers, plan = _prepared(case, job["devices"])
    measured: dict[str, float] = {}
    for name, mover in movers.items():
        if name not in job["algorithms"]:
            continue
        for _ in range(_WARM if name == "ours" else 1):
            jax.block_until_ready(mover([value]))
        seconds = []
        often = name == "ours" or plan.demand.moves[0].bytes < _LONG_SECONDS * case["nic_Bps"]
        for _ in range(job["repeat"] if often else 1):
            begun = barrier()
            jax.block_until_ready(mover([value]))
            seconds.append(barrier() - begun)
        measured[name] = statistics.median(seconds)
        moved = mover([value])[0] if name == "ours" else None
        expected = _whole(case)
        for shard in moved.addressable_shards if moved is not None else ():
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()
    scale = job["Bps"] / rate
    _say(job, f"{case['id']}: bound {float(plan.bound.seconds) * scale:.3f} s, {plan.rounds} rounds, "
              + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured.items()))  # fmt: skip
    return {
        "id": case["id"], "shape": case["shape"], "mebibytes": math.prod(case["shape"]) * case["item"] / 2**20,
        "bound_seconds": float(plan.bound.seconds) * scale, "planned_seconds": float(plan.seconds) * scale,
        "rounds": plan.rounds, "measured_seconds": measured,
    }  # fmt: skip


def _pipeline(job: dict[str, Any], barrier: Any) -> dict[str, Any]:
    """Seconds of a train step whose stages exchange values by our plans, and by the naive transport.

    Three stages on one, two and one hosts of four devices. Layers are split over the devices of a host, and between
    layers, where the width is odd, each of them needs everything; over two hosts the batch is split.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw
    from meshwright.runtime.pipeline.operations import Move
    from meshwright.runtime.pipeline.step import PipelinedStep

    width, hidden, rows, count = 255, 256, 1025, 4

    def loss_of(weights: Any, x: Any) -> Any:
        for number, pair in enumerate(weights):
            if number:
                mw.layer_boundary()
            x = x + jnp.tanh(x @ pair["in"]) @ pair["out"]
        return jnp.mean(x * x)

    def step(weights: Any, x: Any) -> Any:
        loss, grads = mw.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss

    generator = np.random.default_rng(0)
    shapes = {"in": (width, hidden), "out": (hidden, width)}
    weights = [
        {name: generator.normal(0, width**-0.5, shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    x = generator.normal(size=(2 * count, rows, width)).astype(np.float32)
    planning = mw.plan_for(
        step, (weights, x), submeshes=(4, 8, 4), microbatches=count, schedule="one_f_one_b",
        mesh=[{"y": 4}, {"x": 2, "y": 4}], pins={"*['in']": [None, "y"], "*['out']": ["y", None]},
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"planned": [], "naive": []}
    losses: dict[str, float] = {}
    runs: dict[str, Any] = {}
    for name in ("planned", "naive"):
        network = _network([[d.id for d in one] for one in _by_process()], job["Bps"])
        runs[name] = PipelinedStep(planning.program, planning.plan, jax.devices(), transport=name, network=network)
    for name, run in runs.items():
        state: Any = jax.tree.map(np.copy, weights)
        for number in range(2 + job["repeat"]):
            begun = barrier()
            state, loss = run(state, x)
            jax.block_until_ready(state)
            ended = barrier()
            if number >= 2:  # compiled, connected
                seconds[name].append(ended - begun)
            losses[name] = float(loss)
    assert losses["planned"] == losses["naive"], losses
    layouts, executor = runs["planned"].stages, runs["planned"]._executor
    moves = {
        f"{one.source + 1} to {one.target + 1}": [
            f"{tuple(layouts[one.source].partition(a))} to {tuple(layouts[one.target].partition(b))}"
            for a, b in zip(one.sent, one.received, strict=True)
        ]
        for one in executor._order if isinstance(one, Move) and one.microbatch == 0
    }  # fmt: skip
    return {
        "stages": [list(stage.devices) for stage in planning.plan.stages], "microbatches": count,
        "activation_bytes": 2 * rows * width * 4, "layouts_in_process_0": moves,
        "step_seconds": {name: statistics.median(found) for name, found in seconds.items()},
    }  # fmt: skip


def _by_process() -> list[list[Any]]:
    import jax

    found: dict[int, list[Any]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, []).append(device)
    return [found[process] for process in sorted(found)]


def _sharding(mesh: dict[str, Any], spec: Sequence[Sequence[str]]) -> Any:
    """Device d of a case is device d % per_host of process d // per_host."""
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    hosts = _by_process()
    grid = [hosts[d // mesh["per_host"]][d % mesh["per_host"]] for d in devices_of(mesh)]
    names = tuple(mesh["axes"])
    made = Mesh(np.array(grid, dtype=object).reshape(mesh["shape"]), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(made, PartitionSpec(*(tuple(axes) or None for axes in spec)))


def _whole(case: dict[str, Any]) -> Any:
    """The tensor of a case: every element with bits of its own, as far as they go."""
    import jax.numpy as jnp
    import numpy as np

    word, dtype = {2: (np.uint16, jnp.bfloat16), 4: (np.int32, np.float32)}[case["item"]]
    return np.arange(math.prod(case["shape"]), dtype=np.int64).astype(word).view(dtype).reshape(case["shape"])


def _prepared(case: dict[str, Any], devices: int) -> tuple[Any, dict[str, Any], Any]:
    import jax

    from meshwright.resharding.cases import read_case
    from meshwright.runtime.resharding import reshard_plan
    from meshwright.runtime.resharding.mover import Mover

    source, target = _sharding(case["src"], case["src_spec"]), _sharding(case["dst"], case["dst_spec"])
    shape, whole = tuple(case["shape"]), _whole(case)
    if source.addressable_devices:
        value = jax.make_array_from_callback(shape, source, lambda index: whole[index])
    else:
        value = jax.make_array_from_single_device_arrays(shape, source, [], dtype=whole.dtype)
    described = read_case(case).network
    ids = [[device.id for device in host] for host in _by_process()]
    here = [sorted({d // devices for d in host.devices}) for host in described.hosts]
    assert all(len(processes) == 1 for processes in here)
    network = replace(
        described,
        hosts=tuple(replace(h, devices=tuple(ids[p][d % devices] for d in h.devices))
                    for h, (p,) in zip(described.hosts, here, strict=True)),
    )  # fmt: skip
    plan = reshard_plan([value], target, network=network)
    arrays = [jax.ShapeDtypeStruct(shape, whole.dtype)]
    others = {name: rounds(plan) for name, rounds in _OTHERS.items()}
    movers = {"ours": Mover(plan, arrays, [source], [target])}
    movers |= {name: Mover(plan, arrays, [source], [target], rounds=rounds) for name, rounds in others.items()}
    return value, movers, plan


def _network(hosts: Sequence[Sequence[int]], rate: float) -> Any:
    from meshwright.resharding import uniform_network

    return uniform_network(hosts, nic_rate=rate, latency_seconds=_LATENCY_SECONDS)


def _plain(job: dict[str, Any], barrier: Any) -> tuple[float, float]:
    """Bytes/s of one tensor from host 0 to host 1; and what a round costs beside its bytes, in seconds.

    From the second the planner decides how many rounds there are. In the rounds that are timed every host sends a
    hundredth of a second's worth to one of the others.
    """
    import jax

    from meshwright.resharding import Message, Piece, RoundMessages
    from meshwright.runtime.resharding.mover import Mover

    size, each = int(job["Bps"] / 4), job["devices"]  # float32: one second's worth
    case = {"id": "plain", "shape": [size], "item": 4, "src_spec": [[]], "dst_spec": [[]], "nic_Bps": job["Bps"]}
    one = {"shape": [1], "axes": ["a"], "per_host": each}
    value, movers, _ = _prepared({**case, "src": {**one, "first": 0}, "dst": {**one, "first": each}}, each)

    def fastest(mover: Any) -> float:
        for _ in range(_WARM):
            jax.block_until_ready(mover([value]))
        seconds = []
        for _ in range(3):
            begun = barrier()
            jax.block_until_ready(mover([value]))
            seconds.append(barrier() - begun)
        return min(seconds)

    rate = job["Bps"] / fastest(movers["ours"])
    hosts = [[device.id for device in host] for host in _by_process()]
    count, part = len(hosts), size // 100
    all_of = {"shape": [count], "axes": ["a"], "per_host": each}
    ends = [[each * host + place for host in range(count)] for place in (0, each - 1)]
    value, movers, plan = _prepared(
        {**case, "src": {**all_of, "dev": ends[0]}, "dst": {**all_of, "dev": ends[1]}}, each
    )

    def rounds(number: int) -> list[RoundMessages]:
        pieces = [Piece(move=0, slice=((0, size),), start=i * part, stop=(i + 1) * part) for i in range(number)]
        to = [[hosts[(h + 1 + i % (count - 1)) % count][-1] for h in range(count)] for i in range(number)]
        steps = [
            tuple(Message(sender=host[0], receiver=to[i][h], pieces=(piece,)) for h, host in enumerate(hosts))
            for i, piece in enumerate(pieces)
        ]
        return [RoundMessages(steps=(step,), spread=()) for step in steps]

    ours, arrays = movers["ours"], [jax.ShapeDtypeStruct(value.shape, value.dtype)]
    few, many = (Mover(plan, arrays, [value.sharding], ours._targets, rounds=rounds(number)) for number in (1, _TIMED))
    found = [(fastest(many) - fastest(few)) / (_TIMED - 1) - 4 * part / rate for _ in range(_OFTEN)]
    return rate, max(statistics.median(found), 0.0)


# In the parent


def verdict(row: dict[str, Any], model: dict[str, float]) -> dict[str, Any]:
    measured = row["measured_seconds"]
    ahead = {
        name: measured["ours"] <= measured[name] * _NOISE
        for name in measured
        if name != "ours" and model[name] > model["ours"] * 1.1
    }
    within = measured["ours"] <= _WITHIN * row["bound_seconds"]
    return {**row, "model_seconds": model, "to_the_bound": measured["ours"] / row["bound_seconds"],
            "within_1.25": within, "ahead_where_the_model_says_so": ahead}  # fmt: skip


def measure(options: argparse.Namespace, cases: Sequence[dict[str, Any]], *, pipeline: bool = False) -> dict[str, Any]:
    """What hosts of one kind measured: cases of equal machines, or the train step."""
    rate = options.mbit * 1e6 / 8
    devices = 4 if pipeline else cases[0]["src"]["per_host"]
    count = 4 if pipeline else max(host_count(case) for case in cases)
    scale = {} if pipeline else cases[0].get("nic_scale") or {}
    core = None if pipeline else cases[0].get("core_nics")
    rates = [rate * float(Fraction(scale.get(str(host), 1))) for host in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        path, result, screen = Path(folder, "job.json"), Path(folder, "result.json"), os.dup(sys.stderr.fileno())
        job = {"cases": cases, "pipeline": pipeline, "repeat": options.repeat, "Bps": rate, "devices": devices,
               "algorithms": options.algorithms, "screen": screen}  # fmt: skip
        path.write_text(json.dumps({**job, "result": str(result)}))
        with hosts(rates, None if core is None else core * rate) as names:
            run_children(__file__, names, devices, path, keep=(screen,))
        os.close(screen)
        return {"hosts": count, "asked_Bps": rate, **json.loads(result.read_text())}


def machines(case: dict[str, Any]) -> str:
    """Cases of which can be measured on the same hosts."""
    return json.dumps([case["src"]["per_host"], case.get("nic_scale"), case.get("core_nics")])


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| case | MiB | bound | ours | to the bound | send/recv | local all-gather | model: ours | send/recv "
        "| local all-gather |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        measured, model = row["measured_seconds"], row["model_seconds"]
        cells = [row["id"], f"{row['mebibytes']:.0f}", f"{row['bound_seconds']:.2f}", f"{measured['ours']:.2f}",
                 f"{row['to_the_bound']:.2f}",
                 *(f"{measured[name]:.2f}" if name in measured else "" for name in _OTHERS),
                 *(f"{model[name]:.2f}" for name in ("ours", *_OTHERS))]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if "pipeline" in found:
        seconds = found["pipeline"]["step_seconds"]
        lines += ["", "| train step of three stages | seconds |", "|---|---|"]
        lines += [f"| {name} transport | {seconds[name]:.2f} |" for name in ("planned", "naive")]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path(__file__).parents[1] / "tests/data/resharding_cases.json")
    parser.add_argument("--only", nargs="*", default=None, help="ids of cases, and pipeline")
    parser.add_argument("--mebibytes", type=float, default=32.0)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--algorithms", nargs="*", default=["ours", *_OTHERS], help="ours among them")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--markdown", type=Path, help="write the table here, not to the screen")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child.read_text()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end too
    reason = missing()
    if reason is not None:
        print(json.dumps({"skipped": reason}))
        return 0
    from meshwright.resharding import plan_reshard
    from meshwright.resharding.cases import read_case, report

    groups: dict[str, list[dict[str, Any]]] = {}
    rate = options.mbit * 1e6 / 8
    for case in json.loads(options.cases.read_text())["cases"]:
        if not options.only or case["id"] in options.only:
            # Relays take many rounds, each of which costs more here than on real hosts: a larger tensor.
            relayed = report(read_case(case))["chunks"] > 1
            size = options.mebibytes * (2 if relayed else 1)
            groups.setdefault(machines(case), []).append({**scaled(case, size), "nic_Bps": rate})
    found: dict[str, Any] = {
        "what": "seconds of moves between emulated hosts", "system": os.uname().version, "cores": os.cpu_count(),
        "versions": {"python": sys.version.split()[0], "jax": version("jax")}, "command": shlex.join(sys.argv),
        "asked_Bps": rate, "cases": [], "passed": True,
    }  # fmt: skip
    for cases in groups.values():
        result = measure(options, cases)
        scale = rate / result["measured_Bps"]
        for case, row in zip(cases, result["cases"], strict=True):
            described = read_case({**case, "latency_seconds": result["measured_latency_seconds"]})
            told, plan = report(described), plan_reshard(described.network, [described.move])
            model = {name: seconds_of(plan, rounds(plan)) * scale for name, rounds in _OTHERS.items()}
            one = verdict(row, {"ours": told["ours_seconds"] * scale, **model})
            one["exclusive_seconds"] = {name: told["algorithms"][name] * scale for name in _OTHERS}
            here = {name: result[name] for name in ("hosts", "measured_Bps", "measured_latency_seconds")}
            found["cases"].append({**one, **here})
            found["passed"] &= one["within_1.25"] and all(one["ahead_where_the_model_says_so"].values())
        found["cases"].sort(key=lambda row: row["id"])
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")  # what is there so far
    if not options.only or "pipeline" in options.only:
        result = measure(options, [], pipeline=True)
        found["pipeline"] = {**result["pipeline"], "measured_Bps": result["measured_Bps"]}
        seconds = found["pipeline"]["step_seconds"]
        found["passed"] &= seconds["planned"] < seconds["naive"]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(table(found) + "\n")
    else:
        print(table(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
