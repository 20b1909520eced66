"""One examination of a node: look, judge, and say what it amounts to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import gpuhealth.checks  # noqa: F401 - registers them
from gpuhealth import check, collect, early, finding, hca, isolation, nvml
from gpuhealth.check import Check, Job, Node
from gpuhealth.finding import Finding
from gpuhealth.history import History
from gpuhealth.policy import Policy, Sku
from gpuhealth.reading import NOT_RECORDED, OUT_OF_TIME
from gpuhealth.source import Entries, Entry, Recording, Source, entries_of

# A healthy node is done in a tenth of a second; a sick one may take this long (hooks add the
# time for Slurm).
DEADLINE_S = 20.0
# Persistence mode off, or a busy driver: nvmlInit alone may take seconds.
NVML_TIMEOUT_S = 10.0
NVML = "nvml"
VERBS = "verbs"
VERBS_TIMEOUT_S = 3.0
# The key of a recording that `gpuhealth record` made; another one is a map of files.
RECORDED_BY_US = "gpuhealth"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_GPUS = "/proc/driver/nvidia/gpus"


@dataclass(frozen=True)
class Examination:
    """What an examination came to.

    ``sku`` is the name of the node's SKU; None without a policy, or where none matches.
    ``boot_id`` is the kernel's, ``at_s`` the time since boot, ``time`` the date in UTC.
    ``entries``, ``nvml`` and ``verbs`` are the recording that was judged. ``hung`` maps the
    places that did not answer to the process stuck there, if it could not be ended.
    """

    node: str
    verdict: str
    findings: tuple[Finding, ...]
    duration_s: float
    sku: Optional[str] = None
    context: str = check.PERIODIC
    boot_id: str = ""
    at_s: float = 0.0
    time: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict)
    nvml: Mapping[str, Any] = field(default_factory=dict)
    verbs: Mapping[str, Any] = field(default_factory=dict)
    hung: Mapping[str, Optional[isolation.Abandoned]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that ``check --json`` prints."""
        return {
            "verdict": self.verdict,
            "node": self.node,
            "sku": self.sku,
            "duration_s": round(self.duration_s, 4),
            "findings": [one.as_dict() for one in self.findings],
        }


@dataclass(frozen=True)
class Request:
    """What to examine, and against what.

    ``only`` are ids of checks that are run whatever the policy says. ``avoid`` are the places
    where a process of an earlier run is still stuck.
    """

    node: str
    policy: Optional[Policy] = None
    context: str = check.PERIODIC
    job: Optional[Job] = None
    only: tuple[str, ...] = ()
    history: History = field(default_factory=History)
    avoid: tuple[str, ...] = ()
    deadline_s: float = DEADLINE_S


def gpu_model(source: Source) -> Optional[str]:
    """Return the name of the node's GPUs as the driver's /proc gives it; None if unknown.

    It is NVML's product name (``Model:`` of /proc/driver/nvidia/gpus/BDF/information).
    """
    for address in source.names(_GPUS).names:
        text = source.read(f"{_GPUS}/{address}/information").text or ""
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model" and value.strip():
                return value.strip()
    return None


def sku_of(source: Source, policy: Optional[Policy], node: str) -> Optional[Sku]:
    """Return the SKU that a node is of."""
    if policy is None:
        return None
    # Most policies go by names alone, and then nothing needs to be read.
    gpu = gpu_model(source) if any(sku.gpu is not None for sku in policy.skus) else None
    return policy.sku_of(node, gpu)


def _look(
    source: Source,
    request: Request,
    checks: list[Check],
    gpus: Optional[nvml.Nvml],
    now_s: float,
    hung: tuple[str, ...] = (),
    verbs: Optional[Mapping[str, Any]] = None,
) -> tuple[Optional[Sku], list[Finding]]:
    """Run the checks over a source."""
    sku = sku_of(source, request.policy, request.node)
    node = Node(
        name=request.node,
        source=source,
        sku=sku,
        nvml=gpus,
        context=request.context,
        job=request.job,
        history=request.history,
        now_s=now_s,
        hung=hung,
        verbs=verbs or {},
    )
    found = [one for item in checks for one in check.run(item, node, request.policy)]
    if request.policy is not None and sku is None:
        found.append(
            replace(
                finding.unknown(
                    "policy",
                    request.node,
                    "no SKU matches",
                    "one of " + ", ".join(item.name for item in request.policy.skus),
                    "add the node, or its GPU, to a SKU in the policy",
                ),
                action=finding.WARN,
            )
        )
    return sku, found


def examine_recording(
    request: Request, recording: Mapping[str, Any], now_s: float = 0.0
) -> Examination:
    """Judge what was recorded of a node. Pure: the same recording, the same verdict."""
    entries = {path: recording[path] for path in entries_of(recording)}
    source = Recording(entries, partial=RECORDED_BY_US in recording)
    asked = _object(recording.get(NVML)), _object(recording.get(VERBS))
    return _judge(request, source, entries, asked, {}, now_s)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _judge(
    request: Request,
    source: Source,
    entries: Entries,
    asked: tuple[Mapping[str, Any], Mapping[str, Any]],
    hung: Mapping[str, Optional[isolation.Abandoned]],
    now_s: float,
    duration_s: float = 0.0,
) -> Examination:
    checks = check.selected(request.policy, request.context, request.job, request.only)
    gpus, verbs = asked
    known = nvml.from_dict(gpus) if gpus else None
    sku, found = _look(source, request, checks, known, now_s, tuple(hung), verbs)
    found = check.soften(found)
    return Examination(
        node=request.node,
        verdict=finding.verdict(found),
        findings=tuple(found),
        duration_s=duration_s,
        sku=sku.name if sku else None,
        context=request.context,
        boot_id=source.read(BOOT_ID).text or "",
        at_s=now_s,
        entries=entries,
        nvml=gpus,
        verbs=verbs,
        hung=hung,
    )


