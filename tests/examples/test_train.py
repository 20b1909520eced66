"""examples/train.py learns, says where it runs, and survives signals and broken checkpoints."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None and os.environ.get("CI") != "true":
    pytest.skip("torch is not installed", allow_module_level=True)

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"
TIMEOUT_S = 60.0
STEPS = 50
LAST = f"step-{STEPS:08d}.pt"
SLOW = ("--step-time", "0.05", "--log-every", "1", "--checkpoint-every", "7")

# The address is given because a build machine's own name need not resolve.
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
PAIR = (*LAUNCHER, "--nproc-per-node", "2", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
ALONE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    directory: Path

    @property
    def losses(self) -> dict[int, float]:
        return {
            int(s): float(v) for s, v in re.findall(r"^step +(\d+)/.* loss (\S+)", self.out, re.M)
        }

    @property
    def accuracy(self) -> float:
        found = re.search(r"^done +accuracy (\S+) +time \S+ s +\d+ samples/s$", self.out, re.M)
        assert found, self.out + self.err
        return float(found[1])


class Running:
    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.read("out"), re.M):
            assert self.process.poll() is None, self.read("out") + self.read("err")
            assert time.monotonic() < deadline, self.read("out") + self.read("err")
            time.sleep(0.02)

    def ended(self) -> Ended:
        code = self.process.wait(timeout=TIMEOUT_S)
        return Ended(code, self.read("out"), self.read("err"), self.directory)

    def pid_of_rank(self, rank: int) -> int:
        parent = self.process.pid
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return int(pid)
        raise AssertionError(f"process {parent} has no child of rank {rank}")


@contextmanager
def training(directory: Path, launcher: tuple[str, ...], *options: str) -> Iterator[Running]:
    """Run the example; what it prints goes to files in the directory, and nothing outlives it."""
    directory.mkdir(exist_ok=True)
    planted = re.compile(
        r"(GPUSUB|SLURM|TORCH|NCCL|GLOO|MASTER|OMP|PYTHON)_?|(\w+_)?(RANK|WORLD_SIZE)$"
    )
    env = {key: value for key, value in os.environ.items() if not planted.match(key)}
    env |= {"GPUSUB_RUN_DIR": str(directory), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # the same result on any machine
    if launcher:
        # The launcher imports torch too, which warns without numpy; the example hides that itself.
        env["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy:UserWarning"
    command = [sys.executable, *launcher, str(TRAIN), "--steps", str(STEPS), *options]
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        process = subprocess.Popen(command, env=env, cwd=directory, stdout=out, stderr=err)
    try:
        yield Running(process, directory)
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its workers; killing it would orphan them
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(directory: Path, launcher: tuple[str, ...], *options: str) -> Ended:
    with training(directory, launcher, *options) as running:
        return running.ended()


def interrupt(
    directory: Path, launcher: tuple[str, ...], after: int, send: Callable[[Running], None]
) -> Ended:
    """Start or resume, send a signal in the middle, and check that it left as it should."""
    with training(directory, launcher, *SLOW) as running:
        running.wait_for(rf"^step +{after}/")
        send(running)
        ended = running.ended()
    found = re.search(r"^interrupted after step +(\d+)/", ended.out, re.M)
    assert found, ended.out + ended.err
    assert after <= int(found[1]) < STEPS
    before, newest = sorted((directory / "checkpoint").iterdir())  # older ones are gone
    assert before.name < newest.name == f"step-{int(found[1]):08d}.pt"
    assert max(ended.losses) == int(found[1])
    return ended


def gloo_threads(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # one that ends just now
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def tensors(checkpoint: Path) -> list[tuple[int, int]]:
    """Size and checksum of every tensor in a checkpoint, without importing torch here."""
    with zipfile.ZipFile(checkpoint) as archive:
        members = [(m.file_size, m.CRC) for m in archive.infolist() if "/data/" in m.filename]
    assert len(members) == 6 + 3 * 6  # weights and biases of three layers, AdamW's three of each
    return members


def same_end(one: Ended, other: Ended) -> bool:
    """The same to the last bit: weights, optimizer, last loss and accuracy."""
    checkpoints = [tensors(run.directory / "checkpoint" / LAST) for run in (one, other)]
    assert one.losses[STEPS] == other.losses[STEPS]
    assert one.accuracy == other.accuracy
    return checkpoints[0] == checkpoints[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("alone"), ALONE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    with training(tmp_path_factory.mktemp("pair"), PAIR, "--slow-exit", "1:1.5") as running:
        running.wait_for("^done")
        # Between its last step and its end: is the process group really gone? Its threads, if
        # any are left, abort some of the runs at exit; too few to be noticed by the exit code.
        pid = running.pid_of_rank(1)
        deadline = time.monotonic() + 1.0
        while threads := gloo_threads(pid):
            assert time.monotonic() < deadline, threads
            time.sleep(0.02)
        return running.ended()


@pytest.mark.parametrize("fixture", ["alone", "pair"])
def test_it_learns_and_prints_nothing_but_its_report(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    ended: Ended = request.getfixturevalue(fixture)
    assert (ended.code, ended.err) == (0, "")
    assert list(ended.losses) == [1, 10, 20, 30, 40, 50]
    assert ended.losses[STEPS] < ended.losses[1] / 10
    assert ended.accuracy > 0.95
    assert all(len(line) <= 80 for line in ended.out.splitlines() if not line.startswith("rank"))
    assert [path.name for path in (ended.directory / "checkpoint").iterdir()] == [LAST]


@pytest.mark.parametrize(("fixture", "world"), [("alone", 1), ("pair", 2)])
def test_it_says_where_each_rank_runs(
    fixture: str, world: int, request: pytest.FixtureRequest
) -> None:
    out: str = request.getfixturevalue(fixture).out
    assert re.match(rf"world {world}  backend gloo  torch \d\S+  cpu\n", out)
    ranks = re.findall(r"^rank (\d+) +(\S+) +local (\d+) +(\S+) +node-rank (\d+)$", out, re.M)
    host = socket.gethostname()
    assert ranks == [(str(rank), host, str(rank), "cpu", "0") for rank in range(world)]


def test_a_rank_may_work_on_after_the_others(pair: Ended) -> None:
    assert pair.code == 0
    assert pair.out.splitlines()[-1] == "rank 1 worked on for 1.5 s"


def test_sigterm_then_broken_checkpoints_end_like_an_uninterrupted_run(
    alone: Ended, tmp_path: Path
) -> None:
    stopped = interrupt(tmp_path, ALONE, 10, lambda it: it.process.send_signal(signal.SIGTERM))
    assert (stopped.code, stopped.err) == (143, "")
    good = sorted((tmp_path / "checkpoint").iterdir())[-1]

    # Three that pretend to be newer: torn, empty, and one with flipped bits in a tensor, which
    # torch.load would take as it is.
    whole = good.read_bytes()
    with zipfile.ZipFile(good) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
    middle = largest.header_offset + largest.file_size // 2
    flipped = whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 8])
    broken = {47: whole[: len(whole) // 2], 48: b"", 49: flipped + whole[middle + 8 :]}
    for step, content in broken.items():
        good.with_name(f"step-{step:08d}.pt").write_bytes(content)

    resumed = run(tmp_path, ALONE)
    assert resumed.code == 0
    warnings = resumed.err.splitlines()
    assert len(warnings) == 3, resumed.err
    for step, line in zip((49, 48, 47), warnings, strict=True):
        assert line.startswith("warning: ignoring checkpoint ")
        assert f"step-{step:08d}.pt: " in line
    assert f"resumed after step {int(good.stem[5:])}/{STEPS} from " in resumed.out
    assert same_end(resumed, alone)


def test_signals_under_the_launcher_end_like_an_uninterrupted_run(
    pair: Ended, tmp_path: Path
) -> None:
    # To one rank only: the other must leave with it, in the same step.
    stopped = interrupt(tmp_path, PAIR, 10, lambda it: os.kill(it.pid_of_rank(1), signal.SIGUSR1))
    assert stopped.code == 1
    assert re.search(r"exitcode +: 143", stopped.err)

    # To the launcher, which passes it on to both.
    stopped = interrupt(tmp_path, PAIR, 25, lambda it: it.process.send_signal(signal.SIGTERM))
    assert stopped.code != 0
    assert min(stopped.losses) > 10  # it did not start anew

    resumed = run(tmp_path, PAIR)
    assert (resumed.code, resumed.err) == (0, "")
    assert min(resumed.losses) > 25
    assert same_end(resumed, pair)
