"""Turns a typed function into a tool with a JSON schema, and runs the calls of one turn.

A failing tool is an observation for the policy, never an exception; a tool whose own ground gave
way (ToolFault) is called again. This module must not know what an environment or a reward is.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from surefoot.core.errors import ConfigError, EnvironmentFault, nearest
from surefoot.core.types import ToolCall, ToolResult

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
_MARK = "__surefoot_tool__"
_PAUSE = 0.05  # seconds before the first retry after a fault; doubles each time
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to tell the policy what went wrong; its text becomes the observation."""


class ToolFault(EnvironmentFault):
    """Raised by a tool when what it stands on failed (a server is gone), not the policy's call.

    The call is made again as often as the tool allows; then the fault is the episode's.
    """


@dataclass(frozen=True, slots=True)
class Tool:
    """A callable with the name, description and JSON schema that the policy sees.

    ``arguments`` maps the names shown to the policy to the function's own, so that a variant can
    rename them without touching the function. Arguments are checked by ``model``; a tool without one
    (its schema came from elsewhere) is checked by ``parameters`` as JSON Schema.

    ``seconds`` and ``limit`` (characters) replace what :func:`run_calls` is given; ``retries`` is how
    often a call is made again after a ToolFault, all within the one deadline.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any | Awaitable[Any]]
    model: type[BaseModel] | None = None
    arguments: Mapping[str, str] = field(default_factory=lambda: {})
    seconds: float | None = None
    limit: int | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ConfigError(
                f"tool name {self.name!r} is not valid; use letters, digits, '_' and '-', at most 64"
            )
        for name, value, least in (("seconds", self.seconds, 0), ("limit", self.limit, 0)):
            if value is not None and not value > least:
                raise ConfigError(f"tool {self.name!r}: {name} is {value}; it must be > {least}")
        if self.retries < 0:
            raise ConfigError(f"tool {self.name!r}: retries is {self.retries}; it must be >= 0")

    def spec(self) -> dict[str, Any]:
        """The OpenAI function schema of this tool."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    def renamed(
        self, name: str, *, arguments: Mapping[str, str] | None = None, description: str = ""
    ) -> Tool:
        """The same tool under another name; ``arguments`` maps old argument names to new ones."""
        new = dict(arguments or {})
        properties = cast("Mapping[str, Any]", self.parameters.get("properties", {}))
        for old in new:
            if old not in properties:
                raise ConfigError(f"tool {self.name!r} has no argument {old!r}; {nearest(old, properties)}")
        schema = dict(self.parameters)
        schema["properties"] = {new.get(key, key): value for key, value in properties.items()}
        if "required" in schema:
            schema["required"] = [new.get(key, key) for key in schema["required"]]
        back = {new.get(key, key): self.arguments.get(key, key) for key in properties}
        return replace(
            self,
            name=name,
            description=description or self.description,
            parameters=schema,
            arguments=back,
        )

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The function's own arguments. Raises ToolError with a text for the policy."""
        if self.model is None:
            complaint = schema_complaint(self.parameters, arguments)
            if complaint:
                raise ToolError(complaint)
            return {self.arguments.get(key, key): value for key, value in arguments.items()}
        unknown = set(arguments) - set(cast("Mapping[str, Any]", self.parameters.get("properties", {})))
        if unknown:
            known = ", ".join(cast("Mapping[str, Any]", self.parameters.get("properties", {}))) or "none"
            raise ToolError(f"unknown argument {min(unknown)!r}; {self.name} takes: {known}")
        own = {self.arguments.get(key, key): value for key, value in arguments.items()}
        try:
            valid = self.model(**own)
        except ValidationError as error:
            first = error.errors()[0]
            shown = {v: k for k, v in self.arguments.items()}
            where = ".".join(shown.get(str(part), str(part)) for part in first["loc"])
            raise ToolError(f"argument {where!r}: {first['msg']}") from error
        return {name: getattr(valid, name) for name in type(valid).model_fields}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Validate ``arguments`` and call the function. Raises ToolError with a text for the policy."""
        result = self.function(**self.validated(arguments))
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def schema_complaint(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What a JSON Schema holds against ``arguments``, in the words of :meth:`Tool.run`; "" if nothing.

    Raises ConfigError when the schema itself is not valid or refers to another document: nothing is
    ever fetched.
    """
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise ConfigError("checking a JSON Schema needs the jsonschema package") from error
    cls = validator_for(schema)
    try:
        cls.check_schema(dict(schema))
        checker = cls(schema, registry=Registry())
        found = sorted(checker.iter_errors(dict(arguments)), key=lambda item: list(map(str, item.path)))
    except (SchemaError, Unresolvable) as error:
        raise ConfigError(f"a tool's JSON Schema is not usable: {str(error)[:200]}") from error
    if not found:
        return ""
    where = ".".join(map(str, found[0].path))
    return f"argument {where!r}: {found[0].message}" if where else found[0].message


