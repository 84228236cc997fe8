"""Second attempts as members of their groups, and ReLIFT's steps: gradients, and steps in which each acts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import TWO
from tests.e2e.runs import assert_same_run, broken_at
from tests.helpers import credited_groups, load, second_of, settings
from tests.training.test_update import assert_close, gradients, taken
from vlrl import config as configs
from vlrl.algo.advantage import grpo
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.statistics import statistics
from vlrl.config.sections import GUIDED
from vlrl.curriculum import Draw, Outcome
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations.draw import DemonstrationSampler
from vlrl.methods.second_attempts import method as guided
from vlrl.methods.second_attempts.members import USES, hinted, join, mark_moved, replace_wrong, second_attempts
from vlrl.models.packing import make_batch, pieces_of
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.training.advantages import credit
from vlrl.training.loop import train
from vlrl.training.minibatch import split
from vlrl.training.update import make_optimizer, update
from vlrl.types import Sample

TOLD = "Think of vowels, and of nothing else."


class AcceptedDraw(Task):
    prompt = "{q}"


@pytest.fixture(scope="module")
def scene(tiny_models):
    """Groups of two wrong answers, with two attempts under a longer prompt beside each: one right, one wrong."""
    folder = tiny_models[TWO[0]]
    policy, encode = load(settings(folder))
    groups = []
    for g in credited_groups(policy, encode, settings(folder, rollout={"group_size": 4, "prompts_per_step": 6,
                                                                        "max_new_tokens": 8})):
        longer = encode(AcceptedDraw(), g.sample, TOLD)
        members = [replace(r, correct=False, reward=0.1 * i) for i, r in enumerate(g.rollouts[:2])]
        second = [replace(r, variant=GUIDED, correct=not i, trained=not i, reward=1.0 - i, advantage=0.0,
                          train_prompt=longer, sampled_prompt=longer.text) for i, r in enumerate(g.rollouts[2:])]
        groups.append(replace(g, rollouts=tuple(members), aside=tuple(second)))
    return policy, groups, folder


def plainly(groups):
    """Attempts that are trained under the prompt without guidance."""
    return [replace(g, aside=tuple(replace(r, train_prompt=g.prompt) for r in g.aside)) for g in groups]


def of(folder, use, loss="ppo_clip", train=None, **rollout):
    return settings(folder, algo={"guided": {"words": "solution", "use": use}, "loss": loss},
                    train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6, **(train or {})}, rollout={
                        "group_size": 2, "prompts_per_step": 6, "max_new_tokens": 8, **rollout})


def credited(use, groups):
    return credit([USES[use](g) for g in groups], grpo)


def taught(scene, use):
    return credited(use, scene[1] if use == "hinted" else plainly(scene[1]))


def by_hand(policy, groups, term):
    """Gradient of sum term(logp, advantage, guided) / tokens, an answer at a time under the prompt of its training."""
    rows = [(r.train_prompt or g.prompt, r) for g in groups for r in g.rollouts]
    total = sum(len(r.completion.tokens) for _, r in rows)
    for prompt, r in rows:
        logp = policy.logprobs(make_batch(pieces_of([prompt], [r.completion.tokens], 10**6)), 1.0).logprobs
        (term(logp, float(r.advantage), r.train_prompt is not None).sum() / total).backward()
    return taken(policy)


def reinforce(logp, advantage, guided):
    return -advantage * logp


def critiqued(logp, advantage, guided):
    p = logp.exp()
    return -advantage * p / (p + 0.1) if guided else -advantage * logp


@pytest.mark.parametrize("use, loss, term", [("replace", "ppo_clip", reinforce), ("hinted", "ppo_clip", reinforce),
                                             ("join", "critique_grpo", critiqued)])
def test_the_gradient_is_that_of_one_answer_at_a_time(scene, use, loss, term):
    """In one optimizer step every ratio is 1: egsr's attempts are answers of the group, read under the question."""
    policy, _, folder = scene
    groups = taught(scene, use)
    wanted = by_hand(policy, groups, term)
    assert max(v.abs().max() for v in wanted.values()) > 1e-4
    for how in ({}, {"packing": "padded", "tokens_per_batch": 300}, {"tokens_per_batch": 80}):
        (found,), _, _ = gradients(policy, groups, of(folder, use, loss, how))
        assert_close(found, {**{n: torch.zeros_like(v) for n, v in found.items()}, **wanted})




