"""The agents of worker processes. $CREW_FOLDER is where their steps leave marks."""

from __future__ import annotations

import os
from pathlib import Path

from .crew import crew

agents = crew(Path(os.environ["CREW_FOLDER"]) if "CREW_FOLDER" in os.environ else None)
