"""Renders charts as SVG and PDF, and as the data that a page embeds, in one process per available core: vl-convert
draws one chart at a time.

The processes run this file as a script. It imports nothing of the project, so that each of them takes a fifth of the
memory that the index and the analysis need, and they end when their input ends, even if their parent was killed.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

# Liberation Sans, the font that is always available, lacks these (but has ¹²³). A text with one of them would be drawn
# entirely in some other font of the machine.
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "0123456789−T", strict=True))
SIMILAR = str.maketrans({"⟨": "‹", "⟩": "›", "‖": "||"})
_TEXT = re.compile(r"(<(?:text|tspan)\b[^>]*>)([^<]*)")
_SIZES = re.compile(r' (width|height)="([0-9.]+)"')
_CLIP = re.compile(r"((?:id=\"|url\(#)clip)([0-9]+)(?=[\")])")
_SHIFTED = re.compile(f"([{''.join(SUBSCRIPTS)}]+|[{''.join(SUPERSCRIPTS)}]+)")
SMALL, DOWN, UP = 0.72, 0.2, -0.36  # a small digit's size, and its shift down or up, in ems of the text


class RenderError(RuntimeError):
    """A chart could not be drawn. The message says why."""


SCALE = 1.5  # pixels of a PNG per pixel of an SVG


def as_png(svg: bytes) -> bytes:
    """A picture as PNG."""
    import vl_convert

    png: bytes = vl_convert.svg_to_png(svg.decode(), scale=SCALE)
    return png


class Picture(NamedTuple):
    """A drawn chart with its caption. embedded: what page.js draws and saves: JSON, compressed, as Base64."""

    svg: bytes
    embedded: str


class Paper(NamedTuple):
    """A chart drawn for a paper."""

    svg: bytes
    pdf: bytes


class Renderers:
    """A context manager with processes that draw. Requests are handled in order."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="renderer", initializer=self._start)
        self._own = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Renderers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._pool.shutdown(wait=True)
        for process in self._processes:
            process.communicate()

    def render(
        self,
        spec: dict[str, Any],
        caption: dict[str, Any],
        colors: dict[str, str],
        embedded: dict[str, Any] | None = None,
    ) -> Future[Picture]:
        """Draw a Vega-Lite specification with its caption (`Figure.caption_svg`) in the theme's colors and font.
        embedded: the CSV that goes into a page with both, as "csv", and what is different in the specification there,
        as "spec". The future raises RenderError."""
        request = {"spec": spec, "caption": caption, "colors": colors, "embedded": embedded or {}}
        return self._pool.submit(self._picture, request)

    def paper(self, spec: dict[str, Any], mm: float) -> Future[Paper]:
        """Draw a Vega-Lite specification at this width. The future raises RenderError."""
        return self._pool.submit(self._paper, {"spec": spec, "mm": mm})

    def bundle(self) -> Future[str]:
        """Vega, Vega-Lite and vega-embed as one script."""
        return self._pool.submit(lambda: self._request({})["script"])

    def _start(self) -> None:
        # In its own process group, so that Ctrl-C reaches only the parent, which then ends this process.
        self._own.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self._processes.append(self._own.process)

    def _picture(self, request: dict[str, Any]) -> Picture:
        answer = self._request(request)
        return Picture(answer["svg"].encode(), answer["embedded"])

    def _paper(self, request: dict[str, Any]) -> Paper:
        answer = self._request(request)
        return Paper(answer["svg"].encode(), base64.b64decode(answer["pdf"]))

    def _request(self, request: dict[str, Any]) -> dict[str, str]:
        process = self._own.process
        try:
            process.stdin.write(json.dumps(request, allow_nan=False).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise RenderError("the process that draws the charts has ended: killed, or out of memory")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise RenderError(f"a chart cannot be drawn: {answer['error']}")
        return answer


def render(
    spec: dict[str, Any], caption: dict[str, Any], colors: dict[str, str], embedded: dict[str, Any]
) -> dict[str, str]:
    import vl_convert

    # Passed as text, because vl-convert takes longer for a dictionary.
    svg = supported(captioned(_numbered(vl_convert.vegalite_to_svg(json.dumps(spec))), caption, colors))
    shown = {name: value for name, value in (spec | embedded.get("spec", {})).items() if name != "config"}
    content = {"spec": shown, "caption": caption, "csv": embedded.get("csv")}
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return {"svg": svg, "embedded": base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()}


def on_paper(spec: dict[str, Any], mm: float) -> dict[str, str]:
    """The drawing without a caption, at this width."""
    import vl_convert

    svg = supported(_numbered(vl_convert.vegalite_to_svg(spec)))
    pdf = vl_convert.svg_to_pdf(_wide(svg, mm / 25.4 * 72, ""))  # it takes pixels for points
    svg = _wide(svg, mm, "mm")
    return {"svg": svg, "pdf": base64.b64encode(pdf).decode()}


def _wide(svg: str, width: float, unit: str) -> str:
    before, height = (float(size) for _, size in _SIZES.findall(svg)[:2])
    sizes = iter((f' width="{width:.6g}{unit}"', f' height="{width * height / before:.6g}{unit}"'))
    return _SIZES.sub(lambda _: next(sizes), svg, count=2)


def _numbered(svg: str) -> str:
    """The drawing with its clips numbered from 0: Vega counts those of all the drawings that its process has made."""
    numbers: dict[str, int] = {}
    return _CLIP.sub(lambda match: f"{match[1]}{numbers.setdefault(match[2], len(numbers))}", svg)


def captioned(svg: str, caption: dict[str, Any], colors: dict[str, str]) -> str:
    """The drawing with its caption below, on the background of the card."""
    sizes = dict(_SIZES.findall(svg[: svg.index(">") + 1]))
    chart_height = float(sizes["height"])
    width, height = max(float(sizes["width"]), caption["width"]), chart_height + caption["height"]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">'
        f'<rect width="{width:g}" height="{height:g}" fill={quoteattr(colors["card"])}/>{svg}'
        f'<g transform="translate(0 {chart_height:g})" font-family={quoteattr(colors["font"])} '
        f"fill={quoteattr(colors['quiet'])}>{caption['svg']}</g></svg>"
    )


