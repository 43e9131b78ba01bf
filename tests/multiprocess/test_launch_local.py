"""Local processes as one run: what each sees, what is kept of it, and that all end together, whoever fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from launched import ENDING_SECONDS, LIMIT_SECONDS, alive, command_line, marked, started, wait_until, write_script

from meshwright.launch import LaunchError, local, run
from meshwright.launch.process import LocalProcess

# Processes that wait for ever and, as JAX does, take no notice of SIGTERM.
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark(f"process-{place}")
    print("waiting", flush=True)
    if place != 1: time.sleep(1000)
    while not all(pathlib.Path(__file__).with_name(f"process-{other}").exists() for other in (0, 2)): time.sleep(0.01)
"""


def test_each_process_sees_its_place_and_the_script_as_python_shows_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import json, sys
        names = "MESHWRIGHT_COORDINATOR", "MESHWRIGHT_PROCESSES", "XLA_FLAGS", "SAID"
        seen = [__name__, __file__, sys.argv, sys.path[0], sys.stdin.read(), *(os.environ[name] for name in names)]
        print(json.dumps([place, *seen]))
        """,
    )
    lines: list[str] = []
    result = run(
        script, ["--steps", "3"], processes=3, devices_per_process=2, timeout_seconds=LIMIT_SECONDS,
        environment={"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8", "SAID": "so"}, tell=lines.append,
    )  # fmt: skip
    result.check()
    assert (result.ended_by, result.exit_status, result.failed) == ("itself", 0, None)
    assert [process.process_id for process in result.processes] == [0, 1, 2]
    seen = [json.loads(process.output()) for process in result.processes]
    assert [place for place, *_ in seen] == [0, 1, 2]
    name, file, argv, folder, stdin, coordinator, processes, flags, said = seen[0][1:]
    assert (name, file, argv) == ("__main__", str(script), [str(script), "--steps", "3"])
    assert (folder, stdin) == (str(tmp_path), "")
    assert (processes, said) == ("3", "so")
    assert flags.split()[0] == "--a=1"
    assert flags.split()[-1] == "--xla_force_host_platform_device_count=2"
    assert coordinator.startswith("127.0.0.1:")
    assert len({place[6] for place in seen}) == 1
    assert sorted(line[:4] for line in lines) == ["[0] ", "[1] ", "[2] "]


def test_logs_are_complete_and_lines_are_told_whole(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import subprocess, sys
        for line in range(20_000): print(place, "line", line, "x" * 60, file=sys.stdout if line % 2 else sys.stderr)
        subprocess.run(["echo", "from a child"])
        os.write(1, b"not \\xff text, and no end of line")
        os._exit(0)
        """,
    )
    lines: list[str] = []
    result = run(
        script, processes=2, log_dir=tmp_path / "logs" / "deep", timeout_seconds=LIMIT_SECONDS, tell=lines.append
    )
    result.check()
    for process in result.processes:
        assert process.log == tmp_path / "logs" / "deep" / f"process-{process.process_id}.log"
        expected = [f"{process.process_id} line {line} {'x' * 60}" for line in range(20_000)]
        expected += ["from a child", "not \ufffd text, and no end of line"]
        assert process.output().split("\n") == expected
        assert [line[4:] for line in lines if line.startswith(f"[{process.process_id}]")] == expected


def test_an_old_log_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "process-0.log").write_text("old " * 1000)
    result = run(write_script(tmp_path, "print('new')"), processes=1, log_dir=tmp_path)
    assert result.processes[0].output() == "new\n"


