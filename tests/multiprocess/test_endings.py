"""A process that ends, or goes another way, while others run steps: all are told which one and why, and end soon."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from launched import ENDING_SECONDS, LIMIT_SECONDS, alive, started, write_script

from meshwright.launch import run
from meshwright.launch.port import hold_port

_SCRIPT = """
import signal, sys, time
import meshwright as mw
mw.initialize(timeout_seconds=60, step_timeout_seconds=float(os.environ.get("STEP_TIMEOUT", "600")))
import jax, jax.numpy as jnp, numpy as np

@mw.parallelize(**{options})
def train(p, x):
    def loss(p):
        hidden = jnp.tanh(x @ p[0])
        mw.layer_boundary()
        return jnp.mean(jnp.tanh(hidden @ p[1]) ** 2)
    value, grads = mw.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

@mw.parallelize
def evaluate(p, x):
    return p, jnp.mean(x)

p, x = [np.eye(16, dtype=np.float32)] * 2, np.ones((16, 16), np.float32)
for number in range(100_000):
    if place == {who} and number == {when}:
        mark("ending")
        {how}
    p, value = train(p, x)
    float(value)
print("all steps done")
"""
_DATA_PARALLEL = "dict(preset='data_parallel()')"
_STAGES = "dict(stages=2, microbatches=2)"

# What process 1 does before its third step, and what is said of it.
_ENDS = {
    "exit": ("sys.exit(0)", ("sys.exit(0)", "train by plan")),
    "raise": ("raise ValueError('no shard 17')", ("ValueError: no shard 17", "script.py:")),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", ("KeyboardInterrupt",)),
    "os._exit": ("os._exit(0)", ("it told nothing",)),
    "status": ("sys.exit(3)", ("sys.exit(3)",)),
    "break": ("break", ("the end of its script", "train by plan")),
}
# In the same way; nobody ends, but there is no call that all make.
_ELSEWHERE = {
    "shapes": ("x = x[:8]", ("args[1] as float32[8, 16] (float32[16, 16] before)", "train by plan")),
    "other step": ("train = evaluate", ("the planning of evaluate", "train by plan")),
    "skipped": ("train(p, x); evaluate(p, x)", ("the planning of evaluate", "train by plan")),
}
_slow = pytest.mark.slow


def _script(folder: Path, how: str, *, options: str = _DATA_PARALLEL, who: int = 1, when: int = 2) -> Path:
    return write_script(folder, _SCRIPT.format(options=options, how=how, who=who, when=when))


def _seconds_since_the_ending(folder: Path) -> float:
    return time.time() - (folder / "ending").stat().st_mtime


def _launched(folder: Path, script: Path, **environment: str) -> list[str]:
    """What two processes print; the run fails, soon after the ending."""
    ran = run(
        script, processes=2, devices_per_process=1, log_dir=folder, timeout_seconds=LIMIT_SECONDS,
        environment={"JAX_PLATFORMS": "cpu", **environment},
    )  # fmt: skip
    assert ran.ended_by == "failure", [process.output() for process in ran.processes]
    assert _seconds_since_the_ending(folder) < ENDING_SECONDS
    assert not any(alive(process.pid) for process in ran.processes)
    said = [process.output() for process in ran.processes]
    assert not any("Check failure stack trace" in text for text in said), said
    return said


def _by_hand(folder: Path, script: Path) -> list[tuple[int, str]]:
    """Status and errors of two processes that nobody watches, which end soon after the ending."""
    with hold_port() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    environment = {
        "MESHWRIGHT_COORDINATOR": address,
        "MESHWRIGHT_PROCESSES": "2",
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = [
            stack.enter_context(started(script, MESHWRIGHT_PROCESS_ID=str(number), **environment))
            for number in range(2)
        ]
        errors = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in processes]
    assert _seconds_since_the_ending(folder) < ENDING_SECONDS
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def _assert_names_process_1(said: str, *words: str) -> None:
    assert "refused to go on" in said, said
    assert "process 1 (" in said, said
    for word in words:
        assert word in said, said


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (_DATA_PARALLEL, "exit"),
        *(pytest.param(_DATA_PARALLEL, mode, marks=_slow) for mode in ("raise", "interrupt", "os._exit", "status")),
        *(pytest.param(_STAGES, mode, marks=_slow) for mode in ("exit", "raise", "os._exit")),
    ],
)
def test_a_process_that_ends_is_named_in_the_other(tmp_path: Path, options: str, mode: str) -> None:
    how, words = _ENDS[mode]
    said = _launched(tmp_path, _script(tmp_path, how, options=options))
    _assert_names_process_1(said[0], *words)


@_slow
@pytest.mark.parametrize("options", [_DATA_PARALLEL, _STAGES])
@pytest.mark.parametrize("mode", _ELSEWHERE)
def test_a_process_that_goes_another_way_is_named_in_both(tmp_path: Path, options: str, mode: str) -> None:
    how, words = _ELSEWHERE[mode]
    for said in _launched(tmp_path, _script(tmp_path, how, options=options)):
        _assert_names_process_1(said, *words)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (_DATA_PARALLEL, "shapes"),
        *(pytest.param(_DATA_PARALLEL, mode, marks=_slow) for mode in ("raise", "break", "other step")),
        pytest.param(_STAGES, "break", marks=_slow),
    ],
)
def test_without_a_launcher_too(tmp_path: Path, options: str, mode: str) -> None:
    """By status 1, and not by SIGABRT from inside of JAX."""
    how, words = (_ENDS | _ELSEWHERE)[mode]
    ended = _by_hand(tmp_path, _script(tmp_path, how, options=options))
    assert [status for status, _ in ended] == [1, 1], ended
    _assert_names_process_1(ended[0][1], *words)


@_slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_without_a_launcher_one_that_tells_nothing(tmp_path: Path, how: str, who: int) -> None:
    ended = _by_hand(tmp_path, _script(tmp_path, how, who=who))
    status, error = ended[1 - who]
    assert status != 0
    # Of process 0 JAX tells as well, by SIGABRT, if it is the first.
    assert f"process {who} (" in error or (who == 0 and "leader task" in error), error


@_slow
def test_steps_that_wait_for_nobody_are_counted(tmp_path: Path) -> None:
    """The other process never waits for the one that ends, and would go on to its own end."""
    for said in _launched(tmp_path, _script(tmp_path, "break", options="dict()")):
        _assert_names_process_1(said, "as many steps in every process")


@_slow
@pytest.mark.parametrize("options", [_DATA_PARALLEL, _STAGES])
@pytest.mark.parametrize("how", ["time.sleep(1000)", "while True: pass"])
def test_a_process_that_does_not_come_is_named_when_the_time_is_over(tmp_path: Path, options: str, how: str) -> None:
    said = _launched(tmp_path, _script(tmp_path, how, options=options), STEP_TIMEOUT="4")
    _assert_names_process_1(
        said[0].replace("to wait any longer", "to go on"), "nothing for 4 s", "has not come to call"
    )


@_slow
def test_a_first_batch_of_another_size_is_an_error_in_both(tmp_path: Path) -> None:
    script = _script(tmp_path, "x = x[:8]", when=0)
    for status, error in _by_hand(tmp_path, script):
        assert status == 1
        assert "PlanError: refused to plan the step: got args[1] as float32[" in error, error


@_slow
@pytest.mark.parametrize("options", [_DATA_PARALLEL, _STAGES])
def test_processes_that_end_at_different_times_end_well(tmp_path: Path, options: str) -> None:
    script = _script(tmp_path, "mark('late')", options=options)
    script.write_text(script.read_text().replace("100_000", "4") + "\nif place == 0: time.sleep(8)\n")
    ran = run(
        script, processes=2, devices_per_process=1, log_dir=tmp_path, timeout_seconds=LIMIT_SECONDS,
        environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    ran.check()
    assert all("all steps done" in process.output() for process in ran.processes)
    assert not any("meshwright: " in process.output() for process in ran.processes)


@_slow
def test_an_error_after_the_last_step_ends_those_that_are_done(tmp_path: Path) -> None:
    script = _script(tmp_path, "mark('late')")
    text = script.read_text().replace("100_000", "4")
    script.write_text(
        text + "\nif place == 0:\n    time.sleep(3)\n    mark('ending')\n    raise OSError('disk full')\n"
    )
    (first, _), (status, error) = _by_hand(tmp_path, script)
    assert (first, status) == (1, 1)
    assert "process 0 (" in error
    assert "OSError: disk full" in error
