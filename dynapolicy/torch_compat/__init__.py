"""The only place that touches torch's insides. Importing it loads no torch; calling it does."""

from __future__ import annotations

from .capabilities import Capabilities, capabilities

__all__ = ["Capabilities", "capabilities"]
