"""What a fork and the end of the process mean for pools in the background."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable

from .imports import gate

__all__ = ["end_with_process", "look_after"]

#: Seconds that the end of the process may wait for the end of a pool.
_AT_EXIT = 5.0

_called: list[tuple[Callable[[], None], Callable[[float], object]]] = []
_ends = 0


def look_after(in_child: Callable[[], None], end: Callable[[float], object]) -> None:
    """Have these called, and no longer those of before.

    Args:
        in_child: in forked children.
        end: at the end of a process that called ``end_with_process``, with the seconds that it may take.
    """
    _register()
    _called[:] = [(in_child, end)]


def end_with_process() -> None:
    """There is something to end with this process, before torch waits for it. Call it as often as you like."""
    global _ends  # noqa: PLW0603 - once for each process
    if _ends == os.getpid():
        return
    from multiprocessing import util

    _ends = os.getpid()
    atexit.register(_at_exit)
    # Processes that multiprocessing started leave without ``atexit``.
    util.Finalize(None, _at_exit, exitpriority=1000)


def _at_exit() -> None:
    for _, end in _called:
        end(_AT_EXIT)


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_in_child)


def _after_in_child() -> None:
    gate.in_child()
    for in_child, _ in _called:
        in_child()
