"""The command line: its arguments, its refusals, and the JSON of `plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import __version__, cli, cli_values
from meshwright.errors import PlanError
from meshwright.plan.io import load_plan
from meshwright.targets import TargetError, load_target

SRC = Path(cli.__file__).parents[1]

# A module that prints, as users' modules do, and whose step has a state.
MODULE = """
import jax, jax.numpy as jnp
import meshwright as mw
print("a user's own line")

def make(global_batch=16):
    def step(w, x):
        loss, grad = mw.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss
    return step, (jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((global_batch, 32), "float32"))

def fixed():
    return make()

def wrong():
    return 1
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "user_step.py"
    path.write_text(MODULE)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    ("text", "size"),
    [("16e9", 16e9), ("16GB", 16e9), ("15GiB", 15 * 2.0**30), ("512 mib", 2.0**29), ("1.5Gi", 1.5 * 2**30), ("7", 7.0)],
)
def test_sizes(text: str, size: float) -> None:
    assert cli_values.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "16 giga", "GB", "", "1e999", "16iB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="memory of a device"):
        cli_values.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [("8", (8,)), ("2,4", (2, 4)), ("2, 2, 2", (2, 2, 2)), ("data=2,model=4", {"data": 2, "model": 4})],
)
def test_meshes(text: str, mesh: object) -> None:
    assert cli_values.parse_mesh(text) == mesh


@pytest.mark.parametrize("text", ["", "0,8", "2,-4", "2,model=4", "a=2,a=4", "2,2,2,1", "x", "=8"])
def test_meshes_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="logical mesh"):
        cli_values.parse_mesh(text)


@pytest.mark.parametrize("text", ["", "2,", "2,0", "2;2", "2,-2", "two"])
def test_submeshes_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="the submeshes"):
        cli_values.parse_submeshes(text)


def test_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    cli.provide_devices(4)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    cli.provide_devices(2)
    assert os.environ["XLA_FLAGS"].endswith("=4")
    monkeypatch.setenv("XLA_FLAGS", "--other")
    cli.provide_devices(2)
    assert os.environ["XLA_FLAGS"] == "--other --xla_force_host_platform_device_count=2"


def test_help_needs_no_jax() -> None:
    code = (
        "import sys\nfrom meshwright import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "verify" in ran.stdout
    assert ran.stdout.split()[-2:] == ["False", "False"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"meshwright {__version__}\n", "")


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models")
    assert status == 0
    assert "gpt-tiny" in out.split()
    assert "Grattafiori" in out
    status, out, _ = run(capsys, "models", "--json")
    assert status == 0
    llamas = {entry["name"]: entry for entry in json.loads(out)["llama"]}
    assert llamas["llama3-8b"]["parameters"] == 8_030_261_248
    # Six FLOPs a parameter, those of the embedding less, and attention's.
    assert llamas["llama3-8b"]["flops"] == pytest.approx(6 * 8.03e9, rel=0.25)
    assert llamas["llama3-8b"]["unit"] == "token"
    status, out, _ = run(capsys, "clusters")
    assert status == 0
    assert "p3.16xlarge" in out


def test_plan_as_json(capsys: pytest.CaptureFixture[str], module: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    options = ["--global-batch", "64", "--microbatches", "2", "--mesh", "data=2,model=4", "--memory-per-device", "1GiB"]
    status, out, err = run(
        capsys, "plan", f"{module}:make", "--cluster", "cpu", *options, "--out", str(saved), "--json"
    )
    assert status == 0, err
    assert "a user's own line" in err
    found = json.loads(out)
    assert set(found) >= {"planning", "predicted", "microbatches", "schedule", "stages"}
    assert set(found["planning"]) == {"seconds", "trace_seconds", "solve_seconds", "optimality_gap"}
    assert set(found["predicted"]) >= {"step_seconds", "tflops_per_device"}
    assert found["microbatches"] == 2
    (stage,) = found["stages"]
    assert stage["mesh"] == {"data": 2, "model": 4}
    assert stage["devices"] == list(range(8))
    assert stage["memory_limit_bytes"] == 2**30
    (rank,) = found["why"]["ranks"]
    spent = sum(seconds for name, seconds in rank.items() if name.endswith("_seconds"))
    assert spent == pytest.approx(found["predicted"]["step_seconds"], rel=1e-6)
    memory = stage["memory_bytes"]
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))
    assert memory["parameters"] > 0
    plan = load_plan(saved)
    assert plan.program == found["program"]
    assert {c.kind: c.bytes for c in plan.stages[0].communication} == stage["communication_bytes"]