@pytest.mark.parametrize(
    ("last", "status", "shown"),
    [
        ("raise ValueError('this is why')", 1, "ValueError: this is why"),
        pytest.param("raise SystemExit(7)", 7, "status 7", marks=pytest.mark.slow),
        pytest.param("raise SystemExit('a text')", 1, "a text", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        pytest.param("os.abort()", 134, "was killed by SIGABRT", marks=pytest.mark.slow),
    ],
)
def test_one_that_fails_ends_all(tmp_path: Path, last: str, status: int, shown: str) -> None:
    script = write_script(tmp_path, STUBBORN + f"\n    mark('failing')\n    {last}\n")
    result = run(script, processes=3, timeout_seconds=LIMIT_SECONDS)
    took = time.time() - (tmp_path / "failing").stat().st_mtime
    assert took < ENDING_SECONDS
    assert (result.ended_by, result.exit_status) == ("failure", status)
    assert result.failed is result.processes[1]
    assert [process.ended_by_launcher for process in result.processes] == [True, False, True]
    assert [process.exit_status for process in result.processes] == [137, status, 137]
    assert not any(alive(process.pid) for process in result.processes)
    with pytest.raises(LaunchError) as caught:
        result.check()
    assert shown in str(caught.value)
    assert "process 1 " in str(caught.value)
    assert str(result.failed.log) in str(caught.value)


@pytest.mark.parametrize("consequence", ["sys.exit('the consequence')", "time.sleep(0.2); os.kill(os.getpid(), 11)"])
def test_the_first_to_fail_is_named_where_another_is_gone_before_it(tmp_path: Path, consequence: str) -> None:
    """Process 1 meets an error and prints it for half a second; process 0 fails of that, and ends at once."""
    script = write_script(
        tmp_path,
        f"""
        import sys, time
        def slow(kind, error, traceback):
            mark("printing")
            time.sleep(0.5)
            print(error)
        sys.excepthook = slow
        if place == 1:
            raise ValueError("the cause")
        while not os.path.exists({str(tmp_path / "printing")!r}):
            time.sleep(0.01)
        {consequence}
        """,
    )
    result = run(script, processes=2, timeout_seconds=LIMIT_SECONDS)
    assert result.failed is result.processes[1]
    assert "the cause" in str(result.problem)
    assert [process.ended_by_launcher for process in result.processes] == [False, False]


def test_a_traceback_starts_in_the_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, "def deep():\n    raise ValueError('why')\ndeep()")
    result = run(script, processes=1)
    assert result.processes[0].output().startswith(f'Traceback (most recent call last):\n  File "{script}"')
    script.write_text("this is no Python\n")
    assert "SyntaxError" in run(script, processes=1).processes[0].output()


def test_a_timeout_names_who_still_ran(tmp_path: Path) -> None:
    result = run(write_script(tmp_path, STUBBORN), processes=3, timeout_seconds=2.0)
    assert (result.ended_by, result.exit_status, result.failed) == ("timeout", 124, None)
    assert 2.0 <= result.seconds < 2.0 + ENDING_SECONDS
    problem = str(result.problem)
    assert "process 0, 2 still running" in problem
    assert "process-0.log" in problem
    assert problem.endswith("waiting")


