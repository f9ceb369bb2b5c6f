"""Declarations in code: three ways that exclude each other, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, Limits, RunStatus, Runtime, SubagentDeclaration
from retinue.testing import RecordingSink
from tests.subagents.stage import harness, stage, system


def test_the_defaults() -> None:
    declared = SubagentDeclaration("a", "b")
    assert (declared.mode, declared.max_steps, declared.source) == ("isolated", 10, "code")
    nothing = ("workspace", "inline", "url", "headers", "model", "tools", "builtin_tools", "timeout", "limits")
    assert [getattr(declared, name) for name in nothing] == [None] * len(nothing)
    assert not declared.is_remote


@pytest.mark.parametrize(
    "given",
    [
        {"workspace": "defs"},
        {"workspace": Path("defs"), "mode": "shared"},
        {"inline": "You are it."},
        {"url": "https://host.example/x", "headers": {"Authorization": "Bearer x"}},
        {"workspace": "defs", "inline": " \n"},
        {"url": "http://host", "inline": ""},
        {"limits": Limits(tokens=5), "timeout": 0.5},
    ],
)
def test_each_way_on_its_own_is_taken(given: dict[str, Any]) -> None:
    declared = SubagentDeclaration("a", "b", **given)
    assert {name: getattr(declared, name) for name in given} == given
    assert declared.is_remote is ("url" in given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"url": "http://h", "workspace": "w"}, "url and workspace exclude each other"),
        ({"url": "http://h", "inline": "i"}, "url and inline exclude each other"),
        ({"workspace": "w", "inline": "i"}, "workspace and inline exclude each other"),
        ({"url": "http://h", "workspace": "w", "inline": "i"}, "url and workspace exclude each other"),
        ({"headers": {"a": "b"}}, "headers are sent to a url, and there is none"),
        ({"url": "ftp://h"}, "url must begin with http:// or https:// and name a host"),
        ({"url": "http://"}, "url must begin with http:// or https:// and name a host"),
        ({"url": ""}, "url must begin with http:// or https:// and name a host"),
        ({"url": 5}, "url is text without white space, not 5"),
        ({"url": "http://h\n/x"}, "url is text without white space, not 'http://h\\n/x'"),
        ({"url": "http://h:port"}, "url cannot be read: Port could not be cast to integer value as 'port'"),
        ({"url": "http://h:99999"}, "url cannot be read: Port out of range 0-65535"),
        ({"url": "http://[::1"}, "url cannot be read: Invalid IPv6 URL"),
        ({"url": "http://h", "headers": [("a", "b")]}, "headers is a dict {name: value}"),
        ({"url": "http://h", "headers": {"a": "b\r\nc: d"}}, "'a' is not a header that can be sent"),
        ({"url": "http://h", "headers": {"a b": "c"}}, "'a b' is not a header that can be sent"),
        ({"mode": "open"}, "mode is 'isolated' or 'shared', not 'open'"),
        ({"description": None}, "description is text, not None"),
        ({"inline": b"i"}, "inline is text, not b'i'"),
        ({"workspace": 5}, "workspace is the path of a folder, not 5"),
        ({"model": 5}, "model is a 'provider:model' string or a Model object, not 5"),
        ({"model": ""}, "model is 'provider:model', such as 'openai:gpt-4o', not ''"),
        ({"limits": {"steps": 2}}, "limits is not {'steps': 2}: write Limits(depth=…, tokens=…)"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"max_steps": "8"}, "max_steps must be at least 1, got '8'"),
        ({"max_steps": 2.5}, "max_steps must be at least 1, got 2.5"),
        ({"timeout": "5"}, "timeout must be above 0 seconds, got '5'"),
        ({"timeout": 0}, "timeout must be above 0 seconds, got 0"),
        ({"timeout": -1}, "timeout must be above 0 seconds, got -1"),
        ({"timeout": float("nan")}, "timeout must be above 0 seconds, got nan"),
        ({"tools": "lookup"}, "tools is a list of tool names, not the text 'lookup'"),
        ({"tools": [1]}, "tools is a list of tool names, not (1,)"),
        ({"tools": 1}, "tools is a list of tool names, not 1"),
        ({"builtin_tools": ["raed_file"]}, "there is no built-in tool 'raed_file'; there are read_file, "),
    ],
)
def test_what_cannot_be_is_refused_at_once(given: dict[str, Any], problem: str) -> None:
    values: dict[str, Any] = {"name": "a", "description": "b", **given}
    with pytest.raises(ValueError, match="sub-agent 'a'") as caught:
        SubagentDeclaration(**values)
    assert isinstance(caught.value, ConfigurationError)
    assert str(caught.value).startswith(f"sub-agent 'a': {problem}")


@pytest.mark.parametrize("description", ["", " \n"])
def test_a_description_is_needed(description: str) -> None:
    with pytest.raises(ConfigurationError, match="sub-agent 'a' needs a description: the model decides by it"):
        SubagentDeclaration("a", description)


async def test_headers_are_shown_nowhere(tmp_path: Path) -> None:
    secret = "Bearer top-secret"
    declared = SubagentDeclaration("far", "d", url="http://host.example", headers={"Authorization": secret})
    agent = harness(tmp_path, subagents=[declared])
    sink = RecordingSink()
    result = await Runtime([agent]).run("boss", "go", sinks=[sink])
    assert result.status is RunStatus.COMPLETED
    assert "- `far`: d" in system(stage(agent).requests[0])
    shown = [repr(declared), repr(agent), repr(stage(agent).requests), repr(sink.events), repr(result)]
    assert [text for text in shown if "top-secret" in text] == []
