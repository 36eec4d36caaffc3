"""Something of ours in the place of something of torch's, and back."""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

__all__ = ["StandIn"]


class StandIn:
    """``ours`` in the place of an attribute of a module or class, until ``stop``.

    Attributes:
        original: what was there, a static method as such.
    """

    def __init__(self, owner: Any, name: str, ours: Any) -> None:
        self._owner, self._name, self._ours = owner, name, ours
        self.original: Any = getattr_static(owner, name)
        setattr(owner, name, ours)

    def stop(self) -> None:
        """Put the original back; somebody who took the place since keeps it."""
        if getattr_static(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self.original)
