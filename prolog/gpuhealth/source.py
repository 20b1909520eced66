"""Where a node's values come from: a directory tree, or what was recorded of one.

Paths are those of the node (``/sys/class/infiniband``), whatever the tree's own root is.
Every way of looking returns a value or an errno, and raises nothing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Optional, Protocol, Union

from gpuhealth.reading import NOT_RECORDED, Listing, Reading

# An entry of a recording: a file's text, a directory's names, or {"errno": "EIO"},
# {"link": target}, {"kind": "char"}.
Entry = Union[str, list[str], dict[str, str]]
Entries = dict[str, Entry]

# sysfs gives at most a page; what is longer is asked for by its own limit.
LIMIT_BYTES = 4096
# Below this many links a path is no loop (path_resolution(7): ELOOP after 40).
_LINKS = 40

KERNEL_LOG = "/dev/kmsg"
# What the text of a record of the kernel's log has to start with to be kept: anywhere else in it
# the words may be the kernel's command line, say, which is nobody's business. The list is here,
# and not with the checks, since all of them share one look at the log.
KERNEL_WORDS = ("NVRM: Xid", "mlx5_core ")
# For each word the newest records alone: a driver that floods the log must not push out the other.
_KEPT = 256
_KEPT_CHARS = 512
_LOG_READS = 1 << 17
_LOG_BYTES = 1 << 24


class Source(Protocol):
    """A node's files, as far as checks look at them."""

    def read(self, path: str, limit: int = LIMIT_BYTES, binary: bool = False) -> Reading:
        """Return the start of a file: UTF-8, or with ``binary`` one character per byte."""

    def lines(self, path: str, prefixes: tuple[str, ...]) -> Reading:
        """Return those lines of a file, gzipped or not, that start with one of ``prefixes``."""

    def names(self, path: str) -> Listing:
        """Return what is in a directory."""

    def target(self, path: str) -> Reading:
        """Return where a path really is: every link on the way followed."""

    def kind(self, path: str) -> Reading:
        """Return what a path is: ``file``, ``dir``, ``char``, ``block`` or ``other``."""

    def kernel_log(self, words: tuple[str, ...] = KERNEL_WORDS) -> Reading:
        """Return the records of the kernel's log that start with one of ``words``, a line each.

        ``words`` are some of `KERNEL_WORDS`. A record is ``prefix;text`` as in
        linux:Documentation/ABI/testing/dev-kmsg, without its continuation lines.
        """


def _strip(text: str) -> str:
    return text[:-1] if text.endswith("\n") else text


