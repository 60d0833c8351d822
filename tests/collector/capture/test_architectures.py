"""Small random models of transformers: the rows of docs/instrumented_models.md, and the products of experts."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, __version__

from binade import fake_quantize
from binade.collector import coverage, instrument
from tests.collector.instrumented import Recorder, linear_products, names, rows, same, value

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "instrumented_models.md"
VOCAB, HIDDEN, TOKENS, EXPERTS, TOP = 64, 32, 24, 4, 2
DENSE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE |= {"intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARSE = DENSE | {"num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts_per_tok": TOP}
LATENT = SPARSE | {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT |= {
    "num_hidden_layers": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "v_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 2},
    "falcon": DENSE,
    "gpt_neox": DENSE,
    "mamba": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "context_length": 32},
    "mixtral": SPARSE | {"num_local_experts": EXPERTS, "head_dim": 16},
    "qwen3_moe": SPARSE | {"num_experts": EXPERTS, "head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": SPARSE | {"num_local_experts": EXPERTS, "head_dim": 16},
    "llama4_text": SPARSE
    | {"num_local_experts": EXPERTS, "head_dim": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
}
CORES = {"bloom": ["*.self_attention"]}  # in products of its own
SPARSE_KINDS = list(CONFIGS)[5:]


def build(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]), **options).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # some begin as zeros
                parameter.normal_(std=0.1)
    return model


def results(model: nn.Module) -> list[Tensor]:
    """The loss, and the gradient of every weight."""
    tokens = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def row_of(kind: str, model: nn.Module) -> str:
    """The row of the documentation's table."""
    cores = CORES.get(kind, [])
    found = coverage(model, "linear_mxfp8", cores=cores)
    recorded = dict.fromkeys(row.recorded.partition(".")[2] for row in found if row.recorded)
    expected = ("not a product", "embedding", "LM head, unless head=True")
    left = dict.fromkeys(f"{row.paths.rpartition('.')[2]}: {row.reason}" for row in found if row.reason)
    kept = [text for text in left if text.partition(": ")[2] not in expected]
    named = f", `cores={json.dumps(cores)}`" if cores else ""
    return f"| `{kind}`{named} | {' '.join(sorted(recorded))} | {', '.join(kept)} |"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_architecture(tmp_path, kind):
    model, cores = build(kind), CORES.get(kind, [])
    row = row_of(kind, model)
    assert row in PAGE.read_text().splitlines()
    plain = results(model)
    with Recorder(tmp_path / "bf16", max_bytes=0, measures=()) as recorder:
        with instrument(model := build(kind), "bf16", recorder, cores=cores):
            assert same(results(model), plain)
    recipe = "mxfp8" if " core " in row else "linear_mxfp8"
    with Recorder(tmp_path, measures=()) as recorder:
        with instrument(model := build(kind), recipe, recorder, cores=cores, backend="torch"):
            quantized = results(model)
    assert not same(quantized, plain) and all(torch.isfinite(each).all() for each in quantized)
    found = rows(tmp_path)
    modules = {word.removeprefix("expert*.") for word in row.split(" | ")[1].split()}
    assert {module for _, module in names(found)} == modules
    assert set(found[found.module == "router"]["quant_type"]) <= {"bf16"}
    of_experts = found[found.expert.notna()]
    assert of_experts.empty == (kind not in SPARSE_KINDS)
    for layer, expert in {(row.layer_index, row.expert) for row in of_experts.itertuples()}:
        mlp: Any = model.get_submodule(f"model.layers.{layer - 1}")
        experts = (mlp.mlp if hasattr(mlp, "mlp") else mlp.feed_forward).experts
        for module, weight in (("fc1", experts.gate_up_proj), ("fc2", experts.down_proj)):
            linear_products(found, layer, module, expert=expert)
            turned = getattr(experts, "is_transposed", kind == "llama4_text")
            for name, whole in (("weight", weight), ("grad_weight", weight.grad)):
                recorded = value(found, layer, module, name, expert=expert)
                assert torch.equal(recorded.t() if turned else recorded, whole[int(expert)])
    inputs = of_experts[(of_experts.module == "fc1") & (of_experts.tensor_name == "input")]
    tokens = Counter[int]()
    for row in inputs.itertuples():
        tokens[row.layer_index] += len(row.tensor)
    each = EXPERTS if kind == "llama4_text" else TOP  # which sends each token to all, scaled by 0 for most
    assert set(tokens.values()) <= {TOKENS * each}


def test_the_table_names_the_version():
    assert f"transformers {__version__}" in PAGE.read_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("recipe", ["bf16", "linear_mxfp4"])
def test_experts_are_the_same_in_each_implementation(tmp_path, implementation, recipe):
    """Up to the order of sums; a formula of its own: transformers' loop over experts with rounded operands."""
    model = build("mixtral", experts_implementation=implementation)
    experts: Any = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    chosen = torch.rand(TOKENS, EXPERTS - 1, generator=generator).topk(TOP).indices  # the last gets no token
    weights = torch.rand(TOKENS, TOP, generator=generator)
    with Recorder(tmp_path, measures=()) as recorder, instrument(model, recipe, recorder, backend="torch"):
        found = experts(x, chosen, weights)
        found.sum().backward()

    def rounded(tensor: Tensor) -> Tensor:
        return tensor if recipe == "bf16" else fake_quantize(tensor, "mxfp4", dim=-1, backend="torch")

    expected = torch.zeros_like(x)
    for token in range(TOKENS):
        for choice in range(TOP):
            expert = chosen[token, choice]
            gate, up = (rounded(x[token]) @ rounded(experts.gate_up_proj[expert]).t()).chunk(2)
            hidden = nn.functional.silu(gate) * up
            expected[token] += weights[token, choice] * (rounded(hidden) @ rounded(experts.down_proj[expert]).t())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not experts.down_proj.grad[-1].any() and experts.down_proj.grad[0].any()
    recorded = rows(tmp_path)
    assert set(recorded["expert"]) == {0, 1, 2}
    for expert in range(EXPERTS - 1):
        for module, whole in (("fc1", experts.gate_up_proj), ("fc2", experts.down_proj)):
            of = partial(value, recorded, 1, module, expert=expert)
            assert torch.equal(of("weight"), whole[expert]) and torch.equal(of("grad_weight"), whole.grad[expert])
            assert len(of("input")) == (chosen == expert).sum()
            if recipe == "bf16":
                assert torch.allclose(of("output"), of("input") @ of("weight").t(), atol=1e-6)
                assert torch.allclose(of("grad_input"), of("grad_output") @ of("weight"), atol=1e-6)
