"""Runs and the bf16 run that saw the same data.

Runs are matched by what they have read, see data.same_data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.questions.shared.labels import run_labels
from binade.collector.recipes.recipe import round_anything
from binade.collector.training.config import layers_of
from binade.data.catalog import Catalog
from binade.data.difference import OVERRIDES
from binade.data.filter import Filter
from binade.data.same_data import CONFIGURATION, corpus_of, data_key, states_all

OF_MODEL = ("model", "size", "dataset")
PARTS = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router", "product": "Declared products"}


def runs_with_reference(runs: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """Every run, oldest first, with the columns

    run_id, recipe, color
    look       its color and dash among these runs, as `style.run_styles`
    rounded    the recipe; what was rounded if its name does not say so; for an import, the run's id
    name       the one that users gave it, else `rounded`
    label      the name, unique
    PARTS      one column per part: its format, "bf16" if it is not rounded; None if only losses were imported
    reference  the run_id of the newest bf16 run on the same data, or None
    references the run_ids of all of them, the newest first
    quantized  whether any part is, or the recipe rounds anything else
    seed
    data       the same for runs on the same data from the same weights; None if that is unknown
    settings   all other settings that are the same in runs that differ in recipe and seed
    stated     whether run.json states all of same_data.CONFIGURATION
    """
    runs = runs.sort_values(["started", "run_id"], ignore_index=True)
    table = runs[["run_id", "recipe", "started", "color"]].copy()
    wide: dict[Any, Any] = {(row.run_id, row.part): row.format or row.gradient_format for row in parts.itertuples()}
    configs = [json.loads(config) for config in runs["config"]]
    losses_alone = pd.Series(["loss_column" in config for config in configs], table.index, bool)
    for part in PARTS:
        parts_of = [wide.get((run_id, part), "bf16") for run_id in table["run_id"]]
        table[part] = pd.Series(parts_of, table.index, object).mask(losses_alone, None)
    other = table[list(PARTS)].notna() & (table[list(PARTS)] != "bf16")
    # All that is known of runs without tensors, and of state and communication.
    stated = pd.Series([round_anything(config.get("operands") or ()) for config in configs], table.index, bool)
    table["quantized"] = other.any(axis=1) | stated | (losses_alone & (table["recipe"] != "bf16"))
    firsts = runs["first_step"].astype(object).where(runs["first_step"].notna(), None)
    keys = [data_key(config, first) for config, first in zip(configs, firsts, strict=True)]
    table["data"] = pd.Series(keys, table.index, object)
    table["seed"] = [str(config.get("seed")) for config in configs]
    others = tuple(name for name in (*CONFIGURATION, *OVERRIDES) if name != "seed")
    table["settings"] = [
        tuple(map(str, (*map(config.get, others), config.get("dp") or 1, corpus_of(config), layers_of(config))))
        for config in configs
    ]
    table["stated"] = pd.Series([states_all(config) for config in configs], table.index, bool)
    plain = table[(table["recipe"] == "bf16") & ~table["quantized"] & table["data"].notna()]
    on_data = {data: tuple(ids[::-1]) for data, ids in plain.groupby("data")["run_id"].agg(list).items()}
    table["references"] = [on_data.get(data, ()) for data in table["data"]]
    table["reference"] = [next(iter(ids), None) for ids in table["references"]]
    table["rounded"] = [_rounded(row) for _, row in table.iterrows()]
    table["name"] = runs["name"].fillna(table["rounded"])
    table["label"] = run_labels(table)
    chosen = table["color"].astype(object).where(table["color"].notna(), None)
    table["look"] = pd.Series(style.run_styles([*zip(table["rounded"], chosen, strict=True)]), table.index, object)
    return table


def every_run(opened: Catalog) -> pd.DataFrame:
    """`runs_with_reference` of all runs, which all sessions share."""
    key = "every run", opened.state()
    return opened.kept(key, lambda: runs_with_reference(opened.runs(), opened.parts())).copy(deep=False)


def some_runs(opened: Catalog, runs: pd.DataFrame) -> pd.DataFrame:
    """`runs_with_reference` of some of the runs, with the looks that they have among all."""
    table = runs_with_reference(runs, opened.parts())
    return table.assign(look=table["run_id"].map(every_run(opened).set_index("run_id")["look"]))


# What a question may read besides the runs of its filter: see `Question.beyond`


def references_of(opened: Catalog, where: Filter, run_ids: Collection[str]) -> list[str]:
    """The bf16 runs that these are compared with."""
    table = every_run(opened)
    return list(table.loc[table["run_id"].isin(run_ids), "reference"].dropna().unique())


def compared_to(opened: Catalog, where: Filter, run_ids: Collection[str]) -> list[str]:
    """The runs that are compared with one of these as their bf16 run."""
    table = every_run(opened)
    return list(table.loc[table["quantized"] & table["reference"].isin(run_ids), "run_id"])


def same_model(opened: Catalog, where: Filter, run_ids: Collection[str]) -> list[str]:
    """All runs of the models, sizes and datasets that these have."""
    runs = opened.runs()
    of = [tuple(row) for row in runs[list(OF_MODEL)].astype(str).itertuples(index=False)]
    here = {each for each, run in zip(of, runs["run_id"], strict=True) if run in run_ids}
    return [run for each, run in zip(of, runs["run_id"], strict=True) if each in here]


# Tables and titles


def compared_with(table: pd.DataFrame, run_id: str) -> pd.DataFrame:
    """The table of `runs_with_reference` with this run as the reference of all others on the same data."""
    data = table.loc[table["run_id"] == run_id, "data"].iloc[0]
    others = (table["data"] == data) & (table["run_id"] != run_id)  # None equals nothing
    references = others.map({True: (run_id,), False: ()})
    return table.assign(reference=others.map({True: run_id, False: None}), references=references, quantized=others)


def run_titles(table: pd.DataFrame) -> dict[str, str]:
    """What a list of runs shows of each, and is searched by: a dot of the color that a user chose, the label, the
    recipe where the label does not name it, and when it started, if that is known. table: of `runs_with_reference`."""
    titles = {}
    for _, run in table.iterrows():
        dot = "" if pd.isna(run["color"]) else f"{_dot(run['color'])} "
        rounded = "" if run["rounded"] in run["label"] else f" · {run['rounded']}"
        started = "" if pd.isna(run["started"]) else f" · {run['started']:%Y-%m-%d %H:%M}"
        titles[str(run["run_id"])] = f"{dot}{run['label']}{rounded}{started}"
    return titles


DOTS = {"🔴": (221, 46, 68), "🟠": (244, 144, 12), "🟡": (253, 203, 88), "🟢": (120, 177, 89), "🔵": (85, 172, 238),
        "🟣": (170, 142, 214), "🟤": (193, 105, 79), "⚫": (49, 55, 61), "⚪": (230, 231, 232)}  # fmt: skip


def _dot(color: str) -> str:
    """The colored circle that is nearest: a list shows text only."""
    own = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return min(DOTS, key=lambda dot: math.dist(own, DOTS[dot]))


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


def _rounded(run: pd.Series) -> str:
    if run["recipe"] == "bf16" and run["quantized"]:
        return " + ".join(f"{part}_{run[part]}" for part in PARTS if run[part] != "bf16") or "bf16, changed"
    result: str = run["run_id"] if pd.isna(run["recipe"]) else run["recipe"]
    return result