class Directory:
    """A directory that holds a node's tree; ``/`` is this machine."""

    def __init__(self, root: str = "/") -> None:
        self._root = os.path.realpath(root)

    def _inside(self, path: str) -> str:
        """Return a path's place below the root; links in it lead nowhere else."""
        if self._root == "/":
            return path
        return self._follow(path)

    def _follow(self, path: str) -> str:
        # A recorded tree's absolute links mean that tree's root, not this machine's.
        done = self._root
        parts = [part for part in path.split("/") if part][::-1]
        links = 0
        while parts:
            part = parts.pop()
            if part == ".":
                continue
            if part == "..":
                if done != self._root:
                    done = os.path.dirname(done)  # noqa: PTH120 - pathlib costs 6 ms to import
                continue
            place = f"{done}/{part}"
            try:
                target = os.readlink(place)  # noqa: PTH115
            except OSError:
                done = place
                continue
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if target.startswith("/"):
                done = self._root
            parts.extend([piece for piece in target.split("/") if piece][::-1])
        return done

    def read(self, path: str, limit: int = LIMIT_BYTES, binary: bool = False) -> Reading:
        """Return the start of a file."""
        try:
            # One read, without a buffer: what sysfs shows is made at the read.
            handle = os.open(self._inside(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(handle, limit)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            return Reading(error=_errno(error))
        if binary:
            return Reading(data.decode("latin-1"))
        return Reading(_strip(data.decode("utf-8", "replace")))

    def lines(self, path: str, prefixes: tuple[str, ...]) -> Reading:
        """Return the lines that start with one of ``prefixes``."""
        try:
            with open(self._inside(path), "rb") as file:
                data = file.read(1 << 22)
            if data.startswith(b"\x1f\x8b"):
                import zlib

                data = zlib.decompressobj(31).decompress(data, 1 << 22)
        except (OSError, ValueError) as error:
            return Reading(error=_errno(error))
        except Exception as error:
            if type(error).__name__ != "error":
                raise
            return Reading(error=errno.EBADMSG)  # zlib.error: not what it starts like
        text = data.decode("utf-8", "replace")
        return Reading("\n".join(x for x in text.splitlines() if x.startswith(prefixes)))

    def names(self, path: str) -> Listing:
        """Return what is in a directory."""
        try:
            return Listing(tuple(sorted(os.listdir(self._inside(path)))))  # noqa: PTH208
        except (OSError, ValueError) as error:
            return Listing(error=_errno(error))

    def target(self, path: str) -> Reading:
        """Return where a path really is."""
        try:
            place = self._follow(path) if self._root != "/" else os.path.realpath(path)
            os.lstat(place)
        except (OSError, ValueError) as error:
            return Reading(error=_errno(error))
        return Reading(place if self._root == "/" else place[len(self._root) :] or "/")

    def kind(self, path: str) -> Reading:
        """Return what a path is."""
        try:
            mode = os.stat(self._inside(path)).st_mode  # noqa: PTH116
        except (OSError, ValueError) as error:
            return Reading(error=_errno(error))
        for name, test in _KINDS:
            if test(mode):
                return Reading(name)
        return Reading("other")

    def kernel_log(self, words: tuple[str, ...] = KERNEL_WORDS) -> Reading:
        """Return the records of the kernel's log that start with one of ``words``."""
        try:
            handle = os.open(
                self._inside(KERNEL_LOG), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            )
            try:
                if stat.S_ISCHR(os.fstat(handle).st_mode):
                    return Reading(_chosen(_records(handle), words))
                # A recorded tree holds a plain file of such lines.
                data = os.read(handle, _LOG_BYTES)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            return Reading(error=_errno(error))
        return Reading(_chosen(data.split(b"\n"), words))


def _records(handle: int) -> Iterator[bytes]:
    """Yield the records that the kernel's log has now: each read gives one of them."""
    total = 0
    for _ in range(_LOG_READS):
        try:
            record = os.read(handle, 8192)
        except BlockingIOError:
            return  # that was the newest one
        except BrokenPipeError:
            continue  # overwritten meanwhile: the next read goes on with the oldest one left
        if not record:
            return
        total += len(record)
        if total > _LOG_BYTES:
            return
        yield record.partition(b"\n")[0]


def _chosen(records: Iterable[bytes], words: tuple[str, ...]) -> str:
    kept: list[tuple[bytes, list[tuple[int, bytes]]]] = [(word.encode(), []) for word in words]
    for number, record in enumerate(records):
        text = record.partition(b";")[2]
        for word, found in kept:
            if text.startswith(word):
                found.append((number, record))
                if len(found) >= 2 * _KEPT:
                    del found[:_KEPT]
                break
    lines = sorted(line for _, found in kept for line in found[-_KEPT:])
    return "\n".join(line.decode("utf-8", "replace")[:_KEPT_CHARS] for _, line in lines)


_KINDS: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("file", stat.S_ISREG),
    ("dir", stat.S_ISDIR),
    ("char", stat.S_ISCHR),
    ("block", stat.S_ISBLK),
)


def _errno(error: Exception) -> int:
    # ValueError: a name that no file can have (a NUL in it).
    return error.errno or errno.EIO if isinstance(error, OSError) else errno.ENOENT


class Recording:
    """What was recorded of a node: ``path → contents``, as ``gpuhealth record`` prints it.

    A key that ends in ``/`` holds a directory's names. A map of files alone will do, too:
    directories then hold what the paths show. What the map says nothing of is not recorded,
    which is not the same as absent; ``unknown`` is the errno that such a look gets. In a map of
    files alone a path is absent if another one below the same top (``/sys/class/infiniband``)
    is there. ``partial`` says that it is no such map, but what could be read before time ran
    out: then nothing is absent for not being there.
    """

    def __init__(
        self, entries: Mapping[str, Entry], unknown: int = NOT_RECORDED, partial: bool = False
    ) -> None:
        self._entries = entries
        self._unknown = unknown
        self._partial = partial
        self._derived: Optional[dict[str, set[str]]] = None

    def _directories(self) -> dict[str, set[str]]:
        """Return the directories that the paths of files show, with the names in them."""
        if self._derived is None:
            derived: dict[str, set[str]] = {}
            for path, entry in self._entries.items():
                if not path.startswith("/") or _is_absent(entry):
                    continue
                parts = path.strip("/").split("/")
                for depth in range(len(parts)):
                    above = "/" + "/".join(parts[:depth])
                    derived.setdefault(above, set()).add(parts[depth])
            self._derived = derived
        return self._derived

    def _missing(self, path: str) -> int:
        """Return the errno of a path that has no entry."""
        parts = path.strip("/").split("/")
        for depth in range(len(parts) - 1, 0, -1):
            above = "/" + "/".join(parts[:depth])
            listed = self._entries.get(above + "/")
            if isinstance(listed, list):
                return self._unknown if parts[depth] in listed else errno.ENOENT
            if isinstance(listed, dict):
                return _recorded_errno(listed)
        top = "/" + "/".join(parts[:3])
        if len(parts) >= 3 and self._files_alone() and top in self._directories():
            return errno.ENOENT
        return self._unknown

    def _files_alone(self) -> bool:
        return not self._partial and not any(path.endswith("/") for path in self._entries)

    def _entry(self, path: str) -> Union[Entry, int]:
        entry = self._entries.get(path)
        if entry is None:
            return self._missing(path)
        if isinstance(entry, dict) and "errno" in entry:
            return _recorded_errno(entry)
        return entry

    def read(self, path: str, limit: int = LIMIT_BYTES, binary: bool = False) -> Reading:
        """Return a file's recorded contents."""
        entry = self._entry(path)
        if isinstance(entry, int):
            return Reading(error=entry)
        if isinstance(entry, str):
            return Reading(entry if binary else _strip(entry))
        return Reading(error=errno.EISDIR if isinstance(entry, list) else self._unknown)

    def lines(self, path: str, prefixes: tuple[str, ...]) -> Reading:
        """Return the recorded lines that start with one of ``prefixes``."""
        found = self.read(path)
        if found.text is None:
            return found
        return Reading("\n".join(x for x in found.text.splitlines() if x.startswith(prefixes)))

    def names(self, path: str) -> Listing:
        """Return what was in a directory."""
        entry = self._entries.get(path.rstrip("/") + "/")
        if isinstance(entry, list):
            return Listing(tuple(entry))
        if isinstance(entry, dict):
            return Listing(error=_recorded_errno(entry))
        if self._files_alone():
            derived = self._directories().get(path.rstrip("/") or "/")
            if derived:
                return Listing(tuple(sorted(derived)))
        if path in self._entries:
            return Listing(error=errno.ENOTDIR)
        return Listing(error=self._missing(path))

    def target(self, path: str) -> Reading:
        """Return where a path led."""
        entry = self._entry(path)
        if isinstance(entry, dict) and "link" in entry:
            return Reading(entry["link"])
        return Reading(error=entry if isinstance(entry, int) else self._unknown)

    def kind(self, path: str) -> Reading:
        """Return what a path was."""
        entry = self._entry(path)
        if isinstance(entry, dict):
            return Reading(entry["kind"]) if "kind" in entry else Reading(error=self._unknown)
        if isinstance(entry, str):
            return Reading("file")
        if not isinstance(entry, int) or not self.names(path).error:
            return Reading("dir")
        return Reading(error=entry)

    def kernel_log(self, words: tuple[str, ...] = KERNEL_WORDS) -> Reading:
        """Return the recorded records of the kernel's log that start with one of ``words``."""
        found = self.read(KERNEL_LOG)
        if found.text is None:
            return found
        lines = found.text.splitlines()
        return Reading("\n".join(x for x in lines if x.partition(";")[2].startswith(words)))


def _is_absent(entry: Entry) -> bool:
    return isinstance(entry, dict) and entry.get("errno") in ("ENOENT", "ENOTDIR")


def _recorded_errno(entry: Mapping[str, str]) -> int:
    return getattr(errno, entry.get("errno", ""), errno.EIO)


class Recorder:
    """A source that notes down what is looked at in another one, and looks once only."""

    def __init__(
        self,
        source: Source,
        entries: Optional[Entries] = None,
        before: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Start with ``entries``, which are not looked at again.

        ``before`` is told the key of every look at ``source``, before it.
        """
        self._source = source
        self._before = before
        self.entries: Entries = {} if entries is None else entries

    def _recorded(self, key: str) -> bool:
        if key in self.entries:
            return True
        self._before(key)
        return False

    def read(self, path: str, limit: int = LIMIT_BYTES, binary: bool = False) -> Reading:
        """Return the start of a file."""
        if not self._recorded(path):
            self._put(path, self._source.read(path, limit, binary))
        return Recording(self.entries, partial=True).read(path, limit, binary)

    def lines(self, path: str, prefixes: tuple[str, ...]) -> Reading:
        """Return the lines that start with one of ``prefixes``."""
        if not self._recorded(path):
            self._put(path, self._source.lines(path, prefixes))
        return Recording(self.entries, partial=True).lines(path, prefixes)

    def names(self, path: str) -> Listing:
        """Return what is in a directory."""
        key = path.rstrip("/") + "/"
        if not self._recorded(key):
            found = self._source.names(path)
            self.entries[key] = _failed(found.error) if found.error else list(found.names)
        return Recording(self.entries, partial=True).names(path)

    def target(self, path: str) -> Reading:
        """Return where a path really is."""
        if not self._recorded(path):
            self._put(path, self._source.target(path), "link")
        return Recording(self.entries, partial=True).target(path)

    def kind(self, path: str) -> Reading:
        """Return what a path is."""
        if not self._recorded(path):
            self._put(path, self._source.kind(path), "kind")
        return Recording(self.entries, partial=True).kind(path)

    def kernel_log(self, words: tuple[str, ...] = KERNEL_WORDS) -> Reading:
        """Return the records of the kernel's log that start with one of ``words``."""
        if not self._recorded(KERNEL_LOG):
            # All of it: the next one to look may ask for other words.
            self._put(KERNEL_LOG, self._source.kernel_log())
        return Recording(self.entries, partial=True).kernel_log(words)

    def _put(self, key: str, found: Reading, form: str = "") -> None:
        if found.text is None:
            self.entries[key] = _failed(found.error)
        else:
            self.entries[key] = {form: found.text} if form else found.text


def _failed(error: int) -> dict[str, str]:
    return {"errno": errno.errorcode.get(error, "EIO")}


def failed(error: int) -> Entry:
    """Return the entry of a look that ended with an errno."""
    return _failed(error)


def load(text: str) -> dict[str, object]:
    """Return a recording from its JSON text; ValueError says what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not an object of path → contents")  # noqa: TRY004
    for path in entries_of(value):
        _check_entry(path, value[path])
    return value


def entries_of(value: Iterable[str]) -> list[str]:
    """Return the keys of a recording that are paths."""
    return [key for key in value if key.startswith("/")]


def _check_entry(path: str, entry: object) -> None:
    if isinstance(entry, str):
        return
    if isinstance(entry, list) and all(isinstance(name, str) for name in entry):
        return
    if isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values()):
        return
    raise ValueError(f"{path}: a file's text, a list of names or one of errno, link, kind")
