from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import isolation, report
from gpuhealth.examination import Examination
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.folder import Folder
from gpuhealth.report import deliver, job_report, log_line, metrics, node_report, write_metrics
from gpuhealth.state import JobStart

FINDINGS = (
    Finding("ib_port", "mlx5_0:1", HEALTHY, "ACTIVE/LinkUp"),
    Finding("gpudirect", "node", UNKNOWN, "params EACCES", "dmabuf"),
    Finding("ib_port", "mlx5_4:1", UNHEALTHY, "DOWN/Polling", "ACTIVE/LinkUp", "cable", DRAIN),
)
DONE = Examination(
    "gpu-1",
    UNHEALTHY,
    FINDINGS,
    0.125,
    sku="h100",
    context="prolog",
    boot_id="b",
    at_s=12.5,
    time="2026-01-01T00:00:00Z",
)


class TestNodeReport:
    def test_what_is_in_it(self) -> None:
        found = node_report(DONE, {"driver": "580.82.07"})
        assert {key: found[key] for key in ("schema", "node", "verdict", "sku", "context")} == {
            "schema": 1,
            "node": "gpu-1",
            "verdict": UNHEALTHY,
            "sku": "h100",
            "context": "prolog",
        }
        assert found["time"] == "2026-01-01T00:00:00Z"
        assert found["versions"] == {"driver": "580.82.07"}
        assert found["counts"] == {UNHEALTHY: 1, UNKNOWN: 1, HEALTHY: 1}
        assert [one["status"] for one in found["findings"]] == [UNHEALTHY, UNKNOWN, HEALTHY]

    def test_what_is_wrong_is_not_cut_off(self) -> None:
        many = (FINDINGS[0],) * 2000 + FINDINGS
        done = Examination("gpu-1", UNHEALTHY, many, 0.1)
        found = node_report(done)
        assert len(found["findings"]) == report.MAX_FINDINGS
        assert [one["status"] for one in found["findings"][:2]] == [UNHEALTHY, UNKNOWN]
        assert found["counts"][HEALTHY] == 2001


def test_what_a_job_counted() -> None:
    before = {"mlx5_0:1": {"link_downed": 255, "port_xmit_data": 10}}
    after = {"mlx5_0:1": {"link_downed": 255, "port_xmit_data": 30}}
    start = JobStart(7, "b", 10.0, "2026-01-01T00:00:00Z", before, shared=True)
    assert job_report("gpu-1", start, after, 70.5, "2026-01-01T00:01:00Z") == {
        "schema": 1,
        "node": "gpu-1",
        "job": 7,
        "begun": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:01:00Z",
        "duration_s": 60.5,
        "shared": True,
        "ports": {"mlx5_0:1": {"port_xmit_data": 20}},
        "unknown": {"mlx5_0:1": {"link_downed": "saturated"}},
    }


class TestDelivery:
    def test_everybody_can_read_it(self, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            done = deliver(str(tmp_path), "gpu-1", node_report(DONE), {"job": 1})
        finally:
            os.umask(before)
        assert done == report.Delivery()
        assert deliver(str(tmp_path), "gpu-1", job={"job": 2}).why == ""
        files = {path.name: path for path in tmp_path.iterdir()}
        assert sorted(files) == ["gpu-1.jobs.jsonl", "gpu-1.json"]
        assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o644}
        assert json.loads(files["gpu-1.json"].read_text())["verdict"] == UNHEALTHY
        lines = files["gpu-1.jobs.jsonl"].read_text().splitlines()
        assert [json.loads(line)["job"] for line in lines] == [1, 2]

    def test_the_jobs_have_an_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(report, "JOBS_BYTES", 100)
        for job in range(30):
            assert deliver(str(tmp_path), "gpu-1", job={"job": job}).why == ""
        assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.parametrize("node", ["", "../gpu-1", "a/b", ".gpu", "gpu 1", "a\n", "x" * 300])
    def test_no_name_leads_out_of_it(self, tmp_path: Path, node: str) -> None:
        (tmp_path / "reports").mkdir()
        assert "no name of a node" in deliver(str(tmp_path / "reports"), node, {}).why
        assert [path.name for path in tmp_path.rglob("*")] == ["reports"]

    def test_an_empty_mount_point_is_no_place(self, tmp_path: Path) -> None:
        assert "No such file" in deliver(str(tmp_path / "reports"), "gpu-1", {}).why
        assert not (tmp_path / "reports").exists()

    def test_nor_is_one_where_everybody_can_write(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o1777)
        assert "others can write it" in deliver(str(tmp_path), "gpu-1", {}).why
        tmp_path.chmod(0o775)
        assert deliver(str(tmp_path), "gpu-1", {}).why == ""

    @pytest.mark.parametrize("name", ["gpu-1.jobs.jsonl", "gpu-1.json"])
    def test_nothing_is_written_through_a_link(self, tmp_path: Path, name: str) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        (tmp_path / "reports").mkdir()
        (tmp_path / "reports" / name).symlink_to(secret)
        deliver(str(tmp_path / "reports"), "gpu-1", {"a": 1}, {"job": 1})
        assert secret.read_text() == "secret"

    def test_a_full_share_costs_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device", "gpu-1.json")

        monkeypatch.setattr(Folder, "replace", full)
        assert deliver(str(tmp_path), "gpu-1", {}).why == "gpu-1.json: No space left on device"

    def test_a_share_that_hangs_costs_the_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hang(*_: Any) -> None:
            time.sleep(60)

        monkeypatch.setattr(Folder, "replace", hang)
        began_s = time.monotonic()
        done = deliver(str(tmp_path), "gpu-1", {}, deadline_s=0.2)
        assert time.monotonic() - began_s < 1.5
        assert done.why == f"{tmp_path}: no answer for 0.2 s"
        assert done.abandoned is None  # it could be ended

    def test_a_writer_that_dies_is_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(Folder, "replace", fail)
        assert "died" in deliver(str(tmp_path), "gpu-1", {}).why

    def test_while_one_hangs_there_is_no_second_one(self, tmp_path: Path) -> None:
        child = isolation.start(lambda _: time.sleep(60))
        stuck = isolation.Abandoned(child.pid, isolation.start_of(child.pid))
        done = deliver(str(tmp_path), "gpu-1", {}, earlier=stuck)
        assert (done.abandoned, "still hangs there" in done.why) == (stuck, True)
        isolation.end(child)
        assert deliver(str(tmp_path), "gpu-1", {}, earlier=stuck) == report.Delivery()
        assert (tmp_path / "gpu-1.json").exists()

    def test_whoever_reads_sees_a_whole_one(self, tmp_path: Path) -> None:
        done, seen = threading.Event(), 0
        file = tmp_path / "gpu-1.json"
        deliver(str(tmp_path), "gpu-1", node_report(DONE))

        def write() -> None:
            for number in range(200):
                size = {"text": "x" * (number * 200)}
                with Folder(str(tmp_path)) as folder:
                    folder.replace("gpu-1.json", json.dumps(size).encode())
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            json.loads(file.read_text())
            seen += 1
        writer.join()
        assert seen


