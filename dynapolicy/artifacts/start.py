"""Restart without compiling: where artifacts are kept, and ``warm_start``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArtifactError, ArtifactWarning, warn
from ..knob_table import knob, rows_of
from ..knobs import read_knobs
from . import trust
from .store import Store

if TYPE_CHECKING:
    from ..policy import CompilePolicy
    from .session import WarmStart

__all__ = ["open_store", "say_unsafe", "user_folder", "warm_start"]

MODES = ("default", "precompile")


def open_store(
    root: str | os.PathLike[str] | None = None,
    *,
    prefix: str = "DYNAPOLICY_",
    environ: Mapping[str, str] | None = None,
) -> Store:
    """The store at ``<prefix>ARTIFACT_DIR``, else at ``root``, else in the user's cache folder."""
    environ = os.environ if environ is None else environ
    given = {"artifact_dir": None if root is None else os.fspath(root)}
    folder = read_knobs(environ, given, prefix, rows_of("artifacts"))["artifact_dir"].value
    key = environ.get(knob("artifact_key").variable(prefix), "").strip()
    return Store(Path(str(folder)).expanduser() if folder else user_folder(), key.encode() or None)


def user_folder() -> Path:
    """The folder in the user's cache folder that is used where nobody says where.

    Raises:
        ArtifactError: platformdirs is not installed.
    """
    try:
        import platformdirs
    except ImportError:
        rule = "The user's cache folder is found by platformdirs, which is not installed"
        way_out = "Install dynapolicy[artifacts], or set DYNAPOLICY_ARTIFACT_DIR"
        raise ArtifactError("warm_start", None, rule, "default", way_out) from None
    return Path(platformdirs.user_cache_dir("dynapolicy", appauthor=False))


def say_unsafe(root: Path) -> None:
    """Warn about a place where artifacts get lost, can't be loaded, or can be replaced by anybody."""
    real = Path(os.path.realpath(root))
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    if temporary == real or temporary in real.parents:
        warn(
            f"Artifacts are kept in {root}, below the temporary folder, which is cleaned under running jobs and "
            "lost with the machine. Set DYNAPOLICY_ARTIFACT_DIR to a folder that stays.",
            ArtifactWarning,
            once=("temporary", real),
            stacklevel=4,
        )
    if trust.is_noexec(real):
        message = f"Artifacts are kept in {root}, which is mounted noexec: compiled C++ can't be loaded from there."
        warn(message, ArtifactWarning, once=("noexec", real), stacklevel=4)
    if trust.is_world_writable(real):
        message = f"Artifacts are kept in {root}, where everybody can write. They are code: chmod go-w it."
        warn(message, ArtifactWarning, once=("writable", real), stacklevel=4)


def warm_start(
    name: str,
    *,
    policy: CompilePolicy | None = None,
    sources: Iterable[Any] = (),
    signature: Any = None,
    extra: Any = None,
    mode: str = "default",
    root: str | os.PathLike[str] | None = None,
    prefix: str = "DYNAPOLICY_",
    environ: Mapping[str, str] | None = None,
) -> WarmStart:
    """Load on entry what an earlier process compiled; save on a clean exit what was compiled anew.

    A bundle is used only where every field of its manifest is the same here, and every byte of it was
    written by this user or root and is what was saved. What doesn't fit is said, and the start goes on
    cold: artifacts never make a start fail.

    Args:
        name: the model's; bundles of several machines and versions lie below it.
        policy: what the program declares; the policy in force where not given.
        sources: modules, packages, functions, classes or paths whose files must be the same.
        signature: the model, for its tree of modules and the shapes of its tensors; or any JSON.
        extra: JSON of the caller's own that must be the same.
        mode: ``"precompile"`` skips tracing as well; torch then drops guards, see the documentation.
        root: where bundles are kept, in place of the user's cache folder.
        prefix: what the variables' names begin with.
        environ: the environment; ``os.environ`` where not given.

    Raises:
        ArtifactError: a name, mode, source, signature or ``extra`` that can't be used.
    """
    from .session import WarmStart

    if mode not in MODES:
        rule = f"Allowed is one of {', '.join(MODES)}"
        raise ArtifactError("mode", mode, rule, "argument", "Pass an allowed mode")
    store = open_store(root, prefix=prefix, environ=environ)
    store.bundle(name, "x")
    return WarmStart(name, store, policy, sources, signature, extra, mode)
