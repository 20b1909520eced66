"""A box: namespaces that end, with everything in them, when the process that made them ends.

box.sh is its first process. It reads from a pipe whose other end only the process that made the
box holds; at the end of that pipe it ends, and the kernel kills whatever else is in the box,
unmounts its file systems and takes down its networks. No signal has to reach anybody for that, so
it holds for kill -9 as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

# Directories that a box has of its own.
OWN_DIRECTORIES = tuple(Path(path) for path in ("/home", "/tmp", "/run", "/var/tmp"))

Stream = int | IO[bytes] | IO[str] | None
T = TypeVar("T")


class ClusterError(RuntimeError):
    """The cluster itself, not what is tried in it, doesn't do what it should."""


class CommandError(subprocess.CalledProcessError):
    """A command in the box ended with another code than 0; says what it printed."""

    def __str__(self) -> str:
        printed = f"{self.stdout or ''}{self.stderr or ''}".rstrip()
        return f"{super().__str__()}\n{printed[-4000:]}"


class Process(subprocess.Popen[str]):
    """A command in the box.

    The process that Popen itself knows stays outside the box, waits for the command and ends as it
    does. Signals go to the command.
    """

    def inner(self) -> int | None:
        """The command's pid as seen from outside, or None if it has ended."""
        deadline = time.monotonic() + 10
        while self.poll() is None and time.monotonic() < deadline:
            if found := children(self.pid):
                return found[0]
            time.sleep(0.002)
        return None

    def send_signal(self, sig: int) -> None:
        """Send it to the command; SIGKILL to all of its descendants as well."""
        pid = self.inner()
        if pid is None:
            return
        below = descendants(pid) if sig == signal.SIGKILL else []
        for target in (pid, *below):
            kill(target, sig)
        # nsenter has stopped, too, if the command was stopped.
        if sig in (signal.SIGCONT, signal.SIGKILL):
            kill(self.pid, signal.SIGCONT)

    def close_streams(self) -> None:
        """Close this side's ends of its pipes."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()


class Box:
    """The namespaces, and how commands get into them.

    directory   where /home lies, on the disk; it is kept. None: below /var/tmp, and removed when
                the box ends.
    root        the system that the box shows; it is never written to
    expose      directories of this machine that are readable at the same place in the box
    """

    def __init__(self, root: Path, directory: Path | None, expose: Sequence[Path]) -> None:
        self.root, self._directory, self._expose = root.resolve(), directory, expose
        self._holder: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._processes: list[Process] = []
        self.exposed: list[Path] = []

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not been stopped."""
        return self._pid != 0

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        if not self._pid:
            raise ClusterError("the box isn't running")
        return self._pid

    def path(self, inside: str | Path) -> Path:
        """A path in the box, to use from outside."""
        return Path(f"/proc/{self.pid}/root", str(inside).lstrip("/"))

    def start(self, timeout: float = 30) -> None:
        """Make the box."""
        exposures = self._exposures()
        directory = self._directory or Path(tempfile.mkdtemp(prefix="gpusub-", dir="/var/tmp"))
        with umask(0o022):
            for name in ("stage", "home"):
                (directory / name).mkdir(exist_ok=True)
        # The shell that waits for the box also outlives this process, to tidy up.
        script = '"$@"' if self._directory else '"$@"; rm -rf -- "$0"'
        argv = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork"]
        argv += ["--kill-child=KILL", "bash", str(HERE / "box.sh"), str(self.root)]
        argv += [str(directory / "stage"), str(directory / "home"), *exposures]
        with tempfile.TemporaryFile() as errors:
            self._holder = subprocess.Popen(
                ["sh", "-c", script, str(directory), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C at the terminal is for what runs in the box.
                start_new_session=True,
                umask=0o022,
            )
            if not self._says_ready(timeout):
                self.stop()
                errors.seek(0)
                raise ClusterError(f"the box didn't start: {errors.read().decode()[-4000:]}")
        # The shell, unshare, and below it the box's first process.
        self._pid = descendants(self._holder.pid)[-1]

    def stop(self, timeout: float = 30) -> None:
        """End the box and everything in it."""
        if self._holder is None:
            return
        holder, self._holder, self._pid = self._holder, None, 0
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()
        # The box is gone when all of its processes are, and none of those is while whoever waits
        # for it has been stopped.
        for process in self._processes:
            kill(process.pid, signal.SIGCONT)
        try:
            code = holder.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in descendants(holder.pid):
                kill(pid, signal.SIGKILL)
            holder.wait(timeout)
            raise ClusterError(f"the box didn't end in {timeout:g} s and was killed") from None
        finally:
            self._reap(timeout)
        if code and not self._directory:
            raise ClusterError("the box's directory below /var/tmp could not be removed")

    def _reap(self, timeout: float) -> None:
        for process in self._processes:
            process.wait(timeout)
            process.close_streams()
        self._processes.clear()

    def _says_ready(self, timeout: float) -> bool:
        assert self._holder is not None
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], timeout)
        return bool(ready) and self._holder.stdout.readline() == b"ready\n"

    def _exposures(self) -> list[str]:
        """What box.sh has to show of this machine, as its arguments."""
        binds: dict[Path, Path] = {}
        covers: set[Path] = set()
        for path in (*_python_directories(), REPOSITORY, *self._expose):
            source = path.resolve(strict=True)
            if source.stat().st_mode & 0o005 != 0o005:
                raise ClusterError(f"others than root must be able to read {source}")
            # By its real name, and where that isn't enough by the name that links give it.
            for target in (source, path):
                closed = _closed_ancestor(self.root, target)
                if closed:
                    covers.add(closed)
                if closed or target == source or self.root != Path("/"):
                    binds[target] = source
        arguments = [word for cover in sorted(covers) for word in ("--cover", str(cover))]
        self.exposed = sorted(path for path in binds if not binds.keys() & set(path.parents))
        for target in self.exposed:
            arguments += ["--expose", str(binds[target]), str(target)]
        return arguments

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
        target: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, in the user's home and with a clean environment; target: whose
        namespaces it gets, in place of those of the box itself.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.popen(argv, user=user, cwd=cwd, env=env, stdin=stdin, target=target)
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            # The command and all that it started: whoever is left would hold on to the pipes.
            process.kill()
            process.communicate(timeout=10)
            raise
        self._processes.remove(process)
        if check and process.returncode:
            raise CommandError(process.returncode, list(argv), out, err)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        new_session: bool = True,
        target: int | None = None,
    ) -> Process:
        """Start a command, as run does."""
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {
            "PATH": _path(),
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": os.environ.get("TERM", "dumb"),
            **(env or {}),
        }
        # Whether or not the caller, and nsenter with it, ignores them, the command doesn't.
        command = ["env", "-i", "--default-signal=INT,QUIT", f"--chdir={cwd or home}"]
        command += [*(f"{name}={value}" for name, value in variables.items()), *argv]
        if user != "root":
            ids = [f"--reuid={user}", f"--regid={user}", "--init-groups"]
            command = ["setpriv", *ids, *command]
        return self._enter(
            ["--", *command], stdin, stdout, stderr, new_session=new_session, target=target
        )

    def spawn(self, argv: Sequence[str], log: str, netns: str | None = None) -> Process:
        """Start a daemon. Its output goes to a file in the box, never to the caller's pipes, whose
        reader would wait for its end.
        """
        null = subprocess.DEVNULL
        # A process can't enter a pid namespace, only its children can. nsenter forks one and stops
        # itself when that one is stopped; nobody would wake it if this process is killed then. So
        # let unshare fork, which doesn't. (After a SIGKILL it gives the wrong exit code.)
        fork = ["--no-fork", "--", "unshare", "--fork", "--"]
        with self.path(log).open("ab") as output:
            return self._enter([*fork, *argv], null, output, output, netns=netns)

    def _enter(
        self,
        argv: Sequence[str],
        stdin: Stream,
        stdout: Stream,
        stderr: Stream,
        *,
        new_session: bool = True,
        target: int | None = None,
        netns: str | None = None,
    ) -> Process:
        net = f"--net=/proc/{self.pid}/root/run/netns/{netns}" if netns else "--net"
        # --root, --wd: a process in a chroot would leave that by entering mounts alone.
        enter = ["nsenter", f"--target={target or self.pid}", "--mount", "--root", "--wd"]
        enter += ["--uts", "--ipc", "--pid"]
        process = Process(
            [*enter, net, *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={"PATH": SYSTEM_PATH},
            umask=0o022,
            start_new_session=new_session,
        )
        self._processes.append(process)
        return process


def _python_directories() -> list[Path]:
    """Where this interpreter lives: its prefixes, and those that the links to it lead through."""
    found = [Path(sys.prefix), Path(sys.base_prefix)]
    executable = Path(sys.executable)
    while executable.is_symlink():
        found.append(executable.parent.parent)
        executable = Path(os.path.normpath(executable.parent / executable.readlink()))
    found.append(executable.parent.parent)
    # The box has a /usr: in another system that one's.
    return [path for path in dict.fromkeys(found) if path not in (Path("/"), Path("/usr"))]


def _closed_ancestor(root: Path, path: Path) -> Path | None:
    """The first directory on the way to a path that only root can pass, in this root."""
    for ancestor in list(path.parents)[-2::-1]:
        if ancestor in OWN_DIRECTORIES:
            return None
        place = root / ancestor.relative_to("/")
        if place.exists() and not place.stat().st_mode & 0o001:
            return ancestor
    return None


def _path() -> str:
    own = Path(sys.prefix) / "bin"
    return SYSTEM_PATH if own == Path("/usr/bin") else f"{own}:{SYSTEM_PATH}"


def children(pid: int) -> list[int]:
    """The pids of a process's children; none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """The pids of all that a process started, and those did, parents before their children."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def kill(pid: int, sig: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def until(
    condition: Callable[[], T], timeout: float, why: Callable[[], str], interval: float = 0.02
) -> T:
    """Wait until a condition holds and return what it gave; why says what was missing."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout:g} s: {why()}")
        time.sleep(interval)
    return value


def delete(place: Path) -> None:
    """Delete a file or a directory with all that is in it."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def empty(directory: Path) -> None:
    """Delete all that is in a directory."""
    for place in directory.iterdir():
        delete(place)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Create files with this umask, whatever the caller's is."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
