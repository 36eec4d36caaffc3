"""Failures that people reported of programs that use torch.compile, one test each, named after what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.observe.per_place import PlaceRecord, _child_that_forgot
from places import (
    CountingBackend,
    _in_child,
    autograd_thread,
    executor,
    fresh,
    limit_name,
    limits_read,
    new_thread,
    probe,
    server,
    thread_started_before,
)

pytestmark = pytest.mark.usefixtures("torch_ready")


def decode(x: Any) -> Any:
    """A decoder step."""
    return x * 2 + 1


def call(step: Any, sizes: Iterable[int], function: Any = decode) -> None:
    """Call with every size, and compare with eager."""
    import torch

    for size in sizes:
        x = torch.arange(float(size))
        assert torch.equal(step(x), function(x))


def sizes(count: int) -> range:
    """So many sizes, from 2 on."""
    return range(2, 2 + count)


def declared(count: int, function: Any = decode, **knobs: Any) -> dp.CompilePolicy:
    """So many sizes of one function."""
    return dp.CompilePolicy({function: dp.ShapeBuckets(batch=sizes(count))}, **knobs)


def row_of(function: Any) -> Any:
    """The audit's row of a function."""
    return next(row for row in dp.audit() if row.code.endswith(function.__qualname__))


# -- buckets and budgets ------------------------------------------------------------------------------


def test_the_ninth_captured_batch_size_runs_eager(counting_backend: CountingBackend) -> None:
    """Twelve captured sizes: all compile, without a warning."""
    with dp.apply_policy(declared(12)):
        call(dp.compile(decode, backend=counting_backend), sizes(12))
    assert counting_backend.calls == 12


def test_a_limit_far_too_high_recompiles_while_serving(counting_backend: CountingBackend) -> None:
    """Four buckets and twenty undeclared shapes: the limit is tight, and frozen nothing compiles at all."""
    step = dp.compile(decode, backend=counting_backend)
    with dp.apply_policy(declared(4)):
        call(step, sizes(4))
        with dp.freeze():
            call(step, sizes(24))
            assert counting_backend.calls == 4
        with pytest.warns(dp.RecompileLimitWarning):
            call(step, sizes(24))
    assert counting_backend.calls == 4 + 8


def test_more_buckets_than_anyone_allows() -> None:
    """CEIL holds, and the message says what would run eager."""
    with pytest.warns(
        dp.CeilingWarning, match=r"decode: CEIL allows 100 of the 120 declared entries, 20 would run eager"
    ):
        policy = declared(120, ceil=100)
    assert policy.limits.recompile_limit == 100
    with pytest.raises(dp.CeilingError, match="decode"):
        declared(120, ceil=100, on_limit="raise")


def test_a_tight_budget_lowers_everybody_elses(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Another function lives under 64: a policy of nine leaves it there, and binds its own function where torch can."""

    def other(x: Any) -> Any:
        return x - 3

    theirs = CountingBackend()
    with torch_ready._dynamo.config.patch({limit_name(): 64}), dp.apply_policy(declared(9, floor=1, eager_headroom=0)):
        call(torch_ready.compile(other, backend=theirs, dynamic=False), sizes(20), other)
        assert theirs.calls == 20
        step = dp.compile(decode, backend=counting_backend)
        call(step, sizes(9))
        if dp.capabilities().recompile_limit_keyword:
            with pytest.warns(dp.RecompileLimitWarning):
                call(step, sizes(20))
            assert counting_backend.calls == 9


def test_optional_arguments_multiply_the_buckets(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Two arguments, each None or a tensor, times six sizes: 24 entries, declared with ``variants=4``."""

    def attend(x: Any, mask: Any = None, bias: Any = None) -> Any:
        x = x if mask is None else x * mask
        return x * 2 if bias is None else x * 2 + bias

    policy = dp.CompilePolicy({attend: dp.ShapeBuckets(batch=sizes(6), variants=4)}, eager_headroom=0)
    with dp.apply_policy(policy):
        assert limits_read()[limit_name()] == 24
        step = dp.compile(attend, backend=counting_backend)
        for size in sizes(6):
            x = torch_ready.ones(size)
            for arguments in ((x,), (x, x), (x, None, x), (x, x, x)):
                assert torch_ready.equal(step(*arguments), attend(*arguments))
    assert counting_backend.calls == 24


@pytest.mark.parametrize("variants", [1, 2])
def test_serving_in_another_mode_than_the_warm_up_compiles_again(
    counting_backend: CountingBackend, torch_ready: Any, variants: int
) -> None:
    """Variants cover it; without them the audit says that the mode made the entries, not a shape."""
    with dp.apply_policy(dp.CompilePolicy({decode: dp.ShapeBuckets(batch=sizes(6), variants=variants)})):
        step = dp.compile(decode, backend=counting_backend)
        with torch_ready.inference_mode():
            call(step, sizes(6))
        with torch_ready.no_grad():
            call(step, sizes(6))
        row = row_of(decode)
    assert counting_backend.calls == 12
    assert row.state == ("guarded state" if variants == 1 else "fine")
    assert variants == 2 or "dispatch keys" in row.why


def layers(torch: Any, count: int) -> list[Any]:
    """Modules of one class that share their code object, and differ in a guarded number."""

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, scale: int) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Any) -> Any:
            return x * self.scale

    return [Layer(2 + index) for index in range(count)]


