"""Products of two tensors that the user declares by einsum equations, such as those of a chunked scan.

While the forward of a module with declared products runs, torch.einsum and matrix products (@, matmul, mm, bmm) with
the axes of an equation are replaced by left [batch..., m, k] · rightᵀ [batch..., n, k] -> [batch..., m, n]. Batch
letters are in both operands and in the result, k stands for those in both operands alone, m and n for those in one
operand and in the result; each in the order of the left operand, n in that of the right one. What is quantized is
rounded, and what is recorded is shown, in these shapes.

Other functions, code compiled by torch.jit, and kernels of other packages are not seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError, Layer, eagerly, replaces, whole
from binade.collector.capture.adapters.products import (
    Interception,
    Product,
    computing,
    observed_product,
    product_dtype,
    tensors_in,
)
from binade.collector.capture.adapters.weights import MATMULS
from binade.collector.models.parallel import Begin, Call
from binade.collector.models.site import site
from binade.data.run.tensor_kinds import LATER
from binade.quant.gemm import Observed, matmul

Equations = str | Sequence[str]
MATMUL = "...yz,...zx->...yx"


@dataclass(frozen=True)
class Einsum:
    """left,right->result. Its letters are named in the order in which they appear, so that equal products are equal."""

    left: str
    right: str
    result: str

    @classmethod
    def of(cls, equation: str) -> Einsum | None:
        """None for an equation that is not that of a batched matrix product."""
        if not re.fullmatch("[A-Za-z]+,[A-Za-z]+->[A-Za-z]+", equation):
            return None
        terms = left, right, result = re.split(",|->", equation)
        both, either, kept = {*left} & {*right}, {*left} ^ {*right}, {*result}
        if any(len({*term}) < len(term) for term in terms) or not either <= kept <= either | both or both <= kept:
            return None
        names = str.maketrans(dict(zip(dict.fromkeys(left + right), ascii_letters, strict=False)))
        return cls(*(term.translate(names) for term in terms))

    @property
    def groups(self) -> tuple[str, str, str, str]:
        """The letters of the batch, m, n and k."""
        both = [letter for letter in self.left if letter in self.right]
        batch = "".join(letter for letter in both if letter in self.result)
        m, n = ("".join(letter for letter in term if letter not in both) for term in (self.left, self.right))
        return batch, m, n, "".join(letter for letter in both if letter not in self.result)

    def __call__(self, original: Product, a: Tensor, b: Tensor, call: Call) -> Tensor:
        """The product of a and b, as original(a, b) computes it."""
        if call.is_plain:
            return original(a, b)
        batch, m, n, k = self.groups
        a, b = (x.to(product_dtype(x)) for x in (a, b))
        sizes: dict[str, int] = {}
        for letter, size in zip(self.left + self.right, (*a.shape, *b.shape), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 0))  # an axis of one element is repeated

        def matrices(x: Tensor, term: str, rows: str, columns: str) -> Tensor:
            """x, whose axes are the letters of a term, as [batch..., rows, columns]."""
            x = x.permute([term.index(letter) for letter in batch + rows + columns])
            at, end = len(batch), len(batch + rows)
            return x.reshape(*x.shape[:at], math.prod(x.shape[at:end]), math.prod(x.shape[end:]))

        def shape(letters: str) -> list[int]:
            return [sizes[letter] for letter in letters]

        if call.quantizes:
            left = matrices(a.expand(shape(self.left)), self.left, m, k)
            right = matrices(b.expand(shape(self.right)), self.right, n, k)
            y = matmul(left, right, call.rounding, transpose_b=True, tap=call.tap).reshape(shape(batch + m + n))
            return y.permute([(batch + m + n).index(letter) for letter in self.result])
        tap: Any = call.tap
        places = {"a": (a.shape, self.left, m, k), "b": (b.shape, self.right, n, k)}  # the others are of the result

        def show(seen: Observed) -> None:
            tensor_shape, *place = places.get(seen.name[-1], (shape(self.result), self.result, m, n))
            x = matrices(seen.tensor.reshape(tensor_shape), *place)
            tap(replace(seen, tensor=x, dim=-2 if seen.name in LATER else -1))

        return observed_product(original, a, b, show)


def with_letters(equation: str, dims: Sequence[int]) -> str:
    """ "abyz,bzx->abyx" for "...yz,...zx->...yx" and operands of 4 and 3 axes. A result that is not given has the
    letters that occur once, in their order."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = (letter for letter in terms if letter.isalpha() and terms.count(letter) == 1)
        result = "..." * ("..." in terms) + "".join(sorted(once))
    more = [dim - len(term.replace("...", "")) for term, dim in zip(terms.split(","), dims, strict=True)]
    spare = "".join(letter for letter in ascii_letters if letter not in equation)[: max(more)]
    named = [
        term.replace("...", spare[len(spare) - count :]) for term, count in zip(terms.split(","), more, strict=True)
    ]
    return f"{','.join(named)}->{result.replace('...', spare)}"


