"""Names of tensors and groups."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

UNNAMED = "unnamed"  # a tensor that its log does not identify


def group_name(group: Any, names: Mapping[str, str] | None = None) -> str:
    """The label of a group. A tensor without a value of the field is in "none". names: of runs, by run_id."""
    return "none" if pd.isna(group) else (names or {}).get(str(group), str(group))


def tensor_label(row: pd.Series) -> str:
    """A tensor's short name: "L1 qkv input (forward, mxfp8)"."""
    layer = "" if pd.isna(row["layer_index"]) else f"L{int(row['layer_index'])} "
    module = "" if pd.isna(row["module"]) else f"{row['module']} "
    words = ", ".join(row[column] for column in ("operation", "quant_type") if not pd.isna(row[column]))
    name = UNNAMED if pd.isna(row["tensor_name"]) else row["tensor_name"]
    return f"{layer}{module}{name}{f' ({words})' if words else ''}"


def layer_names(layers: pd.Series) -> pd.Series:
    """ "L1 " as a prefix of a name; empty for tensors that belong to no layer."""
    return layers.map(lambda v: "" if pd.isna(v) else f"L{int(v)} ").astype(str)  # of no layers too


def unique_labels(rows: pd.DataFrame, names: Mapping[str, str]) -> dict[str, str]:
    """tensor_id to label; labels that would be equal get the first words in which the tensors differ. names: of runs,
    by run_id."""
    labels = {row["tensor_id"]: tensor_label(row) for _, row in rows.iterrows()}
    by_id = rows.set_index("tensor_id", drop=False)
    for column, title in DISTINCTIONS.items():
        for _, same in pd.Series(labels).groupby(pd.Series(labels)):
            values = by_id.loc[same.index, column].map(partial(group_name, names=names))
            if values.nunique() > 1:
                for tensor_id, value in values.items():
                    labels[tensor_id] += f", {title} {value}"
    return labels


def short_labels(rows: pd.DataFrame, names: Mapping[str, str]) -> dict[str, str]:
    """tensor_id to "L1 fc2 input"; labels that would be equal get the first words in which the tensors differ. names:
    of runs, by run_id. Fast for thousands of tensors."""
    module = rows["module"].fillna("").map(lambda name: f"{name} " if name else "")
    text = layer_names(rows["layer_index"]) + module + rows["tensor_name"].fillna(UNNAMED).str.replace("_", " ")
    text = text.astype(object)
    for column, title in {"operation": "", **DISTINCTIONS}.items():
        again = text.duplicated(keep=False)
        if not again.any():
            break
        values = rows.loc[again, column].map(partial(group_name, names=names)).astype(str)
        differ = values.groupby(text[again]).transform("nunique") > 1
        text = text.where(
            ~differ.reindex(text.index, fill_value=False), text + " · " + (f"{title} " * bool(title) + values)
        )
    return dict(zip(rows["tensor_id"], text, strict=True))


def full_labels(rows: pd.DataFrame, names: Mapping[str, str]) -> dict[str, str]:
    """tensor_id to "L1 fc2 input · forward · iteration 0 · mxfp4", with micro-batch, rank and expert where they differ,
    whether it was taken after quantization, the run where it has one of these names (by run_id) or two runs have one
    recipe, and the end of the id where two are still alike. Fast for thousands of tensors."""
    module = rows["module"].fillna("").map(lambda v: f"{v} " if v else "")
    text = layer_names(rows["layer_index"]) + module + rows["tensor_name"].fillna(UNNAMED)
    text = text + _after(rows["operation"])
    for column in ("iteration", "micro_batch", "rank", "expert"):
        if column == "iteration" or rows[column].nunique(dropna=False) > 1:
            title = DISTINCTIONS[column]
            text = text + rows[column].map(lambda v, t=title: "" if pd.isna(v) else f" · {t} {int(v)}")
    text = text + _after(rows["recipe"].fillna(rows["quant_type"]))
    text = text + rows["stage"].map({"after": " · after quantization"}).fillna("")
    run = rows["run_id"].map(dict(names)).astype(object)
    if rows.drop_duplicates("run_id")["recipe"].duplicated().any():
        run = run.fillna(rows["run_id"].str[-6:])
    text = text + _after(run)
    again = text.duplicated(keep=False)
    text = text.where(~again, text + " · " + rows["tensor_id"].str.rpartition("/")[2])
    return dict(zip(rows["tensor_id"], text, strict=True))


def thinned(table: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
    """Thin a table of curves (columns group or label, and iteration) to about `most` rows. Returns (every n-th
    iteration and the last of each curve, n)."""
    step = -(-len(table) // most) or 1
    if step == 1:
        return table, 1
    curve = table["group" if "group" in table else "label"]
    last = table.groupby(curve)["iteration"].transform("max")
    keep = ((table["iteration"].max() - table["iteration"]) % step == 0) | (table["iteration"] == last)
    return table[keep].reset_index(drop=True), step


def thinned_note(step: int) -> str:
    return f"One iteration in {step} is drawn." if step > 1 else ""


def run_labels(runs: pd.DataFrame) -> list[str]:
    """Labels from the columns name, started and run_id: the name; if several runs share it, also the time of the start,
    with the date if the dates differ; if that is the same, the end of the directory's name."""
    if runs.empty:
        return []
    name = runs["name"]
    again = name.duplicated(keep=False)
    days = runs.loc[again, "started"].dt.date.nunique()
    when = runs["started"].dt.strftime(" at %Y-%m-%d %H:%M:%S UTC" if days > 1 else " at %H:%M:%S UTC")
    name = name.where(~again, name + when)
    alike = name.duplicated(keep=False)
    name = name.where(~alike, name + " · " + runs["run_id"].str[-6:])
    return name.where(~name.duplicated(keep=False), runs["run_id"]).tolist()


def _after(words: pd.Series) -> pd.Series:
    return words.map(lambda word: "" if pd.isna(word) else f" · {word}")


DISTINCTIONS = {
    "phase": "phase",
    "stage": "stage",
    "iteration": "iteration",
    "micro_batch": "micro-batch",
    "rank": "rank",
    "expert": "expert",
    "recipe": "recipe",
    "run_id": "run",
    "tensor_id": "tensor",
}
