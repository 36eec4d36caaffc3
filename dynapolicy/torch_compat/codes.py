"""Code objects that torch met: their resume functions, and making torch forget one of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

__all__ = ["forget", "in_compiled_call", "met", "outcomes", "resume_functions", "resumed"]


def met() -> list[types.CodeType]:
    """Live code objects that torch was asked to compile. Source: ``convert_frame.input_codes``."""
    from torch._dynamo import convert_frame

    found = (ref() for ref in list(convert_frame.input_codes.seen))
    return [code for code in found if isinstance(code, types.CodeType)]


def resumed(code: types.CodeType) -> types.CodeType:
    """The function that a resume function goes on with after a graph break; ``code`` itself for any other."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    known = ContinueExecutionCache.generated_code_metadata
    while code in known:
        code = known[code].code
    return code


def resume_functions(code: types.CodeType) -> list[types.CodeType]:
    """Code objects that torch made to go on after graph breaks of ``code``."""
    return [one for one in met() if one is not code and resumed(one) is code]


def outcomes(code: types.CodeType) -> list[types.CodeType]:
    """What torch made of ``code``, one code object for each cache entry; they die with their entry."""
    from torch._dynamo import eval_frame

    return [entry.code for entry in eval_frame._debug_get_cache_entry_list(code)]


def forget(code: types.CodeType) -> None:
    """Drop the cache entries of one code object; it compiles again, also after it hit a limit."""
    from torch._dynamo import eval_frame

    eval_frame.reset_code(code)  # type: ignore[attr-defined]


def in_compiled_call() -> bool:
    """Whether this thread is inside a call of compiled code, or torch is tracing the caller."""
    import torch
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.utils import orig_code_map

    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        return True
    return any(frame.f_code in orig_code_map for frame in _frames())


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
