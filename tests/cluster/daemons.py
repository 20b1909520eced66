"""The processes that make a cluster, each with the means to break and to mend it."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import hardware
from box import HERE, Box, ClusterError, Process, children, delete, descendants, empty, kill, until
from configuration import NodeSpec

MUNGE_SOCKET = "/var/lib/cluster/munge/munge.socket.2"

# Where a node has a disk of its own. With its power go /run, /tmp and /dev/shm.
DISKS = ("run", "tmp", "var/tmp", "var/log", "var/spool", "var/lib/gpuhealth")

# 6817 and 6818, and the state of a listening socket, as in /proc/net/tcp.
SLURMCTLD_PORT, SLURMD_PORT, LISTEN = "1AA1", "1AA2", "0A"


class Daemon:
    """One of the cluster's own processes."""

    def __init__(self, box: Box, name: str, log: str) -> None:
        self.box, self.name, self.log = box, name, log
        self.process: Process | None = None
        self.is_stopped = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped by a signal."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Its pid as seen from outside the box."""
        pid = self.process.inner() if self.process else None
        if pid is None:
            raise ClusterError(f"{self.name} isn't running{self.log_tail()}")
        return pid

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raise an error, with its log, if it has ended."""
        if not self.is_alive:
            raise ClusterError(f"{self.name} has ended{self.log_tail()}")

    def wait_ready(self, timeout: float = 30) -> None:
        """Wait until it answers."""

        def ready() -> bool:
            self.check_alive()
            return self.is_ready()

        until(ready, timeout, lambda: f"{self.name} doesn't answer{self.log_tail()}")

    def stop(self) -> None:
        """Stop it with SIGSTOP: it keeps its connections and answers nobody."""
        self._signal(signal.SIGSTOP)
        self.is_stopped = True

    def cont(self) -> None:
        """Let it go on, with SIGCONT."""
        self._signal(signal.SIGCONT)
        self.is_stopped = False

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """End it with SIGTERM, in good order."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """End it in good order, if it runs, and start it."""
        if self.is_alive:
            self.terminate()
        self.start()

    def log_tail(self, lines: int = 20) -> str:
        """The end of its log, to put behind a message."""
        path = self.box.path(self.log)
        if not path.exists():
            return ""
        return "\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, sig: int) -> None:
        kill(self.pid, sig)

    def _end(self, sig: int) -> None:
        self._signal(sig)
        if self.is_stopped:
            self.cont()
        assert self.process is not None
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self.name} didn't end in 30 s{self.log_tail()}") from None


class Munge(Daemon):
    """munged, one for the whole cluster."""

    def __init__(self, box: Box) -> None:
        super().__init__(box, "munged", "/var/log/munge/munged.out")

    def install(self) -> None:
        """Create its key and its directories."""
        for directory in ("/etc/munge", "/var/log/munge", "/var/lib/munge"):
            place = self.box.path(directory)
            place.mkdir(exist_ok=True)
            os.chown(place, 0, 0)
            place.chmod(0o755)
        key = self.box.path("/etc/munge/munge.key")
        key.unlink(missing_ok=True)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        sockets = Path(MUNGE_SOCKET).parent
        self.box.path(sockets).mkdir()
        # Where everybody looks for it; each node's /run has the same link.
        self.box.path("/run/munge").symlink_to(sockets)

    def launch(self) -> None:
        """Start it."""
        self.box.path(MUNGE_SOCKET).unlink(missing_ok=True)
        # --force: it is root here, and so are its directories.
        argv = ["munged", "--foreground", "--force", "--num-threads=4", f"--socket={MUNGE_SOCKET}"]
        self.process = self.box.spawn(argv, self.log)

    def is_ready(self) -> bool:
        """Whether its socket is there."""
        return self.box.path(MUNGE_SOCKET).exists()


class Controller(Daemon):
    """slurmctld."""

    def __init__(self, box: Box) -> None:
        super().__init__(box, "slurmctld", "/var/log/slurm/slurmctld.out")

    def install(self) -> None:
        """Create its directories."""
        for directory in ("/var/log/slurm", "/var/spool/slurmctld"):
            place = self.box.path(directory)
            place.mkdir(exist_ok=True)
            os.chown(place, 0, 0)
            place.chmod(0o755)

    def launch(self) -> None:
        """Start it, under the hostname that slurm.conf gives it."""
        run = "hostname controller && exec slurmctld -D"
        self.process = self.box.spawn(["unshare", "--uts", "sh", "-c", run], self.log)

    def is_ready(self) -> bool:
        """Whether it listens."""
        return _listens(self.box.pid, SLURMCTLD_PORT)


class Node(Daemon):
    """A compute node: its namespaces, its hardware and the slurmd in them.

    kill() takes the power from it: everything on it ends at once. start() gives the power back;
    slurmctld, where it has noticed, keeps the node down until it is resumed.
    """

    def __init__(self, box: Box, spec: NodeSpec, index: int) -> None:
        self.spec = spec
        self._own = f"/var/lib/cluster/{spec.name}"
        super().__init__(box, spec.name, f"{self._own}/disk/var/log/slurm/slurmd.out")
        self._individual = hardware.own(spec.name, index, spec.gpus)
        self._healthy: dict[str, tuple[int, int]] = {}

    @property
    def pid(self) -> int:
        """The pid, as seen from outside the box, of the node's first process."""
        unshare = super().pid
        return until(lambda: children(unshare), 10, lambda: f"{self.name} has no process")[0]

    @property
    def infiniband(self) -> Path:
        """The node's /sys/class/infiniband; what is changed there changes on this node only."""
        return self.path("/sys/class/infiniband")

    def path(self, inside: str | Path) -> Path:
        """A path as this node sees it, to use from outside."""
        return Path(f"/proc/{self.pid}/root", str(inside).lstrip("/"))

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this node."""
        return self.box.run(
            argv,
            user=user,
            cwd=cwd,
            env=env,
            check=check,
            timeout=timeout,
            input=input,
            target=self.pid,
        )

    def install(self) -> None:
        """Create the node's own directories."""
        self.process = None
        self._healthy = {}
        own = self.box.path(self._own)
        for directory in ("sys", "sys.work", "dev/shm", *(f"disk/{disk}" for disk in DISKS)):
            (own / directory).mkdir(parents=True)
        for directory in ("log/slurm", "spool/slurmd"):
            (own / "disk/var" / directory).mkdir()
        (own / "disk/var/tmp").chmod(0o1777)
        hardware.write(self._individual, own / "sys")

    def launch(self) -> None:
        """Switch it on."""
        own = self.box.path(self._own)
        for directory in ("disk/run", "disk/tmp", "dev/shm"):
            empty(own / directory)
        (own / "disk/tmp").chmod(0o1777)
        (own / "disk/run/slurm").mkdir()
        (own / "disk/run/munge").symlink_to(Path(MUNGE_SOCKET).parent)
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        hardware.make_devices(hardware.devices(self.spec.gpus), own / "dev")
        argv = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        argv += ["bash", str(HERE / "node.sh"), self.name, self.spec.address]
        argv += [f"gpus-{self.spec.gpus}", *DISKS]
        self.process = self.box.spawn(argv, f"{self._own}/node.out", netns=self.name)

    def is_ready(self) -> bool:
        """Whether its slurmd listens."""
        return _listens(self.pid, SLURMD_PORT)

    def remember(self) -> None:
        """Take its hardware, as it is now, for healthy."""
        self._healthy = hardware.snapshot(self.box.path(self._own) / "sys")

    def reset(self) -> None:
        """Heal its hardware and empty its disks, but for what is Slurm's."""
        own = self.box.path(self._own)
        if hardware.snapshot(own / "sys") != self._healthy:
            tree = hardware.common(self.spec.gpus) | self._individual
            hardware.restore(tree, self.path("/sys"))
            self.remember()
        hardware.make_devices(hardware.devices(self.spec.gpus), own / "dev")
        for disk in ("run", "tmp", "var/tmp", "var/lib/gpuhealth"):
            for place in (own / "disk" / disk).iterdir():
                if not self._is_in_use(Path("/", disk, place.name)):
                    delete(place)

    def log_tail(self, lines: int = 20) -> str:
        """The end of what slurmd said and of what went wrong before it started."""
        setup = self.box.path(f"{self._own}/node.out")
        return super().log_tail(lines) + ("\n" + setup.read_text() if setup.exists() else "")

    def _is_in_use(self, place: Path) -> bool:
        """Whether Slurm needs it, or something from outside the box is mounted there."""
        if place.parent == Path("/run") and place.name.startswith(("slurm", "munge")):
            return True
        return any(exposed.is_relative_to(place) for exposed in self.box.exposed)

    def _signal(self, sig: int) -> None:
        # Without its power nothing on the node runs on; SIGTERM it hands on to slurmd itself.
        below = [] if sig == signal.SIGTERM else descendants(self.pid)
        for pid in (self.pid, *below):
            kill(pid, sig)


def _listens(pid: int, port: str) -> bool:
    """Whether anybody listens on a port in a process's net namespace."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port}") and line.split()[3] == LISTEN for line in lines)
