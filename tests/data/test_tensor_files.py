"""A tensor file must be what its row says, before anything is computed from it: for pages, `verify`, bundles and
comparisons."""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from binade.data.exchange import bundle
from binade.data.exchange.bundle import BundleError
from binade.data.index.catalog import Catalog
from binade.data.run.store import TensorFileError, sha256
from binade.data.run.tensor_files import load, load_plain
from binade.data.run.verify import verify
from tests.data.builder import make_run, reseal, with_column

SHAPE = [4, 8]
GOOD = torch.arange(32.0).reshape(4, 8)


def written(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def repickled(change: Callable[[bytes], bytes]) -> bytes:
    """The file of GOOD with another pickle."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(written({"tensor": GOOD}))) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, change(content) if entry.filename.endswith("data.pkl") else content)
    return target.getvalue()


def calls(module: str, name: str, *arguments: int) -> bytes:
    """A pickle of {"tensor": module.name(*arguments)}; what pickle writes of arguments is between protocol and stop."""
    packed = pickle.dumps(arguments, 2)[2:-1]
    return b"\x80\x02}X\x06\0\0\0tensorc" + f"{module}\n{name}\n".encode() + packed + b"Rs."


def file_of(tensor: Any) -> bytes:
    return written({"tensor": tensor, "tensor_info": {}, "metadata": {}})


def quantized_by_channel() -> Tensor:
    return torch.quantize_per_channel(GOOD, torch.ones(4), torch.zeros(4), 0, torch.qint8)


HUGE = [200_000, 200_000]
# The file, and what its row says: the shape and dtype that the file pretends to have.
FORGED: dict[str, tuple[Callable[[], bytes], list[int], str, str]] = {
    "repeated": (lambda: file_of(torch.zeros(1).expand(HUGE)), HUGE, "float32", "stores 4 bytes"),
    "one repeated row": (lambda: file_of(torch.zeros(8).expand(4, 8)), SHAPE, "float32", "stores 32 bytes"),
    "overlapping windows": (lambda: file_of(torch.zeros(40).as_strided((33, 8), (1, 1))), [33, 8], "float32", "stores"),
    "a part of its storage": (lambda: file_of(torch.zeros(100, 8)[:4]), SHAPE, "float32", "stores 3,200 bytes"),
    "transposed": (lambda: file_of(torch.zeros(8, 4).T), SHAPE, "float32", "stores 128 bytes"),
    "sparse": (lambda: file_of(GOOD.to_sparse()), SHAPE, "float32", "_rebuild_sparse_tensor"),
    "sparse, enormous": (
        lambda: file_of(torch.sparse_coo_tensor([[0], [0]], [1.0], HUGE)), HUGE, "float32", "_rebuild_sparse_tensor",
    ),
    "compressed rows": (lambda: file_of(GOOD.to_sparse_csr()), SHAPE, "float32", "_rebuild_sparse_tensor"),
    "int64": (lambda: file_of(GOOD.long()), SHAPE, "int64", "its row has dtype int64, expected one of bfloat16"),
    "int64 of a float32 row": (lambda: file_of(GOOD.long()), SHAPE, "float32", "dtype int64, expected float32"),
    "bool": (lambda: file_of(GOOD > 3), SHAPE, "bool", "dtype bool"),
    "complex64": (lambda: file_of(GOOD * 1j), SHAPE, "complex64", "dtype complex64"),
    "conjugate": (lambda: file_of((GOOD * 1j).conj()), SHAPE, "float32", "dtype complex64"),
    "float64": (lambda: file_of(GOOD.double()), SHAPE, "float64", "dtype float64"),
    "float8": (lambda: file_of(GOOD.to(torch.float8_e4m3fn)), SHAPE, "float8_e4m3fn", "_rebuild_tensor_v3"),
    "float16 of a bfloat16 row": (lambda: file_of(GOOD.half()), SHAPE, "bfloat16", "float16, expected bfloat16"),
    "meta": (lambda: file_of(GOOD.to("meta")), SHAPE, "float32", "_rebuild_meta_tensor_no_storage"),
    "meta, enormous": (lambda: file_of(torch.empty(HUGE, device="meta")), HUGE, "float32", "_rebuild_meta_tensor"),
    "quantized": (
        lambda: file_of(torch.quantize_per_tensor(GOOD, 1.0, 0, torch.qint8)), SHAPE, "float32", "_rebuild_qtensor",
    ),
    "quantized by channel": (lambda: file_of(quantized_by_channel()), SHAPE, "qint8", "_rebuild_qtensor"),
    "nested": (lambda: file_of(torch.nested.nested_tensor([GOOD, GOOD[:2]])), SHAPE, "float32", "_rebuild_nested"),
    "a parameter": (lambda: file_of(torch.nn.Parameter(GOOD)), SHAPE, "float32", "_rebuild_parameter"),
    "another shape": (lambda: file_of(GOOD.reshape(8, 4)), SHAPE, "float32", "shape [8, 4], expected [4, 8]"),
    "a scalar": (lambda: file_of(torch.tensor(1.0)), SHAPE, "float32", "shape [], expected [4, 8]"),
    "empty": (lambda: file_of(torch.empty(0, 8)), SHAPE, "float32", "shape [0, 8], expected [4, 8]"),
    "a row without a dtype": (lambda: file_of(GOOD), SHAPE, "", "its row has dtype"),
    "a row of a negative shape": (lambda: file_of(GOOD), [-4, -8], "float32", "expected [-4, -8]"),
    "no tensor": (lambda: file_of([1.0, 2.0]), SHAPE, "float32", "contains no tensor"),
    "a large allocation": (
        lambda: repickled(lambda _: calls("__builtin__", "bytearray", 1 << 36)), SHAPE, "float32", "bytearray",
    ),
    "an uninitialized tensor": (
        lambda: repickled(lambda _: calls("torch", "FloatTensor", *HUGE)), SHAPE, "float32", "'torch FloatTensor'",
    ),
    "an enormous pickle": (
        lambda: repickled(lambda old: b"\x80\x02" + b"N0" * (1 << 18) + old[2:]), SHAPE, "float32", "small pickle",
    ),
    "a bare tensor": (lambda: written(GOOD), SHAPE, "float32", "contains no tensor"),
    "the older format": (lambda: pickle.dumps(GOOD), SHAPE, "float32", "zip"),
}  # fmt: skip


def forge(root: Path, content: bytes, shape: list[int], dtype: str) -> str:
    """A run whose one tensor has this file, with all checksums right; returns its id."""
    run = make_run(root, [(GOOD, {})])
    file = run.directory / "tensors" / "0001.pt"
    file.write_bytes(content)
    rows = run.directory / "segments" / "rank00-000001" / "tensor.parquet"
    changed = rows.read_bytes()
    for column, value in {"sha256": sha256(file), "dtype": dtype, "shape": shape}.items():
        changed = with_column(changed, column, value)
    rows.write_bytes(changed)
    reseal(run.directory)
    return run.run_id


@pytest.fixture
def little_memory():
    """At most 2 GB beside what is mapped now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("case", FORGED)
@pytest.mark.filterwarnings("ignore")  # of torch, on prototypes
def test_a_forged_file_is_refused_in_one_line(case: str, tmp_path: Path, little_memory: None):
    make, shape, dtype, words = FORGED[case]
    root = tmp_path / "root"
    run_id = forge(root, make(), shape, dtype)
    with Catalog.open(root) as catalog:
        (tensor_id,) = catalog.tensors()["tensor_id"]
        with pytest.raises(TensorFileError, match="cannot be read as a tensor file") as raised:
            catalog.load(tensor_id)
    assert words in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    (line,) = verify(root).damaged
    assert line.startswith(f"{run_id}/tensors/0001.pt is damaged: ") and words in line and "\n" not in line
    bundle.write(root, tmp_path / "bundle.zip", [run_id], None)
    with pytest.raises(BundleError, match="This bundle is refused: ") as refused:
        bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    assert words in str(refused.value) and "\n" not in str(refused.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 8), (1,), (4, 8), (2, 1, 3)])
