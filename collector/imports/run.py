"""The run of an import: found by its source or created, and locked by this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from binade.data.run.continued import continued_run
from binade.data.run.directory import IMPORT, RunInfo
from binade.data.run.run_writer import RunWriter

SAME = ("kind", "source", "loss_column", "audit")  # two imports that agree in these fields of run.json are one run


@contextmanager
def run_of_import(
    root: Path, config: dict[str, Any], replaceable: Callable[[RunInfo], bool] = lambda run: True
) -> Iterator[RunWriter]:
    """The run with this configuration, which has a `source`; a new one if none is replaceable. Raises as
    `continued_run`."""
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config["source"]).name).strip("-.")[:40] or "logs"
    word, doing = ("audit", "audited") if "audit" in config else ("import", "imported")
    busy = f"{config['source']} is being {doing}"
    with continued_run(root, f"{word}_{label}", {"kind": IMPORT, **config}, SAME, busy, replaceable) as (writer, _):
        yield writer
