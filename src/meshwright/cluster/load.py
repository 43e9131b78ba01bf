"""Finding a cluster by a short text: presets, a TOML file, or the machine at hand.

A preset is one host of a known machine, a TOML file in `presets/` in which every number names its source. The kind of
its device is the name JAX gives to such a device, so that 'local' can find it. TPUs come in slices: their presets have
a table `[slice]` more, which says what torus a number of chips makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from .cluster import Cluster
from .errors import ClusterError, near_names
from .hardware import Host
from .toml_format import cluster_from_document, cluster_from_toml, read_toml
from .torus import slice_shape

_PRESETS = resources.files("meshwright.cluster").joinpath("presets")
_MOST = 999_999


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _PRESETS.iterdir() if f.name.endswith(".toml")))


def load_cluster(text: str) -> Cluster:
    """The cluster that `text` names.

    Args: `text` is "local" (the devices JAX sees), the path of a TOML file, which ends in ".toml", or presets:
    "preset", or "preset:hosts" ("p3.16xlarge:8" is eight such hosts), and several of these joined by "+"
    ("p4d.24xlarge:2+p3.16xlarge:2"). A TPU's number is that of the chips of a slice ("tpu-v5e:256"), and may be
    followed by that of the slices ("tpu-v5e:256x4"). See `preset_names`.

    Raises ClusterError for an unknown preset, a number that is none, a slice that does not exist, a file that is
    missing or wrong, or a local device that no preset describes or whose preset is not the only one.

    >>> load_cluster("p3.16xlarge:2").num_devices
    16
    >>> load_cluster("tpu-v5e:256").hosts[0].torus
    (16, 16)
    """
    if text == "local":
        return cluster_of()
    if text.endswith(".toml"):
        return _from_file(Path(text))
    terms = [_term(term, text) for term in text.split("+")]
    if len(terms) == 1:
        return dataclasses.replace(terms[0], name=text)
    return Cluster(
        name=text,
        hosts=tuple(host for term in terms for host in term.hosts),
        fabric_oversubscription=max(term.fabric_oversubscription for term in terms),
        fabric_hosts_per_leaf=min(term.fabric_hosts_per_leaf for term in terms),
    )


def _term(term: str, text: str) -> Cluster:
    """The cluster that one "preset:number" of `text` names."""
    name, colon, number = term.partition(":")
    if name not in preset_names():
        raise ClusterError(
            refused=f"cluster {text!r}",
            got=f"the unknown preset {name!r}",
            needed="'local', a preset, 'preset:hosts', several joined by '+', or the path of a .toml file",
            where="load_cluster(text)",
            try_=near_names(name, preset_names()),
        )
    preset, parts = _preset(name), _slice_table(name)
    if not colon:
        return preset
    if parts is None:
        hosts = _whole(number)
        if hosts is None:
            raise _no_number(text, number, "hosts", f"'{name}:2'")
        return dataclasses.replace(preset, hosts=preset.hosts * hosts)
    chips_text, times, slices_text = number.partition("x")
    chips, slices = _whole(chips_text), _whole(slices_text) if times else 1
    if chips is None or slices is None:
        raise _no_number(text, number, "chips", f"'{name}:16', or '{name}:16x2' for two slices")
    return dataclasses.replace(preset, hosts=(_slice(preset.hosts[0], parts, chips, text),) * slices)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= _MOST else None


def _no_number(text: str, got: str, what: str, try_: str) -> ClusterError:
    return ClusterError(
        refused=f"cluster {text!r}", got=f"{got!r} {what}", needed=f"a whole number from 1 to {_MOST} after the colon",
        where="load_cluster(text)", try_=try_,
    )  # fmt: skip


def _slice(machine: Host, parts: dict[str, Any], chips: int, text: str) -> Host:
    """A slice of `chips` as one host: its chips reach each other without leaving the torus."""
    shape = slice_shape(chips, parts["shapes"], parts["most_chips"])
    if shape is None:
        most = parts["most_chips"]
        known = [size for size in range(1, most + 1) if slice_shape(size, parts["shapes"], most)]
        near = sorted(sorted(known, key=lambda size: (abs(size - chips), size))[:4])
        raise ClusterError(
            refused=f"cluster {text!r}",
            got=f"a slice of {chips} chips",
            needed="a number of chips that a slice has",
            where="load_cluster(text)",
            try_=" or ".join(map(str, near)) + ", or several slices, as in '16x2'",
        )
    rings = tuple(size % parts["ring_multiple"] == 0 for size in shape)
    machines = -(-chips // parts["chips_per_machine"])
    return dataclasses.replace(machine, devices=chips, torus=shape, torus_wraps=rings, nics=machine.nics * machines)


@cache
def _documents(name: str) -> tuple[Cluster, dict[str, Any] | None]:
    source = f"preset {name}"
    document = read_toml(_PRESETS.joinpath(f"{name}.toml").read_text("utf-8"), source=source)
    parts = document.pop("slice", None)
    return cluster_from_document(document, source=source), parts


def _preset(name: str) -> Cluster:
    return _documents(name)[0]


def _slice_table(name: str) -> dict[str, Any] | None:
    return _documents(name)[1]


def _from_file(path: Path) -> Cluster:
    try:
        return cluster_from_toml(path.read_text("utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            refused=f"cluster {str(path)!r}",
            got=f"a file that cannot be read: {error}",
            needed="a readable TOML file in UTF-8",
            where="load_cluster(text)",
            try_="check the path, or a preset: " + ", ".join(preset_names()),
        ) from None


def cluster_of(devices: Sequence[Any] | None = None) -> Cluster:
    """Devices that JAX sees, by default all of them, which is `load_cluster("local")`: one host for each process (TPUs:
    one slice of all), described by the preset with the same kind of device.

    Args:
      devices: of `jax.devices()`, those of a process together.

    Raises ClusterError for devices that no preset describes, or several do.
    """
    # The only use of JAX in this package, and only when it is asked for.
    from .._jax.devices import visible_devices

    seen = visible_devices(devices)
    presets = {name: _preset(name) for name in preset_names()}
    matching = [name for name, preset in presets.items() if preset.device.kind == seen.kind]
    if not matching:
        raise ClusterError(
            refused="cluster 'local'",
            got=f"{sum(seen.devices_of_process)} devices of kind {seen.kind!r}",
            needed="a kind of device that a preset describes: "
            + ", ".join(sorted({preset.device.kind for preset in presets.values()})),
            where="load_cluster('local')",
            try_="write a TOML file (start from load_cluster('p4d.24xlarge').to_toml()) and load it by its path",
        )
    parts = _slice_table(matching[0])
    if parts is not None:
        host = _slice(presets[matching[0]].hosts[0], parts, sum(seen.devices_of_process), "local")
        return dataclasses.replace(presets[matching[0]], name="local", hosts=(host,))
    # Presets with the same device differ in their NICs, which matter only between hosts and cannot be detected.
    if len(seen.devices_of_process) > 1 and len(matching) > 1:
        raise ClusterError(
            refused="cluster 'local'",
            got=f"{len(seen.devices_of_process)} hosts with {seen.kind}, whose NICs are not visible to JAX",
            needed="to know which machine it is: " + " or ".join(matching),
            where="load_cluster('local')",
            try_=f"'{matching[0]}:{len(seen.devices_of_process)}'",
        )
    preset = presets[matching[0]]
    hosts = tuple(dataclasses.replace(preset.hosts[0], devices=devices) for devices in seen.devices_of_process)
    return dataclasses.replace(preset, name="local", hosts=hosts)
