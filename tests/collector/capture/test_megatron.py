"""Instrumenting megatron-core's own models on the CPU, with its local layer spec, schedules and recomputation.

BINADE_MEGATRON is a directory with another version of megatron-core (pip install --no-deps --target DIRECTORY
megatron-core==0.15.3): these tests then run against that one.
"""

from __future__ import annotations

import os
import sys

if "BINADE_MEGATRON" in os.environ:
    sys.path.insert(0, os.environ["BINADE_MEGATRON"])

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.model import GPTModel as OurModel
from binade.collector.models.registry import MODELS
from binade.collector.models.shape import Shape
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, list_runs
from binade.data.run.events import read_events
from tests.collector.instrumented import (
    BOTH_WAYS,
    CORE,
    LINEAR,
    Recorder,
    linear_products,
    names,
    rows,
    same,
    score_products,
    state,
    train,
    value,
)
from tests.collector.megatron_cpu import OnCpu, build, inputs, load, megatron_on_cpu
from tests.conftest import MadeOnce

pytestmark = pytest.mark.slow
LAYERS, LENGTH, VOCAB = 2, 16, 257
LLAMA = replace(
    MODELS["llama32-1b"]["tiny"], hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, layers=LAYERS, rope_scaling=None
)
DEEPSEEK = MODELS["deepseek2_lite"]["tiny"]
MODULES = ("qkv", "proj", "fc1", "fc2")
EXPECTED = {
    **{(layer, module): LINEAR for layer in (1, 2) for module in MODULES},
    **{(layer, "core"): CORE for layer in (1, 2)},
}
RECOMPUTATION = {
    "none": ({}, set()),
    "full": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {*MODULES, "core"},
    ),
    "selective": ({"recompute_granularity": "selective"}, {"core"}),
}


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory) -> Iterator[None]:
    assert num_microbatches_calculator.__file__.startswith(os.environ.get("BINADE_MEGATRON", sys.prefix))
    with megatron_on_cpu(tmp_path_factory.mktemp("megatron") / "store"):
        yield


def model_of(shape: Shape = LLAMA, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    ours = OurModel(shape)
    ours.initialize(0)
    model = build(shape, dtype, **settings)
    missing = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    if missing:
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in weights.items():
                torch.manual_seed(len(name))
                parameter.normal_(0.0, 0.1)
    else:
        load(model, dict(ours.named_parameters()))
    return model


def loss(model: nn.Module, micro_batch: int) -> Tensor:
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(micro_batch))
    return model(**inputs(tokens[:, :-1]), labels=tokens[:, 1:]).mean()


