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
from collections import Counter, deque
from contextlib import suppress
from ctypes import c_ubyte
from dataclasses import dataclass, field
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
SIGNALS = (signal.SIGTERM, signal.SIGINT)
COLUMNS = {"requests": 9, "requests/s": 12, "tokens/s": 12, "p50 ms": 9, "p95 ms": 9, "p99 ms": 9}
HEADER = " " * 12 + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "    fill"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def above_zero(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def parse_args() -> argparse.Namespace:
    gpus, cpus = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    given = {key: text for key, text in os.environ.items() if text.isdecimal() and int(text)}
    parser = Parser(description="Serve a small model on every GPU of a node and measure it.")
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group
    size, load = one_of().add_argument, one_of().add_argument
    add("--workers", type=positive, default=gpus or int(given.get("SLURM_GPUS_ON_NODE", "1")),
        help="processes; one a GPU, without GPUs as many as the job asked for")  # fmt: skip
    size("--batch-size", type=positive, default=8, help="requests in a batch, at most (8)")
    size("--sweep", type=sizes, metavar="N,N,…", help="batch sizes to try one after the other")
    add("--max-wait", type=above_zero, default=5, metavar="MS", help="of a partial batch (5)")
    load("--clients", type=positive, help="closed loop of so many (two batches a worker)")
    load("--rate", type=above_zero, metavar="R", help="open loop, R requests/s in all")
    add("--queue", type=positive, help="requests that may wait, with --rate (four batches a worker)")
    add("--duration", type=above_zero, default=10, metavar="S", help="of each batch size (10)")
    add("--report", type=above_zero, default=2, metavar="S", help="between two reports (2)")
    add("--json", action="store_true", help="print one JSON object at the end and nothing else")
    add("--layers", type=positive, default=4, help="of the transformer (4)")
    add("--width", type=positive, default=256, help="of the transformer (256)")
    add("--tokens", type=positive, default=64, help="of a request, a byte each (64)")
    add("--seed", type=int, default=0, help="of weights, requests and arrivals (0)")
    args = parser.parse_args()
    if gpus and args.workers > gpus:
        parser.error(f"--workers {args.workers}: {gpus} GPU(s) are visible here, one a worker")
    args.sizes = args.sweep or [args.batch_size]
    args.devices = [f"cuda:{index}" if gpus else "cpu" for index in range(args.workers)]
    # gpusub's OMP_NUM_THREADS is right for one worker a GPU; more of them share the same CPUs.
    share = max(1, cpus // args.workers)
    args.threads = min(share, int(given.get("OMP_NUM_THREADS", share)))
    return args


class Classifier(nn.Module):
    """A transformer over bytes: the class of a text is the largest of 256 scores."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(tokens, width))
        block = nn.TransformerEncoderLayer(width, math.gcd(width, 8), batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embed(texts.long()) + self.position)
        return self.scores(hidden.mean(dim=1)).argmax(dim=1)


def work(args: argparse.Namespace, index: int, inbox: Any, pipe: Connection) -> None:
    """A worker's process: answer batches until the front end closes the pipe, or is gone."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # the same weights in every worker
    device, name = torch.device(args.devices[index]), f"{args.threads} thread(s)"
    model = Classifier(args.layers, args.width, args.tokens).to(device).eval()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        model, name = model.bfloat16(), torch.cuda.get_device_name(device)
    both = torch.frombuffer(inbox, dtype=torch.uint8).view(2, max(args.sizes), args.tokens)

    def answer(slot: int, size: int) -> bytes:
        # tolist waits for the GPU: what is sent is the answer, not a promise of one.
        return bytes(model(both[slot, :size].to(device)).tolist())

    with torch.inference_mode(), suppress(EOFError, ConnectionError):
        powers = {2**power for power in range(max(args.sizes).bit_length())}
        for size in sorted(powers.union(args.sizes)):  # kernels are loaded and chosen by size
            answer(0, min(size, max(args.sizes)))
        pipe.send_bytes(name.encode())
        slot = 0
        while True:
            pipe.send_bytes(answer(slot, int.from_bytes(pipe.recv_bytes(), "little")))
            slot = 1 - slot


class Lost(Exception):
    """A worker died or fell silent."""


@dataclass(eq=False)
class Worker:
    """The front end's view of a worker."""

    label: str
    process: BaseProcess
    pipe: Connection
    inbox: memoryview  # shared with the process; room for two batches, so that no send blocks
    sent: int = 0
    outstanding: deque[tuple[float, list[float]]] = field(default_factory=deque)

    def send(self, batch: list[tuple[float, bytes]], now: float) -> None:
        texts = b"".join(text for _, text in batch)
        start = self.sent % 2 * (len(self.inbox) // 2)
        self.inbox[start : start + len(texts)] = texts
        self.sent += 1
        self.outstanding.append((now, [arrival for arrival, _ in batch]))
        with suppress(OSError):  # it died: receive will tell
            self.pipe.send_bytes(len(batch).to_bytes(4, "little"))

    def receive(self) -> bytes:
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(END_S)
            code = self.process.exitcode or 0
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Lost(f"{self.label}: {how}") from None


def start(args: argparse.Namespace, workers: list[Worker]) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    # Slurm and Ctrl-C signal every process, but only this one is to act. What is blocked here
    # workers inherit, from their first instruction; starting the tracker would unblock it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for index, device in enumerate(args.devices):
        inbox = context.RawArray(c_ubyte, 2 * max(args.sizes) * args.tokens)
        pipe, its_end = context.Pipe()
        process = context.Process(target=work, args=(args, index, inbox, its_end))
        process.start()
        its_end.close()  # so that reading from a dead worker's pipe ends
        label = f"worker {index}  pid {process.pid}  {device}"
        workers.append(Worker(label, process, pipe, memoryview(inbox).cast("B")))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def speaking(workers: list[Worker], until: float) -> list[Worker]:
    """Wait until a worker has an answer, for 0.1 s at most so that signals are seen."""
    timeout = min(max(0.0, until - time.perf_counter()), 0.1)
    # select, because poll and epoll count in milliseconds: on a GPU more than a batch takes.
    ready = select.select([worker.pipe for worker in workers], [], [], timeout)[0]
    return [worker for worker in workers if worker.pipe in ready]


def wait_until_ready(workers: list[Worker], received: list[int]) -> None:
    missing, deadline = list(workers), time.perf_counter() + START_S
    while missing and not received:
        for worker in speaking(missing, deadline):
            worker.label += f"  {worker.receive().decode()}"
            missing.remove(worker)
        if missing and time.perf_counter() > deadline:
            raise Lost(f"{missing[0].label}: not ready after {START_S:g} s")


def stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.pipe.close()  # its process ends by itself, or else is killed
    deadline = time.perf_counter() + END_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.perf_counter()))
        worker.process.kill()
        worker.process.join(END_S)


@dataclass
class Tally:
    batches: int = 0
    # Requests by latency, in classes half a percent wide: hours of them fit in memory.
    classes: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.batches + other.batches, self.classes + other.classes)

    def figures(self, seconds: float, tokens: int) -> dict[str, Any]:
        count = sum(self.classes.values())
        found: dict[str, Any] = {"requests": count, "requests_per_s": round(count / seconds, 2)}
        found["tokens_per_s"] = round(count * tokens / seconds, 1)
        passed, wanted = 0, [50, 95, 99]
        found |= {f"p{percent}_ms": None for percent in wanted}
        for latency, requests in sorted(self.classes.items()):
            passed += requests
            while wanted and passed * 100 >= count * wanted[0]:
                found[f"p{wanted.pop(0)}_ms"] = round(1000 * math.exp(latency / 200), 4)
        whole = sum(math.exp(latency / 200) * n for latency, n in self.classes.items())
        found["mean_ms"] = round(1000 * whole / count, 4) if count else None
        found["fill"] = round(count / self.batches, 2) if count else 0.0
        return found


def row(label: str, figures: dict[str, Any]) -> str:
    p50, p95, p99 = (
        f"{figures[f'p{p}_ms']:9.2f}" if figures["requests"] else f"{'-':>9}" for p in (50, 95, 99)
    )
    rates = f"{figures['requests_per_s']:12.1f}{figures['tokens_per_s']:12.0f}"
    return f"{label:12}{figures['requests']:9}{rates}{p50}{p95}{p99}{figures['fill']:8.1f}"
