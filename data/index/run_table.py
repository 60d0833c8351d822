"""The table of runs: what each rounds, and the bf16 run that saw the same data.

Runs are matched by what they have read, see data.compare.same_data. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import pandas as pd

from binade.data.compare.difference import OVERRIDES
from binade.data.compare.same_data import (
    CONFIGURATION,
    branch_of,
    branched_at,
    corpus_of,
    data_key,
    shared_settings,
    states_all,
    unit_of,
    unknown,
)
from binade.data.index.catalog import Catalog
from binade.data.run.directory import IMPORT
from binade.data.run.events import EVENT, Event, in_order
from binade.data.run.losses import LOSS, is_lost
from binade.data.run.rounding_alone import rounding_alone_of
from binade.data.words.text import one_line
from binade.quant.formats import BF16

# The settings that name one of several runs of a recipe, the first MOST_NAMED that differ.
NAMED_SETTINGS = (
    "seed", "branch_of", "model", "size", "dataset", "layers", "learning_rate", "train_iters", "warmup_iterations",
    "micro_batches", "micro_batch_size", "sequence_length", "tp", "dp", "sequence_parallel", *OVERRIDES,
)  # fmt: skip
OF_GROUPS = ("kind", *(name for name in NAMED_SETTINGS if name not in ("seed", "model", "size", "dataset")))
MOST_NAMED = 2
OF_MODEL = ("model", "size", "dataset")
PARTS = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router", "product": "Declared products"}


def runs_with_references(runs: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """Every run, oldest first, with the columns

    run_id, recipe, color
    rounded    the recipe; what was rounded if its name does not say so; for an import, the run's id
    name       the one that users gave it, else `rounded`
    label      the name, unique
    workload   what was trained on what, as `workload_of`
    group      the name of its recipe over seeds, unique within the workload: the name, and if runs with other settings
               share it, the settings in which they differ
    PARTS      one column per part: its format, "bf16" if it is not rounded; None if only losses were imported
    branch_of  the run_id of the run from which it branched off, or None
    branched   the first iteration of a branch; minus infinity for a run from the start
    start      equal for runs that count as repetitions of one another: `data`; of branches, seed and `branched`
    references the run_ids of the bf16 runs on the same data, the newest first: of several, a comparison
               takes the one that has most of what it compares. Of a branch: bf16 branches of the same checkpoint, and
               the run that it is of
    quantized  whether any part is, or the recipe rounds anything else
    seed
    data       the same for runs on the same data from the same weights; None if that is unknown
    unknown    what is not known of it, as of `same_data.unknown`
    settings   all other settings that are the same in runs that differ in recipe and seed
    stated     whether run.json states all of same_data.CONFIGURATION
    alone      what rounding alone does to its loss, a RoundingAlone; None if that was not measured
    unit       of its losses
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
    table["unknown"] = [unknown(config, first) for config, first in zip(configs, firsts, strict=True)]
    table["seed"] = [str(config.get("seed")) for config in configs]
    shared = [*map(shared_settings, configs)]
    table["settings"] = [*map(_settings, shared)]
    table["stated"] = pd.Series([states_all(config) for config in configs], table.index, bool)
    table["alone"] = pd.Series([*map(rounding_alone_of, configs)], table.index, object)
    table["unit"] = pd.Series([*map(unit_of, configs)], table.index, object)
    table["branch_of"] = [(branch_of(config) or {}).get("run_id") for config in shared]
    table["branched"] = pd.Series([*map(branched_at, shared)], table.index, float)
    starts = zip(table["data"], table["seed"], table["branched"], strict=True)
    table["start"] = pd.Series([d if at == -math.inf else (seed, at) for d, seed, at in starts], table.index, object)
    table["references"] = _references(table)
    table["rounded"] = [_rounded(row) for _, row in table.iterrows()]
    table["name"] = runs["name"].fillna(table["rounded"])
    table["label"] = run_labels(table.assign(config=runs["config"]))
    table["workload"] = pd.Series([*map(workload_of, shared)], table.index, object)
    table["group"] = _group_names(table, shared)
    return table


