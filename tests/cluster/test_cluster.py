"""The virtual cluster does what the other tests take for granted."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from box import ClusterError, descendants
from cluster import Cluster, CommandError, parse_job, real_cpus

ROOT = os.environ.get("GPUSUB_CLUSTER_ROOT", "/")
COMMAND = [sys.executable, str(Path(__file__).with_name("cluster.py")), "--root", ROOT]
GPU_NODES = [f"gpu-{number}" for number in range(5, 13)]

Clusters = Callable[..., Cluster]


def steps(cluster: Cluster, *argv: str) -> list[str]:
    """What one task of a step prints on each of the eight nodes."""
    done = cluster.run(["srun", "-N8", "--ntasks-per-node=1", "--mem=1G", *argv])
    return done.stdout.splitlines()


# -- the nodes


def test_all_nodes_are_idle(cluster: Cluster) -> None:
    assert cluster.nodes() == dict.fromkeys([*GPU_NODES, "gpu-small", "cpu-1"], "idle")
    partitions = cluster.run(["sinfo", "-h", "-o", "%P %D %G"]).stdout.splitlines()
    assert sorted(line.strip() for line in partitions) == [
        "cpu 1 (null)",
        "gpu* 8 gpu:h100:4",
        "mixed 1 gpu:h100:2",
        "mixed 2 gpu:h100:4",
        "urgent 8 gpu:h100:4",
    ]


def test_each_node_has_its_own_name_and_address(cluster: Cluster) -> None:
    script = "echo $(hostname) $(getent ahostsv4 $(hostname) | head -n1) $(hostname -I)"
    seen = [line.split() for line in steps(cluster, "bash", "-c", script)]
    assert sorted(words[0] for words in seen) == sorted(GPU_NODES)
    assert len({words[1] for words in seen}) == 8
    for name, looked_up, _, alias, own, *_ in seen:
        assert (alias, own) == (name, looked_up)


def test_each_node_has_its_own_ports(cluster: Cluster) -> None:
    # All at once: on one machine only the first of them could have the port.
    script = "import socket, time; socket.create_server(('0.0.0.0', 29500)); time.sleep(0.5)"
    steps(cluster, sys.executable, "-c", script)


def test_nodes_reach_each_other_and_the_login_node(cluster: Cluster) -> None:
    script = "exec 3<>/dev/tcp/gpu-12/6818 4<>/dev/tcp/controller/6817"
    steps(cluster, "bash", "-c", script)


def test_each_node_has_its_own_disks_and_boot(cluster: Cluster) -> None:
    steps(cluster, "sh", "-c", "touch /tmp/$(hostname) /var/tmp/$(hostname) /dev/shm/$(hostname)")
    script = "cat /proc/sys/kernel/random/boot_id; cd /; ls -d tmp/gpu* var/tmp/gpu* dev/shm/gpu*"
    first, second = (
        cluster.node(name).run(["sh", "-c", script]).stdout.split() for name in ("gpu-5", "gpu-6")
    )
    assert first[1:] == ["dev/shm/gpu-5", "tmp/gpu-5", "var/tmp/gpu-5"]
    assert second[1:] == ["dev/shm/gpu-6", "tmp/gpu-6", "var/tmp/gpu-6"]
    assert first[0] != second[0]


def test_a_fault_in_sys_is_live_and_on_that_node_only(cluster: Cluster) -> None:
    (cluster.node("gpu-7").infiniband / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    script = "echo $(hostname) $(cat /sys/class/infiniband/mlx5_0/ports/1/state)"
    healthy = {f"{name} 4: ACTIVE" for name in GPU_NODES}
    seen = set(steps(cluster, "sh", "-c", script))
    assert seen == healthy - {"gpu-7 4: ACTIVE"} | {"gpu-7 1: DOWN"}
    cluster.reset()
    assert set(steps(cluster, "sh", "-c", script)) == healthy


def test_reset_brings_hardware_back(cluster: Cluster) -> None:
    node = cluster.node("gpu-6")
    port = node.infiniband / "mlx5_1/ports/1"
    devices = [f"/sys/class/infiniband/mlx5_{number}/" for number in range(2)]
    whole = node.run(["find", *devices]).stdout
    (node.infiniband / "mlx5_0").unlink()
    shutil.rmtree(port / "counters")
    (port / "rate").unlink()
    os.mkfifo(port / "rate")
    (port / "extra").write_text("")
    node.path("/dev/infiniband/uverbs0").unlink()
    node.path("/dev/nvidia9").touch()
    cluster.reset()
    now = node.run(["find", *devices]).stdout
    assert sorted(now.split()) == sorted(whole.split())
    assert (port / "rate").read_text() == "400 Gb/sec (4X NDR)\n"
    assert node.path("/dev/infiniband/uverbs0").is_char_device()
    assert not node.path("/dev/nvidia9").exists()


def test_hardware_looks_like_a_kernels(cluster: Cluster) -> None:
    node = cluster.node("gpu-5")
    found = node.run(["realpath", "/sys/class/infiniband/mlx5_0/device"]).stdout.strip()
    assert found.startswith("/sys/devices/pci0000:15/")
    assert node.run(["cat", f"{found}/numa_node"]).stdout == "0\n"
    pci = node.run(["sh", "-c", "cat /sys/bus/pci/devices/*/class"]).stdout.split()
    assert (pci.count("0x030200"), pci.count("0x020700")) == (4, 2)
    assert node.run(["cat", "/sys/class/net/eth0/operstate"]).stdout == "up\n"
    assert node.run(["sh", "-c", "echo /dev/nvidia? /dev/infiniband/*"]).stdout.split() == [
        *(f"/dev/nvidia{gpu}" for gpu in range(4)),
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/uverbs1",
    ]
    small, none = cluster.node("gpu-small"), cluster.node("cpu-1")
    assert small.run(["sh", "-c", "echo /dev/nvidia?"]).stdout.split()[-1] == "/dev/nvidia1"
    assert none.run(["ls", "/sys/class/infiniband"]).stdout == ""


def test_nodes_leave_the_machine_alone(cluster: Cluster) -> None:
    before = Path("/sys/class/net/lo/mtu").read_text()
    node = cluster.node("gpu-5")
    node.run(["sh", "-c", "echo 1 > /sys/class/net/lo/mtu; rm -f /etc/debian_version; : > /etc/x"])
    assert Path("/sys/class/net/lo/mtu").read_text() == before
    assert Path("/etc/debian_version").exists()
    assert not Path("/etc/x").exists()
    with pytest.raises(CommandError, match="Read-only file system"):
        node.run(["touch", __file__])


# -- users and what they find


def test_users(cluster: Cluster) -> None:
    script = 'echo $(id -un) $(id -gn) $PWD $HOME $(hostname); touch ~/"a file"'
    assert cluster.run(["sh", "-c", script]).stdout.split() == [
        "researcher",
        "researcher",
        "/home/researcher",
        "/home/researcher",
        "login",
    ]
    done = cluster.run(["touch", "/home/researcher/mine"], user="colleague", check=False)
    assert "Permission denied" in done.stderr
    assert cluster.path("/home/researcher/a file").exists()
    cluster.reset()
    assert not cluster.path("/home/researcher/a file").exists()


def test_home_is_not_in_memory_and_the_same_everywhere(cluster: Cluster) -> None:
    script = "stat -f -c %T . ; cat file"
    cluster.path("/home/researcher/file").write_text("hello\n")
    lines = steps(cluster, "sh", "-c", script)
    assert lines.count("hello") == 8
    assert not {"tmpfs", "ramfs"} & set(lines)


def test_researcher_reaches_python_and_the_repository(cluster: Cluster) -> None:
    code = "import os, ssl, sys; print(sys.prefix, os.path.exists(sys.argv[1]))"
    done = cluster.run(["python", "-c", code, __file__])
    assert done.stdout.split() == [sys.prefix, "True"]
    seen = steps(cluster, "python", "-c", code, __file__)
    assert set(seen) == {f"{sys.prefix} True"}


def test_environment_is_that_of_a_fresh_login(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    seen = cluster.run(["env"], env={"MORE": "a b"}).stdout.splitlines()
    assert "MORE=a b" in seen
    assert not [line for line in seen if line.startswith(("SLURM", "PYTEST", "VIRTUAL_ENV"))]


def test_input_exit_code_and_output(cluster: Cluster) -> None:
    assert cluster.run(["cat"], input="to and fro").stdout == "to and fro"
    with pytest.raises(CommandError, match="what went wrong") as caught:
        cluster.run(["sh", "-c", "echo what went wrong >&2; exit 3"])
    assert caught.value.returncode == 3


def test_timeout_ends_the_command_and_what_it_started(cluster: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sh", "-c", "sleep 999 & sleep 999"], timeout=0.3)
    processes = cluster.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], user="root", check=False)
    assert "999" not in processes.stdout


def test_signals_reach_the_command(cluster: Cluster) -> None:
    process = cluster.popen(
        ["sh", "-c", "trap 'echo got it; exit 5' INT; echo on; sleep 30 & wait"]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "got it\n"
    assert process.wait(10) == 5
    process.close_streams()


def test_killed_command_has_the_exit_code_of_one(cluster: Cluster) -> None:
    process = cluster.popen(["sleep", "30"])
    process.send_signal(signal.SIGSTOP)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.close_streams()


# -- Slurm


def test_job_of_an_ordinary_user_gets_gpus(cluster: Cluster) -> None:
    wrap = "srun bash -c 'echo \"$(id -un) $(hostname) $CUDA_VISIBLE_DEVICES\" >> seen'"
    job = cluster.sbatch("-N2", "--ntasks-per-node=1", "--gpus-per-node=3", "--wrap", wrap)
    ended = cluster.wait(job, "COMPLETED")
    assert ended["Partition"] == "gpu"
    seen = cluster.path("/home/researcher/seen").read_text().splitlines()
    assert len(seen) == 2
    assert {line.split()[2] for line in seen} == {"0,1,2"}


def test_memory_and_cpus_are_consumed(cluster: Cluster) -> None:
    def start(mem: str, cpus: str) -> str:
        options = ("-w", "gpu-5", "-c", cpus, "--mem", mem, "--wrap", "sleep 60")
        return cluster.sbatch(*options)

    first = start("200000", "1")
    cluster.wait(first, "RUNNING")
    too_much_memory, enough_memory = start("100000", "1"), start("50000", "1")
    cluster.wait(enough_memory, "RUNNING")
    assert cluster.wait(too_much_memory, "PENDING")["JobState"] == "PENDING"
    cluster.run(["scancel", first, too_much_memory])
    assert "mem=50000M" in cluster.scontrol("show", "job", enough_memory)
    too_many_cpus, enough_cpus = start("1000", "16"), start("1000", "15")
    cluster.wait(enough_cpus, "RUNNING")
    assert cluster.job(too_many_cpus)["JobState"] == "PENDING"


def test_topology(cluster: Cluster) -> None:
    shown = cluster.scontrol("show", "topology")
    leaves = dict(re.findall(r"SwitchName=(leaf-\d).* Nodes=(\S+)", shown))
    assert len(leaves) == 5
    assert leaves["leaf-2"] in {"gpu-6,gpu-10", "gpu-[6,10]"}
    assert sorted(steps(cluster, "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR")) == [
        "core.spine-1.leaf-1.gpu-5",
        "core.spine-1.leaf-1.gpu-9",
        "core.spine-1.leaf-2.gpu-10",
        "core.spine-1.leaf-2.gpu-6",
        "core.spine-2.leaf-3.gpu-11",
        "core.spine-2.leaf-3.gpu-7",
        "core.spine-2.leaf-4.gpu-12",
        "core.spine-2.leaf-4.gpu-8",
    ]
    busy = cluster.sbatch("-w", "gpu-5", "--exclusive", "--wrap", "sleep 60")
    cluster.wait(busy, "RUNNING")
    job = cluster.sbatch("-N2", "--exclusive", "--switches=1", "--wrap", "true")
    assert cluster.wait(job, "COMPLETED")["NodeList"] in {
        f"gpu-[{pair}]" for pair in ("6,10", "7,11", "8,12")
    }


def test_site_lines_are_in_force(cluster: Cluster) -> None:
    shown = cluster.scontrol("show", "config")
    config = dict(re.findall(r"^(\w+)(?:\[0\])? += (.*)$", shown, re.MULTILINE))
    assert config["PrologFlags"].strip() == "Alloc,DeferBatch"
    assert "nohold_on_prolog_fail" in config["SchedulerParameters"]
    assert "batch_sched_delay=0" in config["SchedulerParameters"]
    assert config["HealthCheckNodeState"].strip() == "ANY"
    assert config["Prolog"].strip() == "/usr/libexec/gpusub/prolog"
    assert config["TopologyPlugin"].strip() == "topology/tree"


def test_job_goes_on_elsewhere_when_a_prolog_fails(cluster: Cluster) -> None:
    cluster.hook("prolog", '#!/bin/sh\n[ "$SLURMD_NODENAME" != gpu-9 ]\n')
    wrap = "srun hostname | sort > nodes"
    job = cluster.sbatch("-N2", "--ntasks-per-node=1", "--switches=1", "--wrap", wrap)
    ended = cluster.wait(job, "COMPLETED")
    assert ended["Restarts"] == "1"
    assert cluster.path("/home/researcher/nodes").read_text().split() == ["gpu-10", "gpu-6"]
    assert cluster.nodes()["gpu-9"] == "drained"
    assert "Prolog error" in cluster.scontrol("show", "node", "gpu-9")


def test_batch_script_waits_for_every_prolog(cluster: Cluster) -> None:
    cluster.hook("prolog", '#!/bin/sh\n[ "$SLURMD_NODENAME" = gpu-5 ] || sleep 1\n')
    job = cluster.sbatch("-w", "gpu-[5-6]", "--wrap", "date +%s.%N > started")
    cluster.wait(job, "RUNNING")
    begun = time.time()
    cluster.wait(job, "COMPLETED")
    assert float(cluster.path("/home/researcher/started").read_text()) > begun + 0.5


def test_urgent_preempts(cluster: Cluster) -> None:
    job = cluster.sbatch("-N8", "--exclusive", "--wrap", "sleep 60")
    cluster.wait(job, "RUNNING")
    urgent = cluster.sbatch("-p", "urgent", "-N1", "--wrap", "true", user="colleague")
    cluster.wait(urgent, "COMPLETED")
    requeued = cluster.job(job)
    assert requeued["Restarts"] == "1"


def test_reset_gets_rid_of_a_hanging_prolog(cluster: Cluster) -> None:
    cluster.hook("prolog", "#!/bin/sh\nexec sleep 1000\n")
    job = cluster.sbatch("-w", "gpu-8", "--wrap", "true")
    cluster.wait(job, "CONFIGURING", "RUNNING")
    cluster.reset()
    assert cluster.nodes()["gpu-8"] == "idle"


# -- faults


def test_node_loses_power_and_comes_back(cluster: Cluster) -> None:
    node = cluster.node("gpu-10")
    boot = "/proc/sys/kernel/random/boot_id"
    before = node.run(["cat", boot]).stdout
    node.run(["sh", "-c", "echo 1 > /var/lib/gpuhealth/kept; echo 1 > /run/lost"])
    job = cluster.sbatch("-w", "gpu-10", "--wrap", "sleep 60")
    cluster.wait(job, "RUNNING")
    node.kill()
    assert not node.is_alive
    cluster.scontrol("update", "NodeName=gpu-10", "State=DOWN", "Reason=test")
    assert cluster.wait(job, "PENDING")["Restarts"] == "1"
    node.restart()
    assert node.run(["cat", boot]).stdout != before
    assert node.path("/var/lib/gpuhealth/kept").exists()
    assert not node.path("/run/lost").exists()
    cluster.reset()
    assert cluster.nodes()["gpu-10"] == "idle"


def test_controller_hangs_crashes_and_comes_back(cluster: Cluster) -> None:
    cluster.controller.stop()
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["scontrol", "ping"], timeout=0.3)
    cluster.controller.cont()
    assert "is UP" in cluster.run(["scontrol", "ping"]).stdout
    cluster.controller.kill()
    down = cluster.run(["scontrol", "ping"], check=False)
    assert "is DOWN" in down.stdout
    cluster.controller.restart()
    assert "is UP" in cluster.run(["scontrol", "ping"]).stdout
    cluster.reset()


def test_munge_goes_and_comes_back(cluster: Cluster) -> None:
    cluster.munge.terminate()
    assert "Munge encode failed" in cluster.run(["sinfo"], check=False).stderr
    cluster.reset()
    assert cluster.run(["sinfo"]).stderr == ""


def test_unusable_configuration_is_reported_with_the_log(clusters: Clusters) -> None:
    with pytest.raises(ClusterError, match=r"slurmctld has ended\n(.*\n)*.*select/none_such"):
        clusters(conf="SelectType=select/none_such")


# -- variants


def test_two_clusters_side_by_side(cluster: Cluster, clusters: Clusters) -> None:
    other = clusters(nodes=2, small=False, conf="MaxJobCount=5", files={"extra.sh": "#!/bin/sh\n"})
    assert other.nodes() == {"gpu-5": "idle", "gpu-6": "idle"}
    other.wait(other.sbatch("-N2", "--wrap", "srun hostname"), "COMPLETED")
    assert len(cluster.nodes()) == 10
    assert "MaxJobCount             = 5\n" in other.scontrol("show", "config")
    assert os.access(other.path("/etc/slurm/extra.sh"), os.X_OK)


@pytest.mark.parametrize("cpus", [1, 2])
def test_tasks_are_bound_where_a_task_plugin_binds(clusters: Clusters, cpus: int) -> None:
    cluster = clusters(layout=real_cpus(cpus), task_plugin="task/affinity")
    code = "import os; print(len(os.sched_getaffinity(0)))"
    for wanted in range(1, cpus + 1):
        argv = ["srun", "-n1", "-c", str(wanted), "--mem=100", "--gpus=1", "python", "-c", code]
        assert cluster.run(argv).stdout == f"{wanted}\n"


def test_homes_can_be_kept(clusters: Clusters, tmp_path: Path) -> None:
    cluster = clusters(nodes=1, small=False, directory=tmp_path)
    cluster.run(["touch", "kept"])
    cluster.stop()
    assert (tmp_path / "home/researcher/kept").exists()


def test_starts_and_resets_in_no_time(cluster: Cluster, clusters: Clusters) -> None:
    begun = time.monotonic()
    clusters()
    started = time.monotonic()
    cluster.reset()
    assert started - begun < 5
    assert time.monotonic() - started < 2


# -- the command, and what is left of it


@pytest.fixture
def traces() -> Iterator[None]:
    """Whatever the test does, the machine looks as before it."""

    def look() -> list[str]:
        commands = (["ip", "-o", "link"], ["ip", "netns"])
        shown = [subprocess.run(argv, capture_output=True, check=True) for argv in commands]
        mounts = Path("/proc/self/mountinfo").read_text()
        return [*(done.stdout.decode() for done in shown), mounts]

    before = look()
    yield
    deadline = time.monotonic() + 10
    while look() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert look() == before


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def directory_of_box(processes: list[int]) -> Path:
    """Where on the disk the homes lie of the box that one of these processes holds."""
    for pid in processes:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[:2] == ["sh", "-c"]:
            return Path(words[3])
    raise AssertionError("none of them holds a box")


@pytest.mark.usefixtures("cluster", "traces")
@pytest.mark.parametrize(
    ("sig", "stopped"),
    [
        (signal.SIGKILL, ()),
        (signal.SIGKILL, (b"slurmctld", b"slurmd", b"munged")),
        (signal.SIGTERM, ()),
        (signal.SIGHUP, ()),
    ],
)
def test_nothing_outlives_the_process_that_started_it(
    sig: signal.Signals, stopped: tuple[bytes, ...]
) -> None:
    script = (
        "srun -N8 sleep 999 & while [ $(squeue -h -t R | wc -l) = 0 ]; do :; done; echo on; wait"
    )
    argv = [*COMMAND, "sh", "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        below = descendants(process.pid)
        assert len(below) > 40
        directory = directory_of_box(below)
        assert directory.exists()
        for pid in below:
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] in stopped:
                os.kill(pid, signal.SIGSTOP)
        process.send_signal(sig)
        assert process.wait(10) == -sig
        deadline = time.monotonic() + 10
        while (left := [pid for pid in below if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        assert not directory.exists()


@pytest.mark.usefixtures("cluster", "traces")
def test_command_runs_as_the_researcher_and_gives_its_exit_code() -> None:
    script = "id -un; hostname; cat; exit 7"
    done = subprocess.run(
        [*COMMAND, "--nodes", "2", "sh", "-c", script],
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "researcher\nlogin\ntyped\n"
    assert (done.returncode, done.stderr) == (7, "")


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, timeout: float = 20) -> str:
        """Wait until the program has printed something new that matches."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode()
        self.seen = self.seen[found.end() :]
        return found[0]

    def end(self) -> int:
        """Its exit code."""
        with pytest.raises(OSError, match="Input/output error"):
            self.expect("no more than the end of the terminal")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.usefixtures("cluster", "traces")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_shell_on_a_terminal() -> None:
    terminal = Terminal(COMMAND)
    terminal.expect(r"gpu\* +8 +idle")
    assert "no job control" not in terminal.expect(r"(?s).*\[researcher@login ~\]\$ ")
    terminal.type("srun -N2 hostname | sort\n")
    terminal.expect(r"gpu-5\r\ngpu-9\r\n")
    # Ctrl-C ends the command, not the shell or the cluster; Ctrl-Z stops it.
    terminal.type("echo o''n; sleep 999\n")
    terminal.expect(r"on\r\n")
    time.sleep(0.2)
    terminal.type("\x03")
    terminal.expect(r"\^C")
    terminal.type("echo code $?; echo o''n; sleep 998\n")
    terminal.expect(r"code 130\r\non\r\n")
    time.sleep(0.2)
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.type("kill %1; tty; sinfo -h -p cpu; exit 4\n")
    terminal.expect(r"/dev/pts/\d+")
    terminal.expect(r"cpu +up")
    assert terminal.end() == 4


