"""De-oscillation: a weight whose rounded value moves much more than the weight itself is set to the rounded value.

Rounded in each forward pass, a weight near the middle between two values of its format flips between them while it
hardly moves. After each optimizer step, with Q the rounding of the forward pass, each element adds up

    moved = Σ |w_t − w_(t−1)|        rounded = Σ |Q(w_t) − Q(w_(t−1))|

and at the end of a period, where rounded / moved reaches the ratio, w becomes Q(w), and both sums start at 0. From
Primus, `core/optimizer/weight_deosc.py` (fd1eeab), which also casts the float32 weight to bfloat16 before Q.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.layer import InstrumentError, Layer, is_a
from binade.collector.capture.clock import parameters_of
from binade.collector.capture.observer import Hook, part_at
from binade.collector.capture.recorder import Recorder
from binade.collector.recipes.recipe import Deoscillation
from binade.data.store import staged_file
from binade.data.tensor_kinds import Product
from binade.data.text import describe
from binade.quant.later import Later, LaterPart
from binade.quant.quantizer import apply
from binade.quant.specs import Spec

LEAST = 1e-12  # of what an element has moved, where the ratio is computed
SUMS = ("previous", "previous_rounded", "moved", "rounded")

Snapped = Callable[[Later[int], int], None]  # how many elements were set to their rounded value, of how many


@dataclass(eq=False)
class Weight:
    """A weight that is followed.

    spec    returns the spec of the forward pass now; None while the weight is not rounded
    dim     the axis that the forward GEMM contracts
    steps   the optimizer steps of this weight
    counted how many of them the sums of this period include
    summed  the spec that the sums are of
    """

    parameter: nn.Parameter
    name: str
    spec: Callable[[], Spec | None]
    dim: int = -1
    steps: int = 0
    counted: int = 0
    summed: str = ""
    sums: dict[str, Tensor] | None = None

    def follow(self, options: Deoscillation) -> Tensor | None:
        """The weight was updated. Returns at the end of a period how many elements were snapped, on their device."""
        self.steps += 1
        spec = self.spec()
        if spec is None or str(spec) != self.summed:  # rounded to another format, a weight jumps
            self.sums, self.counted, self.summed = None, 0, str(spec or "")
        if self.steps < options.start or spec is None:
            return None
        weight = self.parameter.detach()
        rounded = apply(weight.bfloat16(), spec, self.dim)[0].float()
        weight = weight.float()
        if self.sums is None:
            self.sums = dict(
                zip(SUMS, (weight.clone(), rounded, *torch.zeros(2, *weight.shape).to(weight)), strict=True)
            )
            return None
        sums = self.sums
        sums["moved"] += (weight - sums["previous"]).abs()
        sums["rounded"] += (rounded - sums["previous_rounded"]).abs()
        sums["previous"], sums["previous_rounded"] = weight.clone(), rounded
        self.counted += 1
        if self.counted < options.period:
            return None
        oscillates = (sums["moved"] > 0) & (sums["rounded"] / sums["moved"].clamp(min=LEAST) >= options.ratio)
        with torch.no_grad():
            self.parameter.copy_(torch.where(oscillates, rounded, weight))
        sums["previous"] = self.parameter.detach().float().clone()
        sums["moved"].zero_()
        sums["rounded"].zero_()
        self.counted = 0
        return oscillates.sum()


def followed(layer: Layer, spec: Callable[[], Spec | None]) -> Weight:
    """The weight of a linear layer. Raises InstrumentError if it cannot be followed."""
    weight = getattr(layer.module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or layer.part or is_dtensor(weight):
        raise InstrumentError(
            f"{layer.name or 'the model'} ({type(layer.module).__name__}) has no weight of two axes of its own that an "
            "optimizer updates here, so it cannot be kept from oscillating: choose the recipe without it, as in "
            "amd_mxfp4_deosc(without=deoscillation)"
        )
    transposed = is_a("transformers.pytorch_utils", "Conv1D", layer.module)
    return Weight(weight, layer.site.name, spec, -2 if transposed else -1)


class Deoscillator:
    """The weights of a model that are followed on one rank, and where their sums are kept.

    former: the directory of a run that is continued. Raises InstrumentError if its sums cannot be read, or if two
    weights have one name.
    """

    def __init__(self, options: Deoscillation, weights: Sequence[Weight], rank: int, former: Path | None) -> None:
        self.options, self.weights = options, weights
        self.name = f"deoscillation_r{rank:02d}.safetensors"
        names = [weight.name for weight in weights]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise InstrumentError(
                f"two weights are called {twice}: instrument one of the models, or exclude one weight"
            )
        if former is not None:
            try:
                self._restore(load((former / self.name).read_bytes()))
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                text = f"no sums of de-oscillation can be read from {former / self.name}: {describe(error)}"
                raise InstrumentError(text) from None

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for weight in self.weights:
            weight.steps, weight.counted = map(int, tensors[f"{weight.name}.steps"])
            weight.summed = bytes(tensors[f"{weight.name}.spec"].tolist()).decode()
            if f"{weight.name}.moved" in tensors:
                sums = {name: tensors[f"{weight.name}.{name}"].to(weight.parameter.device) for name in SUMS}
                if any(each.shape != weight.parameter.shape for each in sums.values()):
                    raise ValueError(f"the shape of {weight.name} differs")
                weight.sums = sums

    def save(self, directory: Path) -> None:
        """Write the sums to a directory. Raises OSError."""
        tensors = {}
        for weight in self.weights:
            tensors[f"{weight.name}.steps"] = torch.tensor([weight.steps, weight.counted])
            tensors[f"{weight.name}.spec"] = torch.tensor([*weight.summed.encode()], dtype=torch.uint8)
            tensors |= {f"{weight.name}.{name}": each.cpu() for name, each in (weight.sums or {}).items()}
        with staged_file(directory / self.name) as file:
            file.write(save(tensors))

    @contextmanager
    def following(self, snapped: Snapped) -> Iterator[None]:
        """A context in which the steps of torch optimizers are followed."""
        weights, steps = {id(weight.parameter): weight for weight in self.weights}, 0

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            nonlocal steps
            steps += 1
            held = [weights[id(p)] for p in parameters_of(optimizer) if id(p) in weights]
            counts = [(count, weight) for weight in held if (count := weight.follow(self.options)) is not None]
            if counts:
                total = sum(weight.parameter.numel() for _, weight in counts)
                device = counts[0][0].device
                number = torch.stack([count.to(device) for count, _ in counts]).sum()
                snapped(Later(lambda found: int(found), LaterPart(number)), total)

        handle = register_optimizer_step_post_hook(stepped)
        start = [weight.steps for weight in self.weights]
        try:
            yield
        finally:
            handle.remove()
        if steps and self.weights and start == [weight.steps for weight in self.weights]:
            warnings.warn(
                "no torch optimizer updated the model's weights, so none was kept from oscillating: the recipe's "
                "de-oscillation needs an optimizer that holds them, not copies of them",
                stacklevel=3,
            )


@contextmanager
def deoscillating(
    options: Deoscillation, hooks: Sequence[Hook], former: str | Path | None, recorder: Recorder
) -> Iterator[None]:
    """A context in which the weights that the forward GEMMs of these hooks round are kept from oscillating; the sums
    are kept with the run. Raises InstrumentError."""

    def spec(hook: Hook) -> Spec | None:
        return part_at(hook.stages, hook.policy.clock.iteration).formats["forward_b"]

    def snapped(number: Later[int], total: int) -> None:
        if recorder.entered:
            recorder.snapped(number, total)

    linear = [hook for hook in hooks if hook.product is Product.LINEAR]
    rounding = [hook for hook in linear if any(part.formats["forward_b"] for _, part in hook.stages)]
    weights = [followed(hook.layer, partial(spec, hook)) for hook in rounding]
    deoscillator = Deoscillator(options, weights, recorder.ranks.rank, None if former is None else Path(former))
    recorder.savers.append(deoscillator.save)
    try:
        with deoscillator.following(snapped):
            yield
    finally:
        recorder.savers.remove(deoscillator.save)