def _references(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """`references` of each run."""
    plain = table[(table["recipe"] == "bf16") & ~table["quantized"] & table["data"].notna()]
    on_data = {data: tuple(ids[::-1]) for data, ids in plain.groupby("data")["run_id"].agg(list).items()}
    plain_ids = {*plain["run_id"]}
    return [
        (*on_data.get(data, ()), *([origin] if origin in plain_ids else []))
        for data, origin in zip(table["data"], table["branch_of"], strict=True)
    ]


def _settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`settings` of a run, from what `shared_settings` says of it."""
    values = (config.get(name) for name in (*CONFIGURATION, *OVERRIDES) if name != "seed")
    return *map(str, (*values, config.get("dp") or 1, corpus_of(config), _layers(config))), *_history(config)


def workload_of(config: Mapping[str, Any]) -> str:
    """Model, size and data of a run in words, from its run.json: "llama32-1b tiny, wikipedia"."""
    named = " ".join(str(config[name]) for name in ("model", "size") if config.get(name))
    return one_line(f"{named or 'unnamed model'}, {config.get('dataset') or 'unnamed data'}", 100)


def _group_names(table: pd.DataFrame, configs: Sequence[Mapping[str, Any]]) -> pd.Series:
    """`group` of each run. configs: of the runs, in the order of the table, whose index is 0, 1 …"""
    names = table["name"].astype(object).copy()
    groups: dict[tuple[str, str], dict[Any, list[int]]] = {}
    for at, (workload, name, settings) in enumerate(
        zip(table["workload"], table["name"], table["settings"], strict=True)
    ):
        groups.setdefault((workload, name), {}).setdefault(settings, []).append(at)
    alike = [[*by_settings.values()] for by_settings in groups.values()]
    for several in alike:
        if len(several) > 1:
            for places, more in zip(several, _apart([configs[at[-1]] for at in several]), strict=True):
                names.iloc[places] += more
            texts = [names.iloc[places[0]] for places in several]
            for places, text in zip(several, texts, strict=True):
                if texts.count(text) > 1:
                    names.iloc[places] = table["label"].iloc[places[-1]]
    return names


def has_reference(table: pd.DataFrame) -> pd.Series:
    """Whether each run has a bf16 run. table: of `runs_with_references`."""
    return table["references"].map(bool).astype(bool)


def references_in(table: pd.DataFrame) -> list[str]:
    """All bf16 runs that those of a table may be compared with."""
    return list(dict.fromkeys(chain.from_iterable(table["references"])))


def compared_with(table: pd.DataFrame, run_id: str) -> pd.DataFrame:
    """The table of `runs_with_references` with this run as the reference of all others on the same data, of its
    branches and of the run that it is a branch of."""
    run = table[table["run_id"] == run_id].iloc[0]
    same = (table["data"] == run["data"]) | (table["branch_of"] == run_id) | (table["run_id"] == run["branch_of"])
    others = same & (table["run_id"] != run_id)  # None equals nothing
    references = others.map({True: (run_id,), False: ()})
    return table.assign(references=references, quantized=others)


def run_labels(runs: pd.DataFrame) -> list[str]:
    """Labels from the columns name, config, started and run_id: the name; if several runs share it, also the settings
    in which they differ ("mxfp8 · seed 2"); if these are the same, the time of the start, with the date if the dates
    differ; if that is the same, the end of the directory's name."""
    if runs.empty:
        return []
    name = runs["name"].astype(object).copy()
    for _, group in runs[name.duplicated(keep=False)].groupby("name", sort=False):
        name[group.index] += _differences([json.loads(config) for config in group["config"]])
    again = name.duplicated(keep=False)
    days = runs.loc[again, "started"].dt.date.nunique()
    when = runs["started"].dt.strftime(" at %Y-%m-%d %H:%M:%S UTC" if days > 1 else " at %H:%M:%S UTC")
    name = name.where(~again, name + when)
    alike = name.duplicated(keep=False)
    name = name.where(~alike, name + " · " + runs["run_id"].str[-6:])
    return name.where(~name.duplicated(keep=False), runs["run_id"]).tolist()


def _apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets groups of runs apart, the fewest settings that do: " · learning rate 0.003"."""
    said = [""] * len(configs)
    for name in OF_GROUPS:
        texts = [_text(name, config) for config in configs]
        if len({*texts}) > 1 and len({*said}) < len(said):
            said = [", ".join(filter(None, pair)) for pair in zip(said, texts, strict=True)]
    return [f" · {text}" if text else "" for text in said]


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets each of several runs apart from the others, at most MOST_NAMED settings: " · seed 2, tp 2"."""
    varying = [name for name in NAMED_SETTINGS if len({_text(name, config) for config in configs}) > 1]
    parts = [", ".join(filter(None, (_text(name, config) for name in varying[:MOST_NAMED]))) for config in configs]
    return [f" · {part}" if part else "" for part in parts]


def _text(name: str, config: Mapping[str, Any]) -> str:
    """A setting of a run in words; "" if it is unknown or none."""
    value = config.get(name)
    if name == "kind":
        return "imported" if value == IMPORT else ""
    if name == "branch_of" and value:
        return f"from iteration {value['iteration']}"
    if value is None or value is False or value in ("", []) or (name in ("tp", "dp") and value == 1):
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return one_line(f"{name.replace('_', ' ')} {shown}".removesuffix(" True"), 60)


def losses_of(opened: Catalog, run_ids: Iterable[str], lost: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The losses of runs; with lost, also the steps whose loss is not finite, as None. Those whose loss is unknown are
    left out."""
    return {
        run_id: [step for step in steps if step["loss"] is not None or (lost and is_lost(step))]
        for run_id, steps in opened.records(LOSS, run_ids).items()
    }


def events_of(opened: Catalog, run_ids: Iterable[str]) -> dict[str, list[Event]]:
    """The events of runs, of each as `events.in_order` sorts them."""
    return {run_id: in_order(events) for run_id, events in opened.records(EVENT, run_ids).items()}


def round_anything(lines: Iterable[str]) -> bool:
    """Whether a recipe with these lines, as run.json has them, rounds anything."""
    tables = ("state.", "communication.", "kv_cache.")
    return any(not line.endswith(f" {BF16}") or line.startswith(tables) for line in lines)


def _layers(config: Mapping[str, Any]) -> Any:
    """How many layers a run was asked to have; None if the number of parameters, one of CONFIGURATION, says it."""
    return None if config.get("parameters") else config.get("layers")


def _history(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What sets a branch apart from runs from the start, and from branches of other recipes or at other iterations."""
    branch = branch_of(config)
    return (f"{', '.join(branch['recipes'])} before iteration {branch['iteration']}",) if branch else ()


def _rounded(run: pd.Series) -> str:
    if run["recipe"] == "bf16" and run["quantized"]:
        return " + ".join(f"{part}_{run[part]}" for part in PARTS if run[part] != "bf16") or "bf16, changed"
    result: str = run["run_id"] if pd.isna(run["recipe"]) else run["recipe"]
    return result
