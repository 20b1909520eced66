from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuhealth import check, cli
from gpuhealth.policy import load
from recorded import POLICY, h100, port, write

OFF = ", ".join(f"{name}: off" for name in check.REGISTRY if name not in ("ib_port", "hung"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthy.json").write_text(json.dumps(h100()))
    down = {
        **h100(),
        f"{port('mlx5_4')}/state": "1: DOWN",
        f"{port('mlx5_4')}/phys_state": "2: Polling",
    }
    (tmp_path / "down.json").write_text(json.dumps(down))
    unread = {**h100(), f"{port('mlx5_4')}/state": {"errno": "EIO"}}
    (tmp_path / "unread.json").write_text(json.dumps(unread))
    (tmp_path / "health.yaml").write_text(POLICY % OFF)
    return tmp_path


CHECK = ("check", "--policy", "health.yaml", "--node", "gpu-1", "--root")


class TestCheck:
    @pytest.mark.parametrize(
        ("file", "code"), [("healthy.json", 0), ("down.json", 1), ("unread.json", 3)]
    )
    def test_exit_codes(self, files: Path, file: str, code: int) -> None:
        assert cli.main([*CHECK, file]) == code

    def test_what_a_person_reads(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main([*CHECK, "down.json"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == (
            "unhealthy  ib_port mlx5_4:1: DOWN/Polling, expected ACTIVE/LinkUp (drain)"
        )
        assert lines[1].strip().startswith("check the cable")
        assert lines[-1].startswith("gpu-1 is unhealthy as h100-ndr: 7 of 8 findings healthy")

    def test_verbose_shows_what_is_healthy(
        self, files: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cli.main([*CHECK, "healthy.json", "-v"])
        out = capsys.readouterr().out
        assert "healthy    ib_port mlx5_0:1: ACTIVE/LinkUp, 400 Gb/sec 4X" in out

    def test_json(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*CHECK, "down.json", "--json"]) == 1
        shown = json.loads(capsys.readouterr().out)
        assert shown["verdict"] == "unhealthy"
        assert shown["node"] == "gpu-1"
        assert shown["sku"] == "h100-ndr"

    def test_without_a_policy_it_says_so(
        self, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli, "POLICY", str(files / "none.json"))
        cli.main(["check", "--root", "healthy.json"])
        assert "no policy" in capsys.readouterr().err

    def test_one_check_alone(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main([*CHECK, "down.json", "--only", "ib_port", "--json"])
        shown = json.loads(capsys.readouterr().out)
        assert {one["check"] for one in shown["findings"]} == {"ib_port"}

    def test_the_nodes_name_from_slurm(
        self, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURMD_NODENAME", "gpu-9")
        cli.main(["check", "--root", "healthy.json", "--policy", "health.yaml", "--json"])
        assert json.loads(capsys.readouterr().out)["node"] == "gpu-9"

    def test_a_tree(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(h100(), files / "tree")
        assert cli.main([*CHECK, "tree"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "--root", "none.json"], "none.json: No such file or directory"),
        (["check", "--root", "health.yaml"], "health.yaml: not JSON"),
        (["check", "--root", "healthy.json", "--policy", "none.yaml"], "none.yaml: No such file"),
        (
            ["check", "--root", "healthy.json", "--only", "ib"],
            "there is no check 'ib'; they are: ib_",
        ),
        (
            ["check", "--policy", "bad.yaml", "--root", "healthy.json"],
            "bad.yaml:1: the policy: there",
        ),
        (["check", "--policy", "bad.json", "--root", "healthy.json"], "bad.json: not a policy"),
        (["compile", "bad.yaml"], "bad.yaml:1: the policy: there is no key 'chekcs'"),
        (["compile", "binary"], "binary: not UTF-8"),
        (["compile", "health.yaml", "-o", "none/health.json"], "none/health.json: No such file"),
    ],
)
def test_bad_input_is_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (files / "bad.yaml").write_text("chekcs: {}")
    (files / "bad.json").write_text("{}")
    (files / "binary").write_bytes(b"\xff\xfe")
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(files.glob("**/*.json.*"))


@pytest.mark.parametrize("argv", [[], ["chek"], ["check", "--rot", "x"], ["check", "--root"]])
def test_usage(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("gpuhealth: ")


class TestCompile:
    def test_what_it_writes_is_what_nodes_read(self, files: Path) -> None:
        assert cli.main(["compile", "health.yaml", "-o", "health.json"]) == 0
        policy = load((files / "health.json").read_text())
        assert policy.skus[0].name == "h100-ndr"
        assert (files / "health.json").stat().st_mode & 0o777 == 0o644
        argv = ["check", "--policy", "health.json", "--node", "gpu-1", "--root", "down.json"]
        assert cli.main(argv) == 1

    def test_the_old_one_stays_if_the_new_one_is_wrong(self, files: Path) -> None:
        (files / "health.json").write_text("old")
        (files / "bad.yaml").write_text("chekcs: {}")
        assert cli.main(["compile", "bad.yaml", "-o", "health.json"]) == 2
        assert (files / "health.json").read_text() == "old"


class TestList:
    def test_every_check(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list", "--policy", "health.yaml"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(check.REGISTRY)
        actions = {line.split()[0]: line.split()[1] for line in lines}
        assert actions["ib_port"] == "drain"

    def test_json(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["list", "--json", "--only", "ib_port"])
        (row,) = json.loads(capsys.readouterr().out)
        assert row["check"] == "ib_port"

    def test_a_proposal(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list", "--propose", "--root", "healthy.json"]) == 0
        assert 'names: ["mlx5_0:1"' in capsys.readouterr().out


def test_env(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--root", "healthy.json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("# ")
    assert out[1].startswith("NCCL_IB_HCA==mlx5_0:1,")


def test_record_of_a_recording(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "--root", "healthy.json"]) == 0
    assert json.loads(capsys.readouterr().out) == h100()


def test_a_reader_that_has_seen_enough(files: Path) -> None:
    code = "import sys; from gpuhealth.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "record", "--root", "healthy.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
