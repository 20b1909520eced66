from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpuhealth import __main__, hooks


@pytest.mark.parametrize("name", __main__.HOOKS)
def test_slurms_hooks_go_past_the_parser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def hook(environ: object) -> int:
        seen.append(name)
        return 75

    monkeypatch.setattr(hooks, name, hook)
    monkeypatch.setattr(sys, "argv", ["gpuhealth", name])
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    __main__.main()
    assert seen == [name]
    assert ended[0] == 75


def test_anything_else_is_a_command() -> None:
    argv = [sys.executable, "-m", "gpuhealth", "prolog", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "before a job" in done.stdout
