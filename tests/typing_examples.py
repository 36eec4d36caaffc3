"""What a user writes, checked by mypy in strict mode and never run."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dynapolicy as dp


def decode(x: Any) -> Any:
    """A function that is compiled."""
    return x


class Engine:
    """Computes its buckets from its configurations."""

    def capture_buckets(self) -> dict[Any, list[dp.ShapeBuckets]]:
        return {decode: [dp.ShapeBuckets(batch=(1, 2, 4))]}


def declare() -> dp.CompilePolicy:
    product = dp.ShapeBuckets(batch=(1, 2, 4, 8), tokens=range(1, 3), variants=2)
    shapes = dp.ShapeBuckets.of([(3, 17), (5, 40)])
    both: dp.ShapeBuckets = product | shapes
    entries: int = both.entries
    names: list[str] = [axis for shape in both for axis in shape]
    assert entries and names
    dp.CompilePolicy(Engine())
    dp.CompilePolicy({decode: product, "pkg.mod:Encoder.forward": [shapes]}, floor=8, on_limit="raise")
    return dp.CompilePolicy.from_env(
        buckets={decode: [both]},
        ceil=1024,
        eager_headroom=8,
        float32_matmul_precision=None,
        settings={"dynamo.specialize_int": False, "inductor.max_autotune": True},
        prefix="ENGINE_",
        environ=os.environ,
    )


def read(policy: dp.CompilePolicy) -> dict[str, object]:
    limits: dp.RecompileLimits = policy.limits
    own: int = policy.limits_for(decode).recompile_limit
    keywords: dict[str, Any] = policy.compile_kwargs(decode, isolate=True)
    records: dict[str, object] = {one.name: one.value for one in policy.knobs}
    again: dp.CompilePolicy = dp.CompilePolicy.from_json(policy.to_json())
    assert limits.accumulated_recompile_limit >= own and keywords and again == policy and hash(policy)
    return records


def put_in_force(policy: dp.CompilePolicy) -> None:
    applied: dp.AppliedPolicy = dp.apply_policy(policy)
    scope: str = applied.scope
    applied.restore()
    with dp.apply_policy(policy, scope="context", exact=True) as inner:
        current: dp.CompilePolicy | None = dp.current_policy()
        assert inner.policy is current and scope
    with ThreadPoolExecutor(1, initializer=dp.apply_policy, initargs=(policy,)) as pool:
        pool.submit(dp.initializer(policy), 0)
    dp.compile(decode, policy=policy, isolate=True, backend="eager", fullgraph=True)


def catch(policy: dp.CompilePolicy) -> tuple[str, object, str, str, str]:
    try:
        dp.apply_policy(policy)
    except dp.SettingError as error:
        return error.thing, error.value, error.rule, error.source, error.way_out
    can: dp.Capabilities = dp.capabilities()
    return can.torch_version, can.isolate_recompiles, "", "", ""


# What mypy must refuse: an unused ignore is an error as well.
dp.CompilePolicy(floor="8")  # type: ignore[arg-type]
dp.CompilePolicy(None, 8)  # type: ignore[call-arg]
dp.apply_policy(scope="thread")  # type: ignore[arg-type]
dp.CompilePolicy(settings={"dynamo.x": 1.5})  # type: ignore[dict-item]
dp.ShapeBuckets(batch=8)  # type: ignore[arg-type]
dp.CompilePolicy().settings = ()  # type: ignore[misc]
