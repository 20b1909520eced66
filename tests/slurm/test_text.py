"""What Slurm's commands print, as values; the texts are recorded from Slurm 22.05.8."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslurm.client import Defaults, Job, NodeKind, Partition
from gpuslurm.queue import QueueEntry, Unavailable
from gpuslurm.text import (
    config_defaults,
    fields,
    first_name,
    gpus_of_gres,
    jobs,
    limit,
    names,
    node_kinds,
    partitions,
    queue,
    seconds,
    tasks,
    unavailable,
    usable,
)

# scontrol --all --oneliner show partition
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES \
QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED \
Nodes=cpu[1-3000],gpu-[001-003,007],n[1-2],old[1-2] PriorityJobFactor=1 PriorityTier=1 \
RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP \
TotalCPUs=384928 TotalNodes=3008 SelectTypeParameters=NONE JobDefaults=(null) \
DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED \
TRES=cpu=384896,mem=9035000M,node=3008,billing=384896
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO \
QoS=N/A DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=3 \
MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=gpu-[001-003,007] \
PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE \
PreemptMode=OFF State=UP TotalCPUs=768 TotalNodes=4 SelectTypeParameters=NONE \
JobDefaults=DefCpuPerGPU=12,DefMemPerGPU=100000 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED \
TRES=cpu=736,mem=7812.50G,node=4,billing=736
PartitionName=mixed AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO \
QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=32 \
Nodes=gpu-[001-003,007],old[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO \
OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=DOWN TotalCPUs=896 TotalNodes=6 \
SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=64000 \
TRES=cpu=864,mem=8812.50G,node=6,billing=864
PartitionName=empty AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO \
QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=(null) \
PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE \
PreemptMode=OFF State=UP TotalCPUs=0 TotalNodes=0 SelectTypeParameters=NONE JobDefaults=(null) \
DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=(null)
"""

# sinfo --all --noheader --format SINFO_FORMAT
SINFO = """\
main*|2|16|4000|2:8:1|gpu:h100:8|(null)|n[1-2]
main*|3000|128|1|2:64:1|(null)|(null)|cpu[1-3000]
main*|4|192|2000000|2:48:2|gpu:h100:8|h100,ndr|gpu-[001-003,007]
main*|2|64|512000|2:32:1|gpu:a100:4,gpu:t4:2,nvme:1|a100|old[1-2]
gpu|4|192|2000000|2:48:2|gpu:h100:8|h100,ndr|gpu-[001-003,007]
empty|0|0|0|0:0:0|(null)|(null)|
"""

# scontrol --all --oneliner show node gpu-001,n1: one with cores and memory set aside
NODES = """\
NodeName=gpu-001 CoresPerSocket=48  CPUAlloc=0 CPUEfctv=184 CPUTot=192 CPULoad=N/A \
AvailableFeatures=h100,ndr ActiveFeatures=h100,ndr Gres=gpu:h100:8 NodeAddr=gpu-001 \
NodeHostName=gpu-001  RealMemory=2000000 AllocMem=0 FreeMem=N/A Sockets=2 Boards=1 \
CoreSpecCount=4 MemSpecLimit=16384 State=UNKNOWN ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A \
MCS_label=N/A Partitions=main,gpu,mixed  BootTime=None SlurmdStartTime=None LastBusyTime=Unknown \
CfgTRES=cpu=184,mem=2000000M,billing=184 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 \
ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=n1 Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=2.43 \
AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:h100:8 NodeAddr=127.0.0.1 \
NodeHostName=ctl Port=6827 Version=22.05.8 OS=Linux 6.18.44-fc-v857 #1 SMP PREEMPT_DYNAMIC @0  \
RealMemory=4000 AllocMem=0 FreeMem=21821 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 \
Weight=1 Owner=N/A MCS_label=N/A Partitions=main  BootTime=2026-11-30T18:57:06 \
SlurmdStartTime=2026-11-30T19:34:12 LastBusyTime=2026-11-30T19:34:12 \
CfgTRES=cpu=16,mem=4000M,billing=16 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 \
ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
"""

