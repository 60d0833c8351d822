"""Exports what runs recorded as series over iterations for other tools: TensorBoard, Weights & Biases, CSV, Parquet.

`points` and `points_of_rows` give the same points, of an index and of rows that are just being written. A target writes
each run to its own directory: `export` writes existing runs, a `Sink` follows one during training.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from binade.data.run.columns import COUNTS, ERROR_COLUMNS, MOMENTS, TensorRow
from binade.data.run.directory import RunError, RunFile
from binade.data.run.json_files import read_json
from binade.data.run.losses import LOSS as STEPS
from binade.data.run.losses import is_lost
from binade.data.run.segment import TENSOR_SCHEMA, tensor_record
from binade.data.run.store import staged_directory, staged_file, sweep_beside
from binade.data.run.tensor_kinds import TENSOR_KINDS
from binade.data.words.filter import FIELDS, Filter
from binade.data.words.text import csv_cell, plain_name
from binade.quant.formats import UnknownFormatError
from binade.quant.normal import VS_NORMAL, normal_sqnr
from binade.quant.sketch import bin_edges
from binade.quant.specs import Spec, SpecError

if TYPE_CHECKING:  # imports DuckDB, which may not be installed for training
    from binade.data.index.catalog import Catalog

LOSS, HISTOGRAM = "loss", "histogram"
MEASURED = (*MOMENTS, *COUNTS, "result_sqnr_db")  # of a tensor
METRICS = (LOSS, HISTOGRAM, *MEASURED, *ERROR_COLUMNS, VS_NORMAL)
DEFAULT_METRICS = (LOSS, HISTOGRAM, "absmax", "kurtosis", "sqnr_db", "flush_to_zero", "saturated", "result_sqnr_db")
RUN_FIELDS = ("run_id", "model", "size", "dataset", "recipe")
PLACE = (*FIELDS, "original_quant_type")  # what identifies a tensor
RECORD = pa.schema([TENSOR_SCHEMA.field(name) for name in ("tensor_id", "numel", *PLACE, *MEASURED)])
OPERATIONS = {kind.name: (kind.operation.value, kind.phase.value) for kind in TENSOR_KINDS}
AT_ONCE = 500  # tensors read from the index at a time
BATCH = 10_000  # points of a table written at a time
WANDB_BINS = 512  # that a histogram of W&B may have


class ExportError(ValueError):
    """The export is not possible as requested. The message says why, and what to do."""

    exit_status = 2


@dataclass(frozen=True)
class Choice:
    """What is exported.

    metrics   of METRICS
    formats   the formats or specs whose errors are exported; all that were scored if empty
    where     the tensors; losses are those of the runs that its run_id, model, size, dataset and recipe select

    Raises ExportError for an unknown metric or format.
    """

    metrics: tuple[str, ...] = DEFAULT_METRICS
    formats: tuple[str, ...] = ()
    where: Filter = field(default_factory=Filter)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ExportError(f"unknown metric {name!r}: expected one of {', '.join(METRICS)}")
        try:
            object.__setattr__(self, "formats", tuple(str(Spec.of(name)) for name in self.formats))
        except (UnknownFormatError, SpecError) as error:
            raise ExportError(str(error)) from None


@dataclass(frozen=True)
class Histogram:
    """Counts of values in adjacent bins, from a binade sketch: edges [n + 1] ascending, counts [n]. min, max, sum and
    sum of squares are those of the values."""

    edges: np.ndarray
    counts: np.ndarray
    min: float
    max: float
    sum: float
    sum_squares: float

    @classmethod
    def of(cls, low: np.ndarray, high: np.ndarray, counts: np.ndarray, record: Mapping[str, Any]) -> Histogram:
        """low, high, counts: the nonempty bins of a tensor, in any order; record: its columns of the index."""
        edges = np.unique(np.concatenate([low, high]))
        filled = np.zeros(len(edges) - 1, np.int64)
        filled[np.searchsorted(edges, low)] = counts
        finite = record["numel"] - record["nans"] - record["infs"]
        mean, rms = record["mean"], record["rms"]
        return cls(edges, filled, record["min"], record["max"], mean * finite, rms * rms * finite)

    def coarse(self, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts and edges, neighbors joined in pairs until there are at most `longest` bins."""
        counts, edges = self.counts, self.edges
        while len(counts) > longest:
            counts = np.add.reduceat(counts, np.arange(0, len(counts), 2))
            edges = np.append(edges[:-1:2], edges[-1])
        return counts, edges


