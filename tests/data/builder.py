"""Small runs made with the project's own writers, from tensors that a test knows."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from binade.data.run.columns import Identity, Score, TensorRow
from binade.data.run.directory import DONE
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import MANIFEST, table_files, write_segment
from binade.data.run.store import encode, sha256, write_atomic
from binade.quant.metrics import score
from binade.quant.summary import summarize

# What makes two runs without hashes start alike: see data.compare.same_data.
START = {
    **{"parameters": 1, "tokenizer": None, "seed": None, "learning_rate": 1e-3},
    **{"warmup_iterations": 0, "micro_batches": 1, "micro_batch_size": 2, "sequence_length": 256, "versions": {}},
}
CONFIG = {"model": "llama32-1b", "size": "tiny", "dataset": "wikipedia", "recipe": "mxfp8", "control_iter": 1} | START


def identity(**words: Any) -> Identity:
    """A linear layer's input, but for the words given."""
    usual = {
        "quant_type": "mxfp8",
        "layer_type": "linear",
        "layer_index": 1,
        "module": "fc1",
        "component": "linear",
        "operation": "forward",
        "phase": "pre",
        "tensor_name": "input",
        "iteration": 0,
        "micro_batch": 0,
        "rank": 0,
    }
    return Identity(**{key: CONFIG[key] for key in ("model", "size", "dataset", "recipe")} | usual | words)


def row(run_id: str, number: int, x: Tensor, path: str | None, **words: Any) -> TensorRow:
    """The row of a tensor; format=... among the words makes it a quantized operand, scored along its last axis."""
    fmt, digest = words.pop("format", None), words.pop("sha256", None)
    return TensorRow(
        tensor_id=f"r00-{number:06d}",
        run_id=run_id,
        identity=identity(**words),
        captured=datetime(2026, 1, 2, 3, 4, 5, number),
        shape=tuple(x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        nbytes=x.numel() * x.element_size(),
        path=path,
        contracted_axis=-1 if fmt else None,
        summary=summarize(x),
        format=fmt,
        error=score(x, fmt) if fmt else None,
        scores=[Score(format=name, error=score(x, name)) for name in ("hifp8", "mxfp4")] if fmt else [],
        recomputed=(True, False, None)[number % 3],
        sha256=digest,
    )


def add_segment(writer: RunWriter, tensors: Sequence[tuple[Tensor, dict]], *, first: int = 1) -> str:
    """Publish tensors as one segment with a file each; {"raw": False} among a tensor's words drops its values."""
    rows = []
    for number, (x, words) in enumerate(tensors, first):
        words = dict(words)
        path = None
        if words.pop("raw", True):
            path = f"tensors/{number:04d}.pt"
            write_atomic(writer.directory / path, encode(x, {}, {}))
            words["sha256"] = sha256(writer.directory / path)
        rows.append(row(writer.run_id, number, x, path, **words))
    name = writer.next_segment_name()
    write_segment(writer.directory / "segments", name, rows)
    writer.update(tensors=writer.status.tensors + len(rows))
    return name


def make_run(root: Path, *segments: Sequence[tuple[Tensor, dict]], label: str = "made", **config: Any) -> RunWriter:
    """A finished run of some segments."""
    writer = RunWriter.create(root, label, CONFIG | config)
    first = 1
    for tensors in segments:
        add_segment(writer, tensors, first=first)
        first += len(tensors)
    writer.finish(DONE)
    return writer


def assorted(seed: int, **words: Any) -> list[tuple[Tensor, dict]]:
    """Tensors of several kinds: dtypes, zeros, NaN and Inf, nothing finite, empty, quantized, without values."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randn(7, 33, generator=generator)
    odd[0, 0], odd[1, 1], odd[2, :5] = torch.nan, -torch.inf, 0.0
    return [
        (torch.randn(64, 96, generator=generator).bfloat16() * 3 + 1, {"format": "mxfp8"} | words),
        (torch.randn(32, 64, generator=generator) * 1e-3, {"format": "mxfp4", "quant_type": "mxfp4"} | words),
        (odd, {"tensor_name": "output", "phase": "post", "layer_index": 2} | words),
        (torch.full((5,), torch.nan), {"operation": "backward", "tensor_name": "grad_input"} | words),
        (torch.zeros(3, 40, dtype=torch.float16), {"format": "hifp8", "quant_type": "hifp8", "iteration": 1} | words),
        (torch.empty(0, 8), {"module": None, "expert": 3} | words),
        (torch.randn(2, 5, 3, generator=generator).half(), {"raw": False, "micro_batch": 1} | words),
    ]


def reseal(run: Path) -> None:
    """Write the checksums of what is now in a run's segments, as someone would who changes them on purpose."""
    for file in run.glob(f"segments/*/{MANIFEST}"):
        sums = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in table_files(file.parent).values()
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | {"files": sums}))


def with_column(content: bytes, column: str, value: Any) -> bytes:
    """A Parquet file whose rows all have this value, of the column's own type."""
    table = pq.read_table(io.BytesIO(content))
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    sink = io.BytesIO()
    pq.write_table(table.set_column(place, field, pa.array([value] * len(table), field.type)), sink)
    return sink.getvalue()
