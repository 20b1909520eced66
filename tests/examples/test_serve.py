"""examples/serve.py batches, measures what it did, and ends as it should, however that comes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None and os.environ.get("CI") != "true":
    pytest.skip("torch is not installed", allow_module_level=True)

SERVE = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
TIMEOUT_S = 60.0
SMALL = ("--layers", "1", "--width", "16", "--tokens", "8")
ROW = re.compile(
    r"^(\S+(?: \S+)?) +(\d+) +([\d.]+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$"
)


@dataclass(frozen=True)
class Row:
    label: str
    requests: float
    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    fill: float


class Running:
    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text()

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text()

    @property
    def rows(self) -> list[Row]:
        found = [match for line in self.out.splitlines() if (match := ROW.match(line))]
        return [Row(match[1], *map(float, match.groups()[1:])) for match in found]

    @property
    def pids(self) -> list[int]:
        """The workers' processes, once they are ready."""
        return [int(pid) for pid in re.findall(r"^worker \d+ \(pid (\d+), cpu\)", self.out, re.M)]

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.02)

    def ended(self, within_s: float = TIMEOUT_S) -> int:
        return self.process.wait(timeout=within_s)


@contextmanager
def serving(directory: Path, *options: str, model: tuple[str, ...] = SMALL) -> Iterator[Running]:
    """Run the example in a process group of its own, to signal it and its workers together."""
    planted = re.compile(r"(GPUSUB|SLURM|TORCH|NCCL|OMP|PYTHON)_?")
    env = {key: value for key, value in os.environ.items() if not planted.match(key)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the same on any machine
    command = [sys.executable, str(SERVE), *model, *options]
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        process = subprocess.Popen(
            command, env=env, cwd=directory, stdout=out, stderr=err, start_new_session=True
        )
    try:
        yield Running(process, directory)
    finally:
        if process.poll() is None:
            process.kill()  # its workers end by themselves
            process.wait()


def children(pid: int) -> list[int]:
    """The workers among a process's children, from their first moment."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    named = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in listed}
    return [child for child, command in named.items() if b"spawn_main" in command]


def alive(pids: list[int]) -> list[int]:
    """Those that still run; what no one has waited for yet is over, too."""
    found = []
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [pid] if state != "Z" else []
    return found


def check(found: dict[str, Any], size: int) -> None:
    assert found["requests"] > 0
    assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"]
    assert 1 <= found["fill"] <= size


def test_one_worker_reports_and_totals_add_up(tmp_path: Path) -> None:
    options = ("--batch-size", "4", "--clients", "3", "--duration", "1.5", "--report", "0.4")
    with serving(tmp_path, *options, "--max-wait", "20") as running:
        assert (running.ended(), running.err) == (0, "")
    lines = running.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == f"worker 0 (pid {running.pids[0]}, cpu)  threads: 1"
    *reports, total = running.rows
    assert [total.label, *(row.label[-2:] for row in reports)] == ["total"] + [" s"] * len(reports)
    assert reports
    assert sum(row.requests for row in reports) <= total.requests
    for row in running.rows:
        check(vars(row), size=3)
        assert row.p50_ms >= 20  # three clients never fill a batch of four
        assert row.tokens_per_s == pytest.approx(8 * row.requests_per_s, rel=0.01)
    end = re.fullmatch(r"sent (\d+), rejected 0 in (\S+) s; front end \d+% busy", lines[-1])
    assert end, running.out
    assert int(end[1]) == total.requests
    assert 1.5 <= float(end[2]) < 5
    assert total.requests_per_s == pytest.approx(total.requests / float(end[2]), rel=0.01)


def test_two_workers_share_the_requests(tmp_path: Path) -> None:
    options = ("--workers", "2", "--clients", "24", "--sweep", "2,8", "--duration", "1", "--json")
    with serving(tmp_path, *options) as running:
        assert (running.ended(), running.err) == (0, "")
    result: dict[str, Any] = json.loads(running.out)
    assert not result["interrupted"]
    assert [name.partition(" (")[0] for name in result["workers"]] == ["worker 0", "worker 1"]
    assert [point["batch_size"] for point in result["points"]] == [2, 8]
    for point in result["points"]:
        total, workers = point["total"], point["workers"]
        for found in (total, *workers):
            check(found, point["batch_size"])
        assert (point["sent"], point["rejected"]) == (total["requests"], 0)
        assert total["requests"] == sum(worker["requests"] for worker in workers)
        assert 1 <= point["seconds"] < 5
        assert total["requests_per_s"] == pytest.approx(
            total["requests"] / point["seconds"], rel=0.01
        )
        # Little's law: each of the clients always waits for an answer, but for the last ones.
        # So what is called latency is all that they wait.
        assert total["requests_per_s"] * total["mean_ms"] / 1000 == pytest.approx(24, rel=0.2)


def test_a_sweep_prints_one_table_and_what_was_rejected(tmp_path: Path) -> None:
    options = ("--sweep", "1,64", "--rate", "20000", "--queue", "64", "--duration", "1")
    with serving(tmp_path, *options) as running:
        assert (running.ended(), running.err) == (0, "")
    one, many = running.rows
    assert (one.label, many.label) == ("batch 1", "batch 64")
    assert one.fill == 1
    assert one.requests_per_s < many.requests_per_s  # that is what batches are for
    assert len(running.out.splitlines()) <= 3 + 2 * 2
    rejected = re.search(r"^sent (\d+), rejected (\d+) in ", running.out, re.M)
    assert rejected, running.out
    assert int(rejected[1]) == one.requests + int(rejected[2])
    assert 10000 < int(rejected[1]) < 21000  # at random, 20000 on average


def test_a_signal_to_all_processes_ends_it_with_its_totals(tmp_path: Path) -> None:
    options = ("--workers", "2", "--batch-size", "4", "--duration", "100", "--report", "0.3")
    with serving(tmp_path, *options) as running:
        running.wait_until(lambda: len(running.rows) >= 6)
        os.killpg(running.process.pid, signal.SIGTERM)  # as Slurm does
        assert (running.ended(within_s=5), running.err) == (0, "")
    assert not alive(running.pids)
    sent, last = running.out.splitlines()[-2:]
    assert last == "interrupted"
    first, second, total = running.rows[-3:]
    assert [first.label, second.label, total.label] == ["worker 0", "worker 1", "total"]
    assert first.requests + second.requests == total.requests
    found = re.match(r"sent (\d+), rejected (\d+) in ", sent)
    assert found
    assert int(found[1]) == total.requests + int(found[2])


def test_a_signal_before_the_workers_are_ready(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.wait_until(lambda: children(running.process.pid))
        os.killpg(running.process.pid, signal.SIGINT)
        assert (running.ended(), running.err) == (0, "")
    assert running.out.splitlines()[-1] == "interrupted before anything was measured"


def test_a_worker_that_dies_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--duration", "100", "--report", "0.2") as running:
        running.wait_until(lambda: running.rows)
        pids = running.pids
        os.kill(pids[1], signal.SIGKILL)
        assert running.ended(within_s=5) == 1
    assert running.err == f"error: worker 1 (pid {pids[1]}, cpu) was killed by signal 9\n"
    assert not alive(pids)


def test_workers_end_when_the_front_end_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path, "--duration", "100", "--report", "0.2") as running:
        running.wait_until(lambda: running.rows)
        pids = running.pids
        running.process.kill()
        running.ended()
    deadline = time.monotonic() + 5
    while alive(pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert running.err == ""


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    wrong = {
        "--workers 0": "argument --workers: '0' is not a whole number, 1 or more",
        "--sweep 1,,4": "argument --sweep: '' is not a whole number, 1 or more",
        "--sweep 1 --batch-size 2": "argument --batch-size: not allowed with argument --sweep",
        "--rate nan": "argument --rate: 'nan' is not a number above 0",
        "--rate 1 --clients 2": "argument --clients: not allowed with argument --rate",
        "--duration -1": "argument --duration: '-1' is not a number above 0",
        "--batch-size 2000 --tokens 64": "batch size 2000: of 64 tokens each, at most 1024",
        "--model big": "unrecognized arguments: --model big",
    }
    # All in one process: most of the time goes into importing torch.
    code = (
        "import runpy, sys\n"
        "parse_args = runpy.run_path(sys.argv[1])['parse_args']\n"
        "for line in sys.argv[2:]:\n"
        "    sys.argv = ['serve.py', *line.split()]\n"
        "    try: parse_args()\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SERVE), *wrong],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["2"] * len(wrong)
    assert done.stderr.splitlines() == [f"serve.py: {message}" for message in wrong.values()]
