"""What Slurm runs on a node: before a job, after it, and now and then.

A hook must never hold a node back that isn't known to be sick. Whatever goes wrong in here, a
bug, a deadline, a broken policy, the job goes on, and syslog says so. A prolog ends with
`ELSEWHERE` in one case only: the node is out of service, so the job has to go to another one.

What Slurm puts into the environment of its hooks: SchedMD/slurm:doc/html/prolog_epilog.shtml.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Optional, Union

from gpuhealth import check, early, examination, policy
from gpuhealth.check import EPILOG, PERIODIC, PROLOG, Job
from gpuhealth.examination import Examination, Request
from gpuhealth.finding import HEALTHY, OFF, UNHEALTHY, UNKNOWN, Finding, drains
from gpuhealth.policy import Policy

if TYPE_CHECKING:
    from gpuhealth import drain
    from gpuhealth.state import State

# Exit codes. Not 1, which is what a Python that can't even start this ends with: the script
# that Slurm runs turns this one alone into a failure.
GO_ON = 0
ELSEWHERE = 75

# The examination may take this long, waiting for another prolog's included; then Slurm.
EXAMINE_S = 20.0
SLURM_S = 18.0
SETTLE_S = 9.0
# Past this the process ends itself; Slurm's own PrologEpilogTimeout has to be longer.
WATCHDOG_S = 50.0
# A prolog on a node that was drained this long ago means that the drain has been lifted: a job
# that had been placed before has begun by then.
RESUMED_AFTER_S = 60.0
# A prolog that starts while another one looks takes that one's findings, if they come in time.
SHARED_S = 10.0
_SHARE_WAIT_S = 12.0
# For so long the NCCL settings that were found are handed down.
SETTINGS_S = 600.0
_MAX_LINES = 20

Examine = Callable[[Request], Examination]
Slurm = Callable[[Mapping[str, str]], "drain.Slurm"]


@dataclass(frozen=True)
class Places:
    """Where things lie on a node."""

    policy: str = "/etc/gpusub/health.json"
    state: str = "/var/lib/gpuhealth"
    runtime: str = "/run/gpuhealth"
    syslog: str = "/dev/log"
    owner: int = 0


@dataclass(frozen=True)
class Hook:
    """One run of a hook."""

    context: str
    environ: Mapping[str, str]
    examine: Examine
    slurm: Slurm
    places: Places
    until_s: float

    def say(self, text: str) -> None:
        """Tell syslog, and slurmd's log."""
        line = _plain(text)
        print(f"gpuhealth: {line}", file=sys.stderr)
        _tell_syslog(self.places.syslog, line)


def prolog(
    environ: Mapping[str, str],
    *,
    examine: Optional[Examine] = None,
    slurm: Optional[Slurm] = None,
    places: Optional[Places] = None,
) -> int:
    """Look at the node before a job; return 0, or `ELSEWHERE` if it is out of service."""
    return _guarded(_hook(PROLOG, environ, examine, slurm, places), _prolog)


def epilog(
    environ: Mapping[str, str],
    *,
    examine: Optional[Examine] = None,
    slurm: Optional[Slurm] = None,
    places: Optional[Places] = None,
) -> int:
    """Look at the node after a job; return 0: a failing epilog drains without a reason."""
    return _guarded(_hook(EPILOG, environ, examine, slurm, places), _epilog)


def periodic(
    environ: Mapping[str, str],
    *,
    examine: Optional[Examine] = None,
    slurm: Optional[Slurm] = None,
    places: Optional[Places] = None,
) -> int:
    """Settle what earlier runs left open, and look at the node; return 0.

    It never lifts a drain that is within the cap: that is done by a person, or by gpuadm.
    """
    return _guarded(_hook(PERIODIC, environ, examine, slurm, places), _periodic)


def _hook(
    context: str,
    environ: Mapping[str, str],
    examine: Optional[Examine],
    slurm: Optional[Slurm],
    places: Optional[Places],
) -> Hook:
    until_s = time.monotonic() + EXAMINE_S + SLURM_S
    return Hook(context, environ, examine or _examine, slurm or _slurm, places or Places(), until_s)


