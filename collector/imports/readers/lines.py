"""Text logs: lines that state a step and losses, among any other lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import re2

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.kind import COLORS, Confidence, Kind, Start
from binade.collector.imports.readers.numbers import LONGEST, number_of, whole_of
from binade.collector.imports.readers.series import Columns, Notes, Rows, Series, Window
from binade.collector.imports.readers.table import EPOCHS, MICRO_BATCHES, NOT_NATS, RANKS, TOTAL, has_columns
from binade.collector.imports.readers.text import text_lines

# A value, up to what cannot be a part of it: a comma or a colon before a digit can.
TOKEN = r"(?:[^\s|;,:/\"'()\[\]{}]|[,:][0-9])"
STEP = rf"([0-9]{TOKEN}*)(?:\s*/\s*({TOKEN}+))?"
# Of re, with possessive quantifiers, and only on LONGEST characters: see numbers.py.
VALUE = re.compile(
    r"\s*+[\"']?((?:(?:np|numpy|torch|jnp|jax|mx)\.)?[A-Za-z]++[0-9]*+\([^()]*+\)|(?:[^\s|;,\"'()\[\]{}]|,[0-9])++)"
)
NUMBER_LIKE = re.compile(
    r"[-+]?(?:\.?[0-9]|(?:nan|inf|infinity)$|(?:np\.|numpy\.|torch\.)?(?:float|tensor|array))", re.IGNORECASE
)
EPOCH = re2.compile(r"(?i)(?:^|[^\w/])epoch(?:\(train\))?[\"']?\s*[:=]?\s*\[?\s*([0-9]+(?:\.[0-9]+)?)")
RANK = re2.compile(r"(?i)(?:^|[^\w])(?:global[ _]?)?rank[\"']?\s*[:=_-]?\s*([0-9]+)|\[default([0-9]+)\]")
RANK_FIRST = re.compile(r"\s{0,9}\[?([0-9]{1,6})\]?:\s")
MICRO = re2.compile(
    r"(?i)(?:^|[^\w])(?:micro[ _-]?(?:batch|step)|accum(?:ulation)?[ _]step)(?:[ _](?:idx|index|id))?[\"']?\s*[:=#]?\s*"
    r"\[?([0-9]+)"
)
NOT_NATS_LABEL = re2.compile(rf"(?i)(?:^|[^\w])({NOT_NATS}(?:/\w+)?)[\"']?\s*[:=]")
_VALIDATION = r"(?:validat(?:e|ion|ing)|eval(?:uat(?:e|ion|ing))?|val(?:id)?|test(?:ing)?|held-?out)"
VALIDATION_BEFORE = re2.compile(rf"(?i)\b{_VALIDATION}[\s:\])|,]")
VALIDATION_ROW = re2.compile(
    rf"(?i)\b(?:split|mode|phase|stage|set|subset|partition)[\"']?\s*[:=]\s*[\"']?(?:{_VALIDATION}|dev)\b"
)
SPACED = re.compile(r" [0-9]{3}(?:[\s,;|)\]:]|$)")  # the rest of a number with spaces between groups
MOST_LOOKED_AT = 10_000  # lines, for words that show what the losses are
OF_VALIDATION = ("val", "eval", "test", "held", "dev")
ENDS = r"(?:[\s,;|)\]}\"']|$)"
_compile = cache(re2.compile)


@dataclass(frozen=True, kw_only=True)
class Lines(Kind):
    """A kind of text log, by patterns of RE2.

    step    finds the step of a line; "{N}" in it stands for the step, which may be written "N/M"
    loss    what stands before a loss, with its name as group 1
    end     what follows a loss; a line that another process wrote into has something else
    skip    lines that are not of the training
    below   whether the losses are in the lines below the one with the step
    prose   whether a label is also a word of sentences, after which there need not be a number
    line    an example: step 10, loss 11.521
    """

    step: str
    loss: str
    line: str
    end: str = ENDS
    skip: str = ""
    below: bool = False
    prose: bool = False
    confidence: Confidence = Confidence.SIGNATURE
    window: Window = Window.ONE
    steps: tuple[str, ...] = ("step",)

    def recognize(self, start: Start) -> Confidence:
        if not _step_pattern(self.step).search(start.text):
            return Confidence.NONE
        notes = Notes()
        found = next(self._rows_of(iter(start.lines), notes, ""), None)
        return self.confidence if found else _possible(notes)

    def rows(self, path: Path, notes: Notes) -> Rows:
        return self._rows_of(text_lines(path, notes, errors="replace"), notes, f"{path}, ")

    def _rows_of(self, lines: Iterator[str], notes: Notes, path: str) -> Rows:
        stated: dict[str, dict[str, Any]] = {}  # the last step, by the rank that a line names
        for number, raw in enumerate(lines, 1):
            line = COLORS.sub("", raw) if "\x1b" in raw else raw
            place = f"line {number}"
            if self.skip and _compile(self.skip).search(line):
                continue
            step, labels = self.parts(line, notes)
            if self.below:
                rank = _rank(line)
                if step:
                    stated[rank] = _step_row(line, step, place, notes)
                row = stated.get(rank, {})
            else:
                row = _step_row(line, step, place, notes) if step and labels else {}
            if not row:
                continue
            if not notes.not_nats and number < MOST_LOOKED_AT and (label := NOT_NATS_LABEL.search(line)):
                notes.not_nats = f"line {number} has {label[1]!r}, of reinforcement or preference learning"
            if losses := self.losses_of(line, labels, place, notes):
                yield f"{path}{place}", row | losses

    def parts(self, line: str, notes: Notes) -> tuple[Any, list[Any]]:
        """The match of the step in a line, whose group 1 is the step, group 2 the M of "N/M", and of each label."""
        step = _step_pattern(self.step).search(line)
        return step, [*_compile(self.loss).finditer(line)] if step or self.below else []

    def losses_of(self, line: str, labels: list[Any], place: str, notes: Notes) -> dict[str, float]:
        """The losses of a line by name. Those without a whole number are noted."""
        found: dict[str, float] = {}
        end = 0
        for label in labels:
            if label.start() < end:  # within the value before
                continue
            text = line[label.end() : label.end() + LONGEST]
            value = VALUE.match(text)
            end = label.end() + (value.end() if value else 0)
            if not (value and NUMBER_LIKE.match(value[1])) and self.prose:
                continue
            try:
                if not (value and _compile(self.end).match(text[value.end() :])):
                    raise ValueError("expected a number")
                found[_name(line, label)] = number_of(value[1])
            except ValueError as error:
                shown = f", found {value[1][:40]!r}" if value else ""
                at = f"{place}, column {label.end() + 1}"
                notes.damaged.append(f"{at}: {error} after {label[0].strip()[:80]!r}{shown}")
        return found


ENOUGH = 3  # steps: a sentence may have one
STEP_NAMES = ("global_step", "global step", "step", "steps", "iteration", "iter")
ANY_STEP = re2.compile(
    r"(?i)(?:^|[^\w/])(total |max |micro |accum |accumulation |per |warmup )?[\"']?"
    rf"(global[_ ]step|steps?|iteration|iter)(?:/max_steps)?[\"']?\s*[:=]?\s*[\"']?\[?\s*{STEP}"
)
DURATION = re.compile(
    r"[0-9]*+\.0*+[1-9][0-9]*+|[0-9.]++(?:s|ms|sec|secs|seconds|x)", re.I
)  # of a step, not its number
ANY_LOSS = (
    r"(?i)(?:^|[^\w/.-])[\"']?((?:(?:training|train|lm|val|valid|validation|eval|test) )?(?:[a-z_][\w/.-]*)?loss)[\"']?"
    r"(?: train)?(?:\s*[:=]\s*|\s+)"
)


@dataclass(frozen=True, kw_only=True)
class PrintedLines(Lines):
    """Lines that print a step and a loss in any of many ways, as most training scripts do. Of several steps in a line,
    the first one of STEP_NAMES counts: NeMo's iteration starts again with each epoch."""

    loss: str = ANY_LOSS
    step: str = ""
    prose: bool = True
    window: Window = Window.UNKNOWN

    def recognize(self, start: Start) -> Confidence:
        if not _compile(ANY_LOSS).search(start.text):
            return Confidence.NONE
        steps, notes = set(), Notes()
        for _, row in self._rows_of(iter(start.lines), notes, ""):
            steps |= {row["step"]} if has_columns(self, row) else set()
            if len(steps) >= ENOUGH:
                return Confidence.COLUMNS
        return _possible(notes)

    def parts(self, line: str, notes: Notes) -> tuple[Any, list[Any]]:
        lower = line.lower()
        labels = [*_compile(ANY_LOSS).finditer(line)] if "loss" in lower else []
        if not labels:
            return None, []
        if any(word in lower for word in OF_VALIDATION) and _is_validation(line, labels[0].start()):
            notes.validation += ANY_STEP.search(line) is not None
            return None, []
        first: dict[str, _Step] = {}
        for match in ANY_STEP.finditer(line):
            if not match[1] and not DURATION.fullmatch(match[3][:LONGEST]):
                name = match[2].lower().replace(" ", "_")
                first.setdefault(name, _Step(match[3], match[4], match.start(3)))
        return next((first[name] for name in STEP_NAMES if name in first), None), labels


