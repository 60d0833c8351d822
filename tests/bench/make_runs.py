"""Make a root as it looks after a month: 200 runs, without training.

    python -m tests.bench.make_runs FOLDER

RECIPES × SEEDS of each model, on two data sets in turn, bf16 runs that differ from others in bits alone, failed,
cancelled, running, imported and instrumented runs, and measurements. Configurations are those that `binade run` writes,
and files are written by the program's own writers. A loss is a curve of its model and seed, plus the gap of its recipe
(GAPS, reached within ITERATIONS), plus what a run adds that differs in bits alone: a random walk. Two recipes diverge.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from binade.cli import main as binade
from binade.collector.datasets.loading import Dataset
from binade.collector.training.config import RunConfig
from binade.collector.training.loop import describe_run
from binade.collector.training.plan import plan
from binade.data.run.directory import CANCELLED, DONE, FAILED, RUNNING, RunState, now
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.experiment import EXPERIMENT
from binade.data.run.run_writer import RunWriter
from tests.data.builder import add_segment
from tests.data.experiments import Effect, append_effect

SEEDS = (1, 2, 3, 4, 5)
PLACES = (("llama32-1b", "wikipedia"), ("llama31-8b", "dolma"), ("deepseek2_lite", "wikipedia"))
GAPS = {
    "bf16": 0.0,
    "FA_mxfp8": 0.0,
    "linear_mxfp8": 0.012,
    "FA_linear_mxfp8": 0.015,
    "mxfp8": 0.014,
    "FA_hifp8": 0.0,
    "linear_hifp8": 0.02,
    "FA_linear_hifp8": 0.024,
    "FA_mxfp4": 0.06,
    "linear_mxfp4": 0.11,
    "FA_linear_mxfp4": 0.17,
    "linear_nvfp4": 0.05,
}  # nats per token, at the end
RECIPES = tuple(GAPS)
ITERATIONS, WARM_UP = 120, 10
BITS = 0.0006  # nats: one step of the random walk of runs that differ in bits alone
# Of the first model: recipe and seed, and the iteration from which the loss is NaN.
LOST = {("FA_linear_mxfp4", 2): 61, ("FA_linear_mxfp4", 4): 83, ("FA_mxfp4", 3): 97}
RUNS = 200
NONE: Any = ()  # documents


@dataclass
class MonthRoot:
    """Writes the runs of a root. Each has random numbers of its own, in the order in which they are written."""

    root: Path

    def __post_init__(self) -> None:
        self.numbers = count()

    def losses(self, config: RunConfig, gap: float, other_bits: bool = True) -> np.ndarray:
        """The losses of a run, warm-up first: one value per iteration."""
        at = np.arange(-WARM_UP, ITERATIONS)
        place = [model for model, _ in PLACES].index(config.model)
        shared = np.random.default_rng((place, config.seed))
        level = 2.4 + 0.3 * place + 0.05 * shared.standard_normal()
        curve = level + 3.5 * np.exp(-(at + WARM_UP) / 22) + 0.04 * shared.standard_normal(len(at))
        own = np.random.default_rng((7, next(self.numbers)))
        drift = BITS * np.cumsum(own.standard_normal(len(at)) * (at >= 0)) if other_bits else 0.0
        found: np.ndarray = curve + drift + gap * (1 - np.exp(-np.maximum(at, 0) / 30)) * (at >= 0)
        return found

    def train(
        self, config: RunConfig, gap: float, state: RunState = DONE, stop: int = ITERATIONS, **facts: Any
    ) -> RunWriter:
        """A run of `binade run`: its losses until the iteration `stop`, and two tensors of seed SEEDS[0]."""
        planned = plan(config)
        identity = {"name": config.dataset, "format": "jsonl", "documents": 1, "tokenizer": None}
        dataset = Dataset(NONE, identity | {"corpus_sha256": config.dataset})
        described = describe_run(planned, None, dataset, torch.device("cpu")) | facts
        label = f"{config.model_name}_{planned.recipe.name}"
        owner = 1 if state == RUNNING else None  # a process that outlives this one
        writer = RunWriter.create(self.root, label, described, owner=owner)
        lost = LOST.get((str(config.recipe), config.seed)) if config.model == PLACES[0][0] else None
        self.write_losses(writer, config, gap, stop, lost)
        if config.seed == SEEDS[0] and state == DONE:
            words = {name: described[name] for name in ("model", "size", "dataset", "recipe")}
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(next(self.numbers)))
            shown = words | {"quant_type": words["recipe"], "raw": False}
            fmt = {} if words["recipe"] == "bf16" else {"format": str(words["recipe"]).rpartition("_")[2]}
            add_segment(writer, [(x, shown | fmt), (x * 2, shown | fmt | {"tensor_name": "weight"})])
        if state != RUNNING:
            reason = {FAILED: "CUDA error: an illegal memory access was encountered"}.get(state)
            writer.finish(state, reason)
        return writer

    def write_losses(self, writer: RunWriter, config: RunConfig, gap: float, stop: int, lost: int | None) -> None:
        values = self.losses(config, gap)
        for at, loss in zip(range(-WARM_UP, stop), values, strict=False):
            is_lost = lost is not None and at >= lost
            known = {"loss": None, "not_finite": True} if is_lost else {"loss": float(loss)}
            record = {"iteration": at, "time": 0.0, "seconds": 0.1, "recorded": at == 0}
            writer.append_loss(record | known | {"data_sha256": f"{config.dataset} {config.seed} {at}"})
        finite = values[: WARM_UP + (stop if lost is None else lost)]
        writer.update(iteration=stop - 1, loss_first=float(finite[0]), loss_last=float(finite[-1]))
        if lost is not None:
            text = "layer1.fc1 forward: the first NaN of the run"
            append_event(writer.directory, Event(EventKind.NON_FINITE, lost, text, now(), place="layer1.fc1", order=1))

    def imported(self, config: RunConfig, gap: float, like: str) -> None:
        """A loss log of another tool, imported as the training of `like`'s model, data and seed."""
        values = self.losses(config, gap)[WARM_UP:]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, f"upload_{next(self.numbers)}_megatron_export.csv")
            log.write_text("step,loss\n" + "".join(f"{at},{loss}\n" for at, loss in enumerate(values)))
            options = [f"--recipe={config.recipe}", f"--like={like}", f"--tensor-save-dir={self.root}"]
            if status := binade(["import", *options, str(log)]):
                raise RuntimeError(f"binade import ended with {status}")

    def measured(self, run: RunWriter, recipe: str, change: float) -> None:
        """A measurement of all that a recipe rounds, on the weights of a run."""
        of = json.loads((run.directory / "run.json").read_text())
        facts = {name: of[name] for name in ("model", "size", "dataset")}
        writer = RunWriter.create(self.root, "measure", facts | {"kind": EXPERIMENT, "measured_run": run.run_id})
        noise = np.random.default_rng(next(self.numbers)).normal(0, 0.002, (2, 16))
        for batch, part in enumerate(noise):
            exact = tuple(float(2.5 + x) for x in part)
            losses = tuple(x + change for x in exact)
            append_effect(writer.directory, Effect(batch, recipe, "", None, None, exact, losses))
        writer.finish(DONE)


