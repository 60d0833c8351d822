"""What a step computes besides its products, against torch: hooks on modules, gradients, and the optimizer's state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import Other, tensor_names
from tests.collector.instrumented import rows, same
from tests.collector.small_model import build, loss

pytestmark = pytest.mark.slow

# Those of AdamW's steps.
NAMES = tuple(name for place in Other if place is not Other.NEWTON_SCHULZ for name in tensor_names(place))
SHAPE = replace(
    MODELS["deepseek2_lite"]["tiny"], hidden=64, ffn=96, heads=4, kv_lora_rank=32, routed_experts=4, expert_ffn=32
)
NORMS = ("input_layernorm", "kv_layernorm", "pre_mlp_layernorm")
LENGTH = 24


def batch(number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(257, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


class Trained:
    """Two steps of two micro-batches; what torch shows of the first, by the path of the module."""

    def __init__(self, root: Path | None, recipe: str = "mxfp8", **options) -> None:
        self.model = GPTModel(SHAPE)
        self.model.initialize(0)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.logits: list[Tensor] = []
        with Recorder(root, enabled=root is not None, **options) as recorder:
            with instrument(self.model, recipe, recorder, backend="torch"):
                self.step(recorder, 0)
                self.handles = [self.watch(name, module) for name, module in self.model.named_modules()]
                self.before = {name: p.detach().clone() for name, p in self.parameters.items()}
                self.step(recorder, 1)
                self.after = {name: p.detach().clone() for name, p in self.parameters.items()}
                self.gradients = {name: p.grad.clone() for name, p in self.parameters.items()}
                names = list(self.parameters)
                found = self.optimizer.state_dict()["state"]
                self.state = {names[at]: {k: v.clone() for k, v in each.items()} for at, each in found.items()}
                for handle in self.handles:
                    handle.remove()
                self.step(recorder, 2)
        self.weights = [p.detach() for p in self.parameters.values()]

    def watch(self, name: str, module: nn.Module):
        def see(_: nn.Module, args: tuple, output: object) -> None:
            if isinstance(output, Tensor):
                self.inputs.setdefault(name, []).append(args[0].detach().clone())
                self.outputs.setdefault(name, []).append(output.detach().clone())

        return module.register_forward_hook(see)

    def step(self, recorder: Recorder, iteration: int) -> None:
        self.optimizer.zero_grad()
        for number in range(2):
            tokens, labels = batch(2 * iteration + number)
            with recorder.at(iteration, number, record=iteration == 1):
                logits, balance = self.model.logits_and_balance(tokens)
                (F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + balance).backward()
            if iteration == 1:
                self.logits.append(logits.detach())
        self.optimizer.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Trained, pd.DataFrame, Path]:
    root = tmp_path_factory.mktemp("step")
    torch_saw = Trained(root, tensors=NAMES, scores=("mxfp8", "nvfp4"))
    return torch_saw, rows(root), root


def path_of(row) -> str:
    """The module's path in the model, of a norm."""
    inner = "self_attention." if row.module == "kv_layernorm" else ""
    return f"layers.{row.layer_index - 1}.{inner}{row.module}" if row.layer_index else row.module


def test_norms_are_what_hooks_on_them_see(trained):
    saw, found, _ = trained
    of_norms = found[found["module"].str.endswith("norm") & (found["operation"] != "optimizer")]
    expected = {(layer, norm, name): 2 for layer in (1, 2) for norm in NORMS for name in tensor_names(Other.NORM)}
    expected |= {(0, "final_layernorm", name): 2 for name in tensor_names(Other.NORM)}
    assert Counter(zip(of_norms.layer_index, of_norms.module, of_norms.tensor_name, strict=True)) == expected
    for row in of_norms.itertuples():
        path = path_of(row)
        if row.tensor_name == "norm_input":
            assert torch.equal(row.tensor, saw.inputs[path][row.micro_batch])
        elif row.tensor_name == "norm_gain":
            assert torch.equal(row.tensor, saw.before[f"{path}.weight"])
    gradients = of_norms[of_norms["tensor_name"] == "grad_norm_gain"].sort_values("micro_batch")
    for _, same_norm in gradients.groupby(["layer_index", "module"]):
        whole = saw.gradients[f"{path_of(same_norm.iloc[0])}.weight"]
        assert torch.equal(sum(same_norm["tensor"]), whole) and whole.abs().max() > 0