def _is_validation(line: str, at: int) -> bool:
    """Whether a line whose first loss is there is of validation data."""
    return bool(VALIDATION_BEFORE.search(line[: at + 1]) or VALIDATION_ROW.search(line))


@dataclass(frozen=True)
class _Step:
    """A step in a line, as a match: its text, the M of "N/M", and where it starts."""

    text: str
    total: str | None
    at: int

    def __getitem__(self, group: int) -> str | None:
        return (self.text, self.text, self.total)[group]

    def start(self, group: int = 0) -> int:
        return self.at

    def end(self) -> int:
        return self.at + len(self.text)


@dataclass(frozen=True, kw_only=True)
class NoLosses(Kind):
    """Files that have no steps with losses. advice: what to import instead. pattern: of their text; magic: their first
    bytes."""

    advice: str
    pattern: str = ""
    magic: bytes = b""

    def recognize(self, start: Start) -> Confidence:
        of_text = self.pattern and _compile(self.pattern).search(start.text)
        of_bytes = self.magic and start.content.startswith(self.magic)
        return Confidence.POSSIBLE if of_text or of_bytes else Confidence.NONE

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        raise ConfigError(f"{path} is {self.advice}")


def _possible(notes: Notes) -> Confidence:
    """Of a text in which no step has a loss: sure enough to say of a file that is named which number cannot be read."""
    return Confidence.POSSIBLE if notes.damaged else Confidence.NONE


