"""Settings on a real Slurm: a first file for a site, fabrics by node, and completion."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import Cluster
from configuration import Layout

HOME = Path("/home/researcher")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for made in (path, path.parent):
        os.chown(made, 1001, 1001)


@pytest.fixture
def home(cluster: Cluster) -> Path:
    """The researcher's home seen from outside."""
    return cluster.path(str(HOME))


def test_a_first_file_is_one_that_submissions_run_with(cluster: Cluster, home: Path) -> None:
    done = cluster.run(["gpusub", "config", "--init", "site.yaml"])
    assert done.stdout == "site.yaml\n"
    text = (home / "site.yaml").read_text()
    assert text == cluster.run(["gpusub", "config", "--init"]).stdout
    for stated in (
        "default_profile: gpu",
        "  # 8 nodes gpu-[5-12]: 4 GPUs (h100), for each 4 CPUs, 62500 MB",
        "  # 1 node gpu-small: 2 GPUs (h100), for each 4 CPUs, 60005 MB",
        "  mixed:",
        "    gpus_per_node: 4",
    ):
        assert stated in text.splitlines()
    assert "cpu:" not in text.split()
    again = cluster.run(["gpusub", "config", "--init", "site.yaml"], check=False)
    assert again.returncode == 2
    assert "site.yaml: is there already" in again.stderr

    asked = ["gpusub", "--dry-run", "--json", "--", "true"]
    without = json.loads(cluster.run(asked).stdout)
    write(home / ".config/gpusub/config.yaml", text)
    plan = json.loads(cluster.run(asked).stdout)
    for key in ("resources", "variables"):
        assert plan[key] == without[key]
    values = [
        {o["name"]: o["value"] for o in p["options"] if o["name"] != "output"}
        for p in (plan, without)
    ]
    assert values[0] == values[1]
    line = text.splitlines().index("    partition: gpu") + 1
    partition = next(o for o in plan["options"] if o["name"] == "partition")
    assert partition["origin"] == f"profile gpu ({HOME}/.config/gpusub/config.yaml:{line})"
    # A partition whose nodes differ is refused without a number; here it has one.
    cluster.run(["gpusub", "--dry-run", "--profile", "mixed", "--", "true"])


def test_its_examples_can_be_used(cluster: Cluster, home: Path) -> None:
    text = cluster.run(["gpusub", "config", "--init"]).stdout
    used = re.sub(r"^( *)#(?=[A-Za-z-])", r"\1", text, flags=re.MULTILINE)
    write(home / ".config/gpusub/config.yaml", used)
    shown = json.loads(cluster.run(["gpusub", "config", "--json"]).stdout)["settings"]
    assert all(value["value"] is not None for value in shown.values())


def test_what_is_in_force_is_shown_as_people_read_it(cluster: Cluster, home: Path) -> None:
    write(home / "gpusub.yaml", "default_profile: p\nprofiles:\n  p: {partition: mixed}\n")
    shown = cluster.run(["gpusub", "config"], env={"SBATCH_TIMELIMIT": "7"}).stdout
    assert re.search(r"^  partition +mixed +~/gpusub.yaml:3$", shown, re.MULTILINE)
    assert re.search(r"^  time +7 +SBATCH_TIMELIMIT$", shown, re.MULTILINE)
    assert re.search(r"^  /etc/gpusub/cluster.yaml +absent$", shown, re.MULTILINE)


def test_a_controller_that_is_down_is_told(cluster: Cluster, home: Path) -> None:
    cluster.controller.kill()
    try:
        done = cluster.run(["gpusub", "config", "--init"], check=False)
        names = complete(cluster, "-p", "")
    finally:
        cluster.controller.restart()
    assert (done.returncode, done.stdout) == (4, "")
    assert "Unable to contact slurm controller" in done.stderr
    assert names == []


# gpu-5 has H100s, gpu-6 A100s and gpu-7 H100s with a feature of its own.
def two_types() -> dict[str, object]:
    layout = Layout.of(3, small=False)
    lines = [node.line() for node in layout.nodes]
    lines[1] = lines[1].replace("gpu:h100:", "gpu:a100:")
    lines[2] += " Features=ndr400,rack2"
    gres = layout.gres().replace(
        "NodeName=gpu-6 Name=gpu Type=h100", "NodeName=gpu-6 Name=gpu Type=a100"
    )
    return {"layout": layout, "conf": "\n".join(lines), "files": {"gres.conf": gres}}


