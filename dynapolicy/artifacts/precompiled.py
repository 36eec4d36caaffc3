"""Precompile mode: tracing is skipped as well, and torch drops guards for it.

A dropped guard is a thing that torch no longer looks at: a function, a module, a closure. What can be
said about it is written down when it is dropped and held against what is there when it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..errors import ArtifactError, ArtifactRefused, ArtifactWarning, RestoreError, warn
from ..torch_compat import precompile
from ..torch_compat.artifacts import CacheCounts, Held
from ..torch_compat.tracing import DroppedGuards

__all__ = ["NoPrecompile", "Precompile", "begin", "described"]

Guard = dict[str, Any]

#: Told apart by torch's and Python's version, and rebound by nobody.
_SETTLED = ("torch", "builtins", "math", "operator", "_operator", "typing", "collections")


class NoPrecompile:
    """The default mode, or precompile mode where torch can't: nothing is watched."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.note = ""

    def abandon(self) -> None:
        """Nothing to take back."""

    def check(self, guards: Sequence[Guard]) -> None:
        """Nothing was dropped."""

    def loaded(self, guards: Sequence[Guard]) -> None:
        """Nothing to say."""

    def guards(self, before: Sequence[Guard]) -> tuple[Guard, ...]:
        """None are dropped."""
        return tuple(before)

    def graphs(self, counted: CacheCounts) -> int:  # noqa: ARG002 - precompile mode uses it
        """Nothing is taken whole."""
        return 0

    def stop(self) -> None:
        """Nothing was changed."""


class Precompile(NoPrecompile):
    """Precompile mode."""

    #: Torch keeps one package per function.
    kinds = frozenset({"precompile"})

    def __init__(self) -> None:
        super().__init__()
        self._frozen: Any = None
        self._undo = contextlib.ExitStack()
        self._undo.callback(Held("dynamo.caching_precompile", True).restore)
        self._dropped = DroppedGuards()
        self._undo.callback(self._dropped.stop)
        self._packages = precompile.Packages(_refuse_collision)
        self._undo.callback(self._packages.stop)

    def check(self, guards: Sequence[Guard]) -> None:
        """Hold what was written down against what is there.

        Raises:
            ArtifactRefused: something that no guard looks at any more is not what it was.
        """
        for guard in guards:
            now = _looked_up(guard)
            what = f"{guard['name']} in {guard['scope']}"
            if now is None:
                raise ArtifactRefused(
                    f"{what} was {guard['object']}: torch drops its guard in precompile mode, and what it is now can't "
                    "be known before the first call. Make it a global, or use the default mode"
                )
            if now != guard["object"]:
                raise ArtifactRefused(f"{what}: {guard['object']} -> {now}")

    def loaded(self, guards: Sequence[Guard]) -> None:
        """Say what nobody guards any more; where torch can't recompile after a hit, freeze."""
        names = sorted({f"{one['scope']}: {one['name']}" for one in guards if one["rebindable"]})
        if names:
            warn(
                "Torch dropped the guards on these for precompile mode: rebinding one while the program runs gives "
                f"wrong results: {', '.join(names)}.",
                ArtifactWarning,
                once=("guards", *names),
                stacklevel=5,
            )
        if precompile.recompile_after_hit_raises():
            self._freeze()

    def _freeze(self) -> None:
        """It outlasts the warm start, as what torch can't do does."""
        from ..actions.freezing import freeze

        self._frozen = freeze()
        self.note = "compilation is frozen, because this torch can't compile after it: other shapes run eager"
        warn(
            "This torch can't compile a function for another shape once it came from precompiled artifacts: "
            "compilation is frozen for the process, and what is not among the artifacts runs eager.",
            ArtifactWarning,
            once="frozen",
            stacklevel=6,
        )

    def abandon(self) -> None:
        """What was loaded is not used after all: compile again."""
        if self._frozen is not None:
            # Somebody's own freeze on top stays, and this one below it.
            with contextlib.suppress(RestoreError):
                self._frozen.restore()
        self._frozen, self.note = None, ""
        self._packages.forget()

    def guards(self, before: Sequence[Guard]) -> tuple[Guard, ...]:
        """What was dropped so far, and before."""
        found = [one for dropped in list(self._dropped.found) if (one := _written_down(*dropped))]
        # What was compiled now stands in the place of what was there, and so does what it looked at.
        anew = {(one["scope"], one["name"]) for one in found}
        kept = [one for one in before if (one["scope"], one["name"]) not in anew]
        return tuple({(one["scope"], one["name"], one["object"]): one for one in (*kept, *found)}.values())

    def graphs(self, counted: CacheCounts) -> int:
        """Graphs that came with their functions, and were not traced again."""
        # A function whose source changed is traced again, although torch counts a hit.
        return max(self._packages.graphs - counted.misses, 0) if counted.packages else 0

    def stop(self) -> None:
        """Put everything back."""
        self._undo.close()


