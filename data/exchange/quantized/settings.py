"""How a checkpoint says that it is quantized: its quantization_config. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from binade.data.run.store import read_file

CONFIG, OF_MODELOPT = "config.json", "hf_quant_config.json"
METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "torchao", "awq", "gptq", "bitsandbytes")
"""The tools whose layouts are read, as quant_method names them: see `layouts.LAYOUTS`."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read. The message says which file or tensor, and why."""

    exit_status = 2


def quantization_of(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config of a checkpoint, {} if it is not quantized. config: the content of config.json, where
    models of several kinds of input have it in text_config, and old ones of compressed-tensors as compression_config.
    Raises CheckpointError."""
    text = config.get("text_config")
    tables = (config, text) if isinstance(text, dict) else (config,)
    found = (table.get(key) for key in ("quantization_config", "compression_config") for table in tables)
    settings = next(filter(None, found), None)
    if not settings and (directory / OF_MODELOPT).is_file():
        of_modelopt = read_settings(directory / OF_MODELOPT).get("quantization")
        if isinstance(of_modelopt, dict) and of_modelopt.get("quant_algo"):
            settings = {"quant_method": "modelopt", **of_modelopt}
    if settings and not isinstance(settings, dict):
        raise CheckpointError(f"checkpoint {directory}: quantization_config is {settings!r}: expected an object")
    return settings or {}


def check_method(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the weights were quantized by a tool whose layouts are not known."""
    if settings and (method := settings.get("quant_method")) not in METHODS:
        raise CheckpointError(
            f"checkpoint {directory} is quantized by {method!r} (quantization_config): only {', '.join(METHODS)} can "
            "be dequantized; give one of these, or one that is not quantized"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        settings = json.loads(read_file(path))
    except OSError as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path} is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"checkpoint file {path} is not a JSON object")
    return settings
