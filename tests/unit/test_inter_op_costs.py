"""What stages cost: submeshes and transfers, forward and backward apart, estimates beside solved ranges."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright._jax.jaxpr import eliminate_dead_code, inline, open_jaxpr
from meshwright.cluster import Cluster, Device, Host, Link, load_cluster
from meshwright.cost.collective import collective_seconds
from meshwright.errors import PlanError
from meshwright.program.build import build_graph
from meshwright.program.cut import Cutter
from meshwright.program.ladder import ALL
from meshwright.program.rules import Rules
from meshwright.program.staged import StagedProgram, merge_scans, staged_program
from meshwright.program.trace import trace_program
from meshwright.search.inter.problem import Crossing
from meshwright.search.inter.submeshes import Submesh, Submeshes
from meshwright.search.intra.limited import LimitedProblem
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.intra.priced import Priced
from meshwright.search.intra.problem import IntraOpProblem
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.costs import StageCosts, option_of
from meshwright.search.stages.problem import StageProblem
from meshwright.search.stages.repeated_blocks import in_parts
from meshwright.search.stages.solved import better_of
from meshwright.search.stages.solver import Place
from meshwright.solve import Problem, solve
from meshwright.zoo import registry

UNLIMITED = float("inf")


@cache
def program_of(name: str, microbatches: int = 4, batch: int = 8) -> tuple[Any, StagedProgram]:
    target = registry.build(name, global_batch=batch)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=microbatches)
    return program, staged_program(program)


def costs_of(name: str, cluster: str = "cpu", **changes: Any) -> StageCosts:
    program, staged = program_of(name)
    wishes: dict[str, Any] = {"constraints": Constraints(), "remat": "none", **changes}
    return StageCosts(staged, parameters=parameter_infos(program), submeshes=Submeshes(load_cluster(cluster)), **wishes)


def host(devices: int, *, link: float = 100.0, nic: float = 10.0, nics: int = 2) -> Host:
    device = Device(
        kind="toy", peak_flops={"float32": 1e9}, memory_bytes=1e9, memory_bandwidth_bytes_per_second=1e9,
        efficiency=1.0, kernel_launch_seconds=0.0, usable_memory_fraction=1.0,
    )  # fmt: skip
    return Host(
        device=device, devices=devices, link=Link(bandwidth_bytes_per_second=link, latency_seconds=1.0), nics=nics,
        nic=Link(bandwidth_bytes_per_second=nic, latency_seconds=2.0, launch_seconds=3.0),
    )  # fmt: skip


# Submeshes


def test_submeshes_are_parts_of_a_host_or_whole_hosts() -> None:
    pieces = Submeshes(Cluster(name="toy", hosts=(host(4), host(4), host(6))))
    found = {(one.first, one.stop) for one in pieces.all}
    assert {(0, 1), (2, 4), (1, 3), (0, 4), (8, 14), (8, 12), (0, 8), (4, 14), (0, 14)} <= found
    assert not found & {(3, 5), (0, 6), (2, 8), (8, 13), (0, 3)}


def test_what_a_submesh_is_made_of() -> None:
    pieces = Submeshes(Cluster(name="toy", hosts=(host(4), host(4), host(6))))
    assert pieces.kind(Submesh(0, 2)) == pieces.kind(Submesh(5, 7))
    assert pieces.kind(Submesh(0, 4)) != pieces.kind(Submesh(0, 2))
    assert pieces.part(Submesh(4, 14)).num_devices == 10
    assert pieces.hosts(Submesh(4, 14)) == (1, 2)


def test_a_transfer_takes_the_way_it_has() -> None:
    pieces = Submeshes(Cluster(name="toy", hosts=(host(4), host(4, nics=1)), fabric_oversubscription=2.0))
    # Inside a host: two links at 100 bytes/s.
    assert pieces.transfer_seconds(Submesh(0, 2), Submesh(2, 4), 400.0) == 1.0 + 400 / 200
    # Between hosts: one NIC of 10 bytes/s on the smaller side, half of it through the fabric.
    assert pieces.transfer_seconds(Submesh(0, 4), Submesh(4, 8), 400.0) == 3.0 + 2.0 + 400 / 5
    assert pieces.transfer_seconds(Submesh(0, 4), Submesh(4, 8), 0.0) == 0.0


def test_a_submesh_that_is_none_is_refused() -> None:
    pieces = Submeshes(Cluster(name="toy", hosts=(host(4), host(4))))
    for wrong in (Submesh(3, 5), Submesh(0, 3), Submesh(4, 12)):
        with pytest.raises(PlanError) as caught:
            pieces.check(wrong)
        assert "whole hosts" in caught.value.needed
    pieces.check(Submesh(4, 8))


# Forward and backward


def test_without_a_derivative_all_is_forward() -> None:
    """The forward price by itself, against the objective of a program that has no backward pass."""
    target = registry.build("gpt-tiny", global_batch=8)
    program = trace_program(target.step, (target.example_state, target.example_batch))
    graph = build_graph(program.core, Rules())
    cut = Cutter(graph).cut(0, len(open_jaxpr(program.core).eqns))
    for shape in ((8,), (2, 4)):
        cluster = load_cluster("p3.16xlarge")
        problem = StageProblem(
            cut, cut.graph, cluster.logical_mesh(shape), cluster.device, parameters=(), microbatches=4,
            constraints=Constraints(),
            split_dims=(),
        )  # fmt: skip
        chosen = problem.solve(UNLIMITED)
        seconds = problem.seconds(chosen.solution.choices)
        assert 4 * seconds.forward_seconds == pytest.approx(chosen.solution.objective, rel=1e-6)
        assert seconds.backward_seconds == pytest.approx(0.0, abs=1e-6 * seconds.forward_seconds)
        assert seconds.synchronise_seconds == seconds.update_seconds == 0.0


def test_a_whole_program_is_one_stage() -> None:
    """Forward, backward and what happens once a step add up to what the problem of one stage minimises."""
    program, staged = program_of("gpt-tiny")
    cluster = load_cluster("cpu")
    mesh = cluster.logical_mesh((2, 4))

    class Whole(IntraOpProblem):
        is_one_program = False  # as a stage of a pipeline

    whole, summed_last = (
        kind(
            staged.graph, mesh, cluster.device, parameters=parameter_infos(program), microbatches=4,
            constraints=Constraints(),
            carried=0, split_dims=staged.split_dims,
        ).solve(UNLIMITED)
        for kind in (Whole, IntraOpProblem)
    )  # fmt: skip
    # Of the loss three sums of a number less.
    axes = [mesh.axis(name) for name in mesh.axis_names]
    saved = whole.solution.objective - summed_last.solution.objective
    assert 0 < saved <= 3 * collective_seconds("all_reduce", 4.0, axes) * (1 + 1e-9)
    costs = costs_of("gpt-tiny", meshes=[(("x", "y"), (2, 4))])
    options = costs.solve(0, len(staged.layers), Submesh(0, 8), 1)
    best = min(4 * option.seconds + option.per_step_seconds for option in options)
    assert best == pytest.approx(whole.solution.objective, rel=1e-2)
    (option,) = options
    assert 0.4 < option.forward_seconds / option.backward_seconds < 1.1


def gradient_bytes(costs: StageCosts, first: int, last: int) -> float:
    """Of the largest gradient that a range makes in a microbatch."""
    return costs.solver.graph(first, last, 0)[1].gradient_bytes


def test_a_microbatch_makes_its_largest_gradient_beside_the_sum() -> None:
    costs = costs_of("gpt-tiny")
    largest = max(
        costs.program.graph.values[costs.program.graph.inputs[p]].bytes for p in costs.program.graph.parameters
    )
    whole = len(costs.program.layers)
    assert gradient_bytes(costs, 0, whole) == largest
    assert gradient_bytes(costs, 2, 3) < largest  # the embedding is elsewhere
    (option,) = costs_of("gpt-tiny", meshes=[(("x",), (1,))]).solve(0, whole, Submesh(0, 1), 1)
    seconds = option.tag.seconds
    assert option.workspace_bytes == seconds.workspace_bytes > largest
    assert option.constant_bytes == pytest.approx(seconds.constant_bytes + seconds.workspace_bytes)
    chosen = option.tag.chosen.solution.choices
    assert option.constant_bytes == pytest.approx(
        sum(float(row[c]) for row, c in zip(option.tag.problem._constant_bytes, chosen, strict=True))
    )
    # Of one microbatch it is the sum.
    program, staged = program_of("gpt-tiny", microbatches=1)
    alone = StageCosts(
        staged,
        parameters=parameter_infos(program),
        submeshes=Submeshes(load_cluster("cpu")),
        constraints=Constraints(),
        remat=None,
    )
    assert gradient_bytes(alone, 0, len(staged.layers)) == 0


def test_a_scan_makes_one_gradient_after_another() -> None:
    costs = costs_of("llama-tiny")
    assert costs.program.scan_splits
    for first, last in ((0, len(costs.program.layers)), (1, 2)):
        # Both of its feed-forward layers lie in one array.
        assert gradient_bytes(costs, first, last) == 4 * 128 * 2 * 256


def test_rematerialisation_keeps_less_and_takes_longer() -> None:
    found = {}
    for remat in ("none", "layer"):
        options = costs_of("gpt-tiny", remat=remat).solve(0, 6, Submesh(0, 2), 1)
        found[remat] = min(options, key=lambda option: option.seconds)
    assert found["layer"].in_flight_bytes < found["none"].in_flight_bytes
    assert found["layer"].backward_seconds > found["none"].backward_seconds
    assert found["layer"].forward_seconds == pytest.approx(found["none"].forward_seconds, rel=0.1)


def test_what_equal_ranges_rematerialise_has_the_places_of_the_first() -> None:
    """The second of two equal ranges is the first to be solved on another mesh: its cut and segments go together."""
    costs = costs_of("gpt3-125m", remat="layer")
    solver, kind = costs.solver, costs.solver.kind_of[Submesh(0, 4)]
    numbers = [solver.number(n, n + 1) for n in range(len(costs.program.layers))]
    first = next(n for n, number in enumerate(numbers) if numbers.count(number) > 1)
    second = len(numbers) - 1 - numbers[::-1].index(numbers[first])
    one = solver.problem(Place(first, first + 1, kind, 0), ALL)
    two = solver.problem(Place(second, second + 1, kind, 1), ALL)
    (_, segments, cut), (problem, same, other) = one, two
    assert first < second
    assert other.equations == cut.equations == solver.cut(first, first + 1).equations
    assert same == segments
    assert any(operator.region is not None for operator in problem.graph.operators)


# Estimates


@pytest.mark.parametrize("name", ["gpt-tiny", pytest.param("unet-tiny", marks=pytest.mark.slow)])
def test_estimates_are_close_and_mostly_too_low(name: str) -> None:
    costs = costs_of(name)
    count = len(costs.program.layers)
    weight = lambda options: min(4 * o.seconds + o.per_step_seconds for o in options)  # noqa: E731
    for first, last, submesh in ((0, 4, Submesh(0, 2)), (2, count, Submesh(0, 4)), (0, count, Submesh(0, 8))):
        estimate = weight(costs.options(first, last, submesh, 1))
        assert not costs.is_solved(first, last, submesh, 1)
        solved = weight(costs.solve(first, last, submesh, 1))
        assert costs.is_solved(first, last, submesh, 1)
        assert 0.5 * solved <= estimate <= 1.05 * solved


@pytest.mark.parametrize("alone", [False, True], ids=["stage", "one program"])
@pytest.mark.parametrize("name", ["mlp-tiny", "llama-tiny", "gpt-tiny"])
def test_bytes_of_a_range_are_those_of_its_parts_counted_once(name: str, alone: bool) -> None:
    """On one device, where there is one layout: parameters of all (tied ones of gpt-tiny's first and last layer too),
    and what the layers of the others keep and make beside it."""
    costs = costs_of(name, alone=alone)
    kind = costs.solver.kind_of[Submesh(0, 1)]
    for first, last in combinations(range(len(costs.program.layers) + 1), 2):
        (estimate,) = costs.estimates.estimate(first, last, kind, 1)
        solved = costs.solver.free(Place(first, last, kind, 0), 0)
        assert solved is not None
        seconds = solved.seconds
        assert estimate.per_step_seconds == pytest.approx(seconds.synchronise_seconds + seconds.update_seconds)
        throughout = estimate.constant_bytes - seconds.constant_bytes
        assert throughout == pytest.approx(seconds.workspace_bytes, rel=0.3 if name == "gpt-tiny" else 0.1)
        if name != "gpt-tiny":
            assert estimate.in_flight_bytes == pytest.approx(seconds.in_flight_bytes)


def test_equal_ranges_are_solved_once() -> None:
    program, staged = program_of("mlp-tiny")
    costs = costs_of("mlp-tiny")
    assert len(staged.layers) == 6
    solves = []
    for layer in range(1, 5):
        costs.solve(layer, layer + 1, Submesh(0, 1), 1)
        solves.append(costs.solves)
    # The first layer, one of the four in the middle, the last: as parts; and the one in the middle as a stage.
    assert solves == [4] * 4
    # Elsewhere, on an equal submesh, it is solved already.
    assert costs.is_solved(2, 3, Submesh(5, 6), 1)
    assert program.microbatches == 4


def test_a_layer_of_equal_blocks_is_estimated_from_one() -> None:
    target = zoo.mlp(width=32, layers=24, batch=32)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    staged = staged_program(program, layers=8)
    parts = in_parts(staged)
    assert [b - a for a, b in staged.layers] == [12] * 7 + [15]
    assert [b - a for a, b in parts.layers] == [4] * 23 + [7]
    costs = StageCosts(
        staged,
        parameters=parameter_infos(program),
        submeshes=Submeshes(load_cluster("cpu")),
        constraints=Constraints(),
        remat="none",
    )
    numbers = [costs.estimates.solver.number(part, part + 1) for part in range(24)]
    assert max(numbers.count(number) for number in numbers) == 22
    (estimate,) = costs.options(1, 4, Submesh(0, 1), 1)
    (solved,) = costs.solve(1, 4, Submesh(0, 1), 1)
    assert estimate.seconds == pytest.approx(solved.seconds, rel=0.01)
    # What has no equal blocks stays as it is.
    _, tiny = program_of("gpt-tiny")
    assert in_parts(tiny) is tiny


def test_a_piece_of_a_scan_over_several_equal_layers_keeps_its_rows() -> None:
    """The rows that it takes of its stacks repeat as the layers of its body do, eight times nine of them."""
    config = zoo.qwen.CONFIGS["qwen3-tiny"]
    (layer,) = config.runs[0].pattern
    target = zoo.decoder.build(replace(config, runs=(zoo.decoder.Run(pattern=(layer,) * 8, repeats=4),)))
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    staged = staged_program(program)
    parts = in_parts(staged)
    assert len(staged.rows) == 4 * 8 * 9
    assert not [first for first, _ in parts.layers if first in staged.rows and first - 1 in staged.rows]


def test_what_stands_before_and_after_equal_blocks_is_a_part_of_its_own() -> None:
    """Of the first layer, which has the embedding, and of the last, which has the head, all else is like the others:
    two blocks, of which every other one has experts."""
    target = zoo.moe.build(replace(zoo.moe.CONFIGS["moe-tiny"], layers=8))
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=4)
    staged = staged_program(program, layers=4)
    parts = in_parts(staged)
    assert parts.layers[0] == (0, 4)
    assert [b - a for a, b in parts.layers[1:-1]] == [77, 146] * 4
    assert {a for a, _ in staged.layers} <= {a for a, _ in parts.layers}
    costs = StageCosts(
        staged,
        parameters=parameter_infos(program),
        submeshes=Submeshes(load_cluster("cpu")),
        constraints=Constraints(),
        remat="none",
    )
    numbers = [costs.estimates.solver.number(part, part + 1) for part in range(10)]
    assert len(set(numbers[1:-1:2])) == len(set(numbers[2:-1:2])) == 1


def test_what_layers_share() -> None:
    _, staged = program_of("gpt-tiny")
    crossings = costs_of("gpt-tiny").crossings()
    last = len(staged.layers) - 1
    (tied,) = [one for one in crossings if one.once_bytes]
    assert tied.layers == (0, last)
    assert tied.once_bytes == 256 * 64 * 4
    values = [one for one in crossings if not one.once_bytes]
    # A chain: each layer reads the one before, and the residual stream reaches further.
    assert {(i, i + 1) for i in range(last)} <= {(one.layers[0], reader) for one in values for reader in one.layers[1:]}
    skips = [one for one in costs_of("unet-tiny").crossings() if one.layers[-1] - one.layers[0] > 2]
    assert skips
    assert all(isinstance(one, Crossing) and one.forward_bytes > 0 for one in skips)


# Scans


def test_pieces_of_one_stage_are_one_scan_again() -> None:
    def step(state: Any, x: Any) -> Any:
        from meshwright import value_and_grad

        def loss(p: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ p["in"], p["layers"])
            return jnp.mean(h @ p["out"])

        value, grads = value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    state = {"in": array(8, 16), "layers": array(6, 16, 16), "out": array(16, 4)}
    program = trace_program(step, (state, array(8, 8)), microbatches=2)
    staged = staged_program(program, layers=8)
    (position,) = staged.scan_splits
    assert staged.scan_splits[position] == (1,) * 6
    bounds = [staged.piece_starts[position, 2], staged.piece_starts[position, 3]]
    merged = merge_scans(staged, bounds)
    assert merged is not None
    assert merged.scan_splits == {position: (2, 1, 3)}
    assert len(merged.layers) == 3
    held = [h.rows for layer in merged.layers for h in merged.cutter.cut(*layer).parameters if h.rows is not None]
    assert [(rows.first, rows.last) for rows in held] == [(0, 2), (2, 3), (3, 6)]
    # A stage for all of it needs no pieces; a stage that begins inside a piece cannot be merged.
    whole = merge_scans(staged, [])
    assert whole is not None
    assert whole.scan_splits == {}
    assert merge_scans(staged, [staged.piece_starts[position, 2] + 1]) is None
    assert eliminate_dead_code(inline(merged.core)) is not None


def test_what_is_certain_of_a_free_stage_is_of_no_price() -> None:
    """Whatever was asked at prices of memory before: no layouts take less than the bound that a free stage carries."""
    costs = costs_of("moe-tiny")
    kind = costs.solver.kind_of[Submesh(0, 8)]
    for layer in range(len(costs.program.layers)):
        for mesh in range(len(costs.solver.meshes[kind])):
            place = Place(layer, layer + 1, kind, mesh)
            costs.solver.priced(place, 0, [(price, 2) for price in (1e-9, 1e-12)], gap=1.0)
            free = costs.solver.free(place, 0)
            assert free is not None
            solution = free.chosen.solution
            numbers = free.problem.problem(UNLIMITED)
            best = solve(Problem(costs=numbers.costs, edges=numbers.edges))
            assert solution.lower_bound <= best.objective * (1 + 1e-9)
            assert best.objective <= solution.objective * (1 + 1e-9) <= best.objective * 1.02


def test_layouts_that_time_cut_short_are_solved_again_where_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search is run again and again, each time with time of its own."""
    left, priced = [-1.0], LimitedProblem.priced

    def in_time(self: Any, prices: Any, *, time_limit_seconds: float, **options: Any) -> Any:
        found = priced(self, prices, time_limit_seconds=time_limit_seconds, **options)
        return found if time_limit_seconds > 5.0 else [replace(one, share=0.5) for one in found]

    monkeypatch.setattr(LimitedProblem, "priced", in_time)
    costs = costs_of("gpt-tiny", left_seconds=lambda: left[0])
    place = Place(0, len(costs.program.layers), costs.solver.kind_of[Submesh(0, 8)], 0)
    cut_short = costs.solver.free(place, 0)
    assert cut_short is not None
    assert cut_short.certain_share == 0.5
    left[0] = 60.0
    solved = costs.solver.free(place, 0)
    assert solved is not None
    assert solved.certain_share >= 1 - costs.solver.gap
    left[0] = -1.0
    assert costs.solver.free(place, 0) is solved


def test_a_stage_in_a_limit_of_memory_is_as_good_as_it_can_be() -> None:
    """Forests find it, or the general solver does: within a percent of the best, and what is proven is below that."""
    costs, fresh, bounded = costs_of("gpt-tiny", "p3.16xlarge:2"), costs_of("gpt-tiny", "p3.16xlarge:2"), 0
    fresh.solver.kind_of[Submesh(0, 8)]
    kind, layers = costs.solver.kind_of[Submesh(0, 8)], len(costs.program.layers)
    for number in range(len(costs.solver.meshes[kind])):
        place = Place(0, layers, kind, number)
        problem, _, _ = costs.solver.problem(place, 0)
        free = costs.solver.free(place, 0)
        least, most = problem.least_bytes.held(2), free.held_bytes(2)
        for share in (0.2, 0.4, 0.6, 0.8, 1.0):
            limit = least + share * (most - least)
            problem.in_flight = 2
            best = problem.solve(limit).solution
            problem.in_flight = 1
            # Whoever has not looked for the fastest layouts need not do so.
            solver = fresh.solver if share < 0.5 else costs.solver
            found = solver.within(place, 0, 2, limit)
            assert found.held_bytes(2) <= limit * (1 + 1e-9)
            solution = found.chosen.solution
            assert best.objective * (1 - 1e-9) <= solution.objective <= best.objective / 0.99
            assert solution.lower_bound <= best.objective * (1 + 1e-9)
            bounded += solution.objective > free.chosen.solution.objective
        assert costs.solver.within(place, 0, 2, 0.99 * least) is None
    assert bounded > 5


def test_meshes_that_are_bound_to_be_slower_are_not_solved_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where forests find what is far from the best, a stage is as fast as on the best of all logical meshes solved to
    the end, within what that is worth, and nothing that is uncertain is offered."""
    submesh, in_flight = Submesh(0, 16), 2
    plain = vars(LimitedProblem)["fastest"].func  # of a cached property

    def poor(problem: StageProblem) -> Priced:
        """Layouts that save memory, which are slower."""
        bound = plain(problem).bound
        (lean,) = problem.priced([(1e-3, in_flight)], gap=0.0, time_limit_seconds=10.0)
        assert lean.choices is not None
        return Priced(choices=lean.choices, bound=bound, share=bound / problem._free.seconds(lean.choices))

    costs, fresh = costs_of("moe-tiny", "p3.16xlarge:2"), costs_of("moe-tiny", "p3.16xlarge:2")
    kind, limit = costs.solver.kind_of[submesh], costs.limit_bytes(submesh, last=False)
    fresh.solver.kind_of[submesh]
    seconds, ends = costs.estimates.step_seconds, 0
    for first, last in ((0, 1), (1, 3), (0, 4)):
        meshes = range(len(costs.solver.meshes[kind]))
        stages = [fresh.solver.within(Place(first, last, kind, mesh), 0, in_flight, limit) for mesh in meshes]
        best = min(seconds(option_of(stage)) for stage in stages if stage is not None)
        with monkeypatch.context() as patched:
            patched.setattr(StageProblem, "fastest", property(poor))
            found = costs.solve(first, last, submesh, in_flight)
        assert best * (1 - 1e-9) <= min(map(seconds, found)) <= best / 0.99
        assert all(option.tag.certain_share >= 0.99 for option in found)
        ends += len(found) < len(stages)
    assert ends > 0


def test_of_two_solutions_the_faster_is_as_certain_as_either_proves() -> None:
    """A forest may find what is faster and prove less of it than elimination does of what it finds to a gap."""
    costs = costs_of("gpt-tiny")
    place = Place(0, 2, costs.solver.kind_of[Submesh(0, 8)], 0)
    stage = costs.solver.free(place, 0)
    assert stage is not None
    slower = replace(stage.chosen.solution, objective=1.005 * stage.chosen.solution.objective)
    proven = replace(stage, chosen=replace(stage.chosen, solution=slower)).certain(1.0 / 1.005)
    for found in (better_of(stage.certain(0.9), proven), better_of(proven, stage.certain(0.9))):
        assert found.chosen.solution.objective == stage.chosen.solution.objective
        assert found.certain_share == pytest.approx(1.0, rel=1e-9)
