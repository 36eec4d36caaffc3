"""``recover`` makes one exhausted code object compile again, and leaves all others alone."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.torch_compat.codes import resume_functions
from dynapolicy.torch_compat.entries import count
from places import CountingBackend

pytestmark = pytest.mark.usefixtures("torch_ready")

NAME = f"{__name__}:one"


def one(x: Any) -> Any:
    """Exhausted in these tests."""
    return x + 1


def other(x: Any) -> Any:
    """Left alone in these tests."""
    return x + 2


def run(step: Any, sizes: range) -> None:
    """Call with each size."""
    import torch

    for size in sizes:
        step(torch.ones(size))


def test_an_exhausted_function_compiles_again_under_a_higher_limit(counting_backend: CountingBackend) -> None:
    """Raising the limit alone changes nothing; with ``recover`` all shapes compile. The other keeps its entries."""
    step, beside = (dp.compile(function, backend=counting_backend) for function in (one, other))
    run(beside, range(2, 5))
    with dp.apply_policy(dp.CompilePolicy({one: dp.ShapeBuckets(batch=(2, 3))})):
        with pytest.warns(dp.RecompileLimitWarning):
            run(step, range(2, 20))
        assert count(one.__code__) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.TooLateWarning)
        applied = dp.apply_policy(dp.CompilePolicy({one: dp.ShapeBuckets(batch=range(2, 20))}))
    with applied:
        before = counting_backend.calls
        run(step, range(15, 20))
        assert counting_backend.calls == before
        assert dp.recover(step) == (NAME,)
        run(step, range(2, 20))
        assert counting_backend.calls == before + 18
        assert [row.state for row in dp.audit() if row.code == NAME] == ["fine"]
        run(beside, range(2, 5))
        assert counting_backend.calls == before + 18


def test_a_hit_after_recovering_is_said_again(counting_backend: CountingBackend) -> None:
    """Once per exhaustion, not once for ever."""
    step = dp.compile(one, backend=counting_backend)
    with dp.apply_policy(dp.CompilePolicy({one: dp.ShapeBuckets(batch=(2, 3))})):
        for _ in range(2):
            with pytest.warns(dp.RecompileLimitWarning):
                run(step, range(2, 14))
            dp.recover(one)


def test_resume_functions_are_recovered_with_it(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """The code that goes on after a graph break is forgotten as well."""

    def broken(x: Any) -> Any:
        y = x + 1
        torch_ready._dynamo.graph_break()
        return y * 2

    step = dp.compile(broken, backend=counting_backend)
    run(step, range(2, 5))
    assert [count(code) for code in resume_functions(broken.__code__)] == [3]
    dp.recover(broken)
    assert count(broken.__code__) == 0
    assert [count(code) for code in resume_functions(broken.__code__)] == [0]
    run(step, range(2, 5))
    assert counting_backend.calls == 12


def test_everything_on_torchs_own_code_object_is_named(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """A partial shares its code object with a Sequential: both are reset and named."""
    half = functools.partial(torch_ready.mul, other=0.5)
    model = torch_ready.nn.Sequential(torch_ready.nn.ReLU())
    steps = [dp.compile(target, backend=counting_backend) for target in (half, model)]
    for step in steps:
        run(step, range(2, 4))
    names = dp.recover(half)
    assert len(names) == 2
    assert any("Sequential" in name for name in names)


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_it_is_refused_inside_a_compiled_call(torch_ready: Any) -> None:
    """Between two graphs of one call, also where dynamo is disabled: an error, and every entry stays."""
    refused: list[str] = []

    @torch_ready._dynamo.disable  # type: ignore[untyped-decorator, unused-ignore]
    def try_to() -> None:
        try:
            dp.recover(one)
        except dp.RecoverError as error:
            refused.append(str(error))

    def broken(x: Any) -> Any:
        y = x + 1
        try_to()
        return y * 2

    plain = torch_ready.compile(one, backend="eager")
    run(plain, range(2, 3))
    torch_ready.compile(broken, backend="eager")(torch_ready.ones(2))
    assert len(refused) == 1
    assert "between calls" in refused[0]
    assert count(one.__code__) == 1


def test_an_unknown_name_is_refused() -> None:
    """A name that nothing in this process has is an error, not a silent nothing."""
    with pytest.raises(dp.RecoverError, match="no function of that name"):
        dp.recover("no.such.module:function")
