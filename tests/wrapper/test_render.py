from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpusub.errors import GpusubError
from gpusub.plan import Plan
from gpusub.render import comment, headline, quote, quote_all, render, template_directory
from gpusub.request import Nodes, Program, Value

Make = Callable[..., Any]

# Whatever execve() can be given: no NUL, and bytes that are no UTF-8 as Python shows them.
ANY = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
UNDECODABLE = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"])
SPECIAL = st.sampled_from(
    [*"'\"\\$`!#%*?~[]{}();&|<> \t\n\r\x01\x1b\x7f-=0123456789nux", "$'", "\\'"]
)
WORD = st.lists(st.one_of(ANY, UNDECODABLE, SPECIAL)).map("".join)
NASTY = [
    "",
    " ",
    "a b",
    "$HOME",
    "`id`",
    "$(id)",
    "it's",
    "#x",
    "%j",
    "--",
    "-x",
    "*",
    "~",
    "64(x2)",
]
NASTY += [
    "a\\=b",
    "x\ny",
    "x\r\ny",
    "$'\\n'",
    "\\",
    "\\'",
    "'\n'",
    "é\n\u2028",
    "\udcff\n",
    "{{ 7*7 }}",
]
NASTY += [
    "{% raw %}",
    "{# x #}",
    "\x1b[31m",
    "\x7f\x01" + "7",
    "!x\n",
    "$'\x01'",
    "a=b",
    "$$",
    "\x80\n",
]


def dumped(output: bytes) -> list[str]:
    assert output.endswith(b"\0")
    return [os.fsdecode(word) for word in output[:-1].split(b"\0")]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quote") / "script"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
class TestQuote:
    def read_by_bash(self, words: list[str], script: Path, locale: str) -> list[str]:
        text = f"printf '%s\\0' {quote_all(words)}\n"
        assert len(re.findall(r"[\x00-\x1f\x7f]", text)) == 1  # its end, and nothing in between
        script.write_bytes(os.fsencode(text))
        done = subprocess.run(
            ["bash", script], env={"LC_ALL": locale}, capture_output=True, check=True
        )
        assert done.stderr == b""
        return dumped(done.stdout)

    @given(words=st.lists(WORD, min_size=1, max_size=40))
    @example(words=NASTY)
    @settings(max_examples=150)
    def test_bash_reads_back_what_was_quoted(
        self, script: Path, locale: str, words: list[str]
    ) -> None:
        found = self.read_by_bash(words, script, locale)
        assert [os.fsencode(word) for word in found] == [os.fsencode(word) for word in words]

    def test_every_character_in_every_neighbourhood(self, script: Path, locale: str) -> None:
        characters = [chr(code) for code in range(1, 256)] + [
            chr(0xDC00 + c) for c in range(128, 256)
        ]
        words = [
            word for c in characters for word in (c, c + "\n", "7" + c + "7\n", "'" + c + "\\\n")
        ]
        assert self.read_by_bash(words, script, locale) == words

    def test_a_long_word(self, script: Path, locale: str) -> None:
        words = ["x" * 200_000, "\n" * 100_000, "'\\\n" * 30_000]
        assert self.read_by_bash(words, script, locale) == words


def test_other_values_are_quoted_as_their_text() -> None:
    assert (quote(5), quote(None), quote(Path("a b"))) == ("5", "None", "'a b'")


@given(text=st.text())
def test_a_comment_stays_on_its_line(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f]", comment(text))
    assert len(comment(text)) == len(text)


PYTHON = """\
#!/bin/sh
# Stands in for Python with torch: says its version, starts what torch.distributed.run is to
# start, and for a program shows the words that it got.
case "$1" in
  -c)
    if [ $# -gt 2 ]; then while [ "$1" != -- ]; do shift; done; shift; exec "$@"; fi
    echo "a warning" >&2; echo "Python 3.11.7, torch 2.13.0" ;;
  *) printf '%s\\0' "$@" >"$GPUSUB_TEST_OUT" ;;
esac
"""


