"""``knobs``: every environment variable, and what is set now."""

from __future__ import annotations

import argparse
import os
from typing import Any

import attrs

from ..knob_table import KNOBS, knob
from ..knobs import read_knobs
from ..records import as_text
from .output import print_json, print_table

__all__ = ["add_arguments", "run", "table"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``knobs`` takes."""
    parser.add_argument("--prefix", default="DYNAPOLICY_", help="what the variables' names begin with")


def table(prefix: str) -> list[dict[str, Any]]:
    """One record for each knob.

    Raises:
        KnobError: variables that are set to something that is not allowed, all of them in one error.
    """
    values = read_knobs(os.environ, {}, prefix, KNOBS)
    return [
        {
            **attrs.asdict(value),
            "default": knob(name).default,
            "allowed": knob(name).allowed,
            "meaning": knob(name).meaning,
        }
        for name, value in values.items()
    ]


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    records = table(arguments.prefix)
    if arguments.json:
        print_json(records)
    else:
        columns = ["variable", "value", "source", "default", "allowed", "meaning"]
        print_table(columns, [[as_text(record[name]) for name in columns] for record in records])
    return 0
