"""Laws of the derivation, and of a policy as a value."""

from __future__ import annotations

import json
import pickle
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapolicy import CeilingError, CeilingWarning, CompilePolicy, RecompileLimits, ShapeBuckets
from strategies import LAW, NAMES, buckets, declarations, knob_arguments, policies, settings_asked


@LAW
@given(declarations, knob_arguments)
def test_limits_are_those_of_the_formula(declared: Any, knobs: Any) -> None:
    """Entries and headroom, not under the floor, not over the ceiling; accumulated four times that, at least 256."""
    policy = CompilePolicy(declared, **knobs)
    needed = [sum(one.entries for one in given_buckets) for given_buckets in declared.values()]
    each = [min(max(policy.floor, entries + policy.eager_headroom), policy.ceil) for entries in needed]
    limit = max(each, default=policy.floor)
    assert policy.limits == RecompileLimits(limit, max(256, 4 * limit))
    for name, own in zip(declared, each, strict=True):
        assert policy.limits_for(name) == RecompileLimits(own, max(256, 4 * own))


@LAW
@given(policies)
def test_the_accumulated_limit_is_never_under_the_plain_one(policy: CompilePolicy) -> None:
    """For the process and for every declared code object."""
    for limits in (policy.limits, *(policy.limits_for(one.name) for one in policy.declarations)):
        assert limits.accumulated_recompile_limit >= max(256, limits.recompile_limit)


@LAW
@given(declarations, knob_arguments, st.sampled_from(NAMES), buckets)
def test_another_bucket_never_lowers_a_limit(declared: Any, knobs: Any, name: str, more: ShapeBuckets) -> None:
    """Neither the process's nor any code object's."""
    less = CompilePolicy(declared, **knobs)
    full = CompilePolicy({**declared, name: [*declared.get(name, []), more]}, **knobs)
    assert full.limits.recompile_limit >= less.limits.recompile_limit
    assert full.limits.accumulated_recompile_limit >= less.limits.accumulated_recompile_limit
    for target in declared:
        assert full.limits_for(target).recompile_limit >= less.limits_for(target).recompile_limit


@LAW
@given(buckets, buckets)
def test_both_together_need_no_more_than_each_of_them(one: ShapeBuckets, other: ShapeBuckets) -> None:
    """``a | b`` is between the larger of them and their sum, and the order says nothing."""
    both = one | other
    assert max(one.entries, other.entries) <= both.entries <= one.entries + other.entries
    assert both == other | one
    assert one | one == one
    merged = CompilePolicy({NAMES[0]: both}).limits.recompile_limit
    assert merged <= CompilePolicy({NAMES[0]: [one, other]}).limits.recompile_limit


@LAW
@given(buckets)
def test_buckets_come_back_from_json(one: ShapeBuckets) -> None:
    """``from_json`` undoes ``to_json``, through text."""
    assert ShapeBuckets.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert len(one.shapes) <= one.entries


@LAW
@given(policies)
def test_a_policy_comes_back_from_json_and_pickle(policy: CompilePolicy) -> None:
    """Equal, of one hash, and with the same records of where every value came from."""
    for again in (CompilePolicy.from_json(policy.to_json()), pickle.loads(pickle.dumps(policy))):
        assert again == policy
        assert hash(again) == hash(policy)
        assert [attrs.asdict(one) for one in again.knobs] == [attrs.asdict(one) for one in policy.knobs]
        assert again.limits == policy.limits


@LAW
@given(declarations, settings_asked, knob_arguments, st.sampled_from(["DYNAPOLICY_", "ENGINE_"]))
def test_equality_ignores_where_values_came_from(declared: Any, asked: Any, knobs: Any, prefix: str) -> None:
    """The same values from arguments and from an environment make equal policies of one hash."""
    argued = CompilePolicy(declared, settings=asked, **knobs)
    environ = {prefix + name.upper(): str(value) for name, value in knobs.items()}
    read = CompilePolicy.from_env(declared, settings=asked, environ=environ, prefix=prefix)
    assert argued == read
    assert hash(argued) == hash(read)
    assert {argued: 1}[read] == 1


@LAW
@given(declarations)
def test_the_order_of_declarations_says_nothing(declared: Any) -> None:
    """Targets declared in another order make an equal policy."""
    assert CompilePolicy(declared) == CompilePolicy(dict(reversed(declared.items())))


@pytest.mark.parametrize("ceil", [1, 5, 11])
def test_entries_over_the_ceiling_are_said(ceil: int) -> None:
    """It names code object, entries, ceiling and how many shapes would run eager; with ``raise`` it is an error."""
    declared = {"pkg.mod:Decoder.forward": ShapeBuckets(batch=range(1, 13))}
    parts = ["pkg.mod:Decoder.forward", "12", str(ceil), f"{12 - ceil} would run eager", "DYNAPOLICY_CEIL"]
    with pytest.warns(CeilingWarning) as said:
        policy = CompilePolicy(declared, ceil=ceil)
    assert policy.limits.recompile_limit == ceil
    assert [part for part in parts if part not in str(said[0].message)] == []
    with pytest.raises(CeilingError) as caught:
        CompilePolicy(declared, ceil=ceil, on_limit="raise")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_entries_at_the_ceiling_are_fine() -> None:
    """As many entries as CEIL allows leave no shape out, whatever the headroom."""
    policy = CompilePolicy({"pkg.mod:f": ShapeBuckets(batch=range(1, 13))}, ceil=12, eager_headroom=8)
    assert policy.limits.recompile_limit == 12


def test_a_policy_is_frozen() -> None:
    """Nothing of it can be assigned."""
    policy = CompilePolicy()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.settings = ()  # type: ignore[misc]
