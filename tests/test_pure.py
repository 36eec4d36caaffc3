"""Importing loads no torch and changes nothing; the pure modules work where torch can't be imported at all."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

import dynapolicy

PURE = (
    *("errors", "knobs", "knob_table", "asked", "buckets", "targets", "declare", "policy"),
    *("workers.machine", "workers.machine_read", "workers.plan", "workers.policy", "workers.jobs", "workers.processes"),
)
SOURCES = pathlib.Path(dynapolicy.__file__).parent


def python(code: str) -> str:
    """What a new interpreter prints; warnings are errors in it."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_torch() -> None:
    """Neither torch nor numpy, and no thread is started."""
    printed = python(
        """
        import sys, threading, dynapolicy
        print(sorted({"torch", "numpy"} & set(sys.modules)), threading.active_count())
        """
    )
    assert printed == "[] 1"


def test_importing_changes_nothing_of_torch() -> None:
    """Every setting of torch is the same object after the import, whatever the environment asks for."""
    printed = python(
        """
        import os, warnings
        os.environ.update({"DYNAPOLICY_FLOOR": "99", "DYNAPOLICY_ON_LIMIT": "raise"})
        warnings.simplefilter("ignore")
        import torch._dynamo.config as config
        def state():
            return [(name, type(entry), dict(entry.__dict__)) for name, entry in config._config.items()]
        before = state()
        filters, variables = list(warnings.filters), dict(os.environ)
        import dynapolicy
        print(before == state(), filters == warnings.filters, variables == dict(os.environ))
        """
    )
    assert printed == "True True True"


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_where_there_is_no_torch(module: str) -> None:
    """Alone, and as the first one of the package."""
    printed = python(
        f"""
        import sys
        sys.modules["torch"] = None
        import dynapolicy.{module} as module
        print(sorted(set(module.__all__) - set(dir(module))))
        """
    )
    assert printed == "[]"


def test_a_policy_is_made_and_sent_where_there_is_no_torch() -> None:
    """A launcher plans, prints and pickles without it."""
    printed = python(
        """
        import pickle, sys
        sys.modules["torch"] = None
        import dynapolicy as dp
        policy = dp.CompilePolicy.from_env({"pkg.mod:f": dp.ShapeBuckets(batch=range(1, 21))}, environ={})
        again = pickle.loads(pickle.dumps(dp.CompilePolicy.from_json(policy.to_json())))
        print(again == policy, again.limits.recompile_limit, again.limits_for("pkg.mod:f").accumulated_recompile_limit)
        """
    )
    assert printed == "True 28 256"


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_names_no_torch_in_an_import(module: str) -> None:
    """Not even inside a function; what needs torch asks ``torch_compat``."""
    tree = ast.parse((SOURCES / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert [name for name in imported if name.split(".")[0] == "torch"] == []
