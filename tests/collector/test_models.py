"""The models against transformers on the same weights, their published sizes, and what capture sees of each.

Where transformers' DeepseekV2ForCausalLM (5.23.0) deviates from the published modeling_deepseek.py of DeepSeek-V2-Lite:

* It has no load-balancing loss. The published model was trained with one (aux_loss_alpha 0.001, seq_aux), and ours has
  it. What is compared with transformers is the gradient of the cross entropy alone; the loss has a test of its own
  against its definition.
* It leaves the rotated part of a head as interleaved pairs. The published code sorts the pairs into halves first, as
  ours does: the same permutation of query and key, so that scores, logits and gradients are equal, and the query and
  key that we record have the published order of columns.
* It adds the experts' outputs in the activations' dtype, one expert after the other. The published code and ours add
  them in float32 and round once. In float32, as here, that is the same up to rounding.
* It never applies norm_topk_prob. The published value is false; a checkpoint with true is refused.

Its YaRN has the published mscale² in the softmax scale and mscale / mscale_all_dim on cos and sin.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.rows import Draft
from binade.collector.capture.step import others
from binade.collector.capture.survey import find
from binade.collector.errors import ConfigError
from binade.collector.models.deepseek import DeepseekShape, balance_loss
from binade.collector.models.gpt2 import GPT2Shape
from binade.collector.models.llama import LlamaShape
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.models.rope_scaling import Llama3Scaling, YarnScaling
from binade.collector.models.shape import RotaryShape, Shape
from binade.collector.models.site import Site
from binade.collector.pretrained.checkpoint import join, open_checkpoint
from binade.collector.pretrained.directory import read_shape
from binade.collector.pretrained.transformers_model import TransformersShape
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import TEN_RECIPES, Recipe
from binade.collector.training.loop import _backward
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Identity
from binade.data.run.tensor_kinds import Other, tensor_names
from binade.data.words.filter import Filter
from binade.quant.gemm import Observed

pytestmark = pytest.mark.slow
PUBLISHED_WEIGHTS = {
    "llama31-8b": 8_030_261_248, "llama32-1b": 1_235_814_400, "deepseek2_lite": 15_706_484_224,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
}  # fmt: skip
REFERENCES = {LlamaShape: LlamaForCausalLM, DeepseekShape: DeepseekV2ForCausalLM, GPT2Shape: GPT2LMHeadModel}

# The two sum the same float32 products in another order: each result is off by a few roundings (2^-24 = 6e-8), which
# the layers pass on. Measured at most 1.7e-6 of a gradient's norm, 6.6e-7 of the logits'; a setting that is wrong moves
# the logits by more than 1e-3 (test_a_wrong_setting_shows).
TOLERANCE = 5e-6

LLAMA_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
# config.json as published, of meta-llama/Llama-3.1-8B, meta-llama/Llama-3.2-1B, deepseek-ai/DeepSeek-V2-Lite and
# openai-community/gpt2.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama31-8b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {**LLAMA_ROPE, "factor": 8.0, "original_max_position_embeddings": 8192},
        "vocab_size": 128256,
    },
    "llama32-1b": {
        "model_type": "llama", "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {**LLAMA_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192},
        "vocab_size": 128256,
    },
    "deepseek2_lite": {
        "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
        "rope_scaling": {**YARN, "factor": 40, "original_max_position_embeddings": 4096}, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "gpt2": {**GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt2-medium": {**GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24},
    "gpt2-large": {**GPT2, "n_embd": 1280, "n_head": 20, "n_layer": 36},
    "gpt2-xl": {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48},
}  # fmt: skip


def theirs(shape: Shape) -> PreTrainedConfig:
    """transformers' configuration of a shape."""
    if isinstance(shape, GPT2Shape):
        return GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_inner=shape.ffn,
            n_head=shape.heads,
            n_positions=shape.max_sequence,
            vocab_size=shape.vocab,
            layer_norm_epsilon=shape.norm_eps,
            tie_word_embeddings=shape.tied_embedding,
            attn_implementation="eager",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    common = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": getattr(shape, "kv_heads", shape.heads),
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_sequence,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embedding,
        "rope_parameters": rope_parameters(shape),
        "attn_implementation": "eager",
    }
    if isinstance(shape, LlamaShape):
        return LlamaConfig(**common, head_dim=shape.head_dim)
    return DeepseekV2Config(
        **common,
        qk_nope_head_dim=shape.qk_nope,
        qk_rope_head_dim=shape.qk_rope,
        v_head_dim=shape.v_head,
        kv_lora_rank=shape.kv_lora_rank,
        q_lora_rank=shape.q_lora_rank,
        first_k_dense_replace=shape.dense_layers,
        n_routed_experts=shape.routed_experts,
        num_experts_per_tok=shape.experts_per_token,
        n_shared_experts=shape.shared_experts,
        moe_intermediate_size=shape.expert_ffn,
        routed_scaling_factor=shape.routed_scale,
        experts_implementation="eager",
    )


