"""Waiting for Slurm while the rest of the program is loaded."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Start ``work`` and return a function that waits for it, and returns or raises what it did.

    A daemon thread: a program that ends early with an error does not wait for it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()

    def wait() -> T:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return wait
