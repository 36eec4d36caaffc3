"""Torch's ``caching_precompile``: what it takes from its cache whole, and where it can't be used."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
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
#: What several packages of one code object have in common.
_COMMON = ("_codes", "_source_info", "_resume_codes")


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
    """Watches which functions torch looks up, and spares it what it would do twice, until ``stop``.

    Torch takes a function's package anew for every instance of a module whose ``forward`` it is, though what
    it installs belongs to the code object, which the instances share. Here it is taken once.

    Attributes:
        graphs: graphs in the packages that were found.

    Args:
        collides: called with the name of a second function that torch can't tell from a first.
        leave_out: called with a function, what was found for it, and whether nothing was installed yet;
            whether not to take it.
        broken: called with a function that torch can't load, and torch's error. It must call ``forget``.
    """

    def __init__(
        self,
        collides: Callable[[str], None],
        leave_out: Callable[[Any, Any, bool], bool],
        broken: Callable[[Any, Exception], None],
    ) -> None:
        from torch._dynamo import package

        self.graphs = 0
        self._collides, self._leave_out, self._broken = collides, leave_out, broken
        self._given_up = False
        self._seen: dict[tuple[str, int], types.CodeType] = {}
        #: What was found for a code object, and the code objects that it was installed for.
        self._found: dict[types.CodeType, Any] = {}
        self._installed: dict[types.CodeType, list[types.CodeType]] = {}
        #: The first package of a code object.
        self._first: dict[types.CodeType, Any] = {}
        #: Those that hold what was found, and the globals that installing left in their modules.
        self._packages: list[Any] = []
        self._globals: list[tuple[dict[str, Any], str]] = []
        cache: Any = vars(package)["DiskDynamoCache"]
        taker: Any = vars(package)["CompilePackage"]
        self._stand_ins = [
            StandIn(cache, "load", self._once(cache.load)),
            StandIn(taker, "install", self._unless_in_force(taker.install)),
            StandIn(taker, "initialize", self._with_the_first(taker.initialize)),
            StandIn(package, _BUILD, _without_filter(vars(package)[_BUILD])),
        ]

    def stop(self) -> None:
        """Watch no longer."""
        for one in self._stand_ins:
            one.stop()
        self._found.clear()
        self._first.clear()
        self._packages.clear()

    def forget(self) -> None:
        """Take out of force what was installed, so that it is neither called nor saved again; torch's reset doesn't."""
        from torch._C._dynamo import eval_frame

        reset: Any = getattr(eval_frame, "_reset_precompile_entries", None)
        codes = {code for codes in self._installed.values() for code in codes}
        for package in self._packages:
            codes.update(_codes_of(package))  # it may be installed in part
        for code in codes if reset is not None else ():
            reset(code)
        self._given_up, self.graphs = True, 0
        self._first.clear()
        for package in self._packages:
            # Packages of one module share names there, and torch's own uninstall fails where one is gone already.
            self._globals += [(vars(scope), name) for scope, names in _installed(package).items() for name in names]
            _installed(package).clear()
            package.uninstall()
            # As if nothing had been found for it.
            type(package).__init__(package, package._innermost_fn)
        for scope, name in self._globals:
            scope.pop(name, None)
        self._found.clear()
        self._installed.clear()
        self._packages.clear()

    def _once(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_once(cache: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            code = self._told_apart(fn)
            if code is not None and self._in_force(code):
                return self._found[code]
            if code in self._first and code not in self._found:
                # What this process compiled and saved itself meanwhile, it has.
                return None
            try:
                with no_compile():  # nor does it save meanwhile
                    found = load(cache, fn, *args, **kwargs)
            except Exception as error:  # whatever torch has against its own file
                self._broken(fn, error)
                return None
            if found is None or self._given_up or self._leave_out(fn, found, not self._packages):
                return None
            self.graphs += len(getattr(found, "backends", None) or ())
            if code is not None:
                self._found[code] = found
                self._installed.pop(code, None)
            return found

        return load_once

    def _unless_in_force(self, install: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(install)
        def install_once(package: Any, backends: Any, *args: Any, **kwargs: Any) -> Any:
            code = next((code for code, found in self._found.items() if found.backends is backends), None)
            self._packages.append(package)
            if code is not None and self._in_force(code):
                return
            scopes = [(scope, set(scope)) for scope in _scopes_of(package)]
            failed = None
            try:
                install(package, backends, *args, **kwargs)
            except Exception as error:  # whatever torch can't make of it
                failed = error
            self._globals += [(scope, name) for scope, before in scopes for name in scope.keys() - before]
            if failed is not None:
                self._broken(package._innermost_fn, failed)
                return
            if code is not None:
                self._installed[code] = [one for one in _codes_of(package) if _entries(one)]

        return install_once

    def _with_the_first(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Torch saves the last package of a code object: what other instances compiled must be in it."""

        @functools.wraps(initialize)
        def initialize_with_first(package: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
            initialize(package, fn, *args, **kwargs)
            first = self._first.setdefault(package._innermost_fn.__code__, package)
            for name in _COMMON:
                setattr(package, name, getattr(first, name))

        return initialize_with_first

    def _in_force(self, code: types.CodeType) -> bool:
        """Whether the package was installed, and nobody has reset torch since."""
        installed = self._installed.get(code, [])
        return bool(installed) and code in self._found and all(map(_entries, installed))

    def _told_apart(self, fn: Any) -> types.CodeType | None:
        """The code object of a function, which no other that was looked up is mixed up with."""
        from torch._dynamo.eval_frame import innermost_fn

        code: types.CodeType | None = getattr(innermost_fn(fn), "__code__", None)
        if code is not None:
            name = innermost_fn(fn).__qualname__
            first = self._seen.setdefault((name, code.co_firstlineno), code)
            if (first, first.co_filename) != (code, code.co_filename):
                self._collides(f"{name} in {first.co_filename} and in {code.co_filename}")
        return code


def _scopes_of(package: Any) -> list[dict[str, Any]]:
    """The globals of the modules whose functions a package holds."""
    names = {getattr(entry, "python_module", "") for entry in dict(getattr(package, "_codes", ())).values()}
    return [vars(sys.modules[name]) for name in names if name in sys.modules]


def _installed(package: Any) -> dict[types.ModuleType, list[str]]:
    """The names that a package has put into modules."""
    names: dict[types.ModuleType, list[str]] = getattr(package, "_installed_globals", {})
    return names


def _codes_of(package: Any) -> Iterator[types.CodeType]:
    """The code objects that a package holds entries for; none where torch keeps them in another way."""
    from torch._dynamo import package as module

    lookup: Any = getattr(module, "_lookup_code", None)
    for code, entry in dict(getattr(package, "_codes", ())).items():
        yield lookup(entry) if lookup is not None and getattr(entry, "code_source", None) else code


def _entries(code: types.CodeType) -> Any:
    """What is installed for a code object; nothing where torch doesn't tell."""
    from torch._C._dynamo import eval_frame

    entries: Any = getattr(eval_frame, "_debug_get_precompile_entries", None)
    return entries(code) if entries is not None else ()


def _without_filter(build: Callable[..., Any]) -> Callable[..., Any]:
    """Torch builds loaded guards twice, to drop again what it dropped before it saved them."""

    @functools.wraps(build)
    def built_once(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo

        # The lock: before torch 2.12 the setting is every thread's, and another may just trace.
        with no_compile(), torch._dynamo.config.patch(caching_precompile=False):
            return build(*args, **kwargs)

    return built_once
