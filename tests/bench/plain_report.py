"""The plain script that bench_report.py compares the report with: every .pt file, NumPy and matplotlib, no code of
Binade.

python -m tests.bench.plain_report ROOT OUTPUT

The identity of a tensor (layer, name, operation) come from the rows in the segments, read as Parquet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy import stats

BINS = np.linspace(-60, 40, 401)
GROUPINGS = ("quant_type", "layer_type", "operation", "module", "tensor_name", "layer_index", "iteration")
QUANTILES_BY = ("quant_type", "operation")  # sorting takes longest: a grouping costs as much as all its histograms
PANELS = (None, "quant_type", "layer_type", "operation")
HIFP8 = (-23, -15, -7, -3, 4, 8, 15)  # log2 of the magnitudes between which the precision is the same
MAPS = 8


def load(root: Path) -> tuple[pd.DataFrame, list[np.ndarray]]:
    rows = pd.concat([pd.read_parquet(path) for path in sorted(root.glob("*/segments/*/tensor.parquet"))])
    rows = rows.reset_index(drop=True)
    tensors = [
        torch.load(root / row.run_id / row.path, weights_only=True)["tensor"].float().numpy()
        for row in rows.itertuples()
    ]
    return rows, tensors


def groups(rows: pd.DataFrame, tensors: list[np.ndarray], by: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """(name, all its values)"""
    if by is None:
        yield "all", np.concatenate([x.reshape(-1) for x in tensors])
        return
    for name, part in rows.groupby(by):
        yield str(name), np.concatenate([tensors[index].reshape(-1) for index in part.index])


def magnitudes(values: np.ndarray) -> np.ndarray:
    return np.log2(np.abs(values[values != 0]))


def histogram(axes: Any, found: Iterator[tuple[str, np.ndarray]], title: str) -> None:
    for name, values in found:
        counts, edges = np.histogram(magnitudes(values), BINS)
        axes.stairs(counts / max(len(values), 1) / np.diff(edges), edges, label=name)
    axes.set(title=title, xlabel="log2 |value|", ylabel="share per binade")
    axes.legend()


def figure(path: Path, size: tuple[float, float] = (10, 5)) -> tuple[Any, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return plt.subplots(figsize=size, dpi=120)


def finish(drawn: Any, path: Path) -> None:
    drawn.tight_layout()
    drawn.savefig(path)
    plt.close(drawn)


def moments(values: np.ndarray) -> dict[str, float]:
    mean, std = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
    return {
        "mean": mean, "std": std, "min": float(values.min()), "max": float(values.max()),
        "absmax": float(np.abs(values).max()), "zeros": int((values == 0).sum()),
        "kurtosis": float((((values - mean) / (std or 1)) ** 4).mean(dtype=np.float64)),
    }  # fmt: skip


def main(root: Path, output: Path) -> None:
    rows, tensors = load(root)
    output.mkdir()
    drawn, axes = plt.subplots(2, 2, figsize=(20, 12), dpi=120)
    for place, by in zip(axes.flat, PANELS, strict=True):
        histogram(place, groups(rows, tensors, by), f"by {by or 'nothing'}")
    finish(drawn, output / "quick_analysis.png")
    by_group: dict[str, dict[str, dict[str, float]]] = {}
    for by in GROUPINGS:
        path = output / "distributions" / f"{by}.png"
        drawn, place = figure(path)
        histogram(place, groups(rows, tensors, by), by)
        finish(drawn, path)
        by_group[by] = {name: moments(values) for name, values in groups(rows, tensors, by)}
    for by in QUANTILES_BY:
        path = output / "distributions" / f"qq_{by}.png"
        drawn, place = figure(path)
        boxes = {}
        for name, values in groups(rows, tensors, by):
            share = stats.norm.cdf(np.linspace(-5, 5, 201))
            marks = np.quantile(values, np.concatenate([share, [0.001, 0.25, 0.5, 0.75, 0.999]]))
            place.plot(stats.norm.ppf(share), (marks[:201] - values.mean()) / values.std(), ".", label=name)
            boxes[name] = marks[201:]
        place.legend()
        finish(drawn, path)
        path = output / "statistics" / f"boxes_{by}.png"
        drawn, place = figure(path)
        place.bxp(
            [
                {"label": name, "whislo": m[0], "q1": m[1], "med": m[2], "q3": m[3], "whishi": m[4], "fliers": []}
                for name, m in boxes.items()
            ]
        )
        finish(drawn, path)
    each = pd.DataFrame([moments(x) for x in tensors])
    rows["row"] = rows["module"] + " " + rows["tensor_name"]
    for metric in ("absmax", "std", "kurtosis"):
        rows[metric] = each[metric]
        grid = rows.pivot_table(index="row", columns="layer_index", values=metric, aggfunc="max")
        path = output / "heatmaps" / f"{metric}.png"
        drawn, place = figure(path)
        drawn.colorbar(place.imshow(grid, aspect="auto"))
        place.set_yticks(range(len(grid)), grid.index)
        finish(drawn, path)
        path = output / "statistics" / f"ranking_{metric}.png"
        drawn, place = figure(path)
        worst = rows.sort_values(metric).tail(20)
        place.barh(worst["row"] + " L" + worst["layer_index"].astype(str) + " " + worst["recipe"], worst[metric])
        finish(drawn, path)
    for by in ("quant_type", "tensor_name"):
        path = output / "hifp8" / f"precisions_{by}.png"
        drawn, place = figure(path)
        for name, values in groups(rows, tensors, by):
            share = np.histogram(magnitudes(values), [-200, *HIFP8, 200])[0] / len(values)
            place.barh([name] * len(share), share, left=np.cumsum(share) - share)
        finish(drawn, path)
    for number, index in enumerate(rows.index[rows["tensor_name"] == "attention_probs"][:MAPS]):
        probs = tensors[index]
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(np.where(probs > 0, probs * np.log2(probs), 0), -1).mean((0, 2))
            path = output / "attention_maps" / f"map_{number}.png"
            drawn, place = figure(path)
            drawn.colorbar(place.imshow(np.log2(probs[0, int(entropy.argmin())]), aspect="auto"))
        finish(drawn, path)
        path = output / "attention_maps" / f"entropy_{number}.png"
        drawn, place = figure(path)
        place.bar(range(1, len(entropy) + 1), entropy)
        finish(drawn, path)
    (output / "tensor_stats.json").write_text(json.dumps({"by": by_group, "tensors": each.to_dict("records")}))
    (output / "tensor_stats.txt").write_text(each.to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
