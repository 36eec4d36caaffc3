"""Torch's own keyword, alone and beside a policy that is in force."""

from __future__ import annotations

import contextvars
import gc
import inspect
from typing import Any

import pytest

import dynapolicy as dp
from places import CountingBackend, fresh, limit_name, limits_read, new_thread, policy_of, probe, step

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore::dynapolicy.RecompileLimitWarning"),
]


@pytest.fixture
def keyword(torch_ready: Any) -> str:
    """The keyword's name, on a torch that takes it."""
    if not dp.capabilities().recompile_limit_keyword:
        pytest.skip("this torch has no torch.compile(recompile_limit=)")
    return "recompile_limit"


def undeclared(x: Any) -> Any:
    """No policy here knows it."""
    return x - 1


# -- what torch is given ----------------------------------------------------------------------------


def test_kwargs_are_what_this_torch_takes(torch_ready: Any) -> None:
    """The declared limit where ``torch.compile`` has the keyword, nothing where it hasn't."""
    takes = inspect.signature(torch_ready.compile).parameters
    kwargs = policy_of(10).compile_kwargs(step)
    assert kwargs == ({"recompile_limit": 12} if "recompile_limit" in takes else {})
    assert probe(13, **kwargs).calls[-1] == (12 if kwargs else 8)


def test_isolating_kwargs_are_what_this_torch_takes(torch_ready: Any) -> None:
    """Both keywords or none: a limit without a region of its own would count the others' entries."""
    takes = inspect.signature(torch_ready.compile).parameters
    kwargs = policy_of(10).compile_kwargs(step, isolate=True)
    can = "isolate_recompiles" in takes
    assert kwargs == ({"recompile_limit": 12, "isolate_recompiles": True} if can else {})
    torch_ready.compile(step, backend="eager", **kwargs)


@pytest.mark.parametrize("isolate", [True, False])
def test_no_kwargs_for_what_was_not_declared_or_is_disabled(isolate: bool) -> None:
    """An undeclared function lives under the process's limit; the operator's way out covers keywords."""
    assert policy_of(10).compile_kwargs(undeclared, isolate=isolate) == {}
    buckets = {step: [dp.ShapeBuckets(batch=tuple(range(1, 11)))]}
    disabled = dp.CompilePolicy.from_env(buckets, environ={"DYNAPOLICY_DISABLE": "1"})
    assert disabled.compile_kwargs(step, isolate=isolate) == {}


def test_a_keyword_of_the_callers_wins(keyword: str) -> None:
    """``dp.compile`` passes on what it is given."""
    function = fresh()
    backend = CountingBackend()
    with dp.apply_policy(policy_of(10)):
        compiled = dp.compile(function, backend=backend, **{keyword: 5})
        use(compiled, 7)
    assert backend.calls == 5


# -- budgets of their own ------------------------------------------------------------------------------


def use(compiled: Any, shapes: int) -> None:
    """So many shapes, each compared with eager."""
    import torch

    for size in range(2, 2 + shapes):
        x = torch.arange(float(size))
        assert torch.equal(compiled(x), step(x))


def test_isolated_wrappers_have_budgets_of_their_own_or_share_the_sum() -> None:
    """Two wrappers with 10 declared shapes and 2 more: 12 each where torch can part them, else 24 together."""
    function, first, second = fresh(), CountingBackend(), CountingBackend()
    with dp.apply_policy(policy_of(10)):
        one = dp.compile(function, isolate=True, backend=first)
        two = dp.compile(function, isolate=True, backend=second)
        use(one, 14)
        use(two, 14)
    if dp.capabilities().isolate_recompiles:
        assert (first.calls, second.calls) == (12, 12)
    else:
        assert (first.calls, second.calls) == (14, 10)


