"""The job script: a template of ours or the site's, filled with a plan.

Template text is trusted, a plan's values are data: they reach the script only through the
filters ``quote`` and ``comment``, and are never evaluated as a template.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from gpusub import __version__
from gpusub.errors import GpusubError
from gpusub.plan import Plan

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def quote(value: object) -> str:
    """Return ``value`` as one word of bash, on one line.

    Control characters are spelt out: sbatch refuses a script that holds a carriage return
    before a line feed ("DOS line breaks"), wherever it stands.
    """
    text = str(value)
    if not _CONTROL.search(text):
        return shlex.quote(text)
    spelt = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match[0]):03o}", spelt) + "'"


def quote_all(words: Iterable[str]) -> str:
    """Return ``words`` as words of bash."""
    return " ".join(quote(word) for word in words)


def comment(text: object) -> str:
    """Return ``text`` fit to stand behind a #: on one line."""
    return _CONTROL.sub(" ", str(text))


def template_directory() -> Path:
    """Return where our templates are: inside the package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "templates"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "templates"


def render(plan: Plan, site_directory: Path | None = None) -> str:
    """Return the job script of ``plan``.

    A site's template (a path, relative to ``site_directory``) may extend ours:
    ``{% extends "torchrun.sh.j2" %}``.

    Raises:
        GpusubError: there is no such template, or it does not hold together.
    """
    asked = plan.template
    if "/" in asked.value or asked.value.endswith(".j2"):
        path = Path(site_directory or Path.cwd(), os.path.expanduser(asked.value))
        path = Path(os.path.abspath(path))
        # By its whole path, since one of ours may have the same name.
        loaders, name = [template_directory(), path.parent, Path("/")], str(path)[1:]
    else:
        loaders, name = [template_directory()], f"{asked.value}.sh.j2"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(directory) for directory in loaders]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_bytecode_cache(),
    )
    environment.filters.update(quote=quote, quote_all=quote_all, comment=comment)
    try:
        return environment.get_template(name).render(
            plan=plan,
            version=__version__,
            headline=headline(plan),
            torchrun=plan.program.kind != "command",
        )
    except Exception as error:  # a site's template can raise anything
        raise GpusubError(_explain(asked.value, asked.origin, error)) from error


class _Cache(jinja2.FileSystemBytecodeCache):
    def dump_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError):  # a full home keeps no job from its submission
            super().dump_bytecode(bucket)


def _bytecode_cache() -> jinja2.BytecodeCache | None:
    """Return where compiled templates are kept, which saves a submission 10 ms; None if nowhere.

    Only in a directory that is the user's own: what lies there is run.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "gpusub"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat()
    except (OSError, RuntimeError):  # no home, or none to write to
        return None
    if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        return None
    return _Cache(str(directory), f"{__version__}-%s.cache")


def _explain(name: str, origin: str, error: Exception) -> str:
    import traceback

    if isinstance(error, jinja2.TemplateNotFound):
        ours = sorted(path.name.split(".")[0] for path in template_directory().glob("*.sh.j2"))
        itself = Path(error.name or "").name == Path(name).name
        missing = name if itself else error.name
        return f"{origin}: no template {missing!r}; write a path, or one of {', '.join(ours)}"
    line = getattr(error, "lineno", None)
    if line is None:
        # Jinja puts the template's own lines into the trace.
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename.endswith(".j2")), None)
    return f"{origin}: template {name}{f':{line}' if line else ''}: {error}"


def headline(plan: Plan) -> str:
    """Return the plan in a few words."""
    resources = plan.resources
    nodes, gpus = resources.nodes.value, resources.gpus_per_node.value
    where = "this machine" if plan.local else f"{nodes} node{'s' if nodes.most > 1 else ''}"
    what = f" x {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else ", on CPUs"
    return f"{plan.program.name} on {where}{what}"
