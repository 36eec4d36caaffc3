"""The command line: what it prints, where, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynapolicy.__main__ import main
from dynapolicy.knob_table import KNOBS
from dynapolicy.observe.per_place import PlaceRecord
from dynapolicy.records import Records

FINE = """
[[target]]
name = "pkg.mod:Decoder.forward"
buckets = [{ batch = [1, 2, 4, 8], tokens = [1] }, { batch = [1, 2], tokens = [128, 256], variants = 2 }]

[[target]]
name = "pkg.mod:Encoder.forward"
[[target.buckets]]
shapes = [[3, 17], [5, 40]]
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Two targets."""
    path = tmp_path / "plan.toml"
    path.write_text(FINE)
    return path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in KNOBS:
        monkeypatch.delenv(row.variable("DYNAPOLICY_"), raising=False)


def test_plan_prints_the_derivation_with_bars(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each target, and 0."""
    assert main(["plan", str(plan_file)]) == 0
    out, err = capsys.readouterr()
    assert not err
    decoder = next(line for line in out.splitlines() if "Decoder" in line)
    assert decoder.split()[:6] == ["pkg.mod:Decoder.forward", "12", "8", "20", "256", "0"]
    assert "#" in decoder
    assert "." in decoder.split()[-1]
    assert "recompile_limit 20, accumulated_recompile_limit 256" in out


