"""vLLM over families that the other tests leave out: their own pictures in tiles, and the ids that the trainer has."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import noise
from tests.helpers import Vowels, load, settings
from tests.vllm.conftest import ENGINE, trainer_logprobs
from vlrl.engine.base import Request, Sampling
from vlrl.types import Media, Sample

pytestmark = pytest.mark.vllm
TAKEN = ("qwen2_vl", "smolvlm", "internvl")
"""vLLM 0.32 refuses LLaVA-OneVision as transformers 5 names its weights."""
SIZES = {"one": [(84, 84)], "three": [(84, 84), (112, 56), (60, 100)], "in tiles": [(300, 100)]}


@pytest.fixture(scope="module", params=TAKEN)
def engine(request, installed, tiny_models, tmp_path_factory):
    from vlrl.engine.vllm.engine import VLLMEngine

    config = settings(tiny_models[request.param], engine={**ENGINE, "max_model_len": 512, "max_seqs": 8})
    policy, encode = load(config)
    made = VLLMEngine(policy, config, tmp_path_factory.mktemp("engine"))
    yield SimpleNamespace(policy=policy, encode=encode, vllm=made)
    made.close()


def test_pictures_are_expanded_once(engine):
    """trl#6294, OpenRLHF#1220: ids that were expanded already were expanded again. What vLLM reports is the trainer's
    prompt, else `generate` raises (test_inputs.py), and both read the same answers alike after two syncs."""
    asked = {}
    for name, sizes in SIZES.items():
        media = tuple(Media(source=noise(i, *size)) for i, size in enumerate(sizes))
        prompt = engine.encode(Vowels(), Sample(id=name, media=media, row={"q": "Which?"}))
        assert len(prompt.raw_ids) < len(prompt)
        asked[name] = Request(prompt=prompt, n=2, sampling=Sampling(max_new_tokens=6), key=(0,))
    for step in range(2):
        engine.vllm.sync(engine.policy, step)
        answers = engine.vllm.generate([*asked.values()])
        pairs = [(r.prompt, c) for r, group in zip(asked.values(), answers, strict=True) for c in group]
        sampled = np.concatenate([c.logprobs for _, c in pairs])
        assert np.abs(trainer_logprobs(engine.policy, pairs) - sampled).max() < 1e-5
