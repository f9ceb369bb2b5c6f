"""The commands of `retinue`: their arguments, options and help. The module of a command is imported when it is used."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, isfinite
from textwrap import fill
from typing import Any, NoReturn

from ..core.runs import RunStatus
from .text import complain

# The last two are what a shell reports for a program that SIGINT or SIGPIPE ended.
COMPLETED, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

_EXITS = """\
Exit codes: 0 done; 1 it failed, did not complete or found errors; 2 wrong use (arguments, folder, database);
130 interrupted by Ctrl-C; 143 terminated; 141 nobody reads the output any more.

Variables: RETINUE_DB is the default of --db, RETINUE_MODEL that of --model; NO_COLOR turns off colours and drawing."""
_RUN = """\
You watch the agents work on it.

The sub-agents that the folder declares in subagents/*.md and .claude/agents/*.md can be given work;
see them with retinue agents list.

You are asked before an agent writes, edits or executes, unless --yes or --allow say otherwise. Without a
terminal such calls are refused.

Without --model and $RETINUE_MODEL, the built-in offline:rules answers. It is rules, not a language model:
it looks for the words of the question in the files and quotes what it finds."""
_CHAT = """\
Each line is a message in one conversation; the agents answer it as with retinue run, and remember the lines before.
--thread continues a conversation that --db has kept.

Ctrl-C stops the present answer, Ctrl-D or /exit leaves. Without a terminal, lines are read until the input ends."""
_SERVE = """\
TARGET is a folder, as for retinue run, or MODULE:ATTR of an agent, a list of agents, a Runtime, or a function
that returns one of them.

Whoever uses it sends a token: that of --token, or one of retinue tokens add. Without either, one is made and
printed. Before an agent of a folder writes, edits or executes, its run waits for a decision of a client.

SIGTERM and Ctrl-C let requests finish, and leave runs to the next process; a second one ends it at once.
docs/server.md says more."""
_WORKER = """\
TARGET is a folder or MODULE:ATTR, as for retinue serve. Runs that were started with that engine, in any process,
are done by any worker that serves their queue and has their agent.

SIGTERM and Ctrl-C: it takes nothing more, lets running tool calls finish for --grace seconds, leaves the rest to
other workers and exits with 0; a second one ends it at once. docs/scale.md says more."""
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
_MORE = "docs/operations.md says more."
_VERBOSE = "log what happens, and show tracebacks"
_CALL = "the call: its id, ticket id or path; needed where several calls wait"
_TARGET = "the agent of the run in your code: an agent, a list of agents, or a function that returns them or a Runtime"

_STEERED = ("approve", "deny", "answer", "resume", "fork")
_GROUPS = {
    "agents": ("list or check the sub-agents that a folder declares", _AGENTS),
    "tasks": ("list, show, await or cancel background tasks", _TASKS),
    "runs": ("list, show, follow, answer, resume, cancel or fork the runs in a database", _MORE),
    "tokens": ("make, list or revoke the tokens of the users of a server", "docs/server.md says more."),
    "db": ("check, migrate or prune the database of runs", _MORE),
}
_COMMANDS = (  # with the function, what it does, and an example
    ("run", "run:run", "ask one question about the files of a folder", '"Where is the key kept?" --workspace docs'),
    ("chat", "chat:chat", "talk about the files of a folder, line by line", "--workspace docs --db sqlite:///app.db"),
    ("agents list", "agents:list_agents", "list the sub-agents of a folder", "examples/workspace"),
    (
        "agents validate",
        "agents:validate_agents",
        "print the problems; exit 1 if there are errors",
        "examples/workspace",
    ),
    ("tasks list", "tasks:list_tasks", "list tasks, oldest first", "--status running"),
    ("tasks show", "tasks:show_task", "show a task with its result", "9f3c"),
    ("tasks wait", "tasks:wait_task", "wait for a task to end, and show it; exit 1 unless it completed", "9f3c"),
    ("tasks cancel", "tasks:cancel_task", "stop a task, and wait until it has stopped", "9f3c --db sqlite:///app.db"),
    ("runs list", "runs:list_runs", "list runs, newest first", "--status suspended"),
    ("runs show", "runs:show_run", "show the tree of agents of a run, and what it waits for", "RUN"),
    ("runs events", "runs:print_events", "print the events of a run, one a line", "RUN --follow --json"),
    ("runs approve", "steering:approve", "let a waiting call go on", "RUN --args '{\"amount\": 5}'"),
    ("runs deny", "steering:deny", "refuse a waiting call", "RUN --message 'not today'"),
    ("runs answer", "steering:answer", "answer a question with VALUE: JSON, or else text", "RUN 'the red one'"),
    ("runs resume", "steering:resume", "continue a run whose process has died, or answer several questions", "RUN"),
    ("runs cancel", "steering:cancel", "stop a run, and wait until it has stopped", "RUN --reason 'too slow'"),
    ("runs fork", "steering:fork", "start a new run that continues as another stood after an event", "RUN --at 12"),
    ("serve", "serve:serve", "serve agents over HTTP", "examples/workspace --db sqlite:///app.db"),
    (
        "worker",
        "worker:work",
        "work on the runs that an engine schedules",
        "app:agents --db postgresql://localhost/app --queues default,gpu",
    ),
    (
        "queues",
        "worker:show_queues",
        "show what waits in the queues of a database, its workers and schedules",
        "--db postgresql://localhost/app",
    ),
    ("tokens add", "tokens:add_token", "make a token, and print it as the last line", "ann --db sqlite:///app.db"),
    ("tokens list", "tokens:list_tokens", "list tokens, without their secrets", "--json"),
    ("tokens revoke", "tokens:revoke_token", "make a token worthless", "tok_7aa7c7"),
    ("db check", "database:check", "read everything, change nothing, and print what is wrong", "--json"),
    ("db migrate", "database:migrate", "bring a database to the schema of this version, or create one", "--dry-run"),
    ("db prune", "database:prune", "drop runs that ended long ago, while others work", "--older-than 30d --dry-run"),
    ("demo", "demo:demo", "see it work, without network or key", "--keep"),
)
_ABOUT = {
    "run": _RUN,
    "chat": _CHAT,
    "demo": _DEMO,
    "serve": _SERVE,
    "worker": _WORKER,
    "queues": "docs/scale.md says more.",
    "db check": _CHECK_CODES,
}
_MAX_INTEGER = 2**63 - 1
"""The largest integer of a database."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the nearest known word. `complete` adds its arguments at first use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.complete: Callable[[], None] | None = None

    def parse_known_args(self, *args: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.complete is not None:
            self.complete()
            self.complete = None
        return super().parse_known_args(*args, **options)

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
    args.argv = sys.argv[1:] if argv is None else list(argv)
    if left and hasattr(args, "words") and not any(word.startswith("-") for word in left):
        args.words += left  # arguments that come after an option
    elif left:
        args.parser.refuse_words(left)
    return args


def _make_parser() -> CommandParser:
    from .. import __version__

    about = "Run agents that delegate to sub-agents, and look after their runs, tasks and databases."
    examples = _examples("demo", 'run "Where is the key kept?"', "runs list --db sqlite:///app.db")
    parser = CommandParser(prog="retinue", description=about, epilog=f"{examples}\n\n{_EXITS}")
    parser.add_argument("--version", action="version", version=f"retinue {__version__}")
    parser.add_argument("--verbose", action="store_true", help=_VERBOSE)
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in dict.fromkeys(words.partition(" ")[0] for words, *_ in _COMMANDS):
        if name in _GROUPS:
            group = commands.add_parser(name, help=_GROUPS[name][0])
            group.complete = partial(_complete_group, group, name)
        else:
            _add_command(commands, name)
    return parser


def _complete_group(group: CommandParser, name: str) -> None:
    """Add the commands of a group."""
    group.description = _about(*_GROUPS[name])
    group.set_defaults(command=None, parser=group)
    actions = group.add_subparsers(title="actions", metavar="ACTION")
    for words, *_ in _COMMANDS:
        if words.startswith(f"{name} "):
            _add_command(actions, words)


def _add_command(place: Any, words: str) -> None:
    (about,) = [about for known, _, about, _ in _COMMANDS if known == words]
    command: CommandParser = place.add_parser(words.rpartition(" ")[2], help=about)
    command.complete = partial(_complete, command, words)


def _complete(command: CommandParser, words: str) -> None:
    """Add all of a command but its name."""
    function, about, example = next(rest for known, *rest in _COMMANDS if known == words)
    group, _, name = words.rpartition(" ")
    command.description = _about(about, _ABOUT.get(words) or _GROUPS[group][1])
    command.epilog = _examples(f"{words} {example}".replace("RUN", "run_7aa7c7"))
    _ADD[group](command, name)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=_VERBOSE)
    command.set_defaults(command=function, parser=command)


def _add_serve(parser: CommandParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a folder, or MODULE:ATTR")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=count_from_0, default=8123, help="default: 8123; 0 is any that is free")
    _add_database(parser)
    auth = parser.add_mutually_exclusive_group()
    auth.add_argument(
        "--token", metavar="T", help="the token of the user local (default: a new one, unless the database has tokens)"
    )
    auth.add_argument("--token-file", metavar="F", help="a file with that token")
    auth.add_argument("--no-auth", action="store_true", help="ask for no token: whoever reaches the port is let in")
    auth.add_argument("--user-header", metavar="NAME", help="the header in which a proxy in front names the user")
    parser.add_argument("--public", action="store_true", help="allow --no-auth on an address that others can reach")
    cors = "an origin whose pages may use it, as in https://app.example.com; may be repeated"
    parser.add_argument("--cors", metavar="ORIGIN", action="extend", nargs="+", default=[], help=cors)
    parser.add_argument("--workers", metavar="N", type=count_from_1, default=1, help="processes that share the port")
    _add_engine(parser)
    parser.add_argument("--tls-cert", metavar="F", help="a chain of certificates (PEM): serve https, and gRPC with TLS")
    parser.add_argument("--tls-key", metavar="F", help="the private key of the certificate (PEM)")
    parser.add_argument("--rate", metavar="R", type=above_0, help="requests a second for each user")
    parser.add_argument("--max-streams", metavar="N", type=count_from_1, help="open streams for each user")
    grpc = "the port of A2A over gRPC (default: the port after --port); 0 is any that is free"
    parser.add_argument("--grpc-port", metavar="PORT", type=count_from_0, help=grpc)
    parser.add_argument("--a2a-key", metavar="F", help="a file with an EC key (P-256, PEM) that signs the A2A cards")
    private = "let A2A push notifications go to this machine and its network"
    parser.add_argument("--push-private", action="store_true", help=private)
    _add_consent(parser)
    _add_model(parser)
    parser.add_argument("--listen-fd", type=count_from_0, help=argparse.SUPPRESS)
    parser.set_defaults(warns=True)


def _add_worker(parser: CommandParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a folder, or MODULE:ATTR")
    _add_database(parser, "postgresql://localhost/app")
    _add_engine(parser, default="postgres")
    parser.add_argument(
        "--queues", metavar="A,B", default="default", help="the queues to take runs from (default: default)"
    )
    parser.add_argument("--slots", metavar="N", type=count_from_1, default=16, help="runs at once (default: 16)")
    lease = "seconds without a sign of life after which others take its runs over (default: 30)"
    parser.add_argument("--lease", metavar="S", type=above_0, default=30.0, help=lease)
    grace = "seconds in which running tool calls may finish when it is stopped (default: 10)"
    parser.add_argument("--grace", metavar="S", type=seconds, default=10.0, help=grace)
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve figures for Prometheus there")
    _add_consent(parser)
    _add_model(parser)
    parser.set_defaults(warns=True)


def _add_engine(parser: CommandParser, default: str | None = None) -> None:
    about = "postgres, or temporal://host:port/namespace"
    shown = f"{about} (default: {default})" if default else f"have workers do the runs: {about}"
    parser.add_argument("--engine", metavar="E", default=default, help=shown)


def _add_tokens(parser: CommandParser, name: str) -> None:
    if name == "add":
        parser.add_argument("user", metavar="USER", help="whose token it is; users do not see each other's runs")
        scopes = "what it allows: some of read,run,answer,admin (default: read,run,answer)"
        parser.add_argument("--scopes", metavar="SCOPES", default="read,run,answer", help=scopes)
    elif name == "revoke":
        parser.add_argument("token_id", metavar="ID", help="the id of the token; retinue tokens list shows them")
    _add_database(parser)


def _about(about: str, more: str) -> str:
    """Return a description in lines."""
    first, *others = more.split("\n\n")
    text = f"{about[0].upper()}{about[1:]}. {first}"
    return "\n\n".join(fill(part, 100) for part in (text, *others))


def _examples(*examples: str) -> str:
    return "\n  retinue ".join(["Examples:", *examples])


def _add_workspace(parser: Any) -> None:
    parser.add_argument("--workspace", metavar="DIR", help="the folder of the agents (default: this one)")


def _add_database(parser: Any, example: str = "sqlite:///app.db") -> None:
    parser.add_argument("--db", metavar="URL", help=f"the database, as in {example} (default: $RETINUE_DB)")


def _add_model(parser: CommandParser) -> None:
    parser.add_argument("--model", metavar="M", help="provider:model (default: $RETINUE_MODEL, else offline:rules)")


def _add_consent(parser: CommandParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask before agents write, edit or execute")
    rule = "do not ask about these calls, as in write_file or 'write_file(path=docs/*)'; may be repeated"
    parser.add_argument("--allow", metavar="RULE", action="append", default=[], help=rule)
    parser.add_argument("--read-only", action="store_true", help="refuse whatever would write, edit or execute")


def _add_single(parser: CommandParser, name: str) -> None:
    if name == "demo":
        parser.add_argument("--keep", action="store_true", help="keep the folder, and say where it is")
        return
    if name in ("serve", "worker"):
        (_add_serve if name == "serve" else _add_worker)(parser)
        return
    if name == "queues":
        _add_database(parser, "postgresql://localhost/app")
        return
    if name == "run":
        parser.add_argument("question", metavar="QUESTION", help="what to ask, in quotes")
    _add_workspace(parser)
    parser.add_argument("--agent", metavar="NAME", help="run this sub-agent of the folder itself, without its parent")
    parser.add_argument("--subagents", metavar="DIR", help="use the sub-agents in DIR/subagents as well")
    parser.add_argument("--shell", action="store_true", help="let the agents run any command, as you could yourself")
    _add_consent(parser)
    _add_model(parser)
    parser.add_argument("--thread", metavar="ID", help="the id of the conversation (default: a new one); --db keeps it")
    _add_database(parser)
    parser.add_argument("--max-steps", metavar="N", type=count_from_1, help="stop after so many model calls")


def _add_agents(parser: CommandParser, name: str) -> None:
    parser.add_argument("folder", metavar="DIR", nargs="?", help="the folder of the agents (default: this one)")
    parser.add_argument("--workspace", metavar="DIR", help="the same, as for other commands")


def _add_tasks(parser: CommandParser, name: str) -> None:
    if name == "list":
        parser.add_argument("--thread", metavar="ID", help="only those of one conversation")
        statuses = ("pending", "running", "completed", "failed", "cancelled", "all")
        parser.add_argument("--status", choices=statuses, default="all", metavar="STATUS", help=_one_of(statuses))
    else:
        parser.add_argument("task_id", metavar="TASK_ID", help="the id, or enough of its end to be unique")
    if name == "wait":
        parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after so long")
    place = parser.add_mutually_exclusive_group()
    _add_workspace(place)
    _add_database(place)


def _add_runs(parser: CommandParser, name: str) -> None:
    if name != "list":
        parser.add_argument("run_id", metavar="RUN", help="the id of the run; retinue runs list shows them")
    match name:
        case "list":
            parser.add_argument("--thread", metavar="ID", help="only those of one conversation")
            parser.add_argument("--user", metavar="ID", help="only those of one user")
            statuses = ("queued", *[status.value for status in RunStatus])
            parser.add_argument("--status", choices=statuses, metavar="STATUS", help=_one_of(statuses))
            parser.add_argument("--limit", metavar="N", type=count_from_1, default=50, help="at most N (default: 50)")
        case "events":
            parser.add_argument("--after", metavar="N", type=count_from_0, default=0, help="only those after number N")
            parser.add_argument("--follow", action="store_true", help="continue until the run has ended or waits")
        case "approve":
            parser.add_argument("words", metavar="CALL", nargs="*", help=_CALL)
            parser.add_argument("--args", metavar="JSON", help="call the tool with these arguments instead")
        case "deny":
            parser.add_argument("words", metavar="CALL", nargs="*", help=_CALL)
            parser.add_argument("--message", metavar="TEXT", help="why; the model reads it")
        case "answer":
            parser.usage = "retinue runs answer RUN [CALL] VALUE [options]"
            parser.add_argument("words", metavar="[CALL] VALUE", nargs="+", help=_CALL)
        case "cancel":
            parser.add_argument("--reason", metavar="TEXT", default="cancelled", help="why, for the record")
        case "fork":
            parser.add_argument("--at", metavar="SEQ", type=count_from_1, required=True, help="the number of the event")
            parser.add_argument("--input", metavar="TEXT", help="continue with this message")
        case _:
            pass
    _add_database(parser)
    if name in ("resume", "fork"):
        for option, value, about in (
            ("--approve", "CALL[=JSON]", 'go on, with JSON or {"approved": true}'),
            ("--cancel", "CALL[=REASON]", "do not go on; the model reads why"),
        ):
            parser.add_argument(option, metavar=value, action="append", default=[], help=about)
    if name in (*_STEERED, "cancel"):
        _add_agent_source(parser, asks=name in _STEERED)


def _add_agent_source(parser: CommandParser, *, asks: bool) -> None:
    """Add the options that say where the agent of a run is, and what it may do."""
    engine = "the engine whose workers do the run, if it is not postgres: temporal://host:port/namespace"
    parser.add_argument("--engine", metavar="E", help=engine)
    if asks:
        _add_consent(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="MODULE:ATTR", help=_TARGET)
    _add_workspace(where)
    _add_model(parser)


def _add_db(parser: CommandParser, name: str) -> None:
    _add_database(parser)
    if name == "prune":
        older = "how long ago they ended: 30d, 12h, 90m or 45s"
        parser.add_argument("--older-than", metavar="TIME", type=span, required=True, help=older)
        parser.add_argument("--deltas", action="store_true", help="drop only the deltas, which are most of a log")
        parser.add_argument("--threads", action="store_true", help="drop conversations without runs as well")
    if name != "check":
        parser.add_argument("--dry-run", action="store_true", help="only say what would be done")


_ADD = {
    "": _add_single,
    "agents": _add_agents,
    "tasks": _add_tasks,
    "runs": _add_runs,
    "tokens": _add_tokens,
    "db": _add_db,
}
"""The functions that add the arguments of a group of commands."""


def _one_of(values: Sequence[str]) -> str:
    return f"only these: {', '.join(values)}"


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
    return _number(text, lambda found: 0 <= found < inf, "a number of seconds")


def above_0(text: str) -> float:
    """Read a number above 0."""
    return _number(text, lambda found: 0 < found < inf, "a number above 0")


def _number(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not fits(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return found


def span(text: str) -> float:
    """Read a time such as 30d, in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip().lower())
    found = float(match[1]) * _UNITS[match[2]] if match else float("inf")
    if not isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 30d, 12h, 90m or 45s")
    return found
