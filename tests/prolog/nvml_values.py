"""NVML as it answers on healthy machines, and what stands for it where there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped,unused-ignore]

from gpuhealth.nvml import Gpu, Nvml

GIB = 1 << 30
# An HGX board's GPUs, in the order of their addresses.
ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db"))
PROC = "/proc/driver/nvidia/gpus"


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-92446845070{index}"


def gpu(index: int = 0, **changed: Any) -> Gpu:
    """A healthy H200 of a board with NVSwitches, as `nvidia-smi -q` shows one at rest."""
    values: dict[str, Any] = {
        "minor": index,
        "uuid": uuid(index),
        "name": "NVIDIA H200",
        "pci": ADDRESSES[index],
        "mig": False,
        "ecc": True,
        "ecc_volatile": 0,
        "ecc_aggregate": 0,
        "remapped_correctable": 0,
        "remapped_uncorrectable": 0,
        "remap_pending": False,
        "remap_failed": False,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "clock_reasons": 1,
        "temperature_c": 39,
        "persistence": True,
        "memory_used_bytes": 0,
        "memory_total_bytes": 143771 << 20,
        "fabric_state": 3,
        "fabric_status": 0,
        "fabric_health": 0,
        "recovery_action": 0,
        "nvlinks": (True,) * 18,
        "processes": (),
        "mig_devices": (),
    }
    missing = {
        "retired_pending": "NVML_ERROR_NOT_SUPPORTED",
        "nvlink_remotes": "not asked",
        **changed.pop("missing", {}),
    }
    for name in missing:
        values.pop(name, None)
    for name in changed:
        missing.pop(name, None)
    values.update(changed)
    return Gpu(index, missing=missing, **values)


def h200(count: int = 8, **changed: Any) -> Nvml:
    """A node of such GPUs; ``changed`` holds for GPU 3, or for the last one of fewer."""
    odd = min(3, count - 1)
    gpus = tuple(gpu(index, **(changed if index == odd else {})) for index in range(count))
    return Nvml(driver="580.159.04", cuda="13.0", gpus=gpus)


class Library:
    """Stands for the module pynvml: its constants and errors, and the answers of these GPUs.

    ``fails`` maps a function's name to the code of the error that it ends with. Whatever NVML
    function isn't answered here can't be called.
    """

    def __init__(self, *gpus: Gpu, fails: dict[str, int] | None = None) -> None:
        self.gpus = gpus
        self.fails = fails or {}
        self.calls: list[str] = []

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not callable(getattr(pynvml, name, None)):
            return getattr(pynvml, name)
        answer: Callable[..., Any] = object.__getattribute__(self, f"_{name[4:]}")

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.fails:
                raise pynvml.NVMLError(self.fails[name])
            return answer(*args)

        return call

    @staticmethod
    def known(gpu: Gpu, name: str) -> Any:
        """A value of this GPU; where it has none, the error by which that shows."""
        value = getattr(gpu, name)
        if value is None:
            raise pynvml.NVMLError(getattr(pynvml, gpu.missing[name]))
        return value

    def _Init(self) -> None: ...

    def _DeviceGetCount(self) -> int:
        return len(self.gpus)

    def _SystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def _SystemGetCudaDriverVersion(self) -> int:
        return 13000

    def _DeviceGetHandleByIndex(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        if "handle" in gpu.missing:
            raise pynvml.NVMLError(getattr(pynvml, gpu.missing["handle"]))
        return gpu

    def _DeviceGetMinorNumber(self, gpu: Gpu) -> Any:
        return self.known(gpu, "minor")

    def _DeviceGetUUID(self, gpu: Any) -> Any:
        return gpu[0] if isinstance(gpu, tuple) else self.known(gpu, "uuid")

    def _DeviceGetName(self, gpu: Gpu) -> Any:
        return self.known(gpu, "name")

    def _DeviceGetPciInfo(self, gpu: Gpu) -> Any:
        domain, bus, device = self.known(gpu, "pci").split(".")[0].split(":")
        return SimpleNamespace(domain=int(domain, 16), bus=int(bus, 16), device=int(device, 16))

    def _DeviceGetMigMode(self, gpu: Gpu) -> Any:
        return [int(self.known(gpu, "mig"))] * 2

    def _DeviceGetEccMode(self, gpu: Gpu) -> Any:
        return [int(self.known(gpu, "ecc"))] * 2

    def _DeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> Any:
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile = counter == pynvml.NVML_VOLATILE_ECC
        return self.known(gpu, "ecc_volatile" if volatile else "ecc_aggregate")

    def _DeviceGetRetiredPagesPendingStatus(self, gpu: Gpu) -> Any:
        return int(self.known(gpu, "retired_pending"))

    def _DeviceGetRemappedRows(self, gpu: Gpu) -> Any:
        names = ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failed")
        return tuple(int(self.known(gpu, name)) for name in names)

    def _DeviceGetCurrPcieLinkWidth(self, gpu: Gpu) -> Any:
        return self.known(gpu, "pcie_width")

    def _DeviceGetMaxPcieLinkWidth(self, gpu: Gpu) -> Any:
        return self.known(gpu, "pcie_width_max")

    def _DeviceGetCurrPcieLinkGeneration(self, gpu: Gpu) -> Any:
        return self.known(gpu, "pcie_gen")

    def _DeviceGetMaxPcieLinkGeneration(self, gpu: Gpu) -> Any:
        return self.known(gpu, "pcie_gen_max")

    def _DeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> Any:
        return self.known(gpu, "clock_reasons")

    def _DeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> Any:
        return self.known(gpu, "clock_reasons")

    def _DeviceGetTemperature(self, gpu: Gpu, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self.known(gpu, "temperature_c")

    def _DeviceGetPersistenceMode(self, gpu: Gpu) -> Any:
        return int(self.known(gpu, "persistence"))

    def _DeviceGetMemoryInfo(self, gpu: Gpu, version: Any = None) -> Any:
        used, total = self.known(gpu, "memory_used_bytes"), self.known(gpu, "memory_total_bytes")
        return SimpleNamespace(used=used, total=total)

    def _DeviceGetFieldValues(self, gpu: Gpu, ids: list[int]) -> Any:
        links = len(gpu.nvlinks or ())
        answers = {
            pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: (pynvml.NVML_SUCCESS, links),
            pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: (
                (pynvml.NVML_SUCCESS, gpu.recovery_action)
                if gpu.recovery_action is not None
                else (getattr(pynvml, gpu.missing["recovery_action"]), 0)
            ),
        }
        found = []
        for code, value in (answers[one] for one in ids):
            field = pynvml.c_nvmlFieldValue_t()
            field.nvmlReturn = code
            field.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            field.value.uiVal = value
            found.append(field)
        return found

    def _DeviceGetNvLinkState(self, gpu: Gpu, link: int) -> Any:
        active = self.known(gpu, "nvlinks")[link]
        if active is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return int(active)

    def _DeviceGetNvLinkRemotePciInfo(self, gpu: Gpu, link: int) -> Any:
        if link == 1:  # as on a virtual machine that isn't shown the switches
            return SimpleNamespace(domain=0xFFFFFFFF, bus=0xFF, device=0xFF)
        return SimpleNamespace(domain=0, bus=5 + link % 4, device=0)

    def _DeviceGetGpuFabricInfoV(self, gpu: Gpu, pointer: Any) -> Any:
        info = pointer._obj
        info.state, info.status = self.known(gpu, "fabric_state"), gpu.fabric_status
        info.healthMask = gpu.fabric_health

    def _DeviceGetGpuFabricInfo(self, gpu: Gpu, pointer: Any) -> Any:
        info = pointer._obj
        info.state, info.status = self.known(gpu, "fabric_state"), gpu.fabric_status

    def _DeviceGetComputeRunningProcesses(self, gpu: Gpu) -> Any:
        none = 0xFFFFFFFF
        return [
            SimpleNamespace(
                pid=pid,
                usedGpuMemory=used,
                gpuInstanceId=none if gi is None else gi,
                computeInstanceId=none if ci is None else ci,
            )
            for pid, used, gi, ci in self.known(gpu, "processes")
        ]

    def _DeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def _DeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Any:
        # Places without a device lie between those with one.
        devices = gpu.mig_devices or ()
        if index % 2 or index // 2 >= len(devices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return devices[index // 2]

    def _DeviceGetGpuInstanceId(self, device: Any) -> Any:
        return device[1]

    def _DeviceGetComputeInstanceId(self, device: Any) -> Any:
        return device[2]
