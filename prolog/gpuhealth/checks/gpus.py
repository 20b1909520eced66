"""GPUs: are all of them there, whole, and free for the job that gets them?

What NVML can't say of a GPU is unknown, unless this kind of GPU, or of driver, has no such value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Optional, Union

from gpuhealth import nvml
from gpuhealth.check import EPILOG, PERIODIC, PROLOG, Node, check
from gpuhealth.finding import DRAIN, WARN, Finding, healthy, unhealthy, unknown
from gpuhealth.nvml import Gpu

# A directory for each GPU that the kernel's driver has bound
# (NVIDIA/open-gpu-kernel-modules:kernel-open/nvidia/nv-procfs.c).
DRIVER = "/proc/driver/nvidia/gpus"
ALL = "GPUs"

# After a boot the fabric manager needs minutes to bring up the switches of a large machine.
FABRIC_START_S = 300.0

_DMESG = "look for its PCI address in dmesg and lspci, power the node off and on, then replace it"
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset), or reboot"
_RMA = "run the vendor's diagnostics (dcgmi diag -r 3) and have the GPU replaced"


def _silent(node: Node, id: str) -> Iterator[Finding]:
    """Say, once a check, that NVML says nothing of any GPU; nothing on a machine without them."""
    error = node.nvml.error if node.nvml else ""
    if not error:
        return
    without = error in (nvml.NOT_INSTALLED, nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED)
    if without and not node.policy.gpus and node.source.names(DRIVER).absent:
        return
    yield unknown(id, ALL, f"NVML: {error}", "", "see the finding of gpu_count")


def _each(node: Node, id: str, judge: Callable[[Gpu], Finding]) -> Iterator[Finding]:
    """Judge every GPU that NVML shows."""
    yield from _silent(node, id)
    for gpu in node.nvml.gpus if node.nvml else ():
        yield judge(gpu)


def _absent(id: str, gpu: Gpu, name: str, expected: str = "") -> Finding:
    """Return the finding of a value that is missing."""
    if gpu.unsupported(name):
        return healthy(id, gpu.label, "not supported")
    return unknown(id, gpu.label, f"{name}: {gpu.why(name)}", expected, "look at nvidia-smi -q")


def _own(node: Node, id: str) -> Union[Finding, Mapping[int, frozenset[str]]]:
    """Return the GPUs of the node's job, or the finding that it isn't known which these are."""
    gpus = (node.job.gpus if node.job else None) or ()
    own = nvml.own_gpus(node.nvml, gpus)
    if own is not None:
        return own
    given = ",".join(gpus)
    return unknown(id, "GPUs of the job", given[:60], "", "compare gres.conf with nvidia-smi -L")


# gpu_count


@check(
    "gpu_count",
    "GPUs that the driver shows, against the policy's number; those off the bus by name",
    action=DRAIN,
    needs="nvml",
)
def gpu_count(node: Node) -> Iterator[Finding]:
    """Compare what NVML (without it: the kernel's driver) shows with what should be there."""
    answer = node.nvml
    if answer is None or answer.error in (nvml.NOT_INSTALLED, nvml.LIBRARY_NOT_FOUND):
        yield from _kernel_count(node)
    elif answer.error:
        yield from _no_answer(node, answer.error)
    else:
        yield from _nvml_count(node, answer.gpus)


def _number(count: Optional[int]) -> str:
    return "" if count is None else "1 GPU" if count == 1 else f"{count} GPUs"


def _none_there(observed: str, want: int) -> Finding:
    # Not one of them: a driver that isn't there rather than so many broken GPUs.
    remedy = "load the nvidia module (modprobe nvidia) and look at dmesg and lspci"
    return replace(
        unhealthy("gpu_count", ALL, observed, _number(want), remedy),
        systemic=True,
    )


def _too_many(count: int, want: int) -> Finding:
    # A policy that is wrong is so for every node.
    return replace(
        unhealthy(
            "gpu_count",
            ALL,
            _number(count),
            _number(want),
            "the policy's number for this SKU is too small, or the node matches the wrong SKU",
        ),
        systemic=True,
    )


def _no_answer(node: Node, error: str) -> Iterator[Finding]:
    want = node.policy.gpus
    if error == nvml.VERSION_MISMATCH:
        yield unhealthy(
            "gpu_count",
            "driver",
            error,
            "module and library of one version",
            "the driver was updated while it was loaded: reload the nvidia modules, or reboot",
        )
        return
    if error == nvml.DRIVER_NOT_LOADED:
        bound = node.source.names(DRIVER)
        if bound.absent or not (bound.error or bound.names):
            if want:
                yield _none_there("driver not loaded", want)
            return
    yield unknown("gpu_count", "NVML", error, _number(want), "run nvidia-smi and look at dmesg")


def _kernel_count(node: Node) -> Iterator[Finding]:
    want = node.policy.gpus
    bound = node.source.names(DRIVER)
    if bound.unreadable:
        if want is not None:
            yield unknown("gpu_count", ALL, bound.why, _number(want), f"look at {DRIVER}")
    elif bound.absent and want:
        yield _none_there("driver not loaded", want)
    elif not bound.names and want:
        yield _none_there("none", want)
    elif want is not None and len(bound.names) > want:
        yield _too_many(len(bound.names), want)
    elif want is not None and len(bound.names) < want:
        yield unhealthy("gpu_count", ALL, _number(len(bound.names)), _number(want), _DMESG)
    elif bound.names or want is not None:
        yield healthy("gpu_count", ALL, _number(len(bound.names)), _number(want))


def _nvml_count(node: Node, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    want = node.policy.gpus
    lost = [gpu for gpu in gpus if gpu.lost]
    mute = [gpu for gpu in gpus if "handle" in gpu.missing and not gpu.lost]
    seen = [gpu for gpu in gpus if not gpu.lost and "handle" not in gpu.missing]
    if want and not gpus:
        bound = node.source.names(DRIVER)
        yield _none_there("driver not loaded" if bound.absent else "none", want)
        return
    for gpu in mute:
        yield unknown("gpu_count", gpu.label, gpu.why("handle"), "an answer", _DMESG)
    if lost or mute or (want is not None and len(gpus) < want):
        names = _missing_names(node, gpus, seen)
    else:
        names = {}
    if len(names) < len(lost):
        names = {gpu.label: "off the bus" for gpu in lost}
    for name, observed in names.items():
        # Without a policy, a GPU that NVML merely doesn't show may be none of ours (a container).
        if want is None and not lost:
            yield unknown("gpu_count", name, observed, "", "look at nvidia-smi -L")
        else:
            yield unhealthy("gpu_count", name, observed, "in NVML", _DMESG)
    count = len(seen)
    if want is not None and len(gpus) > want:
        yield _too_many(len(gpus), want)
    elif want is not None and count + len(mute) + len(names) < want:
        yield unhealthy("gpu_count", ALL, _number(count), _number(want), _DMESG)
    elif not names and not mute and (count or want is not None):
        yield healthy("gpu_count", ALL, _number(count), _number(want))


def _missing_names(node: Node, gpus: tuple[Gpu, ...], seen: list[Gpu]) -> dict[str, str]:
    """Return what the missing GPUs are called: by PCI address, else by a gap in their numbers."""
    bound = node.source.names(DRIVER)
    shown = {gpu.pci for gpu in seen}
    if bound.names and None not in shown:
        found = {}
        for address in bound.names:
            if address.lower() in shown:
                continue
            state = _in_kernel(node, address)
            if state == "missing" and len(gpus) > len(seen):
                state = "off the bus"
            labels = [gpu.label for gpu in gpus if gpu.pci == address.lower()]
            found[labels[0] if labels else address] = state
        if found:
            return found
    # Numbers are given at the driver's start: only a GPU that was there then leaves a gap.
    minors = {gpu.minor for gpu in seen if gpu.minor is not None}
    if len(minors) != len(seen) or not minors or len(gpus) > len(seen):
        return {}
    return {f"/dev/nvidia{n}": "missing" for n in range(max(minors)) if n not in minors}


def _in_kernel(node: Node, address: str) -> str:
    text = node.source.read(f"{DRIVER}/{address}/information").text or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "GPU Excluded" and value.strip() == "Yes":
            return "excluded"
    return "missing"


# Memory


@check(
    "gpu_ecc",
    "uncorrected memory errors since the driver was loaded",
    action=DRAIN,
    needs="nvml",
    thresholds={"uncorrected": {"count": 0}},
)
def gpu_ecc(node: Node) -> Iterator[Finding]:
    """Judge the volatile count alone: what a GPU has had in its whole life says little of today."""
    limit = node.thresholds.get("uncorrected", {}).get("count")

    def judge(gpu: Gpu) -> Finding:
        if gpu.ecc is False:
            return healthy("gpu_ecc", gpu.label, "ECC off")
        count = gpu.ecc_volatile
        if count is None:
            return _absent("gpu_ecc", gpu, "ecc_volatile", "0 uncorrected")
        observed = f"{count} uncorrected"
        if limit is None or count <= limit:
            return healthy("gpu_ecc", gpu.label, observed)
        return unhealthy("gpu_ecc", gpu.label, observed, f"at most {limit:g}", _RESET)

    return _each(node, "gpu_ecc", judge)


@check(
    "gpu_remap",
    "memory rows that could not be replaced by spare ones",
    action=DRAIN,
    needs="nvml",
)
def gpu_remap(node: Node) -> Iterator[Finding]:
    """A failed remapping is the condition for a replacement.

    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/
    """

    def judge(gpu: Gpu) -> Finding:
        if gpu.remap_failed is None:
            return _absent("gpu_remap", gpu, "remap_failed", "no failure")
        if gpu.remap_failed:
            return unhealthy("gpu_remap", gpu.label, "remapping failed", "no failure", _RMA)
        rows = (gpu.remapped_correctable or 0) + (gpu.remapped_uncorrectable or 0)
        return healthy("gpu_remap", gpu.label, f"{rows} remapped")

    return _each(node, "gpu_remap", judge)


@check(
    "gpu_remap_pending",
    "memory rows or pages that wait for a reset to be replaced",
    action=WARN,
    needs="nvml",
)
def gpu_remap_pending(node: Node) -> Iterator[Finding]:
    """The driver keeps such memory from jobs meanwhile, so that the reset may wait."""

    def judge(gpu: Gpu) -> Finding:
        id = "gpu_remap_pending"
        # A GPU has the one (since Ampere) or the other.
        for name, words in (("remap_pending", "remapping"), ("retired_pending", "retirement")):
            if getattr(gpu, name):
                return unhealthy(id, gpu.label, f"{words} pending", "none", _RESET)
        for name in ("remap_pending", "retired_pending"):
            if getattr(gpu, name) is None and not gpu.unsupported(name):
                return _absent(id, gpu, name, "none pending")
        return healthy(id, gpu.label, "none pending")

    return _each(node, "gpu_remap_pending", judge)


# nvmlDeviceGpuRecoveryAction_t, and what it asks for
_RECOVERY = {
    1: ("GPU reset", _RESET),
    2: ("node reboot", "reboot the node"),
    3: ("drain P2P", "end all jobs that use this GPU's NVLinks, then reset it"),
    4: ("drain and reset", "end all jobs of the node and reset its GPUs"),
    5: ("recover IMEX domain", "restart nvidia-imex in the whole domain"),
    6: ("bus reset", "reset the GPU's PCIe bus, or reboot the node"),
    7: ("system reboot", "reboot the node"),
}


@check(
    "gpu_recovery",
    "what the driver asks for before a GPU can be used again",
    action=DRAIN,
    needs="nvml",
)
def gpu_recovery(node: Node) -> Iterator[Finding]:
    """Judge the driver's own recovery action (nvidia-smi -q: GPU Recovery Action)."""

    def judge(gpu: Gpu) -> Finding:
        action = gpu.recovery_action
        if action is None:
            return _absent("gpu_recovery", gpu, "recovery_action", "none")
        if action == 0:
            return healthy("gpu_recovery", gpu.label, "none")
        observed, remedy = _RECOVERY.get(action, (f"action {action}", _RESET))
        return unhealthy("gpu_recovery", gpu.label, observed, "none", remedy)

    return _each(node, "gpu_recovery", judge)


# PCIe

# GT/s of a lane, by generation (PCI Express Base Specification)
SPEED_GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}


@check(
    "gpu_pcie",
    "lanes of a GPU's PCIe link, and the speed that it can reach",
    action=DRAIN,
    needs="nvml",
)
def gpu_pcie(node: Node) -> Iterator[Finding]:
    """Compare width now, and the highest speed: an idle GPU may lower its speed, not its width."""
    wanted = node.policy.pcie.get("gpu", {})

    def judge(gpu: Gpu) -> Finding:
        id = "gpu_pcie"
        width = gpu.pcie_width
        expected: Optional[float] = wanted.get("width", gpu.pcie_width_max)
        # 0: in a virtual machine the link is not there to be seen.
        if width is None or (expected is None and "pcie_width_max" in gpu.missing):
            return _absent(id, gpu, "pcie_width" if width is None else "pcie_width_max")
        if width == 0 or not expected:
            if "width" in wanted:
                return unknown(id, gpu.label, f"x{width}", f"x{wanted['width']:g}")
            return healthy(id, gpu.label, f"x{width}")
        if width < expected:
            remedy = "reseat the GPU, its riser or baseboard, and look for AER errors in dmesg"
            return unhealthy(id, gpu.label, f"x{width}", f"x{expected:g}", remedy)
        speed = wanted.get("speed_gts")
        if speed is None:
            return healthy(id, gpu.label, f"x{width}", f"x{expected:g}")
        if gpu.pcie_gen_max is None:
            return _absent(id, gpu, "pcie_gen_max", f"{speed:g} GT/s")
        reached = SPEED_GTS.get(gpu.pcie_gen_max)
        if reached is None:
            return unknown(id, gpu.label, f"generation {gpu.pcie_gen_max}", f"{speed:g} GT/s")
        observed = f"x{width} up to {reached:g} GT/s"
        if reached < speed:
            remedy = "look at the slot's speed in the BIOS, and at lspci -vv of the bridge above"
            return unhealthy(id, gpu.label, observed, f"{speed:g} GT/s", remedy)
        return healthy(id, gpu.label, observed, f"x{expected:g} {speed:g} GT/s")

    return _each(node, "gpu_pcie", judge)


# Clocks

# nvmlClocksEventReasons: those that are no matter of load and settings.
_SLOW = {
    0x80: "power brake",
    0x40: "hardware thermal slowdown",
    0x08: "hardware slowdown",
}


@check(
    "gpu_throttle",
    "clocks that the hardware holds down: heat, power brake",
    action=WARN,
    needs="nvml",
)
def gpu_throttle(node: Node) -> Iterator[Finding]:
    """Judge the job's own GPUs; those of others are at work, and their heat is not its matter.

    Caps by software (power, idle, application clocks) are how a GPU works.
    """
    id = "gpu_throttle"
    yield from _silent(node, id)
    gpus = node.nvml.gpus if node.nvml else ()
    if node.job is not None and gpus:
        own = _own(node, id)
        if isinstance(own, Finding):
            yield own
            return
        gpus = tuple(gpu for gpu in gpus if gpu.index in own)
    for gpu in gpus:
        mask = gpu.clock_reasons
        if mask is None:
            yield _absent(id, gpu, "clock_reasons")
            continue
        # 0x08 stands beside the other two as well.
        reasons = [words for bit, words in _SLOW.items() if mask & bit]
        if not reasons:
            yield healthy(id, gpu.label, "not held down")
            continue
        observed = reasons[0]
        if gpu.temperature_c is not None:
            observed += f" at {gpu.temperature_c} °C"
        remedy = "look at the cooling, the power supplies and their cables"
        yield unhealthy(id, gpu.label, observed, "none", remedy)


# NVLink


@check(
    "nvlink",
    "active NVLinks of every GPU, against the policy's number",
    action=DRAIN,
    needs="nvml",
)
def nvlink(node: Node) -> Iterator[Finding]:
    """Count a GPU's active links; in MIG mode it has none."""
    want = node.policy.nvlinks

    def judge(gpu: Gpu) -> Finding:
        expected = "" if want is None else f"{want} active"
        if gpu.mig:
            return healthy("nvlink", gpu.label, "MIG")
        if gpu.nvlinks is None:
            if want and gpu.why("nvlinks") == nvml.NOT_SUPPORTED:
                remedy = "look for NVreg_NvLinkDisable and at the model of the GPU"
                return unhealthy("nvlink", gpu.label, "no NVLink", expected, remedy)
            return _absent("nvlink", gpu, "nvlinks", expected)
        count = sum(1 for active in gpu.nvlinks if active)
        unread = [link for link, active in enumerate(gpu.nvlinks) if active is None]
        down = [link for link, active in enumerate(gpu.nvlinks) if active is False]
        observed = f"{count} active"
        if want is None or count >= want:
            return healthy("nvlink", gpu.label, observed, expected)
        if count + len(unread) >= want:
            return unknown("nvlink", gpu.label, f"{observed}, {len(unread)} unread", expected)
        if down:
            observed += f", down: {_few(down)}"
        remedy = "reset all GPUs of the node together, then look at nvidia-smi nvlink -e"
        return unhealthy("nvlink", gpu.label, observed, expected, remedy)

    return _each(node, "nvlink", judge)


def _few(numbers: list[int]) -> str:
    shown = ",".join(str(number) for number in numbers[:4])
    return f"{shown},…" if len(numbers) > 4 else shown


_FABRIC = {nvml.FABRIC_NOT_STARTED: "not started", nvml.FABRIC_IN_PROGRESS: "in progress"}
# nvmlGpuFabricInfo_v2's healthMask: the two bits of each, of which 1 is "true".
_FABRIC_HEALTH = {0: "degraded bandwidth", 4: "unhealthy route"}
_FABRIC_REMEDY = "look at nvidia-fabricmanager (systemctl status, /var/log/fabricmanager.log)"


@check(
    "fabric_manager",
    "whether every GPU has joined the fabric of the node's NVSwitches",
    action=DRAIN,
    needs="nvml",
)
def fabric_manager(node: Node) -> Iterator[Finding]:
    """Until a GPU is in the fabric, CUDA programs on it end with "system not yet initialized"."""
    want = node.policy.fabric_manager
    if want is False:
        return iter(())

    def judge(gpu: Gpu) -> Finding:
        id = "fabric_manager"
        if gpu.mig:
            return healthy(id, gpu.label, "MIG")
        state, status = gpu.fabric_state, gpu.fabric_status
        if state == nvml.FABRIC_NOT_SUPPORTED or (
            state is None and gpu.unsupported("fabric_state")
        ):
            if want:
                remedy = "the driver does not tell: take fabric_manager out of the policy"
                return unknown(id, gpu.label, "not supported", "completed", remedy)
            return healthy(id, gpu.label, "not supported")
        if state is None:
            return _absent(id, gpu, "fabric_state", "completed")
        if state != nvml.FABRIC_COMPLETED:
            observed = _FABRIC.get(state, f"state {state}")
            if 0 < node.now_s < FABRIC_START_S:
                return unknown(id, gpu.label, observed, "completed", "the node has just booted")
            return unhealthy(id, gpu.label, observed, "completed", _FABRIC_REMEDY)
        if status is None:
            return _absent(id, gpu, "fabric_status", "success")
        if status != 0:
            observed = f"completed, status {status}"
            return unhealthy(id, gpu.label, observed, "status 0", _FABRIC_REMEDY)
        for shift, words in _FABRIC_HEALTH.items():
            if (gpu.fabric_health or 0) >> shift & 0x3 == 1:
                return unhealthy(id, gpu.label, words, "healthy", _FABRIC_REMEDY)
        return healthy(id, gpu.label, "completed")

    return _each(node, "fabric_manager", judge)


@check(
    "persistence",
    "persistence mode, against the policy",
    contexts=(PROLOG, PERIODIC),
    action=WARN,
    needs="nvml",
)
def persistence(node: Node) -> Iterator[Finding]:
    """Without it every job waits for the driver to start the GPUs, and settings are lost."""
    want = node.policy.persistence
    if want is None:
        return iter(())

    def judge(gpu: Gpu) -> Finding:
        on = gpu.persistence
        expected = "on" if want else "off"
        if on is None:
            return _absent("persistence", gpu, "persistence", expected)
        if on is want:
            return healthy("persistence", gpu.label, expected)
        remedy = "start nvidia-persistenced, or: nvidia-smi -pm 1" if want else "nvidia-smi -pm 0"
        return unhealthy("persistence", gpu.label, "off" if want else "on", expected, remedy)

    return _each(node, "persistence", judge)


# Leftovers

# Daemons that stand on a GPU on purpose, by the name in /proc/PID/comm (15 characters).
DAEMONS = ("nv-hostengine", "dcgm-exporter", "nvidia-cuda-mps", "nvidia-persiste", "Xorg")


@check(
    "gpu_processes",
    "processes and memory that earlier jobs left on this job's GPUs",
    contexts=(PROLOG, EPILOG),
    action=WARN,
    needs="processes",
    thresholds={"leftover_mib": {"count": 2048}},
)
def gpu_processes(node: Node) -> Iterator[Finding]:
    """Judge the job's own GPUs, or MIG devices, alone: on others, processes are at home.

    Memory without a process is judged on whole GPUs only: MIG devices share its account.
    """
    id = "gpu_processes"
    if node.job is None or node.nvml is None:
        return
    if node.nvml.error:
        yield from _silent(node, id)
        return
    own = _own(node, id)
    if isinstance(own, Finding):
        yield own
        return
    limit = node.thresholds.get("leftover_mib", {}).get("count")
    for gpu in node.nvml.gpus:
        if gpu.index in own:
            yield _leftovers(node, gpu, own[gpu.index], limit)


def _leftovers(node: Node, gpu: Gpu, devices: frozenset[str], limit: Optional[float]) -> Finding:
    id = "gpu_processes"
    if gpu.processes is None:
        return unknown(id, gpu.label, f"processes: {gpu.why('processes')}", "none")
    instances = {(gi, ci) for uuid, gi, ci in gpu.mig_devices or () if uuid in devices}
    found = []
    for pid, used, gi, ci in gpu.processes:
        if devices and (gi, ci) not in instances:
            continue
        name = node.source.read(f"/proc/{pid}/comm").text or ""
        if name not in DAEMONS:
            found.append((used or 0, pid, name))
    if found:
        used, pid, name = max(found)
        observed = f"pid {pid}" + (f" {name}" if name.isprintable() and name else "")
        observed += f" {used >> 20} MiB" if used else ""
        if len(found) > 1:
            observed += f" and {len(found) - 1} more"
        remedy = "end the processes that ended jobs left, and look at Slurm's ProctrackType"
        return unhealthy(id, gpu.label, observed, "no process", remedy)
    if devices or gpu.mig or gpu.processes:
        return healthy(id, gpu.label, "no process of a job")
    used_bytes = gpu.memory_used_bytes
    if used_bytes is None:
        return _absent(id, gpu, "memory_used_bytes", "free memory")
    mib = used_bytes >> 20
    if limit is not None and mib > limit:
        observed = f"{mib} MiB without a process"
        return unhealthy(id, gpu.label, observed, f"at most {limit:g} MiB", _RESET)
    return healthy(id, gpu.label, f"no process, {mib} MiB")
