"""What no schedule can beat: three loads, each a lower bound on the seconds of a move.

* *Receive*: a domain must let in, once, every byte it needs and does not hold.
* *Send*: every byte that some domain lacks must leave a domain that holds it at least once (`flow.least_send_load`).
* *Core*: all of it together must pass the core.

Exact (fractions). It is met, up to the first chunk of a relay, whenever the meshes are disjoint and no receiver sends
slower than it receives; elsewhere the relays' own send load can keep every schedule above it (`routes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .flow import least_send_load
from .tasks import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The three loads, in seconds.

    >>> Bound(receive_seconds=Fraction(2), send_seconds=Fraction(3), core_seconds=Fraction(0)).seconds
    Fraction(3, 1)
    """

    receive_seconds: Fraction
    send_seconds: Fraction
    core_seconds: Fraction

    @property
    def seconds(self) -> Fraction:
        """The lower bound: the largest of the three."""
        return max(self.receive_seconds, self.send_seconds, self.core_seconds)


def lower_bound(demand: Demand) -> Bound:
    """The least seconds that any schedule of `demand` takes, latency left out."""
    network = demand.network
    received = [0] * len(network.members)
    volumes: dict[tuple[int, ...], int] = {}
    for task in demand.classes:
        for d in task.receivers:
            received[d] += task.bytes
        if task.receivers:
            volumes[task.senders] = volumes.get(task.senders, 0) + task.bytes
    loads = (Fraction(v) / r for v, r in zip(received, network.receive_rates, strict=True))
    core = Fraction(0) if network.core_rate is None else Fraction(demand.needed_bytes) / Fraction(network.core_rate)
    return Bound(
        receive_seconds=max(loads, default=Fraction(0)),
        send_seconds=least_send_load(volumes, network.send_rates)[0],
        core_seconds=core,
    )