def test_a_recorded_file_is_read(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path):
    x = torch.ones(shape, dtype=dtype)
    run = make_run(tmp_path, [(x, {})])
    with Catalog.open(tmp_path) as catalog:
        assert torch.equal(catalog.load(f"{run.run_id}/r00-000001"), x)
    assert verify(tmp_path).damaged == []


def test_a_link_is_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0001.pt").write_bytes(file_of(GOOD))
    run = make_run(tmp_path / "root", [(GOOD, {})])
    file = run.directory / "tensors" / "0001.pt"
    for place, target in ((file, outside / "0001.pt"), (file.parent, outside)):
        file.unlink()
        if place != file:
            file.parent.rmdir()
        place.symlink_to(target)
        row = {"sha256": None, "dtype": "float32", "shape": SHAPE}
        with pytest.raises(TensorFileError, match="a symbolic link, which is not followed"):
            load(file, row, run.directory)
    with pytest.raises(TensorFileError, match=r"not in .*"):
        load(run.directory / ".." / ".." / "outside" / "0001.pt", row, run.directory)


def test_a_checkpoint_is_read_whole_or_mapped(tmp_path: Path):
    torch.save({"model": {"w": GOOD}}, tmp_path / "state.pt")
    for mapped in (True, False):
        assert torch.equal(load_plain(tmp_path / "state.pt", mapped=mapped)["model"]["w"], GOOD)