def counts(each: int) -> dict:
    return {site: dict.fromkeys(of_site, each) for site, of_site in EXPECTED.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recomputed", RECOMPUTATION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_recording_changes_no_bit(tmp_path, dtype, recomputed):
    settings, modules = RECOMPUTATION[recomputed]
    plain = train(model_of(dtype=dtype, **settings), loss, micro_batches=2)
    model = model_of(dtype=dtype, **settings)
    before = state(model)
    with Recorder(tmp_path, max_bytes=0) as recorder, instrument(model, None, recorder):
        recorded = train(model, loss, micro_batches=2, after=recorder.step)
    assert same(recorded, plain)
    assert state(model) == before
    found = rows(tmp_path, values=False)
    assert names(found) == counts(2 * 2)
    assert set(found[found["recomputed"]]["module"]) == modules
    assert found["recomputed"].sum() == found["module"].isin(modules).sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recomputed", RECOMPUTATION)
def test_mxfp8_products_are_those_of_the_recorded_operands(tmp_path, recomputed):
    model = model_of(**RECOMPUTATION[recomputed][0])
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        quantized = train(model, loss)
    found = rows(tmp_path, iteration=0)
    for layer in (1, 2):
        for module in MODULES:
            linear_products(found, layer, module)
        score_products(found, layer, LLAMA.head_dim**-0.5)
    with instrument(unrecorded := model_of(), "mxfp8", backend="torch"):
        assert same(train(unrecorded, loss), quantized)
    assert not same(train(model_of(), loss), quantized)


@pytest.mark.thorough
def test_biases_are_added_as_megatron_adds_them(tmp_path):
    """A format of the operands' own values leaves the computation as all there is to differ."""
    plain = train(model_of(dtype=torch.bfloat16, add_bias_linear=True), loss)
    for recipe in (None, "linear_bf16"):
        model = model_of(dtype=torch.bfloat16, add_bias_linear=True)
        with Recorder(tmp_path) as recorder, instrument(model, recipe, recorder, head=True):
            assert same(train(model, loss), plain)
    assert "head" in set(rows(tmp_path)["module"])


@pytest.mark.thorough
def test_latent_attention_experts_and_the_router(tmp_path):
    plain = train(model_of(DEEPSEEK), loss, steps=1)
    model = model_of(DEEPSEEK)
    before = state(model)
    with Recorder(tmp_path / "plain") as recorder, instrument(model, None, recorder):
        assert same(train(model, loss, steps=1), plain)
    assert state(model) == before
    found = rows(tmp_path / "plain")
    latent = {"q", "kv_down", "kv_up", "proj"}
    routed = {"router", "shared_fc1", "shared_fc2", "fc1", "fc2"}
    assert {module for _, module in names(found)} == {"core", *latent, *routed}
    experts = found[found["expert"].notna()]
    assert set(experts["module"]) == {"fc1", "fc2"} and set(experts["expert"]) <= set(range(DEEPSEEK.routed_experts))
    with Recorder(tmp_path / "mxfp8") as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        loss(model, 0).backward()
    found = rows(tmp_path / "mxfp8")
    assert set(found[found["module"] == "router"]["quant_type"]) == {"bf16"}
    for module in ("q", "kv_up", "shared_fc1"):
        linear_products(found, 2, module)
    given = found.query("layer_index == 2 and module == 'fc2' and tensor_name == 'input'")  # an expert may get no token
    assert len(given) > 1
    for expert in set(given["expert"]):
        linear_products(found, 2, "fc2", expert=expert)
    score_products(found, 2, model.decoder.layers[1].self_attention.core_attention.softmax_scale)


def test_an_exception_leaves_the_model_as_it_was():
    model = model_of()
    before = state(model)
    with pytest.raises(IndexError), instrument(model, "mxfp8", backend="torch"):
        model(**inputs(torch.full((1, 4), 10**6)))
    assert state(model) == before


class TestRefusals:
    def refused(self, model: nn.Module, match: str, recipe: str = "mxfp8") -> None:
        before = state(model)
        with pytest.raises(InstrumentError, match=match), instrument(model, recipe, backend="torch"):
            loss(model, 0)
        assert state(model) == before

    def test_a_core_that_attends_in_another_way(self):
        class Fused(DotProductAttention):
            def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
                return query.flatten(2)

        model = model_of()
        model.decoder.layers[1].self_attention.core_attention.__class__ = Fused
        self.refused(
            model, r"decoder\.layers\.1\.self_attention\.core_attention \(Fused\) called .* made 0 products of its own"
        )

    def test_a_layer_that_does_not_call_forward_impl(self):
        class Direct(ColumnParallelLinear):
            def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
                return torch.nn.functional.linear(input_, self.weight), None

        model = model_of()
        model.decoder.layers[0].mlp.linear_fc1.__class__ = Direct
        self.refused(model, r"decoder\.layers\.0\.mlp\.linear_fc1 \(Direct\) (computes|did not call)", "linear_mxfp8")

    def test_transformer_engine(self):
        """It cannot run here; what is tested is that such a class is known by where it comes from."""
        engine = type("TELinear", (nn.Linear,), {"__module__": "megatron.core.extensions.transformer_engine"})
        model = model_of()
        model.decoder.layers[0].mlp.linear_fc2 = engine(2, 2)
        self.refused(
            model, r"decoder\.layers\.0\.mlp\.linear_fc2 \(TELinear\) cannot be intercepted: Transformer Engine"
        )

    def test_fused_gradient_accumulation(self):
        model = model_of()
        model.decoder.layers[0].mlp.linear_fc2.gradient_accumulation_fusion = True
        self.refused(model, r"linear_fc2 .*: use --no-gradient-accumulation-fusion")


def schedule(provider: Callable[..., nn.Module], iterations: int, micro_batches: int) -> list[Tensor]:
    """A training loop of Megatron's parts: its schedule without pipelining, an evaluation after each iteration."""
    model = provider(pre_process=True, post_process=True)
    model.model_type = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []

    def forward_step(data: Iterator[int], model: nn.Module) -> tuple[Tensor, Callable]:
        return loss(model, next(data)), lambda output: (output, {"loss": output.detach()})

    def run(forward_only: bool) -> None:
        with OnCpu():
            reduced = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(range(micro_batches)),
                model=model,
                num_microbatches=micro_batches,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=forward_only,
            )
        losses.extend(each["loss"] for each in reduced)

    for _ in range(iterations):
        optimizer.zero_grad()
        model.train()
        run(False)
        optimizer.step()
        model.eval()
        run(True)
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.fixture
def micro_batches() -> Iterator[int]:
    """Megatron's own count of micro-batches an iteration."""
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    yield num_microbatches_calculator.get_num_microbatches()
    num_microbatches_calculator.destroy_num_microbatches_calculator()


