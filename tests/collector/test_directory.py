"""Models by path: Hugging Face directories as transformers saves them, and GGUF files as gguf writes them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedTokenizerFast,
)

from binade.app.jobs import collecting
from binade.cli import main
from binade.collector.cli.options import parse
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.tokenizer import open_tokenizer
from binade.collector.errors import ConfigError
from binade.collector.jobs.estimate import estimate, volume_of
from binade.collector.models.model import GPTModel
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import read_shape
from binade.collector.training.config import RunConfig
from binade.collector.training.loop import open_stream
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MERGES = [("d", "e"), ("Ġ", "de"), ("Ġde", "f"), ("1", "2")]
TEXT = "def f(x): return x + 1\n\n    é def"
RUN = ["run", "--layers", "1", "--sequence-length", "16", "--backend", "torch", "--scores", "", "--no-raw"]


def reference(tied: bool = True, kind: type[nn.Module] = LlamaForCausalLM, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = {LlamaForCausalLM: LlamaConfig, MistralForCausalLM: MistralConfig}[kind]
    sizes = SIZES | ({"sliding_window": None} if config is MistralConfig else {})
    return kind(config(**sizes, tie_word_embeddings=tied, initializer_range=0.2)).eval()


def tokenizer() -> Tokenizer:
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(letters)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with its tokenizer, as transformers saves it."""
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    reference().save_pretrained(made)
    tokenizer().save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return made


def logits(path: Path, tokens: Tensor) -> Tensor:
    shape = read_shape(path)
    model = GPTModel(shape, compute_dtype=torch.float32)
    open_checkpoint(path, shape).load_into(model)
    with torch.no_grad():
        found: Tensor = model(tokens)
    return found


def tokens() -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
def test_a_mistral_runs_through_the_layers_of_a_llama(tied, tmp_path):
    theirs = reference(tied, MistralForCausalLM)
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(tmp_path, tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


def collected(root: Path, *options: str) -> dict[str, Any]:
    """run.json of a run, the only one under the root."""
    assert main([*RUN, "--dataset", "python-docs", "--tensor-save-dir", str(root), *options]) == 0
    (path,) = root.glob("*/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_directory_is_collected_with_its_weights_and_its_tokenizer(directory, tmp_path, capsys):
    run = collected(tmp_path, "--model", str(directory), "--recipe", "nvidia_nvfp4", "--layers", "2")
    assert run["size"] == "full" and run["weights"]["path"] == str(directory)
    assert run["data"]["tokenizer"] == str(directory / "tokenizer.json")
    assert f"weights from {directory}" in capsys.readouterr().out
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors(Filter())["model"]) == {run["model"]}


def test_models_of_one_name_are_told_apart_by_their_weights(directory, tmp_path):
    """The word is the name with a digest of the weights: a copy elsewhere has the same, other weights another."""
    copy, other = tmp_path / "copy" / directory.name, tmp_path / "other" / directory.name
    shutil.copytree(directory, copy)
    shutil.copytree(directory, other)
    reference(seed=1).save_pretrained(other)
    paths = {"first": directory, "copy": copy, "other": other}
    words = [collected(tmp_path / name / "runs", "--model", str(path))["model"] for name, path in paths.items()]
    assert words[0] == words[1] != words[2] and all(word.startswith("tiny-llama@") for word in words)


def test_the_form_and_the_estimate_take_a_path(directory, tmp_path):
    values = collecting.widgets_of(RunConfig()) | {"model": str(directory), "dataset": "python-docs"}
    (planned,) = collecting.runs_of(values, ["bf16"], RunConfig())
    assert planned.config.size == "full" and planned.shape == read_shape(directory)
    before = estimate([planned], tmp_path)
    collected(tmp_path, "--model", os.path.relpath(directory))
    assert before.basis.startswith("No similar run yet") and estimate([planned], tmp_path).basis.startswith(
        "Estimated from 1"
    )


def test_the_demo_of_the_makefile_is_a_command_that_parses(directory):
    (words,) = re.findall(r"^DEMO_RUNS := ((?:.*\\\n)*.*)", (PROJECT / "Makefile").read_text(), re.M)
    options = shlex.split(words.replace("\\\n", " ").replace("2,15,30", "2"))
    runs = parse(["batch", "--model", str(directory), *options]).runs
    assert [run.recipe for run in runs] == ["bf16", "mxfp8", "mxfp4", "nvfp4", "hifp8"]
    assert all("weight" not in run.tensors and list(run.recorded_iterations) == [0, 3] for run in runs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "tiny"], "--size is tiny: a model given by path has only the size full"),
        (["--vocab-size", "500"], "--vocab-size is 500: the vocabulary of tiny-llama has 320 tokens"),
        (["--layers", "3"], "--layers is 3: expected 1 to 2 for tiny-llama"),
        (["--sequence-length", "1024"], "--sequence-length is 1024: expected at most 512"),
        (["--tokenizer", "nowhere"], "tokenizer nowhere does not exist"),
    ],
)
def test_what_does_not_fit_a_path_is_one_line(options, said, directory):
    with pytest.raises(ConfigError, match=said) as caught:
        parse(["run", "--model", str(directory), *options])
    assert "\n" not in str(caught.value)


