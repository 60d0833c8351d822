"""A run that is found by what it is of, or created, and locked by this process: that of an import or a measurement. A
command that is started again continues its run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from binade.data.run.access import check_writable
from binade.data.run.directory import CANCELLED, DONE, FAILED, RUN_FILE, RunError, RunInfo, list_runs
from binade.data.run.experiment import experiment_files
from binade.data.run.json_files import write_json
from binade.data.run.run_writer import RunWriter, note_continued, unwritable
from binade.data.run.segment import segment_names
from binade.data.run.store import locked
from binade.data.words.text import describe


@contextmanager
def continued_run(
    root: Path,
    label: str,
    config: Mapping[str, Any],
    same: Sequence[str],
    busy: str,
    fits: Callable[[RunInfo], bool] = lambda run: True,
) -> Iterator[tuple[RunWriter, bool]]:
    """The last run that fits and whose run.json agrees with the configuration in the fields `same`, else a new one; and
    whether it existed before. busy: what another process that has it open is doing, such as "is being imported". Raises
    RunError if the root cannot be written or the run is open elsewhere. A process that was started for a queued run
    notes there which run it continues. An exception ends the run as failed or
    cancelled, unless it was done before and has not changed."""
    check_writable("recording a run")
    wanted = json.loads(json.dumps({name: config.get(name) for name in same}))
    with ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root):
                runs = [run for run in list_runs(root)[0] if {n: run.config.get(n) for n in same} == wanted]
                runs = [run for run in runs if fits(run)]
                writer = None if runs else RunWriter.create(root, label, dict(config))
                directory = runs[-1].directory if writer is None else writer.directory
            held.enter_context(locked(directory / "segments", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunError(f"{busy} into {directory.name} by another process: wait until it ends") from None
        except OSError as error:
            raise unwritable(root, error) from error
        before, content = runs[-1].status if runs else None, _content(directory)
        writer = writer or RunWriter.reopen(directory)
        if runs:
            note_continued(root, directory.name)
        try:
            yield writer, bool(runs)
        except BaseException as error:
            if before and before.state == DONE and _content(directory) == content:
                write_json(directory / "status.json", before)  # it still is what an earlier command has made
                raise
            cancelled = isinstance(error, KeyboardInterrupt)
            writer.finish(CANCELLED if cancelled else FAILED, None if cancelled else describe(error))
            raise


def _content(directory: Path) -> list[object]:
    """What changes if the settings, the segments, the losses or the results of a run change."""
    content: list[object] = [segment_names(directory)]
    results = [directory / name for name in experiment_files(directory)]
    for path in sorted([directory / RUN_FILE, *directory.glob("*.jsonl"), *results]):
        with suppress(FileNotFoundError):
            status = os.stat(path)
            content.append((path.name, status.st_ino, status.st_mtime_ns))
    return content