@pytest.fixture
def megatron_lm(monkeypatch, micro_batches) -> Callable[[bool], SimpleNamespace]:
    """What the example needs of Megatron-LM's pretrain_gpt, around megatron.core's model and schedule; with arguments
    as its training loop keeps them, or without."""

    def install(with_arguments: bool) -> SimpleNamespace:
        result = SimpleNamespace(values=None)
        variables = ModuleType("megatron.training.global_vars")

        def pretrain(datasets: Any, provider: Callable, *_: Any, **__: Any) -> None:
            result.values = schedule(provider, 2, micro_batches)

        def model_provider(builder: Callable, pre_process: bool, post_process: bool) -> nn.Module:
            return builder()

        modules = {
            "pretrain_gpt": {
                **{"gpt_builder": model_of, "model_provider": model_provider, "pretrain": pretrain},
                **{"ModelType": ModelType, "forward_step": None, "get_embedding_ranks": None},
                **{"has_nvidia_modelopt": False, "set_startup_timestamps": lambda **_: None},
                "train_valid_test_datasets_provider": SimpleNamespace(),
                "inprocess_restart": SimpleNamespace(
                    maybe_wrap_for_inprocess_restart=lambda pretrain: (pretrain, None)
                ),
            },
            "megatron.training": {},
        }
        for name, words in modules.items():
            module = ModuleType(name)
            vars(module).update(words)
            monkeypatch.setitem(sys.modules, name, module)
        if with_arguments:
            variables._GLOBAL_ARGS = SimpleNamespace(curr_iteration=7)
            monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
        return result

    return install


EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron_pretrain.py"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("with_arguments", [False, True], ids=["core", "training loop"])
def test_the_three_lines_of_the_example(tmp_path, monkeypatch, megatron_lm, micro_batches, with_arguments):
    plain = schedule(lambda **_: model_of(), 2, micro_batches)
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path))
    result = megatron_lm(with_arguments)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert same(result.values, plain)
    (run,) = list_runs(tmp_path)[0]
    assert run.status.state == DONE
    found = rows(tmp_path)
    if with_arguments:  # whose iteration stands still here
        assert set(found["iteration"]) == {7}
    else:
        assert names(found) == counts(1)  # the first micro-batch of the first iteration, and no evaluation
    assert found[["iteration", "micro_batch"]].drop_duplicates().to_numpy().tolist() == [[7 * with_arguments, 0]]


def test_iterations_are_megatrons(tmp_path, micro_batches):
    model = model_of()
    with (
        Recorder(tmp_path, tensors=("input",), max_bytes=0) as recorder,
        instrument(model, "linear_mxfp8", recorder, backend="torch"),
    ):
        schedule(lambda **_: model, 2, micro_batches)
    found = rows(tmp_path, values=False)
    assert found.groupby(["iteration", "micro_batch"]).size().to_dict() == {
        (iteration, micro): LAYERS * len(MODULES) for iteration in (0, 1) for micro in range(micro_batches)
    }


