"""What the core costs, each figure as a ratio of two things measured in turns, in one run.

Not part of ``make test``: ``make bench``. A shared machine disturbs both sides of a ratio alike, so the
medians of many short rounds are what counts; the bounds asserted are wide, the figures are in the report.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import dynapolicy as dp
from dynapolicy.torch_compat.settings import find, limit_names

ROUNDS = 60


@attrs.frozen
class Ratio:
    """One line of the report; times in seconds for one call."""

    what: str
    median: float
    low: float
    high: float
    ours: float
    theirs: float

    def __str__(self) -> str:
        times = f"{self.ours * 1e6:10.2f} µs {self.theirs * 1e6:10.2f} µs"
        return f"{self.what:<58} {self.median:6.2f}  ({self.low:.2f} ... {self.high:.2f}) {times}"


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Seconds for one call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def in_turns(what: str, ours: Callable[[], Any], theirs: Callable[[], Any], calls: int) -> Ratio:
    """The ratio of two calls, measured alternately, each first in every other round. The range is the middle 80 %."""
    for call in (ours, theirs):
        per_call(call, calls)
    gc.disable()
    try:
        pairs = []
        for number in range(ROUNDS):
            if number % 2:
                one = per_call(ours, calls)
                pairs.append((one, per_call(theirs, calls)))
            else:
                other = per_call(theirs, calls)
                pairs.append((per_call(ours, calls), other))
    finally:
        gc.enable()
    ratios = sorted(one / other for one, other in pairs)
    tenth = len(ratios) // 10
    middles = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return Ratio(what, statistics.median(ratios), ratios[tenth], ratios[-1 - tenth], *middles)


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[Ratio]]:
    """Collects the lines, and prints them when the last one is there."""
    lines: list[Ratio] = []
    yield lines
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\nmedian ratio (middle 80 % of the rounds), then one call of each side")
        print("\n".join(map(str, lines)))


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch, ready to compile."""
    torch = pytest.importorskip("torch")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return torch


def step_of(number: int) -> Any:
    """A function with a code object of its own."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(f"def step(x):\n    return x + {number}\n", names)
    return names["step"]


WAYS = {
    "no policy": (None, {}),
    "policy": (dp.ShapeBuckets(batch=range(1, 13)), {}),
    "policy, isolate=True": (dp.ShapeBuckets(batch=range(1, 13)), {"isolate": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_calling_what_was_compiled(way: str, torch: Any, benchmark: Any, report: list[Ratio]) -> None:
    """``dp.compile`` gives torch's own object, so a call costs what it costs."""
    buckets, keywords = WAYS[way]
    mine, plain = step_of(1), step_of(2)
    policy = None if buckets is None else dp.CompilePolicy({mine: buckets})
    ours = dp.compile(mine, policy=policy, backend="eager", **keywords)
    theirs = torch.compile(plain, backend="eager", dynamic=False)
    assert type(ours) is type(theirs)
    assert (ours.__code__, ours.__globals__) == (theirs.__code__, theirs.__globals__)
    x = torch.ones(4)
    line = in_turns(f"call of dp.compile(f), {way} / torch.compile(f)", lambda: ours(x), lambda: theirs(x), 300)
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line))
    benchmark(ours, x)
    assert line.median < 1.3


def test_calling_while_a_policy_is_in_force(torch: Any, benchmark: Any, report: list[Ratio]) -> None:
    """Nothing of it is on the way of a call."""
    compiled = torch.compile(step_of(3), backend="eager", dynamic=False)
    x = torch.ones(4)
    compiled(x)
    policy = dp.CompilePolicy(floor=64)
    sides: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * ROUNDS):
        if number % 2:
            with dp.apply_policy(policy):
                sides[True].append(per_call(lambda: compiled(x), 300))
        else:
            sides[False].append(per_call(lambda: compiled(x), 300))
    ratios = sorted(one / other for one, other in zip(sides[True], sides[False], strict=True))
    tenth = len(ratios) // 10
    middles = [statistics.median(side) for side in sides.values()]
    line = Ratio(
        "call with a policy in force / without", statistics.median(ratios), ratios[tenth], ratios[-1 - tenth], *middles
    )
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line))
    benchmark(compiled, x)
    assert line.median < 1.3


def test_applying_and_restoring(torch: Any, benchmark: Any, report: list[Ratio]) -> None:
    """Against the bare assignments that it replaces, which hold in one context only."""
    config = torch._dynamo.config
    limit, accumulated = (name.partition(".")[2] for name in limit_names(dp.capabilities())[:2])
    policy = dp.CompilePolicy(floor=64)

    def ours() -> None:
        dp.apply_policy(policy).restore()

    def theirs() -> None:
        before = getattr(config, limit), getattr(config, accumulated)
        setattr(config, limit, 64)
        setattr(config, accumulated, 256)
        setattr(config, limit, before[0])
        setattr(config, accumulated, before[1])

    line = in_turns("apply_policy and restore / save, assign, assign back", ours, theirs, 100)
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line))
    benchmark(ours)
    assert line.ours < 0.01


def test_applying_what_is_in_force(torch: Any, benchmark: Any, report: list[Ratio]) -> None:
    """An executor's initializer on the second thread and later."""
    policy = dp.CompilePolicy(floor=64)
    limit = limit_names(dp.capabilities())[0].partition(".")[2]
    config = torch._dynamo.config
    with dp.apply_policy(policy):
        line = in_turns(
            "apply_policy again / one assignment",
            lambda: dp.apply_policy(policy),
            lambda: setattr(config, limit, 64),
            100,
        )
        benchmark(dp.apply_policy, policy)
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line))
    assert line.ours < 0.01


@pytest.mark.parametrize("applied", [False, True], ids=["installed", "in force"])
def test_reading_a_setting(applied: bool, torch: Any, benchmark: Any, report: list[Ratio]) -> None:
    """Torch reads settings while it compiles, not while it runs: one with the stand-in against one without."""
    config = torch._dynamo.config
    setting = find("dynamo.specialize_int")
    assert setting is not None
    setting.override()
    policy = dp.CompilePolicy(settings={"dynamo.specialize_int": True} if applied else {})
    with dp.apply_policy(policy):
        what = f"reading a setting, override {'in force' if applied else 'installed'} / torch's own"
        line = in_turns(what, lambda: config.specialize_int, lambda: config.specialize_float, 2000)
        benchmark(lambda: config.specialize_int)
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line))
    assert line.median < 10


def test_importing(benchmark: Any, report: list[Ratio]) -> None:
    """Under 100 ms more than a bare interpreter."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    pairs = [(seconds("import dynapolicy"), seconds("pass")) for _ in range(16)][1:]
    ratios = sorted(one / other for one, other in pairs)
    more = statistics.median(one - other for one, other in pairs)
    middles = [statistics.median(side) for side in zip(*pairs, strict=True)]
    line = Ratio(
        "python -c 'import dynapolicy' / python -c pass", statistics.median(ratios), ratios[1], ratios[-2], *middles
    )
    report.append(line)
    benchmark.extra_info.update(attrs.asdict(line), more=more)
    benchmark.pedantic(seconds, ["import dynapolicy"], rounds=3)
    assert more < 0.1
