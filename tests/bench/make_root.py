"""Make a root of many tensors: runs as the collector writes them, without training.

    python -m tests.bench.make_root --tensors 100000 --runs 10 --ranks 2 FOLDER

Each run has LAYERS layers with every tensor of TENSOR_KINDS, in as many iterations as the tensors need. Statistics,
sketches (about 250 bins) and scores (of SCORED, for operands) are those of a few real tensors, scaled by powers of two
and with noise, so that files compress as those of a real run. Values, block histograms and traces are left out.
"""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from binade import quant
from binade.data.run.columns import COUNTS, ERROR_COLUMNS, MOMENTS
from binade.data.run.directory import DONE
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import TABLES, write_tables
from binade.data.run.tensor_kinds import TENSOR_KINDS
from binade.quant.metrics import score

MODEL = "llama31-8b"
LAYERS = 32
SEGMENT = 3400  # tensors
EVERY = 100  # iterations between recorded ones
RECIPES = ("bf16", "hifp8", "mxfp8", "mxfp4", "nvfp4")
SCORED = ("hifp8", "mxfp8", "mxfp4", "nvfp4")
MODULES = {"linear": ("qkv", "proj", "fc1", "fc2"), "attention": ("core",), "product": ("mixer",)}
PLACES = [(kind, module) for kind in TENSOR_KINDS if kind.layer_type for module in MODULES[kind.layer_type]]
SCALED = frozenset(MOMENTS) - {"skewness", "kurtosis"}  # by the tensor's power of two