def tool(function: F) -> F:
    """Mark a typed function or method with a docstring as a tool. Only marked ones are exposed."""
    if not inspect.getdoc(function):
        raise ConfigError(f"tool {function.__name__!r} has no docstring; the policy needs a description")
    setattr(function, _MARK, True)
    return function


def is_tool(value: object) -> bool:
    """Whether ``value`` was marked by :func:`tool`."""
    return getattr(value, _MARK, False) is True


def make_tool(function: Callable[..., Any]) -> Tool:
    """Build a Tool from a typed function (bound methods lose ``self``). Raises ConfigError."""
    if inspect.ismethod(function):
        model, schema, description = _described(function.__func__, True)
    else:
        model, schema, description = _described(function, False)
    return Tool(function.__name__, description, schema, function, model)


@functools.lru_cache(maxsize=4096)
def _described(function: Callable[..., Any], bound: bool) -> tuple[type[BaseModel], dict[str, Any], str]:
    """(argument model, JSON schema, description); cached, since every episode binds the same methods."""
    name = function.__name__
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"tool {name!r}: a type cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[int(bound) :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r}: *{parameter.name} cannot be described; name each argument")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: argument {parameter.name!r} has no type")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema()
    for noise in ("title", "additionalProperties"):
        schema.pop(noise, None)
    for value in cast("dict[str, dict[str, Any]]", schema.get("properties", {})).values():
        value.pop("title", None)
    schema.setdefault("properties", {})
    return model, schema, " ".join((inspect.getdoc(function) or "").split())


def tools_of(owner: object) -> tuple[Tool, ...]:
    """The tools that ``owner``'s class marked, in order of definition, bound to ``owner``."""
    found: dict[str, Tool] = {}
    for cls in reversed(type(owner).__mro__):
        for key, value in vars(cls).items():
            if is_tool(value):
                found[key] = make_tool(getattr(owner, key))
    return tuple(found.values())


async def _one(tools: Mapping[str, Tool], call: ToolCall, seconds: float, limit: int) -> ToolResult:
    ok = False
    known = tools.get(call.name)
    if known is None:
        text = f"Error: there is no tool {call.name!r}; {nearest(call.name, tools)}"
    else:
        seconds = known.seconds if known.seconds is not None else seconds
        limit = known.limit if known.limit is not None else limit
        try:
            text, ok = await asyncio.wait_for(_persistent(known, call.arguments), seconds), True
        except ToolError as error:
            text = f"Error: {error}"
        except TimeoutError:
            text = f"Error: {call.name} took longer than {seconds:g} s"
    if len(text) > limit:  # error texts too: they may echo what the policy wrote
        text = f"{text[:limit]} … (cut: {len(text)} characters, limit {limit})"
    return ToolResult(call.id, call.name, text, ok)


async def _persistent(known: Tool, arguments: Mapping[str, Any]) -> str:
    """Call a tool, again after each fault while retries are left; the last fault goes through."""
    for attempt in range(known.retries):
        try:
            return await known.run(arguments)
        except ToolFault:
            await asyncio.sleep(_PAUSE * 2**attempt)
    return await known.run(arguments)


async def run_calls(
    tools: Sequence[Tool], calls: Sequence[ToolCall], *, seconds: float = 10.0, limit: int = 4000
) -> tuple[ToolResult, ...]:
    """Run the calls of one turn side by side; results come back in call order.

    A wrong argument, an unknown tool, a ToolError and a tool's own time-out become results with
    ``ok=False``. A ToolFault is retried as the tool allows. Any other exception propagates: it is the
    environment's fault, not the policy's. Raises ConfigError when two tools share a name.
    """
    by_name = {item.name: item for item in tools}
    if len(by_name) != len(tools):
        names = [item.name for item in tools]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two tools are named {twice!r}; rename one of them with Tool.renamed")
    return tuple(await asyncio.gather(*(_one(by_name, call, seconds, limit) for call in calls)))
