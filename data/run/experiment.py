"""Experiments: the same batches, evaluated on the same weights under several treatments.

A treatment is a recipe in a group of products, while all others are rounded as by its base; a base has no base of its
own. A run of the kind EXPERIMENT has a folder `experiment` with the rows of these tables in Parquet files. So has a run
that is evaluated while it trains; the treatment is its recipe, on the weights of an iteration: data/run/evaluations.py.

    results    a row for each treatment and sequence of a batch: RESULTS
    tokens     the log-probability of each token that counts, of the treatments that keep them: TOKENS
    routes     the experts that each router chose, of the treatments that keep them: ROUTES
    blocks     the errors of the blocks' outputs, of the treatments that keep them: BLOCKS
    gradients  what the recipe does to the gradient of each parameter, of twin steps: GRADIENTS

A file is named <table>-<number>-<CRC-32 of its content>.parquet. Each result is written at once: the last file of its
table is written again with the new rows, appears whole, and then the file before is deleted. From PART bytes on, the
next result begins a new file. What a killed process leaves are at most two versions of one file, of which the one
with more rows is read. `read_results`, `read_logprobs` and `read_routes` return what the tables have.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from binade.data.run.directory import RunError
from binade.data.run.store import read_file, write_atomic
from binade.data.words.text import describe

EXPERIMENT = "experiment"  # the kind of a run, and its folder
SAME = ("kind", "measures")  # two experiments that agree in these fields of run.json are one run
OPERAND_VALUES = "operand_values"
"""The field of run.json with a row for each product: part, layer_index, module, and how many values the first and the
second operand of its forward GEMM have in a batch."""
PART = 1 << 20  # bytes
MOST_PART = 1 << 30  # bytes of a file that is read: one result may be large
FORMER = ("effects.jsonl", "parity.json", "twin.jsonl", "held_out.jsonl")
"""Files of versions before the first release, which are not read."""
RESULTS = pa.schema(
    [
        ("treatment", pa.string()),  # TreatmentKey.id
        ("text", pa.string()),  # of the recipe; "" for no rounding
        ("recipe_sha256", pa.string()),
        ("part", pa.string()),  # the group: "" for all parts
        ("layer_index", pa.int32()),
        ("module", pa.string()),
        ("operand", pa.string()),
        ("is_whole", pa.bool_()),
        ("replays", pa.bool_()),
        ("base", pa.string()),  # the id of the base; null for a base
        ("batch", pa.int32()),
        ("sequence", pa.int32()),  # of the batch, from 0
        ("tokens", pa.int32()),  # that count; null if only the loss is known
        ("loss", pa.float64()),  # nats per token
        ("kl", pa.float64()),  # KL(base ‖ treatment) of the next token, mean over the tokens; null if unknown
        ("kl_reversed", pa.float64()),  # KL(treatment ‖ base)
        ("seconds", pa.float64()),  # of the pass, divided by its sequences
        ("iteration", pa.int64()),  # of the training whose weights these are; null for an experiment of its own
        ("data", pa.string()),  # what was evaluated while training: TWIN_STEP or the hash of held-out sequences
        ("trained", pa.int64()),  # tokens that were trained before; null if unknown
    ]
)
_PLACE = [("treatment", pa.string()), ("batch", pa.int32()), ("sequence", pa.int32())]
TOKENS = pa.schema([*_PLACE, ("logprobs", pa.list_(pa.float64()))])
ROUTES = pa.schema(
    [
        *_PLACE,
        ("layer_index", pa.int32()),
        ("module", pa.string()),
        ("experts", pa.int32()),
        ("chosen", pa.int32()),  # by each token; 0 for a router that does not choose by top-k
        ("choices", pa.list_(pa.int32())),  # of all tokens, by score
        ("margins", pa.list_(pa.float64())),  # of all tokens
    ]
)
BLOCKS = pa.schema(
    [
        *_PLACE,
        ("layer_index", pa.int32()),
        ("error", pa.float64()),  # of a block's output, relative to its norm, with the inputs that the block receives
        ("own_error", pa.float64()),  # with the inputs that it receives in the pass of the base
    ]
)
GRADIENTS = pa.schema(
    [
        ("iteration", pa.int64()),
        ("name", pa.string()),
        ("layer_index", pa.int32()),
        ("module", pa.string()),
        ("expert", pa.int32()),
        *((name, pa.float64()) for name in ("norm", "bias", "bias_corrected", "bias_error", "variance")),
        *((name, pa.float64()) for name in ("variance_error", "cosine")),
        ("draws", pa.bool_()),  # whether the recipe draws random numbers
    ]
)
EXPERIMENT_TABLES = {
    "results": RESULTS, "tokens": TOKENS, "routes": ROUTES, "blocks": BLOCKS, "gradients": GRADIENTS,
}  # fmt: skip
TWIN_STEP = "twin step"
RESULT_FILE = rf"(?:{'|'.join(EXPERIMENT_TABLES)})-[0-9]{{5}}-[0-9a-f]{{8}}\.parquet"  # the names of files
ATTEMPTS = 5  # to list the files while they are replaced
Place = tuple[str, int]  # the id of a treatment, and the batch
Floats = NDArray[np.float64]
T = TypeVar("T")


class EffectGroup(NamedTuple):
    """Products that are rounded together.

    part         linear, router, qk, pv or product; "" for all
    layer_index  None for all layers
    module       None for all modules
    """

    part: str = ""
    layer_index: int | None = None
    module: str | None = None

    @property
    def kind(self) -> str:
        """The granularity: site, layer, module, part or all."""
        if self.layer_index is not None:
            return "layer" if self.module is None else "site"
        return "module" if self.module is not None else "part" if self.part else "all"

    def __str__(self) -> str:
        words = [f"layer{self.layer_index}" if self.layer_index is not None else "", self.module or "", self.part]
        return " ".join(filter(None, words)) or "all"


ALL_PRODUCTS = EffectGroup()


@dataclass(frozen=True)
class TreatmentKey:
    """Which treatment a result is of.

    text           the recipe or format as it was written; "" for no rounding; of imported numbers, the tool
    recipe_sha256  of what it rounds, see `effects.recipe_sha256`: a file of a recipe may change; "" if it is unknown
    group          where it applies
    operand        the operand that it rounds in another way than its base, such as "weight"; "" for both
    is_whole       whether all that differs from the base in the group was changed
    replays        whether the experts are those that the base has chosen
    base           how everything else is rounded; None for a base
    """

    text: str = ""
    recipe_sha256: str = ""
    group: EffectGroup = ALL_PRODUCTS
    operand: str = ""
    is_whole: bool = True
    replays: bool = False
    base: TreatmentKey | None = None

    @cached_property
    def id(self) -> str:
        """16 digits that tell treatments apart."""
        base = self.base.id if self.base else None
        operand = "" if self.is_whole else self.operand  # of all that differs, the operand follows from the recipe
        values = (self.text, self.recipe_sha256, *self.group, operand, self.is_whole, self.replays, base)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


NONE = TreatmentKey()
"""The base without rounding."""


@dataclass(frozen=True, eq=False)
class RouterChoices:
    """The choices of a router for the tokens of a sequence that count.

    experts  how many there are
    choices  [tokens, k] by score, the largest first; k is 0 if it does not choose by top-k
    margins  [tokens]: s_(k) − s_(k+1) of the selection scores
    """

    layer_index: int
    module: str
    experts: int
    choices: NDArray[np.int64]
    margins: Floats


class BlockError(NamedTuple):
    """‖ŷ − y‖ / ‖y‖ of a block's output for a sequence: ŷ of a treatment, y of its base.

    error      with the inputs that the block receives, which have the errors of the blocks before
    own_error  with the inputs that it receives in the pass of the base
    """

    layer_index: int
    error: float
    own_error: float


@dataclass(frozen=True, eq=False)
class BatchResult:
    """The result of a treatment on a batch, each value by sequence.

    losses       nats per token
    tokens       how many count; None if only losses are known
    kl           KL(base ‖ treatment) of the next token, mean over the tokens, in nats; () for a base and without logits
    kl_reversed  KL(treatment ‖ base); () if not requested
    seconds      of the pass
    logprobs     of the tokens that count, in nats [tokens] each; () if not requested
    routes       of all routers; () if not requested
    iteration    of the training whose weights these are, which is how many iterations were trained before; None for an
                 experiment of its own
    data         what was evaluated while training: TWIN_STEP, whose sequences are the passes over one micro-batch, or
                 the hash of held-out sequences, which are one batch; "" for an experiment of its own
    trained      how many tokens were trained before, warm-up included; None if unknown
    blocks       of all blocks; () if not requested
    """

    key: TreatmentKey
    batch: int
    losses: tuple[float, ...]
    tokens: tuple[int | None, ...]
    kl: tuple[float, ...] = ()
    kl_reversed: tuple[float, ...] = ()
    seconds: float = 0.0
    logprobs: tuple[Floats, ...] = ()
    routes: tuple[tuple[RouterChoices, ...], ...] = ()
    iteration: int | None = None
    data: str = ""
    trained: int | None = None
    blocks: tuple[tuple[BlockError, ...], ...] = ()

    @property
    def place(self) -> Place:
        return self.key.id, self.batch


class ExperimentWriter:
    """Adds results to the experiment of a run, as its only writer. Raises as `check_experiment`, and OSError."""

    def __init__(self, directory: Path) -> None:
        check_experiment(directory)
        self._folder = directory / EXPERIMENT
        self._folder.mkdir(exist_ok=True)
        last = max((number for _, number, _ in _files(directory)), default=-1)
        self._next = last + 1
        self._parts: dict[str, tuple[int, Path | None, pa.Table]] = {}

    def add(self, result: BatchResult, gradients: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write a result, and the rows of GRADIENTS that belong to it. Its row of the table results is written last:
        what has it is complete."""
        place = {"treatment": result.key.id, "batch": result.batch}
        tokens = [place | {"sequence": at, "logprobs": x.tolist()} for at, x in enumerate(result.logprobs)]
        routes = [
            place | {"sequence": at, "layer_index": each.layer_index, "module": each.module, "experts": each.experts,
                     "chosen": each.choices.shape[1], "choices": each.choices.reshape(-1).tolist(),
                     "margins": each.margins.tolist()}
            for at, sequence in enumerate(result.routes) for each in sequence
        ]  # fmt: skip
        blocks = [place | {"sequence": at, **each._asdict()} for at, own in enumerate(result.blocks) for each in own]
        tables = {
            "tokens": tokens, "routes": routes, "blocks": blocks, "gradients": gradients, "results": _rows(result),
        }  # fmt: skip
        for name, rows in tables.items():
            if rows:
                self._append(name, pa.Table.from_pylist(list(rows), schema=EXPERIMENT_TABLES[name]))

    def _append(self, name: str, rows: pa.Table) -> None:
        number, before, table = self._parts.get(name) or (self._next, None, rows.schema.empty_table())
        self._next = max(self._next, number + 1)
        table = pa.concat_tables([table, rows])
        path, size = _replace(self._folder, name, number, table, before)
        self._parts[name] = number, path, table
        if size >= PART:
            del self._parts[name]


