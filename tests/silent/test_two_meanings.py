"""One word, one meaning: outcomes and rewards; answers that look like numbers, formulas or letters and are texts; and
no single token that owns an optimizer step."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cosine_similarity

from tests.algo.flat import F64, bound, flat, gradient, run
from tests.helpers import credited_groups, load, settings
from tests.services.stub import PLACE, count_of, judging, says
from tests.services.test_parts import ROW, number, task_of
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.objective import Objective
from vlrl.algo.tables import KLS
from vlrl.curriculum import Draw, Outcome
from vlrl.curriculum.filters import KEEP
from vlrl.data import read_rows
from vlrl.data.coordinates import Coordinates
from vlrl.errors import TrainingError
from vlrl.monitoring.alerts import Alerts, resolved_alerts
from vlrl.monitoring.mismatch import check_mismatch
from vlrl.rewards import answers, text
from vlrl.rewards.text import parse_answer
from vlrl.task import load as load_task
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.training.advantages import Credit
from vlrl.training.update import make_optimizer, update
from vlrl.types import Completion, Group, Prompt, Rollout, Sample

AGREES = says(lambda q, body: {"verdict": "yes" if number(q["answer"]) == number(q["reference"]) else "no"})


def preference(rewards, lengths=None, correct=None, parts=None, **settings):
    """Credit.has_signal of one group with these rewards, under these settings."""
    config = configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"},
                               "rollout": {"max_new_tokens": 10}, **settings})
    def completion(n):
        ones = np.ones(n, dtype=np.int64)
        return Completion(tokens=ones, logprobs=-ones.astype(np.float32), loss_mask=ones.astype(bool), text="x" * n,
                          finish_reason="stop")
    ids = np.arange(3)
    prompt = Prompt(sample_id="1", text="?", ids=ids, raw_ids=ids, positions=ids[None])
    written = map(completion, lengths or [3] * len(rewards))
    rollouts = tuple(Rollout(group_id="g", index=i, policy_step=0, completion=done, reward=reward,
                             parts={"p": reward} if parts is None else parts[i],
                             correct=None if correct is None else correct[i])
                     for i, (done, reward) in enumerate(zip(written, rewards, strict=True)))
    group = Group(id="g", split="train", sample=Sample(id="1", row={}), prompt=prompt, rollouts=rollouts, task="t",
                  weights=dict.fromkeys(rollouts[0].parts, 1.0), target=None)
    return Credit(Algorithm(config), config).has_signal(group)


def rewards_of(judge, task, texts):
    sample = task.sample_from_row(ROW)
    return [s.reward for s in score_group(task, sample, [parse_answer(t) for t in texts], 2,
                                          Services(given={"judge": judge.at(PLACE)}))]


def test_outcomes_of_rule_judge_and_curriculum_are_told_apart(tmp_path):
    """curriculum.pass_at above every value: the cascade still has no question about an answer that the rule pays."""
    task = task_of("cascade", rewards={"format": 0})
    task.override_outcome(None, 7.0)
    with judging(says(lambda q, body: {"verdict": "no"}), tmp_path) as (server, judge):
        assert rewards_of(judge, task, ["<answer>4</answer>"]) == [pytest.approx(1.0)] and count_of(server) == 0
    task, plain = task_of("judge"), task_of()
    most = score_group(plain, plain.sample_from_row(ROW), [parse_answer("<answer>4</answer>")], 2)[0].reward
    with judging(AGREES, tmp_path) as (_, judge):
        right, by_judge, wrong = rewards_of(judge, task, ["<answer>4</answer>", "<answer>four</answer>",
                                                          "<answer>5</answer>"])
    assert right == pytest.approx(most) and by_judge == pytest.approx(most) and wrong < right


def test_groups_are_kept_by_shaped_rewards_the_outcome_or_right_answers():
    """nsr learns from wrong answers alone: a group of right ones that differ by the format teaches it nothing."""
    assert preference([1, 1], lengths=[2, 10], algo={"shaping": ["overlong"]}) is True
    assert preference([1, 1], lengths=[2, 3], algo={"shaping": ["overlong"]}) is False
    assert preference([1.0, 1.1], correct=[True, True], algo={"advantage": "nsr"}) is False
    assert preference([0.0, 1.1], correct=[False, True], algo={"advantage": "nsr"}) is True
    for rewards, passed, kept in (([0.1, 1.1, 0.0], [False, True, False], True), ([1.1, 1.0], [True, True], False),
                                  ([0.1, 0.0, 0.0], [False, False, False], False),  # the format alone differs
                                  ([None, 1.0], [None, True], False),
                                  ([0.3, 0.6], [None, None], True)):  # no outcome is known: by the rewards
        assert KEEP["some_right"](Outcome(Draw(0, 0), tuple(rewards), tuple(passed))) is kept, (rewards, passed)


def test_gradient_norm_is_the_mean_and_the_largest_of_all_passes(tiny_models):
    """Two passes over one batch are two optimizer steps: the first norm is not forgotten."""
    short = {"max_new_tokens": 8, "group_size": 4}
    config = settings(tiny_models["qwen3_vl"], rollout={"updates": 2, **short}, train={"lr": 0.05})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    once = settings(tiny_models["qwen3_vl"], rollout=short, train={"lr": 1e-12})
    first, _ = update(policy, make_optimizer(policy, once), groups, once, 0)
    both, _ = update(policy, make_optimizer(policy, config), groups, config, 0)
    second = 2 * both["grad_norm"] - first["grad_norm"]
    assert second != pytest.approx(first["grad_norm"], rel=1e-3)
    assert both["grad_norm/max"] == pytest.approx(max(first["grad_norm"], second), rel=1e-4)


def rows_of(tmp_path, *records):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"image": "a.png", "question_id": n, **r}) + "\n"
                            for n, r in enumerate(records)))
    return read_rows(path)


def paid(row, *texts):
    task = load_task("qa")
    task.coordinates = Coordinates()
    sample = task.sample_from_row({"id": "1", "question": "?", **row})
    found = score_group(task, sample, [parse_answer(given) for given in texts], 0, None)
    assert all(s.error is None for s in found), found
    return [s.parts["accuracy"] for s in found]


def test_texts_that_look_like_numbers_pay_no_other_codes(tmp_path):
    for question, answer, *wrong in (
            ("What is the bus timetable entry?", "08-15-30", "-37", "30-15-08", "8-15-30"),
            ("Which postcode is on the letter?", "01067", "1067", "001067"),
            ("Which seat is printed on the ticket?", "12E1", "120"),
            ("What does the menu ask for lunch?", "$8-12", "-4", "12-8")):
        (row,) = rows_of(tmp_path, {"question": question, "answer": answer})
        assert paid(row, answer, *wrong) == [1, *[0] * len(wrong)], answer
    row, *_ = rows_of(tmp_path, {"question": "Which grade did she get?", "answer": "A"},
                      {"question": "Who teaches it?", "answer": "Mr Smith"},
                      {"question": "Which subject is it?", "answer": "Biology"})
    assert paid(row, "A", "A+", "A or B") == [1, 0, 0]
    for given, answer, *wrong in (("math", "0041-007", "34", "41-7", "0007-041"), ("number", "0041", "41", "00041")):
        row = {"id": "1", "question": "Which order number?", "answer": answer, "answer_type": given}
        assert paid(row, answer, *wrong) == [1, *[0] * len(wrong)]


def test_words_letters_numbers_and_options_of_other_scripts():
    for right, other in (("красная машина стоит", "синяя лодка плывёт"), ("سيارة حمراء", "قارب أزرق"),
                         ("लाल गाड़ी", "नीली नाव"), ("κόκκινο αυτοκίνητο", "μπλε βάρκα")):
        assert answers.rouge(right, right) == 1 and answers.rouge(other, right) == 0, right
    assert answers.rouge("élève", "lve") == 0
    assert answers.rouge("cafe\u0301 noir", "café noir") == 1  # composed and not
    assert answers.ocr("東京駅南口", "東京駅北口") == pytest.approx(0.8)
    assert answers.ocr("ห้ามจอด", "ห้ามจอด") == 1
    assert text.token_f1("打开蓝牙设置", "打开网络设置") > 0 and text.token_f1("打开", "关闭") == 0
    assert paid({"answer": "12番線", "answer_type": "text"}, "12番線", "13番線", "１２番線") == [1, 0, 1]
    row = {"answer": "42.5", "answer_type": "number"}
    assert paid(row, "４２．５", "42,5", "٤٢٫٥", "४२.५", "42,6", "425") == [1, 1, 1, 1, 0, 0]
    assert paid({"answer": "４２", "answer_type": "count"}, "42", "４２", "24") == [1, 1, 0]
    row = {"answer": "B", "answer_type": "choice", "options": ["红色的车", "蓝色的船", "绿色的树"]}
    assert paid(row, "蓝色的船", "图中是蓝色的船。", "（Ｂ）", "红色的车", "不是蓝色的船") == [1, 1, 1, 0, 0]


TOKENS = 1000


def gradients(distance, **algo):
    """Of a step of 1,000 tokens with advantages of both signs: with one token at this distance, and without it."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(TOKENS, generator=generator, dtype=F64) - 0.1
    away = 0.2 * torch.randn(TOKENS, generator=generator, dtype=F64)
    advantages = [1.0 if i % 2 else -1.0 for i in range(TOKENS)]
    tree = {"task": {"name": "grounding"}, "model": {"name": "x"}, "algo": {"kl_coef": 0.04, **algo}}
    config = configs.validate(tree)
    objective, out = Objective.of(config.algo), []
    for gap in (distance, 0.0):
        x = flat(logp, adv=advantages, reference_logprobs=logp + away)
        x.reference_logprobs[7] = logp[7] + gap
        loss, metrics = objective(replace(x, entropy=torch.zeros_like(logp)), config.algo.kl_coef)
        out.append((torch.autograd.grad(loss, x.logprobs)[0], metrics))
    return out


