"""The trainer's weights in a real vLLM (its CPU build): after every sync both are the same policy."""

import contextlib
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.helpers import load, settings
from tests.vllm.conftest import untied
from tests.vllm.test_proof import perturb
from vlrl.engine.vllm.sync_check import SyncCheck, trainer_logprobs
from vlrl.errors import TrainingError
from vlrl.task import Task

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"),
              pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

EXACT = 1e-5
"""Most that a log-probability may differ by in float32."""


class Ask(Task):
    prompt = "{q}"


class Both:
    def __init__(self, model, folder, **more):
        from vlrl.engine.vllm.engine import VLLMEngine
        self.config = settings(model, engine={"name": "vllm", "max_seqs": 8, "max_model_len": 512},
                               model={"name": str(model), "train": ["language", "merger", "vision"]} | more)
        self.policy, self.encode = load(self.config)
        self.prompts = {kind: self.encode(Ask(), SAMPLES[kind]) for kind in ("image", "two images", "text")}
        self.engine, self.folder = VLLMEngine(self.policy, self.config, folder), folder
        self.llm, self.weights = self.engine.llm, self.engine.weights
        self.proof, self.start = SyncCheck.of(self.encode), state(self.policy)

    def difference(self, policy=None):
        """The largest difference of a log-probability of an answer that the engine samples, and of a fixed one."""
        from vllm import SamplingParams

        from vlrl.engine.vllm.inputs import prompt_input
        policy, fixed, worst = policy or self.policy, np.arange(20, 29), 0.0
        for prompt in self.prompts.values():
            worst = max(worst, np.abs(self.weights.logprobs(prompt, fixed)
                                      - trainer_logprobs(policy, prompt, fixed)).max())
            (out,) = self.llm.generate([prompt_input(prompt)], SamplingParams(max_tokens=8, logprobs=0, seed=1),
                                       use_tqdm=False, lora_request=self.weights.lora_request)
            ids = np.array(out.outputs[0].token_ids)
            sampled = np.array([at[int(i)].logprob for at, i in zip(out.outputs[0].logprobs, ids, strict=True)])
            worst = max(worst, np.abs(sampled - trainer_logprobs(policy, prompt, ids)).max())
        return worst

    def check(self, policy=None):
        policy = policy or self.policy
        return self.proof.check(policy, self.weights.logprobs, lambda: self.weights.compare(policy))

    def close(self):
        self.llm = self.weights = None
        self.engine.close()
        OPEN.clear()


OPEN: list[Both] = []
"""One process has one engine at a time; pytest may make the next fixture before it ends the last."""


@contextlib.contextmanager
def both(tiny_models, tmp_path_factory, family, tied, **more):
    for other in [*OPEN]:
        other.close()
    model = tiny_models[family]
    if not tied:
        model = untied(model, tmp_path_factory.mktemp("untied"))
    made = Both(model, tmp_path_factory.mktemp("scratch"), **more)
    OPEN.append(made)
    yield made
    if made in OPEN:
        made.close()


FULL, ADAPTED = [("qwen2_5_vl", False), ("qwen3_vl", True)], [("qwen2_5_vl", True), ("qwen3_vl", False)]
"""Family, and whether the embeddings are tied."""


@pytest.fixture(scope="module", params=FULL, ids=lambda p: p[0])
def full(request, tiny_models, tmp_path_factory):
    with both(tiny_models, tmp_path_factory, *request.param) as made:
        yield made


@pytest.fixture(scope="module", params=ADAPTED, ids=lambda p: p[0])
def lora(request, tiny_models, tmp_path_factory):
    with both(tiny_models, tmp_path_factory, *request.param, lora={"rank": 4}) as made:
        yield made


@pytest.fixture(autouse=True)
def anew():
    """Each test ends with the policy as it was at first: weights that wander far lose digits."""
    yield
    for made in OPEN:
        made.policy.model.load_state_dict(made.start)


def state(policy):
    return {n: t.clone() for n, t in policy.model.state_dict().items()}


def follows(made, policy):
    for step in range(3):
        perturb(policy, step, by=0.1)
        before = state(policy)
        made.weights.push(policy)
        assert all(torch.equal(t, before[n]) for n, t in policy.model.state_dict().items())
        assert made.difference(policy) < EXACT  # from the second time on with images that the engine has seen
        assert made.check(policy) < EXACT
    perturb(policy, 9, by=0.1)
    assert made.difference(policy) > 100 * EXACT  # the engine holds no memory of the trainer's


def test_full_weights_follow(full):
    """trl#7198, verl#6523, vllm#44910: after a sync the cached features of an image were those of the old vision tower.
    sglang#18024, vllm#33036: an untied head was overwritten by the embedding, a tied one left as it was."""
    assert full.weights.way == "full"
    follows(full, full.policy)
    full.weights.push(full.policy)
    names = {name for name, _, _ in full.weights.compare(full.policy)}
    tied = full.policy.base.config.tie_word_embeddings
    assert len(names) == len(list(full.policy.model.named_parameters())) + tied
    for name, ours, theirs in full.weights.compare(full.policy):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("part", [".2.self_attn.v_proj", "visual.blocks.1.", "visual.merger.", "left out", "head"])