class Runner:
    """Renders a plan into its run directory and runs it as gpusub does."""

    def __init__(self, plan_of: Make, request_of: Make, place: Path) -> None:
        self.plan_of, self.request_of, self.place = plan_of, request_of, place
        self.out = place / "out"

    def plan(self, program: Program, directory: str = "run", **options: Any) -> Plan:
        run_dir = self.place / directory / "20261130-191500-4f3a9c81"
        if not run_dir.is_dir():
            run_dir.mkdir(parents=True)
            python = run_dir.parent / "python"
            python.write_text(PYTHON)
            python.chmod(0o755)
        plan: Plan = self.plan_of(
            self.request_of(program, local=True),
            python=str(run_dir.parent / "python"),
            run_dir=run_dir,
            **options,
        )
        return plan

    def run(
        self, plan: Plan, *role: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        script = Path(plan.run_dir) / "job.sh"
        text = render(plan)
        assert "\r" not in text
        assert "\0" not in text
        script.write_bytes(os.fsencode(text))
        self.out.unlink(missing_ok=True)
        usual = {"PATH": os.environ["PATH"], "GPUSUB_TEST_OUT": str(self.out)}
        return subprocess.run(
            ["/bin/bash", script, *role],
            env={**usual, **(env or {})},
            capture_output=True,
            check=False,
        )

    def words(self, plan: Plan, *role: str) -> list[bytes]:
        done = self.run(plan, *role, env={"GPUSUB_RUN_DIR": plan.run_dir})
        assert (done.returncode, done.stderr) == (0, b"")
        return self.out.read_bytes().split(b"\0")[:-1]


@pytest.fixture
def runner(plan_of: Make, request_of: Make, tmp_path: Path) -> Runner:
    return Runner(plan_of, request_of, tmp_path)


def encoded(*words: str) -> list[bytes]:
    return [os.fsencode(word) for word in words]


SLOW = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestTheProgramsWords:
    @given(args=st.lists(WORD))
    @example(args=NASTY)
    @SLOW
    def test_a_script(self, runner: Runner, args: list[str]) -> None:
        plan = runner.plan(Program("script", "train.py", tuple(args)))
        assert runner.words(plan, "worker") == encoded("-u", "train.py", *args)

    @given(args=st.lists(WORD))
    @example(args=NASTY)
    @SLOW
    def test_a_module(self, runner: Runner, args: list[str]) -> None:
        plan = runner.plan(Program("module", "pkg.train", tuple(args)))
        assert runner.words(plan, "worker") == encoded("-u", "-m", "pkg.train", *args)

    @given(args=st.lists(WORD))
    @example(args=NASTY)
    @SLOW
    def test_a_command(self, runner: Runner, args: list[str]) -> None:
        command = Program("command", "/usr/bin/printf", ("%s\\0", "first", *args))
        done = runner.run(runner.plan(command), "worker")
        assert (done.returncode, done.stderr) == (0, b"")
        assert encoded(*dumped(done.stdout)) == encoded("first", *args)

    @pytest.mark.parametrize("kind", ["script", "module"])
    def test_through_the_whole_launch(self, runner: Runner, kind: Any) -> None:
        # torch.distributed.run would take "--" and "$$" out of them.
        plan = runner.plan(Program(kind, "train", tuple(NASTY)))
        mark = ["-m"] if kind == "module" else []
        assert runner.words(plan) == encoded("-u", *mark, "train", *NASTY)

    def test_a_command_through_the_whole_launch(self, runner: Runner) -> None:
        plan = runner.plan(Program("command", "/usr/bin/printf", ("%s\\0", *NASTY)))
        assert dumped(runner.run(plan).stdout) == NASTY

    @pytest.mark.parametrize("target", ["-x", "-a", "--", "", "a b"])
    def test_a_command_of_any_name_is_looked_for(self, runner: Runner, target: str) -> None:
        done = runner.run(runner.plan(Program("command", target, ("x",))), "worker")
        assert done.returncode == 127
        assert b"not found" in done.stderr

    @given(
        name=st.text(
            st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=40
        )
    )
    @example(name="a b'c\"d$HOME%j\n\\é\r`id`")
    @example(name="{{ 7*7 }}")
    @SLOW
    def test_in_a_directory_of_any_name(self, runner: Runner, name: str) -> None:
        directory = f"in {name}"
        if len(directory.encode()) > 200:
            return
        target = str(runner.place / directory / "train.py")
        plan = runner.plan(Program("script", target, ("a",)), directory)
        assert runner.words(plan) == encoded("-u", target, "a")

    def test_template_text_in_a_value_is_a_value(self, runner: Runner) -> None:
        nasty = "{{ 7919*7907 }}{% raw %}{# x"
        plan = runner.plan(Program("script", nasty, (nasty,)), environ={"OMP_NUM_THREADS": "1"})
        text = render(replace(plan, setup=(f"echo '{nasty}'",), profile=nasty))
        assert text.count(nasty) == 5  # headline, profile, setup, target and argument
        assert "62615533" not in text


class TestLocalRun:
    def test_variables_and_setup_reach_the_program(
        self, runner: Runner, request_of: Make, plan_of: Make, profile_of: Make
    ) -> None:
        show = (
            'printf "%s\\0" "$A" "$B" "$C" "$OMP_NUM_THREADS" "$NODE_RANK" "$NNODES" "$MASTER_ADDR"'
        )
        plan = runner.plan(
            Program("command", "sh", ("-c", show)),
            profile=profile_of(
                env={"A": "it's\n$HOME", "B": "\\"}, setup=["export C=c; D=d", "false"]
            ),
        )
        done = runner.run(plan)
        assert dumped(done.stdout) == ["it's\n$HOME", "\\", "c", "8", "0", "1", "127.0.0.1"]
        assert (done.returncode, done.stderr) == (0, b"")

    def test_its_exit_code_comes_out(self, runner: Runner) -> None:
        assert runner.run(runner.plan(Program("command", "sh", ("-c", "exit 7")))).returncode == 7

    def test_the_python_is_said_on_one_line(self, runner: Runner) -> None:
        plan = runner.plan(Program("script", "train.py"))
        said = runner.run(plan).stdout.decode().splitlines()
        python = plan.python.value if plan.python else ""
        assert len(said) == 1
        assert said[0].endswith(f": {python} (Python 3.11.7, torch 2.13.0)")

    @pytest.mark.parametrize(
        ("python", "says"),
        [
            (
                "#!/bin/sh\necho 'Python 3.9.2, no torch'\n",
                "(Python 3.9.2, no torch); install torch",
            ),
            ("#!/bin/sh\necho first >&2; echo last >&2; exit 3\n", " does not start: last"),
            (None, "no program "),
        ],
    )
    def test_a_python_that_will_not_do_ends_the_run_with_a_reason(
        self, runner: Runner, python: str | None, says: str
    ) -> None:
        plan = runner.plan(Program("script", "train.py"))
        assert plan.python is not None
        if python is None:
            Path(plan.python.value).unlink()
        else:
            Path(plan.python.value).write_text(python)
        done = runner.run(plan)
        assert done.returncode == 127
        assert says in done.stdout.decode()
        assert len(done.stdout.splitlines()) == 1
        assert not runner.out.exists()


class TestRanks:
    """Rank 0 speaks in the job's log, each other rank in a file of its own."""

    @pytest.fixture
    def plan(self, runner: Runner) -> Plan:
        plan = runner.plan(Program("script", "train.py"))
        assert plan.python is not None
        Path(plan.python.value).write_text("#!/bin/sh\necho out; echo err >&2\n")
        (Path(plan.run_dir) / "ranks").mkdir()
        return plan

    def ranks(self, plan: Plan) -> dict[str, str]:
        return {path.name: path.read_text() for path in Path(plan.run_dir, "ranks").iterdir()}

    @pytest.mark.parametrize("env", [{"RANK": "0"}, {}])
    def test_the_first(self, runner: Runner, plan: Plan, env: dict[str, str]) -> None:
        done = runner.run(plan, "worker", env=env)
        assert (done.stdout, done.stderr, self.ranks(plan)) == (b"out\n", b"err\n", {})

    @pytest.mark.parametrize("rank", ["1", "10", "007"])
    def test_the_others(self, runner: Runner, plan: Plan, rank: str) -> None:
        for _ in range(2):  # a requeued job goes on in the same file
            done = runner.run(plan, "worker", env={"RANK": rank})
            assert (done.stdout, done.stderr) == (b"", b"")
        assert self.ranks(plan) == {f"{rank}.log": "out\nerr\n" * 2}

    def shown(self, runner: Runner, plan: Plan, **logs: tuple[int, bytes]) -> str:
        """Return what is shown of a run whose ranks last wrote so many seconds after its start."""
        run_dir = Path(plan.run_dir)
        (run_dir / "started").touch()
        os.utime(run_dir / "started", (1000, 1000))
        for rank, (after, content) in logs.items():
            path = run_dir / "ranks" / f"{rank[1:]}.log"
            path.write_bytes(content)
            os.utime(path, (1000 + after, 1000 + after))
        done = runner.run(plan, "failure")
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()

    def test_the_first_that_failed_is_shown(self, runner: Runner, plan: Plan) -> None:
        shown = self.shown(
            runner,
            plan,
            r1=(5, b"all well\n"),
            r2=(7, b"Traceback (most recent call last)\nValueError: late\n"),
            r3=(6, b"a\0b\n" * 30 + b"ValueError: first\n"),
            r4=(-5, b"ValueError: of an earlier attempt\n"),
        )
        head, *lines = shown.splitlines()
        assert head == "gpusub: rank 3 ended with (all of it is in ranks/3.log):"
        assert lines[-1] == "ValueError: first"
        assert len(lines) == 12

    def test_where_none_failed_nothing_is_shown(self, runner: Runner, plan: Plan) -> None:
        assert self.shown(runner, plan) == ""
        assert self.shown(runner, plan, r1=(5, b"all well\n")) == ""
        assert self.shown(runner, plan, r1=(-5, b"ValueError: of an earlier attempt\n")) == ""


class TestLook:
    """What each node prints before the launch; the batch role reads it word by word."""

    def look(self, plan: Plan, runner: Runner, port: int) -> list[str]:
        env = {"SLURM_PROCID": "3", "SLURMD_NODENAME": "gpu-004"}
        done = runner.run(plan, "look", str(port), env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"\n") == 1
        mark, *words = done.stdout.decode().split()
        assert mark == "gpusub-look"
        return words

    @pytest.fixture
    def plan(self, runner: Runner, request_of: Make, plan_of: Make) -> Plan:
        local = runner.plan(Program("script", "train.py"))
        assert local.python is not None
        made: Plan = plan_of(request_of(), python=local.python.value, run_dir=Path(local.run_dir))
        return made

    def test_one_line_whatever_python_says_beside(self, runner: Runner, plan: Plan) -> None:
        rank, name, port, status, *text = self.look(plan, runner, 20000)
        assert (rank, name, status) == ("3", "gpu-004", "ok")
        assert " ".join(text).endswith("/python (Python 3.11.7, torch 2.13.0)")
        assert 10000 <= int(port) < 29000

    def test_a_port_in_use_is_passed_over(self, runner: Runner, plan: Plan) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            busy = taken.getsockname()[1]
            if not 10000 <= busy < 28999:
                pytest.skip("the kernel hands out other ports here")
            assert int(self.look(plan, runner, busy)[2]) == busy + 1

    def test_the_last_port_is_followed_by_the_first(self, runner: Runner, plan: Plan) -> None:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", 28999))
            taken.listen()
            assert int(self.look(plan, runner, 28999)[2]) == 10000

    def test_a_python_without_torch_is_bad(self, runner: Runner, plan: Plan) -> None:
        assert plan.python is not None
        Path(plan.python.value).write_text("#!/bin/sh\necho 'Python 3.9.2, no torch'\n")
        assert self.look(plan, runner, 20000)[3] == "bad"


def variants(plan_of: Make, request_of: Make, profile_of: Make) -> dict[str, Plan]:
    programs = {
        "script": Program("script", "a b/train.py", tuple(NASTY)),
        "module": Program("module", "pkg.train", ("--lr", "1")),
        "command": Program("command", "nvidia-smi", ("topo", "-m")),
    }
    profiles = {
        "plain": profile_of(),
        "static": profile_of(rendezvous="static"),
        "full": profile_of(
            env={"HF_TOKEN": "hunter2", "A": "it's\n"},
            fabric={"hcas": ("mlx5_0:1",), "service_level": 5},
            setup=["module load cuda", "export A=b"],
        ),
    }
    made = {}
    for local in (False, True):
        for kind, program in programs.items():
            for name, profile in profiles.items():
                request = request_of(program, local=local)
                if not local:
                    request = replace(request, nodes=Value(Nodes(2, 2), "option --nodes"))
                made[f"{kind}-{name}-{'local' if local else 'slurm'}"] = plan_of(request, profile)
    return made


NAMES = [
    f"{kind}-{profile}-{where}"
    for kind in ("script", "module", "command")
    for profile in ("plain", "static", "full")
    for where in ("slurm", "local")
]


@pytest.mark.parametrize("name", NAMES)
class TestEveryVariant:
    @pytest.fixture
    def job(
        self, name: str, plan_of: Make, request_of: Make, profile_of: Make, tmp_path: Path
    ) -> Path:
        path = tmp_path / "job.sh"
        path.write_bytes(os.fsencode(render(variants(plan_of, request_of, profile_of)[name])))
        return path

    def test_bash_can_read_it(self, job: Path) -> None:
        done = subprocess.run(["bash", "-n", job], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    @pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
    def test_shellcheck_finds_nothing(self, name: str, job: Path) -> None:
        # SC2016: bash -c '… "$x"' is meant to be expanded by that bash, not by this one.
        # SC1003: a quoted backslash among the program's words is one.
        # SC2034: node's arguments are the same for a command, which has no rendezvous to name.
        exclude = "SC2016,SC1003" + (",SC2034" if "command" in name else "")
        done = subprocess.run(
            ["shellcheck", f"--exclude={exclude}", job], capture_output=True, text=True, check=False
        )
        assert done.stdout == ""

    def test_it_is_as_it_should_be(self, name: str, job: Path) -> None:
        text = os.fsdecode(job.read_bytes())
        lines = text.splitlines()
        assert lines[0] == "#!/bin/bash"
        assert lines[-1] == "esac"
        assert text.endswith("esac\n")
        assert "hunter2" not in text
        assert "{{" not in text.replace(quote("{{ 7*7 }}"), "")
        assert not [line for line in lines if line != line.rstrip()]
        assert ("HF_TOKEN comes from the environment" in text) == ("full" in name)
        assert ("module load cuda" in lines or "  module load cuda" in lines) == ("full" in name)
        assert ("--rdzv-backend=static" in text) == ("static" in name and "command" not in name)
        assert ("\n  srun " in text) == ("slurm" in name)
        assert ("torch.distributed.run" in text) == ("command" not in name)


class TestSiteTemplates:
    @pytest.fixture
    def plan(self, plan_of: Make, request_of: Make) -> Plan:
        made: Plan = plan_of(request_of())
        return made

    def with_template(self, plan: Plan, path: str) -> Plan:
        return replace(plan, template=Value(path, "profile p (site)"))

    def test_one_that_extends_ours(self, plan: Plan, tmp_path: Path) -> None:
        site = tmp_path / "site.sh.j2"
        site.write_text(
            '{% extends "torchrun.sh.j2" %}\n'
            "{% block environment %}\n  export SITE={{ plan.token | quote }}\n{% endblock %}\n"
            "{% block setup %}\n  module load {{ plan.max_restarts | quote }}\n{% endblock %}\n"
        )
        ours = render(plan)
        text = render(self.with_template(plan, str(site)))
        added = set(text.splitlines()) - set(ours.splitlines())
        assert added == {f"  export SITE={plan.token}", "  module load 0"}
        assert set(ours.splitlines()) <= set(text.splitlines())
        assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0

    @pytest.mark.parametrize("name", ["torchrun.sh.j2", "./torchrun.sh.j2"])
    def test_one_of_the_same_name_as_ours(self, plan: Plan, work: Path, name: str) -> None:
        (work / "torchrun.sh.j2").write_text(
            '{% extends "torchrun.sh.j2" %}{% block setup %}  # the site{% endblock %}'
        )
        text = render(self.with_template(plan, name), work)
        assert "  # the site" in text
        assert text.startswith("#!/bin/bash\n")

    def test_one_beside_another(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "a b").mkdir()
        (tmp_path / "a b" / "base.j2").write_text("base {% block x %}{% endblock %}.\n")
        (tmp_path / "a b" / "it.j2").write_text(
            '{% extends "base.j2" %}{% block x %}it{% endblock %}'
        )
        assert render(self.with_template(plan, f"{tmp_path}/x/../a b/it.j2")) == "base it.\n"

    def test_one_in_the_home_directory(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "home" / "it.j2").write_text("{{ plan.token }}")
        assert render(self.with_template(plan, "~/it.j2")) == plan.token

    @pytest.mark.parametrize(
        ("content", "line", "problem"),
        [
            ("\n{{ plan.nonsense }}", 2, "has no attribute 'nonsense'"),
            ("\n\n{{ nonsense }}", 3, "'nonsense' is undefined"),
            ("\n{{ nonsense | quote }}", 2, "'nonsense' is undefined"),
            ("\n{{ nonsense | comment }}", 2, "'nonsense' is undefined"),
            ("\n{{ nonsense | quote_all }}", 2, "'nonsense' is undefined"),
            ("\n{% if plan.nonsense %}x{% endif %}", 2, "has no attribute 'nonsense'"),
            ("\n{{ 1 / 0 }}", 2, "division by zero"),
            ("\n{{ plan.token + 1 }}", 2, "can only concatenate str"),
            ("\n{% if x %}", 2, "Unexpected end of template"),
            ("\n{{ x", 2, "unexpected end of template"),
            ("\n{{ plan.token | nonsense }}", 2, "No filter named 'nonsense'"),
            ("\n{% nonsense %}", 2, "unknown tag 'nonsense'"),
            (
                '{% extends "torchrun.sh.j2" %}\n{% block setup %}\n{{ nonsense }}{% endblock %}',
                3,
                "'nonsense' is undefined",
            ),
        ],
    )
    def test_a_mistake_is_refused_with_its_line(
        self, plan: Plan, tmp_path: Path, content: str, line: int, problem: str
    ) -> None:
        (tmp_path / "site.j2").write_text(content)
        with pytest.raises(GpusubError) as refused:
            render(self.with_template(plan, f"{tmp_path}/site.j2"))
        where = f"profile p (site): template {tmp_path}/site.j2:{line}: "
        assert str(refused.value).startswith(where)
        assert problem in str(refused.value)

    @pytest.mark.parametrize(
        ("asked", "missing"),
        [
            ("nope", "nope.sh.j2"),
            ("/nowhere/nope.j2", "/nowhere/nope.j2"),
            ("nope.j2", "nope.j2"),
            ("", ".sh.j2"),
            ("/", "/"),
            ("..", "...sh.j2"),
        ],
    )
    def test_none_is_refused_with_those_that_are(
        self, plan: Plan, asked: str, missing: str
    ) -> None:
        with pytest.raises(GpusubError) as refused:
            render(self.with_template(plan, asked))
        assert str(refused.value) == (
            f"profile p (site): no template {missing!r}; write a path, or one of torchrun"
        )

    def test_what_it_extends_must_be_there(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "site.j2").write_text('{% extends "nope.j2" %}')
        with pytest.raises(GpusubError, match=r"no template 'nope\.j2'; write a path, or one of"):
            render(self.with_template(plan, f"{tmp_path}/site.j2"))

    def test_one_that_is_no_text_is_refused(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "site.j2").write_bytes(b"\xff\xfe")
        with pytest.raises(GpusubError, match=r"^profile p \(site\): template .*site\.j2: .*utf-8"):
            render(self.with_template(plan, f"{tmp_path}/site.j2"))


class TestCompiledTemplates:
    """Kept between submissions, which must never keep a job from its submission."""

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "gpusub"

    def test_they_are_the_users_alone(self, cache: Path, plan_of: Make, request_of: Make) -> None:
        text = render(plan_of(request_of()))
        assert cache.stat().st_mode & 0o777 == 0o700
        assert list(cache.iterdir())
        assert render(plan_of(request_of())) == text

    @pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
    def test_where_others_could_write_nothing_is_read(
        self, cache: Path, plan_of: Make, request_of: Make, mode: int
    ) -> None:
        cache.mkdir(parents=True)
        cache.chmod(mode)
        assert render(plan_of(request_of()))
        assert not list(cache.iterdir())

    def test_a_changed_template_is_compiled_anew(
        self, cache: Path, plan_of: Make, request_of: Make, tmp_path: Path
    ) -> None:
        plan = replace(plan_of(request_of()), template=Value(f"{tmp_path}/x.j2", "x"))
        for text in ("one", "two"):
            (tmp_path / "x.j2").write_text(text)
            assert render(plan) == text

    def test_a_full_home_does_not_matter(
        self, cache: Path, plan_of: Make, request_of: Make, no_room: Make
    ) -> None:
        with no_room():
            assert render(plan_of(request_of()))
        assert not list(cache.iterdir())

    def test_nor_a_cache_that_cannot_be_made(
        self, cache: Path, plan_of: Make, request_of: Make
    ) -> None:
        cache.parent.touch()
        assert render(plan_of(request_of()))


def test_templates_lie_beside_the_package() -> None:
    assert (template_directory() / "torchrun.sh.j2").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "train on 1 node x 8 GPUs"),
        ({"nodes": "2-4", "gpus_per_node": "1"}, "train on 2-4 nodes x 1 GPU"),
        ({"nodes": "2", "gpus_per_node": "0"}, "train on 2 nodes, on CPUs"),
        ({"local": True}, "train on this machine x 2 GPUs"),
    ],
)
def test_in_a_few_words(
    plan_of: Make, request_of: Make, changes: dict[str, Any], words: str
) -> None:
    least, _, most = changes.pop("nodes", "1").partition("-")
    nodes = Value(Nodes(int(least), int(most or least)), "option --nodes")
    local = changes.pop("local", False)
    assert headline(plan_of(request_of(settings=changes, nodes=nodes, local=local))) == words


