"""This process's one place for compile workers: started in the background, ended with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedTorchWarning, warn
from ..torch_compat import worker_home as home
from ..torch_compat.worker_settings import Hold
from .forks import look_after
from .loading import Loader
from .plan import WorkerPlan

if TYPE_CHECKING:
    # Whoever calls start_workers shall not wait for what only the background needs.
    from ..torch_compat.worker_pool import Pool
    from .keeper import Keeper

__all__ = ["Site", "site_of"]

#: Seconds before the background thread begins: loading torch's libraries stops every other thread, and
#: whoever called start_workers shall have returned by then.
_LET_RETURN = 0.02

#: Seconds that the end of a start that came too late may take.
_BURY = 5.0


class Site:
    """Where workers are started, asked about and ended.

    Attributes:
        plan: what it was started with.
        notes: what a reader of the report should know.
        keeper: looks after the pool, once torch's module of it is loaded.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.notes: list[str] = []
        self.keeper: Keeper | None = None
        self._state = "nothing"
        self._hold: Hold | None = None
        self._stopped = False
        self._quiet = False
        self._begun = threading.Event()
        self._begun.set()
        self._change = threading.RLock()

    @property
    def state(self) -> str:
        """One of the words that ``WorkerReport`` explains."""
        serial = self.keeper is not None and self.keeper.serial and self._state == "started"
        return "serial" if serial else self._state

    # -- starting, on a thread of its own --------------------------------------------------------

    def begin(self) -> None:
        """Start in the background; returns at once."""
        look_after(self._in_child, self.shutdown)
        self._state = "starting"
        self._begun.clear()
        threading.Thread(target=self._run, args=(Loader(),), name="dynapolicy-workers").start()

    def _run(self, loader: Loader) -> None:
        time.sleep(_LET_RETURN)
        try:
            self._start(loader)
        except Exception as error:  # noqa: BLE001 - a start that fails must not take the program along
            self._settle("failed", f"the start failed: {type(error).__name__}: {error}")
        finally:
            self._begun.set()
        try:
            if self._state == "started":
                loader.compiler(self._stopping)
        except Exception as error:  # noqa: BLE001 - as above; the first compile will say more
            self.notes.append(f"torch's compiler can't be imported: {type(error).__name__}: {error}")
        finally:
            loader.end()

    def _start(self, loader: Loader) -> None:
        loader.configuration()
        with self._change:
            if self._stopping():
                return
            self._hold = Hold(self.plan.workers, self.plan.start, _by_hand())
            self.notes += self._hold.notes
        if not self.plan.pool or self._hold.values["compile_threads"] <= 1:
            self._settle("nothing")
            return
        own = loader.pools()
        missing = home.problem()
        if missing is not None:
            warn(f"No compile workers are started: {missing}.", UnsupportedTorchWarning, once="workers")
            self._settle("failed", f"this torch keeps its workers in a way that isn't known: {missing}")
        elif home.threads_only():
            self._settle("nothing", "nothing is started: this torch compiles on threads")
        else:
            self._keep(own=own)

    def _keep(self, *, own: bool) -> None:
        from .keeper import Keeper

        with self._change:
            if self._hold is None or (self._stopping() and not own):
                return
            self.keeper = Keeper(self._hold, self.notes, self._change)
            self.keeper.adopt_existing(own=own)
            # Only now: who reads this state reads of the pool as well.
            self._state = "started"
            if self._stopped:
                self.shutdown(_BURY)
            elif self._quiet:
                self.keeper.quiesce()
            else:
                self.keeper.start()

    def _stopping(self) -> bool:
        return self._stopped or not threading.main_thread().is_alive()

    def _settle(self, state: str, *notes: str) -> None:
        with self._change:
            if not self._stopped:
                self._state = state
                self.notes += notes

    # -- what is asked of it ---------------------------------------------------------------------

    @property
    def _pool(self) -> Pool | None:
        return None if self.keeper is None else self.keeper.pool

    @property
    def ready(self) -> bool:
        """The workers have answered, and are alive. Never blocks."""
        future, pool = self._ready_future(), self._pool
        return future is not None and future.done() and pool is not None and pool.alive()

    @property
    def healthy(self) -> bool:
        """Nothing is known to be wrong."""
        pool = self._pool
        return self.state not in ("serial", "failed") and (pool is None or pool.alive())

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

    def _ready_future(self) -> Future[Any] | None:
        pool = self._pool
        return None if self._state != "started" or pool is None else home.ready_future(pool.raw)

    @property
    def got(self) -> int | None:
        """Workers of the pool that is there, or None."""
        pool = self._pool
        return None if pool is None else pool.size

    @property
    def processes(self) -> list[int]:
        """Ids of the pool's processes that are alive."""
        pool = self._pool
        return [] if pool is None else pool.family().members()

    @property
    def conflicts(self) -> list[str]:
        """Settings that are no longer as started."""
        return [] if self._hold is None else self._hold.beaten()

    # -- what it is told -------------------------------------------------------------------------

    def recover(self) -> bool:
        """Start a dead pool again; whether there is one."""
        with self._change:
            if self.keeper is not None and self._state == "started":
                return self.keeper.recover()
            if self._state == "unstarted":
                self.begin()
            return self._state == "starting"

    def quiesce(self) -> bool:
        """End the workers until a compile needs them again; whether that is under way."""
        self._quiet = self._state == "starting"
        return True if self.keeper is None else self.keeper.quiesce()

    def shutdown(self, timeout: float) -> bool:
        """End for good within ``timeout`` seconds; whether no process of the pool is left."""
        deadline = time.monotonic() + timeout
        self._stopped = True
        if not self._change.acquire(timeout=timeout):
            return False
        try:
            if self._state == "ended":
                return True
            gone = self.keeper is None or self.keeper.close(deadline)
            if self._hold is not None:
                self._hold.release()
            self._state = "ended"
            return gone
        finally:
            self._change.release()

    def _in_child(self) -> None:
        """After a fork: the thread that started is the parent's, and so is the pool."""
        self._begun, self._change = threading.Event(), threading.RLock()
        self._begun.set()
        amid = self._state == "starting"
        if self.keeper is not None:
            self.keeper.in_child(self._change)
        if amid:
            self._state = "unstarted" if self.keeper is None else "started"


def _by_hand() -> dict[str, Any]:
    """What policies in force ask for of the settings that are about to be held."""
    from ..holding import process

    asked = {name: value for one in process.standing for name, value in one.policy.settings}
    names = ("compile_threads", "worker_start_method")
    return {name: asked[f"inductor.{name}"] for name in names if f"inductor.{name}" in asked}


# -- one site in a process ---------------------------------------------------------------------------

_sites: list[Site] = []


def site_of(plan: WorkerPlan, settle: Callable[[Site], None]) -> Site:
    """The site of this process; a new one is given to ``settle``. Call it under ``locks.lock``."""
    if not _sites or _sites[-1].state == "ended":
        _sites[:] = [Site(plan)]
        settle(_sites[-1])
    return _sites[-1]
