"""Effects of a step (prints, callbacks), run after it on whole values.

The program that a plan splits has no effects: what they read are further results of it (`_jax.lifting`). Here they run
on these, in the order of the program, as a program of one device of process 0. It is issued like the step, without
waiting; `jax.effects_barrier` waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..program.trace import Program


class Replay:
    """Runs the effects of a step.

    Args:
      program: the traced step.
    """

    def __init__(self, program: Program) -> None:
        self._effects = program.effects
        self._jitted = jax.jit(lambda *values: self._effects.run(values, None))

    @property
    def count(self) -> int:
        """How many arrays effects read, the last results of the step."""
        return self._effects.count

    def __call__(self, values: Sequence[Any]) -> None:
        """Run the effects of one step; does nothing in processes other than 0.

        Args:
          values: what they read, each whole on every device that it is on, of which this process has one.
        """
        if not self._effects.lifted or jax.process_index() != 0:
            return
        blocks = [value.addressable_data(0) for value in values]
        device = next(iter(blocks[0].devices())) if blocks else jax.local_devices()[0]
        self._jitted(*(jax.device_put(block, device) for block in blocks))