# Models that transformers runs


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny-neox"
    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4})).save_pretrained(made)
    return made


BYTE_RUN = ["run", "--tokenizer", "byte", "--backend", "torch", "--sequence-length", "32", "--dataset", "python-docs"]


def test_other_models_are_run_by_transformers(neox, tmp_path):
    """Its loss is that of transformers on the same tokens, and what is recorded is what was estimated."""
    options = ["--model", str(neox), "--recipe", "bf16", "--train-iters", "2"]
    assert main([*BYTE_RUN, *options, "--tensor-save-dir", str(tmp_path)]) == 0
    (config,) = parse([*BYTE_RUN, *options]).runs
    shape = plan(config).shape
    theirs = GPTNeoXForCausalLM.from_pretrained(neox)
    assert shape.parameters == theirs.num_parameters() and (shape.layers, shape.hidden, shape.heads) == (2, 64, 4)
    inputs, labels = open_stream(plan(config), open_dataset("python-docs", "byte", 320)).batch(config.micro_batch_size)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(theirs(inputs).logits.float().flatten(0, 1), labels.flatten())
    (losses,) = (path.read_text().splitlines() for path in tmp_path.glob("*/loss.jsonl"))
    first, second = (json.loads(line)["loss"] for line in losses)
    assert first == loss.item() and second != first
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors(Filter())
    sites = {(row.layer_index, row.module) for row in rows.itertuples()}
    assert sites == {(site.layer_index, site.module) for site in shape.sites()}
    assert sites == {(layer, name) for layer in (1, 2) for name in ("qkv", "core", "proj", "fc1", "fc2")}
    volume = volume_of(plan(config))
    assert len(rows) == volume.tensors and rows["numel"].sum() + rows["pairs_left_out"].fillna(0).sum() == volume.values
    assert set(rows[rows["layer_type"] == "linear"]["dtype"]) == {"bfloat16"}


def test_norms_without_a_gain_are_run(tmp_path):
    """OLMo's have no weight; its norms are recorded where they are named."""
    made = tmp_path / "tiny-olmo"
    OlmoForCausalLM(OlmoConfig(**SIZES)).save_pretrained(made)
    options = ["--model", str(made), "--recipe", "bf16", "--train-iters", "2", "--tensors", "norm_input,norm_gain"]
    with pytest.warns(UserWarning, match="nothing was recorded as norm_gain:"):
        assert main([*BYTE_RUN, *options, "--tensor-save-dir", str(tmp_path / "runs")]) == 0
    with Catalog.open(tmp_path / "runs") as catalog:
        found = catalog.tensors()
    assert len(found) == 5 and {tuple(s)[-1] for s in found["shape"]} == {64}


def test_a_buffer_of_integers_is_no_quantized_weight(neox, tmp_path):
    """Checkpoints of former versions hold masks and positions."""
    directory = shutil.copytree(neox, tmp_path / "tiny-neox")
    path = directory / "model.safetensors"
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 512, 512).long()}
    save_file(load_file(path) | mask, path, {"format": "pt"})
    assert open_checkpoint(directory, read_shape(directory)).loaded


def untouched(directory: Path) -> None:
    """A configuration that names code of its own, which would leave a file if it ran."""
    code = f"open({str(directory / 'ran')!r}, 'w').close()"
    (directory / "own.py").write_text(code)
    edit(directory, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})


