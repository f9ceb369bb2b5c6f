"""The example workspace: its sub-agents find what they are for, there and in the documents of this project."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from tests.prepared import PYTHON

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/workspace"
MISTAKE = "docs/guide.md:3: [what it costs](fares.md): there is no docs/fares.md"


def retinue(*args: str) -> str:
    command = [PYTHON, "-W", "error", "-m", "retinue", *args]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert out.returncode == 0, out.stderr
    return out.stdout


def places(out: str) -> list[str]:
    return re.findall(r"^- (\S+:\d+: .*)$", out, re.M)


def typed(document: Path) -> list[str]:
    """What the commands of a document say, in order; a server does not end by itself."""
    shown = re.findall(r"^\.venv/bin/retinue (?!serve )(.*)$", document.read_text(), re.M)
    return [retinue(*shlex.split(line)) for line in shown]


def test_the_commands_of_the_readme_of_the_project() -> None:
    listing, review, question = typed(ROOT / "README.md")
    assert "subagents/links.md" in listing
    assert MISTAKE in places(review)
    assert len(places(question)) >= 2


def test_the_commands_of_its_readme() -> None:
    listing, review, elsewhere, alone = typed(EXAMPLE / "README.md")
    ids = [line.split()[0] for line in listing.splitlines()[1:] if not line.startswith(" ")]
    assert ids == ["general-purpose", "commands", "headings", "links"]
    assert places(review) == [MISTAKE]
    assert "3 of 3 sub-agents reported." in review
    assert review.count("## ") == 3
    assert "## headings\n\nThis part needs a language model: I am rules" in review
    for name in ("commands", "headings", "links"):
        assert re.search(rf"^ +{name} completed: ", review, re.M)
    assert places(elsewhere) == [], "the documents of this project have links that lead nowhere"
    assert places(alone) == [MISTAKE]


def test_every_link_of_this_project_leads_somewhere() -> None:
    """As a user would ask for it; the dead link of the example is meant to be there."""
    found = places(retinue("run", "review the docs", "--subagents", "examples/workspace"))
    assert found == [f"examples/workspace/{MISTAKE.replace('is no ', 'is no examples/workspace/')}"]


def test_its_declarations_have_no_fault() -> None:
    assert retinue("agents", "validate", "examples/workspace") == "3 declared sub-agents can be used, no problems\n"


def test_a_review_changes_nothing() -> None:
    before = {path: path.read_bytes() for path in EXAMPLE.rglob("*") if path.is_file()}
    retinue("run", "review the docs", "--workspace", "examples/workspace")
    assert {path: path.read_bytes() for path in EXAMPLE.rglob("*") if path.is_file()} == before
