"""Weights that are the same in all recorded iterations are said to be, and others are not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from binade import Catalog, Filter, Recorder, instrument, plots


def test_a_weight_that_the_optimizer_lacks_is_unchanged(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    with Recorder(tmp_path, measures=("trace",)) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.1)
        for _ in range(4):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    with Catalog.open(tmp_path) as catalog:
        found = plots.map(catalog, Filter(tensor_name=["weight"]), metric="oscillating").tables
    weights = found["oscillating_weights"].set_index("place")
    assert weights.index[weights["unchanged"] == "yes"].tolist() == ["L2 linear weight"]
    assert weights["unchanged"].isin(("yes", "no")).all() and weights["iterations"].eq(4).all()
