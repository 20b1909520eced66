"""The prolog, the periodic check and the cap on drains, on a real Slurm."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import gpuhealth_install as installation
from box import until
from cluster import Cluster
from configuration import HOOK_DIRECTORY
from gpuhealth import slurmnode

GPU_NODES = [f"gpu-{number}" for number in range(5, 13)]
SICK = "gpuhealth: ib_port mlx5_0:1 DOWN/Polling expected ACTIVE/LinkUp"
Clusters = Callable[..., Cluster]


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_installed(_cluster: Cluster) -> Iterator[None]:
    """Other tests bring hooks of their own, and no policy."""
    yield
    if _cluster.is_running:
        shutil.rmtree(_cluster.path(installation.LIB), ignore_errors=True)
        _cluster.path(installation.POLICY).unlink(missing_ok=True)


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    """The session's cluster with gpuhealth installed, and a cap of two."""
    installation.install(cluster)
    return cluster


def break_port(cluster: Cluster, *names: str) -> None:
    for name in names:
        port = cluster.node(name).infiniband / "mlx5_0/ports/1"
        (port / "phys_state").write_text("2: Polling\n")
        (port / "state").write_text("1: DOWN\n")


def shown(cluster: Cluster, name: str) -> slurmnode.SlurmNode:
    """A node as slurmctld has it."""
    done = cluster.run(
        ["scontrol", "-o", "show", "node", name],
        user="root",
        env={"SLURM_TIME_FORMAT": "standard"},
    )
    return slurmnode.parse(done.stdout)[0]


