"""Writes the checkpoints of this folder with the libraries of their names: see README.md.

python make.py FOLDER original bnb ct awq gptq ao modelopt
"""

import copy
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(sys.argv[1])
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 2:
                p.mul_(torch.exp(torch.randn(p.shape[0], 1)))
    return made.to(dtype)


def linears(m):
    return {n: x for n, x in m.named_modules() if isinstance(x, nn.Linear) and n != "lm_head"}


def digest(t):
    t = t.detach().contiguous()
    return [
        str(t.dtype).removeprefix("torch."),
        list(t.shape),
        hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest(),
    ]


def expected(name, weights):
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(digest(w))}" for n, w in weights.items())
    (HERE / name / "expected.json").write_text(f"{{\n{lines}\n}}\n")
    for extra in (HERE / name).iterdir():
        if extra.name not in ("config.json", "expected.json") and extra.suffix != ".safetensors":
            extra.unlink()


def bnb(name, **options):
    import bitsandbytes as b
    from bitsandbytes.backends.default import ops
    from transformers import BitsAndBytesConfig

    m = AutoModelForCausalLM.from_pretrained(
        HERE / "original", quantization_config=BitsAndBytesConfig(**options), dtype=torch.bfloat16
    )
    m.save_pretrained(HERE / name)
    found, stored = {}, load_file(HERE / name / "model.safetensors")
    for n, x in m.named_modules():
        weight = f"{n}.weight"
        if isinstance(x, b.nn.Linear4bit):
            parts = {key.removeprefix(f"{weight}."): t for key, t in stored.items() if key.startswith(f"{weight}.")}
            state = b.functional.QuantState.from_dict(parts, "cpu")
            absmax = state.absmax
            if state.nested:
                absmax = b.functional.dequantize_blockwise(absmax, state.state2) + state.offset
            # The library's reference: its CPU kernel reads wrong scales where a row has fewer values than a block.
            found[weight] = ops._dequantize_4bit_compute(
                stored[weight].reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype
            )
        elif isinstance(x, b.nn.Linear8bitLt):
            found[weight] = b.functional.int8_vectorwise_dequant(stored[weight], stored[f"{n}.SCB"])
    expected(name, found)


def ao(name, config, **options):
    from transformers import TorchAoConfig

    m = AutoModelForCausalLM.from_pretrained(
        HERE / "original", quantization_config=TorchAoConfig(config, **options), dtype=torch.bfloat16
    )
    m.save_pretrained(HERE / name)
    expected(
        name,
        {
            f"{n}.weight": x.weight.dequantize()
            for n, x in m.named_modules()
            if isinstance(x, nn.Linear) and n != "lm_head"
        },
    )


