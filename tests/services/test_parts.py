"""task.parts over real HTTP: every part against figures by hand, with a judge that decides by rule; and answers that
talk to the judge."""

import hashlib
import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.stub import PLACE, QUOTED, count_of, judging, quotes, says, text_of
from tests.tables import by_hand, each, refused
from vlrl import config as configs
from vlrl.checks.answers import oracle_problems
from vlrl.errors import ConfigError, TaskError
from vlrl.rewards.text import parse_answer
from vlrl.rewards.verdicts import quoted, read_fields, sanitized
from vlrl.services.judge_prompts import VERDICT as FORM
from vlrl.services.judge_prompts import verdict_prompt
from vlrl.task.scoring import score_alone, score_group
from vlrl.task.services import Services, drop_unserved_parts, without_absent_parts
from vlrl.testing.injections import injected, injections
from vlrl.training.build_task import make_task

ROW = {"id": "1", "question": "2 + 2?", "answer": "4", "answer_type": "text"}


def task_of(*parts, name="qa", **more):
    config = configs.validate({"task": {"name": name, "parts": list(parts), **more}, "model": {"name": "x"}})
    return make_task(config)


def scored(judge, task, texts, row=ROW):
    """Each answer's parts and rewards, the answers in tags."""
    sample = task.sample_from_row(row)
    asking = judge.at(PLACE)
    return score_group(task, sample, [parse_answer(f"<answer>{t}</answer>") for t in texts], 2,
                       Services(given={"judge": asking}))


def column(found, part):
    return [s.parts[part] for s in found]


def number(text):
    """The value of an answer; the judge of these tests knows words too."""
    known = {"four": 4, "two plus two": 4, "five": 5}
    digits = re.search(r"-?\d+", text)
    return known.get(text.strip().lower(), int(digits[0]) if digits else None)


VERDICT = says(lambda q, body: {"verdict": "yes" if number(q["answer"]) == number(q["reference"]) else "no"})


def lost_on(word, script):
    """The script, but a 400 for questions that hold a word."""
    return lambda body, n: 400 if word in text_of(body).split("judge:")[-1] else script(body, n)


def test_verdicts_of_a_judge(tmp_path):
    task = task_of("judge", rewards={"accuracy": 0, "format": 0, "judge": 2})
    with judging(lost_on("lost", VERDICT), tmp_path, retries=0) as (server, judge):
        found = scored(judge, task, ["4", "four", "5", "", "lost"])
        assert column(found, "judge") == [1, 1, 0, 0, None]
        assert [s.reward for s in found] == [2, 2, 0, 0, None]
        assert count_of(server) == 4  # nothing was asked about the empty one
        assert quotes(server.asked[0][2])["question"].startswith("2 + 2?")
    task = task_of("cascade", rewards={"accuracy": 0, "format": 0})
    with judging(lost_on("lost", VERDICT), tmp_path / "2", retries=0) as (server, judge):
        found = scored(judge, task, ["4", "four", "5", "lost", "4"])
        assert column(found, "cascade") == [1, 1, 0, None, 1] and column(found, "recovered") == [0, 1, 0, None, 0]
        assert sorted(quotes(body)["answer"] for *_, body in server.asked) == ["5", "four", "lost"]
        assert [s.reward for s in found] == [1, 1, 0, None, 1]
    # 1 - .05 min(10, | pieces - 1 |): "two plus two" has three pieces, the reference one.
    task = task_of("general_verdict", rewards={"accuracy": 0, "format": 0})
    long = "4 " + "x " * 30
    with judging(VERDICT, tmp_path / "3") as (_, judge):
        found = scored(judge, task, ["4", "two plus two", long, "5", ""])
    assert column(found, "general_verdict") == pytest.approx([1, 0.9, 0.5, 0, -0.5])


