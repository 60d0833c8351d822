"""How much time and memory `binade report` takes, compared with a plain script that reads every file.

    python -m tests.bench.bench_report [--tensors 500] [--values 1048576] [--pins 200]

Both draw the same root of float32 tensors with the same kinds of charts, each as a process of its own with whatever
processes it starts; time is wall clock from start to exit, memory the highest sum of the resident sets of all its
processes, sampled twenty times per second for both (pages that processes share count for each).

The plain script is what someone writes who has only the .pt files: it loads each once, keeps the tensors (every chart
needs them again), and draws with matplotlib: the four panels, histograms of magnitudes and box plots by each grouping,
Q-Q plots, heatmaps of statistics by layer and tensor, statistics as text and JSON, HiFloat8's precisions, attention
maps. It does less than the report, so the ratio is conservative: it rounds nothing to a format, so there are no SQNR
charts, and it takes quantiles (Q-Q, boxes) by two groupings where the report takes them by all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from binade import quant
from binade.app.sessions import session, storage
from binade.app.sessions.pins import refreshed
from binade.app.sessions.session import Pin, View
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Identity, Score, TensorRow
from binade.data.run.directory import DONE
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import write_segment
from binade.data.run.store import encode, write_atomic
from binade.quant.metrics import score

PROJECT = Path(__file__).parents[2]
RECIPES = ("bf16", "hifp8", "mxfp8", "mxfp4")
SCORED = ("hifp8", "mxfp8", "mxfp4")
PLACES = (
    ("linear", "qkv", "forward", "input"), ("linear", "qkv", "forward", "weight"),
    ("linear", "proj", "backward", "grad_output"), ("linear", "fc1", "forward", "input"),
    ("linear", "fc2", "forward", "input"), ("linear", "fc2", "backward", "grad_output"),
    ("attention", "core", "forward", "query"), ("attention", "core", "forward", "attention_probs"),
)  # fmt: skip
LAYERS = 8
# The charts of a tensor's views that are pinned.
PINNED = {"why": ("codebook", "channels", "tokens"), "blocks": ("block_map", "scales", "block_values")}
KEPT_ASIDE = 40 * (1 << 20)  # bytes that must stay free


def make_root(root: Path, tensors: int, values: int) -> None:
    """Runs of LAYERS layers, a run a recipe, as the collector writes them: files, rows, sketches and scores."""
    random = torch.Generator().manual_seed(0)
    side = int(math.sqrt(values / 16))
    for recipe_number, recipe in enumerate(RECIPES):
        config = {
            "model": "llama32-1b", "size": "full", "dataset": "wikipedia", "recipe": recipe, "control_iter": 2,
            "command": f"binade run --size full --quantization {recipe}",
        }  # fmt: skip
        writer = RunWriter.create(root, recipe, config)
        rows = []
        for number in range(recipe_number, tensors, len(RECIPES)):
            at = number // len(RECIPES)
            layer_type, module, operation, name = PLACES[at % len(PLACES)]
            iteration, layer = divmod(at // len(PLACES), LAYERS)
            if name == "attention_probs":
                x = torch.randn(1, 16, side, side, generator=random).tril().softmax(-1).tril()
            else:
                spread = 2.0 ** (-10 * (operation == "backward") - layer / 4)
                x = torch.randn(values // 1024, 1024, generator=random) * spread
                x[:, 7] *= 30  # a channel that stands out
            path = f"tensors/{recipe}/{number:04d}.pt"
            (writer.directory / path).parent.mkdir(exist_ok=True)
            write_atomic(writer.directory / path, encode(x, {"recipe": recipe}, {"layer": layer + 1}))
            identity = Identity(
                "llama32-1b", "full", "wikipedia", recipe, recipe, layer_type, layer + 1, module,
                "FA" if layer_type == "attention" else "linear", operation, "pre", name, iteration, 0, 0,
            )  # fmt: skip
            scores = {fmt: score(x, fmt) for fmt in SCORED}
            rows.append(
                TensorRow(
                    f"r00-{number:06d}",
                    writer.run_id,
                    identity,
                    datetime(2026, 1, 1),
                    tuple(x.shape),
                    "float32",
                    x.nbytes,
                    path,
                    -1,
                    quant.summarize(x),
                    None if recipe == "bf16" else recipe,
                    scores.get(recipe),
                    [Score(format=fmt, error=error) for fmt, error in scores.items()],
                )
            )
        write_segment(writer.directory / "segments", writer.next_segment_name(), rows)
        for iteration in range(2):
            writer.append_loss({"iteration": iteration, "loss": 5.0 - iteration + recipe_number / 100})
        writer.update(tensors=len(rows))
        writer.finish(DONE)
    with Catalog.open(root):
        pass  # as after a collection that the app has seen


def save_session(root: Path, count: int) -> str:
    """Save a session of so many pins of tensors' views; its id."""
    with Catalog.open(root) as catalog:
        rows = catalog.tensors()
        ids = rows.loc[rows["contracted_axis"].notna(), "tensor_id"]
        pins = [
            Pin("tensor", {"tensor": [tensor_id], "view": [view], "format": ["mxfp4"]}, chart)
            for tensor_id in ids
            for view, charts in PINNED.items()
            for chart in charts
        ]
        one = refreshed(catalog, session.new("Pins", View("map"), pins=tuple(pins[:count])))
        return storage.create(root, one).session.id


