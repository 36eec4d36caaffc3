"""Declarations: which target meets which buckets. Pure; keeps names, never the targets themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from .buckets import ShapeBuckets
from .errors import BucketError, TargetError
from .targets import Target, resolve

__all__ = ["Declaration", "collect"]


@attrs.frozen
class Declaration:
    """The buckets of one target, by name.

    Attributes:
        name: ``"module:qualname"``, with ``@line`` where the qualname alone is ambiguous.
        line: first line of the code object, 0 where the target was given by name.
        shared: counts on a code object that torch shares between targets of its kind.
        buckets: what was declared; their entries add up.
    """

    name: str
    line: int
    shared: bool
    buckets: tuple[ShapeBuckets, ...]

    @property
    def entries(self) -> int:
        """Cache entries declared."""
        return sum(one.entries for one in self.buckets)

    def matches(self, target: Target) -> bool:
        """Whether this was declared for ``target``."""
        if self.line and target.line and self.line != target.line:
            return False
        if self.line and target.line and self.shared != target.shared:
            return False
        return self.name in (target.name, target.named_with_line)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        buckets = [one.to_json() for one in self.buckets]
        return {"name": self.name, "line": self.line, "shared": self.shared, "buckets": buckets}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Declaration:
        """Read what ``to_json`` wrote."""
        buckets = tuple(ShapeBuckets.from_json(one) for one in data["buckets"])
        return cls(str(data["name"]), int(data["line"]), bool(data["shared"]), buckets)


def collect(buckets: Any) -> tuple[Declaration, ...]:
    """Declarations of a mapping, of an object with ``capture_buckets()``, or of several of those.

    The same target declared twice adds up, as slots that share one capture method do.

    Raises:
        BucketError: something that is no ``ShapeBuckets``.
        TargetError: a target that can't be compiled.
    """
    found: dict[Target, list[ShapeBuckets]] = {}
    for target, value in _pairs(buckets):
        found.setdefault(resolve(target), []).extend(_checked(target, value))
    found = _merged(found)
    names = Counter(target.name for target in found)
    made: dict[tuple[str, int, bool], list[ShapeBuckets]] = {}
    for target, values in found.items():
        name = target.named_with_line if names[target.name] > 1 else target.name
        made.setdefault((name, target.line, target.shared), []).extend(values)
    # A declaration's place says nothing, so that equal policies compare equal.
    return tuple(Declaration(*key, tuple(values)) for key, values in sorted(made.items(), key=lambda item: item[0]))


def _merged(found: dict[Target, list[ShapeBuckets]]) -> dict[Target, list[ShapeBuckets]]:
    """A target given once by name and once as an object is one target."""
    merged = {target: list(values) for target, values in found.items()}
    for named in [target for target in found if not target.line]:
        same = [target for target in found if target.line and target.name == named.name]
        if len(same) == 1:
            merged[same[0]].extend(merged.pop(named))
    return merged


def _pairs(buckets: Any) -> Iterator[tuple[Any, Any]]:
    if buckets is None:
        return
    if hasattr(buckets, "capture_buckets"):
        yield from _pairs(buckets.capture_buckets())
    elif isinstance(buckets, Mapping):
        yield from buckets.items()
    elif isinstance(buckets, Iterable) and not isinstance(buckets, (str, bytes, ShapeBuckets)):
        for one in buckets:
            yield from _pairs(one)
    else:
        rule = "buckets is a mapping from targets to ShapeBuckets, or an object with capture_buckets()"
        raise TargetError("buckets", buckets, rule, "argument", "Pass {function: [ShapeBuckets(...)]}")


def _checked(target: Any, value: Any) -> list[ShapeBuckets]:
    values = [value] if isinstance(value, ShapeBuckets) or not isinstance(value, Iterable) else list(value)
    for one in values:
        if not isinstance(one, ShapeBuckets):
            rule = f"{target!r} takes a ShapeBuckets or a list of them"
            raise BucketError("buckets", one, rule, "argument", "Wrap the shapes: ShapeBuckets(batch=(1, 2, 4))")
    return values
