"""Why a tensor loses precision: the figures of one tensor against one format."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from binade.app.draw.figure import Drawn
from binade.app.questions.shared.axes import CHANNEL, TOKEN, Axes
from binade.app.questions.shared.rounded import subject
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question as why
from binade.app.view.params import Interval, Range, read, texts_of
from binade.data.words.filter import Filter
from binade.quant import fake_quantize, score, summarize
from binade.quant.backends import cpu, native
from binade.quant.blocks import look
from binade.quant.error_causes import ScaleCost
from binade.quant.metrics import streamed_score
from binade.quant.specs import Spec


class Alone(SelectedTensor):
    """A tensor that is in no catalog."""

    @property
    def labels(self) -> dict[str, str]:
        return {"t": "L1 fc1 input"}

    @property
    def axes(self) -> Axes:
        return Axes(TOKEN, CHANNEL, tuple(self.x.shape[:-1]), (TOKEN,))


def drawn_why(x: torch.Tensor, spec: str, dim: int = -1, **values: Any) -> Drawn:
    summary = vars(summarize(x)) | {"numel": x.numel()}
    identity = {"dtype": "float32", "tensor_id": "t", "layer_type": "linear", "tensor_name": "input"}
    row = pd.Series({"contracted_axis": dim, **identity, **summary})
    alone = Alone(SimpleNamespace(cache=None), Filter(), row=row, x=x, spec=Spec.of(spec), dim=dim)
    return why.draw(alone, values)


@pytest.mark.parametrize(("left_out", "of"), [(None, "the values"), (8128.0, "all pairs, masked ones included")])
def test_the_zeros_of_attention_are_counted_among_all_pairs_and_this_is_said(left_out: float | None, of: str):
    """The statistics of a row are without masked pairs, so that another share would seem to contradict them."""
    probs = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)).tril() + 1e-3 * torch.eye(128)
    summary = vars(summarize(probs)) | {"numel": probs.numel(), "pairs_left_out": left_out}
    identity = {"dtype": "float32", "tensor_id": "t", "layer_type": "attention", "tensor_name": "attention_probs"}
    row = pd.Series({"contracted_axis": -1, **identity, **summary})
    alone = Alone(SimpleNamespace(cache=None), Filter(), row=row, x=probs, spec=Spec.of("mxfp4"))
    figure = why.draw(alone, {}).get("codebook")
    assert figure and f"Zeros, 49.6% of {of}, have no magnitude." in str(figure.note)  # 8,128 of 128²


def test_hifp8_without_a_scale_says_what_it_would_do_with_one():
    """The figures of FORMATS2.md for N(0, 1) · 1e-4: 19.7 dB without a scale, 31.6 dB with one."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * 1e-4
    verdict = drawn_why(x, "hifp8").verdict
    found = re.search(r"In hifp8: SQNR 19\.7 dB\. .* With a tensor scale, hifp8\(scale=amax8\): (.*) dB\.", verdict)
    assert found and float(found[1]) == pytest.approx(31.6, abs=0.11)  # the largest value differs by sample
    assert "With a tensor scale" not in drawn_why(x, "hifp8(scale=amax8)").verdict
    assert "With a tensor scale" not in drawn_why(x * 1e4, "hifp8").verdict


def test_values_that_overflow_fp16():
    """A value that becomes infinite makes the SQNR -inf dB, shown as "overflows"; it raises no math domain error."""
    drawn = drawn_why(torch.tensor([[1e6, 1.0, -3.0, 0.5]]), "fp16")
    assert "SQNR overflows" in drawn.verdict and "lost to NaN or Inf 25%" in drawn.verdict


MATRIX, LINE = (1100, 1024), (1_300_003,)


