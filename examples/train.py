"""Train a small network on every process of a job; copy this page to start your own.

    gpusub -N 2 --gpus-per-node 2 --follow examples/train.py --steps 50
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py
    python examples/train.py                                    # one process, no launcher

It learns to tell two interleaved spirals apart, in seconds, with nothing to download: each
rank trains on its own share of the points, DistributedDataParallel averages the gradients.
NCCL is used where there are GPUs, gloo on CPUs.

Interrupting it costs nothing. On SIGTERM or SIGUSR1, to whichever rank, all ranks finish the
step they are in, rank 0 writes a checkpoint, and every rank exits with 143 (128 + SIGTERM):
"not done; start me again". The same command then goes on from the newest whole checkpoint
and ends as if nothing had happened. Exit code 0 means that all steps are done. (The launcher
itself exits with 1 in place of 143, and passes SIGUSR1 on only if --signals-to-handle names it.)
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import warnings
import zipfile
from pathlib import Path

with warnings.catch_warnings():
    # Importing torch warns where numpy is not installed; nothing here needs numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch.distributed as dist

    # DistributedDataParallel loads this when it is made. Loaded only then, it would hold on to
    # the process group past its end, and gloo's threads abort a good run now and then at exit.
    import torch.distributed.nn
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

EXIT_INTERRUPTED = 128 + signal.SIGTERM


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def rank_and_seconds(text: str) -> tuple[int, float]:
    rank, seconds = text.split(":")
    return int(rank), float(seconds)


def parse_args() -> argparse.Namespace:
    run_dir = os.environ.get("GPUSUB_RUN_DIR")  # one for each job, kept when it is requeued
    parser = argparse.ArgumentParser(
        description="Train a small network on every process of a job.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=positive, default=100, help="training steps in all, resumed ones included")
    add("--batch-size", type=positive, default=256, help="samples per rank and step")
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--seed", type=int, default=0, help="seed of data, weights and batches")
    add("--log-every", type=positive, default=10, metavar="STEPS", help="steps between two lines")
    add("--checkpoint", type=Path, default=Path(run_dir or ".") / "checkpoint", metavar="DIR",
        help="where checkpoints are written and looked for; all nodes must see it")  # fmt: skip
    add("--checkpoint-every", type=positive, default=50, metavar="STEPS",
        help="steps between two checkpoints; the last step always writes one")  # fmt: skip
    add("--step-time", type=float, default=0.0, metavar="SECONDS",
        help="make each step last at least this long, to watch or interrupt a job")  # fmt: skip
    add("--slow-exit", type=rank_and_seconds, default=None, metavar="RANK:SECONDS",
        help="let one rank work on after the others are done, to see that it may")  # fmt: skip
    return parser.parse_args()


def start() -> torch.device:
    """Join the other processes; returns this one's device."""
    if "RANK" not in os.environ:  # no launcher: a world of one, on any free port
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)  # at once, also into a file, so that a log can be followed


