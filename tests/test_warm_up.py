"""``warm_up`` calls the step once for every declared shape, and says what that took."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dynapolicy as dp
from places import CountingBackend

pytestmark = pytest.mark.usefixtures("torch_ready")

SHAPES = dp.ShapeBuckets(batch=(1, 4, 2), tokens=(3, 5))


def grid(x: Any) -> Any:
    """Compiled in these tests."""
    return x.sum(0) * 2


def inputs(batch: int, tokens: int) -> Any:
    """One argument for one shape."""
    import torch

    return torch.ones(batch, tokens)


def test_every_declared_shape_runs_largest_first(counting_backend: CountingBackend) -> None:
    """All six, by their product, and the audit agrees."""
    seen: list[tuple[int, ...]] = []
    step = dp.compile(grid, backend=counting_backend)

    def call(x: Any) -> Any:
        seen.append(tuple(x.shape))
        return step(x)

    with dp.apply_policy(dp.CompilePolicy({grid: SHAPES})):
        done = dp.warm_up(call, SHAPES, inputs)
    assert seen[0] == (4, 5)
    assert [a * b for a, b in seen] == sorted((a * b for a, b in seen), reverse=True)
    assert len(set(seen)) == len(seen) == counting_backend.calls == 6
    assert [time.shape for time in done.times] == [{"batch": a, "tokens": b} for a, b in seen]
    assert all(time.seconds > 0 and time.error is None for time in done.times)
    assert done.seconds == sum(time.seconds for time in done.times)
    assert [(row.declared, row.entries, row.undeclared) for row in done.audit if row.declared] == [(6, 6, 0)]
    assert json.loads(json.dumps(done.to_json()))["times"][0]["shape"] == {"batch": 4, "tokens": 5}
    assert "batch" in str(done)


def test_several_arguments_and_axes_without_names(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """A tuple is the arguments; unnamed sizes come in order; a shape in two buckets runs once."""
    step = dp.compile(lambda x, y: x @ y, backend=counting_backend)
    buckets = [dp.ShapeBuckets.of([(2, 3), (4, 5)]), dp.ShapeBuckets.of([(4, 5), (6, 7)])]
    done = dp.warm_up(step, buckets, lambda rows, columns: (torch_ready.ones(rows, columns), torch_ready.ones(columns)))
    assert counting_backend.calls == 3
    assert [tuple(time.shape.values()) for time in done.times] == [(6, 7), (4, 5), (2, 3)]


def test_the_step_runs_on_the_given_executor(counting_backend: CountingBackend) -> None:
    """Compiled on the thread that will serve."""
    with dp.apply_policy(dp.CompilePolicy({grid: SHAPES})), ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        dp.warm_up(dp.compile(grid, backend=counting_backend), SHAPES, inputs, executor=pool)
    assert counting_backend.threads == [thread] * 6


@pytest.mark.parametrize("pooled", [False, True], ids=["loop", "executor"])
def test_an_async_step_is_awaited(counting_backend: CountingBackend, pooled: bool) -> None:
    """In the running loop, or in a loop of the executor's thread."""
    step = dp.compile(grid, backend=counting_backend)

    async def serve(x: Any) -> Any:
        await asyncio.sleep(0)
        return step(x)

    async def main(pool: ThreadPoolExecutor) -> dp.WarmUp:
        done: dp.WarmUp = await dp.warm_up(serve, SHAPES, inputs, executor=pool if pooled else None)
        return done

    with ThreadPoolExecutor(1) as pool:
        done = asyncio.run(main(pool))
    assert len(done.times) == counting_backend.calls == 6
    assert (set(counting_backend.threads) == {threading.get_ident()}) is not pooled


def fail_at_four(x: Any) -> None:
    """Fails for one batch size."""
    if x.shape[0] == 4:
        raise ValueError("four is too many")


def test_a_failing_shape_is_named(torch_ready: Any) -> None:
    """The error carries the shape and its cause, and nothing more is tried."""
    with pytest.raises(dp.WarmUpError, match=r"batch=4, tokens=5.*four is too many") as caught:
        dp.warm_up(fail_at_four, SHAPES, inputs)
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_rest_is_still_tried_if_asked() -> None:
    """Failures are recorded with their shape."""
    done = dp.warm_up(fail_at_four, SHAPES, inputs, on_error="continue")
    assert len(done.times) == 6
    assert [time.shape["batch"] for time in done.failed] == [4, 4]
    assert done.failed[0].error == "ValueError: four is too many"


def test_an_async_failure_is_named_too() -> None:
    """The same for a step that is awaited."""

    async def fail(x: Any) -> None:
        fail_at_four(x)

    with pytest.raises(dp.WarmUpError, match="batch=4"):
        asyncio.run(dp.warm_up(fail, SHAPES, inputs))


def test_the_bar_is_off_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal, no bar; a terminal gets one with an estimate; ``progress=False`` is off everywhere."""
    pytest.importorskip("tqdm", reason="the extra 'progress' is not installed")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, progress, shown in ((io.StringIO(), True, False), (Terminal(), True, True), (Terminal(), False, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        dp.warm_up(lambda x: None, SHAPES, inputs, progress=progress)
        assert ("warm-up" in stream.getvalue()) is shown
        assert ("6/6" in stream.getvalue()) is shown


def test_bad_arguments_are_errors() -> None:
    """Before anything runs."""
    with pytest.raises(dp.KnobError, match="on_error"):
        dp.warm_up(fail_at_four, SHAPES, inputs, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(dp.BucketError, match="ShapeBuckets"):
        dp.warm_up(fail_at_four, [(1, 2)], inputs)  # type: ignore[list-item]