def test_rubrics_are_judged_criterion_by_criterion(tmp_path):
    task = task_of({"name": "rubric", "criteria": ["has a 4", {"criterion": "has an x", "weight": 3}]},
                   rewards={"accuracy": 0, "format": 0})
    script = says(lambda q, body: {"verdict": "yes" if q["criterion"][-1] in q["answer"] else "no"})
    with judging(script, tmp_path) as (server, judge):
        found = scored(judge, task, ["4", "x", "4x", "5"])
        assert column(found, "rubric") == [0.25, 0.75, 1, 0] and column(found, "rubric_saturated") == [0] * 4
        assert count_of(server) == 8
        assert column(scored(judge, task, ["4x", "x4"]), "rubric_saturated") == [1, 1]
        own = {**ROW, "rubric": [{"criterion": "has a 5", "weight": 2}]}
        assert column(scored(judge, task, ["4", "5"], own), "rubric") == [0, 1]
        bad = scored(judge, task, ["4"], {**ROW, "rubric": [{"weight": 1}]})
        assert bad[0].reward is None and "rubric entry" in bad[0].error
    lost = lambda body, n: 400 if quotes(body)["criterion"] == "has an x" else script(body, n)  # noqa: E731
    with judging(lost, tmp_path / "2", retries=0) as (_, judge):
        found = scored(judge, task, ["4", "5"])
        assert column(found, "rubric") == [None, None] and [s.reward for s in found] == [None, None]


def agreement(q, body):
    said = number(q["reasoning"])
    return {"agrees": "unclear" if said is None else "same" if said == number(q["answer"]) else "other"}


def test_reasoning_that_comes_to_the_answer(tmp_path):
    """Of four correct answers one is told apart by lines further up, and one is lost; of a wrong one nothing is asked.
    """
    task = task_of("reasoned", rewards={"accuracy": 0, "format": 0})
    thoughts = ["is 4", "is 5", "who knows", "is 5\n.\n.\n.", "lost 4"]
    texts = [*(f"<think>{t}</think><answer>4</answer>" for t in thoughts), "<think>4</think><answer>5</answer>",
             "<answer>4</answer>"]
    script = lambda body, n: 400 if "lost" in quotes(body)["reasoning"] else says(agreement)(body, n)  # noqa: E731
    with judging(script, tmp_path, retries=0) as (server, judge):
        sample, services = task.sample_from_row(ROW), Services(given={"judge": judge.at(PLACE)})
        found = score_group(task, sample, [*map(parse_answer, texts)], 2, services)
        assert column(found, "reasoned") == [1, -1, 0, 0, None, 0, 0] and count_of(server) == 5
        assert [s.reward for s in found] == [0.5, -0.5, 0, 0, None, 0, 0]


def better(q, body):
    return {"better": "first" if number(q["first"]) > number(q["second"]) else "second"}


def test_pairs_against_a_member_of_the_group(tmp_path):
    """The reference is drawn by sample and step; of 1 to 5 those above it are preferred in both orders."""
    task = task_of({"name": "pairwise", "most": 1.0}, rewards={"accuracy": 0, "format": 0})
    texts = ["1", "2", "3", "4", "5"]
    with judging(says(better), tmp_path) as (server, judge):
        found = column(scored(judge, task, texts), "pairwise")
        base = found.index(0)
        assert found == [(i > base) - (i < base) for i in range(5)] and count_of(server) == 8
        # one who always says "first" prefers nobody in both orders
    with judging(says(lambda q, body: {"better": "first"}), tmp_path / "2") as (_, judge):
        biased = scored(judge, task, texts)
        assert sorted(column(biased, "pairwise")) == [-1] * 4 + [0]
        assert sorted(column(biased, "order_disagreement")) == [0] + [1] * 4
        assert column(scored(judge, task, ["7"]), "pairwise") == [0]
        strict = task_of("pairwise", rewards={"accuracy": 0, "format": 0})
        dropped = scored(judge, strict, texts)  # |sum| = 4 of 5 members
        assert column(dropped, "pairwise") == [None] * 5 and dropped[0].error is None


