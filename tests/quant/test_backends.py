"""One result from every path: the reference, the CPU path, Triton, and quantize().dequantize(), to the bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from binade.quant import FORMATS, fake_quantize, quantize
from binade.quant.backends import cpu
from binade.quant.formats import Format
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.scaling import has_kernel
from binade.quant.specs import OPTIONS, Spec
from tests.conftest import PROJECT
from tests.quant.helpers import RULES, assert_same_bits, awkward, by_reference, devices, formats

pytestmark = pytest.mark.slow

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(fmt: Format) -> list[dict]:
    """Every scale rule, rounding and overflow of a format, each with the others at their default, and a tile. The
    default of all is in test_every_dtype and test_every_shape."""
    roundings = OPTIONS["rounding"].allowed({"format": fmt, "scale": fmt.scale_rules[0]})
    overflows = ["saturate", "inf"] if fmt.element.has_infinity else []
    found = [
        *[{"scale": rule} for rule in fmt.scale_rules],
        *[{"rounding": rounding} for rounding in roundings],
        *[{"overflow": overflow} for overflow in overflows],
        *[{"block": "8x16"} for _ in range(fmt.block_size in (16, 32))],
    ]
    return [chosen for chosen in found if Spec.of(fmt, **chosen) != Spec.of(fmt)]


def label(decided: dict) -> str:
    return "-".join(map(str, decided.values()))


EVERY_OPTION = [
    pytest.param(name, chosen, id=f"{name}-{label(chosen)}") for name in formats() for chosen in options(FORMATS[name])
]


def check_cpu_paths(x: torch.Tensor, name: str, dim: int, want: torch.Tensor, seed: int = 0, **chosen) -> None:
    """The compiled kernel and the reference in pieces, each by name, of a scheme that has kernels."""
    spec = Spec.of(name, **chosen)
    if not x.numel() or has_kernel(spec) is None:
        return
    decided, absmax = spec, outer_absmax(x, spec, dim)
    assert_same_bits(cpu.in_pieces(x, decided, dim, absmax, seed)[0], want, x)
    if (unit := cpu.unit_of(decided, x.dtype)) is not None and (run := cpu.kernel(unit)) is not None:
        assert_same_bits(cpu.compiled(x, decided, dim, absmax, True, run, seed)[0], want, x)


def check_all(x: torch.Tensor, name: str, dim: int, device: str, **chosen) -> None:
    want = by_reference(x, name, dim, **chosen)
    assert want.shape == x.shape and want.dtype == x.dtype
    assert_same_bits(fake_quantize(x, name, dim, backend="torch", **chosen), want, x)
    check_cpu_paths(x, name, dim, want, **chosen)
    assert_same_bits(fake_quantize(x.to(device), name, dim, backend="triton", **chosen), want, x)
    assert_same_bits(quantize(x, name, dim, **chosen).dequantize(), want, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("name", "chosen"), EVERY_OPTION)
def test_every_option_both_axes(name, chosen, device):
    x = awkward((67, 71), seed=1)
    if FORMATS[name].scale_rules[0] in ("amax", "nvfp4") or chosen.get("scale") in ("amax8", "amax15", "pow2"):
        x = torch.nan_to_num(x, nan=1.0, neginf=-3.0)
    for dim in (-1, 0):
        check_all(x, name, dim, device, seed=7, **chosen)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", formats())
def test_every_dtype(name, dtype, device):
    x = awkward((3, 50, 33), DTYPES[dtype], seed=2)
    if FORMATS[name].scale_rules[0] in ("amax", "nvfp4"):
        x = torch.where(x.isfinite(), x, torch.ones_like(x))
    for dim in (2, 1, 0):
        check_all(x, name, dim, device)


SHAPES = [(), (1,), (31,), (33,), (1, 1), (5, 1), (1, 40), (0,), (4, 0), (0, 4), (2, 0, 3), (2, 3, 4, 5)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", formats())
def test_every_shape(name, device):
    for shape in SHAPES:
        x = awkward(shape, seed=3)
        for dim in range(-max(len(shape), 1), max(len(shape), 1)):
            check_all(x, name, dim, device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", formats())
def test_non_contiguous(name, device):
    base = awkward((40, 66), seed=4, specials=False)
    for view in (
        base.t(),
        base[::2, 1::3],
        base[:, 5],
        base.reshape(4, 10, 66).transpose(0, 1),
        base[:1].expand(8, 66),
    ):
        for dim in range(view.dim()):
            want = by_reference(view.contiguous(), name, dim)
            assert_same_bits(fake_quantize(view, name, dim, backend="torch"), want, view)
            check_cpu_paths(view, name, dim, want)
            assert_same_bits(fake_quantize(view.to(device), name, dim, backend="triton"), want, view)
            assert_same_bits(quantize(view, name, dim).dequantize(), want, view)


@pytest.mark.sampled
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("block", [1, 2, 7, 16, 64, 100, 1000, "7x9"])
@pytest.mark.parametrize("name", ["mxfp8", "mxint8", "nvfp4", "nvint4"])
def test_any_block_size(name, block, device):
    x = awkward((70, 130), seed=5, specials=not name.startswith("nv"))
    for dim in (0, 1):
        check_all(x, name, dim, device, block=block)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", formats())
def test_scales_agree(name, device):
    """apply(want_scales=True): [outer, blocks, inner], the same from each backend and as quantize stores them."""
    x = awkward((3, 70, 5), seed=6, specials=False)
    decided = Spec.of(name)
    for dim in range(3):
        _, torch_scales = apply(x, decided, dim, "torch", want_scales=True)
        _, pieces = cpu.in_pieces(x, decided, dim, outer_absmax(x, decided, dim), 0)
        _, triton_scales = apply(x.to(device), decided, dim, "triton", want_scales=True)
        if decided.format.block_size is None:
            assert torch_scales is None and triton_scales is None
            continue
        outer, inner = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
        assert torch_scales.shape == (outer, -(-x.shape[dim] // decided.format.block_size), inner)
        assert_same_bits(triton_scales.contiguous(), torch_scales.contiguous())
        assert_same_bits(pieces.contiguous(), torch_scales.contiguous())
        stored = quantize(x, name, dim).scales
        in_groups = torch_scales.transpose(1, 2).reshape(-1)
        if name in ("nvfp4", "nvint4"):
            assert_same_bits(in_groups, stored.view(torch.float8_e4m3fn).float().reshape(-1))
        elif name == "hif4":
            assert_same_bits(in_groups, (1 + (stored[:, 0] & 3) / 4) * torch.exp2((stored[:, 0] >> 2).float() - 48))
        else:
            assert torch.equal(in_groups, torch.exp2(stored.float() - 127).reshape(-1))


def test_every_combination_of_rule_rounding_and_overflow():
    x = awkward((40, 64), seed=9)
    for rule, rounding, overflow in itertools.product(
        RULES, ("nearest", "half_away", "stochastic"), ("saturate", "inf")
    ):
        chosen = {"scale": rule, "rounding": rounding, "overflow": overflow, "seed": 3}
        want = by_reference(x, "mxfp8_e5m2", 0, **chosen)
        assert_same_bits(fake_quantize(x, "mxfp8_e5m2", 0, **chosen), want, x)
        assert_same_bits(quantize(x, "mxfp8_e5m2", 0, **chosen).dequantize(), want, x)


def test_input_is_left_alone():
    for name in formats():
        x = awkward((40, 40), seed=7)
        before = x.clone()
        fake_quantize(x, name)
        quantize(x, name)
        assert_same_bits(x, before)


@pytest.mark.parametrize("name", formats())
def test_gradient_passes_straight_through(name):
    x = torch.randn(8, 40, requires_grad=True)
    y = fake_quantize(x, name, 0)
    assert_same_bits(y, fake_quantize(x.detach(), name, 0))
    grad = torch.randn(8, 40)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("name", "chosen"),
    [(name, {}) for name in formats()] + [(name, {"rounding": "stochastic", "seed": 3}) for name in formats()],
)
def test_even_tiles(name, chosen, device, monkeypatch):
    """A shape whose blocks fill the kernel's tiles takes its path without masks; here several tiles along each axis."""
    monkeypatch.setattr("binade.quant.backends.triton_kernels.TILE", 1 << 13)
    x = awkward((64, 1024), seed=8, specials=False)
    for dim in (0, 1):
        want = by_reference(x, name, dim, **chosen)
        assert_same_bits(fake_quantize(x.to(device), name, dim, backend="triton", **chosen), want, x)


