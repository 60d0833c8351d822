"""The roofline: times by hand, FLOP against torch's counter, rates against clocks, and advice within a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from binade.collector.advice.advice import AdviceRequest, advise
from binade.collector.advice.costs import AdviceError, Costs, costs
from binade.collector.advice.roofline import GEMMS, Roofline, find_device, products, read_devices
from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.training.targets import CONFIG
from binade.data.catalog import Catalog

FORWARD_PAIR = ("forward_a", "forward_b")
LAYER = replace(MODELS["llama31-8b"]["full"], layers=1)  # 4096 tokens of it are below


def seconds(device: str, place: tuple[str, str], a: str, b: str, gemm: tuple[str, str] = FORWARD_PAIR) -> float:
    roofline = Roofline(find_device(device), products(LAYER, 1, 4096))
    part, module = place
    return roofline.by_place[part, 1, module].seconds(dict(zip(gemm, (a, b), strict=True)), roofline.device)


def test_times_of_a_layer_of_8b_on_an_h100():
    """By hand from 989 and 1979 TFLOP/s and 3.35 TB/s. qkv is [4096, 4096] × [4096, 6144]."""
    qkv, fc2 = ("linear", "qkv"), ("linear", "fc2")
    assert seconds("H100", qkv, "bf16", "bf16") == pytest.approx(206_158_430_208 / 989e12)
    quantizing = (16_777_216 + 25_165_824) * 3 / 3.35e12  # 2 bytes read and 1 written, of the input and the weight
    fp8 = seconds("H100", qkv, "fp8_e4m3", "fp8_e5m2")
    assert fp8 == pytest.approx(206_158_430_208 / 1979e12 + quantizing)
    assert fp8 == pytest.approx(141.7e-6, rel=1e-3) and seconds("H100", qkv, "bf16", "bf16") > fp8
    # mxfp4 is emulated: the rate of bf16, and 2 + 4.25/8 bytes to quantize each value
    emulated = 206_158_430_208 / 989e12 + (16_777_216 + 25_165_824) * 2.53125 / 3.35e12
    assert seconds("H100", qkv, "mxfp4", "mxfp4") == pytest.approx(emulated)
    # of fp8 and bf16, the rate of bf16; only the first is quantized. fc2 is [4096, 14336] × [14336, 4096]
    mixed = 481_036_337_152 / 989e12 + 58_720_256 * 3 / 3.35e12
    assert seconds("H100", fc2, "fp8_e4m3", "bf16") == pytest.approx(mixed)
    # wgrad of fc2 contracts tokens: grad [4096, 4096] and input [4096, 14336]
    wgrad = 481_036_337_152 / 1979e12 + (16_777_216 + 58_720_256) * 3 / 3.35e12
    assert seconds("H100", fc2, "fp8_e5m2", "fp8_e4m3", ("wgrad_grad", "wgrad_a")) == pytest.approx(wgrad)
    # QKᵀ is bound by the bytes of 32 · 4096² scores, besides 4096 · 128 of each of 32 queries and 8 keys
    scores = 2 * (536_870_912 + 16_777_216 + 4_194_304) / 3.35e12
    assert seconds("H100", ("qk", "core"), "bf16", "bf16") == pytest.approx(scores)
    assert scores > 137_438_953_472 / 989e12


@pytest.mark.parametrize(("model", "layers"), [("llama31-8b", 2), ("deepseek2_lite", 2), ("gpt2", 1)])
def test_flop_are_those_that_torch_counts(model, layers):
    """Of forward and backward, of the experts that tokens reach as well."""
    shape = replace(MODELS[model]["tiny"], layers=layers)
    tokens = torch.randint(shape.vocab, (2, 32), generator=torch.Generator().manual_seed(0))
    network = GPTModel(shape, compute_dtype=torch.float32)
    network.initialize(0)
    counter = FlopCounterMode(display=False)
    with counter:
        network(tokens).sum().backward()
    assert sum(3 * product.flop for product in products(shape, 2, 32)) == counter.get_total_flops()


def test_published_rates_are_dense():
    """Clock, FLOP in a cycle of a matrix unit, and their number, as in the tables that devices.toml names."""
    devices = read_devices()
    for name, clock, each, units in (("H100", 1830e6, 1024, 528), ("MI355X", 2400e6, 1024, 1024)):
        assert devices[name].rate("bf16") == pytest.approx(clock * each * units, rel=0.01)
    assert all(device.source and device.rate("fp8_e4m3") >= device.rate("bf16") for device in devices.values())
    b200, mi355x = devices["B200"], devices["MI355X"]
    assert b200.rate("nvfp4(hadamard=16)") == 2 * b200.rate("mxfp8_e5m2") == 2 * b200.rate("mxfp6_e2m3") == 9e15
    assert mi355x.published_rate("nvfp4") is None and mi355x.rate("nvfp4") == mi355x.rate("bf16")
    assert devices["H100"].published_rate("mxfp8") is None  # Hopper scales whole tensors


OWN = """
[devices.H100]
title = "half an H100"
rates = { bf16 = 500, mxfp4 = 2000 }
bandwidth = 2
memory = 40
"""


def test_files_add_devices_and_replace_published_ones(tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "binade.toml").write_text(OWN.replace("H100", "mine") + "[targets.gpu]\nnodes = 1\n")
    monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
    assert find_device("mine").rates == {"bf16": 500, "mxfp4": 2000}
    assert find_device("H100").title == "NVIDIA H100 SXM"
    assert find_device("H100", tmp_path / "own.toml").title == "half an H100"


WRONG = {
    "a rate of no format": (OWN.replace("mxfp4", "mxfp9"), "mxfp9 is no format"),
    "no rate of bf16": (OWN.replace("bf16 = 500, ", ""), "bf16 is missing"),
    "a rate of 0": (OWN.replace("500", "0"), "devices.H100.rates.bf16 is 0"),
    "an infinite rate": (OWN.replace("500", "inf"), "devices.H100.rates.bf16"),
    "a bandwidth in words": (OWN.replace("bandwidth = 2", "bandwidth = '2 TB/s'"), 'bandwidth is "2 TB/s"'),
    "a bandwidth that no time has": (OWN.replace("bandwidth = 2", "bandwidth = 1e-320"), "devices.H100.bandwidth is"),
    "no memory": (OWN.replace("memory = 40", ""), "devices.H100.memory"),
    "an unknown entry": (OWN + "flops = 1", "devices.H100.flops"),
    "no TOML": ("[devices.H100", "Expected ']'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_one_line(name, tmp_path):
    text, message = WRONG[name]
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_devices(tmp_path / "own.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value) and "own.toml: " in str(caught.value)


@pytest.fixture(scope="module")
def found(collected: Path) -> Costs:
    with Catalog.open(collected) as catalog:
        return costs(catalog, parts=("linear",))


@pytest.fixture
def roofline() -> Roofline:
    """Two layers of 8B, as a tiny model takes as long in any format."""
    return Roofline(find_device("B200"), products(replace(LAYER, layers=2), 2, 4096))


def recipe_seconds(roofline: Roofline, advice_recipe) -> float:
    """What the layers of a recipe take, from how a model is quantized by it."""
    total = 0.0
    for product in roofline.products:
        for gemm in GEMMS:
            part = advice_recipe.linear_of(product.site) if product.part == "linear" else None
            specs = {field: part.rounded_to(field) if part else "bf16" for field in gemm}
            total += product.seconds(specs, roofline.device)
    return total


@pytest.mark.thorough
@pytest.mark.slow
def test_advice_keeps_within_the_time_and_loses_less_with_more(found, roofline):
    costs_of = []
    for share in (0.78, 0.83, 0.9, 1.0):
        advice = advise(found, AdviceRequest(None, share=share), roofline)
        assert advice.share <= share + 1e-4
        assert advice.seconds == pytest.approx(recipe_seconds(roofline, advice.recipe("mine")))
        assert advice.sentence.startswith("Advised: ") and "of bf16's time on NVIDIA B200 SXM" in advice.sentence
        assert advice.uniform is None or advice.uniform["share"] <= advice.share + 1e-3
        costs_of.append(advice.forward["cost"].sum())
    assert (np.diff(costs_of) <= 1e-9).all() and costs_of[-1] == 0 < costs_of[0]
    front = advice.frontier.query("kind == 'advised'")
    assert (np.diff(front["ms"]) > -1e-6).all() and front["share"].iloc[-1] == pytest.approx(1)
    assert (front["ms"] / front["share"]).to_numpy() == pytest.approx(1e3 * roofline.bf16)
    bf16 = advice.frontier.query("name == 'bf16'").iloc[0]
    assert (bf16["share"], bf16["change"]) == (1, 0)


@pytest.mark.slow
def test_uniform_and_published_recipes_take_the_time_of_what_they_round(found, roofline):
    frontier = advise(found, AdviceRequest(None), roofline).frontier.set_index("name")["ms"] / 1e3
    for spec in ("mxfp4", "nvfp4", "mxfp8"):
        own = sum(
            product.seconds(dict.fromkeys(gemm, spec if product.part == "linear" else "bf16"), roofline.device)
            for product in roofline.products
            for gemm in GEMMS
        )
        assert frontier[spec] == pytest.approx(own) and own < roofline.bf16
    assert frontier["mxfp4"] < frontier["mxfp8"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_budget_of_loss_takes_the_least_time_that_meets_it(found, roofline):
    wide = advise(found, AdviceRequest(None, share=0.8), roofline)
    limit = float(wide.forward["cost"].sum())
    least = advise(found, AdviceRequest(None, limit * (1 + 1e-6)), roofline)

    def forward_seconds(advice) -> float:
        rounded = {(row.part, row.layer_index, row.module, row.field): row.spec for row in advice.forward.itertuples()}
        return roofline.step(rounded)

    assert least.forward["cost"].sum() <= limit * 1.001 and forward_seconds(least) <= forward_seconds(wide) * 1.0001
    with pytest.raises(AdviceError, match="one budget"):
        advise(found, AdviceRequest(5, share=0.9), roofline)
    with pytest.raises(AdviceError, match="one budget"):
        advise(found, AdviceRequest(None))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_predicts_times_of_experts_and_attention(command, capsys, tmp_path):
    small = ("--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--model", "deepseek2_lite")
    scores = ("--scores", "mxfp4,mxfp8", "--collect-micro-batches", "2")
    assert command("run", "--quantization", "bf16", *small, *scores) == 0
    capsys.readouterr()
    assert command("advise", "--parts", "linear,qk,pv", "--device", "B200") == 0
    out, err = capsys.readouterr()
    assert err == "" and "ms per step   of bf16's time" in out and "uniform mxfp4" in out
    assert "Times are estimates" in out and "Emulated" not in out
    times = []
    for batch in ("1x32", "2x32"):
        assert command("advise", "--device", "B200", "--batch", batch) == 0
        own = capsys.readouterr().out
        times.append(float(next(line for line in own.splitlines() if "uniform bf16" in line).split()[2]))
    shape = MODELS["deepseek2_lite"]["tiny"]
    expected = [Roofline(find_device("B200"), products(shape, size, 32)).bf16 * 1e3 for size in (1, 2)]
    assert times == pytest.approx(expected, rel=1e-3)
    assert command("advise", "--device", "910B", "--budget", "6") == 0
    out, _ = capsys.readouterr()
    assert "Emulated on Huawei Ascend 910B, at the rate of bf16: mxfp4, mxfp8." in out and "bits per forward" in out
