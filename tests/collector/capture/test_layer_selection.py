"""Layers and operands that are quantized differently, skipped, or not recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import torch

from binade.collector import Recorder, instrument
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe
from binade.data.index.catalog import Catalog
from tests.collector.small_model import Hooks, build, check_errors, gradients, step


class TestMixed:
    """What is recorded where operands, GEMMs and layers are quantized differently."""

    def rows(self, root: Path, recipe: Recipe, **layers: str) -> pd.DataFrame:
        model = build()
        with Recorder(root) as recorder, instrument(model, recipe, recorder, backend="torch", **layers):
            step(model)
        with Catalog.open(root) as catalog:
            return catalog.tensors()

    def test_quant_type_is_what_was_asked_and_format_what_was_done(self, tmp_path):
        recipe = parse_recipe(
            "mxfp8", forward="mxfp4", wgrad="bf16", qk="hifp8",
            operands=("linear.forward.weight=bf16", "linear.dgrad.grad_output=mxfp6_e3m2", "pv.forward.value=nvfp4"),
        )  # fmt: skip
        rows = self.rows(tmp_path, recipe)
        found = {
            (row.component, row.tensor_name): (row.quant_type, None if pd.isna(row.format) else row.format)
            for row in rows.itertuples()
        }
        assert found == {
            ("linear", "input"): ("mxfp4", "mxfp4"),
            ("linear", "weight"): ("bf16", None),
            ("linear", "output"): ("mxfp4", None),
            ("linear", "grad_output"): ("mxfp6_e3m2", "mxfp6_e3m2"),
            ("linear", "grad_input"): ("mxfp6_e3m2", None),
            ("linear", "grad_weight"): ("bf16", None),
            ("FA", "query"): ("hifp8", "hifp8"),
            ("FA", "key"): ("hifp8", "hifp8"),
            ("FA", "attention_scores"): ("hifp8", None),
            ("FA", "attention_probs"): ("mxfp8", "mxfp8"),
            ("FA", "value"): ("nvfp4", "nvfp4"),
            ("FA", "output"): ("mxfp8", None),
            ("FA", "grad_output"): ("mxfp8", "mxfp8_e5m2"),
            ("FA", "grad_scores"): ("hifp8", None),
            ("FA", "grad_query"): ("hifp8", None),
            ("FA", "grad_key"): ("hifp8", None),
            ("FA", "grad_value"): ("mxfp8", None),
        }
        error = rows[(rows["tensor_name"] == "grad_output") & (rows["module"] == "fc1")].iloc[0]
        with Catalog.open(tmp_path) as catalog:
            check_errors(catalog.load(error["tensor_id"]), "mxfp6_e3m2", -1, error.to_dict())

    def test_a_skipped_layer_is_bf16(self, tmp_path):
        rows = self.rows(tmp_path, parse_recipe("mxfp4"), skip=r"first,layer2\.core")
        skipped = (rows["layer_index"] == 1) | (rows["module"] == "core")
        assert set(rows["quant_type"][skipped]) == {"bf16"} and rows["format"][skipped].isna().all()
        assert set(rows["quant_type"][~skipped]) == {"mxfp4"} and skipped.sum() == 35 + 11
        assert len(rows) == 70 and rows["format"].notna().sum() == 4 * 3

    def test_only_the_captured_layers_are_recorded(self, tmp_path):
        rows = self.rows(tmp_path, parse_recipe("mxfp4"), capture=r"layer2\.qkv,core")
        assert Counter(zip(rows["layer_index"], rows["module"], strict=True)) == {
            (1, "core"): 11, (2, "core"): 11, (2, "qkv"): 6
        }  # fmt: skip


def outputs(recipe: str, **layers: str) -> Hooks:
    model = build()
    hooks = Hooks(model)
    with instrument(model, recipe, backend="torch", **layers):
        step(model)
    hooks.remove()
    return hooks


def test_skipping_every_layer_is_bf16_to_the_bit():
    plain, skipped = build(), build()
    logits = step(plain)
    with instrument(skipped, "mxfp4", backend="torch", skip="layer"):
        assert torch.equal(step(skipped), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(skipped), strict=True))


def test_skipping_the_first_layer_leaves_it_as_in_bf16_to_the_bit():
    plain, partly = outputs("bf16").seen, outputs("mxfp4", skip="first").seen
    for module in ("qkv", "core", "proj", "fc1", "fc2"):
        assert torch.equal(plain[1, module, "output"], partly[1, module, "output"]), module
        assert not torch.equal(plain[2, module, "output"], partly[2, module, "output"]), module
