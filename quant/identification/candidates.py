"""The specs that `identify` tries: every format with each of its scale rules, blocks and roundings."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from binade.quant.elements import Element, Overflow, RoundingMode
from binade.quant.formats import FORMATS, Format
from binade.quant.scaling import SCALINGS
from binade.quant.specs import ROW, TENSOR, Block, Spec, SpecError

BLOCKS = (
    *(Block(1, size) for size in (16, 32, 64, 128, 256)),
    *(Block(size, size) for size in (16, 32, 64, 128)),
    *(ROW, TENSOR),
)
ROTATIONS = (("none", 16), ("fixed", 16), ("none", 32), ("none", 64), ("none", 128))
"""Signs and sizes of the rotations that are tried."""


def blocks_of(fmt: Format, rule: str, extra: tuple[Block, ...]) -> list[Block | None]:
    """The blocks that are tried for a format with a scale rule; [None] without a scale."""
    scaling = SCALINGS[rule]
    if not scaling.blocks:
        return [None]
    own = [Block(1, fmt.block_size)] if fmt.block_size else []
    fixed = [block for block in scaling.blocks if isinstance(block, Block)]
    return [block for block in dict.fromkeys((*own, *fixed, *BLOCKS, *extra)) if scaling.fits(block)]


@lru_cache(maxsize=8)
def specs(extra: tuple[Block, ...] = ()) -> tuple[Spec, ...]:
    """All deterministic specs that are tried, without rotations; `extra` adds blocks. In the order of FORMATS, the
    default rule and block of a format first."""
    found: dict[Spec, None] = {}
    for fmt in FORMATS.values():
        for rule in fmt.scale_rules:
            if SCALINGS[rule].stochastic:
                continue
            options = SCALINGS[rule].options
            for block, rounding, overflow, error, bound in product(
                blocks_of(fmt, rule, extra),
                (RoundingMode.NEAREST, RoundingMode.HALF_AWAY),
                tuple(Overflow) if fmt.element.has_infinity else (fmt.overflow,),
                options.get("error", (None,)),
                options.get("bound", (None,)),
            ):
                try:
                    spec = Spec.of(
                        fmt, scale=rule, block=block, rounding=rounding, overflow=overflow, error=error, bound=bound
                    )
                except SpecError:
                    continue
                found[spec] = None
    return tuple(found)


def fitted(spec: Spec) -> tuple[Element, Block | None]:
    """What `fitting` tests for a spec: its element, and the values that share all factors."""
    return spec.format.element, Block(1, 4) if spec.scaling.per_element else spec.block
