"""What libibverbs says of a device: can it register a DMA-BUF, and what MTU does its port use?

These calls go down into the driver and may hang: make them in a process that can be left behind.
Signatures and structures: linux-rdma/rdma-core:libibverbs/verbs.h.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Mapping
from typing import Any, Optional

LIBRARY = "libibverbs.so.1"
SUPPORTED = "supported"
UNSUPPORTED = "unsupported"

# The kernel looks at the descriptor -1 only if the driver takes DMA-BUFs at all
# (NVIDIA/nccl:src/transport/net_ib/gdr.cc asks in the same way).
_TAKES_DMABUF = (errno.EBADF,)
_TAKES_NONE = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)

# struct ibv_port_attr: state, max_mtu, active_mtu, each an enum. It grew over time, and the
# library writes as much of it as it knows.
_PORT_ATTR_BYTES = 256
_ACTIVE_MTU_AT = 8
_MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}

Answer = dict[str, Any]


def probe(ports: Mapping[str, int], library: str = LIBRARY) -> Answer:
    """Ask libibverbs about devices, each given with the number of one of its ports.

    Returns ``{device: {"dmabuf": "supported" | "unsupported" | "errno NAME", "active_mtu":
    bytes}}``. A device that could not be asked has ``{"error": why}`` instead, and so has the
    whole answer if there is no library. Nothing is raised.
    """
    try:
        verbs = load(library)
    except (OSError, AttributeError) as error:
        return {"error": f"{library}: {error}"}
    return {device: ask(verbs, device, number) for device, number in ports.items()}


def load(library: str = LIBRARY) -> ctypes.CDLL:
    """Return the library with the types of the calls made here; OSError if there is none."""
    verbs = ctypes.CDLL(library, use_errno=True)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    wide, count = ctypes.c_uint64, ctypes.POINTER(integer)
    for name, result, arguments in (
        ("ibv_get_device_list", ctypes.POINTER(pointer), [count]),
        ("ibv_free_device_list", None, [ctypes.POINTER(pointer)]),
        ("ibv_get_device_name", ctypes.c_char_p, [pointer]),
        ("ibv_open_device", pointer, [pointer]),
        ("ibv_close_device", integer, [pointer]),
        ("ibv_alloc_pd", pointer, [pointer]),
        ("ibv_dealloc_pd", integer, [pointer]),
        ("ibv_dereg_mr", integer, [pointer]),
        ("ibv_query_port", integer, [pointer, ctypes.c_uint8, pointer]),
    ):
        function = getattr(verbs, name)
        function.restype, function.argtypes = result, arguments
    # rdma-core before 34 has no such call.
    if hasattr(verbs, "ibv_reg_dmabuf_mr"):
        verbs.ibv_reg_dmabuf_mr.restype = pointer
        verbs.ibv_reg_dmabuf_mr.argtypes = [pointer, wide, ctypes.c_size_t, wide, integer, integer]
    return verbs


def ask(verbs: ctypes.CDLL, device: str, number: int) -> Answer:
    """Return what there is to know of one device, or ``{"error": why}``."""
    context = _open(verbs, device)
    if isinstance(context, str):
        return {"error": context}
    try:
        answer: Answer = {"dmabuf": dmabuf(verbs, context)}
        mtu = active_mtu(verbs, context, number)
        if mtu is not None:
            answer["active_mtu"] = mtu
        return answer
    finally:
        verbs.ibv_close_device(context)


def _open(verbs: ctypes.CDLL, device: str) -> int | str:
    """Return a device's context, or why there is none."""
    count = ctypes.c_int()
    ctypes.set_errno(0)
    listed = verbs.ibv_get_device_list(ctypes.byref(count))
    if not listed:
        return f"ibv_get_device_list: {_errno_name(ctypes.get_errno())}"
    try:
        for index in range(count.value):
            if verbs.ibv_get_device_name(listed[index]) == device.encode():
                ctypes.set_errno(0)
                context: Optional[int] = verbs.ibv_open_device(listed[index])
                return context or f"ibv_open_device: {_errno_name(ctypes.get_errno())}"
        return "no such device"
    finally:
        verbs.ibv_free_device_list(listed)


def dmabuf(verbs: ctypes.CDLL, context: int) -> str:
    """Return whether the device registers DMA-BUFs; no memory, and no GPU, is touched."""
    if not hasattr(verbs, "ibv_reg_dmabuf_mr"):
        return UNSUPPORTED
    ctypes.set_errno(0)
    domain = verbs.ibv_alloc_pd(context)
    if not domain:
        return f"errno {_errno_name(ctypes.get_errno())}"
    try:
        ctypes.set_errno(0)
        region = verbs.ibv_reg_dmabuf_mr(domain, 0, 0, 0, -1, 0)
        error = ctypes.get_errno()
        if region:
            verbs.ibv_dereg_mr(region)
            return SUPPORTED
    finally:
        verbs.ibv_dealloc_pd(domain)
    if error in _TAKES_DMABUF:
        return SUPPORTED
    return UNSUPPORTED if error in _TAKES_NONE else f"errno {_errno_name(error)}"


def active_mtu(verbs: ctypes.CDLL, context: int, number: int) -> Optional[int]:
    """Return the MTU (bytes) that a port uses; None if the device doesn't say."""
    attributes = ctypes.create_string_buffer(_PORT_ATTR_BYTES)
    if verbs.ibv_query_port(context, number, attributes) != 0:
        return None
    value = ctypes.c_int.from_buffer(attributes, _ACTIVE_MTU_AT).value
    return _MTU_BYTES.get(value)


def _errno_name(error: int) -> str:
    return errno.errorcode.get(error, str(error))
