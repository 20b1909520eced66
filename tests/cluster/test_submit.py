"""`gpusub SCRIPT` on a real Slurm: what the job gets, and what its user gets to see."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster import Cluster
from configuration import real_cpus

HOME = Path("/home/researcher")

# Words that shells, sbatch, srun, torch.distributed.run, Jinja and YAML have each mangled.
HOSTILE = [
    "a b", " lead", "trail ", "", "it's", '"', "'", "\\", "a\\=b", "\\n", "$HOME", "${local_rank}",
    "a$$b", "`id`", "$(id)", "#x", "a#b", "%j", "%%", "!", "*", "?", "[a]", "~", "~root", "{a,b}",
    "64(x2)", ";", "|", "&&", ">x", "--", "-", "-x", "--nnodes=9", "-m", "x\ny", "x\r\ny", "\t",
    "\x01\x7f", "é", "日本", "{{ 7*7 }}", "{% raw %}", "#SBATCH -N9", "EOF", "a=b", "=", ",", "x,y",
]  # fmt: skip

# Prints what a test wants to know of its rank, one JSON object a line.
REPORT = """
import json, os, socket, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "MASTER_ADDR",
        "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "HF_TOKEN", "PLAIN",
        "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "SLURM_CPU_BIND")
sys.stdout.write("REPORT " + json.dumps(dict(
    {key: os.environ.get(key) for key in keys}, argv=sys.argv, cwd=os.getcwd(),
    host=socket.gethostname(), cpus=len(os.sched_getaffinity(0)), name=__name__,
)) + "\\n")
"""


@pytest.fixture
def home(cluster: Cluster) -> Path:
    """The researcher's home seen from outside, with report.py in it."""
    place = cluster.path(str(HOME))
    write(place / "report.py", REPORT)
    return place


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for made in (path, path.parent):
        os.chown(made, 1001, 1001)


def reports(log: str) -> list[dict[str, object]]:
    lines = [line for line in log.splitlines() if line.startswith("REPORT ")]
    found = [json.loads(line.removeprefix("REPORT ")) for line in lines]
    return sorted(found, key=lambda report: int(report["RANK"] or 0))


def log_of(home: Path) -> str:
    (log,) = home.glob(".gpusub/20*-*/log.out")
    return log.read_text() + "".join(rank.read_text() for rank in log.parent.glob("ranks/*.log"))


def follow(
    cluster: Cluster, *words: str, cwd: str | None = None, env: dict[str, str] | None = None
) -> list[dict[str, object]]:
    """Run a job to its end; return what its ranks report, rank 0 in the log, others in theirs."""
    done = cluster.run(["gpusub", "--follow", *words], timeout=120, cwd=cwd, env=env)
    newest = max(cluster.path(cwd or str(HOME)).glob(".gpusub/20*-*"))
    return reports(done.stdout + "".join(log.read_text() for log in newest.glob("ranks/*.log")))


def test_without_any_option_a_job_gets_one_whole_node(cluster: Cluster, home: Path) -> None:
    found = follow(cluster, "report.py")
    assert [report["RANK"] for report in found] == ["0", "1", "2", "3"]
    assert {report["OMP_NUM_THREADS"] for report in found} == {"4"}
    assert {report["CUDA_VISIBLE_DEVICES"] for report in found} == {"0,1,2,3"}
    (job,) = {str(report["SLURM_JOB_ID"]) for report in found}
    shown = cluster.job(job)
    assert shown["NumNodes"] == "1"
    assert shown["OverSubscribe"] == "NO"
    assert shown["Requeue"] == "1"
    assert shown["JobName"] == "report"
    assert shown["NumCPUs"] == "16"
    assert shown["TresPerNode"] in ("gres:gpu:4", "gres/gpu:4")  # 22.05, and newer


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_nodes_are_one_world(cluster: Cluster, home: Path, rendezvous: str) -> None:
    found = follow(cluster, "-N2", "--gpus-per-node=2", "--rdzv", rendezvous, "report.py")
    assert [report["RANK"] for report in found] == ["0", "1", "2", "3"]
    assert {report["WORLD_SIZE"] for report in found} == {"4"}
    assert [report["LOCAL_RANK"] for report in found] == ["0", "1", "0", "1"]
    hosts = [report["host"] for report in found]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    (address,) = {str(report["MASTER_ADDR"]) for report in found}
    shown = cluster.run(["scontrol", "-o", "show", "node", str(hosts[0])]).stdout
    assert f"NodeAddr={address} " in shown


