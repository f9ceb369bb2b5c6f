"""The rules: what to do next, given what is known.

They are tried in the order of RULES, and the first that has something to say makes the turn. A rule makes calls at most
once a question and the last one answers, which is why every run ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...core.model import ModelRequest
from . import answers
from .delegation import SPAWN
from .findings import MOST_PASSAGES, Findings, Line, is_aside

MOST_PLACES = 12
MOST_DOCUMENTS = 30
MOST_DOUBTS = 20
READ_LINES = 200
_EVERY_FILE = "{[!.]*,[!.]*/**/*}"

Call = tuple[str, dict[str, Any]]


class Turn(NamedTuple):
    """What the model does next: calls with a thought, or an answer."""

    thought: str = ""
    calls: Sequence[Call] = ()
    answer: str = ""


def decide(request: ModelRequest) -> Turn:
    """The next turn of a conversation."""
    found = Findings(request)
    return next(turn for rule in RULES if (turn := rule(found)) is not None)


def spawn_sub_agents(found: Findings) -> Turn | None:
    """Side by side, each with its part of the question."""
    if found.calls or not found.assignments:
        return None
    calls: list[Call] = [
        (SPAWN, {"agent_id": who, "task": task, **({"timeout_seconds": 0} if in_background else {})})
        for who, task, in_background in found.assignments
    ]
    names, in_background = [one.agent_id for one in found.assignments], found.assignments[0].in_background
    return Turn(answers.background_plan(names) if in_background else answers.fan_out_plan(names), calls)


def report(found: Findings) -> Turn | None:
    return Turn(answer=answers.reports(found.reports)) if found.reports else None


def introduce_itself(found: Findings) -> Turn | None:
    return Turn(answer=answers.introduction()) if found.question.kind == "introduce" else None


def ask_for_tools(found: Findings) -> Turn | None:
    return None if found.tools else Turn(answer=answers.without_tools())


def stop_at_limit(found: Findings) -> Turn | None:
    """A refused call is answered once in words; asking again would end the run without an answer."""
    return answer(found) if any(call.text.startswith("[limit:") for call in found.calls) else None


def look_around(found: Findings) -> Turn | None:
    question = found.question
    if found.calls or (question.kind == "find" and not question.terms):
        return None
    if question.kind == "check":
        thought = answers.check_plan(question)
        return Turn(thought, [("glob_files", {"pattern": _EVERY_FILE})]) if "glob_files" in found.tools else None
    calls: list[Call] = [("list_files", {"path": question.folder} if question.folder else {})]
    if not question.folder:
        calls.append(("glob_files", {"pattern": _anywhere(question.glob) if question.glob else _EVERY_FILE}))
    calls += [_read(name) for name in question.files[:MOST_PASSAGES]]
    calls = [call for call in calls if call[0] in found.tools]
    return Turn(answers.plan(question), calls) if calls else None


def read_documents(found: Findings) -> Turn | None:
    """What is to be checked, whole."""
    if found.question.kind != "check" or "read_file" not in found.tools or found.done("read_file"):
        return None
    paths = found.documents[:MOST_DOCUMENTS]
    thought = (
        f"{answers.count(len(paths), 'document')} to check for {answers.listed(found.question.checks)}: read them."
    )
    return Turn(thought, [("read_file", {"path": path}) for path in paths]) if paths else None


def look_once_more(found: Findings) -> Turn | None:
    """What documents name and no listing shows is only missing if it cannot be read."""
    if found.question.kind != "check" or any(call.args.get("limit") == 1 for call in found.done("read_file")):
        return None
    doubts = found.doubts[:MOST_DOUBTS]
    thought = f"{answers.count(len(doubts), 'path')} not among the files: make sure."
    return Turn(thought, [("read_file", {"path": path, "limit": 1}) for path in doubts]) if doubts else None


def search_for_words(found: Findings) -> Turn | None:
    """All terms at once; with them, files that were asked for by a name that is not quite right."""
    terms = found.question.terms
    if not terms or "grep_files" not in found.tools or found.searched or found.nothing_there:
        return None
    missing = answers.listed([name for name, path in found.named.items() if path != name])
    thought = f"There is no {missing}: take the nearest name. " if missing else ""
    return Turn(f"{thought}Search for {answers.terms_shown(terms)}.", [*_searches(found), *_second_tries(found)])


def read_nearest_names(found: Findings) -> Turn | None:
    calls = _second_tries(found)
    return Turn("The name was not quite right: read the file with the nearest one.", calls) if calls else None


def read_best_passages(found: Findings) -> Turn | None:
    tried = any("offset" in call.args for call in found.done("read_file"))
    unread = [passage for passage in found.passages if passage[-1][:2] not in found.read]
    if found.question.kind != "find" or tried or not unread or "read_file" not in found.tools:
        return None
    thought = f"{answers.count(len(found.hits), 'line')} found: read around the best."
    return Turn(thought, [_read_around(passage) for passage in unread])


def follow_signs(found: Findings) -> Turn | None:
    patterns = [re.escape(sign) for sign in found.signs]
    if found.question.kind != "find" or not found.searched or not patterns or found.searched & set(patterns):
        return None
    return Turn(f"See what else is said about {answers.listed(found.signs)}.", [_grep(pattern) for pattern in patterns])


def answer(found: Findings) -> Turn:
    return Turn(answer=answers.answer(found))


RULES: tuple[Callable[[Findings], Turn | None], ...] = (
    spawn_sub_agents,
    report,
    introduce_itself,
    ask_for_tools,
    stop_at_limit,
    look_around,
    read_documents,
    look_once_more,
    search_for_words,
    read_nearest_names,
    read_best_passages,
    follow_signs,
    answer,
)


def _searches(found: Findings) -> list[Call]:
    terms = found.question.terms
    named = [path for path in found.named.values() if path]
    own = [entry.rstrip("/") for entry in found.entries if not is_aside(entry.rstrip("/"))]
    if not named and 0 < len(own) < len(found.entries) and len(own) <= MOST_PLACES:
        # Results are cut at some length: hidden and installed files would fill them before the user's own come.
        any_term = "(?i)" + "|".join(term.pattern.removeprefix("(?i)") for term in terms)
        return [_grep(any_term, entry) for entry in own]
    return [_grep(term.pattern, path) for path in named or [""] for term in terms]


def _second_tries(found: Findings) -> list[Call]:
    tried = {call.args.get("path") for call in found.done("read_file")}
    return [_read(path) for path in dict.fromkeys(found.named.values()) if path and tried and path not in tried]


def _grep(pattern: str, path: str = "") -> Call:
    return "grep_files", {"pattern": pattern, "path": path} if path else {"pattern": pattern}


def _read(path: str) -> Call:
    return "read_file", {"path": path, "limit": READ_LINES}


def _read_around(passage: Sequence[Line]) -> Call:
    start = max(0, passage[0].number - 3)
    return "read_file", {"path": passage[0].path, "offset": start, "limit": passage[-1].number - start + 2}


def _anywhere(glob: str) -> str:
    return glob if "/" in glob else f"**/{glob}"
