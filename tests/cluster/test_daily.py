"""status, logs, exec, cancel and clean on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from box import until
from cluster import Cluster

HOME = Path("/home/researcher")
FORGOTTEN = "20250102-030405-0a0a0a0a"

HOSTILE = [
    "a b", "", "it's", '"', "\\", "$HOME", "`id`", "$(id)", "#x", "%j", "%%", "*", "~", ";", "|",
    "--", "-", "-x", "-w", "--nodes=9", "-h", "--help", "x\ny", "\t", "é", "日本", "{{ 7*7 }}",
]  # fmt: skip


@pytest.fixture
def home(cluster: Cluster) -> Path:
    """The researcher's home seen from outside."""
    return cluster.path(str(HOME))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for made in (path, path.parent, path.parent.parent):
        os.chown(made, 1001, 1001)


def gpusub(
    cluster: Cluster, *words: str, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    return cluster.run(["gpusub", *words], check=check, **options)


def submitted(cluster: Cluster, *words: str) -> str:
    return gpusub(cluster, "--parsable", *words).stdout.strip()


def command(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a command that bash runs once a node."""
    return submitted(cluster, *options, "--", "bash", "-c", script)


def status(cluster: Cluster, *words: str) -> str:
    done = gpusub(cluster, "status", *words)
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    return done.stdout


def shown(cluster: Cluster, job: str) -> str:
    """A job's lines in the list of all, as one."""
    lines = status(cluster).splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[0] == job)
    end = next((i for i in range(start + 1, len(lines)) if lines[i][0] != " "), len(lines))
    return " ".join(" ".join(lines[start:end]).split())


def until_shown(cluster: Cluster, job: str, words: str) -> str:
    seen = [""]

    def is_there() -> bool:
        seen[0] = shown(cluster, job)
        return re.search(words, seen[0]) is not None

    until(is_there, 60, lambda: f"{words!r} is not in {seen[0]!r}")
    return seen[0]


def refused(cluster: Cluster, *words: str, code: int = 2, **options: Any) -> str:
    done = gpusub(cluster, *words, check=False, **options)
    assert done.returncode == code, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("gpusub: error: ").rstrip("\n")


def root(cluster: Cluster, *words: str) -> None:
    cluster.run(["scontrol", "update", *words], user="root")


def running(cluster: Cluster, *words: str) -> str:
    job = command(cluster, "echo ready; sleep 300", "--gpus-per-node=2", *words)
    cluster.wait(job, "RUNNING")
    return job


def log_says(home: Path, job: str, words: str) -> None:
    log = home / ".gpusub" / job / "log.out"
    until(lambda: log.exists() and words in log.read_text(), 60, lambda: f"no {words!r} in {log}")


class TestStatus:
    def test_nothing(self, cluster: Cluster, home: Path) -> None:
        done = gpusub(cluster, "status", "--json")
        # What earlier tests ran is still known.
        assert all(job["ended"] for job in json.loads(done.stdout))

    def test_a_running_one_and_those_behind_it(self, cluster: Cluster, home: Path) -> None:
        blocker = command(cluster, "sleep 300", "-N8", "-J", "all of it", "-t", "2:00:00")
        cluster.wait(blocker, "RUNNING")
        first = command(cluster, "true", "-N8", "-J", "first")
        second = command(cluster, "true", "-N8")
        at_end = submitted(cluster, "-d", f"afterok:{blocker}", "--", "true")
        held = submitted(cluster, "--sbatch", "hold", "--", "true")
        line = shown(cluster, blocker)
        assert re.fullmatch(rf"{blocker} all of it running gpu-\[5-12\] 0:\d\d / 2:00:00", line)
        until_shown(cluster, first, r"first pending 8 - / no limit waits for 8 free nodes \(Resour")
        until_shown(cluster, second, r"jobs of higher priority come first \(Priority\)")
        assert f"waits until job {blocker} has ended well" in shown(cluster, at_end)
        assert f"held by you; let it go with: scontrol release {held}" in shown(cluster, held)
        ids = [line.split()[0] for line in status(cluster).splitlines() if line[0].isdigit()]
        assert ids[:5] == [held, at_end, second, first, blocker]
        gpusub(cluster, "cancel", blocker)
        until_shown(
            cluster, at_end, r"never starts \(DependencyNeverSatisfied\): .* \(it did not\)"
        )

    def test_nodes_that_are_drained_are_named(self, cluster: Cluster, home: Path) -> None:
        root(cluster, "nodename=gpu-[5-6]", "state=drain", "reason=ib0 is down")
        root(cluster, "nodename=gpu-[7-12]", "state=drain", "reason=maintenance")
        job = command(cluster, "true", "-N2")
        line = until_shown(cluster, job, "not to be had")
        assert re.search(r"gpu-\[5-6\] drained \(.*ib0 is down\)", line)
        assert "gpu-[7-12] drained (maintenance)" in line

    def test_a_required_node_that_is_drained(self, cluster: Cluster, home: Path) -> None:
        root(cluster, "nodename=gpu-7", "state=drain", "reason=fan")
        job = submitted(cluster, "-w", "gpu-7", "--", "true")
        assert "gpu-7 drained (fan)" in until_shown(cluster, job, "not to be had")

    def test_limits_of_the_partition(self, cluster: Cluster, home: Path) -> None:
        job = submitted(cluster, "-N3", "-t", "60", "--", "sleep", "300")
        late = submitted(cluster, "--sbatch", "begin=now+1hour", "--", "true")
        assert re.search(r"starts at .* at the earliest \(BeginTime\)", shown(cluster, late))
        gpusub(cluster, "cancel", job)
        try:
            root(cluster, "partitionname=gpu", "maxnodes=2", "maxtime=30")
            # Beyond what gpusub itself refuses: limits may change while a job waits.
            nodes = cluster.sbatch("-N3", "-t", "10", "-J", "n", "--wrap", "true")
            long = cluster.sbatch("-N1", "-t", "60", "-J", "t", "--wrap", "true")
            until_shown(cluster, nodes, r"never starts \(PartitionNodeLimit\): more ")
            until_shown(cluster, long, r"never starts \(PartitionTimeLimit\): a longer time than")
        finally:
            root(cluster, "partitionname=gpu", "maxnodes=unlimited", "maxtime=unlimited")

    def test_switches_that_are_waited_for(self, cluster: Cluster, home: Path) -> None:
        # One node of each leaf is taken.
        for node in ("gpu-5", "gpu-6", "gpu-7", "gpu-8"):
            cluster.sbatch("-w", node, "--exclusive", "--wrap", "sleep 300")
        job = submitted(cluster, "-N2", "--sbatch", "switches=1@00:30:00", "--", "true")
        until_shown(
            cluster, job,
            r"free nodes below 1 leaf switch until \d\d:\d\d:\d\d, then for any \(Resources\)",
        )  # fmt: skip

    def test_a_launch_that_failed(self, cluster: Cluster, home: Path) -> None:
        # The site's slurm.conf has nohold_on_prolog_fail; an administrator holds it here.
        cluster.hook("prolog", "#!/bin/sh\nexit 1\n")
        job = submitted(cluster, "-w", "gpu-5", "--", "true")
        until_shown(cluster, job, "requeued; Slurm starts it again after|not to be had")
        root(cluster, f"jobid={job}", "priority=0")
        until_shown(cluster, job, r"held by an administrator.*\(JobHeldAdmin\)")

    def test_ended_ones_and_arrays(self, cluster: Cluster, home: Path) -> None:
        bad = command(cluster, "exit 3", "-J", "bad")
        cluster.wait(bad, "FAILED")
        array = cluster.sbatch("-H", "--array=1-9%2", "-J", "x\x1b[31m\ny", "--wrap", "true")
        assert re.search(r"bad failed \(3\) gpu-5 0:0\d, ended \d\d:\d\d:\d\d", shown(cluster, bad))
        assert f"{array}_[1-9%2]  x?[31m?y" in status(cluster)
        (one,) = json.loads(gpusub(cluster, "status", "--json", f"{array}_3").stdout)
        assert (one["array_id"], one["name"], one["run_dir"]) == (int(array), "x\x1b[31m\ny", None)

    def test_users_variables_blind_nothing(self, cluster: Cluster, home: Path) -> None:
        job = running(cluster)
        blind = {"SQUEUE_STATES": "CD", "SQUEUE_USERS": "root", "SQUEUE_FORMAT": "%i"}
        (one,) = json.loads(gpusub(cluster, "status", "--json", job, env=blind).stdout)
        assert one["state"] == "RUNNING"

    def test_all_about_one(self, cluster: Cluster, home: Path) -> None:
        job = running(cluster, "-N2", "-t", "30", "-J", "one")
        log_says(home, job, "ready")
        token = (home / ".gpusub" / job).readlink().name
        there = [job, token, "one", f".gpusub/{token}", str(HOME / ".gpusub" / job)]
        outputs = {re.sub(r"0:\d\d /", "", status(cluster, word)) for word in there}
        assert len(outputs) == 1
        (output,) = outputs
        for line in (
            "  nodes       2  (option --nodes)",
            "  GPUs        2 a node  (option --gpus-per-node)",
            "  CPUs        8 a node  (2 GPUs' share of a node)",
            "  time        30  (option --time)",
            "  partition   gpu  (Slurm's default partition)",
            f"  run         .gpusub/{token}",
            f"  log         .gpusub/{token}/log.out",
            "ready",
        ):
            assert line in output.splitlines()
        (one,) = json.loads(gpusub(cluster, "status", "--json", job).stdout)
        assert one["token"] == token
        assert one["log"] == str(HOME / ".gpusub" / token / "log.out")
        assert one["plan"]["resources"]["cpus_per_task"]["value"] == 8

    @pytest.mark.parametrize(("code", "words"), [("0", "completed"), ("7", "failed (7)"), ("", "")])
    def test_one_that_slurm_has_forgotten(
        self, cluster: Cluster, home: Path, code: str, words: str
    ) -> None:
        forgotten(home, code)
        output = status(cluster, "987654")
        assert (words or "unknown: it left no exit code") in output
        assert "Slurm does not know it" in output
        assert output == status(cluster, FORGOTTEN)
        (one,) = json.loads(gpusub(cluster, "status", "--json", FORGOTTEN).stdout)
        assert one["exit_code"] == (int(code) if code else None)

    def test_what_is_not_there(self, cluster: Cluster, home: Path) -> None:
        running(cluster, "-J", "training")
        assert refused(cluster, "status", "trainin") == "no job 'trainin'; did you mean training?"
        assert "no job '987654'" in refused(cluster, "status", "987654")
        assert refused(cluster, "status", "./x").startswith("'./x' is no run directory")
        refused(cluster, "status", "1_99999")

    def test_without_a_controller(self, cluster: Cluster, home: Path) -> None:
        forgotten(home, "7")
        env = unreachable(cluster)
        assert "Unable to contact" in refused(cluster, "status", code=4, env=env)
        done = gpusub(cluster, "status", FORGOTTEN, env=env)
        assert "failed (7)" in done.stdout
        assert done.stderr.startswith("gpusub: Slurm gave no answer: ")


def unreachable(cluster: Cluster) -> dict[str, str]:
    """Return an environment in which no controller answers, and that is soon noticed."""
    conf = cluster.path("/etc/slurm/slurm.conf").read_text()
    write(cluster.path(str(HOME / "conf/slurm.conf")), conf + "SlurmctldPort=9\nMessageTimeout=2\n")
    return {"SLURM_CONF": str(HOME / "conf/slurm.conf")}


def forgotten(home: Path, exit_code: str) -> Path:
    """Make a run directory of a job that Slurm does not know."""
    run = home / ".gpusub" / FORGOTTEN
    write(run / "job.sh", "#!/bin/bash\n")
    write(run / "plan.json", json.dumps({"log": {"value": f"{HOME}/x.log", "origin": "built-in"}}))
    write(home / "x.log", "the last words\n")
    if exit_code:
        write(run / "exit_code", f"{exit_code}\n")
    (home / ".gpusub" / "987654").symlink_to(FORGOTTEN)
    return run


RANKS = """
import os, sys, time
rank = os.environ["RANK"]
for step in range(int(sys.argv[1])):
    print("rank", rank, "step", step, flush=True)
    time.sleep(0.3)
"""


class TestLogs:
    def test_the_whole_and_its_end(self, cluster: Cluster, home: Path) -> None:
        job = command(cluster, "seq 100; exit 3")
        cluster.wait(job, "FAILED")
        whole = gpusub(cluster, "logs", job).stdout
        assert "\n99\n100\n" in whole
        assert whole == (home / ".gpusub" / job / "log.out").read_text()
        assert gpusub(cluster, "logs", "-n2", job).stdout == "".join(
            line + "\n" for line in whole.splitlines()[-2:]
        )
        newest = gpusub(cluster, "logs")
        assert newest.stdout == whole
        assert newest.stderr.startswith(f"gpusub: job {job} (bash): .gpusub/")
        done = gpusub(cluster, "logs", "-f", "-n0", job, check=False)
        assert (done.returncode, done.stdout) == (3, "")

    def test_followed_through_a_requeue(self, cluster: Cluster, home: Path) -> None:
        script = (
            'echo "begin $SLURM_RESTART_COUNT"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 300; exit 5'
        )
        job = command(cluster, script)
        following = cluster.popen(["gpusub", "logs", "-f", job])
        log_says(home, job, "begin")
        cluster.run(["scontrol", "requeue", job])
        out, err = following.communicate(timeout=90)
        assert following.returncode == 5, err
        assert out.count("begin") == 2
        assert "begin 1" in out
        assert re.search(r"job \d+ is pending: BeginTime", err)
        assert f"job {job} failed, exit code 5" in err
        assert "restarts    1" in status(cluster, job)

    def test_every_rank_of_two_nodes(self, cluster: Cluster, home: Path) -> None:
        write(home / "ranks.py", RANKS)
        job = submitted(cluster, "-N2", "--gpus-per-node=2", "ranks.py", "3")
        done = gpusub(cluster, "logs", "-f", "--rank", "all", job, timeout=120)
        for rank in range(4):
            lines = re.findall(rf"^\[rank {rank}\] rank (\d) step (\d)$", done.stdout, re.MULTILINE)
            assert lines == [(str(rank), str(step)) for step in range(3)]
        assert all(line.startswith("[rank ") for line in done.stdout.splitlines())
        three = gpusub(cluster, "logs", "--rank", "3", job).stdout
        assert three == "".join(f"rank 3 step {step}\n" for step in range(3))
        main = gpusub(cluster, "logs", "--rank", "0", job).stdout
        assert main == gpusub(cluster, "logs", job).stdout
        assert refused(cluster, "logs", "--rank", "4", job) == (
            f"--rank 4: job {job} has no log of it; there are those of ranks 0-3"
        )
        places = json.loads(gpusub(cluster, "logs", "--json", job).stdout)
        assert sorted(places["ranks"]) == ["0", "1", "2", "3"]

    def test_a_log_of_ones_own_and_a_job_of_another_kind(
        self, cluster: Cluster, home: Path
    ) -> None:
        job = command(cluster, "echo mine", "-o", "own-%j.log", "-J", "own")
        cluster.wait(job, "COMPLETED")
        assert "mine\n" in gpusub(cluster, "logs", "own").stdout
        plain = cluster.sbatch("-o", "%j.txt", "--wrap", "echo plain; exit 2")
        done = gpusub(cluster, "logs", "-f", plain, check=False)
        assert (done.returncode, done.stdout) == (2, "plain\n")

    def test_of_a_job_that_slurm_has_forgotten(self, cluster: Cluster, home: Path) -> None:
        forgotten(home, "7")
        assert gpusub(cluster, "logs", "987654").stdout == "the last words\n"
        assert gpusub(cluster, "logs", "-f", FORGOTTEN, check=False).returncode == 7
        assert "no job 'nope'" in refused(cluster, "logs", "nope")

    def test_of_a_run_on_this_machine(self, cluster: Cluster, home: Path) -> None:
        script = "echo here; sleep 2; exit 6"
        local = cluster.popen(["gpusub", "--local", "--", "bash", "-c", script])
        until(lambda: any(home.glob(".gpusub/2*/log.out")), 30, lambda: "no log")
        done = gpusub(cluster, "logs", "-f", check=False)
        local.communicate(timeout=30)
        assert (done.returncode, done.stdout) == (6, "here\n")

    def test_the_job_goes_on_when_nobody_looks(self, cluster: Cluster, home: Path) -> None:
        job = running(cluster)
        following = cluster.popen(["gpusub", "logs", "-f", job])
        assert following.stdout
        following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=30)
        assert following.returncode == 130
        assert f"job {job} goes on" in err
        assert cluster.job(job)["JobState"] == "RUNNING"


