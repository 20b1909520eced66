"""``gpusub`` and ``python -m gpusub``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:] == ["--version"]:
        from gpusub import __version__

        sys.stdout.write(f"gpusub {__version__}\n")
        return
    from gpusub.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
