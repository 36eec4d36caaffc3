"""``recover``: an exhausted code object compiles again."""

from __future__ import annotations

import types
from typing import Any

from ..apply import current_policy
from ..compiled import compiled
from ..errors import RecoverError
from ..locks import lock
from ..targets import code_named, resolve
from ..torch_compat.codes import forget, in_compiled_call, resume_functions
from ..torch_compat.entries import shared_code
from ..watch import forget_hits

__all__ = ["recover"]


def recover(target: Any) -> tuple[str, ...]:
    """Make an exhausted code object compile again, under the limits of today.

    Its cache entries are dropped, and those of its resume functions; each shape compiles anew. All other
    code objects keep theirs.

    Returns:
        The names of everything that counts on that code object and was reset with it, as all
        ``functools.partial`` objects do.

    Raises:
        RecoverError: inside a compiled call, or nothing in this process has that name.
        TargetError: ``target`` is nothing that could be compiled.
    """
    if in_compiled_call():
        rule = "A compiled call is running on this thread, and its own entries would be dropped under it"
        raise RecoverError("recover", repr(target), rule, "argument", "Call recover() between calls of compiled code")
    what = resolve(target)
    code = what.code or (shared_code() if what.shared else code_named(what.name, what.line))
    if code is None:
        rule = "This process has no function of that name"
        raise RecoverError(what.name, repr(target), rule, "argument", "Import its module, or pass the function itself")
    with lock:
        for one in (*resume_functions(code), code):
            forget(one)
            forget_hits(one)
    return tuple(sorted({what.name, *_names_on(code)}))


def _names_on(code: types.CodeType) -> list[str]:
    policy = current_policy()
    declared = [one.name for one in policy.declarations if one.shared] if policy is not None else []
    shared = declared if code is shared_code() else []
    return [*shared, *(one.target.name for one in compiled() if one.code is code)]
