"""Reading the knobs: parsing, clamping, and where each value came from."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from .errors import KnobError, KnobWarning, warn
from .knob_table import Knob, Value, knob

__all__ = ["KnobValue", "clamp", "format_value", "from_records", "parse", "read_knobs", "settle_bounds"]

Source = Literal["default", "argument", "environment"]

#: More digits than any bound: ``int`` refuses very long texts, and clamping needs no exact value.
_MANY_DIGITS = 20

#: Longer texts are shown in part, in characters.
_LONG = 60


@attrs.frozen
class KnobValue:
    """A knob's value and where it came from."""

    name: str
    variable: str = attrs.field(eq=False)
    value: Value
    raw: str | None = attrs.field(eq=False)
    source: Source = attrs.field(eq=False)
    clamped: bool = attrs.field(eq=False)


def clamp(row: Knob, number: int) -> int:
    """The nearest number within the knob's bounds."""
    if row.low is None or row.high is None:
        return number
    return max(row.low, min(row.high, number))


def format_value(value: Value) -> str:
    """The text that ``parse`` reads as ``value``; empty for unset."""
    return "" if value is None else str(value)


def parse(row: Knob, text: str, variable: str) -> Value:
    """Read one text. Empty means unset and gives ``None``; a number is not clamped yet.

    Raises:
        KnobError: the text is no whole number in ASCII digits, or none of the allowed words.
    """
    stripped = text.strip()
    if not stripped:
        return None
    if row.words:
        if stripped in row.words:
            return stripped
    elif row.low is None:
        return stripped
    elif stripped.isascii() and stripped.isdigit():
        digits = stripped.lstrip("0") or "0"
        return int(digits) if len(digits) < _MANY_DIGITS else 10**_MANY_DIGITS
    rule = f"Allowed is {'one of' if row.words else 'a whole number,'} {row.allowed}"
    raise KnobError(variable, text, rule, "environment", f"Set {variable} to an allowed value or unset it")


def check_argument(row: Knob, value: object) -> Value:
    """A value given in code, as it is, or an error: code is not clamped.

    Raises:
        KnobError: wrong type, out of bounds, or no allowed word.
    """
    if row.words:
        if isinstance(value, str) and value in row.words:
            return value
    elif row.low is None or row.high is None:
        if isinstance(value, str):
            return value
    elif not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
        if number is not None and row.low <= number <= row.high:
            return number
    kind = "one of" if row.words else "a whole number,"
    raise KnobError(row.name, value, f"Allowed is {kind} {row.allowed}", "argument", f"Pass an allowed {row.name}")


def _read_one(row: Knob, environ: Mapping[str, str], argument: object, prefix: str) -> KnobValue:
    variable = row.variable(prefix)
    given = None if argument is None else check_argument(row, argument)
    raw = environ.get(variable)
    if row.secret:
        is_set = bool(raw and raw.strip())
        shown = "(set)" if is_set else None
        return KnobValue(row.name, variable, shown, shown, "environment" if is_set else "default", False)
    parsed = None if raw is None else parse(row, raw, variable)
    if parsed is None:
        source: Source = "default" if given is None else "argument"
        return KnobValue(row.name, variable, row.default if given is None else given, None, source, False)
    value = clamp(row, parsed) if isinstance(parsed, int) else parsed
    return KnobValue(row.name, variable, value, raw, "environment", value != parsed)


def read_knobs(
    environ: Mapping[str, str],
    arguments: Mapping[str, object],
    prefix: str,
    rows: Iterable[Knob],
) -> dict[str, KnobValue]:
    """Read all knobs: the environment wins over arguments, arguments over defaults.

    Raises:
        KnobError: one error that names every bad variable and argument.
    """
    values: dict[str, KnobValue] = {}
    errors: list[KnobError] = []
    for row in rows:
        try:
            values[row.name] = _read_one(row, environ, arguments.get(row.name), prefix)
        except KnobError as error:
            errors.append(error)
    if errors:
        raise _joined(errors) from None
    _warn_clamped(values.values())
    return values


def from_records(records: Iterable[Mapping[str, Any]], rows: tuple[Knob, ...]) -> tuple[KnobValue, ...]:
    """Knob values of their records, as ``attrs.asdict`` gives them.

    Raises:
        KnobError: a value that its knob does not allow.
        KeyError, TypeError: a record is missing, or is none.
    """
    found = {record["name"]: KnobValue(**record) for record in records}
    values = tuple(found[row.name] for row in rows)
    for row, one in zip(rows, values, strict=True):
        if one.value is not None or row.default is not None:
            check_argument(row, one.value)
    return values


def _joined(errors: list[KnobError]) -> KnobError:
    if len(errors) == 1:
        return errors[0]
    return KnobError(
        ", ".join(error.thing for error in errors),
        ", ".join(str(error.value) for error in errors),
        "; ".join(f"{error.thing}: {error.rule}" for error in errors),
        ", ".join(dict.fromkeys(error.source for error in errors)),
        "Correct each of them",
    )


def _warn_clamped(values: Iterable[KnobValue]) -> None:
    for record in values:
        if record.clamped and record.raw is not None:
            raw = record.raw if len(record.raw) <= _LONG else f"{record.raw[:_LONG]}... ({len(record.raw)} characters)"
            warn(
                f"{record.variable}={raw!r} is outside {knob(record.name).allowed}; {record.value} is used.",
                KnobWarning,
                stacklevel=4,
            )


def settle_bounds(values: dict[str, KnobValue]) -> dict[str, KnobValue]:
    """FLOOR over CEIL: a default yields to a value that was set.

    Raises:
        KnobError: both were set.
    """
    floor, ceil = values["floor"], values["ceil"]
    if int(floor.value or 0) <= int(ceil.value or 0):
        return values
    if floor.source == "default":
        return {**values, "floor": attrs.evolve(floor, value=ceil.value, clamped=True)}
    if ceil.source == "default":
        return {**values, "ceil": attrs.evolve(ceil, value=floor.value, clamped=True)}
    raise KnobError(
        f"{_known_as(floor)} and {_known_as(ceil)}",
        f"{floor.value} and {ceil.value}",
        "The floor may not be over the ceiling",
        f"{floor.source} and {ceil.source}",
        f"Lower {_known_as(floor)} or raise {_known_as(ceil)}",
    )


def _known_as(record: KnobValue) -> str:
    return record.variable if record.source == "environment" else record.name
