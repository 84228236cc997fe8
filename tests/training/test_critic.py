"""The critic in the update: what it reads, whose gradient it changes, and that it comes back from a checkpoint."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.e2e.replay import replayed
from tests.e2e.runs import broken_at, finished, goes_on_exactly, metrics, weights, write_config
from tests.environments.acting import played
from tests.helpers import credited_groups, load, settings
from tests.training.critic_scene import CRITIC, learned, main, scene
from tests.training.test_update import assert_close
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.methods.critic.method import with_values
from vlrl.models import logprobs, packing
from vlrl.models.sharding.launch import check
from vlrl.store import checkpoint
from vlrl.training import inert
from vlrl.training.advantages import Credit
from vlrl.training.loop import train
from vlrl.training.sft import supervised_config
from vlrl.training.update import NonFinite, make_optimizer, update

FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def made(tiny_models):
    policy, encode, config = scene(tiny_models[FAMILY])
    return policy, credited_groups(policy, encode, config), tiny_models[FAMILY]


def other(folder, **more):
    return settings(folder, **{"algo": CRITIC, **more})


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_packing_order_and_micro_batches(made):
    policy, groups, folder = made
    (whole,), stats, _ = learned(policy, groups, other(folder, train={"tokens_per_batch": 10**6, "max_grad_norm": 1e9}))
    assert whole["critic.layer.weight"].abs().max() > 1e-4 and stats["critic/grad_norm"] > 0
    for groups_, train_ in ((groups, {"tokens_per_batch": 60}), (groups[::-1], {"tokens_per_batch": 200}),
                            (groups, {"packing": "padded", "tokens_per_batch": 300})):
        (parts,), again, _ = learned(policy, groups_, other(folder, train={"max_grad_norm": 1e9, **train_}))
        assert_close(parts, whole)
        assert again == pytest.approx({**stats, "mismatch/gap_max": again["mismatch/gap_max"]}, rel=1e-4, abs=1e-6)


def test_values_are_those_of_the_state_before_each_token(made):
    """The model's own hidden states, one answer at a time."""
    policy, groups, folder = made
    found = with_values(policy, groups, Algorithm(other(folder)))
    layer = policy.head.layer
    for group in found[:2]:
        for r in group.rollouts:
            piece = packing.Piece(group.prompt, (r.completion.tokens,), (0,))
            inputs = policy.inputs(packing.make_batch([piece], "padded").inputs)
            with torch.no_grad(), policy.evaluating():
                hidden = policy.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
            before = hidden[len(group.prompt) - 1:-1]
            wanted = (before @ layer.weight[0] + layer.bias)[:len(r.completion.tokens)].detach().numpy()
            assert np.abs(r.per_token["values"] - wanted).max() < 1e-5 * max(1.0, np.abs(wanted).max())
            assert r.old_logprobs is None  # one optimizer step: they are those of the update


def test_coef_is_the_share_of_the_policy_alone(made):
    policy, groups, folder = made
    found = {}
    for coef in (0.0, 0.5, 1.0):
        policy.head.settings = replace(policy.head.settings, coef=coef)
        (found[coef],), _, _ = learned(policy, groups, other(folder))
    policy.head.settings = replace(policy.head.settings, coef=0.5)
    for name, none in found[0.0].items():
        half, whole = found[0.5][name], found[1.0][name]
        if name.startswith("critic."):
            assert all(torch.allclose(one, none, rtol=1e-5, atol=1e-8) for one in (half, whole))
        else:
            assert (2 * (half - none) - (whole - none)).abs().max() <= 1e-4 * (whole - none).abs().max() + 1e-7, name
    assert any((found[1.0][n] - g).abs().max() > 1e-3 * g.abs().max() for n, g in found[0.0].items())


