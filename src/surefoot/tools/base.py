"""Turns a typed function into a tool with a JSON schema, and runs the calls of one turn.

A failing tool is an observation for the policy, never an exception; this module must not know
what an environment or a reward is.
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

from surefoot.core.errors import ConfigError, nearest
from surefoot.core.types import ToolCall, ToolResult

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
_MARK = "__surefoot_tool__"
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to tell the policy what went wrong; its text becomes the observation."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A callable with the name, description and JSON schema that the policy sees.

    ``arguments`` maps the names shown to the policy to the function's own, so that a variant can
    rename them without touching the function.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any | Awaitable[Any]]
    model: type[BaseModel]
    arguments: Mapping[str, str] = field(default_factory=lambda: {})

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

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Validate ``arguments`` and call the function. Raises ToolError with a text for the policy."""
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
        values = {name: getattr(valid, name) for name in type(valid).model_fields}
        result = self.function(**values)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


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
    if not _NAME.match(name):
        raise ConfigError(f"tool name {name!r} is not valid; use letters, digits, '_' and '-', at most 64")
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
        try:
            text, ok = await asyncio.wait_for(known.run(call.arguments), seconds), True
        except ToolError as error:
            text = f"Error: {error}"
        except TimeoutError:
            text = f"Error: {call.name} took longer than {seconds:g} s"
    if len(text) > limit:  # error texts too: they may echo what the policy wrote
        text = f"{text[:limit]} … (cut: {len(text)} characters, limit {limit})"
    return ToolResult(call.id, call.name, text, ok)


async def run_calls(
    tools: Sequence[Tool], calls: Sequence[ToolCall], *, seconds: float = 10.0, limit: int = 4000
) -> tuple[ToolResult, ...]:
    """Run the calls of one turn side by side; results come back in call order.

    A wrong argument, an unknown tool, a ToolError and a tool's own time-out become results with
    ``ok=False``. Any other exception propagates: it is the environment's fault, not the policy's.
    """
    by_name = {item.name: item for item in tools}
    return tuple(await asyncio.gather(*(_one(by_name, call, seconds, limit) for call in calls)))