def test_what_a_script_started_ends_with_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import subprocess
        mark("worker", subprocess.Popen(["sleep", "1000"]).pid)
        """,
    )
    run(script, processes=1, timeout_seconds=LIMIT_SECONDS).check()
    [worker] = marked(tmp_path, "worker")
    wait_until(lambda: not alive(worker), "the worker to end")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_stopped_launcher_ends_all(tmp_path: Path, number: int, status: int) -> None:
    script = write_script(tmp_path, STUBBORN.replace("place != 1", "True"))
    with started("-m", "meshwright", "launch", "--processes", "2", script) as launcher:
        pids = marked(tmp_path, "process-0", "process-1")
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=ENDING_SECONDS)
    assert launcher.returncode == status
    assert signal.Signals(number).name in errors
    assert not any(alive(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    worker = '    import subprocess; mark(f"worker-{place}", subprocess.Popen(["sleep", "1000"]).pid)'
    script = write_script(tmp_path, worker + STUBBORN.replace("place != 1", "True"))
    with started("-m", "meshwright", "launch", "--processes", "3", script) as launcher:
        pids = marked(tmp_path, "process-0", "process-1", "process-2")
        assert all(alive(pid) for pid in pids)
        pids += marked(tmp_path, "worker-0", "worker-1", "worker-2")
        launcher.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), "the processes to end", ENDING_SECONDS)


def test_an_error_while_telling_ends_all(tmp_path: Path) -> None:
    def refuse(line: str) -> None:
        raise BrokenPipeError(line)

    script = write_script(tmp_path, STUBBORN)
    with pytest.raises(BrokenPipeError, match="waiting"):
        run(script, processes=2, timeout_seconds=LIMIT_SECONDS, tell=refuse)
    pids = [int(path.read_text()) for path in tmp_path.glob("process-?")]
    assert pids
    assert not any(alive(pid) for pid in pids)


def test_one_that_cannot_be_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(local, "_KILLED_SECONDS", 0.2)
    stuck: list[LocalProcess] = []
    monkeypatch.setattr(LocalProcess, "signal", lambda self, number: stuck.append(self))
    script = write_script(tmp_path, "import time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    lines: list[str] = []
    with pytest.raises(LaunchError, match=r"process 0 \(pid \d+\) still there 0.2 s after SIGKILL"):
        run(script, processes=1, timeout_seconds=1.0, tell=lines.append)
    # The guard has the last word.
    wait_until(lambda: not alive(int(lines[0].removeprefix("[0] "))), "the process to end")
    assert stuck[0].reap().status == -signal.SIGKILL


def test_it_runs_beside_the_main_thread_and_leaves_signals_as_they_were(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    descriptors = len(os.listdir("/proc/self/fd"))
    script = write_script(tmp_path, "print('hello')")
    results = []
    thread = threading.Thread(target=lambda: results.append(run(script, processes=1)))
    thread.start()
    thread.join(LIMIT_SECONDS)
    results.append(run(script, processes=1))
    assert [result.processes[0].output() for result in results] == ["hello\n"] * 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_command_line_shows_lines_errors_and_logs(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import sys\nprint('got', *sys.argv[1:], flush=True)\nif '--fail' in sys.argv: sys.exit(5)"
    )
    good = command_line("--processes", "2", "--log-dir", tmp_path / "logs", script, "--steps", "3", "--", "-x")
    assert good.returncode == 0, good.stderr
    assert sorted(good.stdout.splitlines()) == ["[0] got --steps 3 -- -x", "[1] got --steps 3 -- -x"]
    assert str(tmp_path / "logs") in good.stderr
    wrong = command_line("--proceses", "2", script)
    assert wrong.returncode == 2
    assert "--proceses" in wrong.stderr
    bad = command_line(script, "--fail")
    assert bad.returncode == 5
    assert "process 0 " in bad.stderr
    assert "status 5" in bad.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"script": "missing.py"}, ("missing.py", "no such file")),
        ({"script": "."}, ("no file",)),
        ({"processes": 0}, ("0", "whole number >= 1", "--processes")),
        ({"processes": -2}, ("-2", "--processes")),
        ({"devices_per_process": 0}, ("--devices-per-process",)),
        ({"timeout_seconds": 0.0}, ("--timeout",)),
        ({"timeout_seconds": float("nan")}, ("--timeout",)),
        ({"port": 70000}, ("port 70000", "no port")),
        ({"log_dir": __file__}, ("folder", "--log-dir")),
    ],
)
def test_what_cannot_start_is_refused(tmp_path: Path, wrong: dict, words: tuple[str, ...]) -> None:
    script = write_script(tmp_path, "mark('ran')")
    with pytest.raises(LaunchError) as caught:
        run(**{"script": script, "processes": 1, **wrong})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    script = write_script(tmp_path, "mark('ran')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .* already listens"):
            run(script, processes=2, port=port)
        refused = command_line("--port", str(port), script)
    assert refused.returncode == 2
    assert f"port {port}" in refused.stderr
    # Taken by somebody who does not listen yet.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .*in use"):
            run(script, processes=2, port=port)
    assert not (tmp_path / "ran").exists()