def _replace(folder: Path, name: str, number: int, table: pa.Table, before: Path | None) -> tuple[Path, int]:
    """Write a file of a table in the place of the one before; returns its path and size."""
    content = io.BytesIO()
    pq.write_table(table, content, compression="lz4", write_statistics=False)
    path = folder / f"{name}-{number:05d}-{zlib.crc32(content.getvalue()):08x}.parquet"
    write_atomic(path, content.getvalue())
    if before and before != path:
        os.unlink(before)
    return path, len(content.getvalue())


def cut_results(directory: Path, iteration: int) -> None:
    """Delete what a run has evaluated from this iteration of its training on, as its only writer. Raises RunError,
    OSError."""
    for name, number, path in _files(directory):
        table = _read_file(directory, name, path)
        if "iteration" in table.column_names:
            before = table.filter((pc.field("iteration") < iteration) | pc.field("iteration").is_null())
            if len(before) < len(table):
                _replace(path.parent, name, number, before, path)


def _rows(result: BatchResult) -> list[dict[str, Any]]:
    key = result.key
    shared = {
        "treatment": key.id, "text": key.text, "recipe_sha256": key.recipe_sha256, **key.group._asdict(),
        "operand": key.operand, "is_whole": key.is_whole, "replays": key.replays,
        "base": key.base.id if key.base else None, "batch": result.batch,
        "seconds": result.seconds / len(result.losses), "iteration": result.iteration, "data": result.data or None,
        "trained": result.trained,
    }  # fmt: skip
    known = {name: getattr(result, name) for name in ("kl", "kl_reversed") if getattr(result, name)}
    return [
        shared
        | {"sequence": at, "tokens": result.tokens[at], "loss": loss}
        | {name: values[at] for name, values in known.items()}
        for at, loss in enumerate(result.losses)
    ]


