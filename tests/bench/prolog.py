"""What a prolog costs: ``make bench-prolog``, or ``prolog.py [--rounds N] [--at-once N]``.

The installed form (compiled, isolated interpreter, the shell script that Slurm starts) on the
recording of a node with eight H100s, laid out as a real directory tree over /sys in a mount
namespace of its own. On a machine with NVIDIA GPUs ``--nvml`` lets it ask NVML as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "prolog")]

H100 = REPOSITORY.parent / "shared" / "data" / "sysfs" / "h100-8x-ndr.json"
# What is mounted over, in a namespace of its own.
PLACES = ("/usr/libexec/gpusub", "/etc/gpusub", "/var/lib/gpuhealth", "/run/gpuhealth")
LIBEXEC = "/usr/libexec/gpusub"
POLICY = """
skus:
  h100-ndr:
    match: {nodes: gpu-1}
    ports:
      names: [%s]
      rate_gbps: 400
      width: 4
      link_layer: InfiniBand
checks: {%s}
"""
ENVIRON = {
    "SLURMD_NODENAME": "gpu-1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7",
    "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
}


def lay_out(stage: Path, python: str, nvml: bool) -> None:
    """Write what the namespace mounts: the installation, the tree, the policy."""
    from gpuhealth import check, policy
    from gpuhealth.compiler import compile_policy

    libexec = stage / "libexec"
    lib = libexec / "lib"
    lib.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "prolog" / "gpuhealth", lib / "gpuhealth", ignore=ignored)
    if nvml:
        import pynvml  # type: ignore[import-untyped]

        shutil.copy(str(pynvml.__file__), lib / "pynvml.py")
    subprocess.run([python, "-m", "compileall", "-q", str(lib)], check=True)
    for script in (REPOSITORY / "prolog" / "bin").iterdir():
        text = script.read_text().replace("python=/usr/bin/python3\n", f"python={python}\n")
        (libexec / script.name).write_text(text)
        (libexec / script.name).chmod(0o755)
    entries = json.loads(H100.read_text())
    for path, text in entries.items():
        file = stage / "sys" / path.removeprefix("/sys/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    for module in ("ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib"):
        (stage / "sys" / "module" / module).mkdir(parents=True, exist_ok=True)
    names = sorted({p.split("/")[4] for p in entries if "bond" not in p})
    listed = ", ".join(f'"{name}:1"' for name in names)
    # All look but for two whose files are in /dev and /proc, which this tree lays nothing over.
    lacking = ("ib_uverbs", "gpudirect")
    checks = ", ".join(f"{name}: {'off' if name in lacking else 'warn'}" for name in check.REGISTRY)
    (stage / "gpusub").mkdir()
    text = policy.dump(compile_policy(POLICY % (listed, checks), "health.yaml"))
    (stage / "gpusub" / "health.json").write_text(text)
    for name in ("gpusub", "gpusub/health.json", "libexec"):
        (stage / name).chmod(0o755 if (stage / name).is_dir() else 0o644)


INSIDE = """
set -e
stage=$1; shift
mount --bind "$stage/libexec" /usr/libexec/gpusub
mount --bind "$stage/gpusub" /etc/gpusub
mount -t tmpfs -o mode=755 state /var/lib/gpuhealth
mount -t tmpfs -o mode=755 run /run/gpuhealth
mount -t overlay -o "ro,lowerdir=$stage/sys:/sys" sys /sys
exec "$@"
"""


def job_gpus() -> str:
    """Return SLURM_JOB_GPUS for a job that gets all of this machine's GPUs."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return ",".join(str(number) for number in range(len(listed.stdout.splitlines())))


def measure(argv: list[str], rounds: int, environ: dict[str, str]) -> list[float]:
    """Return how long a command took, in ms, one after the other."""
    taken = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        done = subprocess.run(argv, env=environ, capture_output=True, check=False)
        taken.append((time.perf_counter() - started_s) * 1000)
        if done.returncode:
            raise SystemExit(f"{argv[0]} ended with {done.returncode}: {done.stderr.decode()}")
    return taken


def at_once(argv: list[str], count: int, environ: dict[str, str]) -> float:
    """Return how long the slowest of so many took that were started together, in ms."""
    started_s = time.perf_counter()
    started = [
        subprocess.Popen(
            argv,
            env={**environ, "SLURM_JOB_ID": str(number + 1)},
            stderr=subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    for process in started:
        if process.wait():
            raise SystemExit(f"{argv[0]} ended with {process.returncode}")
    return (time.perf_counter() - started_s) * 1000


def inside(args: argparse.Namespace) -> None:
    """Measure, in the namespace."""
    prolog = [f"{LIBEXEC}/prolog"]
    if args.nvml:
        ENVIRON["SLURM_JOB_GPUS"] = job_gpus()
    bare = [args.python, "-I", "-S", "-B", "-c", "pass"]
    for argv in (prolog, bare):
        measure(argv, 2, ENVIRON)
    rows: dict[str, list[float]] = {"bare interpreter": [], "prolog": []}
    for _ in range(args.rounds):
        rows["bare interpreter"] += measure(bare, 1, ENVIRON)
        rows["prolog"] += measure(prolog, 1, ENVIRON)
    if args.nvml:
        rows["nvidia-smi -q -x"] = measure(
            ["nvidia-smi", "-q", "-x"], args.rounds, dict(os.environ)
        )
    together = [at_once(prolog, args.at_once, ENVIRON) for _ in range(5)]
    rows[f"{args.at_once} prologs at once, until the last"] = together
    print(f"{'ms':42} {'median':>8} {'min':>8} {'max':>8}")
    for name, taken in rows.items():
        print(f"{name:42} {statistics.median(taken):8.1f} {min(taken):8.1f} {max(taken):8.1f}")
    over = statistics.median(rows["prolog"]) - statistics.median(rows["bare interpreter"])
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"over the bare interpreter: {over:.1f} ms; largest resident set: {peak_mb:.1f} MB")
    if not args.nvml and (over > 100 or peak_mb > 40):
        raise SystemExit("more than 100 ms, or than 40 MB")


def main() -> None:
    """Lay out the node and measure in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--python", default="/usr/bin/python3", help="the node's interpreter")
    parser.add_argument("--nvml", action="store_true", help="with the GPUs of this machine")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    if not H100.exists():
        raise SystemExit(f"there is no {H100}")
    with tempfile.TemporaryDirectory(prefix="gpuhealth-bench-") as directory:
        stage = Path(directory)
        stage.chmod(0o755)
        lay_out(stage, args.python, args.nvml)
        own = [sys.executable, __file__, *sys.argv[1:], "--inside", directory]
        argv = ["unshare", "--mount", "bash", "-c", INSIDE, "bash", directory, *own]
        made = [place for place in map(Path, PLACES) if not place.exists()]
        for place in made:
            place.mkdir(parents=True)
        try:
            raise SystemExit(subprocess.run(argv, check=False).returncode)
        finally:
            for place in made:
                place.rmdir()


if __name__ == "__main__":
    main()
