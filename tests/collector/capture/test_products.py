"""Products that are declared by einsum equations: against torch.einsum, and in chunked scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from binade import collector
from binade.app.measures.map_measure import CellQuery
from binade.app.measures.values import computed
from binade.app.questions.map.compute import cells
from binade.collector import coverage, instrument
from binade.collector.advice.advice import AdviceRequest, Operands, advise
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.index.catalog import Catalog
from binade.data.run.effects import EffectGroup
from binade.data.words.filter import Filter
from binade.quant import fake_quantize
from binade.quant.metrics import score
from tests.collector.effect_rows import effect
from tests.collector.instrumented import LINEAR, Recorder, names, rows, same, state, train, value

pytestmark = pytest.mark.slow

PRODUCT = {"left", "right", "product", "grad_product", "grad_left", "grad_right"}
SIZES = dict(zip("abcdefg", (2, 3, 40, 33, 5, 4, 7), strict=True))
EQUATIONS = {
    "matrices": "ec,cd->ed",
    "middle axes, permuted result": "aecb,abcd->adeb",
    "contracted axes in two orders": "facbe,fdbac->dfe",
    "several axes of each operand": "bcea,bcdf->adfbe",
    "a matrix and a vector": "bec,bc->eb",
}
WRITTEN: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "other letters": ("bcd,bdf->bcf", lambda a, b: torch.einsum("Zyx, Zxw -> Zyw", a, b)),
    "an ellipsis": ("bcd,bdf->bcf", lambda a, b: torch.einsum("...yx,...xw->...yw", a, b)),
    "no result": ("cd,df->cf", lambda a, b: torch.einsum("xy,yz", a, b)),
    "@": ("bcd,bdf->bcf", lambda a, b: a @ b),
    "bmm": ("bcd,bdf->bcf", torch.bmm),
    "mm": ("cd,df->cf", Tensor.mm),
    "matmul of four axes": ("abcd,abdf->abcf", lambda a, b: torch.matmul(input=a, other=b)),
    "a matrix for all": ("abcd,df->abcf", torch.matmul),
    "more axes on the right": ("bcd,abdf->abcf", torch.matmul),
}


class Multiply(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.product(a, b)


def operands(equation: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    terms = equation.partition("->")[0].split(",")
    return [torch.randn([SIZES[each] for each in x], generator=generator).requires_grad_() for x in terms]


def results(product: Callable[[Tensor, Tensor], Tensor], equation: str) -> list[Tensor]:
    """The product of the operands, and their gradients for a random gradient of it."""
    a, b = operands(equation)
    y = product(a, b)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad(y, (a, b), grad)]


def rounded(x: Tensor, term: str, along: str, fmt: str = "mxfp4") -> Tensor:
    """x, rounded in blocks along the axes of these letters, merged in their order."""
    if len(along) == 1:
        return fake_quantize(x, fmt, dim=term.index(along))
    order = [term.index(each) for each in sorted(term, key=lambda each: along.find(each))]
    moved = x.permute(order).contiguous()
    flat = moved.reshape(*moved.shape[: len(term) - len(along)], -1)
    return fake_quantize(flat, fmt).reshape(moved.shape).permute([order.index(at) for at in range(len(order))])


def of_rounded(equation: str) -> list[Tensor]:
    """`results` of operands in MXFP4, whose products and sums are exact in float64 and in float32."""
    left, right, result = equation.replace("->", ",").split(",")
    inner, rows, columns = (
        "".join(each for each in term if each not in other)
        for term, other in ((set(left) & set(right), result), (left, right), (right, left))
    )
    inner = "".join(each for each in left if each in inner)
    a, b = (x.detach() for x in operands(equation))

    def product(equation: str, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(equation, x.double(), y.double()).float()

    y = product(equation, rounded(a, left, inner), rounded(b, right, inner))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grad_a = product(f"{result},{right}->{left}", rounded(grad, result, columns), rounded(b, right, columns))
    grad_b = product(f"{result},{left}->{right}", rounded(grad, result, rows), rounded(a, left, rows))
    return [y, grad_a, grad_b]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("equation", "product"),
    [
        *((equation, lambda a, b, e=equation: torch.einsum(e, a, b)) for equation in EQUATIONS.values()),
        *WRITTEN.values(),
    ],
    ids=[*EQUATIONS, *WRITTEN],
)
def test_a_product_is_that_of_rounded_operands(tmp_path, equation, product):
    plain, exact = results(product, equation), of_rounded(equation)
    with instrument(model := Multiply(product), "mxfp4", products={"": equation}, backend="torch"):
        assert same(results(model, equation), exact) and not same(plain, exact)
    for recipe, expected in (("bf16", plain), ("mxfp4", exact)):
        with Recorder(tmp_path / recipe) as recorder:
            with instrument(model, recipe, recorder, products={"": equation}, backend="torch"):
                assert same(results(model, equation), expected)
        recorded = rows(tmp_path / recipe).set_index("tensor_name")["tensor"]
        assert set(recorded.index) == PRODUCT
        matrices = [recorded["left"], recorded["right"].mT, recorded["product"]]
        assert all(x.numel() == y.numel() for x, y in zip(matrices, (*operands(equation), plain[0]), strict=True))
        for name, x in zip(("product", "grad_left", "grad_right"), expected, strict=True):
            assert torch.equal(recorded[name].flatten().sort().values, x.flatten().sort().values), name
        if recipe == "mxfp4":
            left, right, grad = (recorded[name] for name in ("left", "right", "grad_product"))
            assert torch.equal(recorded["product"], fake_quantize(left, "mxfp4") @ fake_quantize(right, "mxfp4").mT)
            dgrad = fake_quantize(grad, "mxfp4") @ fake_quantize(right, "mxfp4", -2)
            assert torch.equal(recorded["grad_left"], dgrad)
            wgrad = fake_quantize(grad, "mxfp4", -2).mT @ fake_quantize(left, "mxfp4", -2)
            assert torch.equal(recorded["grad_right"], wgrad)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("product", [torch.matmul, lambda a, b: torch.einsum("bcd,bdf->bcf", a, b)])
def test_an_axis_of_one_element_is_repeated(tmp_path, product):
    a, b = (x.detach() for x in operands("bcd,bdf->bcf"))
    b = b[:1].requires_grad_()
    for recipe in ("bf16", "mxfp4"):
        with Recorder(tmp_path / recipe) as recorder:
            with instrument(model := Multiply(product), recipe, recorder, products={"": "bcd,bdf->bcf"}):
                y = model(a, b)
                (grad,) = torch.autograd.grad(y, b, torch.ones_like(y))
        by_row = (rounded(x, term, "d") if recipe == "mxfp4" else x for x, term in ((a, "bcd"), (b, "bdf")))
        assert torch.equal(y, product(*by_row))
        (recorded,) = rows(tmp_path / recipe, tensor_name="grad_right")["tensor"]
        assert torch.equal(recorded.mT.sum(0, keepdim=True), grad)


def test_autocast_applies_to_a_product(tmp_path):
    equation = "bcd,bdf->bcf"
    product = Multiply(lambda a, b: torch.einsum(equation, a, b))
    with torch.autocast("cpu", torch.bfloat16):
        plain = results(product, equation)
        with Recorder(tmp_path) as recorder, instrument(product, "bf16", recorder, products={"": equation}):
            assert same(results(product, equation), plain)
        with instrument(product, "mxfp8", products={"": equation}):
            assert results(product, equation)[0].dtype == torch.bfloat16
    assert set(rows(tmp_path, values=False)["dtype"]) == {"bfloat16"}


def test_a_result_that_is_modified_in_place_has_its_gradient(tmp_path):
    equation = "abcd,abdf->fbac"

    def masked(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(equation, a, b).mul_(2.0)

    plain = results(masked, equation)
    with (
        Recorder(tmp_path) as recorder,
        instrument(model := Multiply(masked), "bf16", recorder, products={"": equation}),
    ):
        assert same(results(model, equation), plain)
    grad = torch.randn(plain[0].shape, generator=torch.Generator().manual_seed(1))
    (recorded,) = rows(tmp_path, tensor_name="grad_product")["tensor"]
    assert torch.equal(recorded, 2 * grad.permute(2, 1, 3, 0))


HEADS, LENGTH, CHUNK, DIM = 2, 16, 8, 4
FOUR = ("bhik,bhkj->bhij",) * 4
GATED = {"*.mixer": FOUR}


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Gated linear attention [b, h, t, d], S = diag(decay) S + kᵀ v, o = q S, token by token."""
    state, outputs = torch.zeros(*q.shape[:2], DIM, DIM), []
    for t in range(q.shape[2]):
        state = decay[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outputs, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The same by four products in each chunk."""
    state, outputs = torch.zeros(*q.shape[:2], DIM, DIM), []
    for part in zip(*(x.split(CHUNK, 2) for x in (q, k, v, decay)), strict=True):
        own_q, own_k, own_v, total = *part[:3], part[3].cumprod(2)
        scores = (own_q * total) @ (own_k / total).mT
        scores.masked_fill_(torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1), 0.0)
        outputs.append(scores @ own_v + (own_q * total) @ state)
        last = total[:, :, -1:]
        state = last.mT * state + (own_k * last / total).mT @ own_v
    return torch.cat(outputs, 2)


class GatedLinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(HEADS * DIM, 4 * HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.inputs(x).unflatten(-1, (4, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return chunked(q, k, v, 0.8 + 0.2 * gate.sigmoid()).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"mixer": GatedLinearAttention()}) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = {} if self.reentrant is None else {"use_reentrant": self.reentrant}
            x = x + (checkpoint(layer.mixer, x, **again) if again else layer.mixer(x))
        return x


def loss(model: nn.Module, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(2 + micro_batch)
    return model(torch.randn(2, LENGTH, HEADS * DIM, generator=generator).requires_grad_()).square().mean()


def test_the_chunked_form_is_the_recurrent_one():
    q, k, v, gate = torch.randn(4, 2, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    decay = 0.8 + 0.2 * gate.sigmoid()
    torch.testing.assert_close(chunked(q, k, v, decay), recurrent(q, k, v, decay), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["", "reentrant", "checkpoint"])
def test_a_gated_linear_attention(tmp_path, reentrant):
    """Of equal equations each has its turn, twice for two chunks; what is only recorded trains the same weights."""
    plain = train(Decoder(reentrant), loss)
    before = state(model := Decoder(reentrant))
    with Recorder(tmp_path / "bf16", iterations=1) as recorder, instrument(model, "bf16", recorder, products=GATED):
        assert same(train(model, loss), plain)
    assert state(model).keys() == before.keys()
    found = rows(tmp_path / "bf16", layer_type="product")
    twice = dict.fromkeys(PRODUCT, 2)
    once = dict.fromkeys(("grad_product", "grad_left", "grad_right"), 1)  # the last state is not used
    modules = {"mixer": twice, "mixer.1": twice, "mixer.2": twice | {"grad_right": 1}, "mixer.3": twice | once}
    assert names(found) == {(layer, module): counts for layer in (1, 2) for module, counts in modules.items()}
    first = found[found.layer_index == 1].sort_values("captured")
    shapes = [((CHUNK, DIM), (CHUNK, DIM)), ((CHUNK, CHUNK), (DIM, CHUNK)), ((CHUNK, DIM), (DIM, DIM)),
              ((DIM, CHUNK), (DIM, CHUNK))]  # fmt: skip
    for module, pair in zip(modules, shapes, strict=True):
        for name, shape in zip(("left", "right"), pair, strict=True):
            of_module = first[(first.module == module) & (first.tensor_name == name)]
            assert {tuple(each) for each in of_module["shape"]} == {(2, HEADS, *shape)}
    scores, weights = (first[first.module == module] for module in ("mixer", "mixer.1"))
    masked = [x.tril() for x in scores[scores.tensor_name == "product"]["tensor"]]
    assert same(masked, weights[weights.tensor_name == "left"]["tensor"])


@pytest.mark.thorough
def test_what_is_recorded_under_checkpoints_is_the_same(tmp_path):
    tables = []
    for reentrant in (None, True, False):
        root = tmp_path / str(reentrant)
        with Recorder(root, iterations=1) as recorder:
            with instrument(model := Decoder(reentrant), "mxfp4", recorder, products=GATED, backend="torch"):
                train(model, loss, steps=1)
        found = rows(root, layer_type="product")
        tables.append({key: sorted(x.double().sum().item() for x in each["tensor"]) for key, each in found.groupby(
            ["layer_index", "module", "tensor_name"])})  # fmt: skip
    assert tables[0] == tables[1] == tables[2]


def test_layers_are_left_out():
    plain = train(Decoder(), loss)
    options: dict[str, Any] = {"products": GATED, "backend": "torch"}
    recipe = parse_recipe("bf16", product="mxfp4")
    with instrument(model := Decoder(), recipe, **options, skip="1-2"):
        assert same(train(model, loss), plain)
    with instrument(model := Decoder(), recipe, **options, exclude=["*.mixer"]):
        assert same(train(model, loss), plain)
    with instrument(model := Decoder(), recipe, **options, skip="layer1.mixer$"):
        some = train(model, loss)
    with instrument(model := Decoder(), recipe, **options):
        every = train(model, loss)
    assert not same(some, plain) and not same(some, every) and not same(every, plain)


@pytest.mark.thorough
def test_a_twin_step_and_a_watched_step(tmp_path):
    model, twins = Decoder(), []
    with collector.Recorder(tmp_path, scores=("mxfp4",), measures=("result", "blocks")) as recorder:
        with instrument(model, parse_recipe("bf16", product="mxfp4"), recorder, products=GATED, backend="torch"):
            twins.append(recorder.twin(lambda: loss(model), times=1))
            logits = model(torch.randn(2, LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(2)))
            logits.square().mean().backward()
    assert twins[0].changes[0] != 0 and twins[0].gradients[0].bias > 0
    with Catalog.open(tmp_path) as catalog:
        tensors = catalog.tensors().query("layer_type == 'product'").set_index("tensor_id")
        columns = "tensor_id, tensor_name, module, score.*"
        scores = catalog.ask(f"SELECT {columns} FROM score JOIN tensor USING (key) WHERE layer_type = 'product'", [])
        results = tensors[(tensors.tensor_name == "product") & tensors.module.isin(["mixer", "mixer.1"])]
        assert results["result_sqnr_db"].between(5, 60).all() and len(results) == 8
        assert set(catalog.parts()["part"]) == {"product"}
        for row in scores.itertuples():
            x, dim = catalog.load(row.tensor_id), {"forward": -1, "dgrad": -1, "wgrad": -2}[row.gemm]
            dim = -2 if (row.tensor_name, row.gemm) == ("right", "dgrad") else dim
            assert row.sqnr_db == pytest.approx(score(x, "mxfp4", dim).sqnr_db, rel=1e-4, nan_ok=True)
    forward = scores[scores.gemm == "forward"]
    assert set(forward.tensor_name) == {"left", "right"}
    assert {tuple(each) for each in scores[["tensor_name", "gemm"]].to_numpy()} == {
        *(("left", "forward"), ("right", "forward"), ("grad_product", "dgrad")),
        *(("right", "dgrad"), ("grad_product", "wgrad"), ("left", "wgrad")),
    }


def test_the_map_and_the_advice_know_products(tmp_path):
    """What the Map computes from the values is what was recorded, along the axis of each GEMM."""
    with collector.Recorder(tmp_path, scores=("mxfp4", "mxfp8"), measures=()) as recorder:
        with instrument(model := Decoder(), "bf16", recorder, products=GATED, backend="torch"):
            logits = model(torch.randn(2, LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(2)))
            logits.square().mean().backward()
    operands = [Operands("product", layer, "mixer", 64, 64) for layer in (1, 2)]
    effects = [effect("mxfp4", EffectGroup("product"), [0.1, 0.2])]
    with Catalog.open(tmp_path) as catalog:
        where, by = Filter(module=("mixer", "mixer.1")), ["gemm", "product", "tensor", "layer_index"]
        recorded = cells("sqnr_db", CellQuery(catalog, where, "mxfp4")).set_index(by)["value"]
        from_values = computed("sqnr_db", CellQuery(catalog, where, "mxfp4"))[0].set_index(by)["value"]
    recipe = advise("run", operands, effects, AdviceRequest(6)).recipe("mine")
    assert len(recorded) == 3 * 2 * 2 * 2  # GEMMs, operands, products, layers
    assert from_values.to_dict() == pytest.approx(recorded.to_dict())
    assert recipe.product.formats.quantized and recipe.describe().startswith("linear bf16, qk bf16, pv bf16, product ")


MAMBA2 = (
    "bclhn,bcshn->bclsh",  # scores of queries and keys in a chunk: C · Bᵀ
    "bclsh,bcshp->bclhp",  # their output
    "bclhn,bclhp->bchpn",  # the state of a chunk
    "bzch,bzhpn->bchpn",  # the states between chunks
    "bclhn,bchpn->bclhp",  # their output
)


def mamba2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", vocab_size=64, num_hidden_layers=2, **sizes))


def next_token(model: nn.Module, micro_batch: int) -> Tensor:
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(micro_batch))
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.thorough
def test_the_scan_of_mamba2(tmp_path):
    products = {"*.mixer": MAMBA2}
    plain = train(mamba2().train(), next_token)
    with Recorder(tmp_path / "bf16", iterations=1) as recorder:
        with instrument(model := mamba2().train(), "bf16", recorder, products=products):
            assert same(train(model, next_token), plain)
    with Recorder(tmp_path / "mxfp8", iterations=1) as recorder:
        with instrument(model := mamba2().train(), "mxfp8", recorder, products=products, backend="torch"):
            assert not same(train(model, next_token), plain)
    found = rows(tmp_path / "mxfp8")
    modules = ["mixer", *(f"mixer.{at}" for at in range(1, 5))]
    assert names(found) == {
        (layer, name): dict.fromkeys(LINEAR, 1) for layer in (1, 2) for name in ("in_proj", "proj")
    } | {(layer, name): dict.fromkeys(PRODUCT, 1) for layer in (1, 2) for name in modules}
    shapes = [(2, 3, 4, 8, 16), (2, 3, 4, 8, 8), (2, 3, 4, 16, 8), (2, 4, 4, 4), (2, 3, 4, 8, 16)]
    for module, shape in zip(modules, shapes, strict=True):
        left, right, grad = (value(found, 2, module, name) for name in ("left", "right", "grad_product"))
        assert left.shape == shape
        y = fake_quantize(left, "mxfp8", backend="torch") @ fake_quantize(right, "mxfp8", backend="torch").mT
        torch.testing.assert_close(value(found, 2, module, "product"), y, rtol=1e-5, atol=1e-6)
        dgrad = fake_quantize(grad, "mxfp8_e5m2", backend="torch") @ fake_quantize(right, "mxfp8", -2, backend="torch")
        torch.testing.assert_close(value(found, 2, module, "grad_left"), dgrad, rtol=1e-5, atol=1e-9)
    of_products = found[found.layer_type == "product"]
    assert set(of_products.component) == set(of_products.layer_type)
    covered = {row.recorded: row.format for row in coverage(model, "mxfp8", products=products) if row.recorded}
    assert covered == dict.fromkeys(["layer*.in_proj", "layer*.proj", *(f"layer*.{name}" for name in modules)], "mxfp8")
    assert {row.format for row in coverage(model, "linear_mxfp8", products=products) if "mixer" in row.recorded} == {
        "bf16"
    }


def test_what_cannot_be_intercepted_is_refused(tmp_path):
    model = mamba2()
    with pytest.raises(InstrumentError, match=r"else declare it: products=\{'backbone\.layers\.\*\.mixer'"):
        with instrument(model, "mxfp8", backend="torch"):
            next_token(model, 0)
    with pytest.raises(
        InstrumentError, match=r"'bhls,bhsp->bhlp': it makes bclhn,bcshn->bclsh of \[2, 3, 8, 4, 16\] and "
    ):
        with (
            Recorder(tmp_path) as recorder,
            instrument(model, "bf16", recorder, products={"*.0.mixer": "bhls,bhsp->bhlp"}),
        ):
            next_token(model, 0)
    with instrument(model, "mxfp8", products={"*.mixer": MAMBA2[0]}, backend="torch"):
        next_token(model, 0)  # its other products are left alone
    with pytest.raises(InstrumentError, match=r"products='\*\.nope' matches no module"):
        instrument(model, "mxfp8", products={"*.nope": MAMBA2}).__enter__()
    wrong = ("bi...,bj...->bij", "ii,ij->j", "ij,jk->i", "i,j->ij", "ij,ij->ij", "ij,ij->", "ij,jk", "ij,jk,kl->il")
    for equation in wrong:
        with pytest.raises(
            InstrumentError, match=f"products: {equation!r} is not a product of two tensors".replace(".", r"\.")
        ):
            coverage(model, "mxfp8", products={"*.mixer": equation})


def test_a_recipe_has_a_part_for_products():
    recipe = from_toml('[product]\nforward = "mxfp8"\ndgrad.grad_product = "mxfp8_e5m2"\nwgrad.left = "mxfp4"', "mine")
    lines = [line.split(maxsplit=1) for line in recipe.lines() if line.startswith("product")]
    assert [(name.removeprefix("product."), words.split()[-1]) for name, words in lines] == [
        *(("forward.left", "mxfp8"), ("forward.right", "mxfp8"), ("dgrad.grad_product", "mxfp8_e5m2")),
        *(("dgrad.right", "bf16"), ("wgrad.grad_product", "bf16"), ("wgrad.left", "mxfp4")),
    ]
    assert from_toml(to_toml(recipe), "mine").product == recipe.product
    of_all = parse_recipe("mxfp8").product
    assert of_all == parse_recipe("linear_mxfp8", product="mxfp8").product
    assert (of_all.rounded_to("forward_a"), of_all.rounded_to("dgrad_grad")) == ("mxfp8", "mxfp8_e5m2")
    for name in ("linear_mxfp8", "FA_mxfp8", "FA_linear_mxfp8", "nvidia_nvfp4"):
        assert not parse_recipe(name).product.formats.quantized