def test_load_and_logits_are_what_the_router_chose_and_the_model_gave(trained):
    saw, found, _ = trained
    for row in found[found["tensor_name"] == "router_load"].itertuples():
        probs = saw.outputs["layers.1.mlp.router"][row.micro_batch].softmax(-1)
        chosen = probs.topk(SHAPE.experts_per_token, -1).indices.flatten()
        assert (row.layer_index, row.module) == (2, "router")
        assert row.tensor.tolist() == chosen.bincount(minlength=SHAPE.routed_experts).tolist()
    for row in found[found["tensor_name"] == "logits"].itertuples():
        assert (row.layer_index, row.module) == (0, "head")
        assert torch.equal(row.tensor, saw.logits[row.micro_batch])
    assert found["tensor_name"].value_counts()[["router_load", "logits"]].tolist() == [2, 2]


def test_optimizer_state_is_the_optimizers(trained):
    saw, found, _ = trained
    steps = found[found["operation"] == "optimizer"]
    assert set(steps["iteration"]) == {1} and steps["micro_batch"].isna().all()
    sites = {
        "layers.1.self_attention.linear_kv_up.weight": (2, "kv_up", None),
        "embedding.weight": (0, "embedding", None),
    }
    sites |= {
        "layers.1.mlp.experts.3.linear_fc2.weight": (2, "fc2", 3),
        "final_layernorm.weight": (0, "final_layernorm", None),
    }
    assert len(steps) == len(saw.parameters) * len(tensor_names(Other.PARAMETER))
    for path, (layer, module, expert) in sites.items():
        own = steps[(steps["layer_index"] == layer) & (steps["module"] == module)]
        own = (own[own["expert"].isna()] if expert is None else own[own["expert"] == expert]).set_index("tensor_name")
        old, new = saw.before[path], saw.after[path]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own["tensor"][name], saw.state[path][name])
        assert torch.equal(own["tensor"]["master_weight"], new)
        assert torch.equal(own["tensor"]["update"], new - old) and (new != old).any()
        ratio = torch.stack([(b - a).norm() / a.norm() for a, b in zip(old, new, strict=True)])
        ratio = ratio if old.dim() > 1 else ((new - old).norm() / old.norm())[None]
        torch.testing.assert_close(own["tensor"]["update_ratio"], ratio)


def test_scores_are_along_the_last_axis_and_of_no_gemm(trained):
    _, found, root = trained
    with Catalog.open(root) as catalog:
        scores = catalog.table("score").to_pandas()
    assert scores["gemm"].isna().all() and not scores["used"].any() and found["contracted_axis"].isna().all()
    scored = {"norm_input", "norm_gain", "master_weight", "exp_avg", "exp_avg_sq", "update"}
    assert set(found[found["tensor_id"].isin(scores["tensor_id"])]["tensor_name"]) == scored
    of = found.set_index("tensor_id")
    chosen = scores[scores["tensor_id"].map(of["tensor_name"]).isin(["exp_avg_sq", "norm_input"])].head(40)
    for row in chosen.itertuples():
        x = of["tensor"][row.tensor_id]
        assert row.sqnr_db == pytest.approx(quant.compare(x, quant.fake_quantize(x, row.format))["sqnr_db"], abs=1e-6)


def test_recording_it_changes_no_bit(trained):
    assert same(trained[0].weights, Trained(None).weights)


