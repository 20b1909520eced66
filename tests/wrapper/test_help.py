from __future__ import annotations

import re

import pytest

from gpusub.cli import COMMANDS, load_command, run, submit
from gpusub.help import GROUPS

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("argv", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_every_page_fits_80_columns(
    argv: list[str], capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(argv) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if len(line) > 80] == []


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^(\S.*):\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_options_are_in_groups_each_once(capfd: Capture) -> None:
    run(["--help"])
    page = capfd.readouterr().out
    found = sections(page)
    for title, options in {
        "Resources": ["--nodes", "--gpus-per-node", "--mem", "--time"],
        "Queue": ["--partition", "--account", "--sbatch"],
        "Program": ["-m", "--env", "--nccl", "--python"],
        "Settings": ["--profile", "--template"],
        "Launch and output": ["--local", "--dry-run", "--json", "--version", "--help"],
    }.items():
        for option in options:
            assert re.search(rf"^  (-\w, )?{option}\b", found[title], re.MULTILINE)
    for parameter in submit.params:
        name = max(parameter.opts, key=len)
        assert len(re.findall(rf"^  (?:-\w, )?{name}(?=[ \n])", page, re.MULTILINE)) == 1


def test_every_option_has_its_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {parameter.name for parameter in submit.params} <= set(grouped)


def test_every_command_is_listed_with_what_it_does(capfd: Capture) -> None:
    run(["--help"])
    listed = sections(capfd.readouterr().out)["Commands"]
    for name, (_, words) in COMMANDS.items():
        assert re.search(rf"^  {name} +{words.split()[0]}", listed, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "submit"])
def test_a_command_has_a_page_of_its_own(name: str, capfd: Capture) -> None:
    assert run([name, "--help"]) == 0
    page = capfd.readouterr().out
    assert page.startswith(f"Usage: gpusub {name} ")
    for parameter in load_command(name).params:
        assert all(option in page for option in parameter.opts if option.startswith("-"))
    assert "Commands:" not in page
