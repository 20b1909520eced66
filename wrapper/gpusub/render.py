"""The job script: a template of ours or the site's, filled with a plan.

Template text is trusted, a plan's values are data: they reach the script only through the
filters ``quote`` and ``comment``, and are never evaluated as a template.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gpusub import __version__
from gpusub.errors import GpusubError
from gpusub.plan import Plan

if TYPE_CHECKING:
    import jinja2

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def quote(text: str) -> str:
    """Return ``text`` as one word of bash, on one line.

    Control characters are spelt out: sbatch refuses a script that holds a carriage return
    before a line feed ("DOS line breaks"), wherever it stands.
    """
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
    import jinja2

    asked = plan.template
    if "/" in asked.value or asked.value.endswith(".j2"):
        path = Path(asked.value).expanduser()
        path = path if path.is_absolute() else (site_directory or Path.cwd()) / path
        loaders, name = [path.parent, template_directory()], path.name
    else:
        loaders, name = [template_directory()], f"{asked.value}.sh.j2"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(directory) for directory in loaders]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(quote=quote, quote_all=quote_all, comment=comment)
    try:
        return environment.get_template(name).render(
            plan=plan,
            version=__version__,
            headline=headline(plan),
            torchrun=plan.program.kind != "command",
        )
    except jinja2.TemplateError as error:
        raise GpusubError(_explain(asked.value, asked.origin, error)) from error


def _explain(name: str, origin: str, error: jinja2.TemplateError) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateNotFound):
        ours = sorted(path.name.split(".")[0] for path in template_directory().glob("*.sh.j2"))
        return (
            f"{origin}: no template {error.message or name!r}; write a path, or one of "
            f"{', '.join(ours)}"
        )
    line = getattr(error, "lineno", None)
    return f"{origin}: template {name}{f':{line}' if line else ''}: {error.message}"


def headline(plan: Plan) -> str:
    """Return the plan in a few words."""
    resources = plan.resources
    nodes, gpus = resources.nodes.value, resources.gpus_per_node.value
    where = "this machine" if plan.local else f"{nodes} node{'s' if nodes.most > 1 else ''}"
    what = f"{gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "CPUs only"
    return f"{plan.program.name} on {where} x {what}"
