"""The documentation says what is so: its code runs, and its generated pages are up to date."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\) +# (.*)$", re.MULTILINE)

#: Inductor would take minutes to show the same facts. Blocks that name a backend keep it.
PRELUDE = """\
import functools, warnings
import torch, dynapolicy
torch.compile = functools.partial(torch.compile, backend="eager")
torch.compile(lambda x: x + 1)(torch.ones(1))
warnings.simplefilter("error", dynapolicy.DynapolicyWarning)

"""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_block_of_a_page_runs_and_prints_what_its_comments_say(page: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after the other, are one program; a comment behind a ``print`` is its output."""
    if page.name == "index.md":
        assert set(blocks(page)) <= set(blocks(ROOT / "README.md"))
        return
    program = tmp_path / "program.py"
    body = "\n".join(blocks(page))
    # A spawned child imports this file again; only the parent may run it.
    guarded = "\n".join(f"    {line}" for line in (PRELUDE + body).splitlines())
    program.write_text(f'if __name__ == "__main__":\n{guarded}\n', encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DYNAPOLICY_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == PRINTED.findall(body)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["index.md", "environment_variables.md", "api.md"])
def test_a_generated_page_is_what_the_code_says(torch_ready: object, name: str) -> None:
    """``make docs`` would change nothing: the knob table, the public names and the README agree with the docs."""
    made = generator().PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "run: make docs"


def test_every_knob_is_in_the_documentation() -> None:
    """Whoever adds a row to the knob table finds its variable on the page."""
    from dynapolicy.knob_table import KNOBS

    text = (ROOT / "docs" / "environment_variables.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `DYNAPOLICY_(\w+)`", text, re.MULTILINE)
    assert documented == [row.suffix for row in KNOBS]


def test_the_list_of_names_is_the_public_one(torch_ready: object) -> None:
    """Each public name stands once on the page, and no other does."""
    import dynapolicy

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\* `(\w+)`: \S", text, re.MULTILINE)) == sorted(dynapolicy.__all__)


def test_links_between_pages_lead_somewhere() -> None:
    """A relative link of a page names a file that is there."""
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
