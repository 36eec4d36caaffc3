"""What torch traced, watched while it compiles."""

from __future__ import annotations

import functools
import types
from typing import Any

from .stand_in import StandIn

__all__ = ["TracedCode"]


class TracedCode:
    """Collects every code object that torch traces, inlined ones included, until ``stop``."""

    def __init__(self) -> None:
        from torch._dynamo import symbolic_convert

        self.codes: dict[types.CodeType, str] = {}
        translator: Any = vars(symbolic_convert)["InstructionTranslatorBase"]
        original: Any = translator.run
        codes = self.codes

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            codes[self.f_code] = str(self.f_globals.get("__name__", ""))
            return original(self, *args, **kwargs)

        self._stand_in = StandIn(translator, "run", run)

    def stop(self) -> None:
        """Watch no longer; somebody who wrapped it since keeps their wrapper."""
        self._stand_in.stop()
