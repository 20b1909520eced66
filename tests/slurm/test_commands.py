"""How Slurm's commands are run and what their failures mean.

The classification is of texts recorded from real outages (Slurm 22.05, 24.11 and 26.05 stopped,
killed, cut off); real commands against a real controller are in tests/cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuslurm import commands
from gpuslurm.client import (
    Accepted,
    SlurmAmbiguousError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from gpuslurm.commands import (
    CommandClient,
    available,
    become_step,
    clean_environment,
    error_of,
    step_command,
)

SBATCH = "sbatch: error: Batch job submission failed: "
MUNGE = (
    'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such '
    "file or directory (Did you start munged?)\n"
    "sbatch: error: If munged is up, restart with --num-threads=10\n"
    "sbatch: error: auth_g_create: Protocol authentication error has invalid authentication\n"
    f"{SBATCH}Protocol authentication error\n"
)


class TestErrors:
    @pytest.mark.parametrize(
        "stderr",
        [
            f"{SBATCH}Unable to contact slurm controller (connect failure)\n",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n",
            f"{SBATCH}Slurm backup controller in standby mode\n",
            MUNGE,
            "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
            "sbatch: error: fetch_config: DNS SRV lookup failed\n"
            "sbatch: fatal: Could not establish a configuration source\n",
            'sbatch: error: Unable to resolve "ctl": Host name lookup failure\n',
        ],
    )
    def test_nothing_was_reached(self, stderr: str) -> None:
        assert type(error_of(["sbatch"], stderr)) is SlurmUnreachableError

    @pytest.mark.parametrize(
        "reason",
        [
            "Socket timed out on send/recv operation",
            "Connection reset by peer",
            "Connection timed out",
            "Zero Bytes were transmitted or received",
            "Transport endpoint is not connected",
            "Message receive failure",
            "Message send failure",
            "Unexpected message received",
        ],
    )
    def test_it_may_have_been_carried_out(self, reason: str) -> None:
        for stderr in (f"{SBATCH}{reason}\n", f"slurm_load_jobs error: {reason}\n"):
            assert type(error_of(["sbatch"], stderr)) is SlurmAmbiguousError

    @pytest.mark.parametrize(
        "reason",
        [
            "Invalid partition name specified",
            "Invalid account or account/partition combination specified",
            "Invalid qos specification",
            "Node count specification invalid",
            "Requested time limit is invalid (missing or exceeds some limit)",
            "Requested node configuration is not available",
            "Invalid node name specified",
            "Invalid feature specification",
            "Requested reservation is invalid",
            "Invalid generic resource (gres) specification",
            "Access/permission denied",
            "User's group not permitted to use this partition",
            "Job dependency problem",
            "Unspecified error",
            "Required partition not available (inactive or drain)",
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        ],
    )
    def test_the_answer_was_no(self, reason: str) -> None:
        error = error_of(["sbatch"], f"{SBATCH}{reason}\n")
        assert type(error) is SlurmRefusedError
        assert str(error) == f"Batch job submission failed: {reason}"

    def test_all_that_was_said_is_on_one_line_and_once(self) -> None:
        stderr = (
            "sbatch: error: invalid partition specified: nope\n\n"
            "sbatch: error: invalid partition specified: nope\r\n"
            f"{SBATCH}Invalid partition name specified\n"
        )
        assert str(error_of(["sbatch"], stderr)) == (
            "invalid partition specified: nope; "
            "Batch job submission failed: Invalid partition name specified"
        )

    @pytest.mark.parametrize("stderr", ["", "\n \n"])
    def test_without_a_word(self, stderr: str) -> None:
        assert str(error_of(["sbatch", "x"], stderr)) == "sbatch failed without a word"

    def test_every_kind_can_be_caught_as_one(self) -> None:
        assert issubclass(SlurmRefusedError, SlurmError)
        assert issubclass(SlurmUnreachableError, SlurmError)
        assert issubclass(SlurmAmbiguousError, SlurmError)


@pytest.mark.parametrize(
    "name",
    [
        *("SQUEUE_USERS", "SQUEUE_PARTITION", "SINFO_FORMAT", "SINFO_ALL", "SACCT_FORMAT"),
        *("SCONTROL_ALL", "SLURM_BITSTR_LEN", "SCANCEL_USER", "SLURM_CLUSTERS", "SLURM_JOB_ID"),
    ],
)
def test_what_blinds_slurms_commands_is_kept_from_them(name: str) -> None:
    clean = clean_environment({"PATH": "/bin"})
    assert clean_environment({name: "x", "PATH": "/bin"}) == clean
    assert clean["PATH"] == "/bin"
    assert clean["SLURM_TIME_FORMAT"] == "standard"


def test_where_the_controller_is_they_are_told() -> None:
    environ = {"SLURM_CONF": "/x", "SLURM_TIME_FORMAT": "relative", "KRB5CCNAME": "y"}
    clean = clean_environment({})
    assert clean_environment(environ) == {**clean, "SLURM_CONF": "/x", "KRB5CCNAME": "y"}
    assert clean["SLURM_TIME_FORMAT"] == "standard"
    assert environ["SLURM_TIME_FORMAT"] == "relative"


class TestWithoutTheCommands:
    @pytest.fixture(autouse=True)
    def nothing_on_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path

    def test_slurm_is_not_available(self, nothing_on_path: Path) -> None:
        assert available() is False
        (nothing_on_path / "sbatch").write_text("#!/bin/sh\n")
        assert available() is False
        (nothing_on_path / "sbatch").chmod(0o755)
        assert available() is True

    def test_what_is_asked_of_it_reaches_nothing(self) -> None:
        client = CommandClient()
        for ask in (
            client.inventory,
            lambda: client.jobs(1),
            lambda: client.submit([], "/x", dict(os.environ), "/"),
        ):
            with pytest.raises(
                SlurmUnreachableError, match=r"^(scontrol|sbatch) does not start: No"
            ):
                ask()


class TestStep:
    def test_it_runs_beside_the_others(self) -> None:
        assert step_command(42, "gpu-7", True, ["sh", "-c", "x"]) == [
            *("srun", "--jobid=42", "--overlap", "--nodes=1", "--ntasks=1"),
            *("--nodelist=gpu-7", "--pty", "--", "sh", "-c", "x"),
        ]
        assert step_command(42, None, False, ["--x"])[-2:] == ["--", "--x"]

    def test_without_srun(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SlurmUnreachableError, match="srun does not start: No such file"):
            become_step(42, None, False, ["x"], {"PATH": str(tmp_path)})


class TestOddCommands:
    """What a site has put in place of Slurm's commands: a shell script around them."""

    @pytest.fixture
    def script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(commands, "QUERY_TIMEOUT_S", 0.3)
        monkeypatch.setattr(commands, "SUBMIT_TIMEOUT_S", 0.3)

        def write(content: str) -> None:
            for name in ("scontrol", "sinfo", "sbatch", "squeue", "scancel"):
                (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
                (tmp_path / name).chmod(0o755)

        return write

    def submitted(self) -> Accepted:
        return CommandClient().submit(["--nodes=1"], "/x/job.sh", dict(os.environ), "/")

    @pytest.mark.parametrize("hanging", ["exec /bin/sleep 4", "/bin/sleep 4; exit 1"])
    def test_one_that_hangs_is_given_up(self, script: Callable[[str], None], hanging: str) -> None:
        script(hanging)
        began = time.monotonic()
        with pytest.raises(SlurmUnreachableError, match="scontrol gave no answer in 0 s"):
            CommandClient().jobs(1)
        with pytest.raises(SlurmUnreachableError, match="gave no answer"):
            CommandClient().inventory()
        with pytest.raises(SlurmAmbiguousError, match="sbatch gave no answer"):
            self.submitted()
        assert time.monotonic() - began < 3

    @pytest.mark.parametrize(
        ("content", "accepted"),
        [
            ("echo 42", Accepted(42)),
            ("echo '42;c2'", Accepted(42, "c2")),
            # sbatch repeats by itself what the controller has no room for, and says so.
            ("echo 'sleeping' >&2; echo 42", Accepted(42, message="sleeping\n")),
            (
                'test "$*" = "--parsable --nodes=1 /x/job.sh" && test $PWD = / && echo 42',
                Accepted(42),
            ),
        ],
    )
    def test_a_job_is_accepted(
        self, script: Callable[[str], None], content: str, accepted: Accepted
    ) -> None:
        script(content)
        assert self.submitted() == accepted

    @pytest.mark.parametrize(
        "content", ["true", "echo Welcome; echo 42", "echo Submitted batch job 42", "echo x"]
    )
    def test_what_is_no_job_id_leaves_it_open(
        self, script: Callable[[str], None], content: str
    ) -> None:
        script(content)
        with pytest.raises(SlurmAmbiguousError, match="in place of a job id"):
            self.submitted()

    @pytest.mark.parametrize(
        ("reason", "error"),
        [
            ("Invalid qos specification", SlurmRefusedError),
            ("Unable to contact slurm controller (connect failure)", SlurmUnreachableError),
            ("Socket timed out on send/recv operation", SlurmAmbiguousError),
        ],
    )
    def test_a_submission_that_failed(
        self, script: Callable[[str], None], reason: str, error: type[SlurmError]
    ) -> None:
        script(f"echo 42; echo '{SBATCH}{reason}' >&2; exit 1")
        with pytest.raises(error) as failed:
            self.submitted()
        assert str(failed.value) == f"Batch job submission failed: {reason}"

    def test_a_refusal_may_be_on_stdout(self, script: Callable[[str], None]) -> None:
        script("echo 'Node nope not found'; exit 1")
        with pytest.raises(SlurmRefusedError, match=r"^Node nope not found$"):
            CommandClient().inventory()

    def test_a_job_that_slurm_does_not_know(self, script: Callable[[str], None]) -> None:
        script("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
        assert CommandClient().jobs(1) == ()
        script("echo 'slurm_load_jobs error: Access/permission denied' >&2; exit 1")
        with pytest.raises(SlurmRefusedError, match="denied"):
            CommandClient().jobs(1)

    def test_the_queue_is_asked_for_at_once(self, script: Callable[[str], None]) -> None:
        script('echo "$1 $2 $3 $4" >&2; exit 1')
        for ids, whose in ((None, "--me"), ([1, 2], "--jobs=1,2")):
            with pytest.raises(SlurmRefusedError, match=f"--all --noheader --states=all {whose}$"):
                CommandClient().queue(ids)
        assert CommandClient().queue([]) == ()

    def test_ids_that_slurm_does_not_know(self, script: Callable[[str], None]) -> None:
        script("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
        assert CommandClient().queue([1]) == ()

    def test_jobs_are_cancelled_together(self, script: Callable[[str], None]) -> None:
        script('test "$*" = "12 13_4"')
        CommandClient().cancel(["12", "13_4"])
        with pytest.raises(SlurmRefusedError):
            CommandClient().cancel(["14"])

    def test_they_are_run_in_a_clean_environment(
        self, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SQUEUE_USERS", "nobody")
        monkeypatch.setenv("SINFO_PARTITION", "none")
        script(
            'echo "${SQUEUE_USERS-clean} ${SINFO_PARTITION-clean} $SLURM_TIME_FORMAT" >&2; exit 1'
        )
        with pytest.raises(SlurmRefusedError, match=r"^clean clean standard$"):
            CommandClient().jobs(1)