def describe(device: torch.device) -> list[str]:
    """What runs where: one line about the whole, then one line for each rank."""
    env = os.environ.get
    mine = f"{socket.gethostname()} {env('LOCAL_RANK', 0)} {device} {env('GROUP_RANK', 0)}"
    # Text travels as bytes in a tensor because all_gather_object needs numpy.
    packed = torch.tensor(list(mine.encode().ljust(128)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, packed)
    rows = [[str(r), *bytes(row.tolist()).decode().split()] for r, row in enumerate(gathered)]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    lines = [f"world {len(rows)}  backend {dist.get_backend()}  torch {torch.__version__}  {kind}"]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        rank, host, local, name, node = map(str.ljust, row, wide)
        lines.append(f"rank {rank}  {host}  local {local}  {name}  node-rank {node}")
    return lines


def spirals(points: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's share of the points of two interleaved spirals, and which one each is on."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (points,), generator=random)
    radius = torch.rand(points, generator=random).sqrt()
    angle = 2 * torch.pi * radius + torch.pi * label
    xy = 2 * torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    xy += 0.04 * torch.randn(points, 2, generator=random)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return xy[mine].to(device), label[mine].to(device)


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes a checkpoint that is there whole or not at all; the one before it stays."""
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:08d}.pt"
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        # No random state: step, rank and seed give every random number (see train).
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    for old in sorted(other for other in directory.glob("step-*.pt") if other < path)[:-1]:
        old.unlink()


def newest_whole(directory: Path) -> int:
    """The step of the newest checkpoint that is neither torn nor corrupt; 0 if there is none."""
    for path in sorted(directory.glob("step-*.pt"), reverse=True):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load itself looks at no checksum
                broken = archive.testzip()
            if broken is None:
                return int(path.stem.removeprefix("step-"))
            reason = f"{broken} in it is corrupt"
        except Exception as error:  # noqa: BLE001  a torn file fails in many ways
            reason = str(error)
        print(f"warning: ignoring checkpoint {path}: {reason}", file=sys.stderr, flush=True)
    return 0


def resume(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest whole checkpoint on every rank; returns its step, 0 if there is none."""
    device = next(model.parameters()).device
    # Rank 0 decides which one, so that no two ranks can start from different steps.
    step = torch.tensor(newest_whole(directory) if dist.get_rank() == 0 else 0, device=device)
    dist.broadcast(step, src=0)
    if step > 0:
        path = directory / f"step-{int(step):08d}.pt"
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return int(step)


def train(args: argparse.Namespace, device: torch.device) -> int:
    """Train to the last step or to a signal; returns the exit code."""
    rank, world = dist.get_rank(), dist.get_world_size()
    say("\n".join(describe(device)))
    torch.manual_seed(args.seed)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    first = resume(args.checkpoint, net, optimizer)
    if first:
        say(f"resumed after step {first}/{args.steps} from {args.checkpoint}")
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    points, labels = spirals(16384, args.seed, device)

    # From here on a signal only leaves a note; before, it ends the process: nothing to save yet.
    received: list[int] = []
    for wanted in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(wanted, lambda number, _frame: received.append(number))

    began = logged = time.perf_counter()
    logged_step = first
    for step in range(first + 1, args.steps + 1):
        step_began = time.perf_counter()
        # Seeded anew in each step, so that a resumed run draws what an uninterrupted one does.
        torch.manual_seed(hash((args.seed, step, rank)))
        batch = torch.randint(len(points), (args.batch_size,)).to(device)
        loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, step_began + args.step_time - time.perf_counter()))

        # A signal may reach one rank only or find ranks in different steps, and a rank that
        # left alone would leave the others waiting: so all learn of it in the same step.
        summed = torch.tensor([loss.item(), float(len(received))], device=device)
        dist.all_reduce(summed)
        loss_sum, notes = summed.tolist()
        if step in (first + 1, args.steps) or step % args.log_every == 0 or notes:
            now = time.perf_counter()
            speed = (step - logged_step) * args.batch_size * world / (now - logged)
            count = f"{step:{len(str(args.steps))}}/{args.steps}"
            say(f"step {count}  loss {loss_sum / world:.6f}  {speed:10.0f} samples/s")
            logged, logged_step = now, step
        if step == args.steps or step % args.checkpoint_every == 0 or notes:
            save(args.checkpoint, step, net, optimizer)
        if notes and step < args.steps:
            dist.barrier()  # a rank that exits gets the others killed: first let rank 0 save
            say(f"interrupted after step {count}: checkpoint saved, start again to resume")
            return EXIT_INTERRUPTED

    seconds = time.perf_counter() - began
    speed = max(0, args.steps - first) * args.batch_size * world / seconds
    points, labels = spirals(4096, args.seed + 1, device)  # points never trained on
    with torch.no_grad():
        right = (net(points).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    say(f"done  accuracy {int(right) / 4096:.4f}  time {seconds:.1f} s  {speed:.0f} samples/s")
    return 0


def main() -> int:
    args = parse_args()
    device = start()
    rank = dist.get_rank()
    code = train(args, device)
    dist.destroy_process_group()
    slow_rank, seconds = args.slow_exit or (None, 0.0)
    if code == 0 and rank == slow_rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever ends this rank is to be seen
        time.sleep(seconds)
        print(f"rank {rank} worked on for {seconds:g} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
