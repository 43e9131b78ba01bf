"""Search methods at the front doors: prices are the planner's, plans are checked, and all methods stand in a table."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from meshwright import cli, zoo
from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.planning.checks import request_of
from meshwright.planning.method import choice_words, space_of
from meshwright.planning.plan_for import plan_for
from meshwright.planning.refine import Refinement
from meshwright.planning.request import PlanOptions
from meshwright.program.traces import traces_of
from meshwright.report.curves import Curve, curves_svg
from meshwright.search.rivals import Budget, search_named
from meshwright.search.space.space import Space
from meshwright.searches import Searched, run_searches, searches_document, searches_svg, searches_text

CLUSTER = load_cluster("rtx4090-4")


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_looked_for_in_what_these_tests_make() -> Iterator[None]:
    """Between two methods; what other tests have left is large."""
    gc.freeze()
    yield
    gc.unfreeze()


def small() -> Any:
    target = zoo.mlp(width=64, layers=3, batch=16)
    return target.step, (target.example_state, target.example_batch)


def space(name: str, stages: int | None, **options: Any) -> tuple[Space, Any]:
    """The space of a reference model, and the model."""
    target = zoo.build(name, global_batch=8)
    args = target.example_state, target.example_batch
    asked_for = PlanOptions(cluster=CLUSTER, stages=stages, microbatches=2, **options)
    asked = request_of(traces_of(target.step), args, asked_for, started=0.0)
    return space_of(asked), target


DEAR = {("gpt-tiny", "none", 2), ("gpt-tiny", "layer", 1), ("gpt-tiny", "none", 1)}


@pytest.mark.parametrize(
    ("remat", "stages", "name"),
    [
        pytest.param(remat, stages, name, marks=[pytest.mark.slow] * ((name, remat, stages) in DEAR))
        for name in ("mlp-tiny", "gpt-tiny")
        for stages in (1, 2)
        for remat in ("none", "layer")
    ],
)
def test_a_plan_of_the_default_search_has_its_price_in_the_space(name: str, stages: int, remat: str) -> None:
    of, target = space(name, stages, remat=remat)
    args = target.example_state, target.example_batch
    planned = plan_for(target.step, args, cluster=CLUSTER, stages=stages, microbatches=2, remat=remat)
    *_, found = search_named("hierarchical").run(of, Budget())
    assert found.seconds == pytest.approx(planned.step_seconds, rel=1e-9)
    made = of.plan(found.choice)
    assert made is not None
    plan, _ = made
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(found.seconds, rel=1e-9)
    assert [stage.mesh for stage in plan.stages] == [stage.mesh for stage in planned.plan.stages]
    assert [stage.equations for stage in plan.stages] == [stage.equations for stage in planned.plan.stages]
    assert "2 microbatches" in choice_words(of, found.choice)


def test_a_plan_by_a_method_says_so_and_fits() -> None:
    step, args = small()
    planned = plan_for(step, args, cluster=CLUSTER, method="recursive", time_limit_seconds=5)
    assert "found by the search method recursive" in planned.plan.notes
    assert planned.considered
    assert all(stage.memory.total <= stage.memory_limit_bytes for stage in planned.plan.stages)
    default = plan_for(step, args, cluster=CLUSTER, method="hierarchical")
    assert default.plan == plan_for(step, args, cluster=CLUSTER).plan
    assert default.step_seconds <= planned.step_seconds * (1 + 1e-9)


def test_a_plan_that_turns_out_too_large_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = small()
    fits, answers = Refinement._fits, [False, True]
    monkeypatch.setattr(Refinement, "_fits", lambda *given: fits(*given) and answers.pop(0))
    plan_for(step, args, cluster=CLUSTER, method="recursive", time_limit_seconds=2)
    assert not answers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "annealing"}, "one of hierarchical"),
        ({"method": "mcmc", "preset": "data_parallel"}, "preset="),
        ({"method": "mcmc", "refine": "measure"}, "refine="),
        ({"method": "mcmc", "schedule": "pipedream"}, "pipedream"),
        ({"method": "exhaustive"}, "at most"),
        ({"method": "ilp", "memory_per_device": 1000.0}, "ilp"),
    ],
)
def test_what_a_method_cannot_do_is_refused(options: Any, said: str) -> None:
    step, args = small()
    with pytest.raises(PlanError, match=said):
        plan_for(step, args, cluster=CLUSTER, time_limit_seconds=1, **options)


def test_a_step_without_a_marked_loss_is_refused() -> None:
    def step(weights: Any, x: Any) -> Any:
        return weights, jnp.sum(x @ weights)

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(PlanError, match="a search method for this step"):
        plan_for(step, args, cluster=CLUSTER, method="mcmc")


@pytest.fixture(scope="module")
def searched() -> tuple[Searched, ...]:
    step, args = small()
    wanted = ["exhaustive", "recursive", "mcmc", "hierarchical"]
    return run_searches(step, args, cluster=CLUSTER, methods=wanted, time_limit_seconds=0.5, microbatches=1)


def test_the_fastest_comes_first_and_what_does_not_apply_says_why(searched: tuple[Searched, ...]) -> None:
    assert [one.step_seconds for one in searched] == sorted(one.step_seconds for one in searched)
    last = searched[-1]
    assert (last.name, last.points) == ("exhaustive", ())
    assert "more than 10^" in last.reason
    for one in searched[:-1]:
        assert one.evaluations >= 1
        assert one.plan
        assert one.points[0].after_seconds <= one.best_after_seconds <= one.points[-1].after_seconds <= one.seconds
        assert 0 < one.lower_bound <= searched[0].step_seconds


def test_the_table_and_the_document_have_every_method(searched: tuple[Searched, ...]) -> None:
    text = searches_text(searched)
    assert "No plan takes less than" in text
    assert "exhaustive: refused" in text.split("Without a plan:")[1]
    document = json.loads(json.dumps(searches_document("mlp", searched)))
    assert [one["name"] for one in document["methods"]] == [one.name for one in searched]
    assert all((one["step_seconds"] is None) == (one["reason"] is not None) for one in document["methods"])


def test_the_picture_has_a_curve_for_each_method_that_found_something(searched: tuple[Searched, ...]) -> None:
    picture = ElementTree.fromstring(searches_svg("mlp <and> more", searched))
    tags = [one.tag.split("}")[1] for one in picture.iter()]
    assert tags.count("polyline") == sum(bool(one.points) for one in searched)
    texts = [one.text or "" for one in picture.iter() if one.tag.endswith("text")]
    assert "mlp <and> more" in texts
    for one in searched:
        assert any(text.startswith(one.name) for text in texts) == bool(one.points)


def test_the_bound_is_a_dashed_line_where_it_is_in_sight() -> None:
    curve = Curve(name="a", points=((0.5, 4.0), (2.0, 2.0)), ends=10.0)
    assert "lower bound 1.9" in curves_svg("t", [curve], x_title="x", y_title="y", floor=1.9)
    assert "lower bound" not in curves_svg("t", [curve], x_title="x", y_title="y", floor=0.1)
    assert "<polyline" not in curves_svg("t", [], x_title="x", y_title="y")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_prints_one_json_object_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "searches.svg"
    status, out, _ = run(
        capsys, "searches", "mlp-tiny", "--cluster", "rtx4090-4", "--microbatches", "1", "--time-limit", "0.5",
        "--methods", "recursive, bfs", "--json", "--out", str(picture),
    )  # fmt: skip
    assert status == 0
    assert {one["name"] for one in json.loads(out)["methods"]} == {"recursive", "bfs"}
    assert picture.read_text().startswith("<svg")


def test_the_command_refuses_in_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("searches", "mlp-tiny", "--cluster", "rtx4090-4", "--microbatches", "1", "--time-limit", "0.2")
    status, out, err = run(capsys, *argv, "--methods", "none")
    assert (status, out) == (2, "")
    assert "one of hierarchical" in err
    missing = str(tmp_path / "missing" / "searches.svg")
    status, _, err = run(capsys, *argv, "--methods", "recursive", "--out", missing)
    assert status == 2
    assert "a file to write" in err


def test_plan_takes_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("plan", "mlp-tiny", "--cluster", "rtx4090-4", "--microbatches", "2", "--time-limit", "2")
    status, out, _ = run(capsys, *argv, "--method", "dynamic_programming")
    assert status == 0
    assert "found by the search method dynamic_programming" in out
