from __future__ import annotations

import builtins
import json
from dataclasses import fields
from typing import Any

import pynvml  # type: ignore[import-untyped,unused-ignore]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import nvml
from gpuhealth.nvml import Gpu, Nvml, own_gpus
from nvml_values import GIB, Library, gpu, h200, uuid

MIG = "MIG-11111111-2222-3333-4444-55555555555{}"
CUT = (MIG.format(1), 1, 0), (MIG.format(2), 2, 0)


class TestRead:
    def test_healthy_gpus(self) -> None:
        known = h200(8)
        assert nvml.read(Library(*known.gpus), processes=True) == known

    def test_processes_are_read_only_when_asked_for(self) -> None:
        library = Library(gpu(0))
        (found,) = nvml.read(library).gpus
        assert (found.processes, found.why("processes")) == (None, "not asked")
        assert "nvmlDeviceGetComputeRunningProcesses" not in library.calls

    def test_what_is_at_the_other_end_of_the_links(self) -> None:
        (found,) = nvml.read(Library(gpu(0, nvlinks=(True, True, True, False))), remotes=True).gpus
        assert found.nvlink_remotes == ("0000:05:00.0", None, "0000:07:00.0", None)

    def test_mig(self) -> None:
        cut = gpu(
            0,
            mig=True,
            mig_devices=CUT,
            processes=((77, GIB, 2, 0),),
            missing={"nvlinks": "MIG"},
        )
        assert nvml.read(Library(cut), processes=True).gpus == (cut,)

    @pytest.mark.parametrize(
        ("code", "name"),
        [
            (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML_ERROR_DRIVER_NOT_LOADED"),
            (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML_ERROR_LIBRARY_NOT_FOUND"),
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
            (pynvml.NVML_ERROR_UNKNOWN, "NVML_ERROR_UNKNOWN"),
            (4711, "NVML_ERROR 4711"),
        ],
    )
    def test_nothing_is_known(self, code: int, name: str) -> None:
        assert nvml.read(Library(fails={"nvmlInit": code})) == Nvml(error=name)

    def test_without_nvidia_ml_py(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *args: Any, **options: Any) -> Any:
            if name == "pynvml":
                raise ModuleNotFoundError(name)
            return real(name, *args, **options)

        monkeypatch.setattr(builtins, "__import__", without)
        assert nvml.read() == Nvml(error=nvml.NOT_INSTALLED)

    def test_on_a_machine_without_the_driver(self) -> None:
        if not nvml.read().error:
            pytest.skip("this machine has GPUs")
        assert nvml.read().error in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED)

    def test_a_gpu_off_the_bus_hides_no_other_one(self) -> None:
        lost = Gpu(3, missing={"handle": "NVML_ERROR_GPU_IS_LOST"})
        known = h200(8)
        gpus = (*known.gpus[:3], lost, *known.gpus[4:])
        found = nvml.read(Library(*gpus), processes=True)
        assert found.gpus == gpus
        assert [one.index for one in found.gpus if one.lost] == [3]
        assert found.gpus[3].why("ecc_volatile") == "NVML_ERROR_GPU_IS_LOST"

    @pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_SUPPORTED])
    def test_a_call_that_fails_costs_its_own_values_alone(self, code: int) -> None:
        known = gpu(0, retired_pending=False)
        library = Library(known)
        whole = nvml.read(library, processes=True, remotes=True).gpus[0]
        every = {name for name in library.calls if name.startswith("nvmlDevice")}
        every -= {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
        assert len(every) > 20
        for name in every:
            (found,) = nvml.read(Library(known, fails={name: code}), True, True).gpus
            gone = {
                one.name
                for one in fields(Gpu)
                if one.name != "missing" and getattr(found, one.name) != getattr(whole, one.name)
            }
            assert gone, name
            if name == "nvmlDeviceGetNvLinkState":
                gone.discard("nvlink_remotes")
            if name == "nvmlDeviceGetNvLinkRemotePciInfo":
                assert found.nvlink_remotes == (None,) * 18
                continue
            if name == "nvmlDeviceGetFieldValues":
                # The number of links comes with it; without it they are counted by trying.
                gone.discard("nvlinks")
            for value in gone:
                assert getattr(found, value) is None, name
                assert found.why(value).startswith("NVML_ERROR_"), name
                assert found.unsupported(value) is (code == pynvml.NVML_ERROR_NOT_SUPPORTED)

    def test_what_an_older_driver_calls_otherwise(self) -> None:
        missing = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        older = {
            "nvmlDeviceGetCurrentClocksEventReasons": missing,
            "nvmlDeviceGetGpuFabricInfoV": missing,
        }
        (found,) = nvml.read(Library(gpu(0, clock_reasons=0x40), fails=older)).gpus
        assert (found.clock_reasons, found.fabric_state, found.fabric_status) == (0x40, 3, 0)
        assert found.unsupported("fabric_health")

    def test_a_field_that_the_driver_does_not_know(self) -> None:
        known = gpu(0, missing={"recovery_action": "NVML_ERROR_INVALID_ARGUMENT"})
        (found,) = nvml.read(Library(known)).gpus
        assert found.unsupported("recovery_action")
        assert found.nvlinks == (True,) * 18

    def test_one_link_that_can_not_be_read(self) -> None:
        links = (True, None, False)
        assert nvml.read(Library(gpu(0, nvlinks=links))).gpus[0].nvlinks == links

    def test_more_gpus_than_a_machine_can_have(self) -> None:
        assert nvml.read(Library(*[gpu(0)] * 65)).error == "65 GPUs"


class TestRecording:
    @pytest.mark.parametrize(
        "known",
        [
            Nvml(),
            Nvml(error="hung"),
            h200(8),
            h200(2, processes=((1, None, None, None),), nvlinks=(True, None), mig_devices=CUT),
            Nvml(gpus=(Gpu(0, missing={"handle": "NVML_ERROR_GPU_IS_LOST"}),)),
        ],
        ids=["none", "hung", "h200", "odd", "lost"],
    )
    def test_what_is_written_is_read_again(self, known: Nvml) -> None:
        assert nvml.from_dict(json.loads(json.dumps(nvml.to_dict(known)))) == known

    @pytest.mark.parametrize(
        "value",
        [None, [], "x", 3, {"error": 3}, {"gpus": {}}, {"gpus": [{"index": 1}, {"index": 1}]}],
    )
    def test_what_makes_no_sense_as_a_whole(self, value: object) -> None:
        assert nvml.from_dict(value) == Nvml(error="unreadable")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("ecc_volatile", "0"),
            ("ecc_volatile", True),
            ("ecc_volatile", 0.5),
            ("mig", 0),
            ("uuid", 7),
            ("nvlinks", [1, 1]),
            ("nvlinks", "active"),
            ("processes", [[1, 2]]),
            ("processes", [["1", 2, None, None]]),
            ("mig_devices", [["MIG-1", "1", 0]]),
        ],
    )
    def test_a_value_that_makes_no_sense_is_unreadable(self, name: str, value: object) -> None:
        recorded = nvml.to_dict(h200(1))
        recorded["gpus"][0][name] = value
        (found,) = nvml.from_dict(recorded).gpus
        assert (getattr(found, name), found.why(name)) == (None, "unreadable")
        assert found.memory_total_bytes == 143771 << 20

    def test_what_an_older_recording_lacks_is_not_recorded(self) -> None:
        recorded = nvml.to_dict(h200(1))
        del recorded["gpus"][0]["recovery_action"]
        assert nvml.from_dict(recorded).gpus[0].why("recovery_action") == "not recorded"

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )

    @given(
        st.dictionaries(
            st.sampled_from([one.name for one in fields(Gpu)]) | st.text(), json_values, max_size=6
        )
        | json_values
    )
    def test_never_an_exception(self, value: Any) -> None:
        for one in (value, {"gpus": [value]}, {"gpus": value}):
            found = nvml.from_dict(one)
            for each in found.gpus:
                assert isinstance(each.label, str)
            assert nvml.from_dict(nvml.to_dict(found)) == found


