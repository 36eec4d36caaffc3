"""What a warm start puts in force while it lasts: cache folders, key tag, and everything that watches torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArtifactRefused
from ..torch_compat import artifacts as compat
from ..torch_compat.autotune import AutotuneNames, key_tag_of_environment
from ..torch_compat.keys import Keys
from ..torch_compat.toolchain import Toolchain
from ..torch_compat.tracing import TracedCode
from . import precompiled, workdirs
from .manifest import digest_of
from .open_starts import opened
from .start import user_folder
from .store import Store

__all__ = ["Places"]

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Places:
    """In force from when it is made until ``leave``.

    Attributes:
        state: the folder with this machine's private folders and quarantine.
        work: this process's own cache folder.
        keys, toolchain, traced, precompile: what watches torch, or answers for it.

    Args:
        name: the start's.
        say: warns.

    Raises:
        ArtifactError: another start is open that this one is not inside of.
    """

    def __init__(self, name: str, store: Store, fit: dict[str, Any], mode: str, say: Callable[[str], None]) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(opened(name))
            self.state, self.work = _work_folder(store, say)
            for variable, folder in _FOLDERS.items():
                undo.callback(_put_back, variable, os.environ.get(variable))
                os.environ[variable] = str(self.work.path / folder)
            self._make_folders()
            tag = digest_of([key_tag_of_environment(), fit, mode])[:16]
            undo.callback(compat.Held("compiler.cache_key_tag", f"dynapolicy-{tag}").restore)
            undo.callback(AutotuneNames().stop)
            self.keys = Keys()
            undo.callback(self.keys.stop)
            self.toolchain = Toolchain({})
            undo.callback(self.toolchain.stop)
            self.traced = TracedCode()
            undo.callback(self.traced.stop)
            self.precompile = precompiled.begin(mode)
            undo.callback(self.precompile.stop)
            self._undo = undo.pop_all()

    def _make_folders(self) -> None:
        for folder in _FOLDERS.values():
            (self.work.path / folder).mkdir(exist_ok=True)

    def empty(self) -> None:
        """Nothing of what was loaded stays on disk."""
        self.work.empty()
        self._make_folders()

    def count_kernels(self) -> None:
        """Those that are there now are not new."""
        self._kernels = self._count()

    def new_kernels(self) -> int:
        """C++ kernels that this process built since."""
        return self._count() - self._kernels

    def _count(self) -> int:
        return sum(1 for _ in (self.work.path / "inductor").glob("*/*.so"))

    def leave(self) -> None:
        """Put back what was found. The folder stays until the process ends: torch may still load from it."""
        self._undo.close()


def _work_folder(store: Store, say: Callable[[str], None]) -> tuple[Path, workdirs.WorkFolder]:
    # The user's folder is asked for only where it is needed.
    for choice in range(2):
        state = user_folder() if choice else store.root
        if workdirs.usable(state):
            with contextlib.suppress(OSError, NotImplementedError, ArtifactRefused):
                for said in workdirs.sweep(state):
                    say(f"Quarantined {said}. This start goes on cold.")
                return state, workdirs.WorkFolder(state)
    say("Neither the artifact folder nor the user's cache folder can be written: the temporary one is used.")
    state = Path(tempfile.mkdtemp(prefix="dynapolicy-"))
    return state, workdirs.WorkFolder(state)


def _put_back(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
