"""Checks of Markdown documents: links, commands and headings. Each finds places, none understands a sentence."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_SPAN = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\[([^\]]*)\]\(\s*(?:<([^>]+)>|([^)\s]+))[^)]*\)")
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//|/")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_SHELLS = frozenset({"sh", "bash", "shell", "console", "zsh"})
_COMMAND = re.compile(r"(?:\$\s+)?(?:[A-Z_]+=\S*\s+)*((?:\./)?[\w.-]+/[\w./-]+)")
_COMMAND_FOLDERS = ("scripts/", "bin/", "tools/", "./")
"""Where a path in running text is a command and not just a path."""


class Place(NamedTuple):
    """Something worth a look. `target` is the path it says there is, where that is what is wrong."""

    path: str
    number: int
    text: str
    target: str | None = None


class Link(NamedTuple):
    text: str
    target: str

    @property
    def shown(self) -> str:
        return f"[{self.text}]({self.target})"


class TextLine(NamedTuple):
    number: int
    text: str
    language: str | None
    """Of the code block it is in; None in running text."""


class Document(NamedTuple):
    path: str
    lines: Sequence[TextLine]

    @property
    def headings(self) -> list[tuple[int, int, str]]:
        """Line, level and text of each."""
        found = [(line.number, _HEADING.fullmatch(line.text)) for line in self.lines if line.language is None]
        return [(number, len(match[1]), match[2]) for number, match in found if match]


class Result(NamedTuple):
    """How many of what a check looked at, and what it found."""

    number: int
    noun: str
    places: Sequence[Place]


def make_document(path: str, lines: Iterable[tuple[int, str]]) -> Document:
    """The lines of a file, told apart into text and code; front matter is neither."""
    made: list[TextLine] = []
    fence, language, in_front = "", "", False
    for number, text in lines:
        if text == "---" and (number == 1 or in_front):
            in_front = number == 1
            continue
        match = _FENCE.match(text)
        if match and (not fence or text.strip().startswith(fence)):
            fence, language = ("", "") if fence else (match[1], match[2].lower())
        elif not in_front:
            made.append(TextLine(number, text, language if fence else None))
    return Document(path, made)


def check_links(documents: Sequence[Document], exists: Callable[[str], bool]) -> Result:
    """Links to files that are not there, and to headings that are not in them. What cannot be seen is not counted."""
    slugs = {document.path: _slugs(document) for document in documents}
    total, places = 0, list[Place]()
    for path, number, link in [(document.path, *found) for document in documents for found in _links(document)]:
        wanted, anchor = _target(path, link)
        if wanted is None or (anchor and exists(wanted) and wanted not in slugs):
            continue
        total += 1
        if not exists(wanted):
            places.append(Place(path, number, f"{link.shown}: there is no {wanted}", wanted))
        elif anchor and anchor.lower() not in slugs[wanted]:
            places.append(Place(path, number, f"{link.shown}: {wanted} has no heading #{anchor}"))
    return Result(total, "link", places)


def check_commands(documents: Sequence[Document], exists: Callable[[str], bool]) -> Result:
    """Commands of the project itself that are not there; what is installed elsewhere is not looked for."""
    total, places = 0, list[Place]()
    for document in documents:
        for number, command in _commands(document):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(document.path), command))
            path = posixpath.normpath(command)
            total += 1
            if not exists(path) and not exists(beside):
                places.append(Place(document.path, number, f"{command}: there is no such command", path))
    return Result(total, "local command", places)


def check_headings(documents: Sequence[Document], exists: Callable[[str], bool]) -> Result:
    """Titles, levels that are left out, headings that occur twice in one place or end like a sentence."""
    found = [place for document in documents for place in _odd_headings(document)]
    return Result(sum(len(document.headings) for document in documents), "heading", found)


Check = Callable[[Sequence[Document], Callable[[str], bool]], Result]

CHECKS: Mapping[str, Check] = {"links": check_links, "commands": check_commands, "headings": check_headings}


def known_paths(files: Collection[str]) -> set[str]:
    """The files and every folder above them."""
    known = set(files) | {"."}
    for path in files:
        while path := posixpath.dirname(path):
            known.add(path)
    return known


def _links(document: Document) -> Iterator[tuple[int, Link]]:
    for line in document.lines:
        if line.language is None:
            for text, bracketed, bare in _LINK.findall(_SPAN.sub("", line.text)):
                yield line.number, Link(text, bracketed or bare)


def _target(path: str, link: Link) -> tuple[str | None, str]:
    """The path a link of a document leads to and the heading in it; no path for what is elsewhere."""
    file, _, anchor = unquote(link.target).partition("#")
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), file)) if file else path
    is_elsewhere = _ELSEWHERE.match(link.target) or wanted == ".." or wanted.startswith("../")
    return None if is_elsewhere else wanted, anchor


def _slugs(document: Document) -> set[str]:
    """The anchors that code hosts make of headings."""
    seen: dict[str, int] = {}
    slugs: set[str] = set()
    for _, _, text in document.headings:
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        slugs.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return slugs


def _commands(document: Document) -> Iterator[tuple[int, str]]:
    for line in document.lines:
        spans = [span[1:-1] for span in _SPAN.findall(line.text)] if line.language is None else ()
        named = [span for span in spans if span.startswith(_COMMAND_FOLDERS)]
        for text in [line.text.strip()] if line.language in _SHELLS else named:
            match = _COMMAND.match(text)
            # What begins with a dot, as in .venv/bin, is made by some other command.
            if match and not match[1].removeprefix("./").startswith("."):
                yield line.number, match[1]


def _odd_headings(document: Document) -> Iterator[Place]:
    above: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for index, (number, level, text) in enumerate(document.headings):
        if index == 0 and level > 1:
            yield Place(document.path, number, f"{text!r} is the first heading, and not a title (#)")
        elif index and level == 1:
            yield Place(document.path, number, f"{text!r} is a second title (#)")
        elif index and level > len(above) + 1:
            yield Place(document.path, number, f"{text!r} leaves out a level: {'#' * len(above)}, then {'#' * level}")
        if text.endswith((".", ":", ",", ";")):
            yield Place(document.path, number, f"{text!r} ends with {text[-1]!r}")
        above = [*above[: level - 1], *[""] * (level - 1 - len(above)), text]
        if tuple(above) in seen:
            yield Place(document.path, number, f"{text!r} is there twice")
        seen.add(tuple(above))
