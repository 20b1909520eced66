from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from gpusub import command
from gpusub.cli import SBATCH_VARIABLES, run, submit
from gpusub.errors import GpusubError
from gpusub.request import BUILT_IN, NOT_PASSED_ON, Nodes, Program, Request, Value

Capture = pytest.CaptureFixture[str]


def left(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture(autouse=True)
def train(work: Path) -> Path:
    (work / "train.py").write_text("print('hello')\n")
    return work / "train.py"


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Request]:
    """Return what a command line asks for, without doing it."""
    found: list[Request] = []

    def note(request: Request, params: object) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr(command, "submit_command", note)

    def read(*argv: str) -> Request:
        assert run(argv) == 0
        return found[-1]

    return read


class TestRefusals:
    """Nothing is done: one line on stderr says what is wrong and what to write."""

    def refused(self, argv: Sequence[str], work: Path, capfd: Capture) -> str:
        before = left(work)
        assert run(argv) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.endswith("\n")
        assert len(err[:-1].splitlines()) == 1
        assert left(work) == before
        assert err.startswith("gpusub: error: ")
        return err.removeprefix("gpusub: error: ").rstrip("\n")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--local", "nothing to run; write a script, as in: gpusub train.py (--help for all)"),
            ("submit", "nothing to run; write a script, as in: gpusub train.py (--help for all)"),
            ("--local nope.py", "'nope.py': no such file; name the Python script to run"),
            ("--local a/b.py", "'a/b.py': no such file; name the Python script to run"),
            ("--local .", "'.': is a directory; name the Python script to run"),
            ("--local -", "'-': no such file; name the Python script to run"),
            ("--local " + "x" * 300, f"'{'x' * 300}': no such file; name the Python script to run"),
            ("--local -m", "-m: no module behind it; write -m MODULE ARGS…"),
            ("--local --", "--: no command behind it; write -- COMMAND ARGS…"),
            (
                "-N x t.py",
                "option --nodes: 'x': write a number of nodes, or MIN-MAX, as in 2 or 2-4",
            ),
            ("-N", "Option '-N' requires an argument."),
            ("--nodes", "Option '--nodes' requires an argument."),
            ("--exclusive=1 t.py", "Option '--exclusive' does not take a value."),
            (
                "--local -N 2 train.py",
                "option --nodes: 2 nodes need Slurm, and this runs on this machine alone",
            ),
            (
                "--follo t.py",
                "no option --follo; did you mean --follow? an option of sbatch goes as",
            ),
            ("--zzz=1 t.py", "no option --zzz; an option of sbatch goes as --sbatch zzz"),
            (
                "-n 4 t.py",
                "no option -n; an option of sbatch goes as --sbatch KEY, by its long name",
            ),
            ("--ntasks 4 t.py", f"--ntasks: {NOT_PASSED_ON['ntasks']}"),
            ("--array=1-3 t.py", "--array: job arrays are not supported"),
            ("--wrap x t.py", "--wrap: write the command after --"),
            ("-t 4h t.py", "option --time: '4h' is no time limit; write hours:minutes:seconds"),
            ("--sbatch nodes=2 t.py", "--sbatch nodes: use --nodes"),
            ("--sbatch N=2 t.py", "--sbatch N=2: write KEY or KEY=VALUE with sbatch's long name"),
            ("--env =x t.py", "--env: '' is no variable's name; write NAME=VALUE"),
            ("--local --env NOPE train.py", "--env NOPE: not set in your environment; write NOPE="),
            ("--nccl IB_SL t.py", "--nccl IB_SL: write NAME=VALUE, as in IB_SL=5"),
            ("--nccl IB-SL=5 t.py", "--nccl: 'IB-SL' is no variable's name; write NAME=VALUE"),
            (
                "--rdzv etcd t.py",
                "Invalid value for '--rdzv': 'etcd' is not one of 'c10d', 'static'.",
            ),
            (
                "--max-restarts -1 t.py",
                "Invalid value for '--max-restarts': -1 is not in the range",
            ),
            (
                "--max-restarts x t.py",
                "Invalid value for '--max-restarts': 'x' is not a valid integer",
            ),
            ("--chdir nowhere t.py", "option --chdir: no directory "),
            ("--local --python nope train.py", "--python nope: no such program; name a Python"),
            ("--local --profile nope train.py", "--profile: no profile 'nope': there is none of "),
            ("--local --template nope train.py", "option --template: no template 'nope.sh.j2'; "),
            (
                "--local --gpus-per-node x train.py",
                "option --gpus-per-node: 'x' is no number of GPUs",
            ),
            ("--local -c 0 train.py", "option --cpus-per-task: '0' is no number of CPUs a node"),
            ("--local -o x.log train.py", "option --output: a local run logs to its run directory"),
            ("--local --max-restarts 1 -- sh", "--max-restarts: a command after -- is started by"),
            ("--parsable --json t.py", "--parsable and --json exclude each other; leave one out"),
            ("--parsable --dry-run t.py", "--parsable and --dry-run exclude each other"),
            ("--parsable --follow t.py", "--parsable and --follow exclude each other"),
            ("--json --follow t.py", "--follow and --json exclude each other"),
            ("--dry-run --follow t.py", "--follow and --dry-run exclude each other"),
            ("--dry-run --wait t.py", "--wait and --dry-run exclude each other"),
        ],
    )
    def test_by_option(self, argv: str, message: str, work: Path, capfd: Capture) -> None:
        assert self.refused(argv.split(), work, capfd).startswith(message)

    @pytest.mark.parametrize(
        ("variable", "value", "message"),
        [
            ("GPUSUB_NODES", "x", "environment GPUSUB_NODES: 'x': write a number of nodes"),
            ("GPUSUB_TIME", "x", "environment GPUSUB_TIME: 'x' is no time limit"),
            ("SBATCH_TIMELIMIT", "x", "environment SBATCH_TIMELIMIT: 'x' is no time limit"),
            ("GPUSUB_GPUS_PER_NODE", "x", "environment GPUSUB_GPUS_PER_NODE: 'x' is no number"),
            ("SBATCH_GPUS_PER_NODE", "x", "environment SBATCH_GPUS_PER_NODE: 'x' is no number"),
            ("GPUSUB_CHDIR", "nowhere", "environment GPUSUB_CHDIR: no directory "),
            ("GPUSUB_TEMPLATE", "x", "environment GPUSUB_TEMPLATE: no template 'x.sh.j2'"),
            ("GPUSUB_PYTHON", "nope", "--python nope: no such program"),
            (
                "GPUSUB_EXCLUSIVE",
                "x",
                "Invalid value for '--exclusive': 'x' is not a valid boolean",
            ),
        ],
    )
    def test_by_variable(
        self,
        variable: str,
        value: str,
        message: str,
        work: Path,
        capfd: Capture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv(variable, value)
        assert self.refused(["--local", "train.py"], work, capfd).startswith(message)

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            (b"\x7fELF\x02\x01", "a.out"),
            (b"#!/bin/bash\necho\n", "run.sh"),
            (b"#!/usr/bin/env perl\n", "run"),
        ],
    )
    def test_a_program_that_python_cannot_run(
        self, content: bytes, name: str, work: Path, capfd: Capture
    ) -> None:
        (work / name).write_bytes(content)
        assert self.refused(["--local", name], work, capfd) == (
            f"{name}: no Python script; run it once a node with: gpusub -- ./{name}"
        )
        (work / "bin").mkdir()
        (work / name).rename(work / "bin" / name)
        message = self.refused(["--local", f"bin/{name}"], work, capfd)
        assert message.endswith(f"gpusub -- bin/{name}")

    @pytest.mark.parametrize(
        "content", [b"#!/usr/bin/env python3\n", b"#!/opt/python -u\n", b"x = 1\n", b""]
    )
    def test_a_script_of_any_name_is_taken(
        self, content: bytes, work: Path, requested: Callable[..., Request]
    ) -> None:
        (work / "train").write_bytes(content)
        assert requested("--local", "train").program == Program("script", "train")
        command.check_program(requested("--local", "train"))

    @pytest.mark.parametrize(
        "name", ["a\nb.py", "a\rb.py", "a\u2028b.py", "\udcff.py", "\x1b[31m.py"]
    )
    def test_on_one_line_whatever_the_name(self, name: str, work: Path, capfd: Capture) -> None:
        assert "no such file" in self.refused(["--local", name], work, capfd)

    def test_a_file_of_settings(self, work: Path, capfd: Capture) -> None:
        (work / "gpusub.yaml").write_text("profile:\n")
        assert self.refused(["--local", "train.py"], work, capfd) == (
            f"{work}/gpusub.yaml:1: profile: unknown key; did you mean 'profiles'?"
        )

    @pytest.mark.usefixtures("no_sbatch")
    def test_several_nodes_without_slurm(self, work: Path, capfd: Capture) -> None:
        assert self.refused(["-N", "2", "train.py"], work, capfd) == (
            "option --nodes: 2 nodes need Slurm, and there is no sbatch on PATH"
        )

    def test_a_working_directory_that_is_gone(self, tmp_path: Path, capfd: Capture) -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert self.refused(["--local", "train.py"], tmp_path, capfd) == (
            "the working directory is gone (No such file or directory); cd to one"
        )

    @pytest.mark.parametrize("argv", [["-v"], ["--debug"], ["-vN", "1"], ["-N1", "-v"]])
    def test_debug_shows_where_from_and_ends_the_same(
        self, argv: list[str], capfd: Capture
    ) -> None:
        assert run(["--local", *argv, "nope.py"]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert "Traceback" in err
        assert "check_program" in err
        assert err.splitlines()[-1].startswith("gpusub: error: 'nope.py': no such file")


class TestHelp:
    @pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["-N", "2", "--help"]])
    def test_it_is_on_stdout(self, argv: list[str], capfd: Capture) -> None:
        assert run(argv) == 0
        out, err = capfd.readouterr()
        assert err == ""
        assert out.startswith("Usage: gpusub ")
        for parameter in submit.params:
            assert all(name in out for name in parameter.opts)

    def test_every_example_in_it_can_be_read(
        self, capfd: Capture, requested: Callable[..., Request]
    ) -> None:
        run(["--help"])
        lines = capfd.readouterr().out.partition("Examples:")[2].splitlines()
        examples = [line.strip().split("  ")[0].split() for line in lines if line.strip()]
        assert len(examples) >= 6
        for name, *argv in examples:
            assert name == "gpusub"
            assert requested(*argv).program

    def test_the_version(self, capfd: Capture) -> None:
        assert run(["-N", "2", "--version"]) == 0
        assert capfd.readouterr().out.startswith("gpusub 0.")


