"""The tables of the index that the SQL page and exports show, as SQL and as data for docs/reference.md.

The columns of what is recorded of tensors are declared in data/run/columns.py, the others here. Units: counts are
elements, nbytes and bytes are bytes, times are in UTC, sqnr_db is in decibels, fractions are 0 to 1.
data/index/schema.sql has the tables that only the index uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from binade.data.run.columns import (
    BLOCK_COLUMNS,
    INTEGER,
    LONG,
    REAL,
    REALS,
    SKETCH_COLUMNS,
    TEXT,
    TIME,
    TRUTH,
    Score,
    TableColumn,
    TensorRow,
    Trace,
    columns_of,
)


@dataclass(frozen=True)
class IndexTable:
    """A table of the index. about: what its rows are. checks: conditions in SQL that each row must meet."""

    name: str
    columns: tuple[TableColumn, ...]
    about: str = ""
    checks: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        """The statement that creates the table."""
        columns = [f"{column.name} {column.type} {column.constraint}".rstrip() for column in self.columns]
        return f"CREATE TABLE {self.name} ({', '.join([*columns, *(f'CHECK ({check})' for check in self.checks)])});"


RUN = IndexTable(
    "run",
    (
        TableColumn("run_id", TEXT, constraint="PRIMARY KEY"),
        TableColumn("model", TEXT),
        TableColumn("size", TEXT, "tiny, full"),
        TableColumn("dataset", TEXT),
        TableColumn("recipe", TEXT),
        TableColumn("state", TEXT, "running, done, failed, cancelled, crashed"),
        TableColumn("reason", TEXT, "why it failed or crashed, else null"),
        TableColumn("device", TEXT),
        TableColumn(
            "backend",
            TEXT,
            "what quantized the GEMM operands: torch, or triton with its version, such as triton 3.4.0 (compiled)",
        ),
        TableColumn("started", TIME),
        TableColumn("finished", TIME, "null while running"),
        TableColumn("iteration", LONG, "last iteration finished, warm-up not counted; -1 before the first"),
        TableColumn("iterations", LONG, "requested iterations, warm-up not counted"),
        TableColumn("tensors", LONG, "tensors recorded"),
        TableColumn("tensors_without_raw", LONG, "of these, the tensors whose values were not kept"),
        TableColumn("bytes", LONG, "size of the tensor files"),
        TableColumn("loss_first", REAL, "cross entropy in nats per token"),
        TableColumn("loss_last", REAL),
        TableColumn("config", TEXT, "the contents of run.json"),
        TableColumn("name", TEXT, "name, color (#rrggbb) and note given by users, else null"),
        TableColumn("color", TEXT),
        TableColumn("note", TEXT),
        TableColumn(
            "first_step",
            TEXT,
            "the first record of its losses: iteration, hashes of its data and of the weights; null without one",
        ),
        TableColumn(
            "damage",
            TEXT,
            "a sentence that says what is damaged on disk; the other tables then have no rows for the run",
        ),
    ),
    "The runs of the root.",
)
EFFECT = IndexTable(
    "effect",
    (
        TableColumn("run_id", TEXT),
        TableColumn("format", TEXT, "what the group was rounded to: a spec, or a recipe"),
        TableColumn(
            "recipe_sha256", TEXT, "of what that rounds, the same for files with the same tables; null if unknown"
        ),
        TableColumn("base", TEXT, "the recipe that everything else is rounded by; null for no rounding"),
        TableColumn("part", TEXT, "linear, router, qk, pv, product; null for all"),
        TableColumn("layer_index", INTEGER, "from 1; null for all layers"),
        TableColumn("module", TEXT, "null for all modules"),
        TableColumn("operand", TEXT, "the operand that alone was changed, such as weight; null for all that differ"),
        TableColumn("replays", TRUTH, "whether the experts are those that the base has chosen"),
        TableColumn("sequences", INTEGER, "how many were measured"),
        TableColumn("loss", REAL, "mean cross entropy of the base, in nats per token"),
        TableColumn(
            "change", REAL, "mean of the loss with the group rounded minus that of the base, in nats per token"
        ),
        TableColumn("change_error", REAL, "its standard error over sequences; null for one sequence"),
        TableColumn(
            "divergence", REAL, "mean KL divergence of the next token's distribution, in nats; null if not measured"
        ),
        TableColumn("change_by_sequence", REALS),
        TableColumn("divergence_by_sequence", REALS),
        TableColumn("seconds", REAL, "what its passes took"),
        TableColumn("iteration", LONG, "of the training whose weights these are; null for an experiment of its own"),
    ),
    "Measured effects: what rounding one group of products does to the loss, on the same weights and sequences. Rows "
    "are of experiments: runs of `binade measure` and `binade parity`; and of held-out evaluations of a run that was "
    "evaluated without its recipe as well.",
)
KEY = TableColumn("key", INTEGER)
TENSOR = IndexTable(
    "tensor",
    (
        TableColumn("key", INTEGER, "number of the tensor in the order of indexing; exists only in the index"),
        *columns_of(TensorRow),
        TableColumn(
            "sketch_start",
            LONG,
            "rows sketch_start to sketch_stop - 1 of the sketches of its segment; null without a sketch",
        ),
        TableColumn("sketch_stop", LONG, "see sketch_start; both exist only in the index"),
    ),
    "The recorded tensors.",
    (  # an axis must be one that the shape has: pages rely on this. Of logged statistics, the shape may be unknown.
        "contracted_axis IS NULL OR (shape IS NULL AND path IS NULL) "
        "OR coalesce(contracted_axis BETWEEN -len(shape) AND len(shape) - 1, false)",
        "shard_axis IS NULL OR coalesce(shard_axis BETWEEN -len(shape) AND len(shape) - 1, false)",
    ),
)
SKETCH = IndexTable(
    "sketch",
    (KEY, *SKETCH_COLUMNS),
    "The binade sketch: bin is the top 12 bits of the value as IEEE binary32; finite values only. The rows stay in the "
    "segments, and queries read them from there under this name (data/index/sketches.py); the index has no such table.",
)
SCORE = IndexTable(
    "score",
    (KEY, *columns_of(Score)),
    "The error of each format on a tensor, with blocks along the axis that the GEMM contracts. A tensor may enter "
    "several GEMMs. tensor_scale and the seeds are those of a format that was used.",
)
BLOCK = IndexTable(
    "block",
    (KEY, *BLOCK_COLUMNS),
    "Histograms over the blocks of an operand in a format; quant.block_histograms defines the bins.",
)
TRACE = IndexTable(
    "trace",
    (KEY, *columns_of(Trace)),
    "What is recorded to follow a tensor over iterations: see quant.traces.",
)
RECORD = IndexTable(
    "record",
    (
        TableColumn("run_id", TEXT),
        TableColumn("kind", TEXT, "loss, event"),
        TableColumn("iteration", LONG),
        TableColumn("record", TEXT, "as JSON: (record->>'loss')::DOUBLE is the loss of a record of this kind"),
        TableColumn("file", TEXT, "in the run's directory"),
        TableColumn("line", LONG, "in the file, from 1"),
    ),
    "What runs say of themselves besides tensors: losses, and events such as triggers and the first NaN.",
)
INDEX_TABLES = {table.name: table for table in (RUN, RECORD, TENSOR, SCORE, SKETCH, BLOCK, TRACE, EFFECT)}
"""The tables by name. Those of segments have their columns in the order of data/run/segment.py."""
