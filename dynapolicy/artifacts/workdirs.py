"""Each process's own cache folder, and what is remembered of processes that died in theirs."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import filelock

from ..errors import ArtifactRefused
from . import trust
from .store import write_json

__all__ = ["WorkFolder", "in_use", "lift", "quarantine", "quarantined", "sweep"]

#: A process between load and its first good batch; if it dies there, the artifact is to blame.
LOADING = "loading"


class WorkFolder:
    """A folder that no other process writes to, so that what was checked stays what is used.

    A lock that the system holds for this process tells the living from the dead.

    Attributes:
        path: the folder.
    """

    def __init__(self, state: Path) -> None:
        top = _top(state)
        trust.make_private(top)
        trust.check_folder(top, state)
        self._state = state
        self._pid = os.getpid()
        self.path = top / f"{self._pid}-{os.urandom(4).hex()}"
        self._note = self.path.with_suffix(".json")
        self._lock = filelock.FileLock(self.path.with_suffix(".lock"), timeout=0)
        with _sweeping(state):
            self._lock.acquire()
            self.path.mkdir(mode=0o700)
        atexit.register(self.close)

    def note(self, phase: str, bundle: str, identity: str = "") -> None:
        """Write down what this process is doing with which bundle. It outlasts the process."""
        write_json(self._note, {"phase": phase, "bundle": bundle, "identity": identity, "pid": self._pid})

    def empty(self) -> None:
        """Remove what is in the folder."""
        for path in self.path.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder; in a forked child nothing."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, filelock.Timeout), _sweeping(self._state):
            _discard(self.path)
            self._lock.release()


def _top(state: Path) -> Path:
    return state / "work"


def _sweeping(state: Path) -> filelock.BaseFileLock:
    """Between making a lock and holding it nobody may take the maker for dead."""
    return filelock.FileLock(_top(state) / "sweep.lock", timeout=30)


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for suffix in (".json", ".lock"):
        folder.with_suffix(suffix).unlink(missing_ok=True)


def _folders(state: Path) -> list[Path]:
    found = [path.with_suffix("") for path in _top(state).glob("*.lock")]
    return sorted(path for path in found if path.name != "sweep")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sweep(state: Path) -> list[str]:
    """Clear up after processes that died. Artifacts that one was loading are quarantined.

    Returns:
        What was quarantined, in words.
    """
    said: list[str] = []
    if not _folders(state):
        return said
    with _sweeping(state):
        for folder in _folders(state):
            with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder.with_suffix(".lock"), timeout=0):
                note = _read(folder.with_suffix(".json"))
                if note.get("phase") == LOADING and note.get("identity"):
                    why = f"process {note.get('pid')} died between loading it and its first good batch"
                    quarantine(state, str(note["identity"]), str(note.get("bundle")), why)
                    said.append(f"{note.get('bundle')}: {why}")
                _discard(folder)
    return said


def in_use(state: Path) -> set[str]:
    """Bundles that living processes use, by their id."""
    used = set()
    for folder in _folders(state):
        try:
            with filelock.FileLock(folder.with_suffix(".lock"), timeout=0):
                pass
        except filelock.Timeout:
            used.add(str(_read(folder.with_suffix(".json")).get("bundle")))
    return used


# -- quarantine ----------------------------------------------------------------------------------------


def _sentence(state: Path, identity: str) -> Path:
    return state / "quarantine" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def quarantine(state: Path, identity: str, bundle: str, why: str) -> None:
    """Never load this save of a bundle again. The next save, which is another, is not concerned."""
    with contextlib.suppress(OSError):
        write_json(_sentence(state, identity), {"bundle": bundle, "why": why, "when": time.time()})


def quarantined(state: Path, identity: str) -> str | None:
    """Why this save of a bundle is not loaded, or None."""
    path = _sentence(state, identity)
    if not os.path.lexists(path):
        return None
    return str(_read(path).get("why") or "quarantined")


def lift(state: Path, identity: str) -> None:
    """The artifact was not to blame."""
    with contextlib.suppress(OSError):
        _sentence(state, identity).unlink()


def usable(state: Path) -> bool:
    """Whether work folders can be made in ``state``, and nobody else can write there."""
    if not trust.is_writable(state):
        return False
    try:
        trust.check_folder(state, state)
    except ArtifactRefused:
        return False
    return True
