"""The settings of torch's compile workers, held for the whole process."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from ..locks import lock
from .capabilities import capabilities
from .override import Layer, same
from .settings import Setting, find, touch

__all__ = ["Hold"]


class Hold:
    """Compile threads and start method, in force in every context of the process until released.

    Args:
        workers: compile threads.
        start: start method.
        by_hand: what policies in force ask for of the two; that wins, and is left alone.

    Attributes:
        values: what pools are made with.
    """

    def __init__(self, workers: int, start: str, by_hand: Mapping[str, Any]) -> None:
        planned = {"compile_threads": workers, "worker_start_method": start}
        self.values: dict[str, Any] = {**planned, **by_hand}
        self.notes = [
            f"inductor.{name}={value} of a policy in force wins over {planned[name]}"
            for name, value in by_hand.items()
            if value != planned[name]
        ]
        self._layer = Layer({}, of_process=True)
        self._found: dict[str, Any] = {}
        for name in planned.keys() - by_hand.keys():
            self._put(name)

    def change(self, workers: int) -> None:
        """Another number of compile threads."""
        self.values["compile_threads"] = workers
        self._put("compile_threads")

    def release(self) -> None:
        """What was there before, unless somebody set another value since."""
        with lock:
            self._layer.live = False
            for name, found in self._found.items():
                setting = _setting(name)
                if setting is None:
                    continue
                if not capabilities().process_lever:
                    if same(setting.read(), self.values[name]):
                        setting.write(found)
                elif same(setting.override().process, self.values[name]):
                    setting.override().process = found
                    touch(setting.module)
            self._found.clear()

    def beaten(self) -> list[str]:
        """Which of the values are not those that this context reads, in words."""
        read = {name: setting.read() for name in self._found if (setting := _setting(name)) is not None}
        return [
            f"inductor.{name} reads {value!r} here, not {self.values[name]!r}: somebody set it by hand"
            for name, value in read.items()
            if value != self.values[name]
        ]

    def run(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` in a context that reads these values, whatever this one holds."""
        if not capabilities().context_local_config:
            return make()

        def inside() -> Any:
            for name, value in self.values.items():
                setting = _setting(name)
                if setting is not None:
                    setting.write(value)
            return make()

        return contextvars.copy_context().run(inside)

    def _put(self, name: str) -> None:
        setting = _setting(name)
        if setting is None:
            return
        value = self.values[name]
        with lock:
            if not capabilities().process_lever:
                self._found.setdefault(name, setting.read())
                setting.write(value)
                return
            override = setting.override()
            self._found.setdefault(name, override.process)
            override.process = value
            own = override.own()
            if own is not override.unset and not same(own, value):
                override.push(self._layer)
            touch(setting.module)


def _setting(name: str) -> Setting | None:
    setting = find(f"inductor.{name}")
    # Torch 2.6 has the name of the start method, and None in it: it knows only one.
    return None if setting is None or setting.read() is None else setting
