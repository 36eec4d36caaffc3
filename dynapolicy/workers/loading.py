"""Loading torch's compiler in the background, step by step, so that nobody waits long for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from ..no_fork import no_fork
from ..torch_compat import worker_home as home
from .imports import gate, others_compile

__all__ = ["Loader"]


class Loader:
    """Loads what a first compile needs, in the order in which that does it."""

    def __init__(self) -> None:
        # The program compiles already, and two threads share one interpreter: it is as fast by itself.
        self._helps = not any(name in sys.modules for name in ("torch._dynamo", "torch._inductor"))
        self._found_pool = home.existing() is not None
        gate.put_up()

    def configuration(self) -> None:
        """Torch and its settings; whoever needs torch alone waits for no more than that."""
        with gate.step(), no_fork():
            importlib.import_module("torch")
        with gate.step(polite=True), no_fork():
            for name in home.CONFIGURATION:
                importlib.import_module(name)

    def pools(self) -> bool:
        """The module that keeps the pool; whether there is one that was started since, by that import or by others."""
        with gate.step(), no_fork():
            importlib.import_module(home.HOME)
            return home.existing() is not None and not self._found_pool

    def compiler(self, stopping: Callable[[], bool]) -> None:
        """The rest, seconds of it, as long as nobody else gets to it."""
        for name in home.COMPILER:
            if not self._helps or stopping() or others_compile():
                return
            with gate.step(polite=True) as somebody_waits, no_fork():
                importlib.import_module(name)
                self._helps = not somebody_waits()

    def end(self) -> None:
        """Nothing more is loaded."""
        gate.take_down()
