"""The run of an import: found by its source or created, and locked by this process."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from binade.data.access import check_writable
from binade.data.json_files import write_json
from binade.data.runs import CANCELLED, DONE, FAILED, IMPORT, RUN_FILE, RunError, RunWriter, list_runs
from binade.data.segment import segment_names
from binade.data.store import locked
from binade.data.text import describe

SAME = ("kind", "source", "loss_column")  # two imports that agree in these fields of run.json are one run


@contextmanager
def run_of_import(root: Path, config: dict[str, Any]) -> Iterator[RunWriter]:
    """The run with this configuration, which has a `source`. Raises RunError if root cannot be written or the same
    import is running. An exception ends the run as failed or cancelled."""
    check_writable("recording a run")
    config = {"kind": IMPORT, **config}
    with ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root):
                same = [run for run in list_runs(root)[0] if all(run.config.get(n) == config.get(n) for n in SAME)]
                if same:
                    directory = same[-1].directory
                else:
                    label = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config["source"]).name).strip("-.")[:40]
                    writer = RunWriter.create(root, f"import_{label or 'logs'}", config)
                    directory = writer.directory
            held.enter_context(locked(directory / "segments", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunError(
                f"{config['source']} is being imported into {directory.name} by another process: wait until it ends"
            ) from None
        except OSError as error:
            raise RunError(
                f"cannot write to {root}: {error.strerror or error}; choose a directory with --tensor-save-dir"
            ) from error
        before, content = same[-1].status if same else None, _content(directory)
        writer = RunWriter.reopen(directory) if same else writer
        try:
            yield writer
        except BaseException as error:
            if before and before.state == DONE and _content(directory) == content:
                write_json(directory / "status.json", before)  # it still is what an earlier import has made
                raise
            cancelled = isinstance(error, KeyboardInterrupt)
            writer.finish(CANCELLED if cancelled else FAILED, None if cancelled else describe(error))
            raise


def _content(directory: Path) -> list[object]:
    """What changes if the settings, the losses or the segments of a run change."""
    found: list[object] = [segment_names(directory)]
    for name in (RUN_FILE, "loss.jsonl"):
        with suppress(FileNotFoundError):
            status = os.stat(directory / name)
            found.append((name, status.st_ino, status.st_mtime_ns))
    return found
