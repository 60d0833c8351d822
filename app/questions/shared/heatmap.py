"""Heatmaps as pictures: a single mark regardless of the number of cells, with axes and a legend in exactly the same
colors."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style

NO_VALUE = (0x9A, 0xA1, 0xB2)
SHARP = 640  # minimum size of a picture in pixels, so that the browser does not blur its cells


def _palette() -> np.ndarray:
    """255 colors along the ramp, and one for no value: uint8 [256, 3]."""
    return np.concatenate([style.mixed(style.RAMP, 255), np.array([NO_VALUE], np.uint8)])


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(values: np.ndarray, low: float, high: float, reverse: bool = False) -> bytes:
    """A PNG of [rows, columns], its first row at the top: colors along the ramp from low to high, gray for NaN.

    8 bits per pixel (ISO/IEC 15948, color type 3). Small pictures are enlarged by whole pixels.
    """
    place = (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 0.5)
    place = np.clip(1 - place if reverse else place, 0, 1)
    index = np.where(np.isnan(place), 255, np.nan_to_num(place) * 254).round().astype(np.uint8)
    for axis in (0, 1):
        index = np.repeat(index, max(1, math.ceil(SHARP / max(index.shape[axis], 1))), axis=axis)
    rows, columns = index.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), index], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", _palette().tobytes()), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def heatmap(
    values: np.ndarray,
    title: alt.TitleParams,
    x: tuple[str, float, float],
    y: tuple[str, float, float],
    value_title: str,
    limits: tuple[float, float] | None = None,
    reverse: bool = False,
) -> alt.LayerChart:
    """A picture of [rows, columns] with axes (title, first, last) and a legend; its first row at the top.

    limits: the values at the ends of the ramp; by default the smallest and largest finite ones. reverse: the ramp's
    bright end is low.
    """
    finite = values[np.isfinite(values)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    shown = np.where(np.isposinf(values), high, np.where(np.isneginf(values), low, values))
    url = "data:image/png;base64," + base64.b64encode(png(shown, low, high, reverse)).decode()
    corner = pd.DataFrame({"x": [x[1]], "x2": [x[2]], "y": [y[1]], "y2": [y[2]], "url": [url]})
    whole = alt.Axis(tickMinStep=1)  # rows and columns are counted
    picture = (
        alt.Chart(corner)
        .mark_image(aspect=False)
        .encode(
            x=alt.X("x:Q", title=x[0], axis=whole, scale=alt.Scale(domain=[x[1], x[2]], nice=False, zero=False)),
            x2="x2:Q",
            y=alt.Y("y:Q", title=y[0], axis=whole, scale=alt.Scale(domain=[y[2], y[1]], nice=False, zero=False)),
            y2="y2:Q",
            url="url:N",
        )
    )
    ends = pd.DataFrame({"x": [x[1], x[1]], "y": [y[1], y[1]], "value": [low, high if high > low else low + 1]})
    ramp = style.RAMP[::-1] if reverse else style.RAMP
    scale = alt.Scale(domain=[low, high if high > low else low + 1], range=ramp, interpolate="rgb")
    bar = alt.Legend(
        title=value_title, orient="right", gradientLength=180, labelExpr="format(datum.value, '.4~g')", tickCount=5
    )
    color = alt.Color("value:Q", scale=scale, legend=bar)
    legend = alt.Chart(ends).mark_point(opacity=0, size=0).encode(x="x:Q", y="y:Q", color=color)
    result: alt.LayerChart = (picture + legend).properties(title=title)
    return result