def ct(name, scheme, **change):
    from compressed_tensors.compressors import ModelCompressor, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    m = model()
    scheme = preset_name_to_scheme(scheme, ["Linear"])
    for key, value in change.items():
        setattr(scheme.weights, key, value)
    apply_quantization_config(
        m, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*k_proj", "re:.*router"])
    )
    args = scheme.weights
    for x in linears(m).values():
        if not hasattr(x, "weight_scale"):
            continue
        w = x.weight.data
        rows, columns = w.shape
        if args.strategy in ("group", "tensor_group"):
            parts = w.reshape(rows, -1, args.group_size)
        elif args.strategy == "block":
            a, b = args.block_structure
            parts = w.reshape(rows // a, a, columns // b, b).transpose(1, 2).flatten(2)
        else:
            parts = w[:, None] if args.strategy == "channel" else w.reshape(1, 1, -1)
        low, high = parts.amin(-1), parts.amax(-1)
        extra = {}
        if hasattr(x, "weight_global_scale"):
            x.weight_global_scale.data = generate_gparam(w.amin(), w.amax())
            extra = {"global_scale": x.weight_global_scale.data}
        scale, zero = calculate_qparams(low, high, args, **extra)
        x.weight_scale.data = scale.reshape(x.weight_scale.shape).to(x.weight_scale.dtype)
        if hasattr(x, "weight_zero_point"):
            x.weight_zero_point.data = zero.reshape(x.weight_zero_point.shape).to(x.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(m)
    compressor.compress_model(m)
    (HERE / name).mkdir(exist_ok=True)
    m.config.save_pretrained(HERE / name)
    save_file(
        {n: t.contiguous() for n, t in m.state_dict().items()}, HERE / name / "model.safetensors", {"format": "pt"}
    )
    compressor.update_config(HERE / name)
    for x in linears(m).values():
        if hasattr(x, "weight_scale"):
            decompress_module(x)
    expected(name, {f"{n}.weight": x.weight for n, x in linears(m).items() if hasattr(x, "weight_scale")})


def awq(name):
    sys.modules["awq"] = type(sys)("awq")
    source = Path(importlib.util.find_spec("bitsandbytes").origin).parents[1] / "awq"
    sys.modules["awq"].__path__ = [str(source)]
    for part in ("utils", "modules", "modules.linear", "quantize"):
        module = sys.modules[f"awq.{part}"] = type(sys)(f"awq.{part}")
        module.__path__ = [str(source / part.replace(".", "/"))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    m = model(torch.float16)
    state, found = dict(m.state_dict()), {}
    for n, x in linears(m).items():
        if n.endswith("k_proj"):
            continue
        w = x.weight.data.reshape(-1, 32)  # as AwqQuantizer.pseudo_quantize_tensor, zero_point=True
        top, low = w.amax(1, keepdim=True), w.amin(1, keepdim=True)
        scales = (top - low).clamp(min=1e-5) / 15
        zeros = (-torch.round(low / scales)).clamp_(0, 15)
        x.weight.data = ((torch.clamp(torch.round(w / scales) + zeros, 0, 15) - zeros) * scales).reshape(x.weight.shape)
        scales, zeros = (t.view(x.weight.shape[0], -1).t().contiguous() for t in (scales, zeros))
        q = WQLinear_GEMM.from_linear(x, 4, 32, False, scales, zeros)
        del state[f"{n}.weight"]
        state |= {f"{n}.{k}": t for k, t in q.state_dict().items()}
        found[f"{n}.weight"] = dequantize_gemm(q.qweight, q.qzeros, q.scales, 4, 32).t()
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["k_proj"],
    }
    written(name, m, state, config)
    expected(name, found)


def written(name, m, state, config):
    (HERE / name).mkdir(exist_ok=True)
    m.config.save_pretrained(HERE / name)
    save_file({n: t.contiguous() for n, t in state.items()}, HERE / name / "model.safetensors", {"format": "pt"})
    path = HERE / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}, indent=2) + "\n")


def gptq(name, bits, act_order):
    source = Path("auto_gptq_wheel")  # the unpacked wheel: its compiled part does not load
    sys.path.insert(0, str(source))
    for part in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear", "auto_gptq.quantization"):
        module = sys.modules[part] = type(sys)(part)
        module.__path__ = [str(source / part.replace(".", "/"))]
    torch.cuda.synchronize = lambda *a: None
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from auto_gptq.quantization.gptq import GPTQ

    m = model(torch.float16)
    state, found = dict(m.state_dict()), {}
    torch.manual_seed(1)
    for n, x in linears(m).items():
        if n.endswith("k_proj"):
            continue
        x.float()
        g = GPTQ(x)
        g.quantizer.configure(bits, perchannel=True, sym=act_order, mse=False)
        x.data = None
        g.add_batch(torch.randn(1, 64, x.in_features) * torch.exp(torch.randn(x.in_features)), None)
        scale, zero, g_idx = g.fasterquant(percdamp=0.01, group_size=32, actorder=act_order, static_groups=False)
        q = QuantLinear(bits, 32, x.in_features, x.out_features, False, weight_dtype=torch.float16)
        x.half()
        q.pack(x, scale.half(), zero, g_idx)
        del state[f"{n}.weight"]
        state |= {f"{n}.{k}": t for k, t in q.state_dict().items()}
        eye = torch.eye(x.in_features, dtype=torch.float16)
        found[f"{n}.weight"] = q(eye).t()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "sym": act_order,
        "desc_act": act_order,
        "checkpoint_format": "gptq",
        "modules_in_block_to_quantize": None,
    }
    written(name, m, state, config)
    expected(name, found)