def _guarded(hook: Hook, run: Callable[[Hook], int]) -> int:
    import faulthandler
    import signal
    from contextlib import suppress

    # Where stderr is closed, slurmd's own timeout has to do.
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        # From a thread of C: it ends this process also while Python itself is stuck.
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    # Whoever started slurmd may have ignored it, and then no child's end can be learnt.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # What users have to read they can, and what root keeps nobody else can write.
    mask = os.umask(0o022)
    try:
        return run(hook)
    except Exception as error:  # noqa: BLE001 - a bug in here must drain no node
        hook.say(f"{hook.context}: {_where(error)}; nothing was done to this node")
        return GO_ON
    finally:
        early.drop()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
        os.umask(mask)


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        file = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
        place = f" at {file}:{trace.tb_lineno}"
    return f"{type(error).__name__}{place}: {error}"[:300]


# -- what Slurm says

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_NUMBER = re.compile(r"\d{1,10}\Z", re.ASCII)
_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})\Z", re.ASCII)
# UUIDs and MIG names as NVML gives them: GPU-…, MIG-…, MIG-GPU-…/1/0.
_GPU = re.compile(r"(?:\d{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{1,80}(?:/\d{1,3}/\d{1,3})?)\Z", re.ASCII)
_MAX_GPUS = 256
_GPU_VARIABLES = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def node_name(environ: Mapping[str, str]) -> str:
    """Return the node's name in Slurm, or else its hostname without a domain."""
    name = environ.get("SLURMD_NODENAME", "")
    return name if _NODE_NAME.match(name) else os.uname().nodename.partition(".")[0]


def _number(environ: Mapping[str, str], *names: str) -> Optional[int]:
    for name in names:
        if _NUMBER.match(environ.get(name, "")):
            return int(environ[name])
    return None


def job_of(environ: Mapping[str, str]) -> Optional[Job]:
    """Return the job that a hook runs for; None if Slurm names none."""
    number = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if not number:
        return None
    uid = _number(environ, "SLURM_JOB_UID", "SLURM_UID")
    return Job(number, -1 if uid is None else uid, gpus_of(environ))


def gpus_of(environ: Mapping[str, str]) -> Optional[tuple[str, ...]]:
    """Return the GPUs of the job, as Slurm names them.

    None: it has none. Empty: Slurm says something that isn't understood, so the job may have
    any GPU and checks of single ones have nothing to go by.
    """
    for variable in _GPU_VARIABLES:
        text = environ.get(variable, "").strip()
        # What Slurm says of a job without GPUs on a node that has some.
        if text and text != "NoDevFiles":
            return _gpus(text)
    return None