def test_the_critic_warms_up_alone(tiny_models):
    policy, encode, config = scene(tiny_models[FAMILY], algo={"advantage": "gae", "critic": {"warmup": 1, "lr": 1e-2}})
    groups, optimizer, algorithm = credited_groups(policy, encode, config), make_optimizer(policy, config), None
    algorithm = Algorithm(config)
    credit = Credit(algorithm, config, policy)
    def step(number):
        before = {n: p.detach().clone() for n, p in policy.trainable()}, policy.head.layer.weight.detach().clone()
        stats, _ = update(policy, optimizer, credit(groups, number), config, number, algorithm)
        moved = sum(not torch.equal(p, before[0][n]) for n, p in policy.trainable())
        return moved, not torch.equal(policy.head.layer.weight, before[1]), stats
    moved, critic_moved, stats = step(0)
    assert (moved, critic_moved) == (0, True)  # not even by weight decay
    assert stats["grad_norm"] == 0 and stats["critic/grad_norm"] > 0 and math.isfinite(stats["loss"])
    assert all(not optimizer.state[p] for _, p in policy.trainable())
    moved, critic_moved, stats = step(1)
    assert moved == len(policy.trainable()) and critic_moved and stats["grad_norm"] > 0


def test_metrics_by_hand_and_a_rate_of_its_own(made):
    policy, _, folder = made
    last = make_optimizer(policy, other(folder)).param_groups[-1]
    assert last["params"] == list(policy.head.parameters()) and last["weight_decay"] == 0
    assert last["ratio"] * 1e-3 == pytest.approx(policy.head.settings.lr)
    policy, groups, folder = made
    _, stats, credited = learned(policy, groups, other(folder))
    rollouts = [r for g in credited for r in g.rollouts]
    values, targets = (np.concatenate([r.per_token[name] for r in rollouts]) for name in ("values", "targets"))
    assert stats["critic/value_mean"] == pytest.approx(values.mean(), rel=1e-5)
    assert stats["critic/target_mean"] == pytest.approx(targets.mean(), rel=1e-5)
    assert stats["critic/loss"] == pytest.approx(0.5 * ((values - targets) ** 2).mean(), rel=1e-4)
    assert stats["critic/explained_variance"] == pytest.approx(1 - np.var(targets - values) / np.var(targets), rel=1e-3)
    assert stats["critic/clip_frac"] == 0
    advantages = np.concatenate([r.advantage for r in rollouts])
    raw = targets - values
    assert np.allclose(advantages, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-4)


