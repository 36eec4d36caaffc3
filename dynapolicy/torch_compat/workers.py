"""Torch's compile workers: every private name of theirs, and each is looked for before it is used."""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..locks import lock
from ..processes import Family, end
from .capabilities import capabilities
from .override import Layer, same
from .settings import Setting, find, touch

__all__ = [
    "Hold",
    "Hook",
    "alive",
    "close_child_ends",
    "drop",
    "end_pool",
    "existing",
    "family",
    "forget_ready",
    "load_config",
    "load_rest",
    "load_torch",
    "load_workers",
    "mute",
    "own_ready",
    "problem",
    "quiesce",
    "ready_future",
    "request_ready",
    "size",
    "threads_only",
    "unmute",
]

_MODULE = "torch._inductor.async_compile"

#: Seconds that a pool may take to end by itself before it is killed.
_GRACE = 2.0


# -- imports, in the order in which a first compile does them ----------------------------------------


def load_torch() -> None:
    """Torch itself: every import of one of its modules waits for that anyway."""
    importlib.import_module("torch")


def load_config() -> None:
    """Torch's configuration."""
    for name in ("torch._dynamo", "torch._inductor.config"):
        importlib.import_module(name)


def load_workers() -> bool:
    """The module that keeps the pool; whether nobody had imported it. Torch 2.6 and 2.7 start the pool with it."""
    new = _MODULE not in sys.modules
    importlib.import_module(_MODULE)
    return new


def load_rest() -> None:
    """What a first compile imports besides, seconds of it."""
    importlib.import_module("torch._inductor.compile_fx")


def _home() -> Any:
    return sys.modules[_MODULE].AsyncCompile


def problem() -> str | None:
    """What this torch lacks, or None where its pool can be looked after."""
    home = getattr(sys.modules[_MODULE], "AsyncCompile", None)
    pool = getattr(home, "process_pool", None)
    for name in ("cache_clear", "cache_info"):
        if not hasattr(pool, name):
            return f"AsyncCompile.process_pool.{name} is missing"
    if not hasattr(home, "_get_ready"):
        return "AsyncCompile._get_ready is missing"
    return None


def threads_only() -> bool:
    """Torch 2.15 on free-threaded Python compiles on threads."""
    ask = getattr(_home(), "should_use_thread_workers", None)
    return ask is not None and bool(ask())


# -- settings ----------------------------------------------------------------------------------------


