"""Precompile mode: tracing is skipped as well, and torch drops guards for it.

A dropped guard is a thing that torch no longer looks at: a function, a module, a closure. What can be
said about it is written down when it is dropped and held against what is there when it is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArtifactError, ArtifactRefused, ArtifactWarning, RestoreError, warn
from ..torch_compat import precompile
from ..torch_compat.artifacts import CacheCounts, Held
from ..torch_compat.dropped_guards import DroppedGuards
from ..torch_compat.fake_modes import ModesWithoutStacks
from ..torch_compat.kept_guards import Kept, KeptGuards
from .guarded import Guard, looked_up, told_apart, written_down

__all__ = ["NoPrecompile", "Precompile", "begin"]


class NoPrecompile:
    """The default mode, or precompile mode where torch can't: nothing is watched."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.note = ""

    def abandon(self) -> None:
        """Nothing to take back."""

    def check(self, guards: Sequence[Guard]) -> None:
        """Nothing was dropped."""

    def loaded(self, guards: Sequence[Guard], distrust: Callable[[str], None]) -> None:
        """Nothing to say."""

    def guards(self, before: Sequence[Guard]) -> tuple[Guard, ...]:
        """None are dropped."""
        return tuple(before)

    def graphs(self, counted: CacheCounts) -> int:  # noqa: ARG002 - precompile mode uses it
        """Nothing is taken whole."""
        return 0

    def stop(self) -> None:
        """Nothing was changed."""


class Precompile(NoPrecompile):
    """Precompile mode."""

    #: Torch keeps one package per function.
    kinds = frozenset({"precompile"})

    def __init__(self) -> None:
        super().__init__()
        self._frozen: Any = None
        self._undo = contextlib.ExitStack()
        self._undo.callback(Held("dynamo.caching_precompile", True).restore)
        self._kept = KeptGuards()
        self._undo.callback(self._kept.stop)
        self._dropped = DroppedGuards(told_apart, self._kept.add)
        self._undo.callback(self._dropped.stop)
        self._packages = precompile.Packages(_refuse_collision, self._leave_out, self._trace_again)
        self._undo.callback(self._packages.stop)
        self._undo.callback(ModesWithoutStacks().stop)

    def check(self, guards: Sequence[Guard]) -> None:
        """Hold what was written down against what is there.

        Raises:
            ArtifactRefused: something that no guard looks at any more is not what it was.
        """
        for guard in guards:
            if guard["entry"]:
                self._put_back_later(guard)
                continue
            now = looked_up(guard)
            what = f"{guard['name']} in {guard['scope']}"
            if now is None:
                raise ArtifactRefused(
                    f"{what} was {guard['object']}: torch drops its guard in precompile mode, and nobody can tell it "
                    "from another one. Make it a global, or use the default mode"
                )
            if now != guard["object"]:
                raise ArtifactRefused(f"{what}: {guard['object']} -> {now}")

    def _put_back_later(self, guard: Guard) -> None:
        try:
            self._kept.add(guard["entry"], Kept(guard["name"], guard["object"], told_apart))
        except (SyntaxError, ValueError):
            raise ArtifactRefused(f"a guard that is put back looks at {guard['name']!r}, which is no code") from None

    def loaded(self, guards: Sequence[Guard], distrust: Callable[[str], None]) -> None:
        """Say what nobody guards any more; where torch can't recompile after a hit, freeze.

        Args:
            distrust: sees to it that these artifacts are not loaded again.
        """
        self._distrust = distrust
        names = sorted({f"{one['scope']}: {one['name']}" for one in guards if one["rebindable"]})
        if names:
            warn(
                "Torch dropped the guards on these for precompile mode: rebinding one while the program runs gives "
                f"wrong results: {', '.join(names)}.",
                ArtifactWarning,
                once=("guards", *names),
                stacklevel=5,
            )
        if precompile.recompile_after_hit_raises():
            self._freeze()

    def _freeze(self) -> None:
        """It outlasts the warm start, as what torch can't do does."""
        from ..actions.freezing import freeze

        self._frozen = freeze()
        self.note = "compilation is frozen, because this torch can't compile after it: other shapes run eager"
        warn(
            "This torch can't compile a function for another shape once it came from precompiled artifacts: "
            "compilation is frozen for the process, and what is not among the artifacts runs eager.",
            ArtifactWarning,
            once="frozen",
            stacklevel=6,
        )

    def _leave_out(self, fn: Any, found: Any, first: bool) -> bool:
        """Whether a function's instance is not what was precompiled, so that it must be compiled again."""
        why = self._kept.misfit(fn, found)
        if not why:
            return False
        if first:
            self.abandon()
        elif self._frozen is not None:
            # It can't be compiled any more, but the next start can.
            self._distrust(why)
        why = f"{getattr(fn, '__qualname__', fn)} is not taken from artifacts: {why}"
        self.note = ", ".join(filter(None, (self.note, why)))
        warn(f"{why}.", ArtifactWarning, once=("left out", why), stacklevel=6)
        return True

    def _trace_again(self, fn: Any, error: Exception) -> None:
        """Torch can't load what it saved for a function."""
        self.abandon()
        what = str(error).partition("\n")[0][:200]
        self.note = f"torch can't load {getattr(fn, '__qualname__', fn)}: {type(error).__name__}: {what}"
        warn(f"{self.note}. Everything is traced again.", ArtifactWarning, once=("broken", self.note), stacklevel=6)

    def abandon(self) -> None:
        """What was loaded is not used after all: compile again."""
        if self._frozen is not None:
            # Somebody's own freeze on top stays, and this one below it.
            with contextlib.suppress(RestoreError):
                self._frozen.restore()
        self._frozen, self.note = None, ""
        self._packages.forget()

    def guards(self, before: Sequence[Guard]) -> tuple[Guard, ...]:
        """What was dropped so far, and before."""
        found = [one for dropped in list(self._dropped.found) if (one := written_down(dropped))]
        # What was compiled now stands in the place of what was there, and so does what it looked at.
        anew = {_place(one) for one in found}
        kept = [one for one in before if _place(one) not in anew]
        return tuple({(*_place(one), one["object"]): one for one in (*kept, *found)}.values())

    def graphs(self, counted: CacheCounts) -> int:
        """Graphs that came with their functions, and were not traced again."""
        # A function whose source changed is traced again, although torch counts a hit.
        return max(self._packages.graphs - counted.misses, 0) if counted.packages else 0

    def stop(self) -> None:
        """Put everything back."""
        self._undo.close()


def _place(guard: Guard) -> tuple[str, str, str]:
    return guard["scope"], guard["name"], guard["entry"]


def begin(mode: str) -> NoPrecompile:
    """Put a mode in force."""
    if mode != "precompile":
        return NoPrecompile()
    lacking = precompile.lacking()
    return NoPrecompile(f'mode="precompile": {lacking}') if lacking else Precompile()


def _refuse_collision(name: str) -> None:
    rule = "Torch names a precompiled function after its qualname and first line, and would mix the two up"
    raise ArtifactError('mode="precompile"', name, rule, "torch.compile", "Rename or move one, or use the default mode")
