"""A hook never holds a node back that isn't known to be sick, whatever goes wrong in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuhealth import check, drain, finding, hooks, scontrol
from gpuhealth.check import Job
from gpuhealth.examination import Examination, Request
from gpuhealth.finding import Finding, healthy, unhealthy, unknown
from gpuhealth.hooks import ELSEWHERE, GO_ON, Places
from gpuhealth.policy import Cap, Policy, dump
from gpuhealth.scontrol import ANSWERED, Answer
from gpuhealth.slurmnode import SlurmNode, parse_state

SCRIPTS = Path(__file__).resolve().parents[2] / "prolog" / "bin"
JOB = {
    "SLURMD_NODENAME": "gpu-7",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_UID": "1001",
    "SLURM_JOB_GPUS": "0,1",
}
SICK = Finding("ib_port", "mlx5_0:1", "unhealthy", "DOWN", "ACTIVE", "look", action="drain")
OK = Answer(ANSWERED)
REASON = "gpuhealth: ib_port mlx5_0:1 DOWN expected ACTIVE"


@dataclass
class FakeSlurm:
    """A slurmctld that knows gpu-7."""

    state: str = "IDLE"
    reason: str = ""
    answer: Answer = OK
    calls: list[str] = field(default_factory=list)

    def nodes(
        self, deadline_s: float, names: tuple[str, ...] = ()
    ) -> tuple[Answer, list[SlurmNode]]:
        self.calls.append("nodes")
        one = SlurmNode("gpu-7", parse_state(self.state), self.reason, "root", "", ("gpu",))
        return self.answer, [one] if self.answer.answered else []

    def drain(self, name: str, reason: str, deadline_s: float) -> Answer:
        self.calls.append("drain")
        self.state, self.reason = "IDLE+DRAIN", reason
        return self.answer

    def undrain(self, name: str, deadline_s: float) -> Answer:
        self.calls.append("undrain")
        self.state = "IDLE"
        return self.answer


@dataclass
class Setting:
    """Everything around a hook."""

    places: Places
    slurm: FakeSlurm = field(default_factory=FakeSlurm)
    findings: list[Finding] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    look: Callable[[], None] = lambda: None

    def examine(self, request: Request) -> Examination:
        self.requests.append(request)
        self.look()
        found = tuple(self.findings)
        return Examination(request.node, finding.verdict(found), found, 0.1, boot_id="b")

    def run(self, hook: Callable[..., int], environ: Mapping[str, str] = JOB) -> int:
        return hook(
            environ, examine=self.examine, slurm=lambda environ: self.slurm, places=self.places
        )

    @property
    def message(self) -> str:
        place = Path(self.places.runtime, "jobs", "42.message")
        return place.read_text() if place.exists() else ""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(drain, "SECOND_S", 0.01)
    names = {name: str(tmp_path / name) for name in ("policy", "state", "runtime", "syslog")}
    Path(names["policy"]).write_text(dump(Policy(max_drained=Cap(1, 100.0))))
    Path(names["policy"]).chmod(0o644)
    return Setting(Places(owner=os.geteuid(), **names))


HOOKS = [hooks.prolog, hooks.epilog, hooks.periodic]


# -- what follows from a verdict


@pytest.mark.parametrize("hook", HOOKS)
def test_healthy_node_says_and_asks_nothing(
    setting: Setting, hook: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    setting.findings = [healthy("ib_port", "mlx5_0:1", "ACTIVE")]
    assert setting.run(hook) == GO_ON
    assert setting.slurm.calls == []
    assert setting.message == ""
    assert capfd.readouterr() == ("", "")


def test_sick_node_is_drained_and_the_job_sent_elsewhere(setting: Setting) -> None:
    setting.findings = [SICK]
    assert setting.run(hooks.prolog) == ELSEWHERE
    assert setting.slurm.reason == REASON


@pytest.mark.parametrize("hook", [hooks.epilog, hooks.periodic])
def test_other_hooks_drain_and_never_fail(setting: Setting, hook: Callable[..., int]) -> None:
    setting.findings = [SICK]
    assert setting.run(hook) == GO_ON
    assert setting.slurm.reason == REASON


@pytest.mark.parametrize(
    "found",
    [
        unknown("ib_port", "mlx5_0:1", "EIO", "ACTIVE"),
        unhealthy("ib_counters", "mlx5_0:1", "symbol_error +7", "0", ""),
        Finding("ib_port", "all", "unhealthy", "INIT", "ACTIVE", action="drain", systemic=True),
        Finding("ib_port", "mlx5_0:1", "unknown", "hung", "ACTIVE", action="drain"),
    ],
    ids=["unknown", "warn", "systemic", "unknown, action drain"],
)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("state", ["IDLE", "IDLE+DRAIN"])
def test_anything_else_changes_nothing_in_slurm(
    setting: Setting, hook: Callable[..., int], found: Finding, state: str
) -> None:
    setting.findings = [found]
    setting.slurm.state, setting.slurm.reason = state, REASON
    assert setting.run(hook) == GO_ON
    assert setting.slurm.calls == []
    if hook is hooks.prolog:
        assert setting.message.startswith(f"gpuhealth: gpu-7 is {found.status}: {found.check} ")


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        ("IDLE+DRAIN", "ADMIN SHUTDOWN", ELSEWHERE),
        ("IDLE+DRAIN", "Prolog error", ELSEWHERE),
        ("MIXED+DRAIN", REASON, ELSEWHERE),
        ("IDLE+MAINTENANCE", "", GO_ON),
        ("MIXED+REBOOT_REQUESTED", "", GO_ON),
        ("IDLE+NOT_RESPONDING", "", GO_ON),
        ("DOWN", "power cut", GO_ON),
        ("", "", GO_ON),
    ],
)
def test_a_prolog_fails_only_where_slurm_has_nothing_left_to_drain(
    setting: Setting, state: str, reason: str, code: int
) -> None:
    setting.findings = [SICK]
    setting.slurm.state, setting.slurm.reason = state, reason
    assert setting.run(hooks.prolog) == code
    assert setting.slurm.calls == ["nodes"]
    assert setting.slurm.reason == reason


@pytest.mark.parametrize("outcome", [scontrol.REFUSED, scontrol.UNREACHABLE, scontrol.TIMED_OUT])
def test_without_slurm_the_job_is_let_through_loudly(
    setting: Setting, outcome: str, capfd: pytest.CaptureFixture[str]
) -> None:
    setting.findings = [SICK]
    setting.slurm.answer = Answer(outcome, "no answer")
    assert setting.run(hooks.prolog) == GO_ON
    assert "STAYS IN SERVICE: ib_port mlx5_0:1" in capfd.readouterr().err
    assert "gpu-7 is sick and was let through" in setting.message


def test_past_the_cap_the_job_is_let_through_loudly(
    setting: Setting, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(setting.places.policy).write_text(dump(Policy(max_drained=Cap(0, None))))
    setting.findings = [SICK]
    assert setting.run(hooks.prolog) == GO_ON
    assert setting.slurm.calls == ["nodes"]
    assert "as many nodes are drained as may be" in capfd.readouterr().err
    assert "let through" in setting.message
    assert "DOWN, expected ACTIVE" in setting.message


def test_periodic_run_settles_what_was_left_open(setting: Setting) -> None:
    Path(setting.places.policy).write_text(dump(Policy(max_drained=Cap(0, None))))
    setting.slurm.state, setting.slurm.reason = "IDLE+DRAIN", REASON
    ledger = Path(setting.places.state, "drain.json")
    ledger.parent.mkdir()
    ledger.write_text(json.dumps({"schema": 1, "reason": REASON, "at_s": time.time()}))
    assert setting.run(hooks.periodic) == GO_ON
    assert setting.slurm.state == "IDLE"
    assert not ledger.exists()


def test_periodic_run_lifts_no_drain(setting: Setting) -> None:
    setting.findings = [healthy("ib_port", "mlx5_0:1")]
    setting.slurm.state, setting.slurm.reason = "IDLE+DRAIN", REASON
    assert setting.run(hooks.periodic) == GO_ON
    assert setting.slurm.calls == []


def age(place: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(place, (then, then))


def test_job_after_our_drain_means_that_it_was_lifted(setting: Setting) -> None:
    setting.findings = [SICK]
    assert setting.run(hooks.prolog) == ELSEWHERE
    mark = Path(setting.places.state, "drained")
    assert mark.exists()
    setting.slurm.state, setting.findings = "IDLE", []
    # A job that had been placed before the drain says nothing of a resume.
    setting.run(hooks.prolog)
    assert setting.requests[-1].history.resumed_s == 0
    age(mark, 61)
    setting.run(hooks.periodic)
    assert setting.requests[-1].history.resumed_s == 0
    setting.run(hooks.prolog)
    assert setting.requests[-1].history.resumed_s > 0
    assert not mark.exists()


def test_drain_that_the_cap_lifted_was_no_resume(setting: Setting) -> None:
    Path(setting.places.policy).write_text(dump(Policy(max_drained=Cap(0, None))))
    setting.slurm.state, setting.slurm.reason = "IDLE+DRAIN", REASON
    state = Path(setting.places.state)
    state.mkdir()
    (state / "drained").touch()
    (state / "drain.json").write_text(json.dumps({"schema": 1, "reason": REASON, "at_s": 1}))
    setting.run(hooks.periodic)
    assert setting.slurm.state == "IDLE"
    assert not (state / "drained").exists()


# -- what goes wrong


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EIO, "x"), MemoryError()])
def test_a_bug_drains_nothing(
    setting: Setting,
    hook: Callable[..., int],
    error: Exception,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    setting.look = fail
    assert setting.run(hook) == GO_ON
    assert setting.slurm.calls == []
    assert type(error).__name__ in capfd.readouterr().err


def test_what_is_decided_stays_so(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("x")

    for name in ("_leave_message", "_remember", "_hand_down_settings", "_begin_job"):
        monkeypatch.setattr(hooks, name, fail)
    setting.findings = [SICK]
    assert setting.run(hooks.prolog) == ELSEWHERE


@pytest.mark.parametrize("broken", ["state", "runtime"])
def test_disk_that_can_not_be_written_to(setting: Setting, broken: str) -> None:
    Path(getattr(setting.places, broken)).write_text("a file where a directory should be")
    setting.findings = [healthy("ib_port", "mlx5_0:1")]
    assert setting.run(hooks.prolog) == GO_ON
    setting.findings = [SICK]
    code = setting.run(hooks.prolog)
    # Without a lock nothing is drained; without a disk, what is begun is written to memory.
    assert code == (ELSEWHERE if broken == "state" else GO_ON)
    assert setting.slurm.state == ("IDLE+DRAIN" if broken == "state" else "IDLE")


@pytest.mark.parametrize(
    "harm", ["not json", "{}", '{"schema": 99}', "[]", "world-writable", "foreign", "directory"]
)
def test_policy_that_can_not_be_believed_is_none(
    setting: Setting, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = Path(setting.places.policy)
    if harm == "world-writable":
        place.chmod(0o666)
    elif harm == "foreign":
        os.chown(place, 1001, 1001)
    elif harm == "directory":
        place.unlink()
        place.mkdir()
    else:
        place.write_text(harm)
    assert setting.run(hooks.prolog) == GO_ON
    assert setting.requests[0].policy is None
    assert "no policy is in force" in capfd.readouterr().err


def test_no_policy_is_no_error(setting: Setting, capfd: pytest.CaptureFixture[str]) -> None:
    Path(setting.places.policy).unlink()
    assert setting.run(hooks.prolog) == GO_ON
    assert setting.requests[0].policy is None
    assert capfd.readouterr().err == ""


def test_syslog_is_told_and_a_stopped_one_stops_nothing(setting: Setting) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(setting.places.syslog)
        setting.findings = [SICK]
        started = time.monotonic()
        setting.run(hooks.prolog)
        assert "gpu" in log.recv(4096).decode()
        for _ in range(300):
            hooks._tell_syslog(setting.places.syslog, "x" * 1000)
        assert time.monotonic() - started < 5


# -- prologs at the same time


def test_prologs_at_the_same_time_share_one_look(setting: Setting) -> None:
    setting.look = lambda: time.sleep(0.5)
    warned = Finding("ib_port", "mlx5_0:1", "unhealthy", "DOWN", "ACTIVE", action="warn")
    setting.findings = [warned]
    seen: list[hooks.Seen] = []

    def one() -> None:
        hook = hooks._hook("prolog", JOB, setting.examine, None, setting.places)
        seen.append(hooks._shared(hook, hooks._request(hook, hooks.job_of(JOB))))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert all(warned in one.findings for one in seen)
    # What is each job's own, its GPUs' processes, is looked at for each of them.
    processes = {one.id for one in check.REGISTRY.values() if one.needs == "processes"}
    assert [set(request.only) for request in setting.requests if not request.only] == [set()]
    assert all(set(request.only) <= processes for request in setting.requests)


def test_an_earlier_look_is_not_shared(setting: Setting) -> None:
    setting.findings = [healthy("ib_port", "mlx5_0:1")]
    assert setting.run(hooks.prolog) == GO_ON
    setting.findings = [SICK]
    assert setting.run(hooks.prolog) == ELSEWHERE


def test_lock_that_is_never_given_back_stops_nobody(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_SHARE_WAIT_S", 0.1)
    Path(setting.places.runtime).mkdir()
    lock = Path(setting.places.runtime, "verdict-gpu.json.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        setting.findings = [SICK]
        assert setting.run(hooks.prolog) == ELSEWHERE


# -- what Slurm says of the job


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"SLURM_JOB_GPUS": ""}, None),
        ({"SLURM_JOB_GPUS": "0,1"}, ("0", "1")),
        ({"SLURM_JOB_GPUS": "0-3,7"}, ("0", "1", "2", "3", "7")),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ("2",)),
        ({"GPU_DEVICE_ORDINAL": "3"}, ("3",)),
        ({"SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": "2"}, ("1",)),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43-3c4e-ba2b-1a2b-000000000000"},
            ("GPU-5ebe9f43-3c4e-ba2b-1a2b-000000000000",),
        ),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-5ebe9f43-3c4e/1/0"}, ("MIG-GPU-5ebe9f43-3c4e/1/0",)),
        ({"SLURM_JOB_GPUS": "0,$(reboot)"}, ()),
        ({"SLURM_JOB_GPUS": "../../etc"}, ()),
        ({"SLURM_JOB_GPUS": "0,"}, ()),
        ({"SLURM_JOB_GPUS": "0-999,0-999"}, ()),
        ({"SLURM_JOB_GPUS": ",".join(["1"] * 100_000)}, ()),
        ({"SLURM_JOB_GPUS": "٣"}, ()),
    ],
)
def test_gpus_of_the_job(environ: dict[str, str], gpus: tuple[str, ...] | None) -> None:
    assert hooks.gpus_of(environ) == gpus


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "42", "SLURM_JOB_UID": "1001"}, Job(42, 1001)),
        ({"SLURM_JOB_ID": "42", "SLURM_UID": "0"}, Job(42, 0)),
        ({"SLURM_JOBID": "42"}, Job(42, -1)),
        ({"SLURM_JOB_ID": "42", "SLURM_JOB_UID": "root"}, Job(42, -1)),
        ({"SLURM_JOB_ID": "../../etc/passwd"}, None),
        ({"SLURM_JOB_ID": "42\n"}, None),
        ({"SLURM_JOB_ID": "-1"}, None),
        ({"SLURM_JOB_ID": "0"}, None),
        ({"SLURM_JOB_ID": "9" * 400}, None),
        ({"SLURM_JOB_ID": "٣"}, None),
    ],
)
def test_job(environ: dict[str, str], job: Job | None) -> None:
    assert hooks.job_of(environ) == job


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "a\n", "$(id)", "x" * 300])
def test_name_that_makes_no_sense_is_the_hostname(name: str) -> None:
    assert hooks.node_name({"SLURMD_NODENAME": name}) == os.uname().nodename.partition(".")[0]
    assert hooks.node_name({"SLURMD_NODENAME": "gpu-7.site"}) == "gpu-7.site"


@pytest.mark.parametrize(
    ("path", "taken"), [("/etc/x", "/etc/x"), ("x", ""), ("/a:/b", ""), ("/a\n", "")]
)
def test_paths_from_the_environment(path: str, taken: str) -> None:
    slurm = hooks._slurm({"SLURM_CONF": path, "GPUHEALTH_SLURM_BIN": path})
    assert slurm == scontrol.Scontrol(taken, taken)


# -- what the job is told


def test_message_is_plain(setting: Setting) -> None:
    nasty = 'line\ntwo "quoted" `id` $HOME \\n %s \x1b[31m größe'
    found = [unhealthy("a", nasty, nasty, nasty, "")] + [
        unknown("b", str(n), "EIO") for n in range(50)
    ]
    text = hooks.message("gpu-7", tuple(found), None)
    lines = text.splitlines()
    assert len(lines) == 20
    assert lines[-1] == "gpuhealth: and 32 more: gpuhealth check"
    assert re.fullmatch(r"(?:gpuhealth: [ !#%&(-\[\]^_a-~]+\n)+", text)


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        (("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", "why"), "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\n"),
        (("PATH", "/tmp", "why"), ""),
        (("NCCL_A;B", "1", "why"), ""),
        (("NCCL_A", "$(id)", "why"), ""),
        (("NCCL_A", "1\nNCCL_B=2", "why"), ""),
        (("NCCL_A", "", "why"), ""),
        (("NCCL_A", "a b", "why"), ""),
    ],
)
def test_settings(variable: tuple[str, str, str], line: str) -> None:
    assert hooks.settings_text([variable]) == line


# -- the scripts


@pytest.mark.parametrize("script", ["prolog", "epilog", "health_check", "task_prolog"])
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_scripts_are_sound(script: str, shell: str) -> None:
    place = SCRIPTS / script
    assert place.stat().st_mode & 0o111
    assert place.read_text().startswith("#!/bin/sh\n")
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(place)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(place)], capture_output=True, check=False)
        assert done.stdout == b""


def test_scripts_differ_in_what_they_run_alone() -> None:
    texts = [
        [
            line
            for line in (SCRIPTS / name).read_text().splitlines()
            if not line.startswith(("# What Slurm runs", "# HealthCheckProgram", "hook="))
        ]
        for name in ("prolog", "epilog", "health_check")
    ]
    assert texts[0] == texts[1] == texts[2]


def run_script(tmp_path: Path, shell: str, python: str) -> subprocess.CompletedProcess[str]:
    program, lib = tmp_path / "python", tmp_path / "lib"
    program.write_text(f"#!/bin/sh\n{python}\n")
    program.chmod(0o755)
    lib.mkdir(exist_ok=True)
    (lib / "gpuhealth").mkdir()
    (lib / "gpuhealth" / "__main__.py").touch()
    text = (SCRIPTS / "prolog").read_text()
    text = text.replace("=/usr/bin/python3\n", f"={program}\n")
    text = text.replace("=/usr/libexec/gpusub/lib\n", f"={lib}\n").replace("/usr/bin/logger", "/no")
    (tmp_path / "prolog").write_text(text)
    return subprocess.run(
        [shell, str(tmp_path / "prolog")], env={}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    ("python", "code"),
    [
        ("exit 0", 0),
        ("exit 75", 1),
        ("exit 1", 0),
        ("exit 2", 0),
        ("exit 127", 0),
        ("kill -9 $$", 0),
        ("kill -11 $$", 0),
    ],
)
def test_one_code_alone_fails_the_prolog(
    tmp_path: Path, shell: str, python: str, code: int
) -> None:
    done = run_script(tmp_path, shell, python)
    assert done.returncode == code
    said = "is not checked" in done.stderr
    assert said is (python not in ("exit 0", "exit 75"))


def test_interpreter_is_isolated(tmp_path: Path) -> None:
    done = run_script(tmp_path, "/bin/sh", f'printf "%s|" "$@" > {tmp_path}/words; exit 0')
    assert done.returncode == 0
    words = (tmp_path / "words").read_text().split("|")
    assert words[:4] == ["-I", "-S", "-B", "-c"]
    assert words[5:] == [f"{tmp_path}/lib", "prolog", ""]


@pytest.mark.parametrize("missing", ["python", "lib"])
def test_broken_installation_lets_jobs_through(tmp_path: Path, missing: str) -> None:
    run_script(tmp_path, "/bin/sh", "exit 75")
    place = tmp_path / missing
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    done = subprocess.run(
        ["/bin/sh", str(tmp_path / "prolog")], env={}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "this node is not checked" in done.stderr


TASK = {"SLURM_JOB_ID": "42", "SLURM_LOCALID": "0"}


def task_prolog(tmp_path: Path, shell: str = "/bin/sh", **environ: str) -> list[str]:
    text = (SCRIPTS / "task_prolog").read_text()
    text = text.replace("=/run/gpuhealth\n", f"={tmp_path}\n")
    text = text.replace("/etc/nccl.conf", f"{tmp_path}/site.conf")
    (tmp_path / "task_prolog").write_text(text)
    done = subprocess.run(
        [shell, str(tmp_path / "task_prolog")],
        env={"HOME": str(tmp_path), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
class TestTaskProlog:
    def test_nothing_found(self, tmp_path: Path, shell: str) -> None:
        assert task_prolog(tmp_path, shell, **TASK) == []
        assert task_prolog(tmp_path, shell) == []

    def test_settings(self, tmp_path: Path, shell: str) -> None:
        (tmp_path / "nccl.env").write_text("NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\nNCCL_IB_SL=5\n")
        both = ["export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1", "export NCCL_IB_SL=5"]
        assert task_prolog(tmp_path, shell) == both
        assert task_prolog(tmp_path, shell, NCCL_IB_HCA="mlx5_9") == both[1:]
        assert task_prolog(tmp_path, shell, NCCL_IB_HCA="") == both[1:]

    @pytest.mark.parametrize("place", [".nccl.conf", "site.conf", "own.conf"])
    def test_files_of_nccls_own_are_the_users(self, tmp_path: Path, shell: str, place: str) -> None:
        (tmp_path / "nccl.env").write_text("NCCL_IB_HCA=mlx5_0\nNCCL_IB_SL=5\n")
        (tmp_path / place).write_text("# mine\nNCCL_IB_HCA_X=1\nNCCL_IB_HCA=mlx5_9")
        environ = {"NCCL_CONF_FILE": str(tmp_path / place)} if place == "own.conf" else {}
        assert task_prolog(tmp_path, shell, **environ) == ["export NCCL_IB_SL=5"]

    def test_nothing_unsafe(self, tmp_path: Path, shell: str) -> None:
        lines = [
            "PATH=/x",
            "NCCL_A;id=1",
            "NCCL_A=$(id)",
            "NCCL_B=a b",
            "NCCL_",
            "x",
            "",
            "NCCL_=1",
        ]
        lines += ["nccl_x=1", "NCCL_C=`id`", "NCCL_D='x'", "NCCL_E="]
        (tmp_path / "nccl.env").write_text("\n".join(lines) + "\n")
        assert task_prolog(tmp_path, shell) == []

    def test_message_of_this_job_once_a_node(self, tmp_path: Path, shell: str) -> None:
        (tmp_path / "jobs").mkdir()
        (tmp_path / "jobs" / "42.message").write_text("gpuhealth: gpu-7 is  unhealthy: %s\n")
        said = ["print gpuhealth: gpu-7 is  unhealthy: %s"]
        assert task_prolog(tmp_path, shell, **TASK) == said
        for step in ("0", "-5", "4294967291"):
            assert task_prolog(tmp_path, shell, **{**TASK, "SLURM_STEP_ID": step}) == said
        assert task_prolog(tmp_path, shell, **{**TASK, "SLURM_STEP_ID": "1"}) == []
        assert task_prolog(tmp_path, shell, **{**TASK, "SLURM_LOCALID": "1"}) == []
        assert task_prolog(tmp_path, shell, **{**TASK, "SLURM_JOB_ID": "43"}) == []
        assert task_prolog(tmp_path, shell, **{**TASK, "SLURM_JOB_ID": "../jobs/42"}) == []


def test_the_checks_are_there(setting: Setting) -> None:
    # Without them every node would be healthy.
    setting.run(hooks.prolog)
    assert "ib_port" in check.REGISTRY
