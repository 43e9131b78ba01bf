"""The planner: demand, lower bound, routes, ports, rounds, chunks, in this order.

The time of the plan is the lower bound where senders have slack for direct copies; else at most (1 + 1/K) times the
linear program of `routes` with K chunks, cut by whole elements. The least K that gives the shortest time, the latency
of all rounds included, is taken. Cost: see the modules; about a second for tens of thousands of unit tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .bound import Bound, lower_bound
from .network import Network
from .plan import ReshardPlan, Share
from .ports import Flow, flows_of
from .rounds import decompose, without_crumbs
from .routes import Routes, choose_routes, on_grid
from .tasks import Demand, Move, demand_of

MOST_CHUNKS = 128
"""Chunks beyond which a relay's first chunk, 1/K of the time, is not worth more rounds."""


def plan_reshard(
    network: Network,
    moves: Sequence[Move],
    *,
    most_chunks: int = MOST_CHUNKS,
    most_transfer_bytes: int | None = None,
) -> ReshardPlan:
    """Plan the move of all tensors together.

    >>> from meshwright.resharding.layout import grid_layout
    >>> from meshwright.resharding.network import uniform_network
    >>> network = uniform_network([(0, 1), (2, 3)], nic_rate=1e9)
    >>> split = grid_layout((0, 1), (2,), ("x",), [("x",)])
    >>> whole = grid_layout((2, 3), (2,), ("x",), [])
    >>> plan = plan_reshard(network, [Move(name="w", shape=(8,), item_bytes=4, source=split, destination=whole)])
    >>> plan.bytes_between_domains, plan.seconds == plan.bound.seconds
    (32, True)

    Args:
      network: the machines.
      moves: the tensors.
      most_chunks: the most chunks that relayed data is cut into for the sake of time.
      most_transfer_bytes: the most bytes that two ports exchange in a round, for the sake of buffers: everything is cut
        into as many chunks as that takes. `None` for no limit; below the width of an element, one element.

    Returns:
      the plan; the same for the same arguments.

    Raises:
      ReshardError: a mesh has a device that no host of the network has.
    """
    demand = demand_of(network, moves)
    bound = lower_bound(demand)
    chosen = choose_routes(demand, bound)
    busiest = Fraction(max(chosen.relay_bound_seconds, float(bound.seconds)))
    latency = Fraction(network.latency_seconds)
    chunks = _first_guess(busiest, latency, most_chunks) if any(route.onward for route in chosen.routes) else 1
    best = None
    while chunks:
        plan = _with_chunks(demand, bound, chosen, chunks)
        seconds = plan.seconds + latency * plan.rounds
        if best is None or seconds < best[0]:
            best = (seconds, plan)
        # Half the chunks cost one more first chunk, and save half of what rounding and latency cost.
        if seconds - busiest * (1 + Fraction(1, chunks)) <= 2 * busiest / chunks:
            break
        chunks //= 2
    assert best is not None  # there is at least one chunk
    plan = best[1]
    limit = max(most_transfer_bytes or 0, demand.unit)
    while most_transfer_bytes is not None and plan.largest_transfer_bytes > limit:
        plan = _with_chunks(demand, bound, chosen, plan.chunks * -(-plan.largest_transfer_bytes // limit))
    return plan


def _first_guess(busiest: Fraction, latency: Fraction, most: int) -> int:
    """The largest power of two of chunks worth trying: beyond it even one round a chunk costs more than it saves."""
    chunks = 1
    while chunks * 2 <= most and latency * (chunks * 2) ** 2 <= 2 * busiest:
        chunks *= 2
    return chunks


def _with_chunks(demand: Demand, bound: Bound, chosen: Routes, chunks: int) -> ReshardPlan:
    routes = tuple(chosen.routes if chunks == 1 else on_grid(demand, chosen.routes, chunks * demand.unit))
    flows = tuple(flows_of(demand.network, routes, chunks=chunks, unit=demand.unit))
    return ReshardPlan(
        demand=demand, bound=bound, relay_bound_seconds=chosen.relay_bound_seconds, routes=routes, flows=flows,
        shares=tuple(_shares(demand, flows, chunks)), chunks=chunks, unit=demand.unit,
    )  # fmt: skip


def _shares(demand: Demand, flows: Sequence[Flow], periods: int) -> list[Share]:
    """The rounds of one period: the flows between two ports laid end to end, and cut where a round is over.

    Where there is one period, and so no relay's first chunk to wait for, the rounds end with the busiest port exactly.
    """
    network = demand.network
    queues: dict[tuple[int, int], list[int]] = {}
    volumes: dict[tuple[int, int], int] = {}
    for i, flow in enumerate(flows):
        pair = (flow.sender, flow.receiver)
        queues.setdefault(pair, []).append(i)
        # Whole units, so that rounds end where elements do.
        volumes[pair] = volumes.get(pair, 0) + (flow.end - flow.begin) // demand.unit
    send_rates = [Fraction(nic.send_rate) for nics in network.nics for nic in nics]
    receive_rates = [Fraction(nic.receive_rate) for nics in network.nics for nic in nics]
    core_rate = None if network.core_rate is None else Fraction(network.core_rate)
    found = decompose(volumes, send_rates=send_rates, receive_rates=receive_rates, core_rate=core_rate)
    if periods > 1:
        found = without_crumbs(found, send_rates=send_rates, receive_rates=receive_rates, core_rate=core_rate)
    heads = dict.fromkeys(queues, 0)
    position = {pair: flows[queue[0]].begin for pair, queue in queues.items()}
    shares = []
    for number, step in enumerate(found):
        for sender, receiver, units in step:
            pair = (sender, receiver)
            left = units * demand.unit
            while left:
                flow = flows[queues[pair][heads[pair]]]
                end = min(flow.end, position[pair] + left)
                shares.append(Share(round=number, flow=queues[pair][heads[pair]], begin=position[pair], end=end))
                left -= end - position[pair]
                position[pair] = end
                if end == flow.end and heads[pair] + 1 < len(queues[pair]):
                    heads[pair] += 1
                    position[pair] = flows[queues[pair][heads[pair]]].begin
    return shares
