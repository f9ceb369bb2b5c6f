"""The commands of `retinue`: their arguments, options and help. The module of a command is imported when it is used."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from math import isfinite
from textwrap import fill
from typing import Any, NoReturn

from ..core.lifecycle import RunStatus
from .text import complain

# The last two are what a shell reports for a program that SIGINT or SIGPIPE ended.
COMPLETED, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

_EXITS = """\
Exit codes: 0 done; 1 it failed, did not complete or found errors; 2 wrong use (arguments, folder, database);
130 interrupted by Ctrl-C; 143 terminated; 141 nobody reads the output any more.

Variables: RETINUE_DB is the default of --db, RETINUE_MODEL that of --model; NO_COLOR turns off colours and drawing."""
_RUN = """\
Ask one question about the files of a folder and watch the agents work on it.

The sub-agents that the folder declares in subagents/*.md and .claude/agents/*.md can be given work;
see them with retinue agents list.

Without --model and $RETINUE_MODEL, the built-in offline:rules answers. It is rules, not a language model:
it looks for the words of the question in the files and quotes what it finds."""
_DEMO = """\
Five questions in one conversation about a small folder: the fourth goes to three sub-agents that the folder
declares in Markdown, the last to one in the background. The model is the built-in offline:rules: rules, not a
language model. Nothing is sent anywhere."""
_AGENTS = (
    "Sub-agents are declared in DIR/subagents/*.md and DIR/.claude/agents/*.md; docs/harness.md describes the files."
)
_TASKS = (
    "Tasks of runs in a database (retinue run --db) are in that database, others in DIR/agents/<agent>/tasks. "
    "--db looks in a database, --workspace in a folder; without either it is $RETINUE_DB, else this folder. "
    "docs/tasks.md says more."
)
_CHECK_CODES = (
    "Exit code 0: no errors, though there may be warnings; 1: errors, such as a damaged file or an older schema; "
    "2: nothing to check: it is missing, cannot be reached, is no database or is of a newer version."
)
_FIRST_STEPS = ('retinue run "Where is the key kept?"', "retinue runs list --db sqlite:///app.db")
_MORE = "docs/operations.md says more."
_VERBOSE = "log what happens, and show tracebacks"
_RAW = argparse.RawDescriptionHelpFormatter
_WIDTH = 110
_MAX_INTEGER = 2**63 - 1
"""The largest integer of a database."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the nearest known word."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            what = f"unknown {wrong[1].lower()}" if wrong[1].isupper() else f"{wrong[1]}: unknown value"
            message = f"{what} {wrong[2]!r}"
            self._refuse(message, wrong[2], re.findall(r"[\w-]+", wrong[3]))
        self._refuse(message)

    def refuse_words(self, words: Sequence[str]) -> NoReturn:
        """Exit because of words that no argument takes."""
        known = re.findall(r"--[\w-]+", self.format_help())
        near = known if words[0].startswith("-") else []
        self._refuse(f"unrecognized arguments: {' '.join(words)}", words[0].partition("=")[0], near, others=False)

    def _refuse(self, message: str, given: str = "", known: Sequence[str] = (), *, others: bool = True) -> NoReturn:
        near = difflib.get_close_matches(given, known, 1)
        if near:
            message += f"; did you mean {near[0]}?"
        elif known and others:
            message += f"; choose from {', '.join(known)}"
        complain(f"{message}{'' if near else ';'} see {self.prog} --help")
        self.exit(MISUSED)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. `command` of the result is "module:function", None where none is given."""
    args, left = _make_parser().parse_known_args(argv)
    if left and hasattr(args, "words") and not any(word.startswith("-") for word in left):
        args.words += left  # arguments that come after an option
    elif left:
        args.parser.refuse_words(left)
    return args


def _make_parser() -> CommandParser:
    from .. import __version__

    parser = CommandParser(
        prog="retinue",
        description="Run agents that delegate to sub-agents, and look after their runs, tasks and databases.",
        epilog=f"{_examples('retinue demo', *_FIRST_STEPS)}\n\n{_EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"retinue {__version__}")
    parser.add_argument("--verbose", action="store_true", help=_VERBOSE)
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_run, _add_agents, _add_tasks, _add_runs, _add_db, _add_demo):
        add(commands)
    return parser


def _examples(*lines: str) -> str:
    return "\n  ".join(["Examples:", *lines])


def _group(commands: Any, name: str, about: str, description: str) -> Any:
    """A command that has actions."""
    text = fill(description, _WIDTH)
    parser: CommandParser = commands.add_parser(name, help=about, description=text, formatter_class=_RAW)
    parser.set_defaults(command=None, parser=parser)
    return parser.add_subparsers(title="actions", metavar="ACTION")


def _command(
    commands: Any, name: str, function: str, about: str, more: str, *examples: str, interrupt: bool = False
) -> CommandParser:
    """A command, or an action of one; with `interrupt` its function handles Ctrl-C itself."""
    parser: CommandParser = commands.add_parser(
        name, help=about, description=more, epilog=_examples(*examples), formatter_class=_RAW
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=_VERBOSE)
    parser.set_defaults(command=function, parser=parser, handles_interrupt=interrupt)
    return parser


def _about(about: str, more: str) -> str:
    return fill(f"{about[:1].upper()}{about[1:]}. {more}", _WIDTH)


def _add_workspace(parser: Any, default: str | None = ".") -> None:
    parser.add_argument(
        "--workspace", metavar="DIR", default=default, help="the folder of the agents (default: this one)"
    )


def _add_database(parser: Any) -> None:
    parser.add_argument("--db", metavar="URL", help="the database, as in sqlite:///app.db (default: $RETINUE_DB)")


def _add_model(parser: Any) -> None:
    parser.add_argument("--model", metavar="M", help="provider:model (default: $RETINUE_MODEL, else offline:rules)")


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run:run",
        "ask one question about the files of a folder",
        _RUN,
        'retinue run "Where is the key kept?"',
        'retinue run "Review the docs" --workspace examples/workspace --db sqlite:///app.db',
        'retinue run "And the second?" --thread monday --json',
        interrupt=True,
    )
    parser.add_argument("question", metavar="QUESTION", help="what to ask, in quotes")
    _add_workspace(parser)
    parser.add_argument("--agent", metavar="NAME", help="run this sub-agent of the folder itself, without its parent")
    parser.add_argument("--subagents", metavar="DIR", help="use the sub-agents in DIR/subagents as well")
    parser.add_argument("--shell", action="store_true", help="let the agents run any command, as you could yourself")
    _add_model(parser)
    parser.add_argument("--thread", metavar="ID", help="the id of the conversation (default: a new one)")
    _add_database(parser)
    parser.add_argument("--max-steps", metavar="N", type=count_from_1, help="stop after so many model calls")


def _add_agents(commands: Any) -> None:
    about = "list or check the sub-agents that a folder declares"
    actions = _group(commands, "agents", about, f"The sub-agents of a folder. {_AGENTS}")
    listing = "list the sub-agents of a folder"
    checking = "print every problem as file:line: field: message; exit 1 if there are errors"
    for name, about in (("list", listing), ("validate", checking)):
        example = f"retinue agents {name} examples/workspace"
        action = _command(actions, name, f"agents:{name}_agents", about, _about(about, _AGENTS), example)
        action.add_argument("folder", metavar="DIR", nargs="?", help="the folder of the agents (default: this one)")
        action.add_argument("--workspace", metavar="DIR", help="the same, as for other commands")


def _add_tasks(commands: Any) -> None:
    about = "list, show, await or cancel background tasks"
    actions = _group(commands, "tasks", about, f"The background tasks of a folder or a database. {_TASKS}")
    for name, about, example in (
        ("list", "list tasks, oldest first", "list --status running"),
        ("show", "show a task with its result", "show 9f3c"),
        ("wait", "wait for a task to end, and show it; exit 1 unless it completed", "wait 9f3c --timeout 60"),
        ("cancel", "stop a task, and wait until it has stopped", "cancel 9f3c --db sqlite:///app.db"),
    ):
        action = _command(
            actions,
            name,
            f"tasks:{name}_task" if name != "list" else "tasks:list_tasks",
            about,
            _about(about, _TASKS),
            f"retinue tasks {example}",
            interrupt=name == "wait",
        )
        if name == "list":
            action.add_argument("--session", metavar="ID", help="only those of one conversation (its thread id)")
            statuses = ("running", "completed", "failed", "cancelled", "pending", "all")
            action.add_argument("--status", choices=statuses, default="all", help="only these (default: all)")
        else:
            action.add_argument("task_id", metavar="TASK_ID", help="the id, or enough of its end to be unique")
        if name == "wait":
            action.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after so long")
        place = action.add_mutually_exclusive_group()
        _add_workspace(place, default=None)
        _add_database(place)


def _add_runs(commands: Any) -> None:
    about = "list, show, follow, answer, resume, cancel or fork the runs in a database"
    kept = "The runs that are stored in a database, as retinue run --db and Runtime.open do."
    actions = _group(commands, "runs", about, f"{kept} {_MORE}")
    listing = _run_action(actions, "list", "list runs, newest first", "list --status suspended", run=False)
    listing.add_argument("--thread", metavar="ID", help="only those of one conversation")
    listing.add_argument("--user", metavar="ID", help="only those of one user")
    statuses = ["queued", *[status.value for status in RunStatus]]
    listing.add_argument("--status", choices=statuses, metavar="STATUS", help=f"only these: {', '.join(statuses)}")
    listing.add_argument("--limit", metavar="N", type=count_from_1, default=50, help="at most so many (default: 50)")
    _run_action(actions, "show", "show the tree of agents of a run, and what it waits for", "show RUN")
    events = _run_action(actions, "events", "print the events of a run, one a line", "events RUN --follow --json")
    events.add_argument("--after", metavar="N", type=count_from_0, default=0, help="only those after number N")
    events.add_argument("--follow", action="store_true", help="go on until the run has ended or waits")
    _add_answers(actions)
    resume = _run_action(
        actions,
        "resume",
        "answer several questions at once, or continue a run whose process has died",
        "resume RUN",
        "resume RUN --approve call_1 --cancel call_2='not today'",
        interrupt=True,
    )
    _add_decisions(resume)
    cancel = _run_action(
        actions, "cancel", "stop a run, and wait until it has stopped", "cancel RUN --reason 'too slow'"
    )
    cancel.add_argument("--reason", metavar="TEXT", default="cancelled", help="why, for the record")
    fork = _run_action(
        actions,
        "fork",
        "start a new run that continues as another stood after an event",
        "fork RUN --at 12 --input 'And now in French'",
        interrupt=True,
    )
    fork.add_argument("--at", metavar="SEQ", type=count_from_1, required=True, help="the number of the event")
    fork.add_argument("--input", metavar="TEXT", help="continue with this message")
    _add_decisions(fork)
    for action in (resume, cancel, fork):
        _add_target(action)


def _run_action(
    actions: Any, name: str, about: str, *examples: str, run: bool = True, interrupt: bool = False
) -> CommandParser:
    function = {"list": "runs:list_runs", "show": "runs:show_run", "events": "runs:print_events"}.get(name)
    shown = [f"retinue runs {example.replace('RUN', 'run_7aa7c7')}" for example in examples]
    action = _command(
        actions, name, function or f"steering:{name}", about, _about(about, _MORE), *shown, interrupt=interrupt
    )
    if run:
        action.add_argument("run_id", metavar="RUN", help="the id of the run; retinue runs list shows them")
    _add_database(action)
    return action


def _add_answers(actions: Any) -> None:
    call = "CALL is needed where several calls wait: its call id, ticket id or path."
    for name, about, example, words in (
        ("approve", f"let a waiting call go on. {call}", "approve RUN", "[CALL]"),
        ("deny", f"refuse a waiting call; the model reads the message. {call}", "deny RUN -m 'not today'", "[CALL]"),
        (
            "answer",
            f"answer a question. VALUE is JSON, or else text. {call}",
            "answer RUN 'the red one'",
            "[CALL] VALUE",
        ),
    ):
        action = _run_action(actions, name, about, example, interrupt=True)
        action.usage = f"retinue runs {name} RUN {words} [options]"
        action.add_argument("words", metavar=words, nargs="+" if name == "answer" else "*", help="see above")
        if name == "approve":
            action.add_argument("--args", metavar="JSON", help="call the tool with these arguments instead")
        if name == "deny":
            action.add_argument("--message", "-m", metavar="TEXT", help="why; the model reads it")
        _add_target(action)


def _add_decisions(parser: CommandParser) -> None:
    parser.add_argument(
        "--approve", metavar="CALL[=JSON]", action="append", default=[], help='go on, with JSON or {"approved": true}'
    )
    parser.add_argument(
        "--cancel", metavar="CALL[=REASON]", action="append", default=[], help="do not go on; the model reads why"
    )


def _add_target(parser: CommandParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--target",
        metavar="MODULE:ATTR",
        help="the agent of the run in your code: an agent, a list of agents, or a function that returns them or a Runtime",
    )
    _add_workspace(where)
    _add_model(parser)


def _add_db(commands: Any) -> None:
    about = "check, migrate or prune a database"
    actions = _group(commands, "db", about, f"Look after a database that runs are stored in. {_MORE}")
    for name, about, more, example in (
        ("check", "read everything, change nothing, and print what is wrong", _CHECK_CODES, "check --json"),
        ("migrate", "bring a database to the schema of this version, or create one", "", "migrate --dry-run"),
        ("prune", "drop runs that ended long ago, while others work", "", "prune --older-than 30d --dry-run"),
    ):
        text = _about(about, f"{more} {_MORE}".strip())
        action = _command(actions, name, f"db:{name}", about, text, f"retinue db {example}")
        _add_database(action)
        if name == "prune":
            after = "how long ago they ended: 30d, 12h, 90m or 45s"
            action.add_argument("--older-than", metavar="TIME", type=span, required=True, help=after)
            action.add_argument("--deltas", action="store_true", help="drop only the deltas, which are most of a log")
            action.add_argument("--threads", action="store_true", help="drop conversations without runs as well")
        if name != "check":
            action.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _add_demo(commands: Any) -> None:
    about = "see it work, without network or key"
    parser = _command(
        commands, "demo", "demo:demo", about, _DEMO, "retinue demo", "retinue demo --keep", interrupt=True
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder, and say where it is")


def count_from_0(text: str) -> int:
    return _integer(text, 0)


def count_from_1(text: str) -> int:
    return _integer(text, 1)


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= _MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {'above 0' if least else 'of 0 or more'}")
    return int(text)


def seconds(text: str) -> float:
    """Read seconds, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return found


def span(text: str) -> float:
    """Read a time such as 30d, in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip().lower())
    found = float(match[1]) * _UNITS[match[2]] if match else float("inf")
    if not isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 30d, 12h, 90m or 45s")
    return found
