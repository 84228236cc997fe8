"""Fixtures of the tests with the real vLLM, its CPU build: tiny models, and an engine for each of them."""

import importlib.util
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES, TWO, kinds_of
from tests.e2e import forked
from tests.helpers import Vowels, load, settings
from vlrl.engine.hf import HFEngine
from vlrl.models.packing import pack, pieces_of

for _name, _value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                      "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                      "VLLM_LOGGING_LEVEL": "ERROR"}.items():
    os.environ.setdefault(_name, _value)  # read when vLLM is first imported; nothing above does

ENGINE = {"name": "vllm", "max_model_len": 256, "max_seqs": 32}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM and what it imports warn of each other


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm"):
        forked.preload("tests.vllm.forking")  # programs and servers start without importing it


@pytest.fixture(scope="session")
def installed() -> None:
    """Skips where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


@pytest.fixture(scope="module", params=TWO)
def tiny(request, installed, tiny_models, tmp_path_factory):
    """A tiny model's policy, prompts of all kinds, the HF engine and vLLM with its weights."""
    from vlrl.engine.vllm.engine import VLLMEngine

    room = {} if request.param in TWO else {"max_model_len": 512, "max_seqs": 8}
    config = settings(tiny_models[request.param], engine=ENGINE | room, seed=3)
    policy, encode = load(config)
    prompts = {kind: encode(Vowels(), SAMPLES[kind]) for kind in kinds_of(policy.family)}
    engine = VLLMEngine(policy, config, tmp_path_factory.mktemp("engine"))
    engine.sync(policy, 0)
    yield SimpleNamespace(policy=policy, config=config, prompts=prompts, vllm=engine, encode=encode,
                          hf=HFEngine(policy, 3, 64))
    engine.close()


def trainer_logprobs(policy, pairs, temperature: float = 1.0, model=None) -> np.ndarray:
    """[N] log-probabilities of the tokens of (prompt, completion) pairs as the trainer computes them, of another model
    where one is given."""
    (batch,) = pack(pieces_of([prompt for prompt, _ in pairs], [c.tokens for _, c in pairs], 10**6), 10**6)
    with torch.no_grad():
        return policy.logprobs(batch, temperature, model).logprobs.numpy()


def untied(model, folder):
    """The folder of a model like one in another folder, with an output layer of its own."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    head = whole.get_output_embeddings().weight.detach().clone()
    whole = AutoModelForImageTextToText.from_pretrained(model, config=config, dtype=torch.float32)
    whole.get_output_embeddings().weight.data = head.flip(0).contiguous()
    whole.save_pretrained(folder)
    AutoProcessor.from_pretrained(model).save_pretrained(folder)
    return folder
