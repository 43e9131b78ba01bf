"""Moves described in a JSON file, and what is found out about them.

FILE holds {"cases": [...]}; a case has `shape` and `item` (bytes of an element) of the tensor; `src` and `dst`,
meshes of device ids with `shape`, `axes`, `per_host` and either `first` (ids are counted from it) or `dev` (ids,
nested or not); `src_spec` and `dst_spec`, per dim the list of axes that split it; `nic_Bps`, bytes/s of a NIC each
way, one per host; optional `nic_scale` (factor by host), `core_nics` (the core's rate in NICs), `latency_seconds`. A
device's host is its id divided by `per_host`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ReshardError
from .layout import DeviceMesh, Layout
from .network import Host, Network, Nic
from .planner import plan_reshard
from .published import published_seconds
from .tasks import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One described move.

    Args:
      name: its `id`.
      network: the machines.
      move: the tensor.
    """

    name: str
    network: Network
    move: Move


def read_cases(path: Path) -> list[Case]:
    """The cases of a file.

    Raises:
      ReshardError: the file cannot be read, or a case of it makes no sense.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReshardError(
            refused="the cases", got=str(error), needed='a JSON file with {"cases": [...]}', where=str(path),
            try_="the format in docs/resharding.md",
        ) from None  # fmt: skip
    cases = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        got = "no case" if cases == [] else f"a {type(cases).__name__}"
        raise ReshardError(
            refused="the cases", got=got, needed="a list of at least one case under the key 'cases'",
            where=str(path), try_="the format in docs/resharding.md",
        )  # fmt: skip
    found = []
    for i, data in enumerate(cases):
        try:
            found.append(read_case(data))
        except ReshardError as error:
            raise error.inside(f"{path}, case {data.get('id', i)}") from None
    return found


def read_case(data: Mapping[str, Any]) -> Case:
    """One case from its JSON object.

    >>> mesh = {"shape": [2], "axes": ["x"], "first": 0, "per_host": 1}
    >>> case = read_case({"id": "a", "shape": [4], "item": 2, "src": mesh, "src_spec": [["x"]],
    ...                   "dst": {**mesh, "first": 2}, "dst_spec": [[]], "nic_Bps": 1e9})
    >>> case.move.bytes, len(case.network.hosts)
    (8, 4)

    Raises:
      ReshardError: a field is missing or makes no sense.
    """
    try:
        source, destination = _mesh(data["src"]), _mesh(data["dst"])
        rate = Fraction(data["nic_Bps"])
        network = _network(data, (source, destination), rate)
        name = str(data.get("id", "case"))
        first, second = (
            Layout(mesh=mesh, spec=tuple(tuple(dim) for dim in data[key]))
            for mesh, key in ((source, "src_spec"), (destination, "dst_spec"))
        )
        shape, item = tuple(map(_whole, data["shape"])), _whole(data["item"])
    except KeyError as error:
        raise ReshardError(
            refused="a case", got=f"no {error}", where="",
            needed="shape, item, src, src_spec, dst, dst_spec, nic_Bps; of a mesh shape, axes, per_host, first or dev",
            try_="the format in docs/resharding.md",
        ) from None  # fmt: skip
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ReshardError):
            raise
        raise ReshardError(
            refused="a case", got=str(error), needed="numbers and lists as in docs/resharding.md", where="",
            try_="comparing it with the example there",
        ) from None  # fmt: skip
    move = Move(name=name, shape=shape, item_bytes=item, source=first, destination=second)
    return Case(name=name, network=network, move=move)


def report(case: Case, *, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Everything `meshwright reshard` says about a case, as plain numbers; times in seconds, sizes in bytes."""
    start = clock()
    plan = plan_reshard(case.network, [case.move])
    planned = clock() - start
    out, into = plan.port_bytes
    return {
        "id": case.name,
        "unit_tasks": plan.demand.unit_tasks,
        "lower_bound_seconds": float(plan.bound.seconds),
        "relay_bound_seconds": plan.relay_bound_seconds,
        "algorithms": {name: float(s) for name, s in published_seconds(plan.demand).items()},
        "ours_seconds": float(plan.seconds),
        "rounds": plan.rounds,
        "chunks": plan.chunks,
        "planning_seconds": planned,
        "bytes_between_hosts": plan.bytes_between_domains,
        "max_nic_bytes_in": int(into.max(initial=0)),
        "max_nic_bytes_out": int(out.max(initial=0)),
    }