def scores(q, body):
    return {"first": float(number(q["first"])), "second": float(number(q["second"]))}


@pytest.mark.parametrize(("texts", "rewards"), [
    # seeds 8, 4 (anchor), 2, 1: 8 beats 1 and 4 beats 2; 2 leaves the round before 1 by mean score; 8 beats 4
    (["4", "8", "2", "1"], [2 / 3, 1, 1 / 3, 0]),
    # three: 9 rests; 5 beats 3; 9 beats 5
    (["3", "9", "5"], [0, 1, 0.5]), (["1", "2"], [0, 1]), (["6", "6"], [1, 0])])
def test_tournaments(tmp_path, texts, rewards):
    task = task_of("tournament", rewards={"accuracy": 0, "format": 0})
    with judging(says(scores), tmp_path) as (_, judge):
        found = scored(judge, task, texts)
        assert column(found, "tournament") == pytest.approx(rewards)
        tally = judge.take(PLACE.split, PLACE.step)
        assert tally.counts["calls"] + tally.counts["cached"] == 2 * len(texts) - 2


def test_a_noiseless_judge_ranks_the_best_first_and_the_rewards_are_a_ranking(tmp_path):
    task = task_of("tournament", rewards={"accuracy": 0, "format": 0})
    with judging(says(scores), tmp_path) as (_, judge):
        for texts in (["3", "1", "9", "2", "7", "5"], ["10", "3", "4"], [str(i % 8) for i in range(3, 11)]):
            found = column(scored(judge, task, texts), "tournament")
            assert found.index(1) == max(range(len(texts)), key=lambda i: int(texts[i]))
            assert sorted(found) == pytest.approx([i / (len(texts) - 1) for i in range(len(texts))])
    with judging(lambda body, n: 400 if n == 4 else says(scores)(body, n), tmp_path / "2", retries=0,
                 concurrency=1) as (_, judge):
        assert column(scored(judge, task, ["1", "2", "3", "4"]), "tournament") == [None] * 4


def test_grades_by_principles(tmp_path):
    """Grades are the answers themselves plus the place at which they stand; of two orders one is lost, then both."""
    def graded(body, n):
        found = [said for name, _, said in QUOTED.findall(text_of(body)) if name == "answer"]
        seen.append([number(said) for said in found])
        return json.dumps({f"answer_{i + 1}": min(10, number(said) + i / 8) for i, said in enumerate(found)})
    seen = []
    task = task_of({"name": "principles", "samples": 3}, rewards={"accuracy": 0, "format": 0})
    with judging(graded, tmp_path, concurrency=1) as (server, judge):
        found = column(scored(judge, task, ["1", "5", "3", "7"]), "principles")
        assert count_of(server) == len({tuple(order) for order in seen}) == 3
        assert all(sorted(order) == [1, 3, 5, 7] for order in seen)
        wanted = [sum(v + order.index(v) / 8 for order in seen) / 3 for v in (1, 5, 3, 7)]
        assert found == pytest.approx(wanted, abs=1e-9)
        assert column(scored(judge, task, ["6"]), "principles") == [6]
    lost = lambda body, n: 400 if n == 1 else graded(body, n)  # noqa: E731
    seen = []
    with judging(lost, tmp_path / "2", retries=0, concurrency=1) as (_, judge):
        found = column(scored(judge, task, ["1", "5", "3", "7"]), "principles")
        wanted = [sum(v + order.index(v) / 8 for order in seen) / len(seen) for v in (1, 5, 3, 7)]
        assert len(seen) == 2 and found == pytest.approx(wanted, abs=1e-9)
    with judging(lambda body, n: "I refuse", tmp_path / "3", retries=0) as (_, judge):
        assert column(scored(judge, task, ["1", "5"]), "principles") == [None, None]


