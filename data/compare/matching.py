"""Tensors of two runs that different tools have written: which of one is which of the other.

Tools agree on layers and modules, but not on the names of arguments and results, on how they count iterations and
micro-batches, or on what they say besides. Tensors with the same identity belong together; of the others, those with
the same place, in the order of execution. A fused layer's result is not its parts' results, so only its input matches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

Key = tuple[Any, ...]  # as in data.compare.difference: the values of IDENTITY, and how often it was there before

FUSED = {part: whole for whole, parts in {"qkv": "q k v", "fc1": "gate up"}.items() for part in parts.split()}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of rounding a value to a dtype."""
SUMMATION = 2.0**-20
"""That of float32 and wider dtypes: of sums in float32, whose order differs between devices."""
LARGEST = 0.25
"""A larger relative difference is never explained by rounding."""


def matched(a: Sequence[Key], b: Sequence[Key]) -> dict[Key, Key]:
    """Which tensor of b each tensor of a is, for those that both have. a, b: in the order of execution."""
    both = set(a).intersection(b)
    rest_a, rest_b = ([key for key in keys if key not in both] for keys in (a, b))
    iterations = [{key[0] for key in keys} for keys in (a, b)]
    alone = all(len(numbers) == 1 for numbers in iterations)
    at: dict[Key, list[Key]] = defaultdict(list)
    for key in rest_b:
        at[_place(key, alone)].append(key)
    others = {place: iter(keys) for place, keys in at.items()}
    counterparts = {key: next(others.get(_place(key, alone), iter(())), None) for key in rest_a}
    return {key: key for key in both} | {key: other for key, other in counterparts.items() if other is not None}


def _place(key: Key, alone: bool) -> Key:
    """alone: whether both runs have one iteration, which tools count from 0 or 1."""
    iteration, _, layer, module, expert, layer_type, _, _, _, name, stage, replica, _ = key
    # Of a linear layer with a norm in it, msprobe's input.0 is not the input of its GEMM.
    plain = name if name is None or layer_type == "linear" else name.removesuffix(".0")
    if plain == "input":
        module = FUSED.get(module, module)
    return None if alone else iteration, layer, module, expert, plain, stage, replica


def same_layout(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether tensors of these shapes have the same values in the same order: [1, s, h] and [s, h], [b, s, h] and
    [b * s, h]."""
    short_a, short_b = (tuple(size for size in shape if size != 1) for shape in (a, b))
    flat = min(len(short_a), len(short_b)) == 2 and short_a[-1:] == short_b[-1:]
    return short_a == short_b or (flat and prod(short_a) == prod(short_b))


def explained(differences: Sequence[tuple[float, str, str]]) -> list[float]:
    """The largest difference of each tensor that its dtypes explain: twice the rounding error of the coarser one, and
    twice the largest explained difference before it, which its operands may have.

    differences   in the order of execution: (relative difference, dtype, dtype of the other)
    """
    limits, carried = [], 0.0
    for difference, *dtypes in differences:
        limit = min(LARGEST, 2 * max(ROUNDING.get(dtype, SUMMATION) for dtype in dtypes) + 2 * carried)
        limits.append(limit)
        if difference <= limit:
            carried = max(carried, difference)
    return limits