@dataclass(frozen=True)
class MetricPoint:
    """A metric of a tensor or a run in one iteration.

    place    by PLACE; None where one does not apply or is not known
    metric   of METRICS; a histogram's value is a Histogram
    format   of an error: the format that makes it
    """

    place: Mapping[str, Any]
    metric: str
    value: float | Histogram
    format: str | None = None

    @property
    def step(self) -> int:
        """The iteration; 0 for an imported tensor whose log does not contain it."""
        return self.place["iteration"] or 0

    @property
    def tag(self) -> str:
        """The series of a run that it belongs to: layer2/fc2/input/sqnr_db/mxfp4.

        The parts that most tensors share are left out: micro-batch 0, rank 0, and the usual operation and phase. The
        quant type and stage are named in imported logs, where tensors of one run differ by them.
        """
        at = self.place
        usual = OPERATIONS.get(at["tensor_name"], (None, None))
        log = (at["quant_type"], at["stage"]) if at["original_quant_type"] else ()
        parts = (
            at["layer_index"] is not None and f"layer{at['layer_index']}",
            at["module"] or at["component"],
            at["expert"] is not None and f"expert{at['expert']}",
            at["tensor_name"],
            *(word for word, known in zip((at["operation"], at["phase"]), usual, strict=True) if word != known),
            *log,
            at["rank"] and f"rank{at['rank']}",
            at["micro_batch"] and f"micro_batch{at['micro_batch']}",
            self.metric,
            self.format,
        )
        return "/".join(plain_name(part) for part in parts if part)


def points(catalog: Catalog, run: Mapping[Any, Any], choice: Choice) -> Iterator[MetricPoint]:
    """The points of a run, a row of `Catalog.runs`: its losses, NaN where one is not finite, then its tensors, by
    iteration. Raises OSError."""
    if any(run[name] not in values for name, values in choice.where.items() if name in RUN_FIELDS):
        return
    if LOSS in choice.metrics:
        place = dict.fromkeys(PLACE) | {name: run[name] for name in RUN_FIELDS}
        for step in catalog.records(STEPS, [run["run_id"]])[run["run_id"]]:
            if step["loss"] is not None or is_lost(step):
                loss = math.nan if step["loss"] is None else step["loss"]
                yield MetricPoint(place | {"iteration": step["iteration"]}, LOSS, loss)
    if set(choice.metrics) == {LOSS}:
        return
    tensors = catalog.tensors(replace(choice.where, run_id=(run["run_id"],)), order_by="iteration")
    for start in range(0, len(tensors), AT_ONCE):
        part = tensors[start : start + AT_ONCE]
        ids = part["tensor_id"].tolist()
        scores = dict(list(catalog.scores(tensor_ids=ids).groupby("tensor_id")))
        bins = {}
        if HISTOGRAM in choice.metrics:
            bins = dict(list(catalog.distribution(by="tensor_id", tensor_ids=ids).groupby("group")))
        for record in pa.Table.from_pandas(part, RECORD, preserve_index=False).to_pylist():
            name = record["tensor_id"]
            errors = scores[name].to_dict("records") if name in scores else []
            distribution = bins.get(name)
            sketch = None
            if distribution is not None:
                sketch = (
                    distribution["low"].to_numpy(),
                    distribution["high"].to_numpy(),
                    distribution["count"].to_numpy(),
                )
            yield from _points(record, errors, sketch, choice)


