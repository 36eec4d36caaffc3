"""One of torch's pools: a sidecar process with workers below it, or an executor's own processes."""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..workers.processes import Family, end
from .worker_home import HOME

__all__ = ["Pool"]

#: Seconds that a pool may take to end by itself before it is killed.
_GRACE = 2.0

#: Messages to the sidecar that torch sends amid a compile.
_SIGNALS = ("wakeup", "quiesce")


class Pool:
    """One pool, looked after.

    Attributes:
        raw: torch's object.
        submit: how it takes a job by itself.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.submit: Callable[..., Future[Any]] = raw.submit
        self._sidecar: Any = getattr(raw, "process", None)
        self._close_child_ends()

    # -- what can be seen of it ----------------------------------------------------------------

    def alive(self) -> bool:
        """Whether it can still answer. A system call, no waiting."""
        if self._sidecar is not None:
            return self._sidecar.poll() is None and bool(getattr(self.raw, "running", True))
        return not getattr(self.raw, "_broken", False) and not getattr(self.raw, "_shutdown_thread", False)

    @property
    def size(self) -> int | None:
        """How many workers it has, or None where that can't be told."""
        found = self._argument("workers")
        return found if found is not None else getattr(self.raw, "_max_workers", None)

    @property
    def command(self) -> tuple[str, ...]:
        """Command line of the sidecar, which no other pool has; empty where there is none."""
        return () if self._sidecar is None else tuple(str(part) for part in self._sidecar.args)

    def family(self) -> Family:
        """Its processes."""
        if self._sidecar is None:
            return Family((), tuple(getattr(self.raw, "_processes", None) or ()))
        return Family(self.command, (self._sidecar.pid,) if self._sidecar.poll() is None else ())

    def _argument(self, name: str) -> int | None:
        for part in self.command:
            key, _, value = part.partition("=")
            if key == f"--{name}" and value.isdigit():
                return int(value)
        return None

    # -- looking after it ----------------------------------------------------------------------

    def guard(self, submit: Callable[..., Future[Any]]) -> None:
        """Take jobs through ``submit``. A message to a dead pool does nothing; torch would raise out of a compile."""
        self.raw.submit = submit
        for name in _SIGNALS:
            send = getattr(self.raw, name, None)
            if send is not None:
                setattr(self.raw, name, functools.partial(self._send, send))
        # Torch 2.6 and 2.7 ask whether it is ready when they make it: ask in a way that survives its death.
        if hasattr(self.raw, "ready_future"):
            self.raw.ready_future = submit(sys.modules[HOME].AsyncCompile._get_ready)

    def give_back(self) -> None:
        """As it was."""
        for name in (*_SIGNALS, "submit"):
            vars(self.raw).pop(name, None)

    def quiesce(self) -> bool:
        """End the workers and keep what starts them again; False where this torch can't."""
        stop = getattr(self.raw, "quiesce", None)
        if stop is not None:
            stop()
        return stop is not None

    def end(self, timeout: float) -> bool:
        """End all its processes within ``timeout`` seconds, by force where need be; whether none is left."""
        processes = [*(getattr(self.raw, "_processes", None) or {}).values(), self._sidecar]
        known = self.family()
        # Torch waits up to 300 s for a busy pool, so that must not be waited for here.
        polite = threading.Thread(target=self._shut, name="dynapolicy-shutdown", daemon=True)
        polite.start()
        polite.join(min(_GRACE, timeout / 2))
        first = () if self._sidecar is None else (self._sidecar.pid,)
        gone = end(lambda: known if self._sidecar is None else self.family(), timeout / 2, first=first)
        for process in processes:
            _reap(process)
        polite.join(0.5)
        return gone

    def _send(self, send: Callable[[], object]) -> None:
        if not self.alive():
            return
        try:
            send()
        except (RuntimeError, OSError, ValueError):
            if self.alive():
                raise

    def _shut(self) -> None:
        with suppress(Exception):  # a pool that died halfway; its processes are looked after
            if self._sidecar is not None:
                self.raw.shutdown()
            else:
                self.raw.shutdown(wait=False, cancel_futures=True)

    def _close_child_ends(self) -> None:
        """Close this process's copies of the sidecar's ends of the pipes.

        Up to torch 2.13 they stay open, and then a full pipe to a dead sidecar blocks the compile for ever.
        """
        for name, ours in (("read-fd", "write_pipe"), ("write-fd", "read_pipe")):
            copy, pipe = self._argument(name), getattr(self.raw, ours, None)
            if copy is None or pipe is None:
                continue
            try:
                mine, theirs = os.fstat(pipe.fileno()), os.fstat(copy)
            except (OSError, ValueError):
                continue
            # The number may be another file's by now; both ends of one pipe have one inode.
            if stat.S_ISFIFO(theirs.st_mode) and mine.st_ino == theirs.st_ino and copy != pipe.fileno():
                os.close(copy)


def _reap(process: Any) -> None:
    wait = getattr(process, "wait", None) or getattr(process, "join", None)
    if wait is not None:
        with suppress(Exception):  # somebody else reaped it
            wait(0.5)
