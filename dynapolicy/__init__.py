"""One owner for a program's torch.compile configuration.

Importing this package loads no torch, changes nothing, and loads each part on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actions.freezing import Frozen as Frozen
    from .actions.freezing import freeze as freeze
    from .actions.recovery import recover as recover
    from .actions.warming import WarmUp as WarmUp
    from .actions.warming import warm_up as warm_up
    from .apply import AppliedPolicy as AppliedPolicy
    from .apply import apply_policy as apply_policy
    from .apply import current_policy as current_policy
    from .apply import initializer as initializer
    from .artifacts.session import WarmStart as WarmStart
    from .artifacts.start import warm_start as warm_start
    from .buckets import ShapeBuckets as ShapeBuckets
    from .compiled import compile as compile  # noqa: A004 - torch's own name for it
    from .derivation import RecompileLimits as RecompileLimits
    from .errors import ArtifactError as ArtifactError
    from .errors import ArtifactWarning as ArtifactWarning
    from .errors import BucketError as BucketError
    from .errors import BucketWarning as BucketWarning
    from .errors import CeilingError as CeilingError
    from .errors import CeilingWarning as CeilingWarning
    from .errors import DynapolicyError as DynapolicyError
    from .errors import DynapolicyWarning as DynapolicyWarning
    from .errors import FrozenError as FrozenError
    from .errors import KnobError as KnobError
    from .errors import KnobWarning as KnobWarning
    from .errors import RecompileLimitWarning as RecompileLimitWarning
    from .errors import RecoverError as RecoverError
    from .errors import RestoreError as RestoreError
    from .errors import ScopeWarning as ScopeWarning
    from .errors import SettingError as SettingError
    from .errors import SettingWarning as SettingWarning
    from .errors import TargetError as TargetError
    from .errors import TooLateWarning as TooLateWarning
    from .errors import UnsupportedTorchWarning as UnsupportedTorchWarning
    from .errors import WarmUpError as WarmUpError
    from .errors import WorkerError as WorkerError
    from .errors import WorkerWarning as WorkerWarning
    from .observe.per_code import audit as audit
    from .observe.per_place import doctor as doctor
    from .observe.per_setting import effective as effective
    from .policy import CompilePolicy as CompilePolicy
    from .torch_compat.capabilities import Capabilities as Capabilities
    from .torch_compat.capabilities import capabilities as capabilities
    from .torch_compat.hits import LIMIT_ERRORS as LIMIT_ERRORS
    from .workers.handle import WorkerReport as WorkerReport
    from .workers.handle import Workers as Workers
    from .workers.handle import start_workers as start_workers
    from .workers.machine import Machine as Machine
    from .workers.plan import WorkerPlan as WorkerPlan
    from .workers.policy import WorkerPolicy as WorkerPolicy

__version__ = "0.1.0"

#: Where each public name lives; the imports above say the same to type checkers.
_HOME = {
    "AppliedPolicy": "apply",
    "ArtifactError": "errors",
    "ArtifactWarning": "errors",
    "BucketError": "errors",
    "BucketWarning": "errors",
    "Capabilities": "torch_compat.capabilities",
    "CeilingError": "errors",
    "CeilingWarning": "errors",
    "CompilePolicy": "policy",
    "DynapolicyError": "errors",
    "DynapolicyWarning": "errors",
    "Frozen": "actions.freezing",
    "FrozenError": "errors",
    "KnobError": "errors",
    "KnobWarning": "errors",
    "LIMIT_ERRORS": "torch_compat.hits",
    "Machine": "workers.machine",
    "RecompileLimitWarning": "errors",
    "RecompileLimits": "derivation",
    "RecoverError": "errors",
    "RestoreError": "errors",
    "ScopeWarning": "errors",
    "SettingError": "errors",
    "SettingWarning": "errors",
    "ShapeBuckets": "buckets",
    "TargetError": "errors",
    "TooLateWarning": "errors",
    "UnsupportedTorchWarning": "errors",
    "WarmStart": "artifacts.session",
    "WarmUp": "actions.warming",
    "WarmUpError": "errors",
    "WorkerError": "errors",
    "WorkerPlan": "workers.plan",
    "WorkerPolicy": "workers.policy",
    "WorkerReport": "workers.handle",
    "WorkerWarning": "errors",
    "Workers": "workers.handle",
    "apply_policy": "apply",
    "audit": "observe.per_code",
    "capabilities": "torch_compat.capabilities",
    "compile": "compiled",
    "current_policy": "apply",
    "doctor": "observe.per_place",
    "effective": "observe.per_setting",
    "freeze": "actions.freezing",
    "initializer": "apply",
    "recover": "actions.recovery",
    "start_workers": "workers.handle",
    "warm_start": "artifacts.start",
    "warm_up": "actions.warming",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one list of names


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
