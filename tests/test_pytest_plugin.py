"""The pytest plugin fails tests that hit a limit or leave a setting changed, and only those that ask."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import logging
import pytest
import dynapolicy as dp

def step(x):
    return x * 2

def run(sizes):
    import torch
    compiled = dp.compile(step, backend="eager")
    for size in sizes:
        compiled(torch.ones(size))

@pytest.fixture
def policy():
    import torch._dynamo
    torch._dynamo.reset()
    with dp.apply_policy(dp.CompilePolicy({step: dp.ShapeBuckets(batch=(2, 3))})):
        yield

def test_fine(dynapolicy_guard, policy):
    run(range(2, 6))

def test_hit(dynapolicy_guard, policy):
    run(range(2, 20))

def test_hit_without_a_name(dynapolicy_guard, policy):
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.setLevel(logging.ERROR)
    try:
        run(range(2, 20))
    finally:
        logger.setLevel(logging.NOTSET)

def test_hit_and_failed(dynapolicy_guard, policy):
    run(range(2, 20))
    raise ValueError("of its own")

def test_leak(dynapolicy_guard):
    import torch._dynamo
    torch._dynamo.config.specialize_float = True
    dp.apply_policy(dp.CompilePolicy(floor=31))

def test_leak_is_not_ours(dynapolicy_guard):
    assert dp.current_policy() is not None

def test_unguarded_hit(policy):
    run(range(2, 20))
"""

LAZY = """
import sys

def test_no_torch():
    assert "torch" not in sys.modules

def test_first_import_leaks():
    import torch._dynamo
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, name, 99)
"""


def run_pytest(folder: Path, text: str, *options: str) -> str:
    """Run a file of tests in a pytest of its own; its output."""
    (folder / "test_guarded.py").write_text(text)
    installed = any(one.name == "dynapolicy" for one in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "dynapolicy.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *plugin, *options, "test_guarded.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def section(output: str, name: str) -> str:
    """What the report says about one failed test."""
    _, _, rest = output.partition(f"_ {name} _")
    return rest.partition("\n____")[0]


def test_guarded_tests_fail_with_the_audit(tmp_path: Path) -> None:
    """A hit, named or not, and a leak fail a guarded test with the audit; nothing else does."""
    output = run_pytest(tmp_path, TESTS, "-W", "ignore")
    lines = [line.split() for line in output.splitlines() if line.startswith(("PASSED ", "FAILED "))]
    results = {words[1].partition("::")[2]: words[0] for words in lines}
    assert results == {
        "test_fine": "PASSED",
        "test_hit": "FAILED",
        "test_hit_without_a_name": "FAILED",
        "test_hit_and_failed": "FAILED",
        "test_leak": "FAILED",
        "test_leak_is_not_ours": "PASSED",
        "test_unguarded_hit": "PASSED",
    }, output
    hit = section(output, "test_hit")
    assert "test_guarded:step" in hit
    assert "limit=10" in hit
    assert "exhausted" in hit
    assert "full" in section(output, "test_hit_without_a_name")
    assert "can't be named" in section(output, "test_hit_without_a_name")
    failed = section(output, "test_hit_and_failed")
    assert "of its own" in failed
    assert "limit=10" in failed
    leak = section(output, "test_leak")
    assert "policies in force" in leak
    assert "was 8, and is 31" in leak


def test_the_ini_option_guards_every_test_and_imports_no_torch(tmp_path: Path) -> None:
    """A test that needs no torch runs without it, and one that imports it first is held to torch's own values."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ndynapolicy_guard = true\n")
    output = run_pytest(tmp_path, LAZY)
    assert "PASSED test_guarded.py::test_no_torch" in output, output
    assert "FAILED test_guarded.py::test_first_import_leaks" in output, output
    assert "was 8, and is 99" in output
