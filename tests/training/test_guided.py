"""Second attempts in the update: read under the prompt alone, and a gradient of their own beside the objective."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import TWO
from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from tests.environments.acting import played
from tests.helpers import credited_groups, load, second_of, settings
from tests.training.test_update import Recorder, assert_close, gradients, scarce, taken
from vlrl.algo.advantage import grpo
from vlrl.config.sections import GUIDED
from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.methods.second_attempts import update as guided
from vlrl.methods.second_attempts.members import second_attempts
from vlrl.models.packing import make_batch, pieces_of
from vlrl.training.advantages import credit
from vlrl.training.minibatch import split
from vlrl.training.update import update

SFT, DPO = {"guided": {"loss": "sft"}}, {"guided": {"loss": "dpo"}}


def attempted(groups):
    """Groups whose last answers are second attempts, all but the first group's; one of them is wrong."""
    out = []
    for i, g in enumerate(groups):
        *members, last = [replace(r, correct=False) for r in g.rollouts]
        second = replace(last, variant=GUIDED, correct=i != 1, trained=i != 1, train_prompt=g.prompt, advantage=0.0)
        out.append(replace(g, rollouts=tuple(members), aside=(second,) if i else ()))
    return out


@pytest.fixture(scope="module")
def scene(tiny_models):
    folder = tiny_models[TWO[0]]
    policy, encode = load(settings(folder))
    policy.keep_reference()
    with torch.no_grad():  # the policy has moved on from its reference
        for i, (_, p) in enumerate(policy.trainable()):
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return policy, attempted(credited_groups(policy, encode, settings(folder))), folder


def of(folder, algo, **train):
    return settings(folder, algo=algo, train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6, **train})


def alone(groups):
    """The objective learns nothing."""
    return [replace(g, rollouts=tuple(replace(r, advantage=0.0) for r in g.rollouts)) for g in groups]


