"""From request, profile and Slurm's inventory to the plan: every value with its origin.

Pure: the same input gives the same plan, without a clock, a process or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuslurm.client import Inventory, Partition
from gpusub.environment import OVERRULED, scrubbed, secret
from gpusub.errors import GpusubError
from gpusub.profile import Profile
from gpusub.request import BUILT_IN, Program, Request, Value, refuse_control_characters
from gpusub.resources import (
    Machine,
    Resources,
    choose_partitions,
    local_resources,
    setting,
    slurm_resources,
)

# sbatch's own name of each setting that is passed on as it is.
_PASSED_ON = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "constraint": "constraint",
    "reservation": "reservation",
}


@dataclass(frozen=True)
class Option:
    """One option for sbatch; ``value`` None is a flag."""

    name: str
    value: str | None
    origin: str

    @property
    def text(self) -> str:
        """The option as one word of a command line."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


@dataclass(frozen=True)
class Variable:
    """One variable that the job script exports."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class NodeFabric:
    """What the job script exports besides on nodes with GPUs of a type, or with a feature."""

    name: str
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that the script and the submission are made from.

    ``cwd`` is the job's working directory, ``log`` its log (a pattern where the user gave one).
    ``secrets`` names the variables whose values travel in the environment alone. ``digest`` is
    the SHA-256 of the script as it was submitted. Of ``fabrics`` a node gets the first one that
    fits it.
    """

    token: str
    program: Program
    cwd: str
    run_dir: str
    log: Value[str]
    local: bool
    resources: Resources
    python: Value[str] | None
    rendezvous: Value[str]
    max_restarts: int
    options: tuple[Option, ...]
    variables: tuple[Variable, ...]
    secrets: tuple[str, ...]
    setup: tuple[str, ...]
    template: Value[str]
    profile: str | None
    digest: str | None
    fabrics: tuple[NodeFabric, ...] = ()
    warnings: tuple[str, ...] = ()


def make_plan(
    request: Request,
    profile: Profile,
    facts: Inventory | Machine,
    python: Value[str] | None,
    environ: Mapping[str, str],
    token: str,
    run_dir: Path,
    digest: str | None = None,
) -> Plan:
    """Return the plan of ``request`` on a Slurm (Inventory) or on this machine (Machine).

    ``environ`` is the user's environment: what it exports of NCCL beats the profile.

    Raises:
        GpusubError: the request cannot be met, or contradicts itself; one line says how to mend
            it.
    """
    if isinstance(facts, Machine):
        resources = local_resources(request, profile, facts)
        options: list[Option] = []
    else:
        partition, partitions = choose_partitions(request, profile, facts)
        resources = slurm_resources(request, profile, facts, partitions)
        options = [Option("partition", partition.value, partition.origin)]
    rendezvous = _rendezvous(request, profile, resources)
    log = _log(request, run_dir)
    if not isinstance(facts, Machine):
        options += _options(request, profile, resources, log)
        refuse_control_characters([(o.name, o.value) for o in options if o.value is not None])
    return Plan(
        token=token,
        program=_program(request),
        cwd=str(request.chdir or request.cwd),
        run_dir=str(run_dir),
        log=log,
        local=request.local,
        resources=resources,
        python=python,
        rendezvous=rendezvous,
        max_restarts=request.max_restarts,
        options=tuple(options),
        variables=_variables(request, profile, resources, environ),
        secrets=tuple(secrets(request, profile)),
        setup=tuple(_value(request, profile, "setup", [])),
        template=setting(request, profile, "template") or Value("torchrun", BUILT_IN),
        profile=profile.name,
        digest=digest,
        fabrics=() if isinstance(facts, Machine) else _fabrics(request, profile, environ),
        warnings=()
        if isinstance(facts, Machine)
        else (*_warnings(request, profile, environ), *_unfit(profile, facts, partitions)),
    )


def _program(request: Request) -> Program:
    """Return the program as the job finds it: with --chdir a script's path must be absolute."""
    if request.chdir is None or request.program.kind != "script":
        return request.program
    return replace(request.program, target=str(request.cwd / request.program.target))


def _value(request: Request, profile: Profile, key: str, default: Any) -> Any:
    found = setting(request, profile, key)
    return default if found is None else found.value


def _rendezvous(request: Request, profile: Profile, resources: Resources) -> Value[str]:
    if request.program.kind == "command":
        if request.max_restarts:
            raise GpusubError(
                "--max-restarts: a command after -- is started by itself, not by "
                "torch.distributed.run; leave it out"
            )
        return Value("none", "a command is started as it is")
    asked = setting(request, profile, "rendezvous") or Value("c10d", BUILT_IN)
    if asked.value == "static" and request.max_restarts and resources.nodes.value.most > 1:
        raise GpusubError(
            f"--max-restarts {request.max_restarts} with the static rendezvous ({asked.origin}): "
            "only the failed node would restart and the others wait for ever; use --rdzv c10d"
        )
    return asked


