"""Configurations of other tools that a user may give as a recipe: which tool's it is, and the nearest recipe. No torch.

They are not read as recipes: they leave to a library what Binade must know of each operand, and say much that is not
about precision. The keys are those of torchtitan (`[model] converters`, `[quantize.linear.mx]`, earlier `[float8]`),
nvdlfw-inspect with the features of Transformer Engine, llm-compressor and compressed-tensors, accelerate's
ClusterConfig, DeepSpeed, torchao's `config_to_dict`, ModelOpt's hf_quant_config.json, Megatron's options in YAML (NeMo,
Megatron Bridge), torchtune, and a model's config.json.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[str, Any]
MX, NV = "mxfp8", "nvfp4"
ROW, TENSOR = "fp8_e4m3(block=row)", "fp8_e4m3"
# Weight and input of schemes for inference, whose names llm-compressor and ModelOpt share; None for bf16. Integers have
# scales by group or row there, the nearest formats here have one for each 32 values.
SCHEMES: dict[str, tuple[str, str | None]] = {
    "W8A16": ("mxint8", None),
    "W4A16": ("mxint4", None),
    "W8A8": ("mxint8", "mxint8"),
    "INT8": ("mxint8", "mxint8"),
    "W4A8": ("mxint4", "mxint8"),
    "W4AFP8": ("mxint4", ROW),
    "FP8": (TENSOR, TENSOR),
    "FP8_DYNAMIC": (ROW, ROW),
    "FP8_PER_CHANNEL_PER_TOKEN": (ROW, ROW),
    "FP8_BLOCK": ("fp8_e4m3(block=128x128)", "fp8_e4m3(block=1x128)"),
    "FP8A16": (ROW, None),
    "NVFP4": (NV, NV),
    "NVFP4A16": (NV, None),
    "W4A16_NVFP4": (NV, None),
    "W4A8_NVFP4_FP8": (NV, TENSOR),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP4A16": ("mxfp4", None),
    "MXFP8": (MX, MX),
}
MEGATRON = {
    "delayed": "te_delayed",
    "tensorwise": "te_current",
    "blockwise": "te_block",
    MX: "te_mxfp8",
    NV: "te_nvfp4",
}
# In the names of Megatron Bridge's mixed-precision recipes, such as bf16_with_fp8_current_scaling_mixed
WORDS = {NV: "te_nvfp4", MX: "te_mxfp8", "subchannel": "te_block", "current": "te_current", "fp8": "te_delayed"}
TORCHAO_TRAINING = {
    "tensorwise": "torchao_tensorwise",
    "rowwise": "torchao_rowwise",
    "rowwise_with_gw_hp": "torchao_rowwise_gw_hp",
}
GEMMS = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}
_OF_MODEL = {"architectures", "hidden_size", "n_embd", "transformers_version", "vocab_size"}


@dataclass(frozen=True)
class Tool:
    """nearest: the nearest recipe of a configuration, with options of `binade run`; None for that of another tool."""

    name: str
    nearest: Callable[[Table], str | None]


def recognized(content: object) -> str | None:
    """A message for a configuration of another tool, which continues "recipe FILE: "; None for anything else."""
    if not isinstance(content, dict):
        return None
    for tool in TOOLS:
        if nearest := tool.nearest(content):
            return f"is a configuration of {tool.name}, not a recipe: the nearest one is --recipe {nearest}"
    return None


def _table(value: object) -> Table:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""


def _find(content: object, *keys: str) -> Any:
    """The value of the first of these keys, at any depth; None if there is none."""
    found = dict(reversed([*_items(content)]))
    return next((found[key] for key in keys if key in found), None)


def _items(content: object) -> Iterator[tuple[str, Any]]:
    """All keys with their values, those of outer tables first."""
    left, seen = deque([content]), set[int]()
    while left:
        value = left.popleft()
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                yield from ((key, below) for key, below in value.items() if isinstance(key, str))
            left += value.values() if isinstance(value, dict) else value


def _inference(weight: str, given: str | None) -> str:
    """A recipe that rounds weights, and inputs, in the forward pass alone."""
    operands = f"linear.forward.weight={weight}" + (f",linear.forward.input={given}" if given else "")
    return f"bf16 --operand-quant {_quoted(operands)}"


def _quoted(text: str) -> str:
    return f"'{text}'" if "(" in text else text


def _scheme(name: object, weight_only: str = "W4A16") -> str:
    word = re.sub(r"[\s-]", "_", str(name)).upper()
    known = [scheme for scheme in sorted(SCHEMES, key=len, reverse=True) if word.startswith(scheme)]
    return _inference(*SCHEMES[known[0] if known else weight_only])


def _torchtitan(content: Table) -> str | None:
    old, quantize = _table(content.get("float8")), _table(content.get("quantize"))
    own = {"job", "training", "parallelism", "experimental", "metrics", "lr_scheduler", "activation_checkpoint", "comm"}
    if not (len(own & content.keys()) > 1 or "linear" in quantize or "enable_float8_linear" in old):
        return None
    linear = _table(quantize.get("linear"))
    float8, mx = old or _table(linear.get("float8")), _table(content.get("mx")) or _table(linear.get("mx"))
    converters = _table(content.get("model")).get("converters")
    names = " ".join(map(str, converters)) if isinstance(converters, list) else _text(converters)
    if "mx" in names or (converters is None and mx):
        return "linear_mxfp4" if "fp4" in _text(mx.get("recipe_name")) else "torchao_mxfp8"
    if "float8" in names or old.get("enable_float8_linear") is True or (converters is None and linear.get("float8")):
        return TORCHAO_TRAINING.get(_text(float8.get("recipe_name")), "torchao_tensorwise")
    return "bf16"


def _inspect(content: Table) -> str | None:
    """Sections of any name, each of layers and features. Features that log or dump say nothing of precision."""
    sections = [_table(section) for section in content.values()]
    keys = ("layers", "transformer_engine", "layer_name_regex_pattern")
    if not sections or not any("enabled" in section and any(key in section for key in keys) for section in sections):
        return None
    names = " ".join(key for key, _ in _items(content)).lower()
    stats = str(_find(content, "stats", "tensors_struct")).lower()
    base = next((MEGATRON[w] for w in (NV, MX) if w in names or w in stats), None)
    base = base or ("te_current" if "pertensorscaling" in names else "te_block" if "block" in stats else "te_delayed")
    gemms = _find(content, "gemms")
    if "disable" in names and isinstance(gemms, list):
        return " ".join([base, *(f"--{GEMMS[gemm]}-quant bf16" for gemm in gemms if gemm in GEMMS)])
    return "bf16" if re.search("disable(fp8|quantization)layer", names) else base


def _compressor(content: Table) -> str | None:
    """Stages of modifiers, or modifiers alone, or the quantization_config that they write."""
    names = [key for key, _ in _items(content)]
    is_own = any(re.fullmatch(r"\w*_modifiers|\w*Modifier", name) for name in names)
    if not is_own and "config_groups" not in content and content.get("quant_method") != "compressed-tensors":
        return None
    groups = [*_table(_find(content, "config_groups")).values()]
    group = _table(groups[0]) if groups else {}
    if "weights" in group:
        weights, inputs = _table(group["weights"]), _table(group.get("input_activations"))
        return _inference(_spec(weights), _spec(inputs) if inputs else None)
    scheme = _find(content, "scheme")
    return _scheme(next(iter(scheme), "") if isinstance(scheme, dict) else scheme)


def _spec(args: Table) -> str:
    """That of compressed-tensors' QuantizationArgs."""
    bits, strategy, group = args.get("num_bits"), _text(args.get("strategy")), args.get("group_size")
    if _text(args.get("type")) != "float":
        return "mxint8" if bits == 8 else "mxint4"
    if bits == 4:
        return NV if group == 16 else "mxfp4"
    if group == 32:
        return MX
    return {"token": ROW, "channel": ROW, "block": "fp8_e4m3(block=128x128)", "group": "fp8_e4m3(block=1x128)"}.get(
        strategy, TENSOR
    )


