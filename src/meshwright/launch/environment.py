"""What a local process is told through its environment, and how `initialize` reads it.

Three variables say where the process stands: MESHWRIGHT_COORDINATOR ("127.0.0.1:port"), MESHWRIGHT_PROCESSES and
MESHWRIGHT_PROCESS_ID. The others are JAX's own: XLA_FLAGS with the number of virtual CPU devices, and
JAX_LOCAL_DEVICE_IDS where processes share the GPUs of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import LaunchError

_COORDINATOR = "MESHWRIGHT_COORDINATOR"
_PROCESSES = "MESHWRIGHT_PROCESSES"
_PROCESS_ID = "MESHWRIGHT_PROCESS_ID"
# Number of processes and rank, as Open MPI and launchers that speak PMI (MPICH, Intel MPI) tell them.
_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
_FORCED = "xla_force_host_platform_device_count"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process stands among all: the `coordinator` as host:port, the number of `processes`, its `process_id`.

    >>> Place(coordinator="127.0.0.1:4000", processes=4, process_id=3).variables()["MESHWRIGHT_PROCESS_ID"]
    '3'
    """

    coordinator: str
    processes: int
    process_id: int

    def variables(self) -> dict[str, str]:
        """The environment variables that say it."""
        return {
            _COORDINATOR: self.coordinator,
            _PROCESSES: str(self.processes),
            _PROCESS_ID: str(self.process_id),
        }


def mpi_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """How many processes an MPI launcher started, if more than one, and which of them this is.

    >>> mpi_place({"PMI_SIZE": "4", "PMI_RANK": "2"})
    (4, 2)
    """
    for names in _MPI:
        count, rank = (environment.get(name, "") for name in names)
        if count.isdecimal() and rank.isdecimal() and int(count) > 1:
            return int(count), int(rank)
    return None


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that our launcher wrote into `environment`, or None where it wrote none.

    Raises:
      LaunchError: if only some of the variables are there, or hold no numbers.

    >>> place_in({}) is None
    True
    """
    values = [environment.get(name) for name in (_COORDINATOR, _PROCESSES, _PROCESS_ID)]
    if values == [None, None, None]:
        return None
    coordinator, processes, process_id = (value or "" for value in values)
    if not (coordinator and processes.isdecimal() and process_id.isdecimal() and int(process_id) < int(processes)):
        raise LaunchError(
            refused="the place of this process", got=f"{values}",
            needed=f"{_COORDINATOR} as host:port, {_PROCESSES} as a number, {_PROCESS_ID} as a number below it",
            where="the environment", try_="set all three or none; `meshwright launch` sets them",
        )  # fmt: skip
    return Place(coordinator=coordinator, processes=int(processes), process_id=int(process_id))


def child_environment(base: Mapping[str, str], place: Place, *, devices: int | None, gpus: int = 0) -> dict[str, str]:
    """The environment of one local process.

    Args:
      base: the environment it starts from.
      place: where the process stands.
      devices: how many devices it gets; by default what `base` says for the CPU, or its share of the GPUs.
      gpus: how many GPUs this machine has for the run.

    Raises:
      LaunchError: if the GPUs are fewer than the processes need together.
    """
    environment = {**base, **place.variables(), "PYTHONUNBUFFERED": "1"}
    flags = base.get("XLA_FLAGS", "")
    if devices is not None:
        # The last occurrence of a flag wins, so what the caller forced before is overruled and the rest stays.
        environment["XLA_FLAGS"] = f"{flags} --{_FORCED}={devices}".strip()
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in base):
        # gRPC would ask the proxy for the coordinator on this very machine, and wait for ever.
        environment["no_proxy"] = ",".join(filter(None, [base.get("no_proxy", ""), "127.0.0.1", "localhost"]))
    if gpus:
        share = devices if devices is not None else gpus // place.processes
        if share * place.processes > gpus or not share:
            raise LaunchError(
                refused="this number of processes", got=f"{place.processes} processes with {max(share, 1)} GPUs each",
                needed=f"no more than the {gpus} GPUs of this machine", where="--processes, --devices-per-process",
                try_="fewer of them, or virtual CPU devices with JAX_PLATFORMS=cpu",
            )  # fmt: skip
        first = place.process_id * share
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(device) for device in range(first, first + share))
    return environment


def gpus_for(environment: Mapping[str, str], *, devices_folder: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs a run in `environment` would use, found without JAX: 0 if it is kept to the CPU.

    Args:
      environment: of the run; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES are respected.
      devices_folder: where the system shows its devices.

    >>> gpus_for({"JAX_PLATFORMS": "cpu"})
    0
    """
    platforms = [name.strip() for name in environment.get("JAX_PLATFORMS", "").split(",") if name.strip()]
    if platforms and not {"cuda", "gpu"} & set(platforms):
        return 0
    present = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in devices_folder.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))
