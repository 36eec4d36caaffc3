"""Torch's ``caching_precompile``: what it takes from its cache whole, and where it can't be used."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .artifacts import no_compile
from .settings import find
from .stand_in import StandIn

__all__ = ["Packages", "lacking", "recompile_after_hit_raises"]

#: Known-bad ranges, where no probe can tell. With a hit, the next recompile raises an AssertionError.
_RECOMPILE_RAISES = SpecifierSet(">=2.10,<2.15", prereleases=True)
_BUILD = "load_guard_manager"


def lacking() -> str:
    """Why this torch can't precompile, or nothing."""
    import torch

    if find("dynamo.caching_precompile") is None or not _saves():
        return f"torch {torch.__version__} can't precompile modules: it needs 2.10 or later"
    return ""


def _saves() -> bool:
    try:
        from torch._dynamo.precompile_context import PrecompileContext
    except ImportError:
        return False
    return hasattr(PrecompileContext, "save_to_dynamo_cache")


def recompile_after_hit_raises() -> bool:
    """Whether a function that came from the cache can't be compiled for another shape."""
    import torch

    return Version(torch.__version__).base_version in _RECOMPILE_RAISES


class Packages:
    """Watches which functions torch looks up, and lets it build loaded guards once, until ``stop``.

    Attributes:
        graphs: graphs in the packages that were found.

    Args:
        collides: called with the name of a second function that torch can't tell from a first.
    """

    def __init__(self, collides: Callable[[str], None]) -> None:
        from torch._dynamo import package
        from torch._dynamo.eval_frame import innermost_fn

        self.graphs = 0
        cache: Any = vars(package)["DiskDynamoCache"]
        original: Any = cache.load
        seen: dict[tuple[str, int], types.CodeType] = {}

        def load(cache: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            code = getattr(innermost_fn(fn), "__code__", None)
            if code is not None:
                first = seen.setdefault((innermost_fn(fn).__qualname__, code.co_firstlineno), code)
                if (first, first.co_filename) != (code, code.co_filename):
                    collides(f"{innermost_fn(fn).__qualname__} in {first.co_filename} and in {code.co_filename}")
            found = original(cache, fn, *args, **kwargs)
            self.graphs += len(getattr(found, "backends", None) or ())
            return found

        self._stand_ins = [StandIn(cache, "load", load)]
        build = vars(package).get(_BUILD)
        if build is not None:
            self._stand_ins.append(StandIn(package, _BUILD, _without_filter(build)))

    def stop(self) -> None:
        """Watch no longer."""
        for one in self._stand_ins:
            one.stop()


def _without_filter(build: Callable[..., Any]) -> Callable[..., Any]:
    """Torch builds loaded guards twice, to drop again what it dropped before it saved them."""

    @functools.wraps(build)
    def built_once(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo

        # The lock: before torch 2.12 the setting is every thread's, and another may just trace.
        with no_compile(), torch._dynamo.config.patch(caching_precompile=False):
            return build(*args, **kwargs)

    return built_once