@dataclass(frozen=True)
class Cost:
    """Seconds from start to exit, bytes at the highest."""

    seconds: float
    memory: int


def cost_of(arguments: list[str]) -> Cost:
    start = time.perf_counter()
    process = subprocess.Popen(arguments, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    highest = 0

    def look() -> None:
        nonlocal highest
        while process.poll() is None:
            highest = max(highest, sum(resident(pid) for pid in family(process.pid)))
            time.sleep(0.05)

    watcher = threading.Thread(target=look)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments[:4])} ended with {process.returncode}: {errors[-2000:]}")
    return Cost(seconds, highest)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, children = [pid], Path(f"/proc/{pid}/task")
    try:
        for task in children.iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        pass
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--values", type=int, default=1 << 20, help="of a tensor")
    parser.add_argument("--pins", type=int, default=0, help="also report a session of so many, drawn by one and by all")
    parser.add_argument("--times", type=int, default=3, help="the report is timed; the median counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        needed = args.tensors * args.values * 4 + KEPT_ASIDE
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        if free < needed:
            sys.exit(f"bench_report: {needed / 1e9:.1f} GB are needed in {directory}, {free / 1e9:.1f} are free")
        root, ours, theirs = (Path(directory) / name for name in ("runs", "report", "plain"))
        root.mkdir()
        make_root(root, args.tensors, args.values)
        plain = cost_of([sys.executable, "-m", "tests.bench.plain_report", str(root), str(theirs)])
        report = [sys.executable, "-m", "binade", "report", "--tensor-save-dir", str(root), "--output", str(ours)]
        costs = sorted((cost_of(report) for _ in range(args.times)), key=lambda cost: cost.seconds)
        middle = costs[len(costs) // 2]
        memory = max(cost.memory for cost in costs)
        charts = {name: sum(1 for _ in folder.rglob("*.png")) for name, folder in (("r", ours), ("p", theirs))}
        kept = json.loads((ours / "tensor_stats.json").read_text())["totals"]
        assert kept["tensors"] == args.tensors, kept
        if args.pins:
            with_pins = [*report, "--session", save_session(root, args.pins)]
            one, every = (cost_of([*with_pins, *jobs]).seconds for jobs in (("--jobs", "1"), ()))
            size = (ours / "index.html").stat().st_size
            print(f"session of {args.pins} pins: {every:.1f} s, with --jobs 1 {one:.1f} s, HTML {size / 1e6:.1f} MB")
    print(f"{args.tensors} tensors of {args.values:,} float32 values, {os.cpu_count()} cores")
    print(f"plain script  {plain.seconds:7.1f} s  {plain.memory / 1e6:7.0f} MB  {charts['p']} pictures")
    print(f"app report    {middle.seconds:7.1f} s  {memory / 1e6:7.0f} MB  {charts['r']} pictures and the HTML")
    print(
        f"ratio         {plain.seconds / middle.seconds:7.1f} ×  {plain.memory / memory:7.1f} ×  (asked for: 5 and 4)"
    )


if __name__ == "__main__":
    main()
