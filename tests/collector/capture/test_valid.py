"""Recorder.valid: what is measured of valid tokens, by NumPy on their rows of the values that were recorded."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import nn

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.errors import ConfigError
from binade.data.index.catalog import Catalog
from binade.data.run.notes import notes
from binade.data.run.tensor_kinds import MAPS
from binade.quant import metrics
from binade.quant.specs import Spec
from tests.collector.instrumented import rows
from tests.collector.small_model import batch, build

pytestmark = pytest.mark.slow
SCORES = ("mxfp4", "fp8_e4m3(block=row)", "nvfp4(hadamard=16)", "mxfp8(block=4x8)")
TOKENS, LABELS = batch()
MASK = torch.ones(2, 40, dtype=torch.bool)
MASK[0, 30:] = MASK[1, 17:] = False
ALONG_TOKENS = {("input", "wgrad"), ("grad_output", "wgrad")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple:
    """(the rows with values, the scores) of a step of the small model under MXFP8."""
    root = tmp_path_factory.mktemp("valid")
    model = build(layers=1)
    with Recorder(root, scores=SCORES) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        with recorder.valid(MASK.t(), batch_axis=1):  # its hidden states are [s, b, ·]
            logits = model(TOKENS)
        F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="none")[MASK.flatten()].mean().backward()
    with Catalog.open(root) as catalog:
        scores, sketch = (catalog.table(name).to_pandas() for name in ("score", "sketch"))
    return rows(root), scores, sketch.groupby("tensor_id")["count"].sum()


def mask_of(row) -> np.ndarray | None:
    """Of the tensor's [rows, columns]; None for a weight and its gradient."""
    if row.tensor_name in ("weight", "grad_weight"):
        return None
    mask = MASK.numpy()
    return np.repeat(mask[:, None], row.tensor.shape[1], 1).reshape(-1) if row.module == "core" else mask.T.reshape(-1)


def test_statistics_are_of_valid_tokens(recorded):
    found, _, sketch = recorded
    for row in found.itertuples():
        values, mask = row.tensor.double().numpy(), mask_of(row)
        if mask is not None:
            values = values.reshape(-1, values.shape[-1])[mask]
        if row.tensor_name in MAPS:  # which are causal
            causal = np.tril(np.ones(row.tensor.shape, bool)).reshape(len(mask), -1)
            values = values[causal[mask]]
        assert pd.isna(row.tokens_left_out) if mask is None else row.tokens_left_out == 33, row.tensor_name
        assert row.numel == values.size and row.zeros == (values == 0).sum() and sketch[row.tensor_id] == values.size
        assert row.absmax == np.abs(values).max()
        assert row.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-6)
        text = " ".join(notes(row._asdict()))
        assert ("Without the 33 tokens of padding" in text) == (mask is not None)
    assert len(found) == 35


def test_errors_are_of_valid_tokens_and_blocks_lie_as_they_are(recorded):
    found, scores, _ = recorded
    checked = 0
    for row in found[found["layer_type"] == "linear"].itertuples():
        if (mask := mask_of(row)) is None:
            continue
        for score in scores[scores["tensor_id"] == row.tensor_id].itertuples():
            x = row.tensor.flatten(0, -2)
            along_tokens = (row.tensor_name, score.gemm) in ALONG_TOKENS
            dim = 0 if along_tokens else -1
            if rotated := "hadamard" in score.format:
                blocks = x.float().movedim(dim, -1).unflatten(-1, (-1, 16)) @ torch.from_numpy(hadamard(16) / 4).float()
                x = blocks.flatten(-2).movedim(-1, dim).to(x.dtype)
            q = quant.fake_quantize(x, score.format.partition("(h")[0], dim=dim, backend="torch").double().numpy()
            x = x.double().numpy()
            if not (rotated and along_tokens):  # which mixes tokens: of all of them
                x, q = x[mask], q[mask]
            error = ((q - x) ** 2).sum()
            expected = 10 * np.log10((x**2).sum() / error)
            assert score.sqnr_db == pytest.approx(expected, rel=1e-4), (row.tensor_name, score.gemm, score.format)
            checked += 1
    assert checked == 4 * 4 * 5  # modules, operands of the GEMMs, formats


def test_saturation_is_of_valid_tokens():
    """MXFP8 by the floor rule: NumPy's scales of blocks that padding is part of."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 3
    kept = torch.arange(0, 64, 3)
    for dim in (-1, 0):
        blocks = x.numpy() if dim == 0 else x.numpy().T
        blocks = np.abs(np.pad(blocks, [(0, -len(blocks) % 32), (0, 0)])).reshape(-1, 32, blocks.shape[1])
        scale = 2.0 ** (np.floor(np.log2(blocks.max(1, keepdims=True))) - 8)
        over = (blocks / scale > 448).reshape(-1, blocks.shape[2])
        over = over[:64] if dim == 0 else over[:48].T
        found = metrics.score_of_rows_later(x, Spec.of("mxfp8"), dim, kept)()
        assert found.saturated == over[kept.numpy()].mean() > 0


def test_sequence_first_and_what_has_no_rows_of_tokens(tmp_path):
    """[s, b, hidden], flattened tokens, and a layer of another number of rows."""
    layer, pooled = nn.Linear(8, 8), nn.Linear(8, 4)
    model = nn.ModuleList([layer, pooled])
    model.forward = lambda x: (layer(x), layer(x.flatten(0, 1)), pooled(x.mean(0)))
    x = torch.randn(5, 3, 8)
    mask = torch.rand(5, 3) > 0.4
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "bf16", recorder):
        with recorder.valid(mask, batch_axis=1):
            model(x)
        model(x)
    found = rows(tmp_path, tensor_name="input")
    first, second, third, *without = found.sort_values("tensor_id").itertuples()
    for row in (first, second):
        assert row.numel == int(mask.sum()) * 8 and row.absmax == float(x[mask].abs().max())
    assert third.numel == 24 and all(pd.isna(row.tokens_left_out) for row in (third, *without))


def test_a_mask_in_the_other_order_is_refused(tmp_path):
    layer = nn.Linear(8, 8)
    with (
        Recorder(tmp_path) as recorder,
        instrument(layer, "bf16", recorder),
        pytest.raises(InstrumentError, match=r"\(3, 5\).*\(5, 3\)"),
        recorder.valid(torch.ones(3, 5, dtype=torch.bool)),
    ):
        layer(torch.randn(5, 3, 8))


def test_a_mask_of_another_kind_is_refused(tmp_path):
    with (
        Recorder(tmp_path) as recorder,
        pytest.raises(ConfigError, match="expected bool"),
        recorder.valid(torch.ones(4)),
    ):
        pass
