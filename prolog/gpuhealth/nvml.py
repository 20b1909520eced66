"""What NVML says of a node's GPUs: each value, or why it is missing.

Constants and meanings are those of NVIDIA's nvml.h, which nvidia-ml-py (``pynvml``) repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Optional

NOT_INSTALLED = "not installed"
NOT_RECORDED = "not recorded"
NOT_ASKED = "not asked"
MALFORMED = "unreadable"
LIBRARY_NOT_FOUND = "NVML_ERROR_LIBRARY_NOT_FOUND"
DRIVER_NOT_LOADED = "NVML_ERROR_DRIVER_NOT_LOADED"
VERSION_MISMATCH = "NVML_ERROR_LIB_RM_VERSION_MISMATCH"
NOT_SUPPORTED = "NVML_ERROR_NOT_SUPPORTED"
FUNCTION_NOT_FOUND = "NVML_ERROR_FUNCTION_NOT_FOUND"
GPU_IS_LOST = "NVML_ERROR_GPU_IS_LOST"

# nvmlGpuFabricState_t
FABRIC_NOT_SUPPORTED, FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED = range(4)

# More than any machine has: a count beyond it is none.
_MAX_GPUS = 64
_MAX_LINKS = 64
# What drivers before NVML_FI_DEV_NVLINK_LINK_COUNT have at most (NVML_NVLINK_MAX_LINKS).
_OLD_LINKS = 18
_MAX_MIG = 64
# nvmlProcessInfo_t: the process is on no MIG device.
_NO_INSTANCE = 0xFFFFFFFF


@dataclass(frozen=True)
class Gpu:
    """One GPU. A value that is None has its reason in ``missing``; see `why`.

    ``index`` is NVML's, in the order of PCI addresses; ``minor`` the N of /dev/nvidiaN; ``pci``
    the address as sysfs writes it. ``ecc_volatile`` and ``ecc_aggregate`` count uncorrected
    errors, since the driver was loaded and since ever. ``pcie_gen`` is 5 for 32 GT/s a lane.
    ``clock_reasons`` is nvmlClocksEventReasons' mask. ``processes`` are (pid, bytes, GPU
    instance, compute instance), ``nvlinks`` says of each link whether it is active,
    ``nvlink_remotes`` the PCI address at its other end, ``mig_devices`` are (UUID, GPU instance,
    compute instance). ``fabric_state`` and ``fabric_status`` are nvmlGpuFabricInfo_t's,
    ``fabric_health`` its mask. ``recovery_action`` is nvmlDeviceGpuRecoveryAction_t.
    """

    index: int
    minor: Optional[int] = None
    uuid: Optional[str] = None
    name: Optional[str] = None
    pci: Optional[str] = None
    mig: Optional[bool] = None
    ecc: Optional[bool] = None
    ecc_volatile: Optional[int] = None
    ecc_aggregate: Optional[int] = None
    retired_pending: Optional[bool] = None
    remapped_correctable: Optional[int] = None
    remapped_uncorrectable: Optional[int] = None
    remap_pending: Optional[bool] = None
    remap_failed: Optional[bool] = None
    pcie_width: Optional[int] = None
    pcie_width_max: Optional[int] = None
    pcie_gen: Optional[int] = None
    pcie_gen_max: Optional[int] = None
    clock_reasons: Optional[int] = None
    temperature_c: Optional[int] = None
    persistence: Optional[bool] = None
    memory_used_bytes: Optional[int] = None
    memory_total_bytes: Optional[int] = None
    fabric_state: Optional[int] = None
    fabric_status: Optional[int] = None
    fabric_health: Optional[int] = None
    recovery_action: Optional[int] = None
    nvlinks: Optional[tuple[Optional[bool], ...]] = None
    nvlink_remotes: Optional[tuple[Optional[str], ...]] = None
    processes: Optional[tuple[tuple[int, Optional[int], Optional[int], Optional[int]], ...]] = None
    mig_devices: Optional[tuple[tuple[str, int, int], ...]] = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def why(self, name: str) -> str:
        """Return why a value is None: an NVML error's name, or words."""
        return self.missing.get(name) or self.missing.get("handle") or NOT_RECORDED

    def unsupported(self, name: str) -> bool:
        """Whether this kind of GPU, or of driver, has no such value at all."""
        return self.why(name) in (NOT_SUPPORTED, FUNCTION_NOT_FOUND)

    @property
    def lost(self) -> bool:
        """Whether NVML says that the GPU has fallen off the bus."""
        return GPU_IS_LOST in self.missing.values()

    @property
    def label(self) -> str:
        """What people find it by: ``nvidia3/0000:5d:00.0``."""
        names = [f"nvidia{self.minor}"] if self.minor is not None else []
        names += [self.pci] if self.pci is not None else []
        return "/".join(names) or f"NVML index {self.index}"


