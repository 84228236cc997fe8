"""Runs that several files of tests compare with."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.runs import FEW, ROOT, finished, write_config

TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "train.py")]


class Pair(NamedTuple):
    """A run of two processes on one host with the words FEW: its config, torchrun's words, and folder."""

    config: Path
    launcher: list[str]
    whole: Path


@pytest.fixture(scope="session")
def pair(tiny_models, tmp_path_factory) -> Pair:
    config = write_config(tmp_path_factory.mktemp("pair"), tiny_models["qwen3_vl"])
    finished(config, config.parent / "whole", *FEW, processes=2)
    return Pair(config, TWO, config.parent / "whole")
