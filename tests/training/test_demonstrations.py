"""Demonstrations in the update: their own gradient beside the objective's, by shares; which rows are shown."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import TWO
from tests.e2e.runs import goes_on_exactly, write_config
from tests.helpers import Vowels, credited_groups, load, settings
from tests.training.test_update import Recorder, assert_close, norm, scarce, taken
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations import draw
from vlrl.methods.demonstrations.draw import DemonstrationSampler
from vlrl.models.packing import make_batch, pieces_of
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.training.loop import train
from vlrl.training.update import update
from vlrl.types import Sample


@pytest.fixture(scope="module")
def scene(tiny_models):
    folder = tiny_models[TWO[0]]
    policy, encode = load(settings(folder))
    groups = credited_groups(policy, encode, settings(folder))
    shown = [replace(g, rollouts=(replace(g.rollouts[0], train_prompt=g.prompt, advantage=0.0),),
                     sample=replace(g.sample, row={**g.sample.row, "weight": 1.0 + i})) for i, g in enumerate(groups)]
    return policy, groups, shown, folder


def of(folder, mix, train=None, **rollout):
    algo = {"demonstrations": {"mix": mix}} if mix else {}
    return settings(folder, algo=algo, train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6, **(train or {})},
                    rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, **rollout})


def stepped(policy, groups, shown, config, algorithm=None, step=0):
    """Gradients of each optimizer step, and metrics."""
    recorder = Recorder(policy)
    stats, _ = update(policy, recorder, groups, config, step, algorithm or Algorithm(config),
                      own_groups={"algo.demonstrations": shown})
    return recorder.steps, stats


def cross_entropy(policy, shown):
    """Gradient of sum weight * nll / tokens, an answer at a time."""
    total = sum(len(g.rollouts[0].completion.tokens) for g in shown)
    loss = 0.0
    for g in shown:
        batch = make_batch(pieces_of([g.prompt], [g.rollouts[0].completion.tokens], 10**6))
        one = -g.sample.weight * policy.logprobs(batch, 1.0).logprobs.sum() / total
        one.backward()
        loss += one.item()
    return taken(policy), loss


CHORD = {"name": "chord", "peak": 0.25, "valley": 0.25}


def test_the_gradient_is_the_sum_of_both_by_their_shares(scene):
    policy, groups, shown, folder = scene
    (both,), stats = stepped(policy, groups, shown, of(folder, CHORD))
    (rl,), _ = stepped(policy, groups, (), of(folder, None))
    sft, loss = cross_entropy(policy, shown)
    zero = {n: torch.zeros_like(g) for n, g in (rl | sft).items()}
    assert_close(both, {n: 0.75 * rl.get(n, zero[n]) + 0.25 * sft.get(n, zero[n]) for n in both})
    assert stats["demonstrations/loss"] == pytest.approx(loss, rel=1e-5)
    assert stats["demonstrations/share"] == 0.25 and stats["demonstrations/applied"] == 1
    a, b = 0.25 * norm(sft), 0.75 * norm(rl)
    assert stats["demonstrations/grad_norm"] == pytest.approx(a, rel=1e-4)
    assert 0.05 < stats["demonstrations/grad_share"] == pytest.approx(a / (a + b), rel=1e-4)
    assert stats["demonstrations/tokens"] == sum(len(g.rollouts[0].completion.tokens) for g in shown)
    _, stats = stepped(policy, groups, shown, of(folder, "chord_phi"))
    with torch.no_grad():
        p = torch.cat([policy.logprobs(make_batch(pieces_of([g.prompt], [g.rollouts[0].completion.tokens], 10**6)),
                                       1.0).logprobs.exp() for g in shown])
    assert stats["demonstrations/factor"] == pytest.approx((p * (1 - p)).mean().item(), rel=1e-4)
    assert stats["demonstrations/share"] == 0.1 and 0 < stats["demonstrations/grad_share"] < 1
    (plain,), stats = stepped(policy, groups, (), of(folder, None))
    (same,), again = stepped(policy, groups, shown, of(folder, {**CHORD, "peak": 0.0, "valley": 0.0}))
    assert plain.keys() == same.keys() and all(torch.equal(plain[n], same[n]) for n in plain)
    assert again["demonstrations/share"] == again["demonstrations/applied"] == 0
    assert {k: v for k, v in again.items() if not k.startswith("demonstrations/")} == stats


def test_the_gradient_does_not_depend_on_micro_batches(scene, monkeypatch):
    policy, groups, shown, folder = scene
    config, small = of(folder, CHORD), of(folder, CHORD, {"tokens_per_batch": 60})
    (whole,), stats = stepped(policy, groups, shown, config)
    (parts,), again = stepped(policy, groups, shown[::-1], small)
    assert_close(parts, whole)
    scarce(monkeypatch, policy, 2)  # for the demonstrations, after the objective's only micro-batch
    (halved,), short = stepped(policy, groups, shown, config)
    assert short["memory/halved"] == 1
    assert_close(halved, whole)
    for found in (again, short):
        assert found["demonstrations/loss"] == pytest.approx(stats["demonstrations/loss"], rel=1e-5)


def test_each_optimizer_step_has_its_demonstrations(scene):
    policy, groups, shown, folder = scene
    config = of(folder, CHORD, minibatches=2)
    found = Algorithm(config).methods[0].passes(policy, [], shown, 0)
    assert [[t.group.id for t in s.part.rollouts] for s in found] == [["0", "2", "4"], ["1", "3", "5"]]
    steps, stats = stepped(policy, groups, shown, config)
    assert len(steps) == 2 and stats["demonstrations/applied"] == 1


def test_a_step_of_sasr_is_one_or_the_other(scene):
    policy, groups, shown, folder = scene
    config = of(folder, {"name": "sasr", "warmup": 1})
    algorithm = Algorithm(config)
    (warm,), stats = stepped(policy, groups, shown, config, algorithm)
    sft, _ = cross_entropy(policy, shown)
    assert_close({n: v for n, v in warm.items() if n in sft}, sft)
    assert stats["demonstrations/grad_share"] == 1 and stats["entropy"] > 0  # the answers are measured all the same
    mix = algorithm.methods[0].mix
    assert mix.warm == mix.latest == pytest.approx(norm(sft), rel=1e-4)
    assert algorithm.state_dict(policy)["demonstrations"] == {"warm": mix.warm, "latest": mix.latest}
    mix.latest = 0.0
    (rl,), stats = stepped(policy, groups, (), config, algorithm, step=1)
    (plain,), _ = stepped(policy, groups, (), of(folder, None))
    assert all(torch.equal(rl[n], plain[n]) for n in plain) and stats["demonstrations/chance"] == 0


class Some(Task):
    """Forty rows, of which every fourth has an answer."""

    prompt = "Say {id}."

    def samples(self, split):
        return [Sample(id=str(i), row={"id": str(i), **({"solution": f"it is {i}"} if i % 4 == 0 else {})})
                for i in range(40)]

    def score(self, sample, answer):
        return {}


def test_which_rows_are_shown_and_what_is_refused(scene, monkeypatch):
    *_, folder = scene
    config = of(folder, CHORD)
    task, (_, encode) = Some(), load(config)
    show = DemonstrationSampler(config, task, encode, None, task.samples("train"), Algorithm(config).methods[0].mix)
    first, second = show(3), show(4)
    ids = [g.sample.id for g in first]
    assert len({*ids}) == 8 and all(int(i) % 4 == 0 for i in ids) and ids != [g.sample.id for g in second]
    assert [g.sample.id for g in show(3)] == ids  # whatever was shown before
    assert [g.rollouts[0].completion.text for g in first] == [f"it is {i}" for i in ids]
    assert DemonstrationSampler(config, task, encode, None, task.samples("train"), Algorithm(of(folder, {
        **CHORD, "peak": 0.0, "valley": 0.0})).methods[0].mix)(3) == []
    none = [s for s in task.samples("train") if not s.get("solution")]
    with pytest.raises(ConfigError, match="none of the first 256 training rows has one"):
        draw.check(config, task, none)
    with pytest.raises(ConfigError, match="none of 512 drawn training rows has a given answer"):
        DemonstrationSampler(config, task, encode, None, none, Algorithm(config).methods[0].mix)(0)
    monkeypatch.setattr(draw.shards, "is_sharded", lambda config: True)
    with pytest.raises(ConfigError, match=r"algo\.demonstrations needs the gradient norm.*train\.sharding=none"):
        draw.check(of(folder, CHORD), Vowels(), [])


@pytest.mark.parametrize(("more", "message"), [
    ({"algo": {"demonstrations": {}, "guided": {}}}, "algo.demonstrations and algo.guided both"),
    ({"algo": {"demonstrations": {"rows": 1}}, "rollout": {"minibatches": 2}}, "algo.demonstrations.rows=1 leaves"),
    ({"algo": {"demonstrations": {}}, "async": {"max_staleness": 1}}, "async.max_staleness=1")])
def test_settings_that_do_not_go_together(more, message):
    with pytest.raises(ConfigError, match=message):
        configs.validate({"task": "digits", "model": {"name": "m"}, **more})


@pytest.mark.slow
def test_a_resumed_run_shows_and_draws_the_same(tiny_models, tmp_path):
    """SASR beyond its warm-up: the norms that it remembers are in the checkpoint."""
    file = write_config(tmp_path, tiny_models[TWO[0]], "log: {samples_every: 0}\nalgo: {demonstrations: {rows: 2, mix: "
                                                       "{name: sasr, warmup: 1, gamma: 1.5}}}")
    whole = goes_on_exactly(lambda folder, steps: train(configs.load(file, [
        f"run.dir={folder}", f"steps={steps}", "save.every=2", "save.keep=9", "eval.samples=0",
        "train.schedule=constant", "train.warmup=0", "rollout.prompts_per_step=2"])), tmp_path, 2)
    applied = [line["demonstrations/applied"] for line in RunFolder(whole).metrics()]
    assert applied[0] == 1 and {*applied} == {0, 1}
