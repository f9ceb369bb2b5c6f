"""Who could do which part of a question, and what they reported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.messages import Role
from ...core.model import ModelRequest
from .question import Question, is_review, named_checks

SPAWN = "agent_spawn"
GENERAL_PURPOSE = "general-purpose"
MOST_MEMBERS = 8

_SECTION = re.compile(r"^Available agent ids:\n((?:- `[^`\n]+`:.*(?:\n|$))+)", re.M)
_MEMBER = re.compile(r"- `([^`]+)`: ?(.*)")
_ASKING = re.compile(r"^\W*(?:please\s+)?(?:ask|delegate(?:\s+\w+)?\s+to|let|spawn|use)\b", re.I)
_BACKGROUND = re.compile(r",?\s*\bin the background\b,?", re.I)
_STATUS = re.compile(r"^status: (.+)$", re.M)
_ONLY = re.compile(r"Your part: only (.+)")
_REPLY = re.compile(r"^reply(?: so far)?:\n", re.M)


class Member(NamedTuple):
    """A sub-agent that can be given work."""

    id: str
    description: str

    @property
    def text(self) -> str:
        return f"{self.id} {self.description}"


class Assignment(NamedTuple):
    agent_id: str
    task: str
    in_background: bool = False


class Report(NamedTuple):
    who: str
    """The sub-agent, and the file that was its part where there was one."""
    status: str
    text: str


def members_of(request: ModelRequest) -> list[Member]:
    """The sub-agents that the system message lists, where there is the tool to spawn them."""
    if not any(tool.name == SPAWN for tool in request.tools):
        return []
    system = "\n".join([message.text for message in request.messages if message.role is Role.SYSTEM])
    sections = _SECTION.findall(system)
    return [Member(*match) for match in _MEMBER.findall(sections[-1])] if sections else []


def assignments(question: Question, members: Sequence[Member]) -> list[Assignment]:
    """Who is to do what: those the question names, those whose description fits a review, else one for each file."""
    text = _BACKGROUND.sub("", question.text).strip()
    found = _assignments(question, text, members)
    return [one._replace(in_background=True) for one in found] if text != question.text.strip() else found


def _assignments(question: Question, text: str, members: Sequence[Member]) -> list[Assignment]:
    mentions = [(mention.start(), member) for member in members if (mention := _mention(member.id).search(text))]
    named = [member for _, member in sorted(mentions)]
    if named and not question.checks and (is_review(text) or _ASKING.match(text)):
        rest = _without_names(text, named)
        return [_assign(member, member.description, rest) for member in named[:MOST_MEMBERS]]
    if not is_review(text):
        return []
    fitting = [member for member in members if member in named or _fits(member, question)]
    if fitting:
        return [_assign(member, member.description, text) for member in fitting[:MOST_MEMBERS]]
    helper = next((member for member in members if member.id == GENERAL_PURPOSE), None)
    if helper is None or len(question.files) < 2:
        return []
    return [_assign(helper, f"only {name}", text) for name in question.files[:MOST_MEMBERS]]


def read_report(args: Mapping[str, Any], text: str) -> Report:
    """What the answer of a call of agent_spawn says."""
    only = _ONLY.match(str(args.get("task")))
    who = f"{args.get('agent_id')}{f', {only[1]}' if only else ''}"
    status, reply = _STATUS.search(text), _REPLY.search(text)
    if status is None:
        return Report(who, "error", text.strip())
    return Report(who, status[1], text[reply.end() :].strip() if reply else text[status.end() :].strip())


def _fits(member: Member, question: Question) -> bool:
    """Whether a review is for a sub-agent: by the checks it asks for, or by a word of its description."""
    if member.id == GENERAL_PURPOSE:
        return False
    if set(named_checks(member.text)) & set(question.checks):
        return True
    if question.checks and not question.is_whole_review:
        return False
    return any(term.matches(member.text) for term in question.subjects if not is_review(term.shown))


def _assign(member: Member, part: str, question: str) -> Assignment:
    return Assignment(member.id, f"Your part: {part}\n\nThe question: {question}")


def _mention(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.I)


def _without_names(text: str, named: Sequence[Member]) -> str:
    """The question without "Ask this one, that one and the other:" before it."""
    names = "|".join(re.escape(member.id) for member in named)
    lead = re.match(
        rf"\W*(?:please\s+)?\w+(?:\s+\w+\s+to)?\b(?:[\s,&@`]|\b(?:the|and|sub-?agents?|agents?|{names})\b)*[:,]?\s*(?:to\b)?",
        text,
        re.I,
    )
    rest = text[lead.end() :].strip() if lead else ""
    return rest or text
