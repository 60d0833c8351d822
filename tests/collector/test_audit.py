"""`binade audit` of checkpoints that other libraries have quantized, with and without planted faults."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import binade
from binade.app.questions.shared.rounded import ROUNDED_ALREADY
from binade.app.questions.shared.selection import recorded_in
from binade.cli import main
from binade.collector.audit.audit import of_error
from binade.collector.audit.result import Audit
from binade.collector.audit.weights import CheckpointWeight
from binade.data.compare.difference import difference
from binade.data.exchange.quantized.stored import Decoded
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, list_runs, read_run
from binade.data.run.verify import verify
from binade.quant.metrics import errors
from binade.quant.specs import Block, Spec
from tests.bench.bench_audit import make
from tests.collector.test_directory import reference, write_gguf
from tests.data.test_quantized import CHECKPOINTS, MODULE, NAMES, by_hand

ORIGINAL = CHECKPOINTS / "original"
Tensors = dict[str, torch.Tensor]


def changed(tmp_path: Path, name: str, change: Callable[[Tensors, dict], None]) -> Path:
    """A copy of a checkpoint whose tensors and quantization_config a function has changed."""
    copy = tmp_path / name
    shutil.copytree(CHECKPOINTS / name, copy)
    tensors, settings = load_file(copy / "model.safetensors"), json.loads((copy / "config.json").read_text())
    with safe_open(copy / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    change(tensors, settings["quantization_config"])
    save_file(tensors, copy / "model.safetensors", metadata)
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


@pytest.fixture(scope="module")
def audits(tmp_path_factory) -> tuple[Path, Mapping[str, Audit]]:
    root = tmp_path_factory.mktemp("audits")
    names = ["compressed_tensors_mxfp4", "compressed_tensors_mxfp8", "modelopt_mxfp8", "modelopt_nvfp4", "autoawq"]
    return root, {name: binade.audit(CHECKPOINTS / name, ORIGINAL, root) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_has_its_format_and_the_rule_that_leaves_it_out(name, tmp_path):
    audit = binade.audit(CHECKPOINTS / name, root=tmp_path)
    expected = json.loads((CHECKPOINTS / name / "expected.json").read_text())
    plain = {weight.name: weight.rule for weight in audit.weights if not weight.stored}
    assert {weight.name for weight in audit.weights if weight.stored} == expected.keys()
    assert plain.keys() == {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"} - (
        expected.keys()
    )
    names_rules = not name.startswith(("gptq", "bitsandbytes_nf4", "bitsandbytes_int8")) or "nested" in name
    if names_rules and not name.startswith("torchao"):
        assert "k_proj" in plain["model.layers.0.self_attn.k_proj.weight"]
        assert audit.findings == ()
    if name.startswith("torchao"):  # the library was told to leave out k_proj, and did not
        (finding,) = audit.findings
        assert "'k_proj' leaves out model.layers.0.self_attn.k_proj, which is quantized" in finding


def test_the_error_of_a_weight_is_in_its_row_and_its_values_are_read_in_place(audits):
    root, found = audits
    with Catalog.open(root) as catalog:
        _check_row(catalog, found)
    assert verify(root).damaged == []


def _check_row(catalog: Catalog, found: Mapping[str, Audit]) -> None:
    rows = catalog.tensors(binade.Filter())
    row = rows[(rows["run_id"] == found["modelopt_nvfp4"].run_id) & (rows["file_key"] == f"{MODULE}.weight")].iloc[0]
    x = load_file(ORIGINAL / "model.safetensors")[f"{MODULE}.weight"].double().numpy()
    q = by_hand("modelopt_nvfp4").astype(np.float64)
    assert row["sqnr_db"] == pytest.approx(10 * np.log10((x**2).sum() / ((q - x) ** 2).sum()), abs=1e-9)
    assert (row["layer_index"], row["module"], row["tensor_name"], row["stage"]) == (1, "fc2", "weight", "after")
    assert row["format"] == "nvfp4"
    assert np.array_equal(catalog.load(row["tensor_id"]).numpy(), by_hand("modelopt_nvfp4").astype(np.float32))
    assert recorded_in(catalog, row, "forward").problem(Spec.of("nvfp4")) == ROUNDED_ALREADY


def test_the_report_names_the_spec_that_makes_the_weights(audits):
    _, found = audits
    assert "bit-equal to mxfp4(scale=even): 6 weights" in str(found["compressed_tensors_mxfp4"])
    assert "bit-equal to mxfp8(scale=rceil): 6 weights" in str(found["modelopt_mxfp8"])
    # The library gives up the tensor scale of gate, and the query that of the value, so they are not those of nvfp4.
    stored = load_file(CHECKPOINTS / "modelopt_nvfp4" / "model.safetensors")
    scales = [stored[f"model.layers.0.mlp.{name}_proj.weight_scale_2"] for name in ("gate", "up")]
    assert scales[0] == scales[1]
    assert "as nvfp4, up to two units in the last place: 3 weights" in str(found["modelopt_nvfp4"])
    assert "no spec has such codes: 6 weights" in str(found["autoawq"])


def test_two_audits_compare_weight_by_weight(audits, tmp_path):
    root, found = audits
    ours, theirs = (read_run(root / found[name].run_id) for name in ("compressed_tensors_mxfp8", "modelopt_mxfp8"))
    same = difference(ours, theirs)
    assert len(same.rows) == 9 and all(row.by == "values" and row.equal for row in same.rows)

    def swap(tensors: Tensors, _: dict) -> None:
        packed = tensors[f"{MODULE}.weight_packed"]
        tensors[f"{MODULE}.weight_packed"] = packed << 4 | packed >> 4

    swapped = binade.audit(changed(tmp_path, "compressed_tensors_mxfp4", swap), root=root)
    compared = difference(read_run(root / found["compressed_tensors_mxfp4"].run_id), read_run(root / swapped.run_id))
    assert [row.module for row in compared.rows if not row.equal] == ["fc2"]


SCALE = f"{MODULE}.weight_scale"


def _set(value: float, name: str = SCALE, row: int = 3) -> Callable[[Tensors, dict], None]:
    def change(tensors: Tensors, _: dict) -> None:
        tensors[name] = tensors[name].float().index_fill(0, torch.tensor([row]), value).to(tensors[name].dtype)

    return change


def _config(**settings: object) -> Callable[[Tensors, dict], None]:
    return lambda _, config: config.update(settings)


def _of_another_block(tensors: Tensors, _: dict) -> None:
    scale = tensors[f"{MODULE}.weight_scale"].view(torch.uint8)
    tensors[f"{MODULE}.weight_scale"] = scale.flip(-1).contiguous().view(torch.float8_e4m3fn)


def _turned(tensors: Tensors, _: dict) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.flip(
        tensors["model.layers.0.self_attn.q_proj.weight_scale"], [0]
    )


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        ("compressed_tensors_fp8", _set(0.0), "1 of 32 scales is zero, so that their values are lost"),
        ("compressed_tensors_fp8", _set(-1.0), "1 of 32 scales is negative"),
        ("compressed_tensors_fp8", _set(1e9), "1 of 32 scales is more than 65,536 times the median scale"),
        ("compressed_tensors_mxfp8", _set(255.0), "2 of 64 scales are NaN or infinite"),
        ("autoawq", _set(0.0, f"{MODULE}.scales", 1), "32 of 64 scales are zero"),
        ("compressed_tensors_fp8", _config(ignore=["lm_head", "re:.*router"]), "'re:.*router' names no module"),
        ("compressed_tensors_fp8", _config(ignore=["re:("]), r"'re:(' is no regular expression that can be read"),
        (
            "modelopt_fp8",
            _config(ignore=["lm_head", "*q_proj"]),
            "'*q_proj' leaves out model.layers.0.self_attn.q_proj",
        ),
        (
            "compressed_tensors_fp8",
            _config(config_groups={"g": {"targets": ["re:.*k_proj"], "weights": {}}}, ignore=[]),
            "config_groups.g.targets 're:.*k_proj' quantizes model.layers.0.self_attn.k_proj, which is not quantized",
        ),
        ("compressed_tensors_fp8", _turned, "its values are not those of the original"),
        ("compressed_tensors_nvfp4", _of_another_block, "in the median: other scales?"),
        ("gptq", _config(checkpoint_format="gptq_v2"), "on average: other zeros?"),
        (
            "compressed_tensors_nvfp4",
            _config(config_groups={"g": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}}),
            "it is stored as NVFP4, and its config_groups say int of 4 bits",
        ),
        (
            "compressed_tensors_int4",
            _config(config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 2}}}),
            f"{MODULE}.weight_packed has 8 words in a line of 64 codes, but 2 bits need 4",
        ),
        ("modelopt_fp8", _config(quant_algo="NVFP4", config_groups={}), "stored as FP8, and its quant_algo is NVFP4"),
        ("compressed_tensors_nvfp4", lambda _, config: config.clear(), "has no quantization_config"),
    ],
)
def test_planted_faults_are_found(name, change, finding, tmp_path):
    audit = binade.audit(changed(tmp_path, name, change), ORIGINAL, tmp_path / "runs")
    assert any(finding in text for text in audit.findings), audit.findings


@pytest.mark.parametrize("name", NAMES)
def test_a_right_checkpoint_has_no_findings_against_its_original(name, tmp_path):
    audit = binade.audit(CHECKPOINTS / name, ORIGINAL, tmp_path)
    expected = ("k_proj' leaves out", "is not quantized, and differs")  # torchao kept no rule; AWQ's is float16
    assert all(any(part in finding for part in expected) for finding in audit.findings)


def _values(kind: str) -> torch.Tensor:
    """[192, 512], as weights may be distributed."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(192, 512, generator=generator)
    if kind == "heavy":
        return x / torch.randn(3, 192, 512, generator=generator).square().mean(0).sqrt()
    if kind == "outlying columns":
        x[:, ::37] *= 12
    if kind == "few directions":
        x += torch.randn(192, 8, generator=generator) @ torch.randn(8, 512, generator=generator) / 3
    return x