SAMPLE = re.compile(
    r'gpuhealth_\w+(\{\w+="(?:[^"\\\n]|\\["\\n])*"(,\w+="(?:[^"\\\n]|\\["\\n])*")*\})? [0-9.]+\Z'
)


class TestMetrics:
    def test_what_is_in_them(self) -> None:
        lines = metrics(DONE, 1767225600.0).splitlines()
        for line in (
            'gpuhealth_verdict{verdict="unhealthy"} 1',
            'gpuhealth_verdict{verdict="healthy"} 0',
            'gpuhealth_findings{check="ib_port",status="unhealthy"} 1',
            'gpuhealth_finding{check="ib_port",object="mlx5_4:1",status="unhealthy",'
            'action="drain"} 1',
            "gpuhealth_duration_seconds 0.1250",
            "gpuhealth_last_run_timestamp_seconds 1767225600.000",
        ):
            assert line in lines
        assert metrics(DONE, 1.0).endswith("\n")

    @given(
        st.lists(st.builds(Finding, *[st.text()] * 2, st.sampled_from(report._ORDER)), max_size=9)
    )
    def test_the_format_holds_for_any_name(self, findings: list[Finding]) -> None:
        text = metrics(Examination("gpu-1", HEALTHY, tuple(findings), 0.1), 1.0)
        samples = [line for line in text.split("\n") if line and not line.startswith("#")]
        assert all(SAMPLE.match(line) for line in samples)
        assert len(samples) == len(set(samples))
        text.encode()

    def test_a_textfile_collector_s_directory(self, tmp_path: Path) -> None:
        file = tmp_path / "gpuhealth.prom"
        assert write_metrics(str(file), "a 1\n") == ""
        assert write_metrics(str(file), "a 2\n") == ""
        assert file.read_text() == "a 2\n"
        assert file.stat().st_mode & 0o777 == 0o644
        assert [path.name for path in tmp_path.iterdir()] == ["gpuhealth.prom"]

    def test_none_is_no_error(self, tmp_path: Path) -> None:
        assert "No such file" in write_metrics(str(tmp_path / "none" / "a.prom"), "")
        assert write_metrics("a.prom/", "") == "'a.prom/' names no file"


class TestLogLine:
    def test_what_is_wrong_worst_first(self) -> None:
        assert log_line(DONE) == (
            "gpu-1 is unhealthy as h100 (prolog, 0.12 s); "
            "unhealthy ib_port mlx5_4:1 DOWN/Polling expected ACTIVE/LinkUp (drain); "
            "unknown gpudirect node params EACCES expected dmabuf (warn)"
        )

    def test_a_healthy_node_is_short(self) -> None:
        done = Examination("gpu-1", HEALTHY, FINDINGS[:1], 0.1, context="periodic")
        assert log_line(done) == "gpu-1 is healthy (periodic, 0.10 s)"

    def test_what_does_not_fit_is_counted(self) -> None:
        done = Examination("gpu-1", UNHEALTHY, FINDINGS[2:] * 100, 0.1)
        line = log_line(done)
        assert len(line) < 1000
        shown = line.count("mlx5_4:1")
        assert line.endswith(f"; and {100 - shown} more")

    @given(st.text(), st.text())
    def test_one_line_of_printable_ascii(self, thing: str, observed: str) -> None:
        done = Examination("gpu-1", UNKNOWN, (Finding("c", thing, UNKNOWN, observed),), 0.1)
        line = log_line(done)
        assert all(" " <= sign <= "~" for sign in line)
        assert len(line) < 1000
