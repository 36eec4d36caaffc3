"""Bad input: every message names the variable or argument, the raw text, the rule and the way out."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

import dynapolicy
from dynapolicy import (
    BucketError,
    CompilePolicy,
    DynapolicyError,
    KnobError,
    KnobWarning,
    SettingError,
    SettingWarning,
    ShapeBuckets,
    TargetError,
    apply_policy,
    compile,  # noqa: A004 - torch's own name for it
)
from dynapolicy.torch_compat.settings import find

FLOOR, CEIL = "DYNAPOLICY_FLOOR", "DYNAPOLICY_CEIL"


def read(**environ: str) -> CompilePolicy:
    """A policy of an environment."""
    return CompilePolicy.from_env(environ=environ)


def names(error: BaseException | Warning, *parts: str) -> bool:
    """Whether a message holds every part; shown by pytest where one is missing."""
    missing = [part for part in parts if part not in str(error)]
    assert missing == [], str(error)
    return True


# -- the environment ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["abc", "12.5", "1e3", "-1", "+5", "1_000", "0x10", "\uff11\uff12", "1 2", "True", "inf"]
)
def test_text_that_is_no_whole_number_is_an_error(text: str) -> None:
    """At start-up, not a TypeError inside a later forward."""
    with pytest.raises(KnobError) as caught:
        read(DYNAPOLICY_FLOOR=text)
    assert names(
        caught.value, FLOOR, repr(text), "a whole number", "1 ... 65536", f"Set {FLOOR} to an allowed value or unset it"
    )
    assert (caught.value.thing, caught.value.value, caught.value.source) == (FLOOR, text, "environment")


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_empty_means_unset(text: str) -> None:
    """Also blanks alone."""
    assert read(DYNAPOLICY_FLOOR=text) == CompilePolicy()


@pytest.mark.parametrize("text", [" 64 ", "\t64\n", "064"])
def test_surrounding_blanks_are_allowed(text: str) -> None:
    """The number is read, and the raw text kept."""
    policy = read(DYNAPOLICY_FLOOR=text)
    assert policy.floor == 64
    assert policy.knobs[0].raw == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 1), ("65537", 65536), ("1" + "0" * 30, 65536), ("9" * 5000, 65536)],
    ids=["0", "65537", "10^30", "long"],
)
def test_a_number_outside_the_range_is_clamped_with_a_warning(text: str, value: int) -> None:
    """Said once for each policy, with the variable, the text, the range and what is used; the raw text is kept."""
    with pytest.warns(KnobWarning) as said:
        policy = read(DYNAPOLICY_CEIL=text) if value > 1 else read(DYNAPOLICY_FLOOR=text)
    record = next(one for one in policy.knobs if one.raw is not None)
    assert (record.value, record.raw, record.clamped, record.source) == (value, text, True, "environment")
    assert names(said[0].message, record.variable, text[:40], "1 ... 65536", f"{value} is used")  # type: ignore[arg-type]
    assert len(said) == 1
    assert len(str(said[0].message)) < 300


def test_zero_headroom_is_allowed() -> None:
    """Only the headroom may be none."""
    assert read(DYNAPOLICY_EAGER_HEADROOM="0").eager_headroom == 0


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("DYNAPOLICY_ON_LIMIT", "Raise", "warn, raise"),
        ("DYNAPOLICY_FLOAT32_MATMUL_PRECISION", "tf32", "highest, high, medium"),
        ("DYNAPOLICY_DISABLE", "yes", "0, 1"),
    ],
)
def test_a_word_that_is_not_allowed_is_an_error(name: str, text: str, rule: str) -> None:
    """The message lists the allowed words."""
    with pytest.raises(KnobError) as caught:
        read(**{name: text})
    assert names(caught.value, name, repr(text), rule, f"Set {name} to an allowed value or unset it")


def test_all_bad_variables_are_in_one_error() -> None:
    """Both of FLOOR and CEIL, and a bad argument beside them."""
    with pytest.raises(KnobError) as caught:
        CompilePolicy.from_env(eager_headroom=-1, environ={FLOOR: "abc", CEIL: "12.5"})
    assert names(caught.value, FLOOR, "abc", CEIL, "12.5", "eager_headroom", "-1", "1 ... 65536", "0 ... 65536")
    assert names(caught.value, "environment", "argument")


@pytest.mark.parametrize(
    ("arguments", "environ", "parts"),
    [
        ({"floor": 20, "ceil": 10}, {}, ["floor", "ceil", "argument"]),
        ({}, {FLOOR: "20", CEIL: "10"}, [FLOOR, CEIL, "environment"]),
        ({"floor": 20}, {CEIL: "10"}, ["floor", CEIL, "argument and environment"]),
    ],
)
def test_floor_over_ceil_where_both_were_set_is_an_error(arguments: Any, environ: Any, parts: list[str]) -> None:
    """It names both, their values, and where each came from."""
    with pytest.raises(KnobError) as caught:
        CompilePolicy.from_env(**arguments, environ=environ)
    assert names(caught.value, *parts, "20 and 10", "may not be over", "Lower")


def test_a_default_yields_to_a_bound_that_was_set() -> None:
    """A ceiling under the default floor lowers it, a floor over the default ceiling raises that."""
    assert (read(DYNAPOLICY_CEIL="3").floor, read(DYNAPOLICY_CEIL="3").ceil) == (3, 3)
    assert (CompilePolicy(floor=5000).floor, CompilePolicy(floor=5000).ceil) == (5000, 5000)


@pytest.mark.usefixtures("torch_ready")
def test_the_operator_can_disable_everything() -> None:
    """``DISABLE=1`` is carried in the policy: applying does nothing and says so once, compiling passes no keyword."""
    policy = CompilePolicy.from_env({"pkg:f": ShapeBuckets(batch=range(1, 30))}, environ={"DYNAPOLICY_DISABLE": "1"})
    before = dynapolicy.current_policy()
    with pytest.warns(KnobWarning, match="DYNAPOLICY_DISABLE=1: no policy is applied"):
        applied = apply_policy(policy)
    apply_policy(policy).restore()
    assert (applied.scope, dynapolicy.current_policy()) == ("none", before)
    assert policy.compile_kwargs("pkg:f") == {}
    applied.restore()


# -- values in code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, 0, -1, 65537, 12.5, "64", 10**30, [64], float("nan")])
def test_a_bad_number_in_code_is_an_error(value: Any) -> None:
    """Code is not clamped, and a bool is no number."""
    with pytest.raises(KnobError) as caught:
        CompilePolicy(floor=value)
    assert names(caught.value, "floor", str(value)[:20], "argument", "1 ... 65536", "Pass an allowed floor")


@pytest.mark.parametrize("name", ["on_limit", "float32_matmul_precision"])
@pytest.mark.parametrize("value", ["ignore", 1, True])
def test_a_bad_word_in_code_is_an_error(name: str, value: Any) -> None:
    """The message lists the allowed words."""
    with pytest.raises(KnobError) as caught:
        CompilePolicy(**{name: value})
    assert names(caught.value, name, repr(value), "one of", f"Pass an allowed {name}")


def test_numbers_of_numpy_count() -> None:
    """Sizes and knobs come from configurations that hold numpy's integers."""
    numpy = pytest.importorskip("numpy")
    assert CompilePolicy(floor=numpy.int64(12)).floor == 12
    assert ShapeBuckets(batch=numpy.array([1, 2, 4])) == ShapeBuckets(batch=(1, 2, 4))