@pytest.mark.sampled(2)
@pytest.mark.compiler
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("mxfp4", MATRIX),
        ("nvfp4", MATRIX),
        ("fp8_e4m3(block=row)", MATRIX),
        ("nvfp4", LINE),
        ("hifp8(scale=amax8)", LINE),
    ],
)
def test_a_large_tensor_is_measured_whole_though_a_sample_is_drawn(spec, shape):
    """Against all of its blocks at once, by the definition. The outlier, which sets the scale of the whole tensor, is
    not in the sample."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[1024 + 5] = 3e4
    unit = cpu.unit_of(Spec.of(spec), x.dtype)
    assert unit and cpu.kernel(unit)  # of a tensor of this size alone it would not be worth a build
    whole = look(x, spec)
    sums = whole.sums
    verdict = drawn_why(x, spec).verdict
    shown = re.search(r"SQNR ([-\d.]+) dB.* error, (\S+)% is of .* zero, (\S+)% of saturated ones", verdict)
    assert shown, verdict
    squares = (whole.y.double() - whole.x.double()).square()
    flushed = squares[(whole.y == 0) & whole.valid].sum() / sums.noise
    saturated = squares[whole.clipped & (whole.y != 0)].sum() / sums.noise
    expected = 10 * math.log10(sums.signal / sums.noise), float(flushed), float(saturated)
    assert float(shown[1]) == pytest.approx(expected[0], abs=0.051)
    for text, share in zip(shown.groups()[1:], expected[1:], strict=True):
        if text == ">99.9":
            assert 0.9994 < share < 1
        elif "·10" in text:  # two digits
            digits, _, power = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).partition("·10")
            assert f"{100 * share:.1e}" == f"{digits}e{int(power):+03d}"
        else:  # three digits
            assert float(text) == pytest.approx(100 * share, rel=5.1e-3)
    found = streamed_score(x, spec)
    assert found.sqnr_db == pytest.approx(expected[0], rel=1e-12)
    assert round(found.flush_to_zero * sums.nonzero) == sums.flushed
    assert round(found.saturated * x.numel()) == sums.saturated
    drawn = subject(x, spec)
    assert 1 << 19 < drawn.blocks.valid.sum() < 1 << 20
    scales = {
        tuple(start): scale for start, scale in zip(whole.x[:, :2].tolist(), whole.scale[:, 0].tolist(), strict=True)
    }
    for start, scale in zip(drawn.blocks.x[:, :2].tolist(), drawn.blocks.scale[:, 0].tolist(), strict=True):
        assert scales[tuple(start)] == scale


def test_a_sample_keeps_the_headroom_of_the_whole_tensor():
    """The lines that are left out have the blocks from whose absmaxes the anchor follows."""
    spec, x = "nvfp4(scale=headroom)", torch.randn(MATRIX, generator=torch.Generator().manual_seed(1))
    x[1::2] /= 256
    whole, drawn = look(x, spec), subject(x, spec)
    assert drawn.every == 2
    assert torch.equal(drawn.blocks.scale, whole.scale.reshape(MATRIX[0], -1)[::2].reshape(-1, 1))
    assert not torch.equal(drawn.blocks.scale, look(x[::2], spec).scale)


def test_totals_of_a_sample_say_so():
    """No kernel measures rotated values without a copy."""
    x = torch.randn(MATRIX, generator=torch.Generator().manual_seed(1))
    assert drawn_why(x, "mxfp4(hadamard=32)").verdict.startswith("In mxfp4(hadamard=32) (a sample): SQNR ")


def scales(x: np.ndarray, spec: str) -> np.ndarray:
    """The scale of each value of [lines, axis], by the definition of the format."""
    if spec == "hifp8":
        return np.ones_like(x)
    size = 32 if spec == "mxfp4" else 16
    largest = np.abs(np.nan_to_num(x)).reshape(len(x), -1, size).max(-1).repeat(size, 1)
    if spec == "mxfp4":  # OCP MX 1.0: the exponent of the largest value, less that of the largest code, 4
        return np.exp2(np.floor(np.log2(largest)) - 2)
    whole = np.float32(largest.max() / (448 * 6))  # NVFP4: E4M3 scales, and one of the tensor above them
    return whole * torch.from_numpy(largest / 6 / whole).to(torch.float8_e4m3fn).double().numpy()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", ["hifp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_range_counts_the_values_that_numpy_finds(spec: str, dim: int):
    """Of a tensor with zeros and of channels, tokens and blocks that hold none of them."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2, 96, generator=random) * torch.logspace(-9, 0, 96, base=2)
    x[:, :, 5] = 0
    x[7] = 1e-20
    lines = x.movedim(dim, -1).reshape(-1, x.shape[dim]).double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):  # a block of zeros, and one whose scale underflows
        log2 = np.log2(np.abs(lines) / scales(lines.astype(np.float32), spec))
    low, high = np.round(np.quantile(log2[np.isfinite(log2)], (0.2, 0.4)), 2)
    inside = (log2 >= low) & (log2 < high)
    size = {"hifp8": 32, "mxfp4": 32, "nvfp4": 16}[spec]
    blocks = inside.reshape(len(lines), -1, size).any(-1)
    moved = np.moveaxis(inside.reshape(x.movedim(dim, -1).shape), -1, dim)  # [tokens, channels]
    cells = moved.reshape(-1, 96)
    drawn = drawn_why(x, spec, dim, range=Interval(low, high), channel=60)
    (text,) = drawn.sentences
    share = (lines[inside] ** 2).sum() / (lines**2).sum()
    count, own = int(inside.sum()), int(cells[:, 60].sum())
    assert 0 < own < count and cells.any(0).sum() < 96 and cells.any(1).sum() < 128
    assert text.partition(": ")[2] == (
        f"{count:,} values, {count / x.numel() * 100:.3g}% of all, in {cells.any(0).sum()} of 96 channels, "
        f"{cells.any(1).sum()} of 128 tokens, {blocks.sum():,} of {blocks.size:,} "
        f"{'runs of 32 values' if spec == 'hifp8' else 'blocks'}; they hold {share * 100:.3g}% of the sum of squares. "
        f"{own:,} of them are in channel 60: {own / 128 * 100:.3g}% of the 128 values there."
    )
    histogram, channels, tokens = drawn.figures
    for figure in (histogram, channels, tokens):  # a pin or a picture says what it counts
        assert " ≤ |value / scale| < 2" in figure.caption
    assert channels.table["values"].tolist() == cells.sum(0).tolist() and set(channels.table["of"]) == {128}
    assert np.array_equal(tokens.table.to_numpy(), cells)
    assert f"{count:,} of {x.numel():,} values" in json.loads(channels.on_page.spec)["title"]["subtitle"]
    assert histogram.title.endswith(": channel 60 only") and histogram.marked == Interval(low, high)
    table, place = histogram.table, np.moveaxis(log2.reshape(x.movedim(dim, -1).shape), -1, dim).reshape(-1, 96)[:, 60]
    edges = np.append(table["low"], table["high"].iloc[-1])
    shares = (table["share"] * (table["high"] - table["low"])).cumsum()
    assert shares.iloc[-1] == pytest.approx(np.isfinite(place).mean())
    for edge, below in zip(edges[1:], shares, strict=True):
        assert below == pytest.approx((place < edge).mean(), abs=1.01 / 128)


