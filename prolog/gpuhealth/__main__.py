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

        hook = {"prolog": hooks.prolog, "epilog": hooks.epilog, "periodic": hooks.periodic}
        code = hook[sys.argv[1]](os.environ)
        try:
            sys.stderr.flush()
        finally:
            # Taking the interpreter down would cost a twentieth of the time, for nothing.
            os._exit(code)
        return code
    from gpuhealth.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
