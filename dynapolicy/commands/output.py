"""What every command prints: JSON or a table on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ..records import aligned

__all__ = ["complain", "print_json", "print_table"]


def print_json(data: Any) -> None:
    """Plain data, indented."""
    print(json.dumps(data, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; with rules and colours on a terminal where rich is installed (extra ``tables``)."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*columns)
            for row in rows:
                table.add_row(*row)
            Console(markup=False).print(table)
            return
    print(aligned(columns, rows))


def complain(message: object) -> None:
    """One line on stderr."""
    print(f"dynapolicy: {message}", file=sys.stderr)
