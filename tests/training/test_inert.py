"""Settings without an effect are named, and no preset has one."""

from dataclasses import replace
from pathlib import Path

import torch

from tests.algo.flat import bound, random_step, run
from vlrl import config
from vlrl.algo.tables import LOSSES
from vlrl.config.schema import Config
from vlrl.training import inert
from vlrl.training.build_task import make_task

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = [f"{folder}/{path.name}" for folder in ("algorithms", "curricula")
           for path in sorted((CONFIGS / folder).rglob("*.yaml"))]
ASKED_FOR = {"tis": ["engine.name=vllm_server"], "icepop": ["engine.name=vllm_server"],
             "mis": ["engine.name=vllm_server"], "decoupled_ppo": ["async.max_staleness=1"], "drive": ["steps=200"],
             "grpo_care": ["task.name=video", "task.reference=true"], "gkd": ["algo.distillation.teacher=some/model"],
             **{name: ["task=tests/environments/acting.py:Acting"]
                for name in ("gigpo", "gspo_token", "steppo", "mobgrpo", "loop", "hiper", "himac", "g_ra")}}
"""Presets that say in their comment what else they need."""


def lines(*words: str, base: str = "quickstart.yaml") -> list[str]:
    """What is inert under a config and words; answers may be long."""
    found = config.load(CONFIGS / base, ["rollout.max_new_tokens=512", *words])
    return [str(one) for one in inert.find(found, make_task(found))]


def settings(*words: str) -> set[str]:
    """The settings that are inert because of these words."""
    return {line.split()[1].partition("=")[0] for line in {*lines(*words)} - {*lines()}}


def test_no_preset_has_an_inert_setting():
    silent = {*lines()}
    for preset in PRESETS:
        name = Path(preset).stem
        if name == "grpo_care":
            assert not any("algo.reference" in line for line in lines(base="video/grpo_care.yaml"))
        elif name == "thor":
            words = ["model.name=embedded/tiny-qwen3-vl", "task.rewards.tool_success=0"]
            found = {*lines(f"extends={preset}", *words, base="zoom.yaml")}
            assert not found - {*lines(*words[:1], base="zoom.yaml")}
        else:
            assert not {*lines(f"extends={preset}", *ASKED_FOR.get(name, []))} - silent, name


def test_with_one_optimizer_step_what_a_preset_is_about_is_named():
    for name in ("cispo gspo gmpo dppo kimi rover sapo kl_cov vespo dual_clip two_sided luspo dapo deepseek_v3_2 "
                 "stable_reinforce").split():
        found = settings(f"extends=algorithms/{name}.yaml", "rollout.minibatches=1")
        assert found and all(setting.startswith(("algo.loss", "algo.weights.0")) for setting in found), name


def test_no_shipped_config_has_a_clip_that_never_acts():
    for base in ("qa/glm_v_rlcs.yaml", "gui/glm_v_androidworld.yaml"):
        found = lines("rollout.max_new_tokens=4096", base=base)
        assert not [line for line in found if "clip" in line or "algo.loss" in line]
    for base in ("qa/kimi_k1_5.yaml", "preference/r1_reward.yaml"):
        assert not any("algo.loss" in line for line in lines(base=base))


def test_what_tells_turns_apart_does_nothing_where_answers_have_one():
    for name, named in (("gigpo", {"algo.advantage"}), ("steppo", {"algo.advantage", "algo.loss"}),
                        ("hiper", {"algo.advantage"}), ("himac", set()), ("thor", {"algo.advantage"}),
                        ("g_ra", {"algo.advantage"})):
        assert settings(f"extends=algorithms/{name}.yaml") == named, name
    (line,) = lines("extends=algorithms/thor.yaml", "task=tests/environments/acting.py:Acting")
    assert "no part 'tool_success'" in line
    assert not lines("extends=algorithms/thor.yaml", "algo.advantage.part=vowels",
                     "task=tests/environments/acting.py:Acting")


PLAIN = {"task": "grounding", "model": {"name": "x"}}
SEVERAL = "rollout.minibatches=4"