def test_the_range_of_a_sample_and_of_channels_that_are_combined():
    x = torch.randn(MATRIX, generator=torch.Generator().manual_seed(1))
    drawn = drawn_why(x, "hifp8", range=Interval(-3, -1.5), channel=1001)
    part = np.log2(np.abs(x[::2].double().numpy()))
    inside = (part >= -3) & (part < -1.5)
    text, (histogram, channels, tokens) = drawn.sentences[0], drawn.figures
    assert text.startswith(f"2⁻³ to 2⁻¹·⁵ (in the sample): {inside.sum():,} values, ")
    assert "of 1,024 channels" in text and "of 550 tokens" in text
    assert f"{inside[:, 1000:1002].sum()} of them are in channels 1,000 to 1,001" in text
    assert channels.table["values"].tolist() == inside.reshape(len(inside), 512, 2).sum((0, 2)).tolist()
    assert channels.marked == 1000 and histogram.title.endswith("channels 1,000 to 1,001 only")
    share = tokens.table.to_numpy()
    assert share.shape == (367, 342) and not np.isnan(share).any()
    assert share[0, 0] == inside[:2, :3].mean()  # cells of 3 × 3 values, of which rows 0 and 2 are in the sample
    columns = drawn_why(x.reshape(-1, 512), "mxfp4", 0, channel=1)  # whole channels are in the sample, or not
    assert columns.problems == ("Channel 1 is not in the sample.",) and columns.figures[0].marked is None


def test_values_without_a_magnitude_are_in_no_range():
    x = torch.tensor([[math.nan, math.inf, 0.0, 1.0, -1.0, 2.0, 0.5, 0.0]])
    (text,) = drawn_why(x, "hifp8", range=Interval(-1000, 1000)).sentences
    assert text.startswith("2⁻¹⁰⁰⁰ to 2¹⁰⁰⁰: 4 values, 50% of all, in 4 of 8 channels, 1 of 1 tokens")
    (text,) = drawn_why(x, "hifp8", range=Interval(0, 1)).sentences  # 1 and -1, but not 2
    assert ": 2 values, 25% of all" in text
    empty, plain = drawn_why(x, "hifp8", range=Interval(5, 6)), drawn_why(x, "hifp8")
    assert empty.sentences == ("2⁵ to 2⁶: 0 of 8 values.",)
    assert [figure.title for figure in empty.figures[1:]] == [figure.title for figure in plain.figures[1:]]


