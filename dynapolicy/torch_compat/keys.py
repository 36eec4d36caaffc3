"""What torch and Triton hash of their own files before the first look-up in a cache."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..no_fork import no_fork
from .stand_in import StandIn

__all__ = ["THREAD", "Keys", "fingerprint"]

THREAD = "dynapolicy-keys"

#: Compiled from what is there, or part of no key.
_SKIPPED_FOLDERS = ("__pycache__", "include")


class _Key(NamedTuple):
    """A function that keeps its answer, and the package whose files it hashes."""

    module: str
    name: str
    package: str


#: Hashing takes half a second, and a warm start can be shorter.
_KEYS = (
    _Key("torch._inductor.codecache", "torch_key", "torch"),
    _Key("torch._inductor.runtime.triton_compat", "triton_key", "triton"),
)


class Keys:
    """The hashes, of an earlier process where no file has changed since, otherwise hashed on threads.

    A look-up that comes before the end hashes for itself, as it would have done anyway.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._known: dict[str, dict[str, str]] = {}
        self._stand_ins: list[StandIn] = []
        self._lock = threading.Lock()
        self._stopped = False

    def begin(self, saved: Mapping[str, Any]) -> None:
        """Begin, unless that was done, and let the caller do something else.

        Args:
            saved: what ``known`` said in an earlier process.
        """
        if self._threads:
            return
        # Imported here: torch breaks where threads import parts of it at once.
        import torch._dynamo  # noqa: F401 - first, or some releases can't import the others

        found = [(key, *_found(key)) for key in _KEYS]
        self._threads = [
            threading.Thread(target=self._find, args=(key, module, root, saved.get(key.name)), name=THREAD, daemon=True)
            for key, module, root in found
            if module is not None
        ]
        for thread in self._threads:
            thread.start()

    def known(self) -> dict[str, dict[str, str]]:
        """The hashes by name, each with what tells the files that it is of."""
        for thread in self._threads:
            thread.join()
        return dict(self._known)

    def stop(self) -> None:
        """Put back what was changed."""
        with self._lock:
            self._stopped = True
            for one in self._stand_ins:
                one.stop()

    def _find(self, key: _Key, module: Any, root: str, saved: Any) -> None:
        # Without Triton its key can't be had; what else fails here fails again where torch asks, and is said there.
        # Some releases hold a lock meanwhile, and Triton imports its parts.
        with no_fork(), contextlib.suppress(Exception):
            files = fingerprint(root)
            value = _read(saved, files)
            if value is None:
                value = getattr(module, key.name)()
            else:
                self._take(module, key.name, value)
            self._known[key.name] = {"files": files, "key": repr(value)}

    def _take(self, module: Any, name: str, value: bytes | str) -> None:
        ask: Callable[[], Any] = getattr(module, name)
        if hasattr(ask, "set"):
            # It raises where torch has the value already.
            with contextlib.suppress(Exception):
                ask.set(value)
            return
        with self._lock:
            if not self._stopped:
                self._stand_ins.append(StandIn(module, name, lambda: value))


def _found(key: _Key) -> tuple[Any, str]:
    """The module of the function, and the folder of the files."""
    with contextlib.suppress(ImportError):
        module, package = importlib.import_module(key.module), importlib.import_module(key.package)
        if hasattr(module, key.name) and package.__file__:
            return module, str(Path(package.__file__).parent)
    return None, ""


def _read(saved: Any, files: str) -> bytes | str | None:
    """The hash that was saved, where it is of these files."""
    if not isinstance(saved, dict) or saved.get("files") != files:
        return None
    with contextlib.suppress(Exception):
        value = ast.literal_eval(saved["key"])
        return value if isinstance(value, (bytes, str)) else None
    return None


def fingerprint(root: str) -> str:
    """What tells the files below a folder: path, size, and time of change, in seconds as image layers keep it."""
    seen = sorted((path[len(root) :], stat.st_size, int(stat.st_mtime)) for path, stat in _files(root))
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    todo = [root]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if not entry.is_dir():
                    yield entry.path, entry.stat()
                elif entry.name not in _SKIPPED_FOLDERS:
                    todo.append(entry.path)
