"""Notices when a recompile limit is hit, on any thread, the moment it happens.

Torch logs one record for a hit, on the thread that compiles. A handler on that logger reads it; a call
of compiled code that hits nothing never gets near it.
"""

from __future__ import annotations

import itertools
import logging
import types
import warnings
import weakref
from collections import deque

import attrs

from .compiled import compiled
from .errors import RecompileLimitWarning
from .locks import lock
from .torch_compat.capabilities import capabilities
from .torch_compat.codes import outcomes
from .torch_compat.hits import LOGGER, Hit, read_hit
from .torch_compat.override import Layer
from .torch_compat.settings import find

__all__ = ["forget_hits", "hit_of", "hits_since", "ignored", "last_hit", "unwatch", "watch"]


@attrs.frozen(eq=False)
class _Seen:
    """A hit, and the cache entries of that time: once they are gone, torch has forgotten the hit too."""

    hit: Hit
    code: weakref.ref[types.CodeType]
    entries: tuple[weakref.ref[types.CodeType], ...]


_seen: dict[int, _Seen] = {}
_log: deque[tuple[int, Hit]] = deque(maxlen=1000)
_number = itertools.count()

#: Code objects of probes, which hit limits on purpose; by name.
ignored: set[str] = set()


class _Watcher(logging.Handler):
    """Turns torch's record of a hit into a warning, or into torch's error with a text that says what and why."""

    def emit(self, record: logging.LogRecord) -> None:
        """Read one record.

        What is raised here reaches the caller of the compiled function, as torch's own errors do, and
        leaves the code object able to compile.
        """
        try:
            hit = read_hit(record)
            if hit is None or hit.name.rpartition(":")[2] in ignored:
                return
            text = message(hit)
        except Exception:  # noqa: BLE001 - a slip of ours must never break a compile
            self.handleError(record)
            return
        if hit.error is not None:
            _remember(hit)
            raise hit.error(text)
        if _known(hit):
            return
        # A filter may turn this into an error: then nothing ran eager, and nothing is to be remembered.
        warnings.warn_explicit(text, RecompileLimitWarning, hit.file, hit.line, registry={})
        _remember(hit)


_watcher = _Watcher(logging.WARNING)

#: Layers in force for which it watches; weakly, since nobody restores one whose context is gone.
_watched: weakref.WeakSet[Layer] = weakref.WeakSet()


def watch(layer: Layer) -> None:
    """Watch as long as this layer is in force."""
    with lock:
        _watched.add(layer)
        logging.getLogger(LOGGER).addHandler(_watcher)


def unwatch() -> None:
    """A layer is not in force any more; after the last one torch's logger is as it was."""
    with lock:
        if not any(layer.live for layer in _watched):
            logging.getLogger(LOGGER).removeHandler(_watcher)


def _known(hit: Hit) -> bool:
    return hit.code is not None and hit_of(hit.code) is not None


def _remember(hit: Hit) -> None:
    kept = attrs.evolve(hit, code=None)
    with lock:
        _log.append((next(_number), kept))
        for key in [key for key, seen in _seen.items() if seen.code() is None]:
            del _seen[key]
        if hit.code is not None:
            entries = tuple(weakref.ref(one) for one in outcomes(hit.code))
            _seen[id(hit.code)] = _Seen(kept, weakref.ref(hit.code), entries)


def hit_of(code: types.CodeType) -> Hit | None:
    """The hit that still holds ``code`` back, or None."""
    with lock:
        seen = _seen.get(id(code))
    if seen is None or seen.code() is not code:
        return None
    entries = outcomes(code)
    before = {id(made) for one in seen.entries if (made := one()) is not None}
    if seen.entries and not any(id(one) in before for one in entries):
        return None
    # After torch's error the code object still compiles: entries made since then have outdated the hit.
    return None if seen.hit.error is not None and len(entries) > len(seen.entries) else seen.hit


def forget_hits(code: types.CodeType) -> None:
    """The code object was made able to compile again."""
    with lock:
        _seen.pop(id(code), None)


def last_hit() -> int:
    """A mark for ``hits_since``."""
    return _log[-1][0] if _log else -1


def hits_since(mark: int) -> list[Hit]:
    """Hits seen after ``last_hit`` gave ``mark``, the oldest first; the last thousand at most."""
    with lock:
        return [hit for number, hit in _log if number > mark]


def message(hit: Hit) -> str:
    """What was hit, where its value came from, why, and the way out, in one text."""
    outcome = (
        "The call fails; shapes that are compiled stay usable."
        if hit.error is not None
        else "Shapes that are compiled stay fast, every new one runs eager from now on, on all threads."
    )
    return (
        f"{hit.name} ({hit.file}:{hit.line}) hit {hit.setting}={hit.limit}, which comes from {came_from(hit)}. "
        f"{outcome} Last reason to recompile: {hit.reason}. {_way_out(hit)}"
    )


def came_from(hit: Hit) -> str:
    """Who set the limit that was hit, as this context sees it."""
    from .apply import current_policy

    wrappers = [one for one in compiled() if one.code is hit.code]
    policy = current_policy()
    if policy is not None:
        limits = [policy.limits, *(policy.limits_for(one.target) for one in wrappers)]
        asked = {one.recompile_limit for one in limits} | {one.accumulated_recompile_limit for one in limits}
        if hit.limit in asked | {policy.own_limit(one.target) for one in wrappers}:
            return "the applied policy"
    if hit.limit in {one.keyword for one in wrappers}:
        return "the keyword of torch.compile"
    setting = find(f"dynamo.{hit.setting}")
    if setting is not None and capabilities().process_lever and setting.override().base() == hit.limit:
        return "torch's default"
    return "an assignment outside of dynapolicy"


def _way_out(hit: Hit) -> str:
    way = "Declare the shapes this function meets in CompilePolicy(buckets=...)"
    return f"{way}." if hit.error is not None else f"{way}, then call dynapolicy.recover() on it."
