"""Routing of two recipes, against NumPy on the routers' logits and against routes forced by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from binade.collector import instrument
from binade.collector.experiment.evaluator import evaluator_of
from binade.collector.models.feedforward import MixtureOfExperts
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.recipes.parse import parse_recipe
from binade.data.compare import routing as definitions
from binade.data.compare.routing import Routing
from binade.data.run.directory import list_runs
from binade.data.run.experiment import RouterChoices
from binade.data.run.parity_results import read_parity
from tests.collector.experiment.policies import routing

SHAPE = replace(
    MODELS["deepseek2_lite"]["tiny"], layers=3, hidden=64, heads=2, qk_nope=16, qk_rope=8, v_head=16, kv_lora_rank=32,
    ffn=64, expert_ffn=32, routed_experts=8, experts_per_token=3,
)  # fmt: skip
ROLLOUT, TRAINING = "linear_mxfp4", "linear_mxfp8"


def build() -> GPTModel:
    model = GPTModel(SHAPE)
    model.initialize(0)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(257, (3, 25), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 20:] = -100
    return [(tokens[:2, :-1], labels[:2]), (tokens[2:, :-1], labels[2:])]


def evaluate(model: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    answer = model(given[0])
    return getattr(answer, "logits", answer), given[1]


def found_in(model: nn.Module, rollout: str = ROLLOUT, training: str = TRAINING) -> Routing:
    with torch.no_grad(), evaluator_of(model, evaluate, attention=False, backend="torch") as measured:
        found = routing(measured, batches(), parse_recipe(rollout), parse_recipe(training))
    assert found is not None
    return found


def logits_of(
    model: nn.Module, recipe: str, at: int, routers: list[nn.Module], choose: Callable[[Any], Tensor]
) -> tuple[list[np.ndarray], Tensor]:
    """(the logits of each router in a pass of its own, the log-probabilities of the labels)."""
    seen: list[np.ndarray] = []
    handles = [
        router.register_forward_hook(lambda _, __, output: seen.append(choose(output).double().numpy()))
        for router in routers
    ]
    tokens, labels = batches()[at]
    with torch.no_grad(), instrument(model.eval(), recipe, backend="torch"):
        answer, _ = evaluate(model, (tokens, labels))
    for handle in handles:
        handle.remove()
    return seen, answer.float().log_softmax(-1)


def own_logits(model: GPTModel, recipe: str, at: int) -> tuple[list[np.ndarray], Tensor]:
    """[sequences, tokens, experts] of each layer with experts."""
    routers = [each.router for each in model.modules() if isinstance(each, MixtureOfExperts)]
    seen, scores = logits_of(model, recipe, at, routers, lambda output: output)
    return [np.swapaxes(each, 0, 1) for each in seen], scores


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def ranked(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, -1, kind="stable")[..., :k]


def check(found: Routing, passes: list[tuple[list[np.ndarray], list[np.ndarray]]], k: int, scale: Callable) -> None:
    """passes: for each batch, the routers' logits of the rollout and of training [sequences, tokens, experts]."""
    flipped = []
    for at, layer in enumerate(found.layers):
        shares: dict[str, list[float]] = {"flips": [], "recalls": [], "reorders": []}
        margins, of_flips = [], []
        for (rollout, training), (_, labels) in zip(passes, batches(), strict=True):
            for b, a, counts in zip(rollout[at], training[at], labels.numpy() != -100, strict=True):
                rows = [
                    (list(x), list(y), np.sort(scale(s))[::-1])
                    for x, y, s in zip(ranked(a, k), ranked(b, k), a, strict=True)
                ]
                rows = [row for row, count in zip(rows, counts, strict=True) if count]
                flips = [set(x) != set(y) for x, y, _ in rows]
                shares["flips"].append(float(np.mean(flips)))
                shares["recalls"].append(float(np.mean([len(set(x) & set(y)) / k for x, y, _ in rows])))
                shares["reorders"].append(float(np.mean([set(x) == set(y) and x != y for x, y, _ in rows])))
                margins += [s[k - 1] - s[k] for *_, s in rows]
                of_flips += flips
        for name, values in shares.items():
            assert getattr(layer, name) == pytest.approx(values), (layer.name, name)
        assert layer.margin == pytest.approx(np.median(margins), rel=1e-3)
        if any(of_flips):
            assert layer.flipped_margin == pytest.approx(np.median(np.array(margins)[of_flips]), rel=1e-3)
        flipped.append(of_flips)
    counts = [int((labels != -100).sum(1)[row]) for _, labels in batches() for row in range(len(labels))]
    some = np.split(np.any(flipped, axis=0), np.cumsum(counts)[:-1])
    assert found.any_flip == pytest.approx([each.mean() for each in some])


def test_flips_of_our_own_model():
    model = build()
    found = found_in(model)
    passes = [(own_logits(model, ROLLOUT, at)[0], own_logits(model, TRAINING, at)[0]) for at in range(2)]
    assert [layer.name for layer in found.layers] == ["layer2 router", "layer3 router"] and not found.left_out
    assert {(layer.experts, layer.chosen) for layer in found.layers} == {(8, 3)}
    assert any(0 < share < 1 for layer in found.layers for share in layer.flips)
    check(found, passes, 3, softmax)


