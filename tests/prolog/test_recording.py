from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhealth import recording
from gpuhealth.compiler import compile_policy
from gpuhealth.examination import Request, examine, examine_recording
from gpuhealth.source import Directory, load
from recorded import POLICY, h100, write

UUID = "GPU-8f0e1a2b-1111-2222-3333-445566778899"
PRIVATE: dict[str, Any] = {
    "/proc/sys/kernel/hostname": "gpu-7.example.org",
    "/sys/class/infiniband/mlx5_0/node_desc": "gpu-7 mlx5_0",
    "/sys/class/infiniband/mlx5_0/node_guid": "a088:c203:0001:1000",
    "/sys/class/infiniband/mlx5_0/ports/1/gids/0": "fe80:0000:0000:0000:a088:c203:0001:1000",
    "/sys/class/infiniband/mlx5_0/ports/1/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000",
    "/sys/class/infiniband/mlx5_0/ports/1/gids/2": "0000:0000:0000:0000:0000:ffff:0a01:0203",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "/sys/class/net/eth0/address": "a0:88:c2:03:00:01",
    "/proc/driver/nvidia/gpus/0000:18:00.0/information": f"GPU UUID: {UUID}",
    "/proc/self/mounts": (
        "nfs.example.org:/home /home nfs rw,addr=10.1.2.3 0 0\n/dev/sda1 / ext4 rw 0 0"
    ),
    "/dev/kmsg": "6,1,5,-;NVRM: Xid (PCI:0000:18:00): 13, pid=4242, name=secret, Ch 1",
    "/proc/4242/comm": "secret",
    "nvml": {"gpus": [{"uuid": UUID, "pci": "0000:18:00.0"}]},
}
SECRETS = (
    *("example", "gpu-7", "a088", "c203", "a0:88", "8f0e1a2b"),
    *("10.1.2.3", "0a01:0203", "secret", "pid=4242", "nfs."),
)


class TestAnonymous:
    def test_nothing_tells_whose_it_is(self) -> None:
        text = json.dumps(recording.anonymous(PRIVATE))
        assert not [secret for secret in SECRETS if secret in text.lower()]

    def test_the_same_by_the_same(self) -> None:
        kept = recording.anonymous(PRIVATE)
        uuid = kept["nvml"]["gpus"][0]["uuid"]
        assert uuid in kept["/proc/driver/nvidia/gpus/0000:18:00.0/information"]
        guid = kept["/sys/class/infiniband/mlx5_0/node_guid"]
        assert kept["/sys/class/infiniband/mlx5_0/ports/1/gids/0"].endswith(guid)

    def test_what_checks_look_at_stays(self) -> None:
        kept = recording.anonymous(PRIVATE)
        gids = "/sys/class/infiniband/mlx5_0/ports/1/gids"
        assert kept[f"{gids}/1"] == PRIVATE[f"{gids}/1"]
        assert kept[f"{gids}/2"].startswith("0000:0000:0000:0000:0000:ffff:")
        assert kept["/sys/class/infiniband/mlx5_0/ports/1/rate"] == "400 Gb/sec (4X NDR)"
        assert kept["nvml"]["gpus"][0]["pci"] == "0000:18:00.0"
        assert kept["/dev/kmsg"].startswith("6,1,5,-;NVRM: Xid (PCI:0000:18:00): 13, ")
        assert "/proc/self/mounts" not in kept

    def test_it_is_a_recording_still(self) -> None:
        assert load(json.dumps(recording.anonymous(PRIVATE)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write({**h100(), "/proc/sys/kernel/hostname": "gpu-9"}, tmp_path)
    return tmp_path


@pytest.mark.parametrize("anonymous", [False, True])
def test_a_recording_is_judged_as_its_node(tree: Path, anonymous: bool) -> None:
    (tree / "sys/class/infiniband/mlx5_4/ports/1/state").write_text("1: DOWN\n")
    kept = recording.record(Directory(str(tree)), "gpu-9", with_nvml=False)
    kept = load(json.dumps(recording.anonymous(kept) if anonymous else kept))
    request = Request("gpu-9", compile_policy(POLICY % "", "f"))
    live = examine(request, Directory(str(tree)), with_nvml=False)
    replayed = examine_recording(request, kept)
    assert replayed.findings == live.findings
    sick = [one.object for one in live.findings if one.check == "ib_port" and one.remedy]
    assert sick == ["mlx5_4:1"]


@pytest.mark.parametrize("ports", ["", 'ports: {names: ["mlx5_0:1"]}, gpudirect: any, '])
def test_a_node_without_hcas_is_recorded_as_fully(tmp_path: Path, ports: str) -> None:
    write({"/proc/sys/kernel/hostname": "gpu-9", "/proc/sys/kernel/osrelease": "6.8.0"}, tmp_path)
    text = f"skus: {{a: {{match: {{nodes: gpu-9}}, {ports}versions: {{kernel: '6.8.*'}}}}}}"
    request = Request("gpu-9", compile_policy(text, "f"))
    kept = recording.record(Directory(str(tmp_path)), "gpu-9", with_nvml=False)
    live = examine(request, Directory(str(tmp_path)), with_nvml=False)
    assert examine_recording(request, kept).findings == live.findings


def test_the_nodes_name(tree: Path) -> None:
    assert recording.node_name(Directory(str(tree))) == "gpu-9"
