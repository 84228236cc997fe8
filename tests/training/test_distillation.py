"""A teacher of the policy's own answers in the update: gradients of a real model, runs, and what is refused."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div

from tests.conftest import TWO
from tests.e2e.runs import goes_on_exactly, write_config
from tests.helpers import Vowels, credited_groups, load, settings, started
from tests.training.test_update import Recorder, assert_close, scarce, taken
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.methods.distillation import teacher
from vlrl.models.packing import make_batch, pieces_of
from vlrl.store import RunFolder
from vlrl.training import inert
from vlrl.training.loop import train
from vlrl.training.update import update

TEMPERATURE = 0.8


def of(folder, teacher=None, train=None, model=None, rollout=None, **more):
    algo = {"distillation": {"teacher": str(teacher), **more}} if teacher else {}
    return settings(folder, algo=algo, train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6, **(train or {})},
                    model={"name": str(folder), "train": ["language", "merger", "vision"], **(model or {})},
                    rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, "temperature": TEMPERATURE,
                             **(rollout or {})})


def moved(policy, size=0.02):
    """Moves all that learns."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, p in policy.trainable():
            p.add_(torch.randn(p.shape, generator=generator), alpha=size)


@pytest.fixture(scope="module")
def scene(tiny_models, tmp_path_factory):
    """(policy, encode, groups, the policy's folder, that of a teacher that differs from it in every part)."""
    folder, other = tiny_models[TWO[0]], tmp_path_factory.mktemp("teacher") / "model"
    away, _ = load(of(folder))
    moved(away)
    away.save(other)
    policy, encode = load(of(folder))
    groups = credited_groups(policy, encode, of(folder))
    groups[0] = replace(groups[0], sample=replace(groups[0].sample, row={**groups[0].sample.row, "weight": 2.0}))
    first, *others = groups[1].rollouts
    groups[1] = replace(groups[1], rollouts=(replace(first, trained=False), *others))
    return policy, encode, groups, folder, other


def stepped(scene, config):
    """Gradients of each optimizer step, and metrics."""
    policy, encode, groups, *_ = scene
    recorder = Recorder(policy)
    stats, _ = update(policy, recorder, groups, config, 0, started(config, policy, encode))
    return recorder.steps, stats


def answer_by_answer(scene, model):
    """Gradient and value of the mean KL to a model over what is trained, an answer at a time, in float64."""
    policy, _, groups, *_ = scene
    answers = [(g, r.completion.tokens) for g in groups for r in g.rollouts if r.trained]
    total, loss = sum(len(tokens) for _, tokens in answers), 0.0
    choices = [v for v in range(policy.vocabulary) if v not in policy.banned.tolist()]
    for g, tokens in answers:
        batch = make_batch(pieces_of([g.prompt], [tokens], 10**6))
        with torch.no_grad():
            theirs = policy.logprobs(batch, TEMPERATURE, model, {"all": lambda logits, _: logits.clone()}).more["all"]
        own = policy.logprobs(batch, TEMPERATURE, more={"all": lambda logits, _: logits.clone()}).more["all"]
        p, q = (x[:, choices].double().log_softmax(-1) for x in (own, theirs))
        one = g.sample.weight * kl_div(q, p, reduction="sum", log_target=True) / total
        one.backward()
        loss += one.item()
    return taken(policy), loss


def test_the_gradient_is_that_of_the_mean_kl_beside_the_objective_by_weights(scene):
    policy, *_, folder, other = scene
    config = of(folder, other, objective=0.0)
    wanted, loss = answer_by_answer(scene, teacher.load(config, policy))
    (found,), stats = stepped(scene, config)
    assert_close({n: found[n] for n in wanted}, wanted, 2e-5)
    assert stats["distillation/kl"] == pytest.approx(loss, rel=1e-5) and loss > 0.01
    *_, folder, other = scene
    (alone,), _ = stepped(scene, of(folder, other, objective=0.0))
    (rl,), _ = stepped(scene, of(folder))
    (both,), _ = stepped(scene, of(folder, other, objective=0.5, coef=3.0))
    assert_close(both, {n: 0.5 * rl.get(n, 0) + 3 * g for n, g in alone.items()}, 2e-5)
    *_, folder, _ = scene
    for loss in ("reverse_kl", "sampled_kl"):
        (found,), stats = stepped(scene, of(folder, folder, objective=0.0, loss=loss))
        assert stats["distillation/kl"] == 0.0 and found and not any(g.any() for g in found.values())


def test_it_does_not_depend_on_packing_nor_memory(scene, monkeypatch):
    policy, *_, folder, other = scene
    (whole,), stats = stepped(scene, of(folder, other, objective=0.5))
    for train_ in ({"packing": "padded", "tokens_per_batch": 300}, {"tokens_per_batch": 60}):
        (parts,), again = stepped(scene, of(folder, other, train_, objective=0.5))
        assert_close(parts, whole)
        assert again["distillation/kl"] == pytest.approx(stats["distillation/kl"], rel=1e-5)
    scarce(monkeypatch, policy, 2)  # for the teacher, after the objective's only micro-batch
    (halved,), short = stepped(scene, of(folder, other, objective=0.5))
    assert short["memory/halved"] == 1
    assert_close(halved, whole)
    assert short["distillation/kl"] == pytest.approx(stats["distillation/kl"], rel=1e-5)


