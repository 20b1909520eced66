from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import NodeKind, Partition
from gpusub import command
from gpusub import profile as profiles
from gpusub.cli import SBATCH_VARIABLES, run
from gpusub.config import ProfileSchema
from gpusub.plan import Plan, plain
from gpusub.request import Request
from gpusub.settings import DEFAULTS, _masked

Capture = pytest.CaptureFixture[str]

SITE = """\
default_profile: h100
profiles:
  h100:
    partition: gpu
    account: ~
    time: 12:30:00
    cpus_per_gpu: 12
    shared: true
    fabric: {type: infiniband, hcas: [mlx5_0:1, mlx5_3:1], service_level: 5}
    env: {A: b, HF_TOKEN: hunter2}
    setup:
      - module load cuda
      - export WANDB_API_KEY="hunter2 x" B=c
  a100:
    fabric:
      a100: {pkey: 1}
      roce: {type: roce}
"""


@pytest.fixture
def shown(capfd: Capture) -> Callable[..., str]:
    def show(*argv: str) -> str:
        assert run(["config", *argv]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out

    return show


@pytest.fixture
def settings(shown: Callable[..., str]) -> Callable[..., dict[str, tuple[Any, str]]]:
    """Return every setting's value and origin."""

    def read(*argv: str) -> dict[str, tuple[Any, str]]:
        found = json.loads(shown("--json", *argv))["settings"]
        return {key: (value["value"], value["origin"]) for key, value in found.items()}

    return read


@pytest.fixture
def site() -> Path:
    profiles.SITE_FILE.write_text(SITE)
    return profiles.SITE_FILE


def test_without_any_file_what_is_built_in_is_shown(shown: Callable[..., str]) -> None:
    out = shown()
    assert out.startswith("No profile\n")
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if line[:2] == "  "}
    for key in ProfileSchema.__struct_fields__:
        assert key in rows
    assert (rows["rendezvous"], rows["template"], rows["partition"]) == ("c10d", "torchrun", "-")
    assert out.count(" absent\n") == 3


def test_every_key_of_a_profile_has_words_for_not_being_set() -> None:
    assert set(DEFAULTS) == set(ProfileSchema.__struct_fields__)


def test_each_value_has_its_file_and_line(
    site: Path, work: Path, settings: Callable[..., dict[str, tuple[Any, str]]]
) -> None:
    (work / "gpusub.yaml").write_text("profiles: {h100: {fabric: {service_level: 3}}}\n")
    found = settings()
    lines = SITE.splitlines()
    for key, line in (("partition", 4), ("account", 5), ("time", 6), ("cpus_per_gpu", 7)):
        assert key in lines[line - 1]
        assert found[key][1] == f"profile h100 ({site}:{line})"
    assert found["partition"][0] == "gpu"
    assert found["account"][0] is None
    assert found["fabric.hcas"] == (["mlx5_0:1", "mlx5_3:1"], f"profile h100 ({site}:9)")
    assert found["fabric.service_level"] == (3, f"profile h100 ({work}/gpusub.yaml:1)")
    assert found["env.A"] == ("b", f"profile h100 ({site}:10)")
    assert found["qos"] == (None, "Slurm's default")


