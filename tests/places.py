"""Where code runs: one runner for each kind of place, and what tests do there.

A runner is a context manager. It is entered before any policy is applied, and gives a function
that runs a module-level callable in its place and returns what that returned. Spawned children
import this module by name, so it imports no torch at its top.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import dynapolicy as dp

Run = Callable[..., Any]


class CountingBackend:
    """Counts compiles: torch calls it once for each cache entry. The graph runs as it is.

    Attributes:
        threads: the thread of every compile, by its identifier.
    """

    def __init__(self) -> None:
        self.threads: list[int] = []

    @property
    def calls(self) -> int:
        """How often torch compiled."""
        return len(self.threads)

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        """Be torch.compile's backend."""
        self.threads.append(threading.get_ident())
        return graph.forward


def compile_once() -> None:
    """Compile something in this process, see ``torch_ready``."""
    import torch
    import torch._dynamo.guards

    # After each compile torch flushes the processor's caches to time one guard for its log, and that
    # is half of what a small compile costs.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


_SETTINGS = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
_OLD_SETTINGS = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")


def limits_read() -> dict[str, Any]:
    """The limits as torch reads them in this context; empty while torch is not imported."""
    config = sys.modules.get("torch._dynamo.config")
    if config is None:
        return {}
    return {name: getattr(config, name) for name in (*_SETTINGS, *_OLD_SETTINGS) if hasattr(config, name)}


def limit_name() -> str:
    """What this torch calls its recompile limit."""
    return "recompile_limit" if dp.capabilities().recompile_limit_names else "cache_size_limit"


def limit_errors() -> tuple[type[BaseException], ...]:
    """What this torch raises at a limit."""
    from torch._dynamo import exc

    names = ("FailOnRecompileLimitHit", "RecompileLimitExceeded", "FailOnCacheLimitHit", "CacheLimitExceeded")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


# -- what runs in a place -------------------------------------------------------------------------

#: One bool and one int of dynamo's and inductor's, with another value than torch's own.
SETTINGS: dict[str, int | bool] = {
    "dynamo.specialize_int": True,
    "inductor.max_autotune": True,
    "inductor.max_fusion_size": 17,
    "inductor.triton.unique_kernel_names": False,
}


def step(x: Any) -> Any:
    """The declared function; ``fresh`` copies it, so that every probe starts with no entries."""
    return x * 2 + 1


def fresh(function: Any = step) -> Any:
    """``function`` with a code object of its own under the same name."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def policy_of(entries: int, headroom: int = 2, **knobs: Any) -> dp.CompilePolicy:
    """A policy that declares so many shapes of ``step``."""
    buckets = {"places:step": [dp.ShapeBuckets(batch=tuple(range(2, 2 + entries)))]}
    return dp.CompilePolicy(buckets, eager_headroom=headroom, **{"settings": SETTINGS, **knobs})


class Seen(NamedTuple):
    """What a probe saw.

    Attributes:
        calls: backend calls so far, after each shape.
        equal: every result was that of eager.
        error: name of the exception that a shape raised, and ended the probe.
        settings: ``SETTINGS`` as torch's configuration reads them there.
        where: process and thread.
    """

    calls: list[int]
    equal: bool
    error: str | None
    settings: dict[str, Any]
    where: tuple[int, int]


def probe(shapes: int, function: Any = None, **keywords: Any) -> Seen:
    """Call a newly compiled function with so many shapes."""
    import torch

    function = fresh() if function is None else function
    backend, calls, equal = CountingBackend(), [], True
    compiled = torch.compile(function, backend=backend, dynamic=False, **keywords)
    error = None
    for size in range(2, 2 + shapes):
        x = torch.arange(float(size))
        try:
            equal = equal and torch.equal(compiled(x), function(x))
        except limit_errors() as caught:
            error = type(caught).__name__
            break
        calls.append(backend.calls)
    return Seen(calls, equal, error, settings_read(), (os.getpid(), threading.get_ident()))


def settings_read() -> dict[str, Any]:
    """``SETTINGS`` as this context reads them, the public way."""
    import torch._dynamo
    import torch._inductor.config

    modules = {"dynamo": torch._dynamo.config, "inductor": torch._inductor.config}
    return {
        name: functools.reduce(getattr, name.split(".")[1:], modules[name.split(".")[0]])  # type: ignore[arg-type]
        for name in SETTINGS
    }


def exactly(limit: int) -> list[int]:
    """``Seen.calls`` where the limit is ``limit`` and one shape more was tried: that one ran eager."""
    return [*range(1, limit + 1), limit]


def inside(policy: dp.CompilePolicy, shapes: int) -> tuple[Seen, Seen, Seen]:
    """Apply on another thread of this process: what this thread sees, a new one, and this one after restore."""
    with new_thread() as run, run(dp.apply_policy, policy):
        seen = probe(shapes), run(probe, shapes)
    return (*seen, probe(shapes))


def leave_patched() -> None:
    """Leave what torch's ``patch`` leaves: the values it found, as explicit overrides."""
    import torch._dynamo
    import torch._inductor.config

    with (
        torch._dynamo.config.patch({limit_name(): 5, "specialize_int": True}),
        torch._inductor.config.patch({"max_autotune": True, "max_fusion_size": 3, "triton.unique_kernel_names": False}),
    ):
        pass


