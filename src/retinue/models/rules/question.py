"""What a question asks for: its kind, and the words, file names and patterns in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

MOST_TERMS = 6
QUESTION_CHARS = 2_000
"""What is looked at of a question, which may have a document pasted into it."""

Kind = Literal["introduce", "list", "read", "count", "find", "check"]

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
_REVIEW = re.compile(
    r"^\W*(?:please\s+)?(?:(?:can|could|would)\s+you\s+)?(?:audit|check|examine|inspect|proofread|review|verify)\b"
    r"|^\W*请?(?:检查|审查|审阅|评审)",
    re.I,
)
_PART = re.compile(r"Your part: (.*?)\n\nThe question: ", re.S)
_CHECKED = {
    "links": re.compile(r"\blinks?\b|链接", re.I),
    "commands": re.compile(r"\b(?:commands?|scripts?)\b|命令", re.I),
    "headings": re.compile(r"\bheadings?\b|标题", re.I),
}
_DOCUMENTS = re.compile(r"\b(?:docs?|documentation|documents?|markdown|README)\b|文档", re.I)
_QUOTED = re.compile(r"[\"“”„«「『`]([^\"“”„«»「」『』`]{2,80})[\"“”»」』`]")
_GLOB = re.compile(r"[\w./-]*\*[\w./*-]*")
_FILE = re.compile(r"[\w./-]*\w\.[A-Za-z][A-Za-z0-9]{0,7}\b|\b(?:README|LICENSE|CHANGELOG|Makefile|Dockerfile)\b")
_WORD = re.compile(r"[^\W_][\w'’+#-]*")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+")
_CJK_PARTICLES = re.compile(
    "列出|显示|文件夹?|目录|[的了在是和与或吗呢哪里什么怎样多少几有谁为我你您好请把被这那个些都也就不能会要做到从给对上下中]"
)


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
    checks: Sequence[str] = ()
    """What of documents is to be checked."""
    subjects: Sequence[Term] = ()
    """What it is about, also where these are not words to look for."""

    @property
    def is_whole_review(self) -> bool:
        """Whether documents are to be checked for whatever there may be."""
        return len(self.checks) == len(_CHECKED)


def is_review(text: str) -> bool:
    """Whether something is to be gone through and judged."""
    return _REVIEW.match(text) is not None


def read_question(text: str, earlier: Sequence[str] = ()) -> Question:
    """What is asked for; one that points back ("and who signed it?") takes over the words of those before."""
    text = text[:QUESTION_CHARS]
    part = _PART.match(text)
    if part is not None:
        return _narrowed(read_question(text[part.end() :], earlier), part[1])
    listed = _LIST_OF.match(text)
    folder = listed[1] if listed and listed[1].lower() not in _STOP_WORDS else ""
    rest = _READING.sub(" ", text)
    terms, files, glob = _told_apart(rest.replace(folder, " ") if folder else rest)
    if earlier and len(terms) <= 2 and not files and glob is None and _POINTING_BACK.search(text):
        before = read_question(earlier[-1], earlier[:-1]).terms
        terms = [*terms, *(term for term in before if term not in terms)][:MOST_TERMS]
    made = Question(text, _kind_of(text, terms, files, glob), terms, files, glob, folder, (), terms)
    return _as_check(made, _checks(text))


def _narrowed(question: Question, part: str) -> Question:
    """The part of a question that is one sub-agent's."""
    _, files, glob = _told_apart(part)
    if files or glob is not None:
        question = question._replace(files=files, glob=glob)
    return _as_check(question, named_checks(part) or question.checks or _checks(part))


def _as_check(question: Question, checks: Sequence[str]) -> Question:
    if not checks or not is_review(question.text):
        return question
    return question._replace(kind="check", checks=checks, terms=())


def _checks(text: str) -> Sequence[str]:
    """The checks of documents that a text asks for; all where it names documents only."""
    return named_checks(text) or (list(_CHECKED) if _DOCUMENTS.search(text) else [])


def named_checks(text: str) -> Sequence[str]:
    """The checks a text has words for."""
    return [check for check, pattern in _CHECKED.items() if pattern.search(text)]


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