NAMED = [
    (["algo.clip_low=0.1"], {"algo.clip_low"}),
    (["log.pictures=2"], {"log.pictures"}), (["log.pictures=2", "log.trackers=[tensorboard]"], set()),
    (["algo.loss.dual_clip=3"], {"algo.loss.dual_clip"}),
    (["algo.loss=gspo", "algo.clip_high=0.1"], {"algo.loss", "algo.clip_high"}),
    (["algo.loss=clip_cov"], set()), (["algo.loss=reinforce"], set()),
    (["algo.loss={name: vespo, from_sampler: true}"], {"algo.loss"}),
    (["algo.loss={name: vespo, from_sampler: true}", "engine.name=vllm_server"], set()),
    (["algo.clip_low=0.1", SEVERAL], set()), (["algo.clip_low=0.1", "rollout.updates=2"], set()),
    # a bound that is never reached
    (["algo.clip_low=1", SEVERAL], {"algo.clip_low"}), (["algo.loss={name: gmpo, clip_low: 1}", SEVERAL], set()),
    (["algo.loss={name: dppo_tv, delta_low: 1.5}", SEVERAL], {"algo.loss.delta_low"}),
    (["algo.loss={name: ppo_clip, delta: 4, dual_clip: 5}", SEVERAL], {"algo.loss.dual_clip"}),
    (["algo.loss={name: cispo, cap: 5}", "algo.clip_high=9", SEVERAL], {"algo.clip_high"}),
    (["algo.loss={name: cispo, cap: 5}", "algo.clip_high=2", SEVERAL], {"algo.loss.cap"}),
    # a term with a credit of its own
    (["algo.loss=nft", "algo.advantage=rloo", "algo.shaping=[overlong]"], {"algo.advantage", "algo.shaping.0"}),
    (["algo.loss=pacs", "algo.kl_in=reward", "algo.kl=k1", "algo.kl_coef=0.1"], {"algo.kl_coef"}),
    (["algo.loss=nft", "algo.advantage=rloo", "algo.weights=[hicra]", "algo.shaping=[cosine]"], set()),
    (["algo.loss=nft", "algo.advantage=rloo", "algo.weights=[tests.test_inert:own]"], set()),
    (["algo.loss=nft", "algo.shaping=[tests.test_inert:own]"], {"algo.shaping.0"}),
    (["algo.loss=nft", "algo.shaping=[tests.test_inert:own]", "algo.batch=rorecomp"], set()),
    (["algo.loss=reinforce", "algo.advantage=nsr", "algo.shaping=[cosine]", "algo.kl_coef=0.1", "algo.kl=k1",
      "algo.kl_in=reward"], {"algo.shaping.0", "algo.kl_coef"}),
    (["algo.loss=reinforce", "algo.advantage=nsr", "algo.shaping=[tests.test_inert:own]"], set()),
    (["algo.loss=reinforce", "algo.advantage=nsr", "algo.shaping=[cosine]", "algo.batch=tests.test_inert:own"], set()),
    # KL and reference
    (["algo.kl_target=0.1"], {"algo.kl_target"}), (["algo.kl=k2"], {"algo.kl"}),
    (["algo.kl_horizon=9"], {"algo.kl_horizon"}), (["algo.kl_in=reward"], {"algo.kl_in"}),
    (["algo.kl_weights=[dads]"], {"algo.kl_weights"}),
    (["algo.kl=k2", "algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_weights=[dads]"], {"algo.kl", "algo.kl_weights"}),
    (["algo.kl=k1", "algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_target=0.1", "algo.kl_horizon=9"], set()),
    (["algo.kl_coef=0.1", "algo.reference={name: reset, every: 1}"], {"algo.kl_coef"}),
    (["algo.kl_coef=0.1", "algo.reference={name: reset, every: 1}", SEVERAL], set()),
    (["algo.kl_coef=0.1", "algo.kl_in=reward", "algo.kl=k1", "algo.reference={name: reset, every: 1}",
      "model.dtype=float32", SEVERAL], {"algo.kl_coef"}),
    (["algo.kl_coef=0.1", "algo.reference={name: reset, every: 1}", "model.lora.rank=4", "model.lora.dropout=0.1"],
     set()),
    (["algo.reference=ema"], {"algo.reference"}), (["algo.reference=ema", "algo.kl_coef=0.1"], set()),
    (["algo.reference=reset"], set()), (["algo.reference={name: reset, optimizer: false}"], {"algo.reference"}),
    # entropy, weights, correction
    (["algo.entropy={name: bonus, coef: 0}"], {"algo.entropy"}), (["algo.entropy=bonus"], set()),
    (["algo.entropy={name: temperature, low: 1, high: 1}"], {"algo.entropy"}),
    (["algo.entropy={name: e3, low: 1, high: 1}"], {"algo.entropy"}),
    (["algo.entropy={name: temperature, low: 0.7, high: 0.7}"], set()),  # not that of the first step
    (["algo.weights=[{name: hicra, alpha: 0}, {name: top_entropy, share: 1}]"], {"algo.weights.0", "algo.weights.1"}),
    (["algo.weights=[{name: difficulty, low: 1, high: 1}, top_entropy]"], {"algo.weights.0"}),
    (["algo.weights=[off_policy_sequence_mask]"], {"algo.weights.0"}),
    (["algo.weights=[off_policy_sequence_mask]", SEVERAL], set()),
    (["algo.correction=token_mask", "model.dtype=float32"], {"algo.correction"}),
    (["algo.correction=token_mask", "model.dtype=bfloat16"], set()),
    (["algo.correction=token_mask", "model.dtype=float32", "async.max_staleness=1"], set()),
    (["algo.correction=token_mask", "model.dtype=float32", "rollout.step_tokens=64"], set()),
    (["algo.correction=token_mask", "model.dtype=float32", "model.lora.rank=4", "model.lora.dropout=0.1"], set()),
    (["algo.correction={name: token_truncate, low: 0, high: 1.0e+9}", "model.dtype=bfloat16"],
     {"algo.correction.low", "algo.correction.high"}),
    (["algo.correction={name: token_mask, low: 0.5, high: 5}", "model.dtype=bfloat16"], set()),
    # shaping, batch, reward parts
    (["algo.shaping=[{name: step_pruner, weight: 0}]"], set()),  # it withholds what wrong answers earned
    (["algo.shaping=[{name: overlong, weight: 0}]"], {"algo.shaping.0"}),
    (["algo.shaping=[{name: overlong, limit: 2000}]"], {"algo.shaping.0"}),
    (["algo.shaping=[{name: kimi_length, after: 9}]", "steps=9"], {"algo.shaping.0"}),
    (["algo.shaping=[length_bonus]", "rollout.max_new_tokens=24"], {"algo.shaping.0"}),
    (["algo.shaping=[length_bonus, cosine]"], {"algo.shaping.0"}), (["algo.shaping=[cosine, length_bonus]"], set()),
    (["algo.shaping=[length_bonus, {name: cosine, correct: 0.4}]"], set()),
    (["algo.shaping=[length_bonus, tests.test_inert:own, grsp, cosine]"], {"algo.shaping.2"}),
    (["algo.batch={name: rorecomp, keep: 1}"], {"algo.batch"}), (["algo.batch=rorecomp"], set()),
    (["algo.batch={name: rorecomp, floor: 1}"], {"algo.batch"}),
    (["algo.batch={name: rorecomp, floor: 1, buffered: true}"], set()),
    (["algo.stored={coef: 0}"], {"algo.stored"}), (["algo.stored={}"], set()),
    (["algo.stored={logprobs: own}"], {"algo.stored.rule"}),
    (["algo.stored={logprobs: own}", "rollout.minibatches=2"], set()),
    (["algo.stored={logprobs: own, rule: copg}"], set()),
    (["task.rewards.iou=0", "task.rewards.format=1"], {"task.rewards.iou"}),
    *[([*word, "task.rewards.iou=0", "task.rewards.format=1"], set()) for word in (
        ["algo.loss=nft"], ["algo.shaping=[kimi_length]"], ["algo.stored={batch: right}"],
        ["algo.stored={rule: webrl}"], ["algo.advantage=nsr"], ["algo.weights=[stcr]"],
        ["curriculum.keep=pass_range"], ["curriculum.name=prioritised"])],
    # the curriculum
    (["curriculum.select=nearest_half"], {"curriculum.select"}),
    (["curriculum.select=nearest_half", "curriculum.oversample=2"], set()),
    (["curriculum.oversample=2"], {"curriculum.oversample"}),
    (["curriculum.keep={name: pass_range, low: 0, high: 1}"], {"curriculum.keep"}),
    (["curriculum.keep=pass_range"], set()),
    (["curriculum.name=replay", "curriculum.share=0"], {"curriculum.name"}),
    (["curriculum.name=retrospective", "curriculum.carry=0"], {"curriculum.name"}),
    (["curriculum.name=hard_focus", "steps=100"], {"curriculum.name"}),
    (["curriculum.name=hard_focus", "steps=101"], set()),
    (["curriculum.name=hard_focus", "steps=101", "curriculum.share=1", "curriculum.group_size=8",
      "rollout.group_size=8"], {"curriculum.name"}),
    (["curriculum.name=gvm", "curriculum.least=4", "curriculum.most=4", "rollout.group_size=4"], {"curriculum.name"}),
    # what belongs to other second attempts
    (["algo.loss=critique_grpo"], {"algo.loss"}),
    (["extends=algorithms/ghpo.yaml", "algo.guided.answers=3", "algo.guided.coef=2"],
     {"algo.guided.answers", "algo.guided.coef"}),
    (["extends=algorithms/egsr.yaml", "algo.guided.loss=dpo"], {"algo.guided.loss"}),
    (["extends=algorithms/expo.yaml", "algo.guided.coef=2"], set()),
    (["extends=algorithms/critique_grpo.yaml", "algo.guided.use=hinted"], {"algo.loss"}),
    (["extends=algorithms/relift.yaml", "algo.demonstrations.rows=4"], {"algo.demonstrations.rows"}),
    # a buffer without a stream
    (["data.shuffle_buffer=50"], {"data.shuffle_buffer"}), (["data.shuffle_buffer=50", "data.stream=true"], set()),
    (["data.stream=true", "curriculum=sequential"], {"data.shuffle_buffer"})]


