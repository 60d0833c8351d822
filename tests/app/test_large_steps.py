"""Steps that count tokens, up to 2^53 - 1: from the log of another tool to the charts, tables and exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from binade.app.questions.registry import QUESTIONS
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.cli import main
from binade.collector.imports import importer
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.collector.logs_made import read_here
from tests.compared import compared, gaps_of

STEPS = [0, 2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12, 2**53 - 1]
SOME = ("runs", "map", "recipes", "difference")
SAME = ("--model", "m", "--dataset", "d", "--seed", "1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Losses of bf16 from pandas and of mxfp8 from TensorBoard's writer, and Transformer Engine's dumps."""
    place = tmp_path_factory.mktemp("large")
    losses = np.linspace(9, 4, len(STEPS))
    pd.DataFrame({"step": STEPS, "loss": losses}).to_csv(place / "bf16.csv", index=False)
    with SummaryWriter(str(place / "events")) as writer:
        for step, loss in zip(STEPS, losses + 0.25, strict=True):
            writer.add_scalar("train/loss", loss, step)
    for step in STEPS:
        folder = place / f"tensor_dumps/rank_0/iter_{step:06d}"
        folder.mkdir(parents=True)
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        torch.save({"high_precision": x}, folder / "decoder_layers_1_mlp_linear_fc1_activation.pt")
    into = ("--tensor-save-dir", str(place / "runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "scatter", read_here)
        assert main(["import", str(place / "bf16.csv"), "--recipe", "bf16", *SAME, *into]) == 0
        assert main(["import", str(place / "events"), "--recipe", "mxfp8", *SAME, *into]) == 0
        assert main(["import", str(place / "tensor_dumps"), "--scores", "mxfp8", "--workers", "1", *into]) == 0
    return place / "runs"


def test_they_are_indexed_filtered_and_compared(root: Path):
    with Catalog.open(root) as catalog:
        assert catalog.refused == [] and catalog.runs()["iteration"].tolist().count(STEPS[-1]) == 2
        assert sorted(catalog.tensors()["iteration"]) == STEPS
        for step in STEPS:
            where, problems = Filter.from_query({"iteration": [str(step)]})
            assert not problems and catalog.tensors(where)["iteration"].tolist() == [step]
    assert gaps_of(root) == {"mxfp8": pytest.approx(0.25, abs=1e-6)}
    (costs,) = (section.compared.costs for section in compared(root) if section.compared)
    assert costs["iterations"].tolist() == [len(STEPS)]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, id=question.name, marks=() if question.name in SOME else pytest.mark.thorough)
        for question in QUESTIONS
    ],
)
def test_every_question_is_drawn(root: Path, question):
    with Catalog.open(root) as catalog:
        address = {key: [text] for key, text in question.address.items()}
        drawn = pins.draw(catalog, Pin(question.page, address))
        charts = [json.dumps(figure.chart.to_dict()) for figure in drawn.figures]
        if question.name == "runs":
            assert set(STEPS) <= {int(number) for number in re.findall(r'"iteration": ([0-9]+)[,}]', charts[0])}


@pytest.mark.parametrize("kind", ["parquet", "tensorboard"])
def test_they_are_exported(root: Path, tmp_path: Path, kind: str):
    assert main(["export", "--tensor-save-dir", str(root), "--to", kind, "--output", str(tmp_path / "out")]) == 0
    if kind == "parquet":
        tables = [pq.read_table(path) for path in (tmp_path / "out").rglob("*.parquet")]
        steps = {
            step for table in tables if "iteration" in table.column_names for step in table["iteration"].to_pylist()
        }
    else:
        steps = set()
        for folder in {path.parent for path in (tmp_path / "out").rglob("*tfevents*")}:
            events = EventAccumulator(str(folder)).Reload()
            for tag in events.Tags()["scalars"]:
                steps |= {event.step for event in events.Scalars(tag)}
    assert set(STEPS) <= steps
