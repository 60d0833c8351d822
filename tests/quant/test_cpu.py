"""The compiled CPU kernels: the same bits on large tensors and many threads, built only where it pays, optional."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
import torch

from binade.quant import fake_quantize
from binade.quant.backends import cpu, native
from binade.quant.measurements import Errors
from binade.quant.metrics import errors_later, score
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.scaling import has_kernel
from binade.quant.specs import Spec
from tests.interrupts import interrupted
from tests.quant.helpers import assert_same_bits, awkward, bf16_patterns, by_reference, formats

COMPILED = [name for name in formats() if has_kernel(Spec.of(name))]
GRIDS = list({Spec.of(name).format.element: name for name in COMPILED}.values())  # one format for each element
SCALED_AS_A_WHOLE = ("fp8_e4m3", "fp8_e5m2", "nvfp4", "nvint4")

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

FLOAT32 = cpu.unit_of(Spec.of("mxfp8"), torch.float32)
USERS_FLAGS = native.FLAGS  # before conftest.py makes them faster to build


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel loaded, none on disk."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_worked", {})
    monkeypatch.setenv("BINADE_CACHE_DIR", str(tmp_path))
    native.directory.cache_clear()
    yield tmp_path
    native.directory.cache_clear()


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in COMPILED for dtype in (torch.float32, torch.bfloat16)] + [("mxfp8", torch.float16)],
)
def test_large_tensors_in_threads(name, dtype):
    torch.set_num_threads(2)
    x = awkward((515, 700), dtype, seed=3, specials=name not in SCALED_AS_A_WHOLE)
    x = torch.where(x.isfinite() | x.isnan(), x, 1.0) if name.startswith("nv") else x
    decided = Spec.of(name)
    absmax = outer_absmax(x, decided, -1)
    run = cpu.kernel(cpu.unit_of(decided, dtype))
    assert run is not None and x.numel() > 2 * native.PER_THREAD
    for dim in (-1, 0):
        y, scales = cpu.compiled(x, decided, dim, absmax, True, run)
        want, want_scales = cpu.in_pieces(x, decided, dim, absmax, 0)
        assert_same_bits(y, want, x)
        if decided.format.block_size is not None:
            assert_same_bits(scales, want_scales.contiguous().reshape(-1))


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "rounding"),
    [(name, rounding) for name in GRIDS for rounding in ("nearest", "half_away")[name == "hif4" :]],
)  # HiF4 has one rounding
def test_every_bf16_pattern(name, rounding):
    """In one block each, and with the pattern's neighbours: whatever the processor's vector width, no lane differs."""
    x = torch.tensor(bf16_patterns())
    x = x[x.isfinite()] if name in SCALED_AS_A_WHOLE else x
    decided = Spec.of(name, rounding=rounding)
    for values in (x, x.bfloat16()):
        run = cpu.kernel(cpu.unit_of(decided, values.dtype))
        absmax = outer_absmax(values, decided, 0)
        y, _ = cpu.compiled(values, decided, 0, absmax, False, run)
        assert_same_bits(y, cpu.in_pieces(values, decided, 0, absmax, 0)[0], values)


@needs_compiler
def test_bfloat16_results_round_to_even():
    """Where NVFP4's absmax is 2688 · 1.125, element times scales takes up to 10 bits: some products tie in bfloat16."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 300
    x[0] = 3024.0
    x = x.clamp(-3024, 3024).bfloat16()
    decided = Spec.of("nvfp4")
    absmax = outer_absmax(x, decided, -1)
    exact = cpu.in_pieces(x.float(), decided, -1, absmax, 0)[0]
    assert bool(((exact.view(torch.int32) & 0xFFFF) == 0x8000).any())
    y, _ = cpu.compiled(x, decided, -1, absmax, False, cpu.kernel(cpu.unit_of(decided, torch.bfloat16)))
    assert_same_bits(y, exact.bfloat16(), x)


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", COMPILED)
def test_errors_in_one_pass(name, dtype, monkeypatch):
    """Counts as by torch, sums to the last bits, over both axes, short blocks, NaN, Inf and blocks that are lost."""
    torch.set_num_threads(2)
    x = awkward((515, 700), dtype, seed=4, specials=name not in SCALED_AS_A_WHOLE)
    x = torch.where(x.isfinite() | x.isnan(), x, 1.0) if name.startswith("nv") else x
    assert cpu.kernel(cpu.unit_of(Spec.of(name), dtype)) is not None
    for values in (x, x.nan_to_num(1.0, 2.0, -2.0), torch.randn(515, 700).to(dtype) * 100):
        for dim in (-1, 0):
            q, scales = apply(values, Spec.of(name), dim, want_scales=True)
            found = vars(errors_later(values, q, Spec.of(name), scales, dim)())
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "measure", lambda *_, **__: None)
                want = vars(errors_later(values, q, Spec.of(name), scales, dim)())
            for key in ("flush_to_zero", "underflow_of_all", "saturated", "max_abs_error"):
                assert found[key] == want[key] or want[key] != want[key] != found[key], key
            assert found == pytest.approx(want, rel=1e-12, nan_ok=True)
            assert repr(score(values, name, dim)) == repr(Errors(**found))  # one pass over both, and the same sums