def test_every_optimizer_step_learns_its_answers(scene):
    *_, folder, other = scene
    steps, stats = stepped(scene, of(folder, other, rollout={"minibatches": 2, "updates": 2}, objective=0.0))
    (_,), whole = stepped(scene, of(folder, other, objective=0.0))
    assert len(steps) == 4 and all(torch.equal(steps[0][n], steps[2][n]) for n in steps[0])
    assert stats["distillation/kl"] == pytest.approx(whole["distillation/kl"], rel=0.5)


def test_an_adapter_teaches_as_the_model_it_was_trained_as(scene, tmp_path):
    policy, _, groups, folder, _ = scene
    adapted, _ = load(of(folder, model={"lora": {"rank": 4}, "train": []}))
    moved(adapted, 0.1)
    adapted.save(tmp_path / "adapter")
    config = of(folder, tmp_path / "adapter")
    teacher.check(config)
    batch = make_batch(pieces_of([g.prompt for g in groups], [g.rollouts[0].completion.tokens for g in groups], 10**6))
    with torch.no_grad(), adapted.evaluating():
        found = policy.logprobs(batch, 1.0, teacher.load(config, policy)).logprobs
        assert (found - adapted.logprobs(batch, 1.0).logprobs).abs().max() < 1e-4
        assert (found - policy.logprobs(batch, 1.0).logprobs).abs().max() > 1e-2


def changed(folder, tmp_path, file, change):
    """A copy of a model's folder in which a file says otherwise."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    value = json.loads((copy / file).read_text())
    change(value)
    (copy / file).write_text(json.dumps(value))
    return copy


def swapped(tokenizer):
    words = tokenizer["model"]["vocab"]
    one, two = sorted(words)[:2]
    words[one], words[two] = words[two], words[one]


def test_a_teacher_of_other_tokens_or_pictures_is_refused(scene, tiny_models, tmp_path):
    *_, folder, other = scene
    teacher.check(of(folder, other))
    with pytest.raises(ConfigError, match=r".*\.teacher='.*' has the model type qwen2_5_vl.*type qwen3_vl.*: choose a"):
        teacher.check(of(folder, tiny_models[TWO[1]]))
    with pytest.raises(ConfigError, match=r"algo\.distillation\.teacher='.*/changed' has a different vocab.*2 tokens"):
        teacher.check(of(folder, changed(folder, tmp_path, "tokenizer.json", swapped)))
    shutil.rmtree(tmp_path / "changed")
    patches = changed(folder, tmp_path, "processor_config.json", lambda c: c["image_processor"].update(patch_size=14))
    with pytest.raises(ConfigError, match=r"processes images with patch_size=14, but the policy .* uses 8: choose a"):
        teacher.check(of(folder, patches))
    with pytest.raises(ConfigError, match=r"algo\.distillation\.teacher='/nowhere' cannot be loaded.*Give the folder"):
        teacher.check(of(folder, "/nowhere"))


@pytest.mark.parametrize("more, message", [
    ({"model": {"name": "m", "feature_cache_mib": 64}}, r"model\.feature_cache_mib=64 .*set model\.feature_cache_mib"),
    ({"algo": {"advantage": "gae", "critic": {}, "distillation": {"objective": 0}}},
     r"algo\.distillation\.objective=0 trains on no advantage.*algo\.critic=null")])
def test_settings_that_do_not_go_together(more, message):
    with pytest.raises(ConfigError, match=message):
        configs.validate({"task": "digits", "model": {"name": "m"}, "algo": {"distillation": {}}, **more})


def test_what_the_teacher_alone_does_not_read_and_runs_without_answers():
    (method,) = Algorithm(of("folder", "other")).methods
    with pytest.raises(ConfigError, match="this run generates none: use vlrl train"):
        method.check(Vowels(), [], False)

    def found(**algo):
        config = configs.validate({"task": "digits", "model": {"name": "m"}, "algo": algo})
        return {one.setting: one.value for one in inert.find(config)}
    chosen = {"advantage": "rloo", "kl_coef": 0.1, "entropy": "bonus", "weights": ["top_entropy"]}
    named = {"algo.advantage": "rloo", "algo.kl_coef": 0.1, "algo.entropy": "bonus", "algo.weights": "top_entropy",
             "algo.distillation.teacher": "null"}
    assert found(**chosen, distillation={"objective": 0}).items() >= named.items()
    for distillation in ({"objective": 0.5}, {"objective": 1, "teacher": "t"}):
        assert not {*found(**chosen, distillation=distillation)} & {*named}
    assert "algo.entropy" not in found(entropy="temperature", distillation={"objective": 0, "teacher": "t"})


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one(scene, tmp_path):
    *_, folder, other = scene
    file = write_config(tmp_path, folder, "log: {samples_every: 0}\nalgo: {distillation: {teacher: "
                                          f"{other}, objective: 0}}}}")
    whole = goes_on_exactly(lambda folder, steps: train(configs.load(file, [
        f"run.dir={folder}", f"steps={steps}", "save.every=2", "eval.samples=0", "train.schedule=constant",
        "train.warmup=0", "rollout.prompts_per_step=2"])), tmp_path, 2, 4)
    kl = [line["distillation/kl"] for line in RunFolder(whole).metrics()]
    assert all(math.isfinite(v) and v > 0 for v in kl) and kl[-1] < kl[0]
