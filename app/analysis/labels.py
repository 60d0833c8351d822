"""What tensors and groups are called."""

from __future__ import annotations

import pandas as pd


def group_name(group: object) -> str:
    """A group as people read it; a tensor for which the word does not apply or is not known is in "none"."""
    return "none" if pd.isna(group) else str(group)


def tensor_label(row: pd.Series) -> str:
    """A tensor's short name: "L1 qkv input (forward, mxfp8)"."""
    layer = "" if pd.isna(row["layer_index"]) else f"L{int(row['layer_index'])} "
    module = "" if pd.isna(row["module"]) else f"{row['module']} "
    return f"{layer}{module}{row['tensor_name']} ({row['operation']}, {row['quant_type']})"


def unique_labels(rows: pd.DataFrame) -> dict[str, str]:
    """tensor_id to label; tensors that would share one are told apart by the first words in which they differ."""
    labels = {row["tensor_id"]: tensor_label(row) for _, row in rows.iterrows()}
    by_id = rows.set_index("tensor_id", drop=False)
    for column, title in DISTINCTIONS.items():
        for _, same in pd.Series(labels).groupby(pd.Series(labels)):
            values = by_id.loc[same.index, column].map(group_name)
            if values.nunique() > 1:
                for tensor_id, value in values.items():
                    labels[tensor_id] += f", {title} {value}"
    return labels


def full_labels(rows: pd.DataFrame) -> dict[str, str]:
    """tensor_id to "L1 fc2 input · forward · iteration 0 · mxfp4", with micro-batch, rank and expert where they differ,
    and the run where two runs have one recipe. Quick for thousands."""
    layer = rows["layer_index"].map(lambda v: "" if pd.isna(v) else f"L{int(v)} ")
    text = layer + rows["module"].fillna("").map(lambda v: f"{v} " if v else "") + rows["tensor_name"]
    text = text + " · " + rows["operation"].fillna("")
    for column, title in (
        ("iteration", "iteration"),
        ("micro_batch", "micro-batch"),
        ("rank", "rank"),
        ("expert", "expert"),
    ):
        if column == "iteration" or rows[column].nunique(dropna=False) > 1:
            text = text + rows[column].map(lambda v, t=title: "" if pd.isna(v) else f" · {t} {int(v)}")
    text = text + " · " + rows["recipe"].fillna(rows["quant_type"])
    runs = rows.drop_duplicates("run_id")
    if runs["recipe"].duplicated().any():
        text = text + " · " + rows["run_id"].str[-6:]
    return dict(zip(rows["tensor_id"], text, strict=True))


DISTINCTIONS = {
    "phase": "phase",
    "iteration": "iteration",
    "micro_batch": "micro-batch",
    "rank": "rank",
    "expert": "expert",
    "recipe": "recipe",
    "run_id": "run",
    "tensor_id": "tensor",
}
