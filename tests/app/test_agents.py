"""`binade mcp`, asked by the protocol's own client over the pipes of a real process."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import anyio
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from mcp import ClientSession, StdioServerParameters, stdio_client, types

from tests.conftest import PROJECT, start_python

pytestmark = pytest.mark.slow

WHY = re.compile(
    r"SQNR ([\d.]+) dB. Of the squared error, ([\d.]+)% is of values flushed to zero, ([\d.]+)% of saturated ones "
    r"and ([\d.]+)% of rounding within the grid"
)
TAKEN_BY = {"input": ("forward", "wgrad"), "weight": ("forward", "dgrad"), "grad_output": ("dgrad", "wgrad")}


def with_agent(root: Path, act: Callable[[ClientSession], object]) -> None:
    """Start the server on a root, and run a coroutine function with a session that is initialized."""

    async def main() -> None:
        kept = {name: os.environ[name] for name in ("TMPDIR", "BINADE_CACHE_DIR", "PYTHONPATH") if name in os.environ}
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "binade", "mcp", str(root)], cwd=PROJECT,
            env=kept | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        async with stdio_client(server) as (incoming, outgoing), ClientSession(incoming, outgoing) as session:
            await session.initialize()
            await act(session)

    anyio.run(main)


async def text_of(session: ClientSession, tool: str, **arguments: object) -> str:
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    return result.content[0].text


def rows_of(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of the table in Markdown below a heading."""
    lines = [
        line for line in text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float32 values along the last axis in MXFP4 as the OCP specification has it, by ml_dtypes; the scales)."""
    blocks = x.reshape(-1, 32).astype(np.float64)
    largest = np.abs(blocks).max(1, keepdims=True)
    scales = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2)
    codes = np.clip(blocks / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (codes * scales).reshape(x.shape), np.broadcast_to(scales, blocks.shape).reshape(x.shape)


def sqnr_db(x: np.ndarray, q: np.ndarray) -> float:
    return 10 * np.log10(np.square(x, dtype=np.float64).sum() / np.square(x - q).sum())


def operand(x: np.ndarray, gemm: str, tensor_name: str) -> np.ndarray:
    """An operand of a linear layer's GEMM with the axis that it contracts last."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.T if gemm == "wgrad" or (gemm, tensor_name) == ("dgrad", "weight") else rows


def shares(x: np.ndarray) -> list[float]:
    """Percent of the squared error by cause: flushed to zero, beyond the largest code, within the grid."""
    q, scales = rounded(x)
    error = np.square(x - q)
    flushed, saturated = (q == 0) & (x != 0), np.abs(x) > 6 * scales
    parts = (error[flushed].sum(), error[saturated].sum(), error[~flushed & ~saturated].sum())
    return [100 * part / error.sum() for part in parts]


def test_an_agent_finds_which_operand_breaks_in_mxfp4_and_why(collected: Path):
    """It reads the tools, the runs, the ranking and the cause; ml_dtypes computes both again from the files."""

    async def act(session: ClientSession) -> None:
        assert {tool.name for tool in (await session.list_tools()).tools} >= {"list_runs", "ask", "sql", "identify"}
        runs = await text_of(session, "list_runs")
        (run,) = re.findall(r"\| (\S+) \| done .* \| mxfp4 \|", runs)
        assert "## map: What does a format break?\n" in await text_of(session, "list_questions")
        where = {"run_id": [run], "layer_type": ["linear"]}
        asked = {"format": "mxfp4", "metric": "sqnr_db"}
        ranking = rows_of(await text_of(session, "ask", question="map", filter=where, parameters=asked), "places")
        worst, place = ranking[0]["Worst tensor"], ranking[0]["Place"]
        gemm = place.rpartition(", ")[2]
        said = await text_of(
            session, "ask", question="why", parameters={"format": "mxfp4", "tensor": worst, "gemm": gemm}
        )

        newest = f"SELECT * FROM tensor WHERE run_id = '{run}' AND layer_type = 'linear' ORDER BY iteration DESC"
        csv = await text_of(session, "sql", statement=newest, rows=1000)
        recorded = pd.read_csv(io.StringIO(csv)).query("iteration == iteration.max()")
        recorded = recorded[recorded["tensor_name"].isin(TAKEN_BY)]
        errors, operands = {}, {}
        for row in recorded.itertuples():
            x = torch.load(collected / row.run_id / row.path, weights_only=True)["tensor"].float().numpy()
            for product in TAKEN_BY[row.tensor_name]:
                key = row.tensor_id, product
                operands[key] = operand(x, product, row.tensor_name)
                errors[key] = sqnr_db(operands[key], rounded(operands[key])[0])
        assert len(errors) == 2 * 4 * 3 * 2
        assert (worst, gemm) == min(errors, key=errors.get)
        row = recorded.set_index("tensor_id").loc[worst]
        assert place.startswith(f"L{row['layer_index']} {row['module']} {row['tensor_name'].replace('_', ' ')}")
        expected = [errors[worst, gemm], *shares(operands[worst, gemm])]
        assert [*map(float, WHY.search(said).groups())] == pytest.approx(expected, rel=0.01)

    with_agent(collected, act)


