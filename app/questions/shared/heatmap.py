"""Heatmaps as pictures: a single mark regardless of the number of cells, with axes and a legend in exactly the same
colors. Invisible rectangles above it have the tooltips."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.data.words.text import number_text

NO_VALUE = (0x80, 0x88, 0x99, 0x30)  # RGBA: close to the card that it is drawn on, light or dark
HOVER = 48  # rectangles with a tooltip, each way
SHARP = 640  # minimum size of a picture in pixels, so that the browser does not blur its cells


def _palette() -> np.ndarray:
    """255 colors along the ramp, and one for no value: uint8 [256, 3]."""
    return np.concatenate([style.mixed(style.RAMP, 255), np.array([NO_VALUE[:3]], np.uint8)])


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(values: np.ndarray, low: float, high: float, reverse: bool = False) -> bytes:
    """A PNG of [rows, columns], its first row at the top: colors along the ramp from low to high, which is larger, gray
    for NaN.

    8 bits per pixel (ISO/IEC 15948, color type 3). Small pictures are enlarged by whole pixels.
    """
    place = (values - low) / (high - low)
    place = np.clip(1 - place if reverse else place, 0, 1)
    index = np.where(np.isnan(place), 255, np.nan_to_num(place) * 254).round().astype(np.uint8)
    for axis in (0, 1):
        index = np.repeat(index, max(1, math.ceil(SHARP / max(index.shape[axis], 1))), axis=axis)
    rows, columns = index.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), index], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    alpha = bytes([*[255] * 255, NO_VALUE[3]])
    parts = (
        (b"IHDR", header), (b"PLTE", _palette().tobytes()), (b"tRNS", alpha), (b"IDAT", zlib.compress(lines, 6)),
        (b"IEND", b""),
    )  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _spans(cells: int, count: int) -> pd.DataFrame:
    """The cells of an axis of `count` rows or columns in at most HOVER groups: columns at (the first cell), low
    and high (on the axis), words (the rows or columns)."""
    at = np.arange(0, cells, -(-cells // HOVER))
    after, size = np.append(at[1:], cells), -(-count // cells)
    ends = zip(at * size, np.minimum(after * size, count) - 1, strict=True)
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ends]
    return pd.DataFrame({"at": at, "low": at * count / cells, "high": after * count / cells, "words": words})


def _tooltips(values: np.ndarray, rows: int, columns: int, missing: str) -> pd.DataFrame:
    """At most HOVER × HOVER rectangles: columns x, x2, y, y2, rows, columns and values (in words)."""
    down, across = _spans(values.shape[0], rows), _spans(values.shape[1], columns)

    def over(reduce: np.ufunc, cells: np.ndarray) -> np.ndarray:
        result: np.ndarray = reduce.reduceat(reduce.reduceat(cells, down["at"], axis=0), across["at"], axis=1).ravel()
        return result

    def text(low: float, high: float, gap: bool) -> str:
        if math.isnan(low):
            return missing
        span = number_text(low) if low == high else f"lowest {number_text(low)}, highest {number_text(high)}"
        return f"{span}, in part {missing}" if gap else span

    ranges = over(np.fmin, values), over(np.fmax, values), over(np.logical_or, np.isnan(values))
    table = down.merge(across, how="cross", suffixes=("_y", "_x"))
    names = {"low_x": "x", "high_x": "x2", "low_y": "y", "high_y": "y2", "words_y": "rows", "words_x": "columns"}
    return table.rename(columns=names)[[*names.values()]].assign(values=[*map(text, *ranges)])


def heatmap(
    values: np.ndarray,
    title: style.Title,
    x: tuple[str, int],
    y: tuple[str, int],
    value_title: str,
    limits: tuple[float, float] | None = None,
    reverse: bool = False,
    missing: str = "no value",
) -> Chart:
    """A picture of [rows, columns] with axes (title, number of rows or columns) and a legend; its first row at the top.

    limits: the values at the ends of the ramp; by default the smallest and largest finite ones. reverse: the ramp's
    bright end is low. missing: what NaN means, in words.
    """
    finite = values[np.isfinite(values)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    high = high if high > low else low + 1
    shown = np.where(np.isposinf(values), high, np.where(np.isneginf(values), low, values))
    url = "data:image/png;base64," + base64.b64encode(png(shown, low, high, reverse)).decode()
    corner = pd.DataFrame({"x": [0], "x2": [x[1]], "y": [0], "y2": [y[1]], "url": [url]})
    whole = {"tickMinStep": 1, "grid": False}  # rows and columns are counted
    picture = plot.mark(
        "image", corner, aspect=False, x2="x2", y2="y2", url="url",
        x=plot.x("x", x[0], whole, domain=[0, x[1]], nice=False, zero=False),
        y=plot.y("y", y[0], whole, domain=[y[1], 0], nice=False, zero=False),
    )  # fmt: skip
    ends = pd.DataFrame({"x": [0, 0], "y": [0, 0], "value": [low, high]})
    bar = {"title": value_title, "orient": "right", "gradientLength": 180, "tickCount": 5}
    color = plot.ramp("value", bar, domain=[low, high], range=style.RAMP[::-1] if reverse else style.RAMP)
    legend = plot.mark("point", ends, x="x", y="y", color=color, opacity=0, size=0)
    tips = plot.tips(rows=y[0].partition(" (")[0], columns=x[0].partition(" (")[0], values=value_title)
    cells = plot.mark(
        "rect", _tooltips(values, y[1], x[1], missing), x="x", x2="x2", y="y", y2="y2", opacity=0, aria=False, tips=tips
    )
    return plot.layers(title, "", picture, legend, cells)