def product_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, Product, Tensor, Tensor] | None:
    """(equation, function, operands) of a call that multiplies two tensors; None for another one."""
    is_einsum = func is torch.einsum and isinstance(args[0], str)
    operands = list(tensors_in((args, kwargs))) if is_einsum or func in MATMULS else []
    if len(operands) != 2 or (not is_einsum and min(x.dim() for x in operands) < 2):
        return None
    equation, original = (args[0], partial(func, args[0])) if is_einsum else (MATMUL, func)
    return with_letters(equation, [x.dim() for x in operands]), original, operands[0], operands[1]


class DeclaredMode(Interception):
    """One pass through a module: replaces its product, the first of every `turns` calls with that equation.

    calls   how many had the equation
    others  the products of the others
    """

    def __init__(self, einsum: Einsum, turns: int, begin: Begin) -> None:
        self.einsum, self.turns, self.begin = einsum, turns, begin
        self.calls = 0
        self.others: dict[str, None] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        product = product_of(func, args, kwargs)
        if product is None or self.in_function:
            return func(*args, **kwargs)
        equation, original, a, b = product
        if Einsum.of(equation) != self.einsum:
            self.others[f"{equation} of {list(a.shape)} and {list(b.shape)}"] = None
            return func(*args, **kwargs)
        self.calls += 1
        if (self.calls - 1) % self.turns:
            return func(*args, **kwargs)
        with computing:
            return self.einsum(original, a, b, self.begin())


def find(modules: Mapping[str, nn.Module], products: Mapping[str, Equations]) -> Iterator[Layer]:
    """A layer for each declared product. Raises InstrumentError for an equation that is not one of a product."""
    equations: dict[str, list[str]] = {}
    for pattern, declared in products.items():
        for name in modules:
            if fnmatchcase(name, pattern):
                equations.setdefault(name, []).extend([declared] if isinstance(declared, str) else declared)
    for name, declared in equations.items():
        einsums = [_einsum(equation) for equation in declared]
        where, path = site(name)
        for at, (equation, einsum) in enumerate(zip(declared, einsums, strict=True)):
            end = f".{at}" * bool(at)
            # Of equal equations the first has the innermost mode, which leaves the calls of the others.
            forward = partial(_forward, name, modules[name], equation, einsum, einsums[at:].count(einsum))
            yield Layer(
                name,
                modules[name],
                replace(where, module=where.module + end),
                whole,
                replaces(modules[name], "forward", forward),
                path + end,
                part=f"product {at}",
                is_declared=True,
            )


def _einsum(equation: str) -> Einsum:
    einsum = Einsum.of(equation.replace(" ", ""))
    if einsum is None:
        raise InstrumentError(
            f"products: {equation!r} is not a product of two tensors: write one such as 'bhls,bhsp->bhlp', without an "
            "ellipsis, in which a letter occurs once in an operand, one or more are in both operands and not in the "
            "result, and those of one operand alone are in the result"
        )
    return einsum


def _forward(
    name: str, module: nn.Module, equation: str, einsum: Einsum, turns: int, begin: Begin
) -> Callable[..., Any]:
    forward = module.forward

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        with DeclaredMode(einsum, turns, begin) as mode:
            result = forward(*args, **kwargs)
        if not mode.calls:
            others = "; ".join(mode.others) or "none by einsum or matmul"
            raise InstrumentError(
                f"{name or 'the model'} ({type(module).__name__}) does not make the product {equation!r}: it makes "
                f"{others}; code compiled by torch.jit and kernels of other packages are not seen"
            )
        return result

    return eagerly(intercepted)