# scontrol --all --oneliner show job, after
#   sbatch -J 'a b=c JobState=COMPLETED UserId=x(1)' --comment 'x y=z Foo=bar' …
JOB = (
    "JobId=1 JobName={name} UserId=root(0) GroupId=root(0) "
    "MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState={state} "
    "Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A "
    "SubmitTime=2026-11-30T19:34:27 EligibleTime=2026-11-30T19:34:27 "
    "AccrueTime=2026-11-30T19:34:27 StartTime=Unknown EndTime=Unknown Deadline=N/A "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-30T19:34:27 Scheduler=Main "
    "Partition=mixed AllocNode:Sid=localhost:0 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList={nodes} NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=1,mem=1983616M,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* "
    "MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command={command} "
    "WorkDir={work} Comment={comment}  StdErr={out} StdIn=/dev/null StdOut={out} Power= "
    "TresPerNode=gres:gpu:2 "
)


def job_line(**changes: str) -> str:
    usual = {
        "name": "train",
        "state": "RUNNING",
        "reason": "None",
        "restarts": "0",
        "code": "0:0",
        "nodes": "n1",
        "command": "/w/.gpusub/t/job.sh",
        "work": "/w",
        "comment": "x",
        "out": "/w/.gpusub/t/log.out",
    }
    return JOB.format(**{**usual, **changes})


class TestFields:
    def test_of_a_real_line(self) -> None:
        found = fields(PARTITIONS.splitlines()[1])
        assert found["PartitionName"] == "gpu"
        assert found["JobDefaults"] == "DefCpuPerGPU=12,DefMemPerGPU=100000"
        assert found["TRES"] == "cpu=736,mem=7812.50G,node=4,billing=736"
        assert len(found) == len(PARTITIONS.splitlines()[1].split())

    def test_values_may_hold_blanks_or_nothing(self) -> None:
        found = fields(NODES.splitlines()[1])
        assert found["OS"] == "Linux 6.18.44-fc-v857 #1 SMP PREEMPT_DYNAMIC @0"
        assert (found["AllocTRES"], found["CapWatts"]) == ("", "n/a")

    @pytest.mark.parametrize(
        ("line", "pairs"),
        [
            ("", {}),
            ("words only", {}),
            ("A=", {"A": ""}),
            ("A=1 B=2", {"A": "1", "B": "2"}),
            ("A=b=c D=e", {"A": "b=c", "D": "e"}),
            ("A=x y=z B=1", {"A": "x y=z", "B": "1"}),
            ("A=1  B= C=3 ", {"A": "1", "B": "", "C": "3"}),
            ("CPUs/Task=1 ReqB:S:C:T=0:0:*:*", {"CPUs/Task": "1", "ReqB:S:C:T": "0:0:*:*"}),
            (
                "Reason=Not responding [root@2026-11-30T19:34:27]",
                {"Reason": "Not responding [root@2026-11-30T19:34:27]"},
            ),
            # What a user can write comes behind what Slurm writes of the same name.
            (
                "JobState=RUNNING Comment=JobState=x JobState=COMPLETED",
                {"JobState": "RUNNING", "Comment": "JobState=x"},
            ),
        ],
    )
    def test_of_a_line(self, line: str, pairs: dict[str, str]) -> None:
        assert fields(line) == pairs


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0", 0), ("UNLIMITED", None), ("INFINITE", None), ("N/A", None), ("", None)],
)
def test_a_limit(text: str, value: int | None) -> None:
    assert limit(text) == value


@given(st.integers(0, 300), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_as_slurm_prints_it(days: int, hours: int, minutes: int, secs: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + secs
    assert seconds(f"{days}-{hours:02}:{minutes:02}:{secs:02}") == total
    assert seconds(f"{hours:02}:{minutes:02}:{secs:02}") == total - days * 86400


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        *(("0", 0), ("90", 5400), ("2:30", 150), ("1:2:3", 3723), ("1-2", 93_600)),
        *(("1-2:3", 93_780), ("1-2:3:4", 93_784), ("UNLIMITED", None), ("infinite", None)),
    ],
)
def test_a_time_as_people_write_it(text: str, time_s: int | None) -> None:
    assert seconds(text) == time_s


