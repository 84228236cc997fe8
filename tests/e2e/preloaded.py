"""What a run uses soon after its start, imported and looked up once in the process that `forked` forks from.

vlrl imports most of it only where it is used, so that short commands stay short. Of a run of five steps it is three
fifths of the work: matplotlib for the curve of rewards, peft, the tiny model's family, the list of all processors.
"""

import io

import bitsandbytes  # noqa: F401  peft imports it for an adapter
import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion  # noqa: F401
import pyarrow.dataset  # noqa: F401
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.models.qwen2_vl import image_processing_qwen2_vl  # noqa: F401
from transformers.models.qwen3_vl import modeling_qwen3_vl, processing_qwen3_vl  # noqa: F401

import vlrl.evaluation.report  # noqa: F401

VIDEO_PROCESSOR_MAPPING.values()  # imports the module of each
backend_agg.FigureCanvasAgg(figure := Figure())
figure.subplots().set_title("fonts are found")
figure.savefig(io.BytesIO())
