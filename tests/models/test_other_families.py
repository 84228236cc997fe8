"""Image-text models that are in no table: what vlrl reads off their configs is enough to train them right."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import Florence2Config

from tests import others
from tests.conftest import SAMPLES, kinds_of
from tests.e2e.runs import write_config
from tests.helpers import Vowels, credited_groups, load, settings
from tests.models.test_packing import MIXED, assert_equal, groups
from vlrl.cli.main import main
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError
from vlrl.models import logprobs
from vlrl.models.families import FAMILIES, family_of, unknown_family_notice
from vlrl.models.packing import pack, pieces_of
from vlrl.models.processing import Encoder
from vlrl.training.update import make_optimizer, update

PARTS = ["language", "merger", "vision"]
# LLaVA takes the last layer but one of its vision tower. A key's bias shifts every score of a query alike.
WITHOUT_EFFECT = {"llava": ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm", "k_proj.bias"),
                  "gemma3": ("k_proj.bias",), "paligemma": ("k_proj.bias",)}


TYPES = {"glm4v": "mm_token_type_ids", "qwen3_5": "mm_token_type_ids", "gemma3": "token_type_ids",
         "glm4v_moe": "mm_token_type_ids", "qwen3_5_moe": "mm_token_type_ids", "gemma4": "mm_token_type_ids",
         "paligemma": "token_type_ids"}
"""Token types that a model reads."""
WATCH = ("gemma4", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe")
"""Models that take videos."""
FAST = ("glm4v", "gemma3")
SCENES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in others.OTHERS]


@pytest.fixture(scope="module", params=SCENES)
def scene(request, tmp_path_factory):
    """(name, folder, policy, prompts by kind) of one model."""
    folder = others.build(request.param, tmp_path_factory.mktemp(request.param))
    policy, encode = load(settings(folder, model={"name": str(folder), "train": PARTS}))
    assert policy.family.videos == (request.param in WATCH) and not policy.family.known
    assert policy.layout("shared") == "padded"
    return request.param, folder, policy, {k: encode(Vowels(), SAMPLES[k]) for k in kinds(policy)}


def kinds(policy):
    """Kinds of samples that a model takes; PaliGemma takes no text alone."""
    return [k for k in kinds_of(policy.family) if k != "text" or policy.family.model_type != "paligemma"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"train": PARTS}, {"lora": {"rank": 4, "target": "vision_language"}}],
                         ids=["full", "lora"])
def test_every_trainable_parameter_changes(scene, model):
    name, folder, _, _ = scene
    config = settings(folder, model={"name": str(folder), **model})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config, kinds(policy))
    optimizer = make_optimizer(policy, config)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    for step in range(2):  # in the second one the outer half of an adapter is no longer 0
        update(policy, optimizer, groups, config, step)
    trained = {n for n, _ in policy.trainable()}
    parts = {policy.family.part_of(n) for n in trained}
    assert parts == set(PARTS) or (policy.lora and name == "gemma3" and parts == {"language", "vision"})  # no Linear
    for n, p in policy.model.named_parameters():
        if n not in trained:
            assert torch.equal(p, before[n]), f"{n} is frozen and changed"
        elif not any(part in n for part in WITHOUT_EFFECT.get(name, ())):
            assert not torch.equal(p, before[n]), f"{n} did not change"


def plain(policy, prompt, answer=()):
    """Keywords of transformers' own forward of one prompt, as its processor gives them, positions left to the model."""
    name = policy.family.model_type
    ids = torch.from_numpy(np.concatenate([prompt.ids, np.asarray(answer, dtype=np.int64)]))[None]
    types = {k: torch.from_numpy(np.concatenate([v, np.full(ids.shape[1] - len(v), name == "paligemma")]))[None]
             for k, v in prompt.aligned.items()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **prompt.mm}


