"""megatron-core 0.16.1 on the CPU: its GPTModel with one of our shapes, layers of its local spec, and our weights.

Nothing here changes what it computes. Without a GPU and without transformer_engine it needs to be told:

* that the current device is the CPU: buffers and rotary frequencies go to torch.cuda.current_device();
* that there is no CUDA random state to fork around dropout of 0 (its own tracker for inference forks nothing), nor to
  keep for recomputation;
* the causal mask: the one it would make itself lies on "cuda";
* not to compile: the router updates its bias, of which there is none, in a function under torch.compile;
* that transformer_engine is missing: multi_latent_attention believes that it is there, because modules of Megatron's
  own could be imported, and moe_utils leaves te_general_gemm undefined;
* to leave out k_channels and v_channels, which latent attention gives its core and only TEDotProductAttention takes.

A process has one parallel state: one `megatron_on_cpu` at a time.

`python -m tests.collector.megatron_cpu SCRIPT ARGUMENTS`, with torchrun's variables and the directory of a Megatron-LM
checkout in BINADE_MEGATRON_LM, runs one of its training scripts on the CPU: megatron.core is the installed one, whose
C++ helpers are built, and all else the checkout's. `pretrain_on_cpu` says what the script needs besides.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from binade.collector.models.deepseek import DeepseekShape
from binade.collector.models.gpt2 import GPT2Shape
from binade.collector.models.llama import LlamaShape
from binade.collector.models.rope_scaling import Llama3Scaling
from binade.collector.models.shape import Shape

CLIP = 1.0


@contextmanager
def megatron_on_cpu(store: Path, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """A gloo group of `ranks` processes, all of them tensor-parallel, that meet in the file `store`."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0))
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        patch.setattr(multi_latent_attention, "HAVE_TE", False)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
        try:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
            yield
        finally:
            initialize_rng_tracker(force_reset=True)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on "cuda", and says that they lie there: Megatron checks that."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **(kwargs | {"device": "cpu"} if str(kwargs.get("device")) == "cuda" else kwargs))
        named = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


def pretrain_on_cpu(checkout: str, script: str) -> None:
    """Run a script of Megatron-LM with the arguments of this process. There is one device, whose streams and memory do
    nothing and whose random state is the CPU's; the dataset's helpers are compiled, and fused kernels are none."""
    sys.path.append(checkout)
    from megatron.core.datasets import utils
    from megatron.legacy import fused_kernels

    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: event)
    device = SimpleNamespace(major=9, minor=0)
    cuda = {
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), None),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("Stream", "current_stream", "default_stream"), stream),
        **{"is_available": True, "device_count": 1, "current_device": torch.device("cpu"), "stream": nullcontext()},
        **{"get_device_capability": (9, 0), "get_device_properties": device},
    }
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"), OnCpu():
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        for owner, name in ((random, "_get_cuda_rng_state"), (torch.cuda, "get_rng_state")):
            patch.setattr(owner, name, lambda *_, **__: torch.get_rng_state())
        patch.setattr(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        patch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
        for owner in (Tensor, nn.Module):
            patch.setattr(owner, "cuda", lambda self, *_, **__: self)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        patch.setattr(utils, "compile_helpers", lambda: None)
        patch.setattr(fused_kernels, "load", lambda _: None)
        patch.setattr(WrappedTorchNorm, "__new__", partial(_norm, WrappedTorchNorm.__new__))
        runpy.run_path(script, run_name="__main__")


def _norm(original: Callable[..., Any], kind: type, config: TransformerConfig, *args: Any, **kwargs: Any) -> nn.Module:
    """torch's norm, which Megatron refuses with sequence parallelism, with the mark by which Megatron sums its
    gradients over the ranks."""
    norm: nn.Module = original(kind, replace(config, sequence_parallel=False), *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class LatentCore(DotProductAttention):
    """DotProductAttention for heads whose values are as wide as kv_channels, which is all it asks of them."""

    def __init__(self, *arguments: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)


def build(shape: Shape, dtype: torch.dtype = torch.float32, **settings: Any) -> GPTModel:
    """Megatron's model with weights and activations of `dtype`, and more settings of its TransformerConfig. Its weights
    are not initialized: `load` them.

    Raises ValueError for a rotary scaling that its GPTModel has no option for.
    """
    moe_utils.get_moe_layer_wise_logging_tracker().clear()  # it has as many layers as the model that it saw first
    common = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **settings,
    }
    if isinstance(shape, LlamaShape):
        scaling = shape.rope_scaling
        if scaling not in (None, Llama3Scaling(scaling.factor if scaling else 1.0)):
            raise ValueError(f"megatron-core stretches by a factor from 8192 positions only, not by {scaling}")
        config = TransformerConfig(**common, num_query_groups=shape.kv_heads, kv_channels=shape.head_dim)
        spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
        positions = {
            "position_embedding_type": "rope",
            "rotary_base": shape.rope_theta,
            "rope_scaling": scaling is not None,
            "rope_scaling_factor": scaling.factor if scaling else 1.0,
        }
    elif isinstance(shape, GPT2Shape):
        common |= {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True}
        config = TransformerConfig(**common | {"activation_func": partial(F.gelu, approximate="tanh")})
        spec = get_gpt_layer_local_spec()
        positions = {"position_embedding_type": "learned_absolute"}
    else:
        config = MLATransformerConfig(**common, **_latent(shape), **_experts(shape))
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
        positions = {"position_embedding_type": "rope"}
    tied = shape.tied_embedding
    options = {"share_embeddings_and_output_weights": tied, **positions}
    model = GPTModel(config, spec, shape.vocab, shape.max_sequence, **options)
    return model.to(dtype)


def _latent(shape: DeepseekShape) -> dict[str, Any]:
    found = {
        "kv_channels": shape.v_head,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_nope,
        "qk_pos_emb_head_dim": shape.qk_rope,
        "v_head_dim": shape.v_head,
        "qk_layernorm": True,
        "rotary_base": shape.rope_theta,
    }
    scaling = shape.rope_scaling
    if scaling is None:
        return found | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return found | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }


def _experts(shape: DeepseekShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.routed_experts,
        "moe_layer_freq": [int(layer >= shape.dense_layers) for layer in range(shape.layers)],
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_shared_expert_intermediate_size": shape.shared_experts * shape.expert_ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_topk_scaling_factor": shape.routed_scale,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": shape.balance_alpha,
        "moe_token_dispatcher_type": "allgather",
    }


def name_of(ours: str) -> str:
    """Megatron's name for one of our parameters."""
    if ours == "embedding.weight":
        return "embedding.word_embeddings.weight"
    if ours == "position_embedding.weight":
        return "embedding.position_embeddings.weight"
    if ours == "output_layer.weight":
        return ours
    for part in ("q", "q_down", "q_up", "kv_down", "kv_up"):
        ours = ours.replace(f".linear_{part}.", f".linear_{part}_proj.")
    return "decoder." + ours.replace(".experts.", ".experts.local_experts.")


def load(model: GPTModel, weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights, by our names, into Megatron's model: this rank's part of them, every one exactly once."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    gated = model.config.gated_linear_unit
    model.load_state_dict({name_of(name): part(name, whole, rank, ranks, gated) for name, whole in weights.items()})


def is_divided(name: str, parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks divide a parameter of Llama or GPT-2: not norms, positions and biases of what is
    row-parallel."""
    return name.endswith(("qkv.bias", "fc1.bias")) or (parameter.dim() > 1 and "position_embedding" not in name)


def part(name: str, whole: Tensor, rank: int, ranks: int, gated: bool) -> Tensor:
    """What a rank holds of a weight of Llama or GPT-2: columns of what is row-parallel, rows of all else, and of a
    Llama's fc1 rows of the gate and of the other half."""
    if not is_divided(name, whole):
        return whole
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(ranks, 1)[rank]
    if name.endswith("linear_fc1.weight") and gated:
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks)[rank]


def inputs(tokens: Tensor) -> dict[str, Tensor]:
    """The arguments of Megatron's forward for tokens, int64 [b, s]."""
    batch, length = tokens.shape
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(length).expand(batch, length),
        "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
    }


def step(model: GPTModel, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """One optimizer step over micro-batches, as Megatron's schedule without pipelining takes it: each loss over their
    number, the balance loss weighted likewise. Returns the mean loss in nats per token."""
    optimizer.zero_grad()
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / len(batches)))
    total = 0.0
    for tokens, labels in batches:
        loss = model(**inputs(tokens), labels=labels).mean()
        (loss / len(batches)).backward()
        total += loss.item() / len(batches)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    _clip(model)
    optimizer.step()
    return total


def _clip(model: nn.Module) -> None:
    """Scale gradients to a norm of CLIP at most: that of the whole model."""
    split = sum(p.grad.square().sum() for name, p in model.named_parameters() if is_divided(name, p))
    whole = sum(p.grad.square().sum() for name, p in model.named_parameters() if not is_divided(name, p))
    dist.all_reduce(split, group=parallel_state.get_tensor_model_parallel_group())
    scale = min(1.0, CLIP / (math.sqrt(split + whole) + 1e-6))
    for parameter in model.parameters():
        parameter.grad.mul_(scale)


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Llama's and DeepSeek's AdamW. Megatron would leave weight decay out for norms: train.py does not."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass(frozen=True)
class Training:
    """What to train: whole weights by our names, and the steps, each of them its micro-batches of tokens and labels."""

    shape: Shape
    weights: dict[str, Tensor]
    steps: list[list[tuple[Tensor, Tensor]]]
    learning_rate: float


def tensor_parallel_losses(trainings: Sequence[Training], directory: Path, ranks: int = 2) -> list[list[float]]:
    """Train Megatron's models one after the other on `ranks` processes, in float32: for each the losses of its steps in
    nats per token, which all ranks agree on. `directory` is empty and gets the ranks' files."""
    for index, training in enumerate(trainings):
        torch.save({"weights": training.weights, "steps": training.steps}, directory / f"given{index}.pt")
    settings = [(training.shape, training.learning_rate) for training in trainings]
    torch.multiprocessing.spawn(_train_rank, (ranks, settings, directory), nprocs=ranks)
    losses = [torch.load(directory / f"losses{rank}.pt", weights_only=True) for rank in range(ranks)]
    assert all(of_rank == losses[0] for of_rank in losses)
    return losses[0]


def _train_rank(
    rank: int, ranks: int, settings: Sequence[tuple[LlamaShape | GPT2Shape, float]], directory: Path
) -> None:
    torch.set_num_threads(1)
    losses = []
    with megatron_on_cpu(directory / "store", rank, ranks):
        for index, (shape, learning_rate) in enumerate(settings):
            given = torch.load(directory / f"given{index}.pt", weights_only=True)
            model = build(shape)
            load(model, given["weights"])
            optimizer = adamw(model, learning_rate)
            losses.append([step(model, optimizer, batches) for batches in given["steps"]])
    torch.save(losses, directory / f"losses{rank}.pt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.argv = sys.argv[1:]
    pretrain_on_cpu(os.environ["BINADE_MEGATRON_LM"], sys.argv[0])
