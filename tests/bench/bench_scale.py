"""How fast the index answers on a large root, compared with a plain DuckDB scan of the same rows.

    python -m tests.bench.make_root --tensors 100000 FOLDER
    python -m tests.bench.bench_scale FOLDER

Prints a table: the median of REPEATS in milliseconds, that of the DuckDB statement timed next to it, and their ratio.
The statements run on tables made from the root's Parquet files by CREATE TABLE AS, without keys or joins: the time that
reading every row takes. The index is rebuilt in a separate process. Runs of one segment are added to the root, and
deleted again. On a busy machine, --cpu gives the CPU time of all threads instead of the wall-clock time.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from binade.app.measures.map_measure import ITERATION, CellQuery
from binade.app.questions.map.compute import cells
from binade.app.questions.shared.distributions import distributions
from binade.app.questions.shared.scope import scoped
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS, Filter
from tests.bench.make_root import SEGMENT, make_root

REPEATS = 5
SKETCH = "SELECT bin, sum(count) FROM sketch GROUP BY bin"
SCORE = "SELECT format, median(mse), median(flush_to_zero), median(saturated) FROM score GROUP BY format"
TENSOR = f"SELECT count(*), sum(numel), {', '.join(f'count(DISTINCT {name})' for name in FIELDS)} FROM tensor"
PLACE = Filter(layer_index=[3], module=["fc1"], tensor_name=["input"])
SOME = SKETCH.replace(
    "GROUP", "WHERE tensor_id IN (SELECT tensor_id FROM tensor WHERE layer_index = 3 AND module = 'fc1') GROUP"
)


def cases(catalog: Catalog) -> dict[str, tuple[Callable[[], object], str]]:
    """What is timed, and the statement beside it."""
    runs = catalog.runs()["run_id"].tolist()
    ids = catalog.tensors(PLACE, limit=200)["tensor_id"].tolist()

    def one() -> Filter:
        """What a page without filters shows: one run and iteration."""
        return scoped(catalog, Filter(), scored=True)

    return {
        "facets and totals": (lambda: (catalog.facets(), catalog.totals()), TENSOR),
        "facets and totals of a place": (lambda: (catalog.facets(PLACE), catalog.totals(PLACE)), TENSOR),
        "distribution": (lambda: catalog.distribution(), SKETCH),
        "  by quant type": (lambda: catalog.distribution(by="quant_type"), SKETCH),
        "  by layer": (lambda: catalog.distribution(by="layer_index"), SKETCH),
        "  by iteration": (lambda: catalog.distribution(by="iteration"), SKETCH),
        "  of a layer, by iteration": (lambda: catalog.distribution(Filter(layer_index=[3]), by="iteration"), SKETCH),
        "  and moments, by layer": (lambda: distributions(catalog, Filter(), "layer_index"), SKETCH),
        "  of a place in a run": (lambda: catalog.distribution(Filter(run_id=runs[:1], **PLACE.to_dict())), SOME),
        "  of a place on rank 0": (lambda: catalog.distribution(Filter(rank=[0], **PLACE.to_dict())), SOME),
        "  of 200 tensors": (lambda: catalog.distribution(tensor_ids=ids), SOME),
        "formats compared, of an iteration": (lambda: catalog.compared(one()), SCORE),
        "  of all runs": (lambda: catalog.compared(), SCORE),
        "map, of an iteration": (lambda: cells("sqnr_db", CellQuery(catalog, one(), "mxfp4")), SCORE),
        "map, of all runs": (lambda: cells("sqnr_db", CellQuery(catalog, Filter(), "mxfp4")), SCORE),
        "map by iteration, of a run": (
            lambda: cells("sqnr_db", CellQuery(catalog, Filter(run_id=runs[:1]), "mxfp4", ITERATION)),
            SCORE,
        ),
    }  # fmt: skip


def build(root: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak RSS in MB of a process that indexes the root."""
    (root / "index.duckdb").unlink(missing_ok=True)
    start = time.perf_counter()
    code = "import sys; from binade.data.index.catalog import Catalog; Catalog.open(sys.argv[1]).close()"
    process = subprocess.Popen([sys.executable, "-c", code, str(root)])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("the index could not be built")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def median(clock: Callable[[], float], call: Callable[[], object], before: Callable[[], object] = int) -> float:
    """Milliseconds of a call, before each of which `before` is called."""
    times = []
    for _ in range(REPEATS):
        before()
        start = clock()
        call()
        times.append(clock() - start)
    return 1e3 * statistics.median(times)


def row(*cells: object) -> None:
    print("|", *(f"{c:,.1f} |" if isinstance(c, float) else f"{c} |" for c in cells), flush=True)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time")
    args = parser.parse_args()
    root, clock = args.root, time.process_time if args.cpu else time.perf_counter
    row("", "index", "DuckDB", "ratio")
    row(*["---"] * 4)
    seconds, cpu, peak = build(root)
    with tempfile.TemporaryDirectory() as folder, duckdb.connect(f"{folder}/raw.duckdb") as raw:
        start = cpu_seconds()
        for name in ("tensor", "score", "sketch"):
            raw.execute(f"CREATE TABLE {name} AS FROM read_parquet('{root}/*/segments/*/{name}.parquet')")
        raw.execute("CHECKPOINT")
        plain = cpu_seconds() - start
        row(f"build, CPU s ({seconds:.1f} s, peak RSS {peak:,.0f} MB)", cpu, plain, cpu / plain)
        with Catalog.open(root) as catalog:
            tensors = catalog.totals().tensors
            sizes = [path.stat().st_size / tensors for path in (root / "index.duckdb", Path(f"{folder}/raw.duckdb"))]
            parquet = sum(path.stat().st_size for path in root.glob("*/segments/*/*")) / tensors
            row(f"bytes per tensor (Parquet {parquet:,.0f})", *sizes, sizes[0] / sizes[1])
            for name, (call, statement) in cases(catalog).items():
                call()
                ours = median(clock, call)
                theirs = median(clock, lambda statement=statement: raw.execute(statement).fetchall())
                row(name, ours, theirs, ours / theirs)
            row(f"sync, nothing new, {len(catalog.runs())} runs", median(clock, catalog.sync), "", "")
            made: list[Path] = []
            added = median(clock, catalog.sync, lambda: made.extend(make_root(root, SEGMENT)))
            row(f"sync, a new segment of {SEGMENT} rows", added, "", "")
            for directory in made:
                shutil.rmtree(directory)
            start = clock()
            catalog.sync()
            row(f"sync, {REPEATS} runs deleted", 1e3 * (clock() - start), "", "")


if __name__ == "__main__":
    main()
