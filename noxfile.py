"""The tests on every supported torch, one environment at a time; ``make matrix`` runs it.

``TORCH="2.6.0 2.11.0"`` picks some releases. An environment unpacks to as much as 6 GB and is removed
before the next is made, unless ``KEEP=1``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import nox

RELEASES = ("2.6.0", "2.7.1", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
REPORTS = Path(".nox/reports")

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "uv"
nox.options.error_on_external_run = True


@nox.session(python=None if sys.version_info[:2] == (3, 11) else "3.11")
@nox.parametrize("torch", os.environ.get("TORCH", "").split() or RELEASES)
def tests(session: nox.Session, torch: str) -> None:
    """The suite on one torch; the package is built and installed, so that a broken build shows."""
    place = Path(session.virtualenv.location)
    # Inside the environment, so that what was downloaded goes away with it.
    session.env["OMP_NUM_THREADS"] = "1"  # as in the Makefile
    # uv compiles no bytecode: unless the first process keeps it, each of a hundred compiles torch's modules anew.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.env["UV_CACHE_DIR"] = str(place / "uv-cache")
    try:
        session.install(f"torch=={torch}", "--constraint", _constraints_without_torch(place), ".[test]")
        # In the order of their names: by default files with few tests come last, and these are the long ones.
        session.run(
            *("pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-rs"),
            *(f"--junitxml={REPORTS / torch}.xml", *session.posargs),
        )
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(place, ignore_errors=True)


def _constraints_without_torch(place: Path) -> str:
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    path = place / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
    return str(path)


@nox.session(python=False)
def skips(session: nox.Session) -> None:
    """What every run came to; an error where a test was skipped in all runs that knew it."""
    reports = [ET.parse(path).getroot() for path in sorted(REPORTS.glob("*.xml"))]
    seen: dict[str, list[bool]] = {}
    for report in reports:
        for name, skipped in _outcomes(report):
            seen.setdefault(name, []).append(skipped)
    for path, report in zip(sorted(REPORTS.glob("*.xml")), reports, strict=True):
        session.log(f"{path.stem}: {_summary(report)}")
    never_ran = sorted(name for name, skipped in seen.items() if all(skipped))
    if never_ran and len(reports) > 1:
        session.error("skipped in every run: " + ", ".join(never_ran))


def _outcomes(report: ET.Element) -> Iterator[tuple[str, bool]]:
    for case in report.iter("testcase"):
        skipped = case.find("skipped")
        # An expected failure did run; pytest files it under the same tag.
        never_ran = skipped is not None and skipped.get("type") == "pytest.skip"
        yield f"{case.get('classname')}::{case.get('name')}", never_ran


def _summary(report: ET.Element) -> str:
    suites = list(report.iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    passed = total - failed - errors - skipped
    return f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped in {seconds:.2f}s"
