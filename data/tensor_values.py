"""The values of the tensors of an index: their files, and the shards of tensor-parallel ranks joined."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from binade.data.difference import joined
from binade.data.intake import same
from binade.data.open_index import CatalogError, OpenIndex
from binade.data.remote import fetched
from binade.data.runs import IMPORT
from binade.data.segment import Identity
from binade.data.store import load

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

    def _file(self, tensor_id: str) -> tuple[Path, bool, str | None, str | None]:
        """The tensor's file, whether another tool wrote it, the tensor's key in it, and its SHA-256 if Binade wrote
        it."""
        rows = self._rows(
            "SELECT run_id, path, file_key, sha256, config FROM tensor LEFT JOIN run USING (run_id)"
            " WHERE tensor_id = ?",
            [tensor_id],
        )
        if not rows:
            raise CatalogError(f"there is no tensor {tensor_id!r} in {self.root}")
        run_id, given, key, digest, config = rows[0]
        if given is None:
            raise CatalogError(f"the values of {tensor_id} were not kept: only its statistics and sketch are available")
        if not Path(given).is_absolute():
            return self.root / run_id / given, False, None, digest
        if json.loads(config or "{}").get("kind") != IMPORT:
            raise CatalogError(
                f"{tensor_id} refers to a file outside its run's directory, which is allowed only for imported tensors"
            )
        return Path(given), True, key, None

    def load(self, tensor_id: str) -> Tensor:
        """Return the tensor's values, memory-mapped where the file allows it. Raises CatalogError as `path`,
        TensorFileError for a file that is damaged or not what the run wrote."""
        self.reads(tensor_id)
        return self.kept(("values", tensor_id), lambda: self._read(tensor_id))

    def _read(self, tensor_id: str) -> Tensor:
        path, foreign, key, digest = self._file(tensor_id)
        if not foreign:
            return load(fetched(path), digest)
        from binade.data.foreign import load_foreign  # imports torch

        return load_foreign(path, key)

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