def _name(line: str, label: Any) -> str:
    """The name of a loss. In `split=train loss=2`, `train` is not a part of it."""
    name: str = label[1]
    return name.split()[-1] if line[label.start(1) - 1 : label.start(1)] in ("=", ":") else name


def _step_row(line: str, step: Any, place: str, notes: Notes) -> dict[str, Any]:
    """The step of a line, and the epoch, rank and micro-batch that it names; empty if the step is not a number."""
    try:
        if not step[2] and len(step[1]) <= 3 and SPACED.match(line, step.end()):
            raise ValueError("expected no space within a number")
        row: dict[str, Any] = {"step": whole_of(step[1])}
    except ValueError as error:
        at = f"{place}, column {step.start(1) + 1}"
        notes.damaged.append(f"{at}: {error} as the step, found {step[1][:40]!r}")
        return {}
    if step[2]:
        row[TOTAL] = step[2].replace(",", "")
    lower = line.lower()
    if "epoch" in lower and (epoch := EPOCH.search(line)):
        row[EPOCHS[0]] = epoch[1]
    if rank := _rank(line):
        row[RANKS[1]] = rank
    if ("micro" in lower or "accum" in lower) and (micro := MICRO.search(line)):
        row[MICRO_BATCHES[0]] = micro[1]
    return row


def _rank(line: str) -> str:
    """The rank that a line names; "" if it names none."""
    if "rank" in line.lower() or "[default" in line:
        match = RANK.search(line)
        return next(filter(None, match.groups())) if match else ""
    match = RANK_FIRST.match(line)
    return match[1] if match else ""


@cache
def _step_pattern(step: str) -> Any:
    return re2.compile(f"(?m){step.replace('{N}', STEP)}")
