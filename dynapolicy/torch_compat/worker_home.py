"""The place where torch keeps its pool of compile workers; every private name is looked for before it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = [
    "COMPILER",
    "CONFIGURATION",
    "HOME",
    "Hook",
    "drop",
    "existing",
    "forget_ready",
    "problem",
    "ready_future",
    "request_ready",
    "share_ptxas",
    "threads_only",
]

#: What a first compile imports, in its order: configuration; the pool's module, with which torch 2.6 and 2.7
#: start the pool; and the rest, seconds of it.
CONFIGURATION = ("torch._dynamo", "torch._inductor.config")
HOME = "torch._inductor.async_compile"
COMPILER = ("torch._inductor.graph", "torch._inductor.compile_fx")
_TASKS = "torch._inductor.runtime.compile_tasks"


def _home() -> Any:
    return sys.modules[HOME].AsyncCompile


def problem() -> str | None:
    """What this torch lacks, or None where its pool can be looked after."""
    home = getattr(sys.modules[HOME], "AsyncCompile", None)
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
    maker: Any = getattr(getattr(sys.modules.get(HOME), "AsyncCompile", None), "process_pool", None)
    return maker() if hasattr(maker, "cache_info") and maker.cache_info().currsize else None


def drop(pool: Any) -> None:
    """Torch forgets a pool, so that its next compile makes another."""
    pools = getattr(sys.modules[HOME], "_pool_set", None)
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
    # Of an instance: torch 2.7 knows it as a plain method.
    ask = getattr(_home()(), "use_process_pool", None)
    if ask is not None:
        ask()


def share_ptxas() -> None:
    """Have this process compile with the assembler that its workers take.

    Its version is a part of a kernel's name in Triton's cache. The workers of a torch that brings a ptxas of
    its own take that; a program that hasn't compiled a kernel by itself took Triton's, found nothing of what
    they had compiled for autotuning, and compiled each choice again, one after the other.
    """
    choose = getattr(sys.modules.get(_TASKS), "_set_triton_ptxas_path", None)
    if choose is not None:
        choose()


def ready_future(pool: Any) -> Future[Any] | None:
    """Done once the workers have answered for the first time."""
    future: Future[Any] | None = getattr(_home(), "_ready_future", None) or getattr(pool, "ready_future", None)
    return future
