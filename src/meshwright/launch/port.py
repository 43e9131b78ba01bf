"""Ports of this machine: holding one for the coordinator, and finding out who listens.

A port that is found free and let go may be taken by another program before the coordinator binds it. Ours is therefore
held while the processes run, by a socket that is bound with SO_REUSEPORT and never listens: gRPC, which binds with the
same option, may bind beside it, and other programs are not given the port.
"""

from __future__ import annotations

import socket

from .errors import LaunchError


def hold_port(port: int | None = None) -> socket.socket:
    """A socket that holds `port` of 127.0.0.1, or a free port that the system picks.

    Raises:
      LaunchError: if `port` is taken or is no port.

    >>> with hold_port() as held:
    ...     held.getsockname()[1] > 0
    True
    """
    if port is not None and not 1 <= port <= 65535:
        raise _refusal(port, "a number that is no port")
    if port is not None and somebody_listens("127.0.0.1", port):
        raise _refusal(port, "somebody already listens there")
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", port or 0))
    except OSError as error:
        held.close()
        raise _refusal(port or 0, error.strerror or str(error)) from None
    return held


def somebody_listens(host: str, port: int, *, timeout_seconds: float = 1.0) -> bool:
    """Whether a connection to `host`:`port` is accepted within `timeout_seconds`."""
    try:
        with socket.create_connection((host, port), timeout=timeout_seconds) as connection:
            # A socket that was given this very port as its own reaches itself.
            return connection.getsockname() != connection.getpeername()
    except OSError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Raises:
      LaunchError: for anything else.

    >>> split_address("node7:4000")
    ('node7', 4000)
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 1 <= int(port) <= 65535):
        raise LaunchError(
            refused="the coordinator's address", got=repr(address), needed="host:port", where="coordinator",
            try_="the host of process 0 and a port that is free there: 'node7:4000'",
        )  # fmt: skip
    return host.strip("[]"), int(port)


def _refusal(port: int, reason: str) -> LaunchError:
    return LaunchError(
        refused=f"port {port} for the coordinator", got=reason, needed="a port that is free on this machine",
        where=f"127.0.0.1:{port}", try_="another port",
    )  # fmt: skip
