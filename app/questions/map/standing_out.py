"""The cells of a map that lose more or less than the format makes normally distributed values lose, each named. All
cells were measured, so nothing is inferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from binade.app.draw.style import MEASURES
from binade.app.measures.map_measure import LAYER
from binade.app.questions.map.charts import label
from binade.app.questions.map.compute import MapRow, with_rows
from binade.data.compare import evidence
from binade.data.compare.evidence import Sentence, exact
from binade.data.index.catalog import USED
from binade.data.words.names import layer_name
from binade.data.words.text import counted, number_text
from binade.quant.normal import VS_NORMAL, normal_sqnr

FAR = 2.0  # dB from the SQNR of normal values, at which a cell stands out: 1.6 times the squared error
NAMED = 3  # exceptions that the headline names
DECIDES = 0.3  # share of the squared error from which a cause is named

Segment = tuple[str, str]  # a text, and the cell that it links to, "" for none


@dataclass(frozen=True)
class StandingOut:
    """An operand of one or more GEMMs in neighboring layers or iterations, all of which stand out. cell: the furthest
    off, at the place `worst`. count: of the cells."""

    name: str
    cell: str
    value: float
    worst: pd.Series
    count: int


@dataclass(frozen=True)
class Headline:
    """What a map of SQNR says: as a sentence, and as texts of which some link to cells."""

    sentence: Sentence
    segments: tuple[Segment, ...]


def cell_name(row: str, column: int) -> str:
    """The name of a cell, as in the address."""
    return f"{row}/{column}"


def exceptions(table: pd.DataFrame) -> pd.DataFrame:
    """The cells that lose FAR or more beyond normal values, worst first. table: of VS_NORMAL, with row."""
    away = table["value"].astype(float)
    return table[away <= -FAR].sort_values("value", kind="stable", ignore_index=True)


def cause_of(score: pd.Series) -> Sentence:
    """What most of the squared error is from, if one cause decides; empty if none does."""
    for name, words in (("flushed_error_share", "to zero"), ("saturated_error_share", "saturated")):
        if score[name] >= DECIDES:
            share = exact(MEASURES[name], score[name])
            return Sentence(f"{share.text} of the error {words}", (share,))
    return Sentence()


def headline(
    table: pd.DataFrame, rows: Iterable[MapRow], across: str, fmt: str, formats: Sequence[str],
    cause: Callable[[pd.Series], Sentence] = lambda cell: Sentence(),
) -> Headline:  # fmt: skip
    """table: `Map.table` of rows, of VS_NORMAL. fmt: of the scope; formats: those that the cells are in. cause: as
    `cause_of` the score of a cell."""
    measure, sqnr = MEASURES[VS_NORMAL], MEASURES["sqnr_db"]
    rows = list(rows)
    normal = {name: exact(sqnr, normal_sqnr(name)) for name in formats}
    known = table[table["value"].notna()]
    away = known["value"].astype(float)
    bad, good = exceptions(known), known[(away >= FAR) & (away < math.inf)]
    word = "operands" if (known["tensors"] == 1).all() else "cells"
    every = evidence.listed([f"{sqnr.quantity(value.value)}{f' in {name}' * (len(normal) > 1)}"
                             for name, value in normal.items()])  # fmt: skip
    named = formats[0] if len(formats) == 1 else fmt
    used = ", as used," * (fmt == USED)
    subject = "As used, formats do what they do" if named == USED else f"{named}{used} does what it does"
    usual = len(known) - len(bad) - len(good)
    text = f"{subject} to normal values ({every}) for {usual:,} of {len(known):,} {word}."
    measured = [*normal.values(), exact(MEASURES[VS_NORMAL], FAR)]
    segments: list[Segment] = [(text, "")]
    limit = f"{number_text(FAR)} dB"
    if len(bad):
        groups = _groups(bad, rows, across)
        segments.append((f" {len(bad):,} lose{_s(len(bad))} {limit} or more beyond that: ", ""))
        for index, group in enumerate(groups[:NAMED]):
            segments.append((", " * bool(index), ""))
            segments.append((group.name, group.cell))
            why = cause(group.worst)
            segments.append((f" ({number_text(group.value, '.1f')}{f'; {why}' * bool(why)})", ""))
            measured += [exact(measure, group.value), *why.evidence]
        left = len(bad) - sum(group.count for group in groups[:NAMED])
        segments.append((f" and {left:,} more." if left > 0 else ".", ""))
    else:
        segments.append((f" None loses {limit} or more beyond that.", ""))
    if len(good):
        worst, best = float(good["value"].min()), float(good["value"].max())
        segments.append((f" {len(good):,} lose{_s(len(good))} at least {limit} less.", ""))
        measured += [exact(measure, worst), exact(measure, best)]
    if zero := int((table["value"].isna() & (table["broken"] == 0)).sum()):
        segments.append((f" {zero:,} {'is' if zero == 1 else 'are'} all zero.", ""))
    text = "".join(part for part, _ in segments)
    return Headline(Sentence(text, tuple(measured)), tuple((part, cell) for part, cell in segments if part))


def broken(table: pd.DataFrame, rows: Iterable[MapRow], across: str, of: str = "operand") -> Sentence:
    """Which tensors have no value because of NaN or Inf, in the order of the network; empty if there are none.
    table: `Map.table`."""
    count = int(table["broken"].sum())
    if not count:
        return Sentence()
    names = []
    own = with_rows(table[table["broken"] > 0])
    for row in rows:
        columns = sorted(own.loc[own["row"] == row.key, across])
        names += [_where(label(row), run, across) for run in _neighbors(columns)]
    which = evidence.listed([*dict.fromkeys(names)])
    have = f"{counted(count, of)} {'has' if count == 1 else 'have'}"
    return evidence.say("{have} NaN or Inf in place of a value: {which}.", have=have, which=which)


def _groups(bad: pd.DataFrame, rows: list[MapRow], across: str) -> list[StandingOut]:
    """The exceptions of one operand and GEMM with neighboring layers together, worst first."""
    names = {row.key: label(row) for row in rows}
    several = {name for name in names.values() if [*names.values()].count(name) > 1}
    places: dict[tuple[str, tuple[int, ...]], list[pd.Series]] = {}  # the worst cell of each GEMM
    for key, row_cells in bad.groupby("row", sort=False):
        for run in _neighbors(sorted(row_cells[across])):
            worst = row_cells[row_cells[across].isin(run)].iloc[0]
            places.setdefault((names[str(key)], tuple(run)), []).append(worst)
    groups = []
    for (name, numbers), cells in places.items():
        gemms = f" ({evidence.listed([str(cell['gemm']) for cell in cells])})" if name in several else ""
        worst = min(cells, key=lambda cell: float(cell["value"]))
        cell = cell_name(str(worst["row"]), int(worst[across]))
        name, count = _where(name, numbers, across) + gemms, len(numbers) * len(cells)
        groups.append(StandingOut(name, cell, float(worst["value"]), worst, count))
    return sorted(groups, key=lambda group: group.value)


def _where(name: str, numbers: Sequence[int], across: str) -> str:
    """ "L1 proj input", "qkv input of layers 1 to 6"."""
    if across == LAYER and len(numbers) == 1:
        return f"{layer_name(numbers[0])} {name}"
    between = " and " if len(numbers) == 2 else " to "
    span = between.join(str(number) for number in dict.fromkeys((numbers[0], numbers[-1])))
    return f"{name} of {'layer' if across == LAYER else 'iteration'}{'s' * (len(numbers) > 1)} {span}"


def _s(count: int) -> str:
    return "s" * (count == 1)


def _neighbors(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers in runs without a gap."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
