"""`audit`, which writes an audit as a run: a row for each weight, which the Map shows and `binade diff` compares."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath

import pyarrow as pa

from binade.collector.audit.audit import Auditing
from binade.collector.audit.matching import Match
from binade.collector.audit.result import Audit, AuditedWeight
from binade.collector.audit.weights import CheckpointWeight
from binade.collector.imports.file_rows import identity_of, origin_of
from binade.collector.imports.log import AFTER
from binade.collector.imports.model_paths import Clues
from binade.collector.imports.registry import interpret
from binade.collector.imports.run import run_of_import
from binade.data.run.columns import Score, TensorRow, Trace
from binade.data.run.directory import DONE, resolve_root
from binade.data.run.segment import replace_segments, tables_of
from binade.data.run.store import FileState, append_to, changed_ns, sha256
from binade.data.run.tensor_kinds import Gemm
from binade.quant.summary import summarize
from binade.quant.traces import hot_channels_later

Progress = Callable[[int, int], None]  # weights done, of how many


def audit(
    checkpoint: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    command: str = "",
    progress: Progress = lambda done, total: None,
) -> Audit:
    """Audit a quantized checkpoint, and write what was found as a run.

    Args:
        checkpoint: The directory of a Hugging Face model with safetensors, or a GGUF file.
        against: The original, whose weights have the same names: the error of each weight is measured against it.
        root: Of the runs. None: $TENSOR_SAVE_DIR, else data/runs.
        command: That is recorded with the run.
        progress: Called after each weight.

    Weights are read one at a time and nothing is unpickled. Another audit of the same checkpoint against the same
    original replaces the run.

    Raises ConfigError for a checkpoint that cannot be read, RunError for a root that cannot be written.
    """
    path, original = Path(checkpoint), Path(against) if against is not None else None
    auditing = Auditing(path, original)
    config = {
        "source": str(path.resolve()),
        "audit": str(original.resolve()) if original else "",
        "quantized_by": auditing.checkpoint.method,
        "scores": [],
        "command": command,
    }
    with run_of_import(resolve_root(root), config) as writer:
        rows = _Rows(writer.run_id, path)
        replace_segments(writer.directory, _tables(auditing, rows, progress))
        result = auditing.result(writer.run_id)
        writer.describe({**config, "findings": list(result.findings)})
        with append_to(writer.directory / "log.txt") as log:
            log.write((str(result) + "\n" + "\n".join(result.findings) + "\n").encode())
        writer.update(tensors=rows.count, tensors_without_raw=rows.without_values, bytes=rows.bytes)
        writer.finish(DONE)
    return result


def _tables(auditing: Auditing, rows: _Rows, progress: Progress) -> Iterator[dict[str, pa.Table]]:
    total = len(auditing.checkpoint.names)
    for number, (weight, found) in enumerate(auditing.weights(), 1):
        yield tables_of([rows.row(weight, found)])
        progress(number, total)


class _Rows:
    """Makes the rows of the weights of a checkpoint."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.run_id, self._path = run_id, path
        self.count = self.without_values = self.bytes = 0
        self._states: dict[Path, FileState] = {}

    def row(self, weight: CheckpointWeight, found: AuditedWeight) -> TensorRow:
        """A row of the dequantized values, with the error against the original and the spec that it compares with."""
        values = weight.decoded.values
        values = values if values.dtype.itemsize <= 4 else values.float()
        state = self._state(weight.file)
        log = interpret(
            PurePath(self._path.name), None, weight.name, Clues(PurePath(self._path.name), found.shape, True)
        )
        log = replace(log, refused=None, version="audit", order=self.count, original_quant_type=weight.stored or None)
        log = replace(log, stage=AFTER) if weight.stored else log
        match, error = found.match, found.error
        notes = (*found.findings, *_compared(match))
        score = [Score(format=str(match.spec), gemm=Gemm.FORWARD, used=True, error=error)] if match and error else []
        self.count += 1
        self.without_values += state is None
        self.bytes += values.nbytes
        return TensorRow(
            tensor_id=f"a{hashlib.sha256(weight.name.encode()).hexdigest()[:16]}-{self.count}",
            run_id=self.run_id,
            identity=identity_of(log),
            shape=tuple(values.shape),
            dtype=str(values.dtype).removeprefix("torch."),
            nbytes=values.nbytes,
            path=str(weight.file.resolve()) if state and weight.file else None,
            sha256=state.sha256 if state else None,
            contracted_axis=-1,
            summary=summarize(values),
            shard=None,
            origin=origin_of(log, *notes, file_key=weight.name, file_size=state.size if state else None,
                             file_time_ns=state.time_ns if state else None),
            gemm=Gemm.FORWARD,
            format=score[0].format if score else None,
            error=error,
            scores=score,
            trace=Trace(*hot_channels_later(values)()),
        )  # fmt: skip

    def _state(self, file: Path | None) -> FileState | None:
        """The content of a file of the checkpoint, which is read once."""
        if file is None:
            return None
        if file not in self._states:
            status = os.stat(file)
            self._states[file] = FileState(sha256(file), status.st_size, changed_ns(status))
        return self._states[file]


def _compared(match: Match | None) -> list[str]:
    """A sentence on how a weight compares with specs."""
    if match is None:
        return []
    if match.apart:
        return [f"{match.apart:,} of {match.values:,} values are not those of {match.spec}."]
    bits = "to the bit" if not match.differing else "up to two units in the last place"
    return [f"The values are those of {' and of '.join(map(str, match.making or (match.spec,)))}, {bits}."]