def test_layers_of_one_class_share_one_limit(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Three buckets times ten layers, declared through ``variants`` or as several buckets; both limits follow."""
    found = layers(torch_ready, 10)
    buckets = dp.ShapeBuckets(batch=sizes(3))
    for declaration in (dp.ShapeBuckets(batch=sizes(3), variants=10), [buckets] * 10):
        policy = dp.CompilePolicy({type(found[0]): declaration})
        assert policy.limits == dp.RecompileLimits(38, 256)
    with dp.apply_policy(policy):
        for layer in found:
            call(dp.compile(layer, backend=counting_backend), sizes(3), layer.forward)
    assert counting_backend.calls == 30
    assert dp.CompilePolicy({type(found[0]): [buckets] * 100}).limits == dp.RecompileLimits(308, 1232)


def test_everything_is_slow_until_the_program_restarts(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Nine guarded ints, then reuse: one warning names function, limit and remedy, and ``recover`` works."""

    def sample(x: Any, steps: int) -> Any:
        return x * steps

    step = dp.compile(sample, backend=counting_backend)
    with dp.apply_policy(dp.CompilePolicy()):
        with pytest.warns(dp.RecompileLimitWarning, match=r"sample .*limit=8.*recover\(\)") as caught:
            for steps in (*range(2, 14), *range(2, 14)):
                step(torch_ready.ones(3), steps)
        assert len(caught) == 1
        assert counting_backend.calls == 8
        dp.recover(sample)
        step(torch_ready.ones(3), 13)
        assert counting_backend.calls == 9


# -- where it is seen ---------------------------------------------------------------------------------


def test_settings_made_at_import_are_ignored_on_the_executor_that_compiles(torch_ready: Any) -> None:
    """All declared settings hold there, not only the limit."""
    config = torch_ready._dynamo.config
    policy = declared(12, settings={"dynamo.specialize_int": True, "inductor.max_fusion_size": 17})
    with executor() as run, dp.apply_policy(policy):
        assert run(lambda: config.specialize_int) is True
        assert run(lambda: torch_ready._inductor.config.max_fusion_size) == 17
        assert run(probe, 12).calls == list(range(1, 13))


@pytest.mark.parametrize("fullgraph", [False, True], ids=["plain", "fullgraph"])
def test_checkpointing_recomputes_on_a_thread_with_settings_of_its_own(
    counting_backend: CountingBackend, torch_ready: Any, fullgraph: bool
) -> None:
    """Reentrant checkpoints nested 70 deep: the recompute is on an autograd thread, and compiles."""
    from torch.utils.checkpoint import checkpoint

    policy = dp.CompilePolicy({decode: dp.ShapeBuckets(batch=sizes(12), variants=2)})
    step = dp.compile(decode, backend=counting_backend, fullgraph=fullgraph)

    def nested(x: Any, depth: int) -> Any:
        return step(x) if depth == 0 else checkpoint(nested, x, depth - 1, use_reentrant=True)

    with dp.apply_policy(policy):
        for size in sizes(12):
            x = torch_ready.ones(size, requires_grad=True)
            nested(x, 70).sum().backward()
            assert torch_ready.equal(x.grad, torch_ready.full((size,), 2.0))
    assert counting_backend.calls == 24
    assert len(set(counting_backend.threads)) > 1


def test_raised_to_a_high_limit_and_no_difference(counting_backend: CountingBackend) -> None:
    """Twelve entries on main, one new shape on a worker: it compiles there, and main goes on compiling."""
    with executor() as run, dp.apply_policy(declared(56)):
        step = dp.compile(decode, backend=counting_backend)
        call(step, sizes(12))
        run(call, step, [50])
        assert counting_backend.calls == 13
        call(step, [51, 52])
    assert counting_backend.calls == 15


def test_four_places_had_to_call_the_set_up_by_hand() -> None:
    """One call at start-up: a thread of the UI, the backward thread and a sampling thread see it."""
    everywhere = thread_started_before(), autograd_thread(), new_thread()
    with everywhere[0] as ui, everywhere[1] as backward, everywhere[2] as sampling, dp.apply_policy(declared(12)):
        for run in (ui, backward, sampling):
            assert run(probe, 12).calls == list(range(1, 13))


def test_settings_of_the_launcher_do_not_reach_a_spawned_worker() -> None:
    """The policy travels to it; where the initializer was forgotten, the first row of ``doctor`` says so."""
    with process_without_policy() as run:
        rows = run(forgotten)
        # What an initializer is given travels to the child, and holds there.
        run(dp.initializer(declared(12)))
        assert run(probe, 12).calls == list(range(1, 13))
        assert not run(forgotten)
    assert [(row.seen, row.asked, row.compiled, row.ok) for row in rows] == [(8, 20, 8, False)]
    assert "initializer=dynapolicy.apply_policy" in rows[0].advice


@contextlib.contextmanager
def process_without_policy() -> Iterator[Any]:
    """A spawned child whose program forgot the initializer."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda body, *args: pool.submit(_in_child, body, args).result()


def forgotten() -> list[PlaceRecord]:
    """The doctor's row about this very process."""
    from dynapolicy.observe.probe import quiet

    with quiet():
        return list(_child_that_forgot(20, 12))


def test_what_a_lifespan_task_applies_does_not_reach_the_handlers() -> None:
    """Real sockets: it holds in each handler, and in the executor that a handler awaits."""
    with server(declared(12)) as ask:
        for where in ("handler", "executor", "handler"):
            assert ask(where, 12).calls == list(range(1, 13))


def test_a_fixture_that_restores_in_another_task_breaks_torch() -> None:
    """Applied in one task or thread and restored in another: exact with process scope, refused with context scope."""
    before = limits_read()

    async def fixture(scope: Any) -> AsyncIterator[dp.AppliedPolicy]:
        with dp.apply_policy(declared(30), scope=scope) as applied:
            yield applied

    async def main(scope: Any) -> None:
        generator = fixture(scope)
        await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
        await asyncio.create_task(anext(generator, None))  # type: ignore[arg-type]

    asyncio.run(main("process"))
    assert limits_read() == before
    with new_thread() as run:
        applied = run(dp.apply_policy, declared(30))
        assert limits_read() != before
        applied.restore()
    assert limits_read() == before
    if dp.capabilities().context_local_config:
        with pytest.raises(dp.RestoreError, match="another thread or task"):
            asyncio.run(main("context"))
        assert limits_read() == before


def test_fail_loudly_was_set_on_main_and_a_worker_runs_eager() -> None:
    """``on_limit="raise"`` raises on the worker."""
    with executor() as run, dp.apply_policy(declared(4, on_limit="raise")):
        seen = run(probe, 14)
    assert seen.calls == list(range(1, 13))
    assert seen.error in {one.__name__ for one in dp.LIMIT_ERRORS}


@pytest.mark.parametrize("on_limit", ["warn", "raise"])
def test_a_hit_inside_an_awaited_executor_is_lost(counting_backend: CountingBackend, on_limit: str) -> None:
    """The exception reaches whoever awaits; a warning names function and limit on that thread."""
    step = dp.compile(decode, backend=counting_backend)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, call, step, sizes(16))

    with dp.apply_policy(declared(4, on_limit=on_limit)):
        caught: Any = pytest.raises(dp.LIMIT_ERRORS, match=r"decode .*limit=12") if on_limit == "raise" else None
        with caught or pytest.warns(dp.RecompileLimitWarning, match=r"decode .*limit=12"):
            asyncio.run(main())
    assert counting_backend.calls == 12