@pytest.mark.parametrize("use", ["join", "replace"])
def test_the_words_behind_the_question_get_no_credit(scene, use):
    """Other words, and other log-probabilities under them: the gradient is the same, bit for bit."""
    policy, _, folder = scene
    groups = taught(scene, use)
    moved = [replace(g, rollouts=tuple(replace(r, sampled_prompt="other", completion=replace(
        r.completion, logprobs=r.completion.logprobs - 3)) if r.variant == GUIDED else r for r in g.rollouts))
        for g in groups]
    config = of(folder, use)
    assert second_of(policy, split(groups, 1)[0], config) is None
    (one,), stats, _ = gradients(policy, groups, config)
    (two,), again, _ = gradients(policy, moved, config)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert again["mismatch/kl"] == stats["mismatch/kl"]  # attempts are not compared with their sampler


def test_other_answers_under_another_prompt_are_no_second_attempts(scene):
    """Those to a noisy picture, which are trained under the plain one too, are clipped as any."""
    policy, _, folder = scene
    groups = [replace(g, rollouts=tuple(replace(r, variant="noisy") if r.variant == GUIDED else r for r in g.rollouts))
              for g in taught(scene, "join")]
    (found,), *_ = gradients(policy, groups, of(folder, "join", "critique_grpo"))
    (plain,), *_ = gradients(policy, groups, of(folder, "join"))
    assert all(torch.equal(found[n], plain[n]) for n in plain)


def test_under_a_hint_only_the_sampled_tokens_are_trained(scene):
    policy, _, folder = scene
    groups = taught(scene, "hinted")
    assert all(len(g.prompt) > len(before.prompt) for g, before in zip(groups, scene[1], strict=True))
    _, _, per_token = gradients(policy, groups, of(folder, "hinted"))
    rows = [r for g in groups for r in g.rollouts]
    assert [len(v) for v in per_token["trainer_logprobs"]] == [len(r.completion.tokens) for r in rows]
    # under the plain prompt these are other numbers
    plain = [replace(g, prompt=before.prompt) for g, before in zip(groups, scene[1], strict=True)]
    (one,), *_ = gradients(policy, groups, of(folder, "hinted"))
    (two,), *_ = gradients(policy, plain, of(folder, "hinted"))
    assert max((one[n] - two[n]).abs().max() for n in one) > 1e-4


@pytest.mark.parametrize("use", ["join", "replace", "hinted"])
def test_without_a_kept_attempt_it_is_the_objective_bit_for_bit(scene, use):
    policy, groups, folder = scene
    failed = [replace(g, aside=tuple(replace(r, trained=False) for r in g.aside)) for g in groups]
    (same,), *_ = gradients(policy, credited(use, failed), of(folder, use))
    (plain,), *_ = gradients(policy, credit([replace(g, aside=()) for g in groups], grpo), settings(
        folder, train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6}))
    assert all(torch.equal(same[n], plain[n]) for n in plain)


def test_advantages_are_those_of_the_whole_group(scene):
    group = plainly(scene[1])[0]
    for use, rewards in ((join, [0.0, 0.1, 1.0]), (replace_wrong, [0.0, 1.0]), (hinted, [1.0, 0.0])):
        out, = credit([mark_moved(use(group))], grpo)
        values = np.array(rewards)
        wanted = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
        assert [float(r.advantage) for r in out.rollouts] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert sorted(r.reward for r in out.plain) == [0.0, 0.1]
        assert not second_attempts(out)


def config_of(**guided_):
    return configs.validate({"task": "x", "model": {"name": "y"}, "algo": {"guided": guided_}})


