"""The knob table: every environment variable, what it means and what it may hold.

One table drives parsing, errors, the command line and ``docs/environment_variables.md``.
"""

from __future__ import annotations

import attrs

__all__ = ["KNOBS", "Knob", "Value", "knob", "rows_of"]

Value = int | str | None


@attrs.frozen
class Knob:
    """One row of the table: a whole number with bounds, or one of some words."""

    name: str
    suffix: str
    default: Value
    meaning: str
    low: int | None = None
    high: int | None = None
    words: tuple[str, ...] = ()
    group: str = "policy"
    unit: str = ""
    #: Read where it is used and never recorded: what is shown of it is only whether it is set.
    secret: bool = False

    @property
    def allowed(self) -> str:
        """What may be given, for errors and documentation."""
        if self.words:
            return ", ".join(self.words)
        return f"{self.low} ... {self.high}" if self.low is not None else "text"

    def variable(self, prefix: str) -> str:
        """Name of the environment variable."""
        return prefix + self.suffix


_MOST = 65536

KNOBS: tuple[Knob, ...] = (
    Knob("floor", "FLOOR", 8, "the least recompile limit", low=1, high=_MOST, unit="entries"),
    Knob(
        "ceil",
        "CEIL",
        1024,
        "the most; above it shapes run eager, and dynapolicy says which",
        low=1,
        high=_MOST,
        unit="entries",
    ),
    Knob(
        "eager_headroom",
        "EAGER_HEADROOM",
        8,
        "room for undeclared shapes that come at run time",
        low=0,
        high=_MOST,
        unit="entries",
    ),
    Knob("on_limit", "ON_LIMIT", "warn", "what hitting a limit does", words=("warn", "raise")),
    Knob(
        "float32_matmul_precision",
        "FLOAT32_MATMUL_PRECISION",
        None,
        "precision of float32 matrix products; unset leaves torch alone",
        words=("highest", "high", "medium"),
    ),
    Knob("disable", "DISABLE", "0", "1: applying a policy does nothing, and says so once", words=("0", "1")),
    Knob(
        "compile_threads",
        "COMPILE_THREADS",
        None,
        "the most compile workers; unset leaves it to what the machine bears",
        low=1,
        high=1024,
        group="workers",
        unit="processes",
    ),
    Knob(
        "worker_start",
        "WORKER_START",
        "subprocess",
        "how compile workers are started; only the default is safe with threads and a live CUDA context",
        words=("subprocess", "fork", "spawn"),
        group="workers",
    ),
    Knob(
        "worker_memory_mb",
        "WORKER_MEMORY_MB",
        1024,
        "memory that one compile worker may need",
        low=64,
        high=1048576,
        group="workers",
        unit="MB",
    ),
    Knob(
        "artifact_dir",
        "ARTIFACT_DIR",
        None,
        "where compile artifacts are kept; unset: the user's cache folder",
        group="artifacts",
    ),
    Knob(
        "artifact_key",
        "ARTIFACT_KEY",
        None,
        "signs artifacts, and refuses those that are not signed with it; never recorded",
        group="artifacts",
        secret=True,
    ),
)


def rows_of(group: str) -> tuple[Knob, ...]:
    """The rows of one group: ``"policy"``, and what other parts of the library read."""
    return tuple(row for row in KNOBS if row.group == group)


def knob(name: str) -> Knob:
    """The row called ``name``."""
    return next(row for row in KNOBS if row.name == name)
