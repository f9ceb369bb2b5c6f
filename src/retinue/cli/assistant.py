"""The agent of the command line: a harness on a folder, with what the folder says about itself and declares."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable

from ..core.errors import ConfigurationError, FilesystemError
from ..core.model import Model
from ..models.registry import resolve_model
from ..subagents.declarations import SubagentDeclaration
from ..subagents.harness import HarnessAgent
from ..workspace import AGENTS_FILE, LocalFilesystem
from .text import count

NAME = "assistant"
DEFAULT_MODEL = "offline:rules"
MODEL_VARIABLE = "RETINUE_MODEL"
MOST_STEPS = 16
MOST_BYTES = 32_000
"""What is taken of AGENTS.md, which goes to the model with every request."""

_INSTRUCTIONS = (
    "You are an assistant that works on the files of one folder, the workspace, with the tools you have. "
    "Look before you answer, say where you found what you say as path:line, and say so when you found nothing. "
    "Change files only when you are asked to."
)


def make_assistant(
    workspace: str,
    model: Model,
    max_steps: int | None = None,
    *,
    shell: bool = False,
    subagents: Iterable[SubagentDeclaration] = (),
) -> HarnessAgent:
    """The agent "assistant" on a folder; raises ConfigurationError where it cannot work there."""
    check_workspace(workspace)
    filesystem = LocalFilesystem(workspace)
    own = _read_agents_file(filesystem)
    return HarnessAgent(
        NAME,
        model,
        f"{_INSTRUCTIONS}\n\n# {AGENTS_FILE} of the workspace\n\n{own}" if own else _INSTRUCTIONS,
        max_steps=max_steps or MOST_STEPS,
        workspace=workspace,
        filesystem=filesystem,
        subagents=subagents,
        disable_shell=not shell,
        tells_agents_file=False,
    )


def choose_model(given: str | None) -> Model:
    """The model named on the command line or in the environment, else the built-in rules."""
    where = "--model" if given is not None else f"${MODEL_VARIABLE}"
    try:
        return resolve_model(named_model(given), where)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{exc}; give one in {where}, for example {DEFAULT_MODEL}") from exc


def named_model(given: str | None) -> str:
    """The name of that model."""
    return (given if given is not None else os.environ.get(MODEL_VARIABLE)) or DEFAULT_MODEL


def is_default_model(given: str | None) -> bool:
    return given is None and not os.environ.get(MODEL_VARIABLE)


def check_workspace(path: str, how: str = "with --workspace") -> None:
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        raise ConfigurationError(f"there is no folder {path!r}: create it, or give another {how}") from None
    except NotADirectoryError:
        raise ConfigurationError(f"{path!r} is a file: give the folder it is in {how}") from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigurationError(f"cannot work in {path!r}: {reason}: give another folder {how}") from exc


def _read_agents_file(filesystem: LocalFilesystem) -> str:
    """The text of AGENTS.md, "" where there is none; what is over the limit is cut where it shows."""
    try:
        if not filesystem.exists(AGENTS_FILE):
            return ""
        with filesystem.open(AGENTS_FILE) as stream:
            data = stream.read(MOST_BYTES)
            left = os.fstat(stream.fileno()).st_size - len(data)
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=left <= 0)
    except (FilesystemError, OSError) as exc:
        raise ConfigurationError(f"cannot read {AGENTS_FILE} of the workspace: {exc}: correct or remove it") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{AGENTS_FILE} of the workspace is not UTF-8 text: save it as UTF-8") from exc
    return f"{text}\n[{count(left, 'more byte')} left out]" if left > 0 else text