WRONG = {
    "no such tool": ("look", {}, "'look', expected one of list_runs"),
    "unknown argument": ("ask", {"page": "map"}, "unknown argument 'page', expected one of question, filter"),
    "missing argument": ("ask", {}, "'question' is missing"),
    "wrong type": ("ask", {"question": 3}, "question is 3"),
    "unknown question": ("ask", {"question": "mapp"}, "'mapp', expected one of map, explore"),
    "unknown field": ("ask", {"question": "map", "filter": {"layer": [1]}}, "'layer': expected one of run_id"),
    "wrong value": ("ask", {"question": "map", "filter": {"layer_index": ["one"]}}, "layer_index"),
    "value that does not occur": (
        "ask", {"question": "map", "filter": {"layer_index": [99]}}, "layer_index is 99, expected one of 1, 2"
    ),
    "unknown parameter": ("ask", {"question": "map", "parameters": {"formt": "mxfp4"}}, "'formt'. Its parameters: "),
    "unknown format": ("ask", {"question": "map", "parameters": {"format": "mxfp9"}}, "'mxfp9', expected a format"),
    "unknown figure": ("ask", {"question": "map", "figures": ["pie"]}, "'pie', expected one of map"),
    "a change": ("sql", {"statement": "DELETE FROM tensor"}, "only SELECT"),
    "another file": ("sql", {"statement": "SELECT * FROM read_text('/etc/passwd')"}, "/etc/passwd"),
    "too many rows": ("sql", {"statement": "SELECT 1", "rows": 10**6}, "rows is 1000000"),
    "no file": ("identify", {"x": "/none.pt", "q": "/none.pt"}, "/none.pt is not a file"),
}  # fmt: skip


async def figures(session: ClientSession) -> None:
    """A figure comes as SVG with its numbers, and the address repeats the answer."""
    arguments = {"question": "map", "parameters": {"format": "mxfp4"}, "figures": ["map"]}
    text, figure = (await session.call_tool("ask", arguments)).content
    assert isinstance(figure, types.EmbeddedResource) and figure.resource.mime_type == "image/svg+xml"
    drawing = ElementTree.fromstring(figure.resource.text)
    assert drawing.tag.endswith("svg") and "SQNR against normal values" in "".join(drawing.itertext())
    assert "/map?view=map&format=mxfp4&metric=sqnr_vs_normal" in text.text
    assert len(rows_of(text.text, "Figure map: SQNR against normal values in mxfp4")) == 50


async def identify(session: ClientSession, root: Path, folder: Path) -> None:
    """A recorded tensor against a file that ml_dtypes has made of it."""
    statement = "SELECT tensor_id, run_id, path FROM tensor WHERE tensor_name = 'weight' LIMIT 1"
    row = pd.read_csv(io.StringIO(await text_of(session, "sql", statement=statement))).iloc[0]
    x = torch.load(root / row["run_id"] / row["path"], weights_only=True)["tensor"].float().numpy()
    np.save(folder / "q.npy", rounded(x)[0].astype(np.float32))
    found = await text_of(session, "identify", x=row["tensor_id"], q=str(folder / "q.npy"))
    assert f"mxfp4 along axis 1: all {x.size:,} values, bit for bit" in found


async def mistakes(session: ClientSession) -> None:
    for what, (tool, arguments, part) in WRONG.items():
        result = await session.call_tool(tool, arguments)
        (line,) = result.content
        assert result.is_error and line.text.startswith(f"{tool}: "), what
        assert part in line.text and "\n" not in line.text and "Traceback" not in line.text, (what, line.text)
    assert (await text_of(session, "sql", statement="SELECT 1 AS one")).split() == ["one", "1"]  # it still answers


def test_figures_identify_and_mistakes_write_nothing(collected: Path, tmp_path: Path):
    def files() -> set[Path]:
        return {path for path in collected.rglob("*") if "index.duckdb" not in path.name}

    async def act(session: ClientSession) -> None:
        await figures(session)
        await identify(session, collected, tmp_path)
        await mistakes(session)

    before = files()
    with_agent(collected, act)
    assert files() == before


@pytest.mark.thorough
def test_an_empty_root_is_answered(tmp_path: Path):
    async def act(session: ClientSession) -> None:
        assert "0 runs" in await text_of(session, "list_runs")
        assert "There are no runs" in await text_of(session, "ask", question="map")

    with_agent(tmp_path, act)


def test_ctrl_c_ends_it(tmp_path: Path):
    ping = '{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18", '
    ping += '"capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}}\n'
    with start_python("-m", "binade", "mcp", tmp_path, stdin=-1) as process:
        process.stdin.write(ping)
        process.stdin.flush()
        assert '"serverInfo"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_root_that_is_no_directory_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with start_python("-m", "binade", "mcp", tmp_path / "file", stdin=-1) as process:
        output, error = process.communicate(timeout=300)
    assert process.returncode == 2 and not output and error.startswith("binade: ") and error.count("\n") == 1
