"""The importers. To read another tool's files, write one (see log.Importer) and add it to IMPORTERS. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from binade.collector.imports import checkpoint, megatron_fork, msprobe, sglang, transformer_engine
from binade.collector.imports.log import Importer, TensorLog, in_folders

# The first importer that recognizes a file reads it. The Megatron fork's comes last, since it accepts any file and uses
# what its name says.
IMPORTERS: tuple[Importer, ...] = (
    transformer_engine.IMPORTER,
    msprobe.IMPORTER,
    sglang.IMPORTER,
    checkpoint.IMPORTER,
    megatron_fork.IMPORTER,
)


def interpret(path: PurePath, metadata: object = None, key: str | None = None) -> TensorLog:
    """What a file says about its tensor, and the iteration and the rank in the names of its folders. Never raises."""
    logs = (importer.read(path, metadata, key) for importer in IMPORTERS)
    log = next((log for log in logs if log is not None), TensorLog())
    missing: dict[str, Any] = {name: number for name, number in in_folders(path).items() if getattr(log, name) is None}
    return replace(log, **missing) if missing else log


def beside(path: Path) -> str | None:
    """See log.Importer."""
    return next((reason for importer in IMPORTERS if (reason := importer.beside(path)) is not None), None)


def statistics_of(path: Path) -> Importer | None:
    """The importer of a file that has statistics without values; None for any other file."""
    return next((importer for importer in IMPORTERS if importer.logs(path)), None)