class TestOwnGpus:
    NODE = h200(8)

    @pytest.mark.parametrize(
        ("given_gpus", "own"),
        [
            ((), set()),
            (("0",), {0}),
            (("7", "0"), {0, 7}),
            (("0-3", "5"), {0, 1, 2, 3, 5}),
            ((uuid(2),), {2}),
            ((uuid(2).upper(), "3"), {2, 3}),
        ],
    )
    def test_which(self, given_gpus: tuple[str, ...], own: set[int]) -> None:
        found = own_gpus(self.NODE, given_gpus)
        assert found is not None
        assert found == dict.fromkeys(own, frozenset())

    @pytest.mark.parametrize(
        "item",
        [
            *(
                "",
                " ",
                "8",
                "x",
                "-1",
                "1-",
                "0-63",
                "3-1",
                "0-9999",
                "0x1",
                "١",
                "0;reboot",
                "0\n",
            ),
            *("GPU-", "NoDevFiles", uuid(2)[:-1], "MIG-", MIG.format(1)),
        ],
    )
    def test_what_proves_nothing(self, item: str) -> None:
        assert own_gpus(self.NODE, (item,)) is None
        assert own_gpus(self.NODE, ("0", item)) is None

    def test_without_nvml(self) -> None:
        assert own_gpus(None, ("0",)) is None
        assert own_gpus(Nvml(error="hung"), ("0",)) is None

    def test_numbers_are_those_of_the_device_files(self) -> None:
        # NVML counts by PCI address, the driver in the order in which it found them.
        node = Nvml(gpus=(gpu(0, minor=3), gpu(1, minor=0), gpu(2, missing={"minor": "hung"})))
        assert own_gpus(node, ("3",)) == {0: frozenset()}
        assert own_gpus(node, ("0",)) == {1: frozenset()}
        assert own_gpus(node, ("2",)) is None

    CUT_NODE = h200(2, mig=True, mig_devices=CUT)

    @pytest.mark.parametrize("name", [MIG.format(2), MIG.format(2).lower(), f"MIG-{uuid(1)}/2/0"])
    def test_mig_devices(self, name: str) -> None:
        assert own_gpus(self.CUT_NODE, (name,)) == {1: frozenset({MIG.format(2)})}

    def test_several_mig_devices_of_a_gpu(self) -> None:
        names = (MIG.format(2), MIG.format(1))
        assert own_gpus(self.CUT_NODE, names) == {1: frozenset(names)}
        assert own_gpus(self.CUT_NODE, (*names, uuid(1))) == {1: frozenset()}
        assert own_gpus(self.CUT_NODE, (uuid(1), *names)) == {1: frozenset()}

    @pytest.mark.parametrize("item", ["0", MIG.format(9), f"MIG-{uuid(1)}/3/0"])
    def test_on_a_mig_node_a_number_proves_nothing(self, item: str) -> None:
        assert own_gpus(self.CUT_NODE, (item,)) is None

    @given(st.lists(st.text()).map(tuple))
    def test_never_an_exception(self, items: tuple[str, ...]) -> None:
        own = own_gpus(self.NODE, items)
        assert own is None or set(own) <= set(range(8))
