"""Jobs that survive the pool they were handed to. Pure: a pool is whatever has a ``submit``."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import attrs

__all__ = ["Job", "Jobs", "LocalPool"]

#: How often one job may be handed to a pool. A job that kills its worker each time is to blame itself.
MOST_TRIES = 3

#: Seconds between two looks at a pool that has jobs. Old torch never says that its pool died.
LOOK_EVERY = 0.25

_local = threading.Lock()


@attrs.define(eq=False)
class Job:
    """One call, and the future that its owner waits for, whichever pool runs it."""

    call: Callable[[], Any]
    future: Future[Any] = attrs.field(factory=Future)
    tries: int = 0
    error: BaseException | None = None

    def run_here(self) -> None:
        """Run it in this process, one job at a time, with the copy of its result that a pool gives."""
        with _local:
            try:
                result = pickle.loads(pickle.dumps(self.call()))  # noqa: S301 - our own bytes
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

    @property
    def hopeless(self) -> bool:
        """Its worker died each time."""
        return self.tries >= MOST_TRIES and isinstance(self.error, BrokenProcessPool)

    def give_up(self) -> None:
        """Its owner gets what the last pool said."""
        self.future.set_exception(self.error or BrokenProcessPool("a compile worker died"))


class Jobs:
    """The jobs of one pool.

    Args:
        submit: hands a call to the pool.
        alive: whether the pool can still answer.
        rescue: called on a thread of its own with each job that the pool lost.
    """

    def __init__(
        self, submit: Callable[..., Future[Any]], alive: Callable[[], bool], rescue: Callable[[Job], None]
    ) -> None:
        self._submit = submit
        self._alive = alive
        self._rescue = rescue
        self._open: set[Job] = set()
        self._lock = threading.Lock()
        self._watched = False

    @property
    def open(self) -> int:
        """How many jobs have no answer yet."""
        return len(self._open)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Like the pool's own, but the future is answered also when the pool dies."""
        job = Job(functools.partial(function, *args, **kwargs))
        job.future.set_running_or_notify_cancel()
        self.send(job)
        return job.future

    def send(self, job: Job) -> None:
        """Hand a job to the pool, or to the rescue where the pool is dead."""
        job.tries += 1
        self._add(job)
        if not self._alive():
            self._lose(job, None)
            return
        try:
            inner = self._submit(job.call)
        except (RuntimeError, OSError, ValueError) as error:
            if self._alive():
                self._take(job)
                raise
            self._lose(job, error)
        except BaseException:
            self._take(job)
            raise
        else:
            inner.add_done_callback(lambda done: self._answered(job, done))

    def _answered(self, job: Job, inner: Future[Any]) -> None:
        error = CancelledError() if inner.cancelled() else inner.exception()
        if error is None:
            if self._take(job):
                job.future.set_result(inner.result())
        elif self._is_loss(error):
            self._lose(job, error)
        elif self._take(job):
            job.future.set_exception(error)

    def _is_loss(self, error: BaseException) -> bool:
        if isinstance(error, (BrokenProcessPool, CancelledError)):
            return True
        # Torch's own words for a pool that is gone are a plain RuntimeError.
        return type(error) is RuntimeError and not self._alive()

    def _lose(self, job: Job, error: BaseException | None) -> None:
        if self._take(job):
            job.error = error
            # Torch answers while it holds the pool's lock, so nothing may be handed in from here.
            threading.Thread(target=self._rescue, args=(job,), name="dynapolicy-rescue", daemon=True).start()

    def _add(self, job: Job) -> None:
        with self._lock:
            self._open.add(job)
            if self._watched:
                return
            self._watched = True
        threading.Thread(target=self._watch, name="dynapolicy-watch", daemon=True).start()

    def _take(self, job: Job) -> bool:
        """Whoever gets True answers the job; nobody else does."""
        with self._lock:
            if job not in self._open:
                return False
            self._open.remove(job)
            return True

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            lost = [] if self._alive() else list(self._open)
            for job in lost:
                self._lose(job, None)
            with self._lock:
                if not self._open:
                    self._watched = False
                    return


class LocalPool:
    """Stands in for a pool where none can be kept alive: each job runs where it is submitted."""

    running = True

    def __init__(self) -> None:
        #: Torch 2.6 and 2.7 look for it.
        self.ready_future: Future[Any] = Future()
        self.ready_future.set_result("ready")

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it now."""
        job = Job(functools.partial(function, *args, **kwargs))
        job.run_here()
        return job.future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """There is nothing to end."""