class TestExec:
    def test_it_sees_the_jobs_gpus(self, cluster: Cluster, home: Path) -> None:
        job = running(cluster, "-N2")
        script = "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_ID $(hostname); cat; exit 7"
        done = gpusub(cluster, "exec", job, "sh", "-c", script, check=False, input="from stdin\n")
        assert done.stdout == f"0,1 {job} gpu-5\nfrom stdin\n"
        assert done.returncode == 7
        second = cluster.job(job)["NodeList"]
        assert second == "gpu-[5,9]"
        for words in (["-w", "gpu-9", job], [job, "-wgpu-9", "--"]):
            assert gpusub(cluster, "exec", *words, "hostname").stdout == "gpu-9\n"
        assert refused(cluster, "exec", job, "-w", "gpu-7", "hostname") == (
            f"-w gpu-7: job {job} runs on gpu-[5,9]; name one of these"
        )
        assert cluster.job(job)["JobState"] == "RUNNING"

    def test_words_reach_the_command_unchanged(self, cluster: Cluster, home: Path) -> None:
        running(cluster, "-J", "a job")
        script = "import json, sys; print(json.dumps(sys.argv[1:]))"
        planted = {"SLURM_NTASKS": "3", "SRUN_CPUS_PER_TASK": "99", "SLURM_JOB_ID": "1"}
        done = gpusub(cluster, "exec", "a job", "python", "-c", script, *HOSTILE, env=planted)
        assert json.loads(done.stdout) == HOSTILE

    def test_a_job_that_does_not_run(self, cluster: Cluster, home: Path) -> None:
        held = submitted(cluster, "--sbatch", "hold", "--", "true")
        assert refused(cluster, "exec", held, "true") == (
            f"job {held} does not run; its state: pending"
        )
        forgotten(home, "0")
        assert "has ended" in refused(cluster, "exec", "987654", "true")
        assert "write a job and a command" in refused(cluster, "exec", held)


