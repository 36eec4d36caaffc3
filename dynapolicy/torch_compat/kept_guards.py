"""Guards that torch drops in precompile mode, put back: in the process that compiles, and where it is loaded.

Torch drops those on functions, classes and enum members. Two instances of one module share a code object,
so without its guard what was compiled for one instance's ``self.act`` runs for the other's as well.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .stand_in import StandIn

__all__ = ["Describe", "Kept", "KeptGuards", "entry_of", "put_back"]

Describe = Callable[[Any], str]
_READ, _BUILD = "load_guards_state", "load_guard_manager"


def entry_of(guards_state: bytes | None) -> str:
    """What tells a cache entry from all others, in every process: a hash of the guards that torch saves with it."""
    return hashlib.sha256(guards_state).hexdigest()[:16] if guards_state else ""


class Kept:
    """One guard that is put back.

    Args:
        name: the expression.
        what: how what it must be is described; empty where only ``first`` itself will do.
        described: describes what an object does; empty where another one may look the same.
        first: what it is in the process that compiled.
    """

    def __init__(self, name: str, what: str, described: Describe, first: Any = None) -> None:
        self.name, self.what = name, what
        self._described, self._first = described, _weakly(first)
        # As torch does it with its own expressions. It comes from this process or from a checked bundle.
        self._look: Callable[[Any], Any] = eval(f"lambda L: {name}", {})  # noqa: S307
        #: Functions that are made anew for each instance are described once.
        self._good: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def roots(self) -> set[str]:
        """The arguments and cells that the expression starts from."""
        return set(re.findall(r"L\['(\w+)'\]", self.name))

    def wrong(self, scope: Mapping[str, Any]) -> str:
        """What it is instead of what it must be; nothing where it holds."""
        try:
            found = self._look(scope)
        except Exception:
            return "nothing"
        if found is not None and (found is self._first() or found is self._good.get(id(found))):
            return ""
        now = self._described(found)
        if not now or now != self.what:
            return now or "another object"
        with contextlib.suppress(TypeError):  # it can't be referred to weakly
            self._good[id(found)] = found
        return ""


def _weakly(value: Any) -> Callable[[], Any]:
    """A reference that keeps nobody's model alive, where there is one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def put_back(guard_manager: Any, kept: Sequence[Kept]) -> None:
    """Guard a cache entry with them again, after all of torch's own guards."""

    def holds(scope: Mapping[str, Any]) -> bool:
        return not any(one.wrong(scope) for one in kept)

    said = [" and ".join(f"{one.name} is {one.what}" for one in kept)]
    add = guard_manager.root.add_epilogue_lambda_guard
    try:
        add(holds, said, None)
    except TypeError:  # before torch 2.11
        add(holds, said)


class KeptGuards:
    """Puts guards back on what torch loads, until ``stop``."""

    def __init__(self) -> None:
        from torch._dynamo import package

        self._by_entry: defaultdict[str, list[Kept]] = defaultdict(list)
        self._stand_ins = [
            StandIn(package, _READ, _with_entry(vars(package)[_READ])),
            StandIn(package, _BUILD, self._put_back_on(vars(package)[_BUILD])),
        ]

    def add(self, entry: str, kept: Kept) -> None:
        """Put a guard back on a cache entry, once it is loaded."""
        self._by_entry[entry].append(kept)

    def stop(self) -> None:
        """Put no more back."""
        for one in self._stand_ins:
            one.stop()

    def misfit(self, fn: Any, found: Any) -> str:
        """Why none of the cache entries that were found is for the instance whose function it is.

        Nothing where one may be: arguments are known only in a call.
        """
        scope, own = _known(fn)
        roots = [code for code in found.dynamo.codes if _name(code.python_code) == own]
        wrong = [self._wrong(entry_of(one.guards_state), scope) for code in roots for one in code.guarded_codes]
        return wrong[0] if wrong and all(wrong) else ""

    def _wrong(self, entry: str, scope: dict[str, Any]) -> str:
        for one in self._by_entry.get(entry, ()):
            if one.roots <= scope.keys() and (now := one.wrong(scope)):
                return f"{one.name} was {one.what} and is {now}"
        return ""

    def _put_back_on(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def build_and_keep(state: Any, *args: Any, **kwargs: Any) -> Any:
            built = build(state, *args, **kwargs)
            if kept := self._by_entry.get(state.dynapolicy_entry):
                put_back(built, kept)
            return built

        return build_and_keep


def _with_entry(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    @functools.wraps(read)
    def read_with_entry(guards_state: bytes) -> Any:
        state = read(guards_state)
        state.dynapolicy_entry = entry_of(guards_state)
        return state

    return read_with_entry


def _known(fn: Any) -> tuple[dict[str, Any], tuple[str, int]]:
    """What is known of a function's arguments and cells before it is called, and what tells its code."""
    from torch._dynamo.eval_frame import innermost_fn

    inner: Any = innermost_fn(fn)
    inner = getattr(inner, "__func__", inner)
    code: types.CodeType = inner.__code__
    known = {}
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            known[name] = cell.cell_contents
    if inspect.ismethod(fn) and getattr(fn.__func__, "__code__", None) is code:
        known[code.co_varnames[0]] = fn.__self__
    return known, _name(code)


def _name(code: Any) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno
