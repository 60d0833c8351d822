"""JSON: lines with an object each, alone or after a prefix, and documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import re2

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.kind import MOST_OBJECTS, Confidence, Kind, Start, json_object
from binade.collector.imports.readers.series import Notes, Rows
from binade.collector.imports.readers.table import has_columns
from binade.collector.imports.readers.text import flat, json_document, json_rows, text_lines


@dataclass(frozen=True, kw_only=True)
class JsonLines(Kind):
    """An object a line. signature: keys that only this kind has; of: whether steps are texts such as "3/20"."""

    signature: frozenset[str] = frozenset()
    of: bool = False

    def recognize(self, start: Start) -> Confidence:
        for row in start.objects:
            steps = [str(row[name]) for name in self.steps if name in row]
            is_of = not self.of or any("/" in step for step in steps)
            if is_of and self.signature <= row.keys() and has_columns(self, flat(row)):
                return Confidence.SIGNATURE if self.signature or self.of else Confidence.COLUMNS
        looks = start.first.startswith('{"') or start.path.suffix in (".jsonl", ".ndjson")
        return Confidence.POSSIBLE if looks and not (self.signature or self.of) else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        return json_rows(path, notes)


@dataclass(frozen=True, kw_only=True)
class PrefixedJson(Kind):
    """Lines with an object after a prefix, among any other lines. row: the values by column, of an object; none if it
    is not about a step."""

    prefix: str
    row: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content

    def recognize(self, start: Start) -> Confidence:
        lines = (line for line in start.lines if self.prefix in line)
        rows = (self._row(line) for line in islice(lines, MOST_OBJECTS))
        return Confidence.SIGNATURE if any(has_columns(self, row) for row in rows) else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        for number, line in enumerate(text_lines(path, notes, errors="replace"), 1):
            if self.prefix not in line:
                continue
            if row := self._row(line):
                yield f"{path}, line {number}", row
            elif not json_object(self._text(line)):
                notes.damaged.append(f"line {number}: expected a JSON object after {self.prefix!r}")

    def _text(self, line: str) -> str:
        return line[line.find(self.prefix) + len(self.prefix) :]

    def _row(self, line: str) -> dict[str, Any]:
        return self.row(json_object(self._text(line)))


def mlperf_row(event: dict[str, Any]) -> dict[str, Any]:
    """A train_loss with the steps or samples of its metadata."""
    where = event.get("metadata")
    where = where if isinstance(where, dict) else event
    if event.get("key") != "train_loss":
        return {}
    return {name: where[name] for name in MLPERF_STEPS if name in where} | {"train_loss": event.get("value")}


MLPERF_STEPS = ("step", "step_num", "iteration", "samples_count", "epoch_num")


def dllogger_row(entry: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step, which is a number, or a list with the epoch before it."""
    step, data = entry.get("step"), entry.get("data")
    step = step if isinstance(step, list) else [step]
    if not isinstance(data, dict) or not (step and type(step[-1]) is int):
        return {}
    return {"step": step[-1], **({"epoch": step[0]} if len(step) > 1 else {}), **data}


@dataclass(frozen=True, kw_only=True)
class JsonDocument(Kind):
    """A file that is one value. looks: how sure it is from the start; values: the place in the file, and the values by
    column."""

    looks: Callable[[Start], Confidence]
    values: Callable[[Any, Path], Rows]

    def recognize(self, start: Start) -> Confidence:
        return self.looks(start) if start.lines else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        return self.values(json_document(path), path)


def is_trainer_state(start: Start) -> Confidence:
    if not start.first.lstrip().startswith("{"):
        return Confidence.NONE
    whole = json_object(start.first)  # an object in one line, or the first one of JSON lines
    named = "log_history" in whole if whole else '"log_history":' in start.text
    return Confidence.SIGNATURE if named else Confidence.NONE


def trainer_history(document: Any, path: Path) -> Rows:
    history = document.get("log_history") if isinstance(document, dict) else None
    if not isinstance(history, list):
        raise ConfigError(f"{path}: expected log_history, a list of what was logged")
    for number, row in enumerate(history):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, log_history[{number}]: expected an object with step and loss")
        yield f"{path}, log_history[{number}]", row


_BY_STEP = re2.compile(r'"train/loss":\s*\{\s*"[0-9]+":')


def is_golden(start: Start) -> Confidence:
    """The values that Megatron's tests expect, from TensorBoard; tests of NeMo-RL have values by step below names."""
    of_megatron = all(f'"{key}"' in start.text for key in ("lm loss", "start_step", "values"))
    signature = start.text.lstrip().startswith("{") and (of_megatron or _BY_STEP.search(start.text))
    return Confidence.SIGNATURE if signature else Confidence.NONE


