from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusub.errors import GpusubError
from gpusub.plan import NodeFabric, Option, Plan, Variable, plain
from gpusub.profile import Profile
from gpusub.request import BUILT_IN, Nodes, Program, Value
from gpusub.resources import Machine

Make = Callable[..., Any]
SITE = "profile p (site)"


def lines(plan: Plan) -> list[str]:
    """The options as sbatch gets them, each with where it is from."""
    return [f"{option.text}  # {option.origin}" for option in plan.options]


class TestOptions:
    def test_with_nothing_said(self, request_of: Make, plan_of: Make, work: Path) -> None:
        assert lines(plan_of(request_of())) == [
            "--partition=gpu  # Slurm's default partition",
            "--nodes=1  # built-in",
            "--ntasks-per-node=1  # built-in",
            "--gpus-per-node=8  # all GPUs of a node, by Slurm",
            "--cpus-per-task=192  # 8 GPUs' share of a node",
            "--mem=0  # all memory of a node",
            "--exclusive  # all GPUs of a node",
            "--job-name=train  # built-in",
            f"--chdir={work}  # built-in",
            f"--output={work}/.gpusub/20261130-191500-4f3a9c81/log.out  # built-in",
            "--open-mode=append  # built-in",
            "--requeue  # built-in",
        ]

    def test_with_everything_said(self, request_of: Make, plan_of: Make, work: Path) -> None:
        settings = {
            "partition": "gpu,cpu",
            "account": "acc",
            "qos": "high",
            "time": "1-0",
            "constraint": "[a|b]",
            "reservation": "res",
            "gpus_per_node": "h100:4",
            "cpus_per_task": "10",
            "mem": "64G",
            "job_name": "a name; $x",
            "output": "logs/%x-%j.out",
        }
        request = request_of(
            settings=settings,
            nodes=Value(Nodes(2, 2), "option --nodes"),
            sbatch={
                "exclude": Value("gpu-001", "option --exclude"),
                "nice": Value("100", "option --sbatch"),
                "hold": Value(None, "option --sbatch"),
            },
        )
        assert lines(plan_of(request)) == [
            "--partition=gpu,cpu  # option --partition",
            "--nodes=2  # option --nodes",
            "--ntasks-per-node=1  # built-in",
            "--gpus-per-node=h100:4  # option --gpus-per-node",
            "--cpus-per-task=10  # option --cpus-per-task",
            "--mem=64G  # option --mem",
            "--account=acc  # option --account",
            "--qos=high  # option --qos",
            "--time=1-0  # option --time",
            "--constraint=[a|b]  # option --constraint",
            "--reservation=res  # option --reservation",
            "--job-name=a name; $x  # option --job-name",
            f"--chdir={work}  # built-in",
            f"--output={work}/logs/%x-%j.out  # option --output",
            "--open-mode=append  # built-in",
            "--requeue  # built-in",
            "--exclude=gpu-001  # option --exclude",
            "--nice=100  # option --sbatch",
            "--hold  # option --sbatch",
        ]

    def test_from_a_profile(self, request_of: Make, plan_of: Make, profile_of: Make) -> None:
        profile = profile_of(
            partition="gpu",
            account="acc",
            qos=None,
            time="04:00:00",
            gpus_per_node="4",
            cpus_per_gpu=3,
            mem_per_gpu="10G",
        )
        assert lines(plan_of(request_of(settings={"account": "mine"}), profile))[:8] == [
            f"--partition=gpu  # {SITE}",
            "--nodes=1  # built-in",
            "--ntasks-per-node=1  # built-in",
            f"--gpus-per-node=4  # {SITE}",
            f"--cpus-per-task=12  # {SITE}: 3 a GPU",
            f"--mem=40G  # {SITE}: 10G a GPU",
            "--account=mine  # option --account",
            f"--time=04:00:00  # {SITE}",
        ]

    def test_a_range_of_nodes_is_left_to_slurm(self, request_of: Make, plan_of: Make) -> None:
        # Given a number of tasks a node, sbatch counts tasks and takes the fewest nodes.
        request = request_of(nodes=Value(Nodes(2, 4), "option --nodes"))
        options = lines(plan_of(request))
        assert "--nodes=2-4  # option --nodes" in options
        assert not [option for option in options if option.startswith("--ntasks")]

    @pytest.mark.parametrize(
        ("how", "asked", "option"),
        [
            ("gpus-per-node", "4", "--gpus-per-node=4"),
            ("gres", "4", "--gres=gpu:4"),
            ("gres", "h100:4", "--gres=gpu:h100:4"),
            ("none", "4", None),
            ("gres", "0", None),
            ("gpus-per-node", "0", None),
        ],
    )
    def test_gpus_are_asked_for_once_and_the_sites_way(
        self, request_of: Make, plan_of: Make, profile_of: Make, how: str, asked: str, option: str
    ) -> None:
        request = request_of(settings={"gpus_per_node": asked})
        texts = [o.text for o in plan_of(request, profile_of(gpu_request=how)).options]
        found = [text for text in texts if text.startswith(("--gpus", "--gres"))]
        assert found == ([option] if option else [])

    def test_gres_twice_is_refused(self, request_of: Make, plan_of: Make, profile_of: Make) -> None:
        request = request_of(sbatch={"gres": Value("nvme:1", "option --sbatch")})
        assert "--gres=nvme:1" in [o.text for o in plan_of(request).options]
        with pytest.raises(GpusubError, match=r"^--sbatch gres: "):
            plan_of(request, profile_of(gpu_request="gres"))

    @pytest.mark.parametrize("where", ["job_name", "account", "output"])
    def test_a_line_break_is_refused(self, request_of: Make, plan_of: Make, where: str) -> None:
        with pytest.raises(GpusubError, match=r"a line break cannot stand in it; remove it$"):
            plan_of(request_of(settings={where: "a\nb"}))

    def test_a_line_break_in_the_working_directory_is_refused(
        self, request_of: Make, plan_of: Make
    ) -> None:
        with pytest.raises(GpusubError, match=r"^--chdir '/a\\nb': "):
            plan_of(request_of(cwd=Path("/a\nb")))

    def test_on_this_machine_there_are_none(self, request_of: Make, plan_of: Make) -> None:
        plan = plan_of(request_of(local=True, cwd=Path("/a\nb")))
        assert (plan.options, plan.local) == ((), True)