def report_table(
    reports: Sequence[Mapping[str, Any]], *, show: Callable[[float], str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows for people, a line a case; `show` turns seconds into text."""
    heads = ("case", "unit tasks", "lower bound", "ours", "send/recv", "best published", "rounds", "planned in")
    rows: list[tuple[str, ...]] = []
    for r in reports:
        algorithms = r["algorithms"]
        best = min(sorted(algorithms), key=lambda name: algorithms[name])
        rows.append(
            (
                str(r["id"]),
                str(r["unit_tasks"]),
                show(r["lower_bound_seconds"]),
                show(r["ours_seconds"]),
                show(algorithms["send_recv"]),
                f"{show(algorithms[best])} ({best})",
                str(r["rounds"]),
                show(r["planning_seconds"]),
            )
        )
    return heads, rows


def _whole(number: Any) -> int:
    """A whole number, which JSON may write as 8.0."""
    if isinstance(number, bool) or int(number) != number:
        raise ValueError(f"{number!r}, no whole number")
    return int(number)


def _mesh(data: Mapping[str, Any]) -> DeviceMesh:
    shape, axes = tuple(map(_whole, data["shape"])), tuple(data["axes"])
    if "dev" in data:
        devices = [_whole(device) for device in np.array(data["dev"], dtype=object).ravel().tolist()]
    else:
        first = _whole(data["first"])
        devices = list(range(first, first + math.prod(shape)))
    wrong = [device for device in devices if not 0 <= device < 1 << 31]
    if wrong:
        raise ReshardError(
            refused="a mesh", got=f"the device {wrong[0]}", needed="device ids from 0 to 2**31", where="first, dev",
            try_="counting them from 0",
        )  # fmt: skip
    return DeviceMesh(devices=tuple(devices), shape=shape, axes=axes)


def _network(data: Mapping[str, Any], meshes: tuple[DeviceMesh, DeviceMesh], rate: Fraction) -> Network:
    # A host is known by its number and its size: meshes on machines of two sizes do not share hosts.
    hosts: dict[tuple[int, int], list[int]] = {}
    home: dict[int, tuple[int, int]] = {}
    for side, mesh in zip(("src", "dst"), meshes, strict=True):
        size = _whole(data[side]["per_host"])
        if size < 1:
            raise ReshardError(
                refused="a mesh", got=f"per_host {size}", needed="at least one device a host", where=side, try_="8"
            )
        for device in mesh.devices:
            host = (device // size, size)
            if home.setdefault(device, host) != host:
                raise ReshardError(
                    refused="the meshes", got=f"device {device} on hosts of {home[device][1]} and of {size} devices",
                    needed="one size of the hosts where meshes overlap", where="per_host", try_="the same twice",
                )  # fmt: skip
            if device not in hosts.setdefault(host, []):
                hosts[host].append(device)
    scale = {int(h): Fraction(s) for h, s in (data.get("nic_scale") or {}).items()}
    unknown = sorted(set(scale) - {number for number, _ in hosts})
    if unknown:
        raise ReshardError(
            refused="the factors of NICs", got=f"one for host {unknown[0]}", where="nic_scale",
            needed=f"hosts of the case's devices: {sorted({number for number, _ in hosts})}",
            try_="a device's host is its id divided by per_host",
        )  # fmt: skip
    described = []
    for number, size in sorted(hosts):
        own = rate * scale.get(number, Fraction(1))
        devices = tuple(sorted(hosts[number, size]))
        described.append(Host(devices=devices, nics=(Nic(send_rate=own, receive_rate=own),)))
    core = data.get("core_nics")
    return Network(
        hosts=tuple(described),
        core_rate=None if core is None else Fraction(core) * rate,
        latency_seconds=float(data.get("latency_seconds", 0.0)),
    )
