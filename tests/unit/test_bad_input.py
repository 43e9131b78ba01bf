"""What cannot be planned or run is refused in one sentence: what, what was given and needed, where, what to try."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.cluster import ClusterError
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.plan import Plan

PARAMETERS = {"w": jnp.ones((16, 16)), "b": jnp.zeros(12)}
X = jnp.ones((32, 16))


def step(p: Any, x: jax.Array) -> Any:
    loss, gradients = mw.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"]))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), loss


def written_for_32(p: Any, x: jax.Array) -> Any:
    loss, gradients = mw.value_and_grad(lambda p: jnp.mean(x.reshape(32, 16) @ p["w"]))(p)
    return gradients, loss


def plan(*args: Any, of: Callable[..., Any] = step, **options: Any) -> Plan:
    return mw.plan_for(of, args or (PARAMETERS, X), **options).plan


def refusal(error: type[ValueError], *args: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        plan(*args, **options)
    return assert_complete(caught.value)


def assert_complete(error: Exception) -> str:
    text = str(error)
    for part in ("refused ", "got ", "needed ", "where: ", "try"):
        assert part in text, text
    return text


@pytest.mark.parametrize(
    ("batch", "options", "parts"),
    [
        (X, {"microbatches": 3}, ["microbatches=3", "a batch of 32", "args[1]", "microbatches=2, or a batch of 30"]),
        (X[:0], {}, ["an empty batch", "(0, 16)", "args[1]"]),
        (X, {"microbatches": 0}, ["got 0"]),
        (X, {"microbatches": 2.5}, ["got 2.5"]),
        (X, {"batch_axis": "first"}, ["the batch axis", "'first'"]),
        (X, {"batch_axis": 7}, ["the batch axis", "got 7", "2 axes of the array of shape (32, 16)"]),
        (X, {"batch_axis": 2, "microbatches": 2}, ["the batch axis", "got 2"]),
        (X, {"reduction": "average"}, ["'average'", '"mean"']),
        ({"x": X, "name": "first"}, {}, ["str 'first'", "argument[1]['name']"]),
        ({"x": X, "name": np.array(["a", "b"])}, {}, ["argument[1]['name']"]),
        (jnp.tanh, {}, ["tanh", "eqx.partition"]),
        (jax.ShapeDtypeStruct((float("nan"), 16), "float32"), {}, ["nan", "whole numbers"]),
        (jax.ShapeDtypeStruct((-3, 16), "float32"), {}, ["-3", "whole numbers"]),
    ],
)
def test_arguments(batch: Any, options: dict[str, Any], parts: list[str]) -> None:
    text = refusal(PlanError, PARAMETERS, batch, **options)
    for part in parts:
        assert part in text, text


def test_a_step_written_for_one_batch_size() -> None:
    text = refusal(PlanError, PARAMETERS, X, of=written_for_32, microbatches=2)
    assert "at the size of a microbatch" in text
    assert "x.shape[0]" in text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"mesh": "data"}, ["the logical mesh", "'data'"]),
        ({"zero": 4}, ["the ZeRO stage", "got 4"]),
        ({"remat": "some"}, ["'some'"]),
        ({"memory_per_device": float("nan")}, ["nan", "a positive number of bytes"]),
        ({"memory_per_device": -16e9}, ["a positive number of bytes"]),
        ({"memory_per_device": "16GB"}, ["'16GB'", "a positive number of bytes"]),
        ({"preset": 3}, ["the preset", "got int 3"]),
        ({"time_limit_seconds": -1}, ["the time limit", "got -1"]),
        ({"time_limit_seconds": float("nan")}, ["the time limit", "got nan"]),
        ({"time_limit_seconds": "60"}, ["the time limit", "got '60'"]),
        ({"submeshes": "2,2,4"}, ["the submeshes", "(2, 2, 4)"]),
        ({"submeshes": (2, 2.0, 4)}, ["the submeshes", "2.0"]),
        ({"submeshes": (4, 4, 4)}, ["12 devices in all", "the 8 of cluster"]),
        ({"submeshes": (3, 5)}, ["the devices 0 to 2", "a power of two"]),
        ({"submeshes": (4, 4), "stages": 3}, ["2 submeshes and stages=3"]),
        ({"submeshes": (4, 4), "preset": "gpipe(2)"}, ["the submeshes", "gpipe(stages=2"]),
    ],
)
def test_options(options: dict[str, Any], parts: list[str]) -> None:
    text = refusal(PlanError, **options)
    for part in parts:
        assert part in text, text


def test_a_mesh_of_another_number_of_devices() -> None:
    assert "8 devices" in refusal(ClusterError, mesh=(3, 2), stages=1)
    assert "8 devices" in refusal(PlanError, mesh=(3, 2))


@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        ({"*['w']": ("x", "x")}, ["args[0]['w']", "no axis twice"]),
        ({"*['w']": ("x",)}, ["2 dims"]),
        ({"*['w']": ("y", None)}, ["axis 'y'", "axes of the mesh: x"]),
        ({"*['b']": ("x",)}, ["args[0]['b']", "divide"]),
        ({"*['w']": ("x", None), "*'w'*": (None, "x")}, ["args[0]['w']", "2 different layouts"]),
        ({"*['w']": (0, None)}, ["got 0"]),
        ({"*['w']": "x"}, ["the pin", "got 'x'"]),
        ({3: (None, None)}, ["the pin 3"]),
        ({"*kernel*": ("x", None)}, ["'*kernel*'", "matches no input", "args[0]['w']"]),
    ],
)
def test_pins_that_contradict_themselves_or_the_program(pins: Any, parts: list[str]) -> None:
    text = refusal(PlanError, mesh=(8,), pins=pins)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("peak_flops", "peek_flops", "peek_flops"),
        ("memory_bytes = ", "memory_bytes = -", "memory_bytes"),
        ("memory_bytes = ", "memory_bytes = nan # ", "memory_bytes"),
        ("efficiency = ", "# efficiency = ", "efficiency"),
    ],
)
def test_a_cluster_file_with_a_wrong_line(old: str, new: str, part: str, tmp_path: Path) -> None:
    text = mw.load_cluster("p3.16xlarge").to_toml()
    assert old in text
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(old, new, 1))
    message = refusal(ClusterError, cluster=str(file))
    assert part in message
    assert "cluster.toml" in message


# Plans that are given


def test_a_plan_of_another_program() -> None:
    given = plan(mesh=(8,))
    with pytest.raises(PlanError, match="planning again") as caught:
        mw.parallelize(step, plan=given).plan(PARAMETERS, X[:16])
    assert_complete(caught.value)


def test_a_plan_of_another_schema(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan(mesh=(8,)).save(file)
    file.write_text(file.read_text().replace('"schema": ', '"schema": 9', 1))
    with pytest.raises(PlanError, match="schema") as caught:
        mw.load_plan(file)
    assert "plan.json" in assert_complete(caught.value)


def test_a_plan_for_more_devices() -> None:
    given = plan(cluster="p3.16xlarge:2", mesh=(16,))
    with pytest.raises(PlanError, match="8 devices") as caught:
        mw.parallelize(step, plan=given).plan(PARAMETERS, X)
    assert_complete(caught.value)


def test_a_plan_for_another_platform() -> None:
    given = plan(cluster="p3.16xlarge", mesh=(8,))
    assert given.num_devices == 8
    with pytest.raises(PlanError, match=r"8 cpu devices.*V100") as caught:
        mw.parallelize(step, plan=given).plan(PARAMETERS, X)
    assert_complete(caught.value)


def test_a_plan_for_a_cluster_with_other_numbers_is_run_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = plan(mesh=(8,))
    with caplog.at_level(logging.WARNING, "meshwright"):
        mw.parallelize(step, plan=given).plan(PARAMETERS, X)
        assert not caplog.records
        other = dataclasses.replace(given, cluster="another", cluster_fingerprint="another")
        mw.parallelize(step, plan=other).plan(PARAMETERS, X)
    assert ["another" in record.message for record in caplog.records] == [True]


def test_an_argument_that_has_no_position() -> None:
    def keyword_only(p: Any, *, x: jax.Array) -> Any:
        return p, x

    with pytest.raises(PlanError, match="keyword-only") as caught:
        mw.parallelize(keyword_only)(X, x=X)
    assert_complete(caught.value)


def test_microbatches_of_our_own_making_are_not_what_is_refused() -> None:
    """A loss that is neither mean nor sum cannot be cut; the user asked for a plan that fits, and hears of that."""

    def spread(p: Any, x: jax.Array) -> Any:
        loss, gradients = mw.value_and_grad(lambda p: jnp.std(x @ p["w"]))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), loss

    text = refusal(MemoryExceeded, of=spread, memory_per_device=700)
    assert "usable on a device" in text
    assert "more microbatches are out of the question: refused" in text