def modelopt(name, config):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(config)
    m = model()
    m.config.architectures = ["LlamaForCausalLM"]
    tokens = torch.arange(32)[None]
    mtq.quantize(m, config, lambda m: m(tokens))
    mtq.disable_quantizer(m, "*k_proj*")
    export_hf_checkpoint(m, export_dir=HERE / name, dtype=torch.bfloat16)
    from modelopt.torch.quantization import qtensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    found, stored = {}, load_file(HERE / name / "model.safetensors")
    kind, width, blocks = {
        "fp8": (qtensor.FP8QTensor, 1, None),
        "nvfp4": (qtensor.NVFP4QTensor, 2, {-1: 16}),
        "mxfp4": (qtensor.MXFP4QTensor, 2, {-1: 32}),
        "mxfp8": (MXFP8QTensor, 1, {-1: 32}),
    }[name.split("_")[1]]
    for n, codes in stored.items():
        if n.endswith(".weight") and n + "_scale" in stored:
            shape = torch.Size((codes.shape[0], codes.shape[1] * width))
            scales = {"scale": stored[n + "_scale"], "block_sizes": blocks}
            if n + "_scale_2" in stored:
                scales["double_scale"] = stored[n + "_scale_2"]
            found[n] = kind(shape, torch.float32, codes).dequantize(torch.float32, **scales)
    expected(name, found)


if __name__ == "__main__":
    what = sys.argv[2:]
    if "original" in what:
        model().save_pretrained(HERE / "original")
        (HERE / "original" / "generation_config.json").unlink(missing_ok=True)
    if "bnb" in what:
        bnb("bitsandbytes_nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        bnb(
            "bitsandbytes_nf4_nested",
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["lm_head", "k_proj"],
        )
        bnb("bitsandbytes_int8", load_in_8bit=True)
    if "ao" in what:
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        ao("torchao_fp8", Float8WeightOnlyConfig(), modules_to_not_convert=["lm_head", "k_proj"])
        ao("torchao_nvfp4", NVFP4WeightOnlyConfig(), modules_to_not_convert=["lm_head", "k_proj"])
        ao("torchao_int8", Int8WeightOnlyConfig(version=2), modules_to_not_convert=["lm_head", "k_proj"])
    if "ct" in what:
        ct("compressed_tensors_fp8", "FP8_DYNAMIC")
        ct("compressed_tensors_fp8_block", "FP8_BLOCK", block_structure=[16, 16])
        ct("compressed_tensors_int8", "W8A8")
        ct("compressed_tensors_int4", "W4A16_ASYM", group_size=32)
        ct("compressed_tensors_int3", "W3A16", group_size=32)
        ct("compressed_tensors_nvfp4", "NVFP4A16")
        ct("compressed_tensors_mxfp4", "MXFP4A16")
        ct("compressed_tensors_mxfp8", "MXFP8A16")
    if "awq" in what:
        awq("autoawq")
    if "gptq" in what:
        gptq("gptq", 4, True)
        gptq("gptq_3bit", 3, False)
    if "modelopt" in what:
        import modelopt.torch.quantization as mtq

        modelopt("modelopt_fp8", mtq.FP8_DEFAULT_CFG)
        modelopt("modelopt_nvfp4", mtq.NVFP4_DEFAULT_CFG)
        modelopt("modelopt_mxfp8", mtq.MXFP8_DEFAULT_CFG)
        modelopt("modelopt_mxfp4", mtq.MXFP4_DEFAULT_CFG)