def test_a_stale_weight_is_named(full, part, monkeypatch):
    """The engine gets what it had of a slice of a fused layer, of the vision tower's, of the merger's; or a weight is
    left out; or a tied head stays, as vLLM's own reload leaves it on CPUs."""
    from vlrl.engine.vllm import sync as vllm_sync
    if part == "head" and not full.policy.base.config.tie_word_embeddings:
        pytest.skip("not tied")
    full.weights.push(full.policy)
    saved, old = vllm_sync.saved_tensors, {name: t.clone() for name, t in vllm_sync.saved_tensors(full.policy)}
    wanted = ".layers.1.self_attn.o_proj" if part == "left out" else part
    name = "lm_head.weight (tied to the embedding)" if part == "head" else next(
        n for n in old if wanted in n and n.endswith("weight") and old[n].dim() == 2)
    perturb(full.policy, 3, by=0.2)
    if part == "head":
        monkeypatch.setattr(vllm_sync, "repack_heads", lambda model: None)
    else:
        monkeypatch.setattr(vllm_sync, "saved_tensors", lambda policy: (
            (n, old[n] if n == name else t) for n, t in saved(policy) if part != "left out" or n != name))
    full.weights.push(full.policy)
    monkeypatch.undo()
    with pytest.raises(TrainingError) as error:
        full.check()
    assert f"{name} differs by" in str(error.value)
    assert str(error.value).count("differs by") == 1 or part == "left out"
    full.weights.push(full.policy)
    assert full.check() < EXACT


def test_weights_by_files_and_not_while_answers_are_written(full, monkeypatch):
    from vlrl.engine.vllm.sync import WeightSync
    perturb(full.policy, 6, by=0.1)
    monkeypatch.setattr(WeightSync, "inside", property(lambda self: False))
    monkeypatch.setattr(full.llm.llm_engine.vllm_config.load_config, "load_format", "auto")
    full.weights.push(full.policy)
    monkeypatch.undo()
    assert full.difference() < EXACT
    from vllm import SamplingParams

    from vlrl.engine.vllm.inputs import prompt_input
    engine = full.llm.llm_engine
    engine.add_request("busy", prompt_input(full.prompts["text"]), SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    with pytest.raises(TrainingError, match="completions are still being generated"):
        full.weights.push(full.policy)
    engine.abort_request(["busy"])
    full.weights.push(full.policy)
    assert full.check() < EXACT


def test_an_adapter_that_vllm_cannot_take_is_merged(full):
    """Of the vision tower and the merger too: vllm#17660, #21500, #23796 refused it when it was loaded."""
    from vlrl.engine.vllm.sync import WeightSync, lora_options, why_merged
    name = full.config.model.name
    policy, _ = load(settings(name, model={"name": name, "lora": {"rank": 4, "target": "vision_language"}}))
    assert "merger and the vision" in why_merged(policy) and lora_options(policy) == {}
    weights, full.weights = full.weights, WeightSync(full.llm, policy, full.folder)
    try:
        assert full.weights.way == "merged"
        follows(full, policy)
    finally:
        full.weights = weights
        full.weights.push(full.policy)


def test_half_precision(tiny_models, tmp_path_factory):
    """Weights are equal to the last bit in the engine's type; log-probabilities within the tolerance of it."""
    with both(tiny_models, tmp_path_factory, "qwen3_vl", True, dtype="bfloat16") as made:
        perturb(made.policy, 1, by=0.1)
        made.weights.push(made.policy)
        assert 1e-4 < made.check() < 0.05
        for name, ours, theirs in made.weights.compare(made.policy):
            assert theirs.dtype == torch.bfloat16 and torch.equal(ours.bfloat16(), theirs), name


def test_adapters_are_swapped(lora):
    assert lora.weights.way == "adapter"
    follows(lora, lora.policy)
    lora.weights.push(lora.policy)
    pairs = list(lora.weights.compare(lora.policy))
    tied = lora.policy.base.config.tie_word_embeddings
    assert len({name for name, _, _ in pairs}) == len(list(lora.policy.model.named_parameters())) + tied
    assert all(torch.equal(ours, theirs) for _, ours, theirs in pairs) and len(lora.llm.llm_engine.list_loras()) == 1
    assert len(list((lora.folder / "adapters").iterdir())) == 1


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_a_stale_adapter_matrix_is_named(lora, side, monkeypatch):
    from vlrl.engine.vllm import sync as vllm_sync
    lora.weights.push(lora.policy)
    name = next(n for n, _ in lora.policy.trainable() if f"layers.1.mlp.up_proj.{side}" in n)
    perturb(lora.policy, 7, by=0.3)
    parameter = dict(lora.policy.trainable())[name]
    write = vllm_sync.write_adapter

    def stale(policy, folder):
        now = parameter.detach().clone()
        parameter.data.mul_(0.5)
        write(policy, folder)
        parameter.data.copy_(now)

    monkeypatch.setattr(vllm_sync, "write_adapter", stale)
    lora.weights.push(lora.policy)
    monkeypatch.undo()
    with pytest.raises(TrainingError) as error:
        lora.check()
    assert f"layers.1.mlp.up_proj.{side}" in str(error.value) and str(error.value).count("differs by") == 1
    lora.weights.push(lora.policy)
    assert lora.check() < EXACT
