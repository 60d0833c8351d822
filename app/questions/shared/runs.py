"""The table of runs as the app shows it: with colors, titles and lists."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from itertools import takewhile
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import OF_MODEL, references_in, run_labels, runs_with_references
from binade.data.words.filter import Filter
from binade.quant.formats import BF16

# What may differ between two recordings of the same tensor.
FIELDS_OF_RUNS = ("run_id", "model", "size", "dataset", "recipe", "quant_type", "iteration")


def every_run(opened: Catalog) -> pd.DataFrame:
    """`runs_with_references` of all runs, which all sessions share, and the column look: the color and dash of a run
    among all. Runs of one recipe have its color, as of `style.run_styles`, unless a user chose another one, and differ
    in the dash."""

    def read() -> pd.DataFrame:
        table = runs_with_references(opened.runs(), opened.parts())
        chosen = table["color"].astype(object).where(table["color"].notna(), None)
        first = table.drop_duplicates("group")
        styles = style.run_styles([*zip(first["rounded"], chosen[first.index], strict=True)])
        of_group = dict(zip(first["group"], styles, strict=True))
        colors = chosen.where(chosen.notna(), table["group"].map(lambda group: of_group[group][0]))
        nth = colors.groupby(colors).cumcount()
        dashes = (nth + table["group"].map(lambda group: of_group[group][1])) % len(style.DASHES)
        return table.assign(look=pd.Series([*zip(colors, dashes.astype(int), strict=True)], table.index, object))

    return opened.kept(("every run", opened.state()), read).copy(deep=False)


def some_runs(opened: Catalog, runs: pd.DataFrame) -> pd.DataFrame:
    """`runs_with_references` of some of the runs, with the looks that they have among all."""
    table = runs_with_references(runs, opened.parts())
    return table.assign(look=table["run_id"].map(every_run(opened).set_index("run_id")["look"]))


def with_plain_runs(opened: Catalog, table: pd.DataFrame) -> pd.DataFrame:
    """These runs of `every_run`, and the bf16 runs of their settings and of those of their references: the bands of
    gaps are made of those."""
    every = every_run(opened)
    references = every["run_id"].isin(table["references"].explode())
    settings = {*table["settings"], *every.loc[references, "settings"]}
    alike = every["settings"].isin(settings) & (every["recipe"] == BF16) & ~every["quantized"]
    return every[alike | every["run_id"].isin(table["run_id"])].reset_index(drop=True)


OF_RUNS = ("run_id", *OF_MODEL, "recipe")  # the fields of the filter that a run without tensors has


def matching(opened: Catalog, where: Filter, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Catalog.runs` that a filter selects: with a tensor that it selects, or of a run without tensors, by
    what the run says of itself."""
    if not where.items():
        return runs
    keep = runs["run_id"].isin(opened.distinct(("run_id",), where)["run_id"])
    if not where.without(*OF_RUNS).items():
        alone = runs["tensors"] == 0
        for name, values in where.items():
            alone &= runs[name].isin(values)
        keep |= alone
    return runs[keep]


def occurring(opened: Catalog) -> dict[str, list[Any]]:
    """`Catalog.facets`, with the values of runs without tensors."""
    runs, facets = opened.runs(), opened.facets()
    for name in OF_RUNS:
        facets[name] = list(dict.fromkeys([*facets.get(name, []), *runs[name].dropna()]))
    return facets


# What a question may read besides the runs of its filter: see `Question.beyond`


def references_of(opened: Catalog, where: Filter, run_ids: Collection[str]) -> list[str]:
    """The bf16 runs that these may be compared with."""
    table = every_run(opened)
    return references_in(table[table["run_id"].isin(run_ids)])


# Tables and titles


def run_titles(table: pd.DataFrame) -> dict[str, str]:
    """What a list of runs shows of each, and is searched by: a dot of the color that a user chose, the label without a
    long beginning that all share, the recipe where the label does not name it, and when it started, if that is known.
    table: of `runs_with_references`."""
    titles = {}
    for label, (_, run) in zip(distinct_ends(table["label"].tolist()), table.iterrows(), strict=True):
        dot = "" if pd.isna(run["color"]) else f"{_dot(run['color'])} "
        rounded = "" if run["rounded"] in run["label"] else f" · {run['rounded']}"
        started = "" if pd.isna(run["started"]) else f" · {run['started']:%Y-%m-%d %H:%M}"
        titles[str(run["run_id"])] = f"{dot}{label}{rounded}{started}"
    return titles


LONG = 12  # characters of a beginning that a list leaves out


def distinct_ends(labels: list[str]) -> list[str]:
    """Labels without the parts, ended by "_", "/" or "·", that all of them begin with, if these are long: a narrow list
    cuts the ends."""
    parts = [re.split(r"(?<=[_/])|(?<= · )", label)[:-1] for label in labels if len(labels) > 1]
    shared = takewhile(lambda same: len({*same}) == 1, zip(*parts, strict=False))
    start = sum(len(same[0]) for same in shared)
    return [f"…{label[start:]}" for label in labels] if start >= LONG else labels


DOTS = {"🔴": (221, 46, 68), "🟠": (244, 144, 12), "🟡": (253, 203, 88), "🟢": (120, 177, 89), "🔵": (85, 172, 238),
        "🟣": (170, 142, 214), "🟤": (193, 105, 79), "⚫": (49, 55, 61), "⚪": (230, 231, 232)}  # fmt: skip


def _dot(color: str) -> str:
    """The colored circle that is nearest: a list shows text only."""
    rgb = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return min(DOTS, key=lambda dot: math.dist(rgb, DOTS[dot]))


def labels_of(opened: Catalog) -> dict[str, str]:
    """The label of each run, by run_id."""
    table = every_run(opened)
    return dict(zip(table["run_id"], table["label"], strict=True))


def run_looks(table: pd.DataFrame) -> dict[str, tuple[str, int]]:
    """The color and dash of each run, by its label. table: of `every_run` or `some_runs`."""
    return dict(zip(table["label"], table["look"], strict=True))


def given_names(opened: Catalog) -> dict[str, str]:
    """The names that users gave, unique, by run_id."""

    def names() -> dict[str, str]:
        named = opened.runs().dropna(subset="name")
        return dict(zip(named["run_id"], run_labels(named), strict=True))

    return dict(opened.kept(("given names", opened.state()), names))
