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

Variables: RETINUE_DB is the default of --db, RETINUE_MODEL that of --model; NO_COLOR turns off colours."""
_ABOUT = {
    "run": """\
You watch the agents work on it.

The sub-agents that the folder declares in subagents/*.md and .claude/agents/*.md can be given work;
see them with retinue agents list.

You are asked before an agent writes, edits or executes, unless --yes or --allow say otherwise. Without a
terminal such calls are refused.

Without --model and $RETINUE_MODEL, the built-in offline:rules answers. It is rules, not a language model:
it looks for the words of the question in the files and quotes what it finds.""",
    "chat": """\
Each message is a turn of one conversation; the agents answer it as with retinue run, and remember what was said before.
--continue and --thread go on with a conversation that --db, or the server, has kept.

/help shows the keys and commands. Ctrl-C stops the present answer, Ctrl-D or /exit leaves. Without a terminal, lines
are read until the input ends.""",
    "serve": """\
TARGET is a folder, as for retinue run, or MODULE:ATTR of an agent, a list of agents, a Runtime, or a function
that returns one of them.

Whoever uses it sends a token: that of --token, or one of retinue tokens add. Without either, one is made and
printed. Before an agent of a folder writes, edits or executes, its run waits for a decision of a client.

SIGTERM and Ctrl-C: no run begins a model call or a tool call any more, what runs may finish for --grace seconds, and
the next process continues the runs; a second one ends it at once.
docs/server.md says more.""",
    "worker": """\
TARGET is a folder or MODULE:ATTR, as for retinue serve. Runs that were started with that engine, in any process,
are done by any worker that serves their queue and has their agent.

SIGTERM and Ctrl-C: no run begins a model call or a tool call any more, what runs may finish for --grace seconds, other
workers continue the runs, and it exits with 0; a second one ends it at once. docs/scale.md says more.""",
    "demo": """\
In half a minute: three agents side by side, a question three levels down, kill -9 of the process in the middle, another
process that goes on, and what each agent did. The question is answered by itself after 3 seconds if nobody does.

The models are scripted, and it says so: nothing is sent anywhere.""",
    "replay": "Nothing runs: the events are those of the file. docs/terminal.md says more.",
    "queues": "docs/scale.md says more.",
    "agents": """\
Sub-agents are declared in DIR/subagents/*.md and DIR/.claude/agents/*.md; docs/harness.md describes the files.""",
    "tasks": """\
Tasks of runs in a database (retinue run --db) are in that database, others in DIR/agents/<agent>/tasks. --db looks in a
database, --workspace in a folder; without either it is $RETINUE_DB, else this folder. docs/tasks.md says more.""",
    "runs": "docs/operations.md says more.",
    "tokens": "docs/server.md says more.",
    "budgets": "Windows are calendar windows in UTC. docs/budgets.md says more.",
    "db": "docs/operations.md says more.",
    "db check": """\
Exit code 0: no errors, though there may be warnings; 1: errors, such as a damaged file or an older schema; 2: nothing to
check: it is missing, cannot be reached, is no database or is of a newer version.""",
}
"""More on a command, or on those of a group."""
_VERBOSE = "log what happens, and show tracebacks"
_GROUPS = {
    "agents": "list or check the sub-agents that a folder declares",
    "tasks": "list, show, await or cancel background tasks",
    "runs": "list, show, follow, answer, resume, cancel or fork the runs in a database",
    "tokens": "make, list or revoke the tokens of the users of a server",
    "budgets": "list, set or reset what model calls may cost",
    "db": "check, migrate or prune the database of runs",
}
_COMMANDS = {  # the function, what it does, and an example
    "run": ("run:run", "ask one question about the files of a folder", '"Where is the key kept?" --workspace docs'),
    "chat": ("chat:chat", "talk about the files of a folder", "--workspace docs --db sqlite:///app.db"),
    "replay": ("replay:replay", "show a run again that was recorded", "run.jsonl --speed 4"),
    "agents list": ("agents:list_agents", "list the sub-agents of a folder", "examples/workspace"),
    "agents validate": (
        "agents:validate_agents",
        "print the problems; exit 1 if there are errors",
        "examples/workspace",
    ),
    "tasks list": ("tasks:list_tasks", "list tasks, oldest first", "--status running"),
    "tasks show": ("tasks:show_task", "show a task with its result", "9f3c"),
    "tasks wait": ("tasks:wait_task", "wait for a task to end, and show it; exit 1 unless it completed", "9f3c"),
    "tasks cancel": ("tasks:cancel_task", "stop a task, and wait until it has stopped", "9f3c --db sqlite:///app.db"),
    "runs list": ("runs:list_runs", "list runs, newest first", "--status suspended"),
    "runs show": ("runs:show_run", "show the tree of agents of a run, and what it waits for", "RUN"),
    "runs events": ("runs:print_events", "print the events of a run, one a line", "RUN --follow --json"),
    "runs approve": ("steering:approve", "let a waiting call go on", "RUN --args '{\"amount\": 5}'"),
    "runs deny": ("steering:deny", "refuse a waiting call", "RUN --message 'not today'"),
    "runs answer": ("steering:answer", "answer a question with VALUE: JSON, or else text", "RUN 'the red one'"),
    "runs resume": ("steering:resume", "continue a run whose process has died, or answer several questions", "RUN"),
    "runs cancel": ("steering:cancel", "stop a run, and wait until it has stopped", "RUN --reason 'too slow'"),
    "runs send": ("steering:send", "give a run at work a message", "RUN 'only the last week'"),
    "runs fork": ("steering:fork", "start a new run that continues as another stood after an event", "RUN --at 12"),
    "serve": ("serve:serve", "serve agents over HTTP", "examples/workspace --db sqlite:///app.db"),
    "worker": (
        "worker:work",
        "work on the runs that an engine schedules",
        "app:agents --db postgresql://localhost/app --queues default,gpu",
    ),
    "queues": (
        "worker:show_queues",
        "show what waits in the queues of a database, its workers and schedules",
        "--db postgresql://localhost/app",
    ),
    "tokens add": ("tokens:add_token", "make a token, and print it as the last line", "ann --db sqlite:///app.db"),
    "tokens list": ("tokens:list_tokens", "list tokens, without their secrets", "--json"),
    "tokens revoke": ("tokens:revoke_token", "make a token worthless", "tok_7aa7c7"),
    "budgets list": ("budgets:list_budgets", "list budgets and what is spent of them", "--db sqlite:///app.db"),
    "budgets set": (
        "budgets:set_budget",
        "set a budget, for all or for one user or agent",
        "user/day --cost 5 --of ann",
    ),
    "budgets reset": ("budgets:reset_budget", "count nothing as spent in the present window", "user/day --of ann"),
    "db check": ("database:check", "read everything, change nothing, and print what is wrong", "--json"),
    "db migrate": ("database:migrate", "bring a database to the schema of this version, or create one", "--dry-run"),
    "db prune": ("database:prune", "drop runs that ended long ago, while others work", "--older-than 30d --dry-run"),
    "demo": ("demo:demo", "see it work, without network or key", "--keep"),
}
_CONSENT = "--yes --allow --read-only"
_FOLDER = (
    f"--workspace --agent --subagents --shell {_CONSENT} --model --context-window --thread --db --max-steps "
    "--server --token --plain --ascii"
)
_AGENT_OF_RUN = "--target|--workspace --model"
_ARGUMENTS = {  # names in _OPTIONS; those joined by | exclude each other
    "run": f"question {_FOLDER} --record",
    "replay": "file --speed --plain --ascii",
    "chat": f"{_FOLDER} --continue",
    "agents list": "folder --workspace",
    "agents validate": "folder --workspace",
    "tasks list": "--thread --status --workspace|--db",
    "tasks show": "task_id --workspace|--db",
    "tasks wait": "task_id --timeout --workspace|--db",
    "tasks cancel": "task_id --workspace|--db",
    "runs list": "--thread --user --status --limit --db",
    "runs show": "run_id --db",
    "runs events": "run_id --after --follow --db",
    "runs approve": f"run_id words --args --db --engine {_CONSENT} {_AGENT_OF_RUN}",
    "runs deny": f"run_id words --message --db --engine {_CONSENT} {_AGENT_OF_RUN}",
    "runs answer": f"run_id words --db --engine {_CONSENT} {_AGENT_OF_RUN}",
    "runs resume": f"run_id --db --approve --cancel --engine {_CONSENT} {_AGENT_OF_RUN}",
    "runs cancel": f"run_id --reason --db --engine {_AGENT_OF_RUN}",
    "runs send": f"run_id message --ns --db --engine {_AGENT_OF_RUN}",
    "runs fork": f"run_id --at --input --db --approve --cancel --engine {_CONSENT} {_AGENT_OF_RUN}",
    "serve": "target --host --port --db --token|--token-file|--no-auth|--user-header --public --shared-files --cors --workers --engine "
    f"--tls-cert --tls-key --rate --max-streams --max-takeovers --grace --grpc-port --a2a-key --push-private --config {_CONSENT} --model "
    "--context-window --listen-fd",
    "worker": f"target --db --engine --queues --slots --lease --max-takeovers --grace --metrics --config {_CONSENT} --model --context-window",
    "queues": "--db",
    "tokens add": "user --scopes --shared-files --db",
    "tokens list": "--db",
    "tokens revoke": "token_id --db",
    "budgets list": "--db",
    "budgets set": "budget --cost --tokens --of --unset --db",
    "budgets reset": "budget --of --db",
    "db check": "--db",
    "db migrate": "--db --dry-run",
    "db prune": "--db --older-than --deltas --threads --dry-run",
    "demo": "--web --keep --plain --ascii",
}


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
    for name in dict.fromkeys(words.partition(" ")[0] for words in _COMMANDS):
        if name in _GROUPS:
            group = commands.add_parser(name, help=_GROUPS[name])
            group.complete = partial(_complete_group, group, name)
        else:
            _add_command(commands, name)
    return parser


def _complete_group(group: CommandParser, name: str) -> None:
    """Add the commands of a group."""
    group.description = _about(_GROUPS[name], name)
    group.set_defaults(command=None, parser=group)
    actions = group.add_subparsers(title="actions", metavar="ACTION")
    for words in _COMMANDS:
        if words.startswith(f"{name} "):
            _add_command(actions, words)


def _add_command(place: Any, words: str) -> None:
    command: CommandParser = place.add_parser(words.rpartition(" ")[2], help=_COMMANDS[words][1])
    command.complete = partial(_complete, command, words)


def _complete(command: CommandParser, words: str) -> None:
    """Add all of a command but its name."""
    function, about, example = _COMMANDS[words]
    group = words.rpartition(" ")[0]
    command.description = _about(about, words if words in _ABOUT else group)
    command.epilog = _examples(f"{words} {example}".replace("RUN", "run_7aa7c7"))
    for names in f"{_ARGUMENTS[words]} --json".split():
        place = command.add_mutually_exclusive_group() if "|" in names else command
        for name in names.split("|"):
            keys = (f"{words} {name}", f"{group} {name}", name)
            place.add_argument(name, **next(_OPTIONS[key] for key in keys if key in _OPTIONS))
    if words == "runs answer":
        command.usage = "retinue runs answer RUN [CALL] VALUE [options]"
    command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=_VERBOSE)
    command.set_defaults(command=function, parser=command)


def _about(about: str, words: str) -> str:
    """Return a description in lines."""
    first, *others = _ABOUT[words].split("\n\n")
    text = f"{about[0].upper()}{about[1:]}. {first}"
    return "\n\n".join(fill(part, 100) for part in (text, *others))


def _examples(*examples: str) -> str:
    return "\n  retinue ".join(["Examples:", *examples])


_MAX_INTEGER = 2**63 - 1
"""The largest integer of a database."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= _MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {'above 0' if least else 'of 0 or more'}")
    return int(text)


def _number(text: str, what: str, *, allows_0: bool) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < inf or not (found or allows_0):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return found


dollars = partial(_number, what="a number of dollars, 0 or more", allows_0=True)
count_from_0, count_from_1 = partial(_integer, least=0), partial(_integer, least=1)
seconds = partial(_number, what="a number of seconds", allows_0=True)
above_0 = partial(_number, what="a number above 0", allows_0=False)


def span(text: str) -> float:
    """Read a time such as 30d, in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip().lower())
    found = float(match[1]) * _UNITS[match[2]] if match else float("inf")
    if not isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 30d, 12h, 90m or 45s")
    return found


def _value(metavar: str, about: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": about, **more}


def _flag(about: str) -> dict[str, Any]:
    return {"action": "store_true", "help": about}


def _one_of(*values: str, **more: Any) -> dict[str, Any]:
    return _value("STATUS", f"only these: {', '.join(values)}", choices=values, **more)


def _database(example: str) -> dict[str, Any]:
    return _value("URL", f"the database, as in {example} (default: $RETINUE_DB)")


_REPEATED: dict[str, Any] = {"action": "append", "default": []}
_CALLS = "the call: its id, ticket id or path; needed where several calls wait"
_ENGINE = "postgres, or temporal://host:port/namespace"
_OPTIONS: dict[str, dict[str, Any]] = {  # where commands differ, by the command or its group
    "--a2a-key": _value("F", "a file with an EC key (P-256, PEM) that signs the A2A cards"),
    "--after": _value("N", "only those after number N", type=count_from_0, default=0),
    "--agent": _value("NAME", "run this sub-agent of the folder itself, without its parent"),
    "--allow": _value(
        "RULE",
        "do not ask about these calls, as in write_file or 'write_file(path=docs/*)'; may be repeated",
        **_REPEATED,
    ),
    "--approve": _value("CALL[=JSON]", 'go on, with JSON or {"approved": true}', **_REPEATED),
    "--args": _value("JSON", "call the tool with these arguments instead"),
    "--at": _value("SEQ", "the number of the event", type=count_from_1, required=True),
    "--cancel": _value("CALL[=REASON]", "do not go on; the model reads why", **_REPEATED),
    "--ascii": _flag("draw with ASCII only"),
    "--continue": {
        "action": "store_true",
        "dest": "goes_on",
        "help": "go on with the last conversation of the database",
    },
    "--config": _value("FILE", "settings in TOML: [budgets], [rates]"),
    "--cost": _value("DOLLARS", "the dollars that each window allows", type=dollars),
    "--cors": _value(
        "ORIGIN",
        "an origin whose pages may use it, as in https://app.example.com; may be repeated",
        action="extend",
        nargs="+",
        default=[],
    ),
    "--db": _database("sqlite:///app.db"),
    "worker --db": _database("postgresql://localhost/app"),
    "queues --db": _database("postgresql://localhost/app"),
    "--deltas": _flag("drop only the deltas, which are most of a log"),
    "--dry-run": _flag("only say what would be done"),
    "runs --engine": _value("E", f"the engine whose workers do the run, if it is not postgres: {_ENGINE[13:]}"),
    "serve --engine": _value("E", f"have workers do the runs: {_ENGINE}"),
    "worker --engine": _value("E", f"{_ENGINE} (default: postgres)", default="postgres"),
    "--follow": _flag("continue until the run has ended or waits"),
    "--grace": _value(
        "S",
        "seconds in which model calls and tool calls may finish when it is stopped (default: 10)",
        type=seconds,
        default=10.0,
    ),
    "--grpc-port": _value(
        "PORT", "the port of A2A over gRPC (default: the port after --port); 0 is any that is free", type=count_from_0
    ),
    "--host": _value("HOST", "the address to listen on (default: 127.0.0.1)", default="127.0.0.1"),
    "--input": _value("TEXT", "continue with this message"),
    "--json": _flag("print JSON"),
    "--keep": _flag("keep the folder, and say where it is"),
    "--lease": _value(
        "S",
        "seconds without a sign of life after which others take its runs over (default: 30)",
        type=above_0,
        default=30.0,
    ),
    "--limit": _value("N", "at most N (default: 50)", type=count_from_1, default=50),
    "--listen-fd": {"type": count_from_0, "help": argparse.SUPPRESS},
    "--context-window": _value(
        "N", "the tokens that the model reads (default: what is known of it)", type=count_from_1
    ),
    "--max-steps": _value("N", "stop after so many model calls", type=count_from_1),
    "--max-takeovers": _value(
        "N",
        "give a run up whose process has died more often than this, each time without progress (default: 5)",
        type=count_from_0,
        default=5,
    ),
    "--max-streams": _value("N", "open streams for each user", type=count_from_1),
    "--message": _value("TEXT", "why; the model reads it"),
    "--metrics": _value("HOST:PORT", "serve figures for Prometheus there"),
    "--model": _value("M", "provider:model (default: $RETINUE_MODEL, else offline:rules)"),
    "--no-auth": _flag("ask for no token: whoever reaches the port is let in"),
    "--of": _value("NAME", "only for this user or agent", dest="key"),
    "--older-than": _value("TIME", "how long ago they ended: 30d, 12h, 90m or 45s", type=span, required=True),
    "--plain": _flag("print lines, draw nothing: for screen readers and simple terminals"),
    "--port": _value("PORT", "default: 8123; 0 is any that is free", type=count_from_0, default=8123),
    "--public": _flag("allow --no-auth on an address that others can reach"),
    "--push-private": _flag("let A2A push notifications go to this machine and its network"),
    "--queues": _value("A,B", "the queues to take runs from (default: default)", default="default"),
    "--record": _value("FILE", "write the events to a file that retinue replay shows"),
    "--rate": _value("R", "requests a second for each user", type=above_0),
    "--read-only": _flag("refuse whatever would write, edit or execute"),
    "--reason": _value("TEXT", "why, for the record", default="cancelled"),
    "--scopes": _value(
        "SCOPES",
        "what it allows: some of read,run,answer,admin (default: read,run,answer)",
        default="read,run,answer",
    ),
    "--server": _value("URL", "talk to the agents of a server (retinue serve), as in http://127.0.0.1:8123"),
    "--shared-files": _flag("let all users work on the same files, which their agents read and overwrite"),
    "--shell": _flag("let the agents run any command, as you could yourself"),
    "--slots": _value("N", "runs at once (default: 16)", type=count_from_1, default=16),
    "--speed": _value("N", "so many times as fast (default: 1)", type=above_0, default=1.0),
    "runs --status": _one_of("queued", *[status.value for status in RunStatus]),
    "tasks --status": _one_of("pending", "running", "completed", "failed", "cancelled", "all", default="all"),
    "--subagents": _value("DIR", "use the sub-agents in DIR/subagents as well"),
    "--target": _value(
        "MODULE:ATTR",
        "the agent of the run in your code: an agent, a list of agents, or a function that returns them or a Runtime",
    ),
    "--thread": _value("ID", "the id of the conversation (default: a new one); --db keeps it"),
    "runs --thread": _value("ID", "only those of one conversation"),
    "tasks --thread": _value("ID", "only those of one conversation"),
    "--threads": _flag("drop conversations without runs as well"),
    "--timeout": _value("SECONDS", "give up after so long", type=seconds),
    "--tls-cert": _value("F", "a chain of certificates (PEM): serve https, and gRPC with TLS"),
    "--tls-key": _value("F", "the private key of the certificate (PEM)"),
    "--tokens": _value("N", "the tokens that each window allows", type=count_from_0),
    "--token": _value("T", "the token of the user local (default: a new one, unless the database has tokens)"),
    "run --token": _value("T", "the token of that server"),
    "chat --token": _value("T", "the token of that server"),
    "--token-file": _value("F", "a file with that token"),
    "--unset": _flag("take the budget back: what programs set holds again"),
    "--user": _value("ID", "only those of one user"),
    "--user-header": _value("NAME", "the header in which a proxy in front names the user"),
    "--web": _flag("show it on the page instead"),
    "--workers": _value("N", "processes that share the port", type=count_from_1, default=1),
    "--workspace": _value("DIR", "the folder of the agents (default: this one)"),
    "agents --workspace": _value("DIR", "the same, as for other commands"),
    "--yes": _flag("do not ask before agents write, edit or execute"),
    "file": _value("FILE", "what retinue run --record has written"),
    "budget": _value("BUDGET", "user/day, runtime/hour, agent/month and so on"),
    "folder": _value("DIR", "the folder of the agents (default: this one)", nargs="?"),
    "question": _value("QUESTION", "what to ask, in quotes"),
    "message": _value("TEXT", "what the model of the run reads with its next request"),
    "--ns": _value("NS", "for the sub-agent at this namespace, as runs events shows it: tools:c1|tools:c2"),
    "run_id": _value("RUN", "the id of the run; retinue runs list shows them"),
    "target": _value("TARGET", "a folder, or MODULE:ATTR"),
    "task_id": _value("TASK_ID", "the id, or enough of its end to be unique"),
    "token_id": _value("ID", "the id of the token; retinue tokens list shows them"),
    "user": _value("USER", "whose token it is; users do not see each other's runs"),
    "words": _value("CALL", _CALLS, nargs="*"),
    "runs answer words": _value("[CALL] VALUE", _CALLS, nargs="+"),
}
