"""Does the predicted change of the loss come true? Predictions of one recorded pass against measured losses.

    python -m tests.bench.bench_loss MODEL [--operand weight] [--formats mxfp4,mxfp8] [--tokens 512] [--batches N]
                                     [--every K] [--steps N]

MODEL is a Hugging Face directory or a GGUF file of a Llama-like model, computed in float32, on text of python-docs; or
the name of a model, whose tiny size is trained first, for N steps of 8 sequences.

Predicted: from one forward and backward pass of each batch, recorded unquantized, for the input or the weight of every
linear layer, or of one layer in K. Measured: the loss of the same batch with that one operand rounded, less the loss
without. The first table compares them on the same tokens, batch by batch; its sums are over the layers, averaged over
the batches. With several batches, the second
compares predictions averaged over the first half of the batches with measurements averaged over the second half, whose
own reliability is that of their two halves. All numbers are Spearman's rank correlation over the layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from binade.app.questions.loss.compute import costs
from binade.app.questions.shared.boards import PLACE
from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.samples import SampleStream
from binade.collector.models.checkpoint import open_checkpoint
from binade.collector.models.directory import read_shape
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.training.config import MODELS
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant import fake_quantize
from tests.bench.bench_quantize import versions

PREDICTORS = ("first", "second", "value", "sqnr_db")
TITLES = ("first order", "second order", "both", "−SQNR")


def loss_of(model: GPTModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def rho(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b).statistic)


@contextmanager
def rounded(layer: ParallelLinear, operand: str, fmt: str) -> Iterator[None]:
    weight = layer.weight.data
    hook = layer.register_forward_pre_hook(lambda _, x: (fake_quantize(x[0], fmt), *x[1:]) if operand == "input" else x)
    if operand == "weight":
        layer.weight.data = fake_quantize(weight, fmt)
    yield
    layer.weight.data = weight
    hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--operand", choices=("input", "weight"), default="input")
    parser.add_argument("--formats", default="mxfp4")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    formats, path = given.formats.split(","), Path(given.model)
    shape = MODELS[given.model]["tiny"] if given.model in MODELS else read_shape(path)
    model = GPTModel(shape, compute_dtype=torch.float32)
    if given.model in MODELS:
        model.initialize(0)
    else:
        open_checkpoint(path, shape).load_into(model)
    tokenizer = "byte" if given.model in MODELS else given.model
    stream = SampleStream(open_dataset("python-docs", tokenizer, shape.vocab).documents, given.tokens, 0, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(given.steps):
        optimizer.zero_grad()
        loss_of(model, *stream.batch(8)).backward()
        optimizer.step()
    batches = [stream.batch(1) for _ in range(given.batches)]
    layers = [module for module in model.modules() if isinstance(module, ParallelLinear)][:: given.every]
    places = [(module.site.layer_index, module.site.module) for module in layers]
    print(f"{versions('cpu')}; {path.name}, {given.steps} steps, float32, {given.operand}s of ", end="")
    print(f"{len(layers)} linear layers, {given.batches} x {given.tokens} tokens of python-docs", end="\n\n")

    predicted = {fmt: np.zeros((len(batches), len(layers), len(PREDICTORS))) for fmt in formats}
    with tempfile.TemporaryDirectory() as root:
        options = {"tensors": ("input", given.operand), "scores": formats, "measures": ("loss",), "raw": False}
        with Recorder(root, **options) as recorder, instrument(model, "bf16", recorder):
            for number, batch in enumerate(batches):
                with recorder.at(number, 0):
                    model.zero_grad(set_to_none=True)
                    loss_of(model, *batch).backward()
        with Catalog.open(root) as catalog:
            for fmt in formats:
                for number in range(len(batches)):
                    table = costs(
                        catalog, Filter(iteration=[number], tensor_name=[given.operand]), fmt
                    ).table.set_index(list(PLACE[:2]))
                    predicted[fmt][number] = table.loc[places, list(PREDICTORS)].to_numpy()
                predicted[fmt][..., -1] *= -1

    titles = (*TITLES, "sum predicted", "measured")
    print("| format | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles))
    measured = {fmt: np.zeros((len(batches), len(layers))) for fmt in formats}
    with torch.no_grad():
        for number, batch in enumerate(batches):
            plain = loss_of(model, *batch).item()
            for fmt in formats:
                for index, layer in enumerate(layers):
                    with rounded(layer, given.operand, fmt):
                        measured[fmt][number, index] = loss_of(model, *batch).item() - plain
    for fmt in formats:
        each = [
            [rho(p[:, k], m) for k in range(len(PREDICTORS))]
            for p, m in zip(predicted[fmt], measured[fmt], strict=True)
        ]
        sums = predicted[fmt][..., PREDICTORS.index("value")].sum(1).mean(), measured[fmt].sum(1).mean()
        cells = [*(f"{value:.2f}" for value in np.mean(each, 0)), *(f"{value:+.4f}" for value in sums)]
        print(f"| {fmt} | " + " | ".join(cells) + " |")
    if len(batches) < 4:
        return
    half = len(batches) // 2
    print(
        "\nOn other tokens:\n\n| format | " + " | ".join(TITLES) + " | the measurement's halves |\n|---|" + "---|" * 5
    )
    for fmt in formats:
        truth = measured[fmt][half:]
        values = [rho(predicted[fmt][:half, :, k].mean(0), truth.mean(0)) for k in range(len(PREDICTORS))]
        values.append(rho(truth[::2].mean(0), truth[1::2].mean(0)))
        print(f"| {fmt} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


if __name__ == "__main__":
    main()
