"""A pipeline over processes of which one fails, dies, hangs or never comes: an error that says so; nobody is left.

The model is two layers in two stages, each on the one device of its process. A process marks its pid when it is about
to run steps, and again after some of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from launched import ENDING_SECONDS, LIMIT_SECONDS, alive, marked, started, wait_until, write_script

from meshwright.launch import Result, run
from meshwright.launch.port import hold_port

_MULTIDEVICE = Path(__file__).parents[1] / "multidevice"
_CPU = {"JAX_PLATFORMS": "cpu"}

_HEAD = f"""
import signal, sys, time
sys.path.insert(0, {str(_MULTIDEVICE)!r})
import meshwright as mw
mw.initialize(timeout_seconds=120, step_timeout_seconds=float(os.environ.get("STEP_TIMEOUT", "600")))
import jax, jax.numpy as jnp, numpy as np
from pipelines import Pipeline, pipelined

broken = []

@jax.custom_jvp
def checked(x):
    def check(x):
        if broken:
            raise FloatingPointError("the activations of a stage are not finite")
        return x
    return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

checked.defjvp(lambda x, t: (checked(*x), t[0]))

def plain_step(weights, x, check=lambda h: h):
    def loss(weights):
        hidden = jnp.tanh(x @ weights[0])
        mw.layer_boundary()
        return jnp.mean(jnp.tanh(check(hidden) @ weights[1]))
    value, grads = mw.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

state, x = [np.eye(8, dtype=np.float32)] * 2, np.ones((8, 8), np.float32)

def steps(step, before=lambda number: None):
    global state
    mark(f"begun-{{place}}")
    for number in range(100_000):
        before(number)
        state, loss = step(state, x)
        float(loss)
        if number == 5:
            mark(f"running-{{place}}")
    print("all steps done")
"""
_PLAIN = """
step = pipelined(plain_step, (state, x), Pipeline(submeshes=(1, 1), microbatches=2))
"""
_CHECKED = """
import warnings
warnings.simplefilter("ignore")
step = pipelined(
    lambda weights, x: plain_step(weights, x, checked), (state, x), Pipeline(submeshes=(1, 1), microbatches=2)
)
"""


def launch(folder: Path, text: str, **environment: str) -> tuple[Result, float]:
    """Two processes of one device run `text`; and how long they lived after the first steps."""
    ran = run(
        write_script(folder, _HEAD + text), processes=2, devices_per_process=1, log_dir=folder,
        timeout_seconds=LIMIT_SECONDS, environment={**_CPU, **environment},
    )  # fmt: skip
    seconds = time.time() - (folder / "running-0").stat().st_mtime
    assert not any(alive(process.pid) for process in ran.processes)
    return ran, seconds


def assert_failed(ran: Result, seconds: float, *shown: str) -> None:
    """The run ended by a failure, soon, and its error shows what it should."""
    assert ran.ended_by == "failure", ran.problem
    assert seconds < ENDING_SECONDS, ran.problem
    for text in shown:
        assert text in str(ran.problem)
    assert not any("all steps done" in process.output() for process in ran.processes)


# One of two fails


def test_a_process_that_raises_in_the_middle_of_a_step_ends_all(tmp_path: Path) -> None:
    """A signal's handler raises wherever the process is just then, and again if Python ignores errors there."""
    text = """
def fail(*_):
    raise OSError("the disk is full")
def fail_soon(*_):
    signal.setitimer(signal.ITIMER_REAL, 0.005)
signal.signal(signal.SIGALRM, fail)
sys.unraisablehook = fail_soon
steps(step, lambda number: fail_soon() if place == 1 and number == 20 else None)
"""
    ran, seconds = launch(tmp_path, _PLAIN + text)
    assert_failed(ran, seconds, "OSError: the disk is full", "process 1")


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_ends_all(tmp_path: Path, who: int) -> None:
    text = f"""
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGALRM, die)
steps(step, lambda number: signal.setitimer(signal.ITIMER_REAL, 0.005) if place == {who} and number == 20 else None)
"""
    ran, seconds = launch(tmp_path, _PLAIN + text)
    assert_failed(ran, seconds, "SIGKILL", f"process {who}")


@pytest.mark.slow
def test_a_stage_whose_computation_fails_ends_all(tmp_path: Path) -> None:
    """The error comes out of a compiled program, after it was issued."""
    text = """
steps(step, lambda number: broken.append(number) if place == 1 and number == 20 else None)
"""
    ran, seconds = launch(tmp_path, _CHECKED + text)
    assert_failed(ran, seconds, "the activations of a stage are not finite", "process 1")


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_and_is_named(tmp_path: Path) -> None:
    """It lives, so neither the launcher nor JAX's heartbeats have anything against it."""
    text = """
steps(step, lambda number: time.sleep(1000) if place == 1 and number == 20 else None)
"""
    ran, seconds = launch(tmp_path, _PLAIN + text, STEP_TIMEOUT="3")
    assert_failed(ran, seconds, "process 0", "nothing for 3 s", "with process 1", "stage 1 to stage 2")


