"""Quantized checkpoints of other libraries, in `checkpoints`: the values of their weights are those of the library to
the bit, and those of an independent decoder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from binade.data.exchange.quantized.files import SafetensorsCheckpoint
from binade.data.exchange.quantized.layouts import LAYOUTS
from binade.data.exchange.quantized.rules import rules_of
from binade.data.exchange.quantized.settings import METHODS, CheckpointError

CHECKPOINTS = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/expected.json"))
MODULE = "model.layers.0.mlp.down_proj"
E2M1 = ml_dtypes.float4_e2m1fn


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_library_to_the_bit(name: str):
    checkpoint = SafetensorsCheckpoint(CHECKPOINTS / name)
    checkpoint.check()
    expected = json.loads((CHECKPOINTS / name / "expected.json").read_text())
    assert expected.keys() == checkpoint.quantized.keys()
    for weight, (dtype, shape, digest) in expected.items():
        values = checkpoint.read(weight)
        assert values.shape == torch.Size(shape) == torch.Size(checkpoint.size(weight))
        values = values + 0.0 if name == "modelopt_nvfp4" else values  # the library has no -0
        stored = values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
        assert hashlib.sha256(stored.tobytes()).hexdigest() == digest, weight


def arrays(name: str) -> dict[str, np.ndarray]:
    """The tensors of a module of a checkpoint, float8 as bytes and bfloat16 as float32."""
    found = {}
    for key, tensor in load_file(CHECKPOINTS / name / "model.safetensors").items():
        if key.startswith(f"{MODULE}."):
            tensor = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            found[key.removeprefix(f"{MODULE}.")] = array
    return found


def e4m3(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Bytes of two codes, the lower half first."""
    halves = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
    return halves.view(E2M1).astype(np.float32)


def tiles(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    return np.kron(scale, np.ones([n // m for n, m in zip(shape, scale.shape, strict=True)], np.float32))


def bit_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes in rows of 32-bit words, taken from one large integer for each row."""
    rows = []
    for row in words.astype(np.uint32).tolist():
        whole = sum(word << (32 * i) for i, word in enumerate(row))
        rows.append([whole >> (bits * i) & (1 << bits) - 1 for i in range(32 * len(row) // bits)])
    return np.array(rows)


def by_hand(name: str) -> np.ndarray:
    found = arrays(name)
    tool, _, kind = name.partition("_")
    if tool == "compressed":
        kind, scale = kind.removeprefix("tensors_"), found["weight_scale"]
        if kind in ("fp8", "fp8_block"):
            return e4m3(found["weight"]) * tiles(scale, found["weight"].shape)
        if kind == "int8":
            return found["weight"].astype(np.float32) * scale
        if kind == "mxfp8":
            return e4m3(found["weight"]) * tiles(2.0 ** (scale - 127.0), found["weight"].shape)
        if kind in ("nvfp4", "mxfp4"):
            values = e2m1(found["weight_packed"])
            scale = e4m3(scale) / found["weight_global_scale"] if kind == "nvfp4" else 2.0 ** (scale - 127.0)
            return values * tiles(scale, values.shape)
        bits = int(kind[-1])
        codes = bit_stream(found["weight_packed"], bits)[:, : found["weight_shape"][1]]
        zeros = np.zeros_like(scale) + 2 ** (bits - 1)
        if "weight_zero_point" in found:
            zeros = bit_stream(found["weight_zero_point"].T, bits).T[: len(scale)]
        return (codes - tiles(zeros, codes.shape)) * tiles(scale, codes.shape)
    if tool == "modelopt":
        codes, scale = found["weight"], found["weight_scale"]
        values = e4m3(codes) if "fp8" in kind else e2m1(codes)
        factors = {"fp8": lambda: np.full(values.shape, scale), "nvfp4": lambda: e4m3(scale) * found["weight_scale_2"]}
        factor = factors.get(kind, lambda: 2.0 ** (scale - 127.0))()
        return values * tiles(factor, values.shape)
    if tool == "torchao":
        codes, scale = found["_weight_qdata"], found["_weight_scale"]
        if kind != "nvfp4":
            return (e4m3(codes) if kind == "fp8" else codes.astype(np.float32)) * scale
        values = e2m1(codes)
        flat, place = e4m3(scale).reshape(-1), np.zeros((32, 4), int)
        for row, column in np.ndindex(place.shape):  # cuBLAS's layout of scales
            place[row, column] = (row % 32) * 16 + row // 32 * 4 + column
        return values * tiles(flat[place] * found["_weight_per_tensor_scale"], values.shape)
    if tool == "bitsandbytes":
        if kind == "int8":
            return found["weight"] * found["SCB"][:, None] * np.float32(1 / 127)
        absmax = found["weight.absmax"]
        if "nested" in kind:
            state = json.loads(bytes(found["weight.quant_state.bitsandbytes__nf4"]))
            absmax = found["weight.nested_quant_map"][absmax] * found["weight.nested_absmax"][0]
            absmax = absmax + np.float32(state["nested_offset"])
        codes = np.stack((found["weight"] >> 4, found["weight"] & 15), -1).reshape(-1)
        return (found["weight.quant_map"][codes].reshape(-1, 64) * absmax[:, None]).reshape(32, 64)
    scales = found["scales"].astype(np.float32)
    if tool == "autoawq":
        order = np.argsort([8 * i + place for i in range(4) for place in (0, 2, 4, 6, 1, 3, 5, 7)])
        codes, zeros = (bit_stream(found[key], 4)[:, order] for key in ("qweight", "qzeros"))
        return ((codes - np.repeat(zeros, 32, 0)) * np.repeat(scales, 32, 0)).T
    bits = 3 if kind else 4
    codes, zeros = bit_stream(found["qweight"].T, bits).T, (bit_stream(found["qzeros"], bits) + 1) % 2**bits
    group = found["g_idx"]
    return ((codes - zeros[group]) * scales[group]).T


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_an_independent_decoder(name: str):
    expected = by_hand(name).astype(np.float32)
    found = SafetensorsCheckpoint(CHECKPOINTS / name).read(f"{MODULE}.weight").numpy()
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_each_layout_of_each_tool_has_a_checkpoint():
    read = {
        id(weight.layout) for name in NAMES for weight in SafetensorsCheckpoint(CHECKPOINTS / name).quantized.values()
    }
    elsewhere = {("fp8", "FP8"), ("fp8", "MXFP8"), ("fp8", "MXFP4"), ("mxfp4", "MXFP4")}  # tests/collector
    elsewhere |= {("torchao", "MXFP8"), ("torchao", "MXFP4")}  # test_mx_tensors_of_torchao
    missing = {(layout.method, layout.name) for layout in LAYOUTS if id(layout) not in read} - elsewhere
    assert missing == {("bitsandbytes", "FP4")}  # the codes of nf4 with another table, which is stored
    assert {layout.method for layout in LAYOUTS} == set(METHODS)


def configured(tmp_path: Path, name: str, **settings: object) -> SafetensorsCheckpoint:
    """A copy of a checkpoint with other settings."""
    copy = shutil.copytree(CHECKPOINTS / name, tmp_path / name)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] |= settings
    (copy / "config.json").write_text(json.dumps(config))
    return SafetensorsCheckpoint(copy)


def _group(target: str, **weights: object) -> dict[str, object]:
    return {"targets": [target], "weights": weights}


OTHER = {"num_bits": 8, "group_size": 16}
SETTINGS = {
    "regular expression before class": (
        "compressed_tensors_int4",
        {"config_groups": {"a": _group("Linear", **OTHER), "b": _group("re:.*down_proj", num_bits=4, group_size=32)}},
    ),
    "path before regular expression": (
        "compressed_tensors_int4",
        {"config_groups": {"a": _group("re:.*down_proj", **OTHER), "b": _group(MODULE, num_bits=4, group_size=32)}},
    ),
    "dynamic": ("gptq", {"bits": 8, "dynamic": {"-:.*down_proj$x": {}, "+:.*down_proj": {"bits": 4}}}),
    "dynamic of another module": ("gptq", {"dynamic": {".*up_proj": {"bits": 8}}}),
    "format in place of version": ("autoawq", {"version": None, "format": "gemm"}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_settings_of_a_module_are_its_own(case, tmp_path):
    name, settings = SETTINGS[case]
    found = configured(tmp_path, name, **settings).read(f"{MODULE}.weight")
    assert np.array_equal(found.numpy(), by_hand(name).astype(np.float32))


def test_gptq_v2_is_named_by_either_key(tmp_path):
    first = configured(tmp_path / "a", "gptq", checkpoint_format=None, format="gptq_v2").read(f"{MODULE}.weight")
    second = configured(tmp_path / "b", "gptq", checkpoint_format="gptq_v2").read(f"{MODULE}.weight")
    assert torch.equal(first, second) and not np.array_equal(first.numpy(), by_hand("gptq").astype(np.float32))


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_the_settings_may_be_elsewhere(place, tmp_path):
    copy = shutil.copytree(CHECKPOINTS / "compressed_tensors_int4", tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    settings = config.pop("quantization_config")
    config[place] = {"quantization_config": settings} if place == "text_config" else settings
    (copy / "config.json").write_text(json.dumps(config))
    found = SafetensorsCheckpoint(copy).read(f"{MODULE}.weight").numpy()
    assert np.array_equal(found, by_hand("compressed_tensors_int4").astype(np.float32))


def swizzled(scale: np.ndarray) -> np.ndarray:
    """[rows, columns] in cuBLAS's layout of block scales, padded to tiles of 128 x 4."""
    rows, columns = (-(-n // m) * m for n, m in zip(scale.shape, (128, 4), strict=True))
    flat = np.zeros(rows * columns, np.uint8)
    for row, column in np.ndindex(scale.shape):
        tile = row // 128 * (columns // 4) + column // 4
        flat[tile * 512 + (row % 32) * 16 + row % 128 // 32 * 4 + column % 4] = scale[row, column]
    return flat.reshape(rows, columns)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_mx_tensors_of_torchao(kind, tmp_path):
    """The codes of compressed-tensors as torchao's MXTensor stores them: E8M0 scales in cuBLAS's layout."""
    name = f"compressed_tensors_{kind}"
    found = arrays(name)
    codes = torch.from_numpy(found["weight" if kind == "mxfp8" else "weight_packed"])
    scale = torch.from_numpy(swizzled(found["weight_scale"])).view(torch.float8_e8m0fnu)
    tensors = {
        f"{MODULE}._weight_qdata": codes.view(torch.float8_e4m3fn) if kind == "mxfp8" else codes,
        f"{MODULE}._weight_scale": scale,
    }
    facts = {"_type": "MXTensor", "_data": {"block_size": 32, "is_swizzled_scales": True}}
    save_file(tensors, tmp_path / "model.safetensors", {f"{MODULE}.weight": json.dumps(facts)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.stored_as(f"{MODULE}.weight") == kind.upper()
    assert np.array_equal(checkpoint.read(f"{MODULE}.weight").numpy(), by_hand(name).astype(np.float32))


def test_the_input_scales_of_modelopt_multiply_the_columns(tmp_path):
    """ModelOpt's AWQ divides the columns of a weight by pre_quant_scale, and multiplies the input by it."""
    factors = torch.linspace(0.5, 2.0, 64)
    checkpoint = changed(tmp_path, "modelopt_nvfp4", pre_quant_scale=factors)
    expected = by_hand("modelopt_nvfp4").astype(np.float32) * factors.numpy()
    np.testing.assert_allclose(checkpoint.read(f"{MODULE}.weight").numpy(), expected, rtol=1e-6)


def changed(tmp_path: Path, name: str, **tensors: torch.Tensor | None) -> SafetensorsCheckpoint:
    """A checkpoint with other tensors in MODULE; None removes one."""
    shutil.copytree(CHECKPOINTS / name, tmp_path / name)
    file = tmp_path / name / "model.safetensors"
    stored = load_file(file)
    for key, tensor in tensors.items():
        stored.pop(f"{MODULE}.{key}", None)
        if tensor is not None:
            stored[f"{MODULE}.{key}"] = tensor
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(stored, file, metadata)
    return SafetensorsCheckpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "key", "tensor", "message"),
    [
        ("compressed_tensors_fp8", "weight_scale", None, "weight_scale are missing"),
        ("modelopt_nvfp4", "weight_scale_2", None, "weight_scale_2 are missing"),
        ("autoawq", "qzeros", None, "qzeros are missing"),
        ("compressed_tensors_fp8_block", "weight_scale", torch.ones(4, 2), "is 4 x 2: expected 2 x 4"),
        ("compressed_tensors_int4", "weight_shape", torch.tensor([1 << 40, 64]), "which .*weight_packed does not hold"),
        ("modelopt_mxfp8", "weight_scale", torch.ones(2, 32, dtype=torch.uint8), "is 2 x 32: expected 32 x 2"),
        ("autoawq", "scales", torch.ones(3, 32).half(), "scales is 3 x 32 and the zeros are 2 x 32"),
        ("gptq", "g_idx", torch.full((64,), 9, dtype=torch.int32), "has 2 groups, but the inputs belong to 10"),
        ("bitsandbytes_nf4", "weight.absmax", torch.ones(3), "has fewer codes or scales than 32 x 64 values need"),
        (
            "bitsandbytes_nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.zeros(9, dtype=torch.uint8),
            "nf4 is not a JSON object",
        ),
        ("bitsandbytes_int8", "SCB", torch.ones(3), "SCB is 3: expected 32"),
        ("torchao_nvfp4", "_weight_scale", torch.ones(8, 4).to(torch.float8_e4m3fn), "is 8 x 4: expected 128 x 4"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_does_not_fit_together_is_one_line(tmp_path, name, key, tensor, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint = changed(tmp_path, name, **{key: tensor})
        checkpoint.check()
        checkpoint.read(f"{MODULE}.weight")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "module", "named"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mlp.gate"]}, "m.layers.1.mlp.gate", True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}, "model.layers.1.mlp.up_proj", True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}, "model.layers.11.mlp.up_proj", False),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*gate$"]}, "model.layers.0.mlp.gate", True),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*gate$"]}, "model.layers.0.mlp.gate_proj", False),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"]}, "lm_head2", False),
        ({"quant_method": "modelopt", "ignore": ["model.layers.0*"]}, "model.layers.0.mlp.up_proj", True),
        ({"quant_method": "modelopt", "exclude_modules": ["*router*"]}, "model.layers.0.router", True),
        ({"quant_method": "gptq", "dynamic": {r"-:.*\.1\..*": {}}}, "model.layers.1.mlp.up_proj", True),
    ],
)
def test_rules_name_modules_as_the_tools_do(settings, module, named):
    (rule,) = [rule for rule in rules_of(settings) if rule.pattern != "lm_head" or "ignore" in settings]
    assert rule.excludes and rule.matches(module) is named


def test_rules_of_transformers_are_those_of_should_convert_module():
    from transformers.quantizers.quantizers_utils import should_convert_module

    patterns = [
        "mlp.gate",
        "layers.1",
        "model.layers.1",
        "fc1",
        "model.*.q_proj",
        "lm_head",
        "model.layers.[01].mlp",
        "a|b",
    ]
    modules = ["model.layers.1.mlp.gate", "model.layers.11.mlp.gate_proj", "model.layers.0.mlp", "x.fc1", "a.b", "b",
               "model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.q_proj_2", "lm_head",
               "model.layers.1"]  # fmt: skip
    for pattern in patterns:
        (rule,) = rules_of({"quant_method": "awq", "modules_to_not_convert": [pattern]})
        for module in modules:
            assert rule.matches(module) is not should_convert_module(module, [pattern]), (pattern, module)
