"""Joining the processes of a run: `jax.distributed.initialize` with a bounded wait and an error that says what failed.

Where the process stands is taken from the arguments, else from our launcher's environment, else from JAX's own
detection (SLURM, Kubernetes, Open MPI, Cloud TPU). JAX answers a coordinator that never comes by aborting the process
from C++, out of Python's reach; so JAX waits in a thread of its own, longer than we do, and this module gives up first,
with an error. Afterwards the processes tell each other of their ends (`runtime.peers`), and JAX's heartbeats watch over
them: one that tells nothing ends all others within `heartbeat_timeout_seconds`, with or without a launcher.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

from .ending import end_on_uncaught_errors
from .environment import Place, mpi_place, place_in
from .errors import LaunchError
from .port import hold_port, somebody_listens, split_address

# JAX's own limit lies this much behind ours, so that ours is the one that is met.
_JAX_WAITS_LONGER_SECONDS = 3600

# The failure of the one attempt a process has: JAX's thread cannot be called back.
_failure: LaunchError | None = None


def initialize(
    *,
    timeout_seconds: float = 300.0,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    heartbeat_timeout_seconds: float = 30.0,
    step_timeout_seconds: float = 600.0,
) -> None:
    """Join this process to the others of its run. To be called before JAX's devices are touched.

    Under `meshwright launch`, and where JAX detects a cluster (SLURM, Kubernetes, Open MPI, Cloud TPU), no argument is
    needed; under other MPI launchers the coordinator alone. Alone, with one process, and when called again, it does
    nothing. From then on a process that fails, ends before the others, or makes other calls than they ends all of them
    with an error that names it (docs/launch.md); an error that nobody catches ends a process without exit handlers.

    Args:
      timeout_seconds: how long to wait until all processes are there.
      coordinator: host:port of process 0, on which it starts the coordinator.
      processes: how many processes there are.
      process_id: which of them this is, from 0.
      heartbeat_timeout_seconds: a process whose machine is silent for so long counts as dead, and the others end;
        rounded up to whole seconds.
      step_timeout_seconds: when a step has waited for others for so long, without anything happening, all processes end
        with an error that says for what and for whom. Others may be compiling meanwhile.

    Raises:
      LaunchError: if the others do not come in time, if JAX's devices are in use already, if the coordinator's port is
        taken, or if arguments are missing or wrong.

    >>> initialize(processes=1)
    """
    global _failure
    from .._jax import distributed
    from ..runtime.peers import peers
    from ..runtime.watch import watch

    if _failure is not None:
        raise _failure
    for name, seconds in (
        ("timeout_seconds", timeout_seconds),
        ("heartbeat_timeout_seconds", heartbeat_timeout_seconds),
        ("step_timeout_seconds", step_timeout_seconds),
    ):
        if not 0 < seconds < math.inf:
            raise _refusal("this wait", repr(seconds), "a positive number of seconds", name, "300")
    watch.limit_seconds = step_timeout_seconds
    asked = (coordinator, processes, process_id) != (None, None, None)
    place = None if asked else place_in(os.environ)
    if place is not None:
        coordinator, processes, process_id = place.coordinator, place.processes, place.process_id
    if processes == 1:
        return
    if distributed.is_connected():
        if not peers.are_joined:  # a script that has called jax.distributed.initialize itself
            end_on_uncaught_errors()
            peers.join()
        return
    cluster = None if place is not None else distributed.detected_cluster()
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    started = mpi_place(os.environ) if place is None and cluster is None else None
    if started is not None and processes is None and process_id is None:
        processes, process_id = started
        if coordinator is None:
            raise _refusal(
                "to go on alone", f"process {process_id} of {processes} that an MPI launcher started",
                "the address of process 0, which this launcher does not tell", "meshwright.initialize()",
                'initialize(coordinator="HOST:PORT") in every process, or processes=1 to run each by itself',
            )  # fmt: skip
    elif not asked and place is None and cluster is None and coordinator is None:
        return
    if cluster is None:
        _check_complete(coordinator, processes, process_id)
    if distributed.devices_are_in_use():
        raise _refusal(
            "to join the processes", "JAX's devices in use already", "a call before the first one that touches devices",
            "meshwright.initialize()", "calling it before jax.devices(), jax.numpy, device_put and jitted functions",
        )  # fmt: skip
    if coordinator is not None:
        _, port = split_address(coordinator)
        if process_id == 0:
            # gRPC would share the port with another coordinator without a word, and each would wait for its processes.
            hold_port(port).close()
    end_on_uncaught_errors()
    problem = _tried(
        lambda: distributed.connect(
            coordinator=coordinator,
            processes=processes,
            process_id=process_id,
            detect=place is None,
            # Local processes need no port that is open to the network.
            bind_address=coordinator if place is not None else None,
            give_up_seconds=math.ceil(timeout_seconds) + _JAX_WAITS_LONGER_SECONDS,
            heartbeat_timeout_seconds=math.ceil(heartbeat_timeout_seconds),
        ),
        timeout_seconds,
    )
    if problem is None:
        peers.join()
        return
    address = distributed.coordinator_address() or coordinator
    who = Place(coordinator=address or "unknown", processes=processes or 0, process_id=process_id or 0)
    _failure = _never_came(who, timeout_seconds) if problem == "timeout" else _failed(who, problem)
    raise _failure


def _tried(connect: Callable[[], None], timeout_seconds: float) -> str | None:
    """None once `connect` has returned, "timeout" if it has not in time, or what it raised."""
    said: list[str] = []

    def connect_and_tell() -> None:
        try:
            connect()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    waiting = threading.Thread(target=connect_and_tell, name="meshwright.initialize", daemon=True)
    waiting.start()
    waiting.join(timeout_seconds)
    if waiting.is_alive():
        return "timeout"
    return said[0] if said else None


def _check_complete(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    given = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise _refusal(
            "to join the processes", f"no {', no '.join(missing)}", "all three, where no cluster tells them",
            "meshwright.initialize(coordinator=, processes=, process_id=)",
            "giving them, or starting the script with `meshwright launch`, srun or a Kubernetes job",
        )  # fmt: skip
    if processes is not None and process_id is not None and not 0 <= process_id < processes:
        raise _refusal(
            "this process", f"process_id={process_id} of processes={processes}", "0 <= process_id < processes",
            "meshwright.initialize()", f"process_id from 0 to {max(processes - 1, 0)}",
        )  # fmt: skip


def _never_came(who: Place, seconds: float) -> LaunchError:
    others = f"all {who.processes} processes" if who.processes else "all processes"
    if who.coordinator == "unknown":
        got = f"no address of a coordinator within {seconds:g} s"
    elif who.process_id != 0 and not somebody_listens(*split_address(who.coordinator)):
        got = f"no coordinator at {who.coordinator} within {seconds:g} s: nobody listens there"
    else:
        got = f"a coordinator at {who.coordinator} to which not {others} came within {seconds:g} s"
    return _refusal(
        "to go on", got, f"{others} at the coordinator, which process 0 starts",
        f"meshwright.initialize() in process {who.process_id}",
        "looking at the log of the processes that did not come, process 0 first; or a longer timeout_seconds",
    )  # fmt: skip


def _failed(who: Place, said: str) -> LaunchError:
    return _refusal(
        "to join the processes", f"from JAX: {said}", "a connection to the coordinator",
        f"{who.coordinator}, meshwright.initialize()", "checking the address, processes and process_id",
    )  # fmt: skip


def _refusal(refused: str, got: str, needed: str, where: str, try_: str) -> LaunchError:
    return LaunchError(refused=refused, got=got, needed=needed, where=where, try_=try_)