# A value of each option that stands for itself in the environment.
VALUES = {
    "nodes": ("2", "2"),
    "max_restarts": ("3", 3),
    "rendezvous": ("static", "static"),
    "sbatch": ("nice=1 hold", ("nice=1", "hold")),
    "env": ("A=b", ("A=b",)),
    "nccl": ("IB_SL=5", ("IB_SL=5",)),
}
OPTIONS = [
    option
    for option in submit.params
    if isinstance(option, click.Option) and option.name not in ("module", "version", "help")
]


class TestVariables:
    @pytest.mark.parametrize("option", OPTIONS, ids=lambda option: str(option.name))
    def test_every_option_has_one(
        self, option: click.Option, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = max(option.opts, key=len)
        written, value = VALUES.get(
            option.name or "", ("1", True) if option.is_flag else ("x", "x")
        )
        monkeypatch.setenv("GPUSUB" + name[1:].replace("-", "_").upper(), written)
        context = submit.make_context("gpusub", [])
        assert context.params[option.name or ""] == value

    @pytest.mark.parametrize(
        "name",
        [
            *("GPUSUB_VERSION", "GPUSUB_MODULE", "GPUSUB_HELP", "GPUSUB_ROOT", "GPUSUB_HOME"),
            *("GPUSUB_RUN_DIR", "GPUSUB_TOKEN", "GPUSUB_DEFAULT", "GPUSUB"),
        ],
    )
    @pytest.mark.parametrize("value", ["1", "0.1.0", "/opt/gpusub"])
    def test_what_modules_and_jobs_set_beside_is_no_option(
        self,
        name: str,
        value: str,
        monkeypatch: pytest.MonkeyPatch,
        requested: Callable[..., Request],
    ) -> None:
        without = requested("train.py")
        monkeypatch.setenv(name, value)
        assert requested("train.py") == without

    @pytest.mark.parametrize("key", sorted(SBATCH_VARIABLES))
    def test_an_option_beats_ours_which_beats_sbatchs(
        self, key: str, monkeypatch: pytest.MonkeyPatch, requested: Callable[..., Request]
    ) -> None:
        option = f"--{key.replace('_', '-')}"
        assert key not in requested("train.py").settings
        monkeypatch.setenv(SBATCH_VARIABLES[key], "1")
        found = requested("train.py").settings[key]
        assert found == Value("1", f"environment {SBATCH_VARIABLES[key]}")
        monkeypatch.setenv(f"GPUSUB_{key.upper()}", "2")
        found = requested("train.py").settings[key]
        assert found == Value("2", f"environment GPUSUB_{key.upper()}")
        assert requested(option, "3", "train.py").settings[key] == Value("3", f"option {option}")

    @pytest.mark.parametrize("key", sorted(SBATCH_VARIABLES))
    def test_an_empty_one_is_none(
        self, key: str, monkeypatch: pytest.MonkeyPatch, requested: Callable[..., Request]
    ) -> None:
        monkeypatch.setenv(SBATCH_VARIABLES[key], "")
        monkeypatch.setenv(f"GPUSUB_{key.upper()}", "")
        assert key not in requested("train.py").settings

    def test_inside_a_job_sbatchs_are_the_outer_jobs(
        self, monkeypatch: pytest.MonkeyPatch, requested: Callable[..., Request]
    ) -> None:
        for name in (*SBATCH_VARIABLES.values(), "SBATCH_MEM_PER_GPU", "SLURM_JOB_ID"):
            monkeypatch.setenv(name, "1")
        assert requested("train.py").settings == {}

    @pytest.mark.parametrize("name", ["SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_CPU"])
    def test_memory_by_another_measure_is_left_to_sbatch(
        self, name: str, monkeypatch: pytest.MonkeyPatch, requested: Callable[..., Request]
    ) -> None:
        monkeypatch.setenv(name, "4G")
        assert requested("train.py").settings["mem"] == Value("", f"environment {name}")
        assert requested("--mem", "8G", "train.py").settings["mem"].value == "8G"


class TestRequest:
    def test_with_nothing_said(self, requested: Callable[..., Request], work: Path) -> None:
        assert requested("train.py", "-x", "--", "") == Request(
            program=Program("script", "train.py", ("-x", "--", "")),
            cwd=work,
            nodes=Value(Nodes(1, 1), BUILT_IN),
            run_root=work / ".gpusub",
        )

    def test_submit_may_be_said(self, requested: Callable[..., Request]) -> None:
        assert requested("submit", "-N", "2", "train.py") == requested("-N", "2", "train.py")
        assert requested("submit", "submit").program.target == "submit"

    def test_what_goes_to_sbatch(self, requested: Callable[..., Request]) -> None:
        request = requested(
            *("-x", "a", "-w", "b", "-d", "afterok:1", "--comment", "it's", "--mail-type=END"),
            *("--mail-user", "me", "--sbatch", "nice=1", "--sbatch", "hold", "train.py"),
        )
        assert request.sbatch == {
            "exclude": Value("a", "option --exclude"),
            "nodelist": Value("b", "option --nodelist"),
            "dependency": Value("afterok:1", "option --dependency"),
            "comment": Value("it's", "option --comment"),
            "mail-type": Value("END", "option --mail-type"),
            "mail-user": Value("me", "option --mail-user"),
            "nice": Value("1", "option --sbatch"),
            "hold": Value(None, "option --sbatch"),
        }

    def test_variables_for_the_program(self, requested: Callable[..., Request]) -> None:
        request = requested(
            *("--env", "A=b=c", "--env", "B", "--nccl", "IB_SL=5", "--nccl", "NCCL_DEBUG=INFO"),
            "train.py",
        )
        assert request.env == {"A": "b=c", "B": None}
        assert request.nccl == {"NCCL_IB_SL": "5", "NCCL_DEBUG": "INFO"}

    def test_paths(self, requested: Callable[..., Request], work: Path, tmp_path: Path) -> None:
        (work / "sub").mkdir()
        request = requested("--chdir", "sub", "--run-root", "~/runs", "-o", "~/x.out", "train.py")
        assert request.chdir == work / "sub"
        assert request.run_root == tmp_path / "home" / "runs"
        assert request.settings["output"].value == f"{tmp_path}/home/x.out"
        assert requested("--run-root", "../r", "train.py").run_root == tmp_path / "r"

    def test_the_working_directory_is_shown_as_the_user_came_to_it(
        self,
        requested: Callable[..., Request],
        work: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # The path behind an automounter's links may not be there on other nodes.
        (tmp_path / "link").symlink_to(work)
        monkeypatch.setenv("PWD", str(tmp_path / "link"))
        assert requested("train.py").cwd == tmp_path / "link"
        for stale in ("relative", "/", str(tmp_path / "home"), ""):
            monkeypatch.setenv("PWD", stale)
            assert requested("train.py").cwd == work


@pytest.mark.usefixtures("no_sbatch")
class TestWithoutSlurm:
    def test_a_dry_run_prints_the_script_alone_and_leaves_nothing(
        self, work: Path, capfd: Capture
    ) -> None:
        before = left(work)
        assert run(["--local", "--dry-run", "train.py", "a b"]) == 0
        out, err = capfd.readouterr()
        assert (err, left(work)) == ("", before)
        assert out.startswith("#!/bin/bash\n")
        assert "train.py 'a b'\n" in out

    def test_a_dry_run_as_json(self, work: Path, capfd: Capture) -> None:
        before = left(work)
        assert run(["--local", "--dry-run", "--json", "-c", "4", "train.py", "\udcff"]) == 0
        out, err = capfd.readouterr()
        assert (err, left(work)) == ("", before)
        plan = json.loads(out)
        assert plan["program"] == {"kind": "script", "target": "train.py", "args": ["\udcff"]}
        assert plan["resources"]["cpus_per_task"] == {
            "value": 4,
            "origin": "option --cpus-per-task",
        }

    def test_a_secret_is_nowhere(
        self, work: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "hunter2")
        (work / "gpusub.yaml").write_text(
            "default_profile: p\nprofiles: {p: {env: {MY_SECRET: hunter2}}}\n"
        )
        secret = ["--env", "HF_TOKEN=hunter2", "--env", "WANDB_API_KEY"]
        for how in (["--dry-run"], ["--dry-run", "--json"], ["--json"], []):
            show = "echo ${#HF_TOKEN} ${#WANDB_API_KEY} ${#MY_SECRET}"
            assert run(["--local", *how, *secret, "--", "sh", "-c", show]) == 0
            out, err = capfd.readouterr()
            assert "hunter2" not in out + err
            if not how:
                assert out == "7 7 7\n"
        for path in work.rglob(".gpusub/**/*"):
            assert path.is_dir() or b"hunter2" not in path.read_bytes()

    def test_where_there_is_no_slurm_it_runs_here_and_says_so(
        self, work: Path, capfd: Capture
    ) -> None:
        assert run(["--", "sh", "-c", "echo out; echo err >&2; exit 7"]) == 7
        out, err = capfd.readouterr()
        assert out == "out\nerr\n"
        told, what = err.splitlines()
        assert told == "gpusub: no sbatch on PATH: running on this machine"
        assert what.startswith("gpusub: sh on this machine")
        log = work / what.rpartition("log ")[2]
        assert log.read_text() == "out\nerr\n"
        assert left(work) == {
            "train.py",
            ".gpusub",
            ".gpusub/.gitignore",
            *(f".gpusub/{log.parent.name}" + end for end in ("", "/job.sh", "/plan.json")),
            *(
                f".gpusub/{log.parent.name}/{end}"
                for end in ("log.out", "exit_code", "ranks", "started")
            ),
        }

    def test_json_is_one_object_with_the_jobs_end(self, work: Path, capfd: Capture) -> None:
        assert run(["--local", "--json", "--", "sh", "-c", "echo out; kill -9 $$"]) == 137
        out, _ = capfd.readouterr()
        told = json.loads(out)
        assert (told["exit_code"], told["exit_source"], told["state"]) == (137, "local", "FAILED")
        assert Path(told["log"]).read_text() == "out\n"
        assert Path(told["run_dir"]).name == told["token"]

    def test_parsable_shows_no_log(self, capfd: Capture) -> None:
        assert run(["--local", "--parsable", "--", "echo", "out"]) == 0
        assert capfd.readouterr().out == ""

    def test_in_another_directory(self, work: Path, capfd: Capture) -> None:
        (work / "sub").mkdir()
        assert run(["--local", "--chdir", "sub", "--", "pwd"]) == 0
        assert capfd.readouterr().out == f"{work}/sub\n"

    def test_a_run_directory_that_cannot_be_made(self, work: Path, capfd: Capture) -> None:
        before = left(work)
        assert run(["--local", "--run-root", "train.py", "--", "true"]) == 2
        out, err = capfd.readouterr()
        assert (out, left(work)) == ("", before)
        assert "train.py/" in err
        assert "cannot be made: Not a directory; name another place with --run-root DIR" in err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "gpusub: error: interrupted\n"),
        (click.Abort(), 130, "gpusub: error: interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (GpusubError("a\nb"), 2, "gpusub: error: a b\n"),
    ],
)
def test_how_else_it_ends(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr(command, "submit_command", fail)
    assert run(["train.py"]) == code
    out, err = capfd.readouterr()
    # After ^C on the terminal's line, a new one is begun.
    assert (out, err.lstrip("\n")) == ("", says)


GPUSUB = [sys.executable, "-m", "gpusub"]


class TestAsAProcess:
    def test_its_exit_code_is_that_of_the_run(self) -> None:
        done = subprocess.run(
            [*GPUSUB, "--local", "--", "sh", "-c", "exit 9"], capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (9, b"")

    def test_a_refusal(self) -> None:
        done = subprocess.run([*GPUSUB, "--local", "nope.py"], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.count(b"\n") == 1

    @pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
    def test_bytes_that_are_no_text_come_through(self, locale: str) -> None:
        word = b"\xff\xc3\xa9 x"
        done = subprocess.run(
            [*GPUSUB, "--local", "--", "printf", b"%s|" + word, word],
            env={**os.environ, "LC_ALL": locale},
            capture_output=True,
            check=True,
        )
        assert done.stdout == word + b"|" + word

    def test_when_nobody_reads_on_the_run_goes_on(self, work: Path) -> None:
        loop = "while ! [ -e stop ]; do echo x; sleep 0.01; done; touch done"
        with subprocess.Popen(
            [*GPUSUB, "--local", "--", "sh", "-c", loop],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"x\n"
            process.stdout.close()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            (work / "stop").touch()
            assert process.wait(20) == 0
            assert b"Traceback" not in process.stderr.read()
        assert (work / "done").exists()
