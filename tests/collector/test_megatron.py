"""The models against megatron-core 0.16.1 on the same weights: logits, loss, every gradient, training steps.

Both sides compute in float32 unless a test says otherwise. What differs by design, and is compared as far as it goes:

* Megatron weights an expert's activations before fc2, ours and the published code its outputs: in float32 the same up
  to rounding, in bfloat16 not, so that bfloat16 is compared without experts.
* In bfloat16 Megatron rotates with cos and sin rounded to bfloat16 and rounds each product and sum; ours multiplies in
  float32 and rounds once. Ours rounds scores before and after they are scaled, Megatron's baddbmm only after. All else
  is equal to the bit (test_in_bfloat16_all_but_rotation_and_core_is_equal_to_the_bit).
* Megatron masks future scores with -10000, ours with -inf: both become 0 in the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from megatron.core import package_info
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.gpt.gpt_model import GPTModel as MegatronModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from binade.collector.datasets.loading import open_dataset
from binade.collector.models import attention
from binade.collector.models.attention import CoreAttention
from binade.collector.models.deepseek import DeepseekShape
from binade.collector.models.gpt2 import GPT2Shape
from binade.collector.models.llama import LlamaShape
from binade.collector.models.model import GPTModel
from binade.collector.models.positions import apply_rotary
from binade.collector.models.registry import MODELS
from binade.collector.models.rope_scaling import Llama3Scaling, YarnScaling
from binade.collector.models.shape import Shape
from binade.collector.models.site import Site
from binade.collector.ranks import Ranks
from binade.collector.training.config import RunConfig
from binade.collector.training.loop import _backward, _optimizer, _step, open_stream
from binade.collector.training.plan import plan
from binade.quant import gemm
from tests.collector.megatron_cpu import (
    LatentCore,
    Training,
    adamw,
    build,
    inputs,
    load,
    megatron_on_cpu,
    name_of,
    step,
    tensor_parallel_losses,
)

pytestmark = pytest.mark.slow

# The two sum the same float32 products in another order: each result is off by a few roundings (2^-24 = 6e-8), which
# the layers pass on. Measured at most 1.9e-6 of a gradient's norm, 8.8e-7 of the logits'; a setting that is wrong moves
# the logits by more than 5e-4 (test_a_wrong_setting_shows).
TOLERANCE = 5e-6

ROUNDING = 2.0**-8  # a value rounded to bfloat16, with its 8 bits, is off by this much of itself at most

TINY = {name: sizes["tiny"] for name, sizes in MODELS.items() if not name.startswith("gpt2-")}  # as small as gpt2's
LLAMAS = [name for name, shape in TINY.items() if isinstance(shape, LlamaShape)]
COMPARED: dict[str, Shape] = {
    **TINY,
    "llama, unscaled": replace(TINY["llama32-1b"], rope_scaling=None),
    "deepseek, scaled": replace(TINY["deepseek2_lite"], rope_scaling=YarnScaling(40.0, 4.0, 1.0, 1.0, 0.707, 64)),
    "deepseek, unscaled": replace(TINY["deepseek2_lite"], rope_scaling=None, rope_theta=500.0),
    "deepseek, q_lora": replace(TINY["deepseek2_lite"], q_lora_rank=96, layers=3, dense_layers=2, balance_alpha=0.5),
    "deepseek, routing": replace(
        TINY["deepseek2_lite"], layers=3, routed_experts=32, experts_per_token=6, shared_experts=2, routed_scale=2.5
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with megatron_on_cpu(tmp_path_factory.mktemp("group") / "store"):
        yield


def our_model(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 1) -> GPTModel:
    """Ours, computing in `dtype`, with weights of that dtype's precision that keep activations near 1, norms included:
    nothing is left at its default."""
    model = GPTModel(shape, compute_dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                plain = name == "embedding.weight" and not shape.tied_embedding
                parameter.normal_(0.0, 1.0 if plain else parameter.shape[-1] ** -0.5, generator=generator)
            parameter.copy_(parameter.to(dtype))
    return model


def megatrons(model: GPTModel, dtype: torch.dtype | None = None) -> MegatronModel:
    """Megatron's model with the weights of ours, and its compute dtype unless told otherwise."""
    reference = build(model.shape, dtype or model.compute_dtype)
    load(reference, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return reference


def pairs(model: GPTModel, reference: MegatronModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Our parameters and Megatron's, by our names, each of them once."""
    theirs = dict(reference.named_parameters())
    found = {name: (parameter, theirs.pop(name_of(name))) for name, parameter in model.named_parameters()}
    assert not theirs
    return found


def off(ours: Tensor, reference: Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖, and for a reference of zeros ‖ours‖."""
    ours, reference = ours.detach().double(), reference.detach().double()
    return float((ours - reference).norm() / (reference.norm() or 1.0))


def tokens_of(shape: Shape, batch: int = 2, length: int = 256) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, shape.vocab, (batch, length + 1), generator=torch.Generator().manual_seed(7))
    return drawn[:, :-1], drawn[:, 1:]


def test_megatrons_modules_are_its_own():
    assert package_info.__version__ == "0.16.1"
    for shape in COMPARED.values():
        model = build(shape)
        latent = isinstance(shape, DeepseekShape)
        assert type(model.embedding.word_embeddings) is VocabParallelEmbedding
        assert type(model.output_layer) is ColumnParallelLinear
        for index, layer in enumerate(model.decoder.layers):
            attention, core = layer.self_attention, layer.self_attention.core_attention
            assert type(attention) is (MLASelfAttention if latent else SelfAttention)
            assert type(core) is (LatentCore if latent else DotProductAttention)
            assert type(core).forward is DotProductAttention.forward
            norm = nn.LayerNorm if isinstance(shape, GPT2Shape) else nn.RMSNorm
            assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is norm
            if latent:
                rotary = RotaryEmbedding if shape.rope_scaling is None else YarnRotaryEmbedding
                assert type(attention.rotary_pos_emb) is rotary
            assert (type(layer.mlp) is MoELayer) == (latent and index >= shape.dense_layers)
            linear = {name: type(module) for name, module in layer.named_modules() if ".linear_" in name}
            for name, kind in linear.items():
                row = name.endswith(("linear_proj", "linear_fc2"))
                assert kind is (RowParallelLinear if row else ColumnParallelLinear)
            assert len(linear) >= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMPARED)
def test_logits_loss_and_every_gradient_agree(name):
    """Megatron's of two sequences together, ours as micro-batches of one."""
    shape = COMPARED[name]
    model = our_model(shape)
    reference = megatrons(model)
    tokens, labels = tokens_of(shape)
    with torch.no_grad():
        assert off(model(tokens), reference(**inputs(tokens))) < TOLERANCE
    wanted = reference(**inputs(tokens), labels=labels).mean()
    wanted.backward()
    losses = [
        _backward(model, *sequence, len(tokens)) for sequence in zip(tokens.split(1), labels.split(1), strict=True)
    ]
    assert sum(losses) / len(losses) == pytest.approx(wanted.item(), rel=TOLERANCE)
    compared = {name: off(ours.grad, theirs.grad) for name, (ours, theirs) in pairs(model, reference).items()}
    assert {name: error for name, error in compared.items() if not error < TOLERANCE} == {}
    assert sum(bool(ours.grad.any()) for ours, _ in pairs(model, reference).values()) == len(compared)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama31-8b", {"rope_scaling": None}),
        ("llama31-8b", {"rope_scaling": Llama3Scaling(32.0)}),
        ("llama32-1b", {"rope_scaling": Llama3Scaling(8.0)}),
        ("llama32-1b", {"rope_theta": 10000.0}),
        ("llama32-1b", {"norm_eps": 1e-4}),
        ("deepseek2_lite", {"rope_scaling": None}),
        ("deepseek, scaled", {"rope_scaling": YarnScaling(40.0, 4.0, 1.0, 0.707, 0.707, 64)}),
        ("deepseek, routing", {"experts_per_token": 5}),
        ("deepseek, routing", {"routed_scale": 1.0}),
    ],
)
def test_a_wrong_setting_shows(name, wrong):
    """The comparison would notice: a setting off by one choice moves the logits far beyond the tolerance."""
    model = our_model(COMPARED[name])
    mistaken = GPTModel(replace(COMPARED[name], **wrong), compute_dtype=torch.float32)
    mistaken.load_state_dict(model.state_dict())
    tokens, _ = tokens_of(model.shape)
    with torch.no_grad():
        assert off(mistaken(tokens), megatrons(model)(**inputs(tokens))) > 100 * TOLERANCE


@pytest.mark.parametrize("name", [name for name, shape in COMPARED.items() if isinstance(shape, DeepseekShape)])
def test_routing_has_no_near_ties(name):
    """Rounding cannot have changed which experts were compared above."""
    shape = COMPARED[name]
    model = our_model(shape)
    routed: list[Tensor] = []
    for layer in model.layers[shape.dense_layers :]:
        layer.mlp.router.register_forward_hook(lambda module, given, logits: routed.append(logits.softmax(-1)))
    with torch.no_grad():
        model(tokens_of(shape)[0])
    assert len(routed) == shape.layers - shape.dense_layers
    for probs in routed:
        ordered = probs.sort(-1, descending=True).values
        assert (ordered[..., shape.experts_per_token - 1] - ordered[..., shape.experts_per_token]).min() > 1e-6


def test_a_wrong_weight_of_the_balance_loss_shows():
    model = our_model(TINY["deepseek2_lite"])
    reference = megatrons(our_model(replace(TINY["deepseek2_lite"], balance_alpha=0.002)))
    tokens, labels = tokens_of(model.shape)
    reference(**inputs(tokens), labels=labels).mean().backward()
    _backward(model, tokens, labels, 1)
    ours, theirs = pairs(model, reference)["layers.1.mlp.router.weight"]
    assert off(ours.grad, theirs.grad) > 100 * TOLERANCE


def train_settings(name: str) -> tuple[RunConfig, list[list[tuple[Tensor, Tensor]]]]:
    """Settings of a run and the micro-batches of its first three steps."""
    config = RunConfig(model=name, micro_batches=2, micro_batch_size=2, sequence_length=48)
    stream = open_stream(plan(config), open_dataset(config.dataset, config.tokenizer, plan(config).shape.vocab))
    return config, [[stream.batch(config.micro_batch_size) for _ in range(config.micro_batches)] for _ in range(3)]


def our_losses(model: GPTModel, config: RunConfig, steps: int) -> Iterator[float]:
    """Train ours as train.py does: the loss of each step."""
    optimizer = _optimizer(model, config)
    stream = open_stream(plan(config), open_dataset(config.dataset, config.tokenizer, plan(config).shape.vocab))
    for _ in range(steps):
        yield _step(model, optimizer, stream, config, torch.device("cpu"), Ranks())


def explained(weight: Tensor, learning_rate: float) -> float:
    """How far AdamW's first step may move two weights apart, in norm, whose gradients agree to TOLERANCE.

    It moves a weight by learning_rate · g / (|g| + ε), which has the slope learning_rate · ε / (|g| + ε)²: steep only
    where the gradient is next to nothing. Weights themselves are rounded three times.
    """
    weight, grad, eps = weight.detach().double(), weight.grad.double(), 1e-8
    slope = learning_rate * eps / (grad.abs() + eps).square()
    spread = TOLERANCE * grad.norm() / math.sqrt(grad.numel())
    return float(slope.norm() * spread + 3 * 2**-24 * weight.norm())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TINY)
