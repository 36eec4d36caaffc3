"""From anything one can compile to the code object that torch counts cache entries on.

Nothing here imports torch: torch's own wrappers are recognised by the attributes that they carry.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from .errors import TargetError

__all__ = ["Target", "code_named", "resolve"]

#: Code objects of targets that were declared in this process, by name and line. Policies keep names alone.
_declared: weakref.WeakValueDictionary[tuple[str, int], types.CodeType] = weakref.WeakValueDictionary()


@attrs.frozen
class Target:
    """What a target is called, and how torch counts it.

    Attributes:
        name: ``"module:qualname"``; a lambda's gains ``@line``.
        line: first line of the code object, 0 where only a name is known.
        shared: torch compiles this kind of target through one code object of its own, so that
            all such targets count together.
        code: the code object, where this process has it and it isn't the shared one.
    """

    name: str
    line: int
    shared: bool
    code: types.CodeType | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def named_with_line(self) -> str:
        """The name that stays apart from others of the same qualname."""
        return self.name if "@" in self.name or not self.line else f"{self.name}@{self.line}"


def resolve(target: Any) -> Target:
    """The code object that ``target`` counts on when it is given to ``torch.compile``.

    Source: ``torch._dynamo.eval_frame``; the same rules hold on torch 2.6 to 2.15, except that
    functions without a source file count on their own code since 2.13.

    Raises:
        TargetError: nothing that could be compiled.
    """
    if isinstance(target, str):
        return _by_name(target)
    function = _innermost(target)
    if isinstance(function, types.FunctionType):
        return _function(function)
    if not callable(function):
        rule = 'A target is a callable, a module, a class or "module:qualname"'
        raise TargetError("target", target, rule, "argument", "Declare the function that torch.compile gets")
    return Target(_name_of(function), 0, True)


def _by_name(text: str) -> Target:
    module, colon, qualname = text.partition(":")
    if not (module and colon and qualname):
        rule = 'A name is "module:qualname"'
        raise TargetError("target", text, rule, "argument", 'Write it like "package.module:Class.forward"')
    name = f"{_module_name(module)}:{qualname}"
    _, _, line = qualname.rpartition("@")
    return Target(name, int(line) if line.isdigit() else 0, module.split(".")[0] == "torch")


def _innermost(target: Any) -> Any:
    """Follow compiled wrappers, modules, classes and methods down to what torch gets to see."""
    for _ in range(32):
        inner = _one_step(target)
        if inner is target:
            break
        target = inner
    return target


def _one_step(target: Any) -> Any:
    fields = getattr(target, "__dict__", {})
    # A functools.wraps around a compiled function copies its attributes, but is another object; before
    # torch 2.11 there is no id, and torch itself follows the copy.
    if "_torchdynamo_orig_callable" in fields and fields.get("_torchdynamo_wrapper_id", id(target)) == id(target):
        return fields["_torchdynamo_orig_callable"]
    if isinstance(target, types.MethodType) and target.__name__ in ("_wrapped_call_impl", "_call_impl"):
        return target.__self__
    if isinstance(target, (staticmethod, classmethod, types.MethodType)):
        return target.__func__
    if isinstance(target, type):
        return _of_class(target)
    if "_modules" in fields:
        # A module's hooks run outside; what compiles is its forward.
        return fields["_modules"].get("_orig_mod") or target.forward
    return target


def _of_class(target: type) -> Any:
    if callable(getattr(target, "_call_impl", None)):
        return vars(target).get("forward") or getattr(target, "forward", target)
    return target.__dict__.get("__call__") or getattr(target, "__call__", target)  # noqa: B004


def _function(function: types.FunctionType) -> Target:
    code = function.__code__
    name = _name_of(function)
    if code.co_name == "<lambda>":
        name = f"{name}@{code.co_firstlineno}"
    if _compiled_through_torch(function):
        return Target(name, code.co_firstlineno, True)
    _declared[name, code.co_firstlineno] = code
    return Target(name, code.co_firstlineno, inspect.getsourcefile(function) is None, code)


def _compiled_through_torch(function: types.FunctionType) -> bool:
    """Torch traces no frame of its own, so it puts a shared one around its functions and decorators."""
    return str(function.__globals__.get("__name__", "")).split(".")[0] == "torch"


def _name_of(target: Any) -> str:
    while isinstance(target, functools.partial):
        target = _innermost(target.func)
    if not hasattr(target, "__qualname__"):
        cls = type(target)
        return f"{_module_name(cls.__module__)}:{cls.__qualname__}.__call__"
    return f"{_module_name(getattr(target, '__module__', None))}:{target.__qualname__}"


def _module_name(name: str | None) -> str:
    # A spawned child imports the parent's main module under another name.
    return "__main__" if name == "__mp_main__" else name or "builtins"


def code_named(name: str, line: int) -> types.CodeType | None:
    """The live code object of a declared name, or None where this process doesn't have it.

    Nothing is imported for it: a module that isn't there has compiled nothing.
    """
    known = _declared.get((name, line))
    if known is not None:
        return known
    for function in _functions_named(name):
        target = resolve(function)
        if target.code is not None and line in (0, target.line):
            return target.code
    return None


def _functions_named(name: str) -> Iterator[Callable[..., Any]]:
    module_name, _, qualname = name.partition(":")
    aliases = ("__main__", "__mp_main__") if module_name == "__main__" else (module_name,)
    for alias in aliases:
        found: Any = sys.modules.get(alias)
        for part in qualname.partition("@")[0].split("."):
            found = getattr(found, part, None)
        if callable(found):
            yield found
