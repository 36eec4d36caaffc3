"""How torch's compile workers shall be: the knobs, from code and environment. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import attrs

from ..errors import KnobError
from ..knob_table import Value, knob, rows_of
from ..knobs import KnobValue, from_records, read_knobs
from .machine import Machine
from .plan import WorkerPlan, plan_for

__all__ = ["WorkerPolicy"]

_ROWS = (*rows_of("workers"), knob("disable"))


@attrs.frozen(init=False, repr=False)
class WorkerPolicy:
    """How torch's compile workers shall be. Arguments as given, no environment: see ``from_env``.

    Args:
        compile_threads: the most workers; None leaves it to what the machine bears. Fewer are
            used where the machine bears fewer.
        worker_start: ``"subprocess"`` is safe with threads and a live CUDA context, ``"fork"`` is
            not, ``"spawn"`` imports ``__main__`` again. Torch 2.6 knows only the first.
        worker_memory_mb: memory that one worker may need, in MB.

    Raises:
        KnobError: a value is not allowed.
    """

    _values: tuple[KnobValue, ...]

    def __init__(
        self,
        *,
        compile_threads: int | None = None,
        worker_start: str | None = None,
        worker_memory_mb: int | None = None,
    ) -> None:
        arguments = _arguments(compile_threads, worker_start, worker_memory_mb)
        self.__attrs_init__(tuple(read_knobs({}, arguments, "DYNAPOLICY_", _ROWS).values()))

    @classmethod
    def from_env(
        cls,
        *,
        compile_threads: int | None = None,
        worker_start: str | None = None,
        worker_memory_mb: int | None = None,
        prefix: str = "DYNAPOLICY_",
        environ: Mapping[str, str] | None = None,
    ) -> WorkerPolicy:
        """Like the constructor, but the environment wins over arguments. Numbers are clamped.

        Torch's own ``TORCHINDUCTOR_COMPILE_THREADS`` wins over both, in ``plan``.

        Args:
            prefix: what the variables' names begin with.
            environ: the environment; ``os.environ`` where not given.

        Raises:
            KnobError: one error for all variables and arguments that are not allowed.
        """
        arguments = _arguments(compile_threads, worker_start, worker_memory_mb)
        environ = os.environ if environ is None else environ
        return cls._of(tuple(read_knobs(environ, arguments, prefix, _ROWS).values()))

    @classmethod
    def _of(cls, values: tuple[KnobValue, ...]) -> WorkerPolicy:
        policy = cls.__new__(cls)
        policy.__attrs_init__(values)
        return policy

    def record(self, name: str) -> KnobValue:
        """One knob: its value, and where it came from."""
        return next(record for record in self._values if record.name == name)

    @property
    def knobs(self) -> tuple[KnobValue, ...]:
        """Every knob: its value, and where it came from."""
        return self._values

    @property
    def compile_threads(self) -> int | None:
        """The most workers, or None."""
        value = self.record("compile_threads").value
        return None if value is None else int(value)

    @property
    def worker_start(self) -> str:
        """``"subprocess"``, ``"fork"`` or ``"spawn"``."""
        return str(self.record("worker_start").value)

    @property
    def worker_memory_mb(self) -> int:
        """Memory that one worker may need, in MB."""
        return int(self.record("worker_memory_mb").value or 1)

    @property
    def disabled(self) -> bool:
        """The operator's way out: starting workers does nothing."""
        return self.record("disable").value == "1"

    def plan(self, machine: Machine) -> WorkerPlan:
        """How many workers on this machine, started how, and which limit decided.

        ``TORCHINDUCTOR_COMPILE_THREADS`` wins where it is valid; an empty one counts as unset.

        Raises:
            KnobError: a variable of torch's own holds what torch couldn't read.
            WorkerError: ``"spawn"`` without a main guard.
        """
        return plan_for(self, machine)

    # -- out and in ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        threads = "any" if self.compile_threads is None else self.compile_threads
        return f"<WorkerPolicy: compile_threads {threads}, {self.worker_start}, {self.worker_memory_mb} MB a worker>"

    def to_json(self) -> str:
        """Everything the policy holds, as JSON text; ``from_json`` is its inverse."""
        return json.dumps({"knobs": [attrs.asdict(record) for record in self._values]})

    @classmethod
    def from_json(cls, text: str) -> WorkerPolicy:
        """Read what ``to_json`` wrote.

        Raises:
            KnobError: the text holds no worker policy.
        """
        try:
            return cls._of(from_records(json.loads(text)["knobs"], _ROWS))
        except (ValueError, KeyError, TypeError) as error:
            rule = f"It is no worker policy in JSON: {error}"
            raise KnobError("from_json", text, rule, "argument", "Pass what to_json() gave") from None


def _arguments(compile_threads: Value, worker_start: Value, worker_memory_mb: Value) -> dict[str, Value]:
    return {"compile_threads": compile_threads, "worker_start": worker_start, "worker_memory_mb": worker_memory_mb}
