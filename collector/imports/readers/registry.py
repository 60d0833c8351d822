"""The readers of loss logs. To read another kind, write one (see series.Reader) and add it to READERS."""

from __future__ import annotations

from binade.collector.imports.readers.csv_table import CsvTable
from binade.collector.imports.readers.deepspeed_log import DeepSpeedLog
from binade.collector.imports.readers.events import Events
from binade.collector.imports.readers.golden_values import GoldenValues
from binade.collector.imports.readers.json_lines import JsonLinesReader
from binade.collector.imports.readers.lightning_csv import LightningCsv
from binade.collector.imports.readers.llama_factory import LlamaFactory
from binade.collector.imports.readers.llmc_log import LlmcLog
from binade.collector.imports.readers.megatron_log import MegatronLog
from binade.collector.imports.readers.ms_swift import MsSwift
from binade.collector.imports.readers.ms_swift_megatron import MsSwiftMegatron
from binade.collector.imports.readers.nanogpt_log import NanogptLog
from binade.collector.imports.readers.olmo_log import OlmoLog
from binade.collector.imports.readers.printed_log import PrintedLog
from binade.collector.imports.readers.series import Confidence, Reader, Start
from binade.collector.imports.readers.step_table import StepTable
from binade.collector.imports.readers.tensorboard_csv import TensorboardCsv
from binade.collector.imports.readers.tensorboard_json import TensorboardJson
from binade.collector.imports.readers.torchtitan_log import TorchtitanLog
from binade.collector.imports.readers.torchtune_log import TorchtuneLog
from binade.collector.imports.readers.trainer_state import TrainerState
from binade.collector.imports.readers.wandb_csv import WandbCsv

# The surest reader reads a file; of several, the first one.
READERS: tuple[Reader, ...] = (
    TrainerState(),
    Events(),
    TensorboardCsv(),
    TensorboardJson(),
    WandbCsv(),
    LightningCsv(),
    LlamaFactory(),
    MsSwift(),
    MsSwiftMegatron(),
    JsonLinesReader(),
    MegatronLog(),
    GoldenValues(),
    StepTable(),
    TorchtitanLog(),
    TorchtuneLog(),
    LlmcLog(),
    NanogptLog(),
    OlmoLog(),
    DeepSpeedLog(),
    PrintedLog(),
    CsvTable(),  # of any columns: what is a line for another reader may be cells for this one
)


def reader_of(start: Start, least: Confidence) -> Reader | None:
    """The reader of a file that begins like this; None if none is as sure as `least`."""
    confidence, reader = max(((reader.recognize(start), reader) for reader in READERS), key=lambda pair: pair[0])
    return reader if confidence >= least else None


def looked_for() -> str:
    """The kinds, for a message about a file that is none of them."""
    return ", ".join(reader.kind for reader in READERS)
