"""Formats of a KV cache: against NumPy and ml_dtypes, torch's hooks, and a cache of transformers that holds the rounded
values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.experiment.evaluator import evaluator_of
from binade.collector.experiment.treatments import Treatment
from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.data.run.experiment import NONE, EffectGroup
from tests.collector.experiment.policies import gaps, treatment
from tests.collector.experiment.test_effects import evaluate
from tests.collector.instrumented import rows
from tests.collector.small_model import batch, build
from tests.quant import oracles

Round = Callable[[Tensor], Tensor]


def fp8(x: np.ndarray, axes: tuple[int, ...] | None = None) -> np.ndarray:
    """E4M3 of ml_dtypes with a scale 448 / absmax over these axes."""
    scale = np.float32(448) / np.abs(x).max(axes, keepdims=True)
    return (np.clip(x * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale).astype(np.float32)


SPECS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp8_e4m3": fp8,
    "fp8_e4m3(block=row)": lambda x: fp8(x, (-1,)),
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "nvfp4": oracles.nvfp4,
    "nvfp4(scale=4over6)": oracles.four_over_six,
}


def in_numpy(function: Callable[[np.ndarray], np.ndarray]) -> Round:
    """In float32; the result in the dtype of the tensor, which is bfloat16 in our own models."""
    return lambda x: torch.from_numpy(np.ascontiguousarray(function(x.detach().float().numpy()))).to(x.dtype)


def by(spec: str) -> Round:
    return in_numpy(SPECS[spec])


per_head = in_numpy(lambda x: fp8(x, (0, 2, 3)))


def recipe(cache: str, more: str = "") -> Recipe:
    return from_toml(f"{more}\n[kv_cache]\n{cache}", "mine")


def logits_of(model: nn.Module, cache: str, more: str = "") -> Tensor:
    model.eval()
    with torch.no_grad(), instrument(model, recipe(cache, more), backend="torch"):
        return evaluate(model, batch())[0]


def rounding(model: nn.Module, key: Round, value: Round) -> Tensor:
    """The logits with keys and values rounded as they enter the attention core, by torch's own hooks."""
    cores = [each for each in model.modules() if isinstance(each, CoreAttention)]
    handles = [each.register_forward_pre_hook(lambda _, x: (x[0], key(x[1]), value(x[2]))) for each in cores]
    model.eval()
    with torch.no_grad():
        logits = evaluate(model, batch())[0]
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("spec", SPECS)
def test_keys_and_values_are_those_of_an_independent_implementation(spec: str):
    model = build(2)
    plain = rounding(model, lambda x: x, lambda x: x)
    for cache, key, value in (
        (f'key = "{spec}"', by(spec), lambda x: x),
        (f'value = "{spec}"', lambda x: x, by(spec)),
        (f'key = "{spec}"\nvalue = "fp8_e4m3"', by(spec), by("fp8_e4m3")),
    ):
        found, expected = logits_of(model, cache), rounding(model, key, value)
        assert torch.equal(found, expected)
        assert spec == "bf16" or not torch.equal(found, plain)  # our own models have keys and values in bfloat16


def test_a_scale_for_each_head_and_products_that_round_too():
    model = build(2)
    assert torch.equal(
        logits_of(model, 'key = "fp8_e4m3"\nvalue = "fp8_e4m3"\nscale_of = "head"'), rounding(model, per_head, per_head)
    )
    assert not torch.equal(per_head(torch.randn(2, 3, 4, 5)), by("fp8_e4m3")(torch.randn(2, 3, 4, 5)))
    both = logits_of(model, 'key = "fp8_e4m3"\nvalue = "nvfp4"', '[qk]\nforward = "mxfp8"\n[pv]\nsoftmax = "flash"')
    more = from_toml('[qk]\nforward = "mxfp8"\n[pv]\nsoftmax = "flash"', "mine")
    with instrument(model, more, backend="torch"):
        assert torch.equal(both, rounding(model, by("fp8_e4m3"), by("nvfp4")))


def test_the_latent_is_rounded_and_the_rotated_key_is_not():
    model = GPTModel(replace(MODELS["deepseek2_lite"]["tiny"], layers=2))
    model.initialize(0)
    found = logits_of(model, 'latent = "fp8_e4m3(block=1x128)"')
    handles = []
    for each in model.modules():
        if (up := getattr(each, "linear_kv_up", None)) is not None:
            handles.append(up.register_forward_pre_hook(lambda _, x: (in_numpy(oracles.fp8_blocks)(x[0]),)))
    assert len(handles) == 2
    with torch.no_grad():
        assert torch.equal(found, evaluate(model, batch())[0])


class RoundedCache(DynamicCache):
    """A cache of transformers that rounds what is written to it."""

    def __init__(self, key: Round, value: Round) -> None:
        super().__init__()
        self.key, self.value = key, value

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(self.key(key_states), self.value(value_states), layer_idx, *args, **kwargs)


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=2, attn_implementation=attention, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("cache", "round_"),
    [
        *((f'key = "{spec}"\nvalue = "{spec}"', by(spec)) for spec in SPECS),
        ('key = "fp8_e4m3"\nvalue = "fp8_e4m3"\nscale_of = "head"', per_head),
    ],
)
@torch.no_grad()
def test_transformers_with_a_cache_of_rounded_values_has_the_same_logits(attention: str, cache: str, round_: Round):
    model, tokens = llama(attention), batch()[0]
    expected = model(tokens, past_key_values=RoundedCache(round_, round_)).logits
    with instrument(model, recipe(cache), backend="torch"):
        found = model(tokens).logits
    assert torch.equal(found, expected) and not torch.equal(found, model(tokens).logits)


