"""Connections that the system closes when a process ends, however it does.

A process that is killed, crashes or leaves by os._exit tells nobody, and JAX's heartbeats miss it after half a minute.
So each process of a run keeps a connection to process 0, over which nothing is sent but who it is: when one end is
gone, the other reads the end of the stream. No process is taken for dead because it is slow.

Known limits: a machine that is lost closes no connection, and a firewall between the machines may refuse this one (a
free port of process 0's machine); then there are JAX's heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

_CONNECT_SECONDS = 30.0
_MOST_BYTES = 128


def keep_lifeline(
    me: int, coordinator: str, publish: Callable[[str], None], read: Callable[[], str], gone: Callable[[int], None]
) -> None:
    """Connect this process to process 0, for as long as it lives, and hear of those that are gone. Does not block.

    Args:
      me: the number of this process.
      coordinator: the host on which the others reach process 0.
      publish: in process 0, tells the others where to connect.
      read: in the others, waits for that.
      gone: called, in a thread of its own, with the number of a process whose connection has ended; in all but process
        0 that is process 0.
    """
    if me == 0:
        # Local processes need no port that is open to the network.
        if coordinator in ("localhost", "127.0.0.1"):
            port = socket.create_server((coordinator, 0))
        elif socket.has_dualstack_ipv6():
            port = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            port = socket.create_server(("", 0))
        token = secrets.token_hex(16)
        publish(f"{port.getsockname()[1]} {token}")
        _only_here(port)
        start = threading.Thread(target=_serve, args=(port, token, gone), name="meshwright.lifeline", daemon=True)
    else:
        start = threading.Thread(
            target=_hold, args=(me, coordinator, read, gone), name="meshwright.lifeline", daemon=True
        )
    start.start()


def _only_here(end: socket.socket) -> None:
    """A forked child, which may outlive this process, does not keep the connection open."""
    os.register_at_fork(after_in_child=end.close)


def _hold(me: int, host: str, read: Callable[[], str], gone: Callable[[int], None]) -> None:
    with contextlib.suppress(Exception):  # no way to process 0 but the coordinator's: see the known limits
        port, token = read().split()
        line = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        _only_here(line)
        line.settimeout(None)
        line.sendall(f"{token} {me}\n".encode())
        if not line.recv(1):
            gone(0)


def _serve(port: socket.socket, token: str, gone: Callable[[int], None]) -> None:
    selector = selectors.DefaultSelector()
    selector.register(port, selectors.EVENT_READ)
    who: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is port:
                with contextlib.suppress(OSError):
                    line, _ = port.accept()
                    _only_here(line)
                    line.setblocking(False)
                    selector.register(line, selectors.EVENT_READ)
                continue
            line = key.fileobj
            assert isinstance(line, socket.socket)
            said = b""
            with contextlib.suppress(OSError):
                said = line.recv(_MOST_BYTES)
            words = said.decode(errors="replace").split()
            if line not in who and len(words) == 2 and words[0] == token and words[1].isdecimal():
                who[line] = int(words[1])
                continue
            selector.unregister(line)
            line.close()
            if line in who:
                threading.Thread(target=gone, args=(who.pop(line),), name="meshwright.gone", daemon=True).start()