def edit(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def drop(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "options", "said"),
    [
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), [], "contains no weights"),
        (drop, [], r"lacks the tensor gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight"),
        (lambda d: edit(d, hidden_size=128), [], "cannot be run by transformers"),
        (lambda d: edit(d, model_type="gpt1000"), [], "cannot be run by transformers"),
        (lambda d: edit(d, num_hidden_layers=3_000_000), [], "has 3000000 layers: expected at most 1000"),
        (untouched, [], "cannot be run by transformers"),
        (lambda d: (d / "adapter_config.json").touch(), [], "contains an adapter"),
        (
            lambda d: None,
            ["--layers", "1"],
            "--layers is 1: tiny-neox runs in transformers, where Binade can neither drop layers nor split them",
        ),
        (
            lambda d: None,
            ["--tp", "2"],
            "--tp is 2: tiny-neox runs in transformers, where Binade can neither drop layers nor split them",
        ),
    ],
)
def test_what_transformers_cannot_run_is_one_line(damage, options, said, neox, tmp_path, capfd):
    directory = shutil.copytree(neox, tmp_path / "tiny-neox")
    damage(directory)
    assert main([*BYTE_RUN, "--model", str(directory), *options, "--tensor-save-dir", str(tmp_path / "runs")]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("binade: ") and re.search(said, line)
    assert not (directory / "ran").exists() and not (tmp_path / "runs").exists()


def test_a_product_that_is_not_intercepted_is_one_line(tmp_path, capfd):
    config = BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=320, bos_token_id=0, eos_token_id=0)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    options = ["--model", str(tmp_path / "bloom"), "--recipe", "mxfp8", "--tensor-save-dir", str(tmp_path / "runs")]
    assert main([*BYTE_RUN, *options]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert re.match(r"binade: bloom cannot be trained by binade run, .*: .*by baddbmm that is not", line)


def test_without_transformers_one_line_says_so(neox, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="is a 'gpt_neox' model: only transformers can run it: pip install"):
        parse(["run", "--model", str(neox), "--tokenizer", "byte"])


def test_the_example_collects_an_encoder(tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "encoder")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="<end>")
    fast.save_pretrained(tmp_path / "encoder")
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))
    example = runpy.run_path(str(PROJECT / "examples" / "encoder.py"))
    example["main"](str(tmp_path / "encoder"), ["mxfp8"])
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors(Filter(module=("fc2",)))
    assert set(rows["quant_type"]) == {"mxfp8"} and set(rows["iteration"]) == {0}


# GGUF


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, quantized: gguf.GGMLQuantizationType | None, **changed: Any) -> None:
    """A Llama as llama.cpp's convert_hf_to_gguf.py writes it."""
    writer = gguf.GGUFWriter(path, changed.get("arch", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(320)
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number == 0 else 1 for _, number in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            weight = permuted(weight, heads) if part in name else weight
        theirs = names.get_name(name, (".weight",))
        if quantized is not None and weight.ndim > 1:
            writer.add_tensor(theirs, gguf.quantize(weight, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_the_logits_of_the_model_that_it_was_made_of(tied, tmp_path):
    theirs = reference(tied)
    write_gguf(tmp_path / "model.gguf", theirs, None)
    for path in (tmp_path, tmp_path / "model.gguf"):
        torch.testing.assert_close(logits(path, tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_a_quantized_gguf_file_is_dequantized_and_says_so(tmp_path, capsys):
    theirs = reference()
    write_gguf(tmp_path / "model.gguf", theirs, gguf.GGMLQuantizationType.Q4_1)
    shape = read_shape(tmp_path)
    checkpoint = open_checkpoint(tmp_path, shape)
    weight = theirs.model.layers[0].mlp.down_proj.weight.detach()
    read_weight = checkpoint.tensors.read("model.layers.0.mlp.down_proj.weight")
    assert 0.02 < (read_weight - weight).norm() / weight.norm() < 0.1  # four bits
    run = collected(tmp_path / "runs", "--model", str(tmp_path))
    assert run["weights"]["quantized"] == ["Q4_1"] and run["model"].startswith("model@")
    assert "dequantized from Q4_1: their values lie on a quantization grid" in capsys.readouterr().out


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", reference(), None)
    return tmp_path


def test_the_tokenizer_of_a_gguf_file_is_that_of_transformers(made):
    ours, theirs = open_tokenizer(str(made / "model.gguf")), AutoTokenizer.from_pretrained(made, gguf_file="model.gguf")
    assert ours.encode(TEXT).tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode("12").tolist() == [tokenizer().token_to_id(digit) for digit in "12"]  # SmolLM keeps digits apart
    assert ours.encode("<end>").tolist() == [0] and (ours.size, ours.end) == (len(tokenizer().get_vocab()), 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"arch": "qwen2"}, "of a 'qwen2' model, but only llama is supported"),
        ({"pre": "llama-bpe"}, "the pre-tokenizer llama-bpe, but only"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(changed, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", reference(), None, **changed)
    with pytest.raises(ConfigError, match=said):
        read_shape(tmp_path)
        open_tokenizer(str(tmp_path / "model.gguf"))


def test_damaged_and_ambiguous_gguf_files_are_refused(made):
    whole = (made / "model.gguf").read_bytes()
    for content in (b"", b"GGUF", b"x" * 100, whole[:1000], whole[:-5000]):
        (made / "model.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be"):
            open_checkpoint(made, read_shape(made))
    (made / "second.gguf").write_bytes(whole)
    with pytest.raises(ConfigError, match="contains 2 GGUF files: give the path to one"):
        read_shape(made)