def _log(request: Request, run_dir: Path) -> Value[str]:
    asked = request.settings.get("output")
    if asked is None:
        return Value(str(run_dir / "log.out"), BUILT_IN)
    if request.local:
        raise GpusubError(f"{asked.origin}: a local run logs to its run directory; leave it out")
    directory, _, name = asked.value.rpartition("/")
    if "%" in directory:
        raise GpusubError(
            f"{asked.origin}: {asked.value!r}: Slurm makes no directories, so a % cannot stand in "
            "one; put it into the file's name"
        )
    if not name:
        raise GpusubError(f"{asked.origin}: {asked.value!r} is a directory; name a file in it")
    base = request.chdir or request.cwd
    if not directory.startswith("/") and "%" in str(base):
        raise GpusubError(
            f"{asked.origin}: {asked.value!r}: Slurm would read the % in {base} as a pattern; "
            "leave it out, and the log goes to the run directory"
        )
    return Value(str(base / asked.value), asked.origin)


def _log_option(log: Value[str]) -> Option:
    """Return --output; in a path of ours every character is itself, in the user's % is a pattern.

    A backslash anywhere turns Slurm's patterns off and is then itself an escape (sbatch(1),
    FILENAME PATTERN).
    """
    if log.origin != BUILT_IN:
        return Option("output", log.value, log.origin)
    if "\\" in log.value:
        return Option("output", log.value.replace("\\", "\\\\"), log.origin)
    return Option("output", log.value.replace("%", "%%"), log.origin)


def _options(
    request: Request, profile: Profile, resources: Resources, log: Value[str]
) -> list[Option]:
    """Return sbatch's options but the partition."""
    options = [
        Option("nodes", str(resources.nodes.value), resources.nodes.origin),
        *_task_option(resources),
        *_gpu_option(request, profile, resources),
        Option("cpus-per-task", str(resources.cpus_per_task.value), resources.cpus_per_task.origin),
    ]
    if resources.mem.value is not None:
        options.append(Option("mem", resources.mem.value, resources.mem.origin))
    if resources.exclusive.value and "exclusive" not in request.sbatch:
        options.append(Option("exclusive", None, resources.exclusive.origin))
    for key, name in _PASSED_ON.items():
        found = setting(request, profile, key)
        if found is not None and key != "partition":
            options.append(Option(name, found.value, found.origin))
    job_name = request.settings.get("job_name") or Value(request.program.name, BUILT_IN)
    options += [
        Option("job-name", job_name.value, job_name.origin),
        Option("chdir", str(request.chdir or request.cwd), BUILT_IN),
        _log_option(log),
        Option("open-mode", "append", BUILT_IN),
        Option("requeue", None, BUILT_IN),
    ]
    options += [Option(key, v.value, v.origin) for key, v in request.sbatch.items()]
    return options


def _task_option(resources: Resources) -> list[Option]:
    """Return one task a node; with a range of nodes, Slurm would count tasks and take the fewest.

    srun asks for one task a node in either case.
    """
    nodes = resources.nodes.value
    return [Option("ntasks-per-node", "1", BUILT_IN)] if nodes.least == nodes.most else []


def _gpu_option(request: Request, profile: Profile, resources: Resources) -> list[Option]:
    gpus = resources.gpus_per_node
    how = _value(request, profile, "gpu_request", "gpus-per-node")
    if not gpus.value or how == "none":
        return []
    gres = request.sbatch.get("gres")
    if gres is not None and "gpu" in (gres.value or ""):
        raise GpusubError(
            f"--sbatch gres={gres.value}: its GPUs would come on top of the job's; "
            "use --gpus-per-node for those"
        )
    count = f"{resources.gpu_type}:{gpus.value}" if resources.gpu_type else str(gpus.value)
    if how == "gres":
        if "gres" in request.sbatch:
            raise GpusubError("--sbatch gres: the profile asks for GPUs by gres; use one of them")
        return [Option("gres", f"gpu:{count}", gpus.origin)]
    return [Option("gpus-per-node", count, gpus.origin)]