def test_what_is_named():
    silent = {*lines()}
    for words, named in NAMED:
        assert {line.split()[1].partition("=")[0] for line in {*lines(*words)} - silent} == named, words


def test_a_line_says_setting_value_and_reason():
    assert any("task.rewards.format=0" in line for line in lines())
    assert not any("task.rewards" in line for line in lines("curriculum.part=format"))
    (found,) = inert.find(Config.model_validate(PLAIN))
    assert str(found) == ("inert: algo.loss=ppo_clip (there is one optimizer step per batch, so p / p(old) is 1 and "
                          "its gradient is that of algo.loss=reinforce; raise rollout.minibatches or rollout.updates)")
    assert not inert.find(Config.model_validate({**PLAIN, "algo": {"loss": "supervised"}}))
    own = {"loss": "tests.training.test_inert:own", "shaping": ["tests.training.test_inert:own"],
           "weights": ["tests.training.test_inert:own"]}
    assert not inert.find(Config.model_validate({**PLAIN, "algo": own}))


def own(x):
    return x


RATIOS = {name: LOSSES[name].ratio for name in LOSSES if hasattr(LOSSES[name], "ratio")}

OTHER = {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": 1.1, "delta": 1.06, "cap": 1.1, "tau_positive": 3.0,
         "tau_negative": 2.0, "k_positive": 1.0, "lambda_positive": 1.0, "k_negative": 1.0, "lambda_negative": 1.0,
         "tau": 0.5, "delta_low": 0.01, "delta_high": 0.01, "pre_clip": 1.1, "share": 0.5, "coef": 3.0,
         "decay": 7, "floor": 0.99, "tokens": 2}