def test_rows_without_a_solution_and_words_that_episodes_lack_are_refused():
    rows = [Sample(id="a", row={}), Sample(id="b", row={"solution": "<answer>8</answer>"})]
    for words in ("hint", "solution", "answer"):
        with pytest.raises(ConfigError, match=rf"algo\.guided\.words={words} needs a given solution"):
            guided.check(config_of(words=words), Task(), rows[:1])
    with pytest.raises(ConfigError, match=r"with reasoning before its final answer: give rows a `solution`"):
        guided.check(config_of(words="hint"), Task(), rows)
    guided.check(config_of(words="answer"), Task(), rows)
    guided.check(config_of(words="critique"), Task(), rows[:1])
    for name in ("words", "keep", "use"):
        with pytest.raises(ConfigError, match=rf"algo\.guided\.{name}='other' is not known"):
            guided.check(config_of(**{name: "other"}), Task(), rows)
    class Acts(Task):
        def environment(self, sample):
            return None
    with pytest.raises(ConfigError, match=r"algo\.guided\.words=critique refers to a single answer, .* episodes"):
        guided.check(config_of(words="critique"), Acts(), [])


RELIFT = {"demonstrations": {"mix": {"name": "relift", "size": 3, "lr": 1e-3, "entropy": 0.01}}}


class Every(Task):
    prompt = "Say {id}."

    def samples(self, split):
        return [Sample(id=str(i), row={"id": str(i), **({"solution": f"it is {i}"} if i != 4 else {})})
                for i in range(9)]


def outcomes(*passed):
    return [Outcome(Draw(i, 0), (0.0,) * len(p), p) for i, p in passed]


def test_failed_prompts_are_collected(scene):
    *_, folder = scene
    config, task = settings(folder, algo=RELIFT), Every()
    algorithm, (_, encode) = Algorithm(config), load(config)
    show = DemonstrationSampler(config, task, encode, None, task.samples("train"), algorithm.methods[0].mix)
    assert show(0, outcomes((1, (False, False)), (2, (False, True)), (3, (None, False)), (4, (False,)),
                            (5, (None,)))) == []
    assert algorithm.methods[0].mix.buffer == [1, 3]  # 4 has no answer, of 5 nothing is known
    made = [Outcome(Draw(7, 0, knobs=(("n", 1.0),)), (0.0,), (False,))]
    assert show(1, [*made, *outcomes((3, (False,)))]) == []
    shown = show(2, outcomes((8, (False,)), (6, (False,))))
    assert [g.sample.id for g in shown] == ["1", "3", "8"] and algorithm.methods[0].mix.buffer == [6]
    assert [g.rollouts[0].completion.text for g in shown] == ["it is 1", "it is 3", "it is 8"]


def test_a_supervised_step_follows_with_its_own_optimizer(scene):
    """The weights are those of a step of RL and one of AdamW on the given answers' loss."""
    policy, groups, folder = scene
    config = settings(folder, algo=RELIFT, train={"max_grad_norm": 0.5, "lr": 1e-3})
    start = {n: p.detach().clone() for n, p in policy.trainable()}
    groups = [replace(g, aside=()) for g in groups]
    shown = [replace(g, rollouts=(replace(g.rollouts[0], train_prompt=g.prompt, advantage=9.0),)) for g in groups[:3]]
    try:
        _, plain = stepped(policy, groups, (), config)
        after_rl = {n: p.detach().clone() for n, p in policy.trainable()}
        wanted = supervised(policy, shown)
        restore(policy, start)
        found, stats = stepped(policy, groups, shown, config)
        assert_close(found, wanted, 1e-4)  # AdamW divides tiny gradients by their own size
        assert max((found[n] - after_rl[n]).abs().max() for n in found) > 1e-4
        assert stats["demonstrations/applied"] == 1 and stats["demonstrations/grad_norm"] > 0
        assert stats["demonstrations/tokens"] == sum(len(g.rollouts[0].completion.tokens) for g in shown)
        assert stats["demonstrations/grad_share"] == pytest.approx(
            stats["demonstrations/grad_norm"] / (stats["demonstrations/grad_norm"] + stats["grad_norm"]))
        assert plain["demonstrations/applied"] == 0 and plain["loss"] == stats["loss"]
    finally:
        restore(policy, start)


