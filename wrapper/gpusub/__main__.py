"""``gpusub`` and ``python -m gpusub``."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys


def _settle_streams() -> None:
    """Let every text be written, and no file of ours take the place of a closed stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line and exit with its code."""
    asked = os.environ.get("_GPUSUB_COMPLETE")
    if asked:
        from gpusub.completion import complete

        sys.exit(complete(asked))
    if sys.argv[1:] == ["--version"]:
        from gpusub import __version__

        sys.stdout.write(f"gpusub {__version__}\n")
        return
    # Importing makes many objects and no garbage: 4 ms of a submission went into looking for it.
    gc.set_threshold(100_000)
    from gpusub.cli import run

    _settle_streams()
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        # What matters was flushed when it was written.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # All is written and every process has ended; taking the modules down one by one is another
    # 15 ms of a submission.
    os._exit(code)


if __name__ == "__main__":
    main()