def points_of_rows(rows: Iterable[TensorRow], choice: Choice) -> Iterator[MetricPoint]:
    """The points of rows of tensors."""
    for row in rows:
        record = tensor_record(row)
        if all(record[name] in values for name, values in choice.where.items()):
            errors = [{"format": score.format, **vars(score.error)} for score in row.scores if score.gemm == row.gemm]
            sketch = (*bin_edges(row.summary.bins), row.summary.counts) if len(row.summary.bins) else None
            yield from _points(record, errors, sketch, choice)


def _points(
    record: Mapping[str, Any],
    errors: Sequence[Mapping[Any, Any]],
    bins: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    choice: Choice,
) -> Iterator[MetricPoint]:
    """The points of a tensor, none for a value that is undefined; bins: low, high and counts of its sketch."""
    place = {name: record[name] for name in PLACE}
    values = [(metric, None, record[metric]) for metric in choice.metrics if metric in MEASURED]
    for error in errors:
        if not choice.formats or error["format"] in choice.formats:
            values += [(metric, error["format"], error[metric]) for metric in choice.metrics if metric in ERROR_COLUMNS]
            if VS_NORMAL in choice.metrics:
                values.append((VS_NORMAL, error["format"], error["sqnr_db"] - normal_sqnr(error["format"])))
    for metric, fmt, value in values:
        if value is not None and not math.isnan(value):
            yield MetricPoint(place, metric, float(value), fmt)
    if HISTOGRAM in choice.metrics and bins:
        yield MetricPoint(place, HISTOGRAM, Histogram.of(*bins, record))


# Targets

Write = Callable[[Iterable[MetricPoint]], None]
Open = Callable[[Path, str, Mapping[str, Any]], AbstractContextManager[Write]]


@dataclass(frozen=True)
class ExportTarget:
    """An export format. open(directory, name, config) writes a run of that name into a new directory; package is the
    one that it needs; the extra of the same name installs it."""

    open: Open
    package: str | None = None


_PLACE = [TENSOR_SCHEMA.field(name) for name in FIELDS]
VALUE_SCHEMA = pa.schema([*_PLACE, ("metric", pa.string()), ("format", pa.string()), ("value", pa.float64())])
BIN_SCHEMA = pa.schema([*_PLACE, ("low", pa.float64()), ("high", pa.float64()), ("count", pa.int64())])


