"""A tensor of a run, whole: from the rows that ranks have written of it or of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from binade.data.run.columns import COUNTS, MOMENTS
from binade.data.run.directory import IMPORT, RunInfo
from binade.data.run.store import TensorFileError

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
# The fields that identify a tensor of a step; ranks and shards are not among them.
IDENTITY = (
    "iteration", "micro_batch", "layer_index", "module", "expert", "layer_type", "component", "operation", "phase",
    "tensor_name", "stage", "dp_rank",
)  # fmt: skip


class IncompleteError(ValueError):
    """A part of a tensor was not recorded, or its values were not kept."""


def joined(parts: Sequence[Tensor], shard: str | None, axis: int | None, stride: int | None) -> Tensor:
    """The whole tensor from the parts of tensor-parallel ranks, in their order; see `segment.Shard`. Partial results
    are summed in float32 and returned in their dtype."""
    import torch  # here, so that only reading values waits for it

    if shard == "partial":
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    if shard != "slice":
        return parts[0]
    assert axis is not None
    pieces = [part.chunk(stride or 1, axis) for part in parts]
    return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], axis)


@dataclass
class WholeTensor:
    """A tensor of a run, with a row for each rank that has it or a part of it. reads: as of `difference`."""

    run: RunInfo
    reads: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.rows[0]["shard"] or "whole")

    @property
    def every_row(self) -> list[Row]:
        """With those of other micro-batches, of a sum."""
        return self.rows

    @property
    def parts(self) -> list[Row]:
        """The parts by tensor-parallel rank; for a tensor that every rank has whole, the first rank's."""
        rows = sorted(self.rows, key=lambda row: row["tp_rank"] or 0)
        return rows[:1] if self.kind == "whole" else rows

    def check(self) -> None:
        """Raise IncompleteError if a part is missing."""
        if self.kind != "whole" and len(self.rows) < self.rows[0]["tp_size"]:
            raise IncompleteError("a tensor-parallel rank did not record its shard")

    @property
    def shape(self) -> tuple[int, ...]:
        """() if it is not known."""
        parts = self.parts
        shape = [int(size) for size in parts[0]["shape"] or ()]
        if self.kind == "slice":
            shape[parts[0]["shard_axis"]] = sum(part["shape"][part["shard_axis"]] for part in parts)
        return tuple(shape)

    @property
    def tensor_id(self) -> str:
        return f"{self.run.run_id}/{self.rows[0]['tensor_id']}"

    @property
    def logged(self) -> set[str]:
        """What is known of it: not all if another tool logged only statistics."""
        return {name for name in ("shape", *MOMENTS, *COUNTS) if self.parts[0][name] is not None}

    @property
    def has_values(self) -> bool:
        return all(part["path"] for part in self.parts)

    def values(self) -> Tensor:
        """Raises TensorFileError."""
        parts = self.parts
        axis, stride = parts[0]["shard_axis"], parts[0]["shard_stride"]
        return joined([self._load(part) for part in parts], self.kind, axis, stride)

    def _load(self, row: Row) -> Tensor:
        self.reads(f"{self.run.run_id}/{row['tensor_id']}")
        if Path(row["path"]).is_absolute() and self.run.config.get("kind") != IMPORT:
            raise TensorFileError(
                f"{row['tensor_id']} refers to a file outside its run's directory, "
                "which is allowed only for imported tensors"
            )
        from binade.data.exchange.foreign import load_values  # imports torch

        return load_values(self.run.directory, row)

    def statistics(self) -> dict[str, float]:
        """Statistics of the whole tensor, NaN for one that is not known. Raises IncompleteError for a sum, whose
        statistics cannot be computed from its parts."""
        parts = self.parts
        if len(parts) == 1:
            known = {name: parts[0][name] for name in (*MOMENTS, *COUNTS)}
            return {name: math.nan if value is None else value for name, value in known.items()}
        if self.kind == "partial":
            raise IncompleteError("it is a sum over ranks, which needs values to compare")
        of = {name: np.array([part[name] for part in parts], float) for name in ("numel", *MOMENTS, *COUNTS)}
        statistics = {name: of[name].sum() for name in COUNTS}
        counts = of["numel"] - of["nans"] - of["infs"]
        some = counts > 0
        weights = counts[some] / counts.sum()
        statistics["mean"] = weights @ of["mean"][some] if some.any() else math.nan
        statistics["rms"] = math.sqrt(weights @ of["rms"][some] ** 2) if some.any() else math.nan
        statistics |= {name: np.fmin.reduce(of[name][some], initial=math.nan) for name in ("min", "absmin")}
        statistics |= {name: np.fmax.reduce(of[name][some], initial=math.nan) for name in ("max", "absmax")}
        return {name: float(value) for name, value in statistics.items()}
