"""What a run uses soon after its start, imported and looked up once in the process that `forked` forks from.

vlrl imports most of it only where it is used, so that short commands stay short. Of a run of five steps it is three
fifths of the work: matplotlib for the curve of rewards, peft, the tiny model's family, the list of all processors."""

import contextlib
import functools
import gc
import io

import bitsandbytes  # noqa: F401  peft imports it for an adapter
import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion  # noqa: F401
import pyarrow.dataset  # noqa: F401
import transformers.tokenization_mistral_common  # noqa: F401  a processor asks whether it has this tokenizer
import typer.main
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.models.qwen2_vl import image_processing_qwen2_vl  # noqa: F401
from transformers.models.qwen3_vl import modeling_qwen3_vl, processing_qwen3_vl  # noqa: F401

import vlrl.checks.preflight
import vlrl.distributed.rank_monitor
import vlrl.models.adapters
import vlrl.models.sharding.fsdp
import vlrl.tools.experiments.report
import vlrl.tools.train  # noqa: F401
from tests.once import do_not_sync
from vlrl.cli.main import app

with contextlib.suppress(ImportError):  # it is installed for the tests of ZeRO alone
    import deepspeed  # noqa: F401  accelerate looks whether a model is one of its
do_not_sync()

VIDEO_PROCESSOR_MAPPING.values()  # imports the module of each
get_checkpoint_conversion_mapping("qwen3_vl")  # makes those of all models
PreTrainedConfig.__repr__ = object.__repr__  # the text of an unprinted log line, as in tests/conftest.py
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app)
figure = Figure(layout="constrained")
figure.subplots().set_title("fonts are found")
backend_agg.FigureCanvasAgg(figure)
figure.savefig(io.BytesIO())
gc.collect()
gc.freeze()  # what is here stays: no run looks through it for garbage, nor copies its memory by that
gc.set_threshold(20000, 20, 20)
