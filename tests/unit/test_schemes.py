"""Schemes: closed forms of the literature, the rules of the planner, and the plans of presets say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from meshwright import zoo
from meshwright.cli import main
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.program.traces import Traces, traces_of
from meshwright.schedule import Kind, make_schedule
from meshwright.schemes import SCHEMES, Analysed, Scheme, analyse, schemes_text
from meshwright.schemes.formulas import evaluate, sent
from meshwright.schemes.quantities import quantities, splits_evenly
from meshwright.sharding import Spec, convert
from meshwright.simulate import Timing, simulate
from meshwright.targets import LoadedTarget, load_target
from meshwright.zoo import gpt

DOC = Path(__file__).parents[2] / "docs" / "schemes.md"
CLUSTER = "p3.16xlarge:1"
BY_NAME: dict[str, Scheme] = {scheme.name: scheme for scheme in SCHEMES}

WHOLE, SPLIT = Spec.replicated(1), Spec((("x",),))
PARTIAL, BROADCAST = Spec(((),), partial=frozenset("x")), Spec(((),), broadcast=frozenset("x"))
DEVICES, BYTES = st.integers(2, 512), st.integers(1, 10**12)


@lru_cache
def traced(name: str) -> tuple[Traces, LoadedTarget]:
    target = load_target(name)
    return traces_of(target.step), target


@lru_cache
def analysed(name: str) -> dict[str, Analysed]:
    traces, target = traced(name)
    return {one.scheme.name: one for one in analyse(traces, target.example_args, cluster=CLUSTER)}


def scheme_bytes(name: str, **symbols: float) -> float:
    sizes = {"d": 1, "t": 1, "e": 1, "p": 1, "v": 1, "m": 1, **symbols}
    moves = [one for one in BY_NAME[name].moves if any(sizes[letter] > 1 for letter in one.over)]
    return sum(evaluate(sent(*one[:2], one.buffers), sizes) for one in moves)


def rule_bytes(source: Spec, target: Spec, size: float, devices: int, *, runs: int = 1) -> float:
    """What a device sends for a conversion, forward so many times and backward once, by the conversion table."""
    total = 0.0
    for step in convert(source, target) or ():
        buffer = size * step.buffer_fraction({"x": devices})
        for kind, count in ((step.forward, runs), (step.backward, 1)):
            total += count * evaluate(sent(kind, "d", "S"), {"d": devices, "S": buffer}) if kind is not None else 0.0
    return total


@given(n=DEVICES, size=BYTES)
def test_closed_forms_are_those_of_the_literature_and_of_the_conversion_table(n: int, size: int) -> None:
    ring, half = 2 * (n - 1) / n * size, (n - 1) / n * size
    gradient = pytest.approx(ring, rel=1e-12)
    assert scheme_bytes("data", d=n, P=size) == gradient == rule_bytes(PARTIAL, WHOLE, size, n)
    # ZeRO 1 and 2 send what an all-reduce sends: its two halves, with the update between them.
    halves = rule_bytes(PARTIAL, SPLIT, size, n) - half + half
    assert scheme_bytes("zero_1", d=n, P=size) == scheme_bytes("zero_2", d=n, P=size) == gradient
    assert halves == gradient
    # ZeRO 3: half as much again (Rajbhandari et al. 2020, section 7), two gathers and a reduce-scatter.
    third = rule_bytes(SPLIT, BROADCAST, size, n, runs=2)
    assert scheme_bytes("zero_3", d=n, P=size) == pytest.approx(3 * half, rel=1e-12) == third
    assert scheme_bytes("central", d=n, P=size) == pytest.approx((n - 1) * size, rel=1e-12)
    # Megatron's g sums forward, its f backward; with a split sequence each is a gather and a reduce-scatter.
    f, g = rule_bytes(WHOLE, BROADCAST, size, n), rule_bytes(PARTIAL, WHOLE, size, n)
    assert scheme_bytes("tensor", t=n, C=size, R=size, V=0) == pytest.approx(f + g, rel=1e-12) == 2 * ring
    split = rule_bytes(SPLIT, BROADCAST, size, n) + rule_bytes(PARTIAL, SPLIT, size, n)
    assert scheme_bytes("sequence", t=n, C=size, R=size, V=0, P=0, P_t=0) == pytest.approx(split, rel=1e-12)
    assert split == pytest.approx(2 * ring, rel=1e-12)


@given(n=DEVICES, size=BYTES)
def test_an_expert_layer_has_two_all_to_alls_each_way(n: int, size: int) -> None:
    there = rule_bytes(Spec((("x",), ())), Spec(((), ("x",))), size, n)
    # The table counts a buffer that the axis still splits: size / n on each device.
    expected = scheme_bytes("expert", e=n, S=size, S_g=size, P=0, P_e=0)
    assert expected == pytest.approx(there, rel=1e-12) == 2 * (n - 1) / n * size / n


PIPELINES = [scheme for scheme in SCHEMES if scheme.bubble and not scheme.one_microbatch]


@given(p=st.integers(2, 8), rounds=st.integers(1, 6), scheme=st.sampled_from(PIPELINES))
def test_pipelines_keep_and_wait_as_their_schedules_do(p: int, rounds: int, scheme: Scheme) -> None:
    m, v = p * rounds, 2 if scheme.name.startswith("interleaved") else 1
    options = {"chunks": v} if v > 1 else {}
    schedule = make_schedule(scheme.name, p * v, m, **options)
    # What the first rank has begun and not ended, as it walks its instructions.
    begun = accumulate(
        (one.kind is Kind.FORWARD) - (one.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)) for one in schedule.ranks[0]
    )
    assert evaluate(scheme.in_flight, {"p": p, "m": m, "v": v}) == max(begun) / v
    timing = Timing.uniform(
        stages=p * v, forward_seconds=1 / v, backward_seconds=2 / v, weight_seconds=1 / v, transfer_seconds=0.0
    )
    waits = simulate(schedule, timing).bubble_fraction
    assert evaluate(scheme.bubble, {"p": p, "m": m, "v": v}) == pytest.approx(waits, abs=1e-12)


def measured(layers: int, *, hidden: int = 32, heads: int = 4, sequence: int = 16, batch: int = 8) -> dict[str, float]:
    config = replace(
        gpt.CONFIGS["gpt-tiny"], layers=layers, hidden=hidden, heads=heads, sequence=sequence, global_batch=batch
    )
    target = gpt.build(config)
    traces = traces_of(target.step)
    return quantities(traces.program((target.example_state, target.example_batch), microbatches=1))


@pytest.mark.parametrize(("hidden", "heads", "sequence", "batch"), [(32, 4, 16, 8), (64, 2, 32, 4)])
def test_a_transformer_has_the_sums_and_activations_of_the_papers(
    hidden: int, heads: int, sequence: int, batch: int
) -> None:
    one, three = (measured(layers, hidden=hidden, heads=heads, sequence=sequence, batch=batch) for layers in (1, 3))
    stream = batch * sequence * hidden
    for layers, found in ((1, one), (3, three)):
        # Four sums of b s h a layer (Shoeybi et al. 2019), two forward and two backward; embedding and head one each.
        assert found["R"] == found["C"] == 4 * (2 * layers + 1) * stream
        assert found["V"] == 4 * 3 * batch * sequence
    scores, sums = heads * sequence**2 * batch, 2 * heads * sequence * batch + 4 * batch * sequence
    kept = (three["A"] - one["A"]) / 2 / 4  # elements a layer
    assert kept == 10 * stream + scores + sums
    # Korthikanti et al. 2022, table 2, s b h (34 + 5 a s / h) bytes at two bytes an element: besides, it keeps what a
    # compiler makes again here (inputs of two products and the GELU's result), and dropout's masks and results.
    assert 2 * (kept - sums + 6 * stream + scores) + 2 * stream + scores == 34 * stream + 5 * scores
    split = (three["A_t"] - one["A_t"]) / 2 / 4
    # 10 + 24 / t with 2 for masks: of what is whole on each device the inputs of products, C, come from what is kept.
    assert kept - split == 2 * stream + 4 * batch * sequence


ONE_STAGE = ["data", "central", "zero_1", "zero_2", "zero_3", "tensor", "sequence", "expert"]


# What attention or experts change of how a scheme is planned.
OF_ATTENTION, OF_EXPERTS = ("tensor", "sequence"), ("tensor", "expert")


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("mlp-tiny", ONE_STAGE),
        ("gpt-tiny", OF_ATTENTION),
        ("moe-tiny", OF_EXPERTS),
        pytest.param("gpt-tiny", [one for one in ONE_STAGE if one not in OF_ATTENTION], marks=pytest.mark.slow),
        pytest.param("moe-tiny", [one for one in ONE_STAGE if one not in OF_EXPERTS], marks=pytest.mark.slow),
    ],
    ids=["mlp-tiny", "gpt-tiny", "moe-tiny", "gpt-tiny, other schemes", "moe-tiny, other schemes"],
)
def test_what_is_counted_is_what_the_plan_of_the_preset_shows(name: str, schemes: Sequence[str]) -> None:
    traces, target = traced(name)
    for scheme in schemes:
        found = analysed(name)[scheme]
        if found.reason:
            continue
        stage = plan_for(traces, target.example_args, cluster=CLUSTER, preset=found.preset, microbatches=1).plan.stages[
            0
        ]
        planned = {one.kind: one.bytes for one in stage.communication}
        counted: dict[str, float] = {}
        for move in found.moves:
            kind, _, when = move.key
            # A plan of one stage keeps the weight that its backward pass reads first.
            if (scheme, kind, when) != ("zero_3", "all_gather", "backward"):
                kind = "permute" if kind == "central" else kind
                counted[kind] = counted.get(kind, 0.0) + move.buffer_bytes[1]
        if scheme == "zero_3":
            again = planned["all_gather"] - counted["all_gather"]
            assert 0 < again < counted["all_gather"]
            planned["all_gather"] -= again
        assert counted == pytest.approx(planned, rel=1e-12), scheme
        assert found.memory is not None
        state = [found.memory.parameters, found.memory.optimizer]
        assert state == pytest.approx([stage.memory.parameters, stage.memory.optimizer], rel=1e-12), scheme


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny", "mlp-tiny"])
def test_formulas_give_what_is_counted(name: str) -> None:
    for scheme in ONE_STAGE:
        found = analysed(name)[scheme]
        if found.reason or (name, scheme) == ("moe-tiny", "sequence"):  # tokens in groups have no sequence
            continue
        for move in found.moves:
            formula, counted = move.buffer_bytes
            # What no derivative reads, biases and tables of embeddings, is not gathered again.
            least = 0.5 if (scheme, *move.key) == ("zero_3", "all_gather", "d", "backward") else 1 - 1e-12
            assert least * formula <= counted <= formula * (1 + 1e-12), (scheme, move)
        if scheme != "zero_3":
            assert found.sent_bytes[0] == pytest.approx(found.sent_bytes[1], rel=1e-12), scheme
        assert found.memory is not None
        # Without a residual stream biases of row splits are whole. Of experts' masks t splits nothing.
        loose = {("mlp-tiny", "tensor"): 0.06, ("moe-tiny", "tensor"): 0.25}.get((name, scheme), 0.01)
        for kind, size in found.held_bytes.items():
            assert getattr(found.memory, kind) == pytest.approx(size, rel=loose), (scheme, kind)


def test_pipelines_of_equal_stages_send_and_hold_what_their_formulas_say() -> None:
    target = zoo.mlp(width=64, layers=8, batch=64)
    found = {
        one.scheme.name: one
        for one in analyse(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=4)
    }
    for scheme in (*PIPELINES, BY_NAME["inter_layer"]):
        one = found[scheme.name]
        assert one.symbols["p"] == 4
        sends = {move.key: move.buffer_bytes for move in one.moves}
        for way in ("forward", "backward"):
            formula, counted = sends["send", "p", way]
            assert formula == pytest.approx(counted, rel=1e-12), (scheme.name, way)
        assert one.memory is not None
        assert one.memory.parameters == pytest.approx(one.held_bytes["parameters"], rel=1e-12)
    held = [found[name].memory for name in ("one_f_one_b", "eager_one_f_one_b", "gpipe")]
    activations = [memory.activations for memory in held if memory is not None]
    assert len(activations) == 3
    assert activations == sorted(activations)


def test_microbatches_gather_again_and_keep_less() -> None:
    traces, target = traced("gpt-tiny")
    (found,) = analyse(traces, target.example_args, cluster=CLUSTER, microbatches=2, schemes=[BY_NAME["zero_3"]])
    once = analysed("gpt-tiny")["zero_3"]
    assert found.sent_bytes == pytest.approx([2 * size for size in once.sent_bytes], rel=1e-12)
    assert found.memory is not None
    assert found.memory.activations == pytest.approx(found.held_bytes["activations"], rel=0.01)


def test_a_tensor_axis_divides_heads() -> None:
    """Eight devices do not share twelve heads of gpt3-125m."""
    target = zoo.build("gpt3-125m", global_batch=8)
    program = traces_of(target.step).program((target.example_state, target.example_batch), microbatches=1)
    assert [n for n in (2, 4, 8) if splits_evenly(program.graph, n)] == [2, 4]


def test_what_does_not_apply_says_why_in_a_line() -> None:
    reasons = {name: one.reason for name, one in analysed("mlp-tiny").items() if one.reason}
    assert reasons.keys() == {"sequence", "expert"}
    assert "stack of experts" in reasons["expert"]
    assert not any("\n" in reason for reason in reasons.values())


def test_requests_that_make_no_sense_are_refused() -> None:
    traces, target = traced("mlp-tiny")
    with pytest.raises(PlanError, match="1 device"):
        analyse(traces, target.example_args, cluster=one_device())
    with pytest.raises(PlanError, match="got 0; needed 1"):
        analyse(traces, target.example_args, cluster=CLUSTER, microbatches=0)
    with pytest.raises(PlanError, match="got 1; needed 2"):
        analyse(traces, target.example_args, cluster=CLUSTER, stages=1)
    with pytest.raises(PlanError, match="marked"):
        analyse(lambda x: jnp.sum(x), (jax.ShapeDtypeStruct((8, 8), "float32"),), cluster=CLUSTER)


def one_device() -> object:
    from meshwright.cluster import load_cluster

    cluster = load_cluster(CLUSTER)
    return replace(cluster, hosts=(replace(cluster.hosts[0], devices=1),))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schemes", "moe-tiny", "--cluster", CLUSTER, "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["schemes"]] == [scheme.name for scheme in SCHEMES]
    for one in document["schemes"]:
        assert one["applies"] == (one["reason"] is None)
        values = one["values"]
        total = sum(evaluate(move["formula"], values) for move in one["sends"]["collectives"] if move["formula"])
        assert total == pytest.approx(one["sends"]["formula_bytes"], rel=1e-12)
        for held in one["holds"].values():
            assert evaluate(held["formula"], values) == pytest.approx(held["formula_bytes"])
    with pytest.raises(SystemExit) as ended:
        main(["schemes", "mlp-tiny", "--cluster", CLUSTER, "--microbatches", "3"])
    assert ended.value.code == 2
    assert "refused microbatches=3" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "batch"), [("gpt-tiny", None), pytest.param("gpt3-125m", 64, marks=pytest.mark.slow)])
def test_the_example_of_the_documentation_is_what_the_command_prints(name: str, batch: int | None) -> None:
    """All but the simulated bubble, which any change of costs moves. Where this fails, put the command's text there."""
    if batch is None:
        found = [*analysed(name).values()]
    else:
        target = load_target(name, global_batch=batch)
        found = analyse(target.step, target.example_args, cluster=CLUSTER)
    text = schemes_text(found)
    table = text.split("\n\n")[0] if batch else text
    lines = {line.rsplit(maxsplit=2)[0] if line.endswith("%") else line for line in DOC.read_text().splitlines()}
    for line in table.splitlines():
        assert (line.rsplit(maxsplit=2)[0] if line.endswith("%") else line) in lines