def test_replayed_routes_are_those_of_the_rollout():
    """Against a model whose layers are forced to these experts by their `route`."""
    model = build()
    found = found_in(model)
    changes: list[float] = []
    for at, (_, labels) in enumerate(batches()):
        logits, rolled = own_logits(model, ROLLOUT, at)
        blocks = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
        for block, own in zip(blocks, logits, strict=True):
            chosen = torch.from_numpy(np.swapaxes(ranked(own, 3), 0, 1).copy())

            def route(scores: Tensor, chosen: Tensor = chosen) -> tuple[Tensor, Tensor, Tensor]:
                return scores.softmax(-1).gather(-1, chosen) * SHAPE.routed_scale, chosen, scores.new_zeros(())

            block.route = route
        forced = own_logits(model, TRAINING, at)[1]
        for block in blocks:
            block.route = model.shape.route
        counts = labels != -100
        d = (forced - rolled).gather(-1, labels.where(counts, 0)[..., None])[..., 0].double().abs()
        changes += ((d * counts).sum(1) / counts.sum(1)).tolist()
    assert found.changes == pytest.approx(changes, rel=1e-4)
    assert len(found.divergences) == 3


def test_the_same_recipe_has_no_flips():
    found = found_in(build(), TRAINING, TRAINING)
    assert found.any_flip == (0.0,) * 3 and found.changes == (0.0,) * 3
    assert all(np.isnan(layer.flipped_margin) and layer.recalls == (1.0,) * 3 for layer in found.layers)


COMMON = {
    "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**COMMON, intermediate_size=32, num_local_experts=8, num_experts_per_tok=3, head_dim=32)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**COMMON, intermediate_size=32, num_local_experts=8, num_experts_per_tok=3, head_dim=32)
    ),
    # With one group, its first top-k is over all experts, too.
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **COMMON, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3,
            n_group=1, topk_group=1, first_k_dense_replace=0, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=8,
            qk_nope_head_dim=16, v_head_dim=16,
        )
    ),
}  # fmt: skip
SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mixtral": softmax, "gpt_oss": lambda x: x, "deepseek_v3": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_flips_of_models_of_transformers(family: str):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "sinks" in name:
                weight.zero_()
    found = found_in(model)
    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("router")]
    assert len(routers) == len(found.layers) == 2

    def passes(recipe: str, at: int) -> list[np.ndarray]:
        seen, _ = logits_of(model, recipe, at, routers, lambda out: out[0] if isinstance(out, tuple) else out)
        return [each.reshape(*batches()[at][1].shape, 8) for each in seen]

    check(found, [(passes(ROLLOUT, at), passes(TRAINING, at)) for at in range(2)], 3, SCALES[family])
    assert any(any(layer.flips) for layer in found.layers)


def test_planted_flips():
    a = np.array([[[0, 1, 2], [0, 1, 2], [0, 1, 2], [5, 4, 3]]])
    b = np.array([[[0, 1, 2], [2, 1, 0], [0, 1, 3], [0, 1, 2]]])
    assert definitions.flips(a, b).tolist() == [[False, False, True, True]]
    assert definitions.recall(a, b).tolist() == [[1.0, 1.0, pytest.approx(2 / 3), 0.0]]
    assert definitions.reorders(a, b).tolist() == [[False, True, False, False]]
    training, rollout = (RouterChoices(2, "router", 8, x[0, :3], np.array([0.4, 0.3, 0.1])) for x in (a, b))
    layer = definitions.layer_of([(training, rollout)])
    assert (layer.flips, layer.reorders) == ((pytest.approx(1 / 3),), (pytest.approx(1 / 3),))
    assert layer.recalls == (pytest.approx(8 / 9),) and (layer.margin, layer.flipped_margin) == (0.3, 0.1)


def test_the_command_prints_and_keeps_the_routing(command, tmp_path: Path, capsys):
    options = ("deepseek2_lite", "--layers", "2", "--sequence-length", "16", "--backend", "torch")
    assert command("parity", "--rollout", "linear_mxfp4", *options, "--sequences", "2", "--by", "layer") == 0
    out = capsys.readouterr().out
    table = out.partition("Routing: ")[2].splitlines()
    assert table[2].startswith("layer2 router") and "2 of 16" in table[2] and table[3].startswith("any layer")
    assert "Route replay" in out and "Tokens whose experts differ in at least one layer" in " ".join(out.split())
    (run,), _ = list_runs(tmp_path / "runs")
    kept = read_parity(run.directory)
    (layer,) = kept.routing.layers
    assert f" {float(100 * np.mean(layer.flips)):.3g} " in table[2] and kept.routing.any_flip == layer.flips
    assert len(kept.routing.changes) == len(kept.gaps[0].changes) == 2


def test_a_router_that_does_not_use_topk_is_named():
    """The largest of all by argmax, as in a switch transformer."""
    model = build()

    def route(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits.amax(-1, keepdim=True), logits.argmax(-1, keepdim=True), logits.new_zeros(())

    next(each for each in model.modules() if isinstance(each, MixtureOfExperts)).route = route
    found = found_in(model)
    assert [layer.name for layer in found.layers] == ["layer3 router"] and found.left_out == ("layer2.router",)
