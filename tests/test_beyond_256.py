"""More entries than torch's own accumulated limit of 256."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import dynapolicy as dp
from places import CountingBackend, fresh, new_thread, policy_of

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore::dynapolicy.RecompileLimitWarning"),
]

#: Declared shapes; each run compiles all of them, which takes about 8 s.
MANY = 350


def count_up(x: Any, number: int) -> Any:
    """Adds an entry for each number."""
    return x + number


def entries_of(compiled: Any, backend: CountingBackend, numbers: range) -> int:
    """How often torch compiled for these numbers; every result is compared."""
    import torch

    x = torch.ones(2)
    assert all(torch.equal(compiled(x, number), count_up(x, number)) for number in numbers)
    return backend.calls


def test_350_declared_shapes_on_main_and_two_more_on_a_thread() -> None:
    """By process scope alone: 350, then the headroom on another thread, then eager."""
    import torch

    backend = CountingBackend()
    compiled = torch.compile(fresh(count_up), backend=backend, dynamic=False)
    with dp.apply_policy(policy_of(MANY, 2)), new_thread() as run:
        assert entries_of(compiled, backend, range(2, 2 + MANY)) == MANY
        assert run(entries_of, compiled, backend, range(1000, 1003)) == MANY + 2


def test_350_declared_shapes_on_a_thread_with_the_keyword_on_top() -> None:
    """``dp.compile`` on another thread gives the keyword where torch takes it, and the sum is no obstacle."""
    buckets = {count_up: [dp.ShapeBuckets(number=tuple(range(2, 2 + MANY)))]}
    backend = CountingBackend()

    def work() -> int:
        compiled = dp.compile(count_up, backend=backend)
        return entries_of(compiled, backend, range(2, 2 + MANY + 3))

    with dp.apply_policy(dp.CompilePolicy(buckets, eager_headroom=2)), new_thread() as run:
        assert run(work) == MANY + 2


def test_a_keyword_over_256_without_an_applied_policy_is_said() -> None:
    """Torch has no keyword for its accumulated limit: ``dp.compile`` names the number and the way out, once."""
    policy = policy_of(MANY)
    import places

    # Before torch 2.12 there is no keyword at all: then the plain limit is what stops it.
    allowed = 256 if dp.capabilities().recompile_limit_keyword else 8
    with pytest.warns(dp.RecompileLimitWarning, match=rf"places:step needs 352 .* {allowed}\. .*apply_policy\(\)"):
        dp.compile(places.step, policy=policy, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp.compile(places.step, policy=policy, backend="eager")
        with dp.apply_policy(policy):
            dp.compile(fresh(), policy=policy, backend="eager")


def test_the_accumulated_limit_is_four_times_the_limit() -> None:
    """It follows the limit, and is never under torch's own 256."""
    assert policy_of(MANY, 2).limits == dp.RecompileLimits(MANY + 2, 4 * (MANY + 2))
    assert policy_of(3, 2).limits == dp.RecompileLimits(8, 256)
