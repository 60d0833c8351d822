"""Megatron-LM's pretrain_gpt.py (core_v0.16.1), quantized and recorded: its last lines, with three lines changed.

Start it like the original, with the same arguments, and with the roots of Megatron-LM and Binade on PYTHONPATH:

    CUSTOM_QUANT_TYPE=FA_linear_mxfp8 TENSOR_SAVE_DIR=runs \\
        torchrun --nproc-per-node 8 megatron_pretrain.py --transformer-impl local \\
        --no-gradient-accumulation-fusion --no-persist-layer-norm ...

It records the first micro-batch of the first iteration on every rank; `iterations=` and `micro_batches=` record more.
"""

import time

_PROGRAM_START_TIME = time.time()

from functools import partial  # noqa: E402

import pretrain_gpt as gpt  # noqa: E402

from binade import instrument_provider  # noqa: E402  # 1

if __name__ == "__main__":
    gpt.set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time())
    gpt.train_valid_test_datasets_provider.is_distributed = True
    pretrain, store = gpt.inprocess_restart.maybe_wrap_for_inprocess_restart(gpt.pretrain)
    with instrument_provider(partial(gpt.model_provider, gpt.gpt_builder)) as provider:  # 2
        pretrain(
            gpt.train_valid_test_datasets_provider,
            provider,  # 3: was partial(model_provider, gpt_builder)
            gpt.ModelType.encoder_or_decoder,
            gpt.forward_step,
            args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
            extra_args_provider=gpt.add_modelopt_args if gpt.has_nvidia_modelopt else None,
            store=store,
            get_embedding_ranks=gpt.get_embedding_ranks,
        )
