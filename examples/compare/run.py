"""Run the programs of this folder against a scripted model server on loopback, count their lines, show them in docs/compare.md.

    python examples/compare/run.py                 run Retinue's and Pydantic AI's programs
    python examples/compare/run.py --langgraph     LangGraph's too: pip install langchain langchain-anthropic deepagents
    python examples/compare/run.py --write         write docs/compare.md

Needs: pip install "pydantic-ai-slim[anthropic]" pytest
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/compare.md"
LIBRARIES = {"retinue": "Retinue", "pydantic_ai": "Pydantic AI", "langgraph": "LangGraph"}


class Topic(NamedTuple):
    title: str
    prints: str
    """A part of what each program prints."""


TOPICS = {
    "tool_argument": Topic("A tool with a pydantic argument", "Ordered 2 x rope."),
    "structured_output": Topic("Structured output", "ANN 120.5"),
    "parallel_children": Topic("Parallel children, told apart by namespace", "Go is small."),
    "blocking_hook": Topic("A hook that blocks a call", "Refunds over 100 need a manager."),
    "stop_policy": Topic("A stop policy", "the model repeats a call"),
    "custom_model": Topic("A custom model", "You said: hello"),
    "testing": Topic("A test of your own agent", "1 passed"),
}

INTRODUCTION = """\
# The same program in Retinue, Pydantic AI and LangGraph

Seven small programs, each written the way the library's own documentation does it: Pydantic AI with its `Agent` and
`Hooks`, LangGraph with `create_agent`, its middleware and `create_deep_agent`. They are files in `examples/compare/`, and
`python examples/compare/run.py` runs them against a model server on loopback. Retinue's pass `pyright --strict` and `mypy --strict`.

Lines that are neither blank nor imports:

"""


def answer(request: dict[str, Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the text and the tool calls with which the scripted model answers."""
    question = _texts(next(message for message in request["messages"] if message["role"] == "user"))
    results = _texts(request["messages"][-1], "tool_result")
    tools = [tool["name"] for tool in request.get("tools", [])]
    if "120.50" in question:
        invoice = {"customer": "Ann", "total": 120.5}
        return ("", [(tools[0], invoice)]) if tools else (json.dumps(invoice), [])
    if "Find the key" in question:
        return "", [("look", {"place": "drawer"})]
    if "ropes" in question and not results:
        return "", [("place_order", {"order": {"item": "rope", "count": 2}})]
    if "Refund" in question and not results:
        return "", [("refund", {"amount": 500})]
    if "Compare" in question and not results:
        if "research" in tools:
            return "", [("research", {"topic": topic}) for topic in ("Rust", "Go")]
        return "", [("task", {"subagent_type": "researcher", "description": topic}) for topic in ("Rust", "Go")]
    return results or f"{question} is small.", []


def _texts(part: Any, kind: str = "text") -> str:
    """Return the text of a message, or of the tool results in it."""
    if isinstance(part, str):
        return part if kind == "text" else ""
    if isinstance(part, list):
        return "".join(_texts(item, kind) for item in part)
    if part.get("type") == "text":
        return part["text"] if kind == "text" else ""
    inner = "text" if part.get("type") == kind else kind
    return _texts(part.get("content", ""), inner)


class Handler(BaseHTTPRequestHandler):
    """Speaks Anthropic's messages, streamed or whole."""

    protocol_version = "HTTP/1.1"
    calls = itertools.count(1)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text, calls = answer(request)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        for name, args in calls:
            blocks.append({"type": "tool_use", "id": f"call_{next(self.calls)}", "name": name, "input": args})
        usage = {"input_tokens": 1, "output_tokens": 1}
        reason = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": request["model"], "usage": usage}
        if not request.get("stream"):
            self._send("application/json", json.dumps(message | {"content": blocks} | reason))
            return
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": message | {"content": [], "stop_reason": None}}
        ]
        for n, block in enumerate(blocks):
            if block["type"] == "text":
                start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                start = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append({"type": "content_block_start", "index": n, "content_block": start})
            events.append({"type": "content_block_delta", "index": n, "delta": delta})
            events.append({"type": "content_block_stop", "index": n})
        events += [{"type": "message_delta", "delta": reason, "usage": usage}, {"type": "message_stop"}]
        self._send("text/event-stream", "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events))

    def _send(self, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@contextmanager
def scripted_server() -> Iterator[dict[str, str]]:
    """Yield the environment in which "anthropic:…" means the scripted model."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield {**os.environ, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "LANGSMITH_TRACING": "false"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_program(program: Path, environment: dict[str, str], python: str = sys.executable) -> str:
    """Run a program and return what it printed."""
    command = [python]
    if program.parent.name == "testing":
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        environment = {**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=60, env=environment, cwd=HERE)
    if done.returncode:
        raise RuntimeError(f"{program.relative_to(HERE)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def count_lines(program: Path) -> int:
    """Count the lines of a program that are neither blank nor imports."""
    lines = [line for line in program.read_text().splitlines() if line.strip()]
    return len([line for line in lines if not line.startswith(("import ", "from "))])


def show_all() -> str:
    """Return docs/compare.md: a table of the line counts, then the programs."""
    counts = {topic: [count_lines(HERE / topic / f"with_{name}.py") for name in LIBRARIES] for topic in TOPICS}
    rows = [f"| {TOPICS[topic].title} | {' | '.join(map(str, counted))} |" for topic, counted in counts.items()]
    text = (
        INTRODUCTION + f"| program | {' | '.join(LIBRARIES.values())} |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    for topic, (title, _) in TOPICS.items():
        text += f"\n## {title}\n"
        for name, label in LIBRARIES.items():
            text += f"\n{label}:\n\n```py\n{(HERE / topic / f'with_{name}.py').read_text()}```\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--langgraph", action="store_true", help="run LangGraph's programs too")
    parser.add_argument("--write", action="store_true", help="write docs/compare.md instead")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(show_all())
        return
    libraries = [name for name in LIBRARIES if arguments.langgraph or name != "langgraph"]
    with scripted_server() as environment:
        for topic, (_, expected) in TOPICS.items():
            for library in libraries:
                program = HERE / topic / f"with_{library}.py"
                printed = run_program(program, environment)
                if expected not in printed:
                    raise RuntimeError(f"{topic} with {library} printed {printed!r}, not {expected!r}")
                print(f"{topic:20}{library:14}{count_lines(program):4} lines")


if __name__ == "__main__":
    main()