def assert_preferred(policy, pairs, found, stats):
    """Gradient and loss are those of (prompt, better, worse) one after the other, at beta 0.3."""
    taken(policy)
    total = 0.0
    for prompt, *both in pairs:
        batches = [make_batch(pieces_of([prompt], [c.tokens], 10**6)) for c in both]
        gain = [(policy.logprobs(b, 1.0).logprobs - policy.reference_logprobs(b, 1.0)).sum() for b in batches]
        loss = -torch.nn.functional.logsigmoid(0.3 * (gain[0] - gain[1])) / len(pairs)
        loss.backward()
        total += loss.item()
    wanted = taken(policy)
    assert_close({n: v for n, v in found.items() if n in wanted}, wanted)
    assert stats["guided/loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("algo", [SFT, DPO], ids=["sft", "dpo"])
def test_the_gradient_does_not_depend_on_packing_order_and_micro_batches(scene, algo):
    policy, groups, folder = scene
    (whole,), stats, _ = gradients(policy, groups, of(folder, algo))
    (without,), _, _ = gradients(policy, groups, of(folder, {}))
    assert max((whole[n] - without[n]).abs().max() for n in whole) > 1e-4
    for groups_, train in ((groups, {"tokens_per_batch": 60}), (groups[::-1], {"tokens_per_batch": 200}),
                           (groups, {"packing": "padded", "tokens_per_batch": 300})):
        (parts,), again, _ = gradients(policy, groups_, of(folder, algo, **train))
        assert_close(parts, whole)
        assert again["guided/loss"] == pytest.approx(stats["guided/loss"], rel=1e-5)
        assert again["guided/logratio"] == pytest.approx(stats["guided/logratio"], rel=1e-3, abs=1e-5)


def test_sft_is_the_cross_entropy_under_the_prompt_alone(scene):
    policy, groups, folder = scene
    (found,), stats, _ = gradients(policy, alone(groups), of(folder, {"guided": {"coef": 2.0}}))
    rows = [(g.prompt, r.completion) for g in groups for r in second_attempts(g)]
    total = sum(int(c.loss_mask.sum()) for _, c in rows)
    taken(policy)
    losses = []
    for prompt, c in rows:  # one answer at a time
        batch = make_batch(pieces_of([prompt], [c.tokens], 10**6))
        losses.append(-2.0 * policy.logprobs(batch, 1.0).logprobs[torch.from_numpy(c.loss_mask)].sum() / total)
        losses[-1].backward()
    wanted = taken(policy)
    assert_close({n: v for n, v in found.items() if n in wanted}, wanted)
    assert stats["guided/loss"] == pytest.approx(sum(losses).item(), rel=1e-5)
    assert stats["guided/attempts"] == len(rows) == len(groups) - 2
    assert stats["loss"] == pytest.approx(0.0, abs=1e-6)  # the objective's own


def test_the_term_of_expo_fades_with_the_steps(scene):
    policy, groups, folder = scene
    config = of(folder, {"guided": {"loss": {"name": "expo", "decay": 200}}})
    first, half, last = (update(policy, Recorder(policy), alone(groups), config, step)[0]["guided/loss"]
                         for step in (0, 100, 200))
    assert first > 0.01 and half == pytest.approx(first / 2, rel=1e-5) and last == 0


def test_dpo_prefers_the_attempt_to_a_failure_of_its_group(scene):
    policy, groups, folder = scene
    algo = {"guided": {"loss": {"name": "dpo", "beta": 0.3}}}
    (found,), stats, _ = gradients(policy, alone(groups), of(folder, algo))
    pairs = [(g.prompt, r.completion, g.rollouts[0].completion) for g in groups for r in second_attempts(g)]
    assert_preferred(policy, pairs, found, stats)


def test_guidance_wrong_attempts_and_plain_groups_change_nothing(scene):
    """The same answers under another text of guidance: nothing changes but how far the two prompts are apart."""
    policy, groups, folder = scene
    moved = [replace(g, aside=tuple(replace(r, sampled_prompt="other", completion=replace(
        r.completion, logprobs=r.completion.logprobs - 1)) for r in g.aside)) for g in groups]
    (one,), stats, _ = gradients(policy, groups, of(folder, SFT))
    (two,), again, _ = gradients(policy, moved, of(folder, SFT))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert again["guided/logratio"] == pytest.approx(stats["guided/logratio"] + 1, abs=1e-5)
    (plain,), stats, _ = gradients(policy, groups[:2], of(folder, {}))
    (same,), again, _ = gradients(policy, groups[:2], of(folder, SFT))
    assert all(torch.equal(plain[n], same[n]) for n in plain)
    assert not any(name.startswith("guided/") for name in (*stats, *again))
    # where nothing else teaches, they do
    config = of(folder, SFT)
    untaught = [replace(g, rollouts=tuple(replace(r, trained=False) for r in g.rollouts)) for g in groups]
    (only,), _, _ = gradients(policy, untaught, config)
    assert max(v.abs().max() for v in only.values()) > 1e-4


def test_every_optimizer_step_has_those_of_its_groups(scene):
    policy, groups, folder = scene
    config = settings(folder, algo=SFT, rollout={"minibatches": 2, "group_size": 3, "prompts_per_step": 6})
    parts = [second_of(policy, part, config) for part in split(groups, 2)]
    assert [{t.group.id for t in s.part.rollouts} for s in parts] == [{"2"}, {"3", "4", "5"}]
    assert second_of(policy, split(groups[:2], 1)[0], config) is None
    cut = [replace(g, aside=tuple(replace(r, completion=replace(r.completion, finish_reason="length"))
                                  for r in g.aside)) for g in groups]
    config = of(folder, {**SFT, "mask_truncated": True})
    assert second_of(policy, split(cut, 1)[0], config) is None


@pytest.mark.parametrize("last", [False, True])
def test_too_little_memory_begins_the_optimizer_step_again(scene, monkeypatch, last):
    """In the objective, or in the last micro-batch of the attempts, with the gradients of all others in place."""
    policy, groups, folder = scene
    config = of(folder, SFT, tokens_per_batch=120)
    second = second_of(policy, split(groups, 1)[0], config)
    assert len(second.part.batches) > 1 and len(second.part.batches[-1].pieces) > 1
    with monkeypatch.context() as patch:
        calls = scarce(patch, policy, -1)
        (whole,), stats, _ = gradients(policy, groups, config)
    scarce(monkeypatch, policy, calls[0] if last else 1)
    (again,), halved, _ = gradients(policy, groups, config)
    assert halved["memory/halved"] == 1
    assert_close(again, whole)
    assert halved["guided/loss"] == pytest.approx(stats["guided/loss"], rel=1e-5)
    assert halved["guided/logratio"] == pytest.approx(stats["guided/logratio"], rel=1e-3, abs=1e-5)


def test_attempts_are_compared_with_known_failures_in_turn_and_pairs_stay_together(scene):
    group = scene[1][2]
    known = [replace(group.rollouts[0], index=i, correct=c) for i, c in enumerate((None, False, True, False))]
    second = [replace(group.aside[0], index=4 + i) for i in range(3)]
    pairs = guided._pairs(replace(group, rollouts=tuple(known), aside=tuple(second)), False)
    assert [(one.index, other.index) for one, other in pairs] == [(4, 1), (5, 3), (6, 1)]
    policy, groups, folder = scene
    config = of(folder, DPO)
    second = second_of(policy, split(groups, 1)[0], config)
    (micro,) = second.part.batches
    pieces = micro.pieces[0]
    apart = replace(pieces, answers=pieces.answers[:1], rollouts=pieces.rollouts[:1], units=pieces.units[:1])
    with pytest.raises(TrainingError, match=r"lower train\.tokens_per_batch, or set algo\.guided\.loss=sft"):
        guided.retry_batch(second.part, type(micro)([apart], micro.batch), torch.zeros(3), None, True)


@pytest.mark.slow
@pytest.mark.parametrize("algo, history", [(SFT, "last:1"), (DPO, "full")], ids=["sft", "dpo"])
def test_episodes(tiny_models, algo, history):
    """Observations are context; a cut history gives several rows an attempt."""
    def config(**train):
        return settings(tiny_models[TWO[0]], algo=algo, episode={"history": history},
                        train={"max_grad_norm": 1e9, **train})
    policy, encode = load(config())
    policy.keep_reference()
    groups = attempted(credit(played(policy, encode, config(), 3), grpo))
    (whole,), stats, _ = gradients(policy, groups, config(tokens_per_batch=10**6))
    (parts,), _, _ = gradients(policy, groups[::-1], config(tokens_per_batch=300))
    assert_close(parts, whole)
    (second,) = [r for g in groups for r in second_attempts(g)]
    assert stats["guided/attempts"] == 1 and np.isfinite(stats["guided/loss"])
    if algo is SFT:
        assert stats["guided/logratio"] == pytest.approx(0.0, abs=1e-4)  # these were sampled under the plain prompt
        assert second.completion.loss_mask.sum() < len(second.completion.tokens)


def main(folder, out):
    """Gradients of one update under each loss, its groups dealt to the processes; rank 0 saves them."""
    found = []
    for algo in (SFT, DPO):
        config = of(folder, algo)
        policy, encode = load(config)
        policy.keep_reference()
        groups, recorder = attempted(credited_groups(policy, encode, config)), Recorder(policy)
        stats, _ = update(policy, recorder, groups[comm.rank()::comm.world()], config, step=0)
        found.append((recorder.steps[0], stats))
    if comm.is_main():
        torch.save(found, out)


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tiny_models, tmp_path):
    main(tiny_models[TWO[0]], tmp_path / "one")
    forked.run(["-m", "tests.training.test_guided", tiny_models[TWO[0]], tmp_path / "two"], ENV, ROOT, 300,
               2).check_returncode()
    for one, two in zip(*(torch.load(tmp_path / name, weights_only=True) for name in ("one", "two")), strict=True):
        assert_close(two[0], one[0])
        same = ("guided/loss", "guided/attempts", "guided/logratio")
        assert [two[1][k] for k in same] == pytest.approx([one[1][k] for k in same], rel=1e-5, abs=1e-6)


if __name__ == "__main__":
    main(*sys.argv[1:])