def test_what_cannot_be_chosen_is_said_and_nothing_else_changes():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    plain, beyond = drawn_why(x, "mxfp4"), drawn_why(x, "mxfp4", channel=64)
    assert beyond.problems == ("There is no channel 64: the last is 63.",)
    assert [figure.on_page for figure in beyond.figures] == [figure.on_page for figure in plain.figures]
    rotated = drawn_why(x, "mxfp4(hadamard=32)", range=Interval(-1, 1), channel=1)
    assert rotated.problems == (
        "mxfp4(hadamard=32) rotates the values: no channel or range of magnitudes can be chosen.",
    )
    assert not any(figure.on_page.selections for figure in rotated.figures)


@pytest.mark.parametrize("text", ["-24.5..-22", "0..1", "-0.25..1e-05", "3..1000"])
def test_a_range_survives_the_address(text: str):
    values, problems = read({"range": Range()}, {"range": [text]})
    assert texts_of(values["range"]) == [text] and not problems
    assert (values["range"].low, values["range"].high) == tuple(map(float, text.split("..")))


@pytest.mark.parametrize(
    "text", ["", "1", "1..", "..1", "2..1", "1..1", "nan..1", "-inf..1", "0..inf", "a..b", "1..2..3"]
)
def test_a_text_that_is_no_range_is_said(text: str):
    assert read({"range": Range()}, {"range": [text]}) == (
        {"range": None}, [f"The URL asks for range {text!r}, which does not exist."],
    )  # fmt: skip


def test_the_value_with_most_of_the_error_is_named():
    """From all values, though the rest of the page is of a sample that leaves this one out."""
    x = torch.randn(MATRIX, generator=torch.Generator().manual_seed(1)) * 2.0**-9
    x[1, 1000] = 33.1
    verdict = drawn_why(x, "hifp8").verdict
    found = re.search(r"The value 33\.1 of token 1, channel 1,000 holds ([\d.]+)% of the error\.", verdict)
    noise = score(x, "hifp8").mse * x.numel()
    q = float(fake_quantize(x[1:2, 1000:1001], "hifp8"))
    assert found and float(found[1]) == pytest.approx(100 * (q - float(x[1, 1000])) ** 2 / noise, abs=0.051)


@pytest.mark.parametrize("spec", ["mxfp4", "hifp8", "nvfp4"])
def test_the_error_by_binade_and_cause_is_that_of_all_values(spec):
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 2.0**-17
    drawn, whole = drawn_why(x, spec), look(x, spec)
    table = drawn.get("codebook").table.rename(columns={"of": "cause"})
    table = table[table["cause"] != "values"]
    squares = (whole.y.double() - whole.x.double()).square().numpy()
    binade = np.frexp(whole.magnitudes.numpy())[1] - 1
    for low, cause, share in table[["low", "cause", "share"]].itertuples(index=False):
        flushed, clipped = (whole.y == 0).numpy(), whole.clipped.numpy()
        inside = {"flushed": flushed, "saturated": clipped & ~flushed, "grid": ~flushed & ~clipped}[cause]
        assert share == pytest.approx(squares[inside & (binade == math.floor(low))].sum() / squares.sum(), rel=1e-9)
    assert ((table["to"] - table["from"]) * (table["high"] - table["low"])).sum() == pytest.approx(1)
    assert table["share"].sum() == pytest.approx(1)
    assert ("decomposition" in drawn.tables) == (spec != "hifp8")


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (0.8004, "The rounding of the scales changes it by 0.04%."),
        (0.7, "With scales that are not rounded it would be 90% of it."),
        (1.0, "With scales that are not rounded it would be 120% of it."),
    ],
)
def test_what_the_rounding_of_the_scales_costs(grid: float, said: str):
    cost = ScaleCost(scale=0.01, dead_zone=0.2, grid=grid, scale_and_dead_zone=0.2, scale_and_grid=0.8)
    assert str(why.by_cause(SimpleNamespace(shares=(0.0, 0.2, 0.8), scale=cost))).endswith(said)
