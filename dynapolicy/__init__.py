"""One owner for a program's torch.compile configuration.

Importing this package loads no torch and changes nothing.
"""

from __future__ import annotations

from .apply import AppliedPolicy, apply_policy, current_policy, initializer
from .buckets import ShapeBuckets
from .compiled import compile  # noqa: A004 - torch's own name for it
from .errors import (
    BucketError,
    BucketWarning,
    CeilingError,
    CeilingWarning,
    DynapolicyError,
    DynapolicyWarning,
    KnobError,
    KnobWarning,
    RecompileLimitWarning,
    RecoverError,
    RestoreError,
    ScopeWarning,
    SettingError,
    SettingWarning,
    TargetError,
    TooLateWarning,
    UnsupportedTorchWarning,
)
from .policy import CompilePolicy, RecompileLimits
from .torch_compat import Capabilities, capabilities

__version__ = "0.1.0"

__all__ = [
    "AppliedPolicy",
    "BucketError",
    "BucketWarning",
    "Capabilities",
    "CeilingError",
    "CeilingWarning",
    "CompilePolicy",
    "DynapolicyError",
    "DynapolicyWarning",
    "KnobError",
    "KnobWarning",
    "RecompileLimitWarning",
    "RecompileLimits",
    "RecoverError",
    "RestoreError",
    "ScopeWarning",
    "SettingError",
    "SettingWarning",
    "ShapeBuckets",
    "TargetError",
    "TooLateWarning",
    "UnsupportedTorchWarning",
    "apply_policy",
    "capabilities",
    "compile",
    "current_policy",
    "initializer",
]