def test_a_plan_of_stages_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "p3.16xlarge:2", "--stages", "2", "--microbatches", "4", "--json"]
    status, out, err = run(capsys, "plan", "gpt-tiny", *options)
    assert status == 0, err
    found = json.loads(out)
    assert 0 < found["predicted"]["bubble_fraction"] < 1
    first, last = found["stages"]
    assert [*first["devices"], *last["devices"]] == list(range(16))
    assert (first["layers"][0], first["layers"][1]) == (0, last["layers"][0])
    for stage in (first, last):
        assert stage["hosts"]
        assert stage["seconds_forward"] > 0
        assert stage["seconds_backward"] > 0
        assert stage["remat"] in ("none", "selective", "layer")
    assert first["seconds_forward"] < first["seconds_backward"]
    assert sum(s["seconds_forward"] for s in (first, last)) < sum(s["seconds_backward"] for s in (first, last))
    # A rank keeps more microbatches the earlier it is.
    assert 4 >= first["in_flight"] > last["in_flight"] >= 1
    assert found["transfers"]
    for transfer in found["transfers"]:
        assert (transfer["source"], transfer["target"]) == (0, 1)
        assert transfer["bytes"] > 0
        assert transfer["forward_seconds"] > 0
    work = max(4 * (s["seconds_forward"] + s["seconds_backward"]) for s in (first, last))
    assert found["predicted"]["step_seconds"] > work


def test_plan_as_text(capsys: pytest.CaptureFixture[str], module: Path) -> None:
    status, out, err = run(capsys, "plan", f"{module}:fixed", "--cluster", "cpu:1", "--mesh", "8")
    assert (status, err) == (0, "")
    assert "mesh: x=8" in out
    assert "Planned in" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "gptt-tiny"], "did you mean 'gpt-tiny'"),
        (["plan", "mlp-tiny", "--cluster", "cpu:0"], "whole number"),
        (["plan", "mlp-tiny", "--cluster", "nowhere.toml"], "cannot be read"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--memory-per-device", "1kB"], "a plan for 8 x cpu"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--memory-per-device", "lots"], "16GB"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--mesh", "2,x"], "data=2,model=4"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--mesh", "3"], "8"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--zero", "7"], "ZeRO"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--remat", "some"], "rematerialisation"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--microbatches", "3"], "microbatches=3"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--microbatches", "0"], "at least 1"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--stages", "64"], "a layer and a device for each stage"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--stages", "-2"], "a whole number, or auto"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--submeshes", "2,2"], "the 8 of cluster"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--submeshes", "2,x"], "--submeshes 2,2,4"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--time-limit", "inf"], "the time limit"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--refine", "guess"], "refine"),
        (["plan", "mlp-tiny", "--cluster", "p4d.24xlarge:1", "--refine", "measure"], "to measure plans"),
        (["plan", "mlp-tiny", "--cluster", "cpu", "--out", "/nonexistent/plan.json"], "saving a plan"),
        (["verify", "mlp-tiny", "--devices", "4096"], "4096 devices"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_refusal_is_one_message(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("meshwright: refused ")
    assert err.count("\n") == 1
    assert said in err


def test_a_refusal_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    with pytest.raises(TargetError):
        cli.main(["plan", "gptt-tiny"])


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("", {}, "without a function"),
        (":absent", {}, "no function 'absent'"),
        (":wrong", {}, "int from wrong"),
        (":fixed", {"global_batch": 4}, "global batch 4"),
    ],
)
def test_files_that_are_no_targets(module: Path, function: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        load_target(f"{module}{function}", **options)


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    """As one whose function fails: what went wrong, where, and what to try."""
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package\n")
    with pytest.raises(TargetError, match="No module named 'no_such_package'") as refused:
        load_target(f"{file}:make")
    assert str(file) in str(refused.value)
    assert "MESHWRIGHT_DEBUG=1" in str(refused.value)


def test_what_a_file_puts_on_the_path_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may import from there once its function runs."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, other, file = [*sys.path], tmp_path / "other", tmp_path / "places.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(other)!r})\ndef nothing():\n    return None\n")
    with pytest.raises(TargetError):
        load_target(f"{file}:nothing")
    assert sys.path == [str(other), *before]
    # Nor does it matter that a file has taken its own folder away.
    file.write_text("import sys\nsys.path.pop(0)\ndef nothing():\n    return None\n")
    with pytest.raises(TargetError):
        load_target(f"{file}:nothing")
    assert sys.path == [str(other), *before]


def test_a_file_that_is_absent() -> None:
    with pytest.raises(TargetError, match=r"no file nowhere\.py"):
        load_target("nowhere.py:make")
