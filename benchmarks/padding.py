"""What padding gains where mesh axes do not divide a dim.

    python benchmarks/padding.py [--only PATTERN]
    MESHWRIGHT_PROGRAMS=folder PYTHONPATH=benchmarks/programs python benchmarks/padding.py --only 'flax*'

Prints one JSON object: for each request the predicted seconds of a step of the plan without padding (`as_it_is`), of
the plan that is found (`found`), and of the same model in a size that is divided (`even`), where there is one;
`over_even` is the second over the third, `gain` the first over the second. Of 7 devices, `times_one` is how many times
as fast as one they are by the plan that is found. Public code is planned where its folder is named, as by
`public_programs.py`. Exit status 1 where padding makes a plan slower.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright.targets import zoo_target
from meshwright.zoo import gpt

MEDIUM = gpt.GPTConfig(name="gpt2-medium", hidden=1024, layers=24, heads=16, vocabulary=50257, global_batch=32)
XL = gpt.GPTConfig(name="gpt2-xl", hidden=1600, layers=48, heads=25, vocabulary=50257, global_batch=64)

Step = tuple[Any, tuple[Any, ...]]


def perceptron(rows: int) -> Step:
    """A step of four layers of 4096, with this many rows."""

    def step(ws: Any, x: Any, y: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = jax.nn.gelu(h @ w)
            return jnp.mean((h - y) ** 2)

        value, grads = mw.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    matrix, data = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (rows, 4096)))
    return step, ([matrix] * 4, data, data)


def gpt2(config: gpt.GPTConfig) -> Step:
    target = zoo_target(gpt.build(config))
    return target.step, target.example_args


def with_devices(number: int) -> mw.Cluster:
    """A host of A100s with so many."""
    cluster = mw.load_cluster("dgx-a100-80:1")
    return replace(cluster, name=f"{number} x A100", hosts=(replace(cluster.hosts[0], devices=number, nics=1),))


def requests() -> Iterator[tuple[str, Step, Step | None, Any, dict[str, Any]]]:
    """Name, step, the same in an even size, cluster, options."""
    even = replace(MEDIUM, vocabulary=50304)
    for preset in ("megatron(tp=8)", "megatron(tp=4)"):
        yield f"vocabulary/{preset}", gpt2(MEDIUM), gpt2(even), "dgx-h100:1", {"preset": preset}
    yield "vocabulary/any", gpt2(MEDIUM), gpt2(even), "dgx-h100:1", {}
    yield "heads/megatron(tp=8)", gpt2(XL), None, "dgx-h100:1", {"preset": "megatron(tp=8)"}
    yield "heads/any", gpt2(XL), None, "dgx-h100:1", {}
    if "MESHWRIGHT_PROGRAMS" in os.environ:
        from gemma import gemma3_1b

        yield "flax gemma3-1b/megatron(tp=8)", gemma3_1b(), None, "tpu-v5e:8", {"preset": "megatron(tp=8)"}
    yield "rows of 7 devices", perceptron(200003), perceptron(200004), with_devices(7), {}
    yield "batch of 7 devices", gpt2(replace(MEDIUM, global_batch=256)), None, with_devices(7), {}


def row(step: Step, even: Step | None, cluster: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The plans of one request."""

    def planned(step: Step, **more: Any) -> Any:
        return mw.plan_for(*step, cluster=cluster, **options, **more)

    before, found = planned(step, padding=False), planned(step)
    made: dict[str, Any] = {
        "as_it_is": before.step_seconds, "found": found.step_seconds, "gain": before.step_seconds / found.step_seconds,
        "planning_seconds": [before.seconds, found.seconds],
        "notes": [note for note in found.plan.notes if note.startswith("padded")],
    }  # fmt: skip
    if even is not None:
        made["even"] = planned(even, padding=False).step_seconds
        made["over_even"] = made["found"] / made["even"]
    if found.cluster.num_devices == 7:
        alone = mw.plan_for(*step, cluster=with_devices(1), **options)
        made["times_one"] = alone.step_seconds / found.step_seconds
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", help="names of requests")
    only = parser.parse_args().only
    rows = {}
    for name, *request in requests():
        if fnmatch.fnmatch(name, only):
            rows[name] = row(*request)
            print(name, json.dumps(rows[name]), file=sys.stderr)
    print(json.dumps(rows, indent=1))
    return int(any(one["gain"] < 0.995 for one in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