def test_tiling_is_even_where_blocks_and_tiles_are_whole(monkeypatch):
    from binade.quant.backends import triton_kernels as kernels
    from binade.quant.backends.triton_kernels import _tiling

    monkeypatch.setattr(kernels, "INTERPRETED", True)
    monkeypatch.setattr(kernels, "TILE", 1 << 17)
    assert _tiling(32, 64, 1, 256) == (256, True)
    assert _tiling(32, 64, 128, 256)[1] is False  # 256 groups to a tile, 128 columns: it would span two rows
    assert _tiling(32, 64, 256, 256) == (256, True)
    assert not _tiling(32, 65, 1, 256)[1] and not _tiling(24, 48, 1, 256)[1] and not _tiling(32, 64, 1, 255)[1]


@pytest.mark.thorough
def test_triton_imported_before_by_someone_else():
    """The interpreter is chosen when quant first needs it, which may be after another library has imported triton."""
    program = (
        "import triton, torch\n"
        "from binade import quant\n"
        "x = torch.randn(64, 64)\n"
        "for name in ('mxfp8', 'nvfp4'):\n"
        "    twins = [quant.fake_quantize(x, name, backend=b) for b in ('torch', 'triton')]\n"
        "    assert torch.equal(*twins), name\n"
        "assert (quant.summarize(x, 'triton').counts == quant.summarize(x, 'torch').counts).all()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(PROJECT)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
