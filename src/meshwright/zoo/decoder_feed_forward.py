"""Feed-forwards of decoder layers, as data: dense ones, and mixtures of experts.

Each part declares its parameters, computes (b, s, m) -> (b, s, m) with a loss of its own, and counts its forward FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .parameters import normal, zeros

Activation = Literal["silu", "gelu", "clamped"]


def _clamped(gate: jax.Array, inner: jax.Array) -> jax.Array:
    """The gated unit of gpt-oss's reference code: what goes in is at most 7, the slope of the sigmoid 1.702."""
    gate, inner = jnp.minimum(gate, 7.0), jnp.clip(inner, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (inner + 1.0)


_GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, inner: jax.nn.silu(gate) * inner,
    "gelu": lambda gate, inner: jax.nn.gelu(gate) * inner,
    "clamped": _clamped,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated feed-forward (Shazeer 2020); gate and input come from one product.

    Attributes:
        intermediate: features between its products.
        activation: of the gate.
    """

    intermediate: int
    activation: Activation = "silu"

    def declare(self, hidden: int, out_deviation: float) -> dict[str, Any]:
        """Under `feed_forward`, the name that its parameters have in a layer."""
        return {
            "feed_forward": {
                "gate_in": normal(hidden, 2, self.intermediate),
                "out": normal(self.intermediate, hidden, deviation=out_deviation),
            }
        }

    def apply(self, params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, None]:
        """(b, s, m) -> (b, s, m), and no loss."""
        weights = params["feed_forward"]
        both = jnp.einsum("bsm,mtf->bstf", x, weights["gate_in"].astype(x.dtype))
        gate, inner = (lax.index_in_dim(both, i, axis=2, keepdims=False) for i in range(2))  # (b, s, f)
        gated = _GATED[self.activation](gate, inner)
        return jnp.einsum("bsf,fm->bsm", gated, weights["out"].astype(x.dtype)), None

    def flops(self, sequence: int, hidden: int) -> int:
        """Of the forward pass, for a sample."""
        return 6 * sequence * hidden * self.intermediate


def top_k_gating(
    logits: jax.Array, *, top_k: int, capacity: int, router: Literal["softmax", "sigmoid"], scale: float | None
) -> tuple[jax.Array, jax.Array]:
    """Assigns tokens to slots of experts; all first choices come before all second ones, as in GShard.

    Args:
        logits: float32 (g, s, e), the router's opinion of every token of every group.
        top_k: experts of a token.
        capacity: slots c of an expert for one group; later tokens find it full and keep what else they have.
        router: what makes scores of logits.
        scale: what the weights of a token's experts sum to; None to leave them as the router scores them.

    Returns:
        The combine weights, float32 (g, s, e, c), zero where a token has no slot, and the load-balancing loss, a
        scalar that is 1 when the experts of every group are used evenly (Fedus et al. 2021, for k choices).
    """
    experts = logits.shape[-1]
    scores = jax.nn.softmax(logits, axis=-1) if router == "softmax" else jax.nn.sigmoid(logits)
    _, choices = lax.top_k(lax.stop_gradient(scores), top_k)  # (g, s, k)
    chosen = jax.nn.one_hot(jnp.swapaxes(choices, 1, 2), experts, dtype=jnp.float32)  # (g, k, s, e)
    gates = jnp.einsum("gkse,gse->gks", chosen, scores)
    if scale is not None:
        gates = gates * (scale / jnp.sum(gates, axis=1, keepdims=True))

    # A slot number is the count of earlier tokens of the group with the same expert.
    taken = jnp.sum(chosen, axis=2, keepdims=True)  # (g, k, 1, e)
    number = jnp.cumsum(chosen, axis=2) - chosen + jnp.cumsum(taken, axis=1) - taken
    slots = jax.nn.one_hot(jnp.sum(number * chosen, axis=-1).astype(jnp.int32), capacity, dtype=jnp.float32)
    combine = jnp.einsum("gkse,gksc->gsec", gates[..., None] * chosen, slots)

    fraction = jnp.mean(jnp.sum(chosen, axis=1), axis=1) / top_k  # (g, e): share of the choices that are this expert
    opinion = jnp.mean(scores / jnp.sum(scores, axis=-1, keepdims=True), axis=1)
    return combine, jnp.mean(fraction * opinion) * experts**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of gated experts with slots (capacity), as `moe`: moving from tokens split by group to slots split by
    expert is one all-to-all.

    Attributes:
        experts: how many.
        top_k: of a token.
        intermediate: features between an expert's products.
        shared: of a feed-forward that all tokens pass beside their experts; None without.
        activation: of the gates.
        router: what makes scores of its logits.
        scale: what the weights of a token's experts sum to; None to leave them as the router scores them.
        balance: weight of the load-balancing loss; 0 without one.
        bias: whether the experts and the router have biases.
        group: tokens dealt together; it divides the tokens of a step. Dispatch and combine take 4 * group * top_k *
            hidden FLOPs a token beside 6 * top_k * hidden * intermediate of the experts, which bounds it.
        capacity_factor: slots of all experts together, for each choice of a token.
    """

    experts: int
    top_k: int
    intermediate: int
    shared: int | None = None
    activation: Activation = "silu"
    router: Literal["softmax", "sigmoid"] = "softmax"
    scale: float | None = 1.0
    balance: float = 0.01
    bias: bool = False
    group: int = 256
    capacity_factor: float = 1.25

    @property
    def capacity(self) -> int:
        """Slots of an expert for one group."""
        return math.ceil(self.capacity_factor * self.top_k * self.group / self.experts)

    def declare(self, hidden: int, out_deviation: float) -> dict[str, Any]:
        """Under `experts`, and `feed_forward` for what is shared."""
        number, inner = self.experts, self.intermediate
        experts: dict[str, Any] = {
            "router": normal(hidden, number),
            "gate_in": normal(number, hidden, 2, inner),
            "out": normal(number, inner, hidden, deviation=out_deviation),
        }
        if self.bias:
            experts |= {"router_bias": zeros(number), "gate_in_bias": zeros(number, 2, inner)}
            experts["out_bias"] = zeros(number, hidden)
        shared = {} if self.shared is None else self._beside(self.shared).declare(hidden, out_deviation)
        return {"experts": experts, **shared}

    def _beside(self, intermediate: int) -> Dense:
        return Dense(intermediate=intermediate, activation=self.activation)

    def apply(self, params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(b, s, m) -> (b, s, m), and the load-balancing loss with its weight."""
        weights = params["experts"]
        grouped = x.reshape(-1, self.group, x.shape[-1])  # (g, s, m)
        # The router works in float32: rounding its logits would change which expert is best.
        logits = jnp.einsum("gsm,me->gse", grouped.astype(jnp.float32), weights["router"])
        if self.bias:
            logits = logits + weights["router_bias"]
        combine, balance = top_k_gating(
            logits, top_k=self.top_k, capacity=self.capacity, router=self.router, scale=self.scale
        )
        dispatch = (combine > 0).astype(x.dtype)  # (g, s, e, c)
        slots = jnp.einsum("gsec,gsm->egcm", dispatch, grouped)
        both = jnp.einsum("egcm,emtf->egctf", slots, weights["gate_in"].astype(x.dtype))
        if self.bias:
            both = both + weights["gate_in_bias"].astype(x.dtype)[:, None, None]
        gate, inner = (lax.index_in_dim(both, i, axis=3, keepdims=False) for i in range(2))  # (e, g, c, f)
        slots = jnp.einsum("egcf,efm->egcm", _GATED[self.activation](gate, inner), weights["out"].astype(x.dtype))
        if self.bias:
            slots = slots + weights["out_bias"].astype(x.dtype)[:, None, None]
        mixed = jnp.einsum("gsec,egcm->gsm", combine.astype(x.dtype), slots).reshape(x.shape)
        if self.shared is not None:
            mixed = mixed + self._beside(self.shared).apply(params, x)[0]
        return mixed, self.balance * balance

    def flops(self, sequence: int, hidden: int) -> int:
        """Of the forward pass, for a sample: a token's experts, whatever the capacity; dispatch and combine move data
        and are not counted."""
        shared = 0 if self.shared is None else self._beside(self.shared).flops(sequence, hidden)
        return 2 * sequence * hidden * (3 * self.top_k * self.intermediate + self.experts) + shared
