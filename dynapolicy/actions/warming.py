"""``warm_up``: every declared shape once, before the first request."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Literal, get_args

import attrs

from ..buckets import ShapeBuckets
from ..errors import BucketError, KnobError, WarmUpError
from ..observe.per_code import CodeRecord, audit
from ..records import Records

__all__ = ["ShapeTime", "WarmUp", "warm_up"]

OnError = Literal["raise", "continue"]


@attrs.frozen
class ShapeTime:
    """One warmed shape.

    Attributes:
        shape: its sizes by axis.
        seconds: how long the step took, compilation included.
        error: what the step raised, None where it worked.
    """

    shape: dict[str, int]
    seconds: float
    error: str | None


@attrs.frozen
class WarmUp:
    """What a warm-up did.

    Attributes:
        times: each shape, in the order it ran.
        audit: the audit right after it.
    """

    times: Records[ShapeTime]
    audit: Records[CodeRecord]

    @property
    def seconds(self) -> float:
        """All steps together."""
        return sum(one.seconds for one in self.times)

    @property
    def failed(self) -> tuple[ShapeTime, ...]:
        """Shapes whose step raised."""
        return tuple(one for one in self.times if one.error is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"times": self.times.to_json(), "audit": self.audit.to_json()}

    def __str__(self) -> str:
        return f"{self.times}\n\n{self.audit}"


def warm_up(
    step: Callable[..., Any],
    buckets: ShapeBuckets | Iterable[ShapeBuckets],
    make_inputs: Callable[..., Any],
    *,
    executor: Executor | None = None,
    progress: bool = True,
    on_error: OnError = "raise",
) -> Any:
    """Call ``step`` once for every declared shape, the largest product of axes first.

    Largest first, so that memory pools grow once. Variants of a shape, such as ``no_grad``, are not
    made up: warm each of them up in its own mode.

    Args:
        step: the compiled function or what calls it; may be async.
        buckets: the shapes. A shape that is in several of them runs once.
        make_inputs: gets the sizes as keywords, or in order where axes have no names; returns the
            arguments of ``step``, as a tuple or as the one argument.
        executor: where the steps run, one after the other; here where not given.
        progress: a tqdm bar with an estimate of the time left, on a terminal or in a notebook, where
            tqdm is installed (extra ``progress``).
        on_error: ``"raise"`` stops at the first shape that fails, ``"continue"`` tries the rest.

    Returns:
        A ``WarmUp``; for an async step an awaitable of one.

    Raises:
        WarmUpError: the step failed; it names the shape and carries the cause.
        BucketError, KnobError: an argument is not allowed.
    """
    if on_error not in get_args(OnError):
        raise KnobError("on_error", on_error, 'It is "raise" or "continue"', "argument", "Pass one of them")
    run = _Run(step, make_inputs, executor, on_error, _largest_first(buckets), progress)
    return run.all_async() if _is_async(step) else run.all()


def _largest_first(buckets: Any) -> list[dict[str, int]]:
    several = [buckets] if isinstance(buckets, ShapeBuckets) else list(buckets)
    for one in several:
        if not isinstance(one, ShapeBuckets):
            raise BucketError(
                "buckets", one, "Warm-up takes ShapeBuckets", "argument", "Pass ShapeBuckets(batch=(1, 2))"
            )
    shapes = {tuple(sorted(shape.items())): shape for one in several for shape in one.shapes}
    return sorted(shapes.values(), key=lambda shape: math.prod(shape.values()), reverse=True)


def _is_async(step: Any) -> bool:
    return inspect.iscoroutinefunction(step) or inspect.iscoroutinefunction(type(step).__call__)


@attrs.define
class _Run:
    """One warm-up while it runs."""

    step: Callable[..., Any]
    make_inputs: Callable[..., Any]
    executor: Executor | None
    on_error: OnError
    shapes: list[dict[str, int]]
    progress: bool
    times: list[ShapeTime] = attrs.field(factory=list)

    def all(self) -> WarmUp:
        with _bar(len(self.shapes), self.progress) as bar:
            for shape in self.shapes:
                start = time.perf_counter()
                try:
                    arguments = self._arguments(shape)
                    if self.executor is None:
                        self.step(*arguments)
                    else:
                        self.executor.submit(self.step, *arguments).result()
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    self._failed(shape, start, error)
                else:
                    self._done(shape, start)
                bar.update()
        return self._result()

    async def all_async(self) -> WarmUp:
        with _bar(len(self.shapes), self.progress) as bar:
            for shape in self.shapes:
                start = time.perf_counter()
                try:
                    await self._awaitable(self._arguments(shape))
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    self._failed(shape, start, error)
                else:
                    self._done(shape, start)
                bar.update()
        return self._result()

    def _awaitable(self, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        if self.executor is None:
            return self.step(*arguments)  # type: ignore[no-any-return]
        return asyncio.get_running_loop().run_in_executor(self.executor, _run_async, self.step, arguments)

    def _arguments(self, shape: dict[str, int]) -> tuple[Any, ...]:
        # Axes without names are called by their position, and come in order.
        positional = list(shape) == [str(axis) for axis in range(len(shape))]
        made = self.make_inputs(*shape.values()) if positional else self.make_inputs(**shape)
        return made if isinstance(made, tuple) else (made,)

    def _done(self, shape: dict[str, int], start: float) -> None:
        self.times.append(ShapeTime(shape, time.perf_counter() - start, None))

    def _failed(self, shape: dict[str, int], start: float, error: Exception) -> None:
        self.times.append(ShapeTime(shape, time.perf_counter() - start, f"{type(error).__name__}: {error}"))
        if self.on_error == "raise":
            where = ", ".join(f"{axis}={size}" for axis, size in shape.items())
            rule = f"The step failed for this shape: {type(error).__name__}: {error}"
            way_out = 'Correct the step, or pass on_error="continue" to try the other shapes'
            raise WarmUpError("warm_up", where, rule, "step", way_out) from error

    def _result(self) -> WarmUp:
        return WarmUp(Records(self.times), audit())


def _run_async(step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    async def once() -> Any:
        return await step(*arguments)

    return asyncio.run(once())


class _NoBar:
    """Where no bar is to be seen."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self) -> None:
        pass


def _bar(total: int, wanted: bool) -> Any:
    if not wanted or not (_in_notebook() or sys.stderr.isatty()):
        return _NoBar()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, desc="warm-up", unit="shape")


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return getattr(running, "kernel", None) is not None
