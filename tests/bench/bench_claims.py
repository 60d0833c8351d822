"""What the app's sentences claim: how often they name a difference where there is none, and whether they name those
that exist. Exits with 1 if a line fails.

    python -m tests.bench.bench_claims

null        runs of the collector (the tiny model, fast) that differ only in what cannot matter: the order of reduction
            (tensor parallelism 2 and 1) or the seed of stochastic rounding, on the same weights and data. A comparison
            is one sentence about a group of 3, 4 or 6 seeds, or, on the map, about one recorded run: there two
            runs of one seed differ if each sentence names a single extreme, and not the same. Groups of one size are
            disjoint; groups of different sizes, and questions, share runs. Where 5% are expected by design, a line
            exceeds them half of the time, so that it fails above the 95th percentile of as many comparisons, each
            false with 5%; all lines together fail above 5%
power       planted effects: the sentence must name each of them
invariance  another run, other names of layers, a tensor times 2^k: no sentence or cell about anything else may change

The last two are also tests: tests/app/test_claims_planted.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import binom

from binade.app.questions.block_history.question import BLOCK_HISTORY
from binade.app.questions.map.question import MAP
from binade.app.questions.question import Question
from binade.app.questions.recipes import question as recipes
from binade.app.questions.results.question import RESULTS
from binade.app.questions.shared.runs import PARTS, runs_with_reference
from binade.collector.recipes.ladder import Ladder, Rung
from binade.collector.settings import Backend
from binade.collector.training import loop
from binade.collector.training.config import RunConfig, defaults
from binade.collector.training.launch import _environment
from binade.data.catalog import Catalog
from binade.data.evidence import LEVEL
from binade.data.filter import Filter
from tests.app.planted import EFFECTS, INVARIANCES, drawn, layers_alike

STOCHASTIC = "mxfp4(rounding=stochastic)"
ROUNDINGS = 3  # seeds of stochastic rounding
SIZES = (3, 4, 6)  # seeds in a group
RECORDED = 16  # seeds whose runs are recorded
PLAIN, SPLIT, STILL = "bf16", "bf16, TP 2", "bf16, learning rate 0"
START, START_SPLIT = "first step, TP 1", "first step, TP 2"  # before reduction order has changed any weight
NAMES = {
    "loss": re.compile("(?:Higher|Lower) loss than| outside[.;]"),
    "parts": re.compile("the largest gap is that of"),
    "ablation": re.compile("Told from chance"),
    "gradients": re.compile("Lowest cosine"),
    "trend": re.compile(r" (?:falls|rises) over"),
    "extreme": re.compile("(?:Lowest|Highest) "),
}
OF_MAP = ("sqnr_db", "flush_to_zero", "kurtosis")
EXTREME = re.compile(r"(?:Lowest|Highest) (?P<what>[^:]*): (?P<name>[^,:;]*), (?P<value>[−\d][^ ]*)")


@dataclass(frozen=True)
class Line:
    """A question, its comparisons, and how many of them name a difference."""

    question: str
    what: str
    comparisons: int
    named: int

    @property
    def passes(self) -> bool:
        return self.named <= binom.ppf(1 - LEVEL, self.comparisons, LEVEL)

    def __str__(self) -> str:
        share = self.named / self.comparisons
        verdict = "ok" if self.passes else "FAILS"
        return f"{self.question:<22}  {self.what:<50}  {self.comparisons:>5}  {self.named:>5}  {share:>6.1%}  {verdict}"


# The runs


def plan(seeds: int) -> dict[str, list[dict[str, Any]]]:
    """What to train: (variant, seed, rounding, config), by group of processes."""
    fast = {**vars(defaults("run", "fast")), "backend": Backend.TORCH, "learning_rate": 0.01, "train_iters": 10}
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
        if seed < RECORDED:
            first = own | {"warmup_iterations": 0, "train_iters": 1}
            single.append({"variant": START, "rounding": 0, "config": first})
            split.append({"variant": START_SPLIT, "rounding": 0, "config": first | {"tp": 2}})
            still = own | {"learning_rate": 0.0, "warmup_iterations": 0, "control_iter": 0, "raw": False}
            still |= {"measures": ("blocks",), "linear_quant": "mxfp4"}
            single.append({"variant": STILL, "rounding": 0, "config": still})
    return {"single": single, "split": split}


def train(root: Path, listed: Path) -> None:
    """Train what a file lists, on this rank, and write the variant of each run beside it."""
    instrument, found = loop.instrument, {}
    for each in json.loads(listed.read_text()):
        config = RunConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in each["config"].items()})
        shift = 1_000_000 * each["rounding"]
        # The seed of a run is that of its weights and data as well: only that of rounding is moved.
        loop.instrument = lambda *given, seed, shift=shift, **options: instrument(*given, seed=seed + shift, **options)
        result = loop.train(config, root, say=lambda line: None)
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


def sentence_of_loss(opened: Catalog, table: pd.DataFrame, base: str) -> str:
    """Recipes › Loss, of the runs of a table with column variant, compared with those of the variant `base`."""
    reference = table[table["variant"] == base].set_index("data")["run_id"]
    table = table.assign(reference=table["data"].map(reference), quantized=table["variant"] != base)
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
    table = table.assign(recipe=table["variant"], reference=table["data"].map(reference)).reset_index(drop=True)
    chosen = Ladder("equal steps", (Rung("bf16", "bf16"), *rungs))
    return str(recipes.ladder(opened, Filter(), table, chosen, "", None).verdict)


def sentence_of_gradients(opened: Catalog, table: pd.DataFrame, name: str) -> str:
    reference = table[table["variant"] == PLAIN].set_index("data")["run_id"]
    table = table.assign(reference=table["data"].map(reference), quantized=table["variant"] != PLAIN)
    return str(recipes.gradients(opened, Filter(), table.reset_index(drop=True), name, 0, [0]).verdict)


def contradict(first: str, second: str) -> bool:
    """Whether two sentences each name one extreme of the same quantity, and not the same one."""
    a, b = ({found["what"]: found["name"] for found in EXTREME.finditer(text)} for text in (first, second))
    return any(a[what] != b[what] for what in a.keys() & b.keys())


def null(opened: Catalog, variants: dict[str, str], folder: Path) -> list[Line]:
    table = runs_with_reference(opened.runs(), opened.parts())
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
    recorded = seeds[:RECORDED]
    compared = [sentence_of_gradients(opened, of([PLAIN, *rounding], [seed]), "grad_weight") for seed in recorded]
    add("Recipes › Gradients", "rounding seeds, of one seed", compared, "gradients")
    by_step, by_rounding = [(START, START_SPLIT)], [*combinations(rounding, 2)]
    maps = [(MAP, {"metric": metric, "across": across}) for metric in OF_MAP for across in ("layer_index", "iteration")]
    for question, query in (*maps, (RESULTS, {})):
        for pairs, what in ((by_step, "TP 2 and TP 1"), (by_rounding, "two rounding seeds")):
            if question is RESULTS and pairs is by_step:
                continue  # no result of a bf16 GEMM has an error
            names = dict.fromkeys(name for pair in pairs for name in pair)
            said = [{name: sentence_of(opened, question, of([name], [seed]), **query) for name in names}
                    for seed in recorded]  # fmt: skip
            both = [(text[first], text[second]) for text in said for first, second in pairs]
            other = [" / ".join(pair) for pair in both if contradict(*pair)]
            title = " ".join((question.title, *query.values())).replace("_index", "")
            lines.append(Line(title, f"{what} name different extremes", len(both), len(other)))
            for text in other:
                print(f"    {title}: {text}", flush=True)
    still = [sentence_of(opened, BLOCK_HISTORY, of([STILL], [seed])) for seed in recorded]
    add("Compare › Blocks", "trends of a run with learning rate 0", still, "trend")
    alike = []
    for seed in range(40):
        root = layers_alike(folder / f"alike{seed}", seed)
        with Catalog.open(root) as made_root:
            alike.append(str(drawn(MAP, made_root, metric="sqnr_db", format="mxfp4").verdict))
    add("Map", "operands from one distribution", alike, "extreme")
    return lines


def sentence_of(opened: Catalog, question: Question, runs: pd.DataFrame, **query: str) -> str:
    (run,) = runs["run_id"]
    return str(drawn(question, opened, Filter(run_id=(run,)), format="mxfp4", **query).verdict)


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
        sound = [line.passes for line in lines]
        print(f"\n{'null':<22}  {'':<50}  {'of':>5}  {'named':>5}  {'share':>6}")
        print(*lines, sep="\n")
        count, named = (sum(getattr(line, name) for line in lines) for name in ("comparisons", "named"))
        sound.append(named <= LEVEL * count)
        print(f"{'all':<22}  {'':<50}  {count:>5}  {named:>5}  {named / count:>6.1%}  {'ok' if sound[-1] else 'FAILS'}")
        for title, checks in (("power", EFFECTS), ("invariance", INVARIANCES)):
            print(f"\n{title}")
            for number, check in enumerate(checks):
                problem = check.problem(Path(scratch, f"{title}{number}"))
                sound.append(not problem)
                print(f"{check.question:<22}  {check.what:<50}  {problem or 'ok'}", flush=True)
    print(f"\n{time.monotonic() - start:.0f} s in all, {trained:.0f} s of them training")
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