def test_one_pass_finds_values_and_old_log_probabilities(made, monkeypatch):
    policy, groups, folder = made
    config = other(folder, rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, "minibatches": 2})
    calls = []
    plain = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda *a, **k: calls.append(torch.is_grad_enabled()) or plain(*a, **k))
    steps, stats, credited = learned(policy, groups, config)
    assert calls.count(False) == 1 and calls.count(True) == len(steps) == 2
    for r in (r for g in credited for r in g.rollouts):
        assert np.abs(r.old_logprobs - r.completion.logprobs).max() < 2e-5
    # what looks at other statistics of the old weights has the pass of the update
    calls.clear()
    _, again, credited = learned(policy, groups, other(folder, rollout=config.rollout.model_dump(),
                                                       store={"alternatives": 2}))
    assert calls.count(False) == 2 and all(r.old_logprobs is None for g in credited for r in g.rollouts)
    assert again["grad_norm"] == pytest.approx(stats["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_turns_of_episodes(tiny_models):
    """The critic of turns is trained on the first token of each action alone, also where history is cut."""
    policy, encode, config = scene(
        tiny_models[FAMILY], algo={"advantage": "turn_gae", "critic": {"gamma": 0.9}}, episode={"history": "last:1"},
        limits={"environment_errors": 1.0})
    (gradients,), stats, credited = learned(policy, played(policy, encode, config, 2), config)
    for r in (r for g in credited for r in g.rollouts):
        known = np.flatnonzero(~np.isnan(r.per_token["targets"])).tolist()
        assert known == [t.start for t in r.completion.actions] and (r.per_token["values"][known] != 0).all()
        assert len({float(r.advantage[t.start]) for t in r.completion.actions}) > 1
    assert gradients["critic.layer.weight"].abs().max() > 0 and stats["critic/loss"] > 0
    (again,), _, _ = learned(policy, [replace(g, rollouts=g.rollouts[::-1]) for g in credited], config.model_copy(
        update={"train": config.train.model_copy(update={"packing": "padded"})}))
    assert_close(again, gradients)


def test_a_huge_reward_stops_before_the_weights(made):
    policy, groups, folder = made
    first, *rest = groups[0].rollouts
    spoiled = [replace(groups[0], rollouts=(replace(first, reward=1e30), *rest)), *groups[1:]]
    config = other(folder, algo={**CRITIC, "critic": {"clip": None}}, limits={"nonfinite_steps": 0})
    clip, policy.head.clip = policy.head.clip, None
    with pytest.raises(NonFinite, match="the loss is not finite"):
        learned(policy, spoiled, config)
    policy.head.clip = clip
    for parameter in (*(p for _, p in policy.trainable()), *policy.head.parameters()):
        parameter.grad = None


def test_what_cannot_be_is_refused():
    for kind in ("zero2", "zero3"):
        with pytest.raises(ConfigError, match=f"{kind} cannot be combined with algo.critic.*=fsdp2.*=null.*=grpo"):
            check(settings("m", algo=CRITIC, train={"sharding": kind}))
    assert supervised_config(settings("m", algo=CRITIC)).algo.critic is None


def test_models_and_advantages_that_give_no_values_are_refused(made, monkeypatch, tmp_path):
    policy, groups, folder = made
    monkeypatch.setattr(logprobs, "_RUN_WHOLE", {type(policy.base)})
    with pytest.raises(ConfigError, match=r"how to get the hidden states.*algo.critic=null"):
        with_values(policy, groups, Algorithm(other(folder)))
    monkeypatch.undo()
    (tmp_path / "own.py").write_text("from vlrl.algo.inputs import requires\n\n@requires('values')\ndef own(s):\n"
                                     "    assert len(s.per_token) == len(s.rewards)\n    return s.rewards\n")
    config = other(folder, algo={"advantage": f"{tmp_path}/own.py:own", "critic": {}})
    with pytest.raises(ConfigError, match=r"returns no targets for the critic: return inputs.Estimates"):
        Credit(Algorithm(config), config, policy)(groups, 0)


@pytest.mark.parametrize("words, found", [
    ({"critic": {"clip": 0.1}}, {"algo.critic.clip"}), ({"critic": {}}, set()),
    ({"critic": {"warmup": 100}}, {"algo.loss"})])
def test_what_cannot_act_is_said(words, found):
    config = settings("m", algo={"advantage": "gae", "loss": "reinforce", **words}, steps=100)
    assert {one.setting for one in inert.find(config)} == found


SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.samples=0",
         "save.every=2", "save.keep=9", "log.samples_every=0", "data.workers=0", "train.lr=1e-3", "algo.advantage=gae",
         "algo.critic={lr: 1.0e-3, lam: 0.9}", "rollout.minibatches=2")
CASES = {"lora, KL in the reward": ("model.lora.rank=4", "algo.kl_coef=0.05", "algo.kl_in=reward"),
         "broken in the warm-up, a reference that moves": (
             "algo.critic.warmup=3", "algo.kl_coef=0.05", "algo.reference={name: ema, decay: 0.8, every: 2}")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_exactly(tmp_path, case):
    ran = []
    folder = goes_on_exactly(lambda folder, steps: ran.append(train(configs.load("configs/quickstart.yaml", [
        *SMALL, *CASES[case], f"run.dir={folder}", f"steps={steps}"]))), tmp_path, 2)
    whole, broken = (checkpoint.load_state(path / "checkpoints/step-000005")["algorithm"]["critic"]
                     for path in (folder, tmp_path / "broken"))
    assert all(torch.equal(v, broken[k]) and v.any() for k, v in whole.items())
    assert all(torch.equal(v, whole[k]) for k, v in ran[0].parts.policy.head.state_dict().items())
    lines = metrics(folder)
    assert all(math.isfinite(line["critic/loss"]) and "critic/explained_variance" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ("async.max_staleness=1", "algo.correction=token_truncate", "model.dtype=bfloat16"),
    ("rollout.forget={lr: 1.0e-4}", "algo.correction=token_truncate", "algo.advantage=turn_gae"),
    ("model.dtype=float16", "algo.mask_truncated=true", "store.alternatives=2")],
    ids=lambda words: words[0].partition("=")[0])
def test_what_goes_with_it(tmp_path, words):
    train(configs.load("configs/quickstart.yaml", [*SMALL, *words, f"run.dir={tmp_path}", "steps=3", "save.every=0"]))
    lines = metrics(tmp_path)
    assert len(lines) == 3 and all(math.isfinite(line["critic/loss"]) for line in lines)
    assert lines[-1]["critic/value_mean"] != 0


SEVERAL = {"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, "minibatches": 2}
PROCESSES = {
    "dealt": ("dealt", {"train": {"tokens_per_batch": 120, "max_grad_norm": 1e9}}),
    "sharded, lora, several steps": ("sharded", {"model": {"lora": {"rank": 4}}, "rollout": SEVERAL}),
    "sharded, idle, several steps": ("sharded idle", {"rollout": SEVERAL}),
    "sharded episodes": ("sharded episodes", {"algo": {"advantage": "bilevel_gae", "critic": {"gamma": 0.9}},
                                              "limits": {"environment_errors": 1.0}})}


@pytest.fixture(scope="module")
def found(tiny_models, tmp_path_factory):
    """What one process and what two find in each case."""
    folder, cases = str(tiny_models[FAMILY]), {}
    for case, (how, more) in PROCESSES.items():
        more = {**more, "model": {"name": folder, **more["model"]}} if "model" in more else more
        cases[case] = folder, how, more
    return replayed(tmp_path_factory.mktemp("replays"), cases, main, "tests.training.critic_scene")


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES)
def test_gradients_of_one_and_two_processes(found, case):
    one, two = found[case]
    names = [name for name in one["stats"] if not name.startswith("mismatch/")]
    assert {k: two["stats"][k] for k in names} == pytest.approx({k: one["stats"][k] for k in names}, rel=1e-4, abs=1e-6)
    assert len(one["gradients"]) == len(two["gradients"]) > 0
    for whole, of_two in zip(one["gradients"], two["gradients"], strict=True):
        assert_close(of_two, whole)
        assert of_two["critic.layer.weight"].abs().max() > 0


@pytest.mark.slow
def test_a_sharded_run_goes_on_exactly(tiny_models, tmp_path):
    words = ("train.sharding=fsdp2", "save.every=2", "eval.samples=0", "steps=4", "rollout.prompts_per_step=2",
             "rollout.group_size=2", "algo.advantage=gae", "algo.critic={lr: 1.0e-3, lam: 0.9}")
    config = write_config(tmp_path, tiny_models[FAMILY])
    finished(config, tmp_path / "whole", *words, processes=2)
    broken_at(2, tmp_path)
    finished(config, tmp_path / "broken", *words, processes=2)
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "broken", 4)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    found = checkpoint.load_state(tmp_path / "whole" / "checkpoints" / "step-000004")["algorithm"]["critic"]
    assert found["layer.weight"].any()


