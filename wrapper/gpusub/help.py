"""The pages of --help: options in groups, and every command with what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import click

# The options of a submission by what they are about; what is in none of them comes last.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Resources": (
        *("nodes", "gpus_per_node", "cpus_per_task", "mem", "time", "exclusive"),
        *("constraint", "nodelist", "exclude", "switches", "segment"),
    ),
    "Queue": (
        *("partition", "account", "qos", "reservation", "dependency", "array", "array_file"),
        *("job_name", "comment", "mail_type", "mail_user", "sbatch"),
    ),
    "Program": (
        *("module", "python", "env", "nccl", "nccl_debug", "chdir", "container"),
        *("rendezvous", "max_restarts", "max_requeues", "signal_before", "preflight"),
    ),
    "Settings": ("profile", "template", "run_root"),
    "Launch and output": (
        *("local", "dry_run", "follow", "wait", "output", "parsable", "as_json", "strict"),
        *("debug", "version", "help"),
    ),
}
_COLUMN = 24


def write(
    command: click.Command,
    context: click.Context,
    formatter: click.HelpFormatter,
    commands: Mapping[str, tuple[str, str]],
) -> None:
    """Write the options of ``command``, in groups where it has those of a submission."""
    records = [
        (parameter.name or "", record)
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    groups = _grouped(records) if commands else [("Options", [record for _, record in records])]
    if commands:
        groups.append(("Commands", [(name, words) for name, (_, words) in commands.items()]))
    # One column for all groups.
    width = min(max(len(first) for _, rows in groups for first, _ in rows), _COLUMN)
    for title, rows in groups:
        with formatter.section(title):
            formatter.write_dl(
                # Nobody has to be told that a number cannot be negative.
                [(first.ljust(width), words.removesuffix("  [x>=0]")) for first, words in rows],
                _COLUMN + 2,
            )


def _grouped(
    records: Iterable[tuple[str, tuple[str, str]]],
) -> list[tuple[str, list[tuple[str, str]]]]:
    rows = dict(records)
    groups = []
    for title, names in GROUPS.items():
        there = [rows.pop(name) for name in names if name in rows]
        if there:
            groups.append((title, there))
    if rows:
        groups.append(("More", list(rows.values())))
    return groups