def restore(policy, weights):
    with torch.no_grad():
        for n, p in policy.trainable():
            p.copy_(weights[n])


def stepped(policy, groups, shown, config):
    stats, _ = update(policy, make_optimizer(policy, config), groups, config, 0, Algorithm(config),
                      own_groups={"algo.demonstrations": shown})
    return {n: p.detach().clone() for n, p in policy.trainable()}, stats


def supervised(policy, shown):
    """The weights after a step of AdamW on cross-entropy less 0.01 times the entropy, an answer at a time."""
    weights = [p for _, p in policy.trainable()]
    total = sum(len(g.rollouts[0].completion.tokens) for g in shown)
    for g in shown:
        batch = make_batch(pieces_of([g.prompt], [g.rollouts[0].completion.tokens], 10**6))
        found = policy.logprobs(batch, 1.0, more=statistics(["stat:entropy"]))
        (-(found.logprobs + 0.01 * found.more["entropy"]).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_([p for p in weights if p.grad is not None], 0.5)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {n: p.detach().clone() for n, p in policy.trainable()}


SOLVED = '''
from vlrl.task import Task
from vlrl.types import Sample

class Solved(Task):
    """Half the rows are never answered rightly at first; their given solutions have reasoning."""
    prompt = "Letter {n}?"
    rewards = outcome = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={"n": n, "solution": "<think>aeiou, uoiea</think><answer>a</answer>"})
                for n in range(8)]

    def score(self, sample, answer):
        kind = (sample["n"] + len(answer.text) + sum(map(ord, answer.text[:2]))) % 5
        return {"right": float(kind == 0)}
'''
PRESETS = {"ghpo": "guided/members", "egsr": "guided/members", "critique_grpo": "guided/members",
           "expo": "guided/attempts", "relift": "demonstrations/grad_share"}


def ran(folder, name, run):
    (folder / "solved.py").write_text(SOLVED)
    more = ["algo.demonstrations.mix.size=3"] if name == "relift" else []
    more += ["algo.guided.keep=correct"] if name == "expo" else []  # a random model finds few explanations good
    train(configs.load(folder / f"{name}.yaml", [
        f"run.dir={folder / run}", "steps=8", "save.every=2", "save.keep=20", "eval.samples=0",
        "log.samples_every=0", "rollout.prompts_per_step=4", "rollout.group_size=3", "rollout.max_new_tokens=6",
        "train.schedule=constant", "train.warmup=0", *more]))
    return RunFolder(folder / run)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_acts_in_eight_steps_and_goes_on_exactly(tiny_models, tmp_path, name):
    (tmp_path / f"{name}.yaml").write_text(f"extends: algorithms/{name}.yaml\ntask: {tmp_path}/solved.py:Solved\n"
                                           f"model: {{name: {tiny_models[TWO[0]]}, train: [language]}}\n")
    lines = ran(tmp_path, name, "whole").metrics()
    acted = [line.get(PRESETS[name], 0) for line in lines]
    assert len(lines) == 8 and sum(a > 0 for a in acted) > 2 and all(np.isfinite(line["loss"]) for line in lines)
    if name != "relift":
        assert sum(line["guided/tokens_frac"] > 0 for line in lines) == sum(a > 0 for a in acted)
        shares = [line["guided/tokens_frac"] for line in lines]
        assert max(shares) <= 1 > min(shares)
    rows = RunFolder(tmp_path / "whole").rollouts().to_pylist()
    assert {r["variant"] for r in rows} <= {None, "guided", "replaced"}
    broken_at(4, tmp_path)
    ran(tmp_path, name, "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "whole", 8)
