from __future__ import annotations

import pytest

from gpusub.environment import OVERRULED, scrubbed, secret

PLANTED = [
    "SLURM_JOB_ID",
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_TASK",
    "SLURM_MEM_PER_CPU",
    "SLURM_TRES_PER_TASK",
    "SLURM_EXPORT_ENV",
    "SLURM_CONF_SERVER",
    "SLURMD_NODENAME",
    "SRUN_DEBUG",
    "SBATCH_CPU_BIND",
    "SBATCH_CPU_BIND_LIST",
    "SBATCH_MEM_BIND_TYPE",
    "PMI_RANK",
    "PMI2_JOBID",
    "PMIX_RANK",
    "PMIX_SERVER_URI2",
    "PET_RDZV_ENDPOINT",
    "PET_NNODES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "GPUSUB_RUN_DIR",
    "GPUSUB_TOKEN",
]
INNOCENT = [
    "SLURM_CONF",
    "PATH",
    "HOME",
    "RANKING",
    "MY_RANK",
    "RANK_FILE",
    "WORLD_SIZES",
    "MASTER",
    "MASTERED_BY",
    "SLURMISH",
    "SRUNNER",
    "APMI_X",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_TOKEN",
    "TORCH_HOME",
    "GPUSUB_PARTITION",
    "xSLURM_JOB_ID",
    "slurm_job_id",
]


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("inside", [{}, {"SLURM_JOB_ID": "1"}])
def test_what_a_surrounding_job_plants_is_dropped(name: str, inside: dict[str, str]) -> None:
    assert scrubbed({**inside, name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", INNOCENT)
@pytest.mark.parametrize("inside", [{}, {"SLURM_JOB_ID": "1"}])
def test_everything_else_is_kept(name: str, inside: dict[str, str]) -> None:
    assert scrubbed({**inside, name: "a\nb"}) == {name: "a\nb"}


@pytest.mark.parametrize("name", sorted(OVERRULED))
def test_what_would_undo_the_request_is_dropped(name: str) -> None:
    assert scrubbed({name: "1"}) == {}
    assert scrubbed({f"{name}_X": "1"}) == {f"{name}_X": "1"}


@pytest.mark.parametrize(
    "name", ["SBATCH_PARTITION", "SBATCH_EXPORT", "SBATCH_GPUS_PER_NODE", "SBATCH_X"]
)
def test_a_sites_sbatch_variables_are_kept_but_for_those_of_a_job(name: str) -> None:
    assert scrubbed({name: "1"}) == {name: "1"}
    assert scrubbed({name: "1", "SLURM_JOB_ID": "7"}) == {}


def test_the_environment_itself_is_left_alone() -> None:
    environ = {"RANK": "1"}
    scrubbed(environ)
    assert environ == {"RANK": "1"}


@pytest.mark.parametrize(
    "name",
    [
        *("TOKEN", "HF_TOKEN", "hf_token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SECRET"),
        *("MY_SECRET", "PGPASSWORD", "PASSWORD_FILE", "Db_Password", "KEY"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MONKEY", "KEYBOARD", "SECRETARY", "TOKENS", "PATH"),
        *("SSH_KEY_FILE", "NCCL_DEBUG", "KEY_1"),
    ],
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not secret(name)
