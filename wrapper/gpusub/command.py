"""``gpusub submit``: a request looked up, planned, rendered, and run or submitted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuslurm import commands
from gpuslurm.client import SlurmAmbiguousError, SlurmClient, SlurmError, SlurmUnreachableError
from gpusub import revision
from gpusub.errors import ExitCode, GpusubError
from gpusub.output import note, write
from gpusub.request import BUILT_IN, Request, Value
from gpusub.revision import RevisionQuestion

if TYPE_CHECKING:
    from gpusub.follow import Ending
    from gpusub.plan import Plan
    from gpusub.resources import Machine
    from gpusub.submission import Submission


def submit_command(request: Request, params: Mapping[str, Any]) -> int:
    """Do what ``request`` asks for; ``params`` says how to show it. Return the exit code.

    Raises:
        GpusubError: with the exit code of errors.ExitCode.
    """
    request = _without_slurm(request)
    digest = check_program(request)
    environ = os.environ
    client = commands.CommandClient()
    with _facts(request) as facts, RevisionQuestion(request.cwd) as git:
        # The rest of the program is loaded while Slurm answers.
        from gpusub import interpreter, rundir
        from gpusub.plan import make_plan, secrets
        from gpusub.profile import load
        from gpusub.submission import submit

        profile_name = Value(request.profile, "--profile") if request.profile else None
        profile = load(_home(), request.cwd, profile_name)
        python = None
        if request.program.kind != "command":
            python = interpreter.find(request.python, environ, request.cwd)
        assert request.run_root is not None
        if not request.local:
            rundir.refuse_node_local(request.run_root, _mountinfo())
        facts.go_on()
        from gpusub.render import render

        token = rundir.new_token(time.localtime(), os.urandom(4))
        run_dir = request.run_root / token
        plan = make_plan(request, profile, facts.answer(), python, environ, token, run_dir, digest)
        script = render(plan, request.cwd)
        extra = revision.files(git.answer())
    for warning in (*plan.warnings, *interpreter.doubts(python, environ)):
        note(f"gpusub: {warning}")
    if params["dry_run"]:
        return _dry_run(plan, script, params["as_json"])
    own = [name for name, value in request.env.items() if value is None]
    hidden = {**secrets(request, profile), **{name: environ[name] for name in own}}
    if plan.local:
        return _run_here(plan, script, extra, environ, hidden, params)
    log_start = _size(plan.log.value)
    submission = submit(plan, script, client, environ, hidden, request.cwd, extra)
    return _after(plan, submission, client, params, log_start)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - Path's raises where a name is too long
    except OSError:
        return 0


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor a line in passwd
        return Path("/nonexistent")


def _without_slurm(request: Request) -> Request:
    """Return the request as a local one where this machine has no Slurm."""
    if request.local or commands.available():
        return request
    if request.nodes.value.least > 1:
        raise GpusubError(
            f"{request.nodes.origin}: {request.nodes.value} nodes need Slurm, and there is no "
            "sbatch on PATH"
        )
    note("gpusub: no sbatch on PATH: running on this machine")
    return replace(request, local=True)


def check_program(request: Request) -> str | None:
    """Refuse a script that is not there, or that Python cannot run; return its SHA-256.

    Raises:
        GpusubError: naming the file and, for other programs, the way to run them.
    """
    program = request.program
    if program.kind != "script":
        return None
    path = request.cwd / program.target
    if not os.path.isfile(path):  # noqa: PTH113 - Path's raises where a name is too long
        what = "is a directory" if os.path.isdir(path) else "no such file"  # noqa: PTH112
        raise GpusubError(f"{program.target!r}: {what}; name the Python script to run")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GpusubError(f"{program.target}: cannot be read: {error.strerror}") from error
    start = content[:200].partition(b"\n")[0]
    other = start.startswith(b"\x7fELF") or (start.startswith(b"#!") and b"python" not in start)
    if other and not program.target.endswith(".py"):
        raise GpusubError(
            f"{program.target}: no Python script; run it once a node with: gpusub -- "
            f"{program.target if '/' in program.target else './' + program.target}"
        )
    from hashlib import sha256

    return sha256(content).hexdigest()


def _mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


class _MachineQuestion:
    """What InventoryQuestion is for Slurm, for this machine."""

    def go_on(self) -> None:
        """Do nothing: there is nobody to wait for."""

    def answer(self) -> Machine:
        """Return what this machine has."""
        from gpusub.local import machine

        return machine(os.environ)


@contextmanager
def _facts(request: Request) -> Iterator[commands.InventoryQuestion | _MachineQuestion]:
    """Start looking at what there is."""
    if request.local:
        yield _MachineQuestion()
        return
    try:
        with commands.InventoryQuestion() as question:
            yield question
    except (SlurmUnreachableError, SlurmAmbiguousError) as error:
        raise GpusubError(
            f"Slurm was not reached, nothing was submitted: {error}", ExitCode.UNCERTAIN
        ) from error
    except SlurmError as error:
        raise GpusubError(f"Slurm does not say what there is: {error}", ExitCode.REFUSED) from error


def _dry_run(plan: Plan, script: str, as_json: bool) -> int:
    if as_json:
        from gpusub.plan import plain

        _print_json(plain(plan))
        return 0
    if not plan.local:
        import shlex

        options = " ".join(shlex.quote(option.text) for option in plan.options)
        note(f"gpusub: would run: sbatch {options} {shlex.quote(plan.run_dir + '/job.sh')}")
    try:
        sys.stdout.buffer.write(script.encode(errors="surrogateescape"))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (AttributeError, OSError) as error:
        raise GpusubError(f"--dry-run: the script cannot be written: {error}") from error
    return 0


def _print_json(value: Any) -> None:
    write(sys.stdout, json.dumps(value, indent=1, default=str) + "\n")


def _run_here(
    plan: Plan,
    script: str,
    extra: Mapping[str, bytes],
    environ: Mapping[str, str],
    hidden: Mapping[str, str],
    params: Mapping[str, Any],
) -> int:
    from gpusub import rundir
    from gpusub.follow import Tail
    from gpusub.local import run
    from gpusub.plan import plain
    from gpusub.render import headline

    run_dir = rundir.create(Path(plan.run_dir).parent, plan.token, script, plain(plan), extra)
    note(f"gpusub: {headline(plan)}; log {_short(plan.log.value)}")
    quiet = params["as_json"] or params["parsable"]
    ending = run(
        plan, environ, hidden, None if quiet else Tail(Path(plan.log.value), sys.stdout.buffer)
    )
    if params["as_json"]:
        _print_json(
            {"token": plan.token, "run_dir": str(run_dir), "log": plan.log.value, **_end(ending)}
        )
    return ending.exit_code


def _end(ending: Ending) -> dict[str, Any]:
    return {
        "state": ending.state,
        "exit_code": ending.exit_code,
        "exit_source": ending.exit_source,
    }


def _short(path: str) -> str:
    """Return a path relative to the working directory where that is shorter to read."""
    here = os.environ.get("PWD", "")
    return path[len(here) + 1 :] if here and path.startswith(f"{here}/") else path


def _after(
    plan: Plan,
    submission: Submission,
    client: SlurmClient,
    params: Mapping[str, Any],
    log_start: int,
) -> int:
    """Tell of the submission, and follow or wait if asked to.

    What stood in the log before ``log_start`` is of an earlier job.
    """
    cluster = f";{submission.cluster}" if submission.cluster else ""
    line = f"Submitted batch job {submission.job_id}"
    if params["parsable"]:
        line = f"{submission.job_id}{cluster}"
    if not params["as_json"] and not write(sys.stdout, f"{line}\n"):
        note(f"gpusub: job {submission.job_id} was accepted")
    for said in submission.message.splitlines():
        note(said)
    submission = _looked_at(plan, submission, client)
    answer: dict[str, Any] = {
        "job_id": submission.job_id,
        "cluster": submission.cluster,
        "token": submission.token,
        "run_dir": str(submission.run_dir),
        "log": submission.log,
    }
    if not (params["parsable"] or params["as_json"]):
        _tell(plan, submission)
    if not (params["follow"] or params["wait"]):
        if params["as_json"]:
            _print_json(answer)
        return 0
    from gpusub.follow import Tail, follow

    tail = None
    if params["follow"] and "%" in submission.log and plan.log.origin != BUILT_IN:
        note(f"gpusub: only Slurm knows where {submission.log} is; its log is not shown")
    elif params["follow"] and sys.stdout is not None:
        tail = Tail(Path(submission.log), sys.stdout.buffer, log_start)
    try:
        ending = follow(client, submission, tail, lambda words: note(f"gpusub: {words}"))
    except KeyboardInterrupt:
        note(
            f"gpusub: job {submission.job_id} goes on; see it with "
            f"gpusub logs -f {submission.job_id}, end it with gpusub cancel {submission.job_id}"
        )
        return int(ExitCode.INTERRUPTED)
    if params["as_json"]:
        _print_json({**answer, **_end(ending)})
    return ending.exit_code


def _tell(plan: Plan, submission: Submission) -> None:
    from gpusub.resources import summary

    words = summary(plan.resources)
    share = ", ".join(filter(None, (words["gpus"], words["cpus"], words["mem"])))
    partition = next(option.value for option in plan.options if option.name == "partition")
    note(f"  {plan.program.name} on {words['nodes']} of partition {partition}: {share} on each")
    note(f"  log {_short(submission.log)}")


def _looked_at(plan: Plan, submission: Submission, client: SlurmClient) -> Submission:
    """Look once at a job that Slurm accepted and may never start; return it with its log's path.

    Only Slurm knows what the patterns of a user's --output come to.
    """
    from gpusub.submission import hopeless

    try:
        jobs = client.jobs(submission.job_id)
    except SlurmError as error:
        note(f"gpusub: job {submission.job_id} was accepted; its state is unknown: {error}")
        return submission
    except KeyboardInterrupt:
        note(f"gpusub: job {submission.job_id} was accepted; end it with gpusub cancel")
        raise
    for job in jobs:
        if submission.token not in job.command:
            continue
        why = hopeless(job)
        if why:
            note(
                f"gpusub: job {job.id} was accepted and will not start ({job.reason}): {why}; "
                f"take it back with gpusub cancel {job.id}"
            )
        if plan.log.origin != BUILT_IN and job.stdout:
            submission = replace(submission, log=job.stdout)
    return submission
