"""`audit`: what a quantized checkpoint holds, weight by weight, and what its configuration says that it does not do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from binade.collector.audit.matching import Matcher
from binade.collector.audit.result import Audit, AuditedWeight
from binade.collector.audit.weights import AuditedCheckpoint, CheckpointWeight
from binade.collector.errors import ConfigError
from binade.data.exchange.quantized.rules import Rule
from binade.data.exchange.quantized.stored import by
from binade.data.words.text import and_more, counted
from binade.quant.metrics import Errors, errors

HUGE = 2.0**16  # a scale of more times the median scale of its weight is reported
OFF = 0.05  # how far the factor from a block to the original may be from 1, besides what rounding explains
SHIFTED = 0.25  # the share of the squared error that may be one shift of all values
LEAST_COSINE = ((2, 0.3), (3, 0.6), (4, 0.7), (math.inf, 0.87))
"""To the original, by the most bits of a code: rounding stays above it."""


class Auditing:
    """An audit in progress: its weights, and then the result. Raises ConfigError, here and in its methods."""

    def __init__(self, path: Path, against: Path | None) -> None:
        self.path, self.against = path, against
        self.checkpoint = AuditedCheckpoint(path)
        self._original = AuditedCheckpoint(against) if against else None
        self._found: list[AuditedWeight] = []
        if not self.checkpoint.names:
            reason = next(iter(self.checkpoint.problems.values()), None)
            raise ConfigError(reason or f"checkpoint {path} has no weights of two or more axes")

    def weights(self) -> Iterator[tuple[CheckpointWeight, AuditedWeight]]:
        """Each weight with what was found, while its values are in memory."""
        matcher = Matcher()
        for weight in self.checkpoint.weights():
            found = _weight(self.checkpoint, weight, self._original, matcher)
            self._found.append(found)
            yield weight, found

    def result(self, run_id: str = "") -> Audit:
        """The audit of all weights that were reached."""
        findings = [*_of_config(self.checkpoint, self._found), *self.checkpoint.problems.values()]
        if self.checkpoint.method and not findings and not any(weight.stored for weight in self._found):
            findings.append(f"no weight is quantized, and the configuration says that {self.checkpoint.method} did so")
        if self._original and (lacking := sorted({*self._original.names} - self.checkpoint.all_names)):
            findings.append(f"there is no {lacking[0]}{and_more(lacking)}, which the original has")
        findings += _of_weights(self._found)
        return Audit(
            self.path, self.against, self.checkpoint.method, tuple(self._found), tuple(findings), run_id
        )  # fmt: skip


def _of_weights(weights: list[AuditedWeight]) -> Iterator[str]:
    """The findings of single weights: those that several have in common are one."""
    named = defaultdict[str, list[str]](list)
    for weight in weights:
        for finding in weight.findings:
            named[finding].append(weight.name)
    return (f"{names[0]}{and_more(names)}: {finding}" for finding, names in named.items())


def _weight(
    checkpoint: AuditedCheckpoint, weight: CheckpointWeight, original: AuditedCheckpoint | None, matcher: Matcher
) -> AuditedWeight:
    decoded = weight.decoded
    findings, error, match = [*_of_scales(decoded.scales)], None, None
    if not bool(decoded.values.isfinite().all()):
        findings.append("some of its values are NaN or infinite")
    if weight.stored and not bool(decoded.values.any()):
        findings.append("all of its values are zero")
    if weight.stored and (said := checkpoint.disagreement(weight)):
        findings.append(said)
    if original:
        x = original.original(weight, checkpoint.is_transposed(weight.name))
        if x is None:
            findings.append("the original has no such weight")
        elif x.shape != decoded.values.shape:
            findings.append(f"it is {by(decoded.values.shape)}, and {by(x.shape)} in the original")
        elif weight.stored:
            x = x.float()
            error = errors(x, decoded.values)
            match = matcher.match(x, weight)
            findings += of_error(x, weight, error)
        elif not torch.equal(x.to(decoded.values.dtype), decoded.values):
            findings.append("it is not quantized, and differs from the original")
    rule = None if weight.stored else checkpoint.excluding(weight.module)
    block = decoded.block.words if decoded.block else ""
    shape = checkpoint.sizes[weight.name]
    return AuditedWeight(
        weight.name, shape, weight.stored, weight.dtype, block, str(rule or ""), tuple(findings), error, match
    )  # fmt: skip


def of_error(x: Tensor, weight: CheckpointWeight, error: Errors) -> Iterator[str]:
    """What an error that rounding x [..., in] would not make says of values, scales and zeros. Where x is rounded by
    the right scale, the error is hardly correlated with the result: the factor that takes q to x is 1 but for about
    the squared error relative to x, tan² of the angle between both."""
    decoded = weight.decoded
    if error.cosine < next(least for bits, least in LEAST_COSINE if weight.bits <= bits):
        yield f"relative error {error.relative_error:.3g}: its values are not those of the original"
        return
    q, shift = decoded.values, float((decoded.values - x).mean())
    if shift**2 > SHIFTED * float((q - x).square().mean()):
        yield f"its values are those of the original plus {shift:.3g} on average: other zeros?"
    width = decoded.block.columns if decoded.block and decoded.block.rows == 1 and decoded.block.columns else 0
    width = min(width or x.shape[-1], x.shape[-1])
    x, q = (t[..., : t.shape[-1] // width * width].reshape(-1, width) for t in (x, q))
    factor = (x * q).sum(-1) / q.square().sum(-1)
    off = (factor[factor.isfinite()] - 1).abs()
    if len(off) and float(off.median()) > OFF + error.cosine**-2 - 1:
        times = float(factor[factor > 0].log().abs().median().exp())
        yield f"its blocks or rows are off by a factor of {times:.3g} in the median: other scales?"


def _of_scales(scales: Tensor) -> Iterator[str]:
    """What is wrong with the scales of a weight."""
    if not scales.numel():
        return
    finite = scales[scales.isfinite() & (scales != 0)].abs()
    most = HUGE * float(finite.median()) if len(finite) else torch.inf
    for what, wrong in {
        "zero, so that their values are lost": scales == 0,
        "negative": scales < 0,
        "NaN or infinite": ~scales.isfinite(),
        f"more than {HUGE:,.0f} times the median scale": scales.isfinite() & (scales.abs() > most),
    }.items():
        if count := int(wrong.sum()):
            yield f"{count:,} of {counted(scales.numel(), 'scale')} {'is' if count == 1 else 'are'} {what}"


def _of_config(checkpoint: AuditedCheckpoint, weights: list[AuditedWeight]) -> Iterator[str]:
    """What the configuration says and the tensors do not do."""
    stored = {weight.name.removesuffix(".weight"): weight.stored for weight in weights}
    modules, unused = checkpoint.modules, defaultdict[str, list[Rule]](list)
    for rule in checkpoint.rules:
        if rule.damaged:
            yield f"{rule} is no regular expression that can be read: {rule.damaged}"
        elif not (named := [module for module in modules if rule.matches(module)]):
            unused[rule.key].append(rule)
        elif rule.excludes:
            if quantized := sorted(module for module in named if stored.get(module)):
                yield f"{rule} leaves out {quantized[0]}{and_more(quantized)}, which is quantized"
        elif plain := sorted(name for name in named if stored.get(name) == "" and not checkpoint.excluding(name)):
            yield f"{rule} quantizes {plain[0]}{and_more(plain)}, which is not quantized"
    for rules in unused.values():
        yield f"{rules[0]}{and_more(rules)} names no module of the checkpoint"
