"""The values of a spec's options, as data. `specs` reads, checks and writes them. This module imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from binade.quant.elements import Overflow, RoundingMode
from binade.quant.formats import Format


class SpecError(ValueError):
    """An option is unknown or impossible for the format. The message says what is allowed."""

    exit_status = 2  # of a command


@dataclass(frozen=True)
class Block:
    """The values that share a scale: `columns` neighbors along the contracted axis in each of `rows` neighboring lines
    along it, all other axes taken as one. None is the whole length."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        if self.columns is None:
            return "row" if self.rows else "tensor"
        return f"{self.rows}x{self.columns}"

    @property
    def words(self) -> str:
        """The block in a sentence: "the tensor", "each row", "every 32 values"."""
        if self.columns is None:
            return "each row" if self.rows else "the tensor"
        return f"every {self.columns} values" if self.rows == 1 else f"every {self.rows} × {self.columns} values"

    @property
    def size(self) -> int | None:
        """The number of values; None for a row or a tensor."""
        return (self.rows or 1) * self.columns if self.columns else None

    def count(self, shape: tuple[int, ...], dim: int) -> int:
        """How many blocks a tensor of this shape is cut into, along `dim`."""
        lengths = [*shape] or [1]
        columns = lengths.pop(dim)
        rows = math.prod(lengths)
        if self.columns is None:
            return rows if self.rows else 1
        return -(-rows // (self.rows or 1)) * -(-columns // self.columns)

    @classmethod
    def parse(cls, value: object) -> Block:
        """Parse 32, "32" or "1x32" (a vector), "16x16" (a tile), "row" or "tensor". Raises SpecError."""
        if isinstance(value, Block):
            return value
        if value in ("row", "tensor"):
            return ROW if value == "row" else TENSOR
        sizes = re.fullmatch(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})", "" if isinstance(value, bool) else str(value))
        if not sizes:
            raise SpecError(f"block={value} is not a block: expected 32 (a vector), 16x16 (a tile), row or tensor")
        return cls(int(sizes[1] or 1), int(sizes[2]))


ROW, TENSOR = Block(1, None), Block(None, None)


@dataclass(frozen=True)
class Options:
    """A format, and the value of each option of `specs.OPTIONS`."""

    format: Format
    block: Block | None
    scale: str
    error: str | None
    bound: int | None
    rounding: RoundingMode
    overflow: Overflow
    center: str
    hadamard: int
    signs: str
    history: int
    algorithm: str | None
    margin: int


@dataclass(frozen=True)
class Softmax:
    """What the product of attention probabilities and values multiplies.

    tile      None: the softmax of a whole row ("full"). Otherwise, as flash kernels do, exp(S − m) of tiles of this
              many keys ("flash(tile=64)"), where m is the maximum of a row over the tiles so far. The rows of the
              product are divided by the sums of the rows afterwards
    reversed  whether the tiles are taken from the last to the first ("flash(keys=reversed)")
    rounded   whether the backward pass is that of Attn-QAT ("flash(backward=rounded)"), see `quant.attention`
    """

    tile: int | None = None
    rounded: bool = False
    reversed: bool = False

    def __str__(self) -> str:
        if not self.tile:
            return "full"
        tile = [] if self.tile == DEFAULT_TILE else [f"tile={self.tile}"]
        options = tile + [text for text, field in FLAGS.items() if getattr(self, field)]
        return f"flash({', '.join(options)})" if options else "flash"

    @classmethod
    def parse(cls, text: str) -> Softmax:
        """Parse "full", "flash", "flash(tile=64)" or "flash(tile=64, keys=reversed, backward=rounded)", in any order.
        Raises SpecError."""
        if text == "full":
            return cls()
        flash = re.fullmatch(r"flash(?:\(([^()]+)\))?", text.replace(" ", ""))
        options = flash[1].split(",") if flash and flash[1] else []
        tiles = [option for option in options if re.fullmatch(r"tile=[1-9]\d{0,8}", option)]
        flags = [option for option in options if option in FLAGS]
        if not flash or len(tiles) > 1 or len({*tiles, *flags}) != len(options):
            raise SpecError(
                f"softmax={text} is not known: expected full, flash or flash(tile={DEFAULT_TILE}, "
                f"{', '.join(FLAGS)}), of whose options each may be left out"
            )
        tile = int(tiles[0].removeprefix("tile=")) if tiles else DEFAULT_TILE
        return cls(tile, **{FLAGS[flag]: True for flag in flags})


class Smooth(StrEnum):
    """Which operands of QKᵀ are rounded without their means, see `quant.attention.smoothed`."""

    NONE = "none"
    KEY = "key"  # the mean over the tokens of each head
    BOTH = "query+key"  # that of queries, too: over groups of tokens

    @classmethod
    def parse(cls, text: str) -> Smooth:
        """Raises SpecError."""
        if text not in tuple(cls):
            raise SpecError(f"smooth={text} is not known: expected {', '.join(cls)}")
        return cls(text)


DEFAULT_TILE = 128  # keys
FLAGS = {"keys=reversed": "reversed", "backward=rounded": "rounded"}  # options of flash, and the fields of Softmax
FULL = Softmax()
