"""The cells of a map of SQNR that are far from what the format does to normally distributed values, each named."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from binade.app.questions.map.charts import label
from binade.app.questions.map.compute import LAYER, Row
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.evidence import Part, Sentence, exact, say
from binade.quant.normal import VS_NORMAL, normal_sqnr

FAR = 3.0  # dB from the SQNR of normal values, at which a cell stands out: twice or half the squared error


def standing_out(table: pd.DataFrame, rows: Iterable[Row], across: str, formats: Sequence[str]) -> Sentence:
    """table: `Map.table` of rows, of VS_NORMAL in these formats. All cells were measured, so nothing is inferred."""
    measure, sqnr = MEASURES[VS_NORMAL], MEASURES["sqnr_db"]
    normal = {fmt: exact(sqnr, normal_sqnr(fmt)) for fmt in formats}
    every = Sentence(
        evidence.listed([f"{sqnr.quantity(value.value)} in {fmt}" for fmt, value in normal.items()]),
        tuple(normal.values()),
    )
    far = exact(measure.with_sign(False), FAR)
    away = table["value"].astype(float)
    table = table.assign(away=away)[away < math.inf]
    names = {row.key: label(row) for row in rows}
    numbers = _Numbers(across, table.groupby("row")[across].agg(set).to_dict())
    said: list[str] = []
    for word, most, part in (("more", 3, table[table["away"] <= -FAR]), ("less", 1, table[table["away"] >= FAR])):
        if len(part):
            ends = [exact(measure, edge(part["away"])) for edge in (min, max)]
            parts: dict[str, Part] = {"n": len(part), "all": len(table), "far": far, "word": word}
            parts |= {"low": measure.text(ends[0].value), "high": ends[1], "names": _named(part, names, numbers, most)}
            text = "{n} of {all} cells lose at least {far} {word} than normal values ({low} to {high}): {names}."
            found = say(text, **parts)
            said.append(Sentence(found, (*found.evidence, ends[0])))
    if not said:
        near = say("All {all} cells are within {far} of normal values, which have ", all=len(table), far=far)
        return Sentence(f"{near}{every}.", (*near.evidence, *every.evidence))
    return evidence.together(*said, Sentence(f"Normal values have {every}.", every.evidence))


@dataclass(frozen=True)
class _Numbers:
    """across: layer_index or iteration; of: the numbers of all cells of a row, by its key."""

    across: str
    of: dict[Hashable, set[int]]

    def text(self, key: Hashable, numbers: Iterable[int]) -> str:
        """ "L1, L3 to L5", or "all 30 layers"."""
        word, of = ("L", "layers") if self.across == LAYER else ("iteration ", "iterations")
        own = sorted(numbers)
        return f"all {len(own)} {of}" if len(own) == len(self.of[key]) > 1 else _ranges(own, word)


def _named(part: pd.DataFrame, names: dict[str, str], numbers: _Numbers, most: int) -> str:
    """ "fc1 input, forward (L1, L3 to L5); QK grad scores, dgrad and wgrad (all 30 layers)", the furthest first,
    so many of them."""
    part = part.iloc[part["away"].abs().argsort()[::-1]]
    gemms: dict[tuple[str, str], list[str]] = {}
    for (key, gemm), own in part.groupby(["row", "gemm"], sort=False):
        gemms.setdefault((names[str(key)], numbers.text(key, own[numbers.across])), []).append(str(gemm))
    texts = [f"{name}, {evidence.listed(of)} ({where})" for (name, where), of in gemms.items()]
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _ranges(numbers: Sequence[int], word: str) -> str:
    """ "L1, L3 to L5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{word}{run[0]}" + (f" to {word}{run[-1]}" if len(run) > 1 else "") for run in runs)
