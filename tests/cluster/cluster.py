#!/usr/bin/env python3
"""A real Slurm cluster in throw-away Linux namespaces, for tests and for trying things out.

As a command, `python tests/cluster/cluster.py [CMD ARGS...]` starts a cluster, gives a shell (or
runs CMD) on its login side as an ordinary user, and leaves nothing behind. As a module:

    with Cluster() as cluster:
        job = cluster.sbatch("-N2", "--wrap", "srun hostname")
        cluster.wait(job, "COMPLETED")

The login side, slurmctld and munged are in one box (box.py). Each node has namespaces of its own
below it (node.sh): its own hostname, address, ports, /sys, /dev and local disks. All share /home,
/etc/slurm and what is installed. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import configuration
import hardware
from box import (
    HERE,
    SYSTEM_PATH,
    Box,
    ClusterError,
    CommandError,
    Process,
    Stream,
    delete,
    empty,
    umask,
    until,
)
from configuration import CONTROLLER, HOOK_DIRECTORY, HOOKS, LOGIN, Layout, real_cpus
from daemons import Controller, Daemon, Munge, Node

__all__ = [
    "Cluster",
    "ClusterError",
    "CommandError",
    "Layout",
    "Node",
    "Process",
    "parse_job",
    "real_cpus",
    "what_is_missing",
]

USERS = {"researcher": 1001, "colleague": 1002}
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")

# Fields of "scontrol show job" whose value runs to the end of the line, spaces and all.
FREE_TEXT = (
    "JobName",
    "Comment",
    "AdminComment",
    "SystemComment",
    "Command",
    "SubmitLine",
    "WorkDir",
    "Extra",
)


class Cluster:
    """A cluster; as a context manager it is started and stopped.

    directory   where the homes lie, on the disk; it is kept. By default one below /var/tmp that
                goes away with the cluster, also when this process is killed.
    root        the system that everything runs in: "/", or a directory with another one
    nodes       how many nodes partition gpu has: gpu-5, gpu-6, …
    small       whether there are, beside them, cpu-1 and gpu-small and the partitions cpu and mixed
    layout      nodes and partitions, in place of these two
    task_plugin with "task/affinity" tasks are bound to CPUs. Those have to exist: see real_cpus().
    conf        lines of slurm.conf that override those here
    files       further files in /etc/slurm, by name
    expose      directories of this machine that are readable at the same place in the cluster
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        root: str | Path = "/",
        nodes: int = 8,
        small: bool = True,
        layout: Layout | None = None,
        task_plugin: str = "task/none",
        conf: str = "",
        files: Mapping[str, str] | None = None,
        expose: Sequence[Path] = (),
    ) -> None:
        self.layout = layout or Layout.of(nodes, small)
        self.version: tuple[int, int] = (0, 0)
        self.box = Box(Path(root), directory, expose)
        self.munge = Munge(self.box)
        self.controller = Controller(self.box)
        self._nodes = {
            spec.name: Node(self.box, spec, index) for index, spec in enumerate(self.layout.nodes)
        }
        self._task_plugin, self._conf, self._files = task_plugin, conf, dict(files or {})
        self._etc: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, timeout: float = 60) -> None:
        """Start everything and wait until all nodes are idle."""
        if missing := what_is_missing(self.box.root):
            raise ClusterError(missing)
        try:
            self.box.start()
            with umask(0o022):
                self._install()
                self._start_daemons()
            self._wait_idle(timeout)
            for node in self._nodes.values():
                node.remember()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything."""
        self.box.stop()

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not been stopped."""
        return self.box.is_running

    # -- what tests use

    def path(self, inside: str | Path) -> Path:
        """A path as the login side sees it, to use from outside.

        A link with an absolute target would be followed outside the box.
        """
        return self.box.path(inside)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "researcher",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login side, in the user's home, and return what it printed.

        The environment is that of a fresh login, with env added. At the timeout the command and
        all that it started are killed, and subprocess.TimeoutExpired is raised.
        """
        return self.box.run(
            argv, user=user, cwd=cwd, env=env, check=check, timeout=timeout, input=input
        )

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "researcher",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        new_session: bool = True,
    ) -> Process:
        """Start a command on the login side. Signals sent to it reach the command."""
        return self.box.popen(
            argv,
            user=user,
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            new_session=new_session,
        )

    def sbatch(self, *arguments: str, user: str = "researcher", **options: Any) -> str:
        """Submit a job and return its id; options are those of run."""
        done = self.run(["sbatch", "--parsable", *arguments], user=user, **options)
        return done.stdout.strip().partition(";")[0]

    def scontrol(self, *arguments: str) -> str:
        """Run scontrol as root and return what it printed."""
        return self.box.run(["scontrol", *arguments]).stdout

    def nodes(self) -> dict[str, str]:
        """The state of each node, as sinfo says it: idle, drained, idle*, …"""
        printed = self.box.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout
        return dict(line.split() for line in printed.splitlines())

    def node(self, name: str) -> Node:
        """One node."""
        return self._nodes[name]

    def job(self, job: str | int) -> dict[str, str]:
        """The fields of "scontrol show job"."""
        return parse_job(self.scontrol("show", "job", str(job)))

    def wait(self, job: str | int, *states: str, timeout: float = 60) -> dict[str, str]:
        """Wait until a job is in one of the states (by default: at its end) and return it."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        seen: dict[str, str] = {}

        def is_there() -> bool:
            seen.update(self.job(job))
            return seen["JobState"] in wanted

        def why() -> str:
            state = f"{seen['JobState']}, {seen['Reason']}"
            return f"job {job} is {state}, not {' or '.join(wanted)}{self.controller.log_tail()}"

        until(is_there, timeout, why, interval=0.05)
        return seen

    def hook(self, name: str, script: str = "#!/bin/sh\nexit 0\n") -> None:
        """Replace one of the programs that Slurm runs; without a script by one that does nothing.

        The old one may be running: it is replaced, not rewritten.
        """
        if name not in HOOKS:
            raise ValueError(f"{name} is none of {', '.join(HOOKS)}")
        new = self.path(f"{HOOK_DIRECTORY}/.{name}")
        new.write_text(script)
        new.chmod(0o755)
        new.rename(new.with_name(name))

    def reset(self, timeout: float = 60) -> None:
        """Make it as if just started, but for the numbers and the memory of earlier jobs."""
        for daemon in self._daemons():
            if not daemon.is_alive:
                daemon.start()
            elif daemon.is_stopped:
                daemon.cont()
        with umask(0o022):
            self._reset_files()
        self._cancel_all()
        self._open_partitions()
        try:
            self._wait_clean(6)
        except TimeoutError:
            # A prolog, an epilog or a task may hang: take the power from the nodes that do.
            self._power_cycle_busy()
            self._wait_clean(timeout)
        # Only now: a job that still runs would write into what is being deleted.
        with umask(0o022):
            self._reset_homes()

    # -- start

    def _daemons(self) -> list[Daemon]:
        return [self.munge, self.controller, *self._nodes.values()]

    def _install(self) -> None:
        """Write the cluster's files, all of them inside the box."""
        self._write_accounts()
        self._make_homes()
        self.version = self._slurm_version()
        self._etc = configuration.files(self.layout, self.version, self._task_plugin, self._conf)
        self._etc |= self._files
        self._write_etc()
        self._write_names()
        self.path(HOOK_DIRECTORY).mkdir(parents=True)
        for hook in HOOKS:
            self.hook(hook)
        for gpus in {spec.gpus for spec in self.layout.nodes}:
            layer = self.path(f"/var/lib/cluster/hardware/gpus-{gpus}")
            hardware.write(hardware.common(gpus), layer)
            hardware.hide_own_devices(layer)
        self.munge.install()
        self.controller.install()
        for node in self._nodes.values():
            node.install()

    def _write_accounts(self) -> None:
        """/etc/passwd and /etc/group of the box: the system's accounts and ours.

        Without other people's: one of them may have the number that one of ours has here.
        """
        for name in ("passwd", "group"):
            file = self.path(f"/etc/{name}")
            kept = [line for line in file.read_text().splitlines() if _is_system_account(line)]
            for user, number in USERS.items():
                home = f":{number}::/home/{user}:/bin/bash" if name == "passwd" else ":"
                kept.append(f"{user}:x:{number}{home}")
            file.write_text("\n".join(kept) + "\n")

    def _make_homes(self) -> None:
        for user, number in USERS.items():
            home = self.path(f"/home/{user}")
            home.mkdir(exist_ok=True)
            (home / ".bashrc").write_text("PS1='[\\u@\\h \\W]\\$ '\n")
            for place in (home, home / ".bashrc"):
                os.chown(place, number, number)

    def _write_etc(self) -> bool:
        """Make /etc/slurm hold our files and no others; whether anything was to be done."""
        etc = self.path("/etc/slurm")
        etc.mkdir(exist_ok=True)
        others = [place for place in etc.iterdir() if place.name not in self._etc]
        for place in others:
            delete(place)
        changed = bool(others)
        for name, text in self._etc.items():
            file = etc / name
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
                file.chmod(0o755 if text.startswith("#!") else 0o644)
                changed = True
        return changed

    def _write_names(self) -> None:
        self.path("/etc/hosts").write_text(self.layout.hosts())
        # Empty: nothing here may wait for a name server. It may be a link to nowhere.
        resolver = self.path("/etc/resolv.conf")
        resolver.unlink(missing_ok=True)
        resolver.write_text("")

    def _slurm_version(self) -> tuple[int, int]:
        printed = self.box.run(["slurmctld", "-V"]).stdout
        found = re.search(r"(\d+)\.(\d+)", printed)
        if not found:
            raise ClusterError(f"slurmctld -V says {printed!r}")
        return int(found[1]), int(found[2])

    def _start_daemons(self) -> None:
        self.munge.launch()
        self._connect()
        self.munge.wait_ready()
        self.controller.start()
        # Only now: a slurmd whose first registration is refused sleeps for a second.
        for node in self._nodes.values():
            node.launch()

    def _connect(self) -> None:
        """One bridge, and from it a link into every node's net namespace."""
        lines = ["link set lo up", "link add cluster type bridge"]
        lines += [f"addr add {address}/24 dev cluster" for address in (LOGIN, CONTROLLER)]
        lines += ["link set cluster up"]
        for index, name in enumerate(self._nodes):
            lines += [
                f"netns add {name}",
                f"link add node{index} type veth peer name eth0 netns {name}",
                f"link set node{index} master cluster up",
            ]
        self.box.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n")

    def _wait_idle(self, timeout: float) -> None:
        def is_idle() -> bool:
            for daemon in self._daemons():
                daemon.check_alive()
            states = self.nodes()
            return len(states) == len(self._nodes) and set(states.values()) == {"idle"}

        def why() -> str:
            states = self.nodes()
            busy = next((name for name, state in states.items() if state != "idle"), None)
            log = self.node(busy).log_tail() if busy else ""
            return f"not all idle: {states}{self.controller.log_tail()}{log}"

        until(is_idle, timeout, why)

    # -- reset

    def _reset_files(self) -> None:
        for hook in HOOKS:
            self.hook(hook)
        if self._write_etc():
            self.scontrol("reconfigure")
        for node in self._nodes.values():
            node.reset()

    def _reset_homes(self) -> None:
        for user in USERS:
            empty(self.path(f"/home/{user}"))
        self._make_homes()

    def _cancel_all(self) -> None:
        jobs = self.box.run(["squeue", "-h", "-o", "%A"]).stdout.split()
        if jobs:
            self.box.run(["scancel", *sorted(set(jobs))])

    def _open_partitions(self) -> None:
        for line in self.box.run(["sinfo", "-h", "-o", "%R %a"]).stdout.splitlines():
            name, state = line.split()
            if state != "up":
                self.scontrol("update", f"PartitionName={name}", "State=UP")

    def _wait_clean(self, timeout: float) -> None:
        resumed: set[str] = set()

        def is_clean() -> bool:
            states = self.nodes()
            for name, state in states.items():
                # Once: a node that has been resumed is idle* until it is heard from.
                if name not in resumed and state.startswith(("drain", "down", "fail")):
                    # Refused where it has come back by itself meanwhile; the next look tells.
                    update = ["scontrol", "update", f"NodeName={name}", "State=RESUME"]
                    if self.box.run(update, check=False).returncode == 0:
                        resumed.add(name)
            queue = self.box.run(["squeue", "-h"]).stdout
            return set(states.values()) == {"idle"} and not queue

        until(is_clean, timeout, lambda: f"not clean: {self.nodes()}{self.controller.log_tail()}")

    def _power_cycle_busy(self) -> None:
        for name, state in self.nodes().items():
            if state != "idle":
                self.node(name).kill()
                self.scontrol("update", f"NodeName={name}", "State=DOWN", "Reason=power cycle")
                self.node(name).start()
                self.scontrol("update", f"NodeName={name}", "State=RESUME")


