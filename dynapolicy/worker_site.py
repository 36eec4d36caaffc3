"""This process's one pool of compile workers: started in the background, looked after, ended."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedTorchWarning, WorkerWarning, warn
from .imports import ImportGate
from .machine import WorkerPlan

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import ModuleType

    from .jobs import Job, Jobs

__all__ = ["Site", "site_of"]

#: How often a dead pool is started again in one process.
MOST_RECOVERIES = 3

#: Seconds that the interpreter's exit may spend on ending the pool.
AT_EXIT = 5.0

#: Seconds before the background thread begins: loading torch's libraries stops every other thread, and
#: whoever called start_workers shall have returned by then.
_LET_RETURN = 0.02

#: Seconds that a fork waits for imports in the background, and the end of a dead pool may take.
_FORK_WAITS = 60.0
_BURY = 4.0


def _torch() -> ModuleType:
    # Here and below: whoever calls start_workers shall not wait for what only the background needs.
    from .torch_compat import workers

    return workers


class Site:
    """The pool of this process and what happened to it.

    Attributes:
        plan: what it was started with.
        state: ``"starting"``, ``"started"``, ``"nothing"`` (there is no pool to start), ``"serial"``
            (given up), ``"failed"`` or ``"ended"``.
        notes: what a reader of the report should know.
        recoveries: how often a dead pool was started again.
        pool: torch's pool, or None.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.state = "nothing"
        self.notes: list[str] = []
        self.recoveries = 0
        self.pool: Any = None
        self._jobs: Jobs | None = None
        self._own = False
        self._hold: Any = None
        self._hook: Any = None
        self._stopped = False
        self._quiet = False
        self._begun = threading.Event()
        self._change = threading.RLock()

    # -- starting ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start in the background; returns at once."""
        _look_after_forks()
        self.state = "starting"
        self._begun.clear()
        threading.Thread(target=self._run, name="dynapolicy-workers").start()

    def nothing(self) -> None:
        """There is nothing to start, so nothing is waited for."""
        self._begun.set()

    def _run(self) -> None:
        time.sleep(_LET_RETURN)
        try:
            with _importing:
                self._start()
                self._begun.set()
                if self.state == "started" and not self._stopping():
                    with ImportGate():
                        _torch().load_rest()
        except Exception as error:  # noqa: BLE001 - a start that fails must not take the program along
            self.state = "failed"
            self.notes.append(f"the start failed: {type(error).__name__}: {error}")
        finally:
            self._begun.set()

    def _stopping(self) -> bool:
        return self._stopped or not threading.main_thread().is_alive()

    def _start(self) -> None:
        torch = _torch()
        torch.load_torch()
        with ImportGate():
            torch.load_config()
        with self._change:
            if self._stopping():
                return
            self._hold = torch.Hold(self.plan.workers, self.plan.start)
        if not self.plan.pool:
            self.state = "nothing"
            return
        with ImportGate():
            new = torch.load_workers()
        missing = torch.problem()
        if missing is not None:
            self.state = "failed"
            self.notes.append(f"this torch keeps its workers in a way that isn't known: {missing}")
            warn(f"No compile workers are started: {missing}.", UnsupportedTorchWarning, once="workers")
            return
        with self._change:
            if self._stopping() and not new:
                return
            self._take_over(new=new)

    def _take_over(self, *, new: bool) -> None:
        torch = _torch()
        if torch.threads_only():
            self.state = "nothing"
            self.notes.append("nothing is started: this torch compiles on threads")
            return
        self._hook = torch.Hook(self._make)
        self.state = "started"
        there = torch.existing()
        if there is not None:
            self._adopt(there, own=new)
        if self._stopped:
            self.shutdown(_BURY)
        elif self._quiet:
            self.quiesce()
        else:
            self._start_pool()

    def _start_pool(self) -> None:
        def start() -> None:
            self._hook()
            _torch().request_ready()

        self._hold.run(start)

    def _make(self, original: Callable[[], Any]) -> Any:
        """Torch wants a pool: now, or at some compile later on."""
        from .jobs import LocalPool

        with self._change:
            if self.state == "serial":
                return LocalPool()
            if self.state == "ended":
                return original()
            try:
                pool = self._hold.run(original)
            except (OSError, RuntimeError) as error:
                self._give_up(f"a pool can't be started: {error}")
                return LocalPool()
            self._adopt(pool, own=True)
            return pool

    def _adopt(self, pool: Any, *, own: bool) -> None:
        """Look after a pool: its jobs survive it, and no message to it blocks or raises once it is dead."""
        if pool is self.pool:
            return
        from .jobs import Jobs

        torch = _torch()
        torch.close_child_ends(pool)
        jobs = Jobs(pool.submit, lambda: bool(torch.alive(pool)), self._rescue)
        pool.submit = jobs.submit
        torch.mute(pool)
        torch.own_ready(pool, jobs.submit)
        self.pool, self._jobs, self._own = pool, jobs, own
        if own:
            _end_at_exit()
        elif (got := torch.size(pool)) != self.plan.workers:
            self.notes.append(
                f"a pool of {got} workers was there already, so that many it stays: call start_workers() "
                "before the first compile, and on torch 2.6 and 2.7 before torch._inductor is imported"
            )

    # -- what is asked of it ---------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """The workers have answered, and are alive. Never blocks."""
        future = self._ready_future()
        return future is not None and future.done() and bool(_torch().alive(self.pool))

    @property
    def healthy(self) -> bool:
        """Nothing is known to be wrong."""
        if self.state in ("serial", "failed"):
            return False
        return self.pool is None or bool(_torch().alive(self.pool))

    def _ready_future(self) -> Future[Any] | None:
        pool = self.pool
        if self.state != "started" or pool is None:
            return None
        future: Future[Any] | None = _torch().ready_future(pool)
        return future

    def wait(self, timeout: float) -> bool:
        """Whether the workers are ready within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        if not self._begun.wait(timeout):
            return False
        future = self._ready_future()
        if future is None:
            return False
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except Exception:  # noqa: BLE001 - late, or the workers couldn't answer
            return False
        return self.ready

    @property
    def got(self) -> int | None:
        """Workers of the pool that is there, or None."""
        pool = self.pool
        found: int | None = None if pool is None else _torch().size(pool)
        return found

    @property
    def processes(self) -> list[int]:
        """Ids of the pool's processes that are alive."""
        pool = self.pool
        return [] if pool is None else list(_torch().family(pool).members())

    def recover(self) -> bool:
        """Start a dead pool again, a few times; after that kernels compile in this process."""
        with self._change:
            if self.state == "nothing" and self.plan.pool and self._hook is None and not self.notes:
                self.begin()
                return True
            if self.state != "started":
                return self.state == "starting"
            if self.pool is not None:
                if _torch().alive(self.pool):
                    return True
                if self.recoveries >= MOST_RECOVERIES:
                    self._give_up(f"the pool died {self.recoveries + 1} times")
                    return False
                self.recoveries += 1
                self._bury()
            self._start_pool()
            return self.state == "started"

    def _bury(self) -> None:
        pool, self.pool = self.pool, None
        _torch().drop(pool)
        _torch().end_pool(pool, _BURY)

    def _give_up(self, reason: str) -> None:
        self.state = "serial"
        self.notes.append(f"{reason}; kernels compile in this process from now on")
        self._hold.change(1)
        if self.pool is not None:
            self._bury()
        warn(f"Compile workers: {reason}. Kernels compile in this process from now on.", WorkerWarning, once="serial")

    def _rescue(self, job: Job) -> None:
        """A job's pool is dead, or a worker died under it."""
        if job.hopeless:
            job.give_up()
            return
        with suppress(Exception):  # whatever it is, somebody waits for this job
            jobs = self._living_jobs()
            if jobs is not None:
                jobs.send(job)
                return
        job.run_here()

    def _living_jobs(self) -> Jobs | None:
        with self._change:
            return self._jobs if self.recover() and self.pool is not None else None

    # -- ending ----------------------------------------------------------------------------------

    def quiesce(self) -> bool:
        """End the workers until a compile needs them again; whether that is under way."""
        self._quiet = self.state == "starting"
        with self._change:
            if self.pool is None or not _torch().alive(self.pool) or _torch().quiesce(self.pool):
                return True
            # This torch can only end the whole pool; the next compile makes another.
            if not self._own or (self._jobs is not None and self._jobs.open):
                return False
            self._bury()
            return True

    def shutdown(self, timeout: float) -> bool:
        """End for good within ``timeout`` seconds; whether no process of the pool is left."""
        deadline = time.monotonic() + timeout
        self._stopped = True
        if not self._change.acquire(timeout=timeout):
            return False
        try:
            if self.state != "ended":
                self.state = "ended"
                return self._end(deadline)
            return True
        finally:
            self._change.release()

    def _end(self, deadline: float) -> bool:
        pool, self.pool = self.pool, None
        gone = True
        if self._hook is not None:
            self._hook.remove()
        if pool is not None and self._own:
            _torch().drop(pool)
            gone = bool(_torch().end_pool(pool, max(0.0, deadline - time.monotonic())))
        elif pool is not None:
            _torch().unmute(pool)
        if self._hold is not None:
            self._hold.release()
        return gone

    def in_child(self) -> None:
        """After a fork: the pool is the parent's. A compile here makes another, as planned."""
        self.pool, self._jobs, self.recoveries = None, None, 0
        self._begun, self._change = threading.Event(), threading.RLock()
        self._begun.set()
        if self._hook is not None:
            _torch().forget_ready()
        elif self.state == "starting":
            self.state = "nothing"


