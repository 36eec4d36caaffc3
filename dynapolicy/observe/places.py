"""The kinds of place in which a program compiles, each entered the way a program enters it.

Every function here runs ``body`` in its place and returns what it returned. ``apply`` puts the policy
in force; places that a policy must be brought to call it themselves.
"""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from .probe import ProbeData, Seen, Setup, as_it_is, probe_in_child

__all__ = [
    "Waiting",
    "autograd_thread",
    "data_loader",
    "executor",
    "executor_with_initializer",
    "new_thread",
    "process",
    "run_in_executor",
    "sibling_task",
    "to_thread",
]

Body = Callable[[], Seen]
Apply = Callable[[], Any]

#: Seconds that a child may take to import torch and to compile, on a busy machine.
_CHILD_SECONDS = 120

#: Autograd goes on in another thread where backward calls nest deeper than 60.
_DEEPER_THAN_AUTOGRAD_NESTS = 70


class Waiting:
    """A thread that was started before the policy was applied, waiting for work."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Body, Future[Seen]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _settle(*job)

    def run(self, body: Body) -> Seen:
        """Run in that thread."""
        result: Future[Seen] = Future()
        self._jobs.put((body, result))
        return result.result()

    def end(self) -> None:
        """Let the thread end."""
        self._jobs.put(None)
        self._thread.join()


def _settle(body: Callable[[], Any], result: Future[Any]) -> None:
    try:
        result.set_result(body())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
        result.set_exception(error)


def new_thread(body: Callable[[], Any]) -> Any:
    """A thread of its own."""
    result: Future[Any] = Future()
    thread = threading.Thread(target=_settle, args=(body, result))
    thread.start()
    thread.join()
    return result.result()


def executor(body: Body) -> Seen:
    """A pool's thread that nobody prepared."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


def executor_with_initializer(body: Body, apply: Apply) -> Seen:
    """A pool's thread that applied the policy as its initializer."""
    with ThreadPoolExecutor(1, initializer=apply) as pool:
        return pool.submit(body).result()


def _in_loop(main: Callable[[], Any], context: contextvars.Context) -> Any:
    """An event loop of its own, also where this thread runs one already, as a notebook does."""
    return new_thread(lambda: context.run(lambda: asyncio.run(main())))


def run_in_executor(body: Body) -> Seen:
    """The event loop's default executor."""

    async def main() -> Seen:
        return await asyncio.get_running_loop().run_in_executor(None, body)

    return _seen(_in_loop(main, contextvars.copy_context()))


def to_thread(body: Body) -> Seen:
    """``asyncio.to_thread`` of a task that has the policy."""

    async def main() -> Seen:
        return await asyncio.to_thread(body)

    return _seen(_in_loop(main, contextvars.copy_context()))


def sibling_task(body: Body, apply: Apply) -> Seen:
    """A task beside the one that applied the policy, as a server's handlers are beside its lifespan."""

    async def main() -> Seen:
        applied = asyncio.Event()
        done = asyncio.Event()

        async def lifespan() -> None:
            with apply():
                applied.set()
                await done.wait()

        async def handler() -> Seen:
            await applied.wait()
            try:
                return body()
            finally:
                done.set()

        life = asyncio.create_task(lifespan())
        seen = await asyncio.create_task(handler())
        await life
        return seen

    # A context of its own: what this thread has would be inherited by both tasks.
    return _seen(_in_loop(main, contextvars.Context()))


def _seen(result: Any) -> Seen:
    assert isinstance(result, Seen)  # noqa: S101 - for the type checker
    return result


def autograd_thread(body: Body) -> Seen:
    """A thread of the autograd engine: recomputing inside a deeply nested backward ends up there."""
    import torch

    found: list[Seen] = []

    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, depth: int) -> Any:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if ctx.depth == 0:
                found.append(body())
            else:
                with torch.enable_grad():
                    nested(ctx.depth - 1).backward()
            return grad, None

    def nested(depth: int) -> Any:
        return Nest.apply(torch.ones(1, requires_grad=True), depth)  # type: ignore[no-untyped-call]

    nested(_DEEPER_THAN_AUTOGRAD_NESTS).backward()
    return found[0]


def process(method: str, shapes: int, apply: Apply | None) -> Callable[[], Seen]:
    """Start a child of a process pool; the result waits for it.

    Args:
        method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        apply: the pool's initializer, None for a pool without.
    """
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method), initializer=Setup(apply))
    job = pool.submit(probe_in_child, shapes)

    def wait() -> Seen:
        try:
            return job.result(_CHILD_SECONDS)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return wait


def data_loader(shapes: int, apply: Apply | None) -> Seen:
    """A worker of torch's ``DataLoader``, started in the platform's default way."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        ProbeData(shapes),  # type: ignore[arg-type]
        num_workers=1,
        worker_init_fn=Setup(apply),
        collate_fn=as_it_is,
        timeout=_CHILD_SECONDS,
    )
    return _seen(next(iter(loader))[0])
