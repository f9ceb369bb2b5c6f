"""What the calls since the question have shown: files, lines, passages, and what to quote of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, NamedTuple

from ...core.messages import Message, Role, Visibility
from ...core.model import ModelRequest
from .checks import CHECKS, Document, Result, known_paths, make_document
from .delegation import SPAWN, Assignment, Report, assignments, members_of, read_report
from .question import Term, read_question

MOST_PASSAGES = 3
TOOLS = frozenset({"glob_files", "grep_files", "list_files", "read_file"})

# How the loop words a call that failed; a file's own lines come with a path or a number before them.
_FAILED = re.compile(
    r"(invalid_arguments|execution_failed|denied|not_found|internal|timeout|cancelled)(: |$)|\[(limit:)?\w+\] "
)
_GREP_LINE = re.compile(r"(.+?):(\d+): ?(.*)")
_READ_LINE = re.compile(r" *(\d+)\t(.*)")
_ENTRY = re.compile(r"(.+?)(/| \(\d+ bytes?\))")
_SIGN = re.compile(r"\b[A-Z]{1,5}(?:-\d|\d\d)[A-Z0-9-]*\b")
_INSTALLED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "target", "venv"})


class Done(NamedTuple):
    """A call, and what came back."""

    name: str
    args: dict[str, Any]
    text: str

    @property
    def failed(self) -> bool:
        return _FAILED.match(self.text) is not None

    @property
    def missed(self) -> bool:
        """Whether it failed because nothing is there."""
        return self.text.startswith("not_found: ")


class Line(NamedTuple):
    path: str
    number: int
    text: str


def _is_question(message: Message) -> bool:
    """Whether the user says something; what is only for the model is no question."""
    return message.role is Role.USER and message.visibility is Visibility.ALL and bool(message.text.strip())


class Findings:
    """The question, the tools there are, and what was found since it was asked."""

    def __init__(self, request: ModelRequest) -> None:
        messages = request.messages
        asked = [index for index, message in enumerate(messages) if _is_question(message)]
        texts = [messages[index].text.strip() for index in asked[-5:]] or ["help"]
        self.question = read_question(texts[-1], texts[:-1])
        since = messages[asked[-1] + 1 :] if asked else ()
        answers = {message.tool_call_id: message.text for message in since if message.role is Role.TOOL}
        calls = [call for message in since for call in message.tool_calls]
        self.calls = [Done(call.name, call.args, answers.get(call.id, "cancelled")) for call in calls]
        self.tools = TOOLS & {tool.name for tool in request.tools}
        self.assignments: list[Assignment] = assignments(self.question, members_of(request))

    def done(self, name: str) -> list[Done]:
        return [call for call in self.calls if call.name == name]

    def lines_of(self, name: str) -> list[str]:
        """What the calls of a tool that did not fail have shown, without its notes."""
        return [
            line
            for call in self.done(name)
            if not call.failed
            for line in call.text.splitlines()
            if not line.startswith(("[", "no file in "))
        ]

    @cached_property
    def entries(self) -> list[str]:
        """The workspace or a folder of it: paths, those of folders with "/" at the end."""
        matches = [_ENTRY.fullmatch(line) for line in self.lines_of("list_files")]
        return [match[1] + match[2][0].strip() for match in matches if match]

    @cached_property
    def files(self) -> list[str]:
        """The files to work on: those the question has a pattern for, else all but hidden and installed ones."""
        globbed = any(not call.failed for call in self.done("glob_files"))
        found = self.lines_of("glob_files") if globbed else [entry for entry in self.entries if entry[-1] != "/"]
        return [path for path in found if not is_aside(path)]

    @property
    def nothing_there(self) -> bool:
        """Whether it is known that there are no files."""
        looked = self.done("list_files") + self.done("glob_files")
        return bool(looked) and not self.files and not any(call.failed for call in self.calls)

    @cached_property
    def named(self) -> dict[str, str | None]:
        """The files the question names, each with the path it has or most likely meant."""
        missing = {call.args.get("path") for call in self.done("read_file") if call.missed}
        return {name: nearest(name, self.files) if name in missing else name for name in self.question.files}

    @cached_property
    def searched(self) -> set[str]:
        """The patterns that were searched for."""
        return {str(call.args.get("pattern")) for call in self.done("grep_files")}

    @cached_property
    def hits(self) -> list[Line]:
        """The lines in which a term was found, in order."""
        lines = found_lines(
            call for call in self.done("grep_files") if str(call.args.get("pattern")).startswith("(?i)")
        )
        return [line for line in lines if not self.question.glob or line.path in self.files]

    @cached_property
    def passages(self) -> list[list[Line]]:
        return best_passages(self.hits, self.question.terms)

    @cached_property
    def read(self) -> dict[tuple[str, int], str]:
        """The lines that were read, by path and number."""
        reads = [call for call in self.done("read_file") if not call.failed]
        found = [(call, _READ_LINE.fullmatch(text)) for call in reads for text in call.text.splitlines()]
        return {(str(call.args.get("path")), int(match[1])): match[2].strip() for call, match in found if match}

    @cached_property
    def quotes(self) -> list[Line]:
        """Of each passage the best line, and the next best if it says more or as much."""
        chosen: list[Line] = []
        for passage in self.passages:
            whole = [line._replace(text=self.read.get(line[:2], line.text)) for line in passage]
            # Of two lines with the same words, a heading says less.
            rank = {line: len(self._matched(line)) - 0.5 * line.text.startswith("#") for line in whole}
            first, *others = sorted(whole, key=lambda line: -rank[line])
            has = self._matched(first)
            second = [line for line in others if len(self._matched(line)) >= len(has) or self._matched(line) - has]
            chosen += sorted([first, *second[:1]])
        return chosen

    @cached_property
    def reports(self) -> list[Report]:
        """What sub-agents gave back."""
        return [read_report(call.args, call.text) for call in self.done(SPAWN)]

    @cached_property
    def documents(self) -> list[str]:
        """The Markdown files to check: those the question names or has a pattern for, else all."""
        every = [path for path in self.files if path.lower().endswith((".md", ".markdown"))]
        question = self.question
        if not question.files and question.glob is None:
            return every
        named = {nearest(name, every) for name in question.files}
        globs = [] if question.glob is None else [question.glob, *[f"*/{question.glob}"] * ("/" not in question.glob)]
        return [path for path in every if path in named or any(fnmatch(path, glob) for glob in globs)]

    @cached_property
    def checked(self) -> dict[str, Result]:
        """What the checks found; a path is missing only if reading it showed that it is."""
        known = known_paths(self.files)
        missing = {call.args.get("path") for call in self.done("read_file") if call.missed}
        there = {str(call.args.get("path")) for call in self.done("read_file")} - missing
        documents = [self._document(path) for path in self.documents]
        return {name: CHECKS[name](documents, (known | there).__contains__) for name in self.question.checks}

    @property
    def doubts(self) -> list[str]:
        """Paths that documents name and that are not among the files, to look at once more: listings are cut."""
        places = [place for result in self.checked.values() for place in result.places]
        return list(dict.fromkeys(place.target for place in places if place.target is not None))

    def _document(self, path: str) -> Document:
        return make_document(path, [(number, text) for (of, number), text in self.read.items() if of == path])

    def _matched(self, line: Line) -> set[Term]:
        return {term for term in self.question.terms if term.matches(line.text)}

    @cached_property
    def signs(self) -> list[str]:
        """Part numbers and the like in the quotes: what the question could not ask for."""
        found = [sign for line in self.quotes for sign in _SIGN.findall(line.text)]
        return [sign for sign in dict.fromkeys(found) if sign not in self.question.text][:2]

    def lines_with(self, sign: str) -> list[Line]:
        """The lines that name a sign, but for those quoted already."""
        quoted = {line[:2] for line in self.quotes}
        greps = [call for call in self.done("grep_files") if call.args.get("pattern") == re.escape(sign)]
        return [line for line in found_lines(greps) if line[:2] not in quoted]


def is_aside(path: str) -> bool:
    """Whether a path is hidden, or in a folder of things that were installed or built."""
    return any(part.startswith(".") or part in _INSTALLED for part in path.split("/"))


def nearest(name: str, files: Iterable[str]) -> str | None:
    """The file whose name has most words and letters of this one; None if none is like it."""

    def likeness(path: str) -> tuple[int, float]:
        ours, theirs = (re.sub(r"\.\w+$", "", text.rpartition("/")[2]).lower() for text in (name, path))
        shared = set(re.findall(r"[^\W_]+", ours)) & set(re.findall(r"[^\W_]+", theirs))
        return len(shared), SequenceMatcher(None, ours, theirs).ratio()

    best = max(files, key=likeness, default=None)
    return best if best is not None and max(likeness(best)) >= 0.6 else None


def found_lines(greps: Iterable[Done]) -> list[Line]:
    """What grep_files found, each line once, in order; hidden and installed files left out."""
    matches = [_GREP_LINE.fullmatch(text) for call in greps if not call.failed for text in call.text.splitlines()]
    found = {(match[1], int(match[2])): match[3].strip() for match in matches if match and not is_aside(match[1])}
    return [Line(path, number, text) for (path, number), text in sorted(found.items())]


def best_passages(hits: Sequence[Line], terms: Sequence[Term]) -> list[list[Line]]:
    """Lines near each other, those worth reading: by terms that no better passage has, then by terms, then by lines."""
    passages: list[list[Line]] = []
    for line in hits:
        last = passages[-1] if passages else [Line("", 0, "")]
        if last[0].path == line.path and line.number - last[-1].number <= 3 and line.number - last[0].number < 10:
            last.append(line)
        else:
            passages.append([line])
    texts = ["\n".join([passage[0].path, *(line.text for line in passage)]) for passage in passages]
    held = [{term for term in terms if term.matches(text)} for text in texts]
    most = max(map(len, held), default=0)
    left, covered, best = list(range(len(passages))), set[Term](), list[list[Line]]()
    while left and len(best) < MOST_PASSAGES:
        chosen = max(left, key=lambda at: (len(held[at] - covered), len(held[at]), len(passages[at]), -at))
        if held[chosen] <= covered and len(held[chosen]) < max(min(most, 2), most - 1):
            break
        left.remove(chosen)
        covered |= held[chosen]
        best.append(passages[chosen])
    return best
