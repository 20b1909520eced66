"""The environment: what of it is handed to sbatch, and what in it must not be written down."""

from __future__ import annotations

from collections.abc import Mapping

# What a surrounding job, step or torchrun plants. SLURM_CPU_BIND pins every rank of the new job
# to the cores of the old one; SLURM_MEM_PER_CPU and SLURM_TRES_PER_TASK contradict the new
# request; MASTER_PORT and PET_* (torch.distributed.run's own presets) merge two rendezvous.
# How to reach Slurm, which is the same for the new job.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})

_PLANTED_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_CPU_BIND",
    "SBATCH_MEM_BIND",
    "PMI",
    "PET_",
    "MASTER_",
    "TORCHELASTIC_",
)
_PLANTED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "NODE_RANK",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "GPUSUB_RUN_DIR",
        "GPUSUB_TOKEN",
        "GPUSUB_FABRICS",
    }
)

# sbatch(1), INPUT ENVIRONMENT VARIABLES: what of a site's or a user's would undo the request.
OVERRULED = {
    "SBATCH_ARRAY_INX": "job arrays are not supported",
    "SBATCH_CLUSTERS": "gpusub plans with what one cluster reports",
    "SBATCH_CPUS_PER_GPU": "gpusub counts CPUs by node; cpus_per_gpu in a profile does the same",
    "SBATCH_DISTRIBUTION": "gpusub settles the order of the ranks itself",
    "SBATCH_ERROR": "stdout and stderr share one log",
    "SBATCH_GPUS": "gpusub counts GPUs by node",
    "SBATCH_GPUS_PER_SOCKET": "gpusub counts GPUs by node",
    "SBATCH_GPUS_PER_TASK": "it hides a worker's GPUs from its neighbours",
    "SBATCH_OVERCOMMIT": "it leaves the job one CPU a node",
    "SBATCH_WAIT": "gpusub has its own --wait",
}


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch: the user's, without what a surrounding job planted.

    Neither is there what would undo the request (OVERRULED).

    Inside a job every ``SBATCH_*`` goes too: the site's modules set them for the login node.
    """
    inside_job = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT
        or not (
            name.startswith(_PLANTED_PREFIXES)
            or name in _PLANTED
            or name in OVERRULED
            or (inside_job and name.startswith("SBATCH_"))
        )
    }


def secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    name = name.upper()
    last = name.rpartition("_")[2]
    return last in {
        "TOKEN",
        "KEY",
        "SECRET",
        "PASS",
        "PAT",
        "APIKEY",
        "CREDENTIALS",
        "CREDS",
    } or any(word in name for word in ("PASSWORD", "PASSWD", "PASSPHRASE"))
