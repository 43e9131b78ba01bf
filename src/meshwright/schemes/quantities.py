"""The symbols of the formulas, measured on a traced program: bytes of a step on one device that has all of it.

What an index of the program stands for is read from its structure (`program.origins`), as the roles of presets read it:
tensor parallelism splits *inner* indices (heads, feed-forward width, vocabulary), never the residual stream, and expert
parallelism the stacks of experts. From that follows what tensor parallelism has to send, by Megatron's two conjugate
operators (Shoeybi et al. 2019):

* g: a product that sums over an inner index leaves partial sums on each device: its result is summed forward (R), and
  so are reductions over the vocabulary (V).
* f: a product with an inner index of a weight gives each device a part of the gradient of what it reads: that gradient
  is summed backward (C), once for all products that read the value.

Known limits: of a product that both sums over an inner index and makes another (a perceptron has no residual stream),
every other one in program order is taken to be a row split. Dims that the devices do not divide are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from ..program.graph import Graph, Operator
from ..program.origins import dim_origins, operator_origins
from ..program.parameter_values import values_of_parameters
from ..program.residuals import kept_values
from ..program.trace import Program
from ..search.intra.parameters import parameter_infos
from ..search.intra.problem import trips_of

MEANINGS: Mapping[str, str] = {
    "P": "parameters, and as many bytes of gradients",
    "O": "optimizer state",
    "P_t": "parameters that a tensor axis splits",
    "O_t": "their optimizer state",
    "P_e": "parameters of experts",
    "O_e": "their optimizer state",
    "A": "activations kept for the backward pass",
    "A_t": "of them those that a tensor axis splits",
    "B": "inputs that are no parameters: the batch",
    "C": "values with a gradient that column-split products read",
    "R": "results of row-split products and of lookups in the vocabulary",
    "V": "results of reductions over the vocabulary",
    "S": "what goes to the experts and comes back from them",
    "S_g": "of that what has a gradient",
    "X": "what a stage hands on, at the widest boundary",
    "n": "devices",
    "d": "devices that share the batch",
    "t": "devices that share every product",
    "e": "devices that share the experts",
    "p": "pipeline ranks",
    "v": "stages on each rank",
    "m": "microbatches",
}

# Kinds of indices that tensor parallelism splits.
_INNER = ("weight", "vocabulary")


def quantities(program: Program) -> dict[str, float]:
    """The symbols that are known of a program without its devices, in bytes.

    Args:
      program: traced at the size of a microbatch.
    """
    graph, count = program.graph, program.microbatches
    read, made, reduced = _tensor_traffic(graph)
    crossing, stacks = _expert_traffic(graph)
    values = graph.values
    found = {
        "C": sum(read.values()), "R": sum(made.values()), "V": reduced, "S": sum(crossing.values()),
        "S_g": sum(size for value, size in crossing.items() if values[value].differentiated),
        "B": sum(values[v].bytes for position, v in enumerate(graph.inputs) if position not in graph.parameters),
        "A": 0.0, "A_t": 0.0,
    }  # fmt: skip
    for value in kept_values(graph) - values_of_parameters(graph):
        size = values[value].bytes * trips_of(graph.operators[graph.producer[value][0]], value)
        found["A"] += size
        # What was summed is whole on every device.
        found["A_t"] += size * (value not in made and _is_inner(graph, value))
    found = {name: count * size for name, size in found.items()}
    found |= dict.fromkeys(("P", "O", "P_t", "O_t", "P_e", "O_e"), 0.0)
    for position, info in zip(graph.parameters, parameter_infos(program), strict=True):
        value = graph.inputs[position]
        for suffix, counts in (("", True), ("_t", _is_inner(graph, value)), ("_e", value in stacks)):
            found["P" + suffix] += counts * values[value].bytes
            found["O" + suffix] += counts * info.optimizer_bytes
    return found


def splits_evenly(graph: Graph, devices: int) -> bool:
    """Whether so many devices can share every product that tensor parallelism splits; the vocabulary's are left out,
    which few numbers divide.

    Args:
      graph: of the program.
      devices: of a tensor axis.
    """
    for operator in graph.operators:
        rule, origins = operator.rule, operator_origins(graph)[operator.index]
        inner = {f for f, o in enumerate(origins) if o.kind == "weight" and rule.factors[f].size > 1}
        if not operator.matmul or not inner:
            continue
        data = set().union(*(factors for _, factors in _data_operands(graph, operator)))
        stays = inner & data & _factors(rule.results)
        if all(rule.factors[f].size % devices for f in stays or inner):
            return False
    return True


def _kinds(graph: Graph, value: int) -> set[str]:
    return {origin.kind for origin in dim_origins(graph, value) if origin is not None}


def _is_inner(graph: Graph, value: int) -> bool:
    return not _kinds(graph, value).isdisjoint(_INNER)


def _data_operands(graph: Graph, operator: Operator) -> Iterator[tuple[int, set[int]]]:
    """The operands that depend on data, with their factors."""
    of_parameters = values_of_parameters(graph)
    for value, tensor in zip(operator.operands, operator.rule.operands, strict=True):
        if value is not None and value not in of_parameters and not graph.values[value].constant:
            yield value, _factors([tensor])


def _reads_weights(graph: Graph, operator: Operator) -> bool:
    of_parameters = values_of_parameters(graph)
    return operator.matmul and any(v in of_parameters for v in operator.operands)


def _tensor_traffic(graph: Graph) -> tuple[dict[int, float], dict[int, float], float]:
    """What column splits read and row splits make, by value, and V; bytes of a microbatch."""
    read: dict[int, float] = {}
    summed: dict[int, float] = {}
    reduced = 0.0
    was_column = False
    for operator in graph.operators:
        rule, origins = operator.rule, operator_origins(graph)[operator.index]
        inner = {f for f, o in enumerate(origins) if o.kind in _INNER and rule.factors[f].size > 1}
        data = dict(_data_operands(graph, operator))
        result = next((v for v in operator.results if v is not None), None)
        if not inner or not data or result is None or operator.is_link:
            continue
        made = inner & _factors(rule.results)
        if made & set().union(*data.values()):
            continue  # what is split stays split: attention, elementwise operators
        size = graph.values[result].bytes * operator.repeats
        if _reads_weights(graph, operator):
            was_column = bool(made) and not (inner - made and was_column)
            if was_column:
                read |= {v: graph.values[v].bytes * operator.repeats for v in data if graph.values[v].differentiated}
            else:
                summed[result] = size
        elif not made and prod(graph.values[result].shape) > 1:
            if "stream" in _kinds(graph, result):
                summed[result] = size
            else:
                reduced += size
    return read, summed, reduced


def _expert_traffic(graph: Graph) -> tuple[dict[int, float], set[int]]:
    """What passes between products with stacks of experts and operators outside, bytes of a microbatch by value; and
    the parameters that are such stacks."""
    inside: set[int] = set()
    crossing: dict[int, float] = {}
    stacks: set[int] = set()
    of_parameters = values_of_parameters(graph)
    for operator in graph.operators:
        origins = operator_origins(graph)[operator.index]
        experts = {f for f, o in enumerate(origins) if o.kind == "expert"}
        experts = experts.intersection(*map(_factors, ([one] for one in operator.rule.operands)))
        data = [v for v, _ in _data_operands(graph, operator)]
        if _reads_weights(graph, operator) and experts & _factors(operator.rule.results):
            crossing |= {v: graph.values[v].bytes * operator.repeats for v in data if v not in inside}
            stacks.update(v for v in operator.operands if v is not None and v in of_parameters)
            inside.update(v for v in operator.results if v is not None)
        elif inside.intersection(data):
            if operator.matmul or operator.is_link:
                crossing |= {v: graph.values[v].bytes * operator.repeats for v in inside.intersection(data)}
            else:
                inside.update(v for v in operator.results if v is not None)
    for operator in reversed(graph.operators):  # through casts, back to the parameters
        if not stacks.isdisjoint(v for v in operator.results if v is not None):
            stacks.update(v for v in operator.operands if v is not None and v in of_parameters)
    return crossing, stacks


def _factors(tensors: Iterable[Iterable[Iterable[int]]]) -> set[int]:
    return {factor for tensor in tensors for dim in tensor for factor in dim}
