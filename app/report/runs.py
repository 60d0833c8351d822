"""The sections of text and tables: the runs, the commands that reproduce them, and definitions of the metrics."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
from typing import Any

import pandas as pd

from binade.app.glossary import TERMS
from binade.app.questions.shared.rounded import about_format
from binade.app.report.section import Section, Table
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec

PACKAGES = ("torch", "triton", "numpy", "pandas", "duckdb", "altair", "vl-convert-python")
COLUMNS = ("run_id", "state", "model", "size", "dataset", "recipe", "started", "iterations", "tensors", "loss_last")
MAX_CONFIGS = 60


def selected(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The rows of `Catalog.runs` that have a tensor in the selection."""
    runs = opened.runs()
    counted = opened.moments(where, "run_id")["group"]
    return runs[runs["run_id"].isin(set(counted))]


def section(opened: Catalog, runs: pd.DataFrame) -> Section:
    """Some rows of `Catalog.runs` as a table, with their configurations and commands."""
    table = runs[list(COLUMNS)].assign(started=runs["started"].dt.strftime("%Y-%m-%d %H:%M:%S UTC"))
    texts = []
    for row in runs.head(MAX_CONFIGS).itertuples():
        config = json.loads(str(row.config))
        texts.append((f"{row.run_id}: reproduced by", again(config)))
        texts.append((f"{row.run_id}: configuration", json.dumps(config, indent=1, ensure_ascii=False)))
    problems = []
    if len(runs) > MAX_CONFIGS:
        problems.append(f"{len(runs)} runs are selected: the configurations of the {MAX_CONFIGS} newest are shown.")
    problems += [f"Skipped when the index was built: {reason}" for reason in opened.refused]
    text = "The runs whose tensors are in the report, their configurations, and the commands that reproduce them."
    tables = (Table("runs", "Runs", table),)
    return Section("runs", "Runs", tables=tables, text=text, problems=problems, texts=texts)


def again(config: dict[str, Any]) -> str:
    """The command that reproduces one run; for a run of a batch, only with its own recipe. It leaves out the root,
    which the caller chooses."""
    command = config.get("command")
    if not isinstance(command, str):
        return "not recorded"
    try:
        words = _without(shlex.split(command), "--tensor-save-dir")
    except ValueError:  # quotes that do not close: not written by the collector
        return command
    if "batch" in words:
        words = _without(_without(words, "--quantization"), "--quant-type")
        at = words.index("batch")
        words[at : at + 1] = ["run", "--quantization", str(config.get("recipe"))]
    return shlex.join(words)


def _without(words: list[str], option: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if not skip and word.partition("=")[0] != option:
            kept.append(word)
        skip = word == option and not skip
    return kept


def definitions() -> Section:
    metrics = pd.DataFrame([{"Metric": m.label, "Unit": m.unit, "Definition": m.definition} for m in MEASURES.values()])
    formats = pd.DataFrame([{"Format": name, "What it is": about_format(Spec.of(name))} for name in FORMATS])
    terms = pd.DataFrame(TERMS.items(), columns=["Term", "Definition"])
    tables = (
        Table("metrics", "Metrics", metrics),
        Table("formats_known", "Formats", formats),
        Table("terms", "Terms", terms),
    )
    text = (
        "x is the tensor before rounding, q the tensor after it. NaN and Inf are counted separately and left out of "
        "the "
        "sums."
    )
    return Section("definitions", "Definitions", tables=tables, text=text)


def made_with(command: str) -> Section:
    rows = [("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    table = Table("versions", "Versions", pd.DataFrame(rows, columns=["Package", "Version"]))
    texts = (("This report was made by", command),)
    return Section("made", "How it was made", tables=(table,), texts=texts)