class TestLog:
    @pytest.mark.parametrize(
        ("run_dir", "option"),
        [
            ("/w/.gpusub/t", "/w/.gpusub/t/log.out"),
            ("/w/50%/%j/.gpusub/t", "/w/50%%/%%j/.gpusub/t/log.out"),
            # Any backslash turns Slurm's patterns off, and is itself to be doubled.
            ("/w/a\\b/%j/.gpusub/t", "/w/a\\\\b/%j/.gpusub/t/log.out"),
        ],
    )
    def test_in_a_path_of_ours_every_character_is_itself(
        self, request_of: Make, plan_of: Make, run_dir: str, option: str
    ) -> None:
        plan = plan_of(request_of(), run_dir=Path(run_dir))
        assert plan.log == Value(f"{run_dir}/log.out", BUILT_IN)
        assert Option("output", option, BUILT_IN) in plan.options

    @pytest.mark.parametrize(
        ("asked", "path"),
        [
            ("x.out", "{work}/x.out"),
            ("logs/%x-%j.out", "{work}/logs/%x-%j.out"),
            ("/abs/%A_%a.log", "/abs/%A_%a.log"),
            ("../x", "{work}/../x"),
            ("a b/x$y", "{work}/a b/x$y"),
        ],
    )
    def test_the_users_own_is_a_pattern(
        self, request_of: Make, plan_of: Make, work: Path, asked: str, path: str
    ) -> None:
        plan = plan_of(request_of(settings={"output": asked}))
        path = path.format(work=work)
        assert plan.log == Value(path, "option --output")
        assert Option("output", path, "option --output") in plan.options

    def test_it_is_found_from_the_jobs_working_directory(
        self, request_of: Make, plan_of: Make, tmp_path: Path
    ) -> None:
        plan = plan_of(request_of(settings={"output": "x.out"}, chdir=tmp_path))
        assert plan.log.value == f"{tmp_path}/x.out"

    @pytest.mark.parametrize("asked", ["%j/x.out", "logs/%x/a", "/a%/b", "%u/%j"])
    def test_a_pattern_in_a_directory_is_refused(
        self, request_of: Make, plan_of: Make, asked: str
    ) -> None:
        with pytest.raises(GpusubError) as refused:
            plan_of(request_of(settings={"output": asked}))
        assert str(refused.value).startswith(
            f"option --output: {asked!r}: Slurm makes no directories"
        )

    @pytest.mark.parametrize("asked", ["logs/", "/", ""])
    def test_a_directory_is_refused(self, request_of: Make, plan_of: Make, asked: str) -> None:
        with pytest.raises(GpusubError) as refused:
            plan_of(request_of(settings={"output": asked}))
        assert str(refused.value) == (
            f"option --output: {asked!r} is a directory; name a file in it"
        )

    def test_a_local_run_has_its_own_place(self, request_of: Make, plan_of: Make) -> None:
        with pytest.raises(GpusubError, match=r"^option --output: a local run logs to"):
            plan_of(request_of(local=True, settings={"output": "x"}))


