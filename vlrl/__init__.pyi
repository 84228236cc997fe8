from pathlib import Path

from vlrl.config.loading import load_config as load_config
from vlrl.config.schema import Config as Config
from vlrl.environments.tools import Tool as Tool
from vlrl.errors import VlrlError as VlrlError
from vlrl.task.base import Task as Task
from vlrl.task.environment import Environment as Environment
from vlrl.tools.evaluate import evaluate as evaluate
from vlrl.tools.run import Run as Run
from vlrl.tools.run import load_run as load_run
from vlrl.tools.train import train as train
from vlrl.training.callbacks import Callback as Callback
from vlrl.types import Media as Media
from vlrl.types import Observation as Observation
from vlrl.types import Sample as Sample
from vlrl.types import Step as Step
from vlrl.types import Variant as Variant

__version__: str
HOME: Path

__all__ = ["Callback", "Config", "Environment", "Media", "Observation", "Run", "Sample", "Step", "Task", "Tool",
           "Variant", "VlrlError", "evaluate", "load_config", "load_run", "train"]
