"""What one process adds to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import bundling
from .bundling import Content
from .fit import traced_hashes
from .fitting import usable
from .manifest import Manifest
from .places import Places
from .store import Bundle, Store

__all__ = ["Addition"]


class Addition:
    """Adds what a process compiled to a bundle, as often as there is something new.

    Attributes:
        loaded: kind and key of every artifact that this process loaded.

    Args:
        at: what the warm start put in force.
        compiled: how many graphs were compiled so far.
        fields: name, mode and fit, for the manifest.
    """

    def __init__(
        self, store: Store, bundle: Bundle, at: Places, compiled: Callable[[], int], fields: Mapping[str, Any]
    ) -> None:
        self._store, self._bundle, self._at = store, bundle, at
        self._compiled, self._fields = compiled, fields
        self.loaded: frozenset[tuple[str, str]] = frozenset()

    def save(self) -> bool:
        """Save what is in no bundle. Whether there was something to save.

        Raises:
            OSError, filelock.Timeout: nothing was saved, what was there is still whole.
            ArtifactRefused: a folder above can be written by others.
        """
        mine = bundling.collect(self._at.work.path)
        # A bundle that lacks a kernel is completed, also where no graph was compiled.
        if mine.empty and not (self.loaded and self._at.new_kernels()):
            return False
        return self._store.save(self._bundle, lambda: self._with(mine)) is not None

    def _with(self, mine: Content) -> tuple[Manifest, dict[str, bytes]] | None:
        """What to write, asked while this process is the one writer."""
        at = self._at
        there, before = usable(self._store, self._bundle, at.state)
        # Torch writes a package anew whenever it saves; it says something new only after a compile.
        newer = at.precompile.kinds if self._compiled() else frozenset()
        content = bundling.merged(there, mine, self.loaded, newer=newer)
        if before is not None and content.same_as(there):
            return None
        return bundling.manifest_of(
            content,
            traced={**(before.traced if before else {}), **traced_hashes(at.traced.codes)},
            guards=at.precompile.guards(before.guards if before else ()),
            toolchain={**(before.toolchain if before else {}), **at.toolchain.answers},
            keys=at.keys.known(),
            **self._fields,
        )