# -- names and values ---------------------------------------------------------------------------------


def test_the_new_name_of_the_limit_on_an_old_torch() -> None:
    """The policy finds the name that is there; no AttributeError, and no setting that nobody reads."""
    with dp.apply_policy(declared(12)):
        read = limits_read()
    assert read[limit_name()] == 20
    assert {value for name, value in read.items() if "limit_hit" not in name} == {20, 256}


def test_the_keyword_on_an_old_torch(counting_backend: CountingBackend) -> None:
    """No TypeError where torch lacks it: the process's value takes over, and all twelve compile."""
    policy = declared(12)
    expected = {"recompile_limit": 20} if dp.capabilities().recompile_limit_keyword else {}
    assert policy.compile_kwargs(decode) == expected
    with dp.apply_policy(policy):
        call(dp.compile(decode, backend=counting_backend), sizes(12))
    assert counting_backend.calls == 12


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", 8), (" 64 ", 64), ("0", 1), ("9" * 40, 65536), ("abc", None), ("12.5", None), ("-1", None), ("1e3", None)],
)
def test_a_bad_number_in_the_environment_breaks_a_later_forward(text: str, limit: int | None) -> None:
    """Clear at start-up: read, clamped with a warning, or an error; never a TypeError inside a call."""
    environ = {"DYNAPOLICY_FLOOR": text}
    if limit is None:
        with pytest.raises(dp.KnobError, match=r"DYNAPOLICY_FLOOR.*whole number"):
            dp.CompilePolicy.from_env(environ=environ)
        return
    clamped = text in ("0", "9" * 40)
    with pytest.warns(dp.KnobWarning, match="DYNAPOLICY_FLOOR") if clamped else contextlib.nullcontext():
        policy = dp.CompilePolicy.from_env(ceil=65536, environ=environ)
    with dp.apply_policy(policy):
        assert limits_read()[limit_name()] == max(8, limit)
        assert probe(3).calls == [1, 2, 3]


