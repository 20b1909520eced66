from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import check, source
from gpuhealth.check import Node
from gpuhealth.checks import xid
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.history import History
from gpuhealth.policy import Policy, Sku
from gpuhealth.source import Directory, Entry, Recorder, Recording

GPU = {"/proc/driver/nvidia/gpus/": ["0000:18:00.0"]}
OFF_THE_BUS = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(number: int, at_s: float, text: str = "x", address: str = "0000:18:00") -> str:
    return f"3,901,{int(at_s * 1e6)},-;NVRM: Xid (PCI:{address}): {number}, {text}"


def recovery(at_s: float, action: str) -> str:
    return record(154, at_s, f"GPU recovery action changed from 0x0 (None) to {action}")


def judge(*records: str, **options: Any) -> list[Finding]:
    entries: dict[str, Entry] = {**GPU, "/dev/kmsg": "\n".join(records)}
    node = Node("gpu-1", Recording(entries), **options)
    return check.run(check.REGISTRY["xid"], node, Policy())


def statuses(found: list[Finding]) -> list[str]:
    return [one.status for one in found]


class TestWhichAreFatal:
    @pytest.mark.parametrize("number", sorted(xid.FATAL))
    def test_those_that_ask_for_a_reset(self, number: int) -> None:
        (found,) = judge(record(number, 60))
        assert (found.status, found.object) == (UNHEALTHY, "0000:18:00")
        assert found.observed.startswith(f"Xid {number} ")

    @pytest.mark.parametrize(
        "number", [8, 13, 31, 32, 43, 45, 63, 68, 69, 74, 92, 94, 109, 149, 999]
    )
    def test_programs_errors_and_what_was_dealt_with(self, number: int) -> None:
        assert statuses(judge(record(number, 60), record(number, 61))) == [HEALTHY]

    def test_the_first_one_is_named(self) -> None:
        (found,) = judge(
            record(45, 1), record(79, 60, OFF_THE_BUS), record(119, 66), record(45, 70)
        )
        assert found.observed == "Xid 79 fallen off the bus"

    def test_each_gpu_by_itself(self) -> None:
        found = judge(record(79, 60), record(95, 60, address="0000:5D:00"))
        assert [one.object for one in found] == ["0000:18:00", "0000:5d:00"]


class TestRecoveryAction:
    def test_what_the_driver_asks_for(self) -> None:
        (found,) = judge(recovery(60, "0x1 (GPU Reset Required)"))
        assert (found.status, found.observed) == (UNHEALTHY, "Xid 154 GPU Reset Required")

    def test_it_names_the_cause_before(self) -> None:
        (found,) = judge(record(62, 60), recovery(60, "0x1 (GPU Reset Required)"))
        assert found.observed == "Xid 62 micro-controller halt"

    def test_back_at_none_after_a_reset(self) -> None:
        records = [
            record(62, 60),
            recovery(60, "0x1 (GPU Reset Required)"),
            recovery(90, "0x0 (None)"),
        ]
        assert statuses(judge(*records)) == [HEALTHY]
        other = record(79, 60, address="0000:5d:00")
        assert [one.object for one in judge(other, *records)] == ["0000:5d:00"]
        assert statuses(judge(*records, record(79, 99))) == [UNHEALTHY]

    @pytest.mark.parametrize("text", ["x", "to 0x", "to nothing"])
    def test_an_action_that_can_not_be_read_says_nothing(self, text: str) -> None:
        assert statuses(judge(record(154, 60, text))) == [HEALTHY]
        assert statuses(judge(record(79, 50), record(154, 60, text))) == [UNHEALTHY]


class TestOldXids:
    """Kind: an Xid of before the repair, still in the log, fails the node for ever."""

    def test_before_our_drain_was_lifted(self) -> None:
        assert statuses(judge(record(79, 99), history=History(resumed_s=100))) == [HEALTHY]

    def test_after_it(self) -> None:
        assert statuses(judge(record(79, 101), history=History(resumed_s=100))) == [UNHEALTHY]


