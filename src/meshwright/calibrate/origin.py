"""Which devices a calibration was made on: written into its file, and checked before a plan made by it is run.

The description of a cluster holds hardware and nothing else, so the origin is a comment line above it: any reader of
the file still gets a cluster, and what runs plans (`meshwright.parallelize`) reads the line beside it. Planning for the
described devices is allowed anywhere; running on others is refused, because every number in the file was measured.

Known limit: a cluster that was loaded and written again is no calibration any more; `Cluster` has no place for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cluster import ClusterError
from ..errors import PlanError

_MARK = "# meshwright calibration: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What measured numbers hold for.

    Args:
      device_kind: JAX's name for the devices.
      devices: how many there are in all.
      platform: "cpu", "gpu" or "tpu".
      processes: that held them.
      jax: its version.

    >>> origin = Origin(device_kind="cpu", devices=8, platform="cpu", processes=1, jax="0.10.2")
    >>> origin_in(origin.line() + "name = 'mine'", source="mine.toml") == origin
    True
    """

    device_kind: str
    devices: int
    platform: str
    processes: int
    jax: str

    def line(self) -> str:
        """The comment that says so, with its newline."""
        return f"{_MARK}{json.dumps(asdict(self))}\n"

    def __str__(self) -> str:
        held = "" if self.processes == 1 else f" in {self.processes} processes"
        return f"{self.devices} x {self.device_kind}{held} under JAX {self.jax}"


def origin_of(devices: Sequence[Any]) -> Origin:
    """The origin that a calibration on some `jax.Device`s would have."""
    import jax

    return Origin(
        device_kind=devices[0].device_kind, devices=len(devices), platform=devices[0].platform,
        processes=len({device.process_index for device in devices}), jax=jax.__version__,
    )  # fmt: skip


def origin_in(text: str, *, source: str) -> Origin | None:
    """What the description of a cluster says of its origin; None if it was not measured by `calibrate`.

    Raises:
      ClusterError: if its origin cannot be read.
    """
    line = next((line for line in text.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        return None
    try:
        return Origin(**json.loads(line.removeprefix(_MARK)))
    except (TypeError, ValueError) as error:
        raise ClusterError(
            refused="a calibration", got=f"an origin that cannot be read: {error}",
            needed="the line as `meshwright calibrate` wrote it", where=source,
            try_="calibrating again, or removing the line",
        ) from None  # fmt: skip


def check_origin(path: str | Path) -> None:
    """Refuse to run, on the devices at hand, what is planned by a calibration made on others.

    Args:
      path: of the description of the cluster; one that no calibration wrote passes.

    Raises:
      PlanError: if kind, number, platform or JAX's version differ.
      ClusterError: if the origin cannot be read.
    """
    made = origin_in(Path(path).read_text("utf-8"), source=str(path))
    if made is None:
        return
    import jax

    here = origin_of(jax.devices())
    if made == here:
        return
    raise PlanError(
        refused="to run by this calibration", got=f"{here}", needed=f"the devices it was made on: {made}",
        where=str(path), try_=f"meshwright calibrate --out {path} here, or cluster=\"local\"",
    )  # fmt: skip