def test_wrappers_that_are_not_isolated_share_one_budget() -> None:
    """That is torch's own count: both wrappers' entries are on one code object."""
    function, first, second = fresh(), CountingBackend(), CountingBackend()
    with dp.apply_policy(policy_of(10)):
        one = dp.compile(function, backend=first)
        two = dp.compile(function, backend=second)
        use(one, 7)
        use(two, 14)
    assert (first.calls, second.calls) == (7, 5)


def test_the_sum_follows_the_wrappers_that_live() -> None:
    """What isolated wrappers need is added while they live, on every thread, whoever compiled them."""
    function = fresh()
    sum_of = "accumulated_recompile_limit" if limit_name() == "recompile_limit" else "accumulated_cache_size_limit"
    with dp.apply_policy(policy_of(98)), new_thread() as run:
        assert run(limits_read)[sum_of] == 400
        wrappers = [run(lambda: dp.compile(function, isolate=True, backend="eager")) for _ in range(5)]
        can = dp.capabilities().isolate_recompiles
        assert run(limits_read)[sum_of] == (500 if can else 2000)
        assert limits_read()[limit_name()] == (100 if can else 500)
        wrappers.clear()
        gc.collect()
        dp.compile(fresh(), backend="eager")
        assert run(limits_read)[sum_of] == 400
        assert limits_read()[limit_name()] == 100


# -- a tight keyword stays tight ------------------------------------------------------------------------


def holding(value: int | None, body: Any) -> Any:
    """Run in a context of this thread that holds a deliberate limit, which goes with the context."""
    import torch._dynamo

    def held() -> Any:
        if value is not None:
            setattr(torch._dynamo.config, limit_name(), value)
        return body()

    return contextvars.copy_context().run(held)


@pytest.mark.parametrize("held", [None, 30, 9, 8, 5])
@pytest.mark.parametrize("tight", [5, 8, 11])
def test_a_tight_keyword_stays_tight_under_a_policy(keyword: str, tight: int, held: int | None) -> None:
    """The process's value does not widen it, whatever main holds since before the policy, and on no other thread."""
    wanted = [*range(1, tight + 1), tight]

    def body() -> None:
        with dp.apply_policy(policy_of(18)), new_thread() as run:
            assert probe(tight + 1, **{keyword: tight}).calls == wanted
            assert run(lambda: probe(tight + 1, **{keyword: tight})).calls == wanted
            assert limits_read()[limit_name()] == max(held or 20, 20)
            assert run(limits_read)[limit_name()] == 20

    holding(held, body)


@pytest.mark.parametrize("held", [None, 30, 9, 8, 5])
def test_a_tight_patch_stays_tight_under_a_policy(held: int | None, keyword: str, torch_ready: Any) -> None:
    """Torch's own ``patch`` under a policy narrows the context that uses it, and only as long as it is open."""

    def body() -> None:
        with dp.apply_policy(policy_of(18)):
            with torch_ready._dynamo.config.patch({keyword: 6}):
                assert probe(7).calls == [*range(1, 7), 6]
            assert limits_read()[keyword] == max(held or 20, 20)

    holding(held, body)


def test_a_wide_keyword_stays_wide_under_a_policy(keyword: str) -> None:
    """A keyword over the process's value gives what it says."""
    with dp.apply_policy(policy_of(8)), new_thread() as run:
        assert probe(15, **{keyword: 14}).calls == [*range(1, 15), 14]
        assert run(lambda: probe(15, **{keyword: 14})).calls == [*range(1, 15), 14]


def test_a_deliberate_narrower_value_wins_where_it_stands(torch_ready: Any) -> None:
    """A thread that set 5 by hand before the policy keeps 5, and only that thread; before 2.12 there is one value."""
    from places import thread_started_before

    config = torch_ready._dynamo.config
    with thread_started_before() as run:
        run(setattr, config, limit_name(), 5)
        with dp.apply_policy(policy_of(8)):
            local = dp.capabilities().context_local_config
            assert run(probe, 11).calls[-1] == (5 if local else 10)
            assert probe(11).calls[-1] == 10
        assert run(limits_read)[limit_name()] == 5
        run(setattr, config, limit_name(), 8)
