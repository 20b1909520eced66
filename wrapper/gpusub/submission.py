"""A plan handed to Slurm: one request, one job, and no job that the user is not told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuslurm.client import (
    Job,
    SlurmAmbiguousError,
    SlurmClient,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from gpusub import rundir
from gpusub.environment import scrubbed
from gpusub.errors import ExitCode, GpusubError
from gpusub.plan import Plan, plain
from gpusub.request import BUILT_IN

# Why a job that Slurm accepted will not start, in words (squeue(1), JOB REASON CODES; with
# EnforcePartLimits=NO, the default, Slurm accepts even what can never run).
NEVER_STARTS: Mapping[str, str] = {
    "AccountNotAllowed": "the partition does not take this account",
    "AssocMaxNodePerJobLimit": "more nodes than the account's limit",
    "BadConstraints": "no node has what is asked for",
    "DependencyNeverSatisfied": "its dependency can never be met",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS",
    "MaxMemPerLimit": "more memory than the partition lets a job have",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "more or fewer nodes than the partition lets a job have",
    "PartitionTimeLimit": "a longer time than the partition lets a job have",
    "QOSNotAllowed": "the partition does not take this QOS",
}


# What to do about a refusal, by what stands in Slurm's message (SchedMD/slurm:src/common/
# slurm_errno.c).
_HINTS: Mapping[str, str] = {
    "Invalid account": "see yours with: sacctmgr show associations user=$USER format=account,"
    "partition,qos; choose with --account",
    "Invalid qos": "see yours with: sacctmgr show associations user=$USER format=account,qos; "
    "choose with --qos",
    "Invalid feature specification": "see the nodes' features with: sinfo -o '%N %f'",
    "Invalid node name": "see the nodes with: sinfo -N",
    "Requested reservation is invalid": "see them with: scontrol show reservation",
    "Requested node configuration is not available": "no node has all of it together; ask for "
    "less, or leave out --constraint, --nodelist, --exclude",
    "not permitted to use this partition": "choose another with --partition",
}


def _hint(message: str) -> str:
    return next((f"; {hint}" for known, hint in _HINTS.items() if known in message), "")


@dataclass(frozen=True)
class Submission:
    """A job that Slurm acknowledged.

    ``log`` may be a pattern of the user's (sbatch(1)); ``message`` is what sbatch said beside.
    """

    job_id: int
    cluster: str | None
    token: str
    run_dir: Path
    log: str
    message: str = ""


def submit(
    plan: Plan,
    script: str,
    client: SlurmClient,
    environ: Mapping[str, str],
    secrets: Mapping[str, str],
    cwd: Path,
    extra: Mapping[str, bytes] | None = None,
) -> Submission:
    """Make the run directory, with the files ``extra`` in it, and submit the job.

    Raises:
        GpusubError: Slurm refused it (REFUSED; nothing is left behind), was not reached
            (UNCERTAIN; likewise), or gave no certain answer (UNCERTAIN; the run directory stays,
            since a job may exist).
    """
    run_dir = Path(plan.run_dir)
    root = run_dir.parent
    if plan.log.origin != BUILT_IN:
        rundir.make_log_directory(plan.log.value)
    rundir.create(root, plan.token, script, plain(plan), extra)
    env = {**scrubbed(environ), **secrets}
    try:
        accepted = client.submit(
            [option.text for option in plan.options], str(run_dir / "job.sh"), env, str(cwd)
        )
    except SlurmRefusedError as error:
        rundir.remove(root, plan.token)
        raise GpusubError(
            f"Slurm refused the job: {error}{_hint(str(error))}", ExitCode.REFUSED
        ) from error
    except SlurmUnreachableError as error:
        rundir.remove(root, plan.token)
        raise GpusubError(
            f"Slurm was not reached, nothing was submitted: {error}", ExitCode.UNCERTAIN
        ) from error
    except SlurmAmbiguousError as error:
        raise GpusubError(
            f"Slurm gave no certain answer ({error}); {_look(plan.token)}", ExitCode.UNCERTAIN
        ) from error
    except KeyboardInterrupt:
        raise GpusubError(
            f"interrupted while submitting; {_look(plan.token)}", ExitCode.INTERRUPTED
        ) from None
    rundir.link(root, plan.token, accepted.job_id)
    return Submission(
        accepted.job_id,
        accepted.cluster,
        plan.token,
        run_dir,
        plan.log.value,
        accepted.message,
    )


def _look(token: str) -> str:
    return (
        "a job may exist: look with "
        f"squeue --me -t all -o '%i %T %o' | grep {token} before submitting again"
    )


def hopeless(job: Job) -> str | None:
    """Return why ``job``, just accepted, will not start, or None if it may."""
    # From 24.11 on, what no node can ever run is ended at once.
    if job.state != "PENDING" and (job.state, job.reason) != ("FAILED", "BadConstraints"):
        return None
    return NEVER_STARTS.get(job.reason)
