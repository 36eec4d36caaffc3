"""From declared entries to recompile limits. Pure."""

from __future__ import annotations

import attrs

from .declare import Declaration

__all__ = ["Derivation", "RecompileLimits"]

#: Torch's own default for the accumulated limit, in entries; never asked for less.
LEAST_ACCUMULATED = 256


@attrs.frozen
class RecompileLimits:
    """Both limits that torch has, in cache entries per code object.

    Attributes:
        recompile_limit: entries of one code object (``cache_size_limit`` on torch 2.6).
        accumulated_recompile_limit: entries of one code object over all its wrappers and regions.
    """

    recompile_limit: int
    accumulated_recompile_limit: int


@attrs.frozen
class Derivation:
    """What declarations need, within the bounds of a policy. All numbers are entries."""

    declarations: tuple[Declaration, ...]
    floor: int
    ceil: int
    eager_headroom: int

    def groups(self) -> list[list[Declaration]]:
        """Declarations by the code object they count on: those that share torch's own are one group."""
        shared = [one for one in self.declarations if one.shared]
        return [[one] for one in self.declarations if not one.shared] + ([shared] if shared else [])

    def over_ceiling(self) -> list[tuple[str, int]]:
        """Name and entries of each group that needs more than the ceiling."""
        return [
            (" + ".join(one.name for one in group), entries)
            for group in self.groups()
            if (entries := _entries(group)) > self.ceil
        ]

    def limits(self) -> RecompileLimits:
        """Those of the group that needs most; the floor where none is declared."""
        needed = [self.limits_of(_entries(group)) for group in self.groups()]
        return max(needed, key=lambda limits: limits.recompile_limit, default=_both(self.floor))

    def limits_with(self, declaration: Declaration) -> RecompileLimits:
        """Those of the group that a declaration is in."""
        return self.limits_of(next(_entries(group) for group in self.groups() if declaration in group))

    def limits_of(self, entries: int) -> RecompileLimits:
        """Those of one code object with so many declared entries."""
        return _both(min(max(self.floor, entries + self.eager_headroom), self.ceil))


def _entries(group: list[Declaration]) -> int:
    return sum(one.entries for one in group)


def _both(limit: int) -> RecompileLimits:
    return RecompileLimits(limit, max(LEAST_ACCUMULATED, 4 * limit))