WRITTEN = CompilePolicy({"m:f": ShapeBuckets(batch=(1,))}, floor=12, settings={"dynamo.specialize_int": True}).to_json()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "7", "[" * 100_000, '{"declarations": [], "settings": {}, "knobs": []}']
    + [
        WRITTEN.replace(*change)
        for change in (("12", '"abc"'), ("12", "0"), ("[1]", "[0]"), ("dynamo.", "other."), ("floor", "flor"))
    ],
    ids=range(12),
)
def test_text_that_is_no_policy_is_an_error(text: str) -> None:
    """Whatever is wrong with it, it is one clear error, and no policy that fails later."""
    with pytest.raises(KnobError, match="no policy in JSON"):
        CompilePolicy.from_json(text)


# -- buckets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -4, True, False, 2.0, "8", None])
def test_a_bad_size_is_an_error(size: Any) -> None:
    """In an axis, in an explicit shape, and as a number of variants."""
    for declare in (
        lambda: ShapeBuckets(batch=(1, size)),
        lambda: ShapeBuckets.of([(1, size)]),
        lambda: ShapeBuckets(batch=(1,), variants=size),
    ):
        with pytest.raises(BucketError) as caught:
            declare()
        assert names(caught.value, repr(size), "A size is", "batch=(1, 2, 4)")