def _integers(x: torch.Tensor, bits: int, clip: float = 1.0) -> torch.Tensor:
    """Blocks [blocks, block] rounded to nearest, with a scale and a zero for each."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0) * clip, x.amax(-1, keepdim=True).clamp(min=0) * clip
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale


def _least_error(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Each block clipped where its squared error is least."""
    tried = torch.stack([_integers(x, bits, 1 - step / 20) for step in range(11)])
    return tried[(tried - x).square().sum(-1).argmin(0), torch.arange(len(x))]


def _gptq(x: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Columns rounded in turn, the error of each compensated in those that follow (arXiv:2210.17323, algorithm 1), for
    inputs with strong correlations."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(512, 512, generator=generator) * torch.logspace(0, -2, 512)[:, None]
    inputs = torch.randn(2048, 512, generator=generator) @ mixed
    second = inputs.T @ inputs / len(inputs)
    upper = torch.linalg.cholesky(torch.linalg.inv(second + 0.01 * second.diag().mean() * torch.eye(512)), upper=True)
    x, q = x.clone(), torch.zeros_like(x)
    for column in range(x.shape[1]):
        if column % block == 0:
            low, high = x[:, column : column + block].aminmax(dim=-1)
            low, scale = low.clamp(max=0), (high.clamp(min=0) - low.clamp(max=0)) / (2**bits - 1)
            zero = (-low / scale).round()
        q[:, column] = (((x[:, column] / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale
        x[:, column:] -= ((x[:, column] - q[:, column]) / upper[column, column])[:, None] * upper[column, column:]
    return q


def _audited(q: torch.Tensor, bits: int, block: int) -> CheckpointWeight:
    return CheckpointWeight("a.weight", f"INT{bits}", "I32", None, Decoded(q, torch.ones(1), None, Block(1, block)))


@pytest.mark.parametrize("kind", ["normal", "heavy", "outlying columns", "few directions"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_honest_rounding_is_no_finding_and_other_rows_and_scales_are(bits, kind):
    x = _values(kind)
    for block in (32, 128, 512):
        blocks = x.reshape(-1, block)
        nearest, clipped = (one.reshape(x.shape) for one in (_integers(blocks, bits), _least_error(blocks, bits)))
        for q in (nearest, clipped, _gptq(x, bits, block)):
            assert not list(of_error(x, _audited(q, bits, block), errors(x, q)))
        half = torch.cat((nearest[:96].flip(0), nearest[96:]))
        for wrong in (nearest.flip(0), *((half, 1.5 * clipped) if bits > 2 else ())):
            assert list(of_error(x, _audited(wrong, bits, block), errors(x, wrong)))
        (said,) = of_error(x, _audited(nearest / 4, bits, block), errors(x, nearest / 4))
        assert 2 < float(re.search(r"factor of (\S+)", said)[1]) < 6


def test_scales_of_another_layout_are_a_finding_and_the_others_are_audited(tmp_path):
    def transpose(tensors: Tensors, _: dict) -> None:
        tensors[SCALE] = tensors[SCALE].T.contiguous()

    audit = binade.audit(changed(tmp_path, "modelopt_mxfp8", transpose), root=tmp_path / "runs")
    (finding,) = audit.findings
    assert finding.endswith(f"{SCALE} is 2 x 32: expected 32 x 2")
    assert len([weight for weight in audit.weights if weight.stored]) == 5


def _shaped(rows: int, *scale: int) -> Callable[[Tensors, dict], None]:
    return lambda tensors, _: tensors.update(
        {f"{MODULE}.weight": tensors[f"{MODULE}.weight"][:rows], SCALE: torch.ones(scale).to(tensors[SCALE].dtype)}
    )


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        ("compressed_tensors_fp8", _shaped(0, 0, 1), "weight is 0 x 64: expected two axes or more, with values"),
        ("autoawq", lambda t, _: t.update({f"{MODULE}.qweight": t[f"{MODULE}.qweight"][:0]}), "is 0 x 4: expected"),
        (
            "modelopt_fp8",
            lambda t, _: t.update({f"{MODULE}.weight": t[f"{MODULE}.weight"].reshape(-1)}),
            "weight is 2048: expected two axes",
        ),
        ("compressed_tensors_fp8", _shaped(32, 1, 32), "its values are not those of the original"),
        (
            "compressed_tensors_fp8",
            lambda t, _: t.update({"lm_head.weight": t["lm_head.weight"].long()}),
            "lm_head.weight is I64: expected codes (I8, F8_E4M3, F8_E5M2) or values (F64, F32, F16, BF16)",
        ),
        (
            "compressed_tensors_fp8",
            lambda t, _: t.pop("lm_head.weight"),
            "there is no lm_head.weight, which the original has",
        ),
        ("modelopt_nvfp4", lambda t, _: t.update({f"{SCALE}_2": torch.ones(0)}), "do not fit together: "),
        ("autoawq", _config(group_size=10**30), "down_proj.scales has 2 groups, but the inputs belong to 1"),
        ("compressed_tensors_fp8", _config(ignore=[f"x{i}" for i in range(999)]), "ignore 'x0' and 998 more names no"),
    ],
    ids=["rows", "words", "one axis", "columns of scales", "integers", "lacking", "no factor", "group", "many rules"],
)
def test_a_weight_that_is_no_matrix_of_values_is_a_finding(name, change, finding, tmp_path):
    audit = binade.audit(changed(tmp_path, name, change), ORIGINAL, tmp_path / "runs")
    assert sum(finding in text for text in audit.findings) == 1, audit.findings
    assert len(audit.weights) >= 3


def test_a_tensor_that_the_index_names_and_no_file_has_is_a_finding(tmp_path):
    copy = changed(tmp_path, "compressed_tensors_fp8", lambda tensors, config: None)
    names = dict.fromkeys([*load_file(copy / "model.safetensors"), "model.norm2.weight"], "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    audit = binade.audit(copy, root=tmp_path / "runs")
    assert audit.findings == ("the index says that model.safetensors has model.norm2.weight, which it does not have",)


def test_tiles_of_experts_do_not_reach_into_the_next_expert(tmp_path):
    """Experts of 200 rows with tiles of 128, each quantized on its own."""
    x = torch.randn(3, 200, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    tiles = torch.nn.functional.pad(x.float(), (0, 0, 0, 56)).reshape(3, 2, 128, 2, 128)
    scale = tiles.abs().amax((2, 4)) / 448
    codes = (tiles * (1 / scale)[:, :, None, :, None]).to(torch.float8_e4m3fn).reshape(3, 256, 256)[:, :200]
    name = "model.layers.0.mlp.experts.down_proj"
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for folder, tensors, config in (
        ("original", {name: x}, {}),
        ("quantized", {name: codes.contiguous(), f"{name}_scale_inv": scale}, settings),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    audit = binade.audit(tmp_path / "quantized", tmp_path / "original", tmp_path / "runs")
    (weight,) = audit.weights
    assert weight.block == "every 128 × 128 values" and weight.match is not None
    assert (weight.match.differing, weight.match.values) == (0, x.numel())
    assert "scale=float32" in str(weight.match.spec)


def test_a_gguf_file_is_audited_against_its_original(tmp_path):
    original = reference(True)
    original.save_pretrained(tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", original, gguf.GGMLQuantizationType.Q8_0)
    audit = binade.audit(tmp_path / "model.gguf", tmp_path / "original", tmp_path / "runs")
    by_name = {weight.name: weight for weight in audit.weights}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        x = original.state_dict()[name].double().numpy()
        q = gguf.dequantize(
            gguf.quantize(x.astype(np.float32), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
        )
        error = by_name[name].error
        assert by_name[name].stored == "Q8_0" and error is not None
        assert error.mse == pytest.approx(((q - x) ** 2).mean(), rel=1e-9)
    assert audit.findings == ()


def test_the_command_says_what_it_found_and_its_status_says_whether(tmp_path, capsys):
    arguments = ["--tensor-save-dir", str(tmp_path)]
    assert main(["audit", str(CHECKPOINTS / "modelopt_fp8"), "--against", str(ORIGINAL), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "modelopt_fp8: 6 of 9 weights quantized by modelopt\nFP8, a scale for the tensor: 6 weights" in printed
    assert "values are rounded twice: x over its scale to bfloat16 first" in printed  # as the library computes it
    assert main(["audit", str(CHECKPOINTS / "torchao_int8"), *arguments]) == 1
    assert "finding: modules_to_not_convert 'k_proj' leaves out" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2 + (tmp_path / ".lock").exists()


@pytest.mark.parametrize("case", ["cut", "junk", "config", "nothing", "against"])
def test_a_damaged_checkpoint_is_one_line_and_leaves_no_run(case, tmp_path, capsys):
    copy, against = changed(tmp_path, "compressed_tensors_fp8", lambda tensors, config: None), ORIGINAL
    file = copy / "model.safetensors"
    if case == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    elif case == "junk":
        file.write_bytes(b"\xff" * 100)
    elif case == "config":
        (copy / "config.json").write_text("{")
    elif case == "nothing":
        file.unlink()
    else:
        against = tmp_path / "absent"
    root = tmp_path / "runs"
    assert main(["audit", str(copy), "--against", str(against), "--tensor-save-dir", str(root)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("binade: checkpoint")
    assert not list(root.glob("*/run.json"))


PEAKS = """
import resource, sys
from pathlib import Path
import binade
for name in ("one", "many"):
    folder = Path(sys.argv[1]) / name
    binade.audit(folder / "quantized", folder / "original", folder / "runs")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_holds_one_weight_at_a_time(tmp_path):
    """The peak of resident memory, in a process of its own, of one weight and then of twelve: less than two more."""
    size = 1024
    make(tmp_path / "one", size, 1)
    make(tmp_path / "many", size, 12)
    printed = subprocess.run([sys.executable, "-c", PEAKS, tmp_path], check=True, capture_output=True, text=True).stdout
    one, many = map(int, printed.split())
    assert many - one < 2 * 4 * size**2


INTERRUPTED = """
import os, signal, sys
import binade
from binade.data.index.catalog import Catalog
binade.audit(sys.argv[1], root=sys.argv[2])  # an earlier one
from binade.collector.audit import run
end = lambda done, total: done == 4 and os.kill(os.getpid(), int(sys.argv[3]))
run.audit(sys.argv[1], root=sys.argv[2], progress=end)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_audit_that_is_ended_leaves_the_one_before_it(number, tmp_path):
    """What the run had before can be read, nothing else is in it, and another audit replaces it."""
    command = [sys.executable, "-c", INTERRUPTED, CHECKPOINTS / "modelopt_mxfp8", tmp_path, str(int(number))]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    (run,) = list_runs(tmp_path)[0]
    assert run.status.tensors == 9
    assert verify(tmp_path).damaged == []
    with Catalog.open(tmp_path) as catalog:
        assert len(catalog.tensors(binade.Filter())) == 9
    again = binade.audit(CHECKPOINTS / "modelopt_mxfp8", root=tmp_path)
    assert again.run_id == run.run_id and [one.run_id for one in list_runs(tmp_path)[0]] == [run.run_id]
    assert read_run(tmp_path / run.run_id).status.state == DONE
    assert not [path.name for path in (tmp_path / run.run_id).rglob("*") if "tmp" in path.name or "staged" in path.name]
