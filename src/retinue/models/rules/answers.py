"""What the rules say: plans and answers, in plain words with places quoted as `path:line`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .checks import Result
from .delegation import Report
from .findings import TOOLS, Done, Findings, Line
from .question import Question, Term

LISTED_FILES, SHOWN_LINES, QUOTED_CHARS = 100, 60, 240

_WHAT_IT_IS = (
    "I am offline:rules, a built-in set of rules and not a language model. I look for the words of a question in the "
    "files of a folder and quote the lines that fit best."
)
_EXAMPLES = (
    'Ask me where something is written ("Where is the spare key kept?"), "how many lines mention fog", '
    '"list the files", "read notes.md" or "review the docs".'
)
_JUDGE = "These places were found by rules, not by a language model: judge them yourself."
_UNSEEN = "Checked by rules, not by a language model: what they cannot see may still be wrong."
_TOGETHER = (
    "I put these reports together as they came. I am rules, not a language model, and conclude nothing from them."
)
_CAVEAT = "These lines were found by rules that match words, not by a language model: judge them in their files."


REPORT_LINES = 40
_PLACE = re.compile(r"^- \S+:\d+: ", re.M)


def introduction() -> str:
    return f"{_WHAT_IT_IS} {_EXAMPLES}"


def without_tools() -> str:
    return f"{_WHAT_IT_IS} For that I need the file tools {listed(sorted(TOOLS))}, and this agent has none of them."


def answer(found: Findings) -> str:
    """The answer to every kind of question that takes calls, with what went wrong on the way."""
    kinds = {"list": _listing, "read": _contents, "count": _counts, "check": _checks}
    parts = [_misnamed(found), kinds.get(found.question.kind, _quotations)(found), _failures(found)]
    return _paragraphs(parts) or "I have nothing to show for this question."


def plan(question: Question) -> str:
    steps = ["see which files there are"]
    if question.files:
        steps.append(f"read {listed(question.files)}")
    if question.terms:
        steps.append(f"search for {terms_shown(question.terms)}")
        steps.append("count the lines" if question.kind == "count" else "read around the best places and quote them")
    return f"Plan: {', then '.join(steps)}."


def check_plan(question: Question) -> str:
    return f"Plan: see which documents there are, read them, then check their {listed(question.checks)}."


def fan_out_plan(names: Sequence[str]) -> str:
    return f"Plan: have {listed(names)} work on it side by side, then put their reports together."


def background_plan(names: Sequence[str]) -> str:
    return f"Plan: have {listed(names)} work on it in the background."


def reports(found: Sequence[Report]) -> str:
    """What sub-agents reported, one after another."""
    started = [one.who for one in found if one.status in ("accepted", "timeout_promoted")]
    if len(started) == len(found):
        return f"{listed(started)} work{'s' * (len(started) == 1)} on it in the background. I did not wait for that."
    done = [one for one in found if one.status == "ok"]
    places = sum(len(_PLACE.findall(one.text)) for one in done)
    head = f"{len(done) or 'None'} of {count(len(found), 'sub-agent')} reported"
    named = f" and named {count(places, 'place')}" if places else ""
    return _paragraphs([f"{head}{named}.", *[_report(one) for one in found], _TOGETHER])


def _report(report: Report) -> str:
    text = report.text.replace(_CAVEAT, "").replace(_JUDGE, "").replace(_UNSEEN, "").strip()
    lines = text.splitlines()
    if len(lines) > REPORT_LINES:
        lines[REPORT_LINES:] = [f"[{count(len(lines) - REPORT_LINES, 'more line')} in its report]"]
    ending = "" if report.status == "ok" else f" ended with {report.status}"
    return _paragraphs([f"## {report.who}{ending}", "\n".join(lines)])


def _checks(found: Findings) -> str:
    if not {"glob_files", "read_file"} <= found.tools:
        return f"To check documents I need the tools glob_files and read_file. {_WHAT_IT_IS}"
    if not found.documents:
        return "There is nothing to check: I see no Markdown files like that here."
    read = {path for path, _ in found.read} & set(found.documents)
    left = len(found.documents) - len(read)
    unread = f" ({left:,} more not read)" if left else ""
    parts = [_check(result, f"{count(len(read), 'document')}{unread}") for result in found.checked.values()]
    return _paragraphs([*parts, _JUDGE if any(result.places for result in found.checked.values()) else _UNSEEN])


def _check(result: Result, where: str) -> str:
    checked = f"I checked {count(result.number, result.noun)} in {where}"
    if not result.number:
        return f"There are no {result.noun}s to check in {where}."
    if not result.places:
        return f"{checked} and found nothing wrong."
    rows = [f"- {place.path}:{place.number}: {place.text}" for place in result.places]
    return _paragraphs([f"{checked}. Worth a look:", "\n".join(rows)])


def _listing(found: Findings) -> str:
    question = found.question
    entries = found.entries if question.folder else found.files
    where = f" in {question.folder}" if question.folder else f" like {question.glob}" if question.glob else " here"
    if not entries:
        return "" if any(call.failed for call in found.calls) else f"There are no files{where}, unless hidden ones."
    rows = [f"- {entry}" for entry in entries[:LISTED_FILES]]
    if len(entries) > LISTED_FILES:
        rows.append(f"- … and {len(entries) - LISTED_FILES:,} more")
    return _paragraphs([f"{count(len(entries), 'file')}{where}, without hidden and installed ones:", "\n".join(rows)])


def _contents(found: Findings) -> str:
    return _paragraphs(
        [f"{call.args['path']}:\n\n{_shortened(call)}" for call in found.done("read_file") if not call.failed]
    )


def _shortened(read: Done) -> str:
    lines = [re.sub(r"^ *\d+\t", "", line) for line in read.text.splitlines()]
    if len(lines) > SHOWN_LINES:
        left = len(lines) - SHOWN_LINES
        lines[SHOWN_LINES:] = [f"[{count(left, 'more line')} read; ask for words in this file to see places in it]"]
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
        return f"I find no word in this question that I could look for. {introduction()}"
    if found.nothing_there:
        return f"There is nothing to search: I see no files{f' like {question.glob}' if question.glob else ' here'}."
    if "grep_files" not in found.tools:
        need = f"To look for {terms_shown(question.terms)} I need the tool grep_files. {_WHAT_IT_IS}"
        return _contents(found) or need
    if not found.hits:
        return (
            f"I found nothing: no line in {_scope(found)} has {terms_shown(question.terms, 'or')}. "
            "I am rules, not a language model, and know no synonyms: "
            'try other words, a "quoted phrase", the name of a file, or "list the files".'
        )
    matched = [term for term in question.terms if any(term.matches(line.text) for line in found.hits)]
    absent = [term for term in question.terms if term not in matched]
    head = f"In {_scope(found)}, {_in_files(found.hits)} match {terms_shown(matched)}."
    head += f" Nothing matches {terms_shown(absent, 'or')}." if absent else ""
    also = [_also(found, sign) for sign in found.signs]
    return _paragraphs([f"{head} The closest:", _rows(found.quotes), *also, _CAVEAT])


def _also(found: Findings, sign: str) -> str:
    lines = found.lines_with(sign)[:3]
    return _paragraphs([f"{sign} is also in:", _rows(lines)]) if lines else ""


def _misnamed(found: Findings) -> str:
    return " ".join(
        f"There is no {name}; the nearest name is {path}, so I took that." if path else f"There is no file like {name}."
        for name, path in found.named.items()
        if path != name
    )


def _failures(found: Findings) -> str:
    """Calls that failed, but for misnamed files, of which the answer has told already."""
    failed = [
        call
        for call in found.calls
        if call.failed
        and not (call.missed and (call.args.get("path") in found.named or found.question.kind == "check"))
    ]
    reasons = dict.fromkeys(f"- {call.name}: {call.text.splitlines()[0]}" for call in failed)
    return _paragraphs(["These calls failed:", "\n".join(list(reasons)[:5])]) if reasons else ""


def _scope(found: Findings) -> str:
    """Where was searched, and whether all of it was."""
    named = [path for path in found.named.values() if path]
    capped = any("\n[only the first" in call.text for call in found.done("glob_files"))
    stopped = any("\n[stopped " in call.text for call in found.done("grep_files"))
    files = f"{'more than ' if capped else ''}{count(len(found.files), 'file')}" if found.files else "the workspace"
    return (listed(named) or files) + (" (there may be more)" if stopped else "")


def _in_files(lines: Sequence[Line]) -> str:
    return f"{count(len(lines), 'line')} in {count(len({line.path for line in lines}), 'file')}"


def _rows(lines: Sequence[Line]) -> str:
    return "\n".join(f"- {_quote(line)}" for line in lines)


def _quote(line: Line) -> str:
    text = line.text if len(line.text) <= QUOTED_CHARS else f"{line.text[:QUOTED_CHARS]}…"
    return f"{line.path}:{line.number}: {text}"


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def terms_shown(terms: Sequence[Term], last: str = "and") -> str:
    return listed([f'"{term.shown}"' if " " in term.shown else term.shown for term in terms], last)


def listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
