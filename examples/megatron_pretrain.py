"""Megatron-LM's pretrain_gpt.py, quantized and recorded: the last lines of the original with three changed.

Start it where the original is started, with Megatron-LM's root and Binade's on PYTHONPATH, and the same arguments:

    CUSTOM_QUANT_TYPE=FA_linear_mxfp8 TENSOR_SAVE_DIR=runs \\
        torchrun --nproc-per-node 8 megatron_pretrain.py --transformer-impl local \\
        --no-gradient-accumulation-fusion --no-persist-layer-norm ...

The first iteration's first micro-batch is recorded, on every rank; `iterations=` and `micro_batches=` take more.
"""

from functools import partial

from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import pretrain
from model_provider import model_provider
from pretrain_gpt import forward_step, train_valid_test_datasets_provider

from binade.collector import instrument_provider  # 1

if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    with instrument_provider(partial(model_provider, gpt_builder)) as provider:  # 2
        pretrain(
            train_valid_test_datasets_provider,
            provider,  # 3: was partial(model_provider, gpt_builder)
            ModelType.encoder_or_decoder,
            forward_step,
            args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        )
