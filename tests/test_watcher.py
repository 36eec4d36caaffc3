"""A hit is noticed when it happens, on any thread, with everything one needs to know."""

from __future__ import annotations

import inspect
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.torch_compat.hits import LOGGER
from dynapolicy.watch import last_hit
from places import CountingBackend, fresh

pytestmark = pytest.mark.usefixtures("torch_ready")


def scale(x: Any) -> Any:
    """Declared for four sizes in these tests."""
    return x * 3


def of_four(**knobs: Any) -> dp.CompilePolicy:
    """Four declared sizes and a limit of twelve."""
    return dp.CompilePolicy({f"{__name__}:scale": [dp.ShapeBuckets(batch=(2, 3, 4, 5))]}, **knobs)


def call_with(step: Any, function: Any, sizes: range) -> None:
    """Call with every size, and compare with eager."""
    import torch

    for size in sizes:
        x = torch.arange(float(size))
        assert torch.equal(step(x), function(x))


@pytest.mark.parametrize("thread", [False, True], ids=["main", "worker"])
def test_a_hit_warns_once_and_names_everything(counting_backend: CountingBackend, thread: bool) -> None:
    """One warning for many shapes too many: function, file, line, limit, its origin, reason and remedy."""
    function = fresh(scale)
    step = dp.compile(function, backend=counting_backend)
    with dp.apply_policy(of_four()), pytest.warns(dp.RecompileLimitWarning) as caught:
        if thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(call_with, step, function, range(2, 20)).result()
        else:
            call_with(step, function, range(2, 20))
    assert counting_backend.calls == 12
    assert len(caught) == 1
    text = str(caught[0].message)
    line = inspect.getsourcelines(scale)[1]
    for part in ("test_watcher:scale", __file__, f":{line})", "limit=12", "the applied policy", "size", "recover()"):
        assert part in text
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_keyword_is_named_as_the_origin(counting_backend: CountingBackend) -> None:
    """A hit of ``torch.compile(recompile_limit=)`` says that the keyword set the limit."""
    if not dp.capabilities().recompile_limit_keyword:
        pytest.skip("this torch has no torch.compile(recompile_limit=)")
    function = fresh(scale)
    with dp.apply_policy(of_four()):
        step = dp.compile(function, backend=counting_backend, recompile_limit=3)
        with pytest.warns(dp.RecompileLimitWarning, match="=3, which comes from the keyword of torch.compile"):
            call_with(step, function, range(2, 8))


def test_another_code_object_warns_again(counting_backend: CountingBackend) -> None:
    """Once is once for each code object, not once for the process."""
    with dp.apply_policy(of_four()):
        for function in (fresh(scale), fresh(scale)):
            with pytest.warns(dp.RecompileLimitWarning):
                call_with(dp.compile(function, backend=counting_backend), function, range(2, 16))


def test_a_limit_that_raises_names_everything_in_the_error(counting_backend: CountingBackend) -> None:
    """``on_limit="raise"`` gives torch's own class of error, with our text, and no second message."""
    function = fresh(scale)
    with dp.apply_policy(of_four(on_limit="raise")):
        step = dp.compile(function, backend=counting_backend)
        with pytest.raises(dp.LIMIT_ERRORS, match=r"test_watcher:scale .*limit=12.*applied policy") as caught:
            call_with(step, function, range(2, 20))
        assert "Declare" in str(caught.value)
        # Raising doesn't exhaust it: what is compiled stays usable.
        call_with(step, function, range(2, 14))
    assert counting_backend.calls == 12


def test_fullgraph_raises_a_limit_error_that_names_everything(counting_backend: CountingBackend) -> None:
    """``fullgraph=True`` raises at the limit by itself, as one of ``LIMIT_ERRORS``."""
    function = fresh(scale)
    with dp.apply_policy(of_four()):
        step = dp.compile(function, backend=counting_backend, fullgraph=True)
        with pytest.raises(dp.LIMIT_ERRORS, match="test_watcher:scale"):
            call_with(step, function, range(2, 20))


def test_warnings_as_errors_reach_the_caller_and_exhaust_nothing(counting_backend: CountingBackend) -> None:
    """With the filter "error" the call raises, each time, and a higher limit compiles afterwards."""
    function = fresh(scale)
    step = dp.compile(function, backend=counting_backend)
    with dp.apply_policy(of_four()):
        for _ in range(2):
            with pytest.raises(dp.RecompileLimitWarning):
                call_with(step, function, range(2, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.TooLateWarning)
        with dp.apply_policy(of_four(floor=32)):
            call_with(step, function, range(2, 20))
    assert counting_backend.calls == 18


def test_nothing_is_said_without_a_policy(counting_backend: CountingBackend) -> None:
    """Torch's logger is as it was before the first policy and after the last."""
    handlers = list(logging.getLogger(LOGGER).handlers)
    with dp.apply_policy(of_four()), dp.apply_policy(of_four(floor=20)):
        assert len(logging.getLogger(LOGGER).handlers) == len(handlers) + 1
    assert logging.getLogger(LOGGER).handlers == handlers
    function, mark = fresh(scale), last_hit()
    call_with(dp.compile(function, backend=counting_backend), function, range(2, 16))
    assert last_hit() == mark


def test_the_errors_of_this_torch_are_listed() -> None:
    """``LIMIT_ERRORS`` are exception classes, and importing the package doesn't need them."""
    assert dp.LIMIT_ERRORS
    assert all(issubclass(one, Exception) for one in dp.LIMIT_ERRORS)


def test_a_steady_call_never_reaches_the_watcher(counting_backend: CountingBackend) -> None:
    """What is compiled runs without a log record, so watching it costs nothing."""
    records: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    function = fresh(scale)
    step = dp.compile(function, backend=counting_backend)
    with dp.apply_policy(of_four()):
        call_with(step, function, range(2, 6))
        listener = Listener()
        logging.getLogger(LOGGER).addHandler(listener)
        try:
            call_with(step, function, range(2, 6))
        finally:
            logging.getLogger(LOGGER).removeHandler(listener)
    assert not records