def test_default_and_presets_keep_the_direction_of_the_step():
    """Far below the reference, too: of a token that became certain where the reference finds it impossible."""
    for distance in (9.0, 30.0, 300.0, -200.0):
        (far, clamped), (near, none) = gradients(distance)
        assert cosine_similarity(far, near, 0) > 0.99 and far.isfinite().all(), distance
        assert none["kl/clamped"] == 0 and clamped["kl/clamped"] == (distance > 0)
    for preset in ("algorithms/grpo", "grounding/vlm_r1_rec", "algorithms/gigpo"):
        algo = yaml.safe_load(configs.find_config(f"configs/{preset}.yaml").read_text())["algo"]
        (far, _), (near, _) = gradients(15.0, **{k: algo[k] for k in ("kl", "kl_coef") if k in algo})
        assert cosine_similarity(far, near, 0) > 0.99, preset


def test_what_has_collapsed_is_pulled_back_and_published_k3_is_what_its_name_says():
    for name in ("k2", "k3", "k3_bounded", "k1_plus", "k3_plus"):
        x = flat([-40.0], reference_logprobs=[-1.0])
        (slope,) = gradient(run(bound(KLS, name), x), x)
        assert slope < 0, name  # a step against it makes the token likelier
    x = flat([-9.0, -1.0], reference_logprobs=[-1.0, -3.0])
    values = run(bound(KLS, "k3"), x)
    assert values.tolist() == pytest.approx([2980.9579870 - 9, 0.1353353 + 2 - 1], rel=1e-6)