def leave_keyword() -> None:
    """Leave what torch's own keyword leaves, where this torch has it."""
    keyword = {"recompile_limit": 5} if dp.capabilities().recompile_limit_keyword else {}
    probe(3, **keyword)


def first_policy(policy: dp.CompilePolicy, shapes: int) -> tuple[Seen, list[Seen], list[Seen]]:
    """The first policy of a process, applied on main after torch left overrides on main and on two threads.

    What main saw before, then what main and the threads see under the policy, and after it.
    """
    with thread_started_before() as one, thread_started_before() as two:
        before = probe(shapes)
        one(leave_keyword)
        two(leave_patched)
        leave_patched()
        with dp.apply_policy(policy):
            within = [probe(shapes), one(probe, shapes), two(probe, shapes)]
        after = [probe(shapes), one(probe, shapes), two(probe, shapes)]
    return before, within, after


# -- places in this process -------------------------------------------------------------------------


@contextlib.contextmanager
def main_thread(_policy: Any = None) -> Iterator[Run]:
    """Right here."""
    yield lambda body, *args: body(*args)


@contextlib.contextmanager
def new_thread(_policy: Any = None) -> Iterator[Run]:
    """A thread that starts for each call."""

    def run(body: Run, *args: Any) -> Any:
        future: Future[Any] = Future()
        thread = threading.Thread(target=_settle, args=(future, body, args))
        thread.start()
        thread.join()
        return future.result()

    yield run


def _settle(future: Future[Any], body: Run, args: tuple[Any, ...]) -> None:
    try:
        future.set_result(body(*args))
    except BaseException as error:
        future.set_exception(error)


@contextlib.contextmanager
def thread_started_before(_policy: Any = None) -> Iterator[Run]:
    """A thread that runs since before the policy."""
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        for job in iter(jobs.get, None):
            _settle(*job)

    def run(body: Run, *args: Any) -> Any:
        future: Future[Any] = Future()
        jobs.put((future, body, args))
        return future.result()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield run
    finally:
        jobs.put(None)
        thread.join()


