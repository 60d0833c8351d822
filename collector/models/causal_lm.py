"""A causal language model of transformers, called as the training loop calls a GPTModel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.errors import ConfigError
from binade.collector.models.transformers_model import LOCAL, explained

ADAPTER = "adapter_config.json"


class CausalLM(nn.Module):
    """tokens [batch, sequence] -> logits, float32 [batch, sequence, vocab]. Computes in bfloat16 under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.float()

    def logits_and_balance(self, tokens: Tensor) -> tuple[Tensor, None]:
        """The logits; experts' load-balancing losses are left out."""
        return self(tokens), None


def load(path: Path) -> CausalLM:
    """The model in a directory with its weights, float32. Raises ConfigError."""
    if (path / ADAPTER).exists():
        raise ConfigError(f"checkpoint {path} contains an adapter ({ADAPTER}): merge it into its base model first")
    transformers: Any = import_module("transformers")  # its type annotations are incomplete
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def read() -> CausalLM:
        settings = LOCAL | {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        model, found = transformers.AutoModelForCausalLM.from_pretrained(path, **settings)
        if missing := sorted(found["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(f"checkpoint {path} lacks the tensor {missing[0]}{more}")
        return CausalLM(model.train())

    return explained(path, read)
