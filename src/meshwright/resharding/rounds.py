"""Traffic between ports as a sequence of rounds, none of which asks a port for more than it has.

Given bytes[p, q] from port p to port q, the time needed is the largest load/rate of a port (or of the core), and it is
enough: pad the table with what each port and the core have to spare, so that all of them are busy all the time; then
the table divided by the time is a point of a transportation polytope, and the table a sum of rounds times durations,
each round a vertex. With equal rates the rounds are matchings, and this is the theorem of Birkhoff and von Neumann
(Koenig's edge colouring, the preemptive open shop of Gonzalez and Sahni); with unequal rates a fast port serves
several slower ones in a round, each at a rate of its own. A round is found by an integer max-flow, with the longest
duration for which one exists, which keeps rounds few.

Cost: at most as many rounds as pairs and ports, a few max-flows each (SciPy). Limit: rates whose ratios are not small
fractions are rounded down to 1/4096 of the slowest port.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

# Ratios of rates up to this are kept exactly; others become multiples of 1/4096 of the smallest.
_EXACT_RATE = 1 << 16
_RATE_GRID = 1 << 12
_LARGEST_CAPACITY = (1 << 31) - 1

# Of the time of all rounds: what doing without crumbs may cost.
_CRUMBS = 1 / 1024

Round = list[tuple[int, int, int]]
"""Port that sends, port that receives, bytes."""


def decompose(
    volumes: Mapping[tuple[int, int], int],
    *,
    send_rates: Sequence[Fraction],
    receive_rates: Sequence[Fraction],
    core_rate: Fraction | None = None,
) -> list[Round]:
    """Rounds whose durations add up to the busiest port's load.

    >>> one = [Fraction(1)] * 2
    >>> decompose({(0, 0): 2, (0, 1): 1, (1, 0): 1, (1, 1): 2}, send_rates=one, receive_rates=one)
    [[(0, 0, 2), (1, 1, 2)], [(0, 1, 1), (1, 0, 1)]]

    Args:
      volumes: bytes from port p to port q, by (p, q).
      send_rates: bytes/s of each sending port.
      receive_rates: bytes/s of each receiving port.
      core_rate: bytes/s of everything together, or `None`.

    Returns:
      the rounds in order; each takes as long as its busiest port.
    """
    pairs = sorted(pair for pair, volume in volumes.items() if volume > 0)
    if not pairs:
        return []
    senders, receivers = sorted({p for p, _ in pairs}), sorted({q for _, q in pairs})
    table = _PaddedTable(
        pairs=[(senders.index(p), receivers.index(q)) for p, q in pairs],
        volumes=[volumes[pair] for pair in pairs],
        rates=([send_rates[p] for p in senders], [receive_rates[q] for q in receivers]),
        core_rate=core_rate,
    )
    # Positions in scaled bytes; cutting each pair's line there makes the bytes of all rounds add up.
    done = np.zeros(len(pairs), dtype=np.int64)
    rounds: list[Round] = []
    while table.left():
        served = table.next_round()
        now = done + served
        sent = now // table.scale - done // table.scale
        done = now
        active = np.flatnonzero(sent)
        if len(active):
            rounds.append([(*pairs[i], v) for i, v in zip(active.tolist(), sent[active].tolist(), strict=True)])
    return rounds


def without_crumbs(
    rounds: list[Round],
    *,
    send_rates: Sequence[Fraction],
    receive_rates: Sequence[Fraction],
    core_rate: Fraction | None = None,
) -> list[Round]:
    """The rounds without those of a few bytes that are there because bytes are whole; a round costs a latency.

    What two ports exchange in next to no time moves to the round in which they exchange most. All of it together may
    cost a thousandth of the time; if it costs more, the rounds are left as they are.

    >>> one = [Fraction(1)] * 2
    >>> without_crumbs([[(0, 0, 4000), (1, 1, 3999)], [(1, 1, 1)]], send_rates=one, receive_rates=one)
    [[(0, 0, 4000), (1, 1, 4000)]]

    Args: as of `decompose`, whose result `rounds` is.
    """
    if len(rounds) < 2:
        return rounds
    send, receive = [float(r) for r in send_rates], [float(r) for r in receive_rates]
    core = None if core_rate is None else float(core_rate)
    before = _seconds(rounds, send, receive, core)
    crumb = before * _CRUMBS / len(rounds)
    most: dict[tuple[int, int], tuple[int, int]] = {}
    for number, one in enumerate(rounds):
        for p, q, v in one:
            if v > most.get((p, q), (0, 0))[0]:
                most[p, q] = v, number
    found: list[dict[tuple[int, int], int]] = [{} for _ in rounds]
    for number, one in enumerate(rounds):
        for p, q, v in one:
            place = most[p, q][1] if v <= crumb * min(send[p], receive[q]) else number
            found[place][p, q] = found[place].get((p, q), 0) + v
    merged = [[(p, q, v) for (p, q), v in sorted(one.items())] for one in found if one]
    return merged if _seconds(merged, send, receive, core) <= before * (1 + _CRUMBS) else rounds


def _seconds(rounds: Sequence[Round], send: Sequence[float], receive: Sequence[float], core: float | None) -> float:
    """The rounds one after the other, each as long as its busiest port."""
    total = 0.0
    for one in rounds:
        out: dict[int, int] = {}
        into: dict[int, int] = {}
        for p, q, v in one:
            out[p], into[q] = out.get(p, 0) + v, into.get(q, 0) + v
        busiest = max(*(v / send[p] for p, v in out.items()), *(v / receive[q] for q, v in into.items()))
        total += busiest if core is None else max(busiest, sum(out.values()) / core)
    return total


class _PaddedTable:
    """The table with a row and a column for what ports have to spare, and one each for what the core has."""

    def __init__(
        self,
        *,
        pairs: list[tuple[int, int]],
        volumes: list[int],
        rates: tuple[list[Fraction], list[Fraction]],
        core_rate: Fraction | None,
    ) -> None:
        from scipy.sparse import csr_array  # a sixth of a second, which most never need

        rows, columns = len(rates[0]), len(rates[1])
        most = min(sum(rates[0], Fraction(0)), sum(rates[1], Fraction(0)))
        with_core = core_rate is not None and core_rate < most
        whole = _whole_numbers([*rates[0], *rates[1], *([core_rate] if with_core and core_rate else [])])
        out, into = whole[:rows], whole[rows : rows + columns]
        core = whole[-1] if with_core else min(sum(out), sum(into))
        common = math.lcm(*whole, core)
        self.scale = common if common <= _EXACT_RATE and sum(volumes) * common < 1 << 60 else 1
        scaled = [v * self.scale for v in volumes]
        loads = [0] * rows, [0] * columns
        for (p, q), v in zip(pairs, scaled, strict=True):
            loads[0][p] += v
            loads[1][q] += v
        total = sum(scaled)
        busiest = [*zip(loads[0], out, strict=True), *zip(loads[1], into, strict=True), (total, core)]
        time = max(-(-load // rate) for load, rate in busiest)
        # Rows: ports, spare, core. Columns: ports, spare, core.
        edges = [
            *((p, q, v) for (p, q), v in zip(pairs, scaled, strict=True)),
            *((p, columns, out[p] * time - loads[0][p]) for p in range(rows)),
            *((rows, q, into[q] * time - loads[1][q]) for q in range(columns)),
            (rows, columns + 1, total),
            (rows + 1, columns, total),
            (rows + 1, columns + 1, core * time - total),
        ]
        self.count = len(pairs)
        self.left_over = np.array([v for _, _, v in edges], dtype=np.int64)
        row_rate, column_rate = [*out, sum(into), core], [*into, sum(out), core]
        self.rate = sum(row_rate)
        # One graph: source 0, then rows, then columns, then the sink.
        first_column, sink = 1 + rows + 2, 1 + rows + 2 + columns + 2
        tails = np.array(
            [0] * (rows + 2) + [1 + p for p, _, _ in edges] + [first_column + q for q in range(columns + 2)]
        )
        heads = np.array(
            [1 + p for p in range(rows + 2)] + [first_column + q for _, q, _ in edges] + [sink] * (columns + 2)
        )
        fixed = row_rate + [0] * len(edges) + column_rate
        # The places of the edges in the matrix's data never change: only capacities do.
        places = csr_array((np.arange(len(tails)) + 1, (tails, heads)), shape=(sink + 1, sink + 1))
        order = places.data - 1
        self.graph = csr_array(
            (np.array(fixed, dtype=np.int32)[order], places.indices, places.indptr), shape=places.shape
        )
        inner = np.flatnonzero((order >= rows + 2) & (order < rows + 2 + len(edges)))
        self.place = np.empty(len(edges), dtype=np.int64)
        self.place[order[inner] - rows - 2] = inner
        self.ends = (tails[rows + 2 : rows + 2 + len(edges)], heads[rows + 2 : rows + 2 + len(edges)])
        self.source, self.sink = 0, sink
        self.longest = time

    def left(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self.left_over[: self.count].any())

    def next_round(self) -> np.ndarray:
        """What each pair sends in the next round, in scaled bytes."""
        values = np.unique(self.left_over[self.left_over > 0])
        candidates = [*values[values < self.longest][::-1].tolist(), 1]
        candidates.insert(0, self.longest)
        # The longest duration never grows from round to round, and is mostly near the last one: gallop, then bisect.
        low, step, high = -1, 1, 0
        flow = self._flow(candidates[0])
        while flow is None:
            low, high = high, min(high + step, len(candidates) - 1)
            step *= 2
            flow = self._flow(candidates[high])
        while high - low > 1:
            middle = (low + high) // 2
            other = self._flow(candidates[middle])
            if other is None:
                low = middle
            else:
                high, flow = middle, other
        used = flow > 0
        duration = int((self.left_over[used] // flow[used]).min())
        self.longest = candidates[high]
        self.left_over -= flow * duration
        return flow[: self.count] * duration

    def _flow(self, duration: int) -> np.ndarray | None:
        """Rates of all pairs that keep every port busy and can be kept up for `duration`, or None."""
        from scipy.sparse.csgraph import maximum_flow

        self.graph.data[self.place] = np.minimum(self.left_over // duration, _LARGEST_CAPACITY)
        result = maximum_flow(self.graph, self.source, self.sink)
        if result.flow_value < self.rate:
            return None
        return np.asarray(result.flow[self.ends]).ravel().astype(np.int64)


def _whole_numbers(rates: list[Fraction]) -> list[int]:
    """Whole numbers in the ratios of `rates`."""
    denominator = math.lcm(*(r.denominator for r in rates))
    whole = [int(r * denominator) for r in rates]
    divisor = math.gcd(*whole)
    whole = [w // divisor for w in whole]
    if max(whole) <= _EXACT_RATE:
        return whole
    least = min(rates)
    return [int(r / least * _RATE_GRID) for r in rates]
