"""Finding a cluster by a short text: a preset, a TOML file, or the machine at hand.

A preset is one host of a known machine, a TOML file in `presets/` in which every number names its source. The kind of
its device is the name JAX gives to such a device, so that 'local' can find it.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path

from .cluster import Cluster
from .errors import ClusterError, near_names
from .toml_format import cluster_from_toml

_PRESETS = resources.files("meshwright.cluster").joinpath("presets")


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _PRESETS.iterdir() if f.name.endswith(".toml")))


def load_cluster(text: str) -> Cluster:
    """The cluster that `text` names.

    Args: `text` is "local" (the devices JAX sees), "preset" or "preset:hosts" (see `preset_names`; "p3.16xlarge:8" is
    eight such hosts), or the path of a TOML file, which ends in ".toml".

    Raises ClusterError for an unknown preset, a number of hosts that is none, a file that is missing or wrong, or a
    local device that no preset describes or whose preset is not the only one.

    >>> load_cluster("p3.16xlarge:2").num_devices
    16
    """
    if text == "local":
        return _local()
    if text.endswith(".toml"):
        return _from_file(Path(text))
    name, colon, hosts = text.partition(":")
    if name not in preset_names():
        raise ClusterError(
            refused=f"cluster {text!r}",
            got=f"the unknown preset {name!r}",
            needed="'local', a preset, 'preset:hosts', or the path of a .toml file",
            where="load_cluster(text)",
            try_=near_names(name, preset_names()),
        )
    if colon and not (hosts.isascii() and hosts.isdigit() and int(hosts[:7]) >= 1 and len(hosts) < 7):
        raise ClusterError(
            refused=f"cluster {text!r}",
            got=f"{hosts!r} hosts",
            needed="a whole number from 1 to 999999 after the colon",
            where="load_cluster(text)",
            try_=f"'{name}:2'",
        )
    cluster = _preset(name)
    return dataclasses.replace(cluster, name=text, hosts=cluster.hosts * int(hosts)) if colon else cluster


def _preset(name: str) -> Cluster:
    return cluster_from_toml(_PRESETS.joinpath(f"{name}.toml").read_text("utf-8"), source=f"preset {name}")


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


def _local() -> Cluster:
    """The devices JAX sees: one host for each process, described by the preset with the same kind of device."""
    # The only use of JAX in this package, and only when it is asked for.
    from .._jax.devices import visible_devices

    seen = visible_devices()
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