def test_a_range_of_nodes_is_settled_at_the_start(cluster: Cluster, home: Path) -> None:
    cluster.run(
        ["scontrol", "update", "nodename=gpu-[8-12]", "state=drain", "reason=t"], user="root"
    )
    found = follow(cluster, "-N2-5", "--gpus-per-node=1", "report.py")
    assert {report["WORLD_SIZE"] for report in found} == {"3"}
    assert len(found) == 3


@pytest.mark.parametrize(
    ("gpus", "cpus", "threads"), [("1", 4, "4"), ("2", 8, "4"), ("4", 16, "4"), ("3", 12, "4")]
)
def test_cpus_and_memory_of_the_step_are_the_gpus_share(
    cluster: Cluster, home: Path, gpus: str, cpus: int, threads: str
) -> None:
    script = 'scontrol -o show step "$SLURM_JOB_ID.$SLURM_STEP_ID"; env | grep ^SLURM_'
    done = cluster.run(["gpusub", "--follow", "--gpus-per-node", gpus, "--", "sh", "-c", script])
    step = next(line for line in done.stdout.splitlines() if line.startswith("StepId="))
    assert f"CPUs={cpus} " in step
    assert f"cpu={cpus}," in step
    node = cluster.run(["scontrol", "-o", "show", "node", "gpu-5"]).stdout
    (memory,) = re.findall(r"RealMemory=(\d+)", node)
    (given,) = re.findall(r"mem=(\d+)M", step)
    # Slurm rounds the share of 1 of 4 GPUs to whole megabytes.
    assert int(given) == pytest.approx(int(memory) * int(gpus) / 4, abs=1)
    assert f"SLURM_CPUS_PER_TASK={cpus}" in done.stdout.splitlines()


def test_workers_are_bound_to_the_planned_cpus(
    clusters: Callable[..., Cluster],
) -> None:
    cluster = clusters(layout=real_cpus(2), task_plugin="task/affinity")
    write(cluster.path(str(HOME)) / "report.py", REPORT)
    for gpus, cpus in (("1", 1), ("2", 2)):
        found = follow(cluster, "--gpus-per-node", gpus, "report.py")
        assert len(found) == int(gpus)
        assert {report["cpus"] for report in found} == {cpus}
        assert {report["OMP_NUM_THREADS"] for report in found} == {"1"}


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_arguments_reach_the_program_unchanged(
    cluster: Cluster, home: Path, rendezvous: str
) -> None:
    found = follow(cluster, "-N2", "--gpus-per-node=1", "--rdzv", rendezvous, "report.py", *HOSTILE)
    assert len(found) == 2
    for report in found:
        assert report["argv"] == ["report.py", *HOSTILE]


@pytest.mark.parametrize("how", [["-m", "report"], ["--", "python", "report.py"]])
def test_arguments_of_modules_and_commands_too(
    cluster: Cluster, home: Path, how: Sequence[str]
) -> None:
    (report,) = follow(cluster, "--gpus-per-node=1", *how, *HOSTILE)
    argv = report["argv"]
    assert isinstance(argv, list)
    assert argv[1:] == HOSTILE
    assert report["name"] == "__main__"


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "it's",
        'q"d',
        "50%j",
        "ünï",
        "back\\slash",
        "end\\",
        "$HOME",
        "h#h",
        "%u\\%j",
        "[1-2]",
    ],
)
def test_any_directory_and_script_name_works(cluster: Cluster, home: Path, name: str) -> None:
    write(home / name / f"{name}.py", REPORT)
    (report,) = follow(cluster, "--gpus-per-node=1", f"{name}.py", "x", cwd=str(HOME / name))
    assert report["argv"] == [f"{name}.py", "x"]
    assert report["cwd"] == str(HOME / name)
    (log,) = (home / name).glob(".gpusub/20*-*/log.out")
    assert "REPORT" in log.read_text()


