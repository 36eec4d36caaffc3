"""What a cache entry is good for: the shapes it was made for, and the state it needs besides."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Iterable

import attrs

__all__ = ["Specialization", "last_reason", "specializations", "what_differs"]

_SIZES = re.compile(r"size=(\[[^\]]*\]), stride=\[[^\]]*\]")
#: A whole number that an argument must equal: a shape that is no tensor's.
_INTEGER = re.compile(r"EQUALS_MATCH: (L\[.*\]) == (-?\d+)$")
_STATE = re.compile(r"GLOBAL_STATE: .* against (\{.*\})")
_TENSOR = re.compile(r"check_tensor\((.*?), \w+, DispatchKeySet\((.*?)\), ([\w.]+), device=(\w+), requires_grad=(\w+)")
_SOURCE = re.compile(r"[LG]\['[^']*'\](?:\.\w+|\[[^\]]*\])*")
_DYNAMIC = re.compile(r"NO_HASATTR|MARKING_GUARD|SHAPE_ENV|^Guard latency|^$")


@attrs.frozen
class Specialization:
    """One cache entry, read from its guards.

    Attributes:
        sizes: sizes of the tensors and values of whole-number arguments, in guard order.
        state: everything else that must hold, one line each.
    """

    sizes: tuple[str, ...]
    state: frozenset[str]

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes, flat; dynamic ones are left out."""
        return tuple(int(number) for text in self.sizes for number in re.findall(r"-?\d+", text))

    def fits_any(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether all sizes of one of ``shapes`` are among the numbers."""
        numbers = self.numbers
        return any(all(numbers.count(size) >= shape.count(size) for size in shape) for shape in shapes)


def specializations(code: types.CodeType) -> list[Specialization]:
    """The cache entries of ``code``, the newest first. Source: the text form of torch's guard managers."""
    from torch._dynamo import eval_frame

    return [_read(str(entry.guard_manager)) for entry in eval_frame._debug_get_cache_entry_list(code)]


def _read(text: str) -> Specialization:
    sizes: list[str] = []
    state: set[str] = set()
    for line in text.splitlines():
        guard = _bare(line)
        if _DYNAMIC.search(guard) or "accessed_by=" in guard:
            continue
        integer = _INTEGER.search(guard)
        if integer is not None:
            sizes.append(integer[2])
            continue
        sizes += _SIZES.findall(guard)
        state.update(_state(_SIZES.sub("", guard)))
    return Specialization(tuple(sizes), frozenset(state))


def _bare(line: str) -> str:
    """A guard without the tree around it and the source line behind it."""
    return line.lstrip("| ").removeprefix("+- ").partition("  #")[0].strip()


def _state(guard: str) -> Iterable[str]:
    if (found := _STATE.match(guard)) is not None:
        return _global_state(found[1])
    if (found := _TENSOR.search(guard)) is not None:
        names = ("dispatch keys", "dtype", "device", "requires_grad")
        return [f"{found[1]} {name}={value}" for name, value in zip(names, found.groups()[1:], strict=True)]
    return (guard,)


@functools.lru_cache(maxsize=64)
def _global_state(text: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        return (text,)
    return tuple(f"{name}={json.dumps(value)}" for name, value in values.items())


def what_differs(code: types.CodeType, entries: list[Specialization]) -> list[str]:
    """What entries of the same sizes differ in: ``grad_mode``, a tensor's dtype, an argument, a guarded object."""
    by_sizes: dict[tuple[str, ...], list[frozenset[str]]] = {}
    for one in entries:
        by_sizes.setdefault(one.sizes, []).append(one.state)
    lines: set[str] = set()
    for states in by_sizes.values():
        lines |= frozenset.union(*states) - frozenset.intersection(*states)
    topics = {_topic(line) for line in lines}
    if not any(line.startswith("grad_mode=") for one in entries for line in one.state):
        # Older releases don't write the global state into the guard, but say later what changed in it.
        topics |= _changed_state(code)
    return sorted(topics)


def _topic(line: str) -> str:
    """The thing that a guard is about."""
    name, equals, _ = line.partition("=")
    if equals and not line.startswith(name + "==") and ":" not in name:
        return name
    found = _SOURCE.search(line)
    return found[0] if found is not None else line.partition(":")[0]


def _changed_state(code: types.CodeType) -> set[str]:
    found = (re.search(r"GLOBAL_STATE changed: (.*)", reason) for reason in _reasons(code))
    return {name for one in found if one is not None for name in one[1].split()}


def last_reason(code: types.CodeType) -> str | None:
    """Why ``code`` recompiled last, in torch's words; None where it did not or torch has forgotten."""
    reasons = _reasons(code)
    return " ".join(reasons[-1].split("\n", 1)[0].split()) if reasons else None


def _reasons(code: types.CodeType) -> list[str]:
    from torch._dynamo.utils import guard_failures

    return [str(reason) for reason in guard_failures.get(code, ())]