def _accelerate(content: Table) -> str | None:
    if not (
        {"compute_environment", "distributed_type", "fp8_config"} & content.keys() and "mixed_precision" in content
    ):
        return None
    if _text(content["mixed_precision"]) == "fp8":
        config = _table(content.get("fp8_config"))
        if "ao" in _text(config.get("backend")):
            return "torchao_tensorwise"
        return "te_mxfp8" if config.get("use_mxfp8_block_scaling") is True else "te_delayed"
    return "linear_fp16" if _text(content["mixed_precision"]) == "fp16" else "bf16"


def _deepspeed(content: Table) -> str | None:
    own = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "zero_allow_untested_optimizer"}
    if not own & content.keys():
        return None
    return "linear_fp16" if _table(content.get("fp16")).get("enabled") is True else "bf16"


def _torchao(content: Table) -> str | None:
    if isinstance(quant_type := content.get("quant_type"), dict) and content.get("quant_method") == "torchao":
        content = _table(next(iter(quant_type.values()), None))
    kind = content.get("_type")
    if not isinstance(kind, str) or "_data" not in content:
        return None
    if re.search("MX.*(Linear|Training)", kind):
        return "torchao_mxfp8"
    if "FP4" in kind or "MX" in kind:
        is_mx4 = "float4" in str(content) and "NV" not in kind
        return _scheme("MXFP4" if is_mx4 else "NVFP4" if "NV" in kind else "MXFP8")
    if "Float8" in kind:
        return _scheme("FP8A16" if "WeightOnly" in kind else "FP8_DYNAMIC" if "PerRow" in str(content) else "FP8")
    if "WeightOnly" in kind:
        return _scheme("W8A16" if "Int8" in kind else "W4A16")
    return _scheme("W4A8" if "Int4" in kind else "W8A8")


