"""How the arrays of the training state relate to the parameters: which dim of an optimizer's array is which dim of a
parameter. Found from the update's own equations, by dims that share a factor, so it holds for any optimizer (moments,
Adafactor's row and column means, `MultiSteps` accumulators) without knowing one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._jax.jaxpr import ClosedJaxpr, is_literal, open_jaxpr
from .factors import Composer
from .rules import Rules


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A state array that is laid out like a parameter.

    Args:
      parameter: position among the differentiated inputs.
      dims: for each dim of the array the dim of the parameter it is, or None.
    """

    parameter: int
    dims: tuple[int | None, ...]


def relate_state(
    outer: ClosedJaxpr, marker: int, parameter_inputs: Sequence[int | None], state_inputs: int, rules: Rules
) -> tuple[StateLeaf | None, ...]:
    """For each state input the parameter it belongs to; None for scalars and arrays that belong to none.

    Args:
      outer: the whole step.
      marker: position of its `value_and_grad` equation.
      parameter_inputs: the step input that is each parameter.
      state_inputs: how many leading inputs and outputs are state.
      rules: extended by the equations of the update.
    """
    jaxpr = open_jaxpr(outer)
    marked = jaxpr.eqns[marker]
    after = jaxpr.eqns[marker + 1 :]
    rules.prepare([(equation, False) for equation in (*jaxpr.eqns[:marker], *after)])
    composer = Composer()
    env: dict[Any, Any] = {}

    def dims_of(var: Any) -> Any:
        if var not in env:
            env[var] = composer.tensor(var.aval.shape)
        return env[var]

    for var in jaxpr.invars:
        dims_of(var)
    for equation in jaxpr.eqns[: marker + 1]:
        for var in equation.outvars:
            dims_of(var)
    wrt = marked.invars[marked.params["num_consts"] :]
    grads = marked.outvars[len(marked.outvars) - len(wrt) :]
    for parameter, grad in zip(wrt, grads, strict=True):
        if not is_literal(parameter):
            env[grad] = dims_of(parameter)
    rules.relate(composer, after, env)
    for before, returned in zip(jaxpr.invars[:state_inputs], jaxpr.outvars[:state_inputs], strict=True):
        if not is_literal(returned):
            for a, b in zip(dims_of(before), dims_of(returned), strict=True):
                composer.unify(a, b)

    owner: dict[int, list[tuple[int, int]]] = {}
    for position, parameter in enumerate(wrt):
        if not is_literal(parameter):
            for d, dim in enumerate(dims_of(parameter)):
                for atom in composer.atoms(dim):
                    owner.setdefault(atom, []).append((position, d))

    def belongs(var: Any) -> StateLeaf | None:
        votes: dict[int, list[tuple[int, int]]] = {}
        for d, dim in enumerate(dims_of(var)):
            atoms = composer.atoms(dim)
            for position, parameter_dim in owner.get(atoms[0], ()) if len(atoms) == 1 and var.aval.shape[d] > 1 else ():
                votes.setdefault(position, []).append((d, parameter_dim))
        if not votes:
            return None
        best = max(votes, key=lambda position: (len(votes[position]), -position))
        related = dict(votes[best])
        return StateLeaf(best, tuple(related.get(d) for d in range(len(var.aval.shape))))

    own = {source: position for position, source in enumerate(parameter_inputs) if source is not None}
    found: list[StateLeaf | None] = []
    for index, var in enumerate(jaxpr.invars[:state_inputs]):
        if index in own:
            found.append(StateLeaf(own[index], tuple(range(len(var.aval.shape)))))
        else:
            found.append(belongs(var))
    return tuple(found)
