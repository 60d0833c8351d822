"""How long pages take with one user and with many at once, while a collector writes, and the server's memory.

    python -m tests.bench.bench_users [--users 20] [--seconds 600] [--every 5] [--tensors 5000]

A real `binade serve` answers clients that speak Streamlit's websocket protocol as a browser does: each opens the next
of PAGES every few seconds, and reruns what the server asks it to rerun. A process adds SEGMENT tensors to a run every
WRITES seconds. Time is from the click until the page is complete; that of one user is measured in the first tenth of
the time. Memory is the resident set: after one user has seen every page, the highest, and LEFT seconds
after the last user left, since the server keeps a closed tab for two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import psutil
import torch
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect

from binade.collector import Recorder
from binade.data.index.catalog import Catalog
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import write_tables
from tests.bench.make_root import EVERY, SCORED, Prototypes, make_root, rows

PAGES = ("map", "explore", "tensor", "runs", "notebook")
WITH_VALUES = 32  # tensors, of VALUES values each
VALUES = 1 << 18
SEGMENT, WRITES = 256, 5.0
LONGEST = 300.0  # seconds that a page may take
LEFT = 150.0


def collector(root: Path) -> None:
    """Add a segment to a run from time to time, until it is killed."""
    known, random = Prototypes(), np.random.default_rng(1)
    writer = RunWriter.create(root, "mxfp8", {"model": "llama31-8b", "size": "full", "recipe": "mxfp8"})
    for number in count():
        numbers = np.arange(number * SEGMENT, (number + 1) * SEGMENT)
        tables = rows(known, random, numbers, writer.run_id, "mxfp8", 0)
        write_tables(writer.directory / "segments" / writer.next_segment_name(), [tables])
        writer.append_loss({"iteration": number * EVERY, "loss": 5.0})
        writer.update(tensors=(number + 1) * SEGMENT, iteration=number * EVERY)
        time.sleep(WRITES)


class User:
    """A browser's tab."""

    def __init__(self, connection: ClientConnection, tensor: str) -> None:
        self._connection = connection
        self._tensor = tensor
        self._hashes: dict[str, str] = {}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._wanted, self._shown = PAGES[0], ""
        self._query = ""
        self._complete = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def open(self, page: str, query: Mapping[str, str | Sequence[str]] | None = None) -> float:
        """Click on a page; the seconds until it is complete."""
        self._wanted = page
        self._query = urlencode(query or ({"tensor": self._tensor} if page == "tensor" else {}), doseq=True)
        self._complete.clear()
        start = time.perf_counter()
        await self._rerun()
        complete = asyncio.create_task(self._complete.wait())
        await asyncio.wait({complete, self._reader}, timeout=LONGEST, return_when=asyncio.FIRST_COMPLETED)
        if self._reader.done():
            self._reader.result()
        if not complete.done():
            raise TimeoutError(f"the page {page} is not complete after {LONGEST:g} s, or the server has ended")
        return time.perf_counter() - start

    def leave(self) -> None:
        for task in (self._reader, *self._timers.values()):
            task.cancel()

    async def _rerun(self, fragment: str = "") -> None:
        message = BackMsg()
        state = message.rerun_script
        state.query_string = self._query
        state.page_script_hash = self._hashes.get(self._wanted, "")
        if fragment:
            state.fragment_id, state.is_auto_rerun = fragment, True
        await self._connection.send(message.SerializeToString())

    async def _every(self, seconds: float, fragment: str) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._rerun(fragment)

    async def _read(self) -> None:
        async for content in self._connection:
            message = ForwardMsg.FromString(content)
            kind = message.WhichOneof("type")
            if kind == "navigation":  # all of the page is drawn: it says anew what reruns
                for fragment in list(self._timers):
                    self._stop(fragment)
                pages = message.navigation.app_pages
                self._hashes = {page.url_pathname: page.page_script_hash for page in pages}
                # Another page with its name redirects to the default one.
                self._hashes[PAGES[0]] = next(page.page_script_hash for page in pages if page.is_default)
                self._shown = message.navigation.page_script_hash
            elif kind == "page_info_changed":
                self._query = message.page_info_changed.query_string
            elif kind == "auto_rerun":
                self._stop(message.auto_rerun.fragment_id)
                timer = self._every(message.auto_rerun.interval, message.auto_rerun.fragment_id)
                self._timers[message.auto_rerun.fragment_id] = asyncio.create_task(timer)
            elif kind == "stop_auto_rerun":
                self._stop(message.stop_auto_rerun.fragment_id)
            elif kind == "delta" and message.delta.new_element.WhichOneof("type") == "exception":
                raise RuntimeError(f"{self._wanted}: {message.delta.new_element.exception.message}")
            elif kind == "script_finished" and message.script_finished == ForwardMsg.FINISHED_SUCCESSFULLY:
                self._check()

    def _check(self) -> None:
        if self._shown == self._hashes.get(self._wanted):
            self._complete.set()

    def _stop(self, fragment: str) -> None:
        if timer := self._timers.pop(fragment, None):
            timer.cancel()


