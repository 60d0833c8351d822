import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from binade.cli import main
from binade.data import bundle, remote
from binade.data.catalog import Catalog
from binade.data.remote import fetched, readable_root
from binade.data.runs import DONE, RunError, RunWriter, resolve_root
from binade.data.store import TensorFileError
from tests.data.builder import CONFIG, add_segment, assorted, make_run
from tests.data.s3 import Store, serving

pytestmark = pytest.mark.slow

ADDRESS = "s3://bucket/deep/runs"


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, serving(patch) as store:
        yield store


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """An empty bucket, an empty cache, and no pause between synchronizations."""
    monkeypatch.setenv("BINADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0)
    yield server
    server.empty()


def uploaded(store: Store, run: RunWriter) -> RunWriter:
    store.upload(run.directory, f"deep/runs/{run.run_id}")
    return run


def refused(*_):
    raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation")


def written(path: Path):
    """Which directory, and when; a reader may change the time of access."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def answers(catalog: Catalog):
    return catalog.tensors().to_dict("records"), catalog.distribution(by="layer_index").to_dict("records")


def test_a_root_in_a_store_answers_as_the_directory_and_nothing_is_written(store, tmp_path):
    local = tmp_path / "runs"
    run = uploaded(store, make_run(local, assorted(1), assorted(2)))
    before = store.content()
    with Catalog.open(ADDRESS) as catalog, Catalog.open(local) as expected:
        assert repr(answers(catalog)) == repr(answers(expected)) and not catalog.refused
        assert not list(catalog.root.glob("*/tensors")), "values are fetched when they are opened"
        opened = expected.tensors()["tensor_id"][expected.tensors()["path"].notna()].iloc[0]
        assert torch.equal(catalog.load(opened), expected.load(opened))
        assert len(list(catalog.root.glob("*/tensors/*"))) == 1
    assert store.content() == before
    assert sorted(path.name for path in readable_root(ADDRESS).iterdir()) == [".address", run.run_id, "index.duckdb"]


def test_what_changes_in_the_store_changes_here(store, tmp_path):
    run = RunWriter.create(tmp_path, "grows", CONFIG)
    add_segment(run, assorted(1))
    uploaded(store, run)
    other = uploaded(store, make_run(tmp_path, assorted(3)))
    with Catalog.open(f"{ADDRESS}/") as catalog:
        assert catalog.totals().tensors == 14
        segments = catalog.root / run.run_id / "segments"
        first = written(segments / "rank00-000001")
        name = add_segment(run, assorted(2), first=20)
        run.finish(DONE)
        store.upload(run.directory / "segments" / name, f"deep/runs/{run.run_id}/segments/{name}")
        store.write(f"deep/runs/{run.run_id}/status.json", (run.directory / "status.json").read_bytes())
        assert catalog.sync() == 1 and catalog.totals().tensors == 21 and not catalog.refused
        assert set(catalog.runs()["state"]) == {DONE} and written(segments / "rank00-000001") == first
        store.delete_folder(f"deep/runs/{other.run_id}")
        catalog.sync()
        assert list(catalog.runs()["run_id"]) == [run.run_id] and not (catalog.root / other.run_id).exists()
        store.delete_folder(f"deep/runs/{run.run_id}/segments/{name}")
        catalog.sync()
        assert re.search("14.*so a segment is missing", *catalog.refused)


def test_a_segment_appears_once_all_of_it_is_there(store, tmp_path):
    run = RunWriter.create(tmp_path, "uploading", CONFIG)
    name = add_segment(run, assorted(1))
    last = f"deep/runs/{run.run_id}/segments/{name}/sketch.parquet"
    uploaded(store, run)
    store.delete(last)
    with Catalog.open(ADDRESS) as catalog:
        assert catalog.totals().tensors == 0 and not catalog.refused
        store.write(last, (run.directory / "segments" / name / "sketch.parquet").read_bytes())
        assert catalog.sync() == 1 and catalog.totals().tensors == 7


def test_an_interrupted_download_leaves_nothing(store, tmp_path, monkeypatch):
    """The connection ends after some pieces, of segments and then of a tensor file."""
    uploaded(store, make_run(tmp_path, assorted(1), assorted(2)))
    copy, left = remote.shutil.copyfileobj, [3]

    def cut(source, target, length):
        left[0] -= 1
        if left[0] < 0:
            target.write(source.read(10))
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation")
        copy(source, target, length)

    monkeypatch.setattr(remote.shutil, "copyfileobj", cut)
    with pytest.raises(RunError, match="the server cannot be reached"):
        Catalog.open(ADDRESS)
    (root,) = (tmp_path / "cache" / "roots").glob("*/runs")
    for segment in root.glob("*/segments/*"):
        assert len(list(segment.iterdir())) == 6
    left[0] = 1 << 20
    with Catalog.open(ADDRESS) as catalog:
        assert catalog.totals().tensors == 14
        left[0] = 0
        with pytest.raises(TensorFileError, match="cannot be fetched: the server cannot be reached"):
            catalog.load(catalog.tensors()["tensor_id"][0])
    assert not [path for path in root.rglob("*.pt*") if path.is_file()] and not list(root.rglob(".*.part"))


def test_the_values_that_were_used_least_recently_make_room(store, tmp_path, monkeypatch):
    run = uploaded(store, make_run(tmp_path, [(torch.full((256,), float(n)), {"layer_index": n}) for n in range(3)]))
    size = os.stat(run.directory / "tensors" / "0001.pt").st_size
    monkeypatch.setattr(remote, "KEPT", 2 * size + size // 2)
    with Catalog.open(ADDRESS) as catalog:
        first, second, third = catalog.tensors(order_by="layer_index")["tensor_id"]
        for each in (first, second, first, third):
            assert catalog.load(each).numel() == 256
        assert sorted(path.name for path in catalog.root.glob("*/tensors/*")) == ["0001.pt", "0003.pt"]
        assert float(catalog.load(second)[0]) == 1


def test_the_copies_that_nobody_has_open_make_room(store, tmp_path, monkeypatch):
    run = make_run(tmp_path, assorted(1))
    addresses = [f"s3://bucket/root{number}" for number in range(4)]
    for number in range(len(addresses)):
        store.upload(run.directory, f"root{number}/{run.run_id}")
    copies = [readable_root(address).parent for address in addresses[:3]]
    size = sum(path.lstat().st_size for path in copies[0].rglob("*"))
    for used, copy in enumerate(copies):
        os.utime(copy, (used, used))
    remote._mirrors.pop(copies[0] / "root0")  # as if its process had ended
    remote._mirrors.pop(copies[2] / "root2")
    monkeypatch.setattr(remote, "COPIES", 2 * size + size // 2)
    last = readable_root(addresses[3])
    assert {copy for copy in copies if copy.exists()} == set(copies[1:]), "there was room for two and the new one"
    monkeypatch.setattr(remote, "COPIES", 0)
    assert readable_root(addresses[3]) == last
    assert set(last.parents[1].iterdir()) == {copies[1], last.parent}, "both are open"
    with Catalog.open(addresses[0]) as catalog:
        assert catalog.totals().tensors == 7


def test_a_copy_that_is_being_made_is_not_deleted(store, tmp_path, monkeypatch):
    run = make_run(tmp_path, assorted(1))
    for name in ("first", "second"):
        store.upload(run.directory, f"{name}/{run.run_id}")
    monkeypatch.setattr(remote, "COPIES", 0)
    write = remote.write_atomic
    other = threading.Thread(target=readable_root, args=["s3://bucket/second"])

    def interrupted(path, content):
        if content.endswith(b"first"):
            other.start()
            other.join(0.5)  # it waits until the first copy is open
        write(path, content)

    monkeypatch.setattr(remote, "write_atomic", interrupted)
    first = readable_root("s3://bucket/first")
    other.join()
    assert len(list(first.parents[1].glob(f"*/*/{run.run_id}/run.json"))) == 2


def test_keys_that_lead_out_of_the_copy_are_not_followed(store, tmp_path):
    run = uploaded(store, make_run(tmp_path, assorted(1)))
    for key in ("../outside/run.json", ".hidden/run.json", f"{run.run_id}/segments/../../x/tensor.parquet"):
        store.write(f"deep/runs/{key}", b"{}")
    for name in ("index.duckdb", f"{run.run_id}/segments/rank00-000001/more.sh"):
        store.write(f"deep/runs/{name}", b"not ours")
    with Catalog.open(ADDRESS) as catalog:
        assert catalog.totals().tensors == 7 and not catalog.in_memory
        assert [path.name for path in catalog.root.parent.iterdir()] == ["runs"]
        assert not list(catalog.root.rglob("*.sh"))


def test_a_row_that_names_another_file_than_a_tensor_gets_none(store, tmp_path):
    """A hostile root would otherwise put an index of its own into the copy."""
    run = uploaded(store, make_run(tmp_path, assorted(1)))
    root = readable_root(ADDRESS)
    for name in ("index.duckdb", f"{run.run_id}/log.txt.gz", ".sessions/tensors/x.pt"):
        store.write(f"deep/runs/{name}", b"not a tensor")
        assert not fetched(root / run.run_id / ".." / name).exists()
    assert not fetched(root / run.run_id / "tensors/nul\0.pt").exists()
    assert fetched(root / run.run_id / "tensors/0001.pt").exists()


def test_names_that_no_file_system_takes_are_passed_over(store, tmp_path):
    run = uploaded(store, make_run(tmp_path, assorted(1)))
    for name in ("é" * 128, f"{run.run_id}/segments/{'n' * 256}"):
        store.write(f"deep/runs/{name}/tensor.parquet", b"")
    with Catalog.open(ADDRESS) as catalog:
        assert catalog.totals().tensors == 7 and not catalog.refused


def test_every_state_of_a_session_is_copied(store, tmp_path):
    uploaded(store, make_run(tmp_path, assorted(1)))
    names = [f"{number:04d}.json" for number in range(1, 4)]
    for name in names:
        store.write(f"deep/runs/.sessions/abc/{name}", b"{}")
    folder = readable_root(ADDRESS) / ".sessions" / "abc"
    assert sorted(path.name for path in folder.iterdir()) == names
    store.delete(f"deep/runs/.sessions/abc/{names[0]}")
    readable_root(ADDRESS)
    assert sorted(path.name for path in folder.iterdir()) == names[1:]
    store.delete_folder("deep/runs/.sessions/abc")
    readable_root(ADDRESS)
    assert not folder.exists()


def test_a_bundle_of_more_values_than_are_kept(store, tmp_path, monkeypatch):
    run = uploaded(store, make_run(tmp_path / "runs", assorted(1)))
    monkeypatch.setattr(remote, "KEPT", 0)
    root = readable_root(ADDRESS)
    result = bundle.write(root, tmp_path / "bundle.zip", [run.run_id], None)
    assert (result.with_values, result.left_out) == (6, 0)
    monkeypatch.setattr(remote.Mirror, "download", refused)
    with pytest.raises(bundle.BundleError, match="cannot be fetched: the server cannot be reached"):
        bundle.write(root, tmp_path / "other.zip", [run.run_id], None)


def test_a_copy_that_is_moved_out_of_the_cache_is_a_plain_root(store, tmp_path):
    uploaded(store, make_run(tmp_path / "runs", assorted(1)))
    taken = tmp_path / "taken"
    shutil.copytree(readable_root(ADDRESS), taken)
    make_run(taken, assorted(2))
    with Catalog.open(taken) as catalog:
        assert catalog.totals().tensors == 14


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://127.0.0.1:1", "http://[::1", "http://user:key@host"])
def test_an_endpoint_that_is_not_a_server_is_not_replaced_by_another(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("BINADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(RunError, match=r"AWS_ENDPOINT_URL_S3 .* expected http://HOST:PORT or"):
        readable_root(ADDRESS)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://nobucket/runs", "s3://nobucket/runs cannot be read: there is no such bucket"),
        ("s3://bucket/none", "s3://bucket/none does not exist: expected s3://BUCKET/FOLDER"),
        ("s3://key:secret@bucket/runs", "expected s3://BUCKET/FOLDER as the address"),
        ("s3://bucket/runs?secret_key=secret", "expected s3://BUCKET/FOLDER as the address"),
        ("s3://", "expected s3://BUCKET/FOLDER as the address"),
        ("s3://bucket/..", "expected s3://BUCKET/FOLDER as the address"),
        ("s3://bucket/runs/./x", "expected s3://BUCKET/FOLDER as the address"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_line(store, address, said, capsys):
    assert main(["verify", address]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"binade: {said}") and "secret" not in line.replace("SECRET", "")


def test_no_access_and_no_server_are_one_line(store, tmp_path, monkeypatch, capsys):
    with store.checking_credentials():
        assert main(["compare", ADDRESS]) == 1
    assert f"{ADDRESS} cannot be read: access was denied: check AWS_ACCESS_KEY_ID" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert main(["compare", ADDRESS]) == 1
    assert capsys.readouterr().err == (
        f"binade: {ADDRESS} cannot be read: the server cannot be reached: check AWS_ENDPOINT_URL and the network\n"
    )


def test_what_would_write_refuses_an_address(tmp_path, monkeypatch, capsys):
    for address in (ADDRESS, "s3://key:hidden@bucket/runs", "s3://bucket/runs?secret_key=hidden"):
        with pytest.raises(RunError, match="can only be read"):
            resolve_root(address)
        assert main(["run", "--tensor-save-dir", address, "--size", "tiny"]) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert "a root in an object store can only be read" in line and "hidden" not in line


def test_commands_that_read(store, tmp_path, capsys):
    local = tmp_path / "runs"
    runs = [uploaded(store, make_run(local, assorted(1))).run_id for _ in range(2)]
    for command in (["compare", "ROOT"], ["verify", "ROOT"], ["diff", *runs, "--tensor-save-dir", "ROOT"]):
        said = []
        for root in (ADDRESS, str(local)):
            status = main([root if word == "ROOT" else word for word in command])
            said.append((status, capsys.readouterr()))
        assert said[0] == said[1] and said[0][0] == 0, command
    store.write(f"deep/runs/{runs[0]}/tensors/0001.pt", b"damaged")
    for path in readable_root(ADDRESS).glob("*/tensors/*"):
        path.unlink()
    assert main(["verify", ADDRESS]) == 1
    assert f"damaged: {runs[0]}/tensors/0001.pt has SHA-256" in capsys.readouterr().out