def test_training_steps_agree(name):
    """Two micro-batches a step, clipping, AdamW: the weights after one step, the losses of three."""
    config, steps = train_settings(name)
    model = our_model(TINY[name])
    reference = megatrons(model)
    optimizer = adamw(reference, config.learning_rate)
    for index, loss in enumerate(our_losses(model, config, len(steps))):
        assert loss == pytest.approx(step(reference, optimizer, steps[index]), rel=TOLERANCE)
        if index == 0:
            apart = {
                name: float((ours - theirs).detach().norm()) / explained(theirs, config.learning_rate)
                for name, (ours, theirs) in pairs(model, reference).items()
            }
            assert {name: ratio for name, ratio in apart.items() if not ratio < 1} == {}
            clipped = math.sqrt(sum(ours.grad.square().sum() for ours in model.parameters()))
            assert clipped == pytest.approx(1.0, rel=1e-5), "gradients were clipped"


@pytest.mark.thorough
def test_two_tensor_parallel_ranks_train_as_one(tmp_path):
    """Megatron's losses on two ranks are those of ours on one, which are those of ours on two (test_ranks)."""
    trainings, ours = [], []
    for name in (*LLAMAS, "gpt2"):
        config, steps = train_settings(name)
        model = our_model(TINY[name])
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainings.append(Training(TINY[name], weights, steps, config.learning_rate))
        ours.append(list(our_losses(model, config, len(steps))))
    for losses, wanted in zip(ours, tensor_parallel_losses(trainings, tmp_path), strict=True):
        assert losses == pytest.approx(wanted, rel=TOLERANCE)