@dataclass(frozen=True)
class Nvml:
    """All GPUs. ``error`` is "", or why nothing is known of any of them.

    It is an NVML error's name, ``not installed`` (nvidia-ml-py is missing), ``hung`` or ``died``.
    """

    error: str = ""
    driver: Optional[str] = None
    cuda: Optional[str] = None
    gpus: tuple[Gpu, ...] = ()


def read(library: Any = None, processes: bool = False, remotes: bool = False) -> Nvml:
    """Ask NVML; ``library`` is what stands for the module pynvml. Never raises.

    Any call may hang for good if the driver does, so ask in a process that can be left behind.
    """
    if library is None:
        try:
            import pynvml  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return Nvml(error=NOT_INSTALLED)
        library = pynvml
    # NVML is not shut down: with persistence mode off that takes as long as starting it, and
    # whoever asks ends soon.
    try:
        library.nvmlInit()
        count = int(library.nvmlDeviceGetCount())
    except Exception as error:  # noqa: BLE001 - it is told, by name
        return Nvml(error=_reason(library, error))
    if not 0 <= count <= _MAX_GPUS:
        return Nvml(error=f"{count} GPUs")
    return Nvml(
        driver=_optional(library, "nvmlSystemGetDriverVersion"),
        cuda=_cuda(_optional(library, "nvmlSystemGetCudaDriverVersion")),
        gpus=tuple(_gpu(library, index, processes, remotes) for index in range(count)),
    )


def _reason(library: Any, error: Exception) -> str:
    """Return NVML's name of an error (``NVML_ERROR_NOT_SUPPORTED``)."""
    value = getattr(error, "value", None)
    if isinstance(value, int):
        for name in dir(library):
            if name.startswith("NVML_ERROR_") and getattr(library, name) == value:
                return name
        return f"NVML_ERROR {value}"
    # What an older nvidia-ml-py does not know yet.
    return FUNCTION_NOT_FOUND if isinstance(error, AttributeError) else type(error).__name__


def _optional(library: Any, function: str) -> Any:
    try:
        return getattr(library, function)()
    except Exception:  # noqa: BLE001 - None says that it is not known
        return None


def _cuda(version: Any) -> Optional[str]:
    return f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else None


_Values = dict[str, Any]


def _gpu(library: Any, index: int, processes: bool, remotes: bool) -> Gpu:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # noqa: BLE001
        return Gpu(index, missing={"handle": _reason(library, error)})
    values: _Values = {}
    missing: dict[str, str] = {}
    readers = [*_READERS, (("mig_devices",), _mig_devices), (("nvlinks",), _nvlinks)]
    if processes:
        readers.append((("processes",), _processes))
    else:
        missing["processes"] = NOT_ASKED
    if remotes:
        readers.append((("nvlink_remotes",), _nvlink_remotes))
    else:
        missing["nvlink_remotes"] = NOT_ASKED
    for names, reader in readers:
        try:
            found = reader(library, handle, values)
        except Exception as error:  # noqa: BLE001
            missing.update(dict.fromkeys(names, _reason(library, error)))
            continue
        for name, value in found.items():
            if isinstance(value, _Missing):
                missing[name] = value.why
            else:
                values[name] = value
    return Gpu(index, missing=missing, **{k: v for k, v in values.items() if k != "links"})


class _Missing:
    def __init__(self, why: str) -> None:
        self.why = why


def _address(info: Any) -> str:
    # NVML has no function in it: a GPU, or a switch, is function 0.
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _pci(library: Any, handle: Any, known: _Values) -> _Values:
    return {"pci": _address(library.nvmlDeviceGetPciInfo(handle))}


