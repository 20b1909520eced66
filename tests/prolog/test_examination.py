from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuhealth import check, collect, examination, isolation
from gpuhealth.compiler import compile_policy
from gpuhealth.examination import Request, examine, examine_recording
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN
from gpuhealth.policy import Policy
from gpuhealth.source import Directory, Recording
from recorded import CLASS, HCAS, POLICY, PORTS, h100, port, write

# Of the recorded node only /sys/class/infiniband is known.
OFF = ", ".join(f"{name}: off" for name in check.REGISTRY if name not in ("ib_port", "hung"))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return compile_policy(POLICY % OFF, "health.yaml")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(h100(), tmp_path)
    return tmp_path


def test_the_recorded_node_is_healthy(policy: Policy) -> None:
    done = examine_recording(Request("gpu-1", policy), h100())
    assert done.verdict == HEALTHY
    assert done.sku == "h100-ndr"
    assert [one.object for one in done.findings] == list(PORTS)


def test_and_so_is_its_tree(policy: Policy, tree: Path) -> None:
    done = examine(Request("gpu-1", policy), Directory(str(tree)), with_nvml=False)
    assert done.verdict == HEALTHY
    assert done.findings == examine_recording(Request("gpu-1", policy), h100()).findings


def test_a_node_of_no_sku_is_unknown(policy: Policy) -> None:
    done = examine_recording(Request("login-1", policy), h100())
    assert done.verdict == UNKNOWN
    assert "no SKU matches" in [one.observed for one in done.findings]


def test_json(policy: Policy) -> None:
    entries = {**h100(), f"{port('mlx5_4')}/state": "1: DOWN"}
    shown = examine_recording(Request("gpu-1", policy), entries).as_dict()
    assert list(shown) == ["verdict", "node", "sku", "duration_s", "findings"]
    (one,) = [item for item in shown["findings"] if item["status"] == UNHEALTHY]
    assert {key: one[key] for key in ("check", "object", "action", "observed", "expected")} == {
        "check": "ib_port",
        "object": "mlx5_4:1",
        "action": "drain",
        "observed": "DOWN/LinkUp",
        "expected": "ACTIVE/LinkUp",
    }
    assert one["remedy"]


def test_without_a_policy_nothing_drains() -> None:
    done = examine_recording(Request("gpu-1"), h100())
    assert not [one for one in done.findings if one.action == "drain"]


class TestHung:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collect, "READ_TIMEOUT_S", 0.3)

    def test_a_port_that_hangs_is_unknown_and_the_others_are_judged(
        self, policy: Policy, tree: Path
    ) -> None:
        state = tree / f"{port('mlx5_4')}/state".lstrip("/")
        state.unlink()
        os.mkfifo(state)
        (tree / f"{port('mlx5_5')}/state".lstrip("/")).write_text("1: DOWN\n")
        before_s = time.monotonic()
        done = examine(Request("gpu-1", policy), Directory(str(tree)), with_nvml=False)
        assert time.monotonic() - before_s < 3
        seen = {(one.check, one.object): one.status for one in done.findings}
        assert seen[("ib_port", "mlx5_4:1")] == UNKNOWN
        assert seen[("ib_port", "mlx5_5:1")] == UNHEALTHY
        assert seen[("hung", f"{CLASS}/mlx5_4")] == UNKNOWN
        assert seen[("ib_port", "mlx5_0:1")] == HEALTHY
        assert list(done.hung) == [f"{CLASS}/mlx5_4"]

    def test_the_whole_run_ends_in_time(self, policy: Policy, tree: Path) -> None:
        for name in ("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"):
            state = tree / f"{port(name)}/state".lstrip("/")
            state.unlink()
            os.mkfifo(state)
        before_s = time.monotonic()
        request = Request("gpu-1", policy, deadline_s=5)
        done = examine(request, Directory(str(tree)), with_nvml=False)
        assert time.monotonic() - before_s < 5
        assert done.verdict == UNKNOWN
        # What there was no time for is not said to hang.
        assert len(done.hung) == collect.MAX_HUNG

    def test_where_a_process_is_stuck_nobody_goes_again(self, policy: Policy, tree: Path) -> None:
        state = tree / f"{port('mlx5_4')}/state".lstrip("/")
        state.unlink()
        os.mkfifo(state)
        before_s = time.monotonic()
        request = Request("gpu-1", policy, avoid=(f"{CLASS}/mlx5_4",))
        done = examine(request, Directory(str(tree)), with_nvml=False)
        assert time.monotonic() - before_s < 0.3
        assert {one.object for one in done.findings if one.check == "hung"} == {f"{CLASS}/mlx5_4"}


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (isolation.Outcome(None), "hung"),
        (isolation.Outcome(b""), "died"),
        (isolation.Outcome(b"[1]"), "died"),
        (isolation.Outcome(b"\xff"), "died"),
    ],
)
def test_an_nvml_that_says_nothing(outcome: isolation.Outcome, error: str) -> None:
    assert examination.answer(outcome)["error"] == error


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   1", "NVIDIA H100 80GB HBM3"),
        ("IRQ: 1\nModel:NVIDIA H200\n", "NVIDIA H200"),
        ("Model:\n", None),
        ("", None),
        ({"errno": "EIO"}, None),
    ],
)
def test_the_gpus_name(text: Any, model: str | None) -> None:
    source = Recording({"/proc/driver/nvidia/gpus/0000:18:00.0/information": text})
    assert examination.gpu_model(source) == model


FILES = ("state", "phys_state", "rate", "link_layer")
PATHS = st.sampled_from([f"{port(f'mlx5_{number}')}/{name}" for number in HCAS for name in FILES])
TREES = int(os.environ.get("GPUHEALTH_TREES", "300"))


@settings(max_examples=TREES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(PATHS, st.binary(max_size=40), min_size=1, max_size=4))
def test_any_bytes_in_any_file(changed: dict[str, bytes]) -> None:
    """Whatever the files hold: no exception, and no port is healthy that can't be read."""
    policy = compile_policy(POLICY % "", "health.yaml")
    texts = {path: data.decode("utf-8", "replace") for path, data in changed.items()}
    done = examine_recording(Request("gpu-1", policy), {**h100(), **texts})
    assert not [one for one in done.findings if one.object == "check"]
    for name in PORTS:
        state = texts.get(f"{port(name.partition(':')[0])}/state", "4: ACTIVE")
        if state.rstrip("\n") != "4: ACTIVE":
            (one,) = [f for f in done.findings if f.check == "ib_port" and f.object == name]
            assert one.status != HEALTHY
            assert done.verdict != HEALTHY
