"""Hugging Face checkpoints: config.json and safetensors files of a Llama or DeepSeek-V2, read into a GPTModel.

A checkpoint is checked as a whole before a weight is read: its dimensions against the model's, and the names and shapes
of its tensors against those that the model is made of. Nothing is ever unpickled. A model that was shortened takes the
first layers of a longer checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from binade.collector.models.model import GPTModel
from binade.collector.models.shapes import DeepseekShape, Llama3Scaling, ModelShape, RotaryScaling, Shape, YarnScaling
from binade.collector.training.config import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Those whose values are the weights: others are quantized, and mean something only with their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
# Names are made of a checkpoint's layers before any is found: none that is published has nearly so many.
MOST_LAYERS = 1000

# What a run chooses or never uses; it does not make another model.
NOT_COMPARED = ("layers", "max_sequence", "balance_alpha")


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that one weight of the model is joined from, as names and shapes.

    Rows are taken in turns, `groups` times the next of each, as Megatron lays a group's queries, key and value out.
    With one group that is one tensor after the other.
    """

    tensors: dict[str, tuple[int, ...]]
    groups: int = 1

    def join(self, read: Mapping[str, Tensor]) -> Tensor:
        parts = [read[name] for name in self.tensors]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)


def sources(shape: Shape) -> dict[str, Source]:
    """Where each parameter of GPTModel(shape) comes from in a Hugging Face checkpoint, by the parameter's name."""
    table = (shape.vocab, shape.hidden)
    found = {"embedding.weight": Source({"model.embed_tokens.weight": table})}
    for index in range(shape.layers):
        for name, tensors, groups in _layer(shape, index):
            whole = {f"model.layers.{index}.{theirs}.weight": size for theirs, size in tensors.items()}
            found[f"layers.{index}.{name}.weight"] = Source(whole, groups)
    found["final_layernorm.weight"] = Source({"model.norm.weight": (shape.hidden,)})
    if not shape.tied_embedding:
        found["output_layer.weight"] = Source({"lm_head.weight": table})
    return found


Entry = tuple[str, dict[str, tuple[int, ...]], int]  # our module, their modules with shapes, groups


def _layer(shape: Shape, index: int) -> Iterator[Entry]:
    yield "input_layernorm", {"input_layernorm": (shape.hidden,)}, 1
    yield "pre_mlp_layernorm", {"post_attention_layernorm": (shape.hidden,)}, 1
    if isinstance(shape, ModelShape):
        yield from _grouped_query(shape)
    else:
        yield from _latent(shape)
    if isinstance(shape, ModelShape) or index < shape.dense_layers:
        yield from _mlp("mlp", "mlp", shape.hidden, shape.ffn)
        return
    yield "mlp.router", {"mlp.gate": (shape.routed_experts, shape.hidden)}, 1
    for expert in range(shape.routed_experts):
        yield from _mlp(f"mlp.experts.{expert}", f"mlp.experts.{expert}", shape.hidden, shape.expert_ffn)
    shared = "mlp.shared_experts"
    yield from _mlp(shared, shared, shape.hidden, shape.shared_experts * shape.expert_ffn)


def _grouped_query(shape: ModelShape) -> Iterator[Entry]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = {"q": queries, "k": keys, "v": keys}
    qkv = {f"self_attn.{name}_proj": (width, shape.hidden) for name, width in widths.items()}
    yield "self_attention.linear_qkv", qkv, shape.kv_heads
    yield "self_attention.linear_proj", {"self_attn.o_proj": (shape.hidden, queries)}, 1


def _latent(shape: DeepseekShape) -> Iterator[Entry]:
    queries, latent = shape.heads * shape.head_dim, shape.kv_lora_rank
    expanded = shape.heads * (shape.qk_nope + shape.v_head)
    rows = [
        ("linear_kv_down", "kv_a_proj_with_mqa", (latent + shape.qk_rope, shape.hidden)),
        ("kv_layernorm", "kv_a_layernorm", (latent,)),
        ("linear_kv_up", "kv_b_proj", (expanded, latent)),
        ("linear_proj", "o_proj", (shape.hidden, shape.heads * shape.v_head)),
    ]
    if shape.q_lora_rank is None:
        rows.append(("linear_q", "q_proj", (queries, shape.hidden)))
    else:
        rows.append(("linear_q_down", "q_a_proj", (shape.q_lora_rank, shape.hidden)))
        rows.append(("q_layernorm", "q_a_layernorm", (shape.q_lora_rank,)))
        rows.append(("linear_q_up", "q_b_proj", (queries, shape.q_lora_rank)))
    for ours, theirs, size in rows:
        yield f"self_attention.{ours}", {f"self_attn.{theirs}": size}, 1


