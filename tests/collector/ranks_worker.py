"""One of two ranks, or a single one: trains small float32 models and saves what it sees, in a fork of test_ranks.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from binade.collector.capture.instrument import instrument
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.samples import SampleStream
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.ranks import Ranks
from binade.collector.training.config import RunConfig
from binade.collector.training.loop import _optimizer
from binade.collector.training.plan import plan
from binade.collector.training.ranks import clip_gradients, finish_gradients, join, mean_over_replicas

STEPS = 2
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Case:
    model: str
    recipe: str = "bf16"
    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.recipe} tp{self.tp} dp{self.dp}{' sequence' if self.sequence_parallel else ''}"

    @property
    def single(self) -> Case:
        return Case(self.model, self.recipe)


CASES = [
    Case(model, recipe, **ranks)
    for model, recipe in (
        ("llama32-1b", "bf16"),
        ("llama31-8b", "linear_mxfp8"),
        ("deepseek2_lite", "bf16"),
        ("gpt2", "bf16"),
    )
    for ranks in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2})
]


def train(case: Case, ranks: Ranks) -> dict:
    """Losses, and the largest deviation of a gradient and a weight from the whole ones are compared elsewhere."""
    config = RunConfig(model=case.model, learning_rate=1e-3)
    model = GPTModel(plan(config).shape, ranks.tensor, compute_dtype=torch.float32)
    model.initialize(config.seed)
    documents = open_dataset(config.dataset, config.tokenizer, plan(config).shape.vocab).documents
    stream = SampleStream(documents, 32, config.seed, rank=ranks.replica, ranks=ranks.replicas)
    optimizer = _optimizer(model, config)
    seen: dict = {"losses": [], "gradients": {}}
    with instrument(model, case.recipe):
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(MICRO_BATCHES // ranks.replicas):
                tokens, labels = stream.batch(2)
                logits, balance = model.logits_and_balance(tokens)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                share = MICRO_BATCHES // ranks.replicas
                ((loss if balance is None else loss + balance) / share).backward()
                total += float(loss) / share
            finish_gradients(model, ranks)
            clip_gradients(model, ranks, 0.5)
            if step == 0:
                seen["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            seen["losses"].append(mean_over_replicas(total, ranks))
    seen["weights"] = {name: p.detach() for name, p in model.named_parameters()}
    seen["divided"] = {
        f"{name}.{parameter}": (layer.split_axis, layer.stride)
        for name, layer in model.named_modules()
        if isinstance(layer, ParallelLinear)
        for parameter, x in layer.named_parameters()
        if x.tensor_model_parallel
    }
    return seen


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        for case in dict.fromkeys(case.single for case in CASES):
            torch.save(train(case, Ranks()), directory / f"{case.name}.pt")
        return
    store = os.environ["BINADE_STORE"]
    for number, case in enumerate(CASES):
        os.environ["BINADE_STORE"] = f"{store}{number}"
        config = RunConfig(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence_parallel)
        with join(config, directory) as ranks:
            torch.save(train(case, ranks), directory / f"{case.name} rank{ranks.rank}.pt")
