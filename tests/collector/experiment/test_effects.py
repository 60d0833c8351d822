"""Measured effects against a plain loop: the model evaluated twice with `instrument`, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import binade
from binade.collector import instrument
from binade.collector.errors import ConfigError
from binade.collector.experiment.blocks import BlockOutputs
from binade.collector.experiment.evaluator import evaluator_of
from binade.collector.experiment.treatments import BY, Treatment, recipes_of, treatments_of
from binade.collector.models.site import Site
from binade.collector.recipes.files import from_toml
from binade.data.run.directory import list_runs
from binade.data.run.experiment import NONE, EffectGroup, experiment_files
from binade.data.run.tensor_kinds import Product
from tests.collector.experiment.policies import treatment
from tests.collector.small_model import batch, build

LAYERS = 3
MXFP4 = recipes_of(["mxfp4"])["mxfp4"]


def evaluate(model: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = given
    return model(tokens), labels


def plain(model: nn.Module, recipe: Any, given: tuple[Tensor, Tensor]) -> list[float]:
    """The loss of each sequence in a pass of its own."""
    model.eval()
    with torch.no_grad(), instrument(model, recipe, backend="torch"):
        logits = evaluate(model, given)[0].float()
        return [float(F.cross_entropy(x, label)) for x, label in zip(logits, given[1], strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("group", "recipe"),
    [
        (EffectGroup("linear"), "[linear]\nforward = 'mxfp4'"),
        (
            EffectGroup("linear", 2),
            "".join(f"[modules.'layer2.{m}']\nforward = 'mxfp4'\n" for m in ("qkv", "proj", "fc1", "fc2")),
        ),
        (EffectGroup("linear", None, "fc2"), "[modules.fc2]\nforward = 'mxfp4'"),
        (EffectGroup("linear", 3, "proj"), "[modules.'layer3.proj']\nforward = 'mxfp4'"),
        (EffectGroup("qk"), "[qk]\nforward = 'mxfp4'"),
        (EffectGroup("pv"), "[pv]\nforward = 'mxfp4'"),
    ],
    ids=str,
)
def test_equal_to_two_passes_of_instrument(group: EffectGroup, recipe: str):
    model, given = build(LAYERS), batch()
    with evaluator_of(model, evaluate, backend="torch") as measured:
        exact = measured.begin(Treatment(NONE), given, 0)
        found = measured.evaluate(treatment(measured, MXFP4, group))
        assert measured.reuses
    assert list(exact.losses) == plain(model, "bf16", given)
    assert list(found.losses) == plain(model, from_toml(recipe, "own"), given)
    assert found.losses != exact.losses


def test_divergence_is_that_of_scipy():
    model, given = build(LAYERS), batch()
    with torch.no_grad():
        before = model(given[0]).double().softmax(-1).numpy()
        with instrument(model, "linear_mxfp4", backend="torch"):
            after = model(given[0]).double().softmax(-1).numpy()
    with evaluator_of(model, evaluate, backend="torch") as measured:
        measured.begin(Treatment(NONE), given, 0)
        found = measured.evaluate(treatment(measured, MXFP4, EffectGroup("linear")))
    assert found.kl == pytest.approx(stats.entropy(before, after, axis=-1).mean(-1), rel=1e-2, abs=1e-7)


def test_blocks_before_the_group_are_not_computed_again():
    model, given = build(LAYERS), batch()
    calls: list[int] = []
    for layer in (1, 2, 3):
        module = model.layers[layer - 1].mlp.linear_fc1
        module.register_forward_hook(lambda *_, layer=layer: calls.append(layer))
    with evaluator_of(model, evaluate, backend="torch") as measured:
        measured.begin(Treatment(NONE), given, 0)
        for group, expected in (
            (EffectGroup("linear", 1), [1, 2, 3]),
            (EffectGroup("qk", 3), [3]),
            (EffectGroup("linear", None, "fc1"), [1, 2, 3]),
        ):
            calls.clear()
            measured.evaluate(treatment(measured, MXFP4, group))
            assert calls == expected
            share = measured.cost(treatment(measured, MXFP4, group))
            assert share == pytest.approx(len(expected) / LAYERS)


def test_kept_outputs_are_bounded():
    x, blocks = torch.zeros(4, 8), BlockOutputs(most=2 * 4 * 8 * 4)
    modules = [nn.Identity() for _ in range(5)]
    for module in modules:
        blocks.add(module, (x, None), ((), {}))
    assert list(blocks.before([])) == modules[:2] and blocks.bytes == 256
    blocks.first[Site(2, "fc1"), Product.LINEAR] = 1
    assert list(blocks.before([(Site(2, "fc1"), Product.LINEAR)])) == modules[:1]
    blocks.add(modules[0], (x, None), ((), {}))
    assert blocks.before([]) == {}


class Recurrent(nn.Module):
    """A block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.layers, *self.layers):
            x = self.dropout(block(x))
        return x