def _mlp(ours: str, theirs: str, hidden: int, ffn: int) -> Iterator[Entry]:
    yield f"{ours}.linear_fc1", {f"{theirs}.gate_proj": (ffn, hidden), f"{theirs}.up_proj": (ffn, hidden)}, 1
    yield f"{ours}.linear_fc2", {f"{theirs}.down_proj": (hidden, ffn)}, 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names and shapes are known to fit `shape`. files is the file of each tensor that is used."""

    directory: Path
    shape: Shape
    files: dict[str, Path]

    def load_into(self, model: GPTModel) -> None:
        """Overwrite every weight, cast to the parameter's dtype. Raises ConfigError if a file cannot be read now."""
        known = sources(self.shape)

        def whole(name: str, _: torch.Size) -> Tensor:
            source = known[name]
            return source.join({theirs: self._read(theirs) for theirs in source.tensors})

        model.set_weights(whole)

    def _read(self, name: str) -> Tensor:
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"checkpoint {path} cannot be read: {error}") from error


def open_checkpoint(directory: str | Path, shape: Shape, layers: int | None = None) -> Checkpoint:
    """Check a checkpoint against a model, reading no weights. layers is --layers: where it is given, the checkpoint may
    have more, and those are left out. Raises ConfigError."""
    directory = Path(directory)
    theirs = read_shape(directory)
    if type(theirs) is not type(shape):
        raise ConfigError(f"checkpoint {directory} is a {_family(theirs)}, the model is a {_family(shape)}")
    if theirs.layers < shape.layers or (theirs.layers > shape.layers and layers is None):
        fitting = f"use --layers {theirs.layers}" if theirs.layers < shape.layers else "use the model of that size"
        raise ConfigError(f"checkpoint {directory} has {theirs.layers} layers, the model {shape.layers}: {fitting}")
    ours, found = asdict(shape), asdict(theirs)
    differing = [name for name in ours if name not in NOT_COMPARED and ours[name] != found[name]]
    if differing:
        said = "; ".join(f"{name} is {found[name]}, the model's is {ours[name]}" for name in differing)
        raise ConfigError(f"checkpoint {directory} is of another shape: {said}")
    headers = {path: _header(path) for path in _files(directory)}
    files = {name: path for path, header in headers.items() for name in header}
    if len(files) < sum(len(header) for header in headers.values()):
        raise ConfigError(f"checkpoint {directory} holds a tensor in two of its files: keep one copy")
    sizes = {name: size for header in headers.values() for name, size in header.items()}
    _compare(directory, sizes, shape, theirs.layers)
    return Checkpoint(directory, shape, files)


def _compare(directory: Path, sizes: dict[str, tuple[int, ...]], shape: Shape, layers: int) -> None:
    expected = {
        name: size
        for source in sources(replace(shape, layers=layers)).values()
        for name, size in source.tensors.items()
    }
    for problem, names in (
        ("lacks", sorted(expected.keys() - sizes.keys())),
        ("has, beyond those of the model,", sorted(sizes.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"checkpoint {directory} {problem} the tensor {names[0]}{more}")
    for name, size in expected.items():
        if sizes[name] != size:
            raise ConfigError(
                f"checkpoint {directory}: {name} is {_by(sizes[name])}, {_by(size)} was expected from its config.json"
            )


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size)) or "a scalar"


def _family(shape: Shape) -> str:
    return "Llama" if isinstance(shape, ModelShape) else "DeepSeek-V2"


def _files(directory: Path) -> list[Path]:
    """The safetensors files, by the index if there is one."""
    if (directory / INDEX).is_file():
        index = _read_json(directory / INDEX)
        named = index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ConfigError(f"checkpoint index {directory / INDEX} has no weight_map of file names")
        names = sorted(set(named.values()))
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"checkpoint index {directory / INDEX} names a file outside its directory")
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise ConfigError(
            f"checkpoint {directory} holds no weights: {SINGLE} or {INDEX} was expected (other formats are not read)"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {directory} lacks {missing[0]}, which its index names")
    return [directory / name for name in names]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file}
            sizes = {name: tuple(found.get_shape()) for name, found in slices.items()}
            dtypes = {name: found.get_dtype() for name, found in slices.items()}
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"checkpoint {path} is no readable safetensors file: {reason}") from error
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(f"checkpoint {path}: {name} is {dtype}, {', '.join(DTYPES)} can be loaded: unquantize it")
    return sizes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"checkpoint file {path} is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"checkpoint file {path} is not a JSON object")
    return settings