class FeedForward(nn.Module):
    """A layer with sequence parallelism, which the local spec's norms do not take: its feed-forward part alone, or
    `experts` of them, which Megatron divides among ranks with sequence parallelism only."""

    def __init__(self, sequence_parallel: bool, experts: int | None = None) -> None:
        super().__init__()
        self.layer_number = 1
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            ffn_hidden_size=64,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
            bf16=True,
            gated_linear_unit=True,
            bias_activation_fusion=False,
            add_bias_linear=False,
            num_moe_experts=experts,
            moe_token_dispatcher_type="allgather",
        )
        torch.manual_seed(0)
        if experts:
            self.mlp = MoELayer(config, get_moe_module_spec(use_te=False, num_experts=experts).submodules)
        else:
            self.mlp = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)[0]


def feed_forward_loss(model: FeedForward, micro_batch: int) -> Tensor:
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(micro_batch)).bfloat16()
    if model.sequence_parallel:
        x = x.chunk(2)[parallel_state.get_tensor_model_parallel_rank()]
    return model(x.requires_grad_()).float().square().sum()


def _rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    makers: dict[str, tuple[Callable, Callable]] = {
        "gpt": (model_of, loss),
        "tensor": (lambda: FeedForward(False), feed_forward_loss),
        "sequence": (lambda: FeedForward(True), feed_forward_loss),
        "experts": (lambda: FeedForward(True, experts=2), feed_forward_loss),
    }
    with megatron_on_cpu(directory / "store", rank, 2):
        said = {}
        for name, (make, loss_of) in makers.items():
            plain = train(make(), loss_of)
            for recipe in ("bf16", "mxfp8"):
                model = make()
                before = state(model)
                only_first = {} if rank == 0 else {"capture": "layer1[.].*fc2"}  # ranks need not record the same
                with Recorder(directory / name / recipe, tensors=()) as recorder:
                    with instrument(model, recipe, recorder, backend="torch", **only_first):
                        trained = train(model, loss_of, after=recorder.step)
                if recipe == "bf16":
                    said[name] = same(trained, plain)
                else:
                    said[f"{name} quantized"] = not same(trained, plain)
                said[f"{name} {recipe} restored"] = state(model) == before
        torch.save(said, directory / f"said{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(root_once: MadeOnce) -> Path:
    return root_once("megatron ranks", lambda made: torch.multiprocessing.spawn(_rank, (made,), nprocs=2))


@pytest.mark.thorough
def test_two_tensor_parallel_ranks_train_as_without(two_ranks):
    for rank in range(2):
        said = torch.load(two_ranks / f"said{rank}.pt", weights_only=True)
        assert said and all(said.values()), {name for name, is_so in said.items() if not is_so}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["gpt", "tensor", "sequence", "experts"])
def test_two_ranks_record_their_shards(two_ranks, case):
    found = rows(two_ranks / case / "mxfp8", iteration=0)
    assert set(found["rank"]) == {0, 1} == set(found["tp_rank"])
    found = found[(found["expert"] == 0).fillna(case != "experts")]
    for rank in range(2):
        linear_products(found, 1, "fc2", rank=rank)
    linear_products(found, 1, "fc1", rank=0)
    if case == "gpt":
        linear_products(found, 2, "qkv", rank=0)
        score_products(found, 2, LLAMA.head_dim**-0.5, rank=0)
    fc1 = found[(found["module"] == "fc1") & (found["rank"] == 0)].set_index("tensor_name")
    assert fc1["shard"].to_dict() == {
        "input": "whole",
        "weight": "slice",
        "output": "slice",
        "grad_output": "slice",
        "grad_input": "partial",
        "grad_weight": "slice",
    }
    assert set(fc1["shard_stride"]) == {1, 2}  # gate and up
    with Catalog.open(two_ranks / case / "bf16") as catalog:
        whole = {}
        of_fc2 = catalog.tensors().query("module == 'fc2' and iteration == 0 and layer_index == 1")
        for row in of_fc2[(of_fc2["expert"] == 0).fillna(case != "experts")].itertuples():
            whole[row.tensor_name] = catalog.unsharded(row.tensor_id)
    x, w = whole["input"].float(), whole["weight"].float()
    assert x.shape[-1] == w.shape[-1] == (LLAMA.ffn if case == "gpt" else 64)
    error = (whole["output"].float() - x @ w.t()).norm() / whole["output"].float().norm()
    assert error < (1e-6 if case == "gpt" else 2**-7)


