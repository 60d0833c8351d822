"""What products='kernel' does not see is refused at the end of the first pass, as with the adapters, and so are
transforms of torch.func. Products that are spelled otherwise are seen, and are as in a linear layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.kernel import products as of_kernels
from binade.quant import fake_quantize
from tests.collector.instrumented import Recorder

WIDTH = 16
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
FP8 = torch.float8_e4m3fn


class Own(nn.Module):
    """A linear layer, and a product of its own by a function of the weight."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.product = nn.Linear(WIDTH, WIDTH), product
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.up(x), self.weight)


def without_gradients(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        copy = weight.bfloat16().float()
    return x @ copy


def by_function(x: Tensor, weight: Tensor) -> Tensor:
    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight.to(FP8).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    return Rounding.apply(x, weight)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones(())
    return torch._scaled_mm(x.detach().to(FP8), weight.detach().to(FP8).t(), scale_a=one, scale_b=one)


NOT_SEEN = {
    "copy in another dtype": without_gradients,
    "computed": lambda x, w: x @ (w - w.mean()),
    "normalized": lambda x, w: x @ F.normalize(w).detach(),
    "rounded in a function": by_function,
    "a vector": lambda x, w: torch.stack([torch.mv(w, row) for row in x]),
    "dot products": lambda x, w: torch.stack([torch.stack([r.dot(c) for c in w]) for r in x]),
    "another kernel": scaled,
}


@pytest.mark.parametrize("kind", NOT_SEEN)
def test_what_is_not_seen_is_refused(kind: str) -> None:
    model = Own(NOT_SEEN[kind])
    text = r"the model \(Own\) computes a product with weight by \w+ that is not intercepted"
    with instrument(model, "mxfp8", products="kernel"), pytest.raises(InstrumentError, match=text):
        model(X)
    with instrument(nn.Sequential(model, nn.Linear(WIDTH, WIDTH)), "mxfp8", products="kernel", exclude=["0"]):
        model(X)


SEEN = {
    "view": lambda x, w: x @ w,
    "detached": lambda x, w: x @ w.detach(),
    "data": lambda x, w: x @ w.data,
    "copied": lambda x, w: x @ w.detach().clone(),
    "stacked": lambda x, w: x @ torch.stack([w, w]).detach()[1],
    "kept in range": lambda x, w: x @ w.clamp(-9, 9),
    "inner": lambda x, w: torch.inner(x, w.t()),
    "einsum": lambda x, w: torch.einsum("mk,kn->mn", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "multi_dot": lambda x, w: torch.linalg.multi_dot((x, w)),
}


@pytest.mark.parametrize("kind", SEEN)
def test_other_spellings_are_rounded_and_nothing_is_said(kind: str) -> None:
    model = Own(SEEN[kind])
    with warnings.catch_warnings(), instrument(model, "mxfp8", products="kernel"):
        warnings.simplefilter("error")
        y = model(X)
    x = F.linear(*(fake_quantize(x, "mxfp8") for x in (X, model.up.weight))) + model.up.bias
    assert torch.equal(y, fake_quantize(x, "mxfp8") @ fake_quantize(model.weight, "mxfp8", dim=0))


def test_what_is_left_out_is_not_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(scaled))
    with warnings.catch_warnings(), instrument(model, "mxfp8", products="kernel", exclude=["1", "1.*"]):
        warnings.simplefilter("error")
        model(X)


def by_batches(x: Tensor, weight: Tensor) -> Tensor:
    """Sums the weight's gradient over batches, each in a product of its own."""

    class Summing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            x, grads = (each.unflatten(0, (2, -1)) for each in (x, grad))
            return grad @ weight.t(), torch.bmm(x.mT, grads).sum(0)

    return Summing.apply(x, weight)


def test_a_product_of_a_backward_pass_that_is_not_known_is_named_once() -> None:
    model = Own(by_batches)
    with instrument(model, "mxfp8", products="kernel"):
        with pytest.warns(
            UserWarning, match=r"product by weight multiplies \[2, 16, 4\] by \[2, 4, 16\] \(bmm\), which"
        ):
            model(X).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(X).sum().backward()


class Other(nn.Module):
    """What multiplies, and is no linear layer: embeddings, a convolution, rotary angles, integers, and attention by
    torch's kernel (its mask, which has a gradient, makes that multiply in bmm), or written out."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.embedding, self.convolution = nn.Embedding(32, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.linear, self.mask = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1, 1, 8, 8))
        self.written = written

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.arange(8.0)[:, None] @ torch.arange(float(WIDTH))[None]
        x = self.convolution(x.mT).mT + angles.cos() + (tokens[0, :, None] @ tokens[:1]).sum()
        heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        if self.written:
            x = (heads @ heads.mT).softmax(-1) @ heads
        else:
            x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.mask)
        return x.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "FA_linear_mxfp8"])
def test_products_of_other_kinds_are_not_named(tmp_path: Path, recipe: str, written: bool) -> None:
    torch.manual_seed(0)
    model, tokens = nn.Sequential(Other(written)), torch.randint(32, (2, 8))
    with warnings.catch_warnings(), Recorder(tmp_path) as recorder:
        warnings.filterwarnings("error", ".*neither rounded nor recorded.*")
        with instrument(model, recipe, recorder, products="kernel", cores=["0"] if written else []):
            model(tokens).square().mean().backward()


def test_several_modules_are_named_in_one_error() -> None:
    model = nn.Sequential(*(Own(by_function) for _ in range(3)))
    text = r"0 and 2 more \(Own\) computes a product with 0\.weight by matmul .* exclude=\['0', '1', '2'\]"
    with instrument(model, "mxfp8", products="kernel"), pytest.raises(InstrumentError, match=text):
        model(X)


def test_attention_that_is_no_core_is_refused_if_it_is_to_be_rounded() -> None:
    class Attending(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return attend(super().forward(x)[None])[0]

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    class Inside(nn.Module):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        def forward(self, x: Tensor) -> Tensor:
            assert F.scaled_dot_product_attention  # the name by which the core is found
            return self.Function.apply(x[None])[0]

    for kind, text in (
        (Attending, "computes .* scaled_dot_product"),
        (Inside, "in the forward method of a torch.auto"),
    ):
        module = kind(WIDTH, WIDTH) if kind is Attending else kind()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), module)
        with instrument(model, "mxfp8", products="kernel"), pytest.raises(InstrumentError, match=text):
            model(X)
        with instrument(model, "linear_mxfp8", products="kernel"):
            model(X)


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda each: f(each).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x).sum(-1),
}


@pytest.mark.parametrize("products", [{}, "kernel"])
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("within", [False, True])
def test_a_transform_is_refused_if_it_would_be_rounded(tmp_path: Path, kind: str, within: bool, products: Any) -> None:
    """within: the model's own forward method calls the transform of a function of its weight."""
    transform = TRANSFORMS[kind]
    if within:
        model = Own(lambda x, w: transform(lambda each: each @ w, x))
        run = model
    else:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def run(x: Tensor) -> Tensor:
            return transform(model, x)

    expected = run(X)
    with instrument(model, "mxfp8", products=products):
        with pytest.raises(InstrumentError, match=r"runs in a transform of torch.func \(vmap, grad, jvp\), in which"):
            run(X)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder, products=products):
        with pytest.warns(UserWarning, match=r"products in transforms of torch.func \(vmap, grad, jvp\) are not"):
            assert torch.equal(run(X), expected)


@pytest.mark.parametrize("kept", [1, None])
def test_a_backward_pass_that_comes_too_late_is_named_once(monkeypatch: pytest.MonkeyPatch, kept: int | None) -> None:
    """kept: the calls that are kept; None: an optimizer steps, and the model runs again, before the backward pass."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    if kept:
        monkeypatch.setattr(of_kernels, "KEPT", kept)
    with instrument(model, "mxfp8", products="kernel"):
        loss = model(X).sum()
        if not kept:
            optimizer.step()
            model(X)
        with pytest.warns(UserWarning, match="are neither rounded nor recorded with products='kernel'"):
            loss.backward(retain_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.backward()
