"""The one lock of the package."""

from __future__ import annotations

import os
import threading

__all__ = ["lock"]

#: Guards everything that the package shares between threads. A fork waits for it, so that no child
#: inherits it locked; a second lock beside it could be taken in the other order there.
lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
