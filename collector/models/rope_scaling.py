"""How a model stretches its rotary frequencies for long texts: the setting that Hugging Face calls rope_scaling.

No torch at import. Each kind is a frozen dataclass; SCALINGS lists them by Hugging Face's name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor

MOST = 1e9  # far more than any published setting


class UnfitError(Exception):
    """The models here have no switch for a setting. The message continues "the checkpoint ..."."""


@dataclass(frozen=True)
class RopeScaling(ABC):
    """The fields have their names in a Hugging Face configuration."""

    factor: float

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """As `modeling_rope_utils` of transformers reads them. Raises KeyError for a setting that is missing."""
        return cls(**{field.name: settings[field.name] for field in fields(cls)})

    @abstractmethod
    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """The stretched frequencies, float32 [rotary_dim / 2]. theta is the base that they were computed from."""

    @property
    def rotary_scale(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """The factor of the attention scores, on top of 1 / √d."""
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: wavelengths above original_max_position_embeddings / low_freq_factor are stretched by `factor`, those
    below original_max_position_embeddings / high_freq_factor are kept, those between are interpolated."""

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """apply_scaling of meta-llama/llama-models: kept is 1 where the frequency stays, 0 where it is divided."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): dimensions that turn fewer than beta_slow times in the original context are stretched by
    `factor`, those that turn more than beta_fast times are kept. mscale and mscale_all_dim temper the attention;
    attention_factor replaces what they make of cos and sin. truncate: whether the two dimensions are whole numbers."""

    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        original, factor = settings["original_max_position_embeddings"], settings["factor"]
        if factor is None:
            factor = settings["max_position_embeddings"] / original
        mscale, mscale_all_dim = (settings.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
        scaling = cls(
            factor=factor,
            beta_fast=settings.get("beta_fast") or 32.0,
            beta_slow=settings.get("beta_slow") or 1.0,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
            original_max_position_embeddings=original,
            attention_factor=settings.get("attention_factor"),
            truncate=settings.get("truncate", True),
        )
        if scaling.attention_factor is None and not (mscale and mscale_all_dim):
            return replace(scaling, attention_factor=scaling._temper(1.0))
        return scaling

    @property
    def rotary_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return self._temper(self.mscale) / self._temper(self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        return self._temper(self.mscale_all_dim) ** 2

    def _temper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """DeepseekV2YarnRotaryEmbedding of DeepSeek-V2-Lite's modeling_deepseek.py: a ramp over the frequencies'
        indices, from the last that turns beta_fast times in the original context to the first that turns beta_slow
        times."""
        dim = 2 * len(frequencies)

        def index_of(turns: float) -> float:
            length = self.original_max_position_embeddings
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        index = frequencies.new_tensor(range(len(frequencies)))
        stretched = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched


SCALINGS: Mapping[str, type[RopeScaling]] = {"llama3": Llama3Scaling, "yarn": YarnScaling}


def rope_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json's rotary settings: rope_parameters since transformers 5, rope_scaling before that, and what stands
    beside them where they leave it out. Raises KeyError for a rope_theta that is missing."""
    nested: Mapping[str, Any] = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    length = settings.get("original_max_position_embeddings")
    beside = {"max_position_embeddings": settings.get("max_position_embeddings")}
    beside["original_max_position_embeddings"] = beside["max_position_embeddings"]
    if "rope_theta" not in nested:
        beside["rope_theta"] = settings["rope_theta"]
    return beside | dict(nested) | ({} if length is None else {"original_max_position_embeddings": length})


def read_scaling(settings: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling in a config.json, None if there is none. Raises KeyError, ValueError or UnfitError."""
    rope = rope_settings(settings)
    if type(rope["rope_theta"]) in (int, float) and not rope["rope_theta"] > 0:
        raise ValueError(f"rope_theta is {rope['rope_theta']!r}: expected a number above 0")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnfitError(f"has partial_rotary_factor {rope['partial_rotary_factor']!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise UnfitError(f"has the rope type {kind!r}, which is not one of default, {', '.join(SCALINGS)}")
    scaling = SCALINGS[kind].from_settings(rope)
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        is_number = type(value) in (int, float) and 0 <= value < MOST
        if not (is_number or value is field.default or type(value) is type(field.default)) or not scaling.factor > 0:
            raise ValueError(f"{field.name} of the {kind} scaling is {value!r}: expected a positive number")
    return scaling