def supported(svg: str) -> str:
    """The drawing with only characters that Liberation Sans has: superscript and subscript digits become small ordinary
    digits."""
    return _TEXT.sub(lambda match: match[1] + _shifted(match[2].translate(SIMILAR)), svg)


def _shifted(text: str) -> str:
    parts, shift = [], 0.0  # of the text so far, in ems
    for part in filter(None, _SHIFTED.split(text)):
        table, to = next(((t, to) for t, to in ((SUBSCRIPTS, DOWN), (SUPERSCRIPTS, UP)) if part[0] in t), ({}, 0.0))
        size, attributes = (SMALL, f' font-size="{SMALL:.0%}"') if table else (1.0, "")
        move = f' dy="{(to - shift) / size:.3g}em"' if to != shift else ""
        letters = "".join(table.get(letter, letter) for letter in part)
        parts.append(f"<tspan{move}{attributes}>{letters}</tspan>" if move or table else part)
        shift = to
    return "".join(parts)


def main() -> None:
    """Answer each request, a line of JSON on stdin, with one on stdout: a picture ({"svg"}), one
    for a paper ({"svg", "pdf"}) if it has "mm", the scripts ({"script"}) for an empty request, or {"error"}."""
    import vl_convert

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that was killed reads no answer: end without a traceback

    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if "mm" in request:
                answer = on_paper(**request)
            else:
                answer = render(**request) if request else {"script": vl_convert.javascript_bundle()}  # type: ignore[call-arg]
        except (ValueError, KeyError, TypeError) as error:
            answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
