"""Clusters as TOML: one `[[host]]` table for each run of equal hosts, `count` times.

    name = "pair"
    fabric_oversubscription = 1.0      # may be left out, and fabric_hosts_per_leaf
    [measured_on]                      # the fields of MeasuredOn, as a calibration writes them; else left out
    [[host]]
    count = 2                          # may be left out: 1
    devices = 8
    nics = 1                           # or 0, without [host.nic]
    wires = [[0, 1, 2], ...]           # may be left out, and torus, torus_wraps
    [host.device]                      # the fields of Device
    [host.device.peak_flops]
    [host.link]                        # the fields of Link, for each device
    [host.nic]                         # the fields of Link, for each NIC

The keys are the field names of the dataclasses, read from them, so the two cannot drift apart. The numbers are checked
by the dataclasses; this file checks the shape of the document: keys that are unknown or missing, tables that are not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from typing import Any

from .cluster import Cluster
from .errors import ClusterError, check_count, near_names
from .hardware import Device, Host, Link
from .measured_on import MeasuredOn

# No cluster is near this many hosts; a typing slip like 10000000 would otherwise fill the memory.
_MOST_HOSTS = 100_000


def cluster_from_toml(text: str, *, source: str) -> Cluster:
    """The cluster that `text` describes; `source` (a file name) is what errors call it. Raises ClusterError."""
    return cluster_from_document(read_toml(text, source=source), source=source)


def read_toml(text: str, *, source: str) -> dict[str, Any]:
    """The document that `text` is. Raises ClusterError."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, thousands of brackets
        raise ClusterError(
            refused="a cluster description",
            got=f"text that is not TOML: {error}",
            needed="a TOML document",
            where=source,
            try_="write Cluster.to_toml() to a file and start from that",
        ) from None


def cluster_from_document(document: dict[str, Any], *, source: str) -> Cluster:
    """The cluster that a TOML document describes; `source` is what errors call it. Raises ClusterError."""
    read = {"hosts": _read_hosts, "measured_on": _read_measured_on}
    return _construct(Cluster, document, source, where=source, renamed={"hosts": "host"}, read=read)


def cluster_to_toml(cluster: Cluster) -> str:
    """TOML text for `cluster`, equal hosts in a row written once with their count."""
    lines = _pairs(_plain(cluster))
    if cluster.measured_on is not None:
        lines += ["", "[measured_on]", *_pairs(dataclasses.asdict(cluster.measured_on))]
    for host, run in itertools.groupby(cluster.hosts):
        lines += ["", "[[host]]", f"count = {len(list(run))}", *_pairs(_plain(host))]
        for table in ("device", "link", "nic") if host.nics else ("device", "link"):
            lines += ["", f"[host.{table}]", *_pairs(_plain(getattr(host, table)))]
            if table == "device":
                lines += ["", "[host.device.peak_flops]", *_pairs(dict(host.device.peak_flops))]
    return "\n".join(lines) + "\n"


def _plain(part: Cluster | Host | Device | Link) -> dict[str, Any]:
    """The fields that are no tables, but for empty lists."""
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
    tables = ("hosts", "measured_on", "device", "link", "nic", "peak_flops")
    return {name: value for name, value in fields.items() if name not in tables and value != ()}


def _pairs(values: dict[str, Any]) -> list[str]:
    return [f"{key if _is_bare(key) else _value(key)} = {_value(value)}" for key, value in values.items()]


def _is_bare(key: str) -> bool:
    return key.isascii() and key.replace("_", "").replace("-", "").isalnum()


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    # A JSON string is a TOML basic string, but TOML wants DEL escaped and knows no surrogate pairs (hence no ASCII
    # escapes); Python's repr of a finite number is a TOML number.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _read_hosts(tables: Any, source: str) -> tuple[Host, ...]:
    if not isinstance(tables, list):
        raise _wrong("host", repr(tables), "one or more [[host]] tables", source, "write [[host]] above its keys")
    hosts: list[Host] = []
    for number, table in enumerate(tables, start=1):
        where = f"{source}, [[host]] {number}"
        count = table.get("count", 1) if isinstance(table, dict) else 1
        try:
            check_count("Host", "count", count, at_most=_MOST_HOSTS)
        except ClusterError as error:
            raise error.inside(where) from None
        read = {"device": _reader(Device, "device"), "link": _reader(Link, "link"), "nic": _reader(Link, "nic")}
        hosts += [_construct(Host, table, where, where=where, read=read, extra=("count",))] * count
    return tuple(hosts)


def _read_measured_on(table: Any, source: str) -> MeasuredOn:
    return _construct(MeasuredOn, table, source, where=f"{source}, [measured_on]")


def _reader(kind: type, name: str) -> Any:
    return lambda table, where: _construct(kind, table, where, where=f"{where}, [host.{name}]")


def _construct(
    kind: type,
    table: Any,
    source: str,
    *,
    where: str,
    renamed: dict[str, str] | None = None,
    read: dict[str, Any] | None = None,
    extra: tuple[str, ...] = (),
) -> Any:
    """`kind` built from `table`, whose keys are the field names of `kind` (but for `renamed`) and `extra`."""
    if not isinstance(table, dict):
        raise _wrong(kind.__name__.lower(), repr(table), "a table", where, "write its keys under a [table] header")
    renamed, read = renamed or {}, read or {}
    fields = {renamed.get(field.name, field.name): field for field in dataclasses.fields(kind) if field.init}
    for key in table:
        if key not in fields and key not in extra:
            raise _wrong(key, "a key that is not known", "a known key", where, near_names(key, [*fields, *extra]))
    arguments = {}
    for key, field in fields.items():
        if key in table:
            value = table[key]
            arguments[field.name] = read[field.name](value, source) if field.name in read else value
        elif field.default is dataclasses.MISSING:
            raise _wrong(key, "nothing", f"the key {key!r}", where, f"add {key} = ...")
    try:
        return kind(**arguments)
    except ClusterError as error:
        raise error.inside(where) from None


def _wrong(key: str, got: str, needed: str, where: str, try_: str) -> ClusterError:
    return ClusterError(
        refused="a cluster description", got=got, needed=needed, where=f"{where}, key {key!r}", try_=try_
    )