def rope_parameters(shape: Shape) -> dict[str, Any]:
    rope, scaling = {"rope_theta": shape.rope_theta, "rope_type": "default"}, shape.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        rope |= {"rope_type": "llama3"} | asdict(scaling)
    elif isinstance(scaling, YarnScaling):
        rope |= {"rope_type": "yarn"} | asdict(scaling)
    return rope


def random_reference(shape: Shape, seed: int = 0) -> nn.Module:
    """transformers' model with weights that keep activations near 1, norms included: nothing is left at its default."""
    model = REFERENCES[type(shape)](theirs(shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                low, high = (-0.5, 0.5) if name.endswith(".bias") else (0.5, 1.5)
                parameter.uniform_(low, high, generator=generator)
            else:
                inputs = parameter.shape[0 if isinstance(shape, GPT2Shape) else -1]
                spread = 1.0 if "embed_tokens" in name or ".wpe" in name else inputs**-0.5
                parameter.normal_(0.0, spread, generator=generator)
    return model.train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of transformers' model, by the names of a saved checkpoint, where experts are apart."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                prefix = f"{name.removesuffix('.gate_up_proj')}.{expert}"
                found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"] = grad.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                found[f"{name.removesuffix('.down_proj')}.{expert}.down_proj.weight"] = grad
        else:
            found[name] = parameter.grad
    return found


def off(ours: Tensor, reference: Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖"""
    ours, reference = ours.detach().double(), reference.detach().double()
    return float((ours - reference).norm() / reference.norm())


def tokens_of(shape: Shape, batch: int = 2, length: int = 48) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, shape.vocab, (batch, length + 1), generator=torch.Generator().manual_seed(7))
    return drawn[:, :-1], drawn[:, 1:]


TINY = {name: sizes["tiny"] for name, sizes in MODELS.items() if not name.startswith("gpt2-")}  # as small as gpt2's
# Scaling that bites within the 48 tokens compared, where the published one sets in after thousands.
SHORT_LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 16)
SHORT_YARN = YarnScaling(40.0, 4.0, 1.0, mscale=1.0, mscale_all_dim=0.707, original_max_position_embeddings=64)
COMPARED: dict[str, Shape] = {
    **TINY,
    "gpt2, untied": replace(TINY["gpt2"], tied_embedding=False, ffn=320, heads=2),
    "llama, scaled": replace(TINY["llama31-8b"], rope_scaling=SHORT_LLAMA3),
    "llama, unscaled": replace(TINY["llama32-1b"], rope_scaling=None),
    "deepseek, scaled": replace(TINY["deepseek2_lite"], rope_scaling=SHORT_YARN),
    "deepseek, unscaled": replace(TINY["deepseek2_lite"], rope_scaling=None, rope_theta=500.0),
    "deepseek, q_lora": replace(TINY["deepseek2_lite"], q_lora_rank=96, layers=3, dense_layers=2),
    "deepseek, routing": replace(
        TINY["deepseek2_lite"], layers=3, routed_experts=32, experts_per_token=6, shared_experts=2, routed_scale=2.5
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each tiny model, by save_pretrained."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, shape in TINY.items():
        random_reference(shape).save_pretrained(root / name)
    return {name: root / name for name in TINY}


def load(directory: Path, shape: Shape) -> GPTModel:
    model = GPTModel(shape, compute_dtype=torch.float32)
    open_checkpoint(directory, shape).load_into(model)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_full_models_have_the_published_number_of_weights(name):
    shape = MODELS[name]["full"]
    with torch.device("meta"):
        ours = sum(p.numel() for p in GPTModel(shape).parameters())
        reference = REFERENCES[type(shape)](theirs(shape))
    assert ours == shape.parameters == sum(p.numel() for p in reference.parameters()) == PUBLISHED_WEIGHTS[name]


@pytest.mark.parametrize("name", COMPARED)
def test_counted_weights_are_those_of_the_model(name):
    with torch.device("meta"):
        model = GPTModel(COMPARED[name])
    assert COMPARED[name].parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", COMPARED)
def test_other_parts_are_those_that_capture_finds(name):
    shape = COMPARED[name]
    with torch.device("meta"):
        model = GPTModel(shape)
    parts = others(model, find(model), tensor_names())
    assert Counter((product, layer.site) for product, layer in parts) == Counter(
        (spec.layer_type, spec.site) for spec in shape.others()
    )
    sizes = {spec.site: spec.width * spec.rows for spec in shape.others() if spec.layer_type == Other.PARAMETER}
    for product, layer in parts:
        if product is Other.PARAMETER:
            assert model.get_parameter(layer.name).numel() == sizes[layer.site]


@pytest.mark.parametrize("name", MODELS)
def test_full_models_are_the_published_configurations(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert read_shape(tmp_path) == MODELS[name]["full"]


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_keep_the_architecture(name):
    tiny, full = MODELS[name]["tiny"], MODELS[name]["full"]
    assert type(tiny) is type(full)
    for same in ("rope_scaling", "rope_theta", "norm_eps", "tied_embedding", "max_sequence"):
        assert getattr(tiny, same, None) == getattr(full, same, None)
    if isinstance(full, LlamaShape):
        assert tiny.heads / tiny.kv_heads == full.heads / full.kv_heads
    assert tiny.ffn / tiny.hidden == pytest.approx(full.ffn / full.hidden, rel=0.01)
    if isinstance(full, DeepseekShape):
        for shape in (tiny, full):
            assert shape.qk_nope == shape.v_head == 2 * shape.qk_rope == shape.hidden / shape.heads
            assert shape.kv_lora_rank == shape.hidden / 4
            assert (shape.q_lora_rank, shape.dense_layers) == (None, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMPARED)
def test_logits_and_every_gradient_agree_with_transformers(name, tmp_path):
    shape = COMPARED[name]
    reference = random_reference(shape)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, shape)
    tokens, labels = tokens_of(shape)
    wanted = reference(tokens).logits
    F.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    assert off(logits, wanted) < TOLERANCE
    read = gradients(reference)
    weights = {weight.name: weight for weight in shape.weights()}
    compared = {ours: off(p.grad, join(weights[ours], read)) for ours, p in model.named_parameters()}
    assert {ours: error for ours, error in compared.items() if not error < TOLERANCE} == {}
    assert sum(len(weight.tensors) for weight in shape.weights()) == len(read)


def test_a_gpt2_in_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path):
    shape = TINY["gpt2"]
    reference = random_reference(shape)
    reference.save_pretrained(tmp_path)
    model = GPTModel(shape)
    open_checkpoint(tmp_path, shape).load_into(model)
    tokens, _ = tokens_of(shape)
    with torch.no_grad():
        wanted, ours = reference(tokens).logits, model(tokens)
        assert off(ours, wanted) < 1.5 * off(reference.to(torch.bfloat16)(tokens).logits, wanted)


def test_a_gpt2_as_published_loads(tmp_path):
    """Its names lack those of the module around the layers, and masks are saved with it."""
    shape = TINY["gpt2"]
    reference = random_reference(shape)
    reference.save_pretrained(tmp_path)
    whole = load(tmp_path, shape).state_dict()
    path = tmp_path / "model.safetensors"
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 1024, 1024) for layer in range(shape.layers)}
    save_file({k.removeprefix("transformer."): v for k, v in load_file(path).items()} | masks, path)
    read = load(tmp_path, shape).state_dict()
    assert whole.keys() == read.keys() and all(torch.equal(whole[name], weight) for name, weight in read.items())


@pytest.mark.parametrize("name", [name for name, shape in TINY.items() if isinstance(shape, RotaryShape)])
def test_rotary_angles_of_the_full_models_agree_with_transformers(name):
    shape, length = MODELS[name]["full"], 8192
    cos, sin = (t[:, 0, 0] for t in shape.build_positions()(torch.empty(length))[1])
    at = torch.arange(length)[None]
    if isinstance(shape, LlamaShape):
        wanted = LlamaRotaryEmbedding(theirs(shape))(cos, at)
    else:
        turned = DeepseekV2RotaryEmbedding(theirs(shape))(cos, at)
        wanted = turned.real.repeat(1, 1, 2), turned.imag.repeat(1, 1, 2)
    # An angle is position · frequency: two roundings of the frequency, each 2^-24 of it, and the product's own.
    bound = 3 * length * 2**-24
    assert (cos - wanted[0][0]).abs().max() < bound
    assert (sin - wanted[1][0]).abs().max() < bound


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama, scaled", {"rope_scaling": None}),
        ("llama, scaled", {"rope_scaling": replace(SHORT_LLAMA3, high_freq_factor=2.0)}),
        ("deepseek, scaled", {"rope_scaling": replace(SHORT_YARN, mscale=0.707)}),
        ("deepseek, scaled", {"rope_scaling": replace(SHORT_YARN, mscale_all_dim=1.0)}),
        ("deepseek, scaled", {"rope_scaling": replace(SHORT_YARN, beta_slow=0.25)}),
        ("deepseek, routing", {"experts_per_token": 5}),
        ("deepseek, routing", {"routed_scale": 1.0}),
        ("gpt2", {"norm_eps": 1e-2}),
        ("gpt2", {"heads": 8}),
    ],
)
def test_a_wrong_setting_shows(name, wrong, tmp_path):
    """The comparison would notice: a setting off by one choice moves the logits far beyond the tolerance."""
    shape = COMPARED[name]
    reference = random_reference(shape)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, shape)
    mistaken = GPTModel(replace(shape, **wrong), compute_dtype=torch.float32)
    mistaken.load_state_dict(model.state_dict())
    tokens, _ = tokens_of(shape)
    with torch.no_grad():
        assert off(mistaken(tokens), reference(tokens).logits) > 200 * TOLERANCE


def test_routing_has_no_near_ties():
    """Rounding cannot have changed which experts were compared above."""
    for shape in (s for s in COMPARED.values() if isinstance(s, DeepseekShape)):
        reference = random_reference(shape)
        with torch.no_grad():
            routed = reference(tokens_of(shape)[0], output_router_logits=True).router_logits
        for logits in routed:
            ordered = logits.softmax(-1).sort(-1, descending=True).values
            gap = ordered[:, shape.experts_per_token - 1] - ordered[:, shape.experts_per_token]
            assert gap.min() > 1e-7


def published_balance_loss(logits: Tensor, top: int, alpha: float) -> Tensor:
    """DeepSeek's auxiliary loss by its definition, sequence by sequence and expert by expert. logits [s, b, experts]"""
    length, batch, experts = logits.shape
    total = torch.zeros(())
    for sequence in logits.softmax(-1).unbind(1):
        chosen = Counter(sequence.topk(top, -1).indices.flatten().tolist())
        for expert in range(experts):
            share = chosen[expert] / (length * top / experts)
            total = total + share * sequence[:, expert].sum() / length
    return alpha * total / batch


def test_the_balance_loss_is_trained_on():
    shape = replace(TINY["deepseek2_lite"], layers=3, balance_alpha=0.5)
    model = GPTModel(shape, compute_dtype=torch.float32)
    model.initialize(0, std=0.2)
    seen = []
    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    hooks = [router.register_forward_hook(lambda *call: seen.append(call[2])) for router in routers]
    tokens, labels = tokens_of(shape)
    logits, balance = model.logits_and_balance(tokens)
    assert len(seen) == 2
    wanted = sum(published_balance_loss(x, shape.experts_per_token, shape.balance_alpha) for x in seen)
    assert balance.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert wanted > 2 * shape.balance_alpha, "routing is uneven"
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (entropy + wanted).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    assert _backward(model, tokens, labels, 1) == pytest.approx(entropy.item())
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert off(parameter.grad, grad) < TOLERANCE


def test_an_even_choice_has_a_balance_loss_of_one():
    probs = torch.full((8, 2, 4), 0.25)
    chosen = torch.arange(4).repeat(4).view(8, 1, 2).expand(8, 2, 2)
    assert balance_loss(probs, chosen) == 1.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_router_multiplies_in_float32(dtype, tmp_path):
    model = GPTModel(TINY["deepseek2_lite"], compute_dtype=dtype)
    model.initialize(0)
    rows = recorded(model, "mxfp8", tmp_path)
    assert set(rows[rows.module == "router"].dtype) == {"float32"}
    assert set(rows[rows.module == "fc1"].dtype) == {str(dtype).removeprefix("torch.")}


LINEAR = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
CORE = {
    "query", "key", "value", "attention_scores", "attention_probs", "output",
    "grad_scores", "grad_query", "grad_key", "grad_value", "grad_output",
}  # fmt: skip


def recorded(model: GPTModel, recipe: Recipe | str, root: Path) -> pd.DataFrame:
    """What is recorded of one step on 2 x 16 tokens, a row a tensor, without statistics, which have their own tests."""
    tokens, labels = tokens_of(model.shape, length=16)
    rows = []

    def note(seen: Observed, site: Site, identity: Callable[[], Identity], *words: Any, **options: Any) -> Draft:
        shape = tuple(seen.shape or seen.tensor.shape)
        finite = bool(seen.tensor.isfinite().all())
        dtype = str(seen.tensor.dtype).removeprefix("torch.")
        noted = {"shape": shape, "dtype": dtype, "format": seen.spec and str(seen.spec), "finite": finite}
        rows.append(asdict(identity()) | noted)
        return measure(seen, site, identity, *words, **options)

    with Recorder(root, scores=(), measures=()) as recorder, instrument(model, recipe, recorder, backend="torch"):
        measure, recorder.observing.measurer.measure = recorder.observing.measurer.measure, note
        _backward(model, tokens, labels, 1)
    return pd.DataFrame(rows)


ROUTED = ("fc1", "fc2")


def expected_sites(shape: Shape) -> set[tuple[int, str]]:
    found = set()
    for layer in range(1, shape.layers + 1):
        modules = {"core", "proj", "fc1", "fc2"}
        if not isinstance(shape, DeepseekShape):
            modules |= {"qkv"}
        else:
            modules |= {"kv_down", "kv_up"} | ({"q"} if shape.q_lora_rank is None else {"q_down", "q_up"})
            if layer > shape.dense_layers:
                modules |= {"router", "shared_fc1", "shared_fc2"}
        found |= {(layer, module) for module in modules}
    return found


def sites(rows: pd.DataFrame) -> dict[tuple[int, str, int | None], set[str]]:
    """Tensor names by layer, module and expert, each recorded once."""
    keys = ["layer_index", "module", "expert", "tensor_name"]
    assert not rows.duplicated(keys).any()
    found: dict[tuple[int, str, int | None], set[str]] = {}
    for layer, module, expert, name in rows[keys].itertuples(index=False):
        found.setdefault((layer, module, None if pd.isna(expert) else int(expert)), set()).add(name)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", [*TEN_RECIPES, "nvfp4"])
@pytest.mark.parametrize("name", TINY)
def test_every_recipe_records_every_tensor_of_every_model(name, recipe, tmp_path):
    shape = TINY[name]
    model = GPTModel(shape)
    model.initialize(0)
    rows = recorded(model, recipe, tmp_path)
    assert rows.finite.all() and all(0 not in shape for shape in rows["shape"])
    found = sites(rows)
    apart = {site: names for site, names in found.items() if site[2] is not None}
    whole = {site[:2]: names for site, names in found.items() if site[2] is None}
    mixed = isinstance(shape, DeepseekShape)
    routed_layers = range(shape.dense_layers + 1, shape.layers + 1) if mixed else ()
    assert whole == {
        (layer, module): CORE if module == "core" else LINEAR
        for layer, module in expected_sites(shape)
        if module not in ROUTED or layer not in routed_layers
    }
    assert apart.keys() == {
        (layer, module, expert)
        for layer in routed_layers
        for module in ROUTED
        for expert in range(shape.routed_experts if mixed else 0)
    }
    for names in apart.values():  # an expert without a token has nothing but its weight
        assert names in (LINEAR, {"weight", "grad_weight"})
    for layer in routed_layers:
        inputs = rows[(rows.layer_index == layer) & rows.expert.notna() & (rows.tensor_name == "input")]
        for _, of_module in inputs.groupby("module"):
            assert sum(size[0] for size in of_module["shape"]) == 2 * 16 * shape.experts_per_token
    parsed = parse_recipe(recipe)
    linear = rows[(rows.layer_type == "linear") & (rows.module != "router")]
    assert set(linear.quant_type) == {parsed.linear.quant_type}
    operands = linear[linear.tensor_name.isin(["input", "weight"])]
    assert set(operands.format.dropna()) == {str(spec) for spec in [parsed.linear.formats.forward_a] if spec}
    assert set(rows[rows.tensor_name == "query"].quant_type) == {parsed.qk.quant_type}
    assert set(rows[rows.module == "router"].quant_type) <= {"bf16"}
    assert rows[rows.module == "router"].format.isna().all()


def test_the_catalog_knows_the_expert(tmp_path):
    model = GPTModel(TINY["deepseek2_lite"])
    model.initialize(0)
    tokens, labels = tokens_of(model.shape, length=16)
    with Recorder(tmp_path, tensors=("input",)) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        _backward(model, tokens, labels, 1)
    with closing(Catalog.open(tmp_path)) as catalog:
        third = catalog.tensors(Filter(expert=(3,)))
        assert sites(third) == {(2, "fc1", 3): {"input"}, (2, "fc2", 3): {"input"}}
        assert all("_group003_" in path for path in third.path)
        shared = catalog.tensors(Filter(module=("shared_fc1", "router")))
        assert sites(shared) == {(2, "shared_fc1", None): {"input"}, (2, "router", None): {"input"}}


def test_the_router_is_quantized_when_named(tmp_path):
    model = GPTModel(TINY["deepseek2_lite"])
    model.initialize(0)
    rows = recorded(model, parse_recipe("bf16", router="mxfp8"), tmp_path)
    assert set(rows[rows.quant_type == "mxfp8"].module) == {"router"}
    assert set(rows[rows.tensor_name == "grad_output"].format.dropna()) == {"mxfp8_e5m2"}


def test_attention_has_two_head_sizes(tmp_path):
    shape = TINY["deepseek2_lite"]
    model = GPTModel(shape)
    model.initialize(0)
    rows = recorded(model, "mxfp8", tmp_path)
    core = rows[(rows.module == "core") & (rows.layer_index == 1)].set_index("tensor_name")["shape"]
    for name in ("query", "key", "grad_query", "grad_key"):
        assert list(core[name]) == [2, shape.heads, 16, shape.qk_nope + shape.qk_rope]
    for name in ("value", "output", "grad_value", "grad_output"):
        assert list(core[name]) == [2, shape.heads, 16, shape.v_head]


def test_a_query_latent_has_modules_of_its_own(tmp_path):
    shape = replace(TINY["deepseek2_lite"], layers=1, q_lora_rank=96)
    model = GPTModel(shape)
    model.initialize(0)
    found = sites(recorded(model, "bf16", tmp_path))
    assert {site[:2] for site in found} == expected_sites(shape)
    assert found[1, "q_down", None] == found[1, "q_up", None] == LINEAR


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_experts_without_a_token_get_zero_gradients(recipe, tmp_path):
    """A router of zeros finds all experts equal, and every token goes to the same two."""
    shape = TINY["deepseek2_lite"]
    model = GPTModel(shape)
    model.initialize(0)
    mixture = model.layers[1].mlp
    with torch.no_grad():
        mixture.router.weight.zero_()
    found = sites(recorded(model, recipe, tmp_path))
    busy = {expert for (_, _, expert), names in found.items() if expert is not None and names == LINEAR}
    assert len(busy) == shape.experts_per_token
    for index, expert in enumerate(mixture.experts):
        for linear in (expert.linear_fc1, expert.linear_fc2):
            assert bool(linear.weight.grad.any()) == (index in busy)


@pytest.mark.parametrize("name", TINY)
def test_layers_shorten_a_model_and_its_checkpoint(name, saved):
    shape = replace(TINY[name], layers=1)
    model = GPTModel(shape)
    open_checkpoint(saved[name], shape).load_into(model)
    first = load(saved[name], TINY[name]).state_dict()
    assert all(torch.equal(weight, first[key]) for key, weight in model.state_dict().items())


def test_a_sharded_bfloat16_checkpoint_loads(tmp_path):
    shape = TINY["deepseek2_lite"]
    reference = random_reference(shape).to(torch.bfloat16)
    reference.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    state = load(tmp_path, shape).state_dict()
    assert {weight.dtype for weight in state.values()} == {torch.float32}
    assert torch.equal(state["embedding.weight"], reference.model.embed_tokens.weight.float())
    last = reference.model.layers[-1].mlp.experts
    assert torch.equal(state["layers.1.mlp.experts.15.linear_fc1.weight"], last.gate_up_proj[15].float())


def edit_config(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_weights(directory: Path, *, drop: str = "", **added: Tensor) -> None:
    path = directory / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if name != drop}
    save_file(weights | added, path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def to_pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def index_of(directory: Path, **files: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "is not JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object"),
    "a setting is missing": (lambda d: edit_config(d, hidden_size=None), "is invalid"),
    "layers are a word": (lambda d: edit_config(d, num_hidden_layers="two"), "is invalid"),
    "another width": (
        lambda d: edit_config(d, intermediate_size=512),
        "_proj.weight is .*: expected .*512.* from its dimensions",
    ),
    "more layers than there can be": (
        lambda d: edit_config(d, num_hidden_layers=3_000_000), "num_hidden_layers is 3000000: expected 1 to 1000"
    ),
    "no layers": (lambda d: edit_config(d, num_hidden_layers=0), "num_hidden_layers is 0: expected 1 to 1000"),
    "quantized in an unknown way": (
        lambda d: edit_config(d, quantization_config={"quant_method": "hqq"}), "hqq"
    ),
    **{
        f"weights in {dtype}": (
            lambda d, dtype=dtype: edit_weights(d, **{"model.norm.weight": torch.ones(256).to(dtype)}),
            f"model.norm.weight is {name}, and config.json has no quantization_config: expected F64, F32, F16, BF16",
        )
        for dtype, name in ((torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3"))
    },
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "contains no weights"),
    "pickled weights": (to_pickle, "contains no weights: expected model.safetensors or "),
    "a tensor is missing": (lambda d: edit_weights(d, drop="model.norm.weight"), "lacks the tensor model.norm.weight"),
    "a tensor too many": (lambda d: edit_weights(d, more=torch.ones(2)), "the model does not have: more"),
    "a tensor of another shape": (
        lambda d: edit_weights(d, **{"model.norm.weight": torch.ones(3)}), "model.norm.weight is 3: expected 256"
    ),
    "cut short": (lambda d: truncate(d / "model.safetensors"), "is not a readable safetensors file"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "is not a readable safetensors file"),
    "index without files": (lambda d: index_of(d, a="lost.safetensors"), "lacks lost.safetensors"),
    "index that leads outside": (lambda d: index_of(d, a="../x.safetensors"), "outside its directory"),
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"model_type": "mistral", "sliding_window": 16},
        {"model_type": "qwen2"},
    ],
    ids=str,
)
def test_what_our_layers_have_no_switch_for_is_left_to_transformers(settings, saved, tmp_path):
    directory = shutil.copytree(saved["llama32-1b"], tmp_path / "checkpoint")
    assert isinstance(read_shape(directory), LlamaShape)
    edit_config(directory, **settings)
    assert isinstance(read_shape(directory), TransformersShape)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_checkpoint_that_does_not_fit_is_one_clear_line(what, saved, tmp_path):
    damage, said = DAMAGE[what]
    directory = shutil.copytree(saved["llama32-1b"], tmp_path / "checkpoint")
    damage(directory)
    with pytest.raises(ConfigError, match=said) as caught:
        open_checkpoint(directory, read_shape(directory))
    assert "\n" not in str(caught.value) and str(directory) in str(caught.value)
