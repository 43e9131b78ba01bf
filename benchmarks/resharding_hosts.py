"""Hosts with limited NICs on one machine: network namespaces joined by a bridge, shaped by `tc`.

A NIC is a `veth` pair with a token bucket at either end, and large frames, as clusters have (small ones cost more CPU
time than a few cores have for six hosts). A core that all hosts share is an `ifb` device with a token bucket of its
own, through which what each host sends is led before the bridge. Needs Linux and root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PREFIX = "meshw"
_BURST_BYTES = 65536
# Nothing is lost, as in a cluster's fabric: a lost frame costs fifth parts of seconds.
_QUEUE_BYTES = 1 << 28
_MTU = "9000"
_PORT = 29555
_LIMIT_SECONDS = 1500
# Whatever the machine uses outside: senders that fill a NIC's queue until it is full (of those that Linux lets any
# namespace choose), and a window that does not shrink between one message and the next.
_TCP = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
# A process keeps the memory that it has freed, as accelerators' allocators do, in one pool and large pages: the first
# touch of a page costs more here than all copies of what is on it, and made up half the seconds of some moves.
_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def missing() -> str | None:
    """Why this machine cannot emulate hosts, or None."""
    absent = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    if os.geteuid() != 0:
        return "not root"
    try:
        command("ip", "netns", "add", f"{_PREFIX}try")
        command("ip", "netns", "del", f"{_PREFIX}try")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.decode().strip()}"
    return None


@contextlib.contextmanager
def hosts(rates: Sequence[float], core_rate: float | None = None) -> Iterator[list[str]]:
    """Namespaces with a NIC each, 10.77.0.1 and on; gone afterwards.

    Args:
      rates: of the NICs, each way, in bytes/s.
      core_rate: of all traffic together.
    """
    names = [f"{_PREFIX}{i}" for i in range(len(rates))]
    switch = f"{_PREFIX}sw"
    try:
        command("ip", "netns", "add", switch)
        command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "br0", "up")
        if core_rate is not None:
            command("ip", "-n", switch, "link", "add", "core", "type", "ifb")
            command("ip", "-n", switch, "link", "set", "core", "up")
            command("tc", "-n", switch, "qdisc", "add", "dev", "core", "root", "tbf", *_limit(core_rate))
        for i, (name, rate) in enumerate(zip(names, rates, strict=True)):
            command("ip", "netns", "add", name)
            there = ("peer", "name", f"p{i}", "mtu", _MTU, "netns", switch)
            command("ip", "-n", name, "link", "add", "eth0", "mtu", _MTU, "type", "veth", *there)
            command("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            command("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "netns", "exec", name, "sysctl", "-q", "-w", *_TCP)
            for where, nic in ((name, "eth0"), (switch, f"p{i}")):
                command("tc", "-n", where, "qdisc", "add", "dev", nic, "root", "tbf", *_limit(rate))
            if core_rate is not None:  # what a host sends passes the core before the bridge
                port = ("tc", "-n", switch)
                command(*port, "qdisc", "add", "dev", f"p{i}", "ingress")
                through = ("u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", "core")
                command(*port, "filter", "add", "dev", f"p{i}", "parent", "ffff:", "protocol", "all", *through)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _limit(rate: float) -> tuple[str, ...]:
    return ("rate", f"{round(rate * 8)}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))


def start(
    script: str, names: Sequence[str], devices: int, job: Path, keep: Sequence[int] = ()
) -> list[subprocess.Popen[str]]:
    """A script as a child in every namespace, with a host name that resolves to its address there."""
    processes = []
    for i, name in enumerate(names):
        table = job.parent / f"{name}.hosts"
        table.write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {name}\n")
        inside = f'hostname {name} && mount --bind {table} /etc/hosts && exec "$@"'
        words = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]
        environment = {
            **os.environ,
            **_MEMORY,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "MESHWRIGHT_COORDINATOR": f"10.77.0.1:{_PORT}",
            "MESHWRIGHT_PROCESSES": str(len(names)),
            "MESHWRIGHT_PROCESS_ID": str(i),
        }
        log = open(job.parent / f"{name}.log", "w+")  # noqa: SIM115 (read after the process has ended)
        processes.append(
            subprocess.Popen(
                [*words, sys.executable, script, "--child", str(job)],
                env=environment,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=keep,
            )
        )
    return processes


def run_children(script: str, names: Sequence[str], devices: int, job: Path, keep: Sequence[int] = ()) -> None:
    """Run all children to their end, with the file descriptors `keep`; their logs where one fails."""
    processes = start(script, names, devices, job, keep)
    until = time.monotonic() + _LIMIT_SECONDS
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) for p in processes) or time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        failed = [name for name, p in zip(names, processes, strict=True) if p.poll() != 0]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed:
        logs = "\n".join(f"--- {name}\n{(job.parent / f'{name}.log').read_text()[-3000:]}" for name in failed)
        raise SystemExit(f"{len(failed)} of {len(names)} hosts failed:\n{logs}")