@pytest.mark.usefixtures("cluster", "traces")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_interrupt_is_for_the_command_alone() -> None:
    script = "trap 'sleep 0.3; sinfo -h -p cpu; exit 9' INT; echo o''n; while :; do sleep 0.1; done"
    terminal = Terminal([*COMMAND, "bash", "-c", script])
    terminal.expect(r"on\r\n")
    terminal.type("\x03")
    terminal.expect(r"cpu +up")
    assert terminal.end() == 9


# -- small parts


def test_fields_of_a_job_may_hold_anything() -> None:
    printed = (
        "JobId=3 ArrayJobId=3 ArrayTaskId=1-2 JobName=a b  JobState=X\n"
        "   JobState=PENDING Reason=Resources Dependency=(null)\n"
        "   NumNodes=8-8 ReqB:S:C:T=0:0:*:*\n"
        "   TRES=cpu=8,mem=80G,node=8\n"
        "   Command=/home/a b/job.sh --x=1\n"
        "   StdOut=/home/a b/%j JobId=4.out\n"
        "   Power=\n"
        "   \n"
    )
    assert parse_job(printed) == {
        "JobId": "3",
        "ArrayJobId": "3",
        "ArrayTaskId": "1-2",
        "JobName": "a b  JobState=X",
        "JobState": "PENDING",
        "Reason": "Resources",
        "Dependency": "(null)",
        "NumNodes": "8-8",
        "ReqB:S:C:T": "0:0:*:*",
        "TRES": "cpu=8,mem=80G,node=8",
        "Command": "/home/a b/job.sh --x=1",
        "StdOut": "/home/a b/%j JobId=4.out",
        "Power": "",
    }
