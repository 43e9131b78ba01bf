"""Joining processes under JAX: they compute together, and what does not come or does not last is an error in time."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from launched import ENDING_SECONDS, LIMIT_SECONDS, alive, marked, started, write_script

from meshwright.launch import LaunchError, initialize, run
from meshwright.launch.port import hold_port

JOINED = """
    import meshwright, time
    meshwright.initialize(timeout_seconds=60)
    import jax, jax.numpy as jnp
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("x"))
    numbers = jnp.arange(1.0, 1.0 + jax.device_count())
    x = jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()))
    total = float(add(x).addressable_data(0)[0])
    mark(f"joined-{place}")
    while not all(pathlib.Path(__file__).with_name(f"joined-{other}").exists() for other in range(jax.process_count())):
        time.sleep(0.01)
"""
# The others wait in a collective that the failing one never enters.
FAILING = """
    if place == {who}:
        mark("failing")
        {how}
    add(x).block_until_ready()
    time.sleep(1000)
"""


def test_processes_of_several_devices_add_up(tmp_path: Path) -> None:
    say = "\n    print('total', total, jax.process_index() == place, jax.process_count(), jax.local_device_count())\n"
    again = "    meshwright.initialize()\n"
    script = write_script(tmp_path, JOINED + say + again)
    result = run(script, processes=2, devices_per_process=4, timeout_seconds=LIMIT_SECONDS)
    result.check()
    for process in result.processes:
        assert "total 36.0 True 2 4" in process.output()


@pytest.mark.parametrize(
    ("who", "how", "status", "shown"),
    [
        # In the middle of a step: `test_pipeline_failures`.
        pytest.param(1, "raise ValueError('this is why')", 1, "ValueError: this is why", marks=pytest.mark.slow),
        pytest.param(0, "raise SystemExit(7)", 7, "status 7", marks=pytest.mark.slow),
        pytest.param(1, "os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", marks=pytest.mark.slow),
        # With process 0 goes the coordinator, and the others abort of themselves: it must be named all the same.
        (0, "os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_a_joined_process_that_fails_ends_all(tmp_path: Path, who: int, how: str, status: int, shown: str) -> None:
    script = write_script(tmp_path, JOINED + FAILING.format(who=who, how=how))
    result = run(script, processes=2, timeout_seconds=LIMIT_SECONDS)
    assert time.time() - (tmp_path / "failing").stat().st_mtime < ENDING_SECONDS
    assert result.failed is result.processes[who], [process.output() for process in result.processes]
    assert result.exit_status == status
    assert shown in str(result.problem)
    assert not any(alive(process.pid) for process in result.processes)


@pytest.mark.parametrize("process_id", [0, 1])
def test_others_that_never_come_are_an_error_in_time(tmp_path: Path, process_id: int) -> None:
    port = free_port()
    script = write_script(
        tmp_path,
        f"""
        import time, meshwright, meshwright.launch
        join = dict(coordinator="127.0.0.1:{port}", processes=2, process_id={process_id}, timeout_seconds=1.0)
        start = time.monotonic()
        for again in range(2):
            try: meshwright.initialize(**join)
            except meshwright.launch.LaunchError as error: print(time.monotonic() - start, error)
        meshwright.initialize(**join)
        """,
    )
    with started(script) as process:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert errors.rstrip().splitlines()[-1].startswith("meshwright.launch.errors.LaunchError: refused to go on")
    first, second = output.splitlines()
    assert 1.0 <= float(first.split()[0]) < 1.0 + ENDING_SECONDS
    # A second try does not wait again.
    assert float(second.split()[0]) < float(first.split()[0]) + 1.0
    assert f"127.0.0.1:{port}" in first
    assert "within 1 s" in first
    assert ("nobody listens" if process_id == 1 else "all 2 processes") in first


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time.sleep(1000)", "raise ValueError('this is why')"])
def test_without_a_launcher_a_process_that_ends_ends_the_others(tmp_path: Path, how: str) -> None:
    join = (
        f'coordinator="127.0.0.1:{free_port()}", processes=2, process_id=place, '
        "timeout_seconds=60, heartbeat_timeout_seconds=2"
    )
    script = write_script(tmp_path, JOINED.replace("timeout_seconds=60", join) + FAILING.format(who=1, how=how))
    with started(script) as first, started(script, MESHWRIGHT_PROCESS_ID="1") as second:
        marked(tmp_path, "failing")
        if "raise" in how:
            # At once, and not after the five minutes for which JAX's exit handler waits for the other.
            assert "this is why" in second.communicate(timeout=ENDING_SECONDS)[1]
            assert second.returncode == 1
        else:
            second.send_signal(signal.SIGKILL)
        ended = time.monotonic()
        _, errors = first.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - ended < 2 + ENDING_SECONDS
    assert first.returncode != 0
    assert "process 1 (" in errors or "unhealthy" in errors


def test_slurm_tells_the_place(tmp_path: Path) -> None:
    script = write_script(tmp_path, JOINED + "\n    print('total', total, jax.process_index())\n")
    step = {"JAX_COORDINATOR_PORT": str(free_port()), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    first_rank, second_rank = (step | slurm(process_id) for process_id in range(2))
    script.write_text(script.read_text().replace("MESHWRIGHT_PROCESS_ID", "SLURM_PROCID"))
    with started(script, **first_rank) as first, started(script, **second_rank) as second:
        outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert "total 10.0 0" in outputs[0][0]
    assert "total 10.0 1" in outputs[1][0]


@pytest.mark.slow
def test_our_launcher_comes_before_slurm(tmp_path: Path) -> None:
    # As in `salloc`, whose shell says of all that is started in it that it is process 0.
    script = write_script(tmp_path, JOINED + "\n    print('total', total, jax.process_index())\n")
    result = run(script, processes=2, devices_per_process=1, environment=slurm(0), timeout_seconds=LIMIT_SECONDS)
    result.check()
    assert "total 3.0 1" in result.processes[1].output()


def slurm(process_id: int) -> dict[str, str]:
    """What `srun` tells a process of a step of two on this machine."""
    return {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process_id), "SLURM_LOCALID": str(process_id),
    }  # fmt: skip


def test_it_is_too_late_once_devices_are_in_use() -> None:
    import jax

    jax.devices()
    with pytest.raises(LaunchError, match=r"devices in use already.*before jax\.devices\(\)"):
        initialize(coordinator="127.0.0.1:4000", processes=2, process_id=0)


def test_alone_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize()
    initialize(coordinator="127.0.0.1:4000", processes=1, process_id=0)
    monkeypatch.setenv("MESHWRIGHT_COORDINATOR", "127.0.0.1:4000")
    monkeypatch.setenv("MESHWRIGHT_PROCESSES", "1")
    monkeypatch.setenv("MESHWRIGHT_PROCESS_ID", "0")
    initialize()


@pytest.mark.parametrize(
    "names",
    [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), pytest.param(("PMI_SIZE", "PMI_RANK"), marks=pytest.mark.slow)],
)
def test_mpi_launchers_tell_all_but_the_coordinator(tmp_path: Path, names: tuple[str, str]) -> None:
    script = write_script(tmp_path, JOINED + "\n    print('total', total, jax.process_index())\n")
    script.write_text(script.read_text().replace("MESHWRIGHT_PROCESS_ID", names[1]))
    said = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "XLA_FLAGS": "", names[0]: "2"}
    first_rank, second_rank = (said | {names[1]: str(rank)} for rank in range(2))
    with started(script, **first_rank) as first, started(script, **second_rank) as second:
        outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert "total 3.0 1" in outputs[1][0]


def test_one_of_many_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(LaunchError, match=r"process 2 of 4 that an MPI launcher started.*initialize\(coordinator="):
        initialize()
    initialize(processes=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"coordinator": "127.0.0.1:4000"}, "no processes, no process_id"),
        ({"processes": 2}, "no coordinator, no process_id"),
        ({"coordinator": "127.0.0.1:4000", "processes": 2, "process_id": 2}, "process_id from 0 to 1"),
        ({"coordinator": "127.0.0.1:4000", "processes": 0, "process_id": 0}, "process_id < processes"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
        ({"heartbeat_timeout_seconds": float("inf")}, "heartbeat_timeout_seconds"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        initialize(**wrong)


@pytest.mark.parametrize("listens", [True, False])
def test_a_coordinator_on_a_taken_port_is_refused(tmp_path: Path, listens: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        call = f"meshwright.initialize(coordinator='127.0.0.1:{port}', processes=2, process_id=0, timeout_seconds=5)"
        with started(write_script(tmp_path, f"import meshwright\n{call}")) as process:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    last = errors.rstrip().splitlines()[-1]
    assert "LaunchError" in last
    assert f"port {port} for the coordinator" in last


def free_port() -> int:
    with hold_port() as held:
        return held.getsockname()[1]