class TestCancel:
    def test_by_every_name(self, cluster: Cluster, home: Path) -> None:
        job, held = running(cluster, "-J", "one"), command(cluster, "true", "--sbatch", "hold")
        token = (home / ".gpusub" / held).readlink().name
        done = gpusub(cluster, "cancel", "one", token)
        assert done.stdout == f"{job} (one): cancelled\n{held} (bash): cancelled\n"
        assert cluster.job(job)["JobState"] == "CANCELLED"
        assert refused(cluster, "cancel", job) == f"{job}: the job has ended: cancelled"
        assert refused(cluster, "cancel", "one") == "one: the job has ended: cancelled"

    def test_tasks_of_an_array(self, cluster: Cluster, home: Path) -> None:
        array = cluster.sbatch("-H", "--array=1-4", "--wrap", "true")
        done = gpusub(cluster, "cancel", "--json", f"{array}_2")
        assert [one["shown"] for one in json.loads(done.stdout)] == [f"{array}_2"]
        assert shown(cluster, f"{array}_[1,3-4]")
        gpusub(cluster, "cancel", array)
        assert f"{array}_[" not in cluster.run(["squeue", "-h", "-o", "%i"]).stdout

    def test_none_but_those_that_were_meant(self, cluster: Cluster, home: Path) -> None:
        other = cluster.sbatch("-H", "--wrap", "true", user="colleague")
        assert refused(cluster, "cancel", other) == f"{other}: the job is colleague's, not yours"
        mine = running(cluster, "-J", "same")
        again = running(cluster, "-J", "same")
        # Nothing is cancelled if one of them is refused.
        assert "not yours" in refused(cluster, "cancel", mine, other)
        assert f"several jobs of yours: {mine}, {again}" in refused(cluster, "cancel", "same")
        forgotten(home, "")
        assert "Slurm does not know it" in refused(cluster, "cancel", FORGOTTEN)
        # The link is of a job that had this id before the controller lost its state.
        (home / ".gpusub" / mine).unlink()
        (home / ".gpusub" / mine).symlink_to(FORGOTTEN)
        assert f"use scancel {mine}" in refused(cluster, "cancel", mine)
        assert "another job of this id" in refused(cluster, "exec", mine, "true")
        assert "which Slurm has forgotten" in " ".join(status(cluster, mine).split())
        for job in (mine, again):
            assert cluster.job(job)["JobState"] == "RUNNING"
        assert cluster.job(other)["JobState"] == "PENDING"

    def test_one_that_takes_its_time(self, cluster: Cluster, home: Path) -> None:
        cluster.hook("epilog", "#!/bin/sh\nsleep 8\n")
        job = running(cluster)
        began = time.monotonic()
        done = gpusub(cluster, "cancel", job)
        assert time.monotonic() - began < 10
        assert re.fullmatch(
            rf"{job} \(bash\): cancelled(, and still completing on gpu-5)?\n", done.stdout
        )


