"""A directory that root writes into, so that nobody else decides what is read or written there.

Everything goes through the directory's descriptor, no link is followed, and what others could
have written is as if it were not there. Every error is an OSError whose text says what is wrong.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Optional

LIMIT_BYTES = 4 << 20


class Folder:
    """An open directory; use it in a ``with``.

    ``owner`` is who has to own it and its files; None is anybody. ``writable`` is a mask of who
    may not be able to write there: group and others, unless said otherwise.
    """

    def __init__(
        self,
        path: str,
        owner: Optional[int] = None,
        writable: int = 0o022,
        create: bool = True,
        above: Optional[Folder] = None,
    ) -> None:
        """Open it; ``path`` is a name in the folder ``above``, if one is given."""
        self._owner, self._writable, self._path = owner, writable, path
        at: Optional[int] = above._handle if above is not None else None
        if create:
            self._make(path, at)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._handle: int = os.open(path, flags, dir_fd=at)
        try:
            self._trust(os.fstat(self._handle), path)
        except OSError:
            self.close()
            raise

    @staticmethod
    def _make(path: str, at: Optional[int]) -> None:
        if at is None:
            os.makedirs(path, mode=0o755, exist_ok=True)  # noqa: PTH103 - pathlib costs 6 ms to import
            return
        try:
            os.mkdir(path, 0o755, dir_fd=at)
        except FileExistsError:
            return

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        os.close(self._handle)

    def _trust(self, found: os.stat_result, name: str) -> None:
        if self._owner is not None and found.st_uid != self._owner:
            raise PermissionError(errno.EPERM, f"belongs to uid {found.st_uid}", name)
        if found.st_mode & self._writable:
            mode = stat.S_IMODE(found.st_mode)
            raise PermissionError(errno.EPERM, f"others can write it (mode {mode:o})", name)

    def _open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a regular file that nobody else could have written."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        handle = os.open(name, flags, mode, dir_fd=self._handle)
        try:
            found = os.fstat(handle)
            self._trust(found, name)
            # A second name may be that of a file somewhere else.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise PermissionError(errno.EPERM, "is no plain file of one name", name)
        except OSError:
            os.close(handle)
            raise
        return handle

    def names(self) -> list[str]:
        """Return what is in it."""
        return sorted(os.listdir(self._handle))  # noqa: PTH208

    def read(self, name: str, limit: int = LIMIT_BYTES) -> bytes:
        """Return a file's bytes; EFBIG if there are more than ``limit``."""
        handle = self._open(name, os.O_RDONLY)
        try:
            parts: list[bytes] = []
            left = limit + 1
            while left > 0:
                part = os.read(handle, left)
                if not part:
                    break
                parts.append(part)
                left -= len(part)
        finally:
            os.close(handle)
        if left <= 0:
            raise OSError(errno.EFBIG, f"has more than {limit} bytes", name)
        return b"".join(parts)

    def replace(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put ``data`` in a file's place: whoever reads sees the old one or the new one."""
        temporary = f".{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            handle = self._open(temporary, flags, mode)
        except FileExistsError:
            # Left behind by a process that was killed and had the same number.
            self.remove(temporary)
            handle = self._open(temporary, flags, mode)
        try:
            try:
                # Whatever the umask was that slurmd was started with.
                os.fchmod(handle, mode)
                _write(handle, data)
            finally:
                os.close(handle)
            os.replace(temporary, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError:
            self.remove(temporary)
            raise

    def append(self, name: str, data: bytes, limit: int, mode: int = 0o600) -> None:
        """Add to a file; past ``limit`` bytes it becomes ``name.1``, in whose place it goes."""
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"may have no more than {limit} bytes", name)
        handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        try:
            if os.fstat(handle).st_size + len(data) > limit:
                os.replace(name, f"{name}.1", src_dir_fd=self._handle, dst_dir_fd=self._handle)
                os.close(handle)
                handle = -1
                handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
            os.fchmod(handle, mode)
            _write(handle, data)
        finally:
            if handle >= 0:
                os.close(handle)

    def touch(self, name: str) -> None:
        """Make sure that a file is there."""
        os.close(self._open(name, os.O_WRONLY | os.O_CREAT))

    def lock_file(self, name: str) -> int:
        """Return a descriptor of a file to lock."""
        return self._open(name, os.O_RDWR | os.O_CREAT)

    def remove(self, name: str) -> None:
        """Take a file away, if it is there."""
        try:
            os.unlink(name, dir_fd=self._handle)
        except FileNotFoundError:
            return


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def why(error: OSError) -> str:
    """Return what is wrong, in a line: ``/var/lib/gpuhealth: Permission denied``."""
    text = error.strerror or type(error).__name__
    return f"{error.filename}: {text}" if error.filename else text
