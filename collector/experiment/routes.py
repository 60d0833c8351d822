"""The routes of a model's tokens: recorded from the top-k of its routers, and replayed in another pass.

A router multiplies its input by a weight, and the next top-k over as many scores as this weight has rows chooses the
experts. Both torch.topk and Tensor.topk are intercepted. A pass that replays routes takes the experts of another pass
and their scores from its own: only the choice is that of the other pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from binade.collector.capture.adapters.layer import Layer
from binade.collector.models.site import Site
from binade.data.run.experiment import RouterChoices

TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class Route:
    """The choice of one router in one pass.

    experts  how many there are
    chosen   as the router's top-k returned them [..., k]
    ranked   the same by score, the largest first [..., k]
    margins  s_(k) − s_(k+1) [...]; NaN if all experts are chosen
    """

    experts: int
    chosen: Tensor
    ranked: Tensor
    margins: Tensor

    @staticmethod
    def of(scores: Tensor, chosen: Tensor) -> Route:
        """scores [..., experts], chosen [..., k]"""
        k = chosen.shape[-1]
        chosen_scores = scores.gather(-1, chosen)
        ranked = chosen.gather(-1, chosen_scores.argsort(dim=-1, descending=True, stable=True))
        if k == scores.shape[-1]:
            margins = scores.new_full(scores.shape[:-1], float("nan"))
        else:
            largest = scores.float().topk(k + 1, -1).values
            margins = largest[..., k - 1] - largest[..., k]
        return Route(scores.shape[-1], chosen, ranked, margins)


class Routes(TorchFunctionMode):
    """A context in which the choices of routers are recorded in `found`, by site. `begun` is called before each
    product. replayed: choices that replace those of the pass."""

    def __init__(self, replayed: Mapping[Site, Route] | None = None) -> None:
        super().__init__()
        self.found: dict[Site, Route] = {}
        self._replayed = replayed or {}
        self._router: tuple[Site, int] | None = None  # whose choice comes next, and its number of experts

    def begun(self, layer: Layer) -> None:
        weight = getattr(layer.module, layer.part or "weight", None) if layer.site.is_router else None
        self._router = None if weight is None else (layer.site, weight.shape[0])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK or self._router is None:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        values, chosen = result
        site, experts = self._router
        if scores.shape[-1] != experts or chosen.shape[:-1] != scores.shape[:-1]:
            return result
        other = self._replayed.get(site)
        if other is not None and other.chosen.shape == chosen.shape:
            chosen = other.chosen
            values = scores.gather(-1, chosen)
            result = torch.return_types.topk((values, chosen))
        self.found[site] = Route.of(scores, chosen)
        return result

    def by_sequence(
        self, routers: Iterable[Site], counts: Tensor, sequence_first: bool
    ) -> tuple[tuple[RouterChoices, ...], ...]:
        """The choices of these routers for the tokens that count, by sequence. A router whose choices were not found,
        or are not those of the batch's tokens, has none.

        counts          [sequences, tokens]
        sequence_first  whether two leading axes of a choice are [tokens, sequences]
        """
        columns = [_by_router(site, self.found.get(site), counts, sequence_first) for site in routers]
        return tuple(zip(*columns, strict=True))


def _by_router(site: Site, route: Route | None, counts: Tensor, sequence_first: bool) -> list[RouterChoices]:
    shape = tuple(counts.shape)
    chosen, margins = (
        (_of_tokens(route.ranked, shape, sequence_first, True), _of_tokens(route.margins, shape, sequence_first, False))
        if route
        else (None, None)
    )
    if route is None or chosen is None or margins is None:
        nothing = RouterChoices(site.layer_index, site.module, 0, np.zeros((0, 0), np.int64), np.zeros(0))
        return [nothing] * shape[0]
    return [
        RouterChoices(
            site.layer_index, site.module, route.experts, chosen[at][counted].cpu().numpy(),
            margins[at][counted].double().cpu().numpy(),
        )
        for at, counted in enumerate(counts)
    ]  # fmt: skip


def _of_tokens(x: Tensor, shape: tuple[int, ...], sequence_first: bool, several: bool) -> Tensor | None:
    """Values of tokens as [sequences, tokens, ...]; None if their number is another. shape: (sequences, tokens).
    several: whether the last axis is not one of tokens. Flattened tokens are those of one sequence after the other."""
    rest = x.shape[-1:] if several else ()
    leading = x.shape[: x.dim() - len(rest)]
    if math.prod(leading) != math.prod(shape):
        return None
    if sequence_first and len(leading) == 2:
        x = x.transpose(0, 1)
    return x.reshape(*shape, *rest)