@needs_compiler
def test_errors_do_not_depend_on_the_threads_timing():
    x = torch.randn(2048, 1024).bfloat16()
    assert cpu.kernel(cpu.unit_of(Spec.of("mxfp4"), x.dtype)) is not None  # else the first calls are summed by torch
    assert len({score(x, "mxfp4") for _ in range(20)}) == 1


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("texts", "dtype"),
    [
        (("mxfp8", "nvfp4", "nvfp4(scale=4over6)", "mxfp4(scale=quest)", "fp8_e4m3(block=row)"), torch.float32),
        (("hif4",), torch.bfloat16),
        (("hifp8",), torch.bfloat16),
        (("bf16",), torch.float32),
    ],
    ids=["one tier", "hif4", "tapered", "wide"],
)
def test_as_users_build_it(texts, dtype, fresh, monkeypatch):
    """With all optimizations; a later process finds the build."""
    monkeypatch.setattr(native, "FLAGS", USERS_FLAGS)
    x = awkward((515, 700), dtype, seed=3, specials=False)
    units = {cpu.unit_of(Spec.of(text), dtype) for text in texts}
    assert "-O3" in native.FLAGS and len(units) == 1
    (unit,) = units
    assert cpu.kernel(unit, values=10) is None
    run = cpu.kernel(unit)
    assert len(list(fresh.glob("*.so"))) == 1 and not list(fresh.glob("*.tmp"))
    for spec in map(Spec.of, texts):
        for dim in (1, 0):
            assert_same_bits(cpu.compiled(x, spec, dim, None, True, run)[0], by_reference(x, spec, dim), x)
    native._loaded.clear()
    assert cpu.kernel(unit, values=10) is not None


def test_small_tensors_wait_for_no_compiler(fresh, monkeypatch):
    monkeypatch.setattr(native, "_build", lambda unit: pytest.fail("a small tensor started the compiler"))
    for _ in range(50):
        fake_quantize(torch.randn(64, 64), "mxfp8")
    assert native._worked == {FLOAT32: 50 * 64 * 64}


def test_a_build_is_worth_it_for_a_large_tensor_or_many_small_ones(fresh, monkeypatch):
    built = []
    monkeypatch.setattr(native, "_load", lambda unit: built.append(unit))
    assert cpu.kernel(FLOAT32, values=native.BUILD_AT - 1) is None and not built
    cpu.kernel(FLOAT32, values=native.BUILD_AT)
    assert built == [FLOAT32]
    other = cpu.unit_of(Spec.of("mxfp8"), torch.bfloat16)
    for _ in range(native.BUILD_AFTER // 2**20 - 1):
        cpu.kernel(other, values=2**20)
    assert built == [FLOAT32]
    cpu.kernel(other, values=2**20)
    assert built == [FLOAT32, other]


@pytest.mark.parametrize("found", [None, "/bin/false"], ids=["no compiler", "a compiler that fails"])
def test_without_a_compiler_it_says_so_once(fresh, monkeypatch, caplog, found):
    monkeypatch.setattr(native, "compiler", lambda: found)
    monkeypatch.setattr(native, "BUILD_AT", 1000)
    x = awkward((40, 64), seed=1)
    with caplog.at_level(logging.WARNING, logger="binade.quant.backends.native"):
        results = [fake_quantize(x, name) for name in ("mxfp8", "mxfp8", "hifp8", "bf16")]
    assert len(caplog.records) == 1 and "compile" in caplog.text
    assert_same_bits(results[0], cpu.in_pieces(x, Spec.of("mxfp8"), -1, torch.zeros(()), 0)[0])


def test_an_unwritable_cache_is_replaced(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("BINADE_CACHE_DIR", str(fresh / "file" / "below"))
    native.directory.cache_clear()
    assert native.directory().is_dir() and "binade-" in native.directory().name


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8"])
def test_pieces_are_the_whole(name, monkeypatch):
    x = awkward((70, 130), seed=4, specials=name != "nvfp4")
    spec = Spec.of(name)
    whole = apply(x, spec, 0)[0]
    monkeypatch.setattr(cpu, "PIECE", 200)
    assert_same_bits(cpu.in_pieces(x, spec, 0, outer_absmax(x, spec, 0), 0)[0], whole)


def test_an_interrupt_at_any_step_leaves_the_threads_at_work(monkeypatch):
    """Whatever instruction it comes at, the next call's parts are all done."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def share(done: list[int]) -> None:
        def part(first: int, last: int) -> None:
            done[first:last] = [1] * (last - first)

        native.share_out(len(done), native.PER_THREAD, part)

    for step in itertools.count():
        came = interrupted(lambda: share([0] * 8), step)
        done = [0] * 8
        after = threading.Thread(target=share, args=(done,), daemon=True)
        after.start()
        after.join(20)
        assert not after.is_alive() and min(done) == 1, f"interrupted at step {step}"
        if not came:
            break
    assert step > 30


def test_what_a_part_raises_is_raised(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    done = []

    def part(first: int, last: int) -> None:
        done.append(first)
        if first:
            raise MemoryError(f"at {first}")

    with pytest.raises(MemoryError, match=r"at [2-6]"):
        native.share_out(8, native.PER_THREAD, part)
    assert len(done) == 3
