"""The @tool decorator: makes a tool of a function, its name, docstring and type hints."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
import typing
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from itertools import repeat
from types import CoroutineType
from typing import Any, Generic, Unpack, cast, overload

from typing_extensions import ParamSpec, TypeVar

from .concurrency import GRACE, CancellationToken, join
from .content import to_json_value
from .context import ToolContext
from .errors import ConfigurationError
from .schema import Parameter, describe
from .tools import OptionWords, Tool, ToolDescriptor, ToolOptions

P = ParamSpec("P", default=...)
R = TypeVar("R", covariant=True, default=Any)


class FunctionTool(Tool, Generic[P, R]):
    """A tool made from a function. Calling it calls the function."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        id: str | None = None,
        description: str | None = None,
        category: str | None = None,
        local_names: dict[str, Any] | None = None,
        **options: Unpack[OptionWords],
    ) -> None:
        _check_function(function, name)
        if not (name is None or isinstance(cast("Any", name), str)):
            raise ConfigurationError(f"@tool: name is text, not {name!r}: write name='{name}'")
        inner = _unbound(function)
        given_name = name or getattr(inner, "__name__", type(inner).__name__)
        owner = f"tool {given_name!r}"
        summary, notes = split_docstring(inner.__doc__ or "")
        hints = _hints(inner, local_names, owner)
        parameters, context, open_ended = _parameters(function, hints, notes, owner)
        schema, self._decode = describe(parameters, open_ended, owner)
        self.plain_schema = schema if self._decode is None else None
        """The schema, if it has plain types only and so is known to be valid."""
        self._defaults = {each.name: each.default for each in parameters if each.default is not _EMPTY}
        self._integers = [parameter.name for parameter in parameters if parameter.type is int]
        self.function, self._context, self._is_async = function, context, inspect.iscoroutinefunction(inner)
        self.descriptor = ToolDescriptor(
            id or given_name,
            given_name,
            description if description is not None else summary,
            schema,
            category,
            options=ToolOptions(**options),
        )
        self.__doc__, self.__name__ = function.__doc__, given_name

    @property
    def timeout(self) -> float | None:
        return self.descriptor.options.timeout

    @property
    def retries(self) -> int:
        return self.descriptor.options.retries

    @property
    def result_limit(self) -> int | None:
        return self.descriptor.options.result_limit

    @property
    def idempotent(self) -> bool:
        return self.descriptor.options.idempotent

    @property
    def queue(self) -> str | None:
        return self.descriptor.options.queue

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    def complete_args(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the values that the function gets, as JSON where they have such a form, else as text."""
        given = args if self._decode is None else self._decode(args)
        return {name: _as_json(value) for name, value in {**self._defaults, **given}.items()}

    def execute(self, args: dict[str, Any], ctx: ToolContext) -> CoroutineType[Any, Any, Any]:
        """Return the function's own coroutine if it has one: a wrapper would cost as much as a short tool."""
        if self._decode is not None:
            args = self._decode(args)
        for name in self._integers:
            if type(value := args.get(name)) is float:  # JSON Schema accepts 1.0 as an integer
                args[name] = int(value)
        if self._context is not None:
            args = {**args, self._context: ctx}
        function: Callable[..., Any] = self.function
        return function(**args) if self._is_async else self._run_in_thread(args, ctx)

    def check_values(self, args: dict[str, Any]) -> None:
        """Raise InvalidArguments for arguments that fit the schema and cannot become Python objects all the same."""
        if self._decode is not None:
            self._decode(args)

    async def _run_in_thread(self, args: dict[str, Any], ctx: ToolContext) -> Any:
        """Call a blocking function in a thread."""
        returned = await in_thread(self.function, args, None if self._context is None else ctx.cancellation)
        return await returned if inspect.isawaitable(returned) else returned


def _as_json(value: Any) -> Any:
    try:
        return to_json_value(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _check_function(function: Any, name: str | None) -> None:
    if not callable(function):
        raise ConfigurationError(f"@tool is for functions, not {function!r}: write @tool or @tool(name=…)")
    inner = _unbound(function)
    if name is None and getattr(inner, "__name__", "") == "<lambda>":
        raise ConfigurationError(
            "a tool needs a name and type hints, which a lambda has not: write a function with def"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigurationError(
            f"tool {inner.__name__!r} yields: return the whole result, and show pieces with ctx.stream_output(text)"
        )


def _unbound(function: Any) -> Callable[..., Any]:
    """The function under a functools.partial and under decorators."""
    inner = function.func if isinstance(function, partial) else function
    return inspect.unwrap(inner) if hasattr(inner, "__wrapped__") else inner


async def in_thread(
    function: Callable[..., Any], kwargs: dict[str, Any], token: CancellationToken | None = None
) -> Any:
    """Run a blocking function in a daemon thread of its own.

    A function that ignores its cancellation can then neither starve a pool nor keep the process alive. If it has the
    token, it gets the grace period to stop by itself.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, **kwargs)
        except StopIteration as exc:
            error = RuntimeError(f"the tool raised StopIteration: {exc}")
        except BaseException as exc:  # raised in the waiting task
            error = exc
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the event loop is closed

    threading.Thread(target=work, name=f"tool-{getattr(function, '__name__', 'call')}", daemon=True).start()
    try:
        await join([done])
    except asyncio.CancelledError:
        try:
            if token is not None and token.is_set():
                await join([done], GRACE)
        finally:
            if not done.cancel():
                done.exception()  # nobody else reads it
        raise
    return done.result()


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    id: str | None = None,
    description: str | None = None,
    category: str | None = None,
    timeout: float | None = None,
    retries: int = 0,
    result_limit: int | None = None,
    idempotent: bool = False,
    queue: str | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    id: str | None = None,
    description: str | None = None,
    category: str | None = None,
    timeout: float | None = None,
    retries: int = 0,
    result_limit: int | None = None,
    idempotent: bool = False,
    queue: str | None = None,
) -> Any:
    """Make a tool of a function, which may be async. Its name, docstring and type hints are what the model reads.

        @tool
        async def weather(city: str, days: int = 1) -> str:
            \"""Say what the weather will be.

            Args:
                city: where.
            \"""
            return "sunny"

        @tool(timeout=30, retries=2)
        def search(query: str, ctx: ToolContext) -> list[str]: ...

    A parameter with the type `ToolContext` is not shown to the model. Return any value that has a JSON form, a
    `ToolResult` or a `ToolOutput`.

    name: what the model calls it; that of the function if not given.
    id: identifies the tool in records; the name if not given.
    description: what the model reads; the docstring if not given.
    category: a word of yours to sort tools by.
    timeout: seconds that one attempt may take.
    retries: further attempts after a failure; none after wrong arguments, a denial or a cancel.
    result_limit: characters of the result that the model reads; if not given, the agent's `result_limit`.
    idempotent: True if running a call twice is the same as once. After a crash such a call runs again.
    queue: with an engine, the queue whose workers make its calls; else the run's own process does.
    """
    options = {"name": name, "id": id, "description": description, "category": category, "timeout": timeout}
    options |= {"retries": retries, "result_limit": result_limit, "idempotent": idempotent, "queue": queue}
    make: Any = partial(FunctionTool, local_names=sys._getframe(1).f_locals, **options)  # pyright: ignore[reportPrivateUsage]
    return make if function is None else make(function)


def as_tool(candidate: Tool | Callable[..., Any]) -> Tool:
    """Return a tool as it is, and a plain function as a tool."""
    if isinstance(candidate, Tool):
        return candidate
    if inspect.isclass(candidate) and issubclass(candidate, Tool):
        raise ConfigurationError(f"give an instance of the tool class {candidate.__name__}: {candidate.__name__}()")
    if inspect.iscoroutine(candidate):
        candidate.close()
        raise ConfigurationError(f"{candidate.__name__}() was called: give the function {candidate.__name__} itself")
    if callable(candidate):
        return FunctionTool(candidate)
    raise ConfigurationError(f"not a tool: {candidate!r}; use @tool on a function or subclass Tool")


_QUICK: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "dict": dict,
    "list": list,
    "list[str]": list[str],
    "list[int]": list[int],
}
"""Hints written as text, valid if the module does not redefine these names."""

_QUICK_NAMES = frozenset({"str", "int", "float", "bool", "dict", "list"})


def _quick_hints(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the hints of the parameters if all are simple, or None: `typing` takes ten times longer."""
    known: dict[str, Any] = getattr(function, "__globals__", {})
    if not known.keys().isdisjoint(_QUICK_NAMES):
        return None
    found: dict[str, Any] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        if isinstance(hint, str) and name != "return":
            hint = _QUICK.get(hint)
            if hint is None:
                return None
        found[name] = hint
    return found


def _hints(function: Callable[..., Any], local_names: dict[str, Any] | None, owner: str) -> dict[str, Any]:
    quick = _quick_hints(function)
    if quick is not None:
        return quick
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        # Annotations written as text may name classes of the function that defines the tool.
        try:
            return typing.get_type_hints(function, localns=local_names, include_extras=True)
        except NameError as exc:
            raise ConfigurationError(f"{owner}: a type hint cannot be resolved: {exc}") from exc


def _parameters(
    function: Callable[..., Any], hints: dict[str, Any], notes: dict[str, str], owner: str
) -> tuple[list[Parameter], str | None, bool]:
    """Return the parameters for the model, the name of the context parameter, and True if there is `**kwargs`."""
    found: list[Parameter] = []
    context: str | None = None
    open_ended = False
    for name, default, kind in _signature(function):
        hint = hints.get(name, Any)
        if name == "self" and not found:
            raise ConfigurationError(
                f"{owner} is a method: give the bound method instead, tools=[thing.{function.__name__}]"
            )
        if kind is _VAR_KEYWORD:
            open_ended = True
        elif kind is _VAR_POSITIONAL or kind is _POSITIONAL_ONLY:
            raise ConfigurationError(f"{owner}: parameter {name!r} cannot be given by name; make it an ordinary one")
        elif hint is ToolContext or (not isinstance(hint, type) and ToolContext in typing.get_args(hint)):
            context = name
        else:
            found.append(Parameter(name, hint, default, notes.get(name, "")))
    return found, context, open_ended


_EMPTY = inspect.Parameter.empty
_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_ORDINARY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _signature(function: Callable[..., Any]) -> Iterable[tuple[str, Any, Any]]:
    """Return name, default and kind of each parameter. Ordinary functions are read directly: `inspect` is ten times slower."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_posonlyargcount or code.co_flags & _VARIADIC or hasattr(function, "__wrapped__"):
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.default, parameter.kind) for parameter in parameters]
    if inspect.ismethod(function):
        return list(_signature(function.__func__))[1:]
    defaults: tuple[Any, ...] = getattr(function, "__defaults__", None) or ()
    required = code.co_argcount - len(defaults)
    found = (*repeat(_EMPTY, required), *defaults)
    if code.co_kwonlyargcount:
        by_name: dict[str, Any] = getattr(function, "__kwdefaults__", None) or {}
        names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        found += tuple([by_name.get(name, _EMPTY) for name in names])
    return zip(code.co_varnames, found, repeat(_ORDINARY), strict=False)  # local variables follow the parameters


_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def split_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description for the model, and the text of each parameter in an `Args:` section."""
    if "\n" not in doc:
        return doc.strip(), {}
    summary: list[str] = []
    notes: dict[str, str] = {}
    section = current = ""
    for line in inspect.cleandoc(doc).splitlines():
        if match := _SECTION.match(line):
            section, current = match[1], ""
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            text = line.strip()
            if match := _ARGUMENT.match(text) if len(line) - len(line.lstrip()) <= 4 else None:
                current = match[1].lstrip("*")
                notes[current] = match[2]
            elif current:
                notes[current] = f"{notes[current]} {text}".strip()
    return "\n".join(summary).strip(), notes