@pytest.mark.slow
def test_the_value_error_falls_on_answers_that_it_has_not_seen(tiny_models):
    """Prompts of two kinds, one paid 1 more, answers that no update has seen: better than the best constant."""
    config = settings(tiny_models[FAMILY], algo={"advantage": "gae", "critic": {"lr": 3e-3, "clip": None, "coef": 1.0}},
                      train={"lr": 1e-4})
    policy, encode = load(config)
    algorithm, optimizer = Algorithm(config), make_optimizer(policy, config)
    credit = Credit(algorithm, config, policy)
    drawn = credited_groups(policy, encode, config.model_copy(update={
        "rollout": config.rollout.model_copy(update={"group_size": 16})}), ("text", "image"))
    paid = [replace(g, rollouts=tuple(replace(r, reward=r.reward + bool(g.prompt.mm)) for r in g.rollouts))
            for g in drawn]
    seen, held_out = ([replace(g, rollouts=g.rollouts[half]) for g in paid] for half in (slice(8), slice(8, 16)))
    def error():
        pairs = [(r.per_token["values"], r.per_token["targets"]) for g in credit(held_out, 0) for r in g.rollouts]
        values, targets = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        return float(((values - targets) ** 2).mean()), float(np.var(targets))
    before, spread = error()
    for step in range(30):
        update(policy, optimizer, credit(seen, step), config, step, algorithm)
    after, _ = error()
    assert after < 0.5 * spread < spread < before, (before, after, spread)
    assert credit.metrics()["critic/explained_variance"] > 0.5