# -- entries that multiply ----------------------------------------------------------------------------


def test_a_compiled_optimizer_step_raises_at_the_ninth_parameter_shape(
    counting_backend: CountingBackend, torch_ready: Any
) -> None:
    """Buckets from the parameters, ``fullgraph``; no global change where the keyword exists."""

    def update(parameter: Any, grad: Any) -> Any:
        return parameter - 0.1 * grad

    model = torch_ready.nn.ParameterList([torch_ready.ones(size, 2) for size in sizes(12)])
    policy = dp.CompilePolicy({update: dp.ShapeBuckets.of_parameters(model)})
    assert policy.declarations[0].entries == 12
    keywords = policy.compile_kwargs(update)
    before = limits_read()
    with contextlib.nullcontext() if keywords else dp.apply_policy(policy):
        step = torch_ready.compile(update, backend=counting_backend, dynamic=False, fullgraph=True, **keywords)
        for parameter in model:
            grad = torch_ready.ones_like(parameter)
            assert torch_ready.equal(step(parameter, grad), update(parameter, grad))
        assert not keywords or limits_read() == before
    assert counting_backend.calls == 12


def test_a_factory_that_wraps_one_function_many_times(torch_ready: Any) -> None:
    """Three wrappers of six sizes: budgets of their own where torch isolates, the sum where it can't."""
    backends = [CountingBackend() for _ in range(3)]
    with dp.apply_policy(declared(6, eager_headroom=0)):
        steps = [dp.compile(decode, isolate=True, backend=backend) for backend in backends]
        for step in steps:
            call(step, sizes(6))
    assert [backend.calls for backend in backends] == [6, 6, 6]


def test_more_than_256_entries_through_many_layers(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Nine sizes of thirty layers: the accumulated limit follows."""
    found = layers(torch_ready, 30)
    with dp.apply_policy(dp.CompilePolicy({type(found[0]): dp.ShapeBuckets(batch=sizes(9), variants=30)})):
        for layer in found:
            call(dp.compile(layer, backend=counting_backend), sizes(9), layer.forward)
    assert counting_backend.calls == math.prod((9, 30))


def test_nothing_tells_which_frame_hit_the_limit(counting_backend: CountingBackend) -> None:
    """The audit does, among others that did not."""
    functions = [fresh(decode) for _ in range(3)]
    with dp.apply_policy(declared(2)):
        steps = [dp.compile(function, backend=counting_backend) for function in functions]
        call(steps[0], sizes(2))
        call(steps[2], sizes(3))
        with pytest.warns(dp.RecompileLimitWarning):
            call(steps[1], sizes(12))
        lines = [(row.declared, row.entries, row.state) for row in dp.audit() if row.entries]
    assert sorted(lines) == [(2, 2, "fine"), (2, 3, "undeclared shapes"), (2, 10, "exhausted")]