@contextlib.contextmanager
def executor(_policy: Any = None) -> Iterator[Run]:
    """A ``ThreadPoolExecutor`` that nobody initializes."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda body, *args: pool.submit(body, *args).result()


@contextlib.contextmanager
def executor_with_initializer(policy: Any) -> Iterator[Run]:
    """A ``ThreadPoolExecutor`` whose initializer applies the policy once more."""
    with ThreadPoolExecutor(2, initializer=dp.apply_policy, initargs=(policy,)) as pool:
        yield lambda body, *args: pool.submit(body, *args).result()


@contextlib.contextmanager
def run_in_executor(_policy: Any = None) -> Iterator[Run]:
    """The executor of an asyncio loop."""

    async def hand_over(body: Run, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, body, *args)

    yield lambda body, *args: asyncio.run(hand_over(body, *args))


@contextlib.contextmanager
def to_thread(_policy: Any = None) -> Iterator[Run]:
    """``asyncio.to_thread``."""
    yield lambda body, *args: asyncio.run(asyncio.to_thread(body, *args))


@contextlib.contextmanager
def sibling_tasks() -> Iterator[tuple[Run, Run]]:
    """Two tasks of one loop, both started before the policy."""
    ready: Future[tuple[asyncio.AbstractEventLoop, list[asyncio.Queue[Any]]]] = Future()

    async def work(jobs: asyncio.Queue[Any]) -> None:
        while (job := await jobs.get()) is not None:
            _settle(*job)

    async def main() -> None:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
        tasks = [asyncio.create_task(work(jobs)) for jobs in queues]
        ready.set_result((asyncio.get_running_loop(), queues))
        await asyncio.gather(*tasks)

    def run(jobs: asyncio.Queue[Any], body: Run, *args: Any) -> Any:
        future: Future[Any] = Future()
        loop.call_soon_threadsafe(jobs.put_nowait, (future, body, args))
        return future.result()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, queues = ready.result()
    try:
        yield functools.partial(run, queues[0]), functools.partial(run, queues[1])
    finally:
        for jobs in queues:
            loop.call_soon_threadsafe(jobs.put_nowait, None)
        thread.join()


@contextlib.contextmanager
def task_started_before(_policy: Any = None) -> Iterator[Run]:
    """A task that waits since before the policy."""
    with sibling_tasks() as (run, _):
        yield run


@contextlib.contextmanager
def server(policy: Any) -> Iterator[Callable[[str, int], Seen]]:
    """A server over real sockets whose lifespan task applies the policy; a request is a probe.

    The client asks for a probe in the handler, or in an executor that the handler awaits.
    """
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def lifespan(started: asyncio.Event, stop: asyncio.Event) -> None:
        with dp.apply_policy(policy):
            started.set()
            await stop.wait()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where, shapes = (await reader.readline()).decode().split()
        if where == "handler":
            seen = probe(int(shapes))
        else:
            seen = await asyncio.get_running_loop().run_in_executor(None, probe, int(shapes))
        writer.write(pickle.dumps(seen))
        await writer.drain()
        writer.close()

    async def main() -> None:
        started, stop = asyncio.Event(), asyncio.Event()
        life = asyncio.create_task(lifespan(started, stop))
        await started.wait()
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
            ready.set_result((asyncio.get_running_loop(), stop, listening.sockets[0].getsockname()[1]))
            await life

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, stop, port = ready.result()

    def ask(where: str, shapes: int) -> Seen:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(f"{where} {shapes}\n".encode())
            with client.makefile("rb") as answer:
                seen: Seen = pickle.loads(answer.read())
                return seen

    try:
        yield ask
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextlib.contextmanager
def autograd_thread(_policy: Any = None) -> Iterator[Run]:
    """A thread of autograd's: its engine leaves the caller's thread in a backward nested over 60 deep."""
    import torch

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, depth: int, bottom: Callable[[], None]) -> Any:
            ctx.depth, ctx.bottom = depth, bottom
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if ctx.depth == 0:
                ctx.bottom()
            else:
                with torch.enable_grad():
                    x = torch.ones((), requires_grad=True)
                    torch.autograd.backward(Nested.apply(x, ctx.depth - 1, ctx.bottom))
            return grad, None, None

    def run(body: Run, *args: Any) -> Any:
        future: Future[Any] = Future()
        x = torch.ones((), requires_grad=True)
        Nested.apply(x, 70, lambda: _settle(future, body, args)).backward()
        return future.result()

    yield run


#: Places in this process, by name. Entering one compiles nothing.
PLACES = {
    place.__name__: place
    for place in (
        main_thread,
        new_thread,
        thread_started_before,
        executor,
        executor_with_initializer,
        run_in_executor,
        to_thread,
        task_started_before,
        autograd_thread,
    )
}


# -- places in other processes ------------------------------------------------------------------------


@contextlib.contextmanager
def process(method: str, policy: Any) -> Iterator[Run]:
    """One child of a ``ProcessPoolExecutor``. A fork child inherits; others are initialized, if with a policy."""
    more = {} if method == "fork" or policy is None else {"initializer": dp.apply_policy, "initargs": (policy,)}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method), **more) as pool:
        yield lambda body, *args: pool.submit(_in_child, body, args).result()


def _in_child(body: Run, args: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")
    compile_once()
    return body(*args)


class Job:
    """A data set whose only item is what a call returns."""

    def __init__(self, body: Run, args: tuple[Any, ...]) -> None:
        self.body, self.args = body, args

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return _in_child(self.body, self.args)


def as_it_is(item: Any) -> Any:
    """Collate nothing."""
    return item


@contextlib.contextmanager
def data_loader(method: str, policy: Any) -> Iterator[Run]:
    """A ``DataLoader`` worker with ``dp.initializer``."""
    from torch.utils.data import DataLoader

    def run(body: Run, *args: Any) -> Any:
        loader: Any = DataLoader(
            Job(body, args),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=1,
            collate_fn=as_it_is,
            worker_init_fn=dp.initializer(policy),
            multiprocessing_context=method,
        )
        return next(itertools.chain(loader))

    yield run


def end_policies() -> list[Any]:
    """End every policy in force, also those whose handle nobody kept, and give them: an initializer keeps none."""
    if "dynapolicy.holding" not in sys.modules:
        return []
    from dynapolicy import holding
    from dynapolicy.watch import unwatch

    left = holding.in_force()
    for one in left:
        one.layer.live = False
    unwatch()
    holding.process.standing.clear()
    if left:
        holding.process.settle(())
    return [one.policy for one in left]