@pytest.mark.slow
def test_ctrl_c_ends_a_pipeline(tmp_path: Path) -> None:
    script = write_script(tmp_path, _HEAD + _PLAIN + "steps(step)")
    command = ["-m", "meshwright", "launch", "--processes", "2", "--devices-per-process", "1"]
    with started(*command, "--log-dir", tmp_path, script, **_CPU) as launcher:
        pids = marked(tmp_path, "running-0", "running-1")
        launcher.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, errors = launcher.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - begun < ENDING_SECONDS
    assert launcher.returncode == 128 + signal.SIGINT
    assert "SIGINT" in errors
    assert not any(map(alive, pids))


# Nobody watches


def by_hand(folder: Path, text: str, numbers: Sequence[int], stack: ExitStack, **more: str) -> list[subprocess.Popen]:
    """Processes of a run of two, started without a launcher."""
    script = write_script(folder, _HEAD + text)
    with hold_port(None) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    environment = {"MESHWRIGHT_COORDINATOR": address, "MESHWRIGHT_PROCESSES": "2", "XLA_FLAGS": "", **_CPU, **more}
    return [
        stack.enter_context(started(script, MESHWRIGHT_PROCESS_ID=str(number), **environment)) for number in numbers
    ]


@pytest.mark.slow
def test_without_a_launcher_a_hanging_process_ends(tmp_path: Path) -> None:
    text = """
steps(step, lambda number: time.sleep(1000) if place == 1 and number == 20 else None)
"""
    with ExitStack() as stack:
        first, second = by_hand(tmp_path, _PLAIN + text, (0, 1), stack, STEP_TIMEOUT="3")
        _, errors = first.communicate(timeout=LIMIT_SECONDS)
        assert first.returncode == 1
        assert "refused to go on: got nothing for 3 s" in errors
        assert "with process 1" in errors
        second.wait(ENDING_SECONDS)
        assert second.returncode == 1


@pytest.mark.slow
def test_without_a_launcher_a_killed_process_ends_the_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = by_hand(tmp_path, _PLAIN + "steps(step)", (0, 1), stack)
        marked(tmp_path, "running-0", "running-1")
        second.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        _, errors = first.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - begun < ENDING_SECONDS
        assert first.returncode != 0
        assert "process 1 (" in errors


def test_a_coordinator_that_never_comes(tmp_path: Path) -> None:
    """Process 1 waits for process 0, for as long as it was told."""
    text = """
mw.initialize(timeout_seconds=2)
"""
    script = write_script(tmp_path, "import meshwright as mw" + text)
    with hold_port(None) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    place = {"MESHWRIGHT_COORDINATOR": address, "MESHWRIGHT_PROCESSES": "2", "MESHWRIGHT_PROCESS_ID": "1"}
    begun = time.monotonic()
    with started(script, **place, **_CPU) as process:
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert time.monotonic() - begun < ENDING_SECONDS
    assert process.returncode == 1
    assert f"no coordinator at {address}" in errors


# Plans for others


_TO_BE_REFUSED = """
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
try:
    mw.parallelize(plain_step, plan={plan!r})(state, x)
except mw.PlanError as error:
    print("refused in process", place, ":", error)
    assert not any("backend_compile" in name for name in compiled), compiled
"""


@pytest.mark.parametrize(("planned", "processes"), [(4, 2), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_plan_for_other_processes_is_refused_in_each(tmp_path: Path, planned: int, processes: int) -> None:
    """Before anything is compiled."""
    plan = tmp_path / "plan.json"
    make = f"""
mw.plan_for(plain_step, (state, x), stages=2, microbatches=2).plan.save({str(plan)!r})
"""
    with started(
        write_script(tmp_path, _HEAD + make, "planning.py"), **_CPU,
        XLA_FLAGS=f"--xla_force_host_platform_device_count={planned * 2}",
    ) as process:  # fmt: skip
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, errors
    ran = run(
        write_script(tmp_path, _HEAD + _TO_BE_REFUSED.format(plan=str(plan))), processes=processes,
        devices_per_process=2, log_dir=tmp_path, timeout_seconds=LIMIT_SECONDS, environment=_CPU,
    )  # fmt: skip
    ran.check()
    for number, process in enumerate(ran.processes):
        assert f"refused in process {number} :" in process.output(), process.output()
        assert not alive(process.pid)


def test_nobody_is_left_in_this_module(tmp_path: Path) -> None:
    """Of what the tests before have started, nothing runs under its script's name."""
    root = str(tmp_path.parent)
    left = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                command = Path(entry.path, "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            left += [entry.name] if root in command and "script.py" in command else []
    wait_until(lambda: not any(alive(int(pid)) for pid in left), f"the end of {left}", ENDING_SECONDS)
