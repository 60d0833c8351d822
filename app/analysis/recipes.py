"""Runs against the bf16 run that saw the same data: which part costs the most loss, and what becomes of the gradients.

Runs are matched by configuration (SAME_DATA: two runs that agree in it start from the same weights and read the same
tokens in the same order), tensors by identity (`Catalog.twins`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from binade import quant
from binade.app.analysis.distribution import Distribution, distribution_of
from binade.app.analysis.labels import run_labels
from binade.data.catalog import Catalog, CatalogError
from binade.data.store import TensorFileError
from binade.quant import sketch as sketches
from binade.quant.metrics import errors

SAME_DATA = (
    "model", "size", "dataset", "corpus_sha256", "seed", "load_hf", "layers", "warmup_iterations", "micro_batches",
    "micro_batch_size", "sequence_length", "learning_rate",
)  # fmt: skip
PARTS = ("linear", "QK", "PV", "router")


def overview(runs: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """Every run, oldest first: run_id, recipe, name (the recipe; the run's id where none is known: imports; what was
    rounded where the recipe's name does not say it), label (the name, unique), a column for each of PARTS ("bf16" where
    it runs as it is), reference: the run_id of the newest bf16 run on the same data, or None; quantized."""
    runs = runs.sort_values(["started", "run_id"], ignore_index=True)
    table = runs[["run_id", "recipe", "started"]].copy()
    wide = {(row.run_id, row.part): row.format or row.gradient_format for row in parts.itertuples()}
    for part in PARTS:
        table[part] = [wide.get((run_id, part), "bf16") for run_id in table["run_id"]]
    table["quantized"] = [any(row[part] != "bf16" for part in PARTS) for _, row in table.iterrows()]
    keys = [_key(config) for config in runs["config"]]
    table["reference"] = [_reference(table, keys, index) for index in range(len(table))]
    table["name"] = [_name(row) for _, row in table.iterrows()]
    table["label"] = run_labels(table)
    return table


def _key(config: str) -> tuple:
    read = json.loads(config)
    return tuple(str(read.get(name)) for name in SAME_DATA)


def _reference(table: pd.DataFrame, keys: list[tuple], index: int) -> str | None:
    for other in reversed(range(len(table))):
        if keys[other] == keys[index] and not table["quantized"].iloc[other] and table["recipe"].iloc[other] == "bf16":
            return table["run_id"].iloc[other]
    return None


def _name(run: pd.Series) -> str:
    if run["recipe"] == "bf16" and run["quantized"]:
        return " + ".join(f"{part}_{run[part]}" for part in PARTS if run[part] != "bf16")
    return run["run_id"] if pd.isna(run["recipe"]) else run["recipe"]


def loss_gaps(table: pd.DataFrame, losses: dict[str, list[dict]]) -> pd.DataFrame:
    """Each run's loss against its reference's at the same iteration, warm-up left out.

    Columns run_id, label, iteration, loss, gap (nats per token; positive: worse than bf16). Iterations that the
    reference has not, and runs without a reference, are left out.
    """
    of = {run_id: {row["iteration"]: row["loss"] for row in rows} for run_id, rows in losses.items()}
    found = []
    for _, run in table.iterrows():
        base = of.get(run["reference"], {})
        for iteration, loss in sorted(of.get(run["run_id"], {}).items()):
            if iteration >= 0 and iteration in base:
                gap = {"iteration": iteration, "loss": loss, "gap": loss - base[iteration]}
                found.append({"run_id": run["run_id"], "label": run["label"], **gap})
    return pd.DataFrame(found, columns=["run_id", "label", "iteration", "loss", "gap"])


def costs(gaps: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row a quantized run, dearest first.

    Columns run_id, label, parts (what is rounded, in words), gap (mean over the iterations that both have), last (at
    the last), iterations, only (the part, where only one is rounded).
    """
    quantized = table[table["quantized"]].set_index("run_id")
    rows = []
    for run_id, part in gaps[gaps["run_id"].isin(quantized.index)].groupby("run_id", sort=False):
        run = quantized.loc[run_id]
        rounded = {name: run[name] for name in PARTS if run[name] != "bf16"}
        last = part.sort_values("iteration")["gap"].iloc[-1]
        text = ", ".join(f"{name} {fmt}" for name, fmt in rounded.items())
        rows.append(
            {"run_id": run_id, "label": run["label"], "parts": text, "gap": part["gap"].mean(), "last": last,
             "iterations": len(part), "only": next(iter(rounded)) if len(rounded) == 1 else None}
        )  # fmt: skip
    columns = ["run_id", "label", "parts", "gap", "last", "iterations", "only"]
    return pd.DataFrame(rows, columns=columns).sort_values("gap", ascending=False, ignore_index=True)