def examine(request: Request, source: Source, with_nvml: bool = True) -> Examination:
    """Examine the node that a source shows, in children that may hang.

    It returns by ``request.deadline_s``, whatever hangs.
    """
    started_s = time.monotonic()
    until_s = started_s + request.deadline_s
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    checks = check.selected(request.policy, request.context, request.job, request.only)
    gpus: dict[str, Any] = {}
    hung: dict[str, Optional[isolation.Abandoned]] = {}
    asked = None
    if with_nvml and any(one.needs != "files" for one in checks):
        if NVML in request.avoid:
            gpus = nvml.to_dict(nvml.Nvml(error="hung"))
            hung[NVML] = None
        else:
            asked = early.take() or isolation.start(early.answer_to)
    collected = _collect(request, source, checks, None, until_s, now_s, {})
    if asked is not None:
        outcome = isolation.finish(asked, min(until_s, started_s + NVML_TIMEOUT_S))
        gpus = answer(outcome)
        if outcome.result is None:
            hung[NVML] = outcome.abandoned
    if gpus:
        # What a check looks at may depend on what NVML says.
        known = nvml.from_dict(gpus)
        missing = _Missing(collected.entries)
        _look(missing, request, checks, known, now_s)
        if missing.found and collected.complete:
            more = _collect(request, source, checks, known, until_s, now_s, collected.entries)
            collected = replace(more, hung={**collected.hung, **more.hung})
    hung.update(collected.hung)
    verbs: dict[str, Any] = {}
    # A second look at what the files promise; too dear before every job.
    if with_nvml and request.context != check.PROLOG and VERBS not in request.avoid:
        read = Recording(collected.entries, partial=True)
        if any(one.id == "gpudirect" for one in checks):
            verbs, stuck = _ask_verbs(request, read, hung, until_s)
            if verbs.get("error") == "hung":
                hung[VERBS] = stuck
    for place in request.avoid:
        hung.setdefault(place, None)
    read = Recording(
        collected.entries, NOT_RECORDED if collected.complete else OUT_OF_TIME, partial=True
    )
    judged = _judge(request, read, collected.entries, (gpus, verbs), hung, now_s)
    return replace(
        judged,
        duration_s=time.monotonic() - started_s,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _collect(
    request: Request,
    source: Source,
    checks: list[Check],
    gpus: Optional[nvml.Nvml],
    until_s: float,
    now_s: float,
    entries: Entries,
) -> collect.Collected:
    def look(recorder: Source) -> None:
        recorder.read(BOOT_ID)
        _look(recorder, request, checks, gpus, now_s)

    avoid = tuple(place for place in request.avoid if place not in (NVML, VERBS))
    return collect.collect(source, look, until_s, entries, avoid)


class _Missing(Recording):
    """A recording that notes whether something was looked for that it says nothing of."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(entries, NOT_RECORDED, partial=True)
        self.found = False

    def _missing(self, path: str) -> int:
        error = super()._missing(path)
        self.found = self.found or error == NOT_RECORDED
        return error


def _ask_verbs(
    request: Request, source: Source, hung: Mapping[str, object], until_s: float
) -> tuple[dict[str, Any], Optional[isolation.Abandoned]]:
    """Return what libibverbs says of the listed ports' devices."""
    sku = sku_of(source, request.policy, request.node)
    return ask_verbs(Node(request.node, source, sku), hung, until_s)


def ask_verbs(
    looker: Node, hung: Mapping[str, object], until_s: float
) -> tuple[dict[str, Any], Optional[isolation.Abandoned]]:
    """Return what libibverbs says of the ports that a node lists, and what is stuck there.

    {} if there are none to ask.
    """
    present = looker.source.names(hca.CLASS).names
    ports = {
        port.device: port.number
        for port in hca.listed_ports(looker)
        if port.device in present and f"{hca.CLASS}/{port.device}" not in hung
    }
    if not ports:
        return {}, None
    from gpuhealth import verbs

    left_s = min(VERBS_TIMEOUT_S, until_s - time.monotonic())
    outcome = isolation.call(lambda: json.dumps(verbs.probe(ports)).encode(), left_s)
    if outcome.result is None:
        return {"error": "hung"}, outcome.abandoned
    try:
        return _object(json.loads(outcome.result)), None
    except ValueError:
        return {"error": "died"}, None


def answer(outcome: isolation.Outcome) -> dict[str, Any]:
    """Return what NVML said; a child that hung or died says nothing of the GPUs."""
    if outcome.result is None:
        return nvml.to_dict(nvml.Nvml(error="hung"))
    try:
        value = json.loads(outcome.result)
    except ValueError:
        return nvml.to_dict(nvml.Nvml(error="died"))
    return value if isinstance(value, dict) else nvml.to_dict(nvml.Nvml(error="died"))
