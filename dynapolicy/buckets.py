"""The static shapes that a compiled function will meet."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from .errors import BucketError

__all__ = ["ShapeBuckets"]

#: A shape's axes by name, ``(("batch", 8), ("tokens", 128))``; an unnamed axis is called by its position.
Shape = tuple[tuple[str, int], ...]

#: Far above what any ceiling allows; a product past it is a slip, and would only fill the memory.
_MOST_SHAPES = 1_000_000

_WAY_OUT = "Declare each size as a whole number of at least 1, for example batch=(1, 2, 4)"


@attrs.frozen(init=False, repr=False)
class ShapeBuckets:
    """Shapes, and how many cache entries each of them needs.

    ``ShapeBuckets(batch=(1, 2), tokens=(128, 256))`` is the product of its axes, here four shapes.
    ``variants`` multiplies each shape by the states it is compiled in: 2 for one that runs with
    and without gradients, 4 for two optional arguments that are ``None`` or a tensor.

    Raises:
        BucketError: no axis, an empty axis, a size that is no whole number of at least 1.
    """

    _variants: tuple[tuple[Shape, int], ...]

    def __init__(self, *, variants: int = 1, **axes: Iterable[int]) -> None:
        if not axes:
            raise BucketError("ShapeBuckets", axes, "At least one axis is needed", "argument", _WAY_OUT)
        sizes = {name: _axis(name, axes[name]) for name in sorted(axes)}
        count = math.prod(len(axis) for axis in sizes.values())
        if count > _MOST_SHAPES:
            rule = f"A product has at most {_MOST_SHAPES} shapes"
            raise BucketError("ShapeBuckets", count, rule, "argument", "Declare fewer sizes on an axis")
        shapes = (tuple(zip(sizes, product, strict=True)) for product in itertools.product(*sizes.values()))
        self._fill(dict.fromkeys(shapes, _size("variants", variants)))

    def _fill(self, variants: dict[Shape, int]) -> None:
        self.__attrs_init__(tuple(sorted(variants.items())))

    @classmethod
    def _from(cls, variants: dict[Shape, int]) -> ShapeBuckets:
        made = cls.__new__(cls)
        made._fill(variants)  # noqa: SLF001 - it is this very class
        return made

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]], *, variants: int = 1) -> ShapeBuckets:
        """Explicit shapes; duplicates count once.

        Raises:
            BucketError: no shape, or a size that is no whole number of at least 1.
        """
        made = {_positional(shape): _size("variants", variants) for shape in _iterable("shapes", shapes)}
        if not made:
            raise BucketError("ShapeBuckets.of", [], "At least one shape is needed", "argument", _WAY_OUT)
        return cls._from(made)

    @classmethod
    def of_parameters(cls, model: Any, *, variants: int = 1) -> ShapeBuckets:
        """The distinct shapes of a model's parameters, as a compiled optimizer step meets them.

        ``model`` is anything with ``parameters()``, or the parameters themselves.
        """
        parameters = model.parameters() if hasattr(model, "parameters") else model
        return cls.of([tuple(parameter.shape) for parameter in parameters], variants=variants)

    @property
    def entries(self) -> int:
        """Cache entries that these shapes need: distinct shapes times their variants."""
        return sum(count for _, count in self._variants)

    @property
    def shapes(self) -> tuple[dict[str, int], ...]:
        """Each shape by axis; unnamed axes are called ``"0"``, ``"1"`` and so on."""
        return tuple(dict(shape) for shape, _ in self._variants)

    def __or__(self, other: ShapeBuckets) -> ShapeBuckets:
        """Both, with shapes that are in both counted once, at the larger number of variants."""
        if not isinstance(other, ShapeBuckets):
            return NotImplemented
        merged = dict(self._variants)
        for shape, count in other._variants:
            merged[shape] = max(count, merged.get(shape, 0))
        return self._from(merged)

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter(self.shapes)

    def __repr__(self) -> str:
        return f"<ShapeBuckets: {len(self._variants)} shapes, {self.entries} entries>"

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-ready form; ``from_json`` is its inverse."""
        groups: dict[tuple[tuple[str, ...], int], list[list[int]]] = {}
        for shape, count in self._variants:
            names = tuple(name for name, _ in shape)
            groups.setdefault((names, count), []).append([size for _, size in shape])
        return [{"axes": list(names), "variants": count, "shapes": rows} for (names, count), rows in groups.items()]

    @classmethod
    def from_json(cls, groups: Iterable[dict[str, Any]]) -> ShapeBuckets:
        """Read what ``to_json`` wrote.

        Raises:
            BucketError: the groups hold no valid shapes.
        """
        made: dict[Shape, int] = {}
        for group in groups:
            names = [str(name) for name in group["axes"]]
            for row in group["shapes"]:
                shape = tuple((name, _size(name, size)) for name, size in zip(names, row, strict=True))
                made[shape] = _size("variants", group["variants"])
        if not made:
            raise BucketError("ShapeBuckets.from_json", [], "At least one shape is needed", "argument", _WAY_OUT)
        return cls._from(made)


def _iterable(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise BucketError(name, values, "Several sizes are needed", "argument", _WAY_OUT)
    return list(values)


def _axis(name: str, values: Any) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(_size(name, value) for value in _iterable(name, values)))
    if not sizes:
        raise BucketError(name, (), "An axis has at least one size", "argument", _WAY_OUT)
    return sizes


def _positional(shape: Any) -> Shape:
    return tuple((str(axis), _size(f"axis {axis}", size)) for axis, size in enumerate(_iterable("shape", shape)))


def _size(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise BucketError(name, value, "A size is a whole number", "argument", _WAY_OUT) from None
    if size < 1:
        raise BucketError(name, size, "A size is at least 1", "argument", _WAY_OUT)
    return size
