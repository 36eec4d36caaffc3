"""What artifacts must fit: an allow-list of fields, each readable. What is not here never matters.

HOME, host names, ports, ranks' addresses and paths are not here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArtifactError
from ..torch_compat.artifacts import machine_facts, state_facts
from .manifest import digest_of

if TYPE_CHECKING:
    from ..policy import CompilePolicy

__all__ = ["changed_sources", "fit_of", "signature_of", "source_hashes", "traced_hashes"]

_WAY_OUT = "Pass modules, packages, functions, classes or paths of files"


def fit_of(policy: CompilePolicy | None, sources: Iterable[Any], signature: Any, extra: Any) -> dict[str, Any]:
    """Every field that must match, for this process as it is now.

    Raises:
        ArtifactError: a source without a file, or a signature or ``extra`` that is no JSON.
    """
    fit = machine_facts()
    fit.update(state_facts())
    fit["policy"] = "none" if policy is None else policy_digest(policy)
    fit["buckets"] = {} if policy is None else {one.name: one.entries for one in policy.declarations}
    fit["signature"] = signature_of(signature)
    fit["sources"] = source_hashes(sources)
    fit["extra"] = _json("extra", extra)
    return fit


def policy_digest(policy: CompilePolicy) -> str:
    """The same for policies that ask the same, wherever their values came from."""
    knobs = {record.name: record.value for record in policy.knobs}
    return digest_of([[one.to_json() for one in policy.declarations], dict(policy.settings), knobs])[:16]


def _json(thing: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        rule = "It is written to the manifest as JSON"
        raise ArtifactError(thing, value, rule, "argument", "Pass strings, numbers, lists and dicts") from None


# -- the model ---------------------------------------------------------------------------------------


def signature_of(model: Any) -> Any:
    """A module as its tree of types, and names, shapes, dtypes and strides of its tensors; JSON as it is."""
    if not hasattr(model, "named_modules"):
        return _json("signature", model)
    tree = [[name, f"{type(one).__module__}:{type(one).__qualname__}"] for name, one in model.named_modules()]
    tensors = [
        [name, list(one.shape), str(one.dtype), list(one.stride()), one.device.type, one.requires_grad]
        for name, one in (*model.named_parameters(), *model.named_buffers())
    ]
    tree = [[name, kind.replace("__mp_main__:", "__main__:")] for name, kind in tree]
    return {
        "class": tree[0][1],
        "modules": f"{len(tree)}, {digest_of(tree)[:12]}",
        "tensors": f"{len(tensors)}, {digest_of(tensors)[:12]}",
    }


# -- sources -----------------------------------------------------------------------------------------


def source_hashes(sources: Iterable[Any]) -> dict[str, str]:
    """A hash per source that the caller names: packages with all their files, files by their name.

    Raises:
        ArtifactError: something that has no source file.
    """
    if isinstance(sources, (str, Path, types.ModuleType, types.FunctionType, type)):
        sources = [sources]
    return dict(_source(one) for one in sources)


def _source(source: Any) -> tuple[str, str]:
    if isinstance(source, types.ModuleType) and hasattr(source, "__path__"):
        return source.__name__, _hash_folders([Path(one) for one in source.__path__])
    if isinstance(source, (str, Path)):
        path, name = Path(source), Path(source).name
    else:
        module = source if isinstance(source, types.ModuleType) else sys.modules.get(getattr(source, "__module__", ""))
        name = getattr(module, "__name__", "")
        path = Path(getattr(module, "__file__", None) or "")
    if path.is_dir() and path.name:
        return name, _hash_folders([path])
    found = _hash_file(path)
    if found is None:
        raise ArtifactError("sources", source, "A source has a file", "argument", _WAY_OUT)
    return name.replace("__mp_main__", "__main__"), found


def _hash_folders(folders: list[Path]) -> str:
    """Hash of every Python and extension source below, by relative path."""
    ends = (".py", ".cu", ".cpp", ".cuh", ".h", ".so")
    rows = [
        [path.relative_to(folder).as_posix(), _hash_file(path)]
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in ends and path.is_file()
    ]
    return f"{len(rows)} files {digest_of(sorted(rows))[:16]}"


def _hash_file(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def traced_hashes(codes: dict[types.CodeType, str]) -> dict[str, str]:
    """A hash per module whose code was traced. Torch's own modules are told apart by its version."""
    files = {
        ("__main__" if module == "__mp_main__" else module): code.co_filename
        for code, module in codes.items()
        if module.split(".")[0] not in ("torch", "builtins", "")
    }
    return {module: found for module, file in sorted(files.items()) if (found := _hash_file(Path(file)))}


def changed_sources(traced: dict[str, Any]) -> list[str]:
    """Modules whose source is not what was traced. Nothing is imported to find out."""
    changed = []
    for module, before in traced.items():
        path = _file_of(str(module))
        now = None if path is None else _hash_file(path)
        if now != before:
            changed.append(f"{module} {before} -> {now or 'not found'}")
    return changed


def _file_of(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None
