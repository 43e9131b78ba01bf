"""Meshwright: finds the fastest way to run a JAX training step on a cluster, and runs it.

The public names are resolved on first use, so ``import meshwright`` costs nothing and never imports JAX: a plan can be
looked at, compared and simulated on a machine without it.
"""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

# Each public name and the module it lives in. A new public name is one line here.
_HOME = {
    "Cluster": "cluster",
    "Plan": "plan",
    "PlanError": "errors",
    "attention": "_jax.attention",
    "initialize": "launch",
    "kernel": "_jax.own_kernels",
    "layer_boundary": "_jax.boundary",
    "load_cluster": "cluster",
    "load_plan": "plan",
    "parallelize": "api",
    "reshard": "runtime.resharding",
    "reshard_plan": "runtime.resharding",
    "spread_shardings": "runtime.spread",
    "plan_for": "api",
    "value_and_grad": "api",
}

# Public modules, whose names are best read behind theirs: meshwright.presets.zero.
_MODULES = ("presets",)

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    """Import the home of a public name and keep the name here, so that this runs once for each."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        # With `obj` given, Python itself proposes the nearest public name.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