def _tables(kind: str, make: Callable[[Any, pa.Schema], Any]) -> Open:
    """values.KIND has a line per point and histograms.KIND one per nonempty bin; both appear when the run is
    complete."""

    @contextmanager
    def opened(directory: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            values, bins = (
                stack.enter_context(make(stack.enter_context(staged_file(directory / f"{stem}.{kind}")), schema))
                for stem, schema in (("values", VALUE_SCHEMA), ("histograms", BIN_SCHEMA))
            )

            def write(points: Iterable[MetricPoint]) -> None:
                for batch in _batches(points):
                    rows = [
                        {**p.place, "metric": p.metric, "format": p.format, "value": p.value}
                        for p in batch
                        if not isinstance(p.value, Histogram)
                    ]
                    values.write(pa.Table.from_pylist(rows, VALUE_SCHEMA))
                    if shown := [(p.place, p.value) for p in batch if isinstance(p.value, Histogram)]:
                        bins.write(_bins(shown))

            yield write

    return opened


class _CsvWriter(pyarrow.csv.CSVWriter):  # type: ignore[misc]
    def write(self, table: pa.Table) -> None:
        """Write rows, with text escaped that a spreadsheet would treat as a formula."""
        for index, column in enumerate(table.schema):
            if pa.types.is_string(column.type):
                texts = table[index].combine_chunks().dictionary_encode()
                cells = pa.array(map(csv_cell, texts.dictionary.to_pylist()), column.type)
                table = table.set_column(index, column, cells.take(texts.indices))
        super().write(table)


def _batches(points: Iterable[MetricPoint]) -> Iterator[list[MetricPoint]]:
    rest = iter(points)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _bins(shown: Sequence[tuple[Mapping[str, Any], Histogram]]) -> pa.Table:
    kept = [value.counts.nonzero()[0] for _, value in shown]
    places = pa.Table.from_pylist([place for place, _ in shown], pa.schema(_PLACE))
    edges = [
        (value.edges[at], value.edges[at + 1], value.counts[at]) for (_, value), at in zip(shown, kept, strict=True)
    ]
    columns = map(np.concatenate, zip(*edges, strict=True))
    repeated = places.take(np.repeat(np.arange(len(kept)), [len(at) for at in kept]))
    return pa.Table.from_arrays([*repeated.columns, *columns], schema=BIN_SCHEMA)


@contextmanager
def _tensorboard(directory: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    with import_module("torch.utils.tensorboard").SummaryWriter(str(directory)) as writer:

        def write(points: Iterable[MetricPoint]) -> None:
            for point in points:
                value = point.value
                if isinstance(value, Histogram):
                    limits, counts = value.edges[1:].tolist(), value.counts.tolist()
                    total, sums = sum(counts), (value.sum, value.sum_squares)
                    writer.add_histogram_raw(point.tag, value.min, value.max, total, *sums, limits, counts, point.step)
                else:
                    writer.add_scalar(point.tag, value, point.step)
            writer.flush()

        yield write


@contextmanager
def _wandb(directory: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    """A separate run, in addition to one that the training loop may have. It is uploaded only if the user is logged
    in."""
    wandb = import_module("wandb")
    mode = None  # of WANDB_MODE
    if not os.environ.get("WANDB_MODE"):
        offline = wandb.run.offline if wandb.run else not wandb.login(prompt=False, verify=False)
        mode = "offline" if offline else "online"
    directory.mkdir(parents=True, exist_ok=True)
    quiet = wandb.Settings(silent=True, console="off")
    project = os.environ.get("WANDB_PROJECT") or "binade"
    with wandb.init(
        project=project, name=name, dir=directory, config=dict(config), mode=mode, reinit="create_new", settings=quiet
    ) as run:
        # W&B's own steps only rise: micro-batches of one iteration may arrive one by one, and warm-up is below 0.
        run.define_metric("*", step_metric="iteration")

        def write(points: Iterable[MetricPoint]) -> None:
            for step, group in groupby(points, key=lambda point: point.step):
                run.log({"iteration": step} | {point.tag: shown(point.value) for point in group})

        def shown(value: float | Histogram) -> Any:
            return wandb.Histogram(np_histogram=value.coarse(WANDB_BINS)) if isinstance(value, Histogram) else value

        yield write


TARGETS = {
    "tensorboard": ExportTarget(_tensorboard, "tensorboard"),
    "wandb": ExportTarget(_wandb, "wandb"),
    "csv": ExportTarget(_tables("csv", _CsvWriter)),
    "parquet": ExportTarget(_tables("parquet", pq.ParquetWriter)),
}


TABLES = "tables"  # the index's own tables, for which there is no Target


def target(name: str) -> ExportTarget:
    """The target of this name. Raises ExportError if it is unknown or its package is not installed."""
    if name not in TARGETS:
        raise ExportError(f"there is no export to {name!r}: expected one of {', '.join(TARGETS)}")
    package = TARGETS[name].package
    if package and not find_spec(package):
        raise ExportError(f"export to {name} needs the package {package}: pip install 'binade[{package}]'")
    return TARGETS[name]


@dataclass
class Exported:
    """The amount of data written; for tables, values is the number of tensors."""

    runs: int = 0
    values: int = 0
    histograms: int = 0

    def count(self, points: Iterable[MetricPoint]) -> Iterator[MetricPoint]:
        for point in points:
            self.histograms += point.metric == HISTOGRAM
            self.values += point.metric != HISTOGRAM
            yield point


def check(to: str, output: Path, choice: Choice) -> None:
    """Raises ExportError if the target has no such choice, output exists and is not empty, or the target cannot be
    used."""
    if to == TABLES and (choice.metrics != DEFAULT_METRICS or choice.formats):
        raise ExportError("export to tables writes every metric and format: leave out --metrics and --formats")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"{output} exists and is not an empty directory: choose another path for --output")
    if to != TABLES:
        target(to)


def export(catalog: Catalog, to: str, output: Path, choice: Choice) -> Exported:
    """Write what was recorded into the new directory output/<run_id> of each run that has any of it; to TABLES as
    `Catalog.write_tables` does.

    Raises ExportError as `check`; RunError if nothing is selected; OSError. Then nothing is left behind.
    """
    check(to, output, choice)
    chosen = None if to == TABLES else target(to)
    done = Exported()
    output = output.resolve()
    if to == TABLES and "\\" in str(output):
        raise ExportError(f"{output} contains a backslash, which DuckDB takes for a slash: choose another --output")
    sweep_beside(output)
    with staged_directory(output) as part:
        if chosen is None:
            totals = catalog.totals(choice.where)
            if not totals.tensors:
                raise RunError(f"{catalog.root} has no tensors that match {choice.where.sentence()}: choose other runs")
            done = Exported(totals.runs, totals.tensors)
            catalog.write_tables(part, choice.where)
            return done
        runs = catalog.runs()[::-1].astype(object)
        for run in runs.where(runs.notna(), None).to_dict("records"):
            metric_points = points(catalog, run, choice)
            first = next(metric_points, None)
            if first is not None:
                done.runs += 1
                with chosen.open(part / run["run_id"], run["run_id"], json.loads(run["config"])) as write:
                    write(done.count(chain([first], metric_points)))
        if not done.runs:
            raise RunError(
                f"{catalog.root} has no values that match {choice.where.sentence()}: choose other runs or metrics"
            )
    return done


class Sink:
    """Sends what a Recorder writes to another tool during training.

        with Recorder(sink=Sink("tensorboard", "logs")) as recorder: ...

    Args:
        to: A name of TARGETS.
        output: Each run goes to the directory output/<run_id>, or, for ranks other than 0, to output/<run_id>/rank<r>.
        metrics: Metrics and "histogram", see Choice. The loss belongs to the training loop and is not sent.
        formats: Formats whose scores are sent, see Choice.
        where: A filter for the tensors that are sent (default: all).

    CSV and Parquet files appear when the run ends; the other targets are updated while the run is recorded. Raises as
    Choice and `target` do.
    """

    def __init__(
        self,
        to: str,
        output: str | Path,
        *,
        metrics: Sequence[str] = DEFAULT_METRICS,
        formats: Sequence[str] = (),
        where: Filter | None = None,
    ) -> None:
        self.choice = Choice(tuple(metrics), tuple(formats), where or Filter())
        self.output, self._open = Path(output).absolute(), target(to).open
        self._stack = ExitStack()
        self._write: Write | None = None

    def write(self, run: Path, rank: int, rows: Iterable[TensorRow]) -> None:
        """Send rows of the run with that directory."""
        if self._write is None:
            name = f"{run.name}/rank{rank:02d}" if rank else run.name
            config = dict(read_json(RunFile, run / "run.json"))
            self._write = self._stack.enter_context(self._open(self.output / name, name, config))
        self._write(points_of_rows(rows, self.choice))

    def close(self, error: BaseException | None = None) -> None:
        """End the run; after an error, incomplete files are deleted. Another run can follow."""
        self._write = None
        self._stack.__exit__(type(error) if error else None, error, None)
