"""How long another user's page takes while the server computes what a heavy address asks for, and the most memory.

    python -m tests.bench.bench_addresses [--tensors 24] [--side 2048] [--pages 12]

A real `binade serve` answers two clients (see bench_users). One opens HEAVY addresses one after another, each of which
takes as long as the budget allows or is refused; the other opens pages all the time. The other one's times are compared
with those that it measures in the same run while nobody else is there.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from websockets.asyncio.client import connect

from binade.data.index.catalog import Catalog
from tests.app.planted import operand
from tests.bench.bench_users import LONGEST, User, highest, server
from tests.data.builder import make_run

FORMATS = [f"mxfp4(block=1x{size})" for size in range(2, 14)]
HEAVY = {
    "What if in 12 formats": ("tensor", {"view": "whatif", "formats": FORMATS}),
    "a Map that is computed": ("map", {"format": "nvfp4(block=8)"}),
    "a block longer than its axis": ("tensor", {"format": "mxfp4(block=1x3000000)"}),
    "a tall tile": ("map", {"format": "fp8_e4m3(block=3000000x1)"}),
}
OTHER = ("map", "explore", "runs")


async def look(user: User, pages: int | None, until: asyncio.Task[float] | None = None) -> list[float]:
    """The seconds of the pages that a user opens, at least one."""
    times = []
    while not times or (len(times) < pages if pages else until and not until.done()):
        times.append(await user.open(OTHER[len(times) % len(OTHER)]))
    return times


async def measure(address: str, process: psutil.Process, tensors: list[str], pages: int) -> None:
    options = {"subprotocols": ["streamlit"], "origin": f"http://{address}", "max_size": None, "open_timeout": LONGEST}
    url = f"ws://{address}/_stcore/stream"
    async with connect(url, **options) as one, connect(url, **options) as two:
        heavy, other = User(one, tensors[0]), User(two, tensors[0])
        for user in (heavy, other):
            await user.open("map")
        await look(other, 2 * len(OTHER))  # every module is imported
        alone, before = await look(other, pages), process.memory_info().rss
        print(f"another user alone: median {np.median(alone):.2f} s, longest {max(alone):.2f} s; {before / 1e6:.0f} MB")
        for number, (title, (page, query)) in enumerate(HEAVY.items()):
            seen = [before]
            watcher = asyncio.create_task(highest(process, seen))
            start = time.perf_counter()
            named = {"tensor": tensors[number % len(tensors)]} if page == "tensor" else {}
            computed = asyncio.create_task(heavy.open(page, query | named))
            times = await look(other, None, computed)
            await computed
            watcher.cancel()
            print(
                f"{title}: {time.perf_counter() - start:.1f} s, {(max(seen) - before) / 1e6:+.0f} MB; another user:"
                f" median {np.median(times):.2f} s, longest {max(times):.2f} s, {len(times)} pages, ratio of the"
                f" longest to alone {max(times) / max(alone):.1f}",
                flush=True,
            )
        for user in (heavy, other):
            user.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "runs"
        root.mkdir()
        x = torch.randn(args.side, args.side, generator=torch.Generator().manual_seed(0))
        make_run(root, [operand(x * layer, layer) for layer in range(1, args.tensors + 1)], recipe="mxfp4")
        with Catalog.open(root) as catalog:
            tensors = list(catalog.tensors()["tensor_id"])
        with server(root) as (address, process):
            asyncio.run(measure(address, process, tensors, args.pages))


if __name__ == "__main__":
    main()
