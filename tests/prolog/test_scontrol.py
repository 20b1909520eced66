"""scontrol is asked with a deadline that holds, and its silence is not taken for an answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gpuhealth import scontrol
from gpuhealth.scontrol import ANSWERED, REFUSED, TIMED_OUT, UNREACHABLE, Scontrol

NODE = "NodeName=gpu-5 State=IDLE Partitions=gpu\n"


def fake(place: Path, script: str) -> Scontrol:
    """A scontrol that is this script."""
    program = place / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Scontrol(bin_dir=str(place))


def soon(seconds: float = 5) -> float:
    return time.monotonic() + seconds


def test_answer(tmp_path: Path) -> None:
    asked = fake(tmp_path, f'echo "$*" > {tmp_path}/words; printf "{NODE}"')
    answer, nodes = asked.nodes(soon())
    assert answer.answered
    assert [node.name for node in nodes] == ["gpu-5"]
    assert (tmp_path / "words").read_text() == "-a -o show node\n"
    asked.nodes(soon(), ("gpu-5", "gpu-6"))
    assert (tmp_path / "words").read_text() == "-a -o show node gpu-5,gpu-6\n"


def test_updates(tmp_path: Path) -> None:
    asked = fake(tmp_path, f'printf "<%s>" "$@" > {tmp_path}/words')
    assert asked.drain("gpu-5", "gpuhealth: a b=c", soon()).outcome == ANSWERED
    words = "<update><NodeName=gpu-5><State=DRAIN><Reason=gpuhealth: a b=c>"
    assert (tmp_path / "words").read_text() == words
    assert asked.undrain("gpu-5", soon()).outcome == ANSWERED
    assert (tmp_path / "words").read_text() == "<update><NodeName=gpu-5><State=UNDRAIN>"


def test_environment_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONTROL_ALL", "1")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/elsewhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    asked = fake(tmp_path, f"/usr/bin/env > {tmp_path}/env; cat > {tmp_path}/input")
    own = {"PWD", "SHLVL", "_", "OLDPWD"}

    def variables() -> dict[str, str]:
        pairs = (line.partition("=") for line in (tmp_path / "env").read_text().splitlines())
        return {name: value for name, _, value in pairs if name not in own}

    asked.nodes(soon())
    path = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    assert variables() == {"PATH": path, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    Scontrol(str(tmp_path), "/etc/slurm/slurm.conf").nodes(soon())
    assert variables()["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert (tmp_path / "input").read_text() == ""


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("slurm_update error: Invalid node name specified", REFUSED),
        ("slurm_update error: Invalid user id", REFUSED),
        ("slurm_update error: Access/permission denied", REFUSED),
        ("slurm_update error: Invalid node state specified", REFUSED),
        ("", REFUSED),
        (
            "slurm_load_node error: Unable to contact slurm controller (connect failure)",
            UNREACHABLE,
        ),
        ("scontrol: fatal: Could not establish a configuration source", UNREACHABLE),
        (
            'Munge encode failed: Failed to access "/run/munge": No such file or directory\n'
            "slurm_load_node error: Protocol authentication error",
            UNREACHABLE,
        ),
        ("slurm_update error: Socket timed out on send/recv operation", TIMED_OUT),
        ("slurm_update error: Zero Bytes were transmitted or received", TIMED_OUT),
        ("slurm_update error: Connection reset by peer", TIMED_OUT),
    ],
)
def test_failures(tmp_path: Path, said: str, outcome: str) -> None:
    asked = fake(tmp_path, f"cat >&2 <<'X'\n{said}\nX\nexit 1")
    answer = asked.drain("gpu-5", "gpuhealth: x", soon())
    assert answer.outcome == outcome
    assert answer.text == " ".join(said.split()) or not said
    assert asked.nodes(soon()) == (answer, [])


def test_killed_scontrol_may_have_sent_it(tmp_path: Path) -> None:
    assert fake(tmp_path, "kill -9 $$").run(["ping"], soon()).outcome == TIMED_OUT


@pytest.mark.parametrize("printed", ["", "\n", "Slurm is fine\n"])
def test_no_node_at_all_is_no_answer(tmp_path: Path, printed: str) -> None:
    # An empty state is not "nobody has drained it".
    asked = fake(tmp_path, f"printf '{printed}'")
    answer, nodes = asked.nodes(soon())
    assert not answer.answered
    assert nodes == []


def test_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scontrol, "PATH", str(tmp_path))
    assert Scontrol().run(["ping"], soon()).outcome == UNREACHABLE
    (tmp_path / "scontrol").write_text("#!/no/such/interpreter\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert Scontrol().run(["ping"], soon()).outcome == UNREACHABLE


@pytest.mark.parametrize(
    "script",
    [
        "sleep 300",
        "trap '' TERM; sleep 300 & sleep 300",
        "exec >&- 2>&-; sleep 300",
        "kill -STOP $$",
        "while :; do :; done",
        "sleep 300 &",
        "echo started; sleep 300",
    ],
)
def test_deadline_holds_and_nobody_is_left(tmp_path: Path, script: str) -> None:
    asked = fake(tmp_path, f"echo $$ > {tmp_path}/pid\n{script}")
    started = time.monotonic()
    assert asked.run(["ping"], soon(0.3)).outcome == TIMED_OUT
    assert time.monotonic() - started < 2
    group = int((tmp_path / "pid").read_text())
    deadline = soon()
    while _lives(group):
        assert time.monotonic() < deadline, "its processes live on"
        time.sleep(0.01)


def _lives(group: int) -> bool:
    """Whether a process group has a member that isn't a zombie."""
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(group) and fields[0] != "Z":
            return True
    return False


def test_output_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scontrol, "LIMIT_BYTES", 100_000)
    started = time.monotonic()
    answer = fake(tmp_path, "exec yes").run(["ping"], soon())
    assert answer.outcome == TIMED_OUT
    assert time.monotonic() - started < 3


def test_both_outputs_are_read(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; echo x$i >&2; done"
    answer = fake(tmp_path, script).run(["ping"], soon())
    assert answer.outcome == ANSWERED
    assert answer.text.splitlines()[-1] == "3000"


def test_nothing_is_asked_past_the_deadline(tmp_path: Path) -> None:
    asked = fake(tmp_path, f"touch {tmp_path}/asked")
    assert asked.run(["ping"], time.monotonic() - 1).outcome == UNREACHABLE
    assert not (tmp_path / "asked").exists()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    asked = fake(tmp_path, "exit 0")
    (tmp_path / "hung").mkdir()
    hung = fake(tmp_path / "hung", "sleep 300")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        asked.run(["ping"], soon())
    hung.run(["ping"], soon(0.1))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_ignored_children_are_no_answer(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert fake(tmp_path, "exit 0").run(["ping"], soon(2)).outcome == TIMED_OUT
    finally:
        signal.signal(signal.SIGCHLD, before)
