"""Write docs/reference.md: every public name with its signature and the first sentence of its docstring.

python scripts/reference.py            write it
python scripts/reference.py --check    fail if it is not current
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"
MODULES = [
    "retinue",
    *(
        f"retinue.{name}"
        for name in (
            "backends client errors events messages models plugins runs state stores subagents tasks telemetry temporal testing tools workers workspace"
        ).split()
    ),
]
INTRODUCTION = """\
# Reference

Every public name. `help(name)` in Python shows the whole docstring. Names of the first section come from `retinue`, the others from the
module that heads their section.
"""


def first_sentence(value: object) -> str:
    """Return the first sentence of a docstring, or nothing."""
    own = inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType)
    text = inspect.getdoc(value) if own else None
    if not text or text.startswith(f"{getattr(value, '__name__', '')}("):
        return ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0].replace("|", "\\|")


def describe(name: str, value: object) -> str:
    """Return a row of the table."""
    constant = f"`{value!r}`" if isinstance(value, (str, int)) else "A type or a constant."
    return f"| `{name}` | {first_sentence(value) or constant} |"


def show_all() -> str:
    """Return the page."""
    text = INTRODUCTION
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = [name for name in module.__all__ if not name.startswith("__")]
        text += f"\n## {module_name}\n\n{first_sentence(module)}\n\n| name | |\n|---|---|\n"
        text += "\n".join(describe(name, getattr(module, name)) for name in names) + "\n"
    return text


def main() -> int:
    if "--check" in sys.argv:
        return int(PAGE.read_text() != show_all())
    PAGE.write_text(show_all())
    return 0


if __name__ == "__main__":
    sys.exit(main())