def read_shape(directory: Path) -> Shape:
    """The dimensions in a checkpoint's config.json. Raises ConfigError."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"checkpoint {directory} has no config.json: give the directory of a Hugging Face model")
    settings = _read_json(path)
    kind = settings.get("model_type")
    if kind not in ("llama", "deepseek_v2"):
        raise ConfigError(f"checkpoint {directory} is a {kind!r} model: llama and deepseek_v2 can be loaded")
    if settings.get("quantization_config"):
        raise ConfigError(f"checkpoint {directory} is quantized (quantization_config): give one that is not")
    for name, value in _FIXED.items():
        if settings.get(name, value) not in (value, None):
            raise ConfigError(f"checkpoint {directory} has {name} {settings[name]!r}, the models here {value!r}")
    try:
        shape = _llama(settings) if kind == "llama" else _deepseek(settings)
        if not isinstance(shape.layers, int):
            raise TypeError(f"num_hidden_layers is {shape.layers!r}")
        if not 1 <= shape.layers <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {shape.layers}, 1 to {MOST_LAYERS} were expected")
        return shape
    except KeyError as error:
        raise ConfigError(f"checkpoint {directory}: config.json lacks {error}") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"checkpoint {directory}: config.json cannot be understood: {error}") from error


# Settings that the models here have no switch for, with the value that they are built for.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
}


def _common(settings: dict[str, Any]) -> dict[str, Any]:
    """What both families of shapes have, by the shapes' names."""
    return {
        "layers": settings["num_hidden_layers"],
        "hidden": settings["hidden_size"],
        "ffn": settings["intermediate_size"],
        "heads": settings["num_attention_heads"],
        "vocab": settings["vocab_size"],
        "max_sequence": settings["max_position_embeddings"],
        "rope_theta": _rope(settings)["rope_theta"],
        "norm_eps": settings["rms_norm_eps"],
        "tied_embedding": settings.get("tie_word_embeddings", False),
        "rope_scaling": _scaling(settings),
    }


def _llama(settings: dict[str, Any]) -> ModelShape:
    common = _common(settings)
    return ModelShape(
        **common,
        kv_heads=settings.get("num_key_value_heads") or common["heads"],
        head_dim=settings.get("head_dim") or common["hidden"] // common["heads"],
    )


def _deepseek(settings: dict[str, Any]) -> DeepseekShape:
    return DeepseekShape(
        **_common(settings),
        qk_nope=settings["qk_nope_head_dim"],
        qk_rope=settings["qk_rope_head_dim"],
        v_head=settings["v_head_dim"],
        kv_lora_rank=settings["kv_lora_rank"],
        q_lora_rank=settings["q_lora_rank"],
        dense_layers=settings["first_k_dense_replace"],
        routed_experts=settings["n_routed_experts"],
        experts_per_token=settings["num_experts_per_tok"],
        shared_experts=settings["n_shared_experts"],
        expert_ffn=settings["moe_intermediate_size"],
        routed_scale=settings["routed_scaling_factor"],
        balance_alpha=settings.get("aux_loss_alpha", 0.0),
    )


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: since transformers 5 under rope_parameters, before as rope_theta and rope_scaling."""
    if settings.get("rope_parameters"):
        return settings["rope_parameters"]
    return {"rope_theta": settings["rope_theta"], **(settings.get("rope_scaling") or {})}


def _scaling(settings: dict[str, Any]) -> RotaryScaling:
    rope = _rope(settings)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']!r}, the models here have 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope["factor"],
            low_frequency=rope["low_freq_factor"],
            high_frequency=rope["high_freq_factor"],
            original=rope["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return YarnScaling(
            factor=rope["factor"],
            beta_fast=rope["beta_fast"],
            beta_slow=rope["beta_slow"],
            mscale=rope["mscale"],
            mscale_all_dim=rope["mscale_all_dim"],
            original=rope["original_max_position_embeddings"],
        )
    if kind != "default":
        raise ValueError(f"rope type {kind!r} is none of default, llama3, yarn")
    return None