@pytest.mark.parametrize(
    ("declare", "part"),
    [
        (ShapeBuckets, "At least one axis"),
        (lambda: ShapeBuckets(batch=()), "batch"),
        (lambda: ShapeBuckets(batch=8), "Several sizes"),
        (lambda: ShapeBuckets(batch="128"), "Several sizes"),
        (lambda: ShapeBuckets.of([]), "At least one shape"),
        (lambda: ShapeBuckets.of([8]), "Several sizes"),
        (lambda: ShapeBuckets(a=range(1, 10**4), b=range(1, 10**4)), "at most 1000000"),
        (lambda: CompilePolicy({"m:f": (1, 2)}), "takes a ShapeBuckets or a list"),
        (lambda: CompilePolicy({"m:f": 8}), "takes a ShapeBuckets or a list"),
    ],
)
def test_a_bad_bucket_is_an_error(declare: Any, part: str) -> None:
    """It says what was given, what is needed, and how to write it."""
    with pytest.raises(BucketError) as caught:
        declare()
    assert names(caught.value, part, "argument")


@pytest.mark.parametrize("target", [None, 7, 1.5, "f", "pkg.mod", ":f", "pkg:", ("a",)])
def test_a_bad_target_is_an_error(target: Any) -> None:
    """It says what a target is."""
    with pytest.raises(TargetError) as caught:
        CompilePolicy({target: ShapeBuckets(batch=(1,))})
    assert names(caught.value, repr(target), "module:qualname")


@pytest.mark.parametrize("buckets", [ShapeBuckets(batch=(1,)), "pkg:f", 7, [7]])
def test_buckets_without_a_target_are_an_error(buckets: Any) -> None:
    """A mapping says whose shapes they are."""
    with pytest.raises(TargetError, match="buckets is a mapping"):
        CompilePolicy(buckets)


# -- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, (1,), None, 1.5])
def test_a_collection_as_a_setting_is_an_error(value: Any) -> None:
    """Only int, bool and str can be put in force."""
    with pytest.raises(SettingError) as caught:
        CompilePolicy(settings={"dynamo.specialize_int": value})
    assert names(caught.value, "dynamo.specialize_int", repr(value), "Only int, bool and str")


@pytest.mark.parametrize("name", ["specialize_int", "torch.specialize_int", "dynamo", "Dynamo.specialize_int", ""])
def test_a_setting_of_no_section_is_an_error(name: str) -> None:
    """The message lists the sections."""
    with pytest.raises(SettingError) as caught:
        CompilePolicy(settings={name: True})
    assert names(caught.value, name, "dynamo., inductor., functorch., compiler.")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dynamo.recompile_limit", "buckets, floor and ceil"),
        ("dynamo.cache_size_limit", "buckets, floor and ceil"),
        ("dynamo.accumulated_recompile_limit", "buckets, floor and ceil"),
        ("dynamo.fail_on_recompile_limit_hit", "on_limit"),
        ("compiler.recompile_limit", "buckets, floor and ceil"),
        ("compiler.accumulated_recompile_limit", "buckets, floor and ceil"),
        ("compiler.fail_on_recompile_limit_hit", "on_limit"),
    ],
)
def test_a_setting_that_the_policy_derives_is_an_error(name: str, instead: str) -> None:
    """By every name that a torch gives it, aliases of other modules included."""
    with pytest.raises(SettingError) as caught:
        CompilePolicy(settings={name: 64})
    assert names(caught.value, name, "The policy derives it", instead)


@pytest.mark.usefixtures("torch_ready")
@pytest.mark.parametrize(
    ("name", "near"),
    [("dynamo.specialise_int", "dynamo.specialize_int"), ("inductor.max_autotunes", "inductor.max_autotune")],
)
def test_an_unknown_setting_lists_near_names(name: str, near: str) -> None:
    """The error says what may have been meant."""
    with pytest.raises(SettingError) as caught:
        apply_policy(CompilePolicy(settings={name: True}))
    assert names(caught.value, name, "No torch has such a setting", near)


@pytest.mark.usefixtures("torch_ready")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dynamo.specialize_int", 1),
        ("dynamo.specialize_int", "True"),
        ("dynamo.verbose", 2),
        ("inductor.max_autotune_gemm_backends", True),
    ],
)
def test_a_value_of_another_type_is_an_error(name: str, value: Any) -> None:
    """Torch would take it and fail in a later call."""
    with pytest.raises(SettingError) as caught:
        apply_policy(CompilePolicy(settings={name: value}))
    assert names(caught.value, name, repr(value), "It takes")


