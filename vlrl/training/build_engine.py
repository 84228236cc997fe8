"""Makes the engine of a run or a tool, and its scratch folder."""

import contextlib
import importlib.util
import logging
import shutil
import zlib
from pathlib import Path

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Engine
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError
from vlrl.models.policy import Policy

_log = logging.getLogger(__name__)

_ENGINES = Table({
    "vllm": "vlrl.engine.vllm.engine:VLLMEngine",
    "vllm_server": "vlrl.engine.vllm.server:ServerEngine",
    "copied": "vlrl.engine.copied_engine:CopiedEngine",
})
"""engine.name -> function (policy, config, folder, episodes) that makes the engine. hf uses the training model itself,
or a copy."""


def check_engine(config: Config) -> None:
    """Raises ConfigError if the engine cannot run on this machine: the package vllm is not installed, or one vLLM
    engine would span several training processes."""
    each = config.engine.tensor_parallel
    if config.engine.name == "vllm" and each > 1 and comm.world() > 1:
        raise ConfigError(f"engine.tensor_parallel={each} with {comm.world()} training processes: with "
                          "engine.name=vllm each process runs a vLLM engine on one GPU. Set "
                          "engine.tensor_parallel=1, or engine.name=vllm_server, whose servers have GPUs of their own")
    if config.engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine.name=vllm: vLLM is not installed. Run: pip install 'vlrl[vllm]' (for an NVIDIA "
                          "GPU), install the CPU build with requirements-vllm.txt of a checkout, or set "
                          "engine.name=hf")


def make_engine(config: Config, model: Policy, folder: Path, apart: bool = False,
                episodes: bool = False) -> Engine:
    """Makes the engine of `engine.name`. The caller must close the engine. folder: a folder for files of the engine,
    used only by this process; if the engine writes files, the folder is emptied first. apart: whether the engine
    generates during the update, with a copy of the weights. episodes: whether prompts grow turn by turn."""
    settings = config.engine
    if settings.name == "hf":
        kind: type[HFEngine] = _ENGINES["copied"] if apart else HFEngine
        return kind(model, config.seed, settings.batch_rollouts, settings.prefill_tokens)
    if settings.renormalises and comm.is_main():
        _log.warning("engine.top_p=%g and engine.top_k=%d: answers are sampled from a subset of the vocabulary, and "
                     "the engine's log-probabilities are normalized over this subset. The trainer normalizes them "
                     "over the whole vocabulary, so mismatch/kl is larger and algo.correction corrects for the "
                     "difference.", settings.top_p, settings.top_k)
    shutil.rmtree(folder, ignore_errors=True)  # files of a killed run
    folder.mkdir(parents=True)
    return _ENGINES[settings.name](model, config, folder, episodes)


def engine_folder(config: Config) -> Path:
    """The scratch folder of this process for the engine: in the run folder, or below engine.scratch."""
    run, rank = Path(config.run.dir).absolute(), f"rank-{comm.rank():05d}"
    if config.engine.scratch:
        return Path(config.engine.scratch) / f"vlrl-{run.name}-{zlib.crc32(str(run).encode()):08x}" / rank
    return run / "engine" / rank


def remove_engine_folder(config: Config) -> None:
    """Removes the scratch folder of this process, and the parent folder if it is empty then."""
    folder = engine_folder(config)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