@pytest.mark.parametrize("text", ["NONE", "N/A", "", "1:2:3:4", "x"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="not a time limit"):
        seconds(text)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu:8", 8),
        ("gpu:h100:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:h100:4(S:0,2),gpu:a100:2(S:1,3)", 6),
        ("gpu:h100:8(IDX:0-7)", 8),
        ("gpu:a100:4,gpu:t4:2,nvme:1", 6),
        ("gpu:a100_3g.20gb:4", 4),
        ("nvme:1,gpu:2", 2),
        ("gpu:0", 0),
        ("mps:400", 0),
        ("shard:h100:16", 0),
        ("nic:gpu:2", 0),
        ("gpumem:80", 0),
    ],
)
def test_the_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert gpus_of_gres(gres) == gpus


def test_partitions() -> None:
    assert partitions(PARTITIONS) == (
        Partition("main", True, "UP", 3008),
        Partition(
            "gpu",
            False,
            "UP",
            4,
            max_nodes=3,
            max_time_s=172_800,
            def_cpu_per_gpu=12,
            def_mem_per_gpu_mb=100_000,
        ),
        Partition("mixed", False, "DOWN", 6, max_cpus_per_node=32, max_mem_per_node_mb=64_000),
        Partition("empty", False, "UP", 0),
    )
    assert partitions("No partitions in the system\n") == ()
    assert partitions("") == ()


@pytest.mark.parametrize(
    ("written", "defaults"),
    [
        ("DefCpuPerGPU=10,DefMemPerGPU=400", Defaults(10, 400)),
        ("DefMemPerGPU=400", Defaults(None, 400)),
        ("(null)", Defaults()),
        ("", Defaults()),
    ],
)
def test_the_controllers_defaults(written: str, defaults: Defaults) -> None:
    config = (
        "Configuration data as of 2026-11-30T19:34:26\n"
        "AccountingStorageBackupHost = (null)\n"
        f"JobDefaults             = {written}\n"
        "JobFileAppend           = 0\n"
    )
    assert config_defaults(config) == defaults
    assert config_defaults("") == Defaults()


def test_kinds_of_nodes() -> None:
    h100 = NodeKind(
        "main", "gpu-[001-003,007]", 4, 192, 2, 2_000_000, 8, frozenset({"h100", "ndr"}), ("h100",)
    )
    assert node_kinds(SINFO) == (
        NodeKind("main", "n[1-2]", 2, 16, 1, 4000, 8, gpu_types=("h100",)),
        NodeKind("main", "cpu[1-3000]", 3000, 128, 1, 1, 0),
        h100,
        NodeKind("main", "old[1-2]", 2, 64, 1, 512_000, 6, frozenset({"a100"}), ("a100", "t4")),
        NodeKind("gpu", h100.names, 4, 192, 2, 2_000_000, 8, h100.features, h100.gpu_types),
    )
    assert node_kinds("") == ()


@pytest.mark.parametrize("line", ["sinfo: error: x", "a|b", "main*|1|2|3|4|5|6|7|8"])
def test_other_lines_of_sinfo_are_passed_over(line: str) -> None:
    assert node_kinds(f"{line}\n{SINFO}") == node_kinds(SINFO)


@pytest.mark.parametrize(
    ("hostlist", "name"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[3,5-8]", "n3"),
        ("gpu-[001-003,007]", "gpu-001"),
        ("gpu-[07-09,12]-a,x1", "gpu-07-a"),
        ("rack[0-3]n[00-15]", "rack0n00"),
        ("a[2]b", "a2b"),
        ("cpu[1-3000],gpu-[001-003]", "cpu1"),
    ],
)
def test_the_first_of_a_hostlist(hostlist: str, name: str) -> None:
    assert first_name(hostlist) == name


def test_what_jobs_can_have_of_a_node() -> None:
    assert list(map(usable, NODES.splitlines())) == [
        ("gpu-001", 184, 1_983_616),
        ("n1", 16, 4000),
    ]
    # Before 22.05 there was no CPUEfctv.
    assert usable(NODES.splitlines()[1].replace("CPUEfctv=16 ", "")) == ("n1", 16, 4000)


