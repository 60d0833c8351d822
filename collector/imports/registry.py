"""The importers. To read another tool's files, write one (see log.Importer) and add it to IMPORTERS. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from binade.collector.imports import megatron_fork, model_paths, msprobe, sglang, transformer_engine
from binade.collector.imports.log import Importer, TensorLog, in_folders
from binade.collector.imports.model_paths import Clues

# The first importer that recognizes a file reads it.
IMPORTERS: tuple[Importer, ...] = (
    transformer_engine.IMPORTER,
    msprobe.IMPORTER,
    sglang.IMPORTER,
    megatron_fork.IMPORTER,
)


def interpret(path: PurePath, metadata: object = None, key: str | None = None, clues: Clues | None = None) -> TensorLog:
    """What a file says about its tensor, and the iteration and the rank in the names of its folders. A tensor that no
    tool has named is named by its path in the model, else after its key or its file. Never raises."""
    clues = clues or Clues(PurePath(path.name))
    logs = (importer.read(path, metadata, key) for importer in IMPORTERS)
    log = next((log for log in logs if log is not None), None)
    if log is None:
        log = None if megatron_fork.describes(metadata) else model_paths.read(metadata, key, clues)
        log = log or model_paths.checked(megatron_fork.in_metadata(path, metadata, key), key, clues)
        log = model_paths.of_kind(log, clues.kind) if clues.kind else log
    missing: dict[str, Any] = {name: number for name, number in in_folders(path).items() if getattr(log, name) is None}
    return replace(log, **missing) if missing else log


def beside(path: Path) -> str | None:
    """See log.Importer."""
    return next((reason for importer in IMPORTERS if (reason := importer.beside(path)) is not None), None)


def statistics_of(path: Path) -> Importer | None:
    """The importer of a file that has statistics without values; None for any other file."""
    return next((importer for importer in IMPORTERS if importer.logs(path)), None)
