"""Optimizer state in a format: after each step of a torch optimizer, its tensors are rounded as if they were stored so.

For the recorded linear weights, with w the weight before a step and Δw the update that Adam computes from its moments
before these are rounded, two numbers are recorded in each recorded iteration:

    update_error    ‖Δw_q − Δw‖ / ‖Δw‖    Δw_q from the rounded moments; if the weight is rounded, Q(w + Δw_q) − w
    lost_updates    the share of the nonzero elements of Δw that leave the stored weight as it was
    stale_exp_avg, stale_exp_avg_sq
                    of a moment that is rounded: of the elements that the step changes, the share that is rounded back
                    to what was stored, Q(βm + (1 − β)g) = m (arXiv 2603.16731)

Of torch.optim.Muon, Δw follows from O = orth(B) of the momentum B in the same way. If the momentum is rounded, three
more are recorded, with O_q = orth(Q(B)) and the singular vectors u, v of what is orthogonalized:

    update_angle            between O and O_q, in degrees
    update_alignment        uᵀ O_q v for each pair of singular vectors, those of the largest singular value first;
                            without those of singular values that float32 does not tell from 0
    update_singular_values  of O_q

The momentum is rounded after the step, as MuonQ does: the step itself uses the momentum as it is, the next step the
rounded one. Of other optimizers, Δw is what the weight changed by, in its own dtype, and only lost_updates is recorded.
Where the errors of weights are added to the first moment (`weight_errors`), update_error is not recorded: the moment is
not what the step was computed from. A weight is not measured in a step before which it was not yet a value of its
format. Random numbers depend on the iteration, which a forward pass begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.clock import parameters_of, seed_of
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.optimizer_updates import (
    MOMENTUM,
    adam_update,
    eco_correction,
    muon_update,
    orthogonalized,
)
from binade.collector.probes.probe import Probe
from binade.collector.recipes.recipe import Scheme, StateRounding
from binade.data.run.tensor_kinds import Product
from binade.quant.low_rank import muonq
from binade.quant.quantizer import DTYPES, apply
from binade.quant.specs import Spec

ERROR, LOST = "update_error", "lost_updates"
ANGLE, ALIGNMENT, SINGULAR = "update_angle", "update_alignment", "update_singular_values"
WEIGHT = "master_weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
FACTOR = "momentum_buffer_factor"  # MuonQ's R, which the next step starts from


def _rounded(x: Tensor, spec: Spec, seed: int) -> Tensor:
    return apply(x, spec, seed=seed)[0]


def _local(x: Tensor) -> Tensor:
    """The part of a DTensor on this rank; another tensor as it is."""
    local: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return local


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """Between two matrices as vectors, in degrees; 0 if one of them is 0."""
    a, b = (x.double().flatten() / x.double().norm().clamp(min=1e-300) for x in (a, b))
    # Of unit vectors: exact for small angles, of which the cosine rounds to 1.
    return torch.rad2deg(2 * torch.atan2((a - b).norm(), (a + b).norm())).float()


class StateRounder(Probe):
    """Rounds the state of a model's parameters in torch optimizers after each step. rounded: the names of the tensors
    that were. Warns at the end about tensors that no optimizer had."""

    def __init__(self, instrumented: Instrumented, state: StateRounding) -> None:
        self.state, self.seed, self.recording = state, instrumented.seed, instrumented.recording
        self.models = instrumented.models
        self.corrects = state.weight_errors == "momentum" and state.master_weight is not None
        hooks = instrumented.hooks
        layers = [hook.layer for hook in hooks if hook.observing and hook.product is Product.LINEAR]
        weights = {layer.weight: layer.site for layer in layers if not layer.part}
        # Those that are recorded, as far as each is one parameter of this rank.
        self.sites = {weight: site for weight, site in weights.items() if type(weight) is nn.Parameter}
        self.before: dict[Tensor, Tensor] = {}
        self.moments: dict[tuple[Tensor, str], Tensor] = {}  # those that are rounded, as they were stored
        self.rounded: set[str] = set()
        self.stored: set[Tensor] = set()  # the weights that were of their format before a measured step
        self.stepped = False

    @classmethod
    def of(cls, instrumented: Instrumented) -> Self | None:
        state = instrumented.recipe.state
        return cls(instrumented, state) if state else None

    def before_step(self, optimizer: Optimizer) -> None:
        self.before.clear()
        self.moments.clear()
        if self.recording.policy.moment_of_step().recording:
            self.before.update((p, p.detach().clone()) for p in parameters_of(optimizer) if p in self.sites)
            for p in self.before:
                held = optimizer.state.get(p, {})
                rounded = (key for key in MOMENTS if key in self.state.specs and key in held)
                self.moments.update(((p, key), held[key].detach().clone()) for key in rounded)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None and found_inf.any():
            return  # GradScaler has skipped the step of a fused optimizer
        self.stepped, measures = True, bool(self.before)
        names = {p: name for model in self.models for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names and parameter.grad is not None:
                    self.updated(optimizer, group, parameter, names[parameter])
        if measures:
            self.recording.publish_step()

    def close(self) -> None:
        if self.stepped and (missing := self.state.specs.keys() - self.rounded):
            warnings.warn(
                f"the recipe's state has {', '.join(sorted(missing))}, but nothing was rounded to it: no torch "
                "optimizer that holds the model's own parameters has such a tensor in float32, bfloat16 or float16",
                stacklevel=2,
            )

    def updated(self, optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, name: str) -> None:
        """The optimizer has updated a parameter of this name."""
        state, weight = optimizer.state.get(parameter, {}), parameter.detach()
        seeds = {key: seed_of(self.seed, self.recording.clock.iteration, name, key) for key in self.state.specs}
        before = self.before.pop(parameter, None)
        is_muon = isinstance(optimizer, torch.optim.Muon)
        knows = is_muon or (isinstance(optimizer, torch.optim.Adam) and not group["amsgrad"])

        def muon() -> tuple[Tensor, Tensor] | None:
            gradient = parameter.grad
            return orthogonalized(state[MOMENTUM], gradient, group) if is_muon and gradient is not None else None

        def computed(weight: Tensor, of_muon: tuple[Tensor, Tensor] | None) -> Tensor:
            return muon_update(weight, of_muon[1], group) if of_muon else adam_update(weight, state, group)

        if before is not None:
            exact = muon()
            update = computed(before, exact) if knows else weight.float() - before.float()
        before_moments = {key: self.moments.pop((parameter, key), None) for key in MOMENTS}
        changed = {key: state[key] != stored for key, stored in before_moments.items() if stored is not None}
        if self.corrects:
            if not isinstance(optimizer, torch.optim.Adam):
                raise InstrumentError(f"weight_errors of {name}: only of torch.optim.Adam and AdamW")
            self._correct(weight, state, group, seeds[WEIGHT])
        for key, spec in self.state.specs.items():
            x = weight if key == WEIGHT else state.get(key)
            if isinstance(x, Tensor) and x.shape == weight.shape and x.dtype in DTYPES:
                self._round(name, key, x, spec, seeds[key], state)
        for key, moved in changed.items():
            stale = (moved & (state[key] == before_moments[key])).sum() / moved.sum().clamp(min=1)
            self.recording.keep(f"stale_{key}", stale.reshape(1), self.sites[parameter], "optimizer")
        if before is None:
            return
        if (stored := self.state.master_weight) and parameter not in self.stored:
            self.stored.add(parameter)
            if not torch.equal(_rounded(before, stored, seeds[WEIGHT]), before):
                return
        site, changes = self.sites[parameter], update != 0
        lost = (changes & (weight == before)).sum().float() / changes.sum().clamp(min=1)
        self.recording.keep(LOST, lost.reshape(1), site, "optimizer")
        if knows and not self.corrects:
            rounded = muon()
            again, size = computed(before, rounded), update.norm()
            if stored:
                again = _rounded(before.float() + again, stored, seeds[WEIGHT]) - before.float()
            error = torch.where(size == 0, 0.0, (again - update).norm() / size)  # a learning rate of 0
            self.recording.keep(ERROR, error.reshape(1), site, "optimizer")
        if exact and rounded and self.state.momentum_buffer:
            (direction, wanted), (_, rounded_update) = exact, rounded
            self.recording.keep(ANGLE, _angle(wanted, rounded_update).reshape(1), site, "optimizer")
            if direction.isfinite().all() and direction.any():
                u, sizes, v = torch.linalg.svd(direction.float(), full_matrices=False)
                known = sizes > sizes[0] * max(direction.shape) * torch.finfo(torch.float32).eps
                self.recording.keep(ALIGNMENT, (u * (rounded_update.float() @ v.t())).sum(0)[known], site, "optimizer")
                self.recording.keep(SINGULAR, torch.linalg.svdvals(rounded_update.float()), site, "optimizer")

    def _correct(self, weight: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], seed: int) -> None:
        """Add what rounding will take from a weight to its first moment. state: of the weight."""
        parts, x, spec = {key: _local(each) for key, each in state.items()}, _local(weight), self.state.master_weight
        assert spec
        parts["exp_avg"].add_(eco_correction(x.float() - _rounded(x, spec, seed).float(), parts, group))

    def _round(self, name: str, key: str, x: Tensor, spec: Spec | Scheme, seed: int, state: dict[str, Tensor]) -> None:
        """Round a tensor of a parameter of this name in place. state: of the parameter."""
        local = _local(x)
        if isinstance(spec, Spec):
            try:
                local.copy_(_rounded(local, spec, seed))
            except TypeError as error:
                raise InstrumentError(f"{key} of {name} cannot be rounded to {spec}: {error}") from None
        elif local is not x:
            raise InstrumentError(f"{key} = {spec} rounds whole matrices, but {name} is divided: choose a spec")
        elif x.dim() != 2:
            return
        else:
            rounded, state[FACTOR] = muonq(x, state.get(FACTOR), seed)
            local.copy_(rounded)
        self.rounded.add(key)
