"""offline:rules, the model that needs no network and no key. It is rules, not a language model.

It takes the telling words of a question, looks for them with the file tools and quotes what it finds; it understands
nothing. It keeps nothing either: each turn is decided from the messages alone, by the first of RULES that has something
to say. A rule makes calls at most once a question and the last one answers, which is why every run ends.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from ..core.errors import ConfigurationError
from ..core.messages import Role
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage

Kind = Literal["introduce", "list", "read", "count", "find"]
Call = tuple[str, dict[str, Any]]

MOST_TERMS, MOST_PASSAGES, MOST_PLACES = 6, 3, 12
LISTED_FILES, SHOWN_LINES, READ_LINES, QUOTED_CHARS = 100, 60, 200, 240
QUESTION_CHARS = 2_000
"""What is looked at of a question, which may have a document pasted into it."""

WHAT_IT_IS = (
    "I am offline:rules, a built-in set of rules and not a language model. I look for the words of a question in the "
    "files of a folder and quote the lines that fit best."
)
_EXAMPLES = (
    'Ask me where something is written ("Where is the spare key kept?"), "how many lines mention fog", '
    '"list the files" or "read notes.md".'
)
_CAVEAT = "These lines were found by rules that match words, not by a language model: judge them in their files."

_STOP_WORDS = frozenset(
    """a about after again all also am an and any anything anywhere are as at be because been before between but by
    can content contents could count did directories directory do document documents does doesn don during
    everything explain file files find folder folders for from get give go had happen happened has have he hello
    help her here hey hi him his how i if in into is isn it its just know line lines list look ls made make makes
    many may me mean mention mentioned mentions more most much my number of often on one only or other our out
    please print read really say says search see she should show so some something summarise summarize tell text
    than thank thanks that the their them then there these they this those to up us use very was we were what when
    where which who whom whose why will with word words work workspace would written you your yourself""".split()
)
_READING = re.compile(r"^\W*(?:please\s+)?(?:cat|display|open|print|read|show|view)\b", re.I)
_GREETING = re.compile(r"\b(hi|hello|hey|thanks?|help|you|your|yourself)\b|[你您]", re.I)
_LISTING = re.compile(r"\b(files?|folders?|director(y|ies)|documents?|ls|workspace)\b|文件|目录", re.I)
_LIST_OF = re.compile(
    r"^\W*(?:please\s+)?(?:list|ls|show)\b.*\b(?:in|of|under|below)\s+(?:the\s+)?(?:folder\s+)?([\w./-]+)", re.I
)
_COUNTING = re.compile(r"\bhow (many|often)\b|\bcount\b|\bnumber of\b|多少|几", re.I)
_POINTING_BACK = re.compile(
    r"\b(it|its|that|this|they|them|their|those|these|there|then|he|she|him|her|his)\b|^\W*(and|but|also|what about)\b",
    re.I,
)
_QUOTED = re.compile(r"[\"“”„«「『`]([^\"“”„«»「」『』`]{2,80})[\"“”»」』`]")
_GLOB = re.compile(r"[\w./-]*\*[\w./*-]*")
_FILE = re.compile(r"[\w./-]*\w\.[A-Za-z][A-Za-z0-9]{0,7}\b|\b(?:README|LICENSE|CHANGELOG|Makefile|Dockerfile)\b")
_WORD = re.compile(r"[^\W_][\w'’+#-]*")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+")
_CJK_PARTICLES = re.compile(
    "列出|显示|文件夹?|目录|[的了在是和与或吗呢哪里什么怎样多少几有谁为我你您好请把被这那个些都也就不能会要做到从给对上下中]"
)

# How the loop words a call that failed; a file's own lines come with a path or a number before them.
_FAILED = re.compile(
    r"(invalid_arguments|execution_failed|denied|not_found|internal|timeout|cancelled)(: |$)|\[(limit:)?\w+\] "
)
_GREP_LINE = re.compile(r"(.+?):(\d+): ?(.*)")
_READ_LINE = re.compile(r" *(\d+)\t(.*)")
_ENTRY = re.compile(r"(.+?)(/| \(\d+ bytes?\))")
_SIGN = re.compile(r"\b[A-Z]{1,5}-?\d{2,}[A-Z0-9-]*\b")
_INSTALLED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "target", "venv"})
_EVERY_FILE = "{[!.]*,[!.]*/**/*}"
_TOOLS = frozenset({"glob_files", "grep_files", "list_files", "read_file"})


def make_model(name: str) -> RulesModel:
    """The model behind "offline:<name>"."""
    if name != "rules":
        raise ConfigurationError(f"there is no model 'offline:{name}'; there is: offline:rules")
    return RulesModel()


class RulesModel:
    """Rules, not a language model: it finds and quotes words in files, to try things out without a provider."""

    name = "offline:rules"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        turn = decide(request)
        if turn.thought:
            yield ReasoningChunk(turn.thought)
        written = len(turn.thought) + len(turn.answer)
        for index, (name, args) in enumerate(turn.calls):
            arguments = msgspec.json.encode(args).decode()
            written += len(name) + len(arguments)
            yield CallChunk(index, None, name, arguments)
        for word in re.findall(r"\s*\S+|\s+$", turn.answer):
            yield TextChunk(word)
        # Rules have no tokens: four characters are counted as one, so that budgets have something to work with.
        read = sum(len(message.text) for message in request.messages)
        usage = Usage(requests=1, input_tokens=-(-read // 4), output_tokens=-(-written // 4))
        yield TurnEnd("tool_calls" if turn.calls else "stop", usage)


class Turn(NamedTuple):
    """What the model does next: calls with a thought, or an answer."""

    thought: str = ""
    calls: Sequence[Call] = ()
    answer: str = ""


def decide(request: ModelRequest) -> Turn:
    """The next turn of a conversation."""
    found = Findings(request)
    return next(turn for rule in RULES if (turn := rule(found)) is not None)


# The question: its kind, and the words, file names and patterns in it.


class Term(NamedTuple):
    """Something to look for. Its pattern is escaped text with simple endings: quick, whatever was asked."""

    shown: str
    pattern: str

    def matches(self, text: str) -> bool:
        return re.search(self.pattern, text) is not None


class Question(NamedTuple):
    text: str
    kind: Kind
    terms: Sequence[Term]
    files: Sequence[str]
    glob: str | None
    folder: str


def read_question(text: str, earlier: Sequence[str] = ()) -> Question:
    """What is asked for; one that points back ("and who signed it?") takes over the words of those before."""
    text = text[:QUESTION_CHARS]
    listed = _LIST_OF.match(text)
    folder = listed[1] if listed and listed[1].lower() not in _STOP_WORDS else ""
    rest = _READING.sub(" ", text)
    terms, files, glob = _told_apart(rest.replace(folder, " ") if folder else rest)
    if earlier and len(terms) <= 2 and not files and glob is None and _POINTING_BACK.search(text):
        before = read_question(earlier[-1], earlier[:-1]).terms
        terms = [*terms, *(term for term in before if term not in terms)][:MOST_TERMS]
    return Question(text, _kind_of(text, terms, files, glob), terms, files, glob, folder)


def _kind_of(text: str, terms: Sequence[Term], files: Sequence[str], glob: str | None) -> Kind:
    if terms:
        return "count" if _COUNTING.search(text) else "find"
    if files:
        return "read"
    if glob is not None or _LISTING.search(text):
        return "list"
    return "introduce" if _GREETING.search(text) else "find"


def _told_apart(text: str) -> tuple[Sequence[Term], Sequence[str], str | None]:
    """The terms, the file names and the file pattern in a question."""
    phrases, rest = _QUOTED.findall(text), _QUOTED.sub(" ", text)
    globs, rest = _GLOB.findall(rest), _GLOB.sub(" ", rest)
    named, rest = _FILE.findall(rest), _FILE.sub(" ", rest)
    files = [*(phrase for phrase in phrases if _FILE.fullmatch(phrase.replace(" ", ""))), *named]
    found = [make_term(phrase) for phrase in phrases if phrase not in files]
    for run in _CJK.findall(rest):
        for piece in _CJK_PARTICLES.split(run):
            found += [make_term(piece[at : at + 2]) for at in range(max(len(piece) - 1, bool(piece)))]
    for word in _WORD.findall(_CJK.sub(" ", rest)):
        # Inside a sentence, a capital letter tells the month from the verb.
        if re.sub(r"['’].*", "", word.lower()) not in _STOP_WORDS or (word == "May" and not text.startswith(word)):
            found.append(make_term(word))
    terms = list({term.pattern: term for term in reversed(found)}.values())[::-1]
    # If there are too many: phrases, names and numbers before other words, long ones before short ones.
    ranked = sorted(terms, key=lambda term: (not re.search(r"[\dA-Z ]", term.shown), -len(term.shown)))
    return [term for term in terms if term in ranked[:MOST_TERMS]], list(dict.fromkeys(files)), next(iter(globs), None)


def make_term(text: str) -> Term:
    """A word by its stem; a phrase or CJK text as it is."""
    shown = re.sub(r"['’]s$", "", text)
    if _CJK.search(shown) or not re.fullmatch(r"\w[\w'’-]*", shown):
        return Term(shown, f"(?i){re.escape(shown)}")
    stem, ending = _stem(shown)
    return Term(shown, rf"(?i)\b{re.escape(stem)}{ending}")


def _stem(word: str) -> tuple[str, str]:
    """A word without the commonest English endings, and the pattern of what may follow it."""
    if len(without := re.sub(r"(?i)(ing|ed)s?$", "", word)) >= 4 and without != word:
        return re.sub(r"([bdgmnprt])\1$", r"\1", without), r"(?:e?s|e|\w?ed|\w?ers?|\w?ings?)?\b"
    for ending in (r"(?i)ies$|(?<=\w{4})y$", r"(?i)(?:(?<=[sxz])|(?<=[cs]h))es$", r"(?i)(?<![su])s$"):
        if len(stem := re.sub(ending, "", word)) >= 3 and stem != word:
            word = stem
            break
    if len(word) > 3:
        return word, ""
    # A short stem is in too many words: it stands alone or in the plural.
    plural = "(?:es)?" if re.search(r"[sxz]$|[cs]h$", word) else "s?"
    return word, (plural if word.islower() else "") + r"\b"


# What the calls since the question have shown.


class Done(NamedTuple):
    """A call, and what came back."""

    name: str
    args: dict[str, Any]
    text: str

    @property
    def failed(self) -> bool:
        return _FAILED.match(self.text) is not None


class Line(NamedTuple):
    path: str
    number: int
    text: str


class Findings:
    """The question, the tools there are, and what was found since it was asked."""

    def __init__(self, request: ModelRequest) -> None:
        messages = request.messages
        asked = [index for index, message in enumerate(messages) if message.role is Role.USER and message.text.strip()]
        texts = [messages[index].text.strip() for index in asked[-5:]] or ["help"]
        self.question = read_question(texts[-1], texts[:-1])
        since = messages[asked[-1] + 1 :] if asked else ()
        answers = {message.tool_call_id: message.text for message in since if message.role is Role.TOOL}
        calls = [call for message in since for call in message.tool_calls]
        self.calls = [Done(call.name, call.args, answers.get(call.id, "cancelled")) for call in calls]
        self.tools = _TOOLS & {tool.name for tool in request.tools}

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
        return bool(self.calls) and not self.files and not any(call.failed for call in self.calls)

    @cached_property
    def named(self) -> dict[str, str | None]:
        """The files the question names, each with the path it has or most likely meant."""
        missing = {call.args.get("path") for call in self.done("read_file") if call.failed}
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


# The rules, and the calls they make.


def introduce_itself(found: Findings) -> Turn | None:
    return Turn(answer=f"{WHAT_IT_IS} {_EXAMPLES}") if found.question.kind == "introduce" else None


def ask_for_tools(found: Findings) -> Turn | None:
    needs = f"For that I need the file tools {_listed(sorted(_TOOLS))}, and this agent has none of them."
    return None if found.tools else Turn(answer=f"{WHAT_IT_IS} {needs}")


def look_around(found: Findings) -> Turn | None:
    question = found.question
    if found.calls or (question.kind == "find" and not question.terms):
        return None
    calls: list[Call] = [("list_files", {"path": question.folder} if question.folder else {})]
    if not question.folder:
        calls.append(("glob_files", {"pattern": _anywhere(question.glob) if question.glob else _EVERY_FILE}))
    calls += [_read(name) for name in question.files[:MOST_PASSAGES]]
    calls = [call for call in calls if call[0] in found.tools]
    return Turn(_plan(question), calls) if calls else None


def search_for_words(found: Findings) -> Turn | None:
    """All terms at once; with them, files that were asked for by a name that is not quite right."""
    terms = found.question.terms
    if not terms or "grep_files" not in found.tools or found.searched or found.nothing_there:
        return None
    missing = _listed([name for name, path in found.named.items() if path != name])
    thought = f"There is no {missing}: take the nearest name. " if missing else ""
    return Turn(f"{thought}Search for {_shown(terms)}.", [*_searches(found), *_second_tries(found)])


def read_nearest_names(found: Findings) -> Turn | None:
    calls = _second_tries(found)
    return Turn("The name was not quite right: read the file with the nearest one.", calls) if calls else None


def read_best_passages(found: Findings) -> Turn | None:
    tried = any("offset" in call.args for call in found.done("read_file"))
    unread = [passage for passage in found.passages if passage[-1][:2] not in found.read]
    if found.question.kind != "find" or tried or not unread or "read_file" not in found.tools:
        return None
    return Turn(
        f"{_count(len(found.hits), 'line')} found: read around the best.", [_read_around(one) for one in unread]
    )


def follow_signs(found: Findings) -> Turn | None:
    patterns = [re.escape(sign) for sign in found.signs]
    if found.question.kind != "find" or not found.searched or not patterns or found.searched & set(patterns):
        return None
    return Turn(f"See what else is said about {_listed(found.signs)}.", [_grep(pattern) for pattern in patterns])


def answer(found: Findings) -> Turn:
    """The last rule always speaks, and tells what went wrong on the way."""
    answers = {"list": _listing, "read": _contents, "count": _counts}
    parts = [_misnamed(found), answers.get(found.question.kind, _quotations)(found), _failures(found)]
    return Turn(answer=_paragraphs(parts) or "I have nothing to show for this question.")


RULES: tuple[Callable[[Findings], Turn | None], ...] = (
    introduce_itself,
    ask_for_tools,
    look_around,
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


# What it says.


def _plan(question: Question) -> str:
    steps = ["see which files there are"]
    if question.files:
        steps.append(f"read {_listed(question.files)}")
    if question.terms:
        steps.append(f"search for {_shown(question.terms)}")
        steps.append("count the lines" if question.kind == "count" else "read around the best places and quote them")
    return f"Plan: {', then '.join(steps)}."


def _listing(found: Findings) -> str:
    question = found.question
    entries = found.entries if question.folder else found.files
    where = f" in {question.folder}" if question.folder else f" like {question.glob}" if question.glob else " here"
    if not entries:
        return "" if any(call.failed for call in found.calls) else f"There are no files{where}, unless hidden ones."
    rows = [f"- {entry}" for entry in entries[:LISTED_FILES]]
    if len(entries) > LISTED_FILES:
        rows.append(f"- … and {len(entries) - LISTED_FILES:,} more")
    return _paragraphs([f"{_count(len(entries), 'file')}{where}, without hidden and installed ones:", "\n".join(rows)])


def _contents(found: Findings) -> str:
    return _paragraphs(
        [f"{call.args['path']}:\n\n{_shortened(call)}" for call in found.done("read_file") if not call.failed]
    )


def _shortened(read: Done) -> str:
    lines = [re.sub(r"^ *\d+\t", "", line) for line in read.text.splitlines()]
    if len(lines) > SHOWN_LINES:
        left = len(lines) - SHOWN_LINES
        lines[SHOWN_LINES:] = [f"[{_count(left, 'more line')} read; ask for words in this file to see places in it]"]
    return "\n".join(lines)


def _counts(found: Findings) -> str:
    terms, hits = found.question.terms, found.hits
    if not hits:
        return _quotations(found)
    together = [line for line in hits if all(term.matches(line.text) for term in terms)]
    rows = [f"- {term.shown}: {_in_files([line for line in hits if term.matches(line.text)])}" for term in terms]
    if len(terms) > 1:
        rows.insert(0, f"- all of these in one line: {_in_files(together)}")
    example = f"The first is {_quote((together or hits)[0])}"
    caveat = "I count lines by rules and am no language model: one line may name several things, or deny one."
    return _paragraphs([f"Lines that match in {_scope(found)}:", "\n".join(rows), example, caveat])


def _quotations(found: Findings) -> str:
    question = found.question
    if not question.terms:
        return f"I find no word in this question that I could look for. {WHAT_IT_IS} {_EXAMPLES}"
    if found.nothing_there:
        return f"There is nothing to search: I see no files{f' like {question.glob}' if question.glob else ' here'}."
    if "grep_files" not in found.tools:
        return _contents(found) or f"To look for {_shown(question.terms)} I need the tool grep_files. {WHAT_IT_IS}"
    if not found.hits:
        return (
            f"I found nothing: no line in {_scope(found)} has {_shown(question.terms, 'or')}. "
            "I am rules, not a language model, and know no synonyms: "
            'try other words, a "quoted phrase", the name of a file, or "list the files".'
        )
    matched = [term for term in question.terms if any(term.matches(line.text) for line in found.hits)]
    absent = [term for term in question.terms if term not in matched]
    head = f"In {_scope(found)}, {_in_files(found.hits)} match {_shown(matched)}."
    head += f" Nothing matches {_shown(absent, 'or')}." if absent else ""
    also = [
        (f"{sign} is also in:", _rows(found.lines_with(sign)[:3])) for sign in found.signs if found.lines_with(sign)
    ]
    return _paragraphs(
        [f"{head} The closest:", _rows(found.quotes), *(part for pair in also for part in pair), _CAVEAT]
    )


def _misnamed(found: Findings) -> str:
    return " ".join(
        f"There is no {name}; the nearest name is {path}, so I took that." if path else f"There is no file like {name}."
        for name, path in found.named.items()
        if path != name
    )


def _failures(found: Findings) -> str:
    """Calls that failed, but for misnamed files, of which the answer has told already."""
    failed = [call for call in found.calls if call.failed and call.args.get("path") not in found.named]
    reasons = dict.fromkeys(f"- {call.name}: {call.text.splitlines()[0]}" for call in failed)
    return _paragraphs(["These calls failed:", "\n".join(list(reasons)[:5])]) if reasons else ""


def _scope(found: Findings) -> str:
    """Where was searched, and whether all of it was."""
    named = [path for path in found.named.values() if path]
    capped = any("\n[only the first" in call.text for call in found.done("glob_files"))
    stopped = any("\n[stopped " in call.text for call in found.done("grep_files"))
    files = f"{'more than ' if capped else ''}{_count(len(found.files), 'file')}" if found.files else "the workspace"
    return (_listed(named) or files) + (" (there may be more)" if stopped else "")


def _in_files(lines: Sequence[Line]) -> str:
    return f"{_count(len(lines), 'line')} in {_count(len({line.path for line in lines}), 'file')}"


def _rows(lines: Sequence[Line]) -> str:
    return "\n".join(f"- {_quote(line)}" for line in lines)


def _quote(line: Line) -> str:
    text = line.text if len(line.text) <= QUOTED_CHARS else f"{line.text[:QUOTED_CHARS]}…"
    return f"{line.path}:{line.number}: {text}"


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _shown(terms: Sequence[Term], last: str = "and") -> str:
    return _listed([f'"{term.shown}"' if " " in term.shown else term.shown for term in terms], last)


def _listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
