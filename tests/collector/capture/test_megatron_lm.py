"""Megatron-LM's own pretrain_gpt.py (core_v0.16.1), and the example in its place, on two processes of the CPU.

BINADE_MEGATRON_LM is the directory of a checkout: git clone -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from binade.data.index.catalog import Catalog
from tests.collector.instrumented import LINEAR, linear_products, names, rows
from tests.conftest import PROJECT, start_python

CHECKOUT = os.environ.get("BINADE_MEGATRON_LM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="BINADE_MEGATRON_LM names no checkout of Megatron-LM"),
]
EXAMPLE = PROJECT / "examples" / "megatron_pretrain.py"
ARGUMENTS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --seq-length 16 --max-position-embeddings 16
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 --eval-interval 100
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --disable-bias-linear
    --distributed-backend gloo --use-cpu-initialization --log-interval 1
"""
CASES = {
    "TP 2": "--tensor-model-parallel-size 2",
    "TP 2, MoE": "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 2 --moe-router-topk 2"
    " --moe-token-dispatcher-type alltoall",
    "PP 2": "--pipeline-model-parallel-size 2",
    "PP 2, MoE, recompute": "--pipeline-model-parallel-size 2 --num-experts 2 --moe-router-topk 2"
    " --moe-token-dispatcher-type allgather"
    " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def pretrain(script: Path, arguments: str, **environment: str) -> list[str]:
    """The loss and the gradient's norm of each iteration, as Megatron-LM prints them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = ["-m", "tests.collector.megatron_cpu", script, *f"{ARGUMENTS} {arguments}".split()]
    with ExitStack() as processes:
        ranks = [
            processes.enter_context(
                start_python(*command, env={**common, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            )
            for rank in range(2)
        ]
        said = [each.communicate(timeout=300) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    return re.findall(r"lm loss: (\S+) .*grad norm: (\S+)", said[1][0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_example_stands_for_pretrain_gpt(tmp_path, name):
    plain = pretrain(Path(str(CHECKOUT), "pretrain_gpt.py"), CASES[name])
    assert len(plain) == 2
    recorded = pretrain(EXAMPLE, CASES[name], TENSOR_SAVE_DIR=str(tmp_path / "bf16"))
    assert recorded == plain
    quantized = pretrain(EXAMPLE, CASES[name], TENSOR_SAVE_DIR=str(tmp_path / "mxfp8"), CUSTOM_QUANT_TYPE="mxfp8")
    assert quantized != plain
    found = rows(tmp_path / "mxfp8")
    assert set(found["iteration"]) == {0} == set(found["micro_batch"])
    assert set(found["recomputed"]) == {"recompute" in name}
    for rank in range(2):
        layers = {1, 2} if "TP" in name else {rank + 1}
        of_rank = found[found["rank"] == rank]
        assert {layer for layer, _ in names(of_rank)} == layers
        for layer in layers:
            linear_products(of_rank, layer, "proj")
    modules = {"qkv", "proj", "fc1", "fc2"} | ({"router"} if "MoE" in name else set())
    assert {module for _, module in names(found)} == {*modules, "core"}
    assert all(set(of_site) == LINEAR for site, of_site in names(found).items() if "core" not in site)
    with Catalog.open(tmp_path / "mxfp8") as catalog:
        if name == "TP 2, MoE":
            chosen = found[(found["module"] == "router") & (found["rank"] == 0) & (found["layer_index"] == 1)]
            of = {row.tensor_name: catalog.unsharded(row.tensor_id).flatten(0, -2) for row in chosen.itertuples()}
            assert torch.allclose(of["output"], of["input"] @ of["weight"].t(), atol=1e-6)
            assert torch.allclose(of["grad_weight"], of["grad_output"].t() @ of["input"], atol=1e-6)
        weight = found[(found["module"] == "qkv") & (found["tensor_name"] == "weight")].iloc[0]
        assert catalog.unsharded(weight["tensor_id"]).shape == (3 * 64, 64)
