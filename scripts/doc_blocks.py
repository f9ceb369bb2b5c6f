"""Write the Python blocks of README and docs to files, for type checkers.

    python scripts/doc_blocks.py FOLDER

Each block gets a file of its own, named by document and line. The folder is emptied first.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
            line = text[: match.start()].count("\n") + 1
            (folder / f"{document.stem}_{line}.py").write_text(match[1], encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
