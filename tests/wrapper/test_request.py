from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusub.cli import submit, takes_value
from gpusub.errors import GpusubError
from gpusub.request import (
    NOT_PASSED_ON,
    Nodes,
    Program,
    parse_assignment,
    parse_nodes,
    parse_sbatch,
    parse_time,
    refuse_control_characters,
)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("1", 1, 1), ("2-4", 2, 4), ("2-2", 2, 2), ("007", 7, 7), ("1-1000", 1, 1000)],
)
def test_nodes(text: str, least: int, most: int) -> None:
    assert parse_nodes("option --nodes", text) == Nodes(least, most)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "0-3", "4-2", "2-", "-2", "1-2-3", "two", "1.5", "1,3", " 2", "2 ", "2\n", "٣"],
)
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(GpusubError) as refused:
        parse_nodes("environment GPUSUB_NODES", text)
    assert str(refused.value) == (
        f"environment GPUSUB_NODES: {text!r}: write a number of nodes, or MIN-MAX, as in 2 or 2-4"
    )


@given(least=st.integers(1, 9999), more=st.integers(0, 9999))
def test_nodes_are_written_as_they_are_read(least: int, more: int) -> None:
    nodes = Nodes(least, least + more)
    assert parse_nodes("x", str(nodes)) == nodes


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("A=b", "A", "b"),
        ("A=", "A", ""),
        ("A", "A", None),
        ("_a1=x=y", "_a1", "x=y"),
        ("A=a b\nc", "A", "a b\nc"),
    ],
)
def test_an_assignment(text: str, name: str, value: str | None) -> None:
    assert parse_assignment("--env", text) == (name, value)


@pytest.mark.parametrize(
    "text", ["", "=x", "1A=x", "A-B=x", "A B=x", " A=x", "é=x", "A.B", "A\n=x"]
)
def test_what_no_shell_can_export_is_refused(text: str) -> None:
    # Its value may be a secret, and stays out of the message.
    with pytest.raises(GpusubError) as refused:
        parse_assignment("--env", text)
    name = text.partition("=")[0]
    assert str(refused.value) == f"--env: {name!r} is no variable's name; write NAME=VALUE"


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("1", 60),
        ("90", 5400),
        ("2:30", 150),
        ("60:99", 3699),
        ("12:30:00", 45000),
        ("1-0", 86400),
        ("2-12", 216000),
        ("1-2:3", 93780),
        ("1-2:3:4", 93784),
        ("010", 600),
        # sbatch(1): a limit of zero is none, as the words are.
        ("0", None),
        ("0:00", None),
        ("00:00:00", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("-1", None),
    ],
)
def test_every_form_of_a_time_limit(text: str, time_s: int | None) -> None:
    assert parse_time("option --time", text) == time_s


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "10 ",
            " 10",
            "10\n",
            "-5",
            "1:2:3:4",
            "1-2:3:4:5",
            "1-",
            "-1-2",
            "1--2",
            ":",
            "1:",
        ),
        *(":1", "1.5", "1e3", "0x10", "4h", "30m", "no", "٣", "1:٣", "1,2", "2026-11-30", "+5"),
    ],
)
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(GpusubError) as refused:
        parse_time("option --time", text)
    assert str(refused.value) == (
        f"option --time: {text!r} is no time limit; write hours:minutes:seconds, as in 04:00:00, "
        "or days-hours, as in 2-12"
    )


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("nice=100", "nice", "100"),
        ("--nice=100", "nice", "100"),
        ("hold", "hold", None),
        ("nice=", "nice", ""),
        ("gres=gpu:2,nvme:1", "gres", "gpu:2,nvme:1"),
        ("licenses=a=1", "licenses", "a=1"),
        ("wait-all-nodes=1", "wait-all-nodes", "1"),
        ("time-min=1", "time-min", "1"),
        ("mem-bind=local", "mem-bind", "local"),
    ],
)
def test_other_options_of_sbatch_pass(text: str, name: str, value: str | None) -> None:
    assert parse_sbatch(text) == (name, value)


@pytest.mark.parametrize("name", sorted(NOT_PASSED_ON))
@pytest.mark.parametrize("form", ["{}", "{}=1", "--{}", "--{}=1"])
def test_what_gpusub_settles_is_refused_with_what_to_use(name: str, form: str) -> None:
    with pytest.raises(GpusubError) as refused:
        parse_sbatch(form.format(name))
    assert str(refused.value) == f"--sbatch {name}: {NOT_PASSED_ON[name]}"


@pytest.mark.parametrize("name", sorted(NOT_PASSED_ON))
def test_its_beginning_is_refused_too(name: str) -> None:
    # getopt_long, and so sbatch, takes --ntasks-per-nod=2 for --ntasks-per-node=2.
    for length in range(1, len(name)):
        with pytest.raises(GpusubError, match=r"^--sbatch "):
            parse_sbatch(f"{name[:length]}=1")


def test_what_to_use_instead_is_there_to_be_used() -> None:
    known = takes_value(submit)
    for name, why in NOT_PASSED_ON.items():
        for word in why.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in known or word == "--", name


@pytest.mark.parametrize(
    "text", ["", "=1", "-N=2", "N=2", "n_x=1", "a b=1", "--", "nice\n=1", "ñ=1"]
)
def test_what_is_no_option_of_sbatch_is_refused(text: str) -> None:
    with pytest.raises(GpusubError, match="write KEY or KEY=VALUE with sbatch's long name"):
        parse_sbatch(text)


@pytest.mark.parametrize("character", ["\n", "\r", "\0"])
def test_a_line_break_in_a_value_for_sbatch_is_refused_on_one_line(character: str) -> None:
    refuse_control_characters([("comment", "é\t'$x`\\")])
    with pytest.raises(GpusubError) as refused:
        refuse_control_characters([("partition", "gpu"), ("comment", f"a{character}b")])
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).startswith("--comment 'a")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Program("script", "train.py"), "train"),
        (Program("script", "../a b/train.v2.py"), "train.v2"),
        (Program("script", ".py"), "gpusub"),
        (Program("script", "train"), "train"),
        (Program("module", "pkg.train"), "pkg.train"),
        (Program("command", "/usr/bin/nvidia-smi"), "nvidia-smi"),
        (Program("command", ""), "gpusub"),
        (Program("command", "/"), "gpusub"),
    ],
)
def test_a_job_is_named_after_its_program(program: Program, name: str) -> None:
    assert program.name == name