def configs() -> Iterator[RunConfig]:
    """One configuration for each recipe, seed and place."""
    for model, dataset in PLACES:
        for recipe in RECIPES:
            for seed in SEEDS:
                yield RunConfig(
                    model=model, dataset=dataset, recipe=recipe, seed=seed, train_iters=ITERATIONS,
                    warmup_iterations=WARM_UP, control_iter=1,
                )  # fmt: skip


def make_runs(root: Path) -> Path:
    """Write the runs; returns the root. bf16 of the first model is repeated on two ranks, for each seed."""
    month, first = MonthRoot(root), [config for config in configs() if config.model == PLACES[0][0]]
    plain = [config for config in first if config.recipe == "bf16"]
    made = {config: month.train(config, GAPS[str(config.recipe)]) for config in configs()}
    for config in plain:
        month.train(replace(config, tp=2), 0.0)
    for at, state in enumerate((FAILED, FAILED, CANCELLED, CANCELLED, RUNNING, RUNNING)):
        month.train(replace(first[-1], seed=20 + at), 0.05, state, stop=(3, 40, 25, 60, 30, 90)[at])
    for at, recipe in enumerate(("mxfp4", "mxfp8", "hifp8")):
        config = replace(first[0], recipe=recipe)
        month.imported(config, (0.13, 0.02, 0.03)[at], made[plain[0]].run_id)
    for seed in SEEDS[:2]:
        config = replace(first[-1], model=PLACES[1][0], seed=40 + seed)
        writer = RunWriter.create(root, "mine", {"model": "MyTransformer", "recipe": "mxfp8", "seed": seed})
        month.write_losses(writer, config, 0.02, ITERATIONS, None)
        writer.finish(DONE)
    for recipe, change in (("linear_mxfp8", 0.004), ("linear_mxfp4", 0.03)):
        month.measured(made[plain[0]], recipe, change)
    month.train(replace(first[-1], learning_rate=3e-3), 0.06)
    month.train(replace(first[-1], seed=6), 0.05, stop=50)
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    make_runs(parser.parse_args().root)


if __name__ == "__main__":
    main()