def test_chdir_moves_the_job_and_not_the_script(cluster: Cluster, home: Path) -> None:
    write(home / "data" / "here", "")
    (report,) = follow(cluster, "--gpus-per-node=1", "--chdir", "data", "report.py")
    assert report["cwd"] == str(HOME / "data")


def test_a_rank_that_works_on_longer_is_not_killed(cluster: Cluster, home: Path) -> None:
    write(
        home / "slow.py",
        "import os, time\n"
        "if os.environ['RANK'] == '1': time.sleep(8)\n"
        "print('saved by', os.environ['RANK'])\n",
    )
    done = cluster.run(["gpusub", "--follow", "-N2", "--gpus-per-node=1", "slow.py"], timeout=120)
    assert "saved by 0" in done.stdout
    assert "saved by 1" in log_of(home)


@pytest.mark.parametrize("how", ["--follow", "--wait"])
def test_the_programs_exit_code_comes_out(cluster: Cluster, home: Path, how: str) -> None:
    done = cluster.run(
        ["gpusub", how, "--gpus-per-node=1", "--", "sh", "-c", "echo last words; exit 7"],
        check=False,
    )
    assert done.returncode == 7
    assert ("last words" in done.stdout) == (how == "--follow")
    assert "last words" in log_of(home)


def test_a_failing_rank_ends_the_job_on_all_nodes(cluster: Cluster, home: Path) -> None:
    write(
        home / "bad.py",
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('boom')\n"
        "time.sleep(300)\n",
    )
    done = cluster.run(
        ["gpusub", "--follow", "-N2", "--gpus-per-node=1", "bad.py"], check=False, timeout=120
    )
    assert done.returncode == 1
    # The trace of the rank that failed is the last thing in the log.
    assert done.stdout.splitlines()[-1] == "ValueError: boom"
    assert "gpusub: rank 1 ended with" in done.stdout


def test_json_tells_the_job_and_its_end(cluster: Cluster, home: Path) -> None:
    done = cluster.run(
        ["gpusub", "--json", "--wait", "--gpus-per-node=1", "--", "sh", "-c", "exit 5"], check=False
    )
    answer = json.loads(done.stdout)
    assert (answer["exit_code"], answer["exit_source"], answer["state"]) == (5, "slurm", "FAILED")
    assert done.returncode == 5
    assert cluster.job(answer["job_id"])["StdOut"] == answer["log"]
    assert answer["token"] in cluster.job(answer["job_id"])["Command"]


def test_parsable_prints_the_id_alone(cluster: Cluster, home: Path) -> None:
    done = cluster.run(["gpusub", "--parsable", "report.py"])
    assert re.fullmatch(r"\d+\n", done.stdout)
    assert done.stderr == ""
    assert (home / ".gpusub" / done.stdout.strip() / "job.sh").stat().st_mode & 0o777 == 0o600
    cluster.wait(done.stdout.strip(), "COMPLETED")


def test_a_dry_run_submits_and_leaves_nothing(cluster: Cluster, home: Path) -> None:
    before = queue(cluster)
    done = cluster.run(["gpusub", "--dry-run", "-N2", "report.py", "x"])
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert "sbatch" in done.stderr
    plan = json.loads(cluster.run(["gpusub", "--dry-run", "--json", "-N2", "report.py"]).stdout)
    assert plan["resources"]["cpus_per_task"] == {
        "value": 16, "origin": "4 GPUs' share of a node",
    }  # fmt: skip
    assert queue(cluster) == before
    assert not (home / ".gpusub").exists()


def entries(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.name != ".cache")