def hook(cluster: Cluster, name: str, script: str = "prolog") -> tuple[int, str, float]:
    """Run a hook as slurmd does; return its exit code, what it said, and how long it took."""
    started = time.monotonic()
    variables = {"SLURMD_NODENAME": name}
    if script != "health_check":
        variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1001", "SLURM_JOB_GPUS": "0,1"}
    words = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
    done = cluster.node(name).run([*words, f"{HOOK_DIRECTORY}/{script}"], check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def drained(cluster: Cluster) -> list[str]:
    """The nodes that we hold drained."""
    done = cluster.run(
        ["scontrol", "-o", "show", "node"], user="root", env={"SLURM_TIME_FORMAT": "standard"}
    )
    return sorted(node.name for node in slurmnode.parse(done.stdout) if node.drained_by_us)


def read(cluster: Cluster, name: str) -> str:
    place = cluster.path(f"/home/researcher/{name}")
    return place.read_text() if place.exists() else ""


# -- a sick node, and a job


def test_sick_node_is_drained_and_the_job_goes_elsewhere(cluster: Cluster) -> None:
    break_port(cluster, "gpu-7")
    script = "hostname >> ran; srun hostname | sort > nodes"
    busy = [f"gpu-{number}" for number in (5, 6, 8, 9, 10, 12)]
    holder = cluster.sbatch("-N6", "-w", ",".join(busy), "--exclusive", "--wrap", "sleep 60")
    cluster.wait(holder, "RUNNING")
    # Only gpu-7 and gpu-11 are free: it has to start there.
    job = cluster.sbatch("-N2", "--ntasks-per-node=1", "--gpus-per-node=4", "--wrap", script)
    until(lambda: drained(cluster) == ["gpu-7"], 30, lambda: str(cluster.nodes()))
    cluster.run(["scancel", holder])
    ended = cluster.wait(job, "COMPLETED")
    assert int(ended["Restarts"]) >= 1
    nodes = read(cluster, "nodes").split()
    assert len(nodes) == 2
    assert "gpu-7" not in nodes
    assert len(read(cluster, "ran").split()) == 1
    assert cluster.nodes()["gpu-7"] == "drained"
    node = shown(cluster, "gpu-7")
    assert (node.reason, node.reason_user) == (SICK, "root")


def test_healthy_node_asks_slurm_nothing(cluster: Cluster) -> None:
    cluster.controller.stop()
    code, said, seconds = hook(cluster, "gpu-5")
    assert (code, said) == (0, "")
    assert seconds < 2
    assert hook(cluster, "gpu-5", "health_check")[:2] == (0, "")
    assert hook(cluster, "gpu-5", "epilog")[:2] == (0, "")


def test_tasks_get_the_settings_and_users_keep_their_own(cluster: Cluster) -> None:
    wrap = "srun sh -c 'echo ${NCCL_IB_HCA-none}'"
    job = cluster.sbatch("-w", "gpu-5", "-o", "out", "--wrap", wrap)
    cluster.wait(job, "COMPLETED")
    assert read(cluster, "out") == "=mlx5_0:1,mlx5_1:1\n"
    job = cluster.sbatch("-w", "gpu-5", "-o", "out", "--wrap", wrap, env={"NCCL_IB_HCA": "mlx5_9"})
    cluster.wait(job, "COMPLETED")
    assert read(cluster, "out") == "mlx5_9\n"


def test_warning_is_in_the_jobs_log(cluster: Cluster) -> None:
    installation.set_policy(cluster, installation.policy(ib_port="warn"))
    break_port(cluster, "gpu-6")
    job = cluster.sbatch(
        "-w",
        "gpu-6",
        "-n2",
        "--gpus-per-node=1",
        "-o",
        "out",
        "--wrap",
        "srun echo ran; srun echo ran",
    )
    cluster.wait(job, "COMPLETED")
    # In front of the script, and on each node of its first step.
    assert read(cluster, "out").count("ib_port mlx5_0:1: DOWN/Polling") == 2
    assert read(cluster, "out").count("ran\n") == 4
    assert cluster.nodes()["gpu-6"] == "idle"


# -- nodes that are somebody else's


def test_foreign_drain_stays_as_it_is(cluster: Cluster) -> None:
    break_port(cluster, "gpu-5")
    cluster.scontrol("update", "NodeName=gpu-5", "State=DRAIN", "Reason=ADMIN SHUTDOWN")
    before = shown(cluster, "gpu-5")
    # The job was here already when the node was drained: it can't stay, and nothing changes.
    assert hook(cluster, "gpu-5")[0] == 1
    assert hook(cluster, "gpu-5", "health_check")[0] == 0
    assert shown(cluster, "gpu-5") == before
    cluster.reset()
    cluster.scontrol("update", "NodeName=gpu-5", "State=DRAIN", "Reason=Prolog error")
    installation.install(cluster)
    assert hook(cluster, "gpu-5", "health_check")[0] == 0
    assert shown(cluster, "gpu-5").reason == "Prolog error"


def test_maintenance_is_not_touched(cluster: Cluster) -> None:
    break_port(cluster, "gpu-6")
    cluster.scontrol(
        *("create", "reservation", "ReservationName=work", "Users=root", "Nodes=gpu-6"),
        *("StartTime=now", "Duration=10", "Flags=MAINT,IGNORE_JOBS"),
    )
    try:
        until(
            lambda: "MAINTENANCE" in shown(cluster, "gpu-6").state.flags,
            30,
            lambda: str(shown(cluster, "gpu-6")),
        )
        for script in ("prolog", "health_check"):
            code, said, _ = hook(cluster, "gpu-6", script)
            assert code == 0
            assert "MAINTENANCE" in said
        assert drained(cluster) == []
    finally:
        cluster.scontrol("delete", "ReservationName=work")


def test_rebooting_node_is_not_touched(clusters: Clusters) -> None:
    cluster = clusters(nodes=2, small=False, conf="RebootProgram=/bin/true\n")
    installation.install(cluster)
    holder = cluster.sbatch("-w", "gpu-5", "--mem=1G", "--wrap", "sleep 60")
    cluster.wait(holder, "RUNNING")
    break_port(cluster, "gpu-5")
    cluster.scontrol("reboot", "gpu-5")
    before = shown(cluster, "gpu-5")
    assert before.state.flags == {"REBOOT_REQUESTED"}
    for script in ("prolog", "health_check"):
        code, said, _ = hook(cluster, "gpu-5", script)
        assert code == 0
        assert "REBOOT_REQUESTED" in said
    assert shown(cluster, "gpu-5") == before


# -- a Slurm that doesn't answer


def test_slurmctld_hangs(cluster: Cluster) -> None:
    break_port(cluster, "gpu-5")
    cluster.controller.stop()
    code, said, seconds = hook(cluster, "gpu-5")
    assert code == 0
    assert "STAYS IN SERVICE" in said
    assert seconds < 15
    assert "let through" in cluster.node("gpu-5").path("/run/gpuhealth/jobs/7.message").read_text()
    cluster.controller.cont()
    assert hook(cluster, "gpu-5", "health_check")[0] == 0
    assert drained(cluster) == ["gpu-5"]


def test_slurmctld_is_dead(cluster: Cluster) -> None:
    break_port(cluster, "gpu-5")
    cluster.controller.kill()
    code, said, seconds = hook(cluster, "gpu-5")
    assert code == 0
    assert "did not answer" in said
    assert seconds < 15
    cluster.controller.start()

    def is_drained_in_the_end() -> bool:
        # At first slurmctld hasn't heard from the node, which then isn't touched.
        assert hook(cluster, "gpu-5", "health_check")[0] == 0
        return drained(cluster) == ["gpu-5"] and cluster.nodes()["gpu-5"] == "drained"

    until(is_drained_in_the_end, 30, lambda: str(cluster.nodes()), interval=0.5)


def test_node_is_not_registered_yet(cluster: Cluster) -> None:
    # At slurmd's start the health check runs before Slurm knows of the node again.
    break_port(cluster, "gpu-5")
    node = cluster.node("gpu-5")
    node.kill()
    cluster.scontrol("update", "NodeName=gpu-5", "State=DOWN", "Reason=power cut")
    cluster.controller.stop()
    node.launch()
    until(lambda: node.path("/usr/libexec/gpusub").exists(), 10, lambda: "no file system")
    code, _, seconds = hook(cluster, "gpu-5", "health_check")
    assert code == 0
    assert seconds < 15
    cluster.controller.cont()
    assert shown(cluster, "gpu-5").reason == "power cut"


def test_scontrol_hangs(cluster: Cluster) -> None:
    break_port(cluster, "gpu-5")
    fake = cluster.path("/opt/slurm/bin/scontrol")
    fake.parent.mkdir(parents=True, exist_ok=True)
    fake.write_text("#!/bin/sh\ntrap '' TERM\nsleep 300 & sleep 300\n")
    fake.chmod(0o755)
    script = installation.script(cluster, "prolog")
    cluster.hook("prolog", script.replace("slurm_bin=\n", "slurm_bin=/opt/slurm/bin\n"))
    code, said, seconds = hook(cluster, "gpu-5")
    assert code == 0
    assert "no answer in time" in said
    assert seconds < 15
    processes = cluster.node("gpu-5").run(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).stdout
    assert "sleep" not in processes
    assert drained(cluster) == []


# -- a node that can't be looked at


def test_read_that_hangs_drains_nothing(cluster: Cluster) -> None:
    state = cluster.node("gpu-5").infiniband / "mlx5_0/ports/1/state"
    state.unlink()
    os.mkfifo(state)
    code, _, seconds = hook(cluster, "gpu-5")
    assert code == 0
    assert seconds < 25
    assert drained(cluster) == []
    assert "unknown" in cluster.node("gpu-5").path("/run/gpuhealth/jobs/7.message").read_text()


@pytest.mark.parametrize(
    "harm",
    [
        "rm -r {lib}/gpuhealth",
        "rm -r {lib}",
        "echo 'syntax error(' > {lib}/gpuhealth/check.py",
        "echo 'raise SystemExit(1)' > {lib}/gpuhealth/hooks.py",
        "echo 'import os; os.kill(os.getpid(), 9)' > {lib}/gpuhealth/hooks.py",
        "echo 'not json' > /etc/gpusub/health.json",
        "chmod 666 /etc/gpusub/health.json",
    ],
)
def test_broken_installation_drains_nothing(cluster: Cluster, harm: str) -> None:
    break_port(cluster, "gpu-5")
    try:
        cluster.run(["sh", "-c", harm.format(lib=installation.LIB)], user="root")
        for script in ("prolog", "epilog", "health_check"):
            code, said, _ = hook(cluster, "gpu-5", script)
            assert code == 0
            assert said
        assert drained(cluster) == []
    finally:
        shutil.rmtree(cluster.path(installation.LIB), ignore_errors=True)


# -- the cap


def all_at_once(cluster: Cluster, script: str, jitter_s: float = 0) -> list[int]:
    """Run a hook on all eight nodes, within a moment; return the exit codes."""
    codes: list[int] = []

    def run(name: str, after_s: float) -> None:
        time.sleep(after_s)
        codes.append(hook(cluster, name, script)[0])

    threads = [
        threading.Thread(target=run, args=(name, jitter_s * (index * 3 % 8) / 8))
        for index, name in enumerate(GPU_NODES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


@pytest.mark.parametrize("jitter_s", [0.0, 1.0])
def test_no_more_than_two_of_eight_stay_drained(cluster: Cluster, jitter_s: float) -> None:
    break_port(cluster, *GPU_NODES)
    for _ in range(int(os.environ.get("GPUHEALTH_CAP_ROUNDS", "1"))):
        codes = all_at_once(cluster, "prolog", jitter_s)
        assert len(drained(cluster)) == 2
        # Who fails is drained: a failing prolog on any other node would drain that one, too.
        assert sorted(codes) == [0] * 6 + [1] * 2
        for name in GPU_NODES:
            assert not cluster.node(name).path("/var/lib/gpuhealth/drain.json").exists()
        for name in drained(cluster):
            cluster.scontrol("update", f"NodeName={name}", "State=RESUME")
        until(
            lambda: all(cluster.nodes()[name] == "idle" for name in GPU_NODES),
            60,
            lambda: str(cluster.nodes()),
        )


def test_what_was_left_open_is_settled_by_the_same_rule(cluster: Cluster) -> None:
    # Eight prologs were ended, by whatever it was, between their drain and their second look.
    break_port(cluster, *GPU_NODES)
    for name in GPU_NODES:
        cluster.scontrol("update", f"NodeName={name}", "State=DRAIN", f"Reason={SICK}")
        text = f'{{"schema": 1, "reason": "{SICK}", "at_s": {time.time()}}}'
        cluster.node(name).path("/var/lib/gpuhealth/drain.json").write_text(text)
    first = sorted(GPU_NODES, key=lambda name: (shown(cluster, name).reason_time, name))[:2]
    assert all_at_once(cluster, "health_check") == [0] * 8
    assert drained(cluster) == sorted(first)
    for name in GPU_NODES:
        assert not cluster.node(name).path("/var/lib/gpuhealth/drain.json").exists()
