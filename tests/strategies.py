"""Hypothesis strategies, biased to the bounds, and the profile that the laws run under."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dynapolicy import CompilePolicy, ShapeBuckets
from dynapolicy.knob_table import KNOBS, Knob

#: A busy machine must not fail a law, and a failing one must fail again.
LAW = settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

NUMBER_ROWS = tuple(row for row in KNOBS if row.low is not None)
NAMES = ("pkg.mod:Encoder.forward", "pkg.mod:Decoder.forward", "pkg.other:step")


def numbers_near(row: Knob) -> st.SearchStrategy[int]:
    """Whole numbers, the bounds of ``row`` and their neighbours often."""
    low, high = row.low or 0, row.high or 0
    edges = [low - 1, low, low + 1, high - 1, high, high + 1]
    return st.one_of(st.sampled_from(edges), st.integers(-(10**30), 10**30))


def numbers_within(row: Knob) -> st.SearchStrategy[int]:
    """Whole numbers that ``row`` allows, its bounds often."""
    low, high = row.low or 0, row.high or 0
    return st.one_of(st.sampled_from([low, high]), st.integers(low, high))


def values_of(row: Knob) -> st.SearchStrategy[Any]:
    """Every value that a knob can hold."""
    if row.words:
        return st.sampled_from(row.words)
    return (
        st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1)
        if row.low is None
        else numbers_within(row)
    )


sizes = st.one_of(st.integers(1, 4), st.integers(1, 2**40))
axes = st.dictionaries(
    st.sampled_from(["batch", "tokens", "heads"]), st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=3
)
variant_counts = st.integers(1, 5)
products = st.builds(lambda axes, variants: ShapeBuckets(variants=variants, **axes), axes, variant_counts)
explicit = st.builds(
    lambda shapes, variants: ShapeBuckets.of(shapes, variants=variants),
    st.lists(st.lists(sizes, max_size=3).map(tuple), min_size=1, max_size=6),
    variant_counts,
)
one_bucket = st.one_of(products, explicit)
buckets = st.one_of(one_bucket, st.builds(lambda one, other: one | other, one_bucket, one_bucket))
declarations = st.dictionaries(st.sampled_from(NAMES), st.lists(buckets, min_size=1, max_size=3), max_size=3)

setting_values = st.one_of(st.booleans(), st.integers(-5, 5), st.text(max_size=5))
settings_asked = st.dictionaries(
    st.sampled_from(["dynamo.specialize_int", "inductor.max_autotune", "functorch.anything"]),
    setting_values,
    max_size=2,
)

#: Ceilings that no drawn declaration reaches: what happens there is said, and has tests of its own.
knob_arguments = st.fixed_dictionaries(
    {},
    optional={
        "floor": st.integers(1, 2000),
        "ceil": st.integers(2000, 65536),
        "eager_headroom": st.integers(0, 100),
        "on_limit": st.sampled_from(["warn", "raise"]),
        "float32_matmul_precision": st.sampled_from(["highest", "high", "medium"]),
    },
)
policies = st.builds(
    lambda buckets, settings, knobs: CompilePolicy(buckets, settings=settings, **knobs),
    declarations,
    settings_asked,
    knob_arguments,
)
