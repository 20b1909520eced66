from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusub.cli import submit, takes_value
from gpusub.errors import GpusubError
from gpusub.request import Program
from gpusub.words import split

TAKES_VALUE = takes_value(submit)


@pytest.mark.parametrize(
    ("line", "options", "kind", "target", "args"),
    [
        ("train.py", [], "script", "train.py", []),
        ("train.py --lr 1e-3", [], "script", "train.py", ["--lr", "1e-3"]),
        ("-N 2 train.py", ["-N", "2"], "script", "train.py", []),
        ("-N2 train.py", ["-N2"], "script", "train.py", []),
        ("--nodes 2 train.py", ["--nodes", "2"], "script", "train.py", []),
        ("--nodes=2 train.py", ["--nodes=2"], "script", "train.py", []),
        ("--nodes= train.py", ["--nodes="], "script", "train.py", []),
        ("-vN 2 train.py", ["-vN", "2"], "script", "train.py", []),
        ("-vN2 train.py", ["-vN2"], "script", "train.py", []),
        ("--exclusive train.py", ["--exclusive"], "script", "train.py", []),
        ("--exclusive -N 2 train.py", ["--exclusive", "-N", "2"], "script", "train.py", []),
        ("-p train.py run.py", ["-p", "train.py"], "script", "run.py", []),
        ("-N", ["-N"], None, None, None),
        ("--nodes", ["--nodes"], None, None, None),
        ("-v", ["-v"], None, None, None),
        # An option that nobody knows takes nothing with it: the parser refuses it next.
        ("--array 1-3 train.py", ["--array"], "script", "1-3", ["train.py"]),
        ("-z train.py", ["-z"], "script", "train.py", []),
        # The program's own words look like ours.
        (
            "train.py -N 2 -m x -- --local",
            [],
            "script",
            "train.py",
            ["-N", "2", "-m", "x", "--", "--local"],
        ),
        ("train.py --help", [], "script", "train.py", ["--help"]),
        ("train.py --", [], "script", "train.py", ["--"]),
        ("-N 2 train.py train.py", ["-N", "2"], "script", "train.py", ["train.py"]),
        ("- a", [], "script", "-", ["a"]),
        ("-m pkg.train", [], "module", "pkg.train", []),
        ("-mpkg.train -x", [], "module", "pkg.train", ["-x"]),
        ("-vm pkg.train --lr 1", ["-v"], "module", "pkg.train", ["--lr", "1"]),
        ("-mx -y", [], "module", "x", ["-y"]),
        ("-vmpkg.train", ["-v"], "module", "pkg.train", []),
        ("-N 2 -m pkg.train -m y", ["-N", "2"], "module", "pkg.train", ["-m", "y"]),
        # The m is the value of -N or -p here.
        ("-Nm train.py", ["-Nm"], "script", "train.py", []),
        ("-p m train.py", ["-p", "m"], "script", "train.py", []),
        ("-p -m train.py", ["-p", "-m"], "script", "train.py", []),
        ("--mem 4G train.py", ["--mem", "4G"], "script", "train.py", []),
        ("-- sh -c x", [], "command", "sh", ["-c", "x"]),
        ("-N 2 -- sh", ["-N", "2"], "command", "sh", []),
        ("-- -x --local", [], "command", "-x", ["--local"]),
        ("-- -- x", [], "command", "--", ["x"]),
        ("-p -- train.py", ["-p", "--"], "script", "train.py", []),
        ("", [], None, None, None),
    ],
)
def test_the_program_begins_where_the_options_end(
    line: str, options: list[str], kind: str | None, target: str | None, args: list[str] | None
) -> None:
    found, program = split(line.split(), TAKES_VALUE)
    assert found == options
    if target is None:
        assert program is None
    else:
        assert program is not None
        assert (program.kind, program.target, list(program.args)) == (kind, target, args)


@pytest.mark.parametrize("line", [["-m"], ["-vm"], ["-N", "2", "-m"], ["--"], ["-N", "2", "--"]])
def test_nothing_behind_the_mark_is_refused(line: list[str]) -> None:
    with pytest.raises(GpusubError, match=r"^-(m|-): no (module|command) behind it; write "):
        split(line, TAKES_VALUE)


def test_an_empty_word_is_a_program_of_that_name() -> None:
    assert split(["", "a"], TAKES_VALUE) == ([], Program("script", "", ("a",)))
    assert split(["-p", "", "t.py"], TAKES_VALUE) == (["-p", ""], Program("script", "t.py"))
    assert split(["-m", ""], TAKES_VALUE) == ([], Program("module", "", ()))


@pytest.mark.parametrize("before", [[], ["-N", "2"], ["-v", "--partition=a"], ["--exclusive"]])
@pytest.mark.parametrize(
    ("mark", "kind"),
    [(["train.py"], "script"), (["-m", "a.b"], "module"), (["--", "sh"], "command")],
)
@given(args=st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_every_word_of_the_program_stays_as_it_is(
    before: list[str], mark: list[str], kind: str, args: list[str]
) -> None:
    options, program = split([*before, *mark, *args], TAKES_VALUE)
    assert options == before
    assert program == Program(kind, mark[-1], tuple(args))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", sorted(TAKES_VALUE))
def test_the_parser_sees_the_program_at_the_same_place(option: str) -> None:
    words = [option, "1"] if TAKES_VALUE[option] else [option]
    assert split([*words, "train.py"], TAKES_VALUE) == (words, Program("script", "train.py"))
    context = submit.make_context("gpusub", [*words, "train.py"], resilient_parsing=True)
    assert context.args == ["train.py"]
