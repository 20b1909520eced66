from __future__ import annotations

import errno

import pytest

from gpuhealth.reading import HUNG, NOT_RECORDED, OUT_OF_TIME, Listing, Reading


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ENOTDIR])
@pytest.mark.parametrize("kind", [Reading, Listing])
def test_absent_is_known(kind: type[Reading], error: int) -> None:
    found = kind(error=error)
    assert found.absent
    assert not found.unreadable
    assert found.why == "absent"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errno.EACCES, "EACCES"),
        (errno.EIO, "EIO"),
        (errno.EINVAL, "EINVAL"),
        (errno.ENODEV, "ENODEV"),
        (HUNG, "hung"),
        (OUT_OF_TIME, "not looked at (out of time)"),
        (NOT_RECORDED, "not recorded"),
        (99999, "errno 99999"),
    ],
)
@pytest.mark.parametrize("kind", [Reading, Listing])
def test_unreadable_is_not_absent(kind: type[Reading], error: int, why: str) -> None:
    found = kind(error=error)
    assert found.unreadable
    assert not found.absent
    assert found.why == why


def test_an_empty_file_is_there() -> None:
    assert not Reading("").absent
    assert not Reading("").unreadable
    assert Reading("").why == ""
