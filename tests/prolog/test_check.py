from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuhealth.checks  # noqa: F401 - registers them
from gpuhealth import check
from gpuhealth.check import EPILOG, PERIODIC, PROLOG, REGISTRY, Check, Job, Node
from gpuhealth.finding import DRAIN, OFF, UNHEALTHY, UNKNOWN, WARN, Finding, unhealthy
from gpuhealth.policy import Policy
from gpuhealth.source import Recording

NODE = Node(name="gpu-1", source=Recording({}))
JOB = Job(id=7, uid=1000, gpus=("0", "1"))
CPU_JOB = Job(id=7, uid=1000)


def one(look: check.Look, action: str = DRAIN, **options: object) -> Check:
    return Check("ib_port", "about", look, (PROLOG,), action, **options)  # type: ignore[arg-type]


def sick(node: Node) -> Iterator[Finding]:
    yield unhealthy("ib_port", "mlx5_0:1", "DOWN", "ACTIVE", "look")


class TestRun:
    @pytest.mark.parametrize(
        ("policy", "action"),
        [
            (None, WARN),
            (Policy(), DRAIN),
            (Policy(checks={"ib_port": WARN}), WARN),
            # "--only" runs what is off; it leads to nothing.
            (Policy(checks={"ib_port": OFF}), WARN),
        ],
    )
    def test_the_policy_says_what_a_finding_leads_to(
        self, policy: Policy | None, action: str
    ) -> None:
        (found,) = check.run(one(sick), NODE, policy)
        assert found.action == action

    def test_a_bug_in_a_check_is_unknown(self) -> None:
        def broken(node: Node) -> Iterator[Finding]:
            yield unhealthy("ib_port", "mlx5_0:1", "DOWN", "ACTIVE", "look")
            raise KeyError("lid")

        (found,) = check.run(one(broken), NODE, Policy())
        assert found.status == UNKNOWN
        assert "KeyError" in found.observed
        assert len(found.observed) <= 120

    def test_thresholds_are_the_checks_own_and_over_them_the_policys(self) -> None:
        seen: dict[str, object] = {}

        def look(node: Node) -> Iterator[Finding]:
            seen.update(node.thresholds)
            yield from ()

        defaults = {"symbol_error": {"per_hour": 120.0}, "link_downed": {"delta": 1.0}}
        wanted = {"ib_port": {"symbol_error": {"per_hour": 5.0}}}
        check.run(one(look, thresholds=defaults), NODE, Policy(thresholds=wanted))
        assert seen == {"symbol_error": {"per_hour": 5.0}, "link_downed": {"delta": 1.0}}


class TestSelected:
    def ids(self, *args: object, **options: object) -> set[str]:
        return {item.id for item in check.selected(*args, **options)}  # type: ignore[arg-type]

    def test_what_is_off_is_not_run(self) -> None:
        assert "ib_port" in self.ids(Policy(), PROLOG, JOB)
        assert "ib_port" not in self.ids(Policy(checks={"ib_port": OFF}), PROLOG, JOB)
        assert "ib_port" in self.ids(Policy(checks={"ib_port": OFF}), PROLOG, JOB, ("ib_port",))

    def test_a_job_without_gpus_is_not_held_up_by_their_checks(self) -> None:
        assert self.ids(Policy(), PROLOG, CPU_JOB) < self.ids(Policy(), PROLOG, JOB)
        assert not [i for i in self.ids(Policy(), PROLOG, CPU_JOB) if REGISTRY[i].gpu]
        assert "ib_port" in self.ids(Policy(), PROLOG, CPU_JOB)

    @pytest.mark.parametrize("context", [PROLOG, EPILOG, PERIODIC])
    def test_every_context_has_its_own(self, context: str) -> None:
        for name in self.ids(Policy(), context, None):
            assert context in REGISTRY[name].contexts


def test_two_checks_are_not_called_the_same() -> None:
    with pytest.raises(ValueError, match="two checks are called ib_port"):
        check.check("ib_port", "about")(sick)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_checks_words(name: str) -> None:
    item = REGISTRY[name]
    assert item.id == name == name.lower()
    assert item.about
    assert len(item.about) <= 100
    assert item.action in (DRAIN, WARN, OFF)
    assert set(item.contexts) <= {PROLOG, EPILOG, PERIODIC}
    assert item.contexts


def test_nothing_that_a_prolog_needs_is_heavy() -> None:
    import subprocess

    code = (
        "import sys; import gpuhealth.examination, gpuhealth.checks, gpuhealth.policy\n"
        "print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"pynvml", "yaml", "argparse", "subprocess", "pathlib", "logging", "socket", "difflib"}
    # The interpreter's own site may load some of them.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (set(done.stdout.split()) - set(bare.stdout.split())) & heavy


def test_what_is_systemic_only_warns() -> None:
    one = unhealthy("ib_port", "all ports", "INIT", "ACTIVE", "look")
    from dataclasses import replace

    softened = check.soften([replace(one, action=DRAIN, systemic=True), replace(one, action=DRAIN)])
    assert [item.action for item in softened] == [WARN, DRAIN]
    assert [item.status for item in softened] == [UNHEALTHY, UNHEALTHY]


def test_the_documentation_has_every_check() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "health.md"
    rows = [
        f"| `{one.id}` | {one.action} | {', '.join(one.contexts)} | {one.about} |"
        for one in REGISTRY.values()
    ]
    shown = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert [line for line in shown if line.count("|") == 5] == rows
