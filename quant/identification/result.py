"""What `identify` returns, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from binade.quant.specs import Spec

LISTED = 12  # matches that a text lists


@dataclass(frozen=True)
class SpecOutcome:
    """A spec against the given values.

    dim        the axis that its blocks lie along; None for a spec whose scales and values depend on no axis
    words      how the values were made otherwise than by the spec; empty if not
    reading    how codes and scales were read
    differing  how many values have other bits
    apart      how many differ by more than two units in the last place: they have another code or scale
    values     of how many
    first      index of the first that differs, None if none does; x, q and expected are there
    common     what the values that differ have in common
    """

    spec: Spec
    dim: int | None
    words: tuple[str, ...]
    reading: tuple[str, ...]
    differing: int
    apart: int
    values: int
    first: tuple[int, ...] | None = None
    x: float = 0.0
    q: float = 0.0
    expected: float = 0.0
    common: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return self.differing == 0

    @property
    def matches(self) -> bool:
        """Whether all codes, but for signs of zeros, and scales are those of the spec."""
        return self.apart == 0

    @property
    def name(self) -> str:
        """The spec, the axis and the deviations."""
        axis = "" if self.dim is None else f" along axis {self.dim}"
        read = f" ({'; '.join(self.reading)})" if self.reading else ""
        return f"{self.spec}{axis}{read}" + "".join(f", but {words}" for words in self.words)

    def __str__(self) -> str:
        if self.exact:
            return f"{self.name}: all {self.values:,} values, bit for bit"
        text = f"{self.name}: {self.differing:,} of {self.values:,} values differ"
        if self.matches:
            text += ", none by more than two units in the last place or the sign of a zero"
        text += f"\n    first at {list(self.first or ())}: x {self.x!r}, given {self.q!r}, expected {self.expected!r}"
        return text + "".join(f"\n    in common: {words}" for words in self.common)


@dataclass(frozen=True)
class Identification:
    """Which specs reproduce the given values.

    matches   all outcomes that do, bit for bit if there are any; the simplest spec first
    nearest   if none does: those with the fewest values that differ
    apart     for each further match, an input that would tell it from the first one; empty if none was found
    tried     how many specs were tried, along how many axes
    """

    matches: tuple[SpecOutcome, ...]
    nearest: tuple[SpecOutcome, ...] = ()
    apart: dict[SpecOutcome, str] = field(default_factory=dict)
    tried: tuple[int, int] = (0, 0)

    @property
    def spec(self) -> Spec | None:
        """The simplest spec that reproduces the values bit for bit, without a deviation."""
        return next((outcome.spec for outcome in self.matches if outcome.exact and not outcome.words), None)

    def __str__(self) -> str:
        specs, axes = self.tried
        lines = [f"{specs:,} specs were tried along {axes} ax{'i' if axes == 1 else 'e'}s"]
        for outcome in self.matches[:LISTED]:
            lines.append(str(outcome))
            if outcome in self.apart:
                words = self.apart[outcome]
                lines.append(
                    f"    {'told apart from the first by: ' + words if words else 'equal on every test input'}"
                )
        if len(self.matches) > LISTED:
            lines.append(f"and {len(self.matches) - LISTED} more")
        if not self.matches:
            lines.append("no spec reproduces the values; the nearest:")
            lines += map(str, self.nearest)
        return "\n".join(lines)
