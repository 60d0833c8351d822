"""binade mcp: the protocol. Calls are answered one at a time, in a thread; a mistake in a call is one line.

Figures are embedded resources with the text of the SVG, as few models read SVG in place of a bitmap.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server

from binade.app.agents.answers import Reply
from binade.app.agents.tools import TOOLS, AgentTool, Workspace
from binade.app.report.rendering import Renderers
from binade.data.index.catalog import Catalog
from binade.data.run.json_files import adapter_of, parse_json
from binade.data.words.text import describe, one_line

ABOUT = (
    "Binade shows what low-precision number formats do to the tensors of LLM training: which operands lose precision, "
    "in which format, and why. Everything here is read-only."
)
SVG = "image/svg+xml"


def serve(root: Path) -> None:
    """Answer an agent until it closes standard input. Raises RunError."""
    with Catalog.open(root) as catalog, Renderers(1) as renderers:
        anyio.run(_serve, Workspace(catalog, renderers))


async def _serve(workspace: Workspace) -> None:
    one_at_a_time = anyio.CapacityLimiter(1)

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[*map(_described, TOOLS)])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        call = partial(called, workspace, params.name, params.arguments or {})
        return await anyio.to_thread.run_sync(call, limiter=one_at_a_time)

    server: Server[Any] = Server(
        "binade", version=version("binade"), instructions=ABOUT, on_list_tools=list_tools, on_call_tool=call_tool
    )
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def _described(name: str) -> types.Tool:
    schema = adapter_of(TOOLS[name].arguments).json_schema()
    hints = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
    text = " ".join((TOOLS[name].answer.__doc__ or "").split())
    return types.Tool(name=name, description=text, input_schema=schema, annotations=hints)


def called(workspace: Workspace, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
    """The result of a call: the reply of a tool, or one line that says what was wrong."""
    try:
        if name not in TOOLS:
            raise ValueError(f"there is no tool {name!r}, expected one of {', '.join(TOOLS)}")
        workspace.catalog.sync()
        return _result(TOOLS[name].answer(workspace, _checked(TOOLS[name], arguments)))
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        line = types.TextContent(text=one_line(f"{name}: {describe(error)}", 2000))
        return types.CallToolResult(content=[line], is_error=True)


def _checked(tool: AgentTool[Any], arguments: dict[str, Any]) -> Any:
    known = {each.name: each for each in fields(tool.arguments)}
    for name in arguments:
        if name not in known:
            raise ValueError(f"unknown argument {name!r}, expected one of {', '.join(known) or 'none'}")
    for name, each in known.items():
        if each.default is MISSING and each.default_factory is MISSING and name not in arguments:
            raise ValueError(f"the argument {name!r} is missing")
    return parse_json(tool.arguments, json.dumps(arguments).encode())


def _result(reply: Reply) -> types.CallToolResult:
    content: list[types.ContentBlock] = [types.TextContent(text=reply.text)]
    for address, svg in reply.pictures.items():
        resource = types.TextResourceContents(uri=f"binade:{address}", mime_type=SVG, text=svg)
        content.append(types.EmbeddedResource(resource=resource))
    return types.CallToolResult(content=content)
