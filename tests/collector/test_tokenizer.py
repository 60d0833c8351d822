"""Tokenizers: trained here by the library, compared with what it gives, and what is no tokenizer."""

from __future__ import annotations

import gc
import hashlib
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from binade.collector.datasets.inputs import find_dataset
from binade.collector.datasets.texts import open_texts
from binade.collector.datasets.tokenizer import END_TOKENS, open_tokenizer
from binade.collector.errors import ConfigError, DataError
from tests.collector.files import train_tokenizer


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = open_texts(find_dataset("dolma"))
    return [found.text(index) for index in range(found.bounds[-1])]


@pytest.fixture
def trained(texts) -> Tokenizer:
    return train_tokenizer(texts, 400, ["<s>", "<|endoftext|>"])


def test_bytes():
    tokenizer = open_tokenizer("byte")
    assert bytes(tokenizer.encode("naïve\0\n")) == "naïve\0\n".encode()
    assert (tokenizer.size, tokenizer.end, tokenizer.sha256) == (257, 256, None)


@pytest.mark.parametrize("given", ["file", "directory"])
def test_as_the_library_encodes(tmp_path, texts, trained, given):
    path = tmp_path / "tokenizer.json"
    trained.save(str(path))
    tokenizer = open_tokenizer(str(path if given == "file" else tmp_path))
    theirs = Tokenizer.from_file(str(path))
    for text in (*texts, "", "\0", "三番目 ß", " <s> in a text"):
        ids = tokenizer.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(ids.tolist(), skip_special_tokens=False) == text
    assert tokenizer.size == theirs.get_vocab_size() == 400 and tokenizer.end == theirs.token_to_id("<|endoftext|>")
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and tokenizer.name == str(path)


def test_nothing_is_added_cut_off_or_padded(tmp_path, texts, trained):
    plain = trained.encode(texts[0]).ids
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trained.enable_truncation(8)
    trained.enable_padding(length=16)
    assert len(trained.encode(texts[0]).ids) == 16 < len(plain)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.encode(texts[0]).tolist() == plain
    assert tokenizer.encode("a").tolist() == [trained.token_to_id("a")]


def test_size_counts_ids_not_tokens(tmp_path):
    """A vocabulary may have holes: the model needs a row up to the largest id."""
    Tokenizer(models.WordLevel({"a": 0, "b": 9000}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).size == 9001


@pytest.mark.parametrize("token", END_TOKENS)
def test_the_end_token_by_its_usual_names(tmp_path, token):
    train_tokenizer([], 400, ["<pad>", token]).save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).end == 1


ENDS = {
    "a string": ('{"eos_token": "<s>"}', 0),
    "an object": ('{"eos_token": {"__type": "AddedToken", "content": "<s>"}}', 0),
    "null": ('{"eos_token": null}', 1),
    "not named": ('{"bos_token": "<s>"}', 1),
    "no object": ("[]", 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_token_by_the_configuration(tmp_path, trained, name):
    content, end = ENDS[name]
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert open_tokenizer(str(tmp_path)).end == open_tokenizer(str(tmp_path / "tokenizer.json")).end == end


def test_a_tokenizer_without_an_end_token(tmp_path):
    train_tokenizer([], 400).save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).end is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"eos_token": "<gone>"}', "names the end-of-text token '<gone>', which the tokenizer does not have"),
        (b'{"eos_token": ', "tokenizer_config.json cannot be read"),
        (b"\xff", "tokenizer_config.json cannot be read"),
        (b"[" * 100_000, "tokenizer_config.json cannot be read"),
    ],
    ids=["unknown token", "no JSON", "not UTF-8", "too deep"],
)
def test_a_wrong_configuration_is_refused(tmp_path, trained, content, said):
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    gc.collect()  # else a finalizer may run where no stack is left, which pytest cannot report
    with pytest.raises(ConfigError, match=said):
        open_tokenizer(str(tmp_path))


NO_TOKENIZER = {
    "empty": b"",
    "no JSON": b'{"version": "1.0", ',
    "another JSON": json.dumps({"eos_token": "</s>"}).encode(),
    "a list": b"[]",
    "not UTF-8": b"\xff\xfe",
    "too deep": b"[" * 100_000,
    "unknown model": b'{"version": "1.0", "added_tokens": [], "model": {"type": "LSTM"}}',
    "merge of unknown tokens": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
}


@pytest.mark.parametrize("name", NO_TOKENIZER)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name):
    (tmp_path / "tokenizer.json").write_bytes(NO_TOKENIZER[name])
    gc.collect()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json"):
        open_tokenizer(str(tmp_path))


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone.json"):
        with pytest.raises(ConfigError, match=r"does not exist: give byte, a Hugging Face tokenizer\.json"):
            open_tokenizer(str(path))


def test_an_untrained_tokenizer_is_refused(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has an empty vocabulary"):
        open_tokenizer(str(tmp_path))


def test_a_text_that_cannot_be_spelled(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(str(tmp_path))
    assert found.encode("a a").tolist() == [0, 0]
    with pytest.raises(DataError, match=r"tokenizer .* cannot encode 'a b'"):
        found.encode("a b")