def _mig(library: Any, handle: Any, known: _Values) -> _Values:
    return {"mig": bool(library.nvmlDeviceGetMigMode(handle)[0])}


def _ecc(library: Any, handle: Any, known: _Values) -> _Values:
    return {"ecc": bool(library.nvmlDeviceGetEccMode(handle)[0])}


def _ecc_volatile(library: Any, handle: Any, known: _Values) -> _Values:
    kind = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    counter = library.NVML_VOLATILE_ECC
    return {"ecc_volatile": int(library.nvmlDeviceGetTotalEccErrors(handle, kind, counter))}


def _ecc_aggregate(library: Any, handle: Any, known: _Values) -> _Values:
    kind = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    counter = library.NVML_AGGREGATE_ECC
    return {"ecc_aggregate": int(library.nvmlDeviceGetTotalEccErrors(handle, kind, counter))}


_REMAP = ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failed")


def _remapped(library: Any, handle: Any, known: _Values) -> _Values:
    correctable, uncorrectable, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
    return dict(zip(_REMAP, (int(correctable), int(uncorrectable), bool(pending), bool(failed))))


def _clock_reasons(library: Any, handle: Any, known: _Values) -> _Values:
    try:
        mask = library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception as error:
        if _reason(library, error) != FUNCTION_NOT_FOUND:
            raise
        mask = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # before driver 535
    return {"clock_reasons": int(mask)}


def _memory(library: Any, handle: Any, known: _Values) -> _Values:
    try:
        # The second version counts what the driver keeps for itself apart.
        info = library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2)
    except Exception as error:
        if _reason(library, error) != FUNCTION_NOT_FOUND:
            raise
        info = library.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": int(info.used), "memory_total_bytes": int(info.total)}


_FABRIC = ("fabric_state", "fabric_status", "fabric_health")


def _fabric(library: Any, handle: Any, known: _Values) -> _Values:
    from ctypes import byref

    try:
        info = library.c_nvmlGpuFabricInfo_v2_t()
        library.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        health: Any = int(info.healthMask)
    except Exception as error:
        if _reason(library, error) != FUNCTION_NOT_FOUND:
            raise
        info = library.c_nvmlGpuFabricInfo_t()
        library.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
        health = _Missing(FUNCTION_NOT_FOUND)
    return dict(zip(_FABRIC, (int(info.state), int(info.status), health)))


# The member of nvmlValue_t for each nvmlValueType_t that the fields below have.
_MEMBERS = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def _fields(library: Any, handle: Any, known: _Values) -> _Values:
    ids = {
        "links": library.NVML_FI_DEV_NVLINK_LINK_COUNT,
        "recovery_action": library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    }
    found: _Values = {}
    for name, item in zip(ids, library.nvmlDeviceGetFieldValues(handle, list(ids.values()))):
        code = int(item.nvmlReturn)
        if code == library.NVML_ERROR_INVALID_ARGUMENT:
            found[name] = _Missing(NOT_SUPPORTED)  # a driver that has no such field yet
        elif code:
            found[name] = _Missing(_reason(library, library.NVMLError(code)))
        else:
            found[name] = int(getattr(item.value, _MEMBERS[int(item.valueType)]))
    return found


def _nvlinks(library: Any, handle: Any, known: _Values) -> _Values:
    if known.get("mig"):
        return {"nvlinks": _Missing("MIG")}
    found: list[Optional[bool]] = []
    why = NOT_SUPPORTED
    for link in range(min(known.get("links", _OLD_LINKS), _MAX_LINKS)):
        try:
            found.append(bool(library.nvmlDeviceGetNvLinkState(handle, link)))
        except Exception as error:  # noqa: BLE001
            why = _reason(library, error)
            if why in ("NVML_ERROR_INVALID_ARGUMENT", NOT_SUPPORTED) and "links" not in known:
                break  # there are no more
            found.append(None)
    if all(active is None for active in found):
        return {"nvlinks": _Missing(why)}
    return {"nvlinks": tuple(found)}


