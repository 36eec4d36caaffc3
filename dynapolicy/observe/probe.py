"""What ``doctor`` runs in each place: compile a throwaway function, and read what the place sees.

Spawned children import this module by name, so everything that travels is module-level.
"""

from __future__ import annotations

import itertools
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from ..errors import DynapolicyWarning
from ..torch_compat.capabilities import capabilities
from ..torch_compat.codes import forget
from ..torch_compat.hits import LOGGER, limit_errors
from ..torch_compat.settings import find, limit_names

__all__ = ["Seen", "Setup", "probe", "probe_in_child", "quiet"]

_NAME = "dynapolicy_probe"
_number = itertools.count()


@attrs.frozen
class Seen:
    """What one place showed.

    Attributes:
        limit: the recompile limit that it reads, in entries.
        compiled: how many of the tried shapes compiled.
    """

    limit: int
    compiled: int


def probe(shapes: int) -> Seen:
    """Try ``shapes`` shapes of a function that nobody else has, here and now."""
    import torch

    setting = find(limit_names(capabilities())[0])
    limit = int(setting.read()) if setting is not None else 0
    calls: list[None] = []

    def backend(graph: Any, _inputs: list[Any]) -> Callable[..., Any]:
        calls.append(None)
        forward: Callable[..., Any] = graph.forward
        return forward

    function = _fresh()
    step = torch.compile(function, backend=backend, dynamic=False)
    try:
        for size in range(2, shapes + 2):
            step(torch.ones(size))
    except limit_errors():
        pass  # With on_limit="raise" a place that falls short says so this way.
    finally:
        forget(function.__code__)
    return Seen(limit, len(calls))


def _template(x: Any) -> Any:
    return x + 1


def _fresh() -> types.FunctionType:
    """A function with a code object of its own: torch counts per code object."""
    code = _template.__code__.replace(co_name=f"{_NAME}_{next(_number)}")
    return types.FunctionType(code, {"__name__": __name__, "__builtins__": __builtins__})


@contextmanager
def quiet() -> Iterator[None]:
    """Probes hit limits on purpose where a place falls short: keep that out of log and warnings.

    Records and warnings about anything else still come through.
    """
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_not_of_probes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DynapolicyWarning)
            # Forking beside torch's threads is what a program with fork workers does, too.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            yield
    finally:
        logger.removeFilter(_not_of_probes)


def _not_of_probes(record: logging.LogRecord) -> bool:
    return _NAME not in record.getMessage()


@attrs.frozen
class Setup:
    """Runs ``apply`` first in a child, quietly; picklable. Ignores the arguments that it is called with."""

    apply: Callable[[], Any] | None

    def __call__(self, *_args: Any) -> None:
        """Prepare the child."""
        with quiet():
            if self.apply is not None:
                self.apply()


def probe_in_child(shapes: int) -> Seen:
    """``probe`` in a process of its own, whose first compile this may be."""
    with quiet():
        return probe(shapes)


class ProbeData:
    """A data set of one item, made by probing in the worker."""

    def __init__(self, shapes: int) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        """One item."""
        return 1

    def __getitem__(self, index: int) -> Seen:
        """Probe."""
        return probe_in_child(self.shapes)


def as_it_is(items: list[Seen]) -> list[Seen]:
    """Collate nothing."""
    return items