class Hold:
    """Compile threads and start method, in force in every context of the process until released."""

    def __init__(self, workers: int, start: str) -> None:
        self.values: dict[str, Any] = {"compile_threads": workers, "worker_start_method": start}
        self._layer = Layer({}, of_process=True)
        self._before: list[tuple[Setting, Any]] = []
        self._put()

    def change(self, workers: int) -> None:
        """Another number of compile threads."""
        self.values["compile_threads"] = workers
        self._put()

    def release(self) -> None:
        """What was there before."""
        with lock:
            self._layer.live = False
            for setting, found in self._before:
                if capabilities().process_lever:
                    setting.override().process = found
                    touch(setting.module)
                else:
                    setting.write(found)
            self._before.clear()

    def _put(self) -> None:
        with lock:
            first = not self._before
            for name, value in self.values.items():
                setting = find(f"inductor.{name}")
                # Torch 2.6 has the name of the start method, and None in it: it knows only one.
                if setting is None or setting.read() is None:
                    continue
                found = self._put_one(setting, value)
                if first:
                    self._before.append((setting, found))

    def _put_one(self, setting: Setting, value: Any) -> Any:
        if not capabilities().process_lever:
            found = setting.read()
            setting.write(value)
            return found
        override = setting.override()
        found, override.process = override.process, value
        own = override.own()
        if own is not override.unset and not same(own, value):
            override.push(self._layer)
        touch(setting.module)
        return found

    def run(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` in a context that reads these values, whatever this one holds."""
        if not capabilities().context_local_config:
            return make()

        def inside() -> Any:
            """In the copied context."""
            for name, value in self.values.items():
                setting = find(f"inductor.{name}")
                if setting is not None:
                    setting.write(value)
            return make()

        return contextvars.copy_context().run(inside)


# -- the place where torch keeps its pool ------------------------------------------------------------


class Hook:
    """Stands in for ``AsyncCompile.process_pool``: pools that torch makes by itself are made our way too."""

    def __init__(self, make: Callable[[Callable[[], Any]], Any]) -> None:
        self.original: Any = _home().process_pool
        self._make = make
        _home().process_pool = self

    def __call__(self) -> Any:
        """Torch's pool, made now if there is none."""
        return self.original() if self.original.cache_info().currsize else self._make(self.original)

    def cache_clear(self) -> None:
        """Torch forgets its pool, after a fork for one."""
        self.original.cache_clear()

    def cache_info(self) -> Any:
        """Whether torch has a pool."""
        return self.original.cache_info()

    def remove(self) -> None:
        """Put the original back, unless somebody else has taken the place since."""
        if _home().process_pool is self:
            _home().process_pool = staticmethod(self.original)


def existing() -> Any:
    """Torch's pool if there is one; starts none."""
    maker = _home().process_pool
    return maker() if maker.cache_info().currsize else None


def drop(pool: Any) -> None:
    """Torch forgets a pool, so that its next compile makes another."""
    pools = getattr(sys.modules[_MODULE], "_pool_set", None)
    if pools is not None:
        pools.discard(pool)
    if existing() is pool:
        _home().process_pool.cache_clear()
        forget_ready()


def forget_ready() -> None:
    """Torch asks anew whether its pool is ready."""
    if hasattr(_home(), "_ready_future"):
        _home()._ready_future = None


def request_ready() -> None:
    """Have the workers started, and torch told once they are: what its compiles look at."""
    ask = getattr(_home(), "use_process_pool", None)
    if ask is not None:
        ask()


def ready_future(pool: Any) -> Future[Any] | None:
    """Done once the workers have answered for the first time."""
    future: Future[Any] | None = getattr(_home(), "_ready_future", None) or getattr(pool, "ready_future", None)
    return future


def own_ready(pool: Any, submit: Callable[..., Future[Any]]) -> None:
    """Torch 2.6 and 2.7 ask when they make the pool; ask again in a way that survives its death."""
    if hasattr(pool, "ready_future"):
        pool.ready_future = submit(_home()._get_ready)


# -- one pool ----------------------------------------------------------------------------------------


def alive(pool: Any) -> bool:
    """Whether it can still answer. A system call, no waiting."""
    process = getattr(pool, "process", None)
    if process is not None:
        return process.poll() is None and bool(getattr(pool, "running", True))
    return not getattr(pool, "_broken", False) and not getattr(pool, "_shutdown_thread", False)


def _argument(pool: Any, name: str) -> int | None:
    for part in getattr(getattr(pool, "process", None), "args", ()):
        key, _, value = str(part).partition("=")
        if key == f"--{name}" and value.isdigit():
            return int(value)
    return None


def size(pool: Any) -> int | None:
    """How many workers it has, or None where that can't be told."""
    found = _argument(pool, "workers")
    return found if found is not None else getattr(pool, "_max_workers", None)


def family(pool: Any) -> Family:
    """Its processes."""
    process = getattr(pool, "process", None)
    if process is not None:
        return Family(tuple(str(part) for part in process.args), (process.pid,) if process.poll() is None else ())
    return Family((), tuple(getattr(pool, "_processes", None) or ()))


def close_child_ends(pool: Any) -> None:
    """Close this process's copies of the sidecar's ends of the pipes.

    Up to torch 2.13 they stay open, and then a full pipe to a dead sidecar blocks the compile for ever.
    """
    for name, ours in (("read-fd", "write_pipe"), ("write-fd", "read_pipe")):
        copy, pipe = _argument(pool, name), getattr(pool, ours, None)
        if copy is None or pipe is None:
            continue
        try:
            mine, theirs = os.fstat(pipe.fileno()), os.fstat(copy)
        except (OSError, ValueError):
            continue
        # The number may be another file's by now; both ends of one pipe have one inode.
        if stat.S_ISFIFO(theirs.st_mode) and mine.st_ino == theirs.st_ino and copy != pipe.fileno():
            os.close(copy)


_SIGNALS = ("wakeup", "quiesce")


def mute(pool: Any) -> None:
    """Let messages to a dead pool do nothing; torch would raise out of a compile."""
    for name in _SIGNALS:
        send = getattr(pool, name, None)
        if send is not None:
            setattr(pool, name, functools.partial(_send, pool, send))


def _send(pool: Any, send: Callable[[], object]) -> None:
    if not alive(pool):
        return
    try:
        send()
    except (RuntimeError, OSError, ValueError):
        if alive(pool):
            raise


def unmute(pool: Any) -> None:
    """Give a pool back as it was, ``submit`` included."""
    for name in (*_SIGNALS, "submit"):
        vars(pool).pop(name, None)


def quiesce(pool: Any) -> bool:
    """End the workers and keep what starts them again; False where this torch can't."""
    stop = getattr(pool, "quiesce", None)
    if stop is not None:
        stop()
    return stop is not None


def end_pool(pool: Any, timeout: float) -> bool:
    """End a pool and all its processes within ``timeout`` seconds, by force where need be; whether none is left."""
    processes = [*(getattr(pool, "_processes", None) or {}).values()]
    known = family(pool)
    # Torch waits up to 300 s for a busy pool, so that must not be waited for here.
    polite = threading.Thread(target=_shut, args=(pool,), name="dynapolicy-shutdown", daemon=True)
    polite.start()
    polite.join(min(_GRACE, timeout / 2))
    sidecar = getattr(pool, "process", None)
    first = () if sidecar is None else (sidecar.pid,)
    gone = end(lambda: known if sidecar is None else family(pool), timeout / 2, first=first)
    for process in [sidecar, *processes]:
        _reap(process)
    polite.join(0.5)
    return gone


def _shut(pool: Any) -> None:
    with suppress(Exception):  # a pool that died halfway; its processes are looked after
        if hasattr(pool, "process"):
            pool.shutdown()
        else:
            pool.shutdown(wait=False, cancel_futures=True)


def _reap(process: Any) -> None:
    wait = getattr(process, "wait", None) or getattr(process, "join", None)
    if wait is not None:
        with suppress(Exception):  # somebody else reaped it
            wait(0.5)