def test_nothing_is_attached_unless_it_is_named(tmp_path):
    model = GPTModel(SHAPE)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        assert not any("forward" in vars(each) for name, each in model.named_modules() if name)
    with Recorder(tmp_path, tensors=("exp_avg",)) as recorder, instrument(model, None, recorder):
        assert not any("forward" in vars(each) for name, each in model.named_modules() if name)
        assert not recorder.observing.places & {"linear", "attention"}


class Mine(nn.Module):
    """A language model of torch's own modules."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed, self.recompute = nn.Embedding(32, 16), recompute
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            plain = self.recompute is None
            x = x + (layer(x) if plain else checkpoint(layer, x, use_reentrant=self.recompute))
        return self.lm_head(self.norm(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_a_model_of_ones_own(tmp_path, recompute):
    """Its norms, head and parameters, in the recorded iterations; what it does not have is said."""
    torch.manual_seed(0)
    model = Mine(recompute)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    missing = pytest.warns(UserWarning, match="nothing was recorded as router_load:")
    with (
        missing,
        Recorder(tmp_path, tensors=(*NAMES, "input"), scores=(), iterations=1) as recorder,
        instrument(model, None, recorder),
    ):
        for iteration in range(2):
            optimizer.zero_grad()
            for number in range(2):
                tokens, labels = batch(number)
                logits = model(tokens % 32)
                F.cross_entropy(logits.flatten(0, 1), labels.flatten() % 32).backward()
            optimizer.step()
            if not iteration:
                last, inner = (norm.weight.grad.clone() for norm in (model.norm, model.layers[0][0]))
                state = optimizer.state[model.layers[1][1].bias]["exp_avg"].clone()
    found = rows(tmp_path)
    assert set(found["iteration"]) == {0} and "forward" not in vars(model.norm)
    counts = found[found["operation"] != "optimizer"].groupby(["layer_index", "module"])["tensor_name"].agg(Counter)
    norm = dict.fromkeys(tensor_names(Other.NORM), 2)
    assert counts.to_dict() == {
        (0, "norm"): norm, (0, "head"): {"logits": 2}, (1, "0"): norm, (2, "0"): norm,
        (1, "1"): {"input": 2}, (2, "1"): {"input": 2},
    }  # fmt: skip
    of = found.set_index(["layer_index", "module", "tensor_name"]).sort_index()
    for place, expected in (((0, "norm"), last), ((1, "0"), inner)):
        parts = of.loc[(*place, "grad_norm_gain")].sort_values("micro_batch")
        assert parts["micro_batch"].tolist() == [0, 1] and torch.equal(sum(parts["tensor"]), expected)
    (recorded,) = of.loc[[(2, "1.bias", "exp_avg")], "tensor"]
    assert torch.equal(recorded, state)
    assert {"embed", "lm_head", "1", "1.bias", "norm"} <= {m for _, m, name in of.index if name == "exp_avg"}


def test_layers_are_chosen(tmp_path):
    model, tokens = Mine(), batch(0)[0] % 32
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(tmp_path, tensors=("norm_input", "master_weight"), scores=()) as recorder:
        with instrument(model, None, recorder, capture="last"):
            model(tokens).sum().backward()
            optimizer.step()
    found = rows(tmp_path, values=False)
    assert set(found["layer_index"]) == {2} and set(found["tensor_name"]) == {"norm_input", "master_weight"}


def test_a_step_is_recorded_though_none_of_its_products_is(tmp_path):
    """Without `at`: the passes of the model tell the iteration, and what is captured has no product."""
    model = build(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(tmp_path, tensors=("exp_avg",), iterations=1) as recorder:
        with instrument(model, "bf16", recorder, capture="norm"):
            for _ in range(2):
                loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
    found = rows(tmp_path)
    assert set(found["iteration"]) == {0} and set(found["module"]) == {
        "input_layernorm",
        "pre_mlp_layernorm",
        "final_layernorm",
    }