class TestVariables:
    def stated(self, plan: Plan) -> dict[str, str]:
        return {v.name: v.value for v in plan.variables}

    def origins(self, plan: Plan) -> dict[str, str]:
        return {v.name: v.origin for v in plan.variables}

    @pytest.mark.parametrize(
        ("settings", "threads", "origin"),
        [
            ({}, "24", "192 CPUs for 8 workers"),
            ({"gpus_per_node": "1"}, "24", "24 CPUs for 1 worker"),
            ({"gpus_per_node": "8", "cpus_per_task": "4"}, "1", "4 CPUs for 8 workers"),
            ({"gpus_per_node": "0", "cpus_per_task": "6"}, "6", "6 CPUs for 1 worker"),
        ],
    )
    def test_a_workers_share_of_the_threads(
        self, request_of: Make, plan_of: Make, settings: dict[str, str], threads: str, origin: str
    ) -> None:
        plan = plan_of(request_of(settings=settings))
        assert self.stated(plan) == {"OMP_NUM_THREADS": threads}
        assert self.origins(plan) == {"OMP_NUM_THREADS": origin}

    def test_the_users_own_threads_stay(self, request_of: Make, plan_of: Make) -> None:
        assert self.stated(plan_of(request_of(), environ={"OMP_NUM_THREADS": "3"})) == {}

    def test_the_sites_fabric(self, request_of: Make, plan_of: Make, profile_of: Make) -> None:
        profile = profile_of(fabric={"type": "roce", "hcas": ("a:1", "b:1"), "service_level": 0})
        plan = plan_of(request_of(), profile, environ={"OMP_NUM_THREADS": "1"})
        assert self.stated(plan) == {"NCCL_IB_HCA": "a:1,b:1", "NCCL_IB_SL": "0"}
        assert self.origins(plan)["NCCL_IB_HCA"] == f"{SITE}: fabric.hcas"

    def test_later_sources_win(self, request_of: Make, plan_of: Make, profile_of: Make) -> None:
        profile = profile_of(
            fabric={"service_level": 1, "pkey": 1, "gid_index": 1, "traffic_class": 1},
            env={"NCCL_IB_PKEY": "2", "NCCL_DEBUG": "INFO", "A": "site", "B": "site"},
        )
        # What the user exported of NCCL beats the site's, and is left in the environment.
        environ = {"NCCL_IB_GID_INDEX": "3", "NCCL_DEBUG": "WARN", "A": "exported"}
        plan = plan_of(
            request_of(nccl={"NCCL_IB_TC": "4"}, env={"B": "asked", "NCCL_IB_SL": "5"}),
            profile,
            environ={**environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.stated(plan) == {
            "NCCL_IB_PKEY": "2",
            "A": "site",
            "NCCL_IB_TC": "4",
            "B": "asked",
            "NCCL_IB_SL": "5",
        }
        assert self.origins(plan) == {
            "NCCL_IB_PKEY": SITE,
            "A": SITE,
            "NCCL_IB_TC": "option --nccl",
            "B": "option --env",
            "NCCL_IB_SL": "option --env",
        }

    def test_an_option_beats_what_is_exported(self, request_of: Make, plan_of: Make) -> None:
        environ = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3"}
        request = request_of(nccl={"NCCL_DEBUG": "INFO"}, env={"OMP_NUM_THREADS": "4"})
        assert self.stated(plan_of(request, environ=environ)) == {
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "4",
        }

    def test_a_bare_name_is_as_in_the_environment(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        request = request_of(env={"A": None})
        environ = {"OMP_NUM_THREADS": "1"}
        plan = plan_of(
            request, profile_of(env={"A": "site", "B": "b"}), environ={**environ, "A": "x"}
        )
        assert self.stated(plan) == {"B": "b"}
        with pytest.raises(GpusubError) as refused:
            plan_of(request, environ=environ)
        assert str(refused.value) == "--env A: not set in your environment; write A=VALUE"


class TestSecrets:
    @pytest.fixture
    def profile(self, profile_of: Make) -> Profile:
        made: Profile = profile_of(
            env={"WANDB_API_KEY": "hunter2", "HF_TOKEN": "hunter2", "A": "b"}
        )
        return made

    def test_they_are_named_and_not_written_down(
        self, request_of: Make, plan_of: Make, profile: Profile
    ) -> None:
        plan = plan_of(request_of(env={"MY_SECRET": "hunter2", "HF_TOKEN": "hunter3"}), profile)
        assert set(plan.secrets) == {"WANDB_API_KEY", "HF_TOKEN", "MY_SECRET"}
        assert "hunter" not in json.dumps(plain(plan), default=str)
        assert {v.name for v in plan.variables} == {"OMP_NUM_THREADS", "A"}

    def test_they_travel_in_the_environment(self, request_of: Make, profile: Profile) -> None:
        from gpusub.plan import secrets

        request = request_of(env={"HF_TOKEN": "hunter3", "B": "b"})
        assert secrets(request, profile) == {"WANDB_API_KEY": "hunter2", "HF_TOKEN": "hunter3"}

    def test_a_bare_name_keeps_the_users_own(
        self, request_of: Make, plan_of: Make, profile: Profile
    ) -> None:
        from gpusub.plan import secrets

        request = request_of(env={"HF_TOKEN": None})
        assert secrets(request, profile) == {"WANDB_API_KEY": "hunter2"}
        assert plan_of(request, profile, environ={"HF_TOKEN": "mine"}).secrets == ("WANDB_API_KEY",)

    @pytest.mark.parametrize("export", ["NONE", "NIL", "PATH", "A=1,PATH"])
    def test_one_that_would_not_arrive_is_refused(
        self, request_of: Make, plan_of: Make, profile: Profile, export: str
    ) -> None:
        environ = {"SBATCH_EXPORT": export, "HF_TOKEN": "x"}
        for request, stated in (
            (request_of(), profile),
            (request_of(env={"HF_TOKEN": None}), None),
        ):
            with pytest.raises(
                GpusubError, match=f"^environment SBATCH_EXPORT={export}: .*HF_TOKEN"
            ):
                plan_of(request, stated, environ=environ)
        assert plan_of(request_of(), environ=environ)
        assert plan_of(request_of(), profile, environ={"SBATCH_EXPORT": "ALL,A=1"})
        # Inside a job these variables are the outer job's, and dropped.
        assert plan_of(request_of(), profile, environ={**environ, "SLURM_JOB_ID": "1"})
        assert plan_of(request_of(local=True), profile, environ=environ)


class TestRendezvous:
    def test_c10d_unless_said_otherwise(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        assert plan_of(request_of()).rendezvous == Value("c10d", BUILT_IN)
        static = profile_of(rendezvous="static")
        assert plan_of(request_of(), static).rendezvous == Value("static", SITE)
        request = request_of(settings={"rendezvous": "c10d"})
        assert plan_of(request, static).rendezvous == Value("c10d", "option --rendezvous")

    def test_static_cannot_restart_over_several_nodes(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        several = Value(Nodes(1, 2), "option --nodes")
        request = request_of(max_restarts=3, nodes=several)
        with pytest.raises(GpusubError) as refused:
            plan_of(request, profile_of(rendezvous="static"))
        assert str(refused.value) == (
            f"--max-restarts 3 with the static rendezvous ({SITE}): only the failed node would "
            "restart and the others wait for ever; use --rdzv c10d"
        )
        assert plan_of(request).max_restarts == 3
        one = replace(request, nodes=Value(Nodes(1, 1), "x"))
        assert plan_of(one, profile_of(rendezvous="static")).max_restarts == 3

    def test_a_command_has_none_and_does_not_restart(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        command = Program("command", "nvidia-smi", ("topo",))
        plan = plan_of(request_of(command), profile_of(rendezvous="static"))
        assert (plan.rendezvous.value, plan.python) == ("none", None)
        with pytest.raises(GpusubError, match=r"^--max-restarts: a command after -- is started"):
            plan_of(request_of(command, max_restarts=1))


class TestProgram:
    @pytest.mark.parametrize(
        ("program", "target"),
        [
            (Program("script", "a/train.py", ("b",)), "{work}/a/train.py"),
            (Program("script", "/abs/train.py"), "/abs/train.py"),
            (Program("module", "pkg.train"), "pkg.train"),
            (Program("command", "./run.sh"), "./run.sh"),
        ],
    )
    def test_a_script_is_found_from_another_directory(
        self,
        request_of: Make,
        plan_of: Make,
        work: Path,
        tmp_path: Path,
        program: Program,
        target: str,
    ) -> None:
        plan = plan_of(request_of(program, chdir=tmp_path))
        assert plan.program == replace(program, target=target.format(work=work))
        assert plan.cwd == str(tmp_path)
        assert f"--chdir={tmp_path}" in [option.text for option in plan.options]
        assert plan_of(request_of(program)).program == program


def test_what_of_sbatchs_variables_is_left_out_is_said(request_of: Make, plan_of: Make) -> None:
    environ = {"SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "0-3", "SBATCH_PARTITION": "x"}
    warnings = plan_of(request_of(), environ=environ).warnings
    assert [warning.split()[0] for warning in warnings] == ["SBATCH_ARRAY_INX", "SBATCH_WAIT"]
    assert plan_of(request_of(), environ={**environ, "SLURM_JOB_ID": "1"}).warnings == ()
    assert plan_of(request_of(local=True), environ=environ).warnings == ()


def test_the_same_input_gives_the_same_plan(
    request_of: Make, plan_of: Make, profile_of: Make
) -> None:
    request, profile = request_of(env={"A": "b"}), profile_of(env={"C": "d"}, setup=["x"])
    assert plan_of(request, profile) == plan_of(request, profile)
    assert plan_of(request, profile).setup == ("x",)


def test_the_template(request_of: Make, plan_of: Make, profile_of: Make) -> None:
    assert plan_of(request_of()).template == Value("torchrun", BUILT_IN)
    profile = profile_of(template="/site.j2")
    assert plan_of(request_of(), profile).template == Value("/site.j2", SITE)
    request = request_of(settings={"template": "./mine.j2"})
    assert plan_of(request, profile).template == Value("./mine.j2", "option --template")


def test_the_plan_is_json(request_of: Make, plan_of: Make, profile_of: Make) -> None:
    plan = plan_of(
        request_of(Program("script", "t.py", ("\udcff", "é\0"))),
        profile_of(fabric={"hcas": ("a",)}, env={"A": "b"}),
    )
    read = json.loads(json.dumps(plain(plan)))
    assert read["program"] == {"kind": "script", "target": "t.py", "args": ["\udcff", "é\0"]}
    assert read["resources"]["nodes"] == {"value": {"least": 1, "most": 1}, "origin": BUILT_IN}
    assert {"name": "A", "value": "b", "origin": SITE} in read["variables"]


def test_this_machine(request_of: Make, plan_of: Make) -> None:
    plan = plan_of(request_of(local=True), facts=Machine(0, 4))
    assert (plan.resources.workers, plan.options, plan.local) == (1, (), True)


class TestFabricByNode:
    def test_each_block_is_kept_apart_with_its_origin(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        profile = profile_of(
            fabric={"pkey": 1},
            fabrics={"h100": {"service_level": 5, "type": "infiniband"}, "ndr": {"pkey": 2}},
        )
        plan = plan_of(request_of(), profile)
        assert Variable("NCCL_IB_PKEY", "1", f"{SITE}: fabric.pkey") in plan.variables
        assert plan.fabrics == (
            NodeFabric(
                "h100", (Variable("NCCL_IB_SL", "5", f"{SITE}: fabric.h100.service_level"),)
            ),
            NodeFabric("ndr", (Variable("NCCL_IB_PKEY", "2", f"{SITE}: fabric.ndr.pkey"),)),
        )
        assert plan.warnings == ()
        read = json.loads(json.dumps(plain(plan)))["fabrics"]
        assert read[0]["variables"][0]["name"] == "NCCL_IB_SL"

    def test_what_beats_the_profile_is_in_no_block(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        profile = profile_of(
            fabrics={"h100": {"service_level": 5, "traffic_class": 6, "pkey": 7, "gid_index": 8}},
            env={"NCCL_IB_PKEY": "1"},
        )
        request = request_of(nccl={"NCCL_IB_SL": "2"}, env={"NCCL_IB_GID_INDEX": "4"})
        plan = plan_of(request, profile, environ={"NCCL_IB_TC": "3"})
        assert plan.fabrics == (NodeFabric("h100", ()),)

    def test_blocks_for_none_of_the_nodes_are_told_of(
        self, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        plan = plan_of(request_of(), profile_of(fabrics={"H100": {"pkey": 1}, "a100": {}}))
        assert plan.warnings == (
            "profile p: none of its fabrics (H100, a100) is for partition gpu; GPU types and "
            "features there: h100, ndr",
        )

    def test_this_machine_has_none(self, request_of: Make, plan_of: Make, profile_of: Make) -> None:
        plan = plan_of(request_of(local=True), profile_of(fabrics={"h100": {"pkey": 1}}))
        assert plan.fabrics == ()
