"""A loop over layers keeps for its backward pass what the same layers keep without a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import presets
from meshwright.cluster import load_cluster
from meshwright.planning import plan_for
from meshwright.program.traces import traces_of
from meshwright.zoo import Target, gpt, llama


def activations(target: Target) -> list[float]:
    """Bytes of each of two stages, traced."""
    plan = plan_for(
        traces_of(target.step), (target.example_state, target.example_batch), cluster=load_cluster("dgx-a100-80"),
        preset=presets.megatron(tp=2, pp=2, dp=2), microbatches=4, remat="none",
    ).plan  # fmt: skip
    return [stage.memory.activations for stage in plan.stages]


def test_a_scan_keeps_no_more_than_its_layers_unrolled() -> None:
    """JAX's own derivative of the scan keeps 2.9 times as much: softmax and GELU above all."""
    config = replace(gpt.CONFIGS["gpt-tiny"], hidden=64, heads=4, layers=4, sequence=128, global_batch=16)
    unrolled, scanned = (activations(gpt.build(replace(config, scan=scan))) for scan in (False, True))
    for kept, expected in zip(scanned, unrolled, strict=True):
        assert 0.5 * expected < kept < 1.1 * expected


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_a_user_rematerialises_in_a_scan_is_not_kept(family: str) -> None:
    """The loop's own rule would keep products; inside of `jax.checkpoint` the user has said otherwise."""

    def target(*, remat: bool) -> Target:
        if family == "gpt":
            small = replace(gpt.CONFIGS["gpt-tiny"], layers=4, sequence=128, global_batch=16, scan=True)
            return gpt.build(small, remat=remat)
        return llama.build(replace(llama.CONFIGS["llama-tiny"], layers=4, sequence=128, global_batch=16), remat=remat)

    for kept, less in zip(activations(target(remat=False)), activations(target(remat=True)), strict=True):
        assert less < 0.5 * kept