def _nvlink_remotes(library: Any, handle: Any, known: _Values) -> _Values:
    found: list[Optional[str]] = []
    for link, active in enumerate(known.get("nvlinks", ())):
        try:
            info = library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link) if active else None
        except Exception:  # noqa: BLE001 - None says that it is not known
            info = None
        # A virtual machine that isn't shown the NVSwitches gets an address of ones.
        known_one = info is not None and info.domain != 0xFFFFFFFF
        found.append(_address(info) if known_one else None)
    return {"nvlink_remotes": tuple(found)}


def _instance(value: Any) -> Optional[int]:
    return None if value is None or value == _NO_INSTANCE else int(value)


def _processes(library: Any, handle: Any, known: _Values) -> _Values:
    found = []
    for one in library.nvmlDeviceGetComputeRunningProcesses(handle):
        used = one.usedGpuMemory
        found.append(
            (
                int(one.pid),
                None if used is None else int(used),
                _instance(getattr(one, "gpuInstanceId", None)),
                _instance(getattr(one, "computeInstanceId", None)),
            )
        )
    return {"processes": tuple(found)}


def _mig_devices(library: Any, handle: Any, known: _Values) -> _Values:
    if not known.get("mig"):
        return {"mig_devices": ()}
    found = []
    for index in range(min(int(library.nvmlDeviceGetMaxMigDeviceCount(handle)), _MAX_MIG)):
        try:
            device = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except Exception as error:
            if _reason(library, error) == "NVML_ERROR_NOT_FOUND":
                continue  # no device in this place
            raise
        found.append(
            (
                str(library.nvmlDeviceGetUUID(device)),
                int(library.nvmlDeviceGetGpuInstanceId(device)),
                int(library.nvmlDeviceGetComputeInstanceId(device)),
            )
        )
    return {"mig_devices": tuple(found)}


_Reader = Callable[[Any, Any, _Values], _Values]


def _call(name: str, function: str, make: Callable[[Any], Any], *args: Any) -> Any:
    """Make the reader of a value that one call gives."""

    def ask(library: Any, handle: Any, known: _Values) -> _Values:
        return {name: make(getattr(library, function)(handle, *args))}

    return (name,), ask


_READERS: list[tuple[tuple[str, ...], _Reader]] = [
    _call("minor", "nvmlDeviceGetMinorNumber", int),
    _call("uuid", "nvmlDeviceGetUUID", str),
    _call("name", "nvmlDeviceGetName", str),
    (("pci",), _pci),
    (("mig",), _mig),
    (("ecc",), _ecc),
    (("ecc_volatile",), _ecc_volatile),
    (("ecc_aggregate",), _ecc_aggregate),
    _call("retired_pending", "nvmlDeviceGetRetiredPagesPendingStatus", bool),
    (_REMAP, _remapped),
    _call("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", int),
    _call("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", int),
    _call("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", int),
    _call("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", int),
    (("clock_reasons",), _clock_reasons),
    _call("temperature_c", "nvmlDeviceGetTemperature", int, 0),
    _call("persistence", "nvmlDeviceGetPersistenceMode", bool),
    (("memory_used_bytes", "memory_total_bytes"), _memory),
    (_FABRIC, _fabric),
    (("recovery_action",), _fields),
]


def to_dict(nvml: Nvml) -> dict[str, Any]:
    """Return what stands under ``nvml`` in a recording."""
    found = {**asdict(nvml), "gpus": [_without_none(asdict(gpu)) for gpu in nvml.gpus]}
    return _without_none(found)


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)  # noqa: TRY004
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)  # noqa: TRY004
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)  # noqa: TRY004
    return value