def test_a_block_that_runs_twice_is_computed_and_dropout_is_off():
    model, x = Recurrent().train(), torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean(-1)

    table = binade.measure(model, loss, [x], ["mxfp4"], by=["layer"], backend="torch")
    assert model.training and model.dropout.training
    model.eval()
    with torch.no_grad():
        exact = loss(model, x).double().mean(-1)
        with instrument(model, from_toml("[modules.'layer2.0']\nforward = 'mxfp4'", "own"), backend="torch"):
            rounded = loss(model, x).double().mean(-1)
    row = table[table["layer_index"] == 2].iloc[0]
    assert row["change_by_sequence"] == (rounded - exact).tolist() and np.isnan(row["divergence"])
    low, high = stats.t.interval(0.95, 2, row["change"], stats.sem(rounded - exact))
    assert (row["low"], row["high"]) == pytest.approx((low, high))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_of_transformers(tmp_path, attention: str):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)  # fmt: skip
    model = LlamaForCausalLM(config)
    batches = [torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def loss(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return model(input_ids=tokens, use_cache=False).logits[:, :-1], tokens[:, 1:]

    def losses(recipe: Any, tokens: Tensor) -> list[float]:
        model.eval()
        with torch.no_grad(), instrument(model, recipe, backend="torch"):
            logits, labels = loss(model, tokens)
            return [float(F.cross_entropy(x, label)) for x, label in zip(logits.float(), labels, strict=True)]

    arguments: dict[str, Any] = {"by": ["site", "part"], "root": tmp_path, "backend": "torch"}
    table = binade.measure(model, loss, batches, ["nvfp4"], **arguments)
    recipe = from_toml("[modules.'layer2.fc2']\nforward = 'nvfp4'", "own")
    expected = [
        a - b for tokens in batches for a, b in zip(losses(recipe, tokens), losses("bf16", tokens), strict=True)
    ]
    row = table[(table["layer_index"] == 2) & (table["module"] == "fc2")].iloc[0]
    assert row["change_by_sequence"] == pytest.approx(expected, abs=0) and row["sequences"] == 4
    (run,) = list_runs(tmp_path)[0]
    before = experiment_files(run.directory)
    again = binade.measure(model, loss, batches, ["nvfp4"], **arguments)
    assert again.equals(table) and experiment_files(run.directory) == before and len(list_runs(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "loss", "named"),
    [
        ({"by": ["head"]}, evaluate, "by has 'head'"),
        ({"parts": ["attention"]}, evaluate, "parts has 'attention'"),
        ({"treatments": ["te_delayed"]}, evaluate, "te_delayed"),
        ({"treatments": ["FA_mxfp4"]}, evaluate, "FA_mxfp4 rounds no forward operand"),
        ({"batches": []}, evaluate, "batches is empty"),
        ({}, lambda model, given: 3.0, "a float"),
        ({}, lambda model, given: model(given[0]), r"a tensor \[2, 40, "),
        ({}, lambda model, given: (model(given[0]), given[1][:, 1:]), r"labels \[2, 39\]"),
    ],
    ids=["by", "parts", "delayed", "attention only", "no batches", "a float", "logits", "labels"],
)
def test_what_cannot_be_measured_is_named(arguments: dict[str, Any], loss: Any, named: str):
    given: dict[str, Any] = {"batches": [batch()], "treatments": ["mxfp4"], "backend": "torch"} | arguments
    with pytest.raises(ConfigError, match=named):
        binade.measure(build(1), loss, **given)


def test_whole_groups_are_measured_first():
    with evaluator_of(build(2), evaluate, backend="torch") as measured:
        recipes = recipes_of(["mxfp4", "linear_nvfp4"])
        planned = treatments_of(measured.products, recipes, list(BY), parts=["linear"])
    groups = [(each.key.text, each.key.group) for each in planned]
    assert groups[:4] == [
        (fmt, group) for group in (EffectGroup(), EffectGroup("linear")) for fmt in ("mxfp4", "linear_nvfp4")
    ]
    assert len(groups) == len(set(groups)) == 2 * (1 + 1 + 2 + 4 + 8)