class TestClean:
    @pytest.fixture
    def age(self) -> Callable[[Path, float], None]:
        def make(run: Path, days: float) -> None:
            when = time.time() - days * 86400
            for path in [run, *run.rglob("*")]:
                os.utime(path, (when, when), follow_symlinks=False)

        return make

    def test_old_runs_and_no_others(
        self, cluster: Cluster, home: Path, age: Callable[[Path, float], None]
    ) -> None:
        runs = home / ".gpusub"
        waiting, done = (
            submitted(cluster, *hold, "--", "true") for hold in (("--sbatch", "hold"), ())
        )
        cluster.wait(done, "COMPLETED")
        lost = forgotten(home, "")
        write(home / "data" / "kept", "x" * 1000)
        (lost / "data").symlink_to("../../data")
        for job in (waiting, done):
            age(runs / (runs / job).readlink(), 20)
        age(lost, 20)
        young = submitted(cluster, "--", "true")
        cluster.wait(young, "COMPLETED")
        foreign = runs / "20250102-030405-0b0b0b0b"
        write(foreign / "precious", "")
        age(foreign, 20)
        (runs / "7777777").symlink_to("20250102-030405-0c0c0c0c")
        (runs / "8888888").symlink_to("../data")

        listed = gpusub(cluster, "clean", "--dry-run").stdout
        assert re.search(rf"^\.gpusub/{FORGOTTEN} +987654 +\d{{4}}-\d\d-\d\d +\d+ B$", listed, re.M)
        assert "2 run directories" in listed
        refusal = gpusub(cluster, "clean", check=False)
        assert refusal.returncode == 2
        assert "say so with --yes" in refusal.stderr
        assert lost.is_dir()

        answer = json.loads(gpusub(cluster, "clean", "--yes", "--json").stdout)
        assert sorted(one["job_id"] for one in answer) == [int(done), 987654]
        assert all(one["removed"] for one in answer)
        left = {path.name for path in runs.iterdir()}
        links = {waiting, young, "8888888"}
        kept = {(runs / job).readlink().name for job in (waiting, young)}
        assert left == links | kept | {foreign.name, ".gitignore"}
        assert (home / "data" / "kept").exists()
        assert "older than 14 days" in gpusub(cluster, "clean").stdout

    def test_nothing_without_slurms_word(self, cluster: Cluster, home: Path) -> None:
        lost = forgotten(home, "0")
        refused(cluster, "clean", "--older-than=0", "--yes", code=4, env=unreachable(cluster))
        assert lost.is_dir()
        assert "no directory" in refused(cluster, "clean", "--run-root", "nope")