class TestJobs:
    def test_of_a_real_line(self) -> None:
        line = job_line(
            name="a b=c JobState=COMPLETED UserId=x(1)",
            comment="x y=z Foo=bar",
            state="PENDING",
            reason="PartitionDown",
            nodes="",
            command="(null)",
            work="/w",
            out="/w/slurm-1.out",
        )
        assert jobs(f"{line}\n") == (
            Job(1, "PENDING", "PartitionDown", "", 0, 0, 0, "(null)", "/w/slurm-1.out"),
        )

    @pytest.mark.parametrize(
        "name",
        [
            "a b",
            "a=b",
            "X=y",
            "a JobState=COMPLETED",
            "a UserId=x(1) y",
            "a Reason=z",
            "\x0b",
            "\u2028",
            "JobId=7",
            "",
            "Command=/x WorkDir=/y",
        ],
    )
    def test_a_name_is_no_field(self, name: str) -> None:
        assert jobs(job_line(name=name)) == jobs(job_line())

    @pytest.mark.parametrize(
        "comment", ["JobState=COMPLETED", "x ExitCode=9:9", "Command=/x", "StdOut=/x"]
    )
    def test_a_comment_is_no_state(self, comment: str) -> None:
        found, plain = jobs(job_line(comment=comment))[0], jobs(job_line())[0]
        assert (found.state, found.exit_code, found.command) == (
            plain.state,
            plain.exit_code,
            plain.command,
        )

    @pytest.mark.parametrize(
        "directory", ["/w", "/we ird=1 Dir=x/%j", "/a  b", "/é", "/JobState=FAILED x"]
    )
    def test_its_script_is_found_in_any_directory(self, directory: str) -> None:
        path = f"{directory}/.gpusub/t/job.sh"
        found = jobs(job_line(command=path, work=directory))[0]
        assert (found.command, found.state) == (path, "RUNNING")

    @pytest.mark.parametrize(
        ("written", "code", "signal"),
        [("0:0", 0, 0), ("3:0", 3, 0), ("0:9", 0, 9), ("0:53", 0, 53)],
    )
    def test_its_end(self, written: str, code: int, signal: int) -> None:
        found = jobs(job_line(code=written, state="FAILED"))[0]
        assert (found.exit_code, found.signal, found.ended) == (code, signal, True)

    def test_no_nodes_yet(self) -> None:
        assert jobs(job_line(nodes="(null)"))[0].nodes == ""
        assert jobs(job_line(nodes="gpu-[001-002]"))[0].nodes == "gpu-[001-002]"

    def test_its_restarts(self) -> None:
        assert jobs(job_line(restarts="2"))[0].restarts == 2

    def test_the_tasks_of_an_array(self) -> None:
        lines = [
            job_line().replace("JobId=1 ", f"JobId=1{task} ArrayJobId=5 ArrayTaskId={task} ")
            for task in range(3)
        ]
        assert [job.id for job in jobs("\n".join(lines))] == [10, 11, 12]

    def test_none(self) -> None:
        assert jobs("") == jobs("No jobs in the system\n") == ()


# squeue --me --states=all --noheader --Format QUEUE_FORMAT, with the separators as ¦ and ¶
QUEUE = """\
5¦5¦N/A¦5¦researcher¦gpu¦FAILED¦NonZeroExitCode¦gpu-6¦1¦0:07¦365-00:00:00¦2026-11-30T20:28:50¦\
2026-11-30T20:28:50¦2026-11-30T20:28:51¦2026-11-30T20:28:58¦(null)¦0¦0:00¦0¦768¦(null)¦wrap¶
7¦7¦1-4¦7_[1-4]¦researcher¦gpu¦PENDING¦BeginTime¦¦1¦0:00¦5:00¦2026-11-30T20:28:51¦\
2026-11-30T21:28:51¦2026-11-30T21:28:51¦2026-11-30T21:33:51¦(null)¦0¦0:00¦0¦0:0¦(null)¦wrap¶
1¦1¦N/A¦1¦researcher¦gpu¦RUNNING¦None¦gpu-[5,9]¦2¦1-00:00:02¦UNLIMITED¦2026-11-30T20:28:50¦\
2026-11-30T20:28:50¦2026-11-30T20:28:51¦N/A¦afterok:5(unfulfilled)¦1¦5:00¦2¦0¦/w/a b/job.sh¦a¦b
c¶
""".replace("¦", "\x1f").replace("¶", "\x1e")


