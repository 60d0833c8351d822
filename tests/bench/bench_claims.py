"""What the app's sentences claim: how often they name a difference where there is none, how often they miss one that is
there, and whether they call what was measured whole uncertain. Exits with 1 if a line fails.

    python -m tests.bench.bench_claims

null        runs of the collector (the tiny model, fast) that differ only in what cannot matter: the order of reduction
            (tensor parallelism 2 and 1) or the seed of stochastic rounding, on the same weights and data. A comparison
            is one sentence about a group of 3, 4 or 6 seeds. Groups of one size are disjoint; groups of different
            sizes, and questions, share runs. Where 5% are expected by design, a line exceeds them half of the time, so
            that it fails above the 95th percentile of as many comparisons, each false with 5%; all lines together fail
            above 5%. On the map, a comparison is a run of operands from one normal distribution, none of whose cells
            may be said to stand out
misses      planted differences that no sentence names: gaps of the size that "would probably have shown", of which one
            in five is missed by design; a cell that loses 3 dB more than normal values; the effects of planted.py
exactness   sentences about what was measured whole (maps of each metric, by layer and by iteration, results of GEMMs,
            and gradients of an iteration): those that call it uncertain, and those that name another extreme than the
            table has
invariance  another run, other names of layers, a tensor times 2^k: no sentence or cell about anything else may change

The effects and the invariances are also tests: tests/app/test_claims_planted.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binom

from binade.app.draw.figure import Drawn
from binade.app.questions.map.question import MAP
from binade.app.questions.recipes import question as recipes
from binade.app.questions.shared.runs import every_run
from binade.collector.settings import BackendName
from binade.collector.training import loop
from binade.collector.training.config import RunConfig, defaults
from binade.collector.training.launch import _environment
from binade.collector.training.plan import plan as planned
from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, LEVEL
from binade.data.compare.ladder import Ladder, Rung
from binade.data.compare.student import noncentrality
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import PARTS
from binade.data.words.filter import Filter
from tests.app.planted import EFFECTS, INVARIANCES, drawn, layers_alike, noisy, operand
from tests.data.builder import make_run

STOCHASTIC = "mxfp4(rounding=stochastic)"
ROUNDINGS = 3  # seeds of stochastic rounding
SIZES = (3, 4, 6)  # seeds in a group
RECORDED = 16  # seeds whose runs are recorded
PLAIN, SPLIT = "bf16", "bf16, TP 2"
NAMES = {
    "loss": re.compile("(?:Higher|Lower) loss than| outside[.;]"),
    "parts": re.compile("the largest gap is that of"),
    "ablation": re.compile("Statistically significant"),
    "standing out": re.compile(r"cells lose at least"),
}
UNCERTAIN = re.compile("told apart|istinguishable|would probably have shown|no trend|cannot tell")
TRIALS = 200  # planted gaps of each number of seeds
OF_MAP = ("sqnr_db", "sqnr_vs_normal", "flush_to_zero", "kurtosis")
LOW_IS_BAD = ("sqnr_db", "sqnr_vs_normal")
EXTREME = re.compile(r"(?:Lowest|Highest) (?P<what>[^:]*): (?P<names>[^;]*?), [−+\d]")


@dataclass(frozen=True)
class Line:
    """A question, its comparisons, how many of them are wrong, and the share that may be by design."""

    question: str
    what: str
    comparisons: int
    named: int
    expected: float = LEVEL

    @property
    def passes(self) -> bool:
        return self.named <= (binom.ppf(1 - LEVEL, self.comparisons, self.expected) if self.expected else 0)

    def __str__(self) -> str:
        share = self.named / self.comparisons
        verdict = "ok" if self.passes else "FAILS"
        return f"{self.question:<22}  {self.what:<50}  {self.comparisons:>5}  {self.named:>5}  {share:>6.1%}  {verdict}"


# The runs


def plan(seeds: int) -> dict[str, list[dict[str, Any]]]:
    """What to train: (variant, seed, rounding, config), by group of processes."""
    fast = {**vars(defaults("run", "fast")), "backend": BackendName.TORCH, "learning_rate": 0.01, "train_iters": 10}
    fast |= {"warmup_iterations": 10, "scores": ("mxfp4", "nvfp4"), "measures": ("result",)}
    fast |= {"modules": ("qkv", "proj"), "tensors": ("input", "weight", "grad_output", "grad_weight", "output")}
    single, split = [], []
    for seed in range(seeds):
        own = fast | {"seed": 1000 + seed, "save_tensors": seed < RECORDED}
        stochastic = own | {"linear_quant": STOCHASTIC}
        single.append({"variant": PLAIN, "rounding": 0, "config": own})
        for rounding in range(ROUNDINGS):
            single.append({"variant": f"rounding {rounding}", "rounding": rounding, "config": stochastic})
        split.append({"variant": SPLIT, "rounding": 0, "config": own | {"tp": 2, "save_tensors": False}})
    return {"single": single, "split": split}


def train(root: Path, listed: Path) -> None:
    """Train what a file lists, on this rank, and write the variant of each run beside it."""
    instrument, found = loop.instrument, {}
    for each in json.loads(listed.read_text()):
        config = RunConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in each["config"].items()})
        shift = 1_000_000 * each["rounding"]
        # The seed of a run is that of its weights and data as well: only that of rounding is moved.
        loop.instrument = lambda *given, seed, shift=shift, **options: instrument(*given, seed=seed + shift, **options)
        result = loop.train(planned(config), root, say=lambda line: None)
        found[result.run_id] = each["variant"]
    if os.environ.get("RANK", "0") == "0":
        listed.with_suffix(".runs").write_text(json.dumps(found))


def collect(root: Path, seeds: int, processes: int) -> dict[str, str]:
    """Train the runs of the plan: the variant of each, by run_id."""
    made = plan(seeds)
    files = []
    with tempfile.TemporaryDirectory() as scratch:

        def start(name: str, runs: Sequence[dict[str, Any]], **variables: str) -> subprocess.Popen[bytes]:
            path = Path(scratch, name)
            path.write_text(json.dumps(runs))
            files.append(path.with_suffix(".runs"))
            line = [sys.executable, "-m", "tests.bench.bench_claims", "--train", str(path), str(root)]
            return subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables)

        wait([start(f"single{k}.json", made["single"][k::processes]) for k in range(processes)])
        store = Path(scratch, "store")
        wait([start("split.json", made["split"], **_environment(rank, 2, store)) for rank in range(2)])
        return {run: variant for file in files for run, variant in json.loads(file.read_text()).items()}


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    failed = [process for process in processes if process.wait()]
    if failed:
        raise SystemExit("a run failed")


# The comparisons


def groups(seeds: Sequence[str]) -> Iterator[list[str]]:
    for size in SIZES:
        for first in range(0, len(seeds) - size + 1, size):
            yield list(seeds[first : first + size])


def _alone(table: pd.DataFrame, reference: pd.Series) -> list[tuple[str, ...]]:
    """The only run that each is compared with. reference: by data."""
    return [(reference[data],) if data in reference.index else () for data in table["data"]]


def sentence_of_loss(opened: Catalog, table: pd.DataFrame, base: str) -> str:
    """Recipes › Loss, of the runs of a table with column variant, compared with those of the variant `base`."""
    reference = table[table["variant"] == base].set_index("data")["run_id"]
    table = table.assign(references=_alone(table, reference), quantized=table["variant"] != base)
    return str(recipes.cost(opened, Filter(), table.reset_index(drop=True), base).verdict)


def sentence_of_parts(opened: Catalog, table: pd.DataFrame) -> str:
    """Recipes › Loss, if each of three equal recipes were one part rounded alone."""
    for number, part in enumerate(("QK", "PV", "linear")):
        own = table["variant"] == f"rounding {number}"
        table.loc[own, list(PARTS)] = "bf16"
        table.loc[own, part] = "mxfp4"
    return sentence_of_loss(opened, table, PLAIN)


def sentence_of_ablation(opened: Catalog, table: pd.DataFrame) -> str:
    """Recipes › Ablation, if each of three equal recipes were a step."""
    steps = [f"rounding {number}" for number in range(ROUNDINGS)]
    rungs = [Rung(step, step, against) for step, against in zip(steps, ["", *steps], strict=False)]
    reference = table[table["variant"] == PLAIN].set_index("data")["run_id"]
    table = table.assign(recipe=table["variant"], references=_alone(table, reference)).reset_index(drop=True)
    chosen = Ladder("equal steps", (Rung("bf16", "bf16"), *rungs))
    return str(recipes.ladder(opened, Filter(), table, chosen, "", None).verdict)


def gradients(opened: Catalog, table: pd.DataFrame) -> Drawn:
    """Recipes › Gradients, of the weight gradients of iteration 0, which were measured whole."""
    reference = table[table["variant"] == PLAIN].set_index("data")["run_id"]
    table = table.assign(references=_alone(table, reference), quantized=table["variant"] != PLAIN)
    return recipes.gradients(opened, Filter(), table.reset_index(drop=True), "grad_weight", 0, [0])


def null(opened: Catalog, variants: dict[str, str], folder: Path) -> list[Line]:
    table = every_run(opened)
    table["variant"] = table["run_id"].map(variants)
    table["name"] = table["variant"]
    rounding = [f"rounding {number}" for number in range(ROUNDINGS)]
    seeds = sorted(set(table["seed"]))
    lines: list[Line] = []

    def add(question: str, what: str, sentences: Sequence[str], names: str) -> None:
        named = [text for text in sentences if NAMES[names].search(text)]
        lines.append(Line(question, what, len(sentences), len(named)))
        for text in named:
            print(f"    {question}: {text}", flush=True)

    def of(variants: Sequence[str], seeds: Sequence[str]) -> pd.DataFrame:
        return table[table["variant"].isin(variants) & table["seed"].isin(seeds)].copy()

    made = [*groups(seeds)]
    compared = [sentence_of_loss(opened, of([PLAIN, SPLIT], group), PLAIN) for group in made]
    add("Recipes › Loss", "TP 2 and TP 1", compared, "loss")
    compared = [sentence_of_loss(opened, of(rounding, group), rounding[0]) for group in made]
    add("Recipes › Loss", "rounding seeds, against the first", compared, "loss")
    ranked = [sentence_of_parts(opened, of([PLAIN, *rounding], group)) for group in made]
    add("Recipes › Loss", "largest of three equal parts", ranked, "parts")
    judged = [sentence_of_ablation(opened, of([PLAIN, *rounding], group)) for group in made]
    add("Recipes › Ablation", "equal steps", judged, "ablation")
    alike = []
    for seed in range(40):
        root = layers_alike(folder / f"alike{seed}", seed)
        with Catalog.open(root) as made_root:
            alike.append(str(drawn(MAP, made_root, metric="sqnr_db", format="mxfp4").verdict))
    add("Map", "operands from one normal distribution", alike, "standing out")
    return lines


def misses(folder: Path) -> list[Line]:
    """Planted differences that no sentence names."""
    lines, random = [], np.random.default_rng(0)
    for seeds in SIZES:
        gap = noncentrality(seeds - 1) / math.sqrt(seeds)  # in standard deviations of a seed
        said = [
            evidence.effects([("planted", evidence.mean(GAP, random.normal(gap, 1.0, seeds)))], "bf16")
            for _ in range(TRIALS)
        ]
        missed = sum(not text.startswith("Higher than bf16: planted") for text in said)
        lines.append(Line("Recipes › Loss", f"gaps that would have shown, {seeds} seeds", TRIALS, missed, 0.2))
    missed = 0
    for seed in range(20):
        root, layer = folder / f"cell{seed}", 1 + seed % 12
        made = [operand(noisy(100 * seed + at, 20.0 if at == layer else 1.0), at) for at in range(1, 13)]
        make_run(root, made)
        with Catalog.open(root) as opened:
            missed += f"beyond that: L{layer} " not in drawn(MAP, opened, metric="sqnr_db", format="mxfp4").verdict
    lines.append(Line("Map", "one cell of twelve, 3 dB or more below normal", 20, missed, 0.0))
    problems = [effect.problem(folder / f"effect{number}") for number, effect in enumerate(EFFECTS)]
    for text in filter(None, problems):
        print(f"    {text}", flush=True)
    lines.append(Line("all", "planted effects", len(EFFECTS), sum(map(bool, problems)), 0.0))
    return lines


def exactness(opened: Catalog, variants: dict[str, str]) -> list[Line]:
    """Sentences about recorded runs that call exact values uncertain, or name what is not the extreme."""
    recorded = opened.runs()["run_id"]
    recorded = [run for run in recorded if variants[run] in (PLAIN, *(f"rounding {k}" for k in range(ROUNDINGS)))]
    recorded = [run for run in recorded if opened.totals(Filter(run_id=(run,))).tensors]
    lines = []
    maps = [{"metric": metric, "across": across} for metric in OF_MAP for across in ("layer_index", "iteration")]
    for query in maps:
        said = [drawn(MAP, opened, Filter(run_id=(run,)), format="mxfp4", **query) for run in recorded]
        title = " ".join(("Map", *query.values())).replace("_index", "")
        uncertain = sum(bool(UNCERTAIN.search(answer.verdict)) for answer in said)
        lines.append(Line(title, "exact values called uncertain", len(said), uncertain, 0.0))
        wrong = [answer for answer in said if not names_the_extreme(answer, query["metric"] in LOW_IS_BAD)]
        for answer in wrong:
            print(f"    {title}: {answer.verdict}", flush=True)
        lines.append(Line(title, "another extreme than the table's", len(said), len(wrong), 0.0))
    for metric in ("result_sqnr_db", "result_gain_db"):
        said = [drawn(MAP, opened, Filter(run_id=(run,)), metric=metric) for run in recorded if variants[run] != PLAIN]
        uncertain = sum(bool(UNCERTAIN.search(answer.verdict)) for answer in said)
        lines.append(Line(f"Map {metric}", "exact values called uncertain", len(said), uncertain, 0.0))
    table = every_run(opened)
    table = table[table["run_id"].isin(recorded)].assign(variant=lambda runs: runs["run_id"].map(variants))
    of_seeds = [gradients(opened, runs) for _, runs in table.groupby("seed")]
    uncertain = sum(bool(UNCERTAIN.search(answer.verdict)) for answer in of_seeds)
    lines.append(Line("Recipes › Gradients", "exact values called uncertain", len(of_seeds), uncertain, 0.0))
    wrong = sum(not names_the_lowest_cosine(answer) for answer in of_seeds)
    lines.append(Line("Recipes › Gradients", "another extreme than the table's", len(of_seeds), wrong, 0.0))
    return lines


def names_the_lowest_cosine(answer: Drawn) -> bool:
    """Whether the sentence names the run whose gradients have the lowest median cosine, or says that all are alike."""
    figure = answer.get("cosine")
    assert figure
    lowest = str(figure.table.groupby("group")["cosine"].median().idxmin())
    named = answer.verdict.partition("Lowest cosine")[2].partition("; highest")[0]
    return not named or lowest in named


def names_the_extreme(answer: Drawn, lowest: bool) -> bool:
    """Whether a map's sentence names the kind of operand that has the extreme median in its table."""
    kinds = answer.tables["kinds"].dropna(subset=["value"])
    extreme = kinds.loc[kinds["value"].idxmin() if lowest else kinds["value"].idxmax(), "kind"].replace("_", " ")
    found = EXTREME.search(answer.verdict)
    return not found or " more" in found["names"] or extreme in found["names"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--root", type=Path, help="keep the runs here; those of an earlier call are used again")
    parser.add_argument("--train", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        listed, root = args.train
        train(root, listed)
        return 0
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.root or Path(scratch, "runs")
        listed = root / "variants.json"
        if not listed.exists():
            root.mkdir(parents=True, exist_ok=True)
            listed.write_text(json.dumps(collect(root, args.seeds, args.processes)))
        variants = json.loads(listed.read_text())
        trained = time.monotonic() - start
        print(f"{len(variants)} runs of {args.seeds} seeds, trained in {trained:.0f} s", flush=True)
        with Catalog.open(root) as opened:
            lines = null(opened, variants, Path(scratch))
            others = {"misses": misses(Path(scratch)), "exactness": exactness(opened, variants)}
        sound = [line.passes for line in (*lines, *others["misses"], *others["exactness"])]
        print(f"\n{'null':<22}  {'':<50}  {'of':>5}  {'named':>5}  {'share':>6}")
        print(*lines, sep="\n")
        count, named = (sum(getattr(line, name) for line in lines) for name in ("comparisons", "named"))
        sound.append(named <= LEVEL * count)
        print(f"{'all':<22}  {'':<50}  {count:>5}  {named:>5}  {named / count:>6.1%}  {'ok' if sound[-1] else 'FAILS'}")
        for title, found in others.items():
            print(f"\n{title:<22}  {'':<50}  {'of':>5}  {'wrong':>5}  {'share':>6}")
            print(*found, sep="\n")
        print("\ninvariance")
        for number, check in enumerate(INVARIANCES):
            problem = check.problem(Path(scratch, f"invariance{number}"))
            sound.append(not problem)
            print(f"{check.question:<22}  {check.what:<50}  {problem or 'ok'}", flush=True)
    print(f"\n{time.monotonic() - start:.0f} s in all, {trained:.0f} s of them training")
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