BFLOAT16 = {name: TINY[name] for name in LLAMAS} | {
    "deepseek2_lite, dense": replace(TINY["deepseek2_lite"], dense_layers=2),
    "deepseek2_lite, dense, q_lora": replace(TINY["deepseek2_lite"], dense_layers=2, q_lora_rank=96),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BFLOAT16)
def test_in_bfloat16_all_but_rotation_and_core_is_equal_to_the_bit(name, monkeypatch):
    """With Megatron's rotation and attention core in place of ours, the logits of both are equal to the bit, and so are
    the gradients that they hand back from equal gradients of the logits: of every linear layer as they are; of norms,
    which ours keeps in float32, rounded to Megatron's bfloat16. So are the rows of the embedding whose token occurs
    once: of other tokens Megatron sums the gradients in bfloat16. Products are torch's own, as on a GPU."""
    monkeypatch.setattr(gemm, "multiply", lambda a, b, plus=None: a @ b)
    shape = BFLOAT16[name]
    model = our_model(shape, torch.bfloat16)
    reference = megatrons(model)
    tokens, _ = tokens_of(shape, length=64)
    for layer, theirs in zip(model.layers, reference.decoder.layers, strict=True):
        layer.self_attention.core_attention.forward = in_our_layout(theirs.self_attention.core_attention)
    monkeypatch.setattr(attention, "apply_rotary", megatrons_rotation(reference, tokens.shape[1]))
    logits, wanted = model(tokens), reference(**inputs(tokens))
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(logits, wanted.float())
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted.backward(grad)
    logits.backward(grad.float())
    once = tokens.flatten().bincount(minlength=shape.vocab) <= 1
    different = set()
    for name, (ours, theirs) in pairs(model, reference).items():
        rows = once if name == "embedding.weight" else slice(None)
        exact = ours.grad if "linear_" in name else ours.grad.bfloat16()
        if not torch.equal(exact[rows], theirs.grad[rows].to(exact.dtype)):
            different.add(name)
    assert different == set()