class Prototypes:
    """Real tensors of several shapes of distribution, measured once."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        tensors = [torch.randn(128, 512, generator=random) for _ in range(16)]
        for number, x in enumerate(tensors):
            x[:, : number // 4] *= 4.0 ** (number % 4 + 1)  # some channels stand out
        summaries = [quant.summarize(x) for x in tensors]
        self.moments = {name: np.array([getattr(s, name) for s in summaries]) for name in MOMENTS}
        self.length = np.array([len(s.bins) for s in summaries])
        self.start = np.cumsum(self.length) - self.length
        self.bins = np.concatenate([s.bins for s in summaries])
        self.counts = np.concatenate([s.counts for s in summaries])
        errors = [[vars(score(x, name)) for name in SCORED] for x in tensors]
        self.errors = {name: np.array([[e[name] for e in row] for row in errors]) for name in ERROR_COLUMNS}

    def __len__(self) -> int:
        return len(self.length)


def make_root(root: Path, tensors: int, runs: int = 1, ranks: int = 1) -> list[Path]:
    """Add runs with so many tensors in all to the root; returns their directories."""
    known, random = Prototypes(), np.random.default_rng(0)
    made = []
    for run in range(runs):
        recipe = RECIPES[run % len(RECIPES)]
        total = tensors * (run + 1) // runs - tensors * run // runs
        config = {
            "model": MODEL,
            "size": "full",
            "dataset": "wikipedia",
            "recipe": recipe,
            "train_iters": EVERY * (total // (ranks * LAYERS * len(PLACES)) + 1),
            "layers": LAYERS,
            "dp": ranks,
            "operands": list(SCORED),
        }
        writers = [RunWriter.create(root, recipe, config, ranks=ranks)]
        writers += [RunWriter.join(writers[0].directory, rank, ranks) for rank in range(1, ranks)]
        for rank, writer in enumerate(writers):
            stop = total * (rank + 1) // ranks - total * rank // ranks
            for first in range(0, stop, SEGMENT):
                numbers = np.arange(first, min(first + SEGMENT, stop))
                segment = writer.directory / "segments" / writer.next_segment_name()
                write_tables(segment, [rows(known, random, numbers, writer.run_id, recipe, rank)])
            writer.update(tensors=stop, tensors_without_raw=stop)
        writers[0].update(iteration=config["train_iters"] - 1, loss_first=11.0, loss_last=6.0)
        writers[0].finish(DONE)
        made.append(writers[0].directory)
    return made


def rows(
    known: Prototypes, random: np.random.Generator, numbers: np.ndarray, run_id: str, recipe: str, rank: int
) -> dict[str, pa.Table]:
    """A segment's tables: the tensors of these numbers of a rank."""
    place, layer = numbers % len(PLACES), numbers // len(PLACES) % LAYERS
    iteration = numbers // (len(PLACES) * LAYERS) * EVERY
    prototype = (place * 5 + layer) % len(known)
    shift = 2 - layer // 8 - 10 * np.array([kind.operation == "backward" for kind, _ in PLACES])[place]
    operand = np.array([kind.contracted_axis is not None for kind, _ in PLACES])[place]
    tensor_id = np.char.add(f"r{rank:02d}-", np.char.zfill(numbers.astype(str), 8))

    names = sorted(range(len(PLACES)), key=lambda at: (PLACES[at][1], PLACES[at][0].name))
    together = np.lexsort((np.argsort(names)[place], layer))  # as segment.write_segment has sketches
    length = known.length[prototype[together]]
    end = np.cumsum(length)
    at = np.arange(end[-1]) + np.repeat(known.start[prototype[together]] - (end - length), length)
    count = known.counts[at] * np.int64(256)
    count += (random.standard_normal(len(at), np.float32) * np.sqrt(count)).astype(np.int64)
    count = np.maximum(count, 1)
    sketch = {
        "tensor_id": pa.DictionaryArray.from_arrays(np.repeat(together, length), tensor_id),
        "bin": known.bins[at] + np.repeat(8 * shift[together], length),
        "count": count,
    }

    def of_kind(attribute: str) -> pa.Array:
        return pa.array([None if (v := getattr(kind, attribute)) is None else v for kind, _ in PLACES]).take(place)

    def noisy(values: np.ndarray) -> np.ndarray:
        return values * (1 + random.normal(0, 0.01, values.shape))

    power = {"mse": 2, "max_abs_error": 1}  # of the tensor's scale
    errors = {
        name: noisy(values[prototype]) * 2.0 ** (shift * power.get(name, 0))[:, None]  # [tensors, SCORED]
        for name, values in known.errors.items()
    }
    own = SCORED.index(recipe) if recipe in SCORED else None
    rounded = operand if own is not None else np.zeros_like(operand)
    numel = np.empty(len(numbers), np.int64)
    numel[together] = np.add.reduceat(count, end - length)
    columns: dict[str, Any] = {
        "tensor_id": tensor_id,
        "run_id": run_id,
        "model": MODEL,
        "size": "full",
        "dataset": "wikipedia",
        "recipe": recipe,
        "quant_type": recipe,
        "layer_index": layer + 1,
        "module": np.array([module for _, module in PLACES])[place],
        **{name: of_kind(name) for name in ("layer_type", "component", "operation", "phase", "contracted_axis")},
        "tensor_name": of_kind("name"),
        "gemm": of_kind("gemm"),
        "iteration": iteration,
        "micro_batch": 0,
        "rank": rank,
        "captured": np.datetime64(datetime(2026, 1, 1) + timedelta(seconds=rank), "us") + numbers,
        "shape": [[int(n) // 4096 or 1, 4096] for n in numel],
        "dtype": "bfloat16",
        "numel": numel,
        "nbytes": 2 * numel,
        **{
            name: noisy(values[prototype] * (2.0**shift if name in SCALED else 1))
            for name, values in known.moments.items()
        },
        **dict.fromkeys(COUNTS, 0),
        **dict(zip(("tp_rank", "tp_size", "shard", "shard_stride"), (0, 1, "whole", 1), strict=True)),
        "dp_rank": rank,
        "recomputed": False,
    }
    if own is not None:
        columns["format"] = pa.array(np.full(len(numbers), recipe), mask=~rounded)
        columns |= {name: pa.array(values[:, own], mask=~rounded) for name, values in errors.items()}
    scored = np.repeat(np.flatnonzero(operand), len(SCORED))
    scores = {
        "tensor_id": tensor_id[scored],
        "format": np.tile(SCORED, operand.sum()),
        "gemm": columns["gemm"].take(scored),
        "used": np.tile([name == recipe for name in SCORED], operand.sum()),
        **{name: values[operand].ravel() for name, values in errors.items()},
    }
    return {
        "tensor": table(columns, TABLES["tensor"], len(numbers)),
        "sketch": table(sketch, TABLES["sketch"], len(at)),
        "score": table(scores, TABLES["score"], len(scored)),
        "block": TABLES["block"].empty_table(),
        "trace": TABLES["trace"].empty_table(),
    }


def table(columns: dict[str, object], schema: pa.Schema, length: int) -> pa.Table:
    """A table of the schema from arrays and single values; a column that is not given is null."""
    arrays = []
    for column in schema:
        value = columns.get(column.name)
        if value is None or isinstance(value, (str, int)):
            arrays.append(pa.repeat(pa.scalar(value, column.type), length))
        else:
            arrays.append(pa.array(value).cast(column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("root", type=Path)
    args = parser.parse_args()
    make_root(args.root, args.tensors, args.runs, args.ranks)


if __name__ == "__main__":
    main()