class TestLog:
    def test_a_line_that_a_user_has_written(self) -> None:
        # Facility 1 and above: the kernel sets it on what comes in through /dev/kmsg.
        assert statuses(judge(record(79, 60).replace("3,", "11,", 1))) == [HEALTHY]

    def test_sxid_is_another_thing(self) -> None:
        line = "3,1,60000000,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal"
        assert statuses(judge(line)) == [HEALTHY]

    @pytest.mark.parametrize("error", ["EPERM", "EACCES", "ENOENT", "ETIMEDOUT"])
    def test_a_log_that_can_not_be_read_is_unknown(self, error: str) -> None:
        entries: dict[str, Entry] = {**GPU, "/dev/kmsg": {"errno": error}}
        node = Node("gpu-1", Recording(entries))
        assert statuses(check.run(check.REGISTRY["xid"], node)) == [UNKNOWN]

    def test_a_machine_without_gpus_has_no_xids(self) -> None:
        entries: dict[str, Entry] = {"/proc/driver/": []}
        assert check.run(check.REGISTRY["xid"], Node("cpu-1", Recording(entries))) == []
        sku = Sku("h100", gpus=8)
        found = check.run(check.REGISTRY["xid"], Node("cpu-1", Recording(entries), sku))
        assert statuses(found) == [UNKNOWN]

    def test_off_unless_the_policy_says_otherwise(self) -> None:
        chosen = check.selected(Policy(), check.PROLOG, None)
        assert "xid" not in [one.id for one in chosen]
        chosen = check.selected(Policy(checks={"xid": "warn"}), check.PROLOG, None)
        assert "xid" in [one.id for one in chosen]

    @given(st.lists(st.text() | st.from_regex(r"[0-9],[0-9]*,[0-9]*,-;NVRM: Xid \(.*\): [0-9]*.*")))
    def test_never_an_exception(self, records: list[str]) -> None:
        for one in judge(*records):
            assert one.object != "check", one


class TestKernelLog:
    LINES = (
        "6,1,100,-;Linux version 6.8",
        "3,2,200,-;NVRM: Xid (PCI:0000:18:00): 79, x",
        "4,3,300,-;mlx5_core 0000:1a:00.0: health compromised",
    )

    def tree(self, root: Path, *lines: str) -> Directory:
        (root / "dev").mkdir()
        (root / "dev/kmsg").write_text("\n".join(lines))
        return Directory(str(root))

    def test_lines_of_a_tree_that_have_the_words(self, tmp_path: Path) -> None:
        tree = self.tree(tmp_path, *self.LINES)
        assert tree.kernel_log().text == "\n".join(self.LINES[1:])
        assert tree.kernel_log(("NVRM: Xid",)).text == self.LINES[1]

    def test_one_look_serves_checks_with_different_words(self, tmp_path: Path) -> None:
        looked: list[str] = []
        recorder = Recorder(self.tree(tmp_path, *self.LINES), before=looked.append)
        assert recorder.kernel_log(("NVRM: Xid",)).text == self.LINES[1]
        assert recorder.kernel_log(("mlx5_core ",)).text == self.LINES[2]
        assert looked == ["/dev/kmsg"]
        assert Recording(recorder.entries).kernel_log(("mlx5_core ",)).text == self.LINES[2]

    @pytest.mark.parametrize(
        "text",
        [
            "Command line: console=ttyS0 token=secret driver_async_probe=mlx5_core quiet",
            "audit: a user wrote NVRM: Xid (PCI:0000:18:00): 79, x",
        ],
    )
    def test_words_elsewhere_in_a_record_are_none(self, tmp_path: Path, text: str) -> None:
        """Kind: a recording that is attached to a bug report tells the kernel's command line."""
        assert self.tree(tmp_path, f"6,1,0,-;{text}").kernel_log().text == ""
        recorded = Recording({"/dev/kmsg": f"6,1,0,-;{text}"})
        assert recorded.kernel_log().text == ""

    def test_a_flood_of_one_word_pushes_out_no_other(self, tmp_path: Path) -> None:
        flood = [f"4,{n},{n},-;mlx5_core 0000:1a:00.0: failed" for n in range(5000)]
        text = self.tree(tmp_path, *self.LINES, *flood).kernel_log().text
        assert text is not None
        kept = text.splitlines()
        assert self.LINES[1] in kept
        assert kept[-1] == flood[-1]
        assert len(kept) < 600

    def test_no_log(self, tmp_path: Path) -> None:
        assert Directory(str(tmp_path)).kernel_log().absent
        assert Recording({"/sys/": []}).kernel_log().unreadable

    def test_of_this_machine(self) -> None:
        found = Directory().kernel_log()
        if found.error:
            pytest.skip(f"/dev/kmsg: {found.why}")
        assert found.text is not None
        assert all(
            x.partition(";")[2].startswith(source.KERNEL_WORDS) for x in found.text.splitlines()
        )

    def test_records_until_there_is_no_newer_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the kernel gives them: one a read, EPIPE for one overwritten, EAGAIN at the end."""
        answers: list[bytes | OSError] = [
            b"6,1,100,-;Linux version 6.8\n SUBSYSTEM=pci\n",
            BrokenPipeError(),
            b"3,9,200,-;NVRM: Xid (PCI:0000:18:00): 79, x\n DEVICE=+pci:0000:18:00.0\n",
            BlockingIOError(),
        ]

        def read(handle: int, size: int) -> bytes:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(os, "read", read)
        found = list(source._records(0))
        monkeypatch.undo()
        assert found == [
            b"6,1,100,-;Linux version 6.8",
            b"3,9,200,-;NVRM: Xid (PCI:0000:18:00): 79, x",
        ]
        assert answers == []

    def test_a_log_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "read", lambda handle, size: b"6,1,1,-;" + b"x" * 8000)
        count = sum(1 for _ in source._records(0))
        monkeypatch.undo()
        assert 0 < count < 10_000
