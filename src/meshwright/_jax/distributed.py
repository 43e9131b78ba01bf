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


def accelerators_are_in_use() -> bool:
    """Whether JAX has opened devices other than the host's own."""
    return xla_bridge.backends_are_initialized() and not set(xla_bridge.backends()) <= {"cpu", "interpreter"}


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


def publish(key: str, text: str) -> None:
    """Put a text where every connected process can read it, once."""
    distributed.global_state.client.key_value_set(key, text)


def read(key: str, timeout_seconds: float) -> str:
    """The text that some process publishes under `key`, once it is there.

    Raises:
      TimeoutError: it did not come in time.
    """
    try:
        return distributed.global_state.client.blocking_key_value_get(key, int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(key) from error
        raise