class Times(dict[str, list[float]]):
    """Seconds by page."""

    def add(self, page: str, seconds: float) -> None:
        self.setdefault(page, []).append(seconds)

    @property
    def every(self) -> list[float]:
        return [seconds for each in self.values() for seconds in each]


async def use(address: str, number: int, tensor: str, until: float, every: float, times: Times) -> None:
    """Click through the pages, each at its own pace, until a moment of time.monotonic."""
    random = np.random.default_rng(number)
    await asyncio.sleep(random.uniform(0, every))
    options = {"subprotocols": ["streamlit"], "origin": f"http://{address}", "max_size": None, "open_timeout": LONGEST}
    async with connect(f"ws://{address}/_stcore/stream", **options) as connection:
        user = User(connection, tensor)
        try:
            await user.open(PAGES[0])
            for step in count(number):
                await asyncio.sleep(every * random.uniform(0.5, 1.5))
                if time.monotonic() > until:
                    return
                page = PAGES[step % len(PAGES)]
                times.add(page, await user.open(page))
        finally:
            user.leave()


async def together(address: str, users: int, tensors: list[str], seconds: float, every: float) -> Times:
    times, until = Times(), time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(use(address, number, tensors[number % len(tensors)], until, every, times))
    return times


@contextmanager
def server(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "binade", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"TENSOR_SAVE_DIR": str(root)}, stdout=subprocess.DEVNULL)
    try:
        for _ in range(round(10 * LONGEST)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


async def highest(process: psutil.Process, found: list[int]) -> None:
    while True:
        found.append(process.memory_info().rss)
        await asyncio.sleep(0.25)


async def measure(address: str, process: psutil.Process, tensors: list[str], args: argparse.Namespace) -> None:
    await together(address, 1, tensors, 8 * len(PAGES), 1)  # every module is imported, every page shown once
    start, seen = process.memory_info().rss, list[int]()
    watcher = asyncio.create_task(highest(process, seen))
    spent = [sum(process.cpu_times()[:2])]
    alone = await together(address, 1, tensors, max(args.seconds / 10, 15), 1)
    spent.append(sum(process.cpu_times()[:2]))
    many = await together(address, args.users, tensors, args.seconds, args.every)
    spent.append(sum(process.cpu_times()[:2]))
    await asyncio.sleep(LEFT)
    watcher.cancel()
    end = process.memory_info().rss
    print(f"{'page':10} {'1 user':>16} {f'{args.users} users':>16}  ratio of medians (median, 95th percentile in s)")
    for page in (*PAGES, "all"):
        one, all_ = (times.every if page == "all" else times.get(page, []) for times in (alone, many))
        a, b = (np.percentile(found, [50, 95]) if found else np.full(2, np.nan) for found in (one, all_))
        print(f"{page:10} {a[0]:8.2f}{a[1]:8.2f} {b[0]:8.2f}{b[1]:8.2f} {b[0] / a[0]:17.1f}   {len(all_)} views")
    one, all_ = ((b - a) / max(len(t.every), 1) for a, b, t in zip(spent, spent[1:], (alone, many), strict=False))
    print(f"processor time of the server by view: {one:.2f} s with one user, {all_:.2f} s with {args.users}")
    print(f"resident  start {start / 1e6:.0f} MB  peak {max(seen) / 1e6:.0f} MB  end {end / 1e6:.0f} MB"
          f" ({100 * (end / start - 1):+.0f} %)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between a user's clicks")
    parser.add_argument("--tensors", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "runs"
        root.mkdir()
        with Recorder(
            root, label="values", config={"model": "llama31-8b", "recipe": "bf16"}, scores=SCORED
        ) as recorder:
            for layer in range(1, WITH_VALUES + 1):
                x = torch.randn(VALUES // 512, 512)
                recorder.record("input", x, layer=layer, module="fc1", operation="forward", phase="pre", dim=-1)
        make_root(root, args.tensors, 5)
        with Catalog.open(root) as catalog:
            rows_ = catalog.tensors()
        tensors = rows_.loc[rows_["path"].notna(), "tensor_id"].tolist()
        writing = multiprocessing.get_context("spawn").Process(target=collector, args=(root,), daemon=True)
        with server(root) as (address, process):
            writing.start()
            try:
                asyncio.run(measure(address, process, tensors, args))
            finally:
                writing.kill()
                writing.join()


if __name__ == "__main__":
    main()
