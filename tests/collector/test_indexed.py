"""Megatron's .bin/.idx: written by megatron-core's builder, compared with its own reader; and what is broken."""

from __future__ import annotations

import os
import random
import struct
from itertools import chain

import numpy as np
import pytest

from binade.collector.datasets.indexed import IndexedDocuments
from binade.collector.datasets.inputs import find_dataset
from binade.collector.errors import ConfigError
from tests.collector.files import megatron, read_pair, write_pair

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6], [7]], [], [[8, 9], []], [[10] * 40]]


def opened(name) -> IndexedDocuments:
    return IndexedDocuments(find_dataset(str(name)))


def documents(indexed: IndexedDocuments) -> list[list[int]]:
    return [indexed.tokens(index).tolist() for index in range(indexed.bounds[-1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("modes", [False, True], ids=["text", "multimodal"])
def test_as_megatron_reads_it(tmp_path, dtype, modes):
    chance, top = random.Random(0), min(np.iinfo(dtype).max, 2**40)
    written = [
        [[chance.randint(0, top) for _ in range(chance.randrange(9))] for _ in range(chance.randrange(4))]
        for _ in range(50)
    ]
    prefix = write_pair(tmp_path / "some_text_document", written, dtype, modes=modes)
    indexed = opened(prefix)
    assert documents(indexed) == read_pair(prefix) == [list(chain(*document)) for document in written]
    assert indexed.total == sum(map(len, documents(indexed))) and indexed.bounds.tolist() == [0, 50]


def test_documents_added_whole_and_indices_joined(tmp_path):
    """As preprocess_data and merge_datasets write them."""
    builder = megatron().IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for document, lengths in (([1, 2, 3, 4], [3, 1]), ([5], [1])):
        builder.add_document(document, lengths)
    builder.finalize(str(tmp_path / "a.idx"))
    write_pair(tmp_path / "b", DOCUMENTS, np.uint16)
    builder = megatron().IndexedDatasetBuilder(str(tmp_path / "both.bin"), dtype=np.uint16)
    for name in ("a", "b"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "both.idx"))
    assert documents(opened(tmp_path / "both")) == read_pair(tmp_path / "both")
    assert documents(opened(tmp_path / "both"))[:3] == [[1, 2, 3, 4], [5], [1, 2, 3]]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_prefix_or_either_file(tmp_path, suffix):
    write_pair(tmp_path / "x.v1_document", DOCUMENTS)
    assert documents(opened(f"{tmp_path / 'x.v1_document'}{suffix}")) == [
        list(chain(*document)) for document in DOCUMENTS
    ]


@pytest.mark.parametrize("missing", [".bin", ".idx"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_half_a_pair_is_refused(tmp_path, suffix, missing):
    write_pair(tmp_path / "x", DOCUMENTS)
    (tmp_path / f"x{missing}").unlink()
    with pytest.raises(
        ConfigError, match=f"x lacks .*x{missing}: a preprocessed dataset consists of a .bin and an .idx"
    ):
        opened(f"{tmp_path / 'x'}{suffix}")
    os.mkdir(tmp_path / f"x{missing}")
    with pytest.raises(ConfigError, match="lacks"):
        opened(f"{tmp_path / 'x'}{suffix}")


# DOCUMENTS as int32: a header of 34 bytes, 7 lengths of 4, 7 pointers of 8, 6 documents of 8.
LENGTHS, POINTERS, FIRSTS = 34, 34 + 7 * 4, 34 + 7 * 12
DAMAGE = {
    "wrong magic": (0, b"MMIDIDY", "begins with b'MMIDIDY"),
    "another program's": (0, b"PK\3\4", "begins with b'PK"),
    "version 2": (9, struct.pack("<Q", 2), "its version is 2"),
    "dtype code 0": (17, b"\0", "its dtype code is 0: expected 1 to 8"),
    "dtype code 9": (17, b"\t", "its dtype code is 9: expected 1 to 8"),
    "float64": (17, b"\6", "it contains float64: expected token ids"),
    "float32": (17, b"\7", "it contains float32: expected token ids"),
    "more sequences": (18, struct.pack("<Q", 8), "bytes: expected .* from its counts"),
    "2^64 - 1 sequences": (18, b"\xff" * 8, "bytes: expected .* from its counts"),
    "2^64 - 1 documents": (26, b"\xff" * 8, "bytes: expected .* from its counts"),
    "negative length": (LENGTHS + 4, struct.pack("<i", -1), "a sequence has -1 tokens"),
    "length beyond the .bin": (LENGTHS, struct.pack("<i", 2**31 - 1), "sequence 0 is not within the 196 bytes"),
    "last one token longer": (LENGTHS + 6 * 4, struct.pack("<i", 41), "sequence 6 is not within"),
    "negative pointer": (POINTERS + 8, struct.pack("<q", -4), "sequence 1 is not within"),
    "pointer beyond the .bin": (POINTERS + 16, struct.pack("<q", 197), "sequence 2 is not within"),
    "largest pointer": (POINTERS, struct.pack("<q", 2**63 - 1), "sequence 0 is not within"),
    "smallest pointer": (POINTERS, struct.pack("<q", -(2**63)), "sequence 0 is not within"),
    "another dtype": (17, b"\5", "sequence 6 is not within"),
    "documents begin late": (FIRSTS, struct.pack("<q", 1), "its documents are sequences 1 to 7 of 7"),
    "documents end early": (FIRSTS + 5 * 8, struct.pack("<q", 6), "its documents are sequences 0 to 6 of 7"),
    "documents beyond the end": (FIRSTS + 8, struct.pack("<q", 99), "not in order"),
    "negative document": (FIRSTS + 8, struct.pack("<q", -1), "not in order"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_corrupt_index_is_refused(tmp_path, name):
    where, content, said = DAMAGE[name]
    write_pair(tmp_path / "x", DOCUMENTS)
    whole = bytearray((tmp_path / "x.idx").read_bytes())
    whole[where : where + len(content)] = content
    (tmp_path / "x.idx").write_bytes(whole)
    with pytest.raises(ConfigError, match=rf"x\.idx is not a Megatron index: .*{said}"):
        opened(tmp_path / "x")


def test_an_index_of_any_other_length_is_refused(tmp_path):
    write_pair(tmp_path / "x", DOCUMENTS)
    whole = (tmp_path / "x.idx").read_bytes()
    assert len(whole) == FIRSTS + 6 * 8
    for length in range(len(whole)):
        (tmp_path / "x.idx").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"x\.idx is not a Megatron index"):
            opened(tmp_path / "x")
    for more in (1, 6, 8):  # 7 bytes more are the modes
        (tmp_path / "x.idx").write_bytes(whole + bytes(more))
        with pytest.raises(ConfigError, match=r"x\.idx is not a Megatron index"):
            opened(tmp_path / "x")


def test_data_cut_short_is_refused(tmp_path):
    write_pair(tmp_path / "x", DOCUMENTS)
    with open(tmp_path / "x.bin", "r+b") as file:
        file.truncate(195)
    with pytest.raises(ConfigError, match=r"sequence 6 is not within the 195 bytes of the \.bin"):
        opened(tmp_path / "x")


@pytest.mark.parametrize(
    ("written", "said"),
    [([], "no document"), ([[], []], "no document"), ([[[]], [[], []]], "no token")],
    ids=["no document", "no sequence", "no token"],
)
def test_an_empty_pair_is_refused(tmp_path, written, said):
    write_pair(tmp_path / "x", written)
    with pytest.raises(ConfigError, match=f"x contains {said}"):
        opened(tmp_path / "x")


def test_random_damage_is_refused_or_read(tmp_path):
    """Whatever the bytes of an .idx are: a ConfigError, or documents of tokens that are in the .bin."""
    write_pair(tmp_path / "x", DOCUMENTS)
    whole, chance, refused = (tmp_path / "x.idx").read_bytes(), random.Random(0), 0
    for _ in range(300):
        content = bytearray(whole)
        content[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / "x.idx").write_bytes(content)
        try:
            indexed = opened(tmp_path / "x")
        except ConfigError:
            refused += 1
        else:
            assert sum(map(len, documents(indexed))) == indexed.total
    assert 0 < refused < 300


def test_a_file_larger_than_memory(tmp_path):
    """Eight documents of 2^31 - 1 tokens in a sparse file of 64 GiB: nothing but the tokens asked for is read."""
    length = 2**31 - 1
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(8 * 4 * length)
        file.seek(4 * (5 * length + 1_000_000_000))
        file.write(np.arange(1, 5, dtype=np.int32).tobytes())
    with megatron()._IndexWriter(str(tmp_path / "x.idx"), np.int32) as writer:
        writer.write([length] * 8, None, range(9))
    indexed = opened(tmp_path / "x")
    assert indexed.total == 8 * length
    assert indexed.tokens(5)[999_999_999:1_000_000_005].tolist() == [0, 1, 2, 3, 4, 0]