def test_the_documented_plan_gives_the_documented_table(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file and the output in docs/testing.md belong together."""
    page = (Path(__file__).parent.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    plan_file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert main(["plan", str(plan_file)]) == 1
    assert capsys.readouterr().out == page.partition("plan plan.toml\n")[2].partition("```")[0]


def test_plan_in_json(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records with the same keys everywhere."""
    assert main(["plan", "--json", str(plan_file)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["process"] == {"recompile_limit": 20, "accumulated_recompile_limit": 256}
    assert [(one["entries"], one["limit"], one["eager"]) for one in data["targets"]] == [(12, 20, 0), (2, 10, 0)]


@pytest.mark.parametrize("on_limit", ["warn", "raise"])
def test_plan_fails_where_something_would_run_eager(
    plan_file: Path, capsys: pytest.CaptureFixture[str], on_limit: str
) -> None:
    """1, the table nevertheless, and the reason on stderr once."""
    plan_file.write_text(f'ceil = 9\non_limit = "{on_limit}"\n{FINE}')
    assert main(["plan", str(plan_file)]) == 1
    out, err = capsys.readouterr()
    assert "!!!" in out
    assert err.count("9 of the 12 declared entries, 3 would run eager") == 1
    assert len(err.splitlines()) == 1


def test_the_environment_wins_over_the_file(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where the program runs."""
    monkeypatch.setenv("DYNAPOLICY_EAGER_HEADROOM", "1")
    assert main(["plan", "--json", str(plan_file)]) == 0
    assert [one["limit"] for one in json.loads(capsys.readouterr().out)["targets"]] == [13, 8]


@pytest.mark.parametrize("name", ["policy", "buckets", "make"])
def test_plan_of_an_object(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy, a mapping, or a function that makes one."""
    (tmp_path / "declared_here.py").write_text(
        "import dynapolicy as dp\n"
        "def step(x): return x\n"
        "buckets = {step: dp.ShapeBuckets(batch=(1, 2, 3))}\n"
        "policy = dp.CompilePolicy(buckets)\n"
        "def make(): return policy\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "declared_here", raising=False)
    assert main(["plan", "--json", f"declared_here:{name}"]) == 0
    targets = json.loads(capsys.readouterr().out)["targets"]
    assert [(one["code"], one["entries"]) for one in targets] == [("declared_here:step", 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "At least one [[target]]"),
        ("[[target]", "no readable TOML"),
        ("target = 3", "At least one [[target]]"),
        ("florr = 3", "florr"),
        ('floor = "x"', "floor"),
        ("[[target]]\nbuckets = [{ batch = [1] }]", "has a name"),
        ('[[target]]\nname = "a:b"', "at least one bucket"),
        ('[[target]]\nname = "a"\nbuckets = [{ batch = [1] }]', '"module:qualname"'),
        ('[[target]]\nname = "a:b"\nbuckets = [{ batch = [0] }]', "at least 1"),
        ('[[target]]\nname = "a:b"\nbuckets = [{ batch = 4 }]', "Several sizes"),
        ('[[target]]\nname = "a:b"\nbuckets = [3]', "table of axes"),
        ('[[target]]\nname = "a:b"\nbuckets = [{ shapes = [[1]], batch = [2] }]', "batch"),
    ],
)
def test_a_bad_plan_says_what_and_where(
    plan_file: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """2, one line on stderr, nothing on stdout."""
    plan_file.write_text(text if text != 'floor = "x"' else text + FINE)
    assert main(["plan", str(plan_file)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("source", ["no_such_file.toml", "no_such_module:thing", "json:no_such_object"])
def test_a_source_that_is_not_there(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """2, and its name."""
    assert main(["plan", source]) == 2
    assert source in capsys.readouterr().err


def test_knobs_shows_every_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set, where it came from, and the raw text of what was clamped; the warning is on stderr."""
    monkeypatch.setenv("DYNAPOLICY_CEIL", "10000000")
    assert main(["knobs", "--json"]) == 0
    out, err = capsys.readouterr()
    records = {one["name"]: one for one in json.loads(out)}
    assert set(records) == {row.name for row in KNOBS}
    assert (records["ceil"]["value"], records["ceil"]["source"], records["ceil"]["raw"]) == (
        65536,
        "environment",
        "10000000",
    )
    assert "DYNAPOLICY_CEIL" in err
    assert main(["knobs"]) == 0
    out = capsys.readouterr().out
    assert all(row.variable("DYNAPOLICY_") in out for row in KNOBS)


def test_knobs_with_bad_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """2, and all of them in one error."""
    monkeypatch.setenv("DYNAPOLICY_CEIL", "abc")
    monkeypatch.setenv("DYNAPOLICY_FLOOR", "12.5")
    assert main(["knobs"]) == 2
    err = capsys.readouterr().err
    assert "DYNAPOLICY_CEIL" in err
    assert "DYNAPOLICY_FLOOR" in err


def test_a_terminal_gets_a_table_with_rules(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rich on a terminal, the same cells between rules."""
    pytest.importorskip("rich", reason="the extra 'tables' is not installed")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert "pkg.mod:Decoder.forward" in out
    assert "┃" in out or "|" in out


def test_bad_usage_is_two() -> None:
    """argparse's own status."""
    for argv in ([], ["no-such-command"], ["plan"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


@pytest.mark.parametrize("ok", [True, False])
def test_doctor_prints_rows_and_fails_with_them(
    ok: bool, plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table and ``--json``, 1 where a row fails. The probes themselves are tested elsewhere."""
    asked: list[Any] = []

    def stand_in(policy: Any, *, initializer: bool) -> Records[PlaceRecord]:
        asked.append((policy, initializer))
        return Records([PlaceRecord("new thread", 20, 20, 12, 12, ok, "" if ok else "Apply it there")])

    monkeypatch.setattr("dynapolicy.observe.per_place.doctor", stand_in)
    assert main(["doctor", "--json", str(plan_file)]) == int(not ok)
    out, err = capsys.readouterr()
    assert [one["ok"] for one in json.loads(out)] == [ok]
    assert ("new thread" in err) is not ok
    assert main(["doctor", "--no-initializer"]) == int(not ok)
    assert "new thread" in capsys.readouterr().out
    assert asked[0][0].limits.recompile_limit == 20
    assert [one[1] for one in asked] == [True, False]


def test_it_runs_as_a_module_without_torch(plan_file: Path) -> None:
    """``plan`` in a project's CI needs no torch to be imported."""
    code = (
        "import sys; from dynapolicy.__main__ import main; status = main(sys.argv[1:]); "
        "sys.exit(3 if 'torch' in sys.modules else status)"
    )
    for command in (["-m", "dynapolicy"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, *command, "plan", str(plan_file)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