@pytest.mark.usefixtures("torch_ready")
def test_a_setting_that_holds_a_collection_is_an_error() -> None:
    """Torch copies collections into each context, so no value holds everywhere."""
    with pytest.raises(SettingError, match="collection"):
        apply_policy(CompilePolicy(settings={"dynamo.traceable_tensor_subclasses": "x"}))


@pytest.mark.usefixtures("torch_ready")
def test_an_alias_is_the_setting_that_it_stands_for() -> None:
    """Asked by both names with one value it holds; with two values it is an error that names both."""
    alias, name = "compiler.assume_static_by_default", "dynamo.assume_static_by_default"
    if find(alias) is None:
        pytest.skip("torch 2.6 has no torch.compiler.config with aliases")
    setting = find(name)
    assert setting is not None
    factory = setting.read()
    with apply_policy(CompilePolicy(settings={alias: not factory, name: not factory})):
        assert setting.read() is not factory
    with pytest.raises(SettingError) as caught:
        apply_policy(CompilePolicy(settings={alias: not factory, name: factory}))
    assert names(caught.value, alias, name, "the same setting")
    assert setting.read() is factory


@pytest.mark.usefixtures("torch_ready")
def test_a_name_that_this_torch_lacks_is_a_warning_once() -> None:
    """Another torch has it: the policy leaves it out, says so once, and puts everything else in force."""
    name = lacking()
    policy = CompilePolicy(floor=20, settings={name: True, "dynamo.specialize_int": True})
    with pytest.warns(SettingWarning) as said:
        applied = apply_policy(policy)
    assert names(said[0].message, name, "This torch has no")  # type: ignore[arg-type]
    setting = find("dynamo.specialize_int")
    assert setting is not None
    assert setting.read() is True
    applied.restore()
    apply_policy(policy).restore()


def lacking() -> str:
    """A setting that some torch has and this one lacks."""
    from dynapolicy.torch_compat.settings import known_names

    return next(name for name in sorted(known_names()) if name.startswith("dynamo.") and find(name) is None)


@pytest.mark.usefixtures("torch_ready")
def test_suppressed_errors_do_not_go_with_raise() -> None:
    """It would swallow the error: refused in a policy, and where torch's configuration has it already."""
    with pytest.raises(SettingError) as caught:
        CompilePolicy(on_limit="raise", settings={"dynamo.suppress_errors": True})
    assert names(caught.value, "dynamo.suppress_errors", "swallow", 'on_limit="warn"')
    CompilePolicy(on_limit="raise", settings={"dynamo.suppress_errors": False})
    setting = find("dynamo.suppress_errors")
    assert setting is not None
    with setting.module.patch(suppress_errors=True):
        with pytest.raises(SettingError) as caught:
            apply_policy(CompilePolicy(on_limit="raise"))
        apply_policy(CompilePolicy(on_limit="raise", settings={"dynamo.suppress_errors": False})).restore()
    assert names(caught.value, "dynamo.suppress_errors", "swallow", 'on_limit="warn"', "TORCHDYNAMO_SUPPRESS_ERRORS")


def test_compiling_nothing_is_an_error() -> None:
    """What torch cannot compile is said before torch is asked."""
    with pytest.raises(TargetError, match="A target is a callable"):
        compile(7)


# -- errors travel ------------------------------------------------------------------------------------------


ERRORS = [one for _, one in inspect.getmembers(dynapolicy.errors, inspect.isclass) if issubclass(one, DynapolicyError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_come_back_from_pickle(kind: type[DynapolicyError]) -> None:
    """With their class, fields and text; a value that cannot travel does so as its ``repr``."""
    unpicklable = lambda: None  # noqa: E731 - it is here because it has no name
    for value in (64, "abc", None, unpicklable, [unpicklable]):
        error = kind("thing", value, "Allowed is this", "argument", "Do that")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (again.args, str(again)) == (error.args, str(error))
        assert (again.thing, again.rule, again.source, again.way_out) == (
            "thing",
            "Allowed is this",
            "argument",
            "Do that",
        )
        assert names(again, "thing", "Allowed is this", "argument", "Do that")


@pytest.mark.parametrize("kind", [one for one in ERRORS if one is not DynapolicyError])
def test_errors_are_of_a_builtin_kind_too(kind: type[DynapolicyError]) -> None:
    """``except ValueError`` and its like catch them."""
    assert issubclass(kind, (ValueError, TypeError, RuntimeError, OSError, KeyError, LookupError))
