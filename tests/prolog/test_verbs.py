"""gpuhealth.verbs against a stand-in for libibverbs, since most machines have no HCA.

The stand-in has the signatures of rdma-core's header and answers what it is told to: it shows
that arguments and structures arrive as they should, and nothing of how a real device behaves.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpuhealth import verbs

MOCK = r"""
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct device { char name[64]; int used; };
struct context { struct device *device; int domains; };
struct domain { struct context *context; };
static struct device devices[2] = {{"mlx5_0", 0}, {"mlx5_1", 0}};
static int region;
int leaked = 0;

static const char *told(const char *name) { const char *v = getenv(name); return v ? v : ""; }

struct device **ibv_get_device_list(int *count) {
    if (*told("MOCK_NO_LIST")) { errno = ENOSYS; return NULL; }
    struct device **list = calloc(3, sizeof *list);
    list[0] = &devices[0]; list[1] = &devices[1];
    *count = 2; leaked++;
    return list;
}
void ibv_free_device_list(struct device **list) { leaked--; free(list); }
const char *ibv_get_device_name(struct device *device) { return device->name; }
struct context *ibv_open_device(struct device *device) {
    if (*told("MOCK_NO_OPEN")) { errno = EACCES; return NULL; }
    struct context *context = calloc(1, sizeof *context);
    context->device = device; leaked++;
    return context;
}
int ibv_close_device(struct context *context) { leaked--; free(context); return 0; }
struct domain *ibv_alloc_pd(struct context *context) {
    if (*told("MOCK_NO_PD")) { errno = ENOMEM; return NULL; }
    struct domain *domain = calloc(1, sizeof *domain);
    domain->context = context; leaked++;
    return domain;
}
int ibv_dealloc_pd(struct domain *domain) { leaked--; free(domain); return 0; }
int ibv_dereg_mr(void *mr) { leaked--; return mr != &region; }
#ifndef OLD
void *ibv_reg_dmabuf_mr(struct domain *domain, uint64_t offset, size_t length, uint64_t iova,
                        int fd, int access) {
    /* what the question looks like is part of it: nothing may be registered by accident */
    if (!domain->context || offset || length || iova || fd != -1 || access) {
        errno = EFAULT; return NULL;
    }
    if (*told("MOCK_REGISTERS")) { leaked++; return &region; }
    errno = atoi(told("MOCK_ERRNO"));
    return NULL;
}
#endif
struct port_attr { int state, max_mtu, active_mtu, gid_tbl_len; uint32_t more[8]; char end[16]; };
int ibv_query_port(struct context *context, uint8_t number, struct port_attr *attributes) {
    if (number != 1) return EINVAL;
    memset(attributes, 0xff, sizeof *attributes);
    attributes->state = 4; attributes->max_mtu = 5;
    attributes->active_mtu = context->device == &devices[0] ? atoi(told("MOCK_MTU")) : 3;
    return 0;
}
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    place = tmp_path_factory.mktemp("verbs")
    (place / "mock.c").write_text(MOCK)
    found = {}
    for name, options in (("new", []), ("old", ["-DOLD"])):
        target = str(place / f"libmock-{name}.so")
        command = [compiler, "-shared", "-fPIC", *options, "-o", target, str(place / "mock.c")]
        subprocess.run(command, check=True, timeout=60)
        found[name] = target
    return found


@pytest.fixture
def library(libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MOCK_ERRNO", "9")
    monkeypatch.setenv("MOCK_MTU", "5")
    return libraries["new"]


def test_a_device_that_takes_dmabufs(library: str) -> None:
    answer = verbs.probe({"mlx5_0": 1, "mlx5_1": 1}, library)
    assert answer == {
        "mlx5_0": {"dmabuf": "supported", "active_mtu": 4096},
        "mlx5_1": {"dmabuf": "supported", "active_mtu": 1024},
    }


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("9", "supported"),  # EBADF: it has looked at the descriptor
        ("95", "unsupported"),  # EOPNOTSUPP
        ("93", "unsupported"),  # EPROTONOSUPPORT
        ("12", "errno ENOMEM"),
        ("22", "errno EINVAL"),
        ("0", "errno 0"),
        ("4095", "errno 4095"),
    ],
)
def test_what_the_driver_answers(
    library: str, monkeypatch: pytest.MonkeyPatch, number: str, expected: str
) -> None:
    monkeypatch.setenv("MOCK_ERRNO", number)
    assert verbs.probe({"mlx5_0": 1}, library)["mlx5_0"]["dmabuf"] == expected


def test_a_library_without_the_call(libraries: dict[str, str], library: str) -> None:
    assert verbs.probe({"mlx5_0": 1}, libraries["old"])["mlx5_0"]["dmabuf"] == "unsupported"


@pytest.mark.parametrize(("mtu", "size"), [("1", 256), ("4", 2048), ("5", 4096)])
def test_mtus(library: str, monkeypatch: pytest.MonkeyPatch, mtu: str, size: int) -> None:
    monkeypatch.setenv("MOCK_MTU", mtu)
    assert verbs.probe({"mlx5_0": 1}, library)["mlx5_0"]["active_mtu"] == size


@pytest.mark.parametrize(("mtu", "number"), [("0", 1), ("77", 1), ("5", 2)])
def test_an_mtu_that_is_none(
    library: str, monkeypatch: pytest.MonkeyPatch, mtu: str, number: int
) -> None:
    monkeypatch.setenv("MOCK_MTU", mtu)
    assert verbs.probe({"mlx5_0": number}, library) == {"mlx5_0": {"dmabuf": "supported"}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MOCK_NO_LIST", {"error": "ibv_get_device_list: ENOSYS"}),
        ("MOCK_NO_OPEN", {"error": "ibv_open_device: EACCES"}),
        ("MOCK_NO_PD", {"dmabuf": "errno ENOMEM", "active_mtu": 4096}),
    ],
)
def test_what_fails_is_told(
    library: str, monkeypatch: pytest.MonkeyPatch, name: str, expected: dict[str, object]
) -> None:
    monkeypatch.setenv(name, "1")
    assert verbs.probe({"mlx5_0": 1}, library) == {"mlx5_0": expected}


def test_no_such_device(library: str) -> None:
    assert verbs.probe({"mlx5_7": 1}, library) == {"mlx5_7": {"error": "no such device"}}


def test_no_library() -> None:
    answer = verbs.probe({"mlx5_0": 1}, "libibverbs-that-is-not-there.so.1")
    assert list(answer) == ["error"]


def test_a_library_that_is_another(libraries: dict[str, str]) -> None:
    assert list(verbs.probe({"mlx5_0": 1}, "libc.so.6")) == ["error"]


@pytest.mark.parametrize("name", ["", "MOCK_REGISTERS", "MOCK_NO_OPEN", "MOCK_NO_PD"])
def test_nothing_is_left_open(library: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import ctypes

    if name:
        monkeypatch.setenv(name, "1")
    verbs.probe({"mlx5_0": 1, "mlx5_1": 1}, library)
    assert ctypes.c_int.in_dll(ctypes.CDLL(library), "leaked").value == 0