def in_our_layout(core: DotProductAttention) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Megatron's core for [b, heads, s, d]: it takes [s, b, heads, d] and gives [s, b, heads · v]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, length = query.shape[1:3]
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        context = core(*(t.permute(2, 0, 1, 3).contiguous() for t in (query, key, value)), future)
        return context.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    return attend


def megatrons_rotation(model: MegatronModel, length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Megatron's rotation by the angles of its own for `length` positions, whatever cos and sin it is called with."""
    if model.config.multi_latent_attention:
        angles, scale = model.decoder.layers[0].self_attention.rotary_pos_emb(length)
    else:
        angles, scale = model.rotary_pos_emb(length), 1.0
    return lambda x, cos, sin: _apply_rotary_pos_emb_bshd(x, angles, mscale=scale)


@pytest.mark.parametrize("name", [*LLAMAS, "deepseek2_lite"])
def test_bfloat16_rotation_differs_by_its_roundings(name):
    """Of a·cos + b·sin ours rounds the sum. Megatron rounds cos, sin, the products and the sum: three roundings in a
    row of each term. What float32 adds to that is 2^-16 of a rounding, and there are a few of them."""
    shape = TINY[name]
    x = torch.randn(256, 2, 4, shape.rotary_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, (cos, sin) = shape.build_positions()(x)
    ours = apply_rotary(x, cos, sin).double()
    theirs = megatrons_rotation(build(shape, torch.bfloat16), len(x))(x, cos, sin).double()
    first, second = x.double().chunk(2, -1)
    turned = torch.cat((-second, first), -1) * sin.double()
    exact, terms = x.double() * cos.double() + turned, (x.double() * cos.double()).abs() + turned.abs()
    noise = 2**-20 * terms
    assert ((ours - exact).abs() <= ROUNDING * exact.abs() + noise).all()
    assert ((theirs - exact).abs() <= ((1 + ROUNDING) ** 3 - 1) * terms + noise).all()
    assert off(theirs, exact) > off(ours, exact)


@pytest.mark.parametrize("name", LLAMAS)
def test_bfloat16_core_differs_by_its_roundings(name):
    """The context is a mean of values v weighted by p = softmax(s). Rounding moves a score by e·|s|, with e of two
    roundings in ours, of one in Megatron's; the p of a row, with S its largest |s|, by a factor of exp(2·e·S) at most;
    p is rounded, and the context."""
    shape = TINY[name]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 128, shape.head_dim, generator=generator).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    ours = CoreAttention(Site(1, "core"), shape.head_dim)(query, key, value)
    theirs = in_our_layout(build(shape, torch.bfloat16).decoder.layers[0].self_attention.core_attention)
    copies = shape.heads // shape.kv_heads
    wide_key, wide_value = (t.double().repeat_interleave(copies, 1) for t in (key, value))
    scores = query.double() @ wide_key.mT / math.sqrt(shape.head_dim)
    masked = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -math.inf)
    probs = masked.softmax(-1)
    largest = scores.tril().abs().amax(-1, keepdim=True)
    for context, roundings in ((ours, 2), (theirs(query, key, value), 1)):
        moved = (1 + ROUNDING) ** roundings - 1 + 2**-16
        factor = (2 * moved * largest).exp() * (1 + ROUNDING) ** 2 - 1
        error = (context.double() - probs @ wide_value).abs()
        assert (error <= factor * (probs @ wide_value.abs())).all()


