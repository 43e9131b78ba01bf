"""The schemes, as data: what each splits, what a device sends and holds as formulas, and the preset that is the same.

A formula is text in the symbols of `quantities.MEANINGS`, and what is shown is what is evaluated. All are bytes on one
device in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ..presets import Preset, data_parallel, expert_parallel, megatron, parameter_server, zero

# Kinds of memory, in the order of `Scheme.holds`.
KINDS = ("parameters", "gradients", "optimizer", "activations")


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """The number of a formula.

    >>> evaluate("P_t / t + (P - P_t)", {"P": 10.0, "P_t": 8.0, "t": 4})
    4.0

    Args:
      formula: arithmetic over symbols, `min` and `max`.
      symbols: their values.
    """
    return float(eval(formula, {"__builtins__": {}, "min": min, "max": max}, dict(symbols)))


def sent(kind: str, over: str, buffers: str) -> str:
    """The formula of the bytes that a device sends for a collective, by the ring algorithm (Thakur et al. 2005).

    >>> sent("all_reduce", "d", "P"), sent("all_gather", "dt", "P / 2")
    ('2 * (d - 1) / d * P', '(d * t - 1) / (d * t) * (P / 2)')

    Args:
      kind: as of `plan.Collective`; "send" to one other device; "central": what passes the link of a parameter server,
        half of it out.
      over: the sizes of the axes it runs over, a letter each.
      buffers: the formula of the bytes in its buffers.
    """
    devices, size = " * ".join(over), buffers if buffers.isidentifier() else f"({buffers})"
    share = f"({devices} - 1) / {devices if len(over) == 1 else f'({devices})'}"
    match kind:
        case "all_reduce":
            return f"2 * {share} * {size}"
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return f"{share} * {size}"
        case "central":
            return f"{size} / 2"
    return buffers


class Move(NamedTuple):
    """A collective of a scheme.

    Args:
      kind: as of `sent`.
      over: the same.
      when: "forward" or "backward" for each microbatch, or once a "step".
      buffers: the formula of the bytes in its buffers.
    """

    kind: str
    over: str
    when: str
    buffers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A parallelism of the literature.

    Args:
      name: for programs.
      title: for people.
      source: the paper.
      splits: what is split over which devices.
      own: the letter of its own axis; the devices that this leaves share the batch.
      preset: the restriction of the search that is this scheme, by the size of its own axis.
      moves: what a device sends.
      holds: the formula of the bytes of each of `KINDS`.
      in_flight: microbatches whose activations a device of the first rank keeps at once; "" without stages.
      bubble: the share of time in which a device waits for other stages; "" without stages.
      one_microbatch: whether the batch is not cut.
      note: where formula and count differ, and why.
    """

    name: str
    title: str
    source: str
    splits: str
    own: Literal["d", "t", "e", "p"] = "d"
    preset: Callable[[int], Preset] = field(repr=False)
    moves: tuple[Move, ...]
    holds: tuple[str, str, str, str]
    in_flight: str = ""
    bubble: str = ""
    one_microbatch: bool = False
    note: str = ""


_BATCH = "(A / m + B) / d"
_UNEQUAL = "formulas are of equal stages, counts of the stage with the most; shared parameters and B are left out"


def _pipeline(
    name: str, title: str, source: str, in_flight: str, bubble: str, *, chunks: int = 1, note: str = _UNEQUAL
) -> Scheme:
    """A pipeline of p ranks under the schedule of its name; "inter_layer" has one microbatch."""
    schedule = "one_f_one_b" if name == "inter_layer" else name
    return Scheme(
        name=name, title=title, source=source, splits="layers over p, the batch over d", own="p",
        preset=lambda stages: replace(megatron(tp=1, pp=stages, chunks=chunks), pipeline_schedule=schedule),
        moves=(
            Move("send", "p", "forward", "v * X / d"),
            # The first of two ranks has no cotangent to send but those of its later stages.
            Move("send", "p", "backward", "min(v, v + p - 3) * X / d"),
            Move("all_reduce", "d", "step", "P / p"),
        ),
        holds=("P / p", "P / p", "O / p", f"{in_flight} * A / (p * d * m)"),
        in_flight=in_flight, bubble=bubble, one_microbatch=name == "inter_layer", note=note,
    )  # fmt: skip


SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        name="data", title="data parallel, all-reduce", source="Patarasu and Yuan 2009", splits="the batch over d",
        preset=lambda devices: data_parallel(), moves=(Move("all_reduce", "d", "step", "P"),),
        holds=("P", "P", "O", _BATCH),
    ),
    Scheme(
        name="central", title="data parallel, parameter server", source="Li et al. 2014", splits="the batch over d",
        preset=lambda devices: parameter_server(), moves=(Move("central", "d", "step", "2 * (d - 1) * P"),),
        holds=("P", "P", "O", _BATCH), note="of the server, which is one of the d devices; any other one sends P",
    ),
    Scheme(
        name="zero_1", title="ZeRO 1", source="Rajbhandari et al. 2020", splits="batch, optimizer state over d",
        preset=lambda devices: zero(stage=1),
        moves=(Move("reduce_scatter", "d", "step", "P"), Move("all_gather", "d", "step", "P")),
        holds=("P", "P", "O / d", _BATCH),
    ),
    Scheme(
        name="zero_2", title="ZeRO 2", source="Rajbhandari et al. 2020",
        splits="batch, optimizer state, gradients over d", preset=lambda devices: zero(stage=2),
        moves=(Move("reduce_scatter", "d", "backward", "m * P"), Move("all_gather", "d", "step", "P")),
        holds=("P", "P / d", "O / d", _BATCH),
        note="of one microbatch gradients may all be there before they are scattered, as under ZeRO 1",
    ),
    Scheme(
        name="zero_3", title="ZeRO 3", source="Rajbhandari et al. 2020",
        splits="batch, optimizer state, gradients, parameters over d", preset=lambda devices: zero(stage=3),
        moves=(
            Move("all_gather", "d", "forward", "m * P"), Move("all_gather", "d", "backward", "m * P"),
            Move("reduce_scatter", "d", "backward", "m * P"),
        ),
        holds=("P / d", "P / d", "O / d", _BATCH),
        note="what no derivative reads is gathered once, and so is the last weight of a plan of one stage",
    ),
    Scheme(
        name="tensor", title="tensor, column and row", source="Shoeybi et al. 2019", own="t",
        splits="products, by column and row in turn, over t; the batch over d",
        preset=lambda devices: megatron(tp=devices, pp=1),
        moves=(
            Move("all_reduce", "t", "forward", "(R + V) / d"), Move("all_reduce", "t", "backward", "C / d"),
            Move("all_reduce", "d", "step", "P_t / t + (P - P_t)"),
        ),
        holds=(
            "P_t / t + (P - P_t)", "P_t / t + (P - P_t)", "O_t / t + (O - O_t)",
            "((A_t / t + (A - A_t) + C) / m + B) / d",
        ),
        note="sums of row splits forward, of column splits backward; dims that t does not divide are left out",
    ),
    Scheme(
        name="sequence", title="tensor and sequence", source="Korthikanti et al. 2022", own="t",
        splits="products over t, between them the sequence over t; the batch over d",
        preset=lambda devices: megatron(tp=devices, pp=1, sequence_parallel=True),
        moves=(
            Move("all_gather", "t", "forward", "C / d"), Move("reduce_scatter", "t", "forward", "R / d"),
            Move("all_reduce", "t", "forward", "V / d"), Move("reduce_scatter", "t", "backward", "C / d"),
            Move("all_gather", "t", "backward", "R / d"), Move("all_reduce", "d", "step", "P_t / t"),
            Move("all_reduce", "dt", "step", "P - P_t"),
        ),
        holds=("P_t / t + (P - P_t)", "P_t / t + (P - P_t)", "O_t / t + (O - O_t)", "((A / t + C) / m + B) / d"),
        note="C is kept as it was gathered; the paper keeps C / t and gathers it again in the backward pass",
    ),
    Scheme(
        name="expert", title="expert, two all-to-alls", source="Lepikhin et al. 2020", own="e",
        splits="experts over e, the batch over e and d", preset=lambda devices: expert_parallel(ep=devices),
        moves=(
            Move("all_to_all", "e", "forward", "S / (d * e)"), Move("all_to_all", "e", "backward", "S_g / (d * e)"),
            Move("all_reduce", "d", "step", "P_e / e"), Move("all_reduce", "de", "step", "P - P_e"),
        ),
        holds=("P_e / e + (P - P_e)", "P_e / e + (P - P_e)", "O_e / e + (O - O_e)", "(A / m + B) / (d * e)"),
    ),
    _pipeline("inter_layer", "inter-layer, one microbatch", "Dean et al. 2012", "1", "(p - 1) / p"),
    _pipeline(
        "gpipe", "pipeline, GPipe", "Huang et al. 2019", "m", "(p - 1) / (m + p - 1)",
        note=f"{_UNEQUAL}; without the paper's rematerialisation",
    ),
    _pipeline("one_f_one_b", "pipeline, 1F1B", "Narayanan et al. 2021a", "min(m, p)", "(p - 1) / (m + p - 1)"),
    _pipeline(
        "eager_one_f_one_b", "pipeline, eager 1F1B", "Zhuang et al. 2023", "min(m, 2 * p - 1)", "(p - 1) / (m + p - 1)"
    ),
    _pipeline(
        "interleaved_one_f_one_b", "pipeline, interleaved 1F1B", "Narayanan et al. 2021b",
        "min(m * v, v * p + p - 1) / v", "(p - 1) / (v * m + p - 1)", chunks=2,
        note=f"{_UNEQUAL}; the count adds up what each stage of a rank keeps at most, which is not at one time",
    ),
    _pipeline(
        "zero_bubble", "pipeline, zero bubble (ZB-H1)", "Qi et al. 2024", "min(m, p)", "(p - 1) / (3 * m + p - 1)",
        note=f"{_UNEQUAL}; the bubble is for m >= p and three equal passes",
    ),
)  # fmt: skip
