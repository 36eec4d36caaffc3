"""``audit`` says for each code object what it has, what was declared, and what is wrong."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.torch_compat.hits import LOGGER
from places import CountingBackend, fresh

pytestmark = pytest.mark.usefixtures("torch_ready")

NAME = f"{__name__}:layer"

FIELDS = {"code", "file", "line", "declared", "entries", "undeclared", "limit", "accumulated_limit"}
FIELDS |= {"state", "last_reason"}


def layer(x: Any) -> Any:
    """Declared in these tests."""
    return x * 2 - 1


def run(step: Any, *sizes: int) -> None:
    """Call with each size."""
    import torch

    for size in sizes:
        assert torch.equal(step(torch.ones(size)), layer(torch.ones(size)))


def declared(*sizes: int, function: Any = layer, **knobs: Any) -> dp.CompilePolicy:
    """One function, one axis."""
    return dp.CompilePolicy({function: [dp.ShapeBuckets(batch=sizes)]}, **knobs)


def only_row() -> Any:
    """The one row about ``layer``."""
    return next(row for row in dp.audit() if row.code == NAME)


def test_a_record_has_the_fields_of_the_contract(counting_backend: CountingBackend) -> None:
    """Names, values and JSON."""
    with dp.apply_policy(declared(2, 3)):
        step = dp.compile(layer, backend=counting_backend)
        run(step, 2, 3)
        rows = dp.audit()
        row = only_row()
    assert set(rows.to_json()[0]) >= FIELDS
    assert json.loads(json.dumps(rows.to_json())) == rows.to_json()
    assert (row.declared, row.entries, row.undeclared, row.limit, row.state) == (2, 2, 0, 10, "fine")
    assert (row.file, row.line) == (__file__, layer.__code__.co_firstlineno)
    assert row.accumulated_limit == 256
    assert "size mismatch" in row.last_reason
    assert NAME in str(rows)
    assert f"<td>{NAME}</td>" in rows._repr_html_()


def test_declared_but_never_seen() -> None:
    """A declared function that nothing called, and one that this process doesn't have."""
    with dp.apply_policy(dp.CompilePolicy({name: dp.ShapeBuckets(batch=(1,)) for name in (NAME, "no:such")})):
        states = {row.code: row.state for row in dp.audit() if row.declared}
    assert states == {NAME: "never seen", "no:such": "never seen"}


def test_undeclared_shapes_eat_the_headroom(counting_backend: CountingBackend) -> None:
    """Shapes that fit none of the declared ones are counted before all declared ones were seen."""
    with dp.apply_policy(declared(2, 3, 4, 5)):
        run(dp.compile(layer, backend=counting_backend), 2, 3, 7, 9)
        row = only_row()
    assert (row.entries, row.undeclared, row.state) == (4, 2, "undeclared shapes")


