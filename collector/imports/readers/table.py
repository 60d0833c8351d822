"""The losses in the rows of a log: which columns hold them, which rows are validation, other ranks or other runs."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import re2

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.repeats import LossesInOrder, RepeatedStepError, is_unexplained, one_per_step
from binade.collector.imports.readers.series import (
    NATS,
    UNKNOWN_UNIT,
    Columns,
    Conventions,
    Notes,
    Rows,
    Series,
    Window,
    listed,
    loss_of,
    step_of,
    windows_of,
)
from binade.data.words.text import counted

BLANK = ("", "None")  # cells of rows without a loss
MOST_STEPS = 3_000_000  # loss.jsonl is read as a whole: see data.run.store.MOST_BYTES
MOST_ROWS = 4 * MOST_STEPS
MOST_RUNS = 64  # in one log
MOST_VALUES = 64  # of a column that may tell rows apart
LONGEST_VALUE = 80
# Other names that may be meant. They are read if there is only one, and else the user chooses.
LIKE_STEP = re2.compile(r"(?:^|[^a-z])(?:steps?|iters?|iterations?)(?:[^a-z]|$)")
NO_STEP = re2.compile(r"time|speed|second|per|max|total|skipped|nan|[(]")
LIKE_LOSS = re2.compile(r"(?:^|[^a-z])loss(?:[^a-z]|$)")
NO_LOSS = re2.compile(r"val|eval|test|scale|aux|balanc|mtp|z[ _-]loss|epoch|min|max|best| vs ")
VALIDATION = re2.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval|tel|test|dev)(?:[^a-z]|$)")
# Names that only logs of reinforcement and preference learning have. `entropy` is none: supervised trainers log it too.
NOT_NATS = (
    r"(?:pg_loss|policy_loss|actor_loss|vf_loss|value_loss|critic_loss|kl_loss|entropy_loss|ppo_kl|approx_?kl|"
    r"mismatch[ _]kl|pg_clipfrac\w*|clip_?frac\w*|kl_coef\w*|rewards?(?:_\w+)?|mean_reward|avg[ _]reward|advantages?|"
    r"rewards/\w+|\w+_rewards?|generation kl error|policy_entropy|actor/\w+|critic/\w+|rollout/\w+|dpo_loss|"
    r"grpo_loss|ppo_loss)"
)
_NOT_NATS = re2.compile(rf"(?i)(?:^|.*[^\w]){NOT_NATS}(?:/\w+)?$")

VALIDATION_WORDS = frozenset({"val", "valid", "validation", "validate", "eval", "evaluation", "evaluate", "test",
                              "testing", "dev", "heldout", "holdout"})  # fmt: skip
TRAINING_WORDS = frozenset({"train", "training", "trn", "fit"})
SPLITS = frozenset({"split", "mode", "phase", "stage", "set", "subset", "partition", "fold", "loop", "data_split",
                    "dataset_split", "run_type", "job_type", "type", "kind", "event", "loader"})  # fmt: skip
OF_EVALUATION = frozenset({"eval", "is_eval", "validation", "is_validation", "val", "is_val", "is_test", "evaluation"})
OF_TRAINING = frozenset({"training", "is_train", "is_training"})
RANKS = ("node_rank", "rank", "global_rank", "dp_rank", "local_rank", "process_index", "process_id", "proc_rank",
         "worker", "worker_id", "worker_rank", "gpu_id", "device_id")  # fmt: skip
RUNS = ("run", "run_name", "run_id", "run_uuid", "runname", "experiment", "experiment_name", "experiment_id", "exp",
        "exp_name", "trial", "trial_id", "trial_name", "seed", "recipe", "quantization")  # fmt: skip
MICRO_BATCHES = ("micro_batch", "micro_step", "microbatch", "micro_batch_index", "micro_batch_idx", "micro_batch_id",
                 "microstep", "accumulation_step", "accum_step", "grad_accum_step")  # fmt: skip
EPOCHS = ("epoch", "epochs", "epoch_num", "epoch_idx", "epoch_index", "current_epoch")
TOTAL = "M of N/M"  # the name that lines.py gives the M of a step "N/M"
METRICS = ("metric", "metric_name", "tag", "key", "variable", "scalar", "name")
VALUES = ("value", "metric_value", "scalar_value")


class Names:
    """The columns that may be meant, of those seen so far. Each name costs the same, however many there are."""

    def __init__(self, known: tuple[str, ...], like: Any, unlike: Any, choice: str | None) -> None:
        self._ranks = {name: number for number, name in enumerate(known)}
        self._like, self._unlike, self._choice = like, unlike, choice
        self._known: list[tuple[int, int, str]] = []
        self._others: list[str] = []

    def add(self, name: str) -> None:
        lower = name.strip().lower()
        if self._choice:
            self._others += [name] * (name == self._choice)
        elif lower in self._ranks:
            insort(self._known, (self._ranks[lower], len(self._known), name))
        elif self._like.search(lower) and not self._unlike.search(lower):
            self._others.append(name)

    @property
    def candidates(self) -> list[str]:
        """The best first; several that are not known by name are a question."""
        return [name for _, _, name in self._known] or self._others

    @property
    def best(self) -> str | None:
        """The best known one, or the only one."""
        if self._known:
            return self._known[0][2]
        return self._others[0] if len(self._others) == 1 else None

    @property
    def is_known(self) -> bool:
        return bool(self._known)


def loss_names(kind: Conventions, choice: str | None = None) -> Names:
    return Names(kind.losses, LIKE_LOSS, NO_LOSS, choice)


def step_names(kind: Conventions, choice: str | None = None) -> Names:
    return Names(kind.steps, LIKE_STEP, NO_STEP, choice)


def has_columns(kind: Conventions, names: Any) -> bool:
    """Whether there are a step and a loss among these names."""
    losses, steps = loss_names(kind), step_names(kind)
    for name in names:
        losses.add(name)
        steps.add(name)
    return bool(losses.candidates and steps.candidates)


class LossTable:
    """The losses of the rows so far. A row may bring a column that is meant rather than the one before: then earlier
    rows have no loss."""

    def __init__(self, kind: Conventions, path: Path, columns: Columns, notes: Notes) -> None:
        self._kind, self._path, self.columns, self._notes = kind, path, columns, notes
        self._losses, self._steps = loss_names(kind, columns.loss), step_names(kind, columns.step)
        self._names: dict[str, None] = {}
        self._loss: str | None = None
        self._step: str | None = None
        self._splits: list[str] = []
        self._flags: dict[str, bool] = {}  # columns of true and false, and which of them is an evaluation
        self._tags: dict[tuple[str, ...], list[str]] = {RANKS: [], RUNS: [], MICRO_BATCHES: [], EPOCHS: []}
        self._pivot: tuple[str, str] | None = None
        self._seen_values: dict[str, dict[str, None]] = {column: {} for column, _ in columns.rows}
        self._clear()

    def _clear(self) -> None:
        self._keys: dict[tuple[bool, tuple[str, ...], bool, tuple[str, ...]], int] = {}
        self._key = array("i")
        self._at, self._value, self._epoch, self._total = array("q"), array("d"), array("d"), array("q")
        self.empty = 0

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        if not row.keys() <= self._names.keys():
            self._see(row)
        if self._pivot:
            row = self._by_metric(row)
            if not row.keys() <= self._names.keys():
                self._see(row)
        if not self._is_wanted(row):
            return
        loss = None if self._loss is None else row.get(self._loss)
        if self._loss is None or _is_blank(loss):  # of an evaluation, or another series
            self.empty += self._loss in row
            return
        if self._step is None:
            return
        if _is_blank(row.get(self._step)):
            raise ConfigError(f"{place}: there is a loss, but {self._step!r} has no step: expected a number")
        self._at.append(step_of(row[self._step], place, self._step, self._notes.decimal_comma))
        self._value.append(loss_of(loss, place, self._loss, self._notes.decimal_comma))
        self._epoch.append(_number(next((row[name] for name in self._tags[EPOCHS] if name in row), None)))
        total = _number(row.get(TOTAL))
        self._total.append(int(total) if 0 < total < 1 << 53 else 0)
        micro = any(not _is_blank(row.get(name)) for name in self._tags[MICRO_BATCHES])
        ranks = tuple(text for name in self._tags[RANKS] if (text := _text(row.get(name))))
        runs = tuple(_text(row.get(name)) for name in self._tags[RUNS])
        key = (self._is_validation(row), ranks, micro, runs)
        self._key.append(self._keys.setdefault(key, len(self._keys)))
        if len(self._at) > MOST_ROWS:
            raise ConfigError(f"{self._path} has more than {MOST_ROWS:,} losses: keep every tenth, for example")

    def _see(self, row: Mapping[str, Any]) -> None:
        """Choose the columns, of which there are new ones."""
        for name, value in row.items():
            if name not in self._names:
                self._names[name] = None
                self._see_name(name, value)
        if self._losses.best != self._loss:
            self._loss = self._losses.best
            self._clear()
        if not self._at:
            self._step = self._steps.best
        if self._pivot is None and not self._losses.is_known and not self.columns.loss:
            metric = next((name for name in row if name.strip().lower() in METRICS), None)
            value = next((name for name in row if name.strip().lower() in VALUES), None)
            self._pivot = (metric, value) if metric and value else None

    def _see_name(self, name: str, value: Any) -> None:
        self._losses.add(name)
        self._steps.add(name)
        if not self._notes.not_nats and _NOT_NATS.match(name[:LONGEST_VALUE]):
            self._notes.not_nats = f"{name[:LONGEST_VALUE]!r} is logged by reinforcement or preference learning"
        lower = name.strip().lower().replace(" ", "_").replace("-", "_")
        for prefix in ("train/", "trainer/", "training/", "metadata/"):
            lower = lower.removeprefix(prefix)
        for names, columns in self._tags.items():
            if lower in names:
                columns.append(name)
                return
        word = _text(value).lower()
        if lower in SPLITS or (isinstance(value, str) and word in VALIDATION_WORDS | TRAINING_WORDS):
            self._splits.append(name)
        elif lower in OF_EVALUATION | OF_TRAINING and (
            word in ("true", "false") or (lower.startswith("is_") and word in ("0", "1"))
        ):
            self._flags[name] = lower in OF_EVALUATION

    def _by_metric(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with a metric's name and its value, with a column of that name."""
        assert self._pivot
        metric, value = self._pivot
        return {**row, _text(row[metric]): row.get(value)} if _text(row.get(metric)) else row

    def _is_wanted(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has the values that the user chose."""
        for column, value in self.columns.rows:
            text = _text(row.get(column))
            if len(self._seen_values[column]) < MOST_VALUES:
                self._seen_values[column][text] = None
            if text != value:
                return False
        return True

    def _is_validation(self, row: Mapping[str, Any]) -> bool:
        for name in self._splits:
            words = _text(row.get(name)).lower().replace("-", "_").replace("/", "_").split("_")
            if not VALIDATION_WORDS.isdisjoint(words):
                return True
        return any((_text(row.get(name)).lower() in ("true", "1")) == when for name, when in self._flags.items()
                   if not _is_blank(row.get(name)))  # fmt: skip

    def series(self, again: Callable[[], Rows], run: str | None = None) -> tuple[Series, ...]:
        """The series of all rows. again: yields them once more, to find what tells losses of one step apart."""
        self._check()
        kept, facts = self._training()
        runs = self._runs(kept)
        found: list[Series] = []
        for where, members in runs.items():
            losses = self._losses_of(members)
            chosen = self.columns.repeats or self._kind.repeats
            if not chosen and is_unexplained(losses) and self._separating(again()):
                raise ConfigError(f"{self._path}: a step has several losses: {self._choices(again())}")
            try:
                done = one_per_step(losses, self.columns.repeats, self._kind.repeats)
            except RepeatedStepError as error:
                raise ConfigError(f"{self._path}: {error}: {self._choices(again())}") from None
            if len(done.losses) > MOST_STEPS:
                raise ConfigError(f"{self._path} has more than {MOST_STEPS:,} steps: keep every tenth, for example")
            label = ", ".join(f"{name}={value}" for name, value in [*self.columns.rows, *where])
            of_run = ", ".join(value for _, value in where) or None
            found.append(replace(self._series(done.losses, (*facts, *done.facts)), where=label, run=run or of_run,
                                 repeated=done.replaced))  # fmt: skip
        return tuple(found)

    def _series(self, losses: Mapping[int, float], facts: tuple[str, ...]) -> Series:
        assert self._loss is not None and self._step is not None
        notes, known = self._notes, self._losses.is_known
        window = (notes.window or self._kind.window) if known else Window.UNKNOWN
        steps = sorted(losses)
        if notes.validation:
            facts = (*facts, f"{counted(notes.validation, 'line')} of validation data left out")
        if VALIDATION.search(self._loss.lower()):
            facts = (*facts, f"{self._loss} is a loss of validation data")
        reason = self._kind.not_nats if self._kind.unit != NATS else notes.not_nats
        if not reason and _NOT_NATS.match(self._loss[:LONGEST_VALUE]):
            reason = f"{self._loss!r} is a loss of reinforcement or preference learning"
        unit = self.columns.unit or (UNKNOWN_UNIT if reason else NATS)
        if unit == UNKNOWN_UNIT:
            why = reason or "as --loss-unit says"
            facts = (
                *facts,
                f"the unit of the losses is unknown, not nats per token: {why} (--loss-unit nats if it is)",
            )
        return Series(
            name=self._loss,
            step_name=self._step,
            losses={step: losses[step] for step in steps},
            windows=dict(zip(steps, windows_of(steps, window), strict=True)),
            unit=unit,
            others=(*self._steps.candidates[1:], *self._losses.candidates[1:]),
            empty=self.empty,
            cut=tuple(notes.cut),
            damaged=tuple(notes.damaged),
            facts=(*notes.facts, *facts),
        )

    def _training(self) -> tuple[list[int], tuple[str, ...]]:
        """The keys of the rows that are read, and what is said of the others."""
        keys, counts = list(self._keys), [0] * len(self._keys)
        for key in self._key:
            counts[key] += 1
        kept, facts = list(range(len(keys))), list[str]()

        def left_out(keep: Callable[[int], bool]) -> int:
            nonlocal kept
            number = sum(counts[key] for key in kept if not keep(key))
            kept = [key for key in kept if keep(key)]
            return number

        if all(keys[key][0] for key in kept):
            facts.append("these are losses of validation data")
        elif number := left_out(lambda key: not keys[key][0]):
            columns = listed([*self._splits, *self._flags])
            facts.append(f"{number:,} losses of validation data left out, by column {columns}")
        ranks = {keys[key][1] for key in kept}
        if 1 < len(ranks) < sum(counts[key] for key in kept):
            first = min(ranks, key=lambda rank: [(part.zfill(LONGEST_VALUE), part) for part in rank])
            number = left_out(lambda key: keys[key][1] == first)
            facts.append(f"the losses of rank {'/'.join(first) or 'none'} were read, {number:,} of others left out")
        if len({keys[key][2] for key in kept}) > 1:
            number = left_out(lambda key: not keys[key][2])
            facts.append(f"the losses of whole steps were read, {number:,} of micro-batches left out")
        return kept, tuple(facts)

    def _runs(self, kept: list[int]) -> dict[tuple[tuple[str, str], ...], list[int]]:
        """The rows of each run, by the columns and values that tell it from the others."""
        keys = list(self._keys)
        of_key = {key: keys[key][3] for key in kept}
        values = set(of_key.values())
        members = [number for number, key in enumerate(self._key) if key in of_key]
        if len(values) == 1 or len(values) == len(members):
            return {(): members}
        if len(values) > MOST_RUNS:
            raise ConfigError(
                f"{self._path} has {len(values):,} runs: expected at most {MOST_RUNS}: choose with --rows"
            )
        names = self._tags[RUNS]
        varied = [i for i in range(len(names)) if len({value[i] for value in values if i < len(value)}) > 1]
        runs: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for number in members:
            value = of_key[self._key[number]]
            runs.setdefault(tuple((names[i], value[i] if i < len(value) else "") for i in varied), []).append(number)
        return runs

    def _losses_of(self, members: list[int]) -> LossesInOrder:
        keys = list(self._keys)
        micro = any(keys[key][2] for key in {self._key[i] for i in members})
        return LossesInOrder(
            array("q", (self._at[i] for i in members)),
            array("d", (self._value[i] for i in members)),
            array("d", (self._epoch[i] for i in members)),
            array("q", (self._total[i] for i in members)),
            micro,
        )

    def _choices(self, rows: Rows) -> str:
        """The ways to choose between losses of one step: a column that tells them apart, or --repeats."""
        ways = "choose with --repeats last, first, mean or continue (each time the steps go back, an epoch starts)"
        for column, values in self._separating(rows).items():
            examples = " or ".join(f"--rows {column}={value}" for value in islice(values, 3))
            more = f", of {len(values)} values" if len(values) > 3 else ""
            return f"choose rows with {examples}{more}"[:300] + ", or a way with --repeats"
        return ways

    def _separating(self, rows: Rows) -> dict[str, list[str]]:
        """The columns of which no value has a step twice, with their values."""
        assert self._loss is not None and self._step is not None
        steps: dict[str, dict[str, set[Any]]] | None = None
        for _, raw in rows:
            row = self._by_metric(raw) if self._pivot else raw
            if _is_blank(row.get(self._loss)) or not self._is_wanted(row):
                continue
            if steps is None:
                steps = {name: {} for name in row if name not in (self._loss, self._step)}
            for name in list(steps):
                value = _text(row.get(name))
                if (value not in steps[name] and len(steps[name]) >= MOST_VALUES) or row.get(self._step) in (
                    known := steps[name].setdefault(value, set())
                ):
                    del steps[name]
                else:
                    known.add(row.get(self._step))
        few = sorted((steps or {}).items(), key=lambda item: len(item[1]))
        return {name: list(values) for name, values in few if 1 < len(values) <= len(self._at) // 2}

    def _check(self) -> None:
        """Raise ConfigError if there are no losses, or if it is unknown which column they are in."""
        path = self._path
        if not self._names:
            raise ConfigError(f"{path} {_nothing(self._notes)}: expected a row for each step, with its loss")
        for names, option, what in ((self._steps, "--step-column", "steps"), (self._losses, "--loss-column", "losses")):
            if names.best is None and names.candidates:
                choices = listed(names.candidates)
                raise ConfigError(f"{path}: {choices} may be the {what}: choose one with {option} NAME")
            if names.best is None:
                every = listed(self._names)
                raise ConfigError(f"{path}: no column is known to have the {what}: give {option} NAME; it has {every}")
        if not self._at:
            for column, value in self.columns.rows:
                if value not in (seen := self._seen_values[column]):
                    raise ConfigError(f"{path} has no row with {column}={value}: {column!r} has {listed(seen)}")
            raise ConfigError(f"{path} has no losses in {self._loss!r}")


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip() in BLANK)


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()[:LONGEST_VALUE]


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _nothing(notes: Notes) -> str:
    """Why a log has no rows."""
    if notes.damaged:
        return f"cannot be read ({notes.damaged[0]})"
    return f"has no complete row ({notes.cut[0]})" if notes.cut else "has no rows"
