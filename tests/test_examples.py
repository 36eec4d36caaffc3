"""The examples do what they are there to show, with a backend that takes no minutes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dynapolicy as dp

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def load(name: str) -> ModuleType:
    """An example as a module, as its file stands."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> str:
    """An example as a program; its output."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DYNAPOLICY_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLES.parent.parent), environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "Traceback" not in ran.stderr
    return ran.stdout


def counts(output: str) -> list[tuple[int, int]]:
    """Compiled and eager, for each of the three runs."""
    return [(int(compiled), int(eager)) for compiled, eager in re.findall(r"(\d+) compiled, (\d+) eager", output)]


def test_serving_ten_sizes_compiles_eight_without_a_policy_and_ten_with_it() -> None:
    """The constant is worth what the installed torch makes of a setting on another thread."""
    constant = (8, 2) if dp.capabilities().context_local_config else (10, 0)
    output = run("serve", "--backend", "eager", "--sizes", "1,2,3,4,5,6,7,8,16,24")
    assert counts(output) == [(8, 2), constant, (10, 0)]
    assert output.count("EAGER") == sum(eager for _, eager in counts(output))


def test_other_sizes_change_the_counts() -> None:
    """``--sizes`` decides how many compile: three fit torch's own limit."""
    assert counts(run("serve", "--backend", "eager", "--sizes", "1,2,4")) == [(3, 0)] * 3


def test_the_demo_has_the_sizes_that_engines_capture(torch_ready: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 2, 4, then every eighth up to 128."""
    for variable in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    assert load("serve").SIZES == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)


def test_an_engine_computes_its_buckets_and_compiles_exactly_those(torch_ready: object) -> None:
    """Configurations that overlap count once, slots multiply, and serving what was declared compiles nothing."""
    engine = load("engine").build(environ={})
    try:
        engine.warm_up()
        assert engine.compiled == {"prefill": 9 + 8 - 3 + 2, "decode": 11 * 2}
        assert engine.policy.limits.recompile_limit == 30
        engine.serve("decode", batch=64, tokens=1, slot=1)
        assert engine.compiled["decode"] == 22
        engine.serve("decode", batch=65, tokens=1)
        assert engine.compiled["decode"] == 23
    finally:
        engine.close()
    assert dp.current_policy() is None


def test_the_engine_example_runs_as_a_program() -> None:
    """Its table shows declared and compiled side by side, and undeclared shapes on the serving thread."""
    output = run("engine")
    assert re.search(r"prefill +16 +16 +24", output)
    assert re.search(r"decode +22 +22 +30", output)
    assert output.splitlines()[-1].endswith(" 1")
