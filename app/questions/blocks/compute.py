"""A tensor block by block."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.questions.shared.rounded import MAX_SIDE, Subject
from binade.quant.specs import Spec

WORST_BLOCKS = 50


def block_table(subject: Subject) -> pd.DataFrame:
    """Every block: columns block (its number), absmax, energy (Σx², as a share of all blocks'), sqnr_db,
    flush_to_zero, saturated, scale_exponent."""
    blocks = subject.blocks
    energy = blocks.x.double().square().sum(-1).nan_to_num(posinf=0.0)
    return pd.DataFrame(
        {
            "block": np.arange(len(blocks.x)),
            "absmax": blocks.x.abs().amax(-1).double().numpy(),
            "energy": (energy / energy.sum()).numpy(),
            "sqnr_db": blocks.sqnr_db.numpy(),
            "flush_to_zero": blocks.flush_to_zero.numpy(),
            "saturated": blocks.saturated.numpy(),
            "scale_exponent": blocks.scale_exponents.numpy(),
        }
    )


def worst_blocks(table: pd.DataFrame, metric: str, n: int = WORST_BLOCKS) -> pd.DataFrame:
    """The n worst of a `block_table` by sqnr_db, flush_to_zero or saturated; all-zero blocks have nothing to lose."""
    return table.dropna(subset=[metric]).sort_values(metric, ascending=metric == "sqnr_db", kind="stable").head(n)


def block_grid(values: np.ndarray, per_line: int, worst: str = "min", side: int = MAX_SIDE) -> np.ndarray:
    """One value per block as a picture [lines, blocks along the contracted axis], thinned to `side` by the worst of
    each cell; if a line has few blocks, several lines are drawn side by side. NaN where a cell has no value."""
    grid = values.reshape(-1, per_line)
    take = np.fmin if worst == "min" else np.fmax
    for axis in (0, 1):
        step = -(-grid.shape[axis] // side)
        if step > 1:
            grid = take.reduceat(grid, np.arange(0, grid.shape[axis], step), axis=axis)
    return grid


def scale_histogram(table: pd.DataFrame) -> pd.DataFrame:
    """How often each scale exponent occurs, of a `block_table`: columns exponent, blocks, share."""
    counts = table["scale_exponent"].dropna().astype(int).value_counts().sort_index()
    return pd.DataFrame({"exponent": counts.index, "blocks": counts.to_numpy(), "share": counts / max(counts.sum(), 1)})


def block_values(subject: Subject, block: int) -> pd.DataFrame:
    """One block, one row per value: columns index, value, code (its number), bits, code_value, dequantized, error."""
    blocks = subject.blocks
    keep = blocks.valid[block]
    x, y = blocks.x[block][keep].double().numpy(), blocks.y[block][keep].double().numpy()
    codes = blocks.codes[block][keep].numpy()
    width = blocks.spec.format.element.bits
    return pd.DataFrame(
        {
            "index": np.arange(len(x)),
            "value": x,
            "code": codes,
            "bits": [f"{code:0{width}b}" for code in codes],
            "code_value": blocks.values[block][keep].double().numpy(),
            "dequantized": y,
            "error": y - x,
        }
    )


def blocks_per_line(shape: tuple[int, ...], dim: int, spec: Spec) -> int:
    """How many blocks lie along the contracted axis."""
    axis = shape[dim] if shape else 1
    if spec.hadamard:
        axis += -axis % spec.hadamard
    return max(1, -(-axis // (spec.run(axis) or 32)))