# Roundings to bfloat16 in a layer: 2 norms, qkv, up to 3 in a row of the rotation, 2 of the scores, probabilities,
# context, proj, fc1, silu, product, fc2 and 2 sums with the residual.
PER_LAYER = 17


@pytest.mark.thorough
@pytest.mark.parametrize("name", LLAMAS)
def test_in_bfloat16_both_are_as_near_to_float32(name):
    """A rounding moves its tensor by ROUNDING of its norm at most. Those of different places have nothing to do with
    each other, so that their squares add up; a weight's gradient has those of the forward and of the backward pass."""
    model = our_model(TINY[name], torch.bfloat16)
    exact, reference = megatrons(model, torch.float32), megatrons(model)
    tokens, labels = tokens_of(model.shape)
    forward = PER_LAYER * model.shape.layers + 2  # the last norm and the logits
    with torch.no_grad():
        wanted = exact(**inputs(tokens))
        for logits in (model(tokens), reference(**inputs(tokens))):
            assert off(logits, wanted) < ROUNDING * math.sqrt(forward)
    exact(**inputs(tokens), labels=labels).mean().backward()
    reference(**inputs(tokens), labels=labels).mean().backward()
    _backward(model, tokens, labels, 1)
    wanted = {name: parameter.grad for name, (_, parameter) in pairs(model, exact).items()}
    for name, both in pairs(model, reference).items():
        for parameter in both:
            assert off(parameter.grad, wanted[name]) < ROUNDING * math.sqrt(2 * forward), name
