"""Lays gpuhealth into a virtual cluster in its installed form, as ``gpuadm install`` lays it out.

The programs that Slurm runs are the shipped ones, unmodified but for the interpreter's place where
the cluster's system has none of its own.
"""

from __future__ import annotations

import compileall
import shutil
import sys
from pathlib import Path

from box import REPOSITORY
from cluster import Cluster
from configuration import HOOK_DIRECTORY, HOOKS
from gpuhealth.check import REGISTRY
from gpuhealth.compiler import compile_policy
from gpuhealth.policy import dump

LIB = f"{HOOK_DIRECTORY}/lib"
POLICY = "/etc/gpusub/health.json"
STATE = "/var/lib/gpuhealth"
RUNTIME = "/run/gpuhealth"


def policy(cap: int = 2, **actions: str) -> str:
    """A policy (YAML) for the cluster's GPU nodes: two NDR ports, and nothing else is looked at."""
    import gpuhealth.checks  # noqa: F401 - registers them

    checks = {**dict.fromkeys(REGISTRY, "off"), "ib_port": "drain", **actions}
    listed = ", ".join(f"{name}: {action}" for name, action in checks.items())
    return f"""
skus:
  h100:
    match: {{nodes: "gpu-[5-12]"}}
    ports: {{names: ["mlx5_0:1", "mlx5_1:1"], rate_gbps: 400, width: 4, link_layer: InfiniBand}}
checks: {{{listed}}}
max_drained: {{count: {cap}, percent: 100}}
"""


def install(cluster: Cluster, text: str | None = None) -> None:
    """Install gpuhealth on all of a cluster's nodes, with a policy in place of the default one."""
    lib = cluster.path(LIB)
    if not lib.exists():
        lib.mkdir(parents=True, mode=0o755)
        source = REPOSITORY / "prolog" / "gpuhealth"
        shutil.copytree(source, lib / "gpuhealth", ignore=shutil.ignore_patterns("__pycache__"))
        # Compiled for the interpreter that runs it, which may be another one than this.
        if interpreter(cluster) == str(Path(sys.executable).resolve()):
            compileall.compile_dir(lib, quiet=1)
        else:
            cluster.run([interpreter(cluster), "-m", "compileall", "-q", LIB], user="root")
    for hook in HOOKS:
        cluster.hook(hook, script(cluster, hook))
    set_policy(cluster, policy() if text is None else text)


def script(cluster: Cluster, hook: str) -> str:
    """A hook's shipped script, as it is installed here."""
    text = (REPOSITORY / "prolog" / "bin" / hook).read_text()
    return text.replace("python=/usr/bin/python3\n", f"python={interpreter(cluster)}\n")


def interpreter(cluster: Cluster) -> str:
    """The Python that the cluster's nodes have."""
    system = "/usr/bin/python3"
    return system if cluster.path(system).exists() else str(Path(sys.executable).resolve())


def set_policy(cluster: Cluster, text: str) -> None:
    """Compile a policy and put it where the nodes look for it."""
    place = cluster.path(POLICY)
    place.parent.mkdir(exist_ok=True)
    place.write_text(dump(compile_policy(text, "health.yaml")))
    place.chmod(0o644)
