"""Writes the pages that are made from the code and the README; ``make docs`` runs it, a test holds them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import dynapolicy
from dynapolicy.knob_table import KNOBS, Knob

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PREFIX = "DYNAPOLICY_"
MADE = "<!-- Made by `make docs`; don't edit it here. -->\n"


# -- the environment -----------------------------------------------------------------------------------

ENVIRONMENT = """\
# Environment variables

The environment wins over arguments, and arguments win over defaults. Empty means unset.

* A whole number is written in ASCII digits; blanks around it are allowed. A number outside its range is clamped, with a
  warning, and the raw text is kept in `policy.knobs` and its like.
* Any other text is an error that names the variable, the text and what is allowed; one error for all bad variables.
* A default yields to a value that was set: `DYNAPOLICY_CEIL=4` takes the floor down to 4. Where both are set and the
  floor is over the ceiling, that is an error.
* Another prefix: `CompilePolicy.from_env(prefix="MYENGINE_")`.
"""

TITLES = {"policy": "The policy", "workers": "Compile workers", "artifacts": "Artifacts"}

#: The operator's way out is no argument.
ONLY_IN_THE_ENVIRONMENT = {"disable"}


def environment_variables() -> str:
    """The knob table, a table for each group."""
    groups = dict.fromkeys(row.group for row in KNOBS)
    return "\n".join([MADE, ENVIRONMENT, *(section(group) for group in groups)])


def section(group: str) -> str:
    """One table."""
    rows = [row for row in KNOBS if row.group == group]
    head = ["variable", "argument", "default", "allowed", "meaning"]
    lines = [f"## {TITLES.get(group, group.capitalize())}", "", line(head), line("---" for _ in head)]
    return "\n".join([*lines, *(line(cells(row)) for row in rows), ""])


def cells(row: Knob) -> list[str]:
    """One row of the table."""
    argument = "none" if row.name in ONLY_IN_THE_ENVIRONMENT else f"`{row.name}`"
    default = "unset" if row.default is None else f"`{row.default}`"
    allowed = ", ".join(f"`{word}`" for word in row.words) if row.words else f"{row.allowed} {row.unit}".strip()
    return [f"`{row.variable(PREFIX)}`", argument, default, allowed, row.meaning]


def line(texts: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


# -- the public names ----------------------------------------------------------------------------------

API = """\
# Public names

Everything that `import dynapolicy as dp` offers; `help(dp.apply_policy)` and its like tell the rest.
"""

#: Names without a docstring of their own.
CONSTANTS = {"LIMIT_ERRORS": "The exception classes that the installed torch raises at a limit."}


def api() -> str:
    """Every public name and the first sentence of its docstring."""
    parts: dict[str, list[str]] = {"Functions and constants": [], "Classes": [], "Errors and warnings": []}
    for name in sorted(dynapolicy.__all__, key=str.lower):
        parts[kind(name)].append(name)
    return "\n".join([MADE, API, *(f"## {title}\n\n{listed(names)}\n" for title, names in parts.items())])


def kind(name: str) -> str:
    """The part of the page that a name belongs to."""
    found = getattr(dynapolicy, name)
    if name in CONSTANTS or not isinstance(found, type):
        return "Functions and constants"
    return "Errors and warnings" if issubclass(found, Exception) else "Classes"


def listed(names: Iterable[str]) -> str:
    """A line for each name."""
    return "\n".join(f"* `{name}`: {summary(name)}" for name in names)


def summary(name: str) -> str:
    """What a public name is, in one line."""
    text = CONSTANTS.get(name) or inspect.getdoc(getattr(dynapolicy, name)) or ""
    return " ".join(text.split("\n\n", 1)[0].replace("``", "`").split())


# -- the index -----------------------------------------------------------------------------------------

INDEX = """\
## Pages

* [Tutorial](tutorial.md): from a limit that is hit to an engine
* [How torch's limits work](how_limits_work.md), measured on torch 2.6 to 2.15
* [Environment variables](environment_variables.md)
* [Seeing what holds](observing.md), and [testing with it](testing.md)
* [Compile workers](workers.md), ready before the first compile
* [Restarting without compiling](artifacts.md)
* [What it costs](benchmarks.md)
* [Public names](api.md)
* [A decode step on a worker thread](examples/serve.py): what `make demo` runs
* [An engine whose submodules compute their buckets](examples/engine.py)

What it can't do stands in the [README](../README.md#what-it-cant-do).
"""


def index() -> str:
    """The README's opening, and where to go from there."""
    text = README.read_text(encoding="utf-8")
    opening = text.split("repeats it -->\n", 1)[1].split("<!-- end of opening -->", 1)[0]
    return f"{MADE}\n# dynapolicy\n\n{opening}\n{INDEX}"


PAGES = {"index.md": index, "environment_variables.md": environment_variables, "api.md": api}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make(), encoding="utf-8")
