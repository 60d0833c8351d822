"""Figures to PNG and SVG, by as many painters as there are cores to use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from binade.app.figure import Figure
from binade.app.theme import FONT, LIGHT, Theme

PAINTER = Path(__file__).with_name("painter.py")
WIDTH, HEIGHT = 760, 360  # pixels, of a chart that does not say its height
SCALE = 1.5  # pixels of a picture a pixel of a page


class PaintError(RuntimeError):
    """A chart could not be drawn. The message says why."""


@dataclass(frozen=True)
class Painted:
    png: bytes
    svg: bytes


def spec_of(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart's specification with its data in it, however many rows; no address of its schema."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec = chart.to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return spec


def sized(spec: dict[str, Any], width: int | str, height: int | None) -> dict[str, Any]:
    """The specification at a size that holds title, axes and legend; concatenated charts have sizes of their own."""
    if any(key in spec for key in ("concat", "hconcat", "vconcat")):
        return spec
    return spec | {"width": width, "height": height or HEIGHT, "autosize": {"type": "fit", "contains": "padding"}}


class Painters:
    """Processes that draw; a context manager that ends them. Requests are taken in their order."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="painter")
        self._here = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Painters:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._pool.shutdown(wait=True)
        for process in self._processes:
            process.communicate()

    def paint(self, figure: Figure, spec: dict[str, Any], theme: Theme = LIGHT, width: int = WIDTH) -> Future[Painted]:
        """The figure drawn with its caption. The future raises PaintError."""
        request = {
            "spec": sized(spec, width, figure.height) | {"config": theme.config()},
            "caption": figure.caption.splitlines(),
            "colors": {"card": theme.card, "quiet": theme.quiet},
            "font": FONT,
            "scale": SCALE,
        }
        return self._pool.submit(lambda: Painted(*self._ask(request)))

    def bundle(self) -> Future[str]:
        """Vega, Vega-Lite and vega-embed as one script."""
        return self._pool.submit(lambda: self._ask({"bundle": True})[0].decode())

    def _ask(self, request: dict[str, Any]) -> list[bytes]:
        process = self._process()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(request, allow_nan=False).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or b"null")
        except OSError:
            answer = None
        if answer is None:
            raise PaintError("the process that draws the charts has ended: killed, or out of memory")
        if "error" in answer:
            raise PaintError(f"a chart cannot be drawn: {answer['error']}")
        return [process.stdout.read(size) for size in answer["sizes"]]

    def _process(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._here, "process"):
            # A group of its own: Ctrl-C is for the parent, which ends it.
            self._here.process = subprocess.Popen(
                [sys.executable, str(PAINTER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
            self._processes.append(self._here.process)
        process: subprocess.Popen[bytes] = self._here.process
        return process