class TestFabricByNode:
    NODES = (
        "NodeName=gpu-1 Arch=x86_64 AvailableFeatures=ndr,x ActiveFeatures=ndr,x "
        "Gres=gpu:h100:8(S:0-1),nvme:1 NodeAddr=gpu-1 Reason=Gres=gpu:t4:1\n"
        "NodeName=gpu-2 Arch=x86_64 AvailableFeatures=(null) ActiveFeatures=(null) "
        "Gres=shard:2,gpu:a100:4 NodeAddr=gpu-2\n"
        "NodeName=gpu-3 Arch=x86_64 AvailableFeatures=ndr ActiveFeatures=x,ndr Gres=gpu:8\n"
        "NodeName=gpu-30 AvailableFeatures=ndr,a100 ActiveFeatures=x Gres=gpu:h100_2g:8\n"
    )

    @pytest.fixture
    def job(self, plan_of: Make, request_of: Make, profile_of: Make, tmp_path: Path) -> Path:
        fabrics = {
            "h100": {"service_level": 5},
            "ndr": {"pkey": 1},
            "a100": {"hcas": ("mlx5_0:1", "mlx5_1:1")},
        }
        plan = plan_of(request_of(Program("command", "true")), profile_of(fabrics=fabrics))
        path = tmp_path / "job.sh"
        path.write_text(render(plan))
        return path

    @pytest.mark.parametrize(
        ("node", "variables"),
        [
            ("gpu-1", {"NCCL_IB_SL": "5"}),  # its feature fits as well, and stands behind
            ("gpu-2", {"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"}),
            ("gpu-3", {"NCCL_IB_PKEY": "1"}),
            ("gpu-30", {}),
        ],
    )
    def test_a_node_gets_the_first_that_fits_it(
        self, node: str, variables: dict[str, str], job: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "nodes").write_text(self.NODES)
        functions = job.read_text().partition("\ncase ${1-batch}")[0]
        script = (
            f"{functions}\nscontrol() {{ cat {tmp_path}/nodes; }}\n"
            f"SLURM_JOB_NODELIST=x SLURM_JOB_NUM_NODES=4 SLURMD_NODENAME={node}\n"
            "environment && fabric && env | grep ^NCCL_"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert done.stderr == ""
        assert dict(line.split("=") for line in lines if "NCCL_" in line) == variables
        assert sorted(line for line in lines if "NCCL_" not in line) == [
            f"gpusub: fabric {name} on 1 of 4 node(s)" for name in ("a100", "h100", "ndr")
        ]

    def test_a_controller_that_does_not_say_ends_the_job(self, job: Path) -> None:
        functions = job.read_text().partition("\ncase ${1-batch}")[0]
        script = f"{functions}\nscontrol() {{ return 1; }}\nSLURM_JOB_NODELIST=x\nenvironment"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == "gpusub: Slurm does not say which GPUs the nodes of this job have\n"

    @pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
    def test_shellcheck_finds_nothing(self, job: Path) -> None:
        done = subprocess.run(
            ["shellcheck", "--exclude=SC2016,SC1003,SC2034", job],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout == ""
