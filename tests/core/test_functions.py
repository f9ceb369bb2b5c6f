"""A function is a tool: what its signature and docstring become."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

from retinue import Agent, Runtime, Tool, ToolContext, ToolDescriptor, tool
from retinue.testing import ScriptedModel, call, say


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Box(BaseModel):
    corner: Point
    label: str = Field(default="", max_length=5)


class Options(TypedDict, total=False):
    deep: bool


async def outcome(function: Any, args: dict[str, Any] | str) -> str:
    model = ScriptedModel([call("f", args), say("ok")])
    result = await Runtime([Agent("a", model, tools=[function])]).run("a", "go")
    return next(m.text for m in result.messages if m.role == "tool")


def test_name_docstring_and_hints_make_the_descriptor() -> None:
    @tool
    async def search(query: str, top_k: int = 5, tags: list[str] | None = None, ctx: ToolContext | None = None) -> str:
        """Search the documents.

        Finds whole words only.

        Args:
            query: What to look for,
                in any language.
            top_k (int): How many to return.

        Returns:
            The hits.
        """
        return query

    assert isinstance(search, Tool)
    assert (search.name, search.descriptor.id) == ("search", "search")
    assert search.descriptor.description == "Search the documents.\n\nFinds whole words only."
    assert search.descriptor.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in any language."},
            "top_k": {"type": "integer", "description": "How many to return.", "default": 5},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_options_of_the_decorator() -> None:
    @tool(name="find", id="f1", description="Find it", category="data", timeout=3, retries=1, idempotent=True)
    def search(schema: str, _x: int = 1) -> str:
        return schema

    d = search.descriptor
    assert (d.id, d.name, d.description, d.category) == ("f1", "find", "Find it", "data")
    assert (search.timeout, search.retries, search.idempotent) == (3, 1, True)
    assert search("called") == "called"


def test_plain_functions_are_tools_too() -> None:
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert list(Agent("a", tools=[add]).toolbox) == ["add"]


async def test_rich_types_arrive_as_objects() -> None:
    seen: list[Any] = []

    @tool
    async def f(
        point: Point, box: Box, colour: Colour, when: date, options: Options, n: Annotated[int, Field(ge=1)] = 3
    ) -> str:
        """F."""
        seen.extend([point, box, colour, when, options, n])
        return "ok"

    args = {
        "point": {"x": 1},
        "box": {"corner": {"x": 2, "y": 3}, "label": "b"},
        "colour": "red",
        "when": "2026-11-15",
        "options": {"deep": True},
    }
    assert await outcome(f, args) == "ok"
    assert seen == [Point(1), Box(corner=Point(2, 3), label="b"), Colour.RED, date(2026, 11, 15), {"deep": True}, 3]
    assert "title" not in str(f.descriptor.parameters)


async def test_wrong_arguments_are_all_named_with_their_place() -> None:
    @tool
    async def f(point: Point, n: Annotated[int, Field(ge=1)] = 3, kind: Literal["a", "b"] = "a") -> str:
        """F."""
        return "never"

    text = await outcome(f, {"point": {"x": "one"}, "n": 0, "kind": "c", "extra": 1})
    assert text.startswith("invalid_arguments: ")
    for place in ("point.x: ", "n: 0 is less than", "kind: ", "'extra'"):
        assert place in text


async def test_text_for_a_number_is_refused_not_guessed() -> None:
    @tool
    async def f(n: int) -> int:
        """F."""
        return n

    assert await outcome(f, {"n": "3"}) == 'invalid_arguments: n: "3" is not of type "integer"'


async def test_null_and_nothing_are_no_arguments() -> None:
    @tool
    async def f() -> str:
        """F."""
        return "ok"

    for nothing in ("", "null", "{}"):
        assert await outcome(f, nothing) == "ok"


async def test_extra_keywords_are_open_ended() -> None:
    @tool
    async def f(a: int, **rest: Any) -> dict[str, Any]:
        """F."""
        return {"a": a, **rest}

    assert await outcome(f, {"a": 1, "b": [2]}) == '{"a":1,"b":[2]}'


async def test_hints_may_name_local_classes() -> None:
    @dataclass
    class Local:
        a: int

    @tool
    async def f(value: Local) -> int:
        """F."""
        return value.a

    assert await outcome(f, {"value": {"a": 4}}) == "4"


async def test_dataclasses_and_models_may_be_returned() -> None:
    @tool
    async def f() -> Any:
        """F."""
        return {"point": Point(1, 2), "box": Box(corner=Point(0)), "when": date(2026, 1, 2), "c": Colour.RED}

    assert await outcome(f, {}) == (
        '{"point":{"x":1,"y":2},"box":{"corner":{"x":0,"y":0},"label":""},"when":"2026-01-02","c":"red"}'
    )


def test_signatures_that_cannot_be_called_by_name_are_refused() -> None:
    with pytest.raises(ValueError, match="tool 'f': parameter 'args' cannot be given by name"):

        @tool
        def f(*args: int) -> None: ...

    with pytest.raises(ValueError, match="tool 'g': parameter 'handle' has no JSON Schema"):

        @tool
        def g(handle: threading_lock) -> None: ...

    with pytest.raises(ValueError, match="tool 'h': a type hint cannot be resolved"):

        @tool
        def h(x: Nowhere) -> None: ...  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


class threading_lock:
    def __init__(self) -> None: ...


async def test_an_argument_that_none_of_several_types_has_names_them() -> None:
    def f(seconds: int | None = None, size: int | bool | None = None) -> str:
        """Take a while."""
        return f"{seconds} {size}"

    assert (await outcome(f, {"seconds": "30"})).endswith('seconds: "30" is not of type integer')
    assert (await outcome(f, {"size": "30"})).endswith('size: "30" is not of type integer or boolean')


async def test_an_argument_of_the_type_of_one_option_is_told_what_does_not_fit_there() -> None:
    def f(
        tags: list[str] | None = None, at: Point | None = None, mixed: list[int] | dict[str, int] | None = None
    ) -> str:
        """Take some."""
        return f"{tags} {at} {mixed}"

    assert (await outcome(f, {"tags": ["a", 1]})).endswith('tags[1]: 1 is not of type "string"')
    assert (await outcome(f, {"tags": "a"})).endswith('tags: "a" is not of type array')
    assert (await outcome(f, {"mixed": {"a": "b"}})).endswith('mixed.a: "b" is not of type "integer"')
    assert "mixed: 1 is not of type array or object" in await outcome(f, {"mixed": 1})
    assert (await outcome(f, {"at": {"x": "far"}})).endswith('at.x: "far" is not of type "integer"')


async def test_an_argument_for_no_option_is_not_told_of_one_only() -> None:
    def f(v: Literal["x", "y"] | int = 1, w: Literal["x", "y"] | None = None) -> str:
        """Take one."""
        return f"{v} {w}"

    assert "is not one of" not in await outcome(f, {"v": 1.5})
    assert (await outcome(f, {"w": "z"})).endswith('w: "z" is not one of "x" or "y"')


@pytest.mark.parametrize(
    "properties", [{"anyOf": False}, {"v": {"anyOf": [False, {"type": "string"}]}}], ids=["a name", "an option"]
)
async def test_a_schema_that_says_false_is_told(properties: dict[str, Any]) -> None:
    class F(Tool):
        descriptor = ToolDescriptor("f", "f", "Take.").with_parameters({"type": "object", "properties": properties})

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> str:
            return "taken"

    (name,) = properties
    assert (await outcome(F(), {name: 1})).startswith(f"invalid_arguments: {name}: ")


class And(BaseModel):
    op: Literal["and"]
    left: Node
    right: Node


class Or(BaseModel):
    op: Literal["or"]
    left: Node
    right: Node


class Leaf(BaseModel):
    name: str


Node = And | Or | Leaf
And.model_rebuild()
Or.model_rebuild()


async def test_errors_of_deep_options_are_not_listed() -> None:
    """Each level would double the time: at 13 levels it takes seconds, at 100 it would never end."""

    def f(node: Node) -> str:
        """Take a tree."""
        return "taken"

    def tree(depth: int) -> dict[str, Any]:
        return {"op": "and", "left": tree(depth - 1), "right": {"name": "b"}} if depth else {"name": 1}

    assert "node" in await outcome(f, {"node": tree(3)})
    assert "errors are listed for values up to 6 deep" in await outcome(f, {"node": tree(60)})
