"""A causal language model of transformers, called as the training loop calls a GPTModel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