def experiment_files(directory: Path) -> list[str]:
    """The files of a run's experiment, relative to its directory."""
    return [f"{EXPERIMENT}/{path.name}" for *_, path in _files(directory)]


def _files(directory: Path) -> list[tuple[str, int, Path]]:
    """(table, number, path) in their order."""
    paths = []
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = [directory / EXPERIMENT / name for name in os.listdir(directory / EXPERIMENT)]
    own = [path for path in paths if re.fullmatch(RESULT_FILE, path.name)]
    return sorted((path.name.split("-")[0], int(path.name.split("-")[1]), path) for path in own)


def read_rows(directory: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one of EXPERIMENT_TABLES. Raises RunError for a damaged file, and OSError."""
    for _ in range(ATTEMPTS - 1):
        with suppress(FileNotFoundError):  # replaced since it was listed
            return _read_once(directory, name)
    return _read_once(directory, name)


def _read_once(directory: Path, name: str) -> list[dict[str, Any]]:
    parts: dict[int, pa.Table] = {}
    for table, number, path in _files(directory):
        if table != name:
            continue
        rows = _read_file(directory, name, path)
        if number not in parts or len(rows) > len(parts[number]):
            parts[number] = rows
    return [row for number in sorted(parts) for row in parts[number].to_pylist()]


def _read_file(directory: Path, name: str, path: Path) -> pa.Table:
    content = read_file(path, MOST_PART, directory)
    if f"{zlib.crc32(content):08x}" != path.stem.rpartition("-")[2]:
        raise RunError(f"its {EXPERIMENT}/{path.name} is damaged: its CRC-32 is {zlib.crc32(content):08x}")
    try:
        return pq.read_table(pa.BufferReader(content), schema=EXPERIMENT_TABLES[name])
    except (pa.ArrowException, ValueError, OSError) as error:
        raise RunError(f"its {EXPERIMENT}/{path.name} cannot be read: {describe(error)}") from None


def read_results(directory: Path) -> list[BatchResult]:
    """The results of a run in the order in which they were measured, without log-probabilities and routes; [] for a run
    without an experiment. A batch that was measured again with more sequences, or fewer, has a result of each size.
    Raises RunError for a damaged file, and OSError."""
    rows = read_rows(directory, "results")
    keys = _keys(rows)
    by_pass: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["sequence"] == 0 or not by_pass:
            by_pass.append([])
        by_pass[-1].append(row)
    results = []
    for own in by_pass:
        treatment, batch = own[0]["treatment"], own[0]["batch"]
        places = [(row["treatment"], row["batch"], row["sequence"]) for row in own]
        if treatment not in keys or places != [(treatment, batch, number) for number in range(len(own))]:
            raise RunError(f"its {EXPERIMENT} is damaged: batch {batch} of treatment {treatment} is incomplete")
        results.append(
            BatchResult(
                keys[treatment],
                batch,
                tuple(_number(row["loss"]) for row in own),
                tuple(row["tokens"] for row in own),
                _values(own, "kl"),
                _values(own, "kl_reversed"),
                math.fsum(row["seconds"] or 0 for row in own),
                iteration=own[0]["iteration"],
                data=own[0]["data"] or "",
                trained=own[0]["trained"],
            )
        )
    return results


def _keys(rows: Iterable[dict[str, Any]]) -> dict[str, TreatmentKey]:
    """The treatments of rows by their ids; those whose base has no row are left out, unless it is NONE."""
    described = {row["treatment"]: row for row in rows}
    keys = {NONE.id: NONE}
    for bases in (True, False):
        for treatment, row in described.items():
            if (row["base"] is None) is bases and (bases or row["base"] in keys):
                group = EffectGroup(row["part"], row["layer_index"], row["module"])
                words = row["text"], row["recipe_sha256"], group, row["operand"], row["is_whole"], row["replays"]
                keys[treatment] = TreatmentKey(*words, None if bases else keys[row["base"]])
    return keys


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _values(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, ...]:
    """() if no row has a value."""
    values = tuple(_number(row[name]) for row in rows)
    return () if all(row[name] is None for row in rows) else values


def read_logprobs(directory: Path) -> dict[Place, list[Floats]]:
    """The log-probabilities of the tokens that count, of each sequence of a batch. Raises as `read_results`."""
    places = _by_sequence(directory, "tokens", lambda row: np.asarray(row["logprobs"], np.float64))
    return {place: [logprobs for (logprobs,) in sequences] for place, sequences in places.items()}


def read_routes(directory: Path) -> dict[Place, list[list[RouterChoices]]]:
    """The choices of the routers, of each sequence of a batch. Raises as `read_results`."""

    def router(row: dict[str, Any]) -> RouterChoices:
        choices = np.asarray(row["choices"], np.int64).reshape(len(row["margins"]), row["chosen"])
        margins = np.asarray(row["margins"], np.float64)
        return RouterChoices(row["layer_index"], row["module"], row["experts"], choices, margins)

    return _by_sequence(directory, "routes", router)


def read_blocks(directory: Path) -> dict[Place, list[list[BlockError]]]:
    """The errors of the blocks, of each sequence of a batch, in the order of the model. Raises as `read_results`."""
    return _by_sequence(directory, "blocks", lambda row: BlockError(row["layer_index"], row["error"], row["own_error"]))


def _by_sequence(directory: Path, name: str, value_of: Callable[[dict[str, Any]], T]) -> dict[Place, list[list[T]]]:
    """The values of a table's rows by treatment and batch, for each sequence; the last one of each place in a model."""
    places: dict[Place, dict[int, dict[Any, T]]] = {}
    for row in read_rows(directory, name):
        sequences = places.setdefault((row["treatment"], row["batch"]), {})
        sequences.setdefault(row["sequence"], {})[row.get("layer_index"), row.get("module")] = value_of(row)
    return {place: [list(own[at].values()) for at in sorted(own)] for place, own in places.items()}


def check_experiment(directory: Path) -> None:
    """Raise RunError for a damaged file of an experiment, and for one of an earlier version; OSError."""
    for name in FORMER:
        if os.path.lexists(directory / name):
            raise RunError(f"its {name} is of an earlier version, and is not read")
    for name in EXPERIMENT_TABLES:
        read_rows(directory, name)
