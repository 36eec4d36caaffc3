"""Torch's cache artifacts, cache counters and cache folder, by what the installed torch has."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from ..artifacts.envelope import Layout
from .settings import Setting, find, touch

__all__ = [
    "CacheCounts",
    "Held",
    "clear_caches",
    "counts",
    "cpu_instructions",
    "layout",
    "load_blob",
    "machine_facts",
    "no_compile",
    "save_blob",
    "state_facts",
]


@functools.cache
def layout() -> Layout | None:
    """How this torch writes its envelope, seen in one that it wrote; None where it has none (2.6)."""
    import torch

    if not hasattr(torch.compiler, "save_cache_artifacts"):
        return None
    import torch._dynamo  # before _cache, which torch 2.7 can't import alone
    from torch.compiler import _cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer

    writer: Any = AppendingByteSerializer(serialize_fn=lambda out, text: out.write_str(text))
    writer.append("ab?")
    data = writer.to_bytes()
    return Layout(
        checksum=not data.startswith(bytes(7) + b"\x01" + bytes(7)),
        base64=not data.endswith(b"ab?"),
        grouped=hasattr(_cache, "_serialize_single_cache"),
    )


def save_blob() -> bytes | None:
    """Torch's own artifacts of everything this process compiled or took from a cache, or None."""
    import torch
    import torch._dynamo  # without it torch 2.7 can't save

    if layout() is None:
        return None
    with no_compile():
        saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else bytes(saved[0])


def load_blob(blob: bytes) -> bool:
    """Let torch write the entries into its cache folder. Only for bytes that were checked."""
    import torch
    import torch._dynamo  # without it torch 2.7 can't load

    return torch.compiler.load_cache_artifacts(blob) is not None


@contextlib.contextmanager
def no_compile() -> Iterator[None]:
    """Wait for the compile that runs, and let none begin."""
    from torch._dynamo import convert_frame

    with convert_frame.compile_lock:
        yield


def clear_caches() -> None:
    """Forget everything compiled: torch's entries and inductor's modules, in memory."""
    import torch
    from torch._inductor import utils

    torch._dynamo.reset()
    # Its name changed with torch 2.9.
    clear: Any = getattr(utils, "clear_caches", None) or getattr(utils, "clear_inductor_caches", None)
    if clear is not None:
        clear()


@attrs.frozen
class CacheCounts:
    """What torch counted since the process began.

    Attributes:
        hits: graphs taken from a cache.
        misses: graphs looked up and compiled.
        bypassed: graphs that can't be cached, compiled as well.
        packages: whole functions taken from a precompile cache.
        traced: frames that were traced; a precompiled one is not.
    """

    hits: int = 0
    misses: int = 0
    bypassed: int = 0
    packages: int = 0
    traced: int = 0

    def since(self, before: CacheCounts) -> CacheCounts:
        """The difference; where somebody cleared the counters, what they say now."""
        pairs = zip(attrs.astuple(self), attrs.astuple(before), strict=True)
        return CacheCounts(*(now - then if now >= then else now for now, then in pairs))


def counts() -> CacheCounts:
    """Torch's counters, as far as they are about caches."""
    from torch._dynamo.utils import counters

    graphs, autograd = counters["inductor"], counters["aot_autograd"]
    hits, misses = graphs["fxgraph_cache_hit"], graphs["fxgraph_cache_miss"]
    # Bundled autograd entries hold their graphs: torch counts no look-up of the graph itself then.
    return CacheCounts(
        hits=max(hits, autograd["autograd_cache_hit"]),
        misses=misses,
        bypassed=graphs["fxgraph_cache_bypass"],
        packages=counters["dynamo_cache"]["dynamo_cache_hit"],
        traced=counters["frames"]["ok"],
    )


# -- what must fit ------------------------------------------------------------------------------------


def machine_facts() -> dict[str, Any]:
    """Torch, Python, Triton and the device: the fields that say where artifacts can be used."""
    import torch

    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version)[:12],
        "python": f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}",
        "machine": f"{platform.system()} {platform.machine()}",
        "triton": _triton(),
        "cuda": _accelerator(),
    }
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        facts["gpu"] = torch.cuda.get_device_name(index)
        facts["gpu_capability"] = ".".join(map(str, torch.cuda.get_device_capability(index)))
        facts["gpu_index"] = index
    else:
        facts["cpu"] = cpu_instructions()
        facts["threads"] = torch.get_num_threads()
    return facts


def _accelerator() -> str:
    import torch

    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "none"


def _triton() -> str:
    from importlib import metadata

    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "none"


@functools.cache
def cpu_instructions() -> str:
    """The CPU's instruction set. Inductor compiles C++ with ``-march=native``, so every flag counts."""
    import hashlib

    import torch

    capability = str(torch.backends.cpu.get_cpu_capability())
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
        words = sorted(flags.partition(":")[2].split())
        return f"{capability}, {len(words)} flags {hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"
    return f"{capability}, {platform.processor()}"


def state_facts() -> dict[str, Any]:
    """Torch's state of this thread that goes into what is compiled."""
    import torch

    autocast = [
        f"{device} {torch.get_autocast_dtype(device)}"
        for device in ("cuda", "cpu")
        if torch.is_autocast_enabled(device)
    ]
    return {
        "grad": "inference" if torch.is_inference_mode_enabled() else torch.is_grad_enabled(),
        "autocast": ", ".join(autocast) or "off",
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


# -- settings for the whole process ------------------------------------------------------------------


class Held:
    """A setting held at a value for the whole process, below every deliberate value, until ``restore``."""

    def __init__(self, name: str, value: Any) -> None:
        self._setting = find(name)
        if self._setting is None:
            return
        self._override = self._setting.override()
        self._before = self._override.process
        self._put(self._override, value)
        self._written = self._setting.read() != value
        if self._written:
            # This context has a value of its own, which wins.
            self._found = self._setting.read()
            self._setting.write(value)

    def _put(self, override: Any, value: Any) -> None:
        override.process = value
        touch(self._setting_there.module)

    @property
    def _setting_there(self) -> Setting:
        assert self._setting is not None  # noqa: S101 - for the type checker
        return self._setting

    def restore(self) -> None:
        """Put back what was found."""
        if self._setting is None:
            return
        if self._written:
            self._setting.write(self._found)
        self._put(self._override, self._before)