def parse_job(printed: str) -> dict[str, str]:
    """The fields of one job as "scontrol show job" prints it: a line for each group of fields."""
    fields: dict[str, str] = {}
    for line in printed.splitlines():
        rest = line.strip()
        while rest:
            key, _, rest = rest.partition("=")
            if key in FREE_TEXT or key.startswith("Std"):
                value, rest = rest, ""
            else:
                value, _, rest = rest.partition(" ")
            fields.setdefault(key, value)
            rest = rest.lstrip()
    return fields


def what_is_missing(root: str | Path = "/") -> str:
    """Why there can't be a cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root"
    path = ":".join(f"{root}{part}" for part in SYSTEM_PATH.split(":"))
    missing = [command for command in COMMANDS if not shutil.which(command, path=path)]
    if missing:
        return f"not installed: {', '.join(missing)} (run {HERE / 'install.sh'})"
    return ""


def _is_system_account(line: str) -> bool:
    name, _, number = line.split(":")[:3]
    return name not in USERS and (int(number) < 1000 or int(number) >= 65000)


# -- the command


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Leave Ctrl-C and Ctrl-\\, which reach all that the terminal runs, to the command.

    Ignored rather than handled, so that what waits for the command inherits it.
    """
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _banner(cluster: Cluster, user: str) -> str:
    version = ".".join(f"{part:02}" for part in cluster.version)
    partitions = cluster.run(["sinfo", "-o", "%10P %.5D %.6t %.4c %.8m %10G %N"]).stdout
    return (
        f"{partitions}A virtual cluster with Slurm {version}; its GPUs are device files only."
        f" You are {user}\non its login node. exit or Ctrl-D ends it and leaves nothing behind.\n"
    )


def _run_command(cluster: Cluster, user: str, argv: list[str]) -> int:
    if not argv:
        print(_banner(cluster, user), end="", file=sys.stderr)
        argv = ["bash", "-i"]
    with _ignoring_interrupts():
        process = cluster.popen(
            argv, user=user, stdin=None, stdout=None, stderr=None, new_session=False
        )
        code = process.wait()
    return code if code >= 0 else 128 - code


def main() -> int:
    """Start a cluster, give a shell or run a command in it, end it."""
    parser = argparse.ArgumentParser(
        description="Start a virtual Slurm cluster; give a shell, or run CMD, on its login side."
    )
    parser.add_argument("--nodes", type=int, default=8, help="nodes in partition gpu (default: 8)")
    parser.add_argument("--root", default="/", help="directory with another system to run")
    parser.add_argument("--user", default="researcher", choices=[*USERS, "root"])
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD ARGS...")
    options = parser.parse_args()
    try:
        with Cluster(nodes=options.nodes, root=options.root) as cluster:
            return _run_command(cluster, options.user, options.command)
    except (ClusterError, TimeoutError) as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
