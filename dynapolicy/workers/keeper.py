"""The pool of this process, and another in its place when it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import WorkerWarning, warn
from ..torch_compat import worker_home as home
from ..torch_compat.worker_pool import Pool
from ..torch_compat.worker_settings import Hold
from .forks import end_with_process
from .guardian import Guardian
from .jobs import Job, Jobs, LocalPool

__all__ = ["Keeper"]

#: How often a dead pool is started again in one process.
MOST_RECOVERIES = 3

#: Seconds that the end of a dead pool may take.
_BURY = 4.0


class Keeper:
    """Looks after torch's pool, whoever makes it.

    Args:
        hold: settings that pools are made with.
        notes: gets what a reader of the report should know.
        change: held by whoever changes something.

    Attributes:
        pool: the pool, or None.
        recoveries: how often a dead one was started again.
        serial: none could be kept alive, so kernels compile in this process.
    """

    def __init__(self, hold: Hold, notes: list[str], change: threading.RLock) -> None:
        self.pool: Pool | None = None
        self.recoveries = 0
        self.serial = False
        self.change = change
        self._hold = hold
        self._notes = notes
        self._closed = False
        self._own = False
        self._jobs: Jobs | None = None
        self._guardian: Guardian | None = None
        self._hook = home.Hook(self._make)

    # -- making one ----------------------------------------------------------------------------

    def start(self) -> None:
        """Have a pool, and its workers started, without waiting for them."""

        def begin() -> None:
            self._hook()
            home.request_ready()

        self._hold.run(begin)

    def adopt_existing(self, *, own: bool) -> None:
        """Look after the pool that is there already, if there is one."""
        there = home.existing()
        if there is not None:
            self._adopt(there, own=own)

    def _make(self, original: Callable[[], Any]) -> Any:
        """Torch wants a pool: now, or at some compile later on."""
        with self.change:
            if self.serial:
                return LocalPool()
            if self._closed:
                return original()
            try:
                made = self._hold.run(original)
            except (OSError, RuntimeError) as error:
                self._give_up(f"a pool can't be started: {error}")
                return LocalPool()
            self._adopt(made, own=True)
            return made

    def _adopt(self, raw: Any, *, own: bool) -> None:
        pool = Pool(raw)
        self._jobs = Jobs(pool.submit, pool.alive, self._rescue)
        pool.guard(self._jobs.submit)
        self.pool, self._own = pool, own
        home.share_ptxas()
        wanted = self._hold.values["compile_threads"]
        if own:
            end_with_process()
            if pool.command:
                with suppress(OSError):  # no process to be had; torch's own watch is left
                    self._guardian = Guardian(pool.command)
        if pool.size != wanted:
            self._notes.append(
                f"a pool of {pool.size} workers was there already, so that many it stays: call start_workers() "
                "before the first compile, and on torch 2.6 and 2.7 before torch._inductor is imported"
            )

    # -- when it dies --------------------------------------------------------------------------

    def recover(self) -> bool:
        """Start a dead pool again, a few times; after that kernels compile in this process."""
        with self.change:
            if self.serial or self._closed:
                return False
            if self.pool is not None:
                if self.pool.alive():
                    return True
                if self.recoveries >= MOST_RECOVERIES:
                    self._give_up(f"the pool died {self.recoveries + 1} times")
                    return False
                self.recoveries += 1
                self._bury(_BURY)
            self.start()
            return not self.serial

    def _rescue(self, job: Job) -> None:
        """A job's pool is dead, or a worker died under it."""
        if job.hopeless:
            job.give_up()
            return
        with suppress(Exception):  # whatever it is, somebody waits for this job
            with self.change:
                jobs = self._jobs if self.recover() and self.pool is not None else None
            if jobs is not None:
                jobs.send(job)
                return
        job.run_here()

    def _give_up(self, reason: str) -> None:
        self.serial = True
        self._notes.append(f"{reason}; kernels compile in this process from now on")
        self._hold.change(1)
        self._bury(_BURY)
        warn(f"Compile workers: {reason}. Kernels compile in this process from now on.", WorkerWarning, once="serial")

    # -- ending --------------------------------------------------------------------------------

    def quiesce(self) -> bool:
        """End the workers until a compile needs them again; whether that is under way."""
        with self.change:
            if self.pool is None or not self.pool.alive() or self.pool.quiesce():
                return True
            # This torch can only end the whole pool; the next compile makes another.
            if not self._own or (self._jobs is not None and self._jobs.open):
                return False
            self._bury(_BURY)
            return True

    def close(self, deadline: float) -> bool:
        """End for good; whether no process of the pool is left at the deadline, on ``time.monotonic``'s clock."""
        with self.change:
            self._closed = True
            self._hook.remove()
            if self.pool is None or self._own:
                return self._bury(max(0.0, deadline - time.monotonic()))
            self.pool.give_back()
            self.pool = None
            return True

    def _bury(self, timeout: float) -> bool:
        pool, self.pool = self.pool, None
        guardian, self._guardian = self._guardian, None
        gone = True
        if pool is not None:
            home.drop(pool.raw)
            gone = pool.end(timeout)
        # Last: it guards the pool while that is being ended.
        if guardian is not None:
            guardian.end()
        return gone

    def in_child(self, change: threading.RLock) -> None:
        """After a fork: the pool is the parent's. A compile here makes another, as planned."""
        self.pool, self._jobs, self._guardian, self.recoveries = None, None, None, 0
        self.change = change
        home.forget_ready()