@torch.no_grad()
def test_transformers_latent():
    torch.manual_seed(0)
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**ranks, **heads, **sizes)).eval()
    with instrument(model, recipe('latent = "fp8_e4m3(block=row)"'), backend="torch"):
        found = model(batch()[0]).logits
    for name, module in model.named_modules():
        if name.endswith("kv_b_proj"):
            module.register_forward_pre_hook(lambda _, x: (by("fp8_e4m3(block=row)")(x[0]),))
    assert torch.equal(found, model(batch()[0]).logits)


def test_passes_that_train_are_as_without_a_cache():
    tokens, labels = batch()

    def gradients(text: str) -> list[Tensor]:
        model = build(2).train()
        with instrument(model, from_toml(text, "mine"), backend="torch"):
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        return [p.grad for p in model.parameters()]

    for x, y in zip(gradients("[kv_cache]\nkey = 'nvfp4'\nvalue = 'nvfp4'"), gradients(""), strict=True):
        assert torch.equal(x, y)


def test_gradients_pass_through_in_an_evaluation():
    model = build(1).eval()
    model.requires_grad_(True)
    with instrument(model, recipe("key = 'nvfp4'\nvalue = 'nvfp4'"), backend="torch"):
        evaluate(model, batch())[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", ["fp8_e4m3", "nvfp4", "nvfp4(hadamard=16)"])
def test_rows_have_the_spec_and_its_error(tmp_path, spec: str):
    model = build(1).eval()
    with Recorder(tmp_path, scores=("mxfp8",), evaluation=True) as recorder:
        cache = recipe(f"key = '{spec}'\nvalue = '{spec}'")
        with torch.no_grad(), instrument(model, cache, recorder, backend="torch"):
            evaluate(model, batch())
    found = rows(tmp_path, operation="evaluation")
    for name in ("key", "value"):
        (row,) = found[found["tensor_name"] == name].to_dict("records")
        assert row["quant_type"] == spec and row["format"] == spec
        x = row["tensor"]
        if spec in SPECS:
            e = by(spec)(x).double() - x.double()
            assert row["sqnr_db"] == pytest.approx(float(10 * np.log10(x.double().square().sum() / e.square().sum())))
    assert set(found[~found["tensor_name"].isin(["key", "value"])]["quant_type"]) == {"bf16"}


def test_measured_and_compared_by_layer():
    """Keys and values of a layer alone, against passes with the rest kept out by name."""
    model, given = build(2), batch()
    cache = recipe("key = 'nvfp4'\nvalue = 'fp8_e4m3'")
    layer2 = recipe("key = 'nvfp4'", "[keep]\nlayers = '1'")
    with evaluator_of(model, evaluate, backend="torch") as measured:
        exact = measured.begin(Treatment(NONE), given, 0)
        both, single = (
            measured.evaluate(treatment(measured, cache, group))
            for group in (EffectGroup(), EffectGroup("qk", 2, "core"))
        )
        found = gaps(measured, [given], cache, parse_recipe("bf16"), by=("part",))
    for losses, used in ((both, cache), (single, layer2)):
        model.eval()
        with torch.no_grad(), instrument(model, used, backend="torch"):
            logits = evaluate(model, given)[0].float()
        expected = [float(F.cross_entropy(x, label)) for x, label in zip(logits, given[1], strict=True)]
        assert list(losses.losses) == expected != list(exact.losses)
    assert {gap.measured.name for gap in found[1:]} == {"qk, key", "pv, value"}


def test_text_and_schedule():
    made = recipe(
        "key = 'fp8_e4m3'\nvalue = 'nvfp4'\nscale_of = 'layer'", "[[schedule]]\nfrom = 3\nlinear.forward = 'mxfp8'"
    )
    again = from_toml(to_toml(made), "mine")
    assert again == made and made.quantized and made.schedule[0][1].kv_cache == made.kv_cache
    assert recipe("key = 'fp8_e4m3'").quantized and not recipe("key = 'fp8_e4m3'").quantizes
    assert made.tables() == {"kv_cache": {"key": "fp8_e4m3", "value": "nvfp4"}}
    assert "kv_cache.key                  last axis    fp8_e4m3" in made.lines()
    assert recipe("key = 'fp8_e4m3'\nscale_of = 'head'").tables()["kv_cache"]["scale_of"] == "head"


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("keys = 'nvfp4'", "unknown key 'keys' in .kv_cache.: expected one of key, value, latent, scale_of"),
        ("key = 'nvfp4'\nscale_of = 'token'", "kv_cache.scale_of = 'token': expected layer or head"),
        ("key = 'nvfp4'\nscale_of = 'head'", "kv_cache.key: nvfp4 has scales of blocks"),
        ("value = 'nvfp4(rounding=stochastic)'", "kv_cache.value: .* a cache is written once"),
        ("value = 'fp8_e4m3(history=4)'", "kv_cache.value .* leave it out"),
    ],
)
def test_wrong_tables_are_refused(cache: str, message: str):
    with pytest.raises(RecipeError, match=message):
        recipe(cache)


def test_a_latent_needs_a_model_that_has_one():
    with pytest.raises(InstrumentError, match=r"no layer of the model is kv_up or kv_b_proj: write key and value"):
        with instrument(build(1), recipe("latent = 'nvfp4'")):
            pass
