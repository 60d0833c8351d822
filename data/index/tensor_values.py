"""The values of the tensors of an index: their files, and the shards of tensor-parallel ranks joined."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from binade.data.index.cubes import same
from binade.data.index.opened import HIDDEN, IN_LIST, CatalogError, OpenIndex
from binade.data.index.whole_tensors import joined
from binade.data.run.columns import Identity
from binade.data.run.directory import IMPORT
from binade.data.run.store import changed_ns

if TYPE_CHECKING:
    from torch import Tensor

# The fields that identify a tensor within a rank, and that its parts on tensor-parallel ranks share.
SAME_IN_SHARDS = ("run_id", "dp_rank", *(f.name for f in fields(Identity) if f.name != "rank"))


class TensorValues(OpenIndex):
    """The part of a Catalog that reads values."""

    def path(self, tensor_id: str) -> Path:
        """Return the path of the tensor's file. Raises CatalogError if the id is unknown, its values were not kept, or
        a recorded tensor refers to a file outside its run's directory."""
        return self._file(tensor_id)[0]

    def _file(self, tensor_id: str) -> tuple[Path, dict[str, Any]]:
        """The path of the tensor's file, and its row: path is absolute there if another tool wrote the file."""
        columns = "run_id", "path", "file_key", "sha256", "file_size", "file_time_ns", "dtype", "shape", "config"
        rows = self._rows(
            f"SELECT {', '.join(columns)} FROM tensor LEFT JOIN run USING (run_id) WHERE tensor_id = ?", [tensor_id]
        )
        if not rows:
            raise CatalogError(f"there is no tensor {tensor_id!r} in {self.root}")
        row = dict(zip(columns, rows[0], strict=True))
        if row["path"] is None:
            raise CatalogError(f"the values of {tensor_id} were not kept: only its statistics and sketch are available")
        if os.path.isabs(row["path"]) and json.loads(row["config"] or "{}").get("kind") != IMPORT:
            raise CatalogError(
                f"{tensor_id} refers to a file outside its run's directory, which is allowed only for imported tensors"
            )
        return self.root / row["run_id"] / row["path"], row  # an absolute path stays as it is

    def contents(self, tensor_ids: Iterable[str]) -> Hashable:
        """Return what changes when the rows or values of these tensors do: of an imported one, also when its file is
        written again. Results that depend on these tensors alone remain valid while this stays the same. Unknown ids
        are left out."""
        rows = self._rows(
            f"SELECT tensor_id, hash(this), path FROM (SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE {IN_LIST}) AS this"
            " ORDER BY tensor_id",
            [list(tensor_ids)],
        )
        return tuple((*row, _written(row[-1])) for row in rows)

    def load(self, tensor_id: str) -> Tensor:
        """Return the tensor's values, memory-mapped where the file allows it. Raises CatalogError as `path`,
        TensorFileError for a file that is damaged, not what the run wrote, or has changed since it was imported."""
        self.reads(tensor_id)
        return self.kept(("values", self.contents([tensor_id])), lambda: self._read(tensor_id))

    def _read(self, tensor_id: str) -> Tensor:
        _, row = self._file(tensor_id)
        from binade.data.exchange.foreign import load_values  # imports torch

        return load_values(self.root / row["run_id"], row)

    def unsharded(self, tensor_id: str) -> Tensor:
        """Return the whole tensor, assembled from the shards of the tensor-parallel ranks; `load` if it is not sharded.

        Slices are concatenated, partial results summed in float32 and returned in their dtype. Raises CatalogError if a
        shard was not recorded or its values not kept, TensorFileError for a damaged file.
        """
        parts = self.shards(tensor_id)
        first = parts.iloc[0]
        if first["shard"] not in ("slice", "partial"):
            return self.load(tensor_id)
        missing = set(range(first["tp_size"])) - set(parts["tp_rank"])
        if missing:
            raise CatalogError(
                f"{tensor_id} is a shard: the shard of tensor-parallel rank {min(missing)} was not recorded"
            )
        tensors = [self.load(part) for part in parts["tensor_id"]]
        axis = None if pd.isna(first["shard_axis"]) else int(first["shard_axis"])
        return joined(tensors, first["shard"], axis, int(first["shard_stride"]))

    def shards(self, tensor_id: str) -> pd.DataFrame:
        """Return the shards of the tensor that this one is a shard of, by tp_rank: columns tensor_id, rank, tp_rank,
        tp_size, shard, shard_axis, shard_stride, path. Raises CatalogError if the id is unknown."""
        frame = self.ask(
            "SELECT part.tensor_id, part.rank, part.tp_rank, part.tp_size, part.shard, part.shard_axis,"
            " part.shard_stride, part.path FROM tensor AS given JOIN tensor AS part"
            f" ON {same('part', 'given', SAME_IN_SHARDS)} WHERE given.tensor_id = ? ORDER BY part.tp_rank",
            [tensor_id],
        )
        if frame.empty:
            raise CatalogError(f"there is no tensor {tensor_id!r} in {self.root}")
        return frame


def _written(path: str | None) -> Hashable:
    """What changes when the file of an imported tensor is written; None for others, which are not written again."""
    if path is None or not os.path.isabs(path):
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, changed_ns(status)
