"""What a dropped guard looked at, in words that are the same in every process."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import sys
import types
from typing import Any

from ..torch_compat.dropped_guards import Dropped

__all__ = ["Guard", "described", "looked_up", "told_apart", "written_down"]

Guard = dict[str, Any]

#: Told apart by torch's and Python's version, and rebound by nobody.
_SETTLED = ("torch", "builtins", "math", "operator", "_operator", "typing", "collections")
_NOTHING = object()


def written_down(dropped: Dropped) -> Guard | None:
    """The record of a dropped guard; None where torch's version says what it looked at."""
    scope = "__main__" if dropped.scope == "__mp_main__" else dropped.scope
    value, name = dropped.value, dropped.name
    if _settled(value) and (isinstance(value, types.ModuleType) or _reached_through_settled(name, scope)):
        return None
    return {
        "guard": dropped.kind,
        "name": name,
        "scope": scope,
        "object": described(value),
        "rebindable": name.startswith("G[") and not isinstance(value, types.ModuleType),
        # Only what can be told from another in the next process is put back there.
        "entry": dropped.entry if told_apart(value) else "",
    }


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


def told_apart(value: Any) -> str:
    """What an object is, where no other one is described the same; otherwise nothing."""
    what = described(value)
    return "" if what.startswith("instance of ") else what


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
    if isinstance(value, enum.Enum):
        return f"member {name}.{value.name or value.value}"
    return f"{'class' if isinstance(value, type) else 'instance of'} {name}"


def _function_hash(function: types.FunctionType) -> str:
    """Of what it does: its code, its defaults, and the functions that it closes over."""
    digest, seen, todo = hashlib.sha256(), set(), [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        digest.update(_code_hash(one.__code__).encode())
        digest.update(_written([*(one.__defaults__ or ()), *sorted((one.__kwdefaults__ or {}).items())]).encode())
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                inner = cell.cell_contents
                if isinstance(inner, types.FunctionType):
                    todo.append(inner)
                elif callable(inner):
                    digest.update(described(inner).encode())
    return digest.hexdigest()[:12]


def _written(value: Any) -> str:
    """A default, which older torch doesn't guard: plain values as they are, others by what they do."""
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_written, value))})"
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        return _code_hash(value.__code__)  # and no further: a function may be its own default
    plain = isinstance(value, (bool, int, float, complex, str, bytes, types.NoneType))
    return repr(value) if plain else described(value)


def _code_hash(code: types.CodeType) -> str:
    """Of what a function does: its bytecode, names and constants, nested functions included."""
    digest = hashlib.sha256(code.co_code)
    for one in code.co_consts:
        digest.update((_code_hash(one) if isinstance(one, types.CodeType) else repr(one)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()[:12]


def looked_up(guard: Guard) -> str | None:
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