def golden_values(document: Any, path: Path) -> Rows:
    for metric, about in document.items() if isinstance(document, dict) else ():
        if not isinstance(about, dict):
            raise ConfigError(f"{path}, {metric[:80]}: expected start_step, step_interval and values")
        for step, value in _values(path, metric, about):
            yield f"{path}, {metric[:80]}, step {str(step)[:40]}", {"step": step, metric: value}


def _values(path: Path, metric: str, about: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The values by step: older files have a list of them."""
    values = about.get("values", about if about and all(map(str.isdecimal, about)) else None)
    if isinstance(values, dict):
        yield from values.items()
    elif isinstance(values, list) and all(type(about.get(key)) is int for key in ("start_step", "step_interval")):
        yield from ((about["start_step"] + n * about["step_interval"], value) for n, value in enumerate(values))
    else:
        raise ConfigError(f"{path}, {metric[:80]}: expected values by step, or a list with start_step, step_interval")


_NUMBER = r"\s*-?[0-9.]+(?:[eE][-+]?[0-9]+)?\s*"
_SCALARS = re2.compile(rf"\s*\[\s*\[{_NUMBER},\s*[0-9]+\s*,(?:{_NUMBER}|\s*\"?-?(?:NaN|Infinity)\"?\s*)\]")


def is_tensorboard(start: Start) -> Confidence:
    if not _SCALARS.match("\n".join(start.lines[:6])[:400]):
        return Confidence.NONE
    return Confidence.POSSIBLE if is_other_tag(start.path.stem) else Confidence.SIGNATURE


def tensorboard_scalars(document: Any, path: Path) -> Rows:
    for number, row in enumerate(document if isinstance(document, list) else [], 1):
        if not isinstance(row, list) or len(row) != 3:
            raise ConfigError(f"{path}, entry {number}: expected [wall time, step, value]")
        yield f"{path}, entry {number}", {"step": row[1], "value": row[2]}


def is_other_tag(name: str) -> bool:
    """Whether the name of a download, "run-RUN-tag-TAG", is that of another scalar than a loss."""
    _, separator, tag = name.lower().rpartition("-tag-")
    return bool(separator) and ("loss" not in tag or any(word in tag for word in ("val", "eval", "test")))


_CURVES = re2.compile(r'^\s*\[\s*\{[^{}\[\]]*"(?:x|y|name)":')


def is_comet(start: Start) -> Confidence:
    curves = _CURVES.match(start.text) and all(f'"{key}"' in start.text[:100_000] for key in ("name", "x", "y"))
    return Confidence.SIGNATURE if curves and "loss" in start.text.lower() else Confidence.NONE


def comet_curves(document: Any, path: Path) -> Rows:
    for number, curve in enumerate(document if isinstance(document, list) else [], 1):
        place = f"{path}, curve {number}"
        if not isinstance(curve, dict) or not all(isinstance(curve.get(axis), list) for axis in "xy"):
            raise ConfigError(f"{place}: expected name, and x and y, which are lists")
        if len(curve["x"]) != len(curve["y"]):
            raise ConfigError(f"{place}: there are {len(curve['x'])} x and {len(curve['y'])} y: expected as many")
        for step, value in zip(curve["x"], curve["y"], strict=True):
            yield place, {"step": step, str(curve.get("name"))[:200]: value}


def is_records(start: Start) -> Confidence:
    """A list of objects, or an object of lists, of which the first MiB names a step and a loss."""
    keys = {match[1] for match in islice(_KEY.finditer(start.text[:20_000]), 200)}
    if not start.first.lstrip().startswith(("[", "{")) or json_object(start.first):
        return Confidence.NONE
    if not _RECORDS.match(start.text):
        return Confidence.NONE
    return Confidence.COLUMNS if has_columns(_ANY, keys) else Confidence.NONE


_KEY = re2.compile(r'"([^"\\]{1,80})"\s*:')
_RECORDS = re2.compile(r'\s*(?:\[\s*\{|\{\s*"[^"]*"\s*:\s*\[\s*[-0-9"nNI])')
_ANY = JsonLines(kind="", example="", columns="")


def records(document: Any, path: Path) -> Rows:
    if isinstance(document, dict):
        lists = {name: values for name, values in document.items() if isinstance(values, list)}
        if len({len(values) for values in lists.values()}) > 1:
            raise ConfigError(f"{path}: its lists have different lengths: expected one value for each step in each")
        for number, row in enumerate(zip(*lists.values(), strict=True), 1):
            yield f"{path}, entry {number}", dict(zip(lists, row, strict=True))
        return
    for number, row in enumerate(document if isinstance(document, list) else [], 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, entry {number}: expected an object with a step and a loss")
        yield f"{path}, entry {number}", flat(row)
