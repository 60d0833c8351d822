"""Models by path: the directory of a Hugging Face model, or a GGUF file. No torch at import.

`shape_of` gives the dimensions of every model, by name or by path. A path's are those in its config.json or its GGUF
metadata. A model whose layers a family here can compute belongs to that family; all others are left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

from binade.collector.errors import ConfigError
from binade.collector.models.registry import MODELS
from binade.collector.models.rope_scaling import UnfitError
from binade.collector.models.shape import Shape
from binade.collector.pretrained.gguf_file import GGUF, open_gguf
from binade.collector.pretrained.transformers_model import MOST_LAYERS, shape_of_transformers
from binade.data.exchange.quantized.settings import CheckpointError, check_method, quantization_of, read_settings

CONFIG = "config.json"
MOST = 10**9
KINDS = {
    int: ((int,), f"an integer from 0 to {MOST}"),
    float: ((int, float), f"a number from 0 to {MOST}"),
    bool: ((bool,), "true or false"),
}
# Types of model whose layers are those of a family here, by their name at Hugging Face, with the defaults in which they
# differ.
SAME_LAYERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "mistral": (
        "llama",
        {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    )
}


def shape_of(model: str, size: str) -> Shape:
    """The dimensions of a model by its name, or by its path, which has one size. Raises ConfigError."""
    return MODELS[model][size] if model in MODELS else read_shape(Path(model))


def gguf_of(path: Path) -> Path | None:
    """The GGUF file at a path or in its directory; None for a Hugging Face directory. Raises ConfigError."""
    if path.is_file() and path.suffix == GGUF:
        return path
    if (path / CONFIG).is_file():
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise ConfigError(f"checkpoint {path} contains {len(files)} GGUF files: give the path to one")
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist")
    if not files:
        raise ConfigError(
            f"checkpoint {path} has no {CONFIG}: give the directory of a Hugging Face model, or a {GGUF} file"
        )
    return files[0]


def name_of(path: Path) -> str:
    """The name of the model at a path: that of its directory or GGUF file. Raises ConfigError."""
    file = gguf_of(path)
    return file.stem if file else path.resolve().name


def describe_weights(path: Path) -> str:
    """A description of where a model's weights come from. Raises ConfigError."""
    if file := gguf_of(path):
        quantized = open_gguf(file).quantized()
    else:
        with readable():
            method = quantization_of(path, read_json(path / CONFIG)).get("quant_method")
        quantized = (str(method),) if method else ()
    grid = (
        f", dequantized from {' and '.join(quantized)}: their values lie on a quantization grid, so the rounding "
        "errors of weights are meaningless"
    )
    return f"from {path}{grid if quantized else ''}"


def read_shape(path: Path) -> Shape:
    """The dimensions of the model at a path. Raises ConfigError."""
    file = gguf_of(path)
    settings, source = (open_gguf(file).settings(), "its metadata") if file else (read_json(path / CONFIG), CONFIG)
    kind = settings.get("model_type")
    families = {type(shape).model_type: type(shape) for sizes in MODELS.values() for shape in sizes.values()}
    same, defaults = SAME_LAYERS.get(str(kind), (str(kind), {}))
    family = families.get(same)
    if not file:
        with readable():
            check_method(path, quantization_of(path, settings))
    if family:
        settings = {family.aliases.get(name, name): value for name, value in settings.items()}
        settings = ({} if file else {**family.defaults, **defaults}) | settings
    try:
        if family is None:
            raise UnfitError(f"is a {kind!r} model")
        for name, value in family.fixed.items():
            if settings.get(name, value) not in (value, None):
                raise UnfitError(f"has {name} {settings[name]!r}")
        return _read(path, source, family, settings)
    except UnfitError as reason:
        if file:
            raise ConfigError(f"checkpoint {path} {reason}; this is supported only for safetensors") from reason
        return shape_of_transformers(path, str(reason))


def _read(path: Path, source: str, family: type[Shape], settings: Mapping[str, Any]) -> Shape:
    try:
        shape = family.from_settings(settings)
        for name, (kinds, expected) in ((n, KINDS[k]) for n, k in get_type_hints(family).items() if k in KINDS):
            value = getattr(shape, name)
            if type(value) not in kinds or not 0 <= value <= MOST:
                raise TypeError(f"{name} is {value!r}: expected {expected}")
        if not 1 <= shape.layers <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {shape.layers}: expected 1 to {MOST_LAYERS}")
        return shape
    except KeyError as error:
        raise ConfigError(f"checkpoint {path}: {source} lacks {error}") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"checkpoint {path}: {source} is invalid: {error}") from error


@contextmanager
def readable() -> Iterator[None]:
    """Raises ConfigError for a checkpoint that cannot be read."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises ConfigError."""
    with readable():
        return read_settings(path)
