"""Tables of records: tuples that read well as text, in a notebook, and as JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs

__all__ = ["Records", "aligned", "as_text"]

Record = TypeVar("Record", bound=attrs.AttrsInstance)


class Records(tuple[Record, ...]):
    """A tuple of records of one kind.

    ``str`` gives an aligned table, a notebook shows an HTML one, ``to_json`` gives plain data.
    """

    __slots__ = ()

    def to_json(self) -> list[dict[str, Any]]:
        """The records as dictionaries of numbers, text and lists, with the same keys everywhere."""
        plain: list[dict[str, Any]] = json.loads(json.dumps([attrs.asdict(one) for one in self]))
        return plain

    def columns(self) -> list[str]:
        """Names of the fields, in their order; empty for an empty table."""
        return [field.name for field in attrs.fields(type(self[0]))] if self else []

    def rows(self) -> list[list[str]]:
        """The fields as text."""
        return [[as_text(getattr(one, name)) for name in self.columns()] for one in self]

    def __str__(self) -> str:
        return aligned(self.columns(), self.rows()) if self else "(nothing)"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns())
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def as_text(value: Any) -> str:
    """One cell: None is a dash, a list its items."""
    if value is None or value == ():
        return "-"
    if isinstance(value, (tuple, list)):
        return ", ".join(str(one) for one in value)
    return str(value)


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in plain text: columns as wide as their widest cell, numbers to the right."""
    table = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(columns))]
    right = [all(row[at].isdigit() or row[at] == "-" for row in table[1:]) for at in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