def queue(cluster: Cluster) -> str:
    # A job that Slurm refuses for want of nodes stays in its list of ended ones as FAILED.
    return cluster.run(["squeue", "-h", "-o", "%i %T"]).stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-N9"], 2, "--nodes: 9 nodes with 4 GPUs, and partition gpu has 8; ask for fewer"),
        (["--gpus-per-node=5"], 2, "5 GPUs a node, and no node of partition gpu has more than 4"),
        (["-c", "17"], 2, "17 CPUs a node, and no node of partition gpu gives more than 16"),
        (["-p", "gpus"], 2, "no partition 'gpus'; did you mean 'gpu'?"),
        (["-p", "cpu"], 2, "the nodes of partition cpu have no GPUs"),
        (["-p", "mixed"], 2, "differ: 2 GPUs on 1 nodes, 4 GPUs on 2 nodes"),
        (["-t", "1:2:3:4"], 2, "'1:2:3:4' is no time limit"),
        (["--mem", "lots"], 2, "'lots' is no size"),
        (["-C", "nope"], 2, "'nope'"),
        (["--rdzv", "static", "--max-restarts=2", "-N2"], 2, "--rdzv c10d"),
        (["--sbatch", "gpus-per-task=1"], 2, "use --gpus-per-node"),
        (["--comment", "a\nb"], 2, "a line break cannot stand in it"),
        (["-w", "nope"], 3, "Invalid node name specified; see the nodes with: sinfo -N"),
        (["-x", "gpu-[5-12]"], 3, "Requested node configuration is not available"),
        (["--reservation", "nope"], 3, "Requested reservation is invalid"),
        (["--sbatch", "frobnicate=1"], 3, "unrecognized option"),
        (["-o", "/root/x/log"], 2, "cannot be made"),
        (["--run-root", "/root/x"], 2, "--run-root"),
        (["--run-root", "/tmp/x"], 2, "every node has its own"),
        (["--run-root", "/dev/shm/x"], 2, "every node has its own"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_and_leaves_nothing(
    cluster: Cluster, home: Path, words: list[str], code: int, says: str
) -> None:
    before, there = queue(cluster), entries(home)
    done = cluster.run(["gpusub", *words, "report.py"], check=False)
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gpusub: error: ")
    assert says in done.stderr
    assert queue(cluster) == before
    assert entries(home) == there


def test_a_controller_that_is_down_is_told_from_a_refusal(cluster: Cluster, home: Path) -> None:
    cluster.controller.kill()
    try:
        done = cluster.run(["gpusub", "report.py"], check=False, timeout=60)
    finally:
        cluster.controller.restart()
    assert done.returncode == 4
    assert "nothing was submitted" in done.stderr
    assert "Unable to contact slurm controller" in done.stderr
    assert not (home / ".gpusub").exists()


def test_a_job_that_can_never_start_is_told_of(cluster: Cluster, home: Path) -> None:
    cluster.run(["scontrol", "update", "partitionname=gpu", "state=down"], user="root")
    done = cluster.run(["gpusub", "report.py"])
    assert "will not start (PartitionDown): the partition is down" in done.stderr
    assert "gpusub cancel" in done.stderr


def test_what_a_surrounding_job_planted_does_not_reach_the_new_one(
    cluster: Cluster, home: Path
) -> None:
    inner = "export MASTER_PORT=1 WORLD_SIZE=9 PET_NNODES=7; gpusub --parsable report.py > id"
    job = cluster.sbatch("-c3", "--mem-per-cpu=10", "--wrap", f"srun sh -c '{inner}'")
    cluster.wait(job, "COMPLETED")
    cluster.wait((home / "id").read_text().strip(), "COMPLETED")
    found = reports(log_of(home))
    assert [report["WORLD_SIZE"] for report in found] == ["4"] * 4
    assert {report["OMP_NUM_THREADS"] for report in found} == {"4"}


@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_variables_reach_the_program(cluster: Cluster, home: Path, export: str) -> None:
    (report,) = follow(
        cluster, "--gpus-per-node=1", "--env", "PLAIN=a b$x,y", "--nccl", "IB_SL=3", "report.py",
        env={"SBATCH_EXPORT": export},
    )  # fmt: skip
    assert report["PLAIN"] == "a b$x,y"
    assert report["NCCL_IB_SL"] == "3"


def test_a_secret_reaches_the_program_and_no_file(cluster: Cluster, home: Path) -> None:
    (report,) = follow(
        cluster, "--gpus-per-node=1", "--env", "HF_TOKEN=hf_very_secret", "report.py"
    )
    assert report["HF_TOKEN"] == "hf_very_secret"
    for path in home.rglob(".gpusub/20*-*/*"):
        if path.is_file() and path.name != "log.out":
            assert "hf_very_secret" not in path.read_text()


def test_a_profile_is_what_the_job_runs_with(cluster: Cluster, home: Path) -> None:
    write(
        home / ".config/gpusub/config.yaml",
        "default_profile: small\n"
        "profiles:\n"
        "  small:\n"
        "    gpus_per_node: 2\n"
        "    cpus_per_gpu: 3\n"
        "    time: 12:30:00\n"
        "    fabric: {type: infiniband, service_level: 5, traffic_class: 136}\n"
        "    env: {TOKENIZERS_PARALLELISM: false}\n"
        "    setup: ['export PLAIN=\"from the setup\"']\n",
    )
    found = follow(cluster, "report.py", env={"NCCL_IB_TC": "7"})
    assert len(found) == 2
    for report in found:
        assert report["NCCL_IB_SL"] == "5"
        assert report["NCCL_IB_TC"] == "7"  # exported by the user, which beats the site
        assert report["TOKENIZERS_PARALLELISM"] == "false"
        assert report["PLAIN"] == "from the setup"
        assert report["SLURM_CPUS_PER_TASK"] == "6"
    assert cluster.job(str(found[0]["SLURM_JOB_ID"]))["TimeLimit"] == "12:30:00"


def test_gpus_can_be_asked_for_by_gres(cluster: Cluster, home: Path) -> None:
    write(
        home / "gpusub.yaml",
        "default_profile: g\nprofiles: {g: {gpu_request: gres, gpus_per_node: 'h100:2'}}\n",
    )
    found = follow(cluster, "-N2", "report.py")
    assert len(found) == 4
    assert {len(str(report["CUDA_VISIBLE_DEVICES"]).split(",")) for report in found} == {2}


def test_a_partition_without_gpus_runs_on_cpus_if_asked(cluster: Cluster, home: Path) -> None:
    (report,) = follow(cluster, "-p", "cpu", "--gpus-per-node=0", "report.py")
    assert report["host"] == "cpu-1"
    assert report["WORLD_SIZE"] == "1"


def test_sites_variables_are_between_profile_and_option(cluster: Cluster, home: Path) -> None:
    site = {"SBATCH_PARTITION": "mixed", "SBATCH_TIMELIMIT": "7", "SBATCH_GPUS_PER_NODE": "2"}
    found = follow(cluster, "-t", "9", "report.py", env=site)
    assert len(found) == 2
    job = cluster.job(str(found[0]["SLURM_JOB_ID"]))
    assert (job["Partition"], job["TimeLimit"]) == ("mixed", "00:09:00")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("/tmp/only-here", "no program /tmp/only-here on this node"),  # each node has its own /tmp
        ("/usr/bin/python3", "no torch"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_its_node(
    cluster: Cluster, home: Path, python: str, says: str
) -> None:
    cluster.run(["ln", "-sf", "/usr/bin/python3", "/tmp/only-here"])
    done = cluster.run(["gpusub", "--follow", "-N2", "--python", python, "report.py"], check=False)
    assert done.returncode == 127
    assert len(re.findall(rf"gpusub: gpu-\d+: .*{says}.*--python", done.stdout)) == 2
    assert "REPORT" not in done.stdout


def test_the_log_starts_with_each_nodes_python(cluster: Cluster, home: Path) -> None:
    done = cluster.run(["gpusub", "--follow", "-N2", "--gpus-per-node=1", "report.py"], timeout=120)
    lines = done.stdout.splitlines()[2:4]
    for line in lines:
        assert re.fullmatch(
            r"gpusub: gpu-\d+: \S+/bin/python \(Python 3\.\d+\.\d+, torch 2\.\S+\)", line
        )


def test_a_sick_nodes_prolog_sends_the_job_elsewhere(cluster: Cluster, home: Path) -> None:
    cluster.hook("prolog", '#!/bin/sh\n[ "$SLURMD_NODENAME" != gpu-5 ]\n')
    submit = ["gpusub", "--parsable", "-N2", "--gpus-per-node=1", "report.py"]
    cluster.wait(cluster.run(submit).stdout.strip(), "COMPLETED", timeout=120)
    found = reports(log_of(home))
    assert len(found) == 2
    assert "gpu-5" not in {report["host"] for report in found}


def test_the_example_trains_on_two_nodes(cluster: Cluster, home: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples/train.py"
    write(home / "examples/train.py", example.read_text())
    done = cluster.run(
        ["gpusub", "-N2", "--gpus-per-node=2", "--follow", "examples/train.py", "--steps", "50"],
        timeout=180,
    )
    hosts = re.findall(r"^rank (\d)\s+(gpu-\d+) ", done.stdout, re.MULTILINE)
    assert [rank for rank, _ in hosts] == ["0", "1", "2", "3"]
    assert len({host for _, host in hosts}) == 2
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] / 4
    assert (home / ".gpusub").is_dir()


def test_a_script_that_changed_since_is_named(cluster: Cluster, home: Path) -> None:
    cluster.scontrol("update", "partitionname=gpu", "state=down")
    job = cluster.run(["gpusub", "--parsable", "--gpus-per-node=1", "report.py"]).stdout.strip()
    write(home / "report.py", REPORT + "# changed\n")
    cluster.scontrol("update", "partitionname=gpu", "state=up")
    cluster.wait(job, "COMPLETED")
    assert "warning: report.py is not what it was when this job was submitted" in log_of(home)


def test_the_example_serves_on_a_nodes_gpus(cluster: Cluster, home: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples/serve.py"
    write(home / "examples/serve.py", example.read_text())
    words = ["--follow", "--gpus-per-node=2", "--", "python", "examples/serve.py"]
    done = cluster.run(
        ["gpusub", *words, "--sweep", "1,4", "--duration", "1", "--layers", "1", "--width", "64"],
        timeout=180,
    )
    # One worker for each of the job's GPUs, and a line for each batch size.
    assert "worker 1 " in done.stdout
    for size in ("1", "4"):
        assert re.search(rf"^batch {size} +[1-9]\d* +\d+\.\d", done.stdout, re.MULTILINE)


def test_local_runs_the_same_script_on_the_login_node(cluster: Cluster, home: Path) -> None:
    before = queue(cluster)
    done = cluster.run(
        ["gpusub", "--local", "--gpus-per-node=2", "report.py", *HOSTILE], timeout=60
    )
    assert len(reports(done.stdout)) == 1
    found = reports(log_of(home))
    assert [report["argv"] for report in found] == [["report.py", *HOSTILE]] * 2
    assert queue(cluster) == before
    assert "REPORT" in log_of(home)


@pytest.mark.parametrize(
    "redirected", [">&-", ">/dev/full", "| true", "2>&-", "2>/dev/full", "--parsable >/dev/full"]
)
def test_an_accepted_job_is_no_failure_whoever_reads_of_it(
    cluster: Cluster, home: Path, redirected: str
) -> None:
    script = f"set -o pipefail; gpusub --gpus-per-node=1 report.py {redirected}"
    if redirected.startswith("--"):
        script = script.replace("report.py --parsable", "--parsable report.py")
    done = cluster.run(["bash", "-c", script], check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    if ">/dev/full" in redirected and "2>" not in redirected:
        assert re.search(r"job \d+ was accepted", done.stderr)
    assert len(list(home.glob(".gpusub/20*-*"))) == 1


def test_what_a_sites_hooks_print_does_not_reach_the_launch(cluster: Cluster, home: Path) -> None:
    cluster.hook("task_prolog", "#!/bin/sh\necho print Welcome to the ok cluster\n")
    write(home / "env.sh", "echo 0 gpu-99 12345 ok hello\n")
    found = follow(
        cluster, "-N2", "--gpus-per-node=1", "report.py", env={"BASH_ENV": f"{HOME}/env.sh"}
    )
    assert [report["RANK"] for report in found] == ["0", "1"]


@pytest.mark.parametrize("name", ["torch.py", "torch/__init__.py", "types.py", "email.py"])
def test_a_file_in_the_working_directory_is_not_run_in_the_launchers_place(
    cluster: Cluster, home: Path, name: str
) -> None:
    write(home / name, "raise SystemExit('not me')\n")
    write(home / "src" / "report.py", REPORT)
    (report,) = follow(cluster, "--gpus-per-node=1", "src/report.py")
    assert report["argv"] == ["src/report.py"]


def test_what_setup_provides_is_there_for_the_look_too(cluster: Cluster, home: Path) -> None:
    python = cluster.run(["python", "-c", "import torch; print(torch.__path__[0])"]).stdout
    packages = str(Path(python.strip()).parent)
    write(
        home / "gpusub.yaml",
        f'default_profile: p\nprofiles:\n  p:\n    setup: ["export PYTHONPATH={packages}"]\n',
    )
    found = follow(cluster, "--gpus-per-node=1", "--python", "/usr/bin/python3", "report.py")
    assert len(found) == 1


def test_a_users_file_that_is_named_like_a_job_stays(cluster: Cluster, home: Path) -> None:
    for number in range(1, 300):
        write(home / "data" / str(number), "precious")
    cluster.run(["gpusub", "--wait", "--gpus-per-node=1", "--run-root", "data", "--", "true"])
    for number in range(1, 300):
        assert (home / "data" / str(number)).read_text() == "precious"


def test_a_log_that_was_there_is_not_shown_again(cluster: Cluster, home: Path) -> None:
    for words in ("first", "second"):
        done = cluster.run(
            ["gpusub", "--follow", "--gpus-per-node=1", "-o", "same.log", "--", "echo", words]
        )
    assert "second" in done.stdout
    assert "first" not in done.stdout
    assert "first" in (home / "same.log").read_text()


def test_what_sbatch_says_beside_is_passed_on(cluster: Cluster, home: Path) -> None:
    write(
        home / "bin/sbatch", '#!/bin/sh\necho "3 GPU-hours left" >&2\nexec /usr/bin/sbatch "$@"\n'
    )
    (home / "bin/sbatch").chmod(0o755)
    path = cluster.run(["sh", "-c", "echo $PATH"]).stdout.strip()
    done = cluster.run(["gpusub", "report.py"], env={"PATH": f"{HOME}/bin:{path}"})
    assert "3 GPU-hours left" in done.stderr


@pytest.mark.parametrize("number", ["INT", "QUIT", "TERM", "HUP"])
def test_a_signal_to_a_local_run_leaves_no_worker(
    cluster: Cluster, home: Path, number: str
) -> None:
    write(home / "sleep.py", "import time\nprint('there', flush=True)\ntime.sleep(321)\n")
    script = (
        # A shell lets what it starts in the background ignore SIGINT and SIGQUIT.
        "env --default-signal=INT,QUIT gpusub --local sleep.py & p=$!; "
        "for i in $(seq 200); do grep -qs there .gpusub/*/log.out && break; sleep 0.1; done; "
        f"kill -{number} $p; wait $p; echo code $?; sleep 0.3; ps -eo args | grep '[s]leep.py'"
    )
    done = cluster.run(["bash", "-c", script], check=False, timeout=90)
    assert re.search(r"code (1|13\d|14\d)$", done.stdout, re.MULTILINE)
    assert "-u sleep.py" not in done.stdout


def test_a_planted_name_reaches_the_job_if_asked_for(cluster: Cluster, home: Path) -> None:
    done = cluster.run(
        ["gpusub", "--follow", "--gpus-per-node=1", "--env", "PMIX_X", "--", "printenv", "PMIX_X"],
        env={"PMIX_X": "mine"},
    )
    assert "mine" in done.stdout.splitlines()