def _gpus(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for item in text.split(",")[: _MAX_GPUS + 1]:
        span = _RANGE.match(item)
        if span and int(span[1]) <= int(span[2]):
            found += [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
        elif _GPU.match(item):
            found.append(item)
        else:
            return ()
    return tuple(dict.fromkeys(found)) if len(found) <= _MAX_GPUS else ()


def _trusted(path: str, owner: int) -> Union[bytes, str]:
    """Return a file's bytes, or why it can't be believed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is no file"
        if found.st_uid != owner or found.st_mode & 0o022:
            return f"{path} can be written by others than root"
        return os.read(handle, 16 << 20)
    finally:
        os.close(handle)


def load_policy(places: Places) -> tuple[Optional[Policy], str]:
    """Return the policy; without a usable one None, and what is wrong with it ("" if none is
    installed).
    """
    if not os.path.lexists(places.policy):
        return None, ""
    text = _trusted(places.policy, places.owner)
    if isinstance(text, str):
        return None, text
    try:
        return policy.load(text), ""
    except ValueError as error:
        return None, f"{places.policy}: {error}"


# -- the examination


def _examine(request: Request) -> Examination:
    from gpuhealth.source import Directory

    return examination.examine(request, Directory("/"))


def _request(hook: Hook, job: Optional[Job]) -> Request:
    # Here, where a check that doesn't even load is caught like any other bug.
    import gpuhealth.checks  # noqa: F401

    found, wrong = load_policy(hook.places)
    if wrong:
        hook.say(f"no policy is in force, so nothing is drained: {wrong}")
    return Request(
        node=node_name(hook.environ),
        policy=found,
        context=hook.context,
        job=job,
        deadline_s=EXAMINE_S,
    )


@dataclass(frozen=True)
class Seen:
    """What a hook found out: ``done`` is None where another prolog looked.

    ``counters`` are the ports', at ``at_s`` since boot.
    """

    findings: tuple[Finding, ...]
    request: Request
    done: Optional[Examination] = None
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    at_s: float = 0.0


def _look(hook: Hook, request: Request) -> Seen:
    """Examine the node, with what is remembered of earlier runs."""
    from gpuhealth import memory
    from gpuhealth.state import State

    known, wrong = State(hook.places.state, hook.places.owner).load()
    if wrong:
        hook.say(f"nothing is remembered of earlier runs: {wrong}")
    request = replace(request, history=known.history, avoid=known.avoid())
    done = hook.examine(request)
    return Seen(done.findings, request, done, memory.counters_of(request, done), done.at_s)


def _shared(hook: Hook, request: Request) -> Seen:
    """Examine the node, or take what another prolog found while this one waited for it.

    An earlier verdict, however young, would let a job onto a node that has just gone bad. What
    is the job's own, leftover processes on its GPUs, is looked at for every job.
    """
    started_s, started_boot_s = time.monotonic(), _boot_s()
    kind = "cpu" if request.job is None or request.job.gpus is None else "gpu"
    path = f"{hook.places.runtime}/verdict-{kind}.json"
    own = tuple(
        one.id
        for one in check.selected(request.policy, request.context, request.job)
        if one.needs == "processes"
    )
    with _Lock(f"{path}.lock", _SHARE_WAIT_S):
        found = _read_shared(path, hook.places, request, started_boot_s)
        left_s = max(5.0, EXAMINE_S - (time.monotonic() - started_s))
        request = replace(request, deadline_s=left_s)
        if found is None:
            seen = _look(hook, request)
            _write_shared(path, seen, own)
            return seen
    if own:
        fresh = _look(hook, replace(request, only=own)).findings
        found = replace(found, findings=found.findings + fresh)
    return found


def _write_shared(path: str, seen: Seen, own: tuple[str, ...]) -> None:
    value = {
        "schema": 1,
        "ended_s": _boot_s(),
        "at_s": seen.at_s,
        "counters": seen.counters,
        "findings": [one.as_dict() for one in seen.findings if one.check not in own],
    }
    _write_file(path, json.dumps(value))


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_shared(path: str, places: Places, request: Request, since_s: float) -> Optional[Seen]:
    text = _trusted(path, places.owner)
    if isinstance(text, str):
        return None
    try:
        value = json.loads(text)
        if not since_s <= value["ended_s"] <= min(_boot_s(), since_s + SHARED_S):
            return None
        if _is_older(path, places.policy):
            return None  # a policy that was changed since may say something else
        findings = tuple(Finding(**one) for one in value["findings"])
        return Seen(findings, request, None, value["counters"], float(value["at_s"]))
    except (ValueError, KeyError, TypeError):
        return None


class _Lock:
    """A lock between processes; who waits too long goes on without it."""

    def __init__(self, path: str, wait_s: float) -> None:
        self._path, self._wait_s, self._handle = path, wait_s, -1
        self.held = False

    def __enter__(self) -> _Lock:
        import fcntl

        try:
            os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._handle = os.open(self._path, flags, 0o600)
        except OSError:
            return self
        until_s = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= until_s:
                    return self
                time.sleep(0.02)
            else:
                self.held = True
                return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)


# -- what follows from it


def _slurm(environ: Mapping[str, str]) -> drain.Slurm:
    from gpuhealth.scontrol import Scontrol

    return Scontrol(
        bin_dir=_absolute(environ.get("GPUHEALTH_SLURM_BIN", "")),
        conf=_absolute(environ.get("SLURM_CONF", "")),
    )


def _absolute(path: str) -> str:
    return path if path.startswith("/") and path.isprintable() and ":" not in path else ""


def _prolog(hook: Hook) -> int:
    job = job_of(hook.environ)
    request = _request(hook, job)
    _note_a_resume(hook)
    seen = _shared(hook, request)
    sick = drains(seen.findings)
    result = _take_out(hook, request, sick) if sick else None
    out = result is not None and result.out_of_service
    # It is decided. Nothing that goes wrong from here on may change it.
    _afterwards(hook, lambda: _leave_message(hook, job, seen.findings, result))
    _afterwards(hook, lambda: _remember(hook, seen))
    if not out:
        _afterwards(hook, lambda: _begin_job(hook, job, seen))
        _afterwards(hook, lambda: _hand_down_settings(hook, request))
    return ELSEWHERE if out else GO_ON


def _epilog(hook: Hook) -> int:
    job = job_of(hook.environ)
    seen = _look(hook, _request(hook, job))
    sick = drains(seen.findings)
    if sick:
        _take_out(hook, seen.request, sick)
    if job is not None:
        _remove(_message_path(hook, job))
    ended = _end_job(hook, job, seen)
    _afterwards(hook, lambda: _remember(hook, seen, ended))
    return GO_ON


def _periodic(hook: Hook) -> int:
    request = _request(hook, None)
    settled = _settle(hook, request)
    if settled is not None:
        hook.say(f"an earlier drain: {settled.text}")
    seen = _look(hook, request)
    sick = drains(seen.findings)
    if sick:
        _take_out(hook, request, sick)
    _afterwards(hook, lambda: _remember(hook, seen))
    return GO_ON


def _afterwards(hook: Hook, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - see where it is called
        hook.say(f"{hook.context}: {_where(error)}")


def _ledger(places: Places) -> tuple[str, str]:
    return f"{places.state}/drain.json", f"{places.runtime}/drain.json"


def _drain(hook: Hook, request: Request, until_s: float) -> drain.Drain:
    from gpuhealth import drain

    cap = request.policy.max_drained if request.policy else policy.Cap(0, 0)
    ledger = drain.Ledger(*_ledger(hook.places))
    return drain.Drain(request.node, hook.slurm(hook.environ), ledger, cap, until_s)


def _take_out(hook: Hook, request: Request, sick: list[Finding]) -> drain.Result:
    """Drain the node for the first of what is wrong, and say what came of it."""
    from gpuhealth import drain, slurmnode

    reason = slurmnode.reason_of(sick[0])
    # One at a time on this node: a second one would take for settled what the first one has
    # still to settle.
    with _Lock(f"{hook.places.runtime}/drain.lock", SLURM_S / 2) as lock:
        if lock.held:
            result = _drain(hook, request, hook.until_s).begin(reason)
        else:
            result = drain.Result(drain.UNREACHED, "another run is at it, or can't be locked out")
    said = (
        "this node is sick" if result.out_of_service else "THIS NODE IS SICK AND STAYS IN SERVICE"
    )
    hook.say(f"{hook.context}: {said}: {_of(sick[0])}; {result.text}")
    _mark(hook, result)
    return result


def _settle(hook: Hook, request: Request) -> Optional[drain.Result]:
    if not any(os.path.exists(name) for name in _ledger(hook.places)):  # noqa: PTH110
        return None
    with _Lock(f"{hook.places.runtime}/drain.lock", 2.0) as lock:
        if not lock.held:
            return None
        result = _drain(hook, request, time.monotonic() + SETTLE_S).settle()
    if result is not None:
        _mark(hook, result)
    return result


# -- what is remembered, and reported


def _drained_path(places: Places) -> str:
    return f"{places.state}/drained"


def _mark(hook: Hook, result: drain.Result) -> None:
    """Leave a mark on a drained node, so that the next job knows of its being resumed.

    Who lifts its drain because of the cap has mended nothing, and takes the mark away.
    """
    from gpuhealth import drain

    if result.outcome in (drain.DRAINED, drain.UNSETTLED):
        _write_file(_drained_path(hook.places), "")
    elif result.outcome == drain.CAPPED:
        _remove(_drained_path(hook.places))


def _note_a_resume(hook: Hook) -> None:
    """Note that our drain was lifted, if it was: a job is about to start here."""
    path = _drained_path(hook.places)
    if not RESUMED_AFTER_S <= _age_s(path) < float("inf"):
        return
    from gpuhealth import history
    from gpuhealth.state import State, boot_id

    boot, now_s = boot_id(), _boot_s()
    _, wrong = State(hook.places.state, hook.places.owner).update(
        lambda known: replace(known, history=history.resumed(known.history, boot, now_s))
    )
    if not wrong:
        _remove(path)


def _remember(hook: Hook, seen: Seen, ended: Optional[Mapping[str, Any]] = None) -> None:
    """Keep what the next run needs, and report: always now and then, else what has changed."""
    done, request = seen.done, seen.request
    if done is None:
        return
    from gpuhealth import memory, report
    from gpuhealth.state import Memory, State

    before = ""

    def change(known: Memory) -> Memory:
        nonlocal before
        before = known.verdict
        stuck = {place: one for place, one in known.stuck.items() if one.lives}
        stuck.update({place: one for place, one in done.hung.items() if one is not None})
        return Memory(memory.remember(request, done, known.history), done.verdict, stuck)

    state = State(hook.places.state, hook.places.owner)
    _, wrong = state.update(change)
    if examination.NVML in done.hung:
        _write_file(f"{hook.places.runtime}/nvml.stuck", "")
    elif done.nvml:
        _remove(f"{hook.places.runtime}/nvml.stuck")
    if before != done.verdict:
        line = report.log_line(done)
        wrong = state.log({"time": done.time, "boot_id": done.boot_id, "what": line}) or wrong
        if before or done.verdict != HEALTHY:
            hook.say(line)
    if wrong:
        hook.say(f"nothing is kept for later runs: {wrong}")
    if hook.context == PERIODIC:
        text = report.metrics(done, time.time())
        report.write_metrics(f"{hook.places.state}/gpuhealth.prom", text)
    share = request.policy.report_dir if request.policy else None
    if share and (hook.context == PERIODIC or before != done.verdict or ended):
        _deliver(hook, state, share, report.node_report(done), ended)


def _deliver(
    hook: Hook,
    state: State,
    share: str,
    found: Mapping[str, Any],
    ended: Optional[Mapping[str, Any]],
) -> None:
    from gpuhealth import report

    key = f"report {share}"
    known, _ = state.load()
    earlier = known.stuck.get(key)
    given = report.deliver(share, node_name(hook.environ), found, ended, earlier=earlier)
    if given.why:
        hook.say(f"no report: {given.why}")
    stuck = given.abandoned
    if stuck is not None and stuck != earlier:
        state.update(lambda known: replace(known, stuck={**known.stuck, key: stuck}))


def _begin_job(hook: Hook, job: Optional[Job], seen: Seen) -> None:
    if job is None:
        return
    from gpuhealth.state import JobStart, State, boot_id

    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    start = JobStart(job.id, boot_id(), seen.at_s, when, seen.counters)
    State(hook.places.state, hook.places.owner).begin_job(start)


def _end_job(hook: Hook, job: Optional[Job], seen: Seen) -> Optional[Mapping[str, Any]]:
    """Return what the job's ports counted; None if its start is not known."""
    if job is None or seen.done is None:
        return None
    from gpuhealth import report
    from gpuhealth.state import State

    state = State(hook.places.state, hook.places.owner)
    start, _ = state.end_job(job.id, seen.done.boot_id, seen.at_s)
    if start is None:
        return None
    found = report.job_report(
        node_name(hook.environ), start, seen.counters, seen.at_s, seen.done.time
    )
    state.log(found)
    return found


# -- what the job is told


def _of(one: Finding) -> str:
    text = f"{one.check} {one.object}: {one.observed}"
    return f"{text}, expected {one.expected}" if one.expected else text


_LOST = re.compile(r"[^ -~]+")
_QUOTES = str.maketrans("", "", "\"'`\\$")


def _plain(text: str) -> str:
    """Return text as one line of printable ASCII, without what a shell or a format could read."""
    return " ".join(_LOST.sub(" ", text.translate(_QUOTES)).split())


def message(node: str, found: tuple[Finding, ...], result: Optional[drain.Result]) -> str:
    """Return what a job's log shall show of the findings; "" if all is well."""
    lines = []
    if result is not None and not result.out_of_service:
        lines.append(f"{node} is sick and was let through, {result.text}")
    for status in (UNHEALTHY, UNKNOWN):
        lines += [
            f"{node} is {status}: {_of(one)}"
            for one in found
            if one.status == status and one.action != OFF
        ]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES - 1 :] = [f"and {len(lines) - _MAX_LINES + 1} more: gpuhealth check"]
    return "".join(f"gpuhealth: {_plain(line)}\n" for line in lines)


def _message_path(hook: Hook, job: Job) -> str:
    return f"{hook.places.runtime}/jobs/{job.id}.message"


def _leave_message(
    hook: Hook, job: Optional[Job], found: tuple[Finding, ...], result: Optional[drain.Result]
) -> None:
    if job is None:
        return
    text = message(node_name(hook.environ), found, result)
    path = _message_path(hook, job)
    if text:
        _write_file(path, text, 0o644)
    else:
        _remove(path)


_VARIABLE = re.compile(r"NCCL_[A-Z0-9_]{1,60}\Z", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9_=,.:^/+-]{1,2000}\Z", re.ASCII)


def settings_text(variables: list[tuple[str, str, str]]) -> str:
    """Return the lines that task_prolog hands to tasks: ``NAME=value``, and nothing unsafe."""
    return "".join(
        f"{name}={value}\n"
        for name, value, _ in variables
        if _VARIABLE.match(name) and _VALUE.match(value)
    )


def _hand_down_settings(hook: Hook, request: Request) -> None:
    """Write the node's NCCL settings for task_prolog, if they are not there yet.

    They come from a look of their own, in a child that may hang: a list with only those ports
    that could be read would take good ones from the job.
    """
    path = f"{hook.places.runtime}/nccl.env"
    if _age_s(path) < SETTINGS_S and not _is_older(path, hook.places.policy):
        return
    from gpuhealth import isolation

    outcome = isolation.call(lambda: _settings(request).encode(), 2.0)
    if outcome.result is not None:
        _write_file(path, outcome.result.decode("ascii", "replace"), 0o644)


def _settings(request: Request) -> str:
    from gpuhealth import environment
    from gpuhealth.source import Directory

    source = Directory("/")
    sku = examination.sku_of(source, request.policy, request.node)
    return settings_text(environment.variables(check.Node(request.node, source, sku)))


def _is_older(path: str, than: str) -> bool:
    try:
        return os.stat(path).st_mtime_ns < os.stat(than).st_mtime_ns  # noqa: PTH116
    except OSError:
        return False


# -- files and syslog


def _age_s(path: str) -> float:
    try:
        age_s = time.time() - os.stat(path).st_mtime  # noqa: PTH116 - pathlib costs 6 ms to import
    except OSError:
        return float("inf")
    return age_s if age_s >= 0 else float("inf")


def _write_file(path: str, text: str, mode: int = 0o600) -> bool:
    """Replace a file in one step; whether that worked: no hook may fail for a full disk."""
    temporary = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(handle, mode)
            os.write(handle, text.encode())
        finally:
            os.close(handle)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        return False
    return True


def _remove(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return


def _tell_syslog(path: str, text: str) -> None:
    """Send one line, daemon.err, and don't wait: a stopped syslogd must stop nothing here."""
    import socket

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.connect(path)
            channel.send(f"<27>gpuhealth[{os.getpid()}]: {text}"[:2000].encode())
    except OSError:
        return