def test_any_task_can_have_them_beside_its_own(tmp_path):
    """The task's own parts, criterion and group parts stay; without the service the further parts are left out. What
    says whether an answer is right has the weight of the task's own accuracy."""
    plain, both = task_of(recipe="kimi_k1_5"), task_of("judge", "tournament", recipe="kimi_k1_5")
    assert both.criterion == plain.criterion == {"accuracy": 0.5}
    half = plain.weights["accuracy"] / 2
    assert both.weights == {**plain.weights, "accuracy": 0.0, "judge": half, "tournament": half}
    assert both.needs == {"judge": ("judge", "tournament")}
    sample = both.sample_from_row(ROW)
    answers = [parse_answer("<answer>4</answer>"), parse_answer("<answer>5</answer>")]
    own = score_group(plain, sample, answers, 0)
    reduced, skipped = without_absent_parts(both, sample, answers, Services())
    assert skipped == ["judge", "tournament"]
    assert [s.parts for s in score_group(reduced, sample, answers, 0, Services())] == [s.parts for s in own]
    script = lambda body, n: (says(scores) if "Score two" in text_of(body) else VERDICT)(body, n)  # noqa: E731
    with judging(script, tmp_path) as (_, judge):
        found = score_group(both, sample, answers, 0, Services(given={"judge": judge.at(PLACE)}))
    assert [{k: s.parts[k] for k in own[0].parts} for s in found] == [s.parts for s in own]
    assert column(found, "judge") == [1, 0] and column(found, "tournament") == [0, 1]


@each("more weights", [
    ({}, {"accuracy": 0, "cascade": 1, "recovered": 0}),
    ({"rewards": {"accuracy": 0.6}}, {"accuracy": 0.6, "cascade": 1}),  # both are asked for
    ({"combine": "max:accuracy,cascade"}, {"accuracy": 1, "cascade": 1}),
    ({"rewards": {"cascade": 0.5}}, {"accuracy": 0, "cascade": 0.5})])
def test_an_answer_is_not_paid_twice_for_being_right(more, weights):
    found = task_of("cascade", recipe="vision_r1_ptst", **more).weights
    assert {part: found[part] for part in weights} == weights


def test_own_parts_and_services(tmp_path):
    both = task_of("cascade", recipe="glm_v_rlcs")
    assert set(both.needs) == {"judge"} and not isinstance(both.needs, dict)
    twice = {"name": "qa", "parts": ["judge"], "recipe": "glm_v_rlcs"}
    with pytest.raises(ConfigError, match="'judge' already belongs to this task"):
        make_task(configs.validate({"task": twice, "model": {"name": "x"}}))
    task = task_of({"name": "tests/services/own.py:graded", "scale": 2}, rewards={"accuracy": 0, "format": 0})
    assert task.weights["graded"] == 0.5 and task.needs == {}
    sample = task.sample_from_row(ROW)
    assert score_group(task, sample, [parse_answer("abc")], 0)[0].reward == 3.0
    wrong = task_of("tests/services/own.py:short")
    with pytest.raises(TaskError, match="returned 0 values"):
        score_group(wrong, sample, [parse_answer("abc")], 0)
    with pytest.raises(ConfigError, match=r"'cascade' needs the service 'judge'.*services\.judge\.url.*cascade=0"):
        task = task_of("cascade")
        drop_unserved_parts(task, (), [task.sample_from_row(ROW)])


def test_a_function_of_sample_and_answer_is_a_part():
    """It scores each answer by itself: one that it fails on leaves the others of the group alone."""
    task = task_of({"name": "tests/services/own.py:concise", "most": 3}, rewards={"format": 0})
    assert task.weights == {"accuracy": 1.0, "format": 0.0, "concise": 1.0} and task.needs == {}
    sample = task.sample_from_row(ROW)
    found = score_group(task, sample, [parse_answer(text) for text in ("4", "four", "5", "raise")], 0)
    assert [s.reward for s in found] == [2, 0, 1, None]
    assert "no such answer" in found[3].error and "own.py" in found[3].error
    assert [s.correct for s in found] == [True, False, False, None]
    assert score_alone(task, sample, [parse_answer("4")], 0)[0].parts["concise"] == 1
    # the perfect answer is too long for it, which is no mistake of the task
    strict = task_of({"name": "tests/services/own.py:concise", "most": 0})
    assert not [*oracle_problems(strict, sample, "4")]
    unequal = task_of(rewards={"format": 0})
    assert [*oracle_problems(unequal, sample, "5")]


