"""``gpuhealth``, and ``python -m gpuhealth``."""

from __future__ import annotations

import os
import sys

HOOKS = ("prolog", "epilog", "periodic")


def main() -> int:
    """Run the command, or a hook of Slurm's, without what only people's commands need."""
    if len(sys.argv) == 2 and sys.argv[1] in HOOKS:
        from gpuhealth import early

        early.ask(os.environ)
        from gpuhealth import hooks

        return {"prolog": hooks.prolog, "epilog": hooks.epilog, "periodic": hooks.periodic}[
            sys.argv[1]
        ](os.environ)
    from gpuhealth.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
