"""``plan``: what a declaration comes to, before it runs."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from ..declare import Declaration
from ..policy import CompilePolicy
from ..records import Records
from ..targets import Target
from .output import print_json, print_table
from .planfile import load_policy

__all__ = ["PlanRecord", "add_arguments", "plan", "run"]

_BAR = 32


@attrs.frozen
class PlanRecord:
    """One code object of a plan.

    Attributes:
        code: what counts on it; several where torch lets them share one.
        entries: declared cache entries.
        headroom: entries left for undeclared shapes.
        limit: the recompile limit, in entries.
        accumulated_limit: the accumulated recompile limit, in entries.
        eager: declared entries past the ceiling, which would run eager.
    """

    code: str
    entries: int
    headroom: int
    limit: int
    accumulated_limit: int
    eager: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``plan`` takes."""
    parser.add_argument("file", metavar="FILE", help='a TOML file, or "module:object"')


def plan(policy: CompilePolicy) -> Records[PlanRecord]:
    """The derivation for each declared code object."""
    own = [[one] for one in policy.declarations if not one.shared]
    shared = [one for one in policy.declarations if one.shared]
    return Records(_record(policy, group) for group in (*own, shared) if group)


def _record(policy: CompilePolicy, group: list[Declaration]) -> PlanRecord:
    limits = policy.limits_for(Target(group[0].name, group[0].line, group[0].shared))
    entries = sum(one.entries for one in group)
    return PlanRecord(
        code=" + ".join(one.name for one in group),
        entries=entries,
        headroom=max(0, limits.recompile_limit - entries),
        limit=limits.recompile_limit,
        accumulated_limit=limits.accumulated_recompile_limit,
        eager=max(0, entries - limits.recompile_limit),
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 where something would run eager."""
    policy = load_policy(arguments.file)
    records = plan(policy)
    limits = attrs.asdict(policy.limits)
    if arguments.json:
        print_json({"process": limits, "targets": records.to_json()})
    else:
        print_table(["code", "entries", "headroom", "limit", "accumulated", "eager", ""], _rows(records))
        print(", ".join(f"{name} {value}" for name, value in limits.items()) + " for the process")
    # The policy itself has warned of each.
    return 1 if any(one.eager for one in records) else 0


def _rows(records: Records[PlanRecord]) -> list[list[str]]:
    longest = max((max(one.entries, one.limit) for one in records), default=1)
    return [[*(str(value) for value in attrs.astuple(one)), _bar(one, longest)] for one in records]


def _bar(one: Any, longest: int) -> str:
    """Compiled ``#``, headroom ``.``, eager ``!``."""
    parts = (("#", one.entries - one.eager), (".", one.headroom), ("!", one.eager))
    return "".join(sign * -(-count * _BAR // longest) for sign, count in parts)
