"""What the installed torch can do, found by trying, in one frozen record."""

from __future__ import annotations

import functools
import inspect
import os

import attrs

from ..errors import UnsupportedTorchWarning, warn
from ..workers.machine import TORCH_THREADS

__all__ = ["Capabilities", "capabilities", "unset_empty_threads"]


@attrs.frozen(kw_only=True)
class Capabilities:
    """What the installed torch can do. Pass another one to see what a torch without it would do.

    Attributes:
        torch_version: for messages only; nothing is decided by it.
        recompile_limit_names: ``config.recompile_limit`` and its family, since torch 2.7.
        context_local_config: a value set on one thread isn't seen by others, since torch 2.12.
        recompile_limit_keyword: ``torch.compile(recompile_limit=)``, since torch 2.12.
        isolate_recompiles: ``torch.compile(isolate_recompiles=)``, since torch 2.13.
        allow_unspec_int_on_nn_module: that dynamo setting, since torch 2.7.
        cache_artifacts: ``torch.compiler.save_cache_artifacts``, since torch 2.7.
        caching_precompile: that dynamo setting, since torch 2.9 (2.8 was not tried).
        precompile: ``torch.compiler.precompile``, since torch 2.14.
        process_lever: a value can be put in force for every context of the process.
    """

    torch_version: str
    recompile_limit_names: bool
    context_local_config: bool
    recompile_limit_keyword: bool
    isolate_recompiles: bool
    allow_unspec_int_on_nn_module: bool
    cache_artifacts: bool
    caching_precompile: bool
    precompile: bool
    process_lever: bool


def unset_empty_threads() -> bool:
    """Unset an empty ``TORCHINDUCTOR_COMPILE_THREADS``, with which torch's configuration can't be imported.

    It is not put back: compile workers inherit the environment and import the same configuration.
    """
    empty = not os.environ.get(TORCH_THREADS, "unset").strip()
    if empty:
        del os.environ[TORCH_THREADS]
    return empty


@functools.cache
def capabilities() -> Capabilities:
    """Probe the installed torch, once per process. Imports ``torch._dynamo``: seconds on the first call."""
    unset_empty_threads()
    import torch
    from torch._dynamo import config

    from . import lever

    keywords = inspect.signature(torch.compile).parameters
    problem = lever.probe(config)
    if problem is not None:
        warn(
            f"torch {torch.__version__} keeps its configuration in a way dynapolicy doesn't know ({problem}). "
            "A policy holds only in the context that applies it: apply it in each thread and task that compiles, "
            "or pass compile_kwargs() to torch.compile.",
            UnsupportedTorchWarning,
            once="process_lever",
        )
    return Capabilities(
        torch_version=str(torch.__version__),
        recompile_limit_names=hasattr(config, "recompile_limit"),
        context_local_config=lever.is_context_local(config),
        recompile_limit_keyword="recompile_limit" in keywords,
        isolate_recompiles="isolate_recompiles" in keywords,
        allow_unspec_int_on_nn_module=hasattr(config, "allow_unspec_int_on_nn_module"),
        cache_artifacts=hasattr(torch.compiler, "save_cache_artifacts"),
        caching_precompile=hasattr(config, "caching_precompile"),
        precompile=hasattr(torch.compiler, "precompile"),
        process_lever=problem is None,
    )