def begin(mode: str) -> NoPrecompile:
    """Put a mode in force."""
    if mode != "precompile":
        return NoPrecompile()
    lacking = precompile.lacking()
    return NoPrecompile(f'mode="precompile": {lacking}') if lacking else Precompile()


def _refuse_collision(name: str) -> None:
    rule = "Torch names a precompiled function after its qualname and first line, and would mix the two up"
    raise ArtifactError('mode="precompile"', name, rule, "torch.compile", "Rename or move one, or use the default mode")


# -- what a guard looked at --------------------------------------------------------------------------


def _written_down(kind: str, name: str, scope: str, value: Any) -> Guard | None:
    scope = "__main__" if scope == "__mp_main__" else scope
    if _settled(value) and (isinstance(value, types.ModuleType) or _reached_through_settled(name, scope)):
        return None
    rebindable = name.startswith("G[") and not isinstance(value, types.ModuleType)
    return {"guard": kind, "name": name, "scope": scope, "object": described(value), "rebindable": rebindable}


def _reached_through_settled(name: str, scope: str) -> bool:
    """Whether the way to it leads through a module of torch's own, and not through a name of the program's."""
    root, _, rest = name.removeprefix("G['").partition("']")
    found = vars(sys.modules[scope]).get(root) if scope in sys.modules else None
    through_module = isinstance(found, types.ModuleType) and _settled(found) and rest != ""
    return name.startswith("G['") and (through_module or root.startswith("__"))


def _settled(value: Any) -> bool:
    """Whether it is of torch or Python, and so told apart by their versions."""
    return _module_of(value).split(".", 1)[0] in _SETTLED


def _module_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(getattr(named, "__module__", None) or "builtins")


def described(value: Any) -> str:
    """What an object is, the same in every process."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.MethodType):
        value = value.__func__
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{_module_of(value).replace('__mp_main__', '__main__')}:{named.__qualname__}"
    if isinstance(value, types.FunctionType):
        return f"function {name} {_function_hash(value)}"
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return f"builtin {name}"
    return f"{'class' if isinstance(value, type) else 'instance of'} {name}"


def _function_hash(function: types.FunctionType) -> str:
    """Of what it does: its code, and the functions that it closes over."""
    digest, seen, todo = hashlib.sha256(), set(), [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        digest.update(_code_hash(one.__code__).encode())
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                inner = cell.cell_contents
                if isinstance(inner, types.FunctionType):
                    todo.append(inner)
                elif callable(inner):
                    digest.update(described(inner).encode())
    return digest.hexdigest()[:12]


def _code_hash(code: types.CodeType) -> str:
    """Of what a function does: its bytecode, names and constants, nested functions included."""
    digest = hashlib.sha256(code.co_code)
    for one in code.co_consts:
        digest.update((_code_hash(one) if isinstance(one, types.CodeType) else repr(one)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()[:12]


def _looked_up(guard: Guard) -> str | None:
    """What the guard's expression is now; None where it can't be known without running something."""
    module = sys.modules.get(str(guard["scope"]))
    name, _, rest = str(guard["name"]).partition("']")
    if module is None or not name.startswith("G['"):
        return None
    found: Any = vars(module).get(name[3:], _NOTHING)
    for part in rest.removeprefix(".").split(".") if rest else ():
        if not part.isidentifier():
            return None
        found = getattr(found, part, _NOTHING)
    return "nothing" if found is _NOTHING else described(found)


_NOTHING = object()