FABRICS = """\
default_profile: p
profiles:
  p:
    gpus_per_node: 1
    fabric:
      ndr400: {type: infiniband, service_level: 1, hcas: ["mlx5_0:1", "mlx5_3:1"]}
      a100: {type: roce, service_level: 2, gid_index: 3}
      t4: {type: ethernet, service_level: 9}
      h100: {type: infiniband, service_level: 3, traffic_class: 4}
"""


def test_each_node_gets_the_fabric_of_its_gpus_or_features(
    clusters: Callable[..., Cluster],
) -> None:
    cluster = clusters(**two_types())
    home = cluster.path(str(HOME))
    write(home / "gpusub.yaml", FABRICS)
    show = 'echo "ON $SLURMD_NODENAME $(env | grep ^NCCL_ | sort | tr "\\n" " ")"'
    done = cluster.run(
        ["gpusub", "--follow", "-N3", "--", "bash", "-c", show], env={"NCCL_IB_TC": "7"}
    )
    found = sorted(line.split()[1:] for line in done.stdout.splitlines() if line[:3] == "ON ")
    assert found == [
        ["gpu-5", "NCCL_IB_SL=3", "NCCL_IB_TC=7"],  # exported by the user, which beats the site
        ["gpu-6", "NCCL_IB_GID_INDEX=3", "NCCL_IB_SL=2", "NCCL_IB_TC=7"],
        ["gpu-7", "NCCL_IB_HCA=mlx5_0:1,mlx5_3:1", "NCCL_IB_SL=1", "NCCL_IB_TC=7"],
    ]
    for name in ("ndr400", "a100", "h100"):
        assert f"gpusub: fabric {name} on 1 of 3 node(s)\n" in done.stdout
    (plan,) = (json.loads(path.read_text()) for path in home.glob(".gpusub/20*-*/plan.json"))
    assert [fabric["name"] for fabric in plan["fabrics"]] == ["ndr400", "a100", "t4", "h100"]
    assert plan["fabrics"][1]["variables"][0] == {
        "name": "NCCL_IB_SL",
        "value": "2",
        "origin": f"profile p ({HOME}/gpusub.yaml:7): fabric.a100.service_level",
    }
    # A node that none of them fits, by a constraint of the user's.
    write(home / "gpusub.yaml", FABRICS.replace("h100: {", "b200: {"))
    done = cluster.run(["gpusub", "--follow", "-w", "gpu-5", "--", "bash", "-c", show])
    assert "ON gpu-5 \n" in done.stdout


def test_the_workers_of_torch_have_it_too(clusters: Callable[..., Cluster]) -> None:
    cluster = clusters(**two_types())
    home = cluster.path(str(HOME))
    write(home / "gpusub.yaml", FABRICS)
    write(
        home / "report.py",
        "import os, socket\n"
        "line = f\"{socket.gethostname()} {os.environ.get('NCCL_IB_SL')}\\n\"\n"
        "open(f\"out-{os.environ['RANK']}\", 'w').write(line)\n",
    )
    done = cluster.run(
        ["gpusub", "--follow", "-N2", "-w", "gpu-[6-7]", "report.py"], check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout
    found = sorted((home / f"out-{rank}").read_text() for rank in (0, 1))
    assert found == ["gpu-6 2\n", "gpu-7 1\n"]


def complete(cluster: Cluster, *words: str) -> list[str]:
    done = cluster.run(
        ["gpusub"],
        env={
            "_GPUSUB_COMPLETE": "zsh_complete",
            "COMP_WORDS": "\n".join(["gpusub", *words]),
            "COMP_CWORD": str(len(words)),
        },
        timeout=10,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line != "plain"]


def test_partitions_and_jobs_are_completed(cluster: Cluster, home: Path) -> None:
    assert complete(cluster, "-p", "")[:2] == ["gpu", "8 nodes, 4 GPUs"]
    assert complete(cluster, "--partition", "mix") == ["mixed", "3 nodes, 2 or 4 GPUs"]
    assert complete(cluster, "-p", "gpu,mix") == ["gpu,mixed", "3 nodes, 2 or 4 GPUs"]
    assert complete(cluster, "-p", "nope") == []
    job = cluster.sbatch("-J", "llama", "--wrap", "sleep 60")
    others = cluster.sbatch("--wrap", "sleep 60", user="colleague")
    cluster.wait(job, "RUNNING")
    for command in ("status", "logs", "cancel", "exec"):
        assert complete(cluster, command, job) == [job, "llama, running"]
        assert others not in complete(cluster, command, "")
