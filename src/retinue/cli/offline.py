"""offline:rules, the model of `retinue demo` and of `retinue run` without a key. It is rules, not a language model.

It searches for the words of a question with the file tools and quotes what it finds. Sub-agents that the question names get
the rest of it. It understands nothing and remembers nothing: `decide` makes each turn from the messages alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import AsyncIterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from ..core.errors import ConfigurationError
from ..core.messages import Role, Visibility
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from .text import count

_INTRODUCTION = (
    "I am offline:rules, built-in rules and not a language model. I look for the words of a question in files and quote the "
    'lines that fit best. Ask me where something is written, "list the files", "read notes.md" or "check the links".'
)
_CAVEAT = "These lines were found by rules that match words, not by a language model: judge them in their files."
_TOGETHER = "I am rules, not a language model: I put these reports together and conclude nothing from them."
_TOOLS, _SPAWN = ("glob_files", "grep_files", "list_files", "read_file"), "agent_spawn"
_EVERY_FILE = "{[!.]*,[!.]*/**/*}"
_MOST_TERMS, _MOST_QUOTES, _MOST_LISTED = 6, 5, 100
_STOP_WORDS = frozenset(
    """a about all an and any are as ask at be but by can could did do does file files find folder for from give has have hello
    help her here hi him his how i if in is it its list look make makes many may me my no not of on or our please read say says
    she show so tell than that the their them there they this to use was we what when where which who why will with you your""".split()
)
_FAILED = re.compile(r"([a-z]+_[a-z]+|denied|internal|timeout|cancelled)(: |$)|\[(limit:)?\w+\] ")
_FILE = re.compile(r"[\w./-]*\w\.[A-Za-z][A-Za-z0-9]{0,7}\b|\bREADME\b")
_GREP_LINE = re.compile(r"(.+?):(\d+): ?(.*)")
_SIGN = re.compile(r"\b[A-Z]{1,5}(?:-\d|\d\d)[A-Z0-9-]*\b")
_POINTS_BACK = re.compile(r"\b(it|its|that|they|them|those|there|he|she|him|her)\b|^\W*(and|but)\b", re.I)
_ASIDE = re.compile(r"(^|/)(\.|(__pycache__|build|dist|node_modules|site-packages|target|venv)(/|$))")
_REVIEW = re.compile(r"^\W*(?:please\s+)?(?:check|review|verify)\b", re.I)
_LINK = re.compile(r"\[[^\]]*\]\((?!\w+:|/|#)([^)#\s]+)[^)]*\)")
_PART = re.compile(r"Your part: (.*?)\n\nThe question: (.*)", re.S)
_SUBAGENTS = re.compile(r"^Available agent ids:\n((?:- `[^`\n]+`:.*(?:\n|$))+)", re.M)
_BACKGROUND = re.compile(r",?\s*\bin the background\b,?", re.I)

Call = tuple[str, dict[str, Any]]


class Turn(NamedTuple):
    """Calls with a thought, or an answer."""

    thought: str = ""
    calls: Sequence[Call] = ()
    answer: str = ""


class Done(NamedTuple):
    """A call and its result."""

    name: str
    args: dict[str, Any]
    text: str

    @property
    def lines(self) -> list[str]:
        lines = [] if _FAILED.match(self.text) else self.text.splitlines()
        return [line for line in lines if not line.startswith(("[", "no file in "))]


class Line(NamedTuple):
    path: str
    number: int
    text: str


class RulesModel:
    """Rules, not a language model: it finds and quotes words in files, to try things out without a provider."""

    name = "offline:rules"
    context_window = 1_000_000

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        turn = decide(request)
        written = len(turn.thought) + len(turn.answer)
        if turn.thought:
            yield ReasoningChunk(turn.thought)
        for index, (name, args) in enumerate(turn.calls):
            arguments = msgspec.json.encode(args).decode()
            written += len(name) + len(arguments)
            yield CallChunk(index, None, name, arguments)
        for word in re.findall(r"\s*\S+|\s+$", turn.answer):
            yield TextChunk(word)
        # Rules have no tokens: four characters count as one, so that budgets have something to work with.
        read = sum(len(message.text) for message in request.messages)
        usage = Usage(requests=1, input_tokens=-(-read // 4), output_tokens=-(-written // 4))
        yield TurnEnd("tool_calls" if turn.calls else "stop", usage)


def make_model(name: str) -> RulesModel:
    """Return the model behind "offline:<name>"."""
    if name != "rules":
        raise ConfigurationError(f"there is no model 'offline:{name}'; there is: offline:rules")
    return RulesModel()


def decide(request: ModelRequest) -> Turn:
    """Return the next turn: each kind of call is made once, then comes the answer, so every run ends."""
    found = Findings(request)
    if reports := found.done(_SPAWN):
        return Turn(answer=_reports(reports))
    if not found.calls and (spawns := found.delegate()):
        where = "in the background" if "timeout_seconds" in spawns[0][1] else "side by side"
        names = _listed([args["agent_id"] for _, args in spawns])
        return Turn(f"Plan: have {names} work on it {where}.", spawns)
    if not found.tools:
        return Turn(answer=f"{_INTRODUCTION} For that I need the file tools {_listed(_TOOLS)}; this agent has none.")
    if found.part and _REVIEW.match(found.text) and not found.checks_links:
        return Turn(answer="This part needs a language model: I am rules, and links are all I can check.")
    if not (found.terms or found.files or found.checks_links or re.search(r"\b(list|files)\b", found.text, re.I)):
        return Turn(answer=_INTRODUCTION)
    for plan in () if found.limit else (found.look_around, found.search, found.follow_signs):
        thought, calls = plan()
        if calls := [call for call in calls if call[0] in found.tools]:
            return Turn(thought, calls)
    return Turn(answer="\n\n".join(part for part in (found.limit, *found.answer()) if part))


class Findings:
    """The question, and what the calls since then found."""

    def __init__(self, request: ModelRequest) -> None:
        messages = request.messages
        visible = [message.role is Role.USER and message.visibility is Visibility.ALL for message in messages]
        asked = [at for at, message in enumerate(messages) if visible[at] and message.text.strip()]
        texts = [messages[at].text.strip()[:4000] for at in asked[-5:]] or ["help"]
        part = _PART.match(texts[-1])
        self.text, self.part = (part[2], part[1]) if part else (texts[-1], "")
        since = messages[asked[-1] + 1 :] if asked else ()
        results = {message.tool_call_id: message.text for message in since if message.role is Role.TOOL}
        calls = [call for message in since for call in message.tool_calls]
        self.calls = [Done(call.name, call.args, results.get(call.id, "cancelled")) for call in calls]
        limits = [message.text.partition("] ")[2] for message in since if message.text.startswith("[limit:")]
        self.limit = f"I could not look further: {limits[0].partition(': no')[0]}." if limits else ""
        self.tools = [tool.name for tool in request.tools if tool.name in _TOOLS]
        self.files = list(dict.fromkeys(_FILE.findall(self.part) or _FILE.findall(self.text)))
        self.checks_links = bool(_REVIEW.match(self.text) and re.search(r"\blinks?\b", self.part or self.text))
        self.terms = [] if self.checks_links else _terms(self.text, texts[:-1])
        can_spawn = any(tool.name == _SPAWN for tool in request.tools)
        lists = _SUBAGENTS.findall(messages[0].text) if can_spawn else []
        self.subagents: list[tuple[str, str]] = re.findall(r"- `([^`]+)`: ?(.*)", lists[-1]) if lists else []

    def done(self, name: str) -> list[Done]:
        return [call for call in self.calls if call.name == name]

    def delegate(self) -> list[Call]:
        """Give the question to the sub-agents it names, or a review of the docs to those that review docs."""
        text = _BACKGROUND.sub("", self.text).strip()
        names = [(at, one) for one in self.subagents if (at := text.lower().find(one[0].lower())) >= 0]
        chosen = [one for _, one in sorted(names)] if re.match(r"\W*(please\s+)?ask\b", text, re.I) else []
        if _REVIEW.match(text) and re.search(r"\bdocs?\b|\.md\b", text):
            chosen = [one for one in self.subagents if re.search(r"\bdocs?\b", one[1])]
        rest = text.partition(":")[2].strip() or text if names else text
        later = {"timeout_seconds": 0} if text != self.text else {}
        tasks = [(name, f"Your part: {about}\n\nThe question: {rest}") for name, about in chosen]
        return [(_SPAWN, {"agent_id": name, "task": task, **later}) for name, task in tasks]

    @property
    def known(self) -> list[str]:
        """The files there are, without hidden and installed ones."""
        return [path for call in self.done("glob_files") for path in call.lines if not _ASIDE.search(path)]

    @property
    def named(self) -> dict[str, str | None]:
        """The files the question names, each with its path or the nearest one."""
        missed = [call.args["path"] for call in self.done("read_file") if call.text.startswith("not_found: ")]
        return {name: _nearest(name, self.known) if name in missed else name for name in self.files}

    def hits(self, *, signs: bool = False) -> list[Line]:
        """Return the lines that searches found, those for words or those for signs."""
        greps = [call for call in self.done("grep_files") if str(call.args["pattern"]).startswith("(?i)") is not signs]
        lines = [match for call in greps for line in call.lines if (match := _GREP_LINE.fullmatch(line))]
        found = {(match[1], int(match[2])): match[3].strip() for match in lines if not _ASIDE.search(match[1])}
        return [Line(path, number, text) for (path, number), text in sorted(found.items())]

    @property
    def quotes(self) -> list[Line]:
        """The lines with most of the words; of two alike, a heading says less."""
        return sorted(self.hits(), key=self._rank)[:_MOST_QUOTES]

    @property
    def signs(self) -> list[str]:
        """The part numbers and the like in the quotes, which the question could not ask for."""
        found = [sign for line in self.quotes for sign in _SIGN.findall(line.text)]
        return [sign for sign in dict.fromkeys(found) if sign not in self.text][:2]

    def look_around(self) -> tuple[str, list[Call]]:
        if self.calls:
            return "", []
        steps = ["see which files there are", *[f"read {name}" for name in self.files]]
        steps += [f"search for {_listed(self.terms)} and quote the best places"] if self.terms else []
        calls: list[Call] = [("list_files", {}), ("glob_files", {"pattern": _EVERY_FILE})]
        calls += [("read_file", {"path": name, "limit": 200}) for name in self.files[:_MOST_TERMS]]
        return f"Plan: {', then '.join(steps)}.", calls

    def search(self) -> tuple[str, list[Call]]:
        if self.done("grep_files"):
            return "", []
        patterns = [r"(?i)\]\("] if self.checks_links else [_pattern(term) for term in self.terms]
        again = [path for name, path in self.named.items() if path and path != name]
        calls: list[Call] = [("read_file", {"path": path, "limit": 200}) for path in again]
        for path in [path for path in self.named.values() if path] or [""]:
            calls += [("grep_files", {"pattern": one, **({"path": path} if path else {})}) for one in patterns]
        return f"Search for {_listed(self.terms) or 'links'}.", calls

    def follow_signs(self) -> tuple[str, list[Call]]:
        searched = [call.args["pattern"] for call in self.done("grep_files")]
        patterns = [re.escape(sign) for sign in self.signs if not self.checks_links]
        calls: list[Call] = [("grep_files", {"pattern": one}) for one in patterns if one not in searched]
        return f"See what else is said about {_listed(self.signs)}.", calls

    def answer(self) -> list[str]:
        """Return the paragraphs of the answer."""
        wrong = [(name, path) for name, path in self.named.items() if path != name]
        notes = [f"There is no {name}; the nearest name is {path or 'none'}." for name, path in wrong]
        failed = [call for call in self.calls if _FAILED.match(call.text) and call.args.get("path") not in self.named]
        return [" ".join(notes), *self._found(), *[f"{call.name} failed: {call.text[:200]}" for call in failed[:3]]]

    def _found(self) -> list[str]:
        hits = self.hits()
        if self.checks_links:
            return self._dead_links(hits)
        if not self.terms:
            listing = "\n".join([f"- {path}" for path in self.known[:_MOST_LISTED]])
            return self._contents() or [f"{count(len(self.known), 'file')} here, without hidden ones:", listing]
        if not hits:
            nothing = f"I found no line with {_listed(self.terms, 'or')}. I am rules and know no synonyms"
            return [*self._contents(), f'{nothing}: try other words, or "list the files".']
        where = _listed([path for path in self.named.values() if path]) or count(len(self.known), "file")
        match = f"{count(len(hits), 'line')} in {count(len({line.path for line in hits}), 'file')} match"
        also = [line for line in self.hits(signs=True) if line not in self.quotes]
        more = [f"{_listed(self.signs)}: also in", _rows(also[:_MOST_QUOTES])] if also else []
        return [f"In {where}, {match}. The closest:", _rows(self.quotes), *more, _CAVEAT]

    def _contents(self) -> list[str]:
        reads = [call for call in self.done("read_file") if call.lines]
        return [f"{call.args['path']}:\n\n" + "\n".join(call.lines[:_MOST_LISTED]) for call in reads]

    def _dead_links(self, hits: Sequence[Line]) -> list[str]:
        dead: list[Line] = []
        for line in hits:
            for link in _LINK.finditer(re.sub(r"`[^`]*`", "", line.text)) if line.path.endswith(".md") else ():
                target = posixpath.normpath(posixpath.join(posixpath.dirname(line.path), link[1]))
                if not target.startswith("..") and not any(f"{path}/".startswith(f"{target}/") for path in self.known):
                    dead.append(line._replace(text=f"{link[0]}: there is no {target}"))
        checked = f"I checked the links in {count(len(hits), 'line')}"
        return [f"{checked}. Worth a look:", _rows(dead), _CAVEAT] if dead else [f"{checked} and found nothing wrong."]

    def _rank(self, line: Line) -> int:
        matched = [term for term in self.terms if re.search(_pattern(term), f"{line.path} {line.text}")]
        return line.text.startswith("#") - 2 * len(matched)


def _terms(text: str, earlier: Sequence[str]) -> list[str]:
    """Return the words to look for; a question that points back ("who signed it?") takes over those before."""
    words = re.findall(r"[^\W_][\w'’-]*", _FILE.sub(" ", text))
    terms = [word for word in dict.fromkeys(words) if word.lower() not in _STOP_WORDS or word == "May"]
    if earlier and len(terms) <= 2 and _POINTS_BACK.search(text):
        terms += [term for term in _terms(earlier[-1], earlier[:-1]) if term not in terms]
    return terms[:_MOST_TERMS]


def _pattern(term: str) -> str:
    """Match a word and its other forms, by its stem."""
    stem = re.sub(r"(?i)(?<=\w{4})(ing|ed|ies|es|s|y|e)$", "", term)
    return rf"(?i)\b{re.escape(stem)}" + ("" if len(term) > 3 else r"s?\b")


def _nearest(name: str, paths: Sequence[str]) -> str | None:
    stems = {re.sub(r"\.\w+$", "", path.rpartition("/")[2]): path for path in paths}
    best = get_close_matches(re.sub(r"\.\w+$", "", name.rpartition("/")[2]), stems, 1, 0.5)
    return stems[best[0]] if best else None


def _reports(calls: Sequence[Done]) -> str:
    if all("status: accepted" in call.text for call in calls):
        return f"In the background: {_listed([call.args['agent_id'] for call in calls])}. I did not wait for that."
    replies = [call.text.partition("\nreply:\n")[2].replace(_CAVEAT, "").strip() or call.text for call in calls]
    parts = [f"## {call.args['agent_id']}\n\n{reply}" for call, reply in zip(calls, replies, strict=True)]
    done = sum("\nstatus: ok" in call.text for call in calls)
    return "\n\n".join([f"{done} of {count(len(calls), 'sub-agent')} reported.", *parts, _TOGETHER])


def _rows(lines: Sequence[Line]) -> str:
    return "\n".join(f"- {line.path}:{line.number}: {line.text[:240]}" for line in lines)


def _listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""