FINE = {"reward/mean": 0.5, "reward/std": 0.1, "mismatch/kl": 1e-9, "mismatch/gap_mean": 1e-6, "mismatch/gap_max": 1e-5}


def run_config(**more):
    return configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"}, **more})


def told(folder, line, config):
    said = []
    alerts = Alerts(resolved_alerts(config), folder, said.append)
    for step in range(3):
        alerts.check({"step": step, **FINE, "reward/mean": 0.1 * step})
    alerts.check({"step": 3, **FINE, **line})
    return " ".join(said)


def test_a_mismatch_is_an_alert_or_stops_a_run(tmp_path):
    rounding = {"model": {"name": "x", "dtype": "bfloat16"}, "engine": {"name": "vllm"}}
    late = {**rounding, "algo": {"correction": "token_truncate"}, "async": {"max_staleness": 2}}
    for n, (more, line, alert) in enumerate((
            ({"model": {"name": "x", "dtype": "float32"}}, {"mismatch/kl": 2e-3}, True),
            (rounding, {"mismatch/kl": 1e-3, "mismatch/gap_mean": 0.02}, False),
            (rounding, {"mismatch/kl": 0.8, "mismatch/gap_mean": 0.5}, True),  # other weights or pictures
            (late, {"mismatch/kl": 0.02, "mismatch/gap_mean": 0.05}, False),
            ({"alerts": {"mismatch_above": None}}, {"mismatch/kl": 5.0}, False),
            ({}, {"mismatch/kl": float("nan")}, False))):
        (tmp_path / str(n)).mkdir()
        said = told(tmp_path / str(n), line, run_config(**more))
        assert ("mismatch" in said) == ("alerts.mismatch_above" in said) == alert, (more, said)
    config = run_config(limits={"mismatch": 0.05})
    check_mismatch({**FINE, "mismatch/kl": 0.04}, config, 3)
    with pytest.raises(TrainingError, match=r"limits\.mismatch=0\.05.*engine"):
        check_mismatch({**FINE, "mismatch/kl": 0.06}, config, 3)
