"""What a process is told through its environment, and the ports of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshwright.launch import LaunchError
from meshwright.launch.environment import Place, child_environment, gpus_for, place_in
from meshwright.launch.port import hold_port, somebody_listens, split_address


def place(process_id: int, processes: int = 4) -> Place:
    return Place(coordinator="127.0.0.1:4000", processes=processes, process_id=process_id)


def test_a_place_survives_the_environment() -> None:
    assert place_in({"HOME": "/", **place(2).variables()}) == place(2)


@pytest.mark.parametrize("wrong", ["", "four", "2"])
def test_a_broken_place_is_refused(wrong: str) -> None:
    with pytest.raises(LaunchError, match="MESHWRIGHT_PROCESSES"):
        place_in({**place(2).variables(), "MESHWRIGHT_PROCESSES": wrong})


def test_flags_are_left_alone_unless_devices_are_asked_for() -> None:
    base = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    assert child_environment(base, place(0), devices=None)["XLA_FLAGS"] == base["XLA_FLAGS"]
    assert child_environment({}, place(0), devices=3)["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"
    assert "JAX_LOCAL_DEVICE_IDS" not in child_environment({}, place(0), devices=3)


def test_a_proxy_is_not_asked_for_this_machine() -> None:
    assert "no_proxy" not in child_environment({}, place(0), devices=None)
    told = child_environment({"https_proxy": "p:1", "no_proxy": "there"}, place(0), devices=None)
    assert told["no_proxy"] == "there,127.0.0.1,localhost"


@pytest.mark.parametrize(("devices", "shares"), [(None, ["0,1", "2,3", "4,5", "6,7"]), (1, ["0", "1", "2", "3"])])
def test_gpus_are_shared_out(devices: int | None, shares: list[str]) -> None:
    told = [child_environment({}, place(number), devices=devices, gpus=8) for number in range(4)]
    assert [one["JAX_LOCAL_DEVICE_IDS"] for one in told] == shares


@pytest.mark.parametrize(("devices", "gpus"), [(None, 3), (2, 7)])
def test_too_few_gpus_are_refused(devices: int | None, gpus: int) -> None:
    with pytest.raises(LaunchError, match=rf"no more than the {gpus} GPUs.*JAX_PLATFORMS=cpu"):
        child_environment({}, place(0), devices=devices, gpus=gpus)


def test_gpus_are_counted_where_they_may_be_used(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_for({}, devices_folder=tmp_path) == 3
    assert gpus_for({"JAX_PLATFORMS": "cuda,cpu"}, devices_folder=tmp_path) == 3
    assert gpus_for({"JAX_PLATFORMS": "cpu"}, devices_folder=tmp_path) == 0
    assert gpus_for({"CUDA_VISIBLE_DEVICES": "2"}, devices_folder=tmp_path) == 1
    assert gpus_for({"CUDA_VISIBLE_DEVICES": ""}, devices_folder=tmp_path) == 0


def test_a_held_port_is_ours_and_no_one_elses() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        assert not somebody_listens("127.0.0.1", port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # As the coordinator of JAX binds.
        with socket.socket() as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind(("127.0.0.1", port))
            coordinator.listen()
            assert somebody_listens("127.0.0.1", port)


@pytest.mark.parametrize("wrong", ["", "4000", "host:", ":4000", "host:port", "host:0", "host:70000"])
def test_an_address_without_host_or_port_is_refused(wrong: str) -> None:
    with pytest.raises(LaunchError, match="host:port"):
        split_address(wrong)


def test_an_address_of_six_is_split() -> None:
    assert split_address("[::1]:4000") == ("::1", 4000)