def test_the_profile_and_where_it_is_from(
    site: Path, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown().splitlines()[0] == f"Profile h100 (default_profile, {site}:1); others: a100"
    assert shown("--profile", "a100").startswith("Profile a100 (option --profile); others: h100\n")
    monkeypatch.setenv("GPUSUB_PROFILE", "a100")
    assert shown().startswith("Profile a100 (GPUSUB_PROFILE); others: h100\n")
    told = json.loads(shown("--json"))
    assert told["profile"] == {"value": "a100", "origin": "environment GPUSUB_PROFILE"}
    assert told["profiles"] == ["a100", "h100"]


def test_a_fabric_by_node_is_shown_block_by_block(
    site: Path, settings: Callable[..., dict[str, tuple[Any, str]]]
) -> None:
    found = settings("--profile", "a100")
    assert found["fabric.a100.pkey"] == (1, f"profile a100 ({site}:16)")
    assert found["fabric.roce.type"] == ("roce", f"profile a100 ({site}:17)")
    assert "fabric" not in found


def test_variables_are_over_the_files_and_ours_over_sbatchs(
    site: Path,
    settings: Callable[..., dict[str, tuple[Any, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "b")
    monkeypatch.setenv("GPUSUB_PARTITION", "c")
    monkeypatch.setenv("GPUSUB_NODES", "4")
    monkeypatch.setenv("GPUSUB_ENV", "A=z N=1")
    monkeypatch.setenv("NCCL_IB_SL", "9")
    found = settings()
    assert found["time"] == ("7", "environment SBATCH_TIMELIMIT")
    assert found["partition"] == ("c", "environment GPUSUB_PARTITION")
    assert found["nodes"] == ("4", "environment GPUSUB_NODES")
    assert found["env.A"] == ("z", "environment GPUSUB_ENV")
    assert found["env.N"] == ("1", "environment GPUSUB_ENV")
    assert found["NCCL_IB_SL"] == ("9", "your environment")


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_secret_is_masked(
    site: Path, how: list[str], shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSUB_ENV", "MY_SECRET=hunter2")
    out = shown(*how)
    assert "hunter2" not in out
    assert out.count("***") == 3
    assert "B=c" in out


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=hunter2",
        "export HF_TOKEN='a hunter2'",
        "export HF_TOKEN=$'a hunter2'",
        'export HF_TOKEN="a\\"hunter2"',
        r"export HF_TOKEN=a\ hunter2",
        "--export=HF_TOKEN=hunter2",
        "login --token hunter2",
        "curl -H 'Authorization: Bearer hunter2' x",
        "export URL=postgres://me:hunter2@db/x",
    ],
)
def test_a_secret_in_a_line_of_the_setup_is_masked(line: str) -> None:
    masked = _masked("setup", [line])
    assert "hunter2" not in str(masked)
    assert "***" in str(masked)


def test_what_is_no_secret_is_shown() -> None:
    line = "module load cuda && export NCCL_IB_SL=5 TOKENIZERS_PARALLELISM=false X=http://h:80/x"
    assert _masked("setup", line) == line


def test_it_is_aligned_within_80_columns(
    work: Path, tmp_path: Path, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SITE_FILE", tmp_path / "home/site.yaml")
    profiles.SITE_FILE.write_text(SITE)
    (work / "gpusub.yaml").write_text(
        f"profiles: {{h100: {{reservation: {'r' * 36}, env: {{LONG: {'x' * 90}}}}}}}\n"
    )
    lines = shown().splitlines()
    # A value that is longer than a line is left whole, for the clipboard.
    assert [line for line in lines if len(line) > 80 and "x" * 90 not in line] == []
    assert any(line.endswith(f"{'r' * 36}  ./gpusub.yaml:1") for line in lines)
    assert any("x" * 90 in line for line in lines)
    columns = {line.index("~/site.yaml:") for line in lines[2:] if "~/site.yaml:" in line}
    assert len(columns) == 1


def test_files_are_named_with_what_they_are(
    site: Path, work: Path, tmp_path: Path, shown: Callable[..., str]
) -> None:
    files = json.loads(shown("--json"))["files"]
    assert files == [
        {"path": str(site), "state": "read"},
        {"path": f"{tmp_path}/home/.config/gpusub/config.yaml", "state": "absent"},
        {"path": f"{work}/gpusub.yaml", "state": "absent"},
    ]
    assert re.search(r"^  ~/.config/gpusub/config.yaml +absent$", shown(), re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "content", "says"),
    [
        (["--profile", "h10"], SITE, "option --profile: no profile 'h10'; did you mean 'h100'?"),
        ([], "profile:\n", ":1: profile: unknown key; did you mean 'profiles'?"),
        (["--nope"], SITE, "--nope"),
        (["x"], SITE, "Got unexpected extra argument (x)"),
    ],
)
def test_a_refusal_is_one_line(argv: list[str], content: str, says: str, capfd: Capture) -> None:
    profiles.SITE_FILE.write_text(content)
    assert run(["config", *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.usefixtures("no_sbatch")
def test_a_first_file_needs_slurm(capfd: Capture) -> None:
    assert run(["config", "--init"]) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("gpusub: error: Slurm does not say what there is: ")


# Of each setting: its key in a file, its variables, its option, and where it is in the plan.
TABLE = {
    "partition": ("partition", "SBATCH_PARTITION", "PARTITION", "-p", "sbatch partition"),
    "account": ("account", "SBATCH_ACCOUNT", "ACCOUNT", "-A", "sbatch account"),
    "qos": ("qos", "SBATCH_QOS", "QOS", "-q", "sbatch qos"),
    "time": ("time", "SBATCH_TIMELIMIT", "TIME", "-t", "sbatch time"),
    "constraint": ("constraint", "SBATCH_CONSTRAINT", "CONSTRAINT", "-C", "sbatch constraint"),
    "reservation": (
        *("reservation", "SBATCH_RESERVATION", "RESERVATION", "--reservation"),
        "sbatch reservation",
    ),
    "gpus_per_node": (
        *("gpus_per_node", "SBATCH_GPUS_PER_NODE", "GPUS_PER_NODE", "--gpus-per-node"),
        "sbatch gpus-per-node",
    ),
    "cpus": ("cpus_per_gpu", "SBATCH_CPUS_PER_TASK", "CPUS_PER_TASK", "-c", "sbatch cpus-per-task"),
    "mem": ("mem_per_gpu", "SBATCH_MEM_PER_NODE", "MEM", "--mem", "sbatch mem"),
    "rendezvous": ("rendezvous", "", "RDZV", "--rdzv", "plan rendezvous"),
    "template": ("template", "", "TEMPLATE", "--template", "plan template"),
    "job_name": ("", "SBATCH_JOB_NAME", "JOB_NAME", "-J", "sbatch job-name"),
    "output": ("", "SBATCH_OUTPUT", "OUTPUT", "-o", "sbatch output"),
    "env": ("env", "", "ENV", "--env", "variable V"),
    "nccl": ("fabric", "", "NCCL", "--nccl", "variable NCCL_IB_SL"),
    "gpu_request": ("gpu_request", "", "", "", "sbatch gres"),
    "setup": ("setup", "", "", "", "setup"),
    "shared": ("shared", "", "", "", "exclusive"),
}
# What each layer states, from the site's file to the option, and what comes of it.
WRITTEN = {
    "time": "1 2 3 4 5 6",
    "gpus_per_node": "1 2 3 4 5 6",
    "cpus": "1 2 3 4 5 6",
    "output": "- - - /o/4 /o/5 /o/6",
    "mem": "1G 2G 3G 4G 5G 6G",
    "rendezvous": "static c10d static c10d static c10d",
    "env": "{V:\xa0a} {V:\xa0b} {V:\xa0c} - V=e V=f",
    "nccl": "{service_level:\xa01} {service_level:\xa02} {service_level:\xa03} - IB_SL=5 IB_SL=6",
    "gpu_request": "gres gpus-per-node gres",
    "setup": "[a] [b] [c]",
    "shared": "true false true",
}
COMES_OUT = {
    "cpus": "8 16 24 4 5 6",
    "mem": "8G 16G 24G 4G 5G 6G",
    "env": "a b c - e f",
    "nccl": "1 2 3 - 5 6",
    "gpu_request": "gpu:8 None gpu:8",
    "setup": "a b c",
    "shared": "False True False",
}


def found(plan: dict[str, Any], where: str) -> tuple[Any, Any]:
    """Return a value of a plan and its origin."""
    kind, _, name = where.partition(" ")
    if kind == "setup":
        return plan["setup"][0], None
    if kind == "exclusive":
        return plan["resources"]["exclusive"]["value"], plan["resources"]["exclusive"]["origin"]
    if kind == "plan":
        return plan[name]["value"], plan[name]["origin"]
    listed = plan["options" if kind == "sbatch" else "variables"]
    return next(((v["value"], v["origin"]) for v in listed if v["name"] == name), (None, None))


class TestLayers:
    """Built-in, site, user, project, SBATCH_*, GPUSUB_*, option: each beats those before it."""

    @pytest.fixture
    def planned(
        self,
        work: Path,
        tmp_path: Path,
        inventory: Callable[..., Any],
        plan_of: Callable[..., Plan],
        monkeypatch: pytest.MonkeyPatch,
    ) -> Callable[..., dict[str, Any]]:
        names = [f"v{n}" for n in range(1, 7)]
        facts = inventory(
            *[Partition(name, name == "v1", "UP", 4) for name in names],
            kinds=tuple(
                NodeKind(name, "n[1-4]", 4, 64, 1, 512_000, 8, frozenset(names)) for name in names
            ),
        )
        plans: list[dict[str, Any]] = []

        def note(request: Request, params: object) -> int:
            loaded = profiles.load(tmp_path / "home", work, None)
            plans.append(plain(plan_of(request, loaded, facts, dict(os.environ))))
            return 0

        monkeypatch.setattr(command, "submit_command", note)
        (work / "train.py").touch()

        def plan(*argv: str) -> dict[str, Any]:
            assert run([*argv, "train.py"]) == 0
            return plans[-1]

        return plan

    @pytest.mark.parametrize("key", TABLE)
    def test_each_beats_those_before_it(
        self,
        key: str,
        planned: Callable[..., dict[str, Any]],
        work: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        stated, by_sbatch, by_ours, option, where = TABLE[key]
        written = WRITTEN.get(key, "v1 v2 v3 v4 v5 v6").split(" ")
        expected = COMES_OUT.get(key, " ".join(written)).split(" ")
        for layer, path in enumerate(profiles.paths(tmp_path / "home", work) if stated else ()):
            path.parent.mkdir(parents=True, exist_ok=True)
            says = written[layer].replace("\xa0", " ")
            path.write_text(f"default_profile: p\nprofiles:\n  p:\n    {stated}: {says}\n")
            value, origin = found(planned(), where)
            assert str(value) == expected[layer]
            if key not in ("setup", "shared", "gpu_request"):
                assert origin.startswith(f"profile p ({path}:4)")
        variables = ((3, by_sbatch), (4, f"GPUSUB_{by_ours}" if by_ours else ""))
        for layer, name in variables:
            if name:
                monkeypatch.setenv(name, written[layer])
                value, origin = found(planned(), where)
                assert str(value) == expected[layer]
                assert origin == f"environment {name}"
        if option:
            value, origin = found(planned(option, written[5]), where)
            assert str(value) == expected[5]
            assert origin.startswith("option --")

    def test_every_option_that_a_file_or_sbatch_can_set_is_in_the_table(self) -> None:
        assert set(SBATCH_VARIABLES.values()) <= {row[1] for row in TABLE.values()}
        assert set(ProfileSchema.__struct_fields__) == {row[0] for row in TABLE.values()} - {""}

    def test_what_is_repeated_adds_to_its_variable(
        self, planned: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GPUSUB_ENV", "A=1 B=1")
        monkeypatch.setenv("GPUSUB_NCCL", "IB_SL=1 IB_TC=1")
        monkeypatch.setenv("GPUSUB_SBATCH", "nice=1 hold")
        plan = planned("--env", "A=2", "--nccl", "IB_SL=2", "--sbatch", "nice=2")
        assert found(plan, "variable A") == ("2", "option --env")
        assert found(plan, "variable B") == ("1", "environment GPUSUB_ENV")
        assert found(plan, "variable NCCL_IB_SL") == ("2", "option --nccl")
        assert found(plan, "variable NCCL_IB_TC") == ("1", "environment GPUSUB_NCCL")
        assert found(plan, "sbatch nice") == ("2", "option --sbatch")
        assert found(plan, "sbatch hold") == (None, "environment GPUSUB_SBATCH")

    def test_an_exported_nccl_variable_is_over_the_fabric_and_under_the_option(
        self, planned: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        profiles.SITE_FILE.write_text(
            "default_profile: p\nprofiles: {p: {fabric: {service_level: 1}}}\n"
        )
        assert found(planned(), "variable NCCL_IB_SL")[0] == "1"
        monkeypatch.setenv("NCCL_IB_SL", "2")
        assert found(planned(), "variable NCCL_IB_SL") == (None, None)
        assert found(planned("--nccl", "IB_SL=3"), "variable NCCL_IB_SL")[0] == "3"

    @pytest.mark.parametrize(
        ("variable_name", "written", "origin"),
        [
            ("SBATCH_EXCLUSIVE", "", "environment SBATCH_EXCLUSIVE"),
            ("SBATCH_EXCLUSIVE", "exclusive", "environment SBATCH_EXCLUSIVE"),
            ("GPUSUB_EXCLUSIVE", "1", "environment GPUSUB_EXCLUSIVE"),
        ],
    )
    def test_whole_nodes_by_a_variable_are_over_a_profile_that_shares(
        self,
        variable_name: str,
        written: str,
        origin: str,
        planned: Callable[..., dict[str, Any]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        profiles.SITE_FILE.write_text("default_profile: p\nprofiles: {p: {shared: true}}\n")
        assert planned()["resources"]["exclusive"]["value"] is False
        monkeypatch.setenv(variable_name, written)
        assert found(planned(), "exclusive") == (True, origin)


def test_it_is_not_loaded_for_a_submission(work: Path) -> None:
    (work / "train.py").touch()
    code = (
        "import sys; from gpusub.cli import run\n"
        "run(['--local', '--dry-run', 'train.py'])\n"
        "mine = {'gpusub.settings', 'gpusub.sitefile', 'gpusub.completion', 'gpusub.help'}\n"
        "sys.stderr.write(str((mine | {'yaml', 'msgspec', 'click.shell_completion'}) "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()"
