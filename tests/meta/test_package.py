"""What the package promises about itself."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import retinue
from retinue import Event, errors, events
from retinue.core import errors as core_errors

ROOT = Path(__file__).parents[2]


TOPICS = (
    "backends client errors events messages models plugins runs state stores subagents tasks telemetry temporal testing tools workers workspace"
).split()
MODULES = ["retinue", *[f"retinue.{topic}" for topic in TOPICS]]

ROOT_NAMES = """
A2AAgent Agent Budget Decision HarnessAgent Limits MAX_SPAWN_DEPTH Run RunIdentity RunResult RunState RunStatus Runtime Usage
CancellationToken ProgressStatus ResumeMode SuspendTicket Tool ToolCallStatus ToolContext ToolDescriptor
ToolOutput ToolResult ToolStatus file_tools tool
CallChunk DataPart FilePart ImagePart Message Model ModelRequest PartChunk Rate ReceiptPart TextChunk ToolCall TurnEnd
MutationBatch PersistedState StateCommand StateKey StateStore UnknownKeyPolicy
Block Compaction HookContext Permissions Plugin Registrar SetResult Suspend Todo
Event NullSink Sink Telemetry
Backend BackendProfile Child ChildErrorForwarding ParentContext StreamedChild StreamingPassthroughSink
SubagentDeclaration run_child_agent run_child_agent_checked run_streaming_subagent
LocalFilesystem SandboxFilesystem StoreFilesystem
ChildAgentError ConfigurationError DecisionRefused Denied ExecutionBackendError ExecutionFailed InternalError
InvalidArguments ModelError NotFound RetinueError RunNotCompleted ThreadBusy ToolCancelled ToolError ToolTimeout UnknownAgent UnknownRun
__version__
"""


def test_the_names_at_the_root() -> None:
    """A name that few programs need belongs into a module of its topic."""
    assert retinue.__all__ == sorted(ROOT_NAMES.split())
    assert len(retinue.__all__) <= 92


def test_every_module_at_the_top_is_a_topic() -> None:
    found = {path.stem for path in (ROOT / "src/retinue").glob("[a-z]*.py")}
    assert found <= {*TOPICS}
    assert (ROOT / "docs/reference.md").read_text().count("\n## ") == len(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_public_names(name: str) -> None:
    """They are sorted, they exist, and each says what it is."""
    module = importlib.import_module(name)
    assert module.__doc__
    assert module.__all__ == sorted(set(module.__all__))
    for public in module.__all__:
        value = getattr(module, public)
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or value.__doc__, public


def test_help_works_on_every_module() -> None:
    """With it on every public name: the help of a module has that of all of them."""
    for name in MODULES:
        assert pydoc.render_doc(importlib.import_module(name))


@pytest.mark.parametrize("value", [retinue.tool, retinue.Agent])
def test_help_explains_every_argument_with_an_example(value: Any) -> None:
    text = inspect.getdoc(value) or ""  # without the indentation, which Python 3.13 removes itself
    assert "\n    @tool" in text or "\n    agent = Agent(" in text
    for name, parameter in inspect.signature(value).parameters.items():
        assert parameter.kind is parameter.POSITIONAL_ONLY or f"\n{name}: " in text, name


def test_every_concrete_event_is_public() -> None:
    assert {kind.__name__ for kind in Event.__subclasses__()} <= set(events.__all__)
    assert set(get_args(events.AnyEvent)) == set(Event.__subclasses__())


def test_every_error_is_public() -> None:
    made = [value for name, value in vars(core_errors).items() if not name.startswith("_")]
    own = {kind.__name__ for kind in made if inspect.isclass(kind) and issubclass(kind, retinue.RetinueError)}
    assert own == set(errors.__all__)


def test_importing_loads_no_server_database_terminal_or_model_layer() -> None:
    heavy = ["pydantic", "rich", "argparse", "httpx", "starlette", "sqlite3", "psycopg", "retinue.cli", "http.client"]
    heavy += ["opentelemetry", "genai_prices", "httpx2"]
    heavy += ["aiohttp", "openai", "anthropic", "pydantic_ai", "urllib.request", "retinue.models.providers"]
    code = f"import sys, retinue, retinue.testing; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {retinue.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("module", "extra", "missing"), [("server", "server", "starlette"), ("temporal", "temporal", "temporalio")]
)
def test_a_part_that_is_not_installed_says_what_to_install(module: str, extra: str, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import retinue.{module}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stderr.endswith(f'ModuleNotFoundError: retinue.{module} needs: pip install "retinue[{extra}]"\n')