def _or_none(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else kind(value)


def _many(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError(value)  # noqa: TRY004
        return tuple(kind(item) for item in value)

    return convert


def _row(*kinds: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise ValueError(value)
        return tuple(kind(item) for kind, item in zip(kinds, value))

    return convert


_LONGER: dict[str, Callable[[Any], Any]] = {
    "nvlinks": _many(_or_none(_bool)),
    "nvlink_remotes": _many(_or_none(_text)),
    "processes": _many(_row(_int, _or_none(_int), _or_none(_int), _or_none(_int))),
    "mig_devices": _many(_row(_text, _int, _int)),
}
_SIMPLE = {"Optional[int]": _int, "Optional[bool]": _bool, "Optional[str]": _text}


def from_dict(value: Any) -> Nvml:
    """Return what a recording holds; what makes no sense in it is missing, as unreadable."""
    if not isinstance(value, dict):
        return Nvml(error=MALFORMED)
    error, gpus = value.get("error", ""), value.get("gpus", [])
    if not isinstance(error, str) or not isinstance(gpus, list):
        return Nvml(error=MALFORMED)
    found = [_gpu_from(index, item) for index, item in enumerate(gpus)]
    if len({gpu.index for gpu in found}) != len(found):
        return Nvml(error=MALFORMED)
    return Nvml(
        error=error,
        driver=_text_or_none(value.get("driver")),
        cuda=_text_or_none(value.get("cuda")),
        gpus=tuple(found),
    )


def _text_or_none(value: Any) -> Optional[str]:
    return value if isinstance(value, str) else None


def _gpu_from(place: int, value: Any) -> Gpu:
    if not isinstance(value, dict):
        return Gpu(place, missing={"handle": MALFORMED})
    noted = value.get("missing")
    missing: dict[str, str] = {}
    if isinstance(noted, dict):
        missing = {str(name): why for name, why in noted.items() if isinstance(why, str)}
    found: dict[str, Any] = {}
    for one in fields(Gpu):
        if one.name in ("index", "missing") or value.get(one.name) is None:
            continue
        kind = _LONGER.get(one.name) or _SIMPLE[str(one.type)]
        try:
            found[one.name] = kind(value[one.name])
        except ValueError:
            missing[one.name] = MALFORMED
    try:
        index = _int(value.get("index", place))
    except ValueError:
        index = place
    return Gpu(index, missing=missing, **found)


# Compiled where they are used: most runs use none of them.
_RANGE = r"([0-9]{1,4})(?:-([0-9]{1,4}))?\Z"
_MIG_OLD = r"(?i)MIG-(GPU-[0-9a-f-]+)/([0-9]{1,3})/([0-9]{1,3})\Z"


def own_gpus(nvml: Optional[Nvml], gpus: tuple[str, ...]) -> Optional[dict[int, frozenset[str]]]:
    """Return NVML's indices of a job's GPUs, each with the UUIDs of the job's MIG devices on it.

    No UUIDs: the whole GPU is the job's. ``gpus`` is what Slurm says: numbers are the N of
    /dev/nvidiaN, others are UUIDs of GPUs or names of MIG devices. None if that does not prove
    which GPUs they are: with MIG, a number counts Slurm's devices, and no GPUs.
    """
    if nvml is None or nvml.error:
        return None
    own: dict[int, frozenset[str]] = {}
    for item in gpus:
        found = _numbered(nvml, item) if re.match(_RANGE, item) else _named(nvml, item)
        if not found:
            return None
        for index, devices in found.items():
            # A whole GPU and a part of it: the whole one.
            whole = index in own and (not own[index] or not devices)
            own[index] = frozenset() if whole else own.get(index, frozenset()) | devices
    return own


def _numbered(nvml: Nvml, item: str) -> dict[int, frozenset[str]]:
    match = re.match(_RANGE, item)
    if match is None or any(gpu.mig for gpu in nvml.gpus):
        return {}
    first = int(match[1])
    wanted = range(first, int(match[2] or first) + 1)
    minors = {gpu.minor: gpu.index for gpu in nvml.gpus if gpu.minor is not None}
    if len(wanted) > _MAX_GPUS or not all(minor in minors for minor in wanted):
        return {}
    return {minors[minor]: frozenset() for minor in wanted}


def _named(nvml: Nvml, item: str) -> dict[int, frozenset[str]]:
    name = item.lower()
    old = re.match(_MIG_OLD, item)
    for gpu in nvml.gpus:
        if gpu.uuid is not None and gpu.uuid.lower() == name:
            return {gpu.index: frozenset()}
        for uuid, instance, compute in gpu.mig_devices or ():
            if uuid.lower() == name:
                return {gpu.index: frozenset({uuid})}
            if not old or not gpu.uuid or gpu.uuid.lower() != old[1].lower():
                continue
            if (instance, compute) == (int(old[2]), int(old[3])):
                return {gpu.index: frozenset({uuid})}
    return {}
