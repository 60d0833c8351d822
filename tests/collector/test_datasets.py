"""`--dataset`, `--tokenizer` and `--vocab-size` through the real command: what is read, recorded, refused and said."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from binade.collector.datasets.inputs import find_dataset
from binade.collector.datasets.texts import open_texts
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.data.words.filter import Filter
from tests.collector.files import megatron, read_pair, train_tokenizer, write_jsonl, write_pair
from tests.collector.forked import run_forked

pytestmark = pytest.mark.slow

TEXTS = [f"Text {i} has the length of {i % 13 * 'some '}words.\n" for i in range(40)]
FAST = ("--tensors", "query", "--no-raw")


def data_hashes(run) -> list[str]:
    return [record["data_sha256"] for record in read_losses(run.directory)]


def sha256_of_batches(row: list[int], batches: int, size: int, length: int) -> list[str]:
    """The hashes after each batch of samples that are cut from a row of tokens one after the other."""
    sha, found = hashlib.sha256(), []
    for start in range(0, batches * size * length, size * length):
        for first in (start, start + 1):  # tokens, labels
            sha.update(np.array(row[first : first + size * length], dtype="<i8").tobytes())
        found.append(sha.hexdigest())
    return found


@pytest.fixture
def write(tmp_path):
    """TEXTS in a format: the path."""

    def call(suffix: str) -> Path:
        path = tmp_path / f"mine.{suffix}"
        lines = write_jsonl(tmp_path / "mine.jsonl", TEXTS)
        if suffix == "jsonl.gz":
            path.write_bytes(gzip.compress(lines.read_bytes()))
        if suffix == "parquet":
            pq.write_table(pa.table({"text": TEXTS}), path)
        return path

    return call


class TestRecorded:
    def test_the_same_texts_are_the_same_data_in_any_format(self, collect, write):
        runs = [collect(*FAST, "--dataset", str(write(suffix))) for suffix in ("jsonl", "jsonl.gz", "parquet")]
        for run, suffix in zip(runs, ("jsonl", "jsonl.gz", "parquet"), strict=True):
            assert run.config["data"] == {
                "name": str(write(suffix)),
                "format": suffix,
                "documents": len(TEXTS),
                "tokenizer": "byte",
                "tokenizer_sha256": None,
                "end_of_document": 256,
                "corpus_sha256": hashlib.sha256("\0".join(TEXTS).encode()).hexdigest(),
            }
            assert f"data: {write(suffix)} ({suffix}), 40 documents, " in (run.directory / "log.txt").read_text()
        assert data_hashes(runs[0]) == data_hashes(runs[1]) == data_hashes(runs[2])

    def test_a_hash_of_what_was_read_is_the_same_for_every_recipe(self, command, collect, tmp_path):
        length = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--micro-batches", "2")
        iterations = ("--warmup-iterations", "1", "--control-iter", "2", "--backend", "torch", "--scores", "")
        assert command("batch", "--quantization", "bf16,mxfp4,FA_hifp8", *length, *iterations, *FAST) == 0
        hashes = [data_hashes(run) for run in list_runs(tmp_path / "runs")[0]]
        assert len(hashes) == 3 and hashes[0] == hashes[1] == hashes[2]
        assert len(set(hashes[0])) == 3 and all(len(digest) == 64 for digest in hashes[0])
        other = collect(*FAST, *length, *iterations, "--seed", "1")
        assert not set(data_hashes(other)) & set(hashes[0])

    def test_the_hash_is_of_the_tokens_in_the_bin(self, collect, tmp_path):
        """One document, again and again: what is read is known without the collector's order."""
        document = np.random.default_rng(0).integers(0, 500, 77).tolist()
        prefix = write_pair(tmp_path / "mine_text_document", [[document]], np.uint16)
        run = collect(*FAST, "--dataset", str(prefix), "--vocab-size", "500", "--control-iter", "4")
        read = read_pair(prefix)[0] * 2
        assert data_hashes(run) == sha256_of_batches(read, 4, 1, 32)
        index = (tmp_path / "mine_text_document.idx").read_bytes()
        assert run.config["data"] == {
            "name": str(prefix),
            "format": "bin/idx",
            "documents": 1,
            "tokenizer": None,
            "idx_sha256": hashlib.sha256(index).hexdigest(),
            "idx_bytes": len(index),
            "bin_bytes": 2 * 77,
        }
        assert "1 documents, tokenized already" in (run.directory / "log.txt").read_text()

    def test_the_hash_is_of_the_tokens_of_the_tokenizer(self, collect, tmp_path):
        (text,) = texts = [" ".join(TEXTS)]
        tokenizer = train_tokenizer(TEXTS, 420, ["<|end_of_text|>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        ids = [*tokenizer.encode(text).ids, 0]
        dataset = write_jsonl(tmp_path / "mine.jsonl", texts)
        run = collect(*FAST, "--dataset", str(dataset), "--tokenizer", str(tmp_path), "--vocab-size", "420")
        assert data_hashes(run) == sha256_of_batches(ids * 9, 1, 1, 32)
        data, content = run.config["data"], (tmp_path / "tokenizer.json").read_bytes()
        assert data["tokenizer"] == str(tmp_path / "tokenizer.json") and data["end_of_document"] == 0
        assert data["tokenizer_sha256"] == hashlib.sha256(content).hexdigest()
        assert (run.config["tokenizer"], run.config["vocab_size"]) == (str(tmp_path), 420)

    @pytest.mark.thorough
    def test_an_epoch_and_more_of_a_bin_that_megatron_style_preprocessing_wrote(self, collect, tmp_path):
        """Documents tokenized by the library and ended by hand give the very data that the collector makes of text."""
        tokenizer = train_tokenizer(TEXTS, 384, ["</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        texts = write_jsonl(tmp_path / "mine.jsonl", TEXTS)
        tokens = write_pair(tmp_path / "mine", [[[*tokenizer.encode(text).ids, 0]] for text in TEXTS])
        options = (*FAST, "--control-iter", "20")
        first = collect(*options, "--dataset", str(texts), "--tokenizer", str(tmp_path))
        second = collect(*options, "--dataset", str(tokens))
        assert data_hashes(first) == data_hashes(second) and len(set(data_hashes(first))) == 20


def test_a_model_takes_the_vocabulary_it_is_given(collect, tmp_path):
    prefix = write_pair(tmp_path / "x", [[list(range(1000))]])
    run = collect("--dataset", str(prefix), "--vocab-size", "1000", "--tensors", "grad_weight")
    assert run.config["vocab_size"] == 1000
    assert run.config["parameters"] == plan(RunConfig(layers=1)).shape.parameters + 256 * (1000 - 384)
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors(Filter(tensor_name=["grad_weight"]))
        assert len(rows) and all(bool(torch.isfinite(catalog.load(row)).all()) for row in rows["tensor_id"])


def test_a_file_larger_than_memory_is_trained_on(collect, tmp_path):
    """One document of 2^31 - 1 tokens in each of sixteen: a sparse .bin of 64 GiB."""
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(16 * 2 * (2**31 - 1))
    with megatron()._IndexWriter(str(tmp_path / "x.idx"), np.uint16) as writer:
        writer.write([2**31 - 1] * 16, None, range(17))
    run = collect(*FAST, "--dataset", str(tmp_path / "x.bin"))
    assert data_hashes(run) == sha256_of_batches([0] * 33, 1, 1, 32)


def corrupt(path: Path, position: int, content: bytes) -> Path:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(content)
    return path


def pair(place: Path) -> Path:
    return write_pair(place / "x", [[[1, 2, 300, 4] * 10]])


def untrained(place: Path) -> Path:
    (place / "none.json").write_text("{}")
    return place / "none.json"


def trained(place: Path) -> Path:
    train_tokenizer(TEXTS, 400, [f"<{i}>" for i in range(130)]).save(str(place / "tokenizer.json"))
    return place


def parquet(place: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), place / "x.parquet")
    return place / "x.parquet"


# The options that each makes of an empty directory, and what is said about them.
REFUSED = {
    "unknown": (lambda p: ("--dataset", str(p / "x")), "x': expected wikipedia, dolma, python-docs, or a path to "),
    "an unknown kind of file": (lambda p: ("--dataset", str(untrained(p))), "none.json': expected wikipedia"),
    "a directory": (lambda p: ("--dataset", str(p)), "': expected wikipedia, dolma"),
    "a missing parquet": (lambda p: ("--dataset", str(p / "x.parquet")), "x.parquet does not exist: give the path"),
    "a missing bin": (lambda p: ("--dataset", str(p / "x.bin")), "x.bin does not exist: give the path"),
    "half a pair": (lambda p: ("--dataset", str(pair(p)), (p / "x.bin").unlink())[:2], "x lacks "),
    "a corrupt idx": (
        lambda p: ("--dataset", str(corrupt(pair(p).with_suffix(".idx"), 0, b"X"))),
        "is not a Megatron index",
    ),
    "an empty pair": (lambda p: ("--dataset", str(write_pair(p / "x", []))), "x contains no documents"),
    "no column text": (lambda p: ("--dataset", str(parquet(p, body=["a"]))), "needs one column 'text'"),
    "a damaged parquet": (lambda p: ("--dataset", str(corrupt(parquet(p, text=["a"]), 0, b"X" * 99))), "x.parquet"),
    "a tokenizer for a bin": (
        lambda p: ("--dataset", str(pair(p)), "--tokenizer", "byte"),
        "x contains tokens, not text: leave out --tokenizer byte",
    ),
    "a missing tokenizer": (lambda p: ("--tokenizer", str(p)), "tokenizer.json does not exist: give byte, a Hugging"),
    "no tokenizer": (lambda p: ("--tokenizer", str(untrained(p))), "none.json is not a Hugging Face tokenizer.json"),
    "a large tokenizer": (
        lambda p: ("--tokenizer", str(trained(p))),
        " tokens, but the model's vocabulary has only 384: use --vocab-size ",
    ),
    "too few for bytes": (
        lambda p: ("--vocab-size", "256"),
        "tokenizer byte has 257 tokens, but the model's vocabulary has only 256",
    ),
    "ids beyond the model": (
        lambda p: ("--dataset", str(pair(p)), "--vocab-size", "300"),
        "x contains the token id 300, but the model's vocabulary has only 300 tokens: use --vocab-size 301 or more",
    ),
    "no vocabulary": (lambda p: ("--vocab-size", "0"), "--vocab-size is 0: it must be 1 or more"),
    "a negative vocabulary": (lambda p: ("--vocab-size", "-5"), "--vocab-size is -5"),
    "a vocabulary of words": (lambda p: ("--vocab-size", "many"), "'--vocab-size': 'many' is not a valid integer"),
    "a vocabulary beyond the memory": (lambda p: ("--vocab-size", "9" * 9), " GiB are free on cpu"),
    "a vocabulary without end": (lambda p: ("--vocab-size", "9" * 20), "it must be at most 1000000000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_with_nothing_written(command, capsys, tmp_path, name):
    make, said = REFUSED[name]
    place = tmp_path / "given"
    place.mkdir()
    assert command("run", "--backend", "torch", *make(place)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("binade: ") and err.endswith("\n") and err[:-1].isprintable() and said in err
    assert out in ("", "bf16\n") and not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_ranks_refuse_as_one(command, capsys, tmp_path):
    arguments = ("run", "--dp", "2", "--backend", "torch", "--dataset", str(pair(tmp_path)), "--vocab-size", "300")
    assert command(*arguments) == 2 and not (tmp_path / "runs").exists()
    error = capsys.readouterr().err
    assert error.startswith(f"binade: dataset {tmp_path / 'x'} contains the token id 300")
    assert error.count("\n") == 1


def test_ranks_read_what_one_rank_reads(tmp_path):
    """One document: each of two ranks takes every other batch of the row."""
    document = list(range(77))
    prefix = write_pair(tmp_path / "x", [[document]])
    small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch")
    arguments = (*small, *FAST, "--dp", "2", "--micro-batches", "2", "--dataset", str(prefix))
    assert run_forked(tmp_path / "runs", *arguments, ranks=2) == 0
    ((run,), _) = list_runs(tmp_path / "runs")
    row, sha = document * 3, hashlib.sha256()
    for batch in (0, 2):  # those of rank 0
        for first in (32 * batch, 32 * batch + 1):
            sha.update(np.array(row[first : first + 32], dtype="<i8").tobytes())
    assert data_hashes(run) == [sha.hexdigest()]


def test_a_dataset_that_breaks_under_way_fails_the_run(command, capsys, tmp_path):
    """The second document cannot be spelled, which is found when it is its turn."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "?"},
            }
        )
    )
    good = " ".join(["word"] * 40)
    for seed in range(9):  # in an order that begins with the good one
        dataset = write_jsonl(tmp_path / "x.jsonl", [good, "strange"])
        options = ("--tokenizer", str(tmp_path), "--dataset", str(dataset), "--seed", str(seed))
        small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "16", "--backend", "torch")
        status = command("run", *small, *FAST, *options, "--control-iter", "9")
        err = capsys.readouterr().err
        assert "cannot encode 'strange'" in err and err.count("\n") == 1
        if status == 1:
            break
        assert status == 2 and not (tmp_path / "runs").exists()
    ((run,), _) = list_runs(tmp_path / "runs")
    assert run.status.state == "failed" and "cannot encode" in run.status.reason
    assert len(data_hashes(run)) >= 1


class TestSaid:
    def test_dry_run(self, command, capsys, tmp_path):
        shown = {
            "wikipedia (built in), byte tokens, 512": ("--dataset", "wikipedia"),
            "x.parquet (.parquet), byte tokens, 512": ("--dataset", str(parquet(tmp_path, text=["a"]))),
            "x (Megatron's .bin/.idx, tokenized already), 512": ("--dataset", str(pair(tmp_path))),
            f"tokens of {tmp_path / 'tokenizer.json'}, 512": ("--tokenizer", str(trained(tmp_path))),
            "head 32, vocabulary 1000; ": ("--vocab-size", "1000"),
        }
        for line, options in shown.items():
            assert command("run", "--dry-run", *options) == 0
            assert line in capsys.readouterr().out
        assert not (tmp_path / "runs").exists()

    def test_help(self, command, capsys):
        assert command("run", "--help") == 0
        words = " ".join(capsys.readouterr().out.split())
        for said in (".jsonl.gz or .parquet", "Megatron’s .bin/.idx", "path to a tokenizer.json", "--vocab-size N"):
            assert said in words

    def test_list(self, command, capsys):
        assert command("list") == 0
        out = capsys.readouterr().out
        for said in (
            ".jsonl.gz or .parquet",
            ".bin/.idx",
            "tokenizer.json",
            "vocabulary 128256",
            "256 ends a document",
        ):
            assert said in out


def test_python_docs_can_be_named(collect):
    run = collect(*FAST, "--dataset", "python-docs")
    assert run.config["data"]["corpus_sha256"] == open_texts(find_dataset("python-docs")).digest
