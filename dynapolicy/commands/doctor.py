"""``doctor``: does a policy hold in every kind of place on this machine?"""

from __future__ import annotations

import argparse

from .output import complain, print_json, print_table
from .planfile import load_policy

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``doctor`` takes."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="whose policy, as for plan; else the environment's")
    parser.add_argument(
        "--no-initializer", action="store_true", help="start processes without the policy's initializer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a place falls short."""
    from ..observe.per_place import doctor

    policy = load_policy(arguments.file) if arguments.file else None
    records = doctor(policy, initializer=not arguments.no_initializer)
    if arguments.json:
        print_json(records.to_json())
    else:
        print_table(records.columns(), records.rows())
    failing = [one.place for one in records if not one.ok]
    if failing:
        complain(f"the policy doesn't hold in: {', '.join(failing)}")
    return 1 if failing else 0
