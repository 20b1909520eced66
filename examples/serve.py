"""Serve a small model on every GPU of a node and measure it; copy this page to start your own.

    gpusub --follow -- python examples/serve.py                  # one node, all its GPUs
    gpusub --follow -- python examples/serve.py --sweep 1,4,16,64 --duration 5
    python examples/serve.py --workers 2 --rate 50               # here, with GPUs or without

One worker process a GPU holds a copy of a small transformer, made from a seed, that sorts texts
into classes. This process plays the clients and the front end: requests wait in a bounded queue
and go to a worker when a batch is full, or when the oldest has waited for --max-wait.

Closed loop (the default): each client sends its next request when it has its answer, so that
the workers are always busy. Open loop (--rate): requests come at random times, whether others
were answered or not, as from users; one that finds the queue full is rejected, and counted. A
latency is the time from a request's arrival to its answer. Warm-up is not measured.

To choose a batch size, --sweep several: throughput rises until the GPU is full; beyond, only
latency does. A front end that is busy nearly all the time is itself the limit.

On SIGTERM or SIGINT outstanding batches are finished, the totals printed, and the exit code is
0. A worker that dies, or falls silent, is named and ends the whole with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any, NoReturn

with warnings.catch_warnings():
    # Importing torch warns where numpy is not installed; nothing here needs numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    from torch import nn

START_S, ANSWER_S, END_S = 300.0, 60.0, 2.0  # a worker that takes longer is lost
PIPE_BYTES = 1 << 16  # a pipe takes two batches of this size at once, so that no send blocks
SIGNALS = (signal.SIGTERM, signal.SIGINT)
HEADER = " " * 12 + " requests  requests/s    tokens/s   p50 ms   p95 ms   p99 ms    fill"

received: list[int] = []  # signals


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def above_zero(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def parse_args() -> argparse.Namespace:
    gpus, cpus = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    given = {name: int(text) for name, text in os.environ.items() if text.isdecimal()}
    parser = Parser(description="Serve a small model on every GPU of a node and measure it.")
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group
    size, load = one_of().add_argument, one_of().add_argument
    add("--workers", type=positive, default=gpus or given.get("SLURM_GPUS_ON_NODE") or 1,
        help="processes; one a GPU, without GPUs as many as the job asked for")  # fmt: skip
    size("--batch-size", type=positive, default=8, help="requests in a batch, at most (8)")
    size("--sweep", type=positives, metavar="N,N,…", help="batch sizes, one after the other")
    add("--max-wait", type=above_zero, default=5, metavar="MS", help="for a full batch (5)")
    load("--clients", type=positive, help="closed loop of so many (two batches a worker)")
    load("--rate", type=above_zero, metavar="R", help="open loop, R requests/s in all")
    add("--queue", type=positive, help="with --rate: how many may wait (four batches a worker)")
    add("--duration", type=above_zero, default=10, metavar="S", help="of each batch size (10)")
    add("--report", type=above_zero, default=2, metavar="S", help="between two reports (2)")
    add("--json", action="store_true", help="print one JSON object at the end and nothing else")
    add("--layers", type=positive, default=4, help="of the transformer (4)")
    add("--width", type=positive, default=256, help="of the transformer (256)")
    add("--tokens", type=positive, default=64, help="of a request, a byte each (64)")
    args = parser.parse_args()
    args.sizes = args.sweep or [args.batch_size]
    if gpus and args.workers > gpus:
        parser.error(f"--workers {args.workers}: one a GPU, and {gpus} are visible here")
    if (most := PIPE_BYTES // args.tokens) < max(args.sizes):
        parser.error(f"batch size {max(args.sizes)}: of {args.tokens} tokens each, at most {most}")
    args.devices = [f"cuda:{index}" if gpus else "cpu" for index in range(args.workers)]
    # gpusub's OMP_NUM_THREADS is right for one worker a GPU; more of them share the same CPUs.
    share = max(1, cpus // args.workers)
    args.threads = min(share, given.get("OMP_NUM_THREADS") or share)
    return args


def work(args: argparse.Namespace, name: str, pipe: Connection) -> None:
    """Be a worker: answer batches until the front end closes the pipe, or is gone."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)  # the same weights in every worker
    device, dtype, kind = torch.device(name), torch.float32, f"threads: {args.threads}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dtype, kind = torch.bfloat16, torch.cuda.get_device_name(device)
    width = args.width
    block = nn.TransformerEncoderLayer(width, math.gcd(width, 8), 4 * width, batch_first=True)
    encoder = nn.TransformerEncoder(block, args.layers, enable_nested_tensor=False)
    classes = nn.Linear(args.tokens * width, 256)
    model = nn.Sequential(nn.Embedding(256, width), encoder, nn.Flatten(), classes)
    model.to(device, dtype).eval()

    # Kernels are loaded and chosen by size, so batches are filled up to one of a few sizes.
    powers = {2**power for power in range(max(args.sizes).bit_length())}
    sizes = sorted(powers.union(args.sizes))

    def answer(texts: bytes) -> bytes:
        count = len(texts) // args.tokens
        size = next(size for size in sizes if size >= count)
        filled = torch.frombuffer(bytearray(texts.ljust(size * args.tokens)), dtype=torch.uint8)
        scores = model(filled.view(size, args.tokens).to(device).long())[:count]
        # tolist waits for the GPU: what is sent is the answer, not a promise of one.
        return bytes(scores.argmax(dim=1).tolist())

    with torch.inference_mode(), suppress(EOFError, ConnectionError):
        for size in sizes:
            answer(bytes(size * args.tokens))
        pipe.send_bytes(kind.encode())
        while True:
            pipe.send_bytes(answer(pipe.recv_bytes()))