def _variables(
    request: Request, profile: Profile, resources: Resources, environ: Mapping[str, str]
) -> tuple[Variable, ...]:
    """Return what the script exports; later sources replace earlier ones, name by name."""
    found: dict[str, Variable] = {}

    def put(name: str, value: str, origin: str) -> None:
        found.pop(name, None)
        found[name] = Variable(name, value, origin)

    cpus, workers = resources.cpus_per_task.value, resources.workers
    # In a job of ours it is that job's.
    if "OMP_NUM_THREADS" not in environ or "GPUSUB_TOKEN" in environ:
        put(
            "OMP_NUM_THREADS",
            str(max(cpus // workers, 1)),
            f"{cpus} CPUs for {workers} worker{'s' if workers > 1 else ''}",
        )
    for variable in _nccl(profile.fabric, "fabric"):
        put(variable.name, variable.value, variable.origin)
    for name, stated in profile.env.items():
        if not secret(name):
            put(name, stated.value, stated.origin)
    for name in [name for name in found if name.startswith("NCCL_") and name in environ]:
        del found[name]
    for name, chosen in request.nccl.items():
        put(name, chosen, request.origins.get(name, "option --nccl"))
    for name, asked in request.env.items():
        if asked is not None and not secret(name):
            put(name, asked, request.origins.get(name, "option --env"))
        elif asked is None and name not in environ:
            raise GpusubError(f"--env {name}: not set in your environment; write {name}=VALUE")
        elif asked is None:
            found.pop(name, None)
    return tuple(found.values())


def _nccl(fabric: Mapping[str, Value[Any]], where: str) -> list[Variable]:
    """Return the NCCL variables that a fabric states."""
    if not fabric:
        return []
    from gpuhealth.nccl import Fabric, stated_variables

    stated = stated_variables(Fabric(**{key: value.value for key, value in fabric.items()}))
    return [Variable(n, v, f"{fabric[key].origin}: {where}.{key}") for n, v, key in stated]


def _fabrics(
    request: Request, profile: Profile, environ: Mapping[str, str]
) -> tuple[NodeFabric, ...]:
    """Return what nodes get by GPU type or feature, without what beats the profile's fabric."""
    above = {*profile.env, *request.nccl, *request.env}

    def stands(variable: Variable) -> bool:
        return variable.name not in above and variable.name not in environ

    return tuple(
        NodeFabric(name, tuple(filter(stands, _nccl(fabric, f"fabric.{name}"))))
        for name, fabric in profile.fabrics.items()
    )


def _unfit(profile: Profile, inventory: Inventory, partitions: Iterable[Partition]) -> list[str]:
    """Return a word of warning where the profile has a fabric for none of the GPUs here."""
    names = {partition.name for partition in partitions}
    kinds = [kind for kind in inventory.kinds if kind.partition in names and kind.gpus]
    there = {word for kind in kinds for word in (*kind.gpu_types, *kind.features)}
    if not profile.fabrics or not kinds or there & set(profile.fabrics):
        return []
    return [
        f"profile {profile.name}: none of its fabrics ({', '.join(profile.fabrics)}) is for "
        f"partition {', '.join(sorted(names))}; GPU types and features there: "
        f"{', '.join(sorted(there)) or 'none'}"
    ]


def secrets(request: Request, profile: Profile) -> dict[str, str]:
    """Return the variables that must not be written down, to be put into sbatch's environment."""
    stated = {name: value.value for name, value in profile.env.items()}
    asked = {name: value for name, value in request.env.items() if value is not None}
    own = {name for name, value in request.env.items() if value is None}
    return {
        name: value
        for name, value in {**stated, **asked}.items()
        if secret(name) and name not in own
    }


def _warnings(request: Request, profile: Profile, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the user should know before the job is submitted.

    Raises:
        GpusubError: a variable that the user asks for would not reach the job.
    """
    export = scrubbed(environ).get("SBATCH_EXPORT", "ALL")
    own = [name for name, value in request.env.items() if value is None]
    unwritten = [*secrets(request, profile), *own]
    if unwritten and "ALL" not in export.split(","):
        raise GpusubError(
            f"environment SBATCH_EXPORT={export}: {', '.join(unwritten)} would not reach the job, "
            "since secrets travel in the environment alone; unset it, or set it to ALL"
        )
    gres = scrubbed(environ).get("SBATCH_GRES", "")
    if "gpu" in gres:
        raise GpusubError(
            f"environment SBATCH_GRES={gres}: its GPUs would come on top of the job's; unset it"
        )
    return tuple(
        f"{name} is left out: {OVERRULED[name]}"
        for name in sorted(OVERRULED)
        if name in environ and "SLURM_JOB_ID" not in environ
    )


def plain(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON's types, each value beside its origin."""
    from dataclasses import asdict

    return asdict(plan)
