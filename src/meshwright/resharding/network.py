"""The machines a move runs on, as the planner sees them: ports, and the domains that share them.

A *port* is a NIC: it sends and receives at the same time (full duplex), each at its own rate. A *domain* is a set of
hosts whose devices reach each other so fast that a byte needs to enter it once (a host; an NVLink domain or a TPU
slice of several hosts). Traffic inside a domain is taken to be free, traffic between domains passes one port on
either side, and all of it together passes the core of the network where that has a rate.

Limits: one level of core; no rates between single pairs of hosts; a domain's devices may use any of its NICs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from .errors import ReshardError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface.

    >>> Nic(send_rate=1e9, receive_rate=2e9).receive_rate
    2000000000.0

    Args:
      send_rate: bytes/s out of the host.
      receive_rate: bytes/s into the host, at the same time.

    Raises:
      ReshardError: a rate is not a finite positive number.
    """

    send_rate: float | Fraction
    receive_rate: float | Fraction

    def __post_init__(self) -> None:
        for field in ("send_rate", "receive_rate"):
            check_positive(getattr(self, field), what=f"Nic.{field}", unit="bytes/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: its devices (ids) and its NICs.

    >>> Host(devices=(0, 1), nics=(Nic(send_rate=1e9, receive_rate=1e9),)).devices
    (0, 1)
    """

    devices: tuple[int, ...]
    nics: tuple[Nic, ...]

    def __post_init__(self) -> None:
        # Lists are taken too; plans are kept by their network, which has to be hashable.
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "nics", tuple(self.nics))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts, the domains they form, and the core between them.

    >>> nic = Nic(send_rate=1e9, receive_rate=1e9)
    >>> pair = Network(hosts=(Host(devices=(0, 1), nics=(nic,)), Host(devices=(2, 3), nics=(nic,))))
    >>> pair.domain_of[3], pair.send_rates
    (1, (Fraction(1000000000, 1), Fraction(1000000000, 1)))

    Args:
      hosts: the machines.
      domains: positions of the hosts in each fast domain; each host is one by itself by default.
      core_rate: bytes/s of all traffic between domains together; `None` where the core is never the limit.
      latency_seconds: seconds before the first byte of a message moves; it decides how finely relayed data is chunked.

    Raises:
      ReshardError: a device is in two hosts, a host in no or two domains, a host without NIC, or a rate out of range.
    """

    hosts: tuple[Host, ...]
    domains: tuple[tuple[int, ...], ...] | None = None
    core_rate: float | Fraction | None = None
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        domains = ((h,) for h in range(len(self.hosts))) if self.domains is None else self.domains
        object.__setattr__(self, "domains", tuple(map(tuple, domains)))
        if self.core_rate is not None:
            check_positive(self.core_rate, what="Network.core_rate", unit="bytes/s")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ReshardError(
                refused="the network", got=f"latency {self.latency_seconds}", needed="a finite number of seconds >= 0",
                where="Network.latency_seconds", try_="0.0 or 1e-5",
            )  # fmt: skip
        members = sorted(h for domain in self.members for h in domain)
        if members != list(range(len(self.hosts))):
            raise ReshardError(
                refused="the fast domains", got=f"{self.domains}", needed=f"hosts 0 to {len(self.hosts) - 1} once each",
                where="Network.domains", try_="leaving domains out, which makes each host its own",
            )  # fmt: skip
        seen: set[int] = set()
        for number, host in enumerate(self.hosts):
            if not host.nics:
                raise ReshardError(
                    refused="a host", got="no NIC", needed="at least one", where=f"Network.hosts[{number}]",
                    try_="joining it to the domain of a host that has one, with its NICs",
                )  # fmt: skip
            twice = [d for d in host.devices if d in seen or host.devices.count(d) > 1]
            if twice:
                raise ReshardError(
                    refused="a host", got=f"device {twice[0]} a second time", needed="each device in one host",
                    where=f"Network.hosts[{number}]", try_="numbering the devices of all hosts differently",
                )  # fmt: skip
            seen.update(host.devices)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the hosts in each domain."""
        assert self.domains is not None  # set in __post_init__
        return self.domains

    @cached_property
    def domain_of(self) -> dict[int, int]:
        """The domain of each device."""
        return {d: i for i, domain in enumerate(self.members) for h in domain for d in self.hosts[h].devices}

    @cached_property
    def nics(self) -> tuple[tuple[Nic, ...], ...]:
        """The NICs of each domain, in the order of its hosts."""
        return tuple(tuple(nic for h in domain for nic in self.hosts[h].nics) for domain in self.members)

    @cached_property
    def send_rates(self) -> tuple[Fraction, ...]:
        """Bytes/s out of each domain, over all its NICs; exact."""
        return tuple(sum((Fraction(n.send_rate) for n in nics), Fraction(0)) for nics in self.nics)

    @cached_property
    def receive_rates(self) -> tuple[Fraction, ...]:
        """Bytes/s into each domain, over all its NICs; exact."""
        return tuple(sum((Fraction(n.receive_rate) for n in nics), Fraction(0)) for nics in self.nics)


def uniform_network(
    hosts: Sequence[Sequence[int]],
    *,
    nic_rate: float,
    nics: int = 1,
    core_rate: float | None = None,
    latency_seconds: float = 0.0,
) -> Network:
    """A network of equal hosts.

    >>> uniform_network([(0, 1), (2, 3)], nic_rate=1e9, nics=2).send_rates[0]
    Fraction(2000000000, 1)

    Args:
      hosts: the devices (ids) of each host.
      nic_rate: bytes/s of one NIC, each way.
      nics: NICs of each host.
      core_rate: bytes/s of all traffic between hosts together; `None` for no limit.
      latency_seconds: seconds before the first byte of a message moves.

    Raises:
      ReshardError: as `Network`.
    """
    nic = Nic(send_rate=nic_rate, receive_rate=nic_rate)
    return Network(
        hosts=tuple(Host(devices=tuple(devices), nics=(nic,) * nics) for devices in hosts),
        core_rate=core_rate,
        latency_seconds=latency_seconds,
    )


def check_positive(value: object, *, what: str, unit: str) -> None:
    """Refuse a `value` that is no finite number above 0."""
    good = isinstance(value, int | float | Fraction) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and value > 0):  # pyrefly: ignore[unsupported-operation]
        raise ReshardError(
            refused="the network", got=repr(value), needed=f"a finite number of {unit} > 0", where=what,
            try_="a plain number such as 1.25e9",
        )  # fmt: skip