# -- one site in a process ---------------------------------------------------------------------------

_importing = threading.RLock()
_sites: list[Site] = []
_exit_pid = 0


def site_of(plan: WorkerPlan) -> tuple[Site, bool]:
    """The site of this process, and whether it is new."""
    if _sites and _sites[-1].state != "ended":
        return _sites[-1], False
    _sites[:] = [Site(plan)]
    return _sites[-1], True


def _end_at_exit() -> None:
    """End the pool with the process, before torch waits for it; also where multiprocessing started the process."""
    global _exit_pid  # noqa: PLW0603 - once for each process
    if _exit_pid == os.getpid():
        return
    from multiprocessing import util

    _exit_pid = os.getpid()
    atexit.register(_at_exit)
    util.Finalize(None, _at_exit, exitpriority=1000)


def _at_exit() -> None:
    for site in _sites:
        site.shutdown(AT_EXIT)


def _before_fork() -> None:
    _importing.acquire(timeout=_FORK_WAITS)


def _after_fork() -> None:
    with suppress(RuntimeError):  # it was not to be had in time
        _importing.release()


def _in_child() -> None:
    global _importing  # noqa: PLW0603 - its owner doesn't exist here
    _importing = threading.RLock()
    for site in _sites:
        site.in_child()


@functools.cache
def _look_after_forks() -> None:
    # The last to register is the first to be called. Who waits for imports must hold no lock by then
    # that an import may need, so these two, which hold one through a fork, are registered before.
    for name in ("logging", "concurrent.futures.thread"):
        importlib.import_module(name)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
