"""Stopping compilation for the whole process, with torch's ``set_stance`` behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Stop", "can_name_frames"]

Explain = Callable[[Any], Exception]


class Stop:
    """Nothing compiles from the constructor until ``end``.

    Args:
        explain: makes the error for a frame that would compile; None lets it run eager.
    """

    def __init__(self, explain: Explain | None) -> None:
        import torch

        self._unpatch = _explained(explain) if explain is not None else _nothing
        try:
            self._stance = torch.compiler.set_stance("eager_on_recompile" if explain is None else "fail_on_recompile")
        except BaseException:
            self._unpatch()
            raise

    def end(self) -> None:
        """Compile again, as before."""
        self._unpatch()
        self._stance.__exit__(None, None, None)


def _nothing() -> None:
    """Nothing was patched."""


def can_name_frames() -> bool:
    """Whether the frame that would compile can be seen: a private function of torch's, on 2.6 to 2.15."""
    from torch._dynamo import eval_frame

    return hasattr(eval_frame, "_callback_from_stance")


def _explained(explain: Explain) -> Callable[[], None]:
    """Let torch's refusal name function and shapes, which older releases don't."""
    from torch._C._dynamo import eval_frame as in_c
    from torch._dynamo import eval_frame

    if not can_name_frames():
        return _nothing
    before = eval_frame._callback_from_stance

    def from_stance(callback: Any) -> Any:
        refuse: Any = before(callback)
        if refuse in (callback, False, None):
            return refuse

        def refuse_with_names(frame: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return refuse(frame, *args, **kwargs)
            except RuntimeError as error:
                raise explain(frame) from error

        # Torch compares these to find the entries of the wrapper's own backend.
        refuse_with_names.__dict__.update(refuse.__dict__)
        return refuse_with_names

    # Torch calls it inside of compiled calls, and old releases would take it for a frame to compile.
    getattr(in_c, "skip_code", id)(from_stance.__code__)
    eval_frame._callback_from_stance = from_stance

    def unpatch() -> None:
        eval_frame._callback_from_stance = before

    return unpatch