def test_a_mode_made_the_entries_not_a_shape(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Global state: the same shapes with and without gradients."""
    with dp.apply_policy(declared(2, 3, 4)):
        step = dp.compile(layer, backend=counting_backend)
        run(step, 2, 3, 4)
        with torch_ready.no_grad():
            run(step, 2, 3, 4)
        row = only_row()
    assert (row.entries, row.undeclared, row.state) == (6, 3, "guarded state")
    assert "grad_mode" in row.why


def test_a_dtype_made_the_entries_not_a_shape(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """The tensor and what differs in it are named."""
    with dp.apply_policy(declared(2, 3)):
        step = dp.compile(layer, backend=counting_backend)
        for dtype in (torch_ready.float32, torch_ready.float64):
            for size in (2, 3):
                step(torch_ready.ones(size, dtype=dtype))
        row = only_row()
    assert row.state == "guarded state"
    assert "dtype" in row.why


def test_a_guarded_attribute_made_the_entries(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Modules of one class that differ in a plain attribute, at one shape."""

    class Scaled(torch_ready.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Any) -> Any:
            return x * self.factor

    with dp.apply_policy(dp.CompilePolicy({Scaled: dp.ShapeBuckets(batch=(2,))})):
        steps = [dp.compile(Scaled(number), backend=counting_backend) for number in range(2, 6)]
        for step in steps:
            step(torch_ready.ones(2))
        row = next(row for row in dp.audit() if row.declared)
    assert (row.entries, row.undeclared, row.state) == (4, 3, "guarded state")
    assert "factor" in row.why


def test_variants_cover_a_mode(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Declared with ``variants=2``, both modes are fine."""
    with dp.apply_policy(dp.CompilePolicy({layer: dp.ShapeBuckets(batch=(2, 3), variants=2)})):
        step = dp.compile(layer, backend=counting_backend)
        run(step, 2, 3)
        with torch_ready.no_grad():
            run(step, 2, 3)
        row = only_row()
    assert (row.declared, row.entries, row.undeclared, row.state) == (4, 4, 0, "fine")


def test_full_is_not_exhausted(counting_backend: CountingBackend) -> None:
    """All entries that the limit allows: full. One shape more: exhausted."""
    with dp.apply_policy(declared(2, 3)):
        step = dp.compile(layer, backend=counting_backend)
        run(step, *range(2, 12))
        assert only_row().state == "full"
        with pytest.warns(dp.RecompileLimitWarning):
            run(step, 12)
        row = only_row()
        assert row.state == "exhausted"
        assert "size mismatch" in row.last_reason


def test_after_torchs_reset_nothing_is_exhausted(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """``torch._dynamo.reset()`` makes a hit the past."""
    with dp.apply_policy(declared(2, 3)):
        step = dp.compile(layer, backend=counting_backend)
        with pytest.warns(dp.RecompileLimitWarning):
            run(step, *range(2, 14))
        torch_ready._dynamo.reset()
        assert only_row().state == "never seen"
        run(step, 2)
        assert only_row().state == "fine"


def test_with_a_silenced_logger_it_is_full(counting_backend: CountingBackend) -> None:
    """A hit that nobody could name still shows as a full code object, and ``effective`` says why."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with dp.apply_policy(declared(2, 3)):
            run(dp.compile(layer, backend=counting_backend), *range(2, 14))
            assert only_row().state == "full"
            assert [row.verdict for row in dp.effective() if LOGGER in row.setting] == ["unseen"]
    finally:
        logger.setLevel(level)


def test_resume_functions_belong_to_the_function_they_resume(
    counting_backend: CountingBackend, torch_ready: Any
) -> None:
    """A hit after a graph break exhausts the function's own row."""

    def broken(x: Any) -> Any:
        y = x + 1
        torch_ready._dynamo.graph_break()
        return y * 2

    with dp.apply_policy(dp.CompilePolicy({broken: dp.ShapeBuckets(batch=(2, 3))})):
        step = dp.compile(broken, backend=counting_backend)
        with pytest.warns(dp.RecompileLimitWarning, match="broken"):
            for size in range(2, 14):
                step(torch_ready.ones(size))
        rows = dp.audit()
    assert [(row.entries, row.state) for row in rows if row.declared] == [(10, "exhausted")]


def test_targets_on_torchs_own_code_object_are_one_row(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """A partial and a Sequential count together: one row that names both."""
    half = functools.partial(torch_ready.mul, other=0.5)
    model = torch_ready.nn.Sequential(torch_ready.nn.ReLU())
    buckets = dp.ShapeBuckets(batch=(2, 3, 4))
    with dp.apply_policy(dp.CompilePolicy({half: buckets, model: buckets})):
        steps = [dp.compile(one, backend=counting_backend) for one in (half, model)]
        for step in steps:
            for size in (2, 3, 4):
                step(torch_ready.ones(size))
        rows = [row for row in dp.audit() if row.declared]
    assert len(rows) == 1
    assert rows[0].declared == 6
    assert len(rows[0].targets) == 2


def test_other_code_near_its_limit_is_shown(torch_ready: Any) -> None:
    """Code of another library, compiled without us, shows when it has nearly used its limit up."""

    def foreign(x: Any) -> Any:
        return x / 2

    step = torch_ready.compile(foreign, backend="eager", dynamic=False)
    for size in range(2, 5):
        step(torch_ready.ones(size))
    assert not [row for row in dp.audit() if "foreign" in row.code]
    for size in range(5, 9):
        step(torch_ready.ones(size))
    assert [row.state for row in dp.audit() if "foreign" in row.code] == ["near its limit"]


def test_isolated_wrappers_have_the_sum_of_their_budgets(counting_backend: CountingBackend) -> None:
    """The row's limit is what all wrappers of the function may have together."""
    if not dp.capabilities().isolate_recompiles:
        pytest.skip("this torch has no torch.compile(isolate_recompiles=)")
    function = fresh(layer)
    with dp.apply_policy(declared(2, 3, function=function)):
        steps = [dp.compile(function, isolate=True, backend=counting_backend) for _ in range(2)]
        for step in steps:
            run(step, 2, 3)
        row = next(row for row in dp.audit() if row.entries)
    assert (row.entries, row.limit) == (4, 20)
