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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.layer import InstrumentError, Layer, is_a
from binade.collector.capture.clock import parameters_of
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.observer import Hook, part_at
from binade.collector.probes.probe import Finding, Probe, Recording
from binade.collector.recipes.recipe import Deoscillation
from binade.data.run.events import EventKind
from binade.data.run.store import staged_file
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import describe
from binade.quant.later import Later, LaterPart
from binade.quant.quantizer import apply
from binade.quant.specs import Spec

LEAST = 1e-12  # of what an element has moved, where the ratio is computed
SUMS = ("previous", "previous_rounded", "moved", "rounded")


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
    weight = layer.weight
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or layer.part or is_dtensor(weight):
        raise InstrumentError(
            f"{layer.name or 'the model'} ({type(layer.module).__name__}) has no weight of two axes of its own that an "
            "optimizer updates here, so it cannot be kept from oscillating: choose the recipe without it, as in "
            "amd_mxfp4_deosc(without=deoscillation)"
        )
    transposed = is_a("transformers.pytorch_utils", "Conv1D", layer.module)
    return Weight(weight, layer.site.name, spec, -2 if transposed else -1)


class Deoscillator(Probe):
    """Keeps the weights that forward GEMMs round from oscillating. The sums of a rank are kept with its run.

    former: the directory of a run that is continued. Raises InstrumentError if its sums cannot be read, or if two
    weights have one name.
    """

    def __init__(
        self, options: Deoscillation, weights: Sequence[Weight], former: Path | None, recording: Recording
    ) -> None:
        self.options, self.weights, self.recording = options, weights, recording
        self.by_parameter = {id(weight.parameter): weight for weight in weights}
        self.stepped = self.followed = False  # whether an optimizer has stepped, and one of these weights
        self.name = f"deoscillation_r{recording.ranks.rank:02d}.safetensors"
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

    @classmethod
    def of(cls, instrumented: Instrumented) -> Self | None:
        if not (options := instrumented.recipe.deoscillation):
            return None

        def spec(hook: Hook) -> Spec | None:
            return part_at(hook.stages, hook.policy.clock.iteration).formats["forward_b"]

        linear = [hook for hook in instrumented.hooks if hook.product is Product.LINEAR]
        rounding = [hook for hook in linear if any(part.formats["forward_b"] for _, part in hook.stages)]
        weights = [followed(hook.layer, partial(spec, hook)) for hook in rounding]
        return cls(options, weights, instrumented.former, instrumented.recording)

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for weight in self.weights:
            weight.steps, weight.counted = map(int, tensors[f"{weight.name}.steps"])
            weight.summed = bytes(tensors[f"{weight.name}.spec"].tolist()).decode()
            if f"{weight.name}.moved" in tensors:
                sums = {name: tensors[f"{weight.name}.{name}"].to(weight.parameter.device) for name in SUMS}
                if any(tensor.shape != weight.parameter.shape for tensor in sums.values()):
                    raise ValueError(f"the shape of {weight.name} differs")
                weight.sums = sums

    def save(self, directory: Path) -> None:
        """Write the sums to a directory. Raises OSError."""
        tensors = {}
        for weight in self.weights:
            tensors[f"{weight.name}.steps"] = torch.tensor([weight.steps, weight.counted])
            tensors[f"{weight.name}.spec"] = torch.tensor([*weight.summed.encode()], dtype=torch.uint8)
            tensors |= {f"{weight.name}.{name}": tensor.cpu() for name, tensor in (weight.sums or {}).items()}
        with staged_file(directory / self.name) as file:
            file.write(save(tensors))

    def after_step(self, optimizer: Optimizer) -> None:
        self.stepped = True
        held = [self.by_parameter[id(p)] for p in parameters_of(optimizer) if id(p) in self.by_parameter]
        self.followed |= bool(held)
        counts = [(count, weight) for weight in held if (count := weight.follow(self.options)) is not None]
        if counts:
            total = sum(weight.parameter.numel() for _, weight in counts)
            device = counts[0][0].device
            number = torch.stack([count.to(device) for count, _ in counts]).sum()
            snapped = Later(lambda count: int(count), LaterPart(number))
            self.recording.report(partial(_snapped, self.recording.clock.iteration, snapped, total))

    def close(self) -> None:
        if self.stepped and self.weights and not self.followed:
            warnings.warn(
                "no torch optimizer updated the model's weights, so none was kept from oscillating: the recipe's "
                "de-oscillation needs an optimizer that holds them, not copies of them",
                stacklevel=2,
            )


def _snapped(iteration: int, number: Later[int], total: int) -> Iterator[Finding]:
    """So many elements of the weights were set to their rounded value."""
    count = number()
    text = f"{count:,} of {total:,} weights ({count / total:.3%}) oscillated and were set to their rounded value"
    yield Finding(iteration, text, kind=EventKind.WEIGHTS)