def parts_alone(costs: pd.DataFrame) -> pd.DataFrame:
    """Of `costs`, the runs in which one part alone is rounded, by part and format, dearest first.

    Columns only (the part), parts (it and the format, in words), gap (mean over the runs), runs.
    """
    alone = costs[costs["only"].notna()].groupby(["only", "parts"], as_index=False)
    return alone.agg(gap=("gap", "mean"), runs=("gap", "size")).sort_values("gap", ascending=False, ignore_index=True)


def gradients(
    catalog: Catalog, pairs: pd.DataFrame, done: Callable[[int], None] = lambda count: None
) -> tuple[pd.DataFrame, int]:
    """Each pair of `Catalog.pairs` compared: (its columns with cosine, gradient_bias ‖ĝ−g‖²/‖g‖², projection, and the
    sums they are made of; how many could not be read). done is told how many are through."""
    rows, unread = [], 0
    for index, pair in enumerate(pairs.to_dict("records")):
        try:
            own, base = catalog.load(pair["tensor_id"]), catalog.load(pair["reference_id"])
            found = errors(base, own)
        except (CatalogError, TensorFileError, ValueError):
            unread += 1
            continue
        rows.append(
            pair
            | {"cosine": found.cosine, "gradient_bias": found.relative_error**2, "projection": found.projection}
            | {"error": found.relative_error**2 * pair["reference_power"]}
        )
        done(index + 1)
    added = ["cosine", "gradient_bias", "projection", "error"]
    return pd.DataFrame(rows, columns=[*pairs.columns, *added]), unread


def gradient_summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`gradients` by columns: tensors, cosine (mean, each tensor alike), gradient_bias (of the summed powers)."""
    found = table.groupby(by, sort=False, dropna=False).agg(
        tensors=("cosine", "size"), cosine=("cosine", "mean"), square=("reference_power", "sum"), error=("error", "sum")
    )
    found = found.assign(gradient_bias=found["error"] / found["square"].replace(0, np.nan))
    return found.drop(columns=["square", "error"]).reset_index()


@dataclass(frozen=True)
class ThreeWay:
    """bf16's tensor g, the same rounded to a format, and the quantized run's tensor ĝ before its own rounding.

    table: rows rounding (of the rounded g against g), drift (ĝ against g) and both (the rounded ĝ against g); columns
    what, sqnr_db, relative_error, cosine, gradient_bias, ks.
    """

    table: pd.DataFrame
    distributions: list[Distribution]
    format: str

    @property
    def verdict(self) -> str:
        """In words: which of the two is larger, by their relative errors."""
        of = self.table.set_index("what")["relative_error"]
        rounding, drift = of["rounding"], of["drift"]
        if not (math.isfinite(rounding) and math.isfinite(drift)):
            return "Not to be told: one of the three has no finite size."
        if drift == 0:
            return "The format's rounding alone: the run has not drifted, its tensor is bit for bit that of bf16."
        if rounding == 0:
            return f"The run has drifted (relative error {drift:.3g}); the format's rounding loses nothing here."
        ratio = drift / rounding
        if ratio > 2:
            return f"Mostly drift: the run's tensor is {ratio:.1f} times as far from bf16's as rounding alone puts it."
        if ratio < 0.5:
            return f"Mostly the format's rounding: it is {1 / ratio:.1f} times the drift of the run."
        return f"Both: the run has drifted {ratio:.2f} times as far as the format's rounding alone."


def three_way(reference: Tensor, own: Tensor, fmt: str, dim: int = -1) -> ThreeWay:
    """Is it the format's rounding, or has the run drifted? Both tensors of one shape; blocks along dim."""
    rounded, both = quant.fake_quantize(reference, fmt, dim), quant.fake_quantize(own, fmt, dim)
    rows = []
    for what, q in (("rounding", rounded), ("drift", own), ("both", both)):
        found = errors(reference, q)
        rows.append(
            {"what": what, "sqnr_db": found.sqnr_db, "relative_error": found.relative_error, "cosine": found.cosine,
             "gradient_bias": found.relative_error**2,
             "ks": sketches.ks(quant.summarize(reference).sketch, quant.summarize(q).sketch)}
        )  # fmt: skip
    names = ("bf16 run", f"bf16 run, rounded to {fmt}", "quantized run")
    shown = [distribution_of(name, x) for name, x in zip(names, (reference, rounded, own), strict=True)]
    return ThreeWay(pd.DataFrame(rows), shown, fmt)