class TestQueue:
    def test_a_job_that_failed(self) -> None:
        assert queue(QUEUE)[0] == QueueEntry(
            id=5,
            array_id=5,
            tasks="",
            shown="5",
            user="researcher",
            name="wrap",
            partition="gpu",
            state="FAILED",
            reason="NonZeroExitCode",
            nodes="gpu-6",
            node_count=1,
            elapsed_s=7,
            limit_s=365 * 86400,
            submitted="2026-11-30T20:28:50",
            eligible="2026-11-30T20:28:50",
            start="2026-11-30T20:28:51",
            end="2026-11-30T20:28:58",
            dependency="",
            switches=0,
            switches_wait_s=0,
            restarts=0,
            exit_code=3,
            signal=0,
            command="",
        )

    def test_an_array_to_come(self) -> None:
        entry = queue(QUEUE)[1]
        assert (entry.shown, entry.tasks, entry.limit_s) == ("7_[1-4]", "1-4", 300)
        assert not entry.ended

    def test_a_name_may_hold_anything(self) -> None:
        entry = queue(QUEUE)[2]
        assert entry.name == "a\x1fb\nc"
        assert entry.command == "/w/a b/job.sh"
        assert (entry.reason, entry.end, entry.limit_s, entry.elapsed_s) == ("", "", None, 86402)
        assert (entry.switches, entry.switches_wait_s, entry.restarts) == (1, 300, 2)
        assert entry.dependency == "afterok:5(unfulfilled)"

    def test_nothing(self) -> None:
        assert queue("") == ()

    @pytest.mark.parametrize(
        ("printed", "code", "signal"),
        # 22.05 prints the status of wait(2), later releases what sacct does.
        [("768", 3, 0), ("9", 0, 9), ("3:0", 3, 0), ("0:15", 0, 15), ("0", 0, 0), ("0:0", 0, 0)],
    )
    def test_exit_codes(self, printed: str, code: int, signal: int) -> None:
        entry = queue(QUEUE.replace("\x1f768\x1f", f"\x1f{printed}\x1f"))[0]
        assert (entry.exit_code, entry.signal) == (code, signal)

    def test_odd_times(self) -> None:
        odd = "\x1fINVALID\x1fPartition_Limit"
        entry = queue(QUEUE.replace("\x1f0:07\x1f365-00:00:00", odd))[0]
        assert (entry.elapsed_s, entry.limit_s) == (0, None)


def test_nodes_that_take_no_job() -> None:
    printed = "".join(
        "\x1f".join(columns) + "\x1e\n"
        for columns in [
            ("gpu", "idle", "gpu-5", "none"),
            ("gpu", "drained", "gpu-[6-7]", "gpuhealth: ib_port mlx5_0:1 | DOWN"),
            ("gpu", "mixed", "gpu-8", "none"),
            ("gpu", "idle*", "gpu-9", "none"),
            ("gpu", "down*", "gpu-10", "Not responding"),
        ]
    )
    assert unavailable(printed) == (
        Unavailable("gpu", "drained", "gpu-[6-7]", "gpuhealth: ib_port mlx5_0:1 | DOWN"),
        Unavailable("gpu", "not responding", "gpu-9", "none"),
        Unavailable("gpu", "down", "gpu-10", "Not responding"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-4%2", [1, 2, 3, 4]),
        ("0,3-9:3", [0, 3, 6, 9]),
        ("7", [7]),
        ("[1-2]", [1, 2]),
        ("", []),
        ("1,...", [1]),
    ],
)
def test_tasks_of_an_array(text: str, expected: list[int]) -> None:
    assert [task for part in tasks(text) for task in part] == expected


@pytest.mark.parametrize(
    ("hostlist", "expected"),
    [
        ("", []),
        ("gpu-7", ["gpu-7"]),
        ("gpu-[5,9]", ["gpu-5", "gpu-9"]),
        ("gpu-[098-100],x", ["gpu-098", "gpu-099", "gpu-100", "x"]),
        ("r[1-2]n[1-2]-a", ["r1n1-a", "r1n2-a", "r2n1-a", "r2n2-a"]),
    ],
)
def test_names_of_a_hostlist(hostlist: str, expected: list[str]) -> None:
    assert names(hostlist) == expected
