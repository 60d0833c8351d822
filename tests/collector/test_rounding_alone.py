"""What rounding alone does to the loss: of one batch with and without the recipe in one run, against two runs, and
against models that are rounded by hand. Training has the same bits with and without the measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.data.compare.comparison import compare
from binade.data.compare.difference import difference
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of, runs_with_references
from binade.data.run.directory import RunInfo, read_run
from binade.data.run.losses import read_losses
from binade.data.run.rounding_alone import FACT, RoundingAlone, rounding_alone, rounding_alone_of
from binade.quant.quantizer import fake_quantize

pytestmark = pytest.mark.slow
OPTIONS = ("--train-iters", "3", "--control-iter", "2", "--micro-batches", "2", "--warmup-iterations", "1")
VOCAB = 32


def losses(run: RunInfo) -> list[float]:
    return [record["loss"] for record in read_losses(run.directory)]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("te_delayed", ()),
        ("nvidia_nvfp4(without=keep)", ()),  # rounds stochastically
        ("mxfp4", ("--model", "deepseek2_lite")),
    ],
)
def test_training_has_the_same_bits(collect: Callable[..., RunInfo], recipe: str, more: tuple[str, ...]):
    line = (*OPTIONS, "--quantization", recipe, *more)
    plain, measured = collect(*line, "--no-rounding-alone"), collect(*line)
    assert rounding_alone_of(plain.config) is None and rounding_alone_of(measured.config)
    found = difference(plain, measured)
    assert found.rows and found.first(None) is None and not (found.only_a or found.only_b)
    assert losses(plain) == losses(measured) and len(losses(plain)) == 4


def test_it_is_the_difference_of_two_runs_with_the_same_weights_and_data(collect: Callable[..., RunInfo]):
    line = ("--train-iters", "1", "--warmup-iterations", "2", "--micro-batch-size", "3")
    bf16, mxfp4 = (collect(*line, "--quantization", recipe) for recipe in ("bf16", "FA_linear_mxfp4"))
    assert rounding_alone_of(bf16.config) is None  # rounds nothing
    found = rounding_alone_of(mxfp4.config)
    assert found and (found.iteration, found.sequences) == (0, 3)
    assert found.loss == pytest.approx(losses(bf16)[-1], rel=1e-6)
    assert found.change == pytest.approx(losses(mxfp4)[-1] - losses(bf16)[-1], abs=1e-6) and found.change


class Model(nn.Module):
    """Two linear layers on one-hot tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(VOCAB, 64, bias=False), nn.Linear(64, VOCAB, bias=False)
        nn.init.normal_(self.head.weight)  # so that tokens have very different losses

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.one_hot(tokens, VOCAB).float())))


def tokens(number: int, sequences: int = 4) -> Tensor:
    return torch.randint(VOCAB, (sequences, 9), generator=torch.Generator().manual_seed(number))


def sequence_loss(model: nn.Module, batch: Tensor) -> Tensor:
    after = model(batch[:, :-1]).log_softmax(-1)
    return -after.gather(-1, batch[:, 1:, None]).squeeze(-1)


def fine_tune(root: Path, recipe: str, *, masked: int = 0, evaluates: bool = False) -> RunInfo:
    """Three steps. The labels of the first `masked` tokens do not count, which nothing in the run says."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(root, iterations=1, scores=()) as recorder, instrument(model, recipe, recorder, backend="torch"):
        for step in range(3):
            if evaluates:
                recorder.evaluate(sequence_loss, [tokens(100), tokens(101)])
            loss = sequence_loss(model, tokens(step))[:, masked:].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(loss=loss)
    return read_run(recorder.writer.directory)


def test_of_an_instrumented_model_it_is_that_of_rounding_by_hand(tmp_path: Path):
    run = fine_tune(tmp_path, "mxfp4", evaluates=True)
    found = rounding_alone_of(run.config)
    assert found and (found.iteration, found.sequences) == (0, 8)
    model, changes = Model(), []
    for number in (100, 101):
        x = F.one_hot(tokens(number)[:, :-1], VOCAB).float()
        up, head = (weight.detach() for weight in (model.up.weight, model.head.weight))
        hidden = F.relu(fake_quantize(x, "mxfp4") @ fake_quantize(up, "mxfp4").t())
        logits = fake_quantize(hidden, "mxfp4") @ fake_quantize(head, "mxfp4").t()
        labels = tokens(number)[:, 1:]
        rounded = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(-1)
        changes += (rounded - sequence_loss(model, tokens(number)).mean(-1)).tolist()
    assert found.change == pytest.approx(sum(changes) / 8, abs=1e-6)
    low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert [found.estimate.low, found.estimate.high] == pytest.approx([low, high], abs=1e-6)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_mask_that_no_hash_has_seen_is_not_called_rounding(tmp_path: Path, evaluates: bool):
    fine_tune(tmp_path, "bf16", evaluates=evaluates)
    run = fine_tune(tmp_path, "mxfp4", masked=4, evaluates=evaluates)
    with Catalog.open(tmp_path) as opened:
        table = runs_with_references(opened.runs(), opened.parts())
        compared = compare(table, losses_of(opened, table["run_id"].tolist(), lost=True))
    (row,) = compared.recipe_table.to_dict("records")
    found = rounding_alone_of(run.config)
    assert abs(compared.gaps["gap"]).max() > 0.05
    if found is None:
        assert not evaluates and row["alone"] != row["alone"] and "rounding alone" not in compared.verdict
    else:
        assert evaluates and row["alone"] == found.change and row["alone_interval"].endswith("(8 sequences)")
        assert f"{found.estimate}" in compared.verdict


def test_what_is_not_valid_is_not_shown():
    assert rounding_alone(0, (1.0, float("nan")), (1.0, 1.0)) is None and rounding_alone(0, (), ()) is None
    one = rounding_alone(7, (1.5,), (1.0,))
    assert one == RoundingAlone(7, 1.0, 0.5, None, 1)
    assert rounding_alone_of(json.loads(json.dumps(one.fact()))) == one
    for damaged in (None, 3, {}, {"change": 1.0}, one.fact()[FACT] | {"sequences": 0}):
        assert rounding_alone_of({FACT: damaged}) is None
