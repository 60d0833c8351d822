"""Models by path that our layers cannot compute: transformers builds and loads them, `instrument` intercepts them.

Their dimensions are those of the model that transformers builds from the config.json without allocating it. Only the
code of transformers runs, never a checkpoint's own, and weights are read from safetensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from binade.collector.errors import ConfigError
from binade.collector.models.shape import Shape
from binade.collector.models.specs import CoreSpec, LinearSpec, OtherSpec, Spec, Split
from binade.data.run.tensor_kinds import Other, tensor_names
from binade.data.words.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from binade.collector.pretrained.causal_lm import CausalLM

MOST_LAYERS = 1000  # far more than any published model has
MOST = 10**9  # tokens, if positions have no limit
ADAPTER = "adapter_config.json"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, kw_only=True)
class TransformersShape(Shape):
    """The dimensions of a model of transformers. found are its layers as `instrument` finds them, besides the other
    parts that are recorded if named, count its weights."""

    model_type = ""

    kind: str
    found: tuple[Spec, ...]
    besides: tuple[OtherSpec, ...]
    count: int

    def specs(self) -> tuple[Spec, ...]:
        return self.found

    def others(self) -> tuple[OtherSpec, ...]:
        return self.besides

    @property
    def parameters(self) -> int:
        return self.count

    def attention(self, layer: int) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.found if spec.site.layer_index == layer)

    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        return ()  # in attention only the names distinguish them

    def build_positions(self) -> NoReturn:
        raise NotImplementedError("transformers builds the model")

    def activation_bytes(self, layer: int) -> int:
        """An estimate: input and output of each linear layer, in float32 and in bfloat16."""
        return sum(6 * (spec.inputs + spec.outputs) for spec in self.linears(layer))

    @property
    def divided(self) -> dict[str, int]:
        return {}  # `check` refuses tensor-parallel ranks

    def describe(self) -> str:
        return f"{self.kind} of transformers, {self.layers} layers, hidden {self.hidden}, {self.heads} heads"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        raise NotImplementedError("transformers reads the configuration")


def shape_of_transformers(path: Path, reason: str) -> TransformersShape:
    """The dimensions of the model in a directory. reason: why our layers cannot compute it. Raises ConfigError."""
    if not find_spec("transformers"):
        raise ConfigError(f"checkpoint {path} {reason}: only transformers can run it: pip install 'binade[hf]'")
    return _shape(path, (path / "config.json").stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _shape(path: Path, modified: int) -> TransformersShape:
    """modified identifies the version of the configuration in the cache."""
    import torch
    from transformers import AutoConfig

    from binade.collector.capture.step import others
    from binade.collector.capture.survey import find
    from binade.collector.pretrained.causal_lm import CausalLM

    auto: Any = import_module("transformers").AutoModelForCausalLM  # its types are incomplete

    with explained(path):
        config = _plain(AutoConfig.from_pretrained(path, **LOCAL))
        text = config.get_text_config()
        if text.num_hidden_layers > MOST_LAYERS:
            raise ConfigError(f"checkpoint {path} has {text.num_hidden_layers} layers: expected at most {MOST_LAYERS}")
        with torch.device("meta"):
            model = CausalLM(auto.from_config(config, trust_remote_code=False))
        heads = getattr(text, "num_attention_heads", None) or 1  # a model may have other attention, or none
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        core = heads, kv_heads, head_dim, head_dim
        survey = find(model)
        return TransformersShape(
            kind=config.model_type,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            ffn=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            vocab=text.vocab_size,
            max_sequence=getattr(text, "max_position_embeddings", None) or MOST,
            norm_eps=0.0,
            tied_embedding=text.tie_word_embeddings,
            found=tuple(
                CoreSpec(layer.site, *core) if layer.is_core else _linear(layer, text) for layer in survey.layers
            ),
            besides=tuple(_other(model, text, *part) for part in others(model, survey, tensor_names())),
            count=sum(weight.numel() for weight in model.parameters()),
        )


def load(path: Path, dequantized: Callable[[], dict[str, Tensor]] | None = None) -> CausalLM:
    """The model in a directory with its weights, float32. dequantized: reads them, where transformers would need the
    library that quantized them. Raises ConfigError."""
    if (path / ADAPTER).exists():
        raise ConfigError(f"checkpoint {path} contains an adapter ({ADAPTER}): merge it into its base model first")
    import torch

    from binade.collector.pretrained.causal_lm import CausalLM

    transformers: Any = import_module("transformers")  # its type annotations are incomplete
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    with explained(path):
        settings = LOCAL | {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        if dequantized is None:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(path, **settings)
        else:
            config = _plain(transformers.AutoConfig.from_pretrained(path, **LOCAL))
            with torch.device("meta"):
                of_kind = type(transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False))
            settings |= {"config": config, "state_dict": dequantized()}
            model, info = of_kind.from_pretrained(None, **settings)
        if missing := sorted(info["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(f"checkpoint {path} lacks the tensor {missing[0]}{more}")
        return CausalLM(model.train())


def _plain(config: Any) -> Any:
    """The configuration of the same model, not quantized."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _linear(layer: Any, config: Any) -> LinearSpec:
    module, share = layer.module, Fraction(1)
    if layer.part:  # the weight and the expert
        weight = module.get_parameter(layer.part.rpartition(".")[0])
        share = Fraction(getattr(config, "num_experts_per_tok", None) or 1, len(weight))
        outputs, inputs = (weight.mT if getattr(module, "is_transposed", False) else weight).shape[1:]
    else:
        outputs, inputs = (module.weight.t() if hasattr(module, "nf") else module.weight).shape
    return LinearSpec(layer.site, inputs, outputs, Split.REPLICATED, layer.name, {}, share=share)


def _other(model: Any, config: Any, product: Other, layer: Any) -> OtherSpec:
    if product is Other.PARAMETER:
        parameter = model.get_parameter(layer.name)
        width = parameter.shape[-1] if parameter.dim() else 1
        return OtherSpec(layer.site, product, width, parameter.numel() // width)
    gain = getattr(layer.module, "weight", None)  # a norm may have none
    width = config.vocab_size if product is Other.HEAD else config.hidden_size if gain is None else gain.numel()
    return OtherSpec(layer.site, product, width)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raises ConfigError for errors of transformers, instrument or files in the context."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers raises all kinds of exceptions for models that it cannot build or read
        raise ConfigError(f"checkpoint {path} cannot be run by transformers: {one_line(error)}") from error
