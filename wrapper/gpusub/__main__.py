"""``gpusub`` and ``python -m gpusub``."""

from __future__ import annotations

import gc
import os
import sys


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

    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # somebody's head(1) has seen enough
        code = code or 1
    # All is written and every process has ended; taking the modules down one by one is another
    # 15 ms of a submission.
    os._exit(code)


if __name__ == "__main__":
    main()
