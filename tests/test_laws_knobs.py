"""Laws of the knob table: each holds for every knob and every value."""

from __future__ import annotations

import warnings
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynapolicy import CompilePolicy, KnobWarning
from dynapolicy.knob_table import KNOBS
from dynapolicy.knobs import clamp, format_value, parse
from strategies import LAW, NUMBER_ROWS, numbers_near, numbers_within, values_of

rows = st.sampled_from(NUMBER_ROWS)
row_and_number = rows.flatmap(lambda row: st.tuples(st.just(row), numbers_near(row)))


@LAW
@given(row_and_number)
def test_clamping_stays_within_the_bounds(drawn: Any) -> None:
    """A clamped number is allowed."""
    row, number = drawn
    assert row.low <= clamp(row, number) <= row.high


@LAW
@given(row_and_number)
def test_clamping_twice_is_clamping_once(drawn: Any) -> None:
    """Clamping is idempotent, and leaves alone what is within the bounds."""
    row, number = drawn
    once = clamp(row, number)
    assert clamp(row, once) == once
    assert once == number or not row.low <= number <= row.high


@LAW
@given(rows, st.data())
def test_clamping_keeps_the_order(row: Any, data: st.DataObject) -> None:
    """Clamping is monotone."""
    one, other = sorted(data.draw(st.tuples(numbers_near(row), numbers_near(row))))
    assert clamp(row, one) <= clamp(row, other)


@LAW
@given(st.sampled_from(KNOBS).flatmap(lambda row: st.tuples(st.just(row), st.one_of(st.none(), values_of(row)))))
def test_parsing_undoes_formatting(drawn: Any) -> None:
    """``parse`` reads what ``format_value`` wrote, unset included."""
    row, value = drawn
    assert parse(row, format_value(value), "VARIABLE") == value


@LAW
@given(st.sampled_from(NUMBER_ROWS), st.text(" \t\n", max_size=3), st.text("0", max_size=3), st.data())
def test_blanks_and_leading_zeros_mean_nothing(row: Any, blanks: str, zeros: str, data: st.DataObject) -> None:
    """Surrounding blanks and leading zeros do not change a number."""
    number = data.draw(numbers_within(row))
    assert parse(row, f"{blanks}{zeros}{number}{blanks}", "VARIABLE") == number


policy_rows = tuple(row for row in KNOBS if row.group == "policy")


@LAW
@given(st.sampled_from(policy_rows).flatmap(lambda row: st.tuples(st.just(row), values_of(row))))
def test_an_environment_value_within_bounds_comes_back_verbatim(drawn: Any) -> None:
    """It is the knob's value, with source ``environment``, its raw text, and nothing clamped."""
    row, value = drawn
    policy = CompilePolicy.from_env(environ={row.variable("X_"): str(value)}, prefix="X_")
    record = next(one for one in policy.knobs if one.name == row.name)
    assert (record.value, record.source, record.raw) == (value, "environment", str(value))
    assert (record.variable, record.clamped) == ("X_" + row.suffix, False)


@LAW
@given(st.sampled_from(policy_rows).flatmap(lambda row: st.tuples(st.just(row), values_of(row), values_of(row))))
def test_the_environment_wins_over_the_argument(drawn: Any) -> None:
    """An argument counts only while its variable is unset or empty."""
    row, given_value, value = drawn
    if row.name == "disable":
        return
    argument = {row.name: given_value}
    name = row.variable("DYNAPOLICY_")
    won = CompilePolicy.from_env(**argument, environ={name: str(value)})
    unset = CompilePolicy.from_env(**argument, environ={name: " "})
    record = {source.knobs: next(one for one in source.knobs if one.name == row.name) for source in (won, unset)}
    assert record[won.knobs].value == value
    assert (record[unset.knobs].value, record[unset.knobs].source) == (given_value, "argument")


@LAW
@given(st.sampled_from(NUMBER_ROWS), st.data())
def test_a_number_outside_the_bounds_is_clamped_and_said(row: Any, data: st.DataObject) -> None:
    """The raw text is kept in the record, and a warning names variable and text."""
    if row.group != "policy":
        return
    number = data.draw(st.integers(row.high + 1, 10**30))
    name = row.variable("DYNAPOLICY_")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        policy = CompilePolicy.from_env(environ={name: str(number)})
    record = next(one for one in policy.knobs if one.name == row.name)
    assert (record.value, record.raw, record.clamped) == (row.high, str(number), True)
    (message,) = [str(one.message) for one in said if one.category is KnobWarning]
    assert name in message
    assert str(number) in message


def test_an_empty_environment_means_defaults() -> None:
    """No variable, or an empty one, is the default with source ``default``."""
    for environ in ({}, {row.variable("DYNAPOLICY_"): "" for row in KNOBS}):
        policy = CompilePolicy.from_env(environ=environ)
        assert {one.name: one.value for one in policy.knobs} == {row.name: row.default for row in policy_rows}
        assert {one.source for one in policy.knobs} == {"default"}
