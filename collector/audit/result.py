"""What `audit` returns, and how it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from binade.collector.audit.matching import Match
from binade.data.words.text import counted
from binade.quant.measurements import Errors

LISTED = 20  # findings
Key = TypeVar("Key")


@dataclass(frozen=True)
class AuditedWeight:
    """A weight that was audited.

    stored    as in CheckpointWeight
    block     the values that share a scale, in words; "" if not known
    rule      that leaves it out of quantization, or ""
    findings  what is wrong with it
    error     against the original; None without one
    match     with a spec; None without an original, or if no format here has such codes
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    dtype: str
    block: str
    rule: str
    findings: tuple[str, ...]
    error: Errors | None = None
    match: Match | None = None


@dataclass(frozen=True)
class Audit:
    """An audit.

    weights   of two or more axes, in the order of their names
    findings  of the configuration, of what cannot be decoded, and of single weights
    run_id    of the run that has it
    """

    path: Path
    against: Path | None
    method: str
    weights: tuple[AuditedWeight, ...]
    findings: tuple[str, ...]
    run_id: str = ""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(audit: Audit) -> Iterator[str]:
    """The report: a line for each format, and for each rule that leaves weights out, then the findings."""
    quantized = [weight for weight in audit.weights if weight.stored]
    count = f"{len(quantized):,} of {counted(len(audit.weights), 'weight')} quantized"
    yield f"{audit.path}: {count}{f' by {audit.method}' if audit.method else ''}"
    for (stored, block), group in _grouped(quantized, lambda weight: (weight.stored, weight.block)).items():
        yield f"{stored}{f', a scale for {block}' if block else ''}: {_names(group)}"
        if audit.against:
            yield from _against(group)
    plain = [weight for weight in audit.weights if not weight.stored]
    for (dtype, rule), group in _grouped(plain, lambda weight: (weight.dtype, weight.rule)).items():
        yield f"{dtype}, {f'left out by {rule}' if rule else 'no rule leaves it out'}: {_names(group)}"
    yield from (f"finding: {finding}" for finding in audit.findings[:LISTED])
    if len(audit.findings) > LISTED:
        yield f"finding: and {len(audit.findings) - LISTED:,} more, in the log of the run"
    found = counted(len(audit.findings), "finding") if audit.findings else "no findings"
    yield f"{found}{f', run {audit.run_id}' if audit.run_id else ''}"


def _against(group: Sequence[AuditedWeight]) -> Iterator[str]:
    """The errors of a group of weights, and the specs that they compare with."""
    known = sorted((weight.error.sqnr_db, weight.name) for weight in group if weight.error)
    if known:
        (low, worst), (high, _) = known[0], known[-1]
        yield f"    SQNR {low:.2f} to {high:.2f} dB, lowest {worst}"
    matches = [weight for weight in group if weight.match]
    for words, same in _grouped(matches, lambda weight: _match(weight, matches)).items():
        yield f"    {words}: {_names(same)}"
    for weight in matches:
        if weight.match and weight.match.identified:
            yield f"    identify says of {weight.name}: {weight.match.identified}"
    if len(matches) < len(known):
        yield f"    no spec has such codes: {counted(len(known) - len(matches), 'weight')}"


def _match(weight: AuditedWeight, group: Sequence[AuditedWeight]) -> str:
    """How a weight compares with a spec: of several that make it, the one that makes most weights of its group."""
    match = weight.match
    if match is None:
        return ""
    made = Counter(spec for other in group if other.match for spec in other.match.making)
    return match.words(max(match.making, key=lambda spec: made[spec]) if match.making else match.spec)


def _grouped(weights: Sequence[AuditedWeight], key: Callable[[AuditedWeight], Key]) -> dict[Key, list[AuditedWeight]]:
    groups: dict[Key, list[AuditedWeight]] = {}
    for weight in weights:
        groups.setdefault(key(weight), []).append(weight)
    return groups


def _names(group: Sequence[AuditedWeight]) -> str:
    more = f" to {group[-1].name}" if len(group) > 1 else ""
    return f"{counted(len(group), 'weight')}, {group[0].name}{more}"
