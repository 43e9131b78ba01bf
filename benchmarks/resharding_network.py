"""Moves between hosts with limited NICs, measured: ours beside send/recv, local all-gather and the lower bound.

    sudo python benchmarks/resharding_network.py [--cases FILE.json] [--mebibytes 16] [--mbit 200] [--repeat 3]

Every host is a process in a network namespace of its own, joined by a bridge; `tc tbf` limits what each sends and
receives. The tensors of the cases keep their layouts and are scaled to the given size. Needs Linux, root, `ip`, `tc`
and `unshare`; says so and ends with status 0 where they are missing. Prints one JSON object; status 1 if ours takes
more than 1.25 times the bound, or more than another where the model says that it takes less.

A move is timed from a barrier of all processes to the next, compiled and connected before. The limits are measured too,
by one plain transfer between two hosts: seconds of the model are for that rate, not for the one asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "meshw"
_BURST_BYTES = 65536
_PORT = 29555
_LIMIT_SECONDS = 1500
_WITHIN = 1.25
# What measurements of one thing differ by.
_NOISE = 1.05


# Namespaces


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def missing() -> str | None:
    """Why this machine cannot emulate hosts, or None."""
    absent = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    if os.geteuid() != 0:
        return "not root"
    try:
        command("ip", "netns", "add", f"{_PREFIX}try")
        command("ip", "netns", "del", f"{_PREFIX}try")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.decode().strip()}"
    return None


@contextlib.contextmanager
def hosts(count: int, mbit: float) -> Iterator[list[str]]:
    """Namespaces with a NIC each, 10.77.0.1 and on; gone afterwards."""
    names = [f"{_PREFIX}{i}" for i in range(count)]
    switch = f"{_PREFIX}sw"
    try:
        command("ip", "netns", "add", switch)
        command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{i}", "netns", switch)
            command("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            command("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            for where, nic in ((name, "eth0"), (switch, f"p{i}")):
                limit = ("rate", f"{mbit}mbit", "burst", str(_BURST_BYTES), "limit", "4000000")
                command("tc", "-n", where, "qdisc", "add", "dev", nic, "root", "tbf", *limit)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start(names: Sequence[str], devices: int, job: Path) -> list[subprocess.Popen[str]]:
    """This script as a child in every namespace, with a host name that resolves to its address there."""
    processes = []
    for i, name in enumerate(names):
        table = job.parent / f"{name}.hosts"
        table.write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {name}\n")
        inside = f'hostname {name} && mount --bind {table} /etc/hosts && exec "$@"'
        words = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "MESHWRIGHT_COORDINATOR": f"10.77.0.1:{_PORT}",
            "MESHWRIGHT_PROCESSES": str(len(names)),
            "MESHWRIGHT_PROCESS_ID": str(i),
        }
        log = open(job.parent / f"{name}.log", "w+")  # noqa: SIM115 (read after the process has ended)
        processes.append(
            subprocess.Popen(
                [*words, sys.executable, __file__, "--child", str(job)],
                env=environment,
                stdout=log,
                stderr=log,
                text=True,
            )
        )
    return processes


def run_children(names: Sequence[str], devices: int, job: Path) -> None:
    """Run all children to their end; their logs where one fails."""
    processes = start(names, devices, job)
    until = time.monotonic() + _LIMIT_SECONDS
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) for p in processes) or time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        failed = [name for name, p in zip(names, processes, strict=True) if p.poll() != 0]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed:
        logs = "\n".join(f"--- {name}\n{(job.parent / f'{name}.log').read_text()[-3000:]}" for name in failed)
        raise SystemExit(f"{len(failed)} of {len(names)} hosts failed:\n{logs}")


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
    import numpy as np

    import meshwright as mw

    mw.initialize(timeout_seconds=300)
    from meshwright.runtime.agree import exchange_texts

    everybody = list(range(jax.process_count()))

    def barrier() -> float:
        exchange_texts("here", among=everybody, about="the benchmark", timeout_seconds=600)
        return time.perf_counter()

    rate = _plain_rate(job, barrier)
    results = []
    for case in job["cases"]:
        value, movers, plan = _prepared(case)
        row: dict[str, Any] = {
            "id": case["id"], "shape": case["shape"], "mebibytes": math.prod(case["shape"]) * case["item"] / 2**20,
            "bound_seconds": float(plan.bound.seconds) * job["Bps"] / rate,
            "planned_seconds": float(plan.seconds) * job["Bps"] / rate, "rounds": plan.rounds, "measured_seconds": {},
        }  # fmt: skip
        for name, mover in movers.items():
            jax.block_until_ready(mover([value]))
            seconds = []
            for _ in range(job["repeat"]):
                begun = barrier()
                jax.block_until_ready(mover([value]))
                seconds.append(barrier() - begun)
            row["measured_seconds"][name] = statistics.median(seconds)
        moved = movers["ours"]([value])[0]
        expected = np.arange(math.prod(case["shape"]), dtype=np.int32).view(np.float32).reshape(case["shape"])
        for shard in moved.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()
        results.append(row)
    if jax.process_index() == 0:
        Path(job["result"]).write_text(json.dumps({"measured_Bps": rate, "cases": results}))
    barrier()


def _sharding(mesh: dict[str, Any], spec: Sequence[Sequence[str]]) -> Any:
    """Device d of a case is device d % per_host of process d // per_host."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    by_place = {}
    for device in jax.devices():
        by_place.setdefault(device.process_index, []).append(device)
    grid = [by_place[d // mesh["per_host"]][d % mesh["per_host"]] for d in devices_of(mesh)]
    names = tuple(mesh["axes"])
    made = Mesh(np.array(grid, dtype=object).reshape(mesh["shape"]), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(made, PartitionSpec(*(tuple(axes) or None for axes in spec)))


def _value(shape: Sequence[int], sharding: Any) -> Any:
    import jax
    import numpy as np

    whole = np.arange(math.prod(shape), dtype=np.int32).view(np.float32).reshape(shape)
    mine = [whole[index] for index in sharding.addressable_devices_indices_map(tuple(shape)).values()]
    if not mine:
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=np.float32)
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: whole[index])


def _prepared(case: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    import jax
    import numpy as np

    from meshwright.runtime.resharding import reshard_plan
    from meshwright.runtime.resharding.mover import Mover

    source, target = _sharding(case["src"], case["src_spec"]), _sharding(case["dst"], case["dst_spec"])
    value = _value(case["shape"], source)
    plan = reshard_plan([value], target, network=_network(case))
    arrays = [jax.ShapeDtypeStruct(tuple(case["shape"]), np.float32)]
    others = {"send_recv": _send_recv(plan), "local_all_gather": _local_all_gather(plan)}
    movers = {"ours": Mover(plan, arrays, [source], [target])}
    movers |= {name: Mover(plan, arrays, [source], [target], rounds=rounds) for name, rounds in others.items()}
    return value, movers, plan


def _network(case: dict[str, Any]) -> Any:
    import jax

    from meshwright.resharding import uniform_network

    ids: dict[int, list[int]] = {}
    for device in jax.devices():
        ids.setdefault(device.process_index, []).append(device.id)
    return uniform_network([ids[p] for p in sorted(ids)], nic_rate=case["Bps"], latency_seconds=1e-3)


def _plain_rate(job: dict[str, Any], barrier: Any) -> float:
    """Bytes/s of one tensor from the first device of host 0 to the first of host 1."""
    import jax

    size = int(job["Bps"] / 4)  # one second's worth of float32
    one = {"shape": [1], "axes": ["a"], "first": 0, "per_host": job["devices"]}
    case = {
        "id": "plain", "shape": [size], "item": 4, "src": one, "src_spec": [[]],
        "dst": {**one, "first": job["devices"]}, "dst_spec": [[]], "Bps": job["Bps"],
    }  # fmt: skip
    value, movers, _ = _prepared(case)
    jax.block_until_ready(movers["ours"]([value]))
    seconds = []
    for _ in range(3):
        begun = barrier()
        jax.block_until_ready(movers["ours"]([value]))
        seconds.append(barrier() - begun)
    return 4 * size / min(seconds)


def _unit_tasks(plan: Any) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Every slice that has to cross hosts: the piece, who holds it, who needs it."""
    from meshwright.resharding.messages import pieces

    demand = plan.demand
    for number, task in enumerate(demand.classes):
        if task.receivers:
            for entry, piece in pieces(plan, number, 0, task.bytes):
                yield piece, *demand.patterns[demand.pattern[entry]]


def _send_recv(plan: Any) -> list[Any]:
    """Every slice from one of its holders, the one with least to send so far, to each device that needs it."""
    sent: dict[tuple[int, int], list[Any]] = {}
    home, load = plan.demand.network.domain_of, {}
    for piece, holders, needers in _unit_tasks(plan):
        far = [d for d in needers if home[d] not in {home[h] for h in holders}]
        giver = min(holders, key=lambda d: (load.get(home[d], 0), d))
        load[home[giver]] = load.get(home[giver], 0) + (piece.stop - piece.start) * len(far)
        for taker in far:
            sent.setdefault((giver, taker), []).append(piece)
    return _rounds(sent, {})


def _local_all_gather(plan: Any) -> list[Any]:
    """Every slice cut among the devices that need it in a host, which then share what they have."""
    from meshwright.resharding import Piece

    sent: dict[tuple[int, int], list[Any]] = {}
    shared: dict[tuple[int, int], list[Any]] = {}
    home, load = plan.demand.network.domain_of, {}
    for piece, holders, needers in _unit_tasks(plan):
        near = {home[h] for h in holders}
        for host in sorted({home[d] for d in needers} - near):
            takers = [d for d in needers if home[d] == host]
            giver = min(holders, key=lambda d: (load.get(home[d], 0), d))
            load[home[giver]] = load.get(home[giver], 0) + piece.stop - piece.start
            count = piece.stop - piece.start
            cuts = [piece.start + count * i // len(takers) for i in range(len(takers) + 1)]
            for taker, first, last in zip(takers, cuts, cuts[1:], strict=False):
                part = Piece(move=piece.move, slice=piece.slice, start=first, stop=last)
                sent.setdefault((giver, taker), []).append(part)
                for other in takers:
                    if other != taker:
                        shared.setdefault((taker, other), []).append(part)
    return _rounds(sent, shared)


def _rounds(sent: dict[tuple[int, int], list[Any]], shared: dict[tuple[int, int], list[Any]]) -> list[Any]:
    from meshwright.resharding import RoundMessages
    from meshwright.resharding.messages import _messages, _steps

    return [RoundMessages(steps=_steps(_messages(sent)), spread=_messages(shared))]


# In the parent


def verdict(row: dict[str, Any], model: dict[str, float]) -> dict[str, Any]:
    measured = row["measured_seconds"]
    ahead = {
        name: measured["ours"] <= measured[name] * _NOISE
        for name in ("send_recv", "local_all_gather")
        if model[name] > model["ours"] * 1.1
    }
    within = measured["ours"] <= _WITHIN * row["bound_seconds"]
    return {**row, "model_seconds": model, "to_the_bound": measured["ours"] / row["bound_seconds"],
            "within_1.25": within, "ahead_where_the_model_says_so": ahead}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path(__file__).parents[1] / "tests/data/resharding_cases.json")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--mebibytes", type=float, default=16.0)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child.read_text()))
        return 0
    reason = missing()
    if reason is not None:
        print(json.dumps({"skipped": reason}))
        return 0
    from meshwright.resharding.cases import read_case, report

    rate = options.mbit * 1e6 / 8
    chosen, left_out = [], {}
    for case in json.loads(options.cases.read_text())["cases"]:
        if options.only and case["id"] not in options.only:
            continue
        if case.get("nic_scale") or case.get("core_nics"):
            left_out[case["id"]] = "unequal NICs and limited cores are not emulated"
        elif case["item"] != 4 or case["src"]["per_host"] != 4:
            left_out[case["id"]] = "hosts of other than four devices"
        else:
            chosen.append({**scaled(case, options.mebibytes), "nic_Bps": rate, "Bps": rate})
    found, ok = [], True
    with tempfile.TemporaryDirectory() as folder:
        count = max(host_count(case) for case in chosen)
        with hosts(count, options.mbit) as names:
            job = {
                "cases": chosen, "repeat": options.repeat, "Bps": rate, "devices": 4,
                "result": str(Path(folder, "result.json")),
            }  # fmt: skip
            path = Path(folder, "job.json")
            path.write_text(json.dumps(job))
            run_children(names, 4, path)
        result = json.loads(Path(folder, "result.json").read_text())
    for case, row in zip(chosen, result["cases"], strict=True):
        told = report(read_case(case))
        scale = rate / result["measured_Bps"]
        model = {name: told["algorithms"][name] * scale for name in ("send_recv", "local_all_gather")}
        one = verdict(row, {"ours": told["ours_seconds"] * scale, **model})
        ok = ok and one["within_1.25"] and all(one["ahead_where_the_model_says_so"].values())
        found.append(one)
    print(json.dumps({
        "asked_Bps": rate, "measured_Bps": result["measured_Bps"], "hosts": count, "cases": found,
        "left_out": left_out, "passed": ok,
    }, indent=1))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