def test_a_router_has_a_part_of_the_sequence(two_ranks):
    router = rows(two_ranks / "experts" / "mxfp8", values=False, iteration=0, module="router")
    divided = {row.tensor_name: (row.shard, row.shard_axis) for row in router.fillna({"shard_axis": -9}).itertuples()}
    tokens = dict.fromkeys(("input", "output", "grad_output", "grad_input"), ("slice", 0))
    assert divided == {**tokens, "weight": ("whole", -9), "grad_weight": ("partial", -9)}


@BOTH_WAYS
def test_a_head_is_quantized_only_when_asked_for(tmp_path, products):
    outputs = []
    for options in ({}, {"head": True}):
        model = model_of()
        with Recorder(tmp_path / str(bool(options))) as recorder:
            with instrument(model, "linear_mxfp8", recorder, backend="torch", products=products, **options):
                outputs.append(loss(model, 0).detach())
    assert not torch.equal(*outputs)
    assert "head" not in set(rows(tmp_path / "False")["module"])
    head = rows(tmp_path / "True", module="head")
    assert torch.equal(value(head, 0, "head", "weight"), model.shared_embedding_or_output_weight())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [False, True], ids=["sound", "from micro-batch 0 alone"])
def test_main_grad_is_the_sum_of_the_micro_batches(tmp_path, lost):
    """bfloat16 weight gradients, which Megatron's DistributedDataParallel adds in float32."""
    model = model_of(dtype=torch.bfloat16)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, config, model)
    weights = {f"layers.{n}.mlp.linear_fc1": model.decoder.layers[n].mlp.linear_fc1.weight for n in range(LAYERS)}
    returned: dict[str, list[Tensor]] = {name: [] for name in weights}
    for name, weight in weights.items():
        weight.register_hook(lambda gradient, name=name: returned[name].append(gradient.double()))
    mains = [nn.Parameter(weight.detach().float()) for weight in weights.values()]  # as of Megatron's mixed precision
    optimizer = torch.optim.SGD(mains, lr=0.1)
    with (
        Recorder(tmp_path, max_bytes=0, measures=("accumulated",)) as recorder,
        instrument(model, "mxfp8", recorder, backend="torch"),
    ):
        wrapped.zero_grad_buffer()
        for micro_batch in range(3):
            before = [weight.main_grad.clone() for weight in weights.values()]
            loss(wrapped, micro_batch).backward()
            for weight, gradient in zip(weights.values(), before if lost and micro_batch else (), strict=False):
                weight.main_grad.copy_(gradient)
        for parameter in model.parameters():
            parameter.main_grad /= 3
        optimizer.step()
    found = rows(tmp_path, values=False, tensor_name="accumulation_error")
    assert set(found["module"]) == set(MODULES) and len(found) == LAYERS * len(MODULES)
    for layer, (name, weight) in enumerate(weights.items(), 1):
        s, g = torch.stack(returned[name]).sum(0), weight.main_grad.double()
        measured = found[(found["module"] == "fc1") & (found["layer_index"] == layer)]["mean"].item()
        assert measured == pytest.approx(float((s / 3 - g).norm() / g.norm()), rel=1e-3, abs=1e-7)
        assert measured > 0.5 if lost else measured < 1e-6
    assert [event.place for event in read_events(recorder.writer.directory)] == ["layer2.fc1 grad_weight"] * lost