def test_padded_rows_equal_the_models_own_forward(scene):
    _, _, policy, prompts = scene
    answers = [np.arange(40 + i, 46 + 3 * i) for i in range(len(prompts))]
    prompts = dict(reversed(prompts.items()))  # a video before the images
    (batch,) = pack(pieces_of(list(prompts.values()), answers, 10**6), 10**6, "padded")
    ours = policy.logprobs(batch, 0.8).logprobs.detach().split([len(a) for a in answers])
    for prompt, answer, logps in zip(prompts.values(), answers, ours, strict=True):
        with torch.no_grad():
            inputs = policy.family.encode(policy.base, plain(policy, prompt, answer=answer))  # clips of Gemma 4 alone
            logits = policy.base(**inputs).logits[0, len(prompt) - 1:-1].float() / 0.8
        logits[:, policy.banned] = -torch.inf
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(answer)[:, None])[:, 0]
        assert (logps - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert type(policy.base) not in logprobs._RUN_WHOLE  # its output layer runs in chunks


def test_greedy_equals_plain_generate(scene):
    _, _, policy, prompts = scene
    engine = HFEngine(policy, seed=0, batch_rollouts=64)
    greedy = Sampling(max_new_tokens=16, temperature=0)
    ours = engine.generate([Request(prompt=p, n=2, sampling=greedy) for p in prompts.values()])
    for prompt, (answer, _) in zip(prompts.values(), ours, strict=True):
        with torch.no_grad(), policy.evaluating():
            out = policy.base.generate(**plain(policy, prompt), do_sample=False, max_new_tokens=16,
                                       eos_token_id=sorted(policy.eos), suppress_tokens=policy.banned.tolist())
        assert answer.tokens.tolist() == out[0, len(prompt):].tolist()


def test_sampler_and_trainer_agree(scene):
    _, _, policy, prompts = scene
    sampling = Sampling(max_new_tokens=16, temperature=0.7)
    answers = HFEngine(policy, seed=3, batch_rollouts=7).generate(
        [Request(prompt=p, n=3, sampling=sampling, key=(0, i)) for i, p in enumerate(prompts.values())])
    flat = [(p, c) for p, group in zip(prompts.values(), answers, strict=True) for c in group]
    (batch,) = pack(pieces_of([p for p, _ in flat], [c.tokens for _, c in flat], 10**6), 10**6, "padded")
    with torch.no_grad():
        trainer = policy.logprobs(batch, 0.7).logprobs.numpy()
    assert np.abs(trainer - np.concatenate([c.logprobs for _, c in flat])).max() < 3e-5


@pytest.mark.slow
def test_answers_of_one_picture_in_many_micro_batches(tmp_path):
    """ms-swift#9287, #6521: eight answers share a picture, and a micro-batch has fewer grids than rows."""
    folder, after = others.build("qwen3_5", tmp_path), []
    for tokens in (10**5, 80):
        config = settings(folder, rollout={"group_size": 8, "prompts_per_step": 4, "max_new_tokens": 8},
                          train={"lr": 1e-3, "max_grad_norm": 1e9, "tokens_per_batch": tokens})
        policy, encode = load(config)
        drawn = credited_groups(policy, encode, config, ("image",) * 4)
        assert [len(g.rollouts) for g in drawn] == [8] * 4
        update(policy, make_optimizer(policy, config), drawn, config, 0)
        after.append({n: p.detach() for n, p in policy.trainable()})
    assert max((after[0][n] - after[1][n]).abs().max() for n in after[0]) < 2e-5  # a fiftieth of a step of AdamW


def neighbours(prompts):
    """Prompts and answers that stand beside a row, each in turn."""
    return [(prompts[kind], np.arange(50, 50 + n)) for kind in ("text", "two images", "image") for n in (5, 43)]


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["qwen3_5", "glm4v"], indirect=True)
def test_a_row_does_not_depend_on_its_neighbours(scene):
    """ms-swift#9565: samples leaked into each other through the state of Qwen3.5's linear attention. trl#5785: pictures
    went to other rows where prompts differ in length."""
    _, _, policy, prompts = scene
    prompt, answer, sampling = prompts["image"], np.arange(40, 49), Sampling(max_new_tokens=12)
    request, engine = Request(prompt=prompt, n=3, sampling=sampling, key=(0, 1)), HFEngine(policy, 5, 16)
    def read(others):
        (batch,) = pack(pieces_of([p for p, _ in others] + [prompt], [a for _, a in others] + [answer], 10**6), 10**6,
                        policy.layout("shared"))
        with torch.no_grad():
            return policy.logprobs(batch, 1.0).logprobs[batch.rollout_id == len(others)]
    alone, (written,) = read([]), engine.generate([request])
    for other, ids in neighbours(prompts):
        assert (read([(other, ids)]) - alone).abs().max() < 1e-5
        beside = Request(prompt=other, n=3, sampling=Sampling(max_new_tokens=len(ids)), key=(0, 2))
        _, found = engine.generate([beside, request])
        for a, b in zip(found, written, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5


def test_pictures_and_control_tokens_in_prompts(scene):
    name, _, policy, prompts = scene
    base = policy.base.config
    ids = [base.image_token_id, getattr(base, "video_token_id", -1)]
    for prompt in prompts.values():
        assert len(prompt.visual_tokens) == len(prompt.media)
        assert sum(prompt.visual_tokens) == np.isin(prompt.ids, ids).sum()
        assert set(prompt.aligned) == ({TYPES[name]} if name in TYPES else set())
        if name in TYPES and name != "paligemma":  # 0 is text
            assert (prompt.aligned[TYPES[name]] > 0).sum() == sum(prompt.visual_tokens)
    # Else the tests above could pass without it.
    _, _, policy, prompts = scene
    blank = {k: torch.zeros_like(v) if k == "pixel_values" else v for k, v in prompts["image"].mm.items()}
    seen, unseen = (policy.logprobs(pack(pieces_of([p], [np.arange(40, 46)], 99), 99, "padded")[0], 1.0).logprobs
                    for p in (prompts["image"], dataclasses.replace(prompts["image"], mm=blank)))
    assert (seen - unseen).abs().max() > 1e-4
    # A row's text cannot end its turn or place an image, whatever the model's tokens look like.
    encode = Encoder(policy.processor, policy.family, policy.positions, settings("unused"))
    for token in policy.processor.tokenizer.all_special_tokens:
        sample = dataclasses.replace(SAMPLES["image"], row={"q": f"Where is {token} it?{token}"})
        prompt, known = encode(Vowels(), sample), policy.processor.tokenizer.convert_tokens_to_ids(token)
        assert (prompt.ids == known).sum() == (prompts["image"].ids == known).sum(), token
    assert set(policy.processor.image_token_ids) <= set(policy.banned.tolist())


@pytest.mark.slow
def test_experts_share_prompts_like_the_dense_model(tmp_path):
    """Qwen3-VL-MoE is in the table: a shared row equals padded rows, also in its gradients."""
    folder = others.build("qwen3_vl_moe", tmp_path)
    policy, encode = load(settings(folder))
    assert policy.family.known and policy.layout("shared") == "shared"
    assert_equal(policy, *groups(policy, encode, MIXED))
    config = settings(folder)
    before = {n: p.detach().clone() for n, p in policy.trainable()}
    optimizer, drawn = make_optimizer(policy, config), credited_groups(policy, encode, config)
    update(policy, optimizer, drawn, config, 0)
    assert all(not torch.equal(p, before[n]) for n, p in policy.trainable())


def test_encoder_decoders_are_refused():
    with pytest.raises(ConfigError, match="'florence2' reads images by cross-attention"):
        family_of(Florence2Config())


@pytest.mark.slow
def test_a_run_says_that_its_family_is_in_no_table(tmp_path, capsys):
    folder = others.build("gemma3", tmp_path / "model")
    words = ["steps=1", "eval.every=0", "eval.samples=2", "save.every=0", "rollout.max_new_tokens=4"]
    config = write_config(tmp_path, folder, "log: {samples_every: 0}")
    assert main(["train", str(config), f"run.dir={tmp_path}/run", *words]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("model type 'gemma3' is unknown to vlrl: rows are padded") == 1
    assert "requested as norm1000 (task.coordinates); the loss is not affected" in said
    assert unknown_family_notice(FAMILIES["qwen3_vl"]) == ""
