from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpuhealth import collect
from gpuhealth.reading import Reading
from gpuhealth.source import Directory, Entries, Recording, Source

FILES = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "/sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)",
    "/sys/module/nvidia/version": "580.82.07",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path


def look(source: Source) -> None:
    for device in source.names("/sys/class/infiniband").names:
        for name in ("state", "rate", "none"):
            source.read(f"/sys/class/infiniband/{device}/ports/1/{name}")
    source.read("/sys/module/nvidia/version")


def hang(root: Path, path: str) -> None:
    """Make a read of this file wait for ever."""
    file = root / path.lstrip("/")
    file.unlink()
    os.mkfifo(file)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "READ_TIMEOUT_S", 0.3)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_everything_that_is_looked_at_is_there(root: Path) -> None:
    found = collect.collect(Directory(str(root)), look, in_s(5))
    assert found.complete
    assert not found.hung
    source = Recording(found.entries)
    for path, text in FILES.items():
        assert source.read(path) == Reading(text)
    assert source.read("/sys/class/infiniband/mlx5_0/ports/1/none").absent


@pytest.mark.parametrize("name", ["state", "rate"])
def test_one_file_that_hangs_costs_its_device_alone(root: Path, name: str) -> None:
    hang(root, f"/sys/class/infiniband/mlx5_0/ports/1/{name}")
    before_s = time.monotonic()
    found = collect.collect(Directory(str(root)), look, in_s(5))
    assert time.monotonic() - before_s < 2
    assert found.complete
    assert list(found.hung) == ["/sys/class/infiniband/mlx5_0"]
    source = Recording(found.entries)
    assert source.read(f"/sys/class/infiniband/mlx5_0/ports/1/{name}").why == "hung"
    assert source.read("/sys/class/infiniband/mlx5_1/ports/1/rate").text
    assert source.read("/sys/module/nvidia/version").text == "580.82.07"


def test_a_file_of_no_device_costs_itself_alone(root: Path) -> None:
    hang(root, "/sys/module/nvidia/version")
    found = collect.collect(Directory(str(root)), look, in_s(5))
    assert list(found.hung) == ["/sys/module/nvidia/version"]
    assert found.complete


def test_it_ends_in_time_whatever_hangs(root: Path) -> None:
    def endless(source: Source) -> None:
        for number in range(1000):
            path = f"/fifo/{number}"
            source.read(path)

    (root / "fifo").mkdir()
    for number in range(10):
        os.mkfifo(root / f"fifo/{number}")
    before_s = time.monotonic()
    found = collect.collect(Directory(str(root)), endless, in_s(10))
    assert time.monotonic() - before_s < 4
    assert not found.complete
    assert len(found.hung) == collect.MAX_HUNG


def test_what_is_slow_is_not_called_hung(root: Path) -> None:
    def slow(source: Source) -> None:
        for number in range(100):
            source.read(f"/{number}")
            time.sleep(0.05)

    found = collect.collect(Directory(str(root)), slow, in_s(0.6))
    assert not found.complete
    assert not found.hung


def test_places_to_avoid_are_not_touched(root: Path) -> None:
    hang(root, "/sys/class/infiniband/mlx5_0/ports/1/state")
    before_s = time.monotonic()
    found = collect.collect(
        Directory(str(root)), look, in_s(5), avoid=("/sys/class/infiniband/mlx5_0",)
    )
    assert time.monotonic() - before_s < 0.3
    assert found.complete
    assert Recording(found.entries).read("/sys/class/infiniband/mlx5_0/ports/1/state").why == "hung"


def test_what_is_known_is_not_read_again(root: Path) -> None:
    hang(root, "/sys/class/infiniband/mlx5_0/ports/1/state")
    known: Entries = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
    found = collect.collect(Directory(str(root)), look, in_s(5), known)
    assert found.complete
    assert not found.hung


def test_a_look_that_raises_is_incomplete(root: Path) -> None:
    def broken(source: Source) -> None:
        look(source)
        raise RuntimeError("broken")

    found = collect.collect(Directory(str(root)), broken, in_s(5))
    assert not found.complete


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("/sys/class/infiniband/mlx5_0/ports/1/state", "/sys/class/infiniband/mlx5_0"),
        ("/sys/class/infiniband/mlx5_0", "/sys/class/infiniband/mlx5_0"),
        ("/proc/driver/nvidia/gpus/0000:18:00.0/information", "/proc/driver/nvidia"),
        ("/sys/devices/pci0000:15/0000:15:01.0/config", "/sys/devices/pci0000:15/0000:15:01.0"),
        ("/scratch", "/scratch"),
    ],
)
def test_what_hangs_together(key: str, place: str) -> None:
    assert collect.place_of(key) == place
