"""Reads the tensors of one file into rows of a segment. Runs in a separate process, see `workers`.

The id of a tensor consists of digests of its file's name and of its content, so that an unchanged file keeps its ids,
and an id never stands for another tensor later.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from binade.collector.imports.files import LEFT_OUT, File, Refusal
from binade.collector.imports.log import Importer, TensorLog
from binade.collector.imports.model_paths import Clues, names_parameter
from binade.collector.imports.registry import interpret, statistics_of
from binade.data.exchange.foreign import ForeignTensor, opened
from binade.data.run.columns import Identity, LoggedRow, Origin, Score, TensorRow, Trace
from binade.data.run.directory import is_unicode
from binade.data.run.store import FileState, TensorFileError
from binade.data.run.tensor_files import TooLargeError
from binade.data.run.tensor_kinds import MAPS
from binade.data.words.text import counted, describe
from binade.quant.metrics import score
from binade.quant.summary import summarize
from binade.quant.traces import hot_channels_later

SCORE_BYTES = 28  # that scoring takes, for each element, at its peak
DIGITS = 10  # hexadecimal ones of each digest in a tensor's id


@dataclass(frozen=True)
class FileJob:
    """A file to read. room: see `data.exchange.foreign.opened`; alone: no other file is read at the same time, so there
    will not be more memory later; kind: see `model_paths.Clues`."""

    file: File
    scores: tuple[str, ...]
    room: int | None = None
    alone: bool = False
    kind: str | None = None


@dataclass(frozen=True)
class FileRead:
    """The result of reading a file. rows: without the id of their run; later: there was not enough memory for it next
    to the others; unnamed: of how many tensors only the module is known."""

    rows: Sequence[TensorRow | LoggedRow] = ()
    refused: list[Refusal] = field(default_factory=list)
    version: str | None = None
    later: bool = False
    unnamed: int = 0


def read_file(job: FileJob) -> FileRead:
    """The rows of one file, and refusals with reasons for what cannot be used. Runs in a separate process."""
    torch.set_num_threads(1)
    rows, refused, version, unnamed = [], [], None, 0
    path, name = Path(job.file.path), job.file.name
    doubtful: Counter[str] = Counter()
    if (importer := statistics_of(path)) is not None:
        return _read_statistics(job, importer)
    try:
        with opened(path, job.room) as file:
            state = file.state()
            has_parameters = any(map(names_parameter, file.keys))
            for number, foreign in enumerate(file.tensors):
                if foreign.tensor is None or foreign.dtype is None:
                    refused.append(Refusal(name, foreign.refused or "it contains no tensor", foreign.key))
                    continue
                if foreign.key is not None and not is_unicode(foreign.key):
                    doubtful["its name in the file is not valid Unicode"] += 1
                    continue
                clues = Clues(PurePath(name), tuple(foreign.tensor.shape), has_parameters, job.kind)
                log = interpret(path, foreign.metadata, foreign.key, clues)
                if log.refused:
                    doubtful[log.refused] += 1
                    continue
                version = log.version
                unnamed += log.is_unnamed
                tensor_id = _tensor_id(job, number if foreign.key is not None else None, state.sha256)
                order = None if log.order is None else log.order + number
                rows.append(
                    _row(job, tensor_id, state, foreign, foreign.tensor, foreign.dtype, replace(log, order=order))
                )
    except (TensorFileError, MemoryError, OSError) as error:
        reason = "there is not enough memory to read it" if isinstance(error, MemoryError) else describe(error)
        no_memory = isinstance(error, (TooLargeError, MemoryError))
        return FileRead(refused=[Refusal(name, reason)], later=no_memory and not job.alone)
    refused += [Refusal(name, f"{counted(count, 'tensor')}: {reason}") for reason, count in doubtful.items()]
    return FileRead(rows, refused, version, unnamed=unnamed)


def _tensor_id(job: FileJob, number: int | None, *content: object) -> str:
    """number: of the tensor in its file, if that may have several; content: what the tensor is known by."""
    of_file, of_content = (
        hashlib.sha256(repr(part).encode()).hexdigest()[:DIGITS] for part in (job.file.name, content)
    )
    return "-".join([f"f{of_file}", *([] if number is None else [str(number)]), of_content])


def _read_statistics(job: FileJob, importer: Importer) -> FileRead:
    name = job.file.name
    try:
        statistics = importer.statistics(Path(job.file.path))
    except (ValueError, OSError, MemoryError) as error:
        return FileRead(refused=[Refusal(name, describe(error))])
    left_out = Counter(statistics.left_out)
    left_out.update(("", f"impossible: {tensor.impossible}") for tensor in statistics.tensors if tensor.impossible)
    refused = [
        Refusal(name, f"{LEFT_OUT}{counted(count, 'tensor')}: {reason}", statistic or None)
        for (statistic, reason), count in sorted(left_out.items())
    ]
    rows = []
    for number, tensor in enumerate(statistics.tensors):
        if tensor.impossible:
            continue
        identity = identity_of(tensor.log)
        tensor_id = _tensor_id(job, number, identity, sorted(tensor.columns.items()))
        rows.append(LoggedRow(tensor_id, "", identity, origin_of(tensor.log), tensor.columns))
    if not (rows or refused):
        refused = [Refusal(name, "it has no statistics")]
    return FileRead(rows, refused, importer.name)


def identity_of(log: TensorLog) -> Identity:
    """What a tensor is, by its log."""
    words = {name: getattr(log, name) for name in Identity.__annotations__ if hasattr(log, name)}
    return Identity(model=None, size=None, dataset=None, recipe=None, **words)


def origin_of(log: TensorLog, *notes: str, **of_file: Any) -> Origin:
    """Where a tensor is from, by its log, with further notes and facts of its file."""
    return Origin(
        source_version=log.version,
        original_quant_type=log.original_quant_type,
        stage=log.stage,
        corrections="\n".join((*log.corrections, *notes)) or None,
        module_path=log.path,
        execution_order=log.order,
        **of_file,
    )


def _row(
    job: FileJob, tensor_id: str, state: FileState, foreign: ForeignTensor, x: Tensor, dtype: str, log: TensorLog
) -> TensorRow:
    notes = [foreign.note] if foreign.note else []
    axis = log.contracted_axis
    if axis is not None and -axis > x.dim():
        axis = None
    needed = x.numel() * SCORE_BYTES
    scores = job.scores if log.is_scored else ()
    if scores and job.room is not None and needed > job.room:
        if not job.alone:
            raise TooLargeError(f"scoring it takes {needed / 2**30:.1f} GiB")
        scores = ()
        notes.append(
            f"Not scored: that takes about {needed / 2**30:.1f} GiB, but only {max(job.room, 0) / 2**30:.1f} GiB of "
            "memory were free."
        )
    return TensorRow(
        tensor_id=tensor_id,
        run_id="",
        identity=identity_of(log),
        captured=log.captured,
        shape=tuple(x.shape),
        dtype=dtype,
        nbytes=x.numel() * (8 if dtype == "float64" else x.element_size()),
        path=job.file.path,
        contracted_axis=axis,
        summary=summarize(x),
        scores=[Score(format=name, error=score(x, name, -1 if axis is None else axis)) for name in scores],
        shard=None,
        origin=origin_of(log, *notes, file_key=foreign.key, file_size=state.size, file_time_ns=state.time_ns),
        sha256=state.sha256,
        trace=None if log.tensor_name in MAPS else Trace(*hot_channels_later(x)()),
    )
