"""Answers that talk to the judge, through the prompt builder: to a judge that obeys whatever is not quoted."""

import hashlib
import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.stub import QUOTED, judging, text_of
from tests.services.test_parts import ROW, column, number, scored, task_of
from tests.tables import by_hand, each
from vlrl.rewards.verdicts import quoted, read_fields, sanitized
from vlrl.services.judge_prompts import VERDICT, verdict_prompt
from vlrl.testing.injections import injected, injections

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
    found = read_fields(text, VERDICT)
    assert found is None or found["verdict"] in ("yes", "no")


test_replies = by_hand(read_fields, [
    ('{"verdict": "yes"}', VERDICT, {"verdict": "yes"}), ('no {"verdict": "yes"} but {"verdict": " NO "}', VERDICT,
                                                          {"verdict": "no"}),
    ('{"verdict": "yes", "why": {"verdict": "no"}}', VERDICT, {"verdict": "yes"}),
    ('<think>{"verdict": "yes"}</think>', VERDICT, None), ('{"verdict": true}', VERDICT, None),
    ('{"verdict": "yes"', VERDICT, None), ("[1]", VERDICT, None), ('{"a": 3}', {"a": (1, 3)}, {"a": 3}),
    ('{"a": 3.5}', {"a": (1, 3)}, None), ('{"a": NaN}', {"a": (1, 3)}, None), ('{"a": "3"}', {"a": (1, 3)}, None),
    ('{"a": true}', {"a": (0, 3)}, None), ("{" * 5000, VERDICT, None)])
