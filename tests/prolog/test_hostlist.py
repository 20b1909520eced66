from __future__ import annotations

import pytest

from gpuhealth import hostlist


@pytest.mark.parametrize(
    ("expression", "name", "is_in"),
    [
        ("gpu-1", "gpu-1", True),
        ("gpu-1", "gpu-11", False),
        ("gpu-[1-64]", "gpu-1", True),
        ("gpu-[1-64]", "gpu-64", True),
        ("gpu-[1-64]", "gpu-65", False),
        ("gpu-[1-64]", "gpu-01", False),
        ("gpu-[01-64]", "gpu-01", True),
        ("gpu-[01-64]", "gpu-1", False),
        ("gpu-[08-120]", "gpu-09", True),
        ("gpu-[08-120]", "gpu-119", True),
        ("gpu-[08-120]", "gpu-0119", False),
        ("gpu-[1,3,5-6]", "gpu-4", False),
        ("gpu-[1,3,5-6]", "gpu-5", True),
        ("a[1-2]b[3-4]", "a2b3", True),
        ("a[1-2]b[3-4]", "a3b3", False),
        ("login1, gpu-[1-2]", "gpu-2", True),
        ("gpu.x", "gpuzx", False),
        ("gpu-[1-64]", "xgpu-1", False),
        ("gpu-[1-64]", "gpu-1\n", False),
        ("gpu-[1-64]", "gpu-²", False),
    ],
)
def test_a_name_is_in_an_expression(expression: str, name: str, is_in: bool) -> None:
    assert hostlist.matches(expression, name) is is_in


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a,",
        ",a",
        "gpu-[1-",
        "gpu-1]",
        "gpu-[[1]]",
        "gpu-[a-b]",
        "gpu-[5-1]",
        "gpu-[]",
        "g[1-2-3]",
    ],
)
def test_what_makes_no_sense_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|missing|no number|backwards"):
        hostlist.split(expression)