class Lost(Exception):
    """A worker died or fell silent."""


@dataclass(eq=False)
class Worker:
    """The front end's view of a worker."""

    name: str
    kind: str
    process: BaseProcess
    pipe: Connection
    sent: int = 0
    outstanding: deque[tuple[float, list[float]]] = field(default_factory=deque)

    def send(self, batch: list[tuple[float, bytes]], now: float) -> None:
        self.sent += 1
        self.outstanding.append((now, [arrival for arrival, _ in batch]))
        with suppress(OSError):  # it died: receive will tell
            self.pipe.send_bytes(b"".join(text for _, text in batch))

    def receive(self) -> bytes:
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(END_S)
            code = self.process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Lost(f"{self.name} {how}") from None


def speaking(workers: list[Worker], until: float) -> list[Worker]:
    """Wait until a worker has an answer, for 0.1 s at most so that signals are seen."""
    timeout = min(max(0.0, until - time.perf_counter()), 0.1)
    # select, because poll and epoll count in milliseconds: on a GPU more than a batch takes.
    ready = select.select([worker.pipe for worker in workers], [], [], timeout)[0]
    return [worker for worker in workers if worker.pipe in ready]


def start(args: argparse.Namespace, workers: list[Worker]) -> None:
    """Start the workers and wait until all are ready, or until a signal is received."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    # Slurm and Ctrl-C signal every process, but only this one is to act. What is blocked here
    # workers inherit, from their first instruction; starting the tracker would unblock it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for index, device in enumerate(args.devices):
        pipe, its_end = context.Pipe()
        process = context.Process(target=work, args=(args, device, its_end))
        process.start()
        its_end.close()  # so that reading from a dead worker's pipe ends
        name = f"worker {index} (pid {process.pid}, {device})"
        workers.append(Worker(name, "not ready", process, pipe))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    missing, deadline = list(workers), time.perf_counter() + START_S
    while missing and not received:
        for worker in speaking(missing, deadline):
            worker.kind = worker.receive().decode()
            missing.remove(worker)
        if missing and time.perf_counter() > deadline:
            raise Lost(f"{missing[0].name} is not ready after {START_S:g} s")


def stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.pipe.close()  # its process ends by itself, or else is killed
    deadline = time.perf_counter() + END_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.perf_counter()))
        worker.process.kill()
        worker.process.join(END_S)


Batches = list[list[float]]  # the latencies of each batch's requests, in seconds


def figures(batches: Batches, seconds: float, tokens: int) -> dict[str, Any]:
    latencies = sorted(chain.from_iterable(batches))
    done = len(latencies)
    found: dict[str, Any] = {"requests": done, "requests_per_s": round(done / seconds, 1)}
    found["tokens_per_s"] = round(done / seconds * tokens)
    for percent in (50, 95, 99):
        at = math.ceil(done * percent / 100) - 1
        found[f"p{percent}_ms"] = round(1000 * latencies[at], 3) if done else None
    found["mean_ms"] = round(1000 * sum(latencies) / done, 3) if done else None
    found["fill"] = round(done / len(batches), 2) if done else None
    return found


def results(answered: list[Batches], seconds: float, tokens: int) -> dict[str, Any]:
    total = figures(list(chain.from_iterable(answered)), seconds, tokens)
    return {"total": total, "workers": [figures(one, seconds, tokens) for one in answered]}


def show(label: str, total: dict[str, Any], workers: Iterable[dict[str, Any]] = ()) -> None:
    """Print a line for each worker, if there are several, and one for all of them."""
    lines = [(f"worker {index}", one) for index, one in enumerate(workers)]
    for name, one in [*(lines if len(lines) > 1 else []), (label, total)]:
        text = f"{name:12}{one['requests']:9}{one['requests_per_s']:12}{one['tokens_per_s']:12}"
        if one["requests"]:
            text += "".join(f"{one[key]:9.2f}" for key in ("p50_ms", "p95_ms", "p99_ms"))
            text += f"{one['fill']:8.1f}"
        print(text, flush=True)


def serve(
    args: argparse.Namespace, workers: list[Worker], size: int, duration: float, quiet: bool
) -> dict[str, Any]:
    """Serve for this long, or until a signal is received; returns what came of it."""
    random = Random(0)
    source = random.randbytes(args.tokens + 65536)  # each request is a piece of it
    room = args.queue or 4 * size * len(workers)
    waiting: deque[tuple[float, bytes]] = deque()
    answered: list[Batches] = [[] for _ in workers]
    shown = [0] * len(workers)
    sent, rejected, idle_s = 0, 0, 0.0
    now = began = reported = time.perf_counter()
    end, upcoming, arrivals = began + duration, math.inf, list[float]()
    if args.rate:
        upcoming = began + random.expovariate(args.rate)
    else:
        arrivals = [began] * (args.clients or 2 * size * len(workers))

    while True:
        # Requests arrive. (A rate that is more than this loop can do must not hold it up.)
        stopping = now >= end or bool(received)
        while upcoming <= now and not stopping and len(arrivals) < 1000:
            arrivals.append(upcoming)
            upcoming += random.expovariate(args.rate)
        for arrival in arrivals:
            sent += 1
            if args.rate and len(waiting) >= room:
                rejected += 1
            else:
                first = random.randrange(65536)
                waiting.append((arrival, source[first : first + args.tokens]))
        arrivals = []
        if received:  # there is no time for what no worker has yet
            rejected += len(waiting)
            waiting.clear()

        # Batches go to the least busy worker: one at a time, or two if the second is full.
        due = math.inf
        while waiting:
            worker = min(workers, key=lambda worker: (len(worker.outstanding), worker.sent))
            full = len(waiting) >= size
            if len(worker.outstanding) > full:
                break
            due = waiting[0][0] + args.max_wait / 1000
            if now < due and not full and not stopping:
                break
            worker.send([waiting.popleft() for _ in range(min(size, len(waiting)))], now)
            due = math.inf
        if stopping and not any(worker.outstanding for worker in workers):
            break

        # Answers come.
        before = time.perf_counter()
        ready = speaking(workers, due if stopping else min(due, upcoming, end))
        now = time.perf_counter()
        idle_s += now - before
        for worker, batches in zip(workers, answered, strict=True):
            if worker in ready:
                answers = worker.receive()
                now = time.perf_counter()
                batches.append([now - arrival for arrival in worker.outstanding.popleft()[1]])
                if not (args.rate or now >= end or received):
                    arrivals += [now] * len(answers)
            elif worker.outstanding and now - worker.outstanding[0][0] > ANSWER_S:
                raise Lost(f"{worker.name} has not answered for {ANSWER_S:g} s")
        if not quiet and now - reported >= args.report:
            recent = [batches[first:] for batches, first in zip(answered, shown, strict=True)]
            show(f"{now - began:.1f} s", **results(recent, now - reported, args.tokens))
            shown, reported = [len(batches) for batches in answered], now

    seconds = time.perf_counter() - began
    return {
        "batch_size": size,
        "seconds": round(seconds, 3),
        "sent": sent,
        "rejected": rejected,
        "front_end_busy": round(1 - idle_s / seconds, 3),
        **results(answered, seconds, args.tokens),
    }


def measure(args: argparse.Namespace, workers: list[Worker]) -> list[dict[str, Any]]:
    """Serve with each batch size, and print what there is to see meanwhile."""
    points: list[dict[str, Any]] = []
    if not args.json:
        print(f"serve  {socket.gethostname()}  torch {torch.__version__}")
        lines = [f"{worker.name}  {worker.kind}" for worker in workers]
        print(*lines, HEADER, sep="\n", flush=True)
    for size in args.sizes:
        serve(args, workers, size, min(1.0, args.duration / 10), quiet=True)  # clocks speed up
        if received:
            break
        point = serve(args, workers, size, args.duration, quiet=args.json or bool(args.sweep))
        points.append(point)
        if args.json:
            continue
        if args.sweep:
            show(f"batch {size}", point["total"])
        else:
            show("total", point["total"], point["workers"])
        if not args.sweep or point["rejected"] or point["front_end_busy"] > 0.9:
            text = f"sent {point['sent']}, rejected {point['rejected']} in {point['seconds']} s; "
            print(f"{text}front end {point['front_end_busy']:.0%} busy", flush=True)
    return points


def main() -> int:
    args = parse_args()
    for wanted in SIGNALS:
        signal.signal(wanted, lambda number, _frame: received.append(number))
    workers: list[Worker] = []
    try:
        start(args, workers)
        points = measure(args, workers)
    except Lost as lost:
        print(f"error: {lost}", file=sys.stderr)
        return 1
    finally:
        stop(workers)
    if args.json:
        about = {"host": socket.gethostname(), "torch": torch.__version__, "points": points}
        about["workers"] = [f"{worker.name} {worker.kind}" for worker in workers]
        print(json.dumps(about | {"interrupted": bool(received)}))
    elif received:
        print("interrupted" + ("" if points else " before anything was measured"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
