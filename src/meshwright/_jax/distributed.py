"""`jax.distributed` under what `launch` needs of it: whether it is too late, what was detected, and whom it waits for.

Connecting itself is public. Used of `jax._src`, the same in JAX 0.10 to 0.12: which backends exist, whether a
cluster environment (SLURM, Kubernetes, Open MPI, Cloud TPU) is detected, the coordinator's address that came of it, and
the coordinator's key-value store.
"""

from __future__ import annotations

import jax
from jax._src import clusters, distributed, xla_bridge


def is_connected() -> bool:
    """Whether this process is connected to a coordinator, or is about to be."""
    return jax.distributed.is_initialized()


def devices_are_in_use() -> bool:
    """Whether JAX has looked at its devices; after that it is too late to connect."""
    return xla_bridge.backends_are_initialized()


def detected_cluster() -> str | None:
    """The name of the cluster environment that JAX will ask for what it is not told, or None."""
    # The same choice as ClusterEnv.auto_detect_unset_distributed_params makes.
    known = clusters.ClusterEnv._cluster_types
    return next((env.name for env in known if not env.opt_in_only_method and env.is_env_present()), None)


def coordinator_address() -> str | None:
    """The address of the coordinator that was given or detected, as host:port; None while there is none."""
    return distributed.global_state.coordinator_address


def connect(
    *,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    detect: bool,
    bind_address: str | None,
    give_up_seconds: int,
    heartbeat_timeout_seconds: int,
) -> None:
    """Connect to the coordinator, which process 0 starts. Blocks; after `give_up_seconds` JAX ends the process.

    Args:
      coordinator: host:port.
      processes: how many.
      process_id: of this process.
      detect: whether JAX may ask a cluster environment, also for which devices this process owns.
      bind_address: where process 0 listens; on every interface by default.
      give_up_seconds: after these JAX aborts, without an error that Python could see.
      heartbeat_timeout_seconds: a process that is silent for so long is dead.
    """
    # JAX's default, unless somebody unset it; without it nothing over CPU devices of several processes compiles.
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process_id,
        cluster_detection_method=None if detect else "deactivate",
        initialization_timeout=give_up_seconds,
        coordinator_bind_address=bind_address,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )


def place() -> tuple[int, int]:
    """The number of this process, and how many are connected; asks no device."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def publish(key: str, text: str, *, again: bool = False) -> None:
    """Put a text where every connected process can read it.

    Args:
      key: where.
      text: what.
      again: whether it may take the place of an earlier one.

    Raises:
      FileExistsError: there is one already.
    """
    try:
        distributed.global_state.client.key_value_set(key, text, allow_overwrite=again)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            raise FileExistsError(key) from error
        raise


def published(folder: str) -> dict[str, str]:
    """The texts there are under `folder/` by now, by the rest of their keys."""
    found = distributed.global_state.client.key_value_dir_get(folder)
    return {key.removeprefix(f"{folder}/"): text for key, text in found}


def count(key: str, more: int = 1) -> int:
    """Add to the number that all processes share under `key`, and return the sum."""
    return distributed.global_state.client.key_value_increment(key, more)


def read(key: str, timeout_seconds: float) -> str:
    """The text that some process publishes under `key`, once it is there.

    Raises:
      TimeoutError: it did not come in time.
      ConnectionAbortedError: this process has left the coordinator meanwhile.
      ConnectionError: the coordinator is gone.
    """
    client = distributed.global_state.client
    if client is None:
        raise ConnectionAbortedError(key)
    try:
        return client.blocking_key_value_get(key, int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(key) from error
        if "CANCELLED" in str(error):
            raise ConnectionAbortedError(key) from error
        if "UNAVAILABLE" in str(error):
            raise ConnectionError(str(error)) from error
        raise