"""A value of each option that differs from its default."""
WIDE = {"kl_cov": {"share": 0.3}, "clip_cov": {"share": 0.3, "cov_low": -1.0}, "stable_reinforce": {"sigma": 1.0}}
"""Options with which a few tokens are enough."""


def slope(name, on_policy, **options):
    """d loss / d logp of a term, [N]."""
    x = random_step(5, gap=1.0)
    x = replace(x, variants={"guided": torch.arange(len(x.lengths)) % 3 == 0})  # of critique_grpo alone
    if on_policy:
        x = replace(x, old_logprobs=x.logprobs.detach(), old_stats={})
    values, _ = run(bound(LOSSES, name, **{**WIDE.get(name, {}), **options}), x)
    return torch.autograd.grad((values * x.mask).sum(), x.logprobs)[0]


def test_what_is_said_of_the_ratio_is_so():
    for name, option in [(n, o) for n, said in RATIOS.items() for o in said.options]:
        more = {option: 0.1 if name == "cispo" and option != "cap" else OTHER[option]}
        assert torch.allclose(slope(name, True), slope(name, True, **more)), (name, option)
        assert not torch.allclose(slope(name, False), slope(name, False, **more)), (name, option)
    for name in (*RATIOS, "nft", "pacs", "oreal", "reinforce"):
        cosines = [float(torch.cosine_similarity(slope(name, on_policy), slope("reinforce", on_policy), dim=0))
                   for on_policy in (True, False)]
        alone = name == "reinforce" or (name in RATIOS and RATIOS[name].alone)
        assert [cosine > 1 - 1e-9 for cosine in cosines] == [alone, name == "reinforce"], name
    x = random_step(5)
    for name in ("nft", "pacs", "oreal", "ppo_clip"):
        one, two = (run(bound(LOSSES, name), replace(x, advantages=factor * x.advantages))[0] for factor in (1.0, -2.0))
        assert torch.equal(one, two) == (getattr(LOSSES[name], "alone", None) == {}), name