def _modelopt(content: Table) -> str | None:
    algorithm = _find(content, "quant_algo") if "quant_algo" in content or "quantization" in content else None
    if algorithm:
        return _scheme(algorithm)
    return _scheme("NVFP4" if "[2, 1]" in str(content) else "FP8") if "quant_cfg" in content else None


def _megatron(content: Table) -> str | None:
    found = dict(reversed([*_items(content)]))
    own = {"tensor_model_parallel_size", "megatron_amp_O2", "transformer_engine", "model_parallel", "fp8_recipe", "fp8",
           "fp8_format", "fp8_hybrid", "fp4", "fp4_recipe", "fp4_format"}  # fmt: skip
    named = found.get("mixed_precision") or found.get("precision_config") or found.get("precision")
    nearest = next((recipe for word, recipe in WORDS.items() if word in _text(named)), None)
    if not own & found.keys() and not nearest and "-mixed" not in _text(named):
        return None
    if any(found.get(key) for key in ("fp4", "fp4_format", "fp4_recipe")):
        return "te_nvfp4"
    if any(found.get(key) for key in ("fp8", "fp8_format", "fp8_hybrid", "fp8_e4m3")):
        return MEGATRON.get(_text(found.get("fp8_recipe")), "te_delayed")
    return nearest or "bf16"


def _model(content: Table) -> str | None:
    if "model_type" not in content or not _OF_MODEL & content.keys():
        return None
    return _quantization(_table(content.get("quantization_config"))) or "bf16"


def _quantization(content: Table) -> str | None:
    """That of a quantization_config of Hugging Face."""
    method = content.get("quant_method")
    if method == "fp8":
        return _scheme("FP8_BLOCK" if content.get("weight_block_size") else "FP8")
    by_method = {"mxfp4": "MXFP4A16", "gptq": "W4A16", "awq": "W4A16", "bitsandbytes": "W4A16"}
    if method in by_method:
        return _scheme("W8A8" if content.get("load_in_8bit") is True else by_method[method])
    return next(filter(None, (read(content) for read in (_compressor, _torchao, _modelopt))), None)


def _training(content: Table) -> str | None:
    """Of torchtune, axolotl, LLaMA-Factory, verl, Composer and others."""
    precision = _text(content.get("precision"))
    if precision.startswith("amp_"):
        return "te_delayed" if "fp8" in precision else "linear_fp16" if "fp16" in precision.split("_") else "bf16"
    if _find(content, "_component_", "model_name_or_path", "base_model", "actor_rollout_ref") is None:
        return None
    return "torchao_tensorwise" if _find(content, "fp8", "enable_fp8_training") is True else "bf16"


TOOLS = (
    Tool("torchtitan", _torchtitan),
    Tool("Transformer Engine's debug features (nvdlfw-inspect)", _inspect),
    Tool("a model (config.json), which --model DIR runs", _model),
    Tool("llm-compressor", _compressor),
    Tool("torchao", _torchao),
    Tool("ModelOpt", _modelopt),
    Tool("Hugging Face's quantization_config", _quantization),
    Tool("accelerate", _accelerate),
    Tool("DeepSpeed", _deepspeed),
    Tool("a training (torchtune, axolotl, LLaMA-Factory, verl, Composer or OLMo)", _training),
    Tool("NeMo or Megatron", _megatron),
)