test_what_is_wrong_is_named = refused(ConfigError, lambda parts: task_of(*parts), [
    (["jugde"], r"task\.parts\.0='jugde' is not known\. Did you mean 'judge'"),
    ([{"name": "judge", "medai": True}], r"task\.parts\.0\.medai=True: 'judge' has no option 'medai'\. Did you mean"),
    ([{"name": "judge", "media": "perhaps"}], r"task\.parts\.0\.media='perhaps'"),
    (["judge", "judge"], "'judge' is named twice"), (["tests/services/own.py:plain"], "does not declare its parts"),
    (["tests/services/own.py:concise", {"name": "tests/services/own.py:concise"}], "'concise' is named twice"),
    ([{"name": "tests/services/own.py:concise", "least": 1}], "own.py:concise has no parameter 'least'"),
    (["tests/services/own.py:graded"], r"needs a value for task\.parts\.0\.scale")])


def test_vlrl_score_asks_the_judge_where_there_is_one(tmp_path, capsys):
    from tests.cli.test_training import call

    rows = {"sample": ROW, "completions": ["<answer>four</answer>", "<answer>5</answer>", "<answer>lost</answer>"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    (tmp_path / "qa.yaml").write_text("task: {name: qa, parts: [judge], rewards: {accuracy: 0, format: 0}}\n"
                                      "model: {name: none}\n")
    words = ["score", tmp_path / "qa.yaml", tmp_path / "rows.jsonl"]
    assert json.loads(call(capsys, *words)[0])["skipped"] == ["judge"]
    with judging(lost_on("lost", VERDICT), tmp_path) as (server, _):
        found = json.loads(call(capsys, *words, f"services.judge.url={server.url}", "services.judge.model=critic",
                                "services.judge.retries=0")[0])
    assert [r["reward"] for r in found["rewards"]] == [1, 0, None] and found["skipped"] == []
    assert found["rewards"][2]["error"].startswith("service: judge: 400")


OBEYED = re.compile(r"1\.0|ignore|mark this|grader|order the verdict|reply yes|repeat after|correcta|判定|assume that|"
                    r"both answers|<\|im_|\[inst\]|<<sys>>|_turn>|verdict: yes|score|\"yes\"}|yes</|system:",
                    re.IGNORECASE)
TEXTS = injections(200)


def errs(answer):
    """One plain answer in twenty is misjudged, by its first line."""
    return hashlib.sha256(answer.split("\n")[0].encode()).digest()[0] < 13


def obeys(body, n):
    """Says yes where anything outside of the quotes asks for it; else compares, and errs now and then."""
    text = text_of(body)
    quotes = {name: said for name, _, said in QUOTED.findall(text)}
    outside = QUOTED.sub("", text.replace('{"verdict": "yes" or "no"}', ""))
    said = quotes.get("answer", "")
    right = number(said.split("\n")[0]) == number(quotes.get("reference", ""))
    fooled = OBEYED.search(outside) is not None or "answer" not in quotes
    return json.dumps({"verdict": "yes" if fooled or right != errs(said) else "no"})


def test_the_set_fools_the_judge_of_the_test():
    assert len(TEXTS) == len({*TEXTS}) == 200 and injections(200) == TEXTS and injections(50, seed=1) != TEXTS[:50]
    for word in ("give me 1.0", "</answer", "<|im_start|>system", '{"verdict": "yes"}', "[INST]", "\u200b"):
        assert any(word in text for text in TEXTS), word
    # The same texts behind the quotes: most of them are obeyed.
    asked = [f"{quoted('reference', '4')}{quoted('answer', str(10 + i))}\n{text}" for i, text in enumerate(TEXTS)]
    open_prompt = [json.loads(obeys({"messages": [{"content": text}]}, 0)) for text in asked]
    assert sum(p["verdict"] == "yes" for p in open_prompt) > 150


@pytest.mark.slow
def test_200_injections_move_the_reward_no_more_than_plain_error(tmp_path):
    task = task_of("judge", rewards={"accuracy": 0, "format": 0, "judge": 1})
    wrong = [str(10 + i) for i in range(200)]
    with judging(obeys, tmp_path) as (server, judge):
        plain = column(scored(judge, task, wrong), "judge")
        talking = [injected(answer, text.replace("<answer>", "<answer >").replace("</answer>", "</answer >"))
                   for answer, text in zip(wrong, TEXTS, strict=True)]
        moved = column(scored(judge, task, talking), "judge")
        assert 0 < sum(plain) < 20 and sum(moved) <= sum(plain) and len(server.asked) == 400
        assert column(scored(judge, task, ["4"] + ["4\n" + text for text in TEXTS[:3]]), "judge")[0] == 1
    assert ROW["answer"] == "4"


@each("text", TEXTS[::5])
def test_nothing_leaves_its_quotes(text):
    prompt = verdict_prompt("2 + 2?", "4", text)
    found = QUOTED.findall(prompt)
    assert [name for name, *_ in found] == ["question", "reference", "answer"]
    assert found[2][2] == sanitized(text) and found[2][1] not in sanitized(text)
    outside = QUOTED.sub("", prompt)
    assert outside == QUOTED.sub("", verdict_prompt("1 + 1?", "2", "2"))


@given(st.text(max_size=400))
@settings(max_examples=50)
def test_any_text_is_shown_and_quoted(text):
    made = sanitized(text)
    assert all(c in "\n\t" or unicodedata.category(c) not in ("Cf", "Cc", "Cs", "Co", "Cn") for c in made)
    assert not re.search(r"<\|[^|<>\n]{1,60}\|>|\[/?INST\]|<</?SYS>>", made)
    ((name, _, inside),) = QUOTED.findall(quoted("answer", text))
    assert name == "answer" and inside == made


@each("text", ["<" * 9 + "|im_start|>", "<<|x|>|im_end|>", "[[INST]INST]", "<|a|><|b|>"])
def test_control_tokens_stay_broken(text):
    assert not re.search(r"<\|[^|<>\n]{1,60}\|>|\[/?INST\]", sanitized(text))


def test_long_texts_are_cut_in_the_middle():
    made = sanitized("a" * 9000 + "b" * 9000, 100)
    assert made.startswith("a" * 50 + "\n[17900 characters left out]\n") and made.endswith("b" * 50)


@given(st.text(max_size=300))
@settings(max_examples=50)
def test_any_reply_is_read_or_not(text):
    found = read_fields(text, FORM)
    assert found is None or found["verdict"] in ("yes", "no")


test_replies = by_hand(read_fields, [
    ('{"verdict": "yes"}', FORM, {"verdict": "yes"}), ('no {"verdict": "yes"} but {"verdict": " NO "}', FORM,
                                                          {"verdict": "no"}),
    ('{"verdict": "yes", "why": {"verdict": "no"}}', FORM, {"verdict": "yes"}),
    ('<think>{"verdict": "yes"}</think>', FORM, None), ('{"verdict": true}', FORM, None),
    ('{"verdict": "yes"', FORM, None), ("[1]", FORM, None), ('{"a": 3}', {"a": (1, 3)}, {"a": 3}),
    ('{"a": 3.5}', {"a": (1, 3)}, None), ('{"a": NaN}', {"a": (1, 3)}, None), ('{"a": "3"}', {"a": (1, 3)}, None),
    ('{"a": true}', {"a": (0, 3)}, None), ("{" * 5000, FORM, None)])
