"""The qa task: answer types and recipes by hand, forms of one item, rows, cheats, bounds."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image

from tests.tables import each, refused
from tests.tasks import scaffold
from tests.tasks.scaffold import assert_contract, think
from vlrl.checks.fields import field_problems
from vlrl.errors import ConfigError, DataError
from vlrl.rewards import math as verifier
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.task.services import AbsentService, Services
from vlrl.tasks._qa import noise_step
from vlrl.types import Media

from .test_recipes import ROWS as OTHERS

RECIPES = list(load("qa")._recipes)
LONG = "x " * 50_000
CHOICE = {"question": "Which?", "answer": "B", "answer_type": "choice", "options": ["a cat", "a dog", "a black dog"]}
SEVERAL = {**CHOICE, "answer": ["A", "C"]}
COUNT = {"question": "How many?", "answer": 12, "answer_type": "count"}
NUMBER = {"question": "How long?", "answer": 3.14, "answer_type": "number", "tolerance": 0.01}
SHARE = {**NUMBER, "answer": "200", "tolerance": "5%"}
YES = {"question": "Is it?", "answer": "yes", "answer_type": "yes_no"}
MATH = {"question": "Solve.", "answer": "\\frac{1}{2}", "answer_type": "math"}
VALUE = {"question": "What value?", "answer": "1,250.5", "answer_type": "chart"}
YEAR = {"question": "Which year?", "answer": 2019, "answer_type": "chart"}
OCR = {"question": "Read it.", "answer": "NO PARKING\nany time", "answer_type": "ocr"}
TEXT = {"question": "What is it?", "answer": ["a man walks a dog", "dog walking"], "answer_type": "text"}
GUESS = {"question": "How old?", "answer": 40, "answer_type": "regression"}
ROWS = [CHOICE, SEVERAL, COUNT, NUMBER, SHARE, YES, VALUE, YEAR, OCR, TEXT, GUESS]
qa = partial(scaffold.built, "qa")


def sample_of(task, row):
    return task.sample_from_row({"id": "r1", **row})


def scored(row, *texts, services=None, lengths=(), **options):
    task = qa(**options)
    answers = [parse_answer(text, n) for text, n in zip(texts, lengths or [0] * len(texts), strict=True)]
    return score_group(task, sample_of(task, row), answers, 0, services)


def glm(answer):
    return think(f"<|begin_of_box|>{answer}<|end_of_box|>")


NEVER = Services(given={"judge": lambda questions: ["0.0"] * len(questions)})


TYPES = [
    (CHOICE, {"B": 1, "b": 1, "(B)": 1, "B. a dog": 1, "a dog": 1, "The answer is B.": 1, "it is a dog, sure": 1,
              "there is a cat": 0, "it is a black dog": 0, "A": 0, "A, B": 0, "A B C": 0, "B or C": 0,
              "a cat; a dog": 0, "": 0, "D": 0, "Both": 0, "A dog": 1, "B. a cat": 0, "A or B": 0, LONG: 0}),
    (SEVERAL, {"A, C": 1, "C, A": 1, "A and C": 1, "A": 0, "A, B, C": 0, "": 0}),
    ({**CHOICE, "answer": ["a black dog", "a cat"]}, {"A, C": 1, "C": 0}),
    ({**CHOICE, "answer": "A, C"}, {"C, A": 1, "C": 0}),
    ({**CHOICE, "options": ["A. a cat", "B. a dog"], "answer": "a dog"}, {"B": 1, "a dog": 1, "A": 0}),
    ({**CHOICE, "options": ["2", "-5", "+"]}, {"it is -5": 1, "it is 5": 0, "-5.5 m": 0, "2": 0, "": 0, "it is 2": 0}),
    ({**CHOICE, "options": ["2", "5", "+"], "answer": "C"}, {"": 0, "+": 1, "C": 1, "!": 0}),
    ({**CHOICE, "options": None}, {"B": 1, "(b)": 1, "A": 0, "none": 0}),
    (COUNT, {"12": 1, "12.": 1, "twelve": 1, "there are 12 of them": 1, "12.0": 1, "112": 0, "1 2": 0, "12, 13, 14": 0,
             "-12": 0, "11": 0, "": 0, "0 1 2 3 4 5 6 7 8 9 10 11 12": 0, "1e1": 0, "9" * 400: 0}),
    (NUMBER, {"3.14": 1, "3.15": 1, "3.13 m": 1, "3.16": 0, "about 3.1": 0, "3.14 or 3.2": 0, "": 0, "nan": 0}),
    (SHARE, {"200": 1, "210": 1, "190": 1, "211": 0, "-200": 0}),
    (YES, {"yes": 1, "Yes.": 1, "True": 1, "yes, no": 0, "no, yes": 0, "not correct": 0, "no": 0, "unknown": 0, "": 0}),
    ({**YES, "answer": False}, None), ({**YES, "answer": "No"}, {"no": 1, "not true": 1, "yes and no": 0, "yes": 0}),
    (VALUE, {"1250.5": 1, "1,250.5": 1, "$1250.5": 1, "1250.51": 1, "1250.53": 0, "1250.5%": 1, "it is 1250.5": 0,
             "": 0}),
    (YEAR, {"2019": 1, "2019.": 1, "2,019": 1, "2020": 0, "in 2019": 0}),
    ({**YEAR, "tolerance": "5%"}, {"2019": 1, "2020": 0}), ({**YEAR, "answer": 20190}, {"20190.1": 1, "20191": 0}),
    ({**VALUE, "answer": "Blue line"}, {"blue line.": 1, "red line": 0}),
    ({**VALUE, "answer": 10, "tolerance": "5%"}, {"10.5": 1, "10.6": 0}),
    ({**VALUE, "answer": 10, "tolerance": 2}, {"12": 1, "12.1": 0, "ten": 0}),
    (OCR, {"NO PARKING any time": 1, "NOPARKINGanytime": 1, "NO PARKING any tim": 15 / 16, "": 0, "N": 1 / 16}),
    (TEXT, {"A man walks a dog.": 1, "dog walking": 1, "": 0, "cat": 0, "a man": (4 / 7 + 2 / 5 + 4 / 7) / 3}),
    (GUESS, {"40": 1, "30": 0.75, "I say 44": 0.9, "90": 0, "": 0}),
    (MATH, {"0.5": 1, "$\\frac{2}{4}$": 1, "x=1/2": 1, "so it is 1/2": 1, "2": 0, "1/2, 1/3": 0,
            "\\boxed{1/2} \\boxed{1/3}": 0, "half of it": 0, "": 0, "1 2": 0}),
    ({**MATH, "answer": 12}, {"12": 1, "112": 0, "10, 11, 12": 0, "1 to 12": 0})]


@each("row table", [case for case in TYPES if case[1]])
def test_types_by_hand(row, table):
    found = scored(row, *table, recipe="direct")
    assert all(s.error is None for s in found)
    assert [s.parts["accuracy"] for s in found] == pytest.approx(list(table.values()), abs=1e-4)


def test_totals_lengths_and_noise():
    for name, expected in (("exact", 0), ("edit", 5 / 17)):
        assert scored(TEXT, "a man", text_score=name)[0].parts["accuracy"] == pytest.approx(expected)
    right, wrong, bare = think("12"), think("13"), "12"
    for recipe, totals in {"vision_r1_ptst": (1, 0, 0), "thinking": (2, 1, 1), "apo_view_r1": (1.5, 0.5, 1),
                           "mm_eureka": (1.5, 0.5, 1), "noisy_rollout": (1, 0.5, 0.5), "kimi_k1_5": (1, 0, 1)}.items():
        assert [s.reward for s in scored(COUNT, right, wrong, bare, recipe=recipe)] == pytest.approx(totals), recipe
    # Kimi k1.5: .5 - (length - min) / (max - min); a wrong answer keeps what is negative.
    texts, lengths = [think("12"), think("12"), think("13"), think("13"), think("12")], [100, 200, 100, 200, 150]
    found = scored(COUNT, *texts, lengths=lengths, recipe="kimi_k1_5")
    assert [s.parts["length"] for s in found] == [0.5, -0.5, 0, -0.5, 0]
    assert [s.parts["length"] for s in scored(COUNT, *texts, lengths=[7] * 5, recipe="kimi_k1_5")] == [0] * 5
    assert [qa(recipe="kimi_k1_5").weights_at(step)["length"] for step in (0, 99, 100, 900)] == [0, 0, 1, 1]
    assert [noise_step(step, 500, 60) for step in (0, 20, 38, 40, 42, 60, 10**6)] == [500, 500, 366, 250, 134, 0, 0]
    task = qa(recipe="noisy_rollout")
    picture = Image.new("RGB", (8, 8))
    sample = sample_of(task, COUNT)
    assert task.variants(sample, 8, 0) == ()  # no image, nothing to add noise to
    sample = replace(sample, media=(Media(source=picture), Media(source=picture)))
    (noisy,) = task.variants(sample, 9, 40)
    assert (noisy.name, noisy.n, noisy.trained) == ("noisy", 4, True)
    edits = [m.edits for m in noisy.media]
    assert [(name, amount) for ((name, amount, _),) in edits] == [("noise", 250)] * 2 and edits[0] != edits[1]
    assert [m.edits for m in task.variants(sample, 9, 40)[0].media] == edits
    assert task.variants(sample, 9, 41)[0].media[0].edits != edits[0] and task.variants(sample, 8, 60) == ()


STAGES = "<planning>p</planning> <caption>c</caption>\n<reasoning>r</reasoning><summary>s</summary>"
FORMS = {  # text -> accuracy, format, of the count 12
    "direct": {"12": (1, 1), " 12\n": (1, 1), "1\n2": (0, 0), "12\n": (1, 1), "": (0, 0), "<b>12": (1, 0),
               "<think>12</think>": (0, 0), LONG: (0, 0)},
    "thinking": {think("12"): (1, 1), think(" 12 "): (1, 1), "12": (1, 0), think("12") + "!": (1, 0),
                 "<think>12</think><answer>11</answer>": (0, 1), think("11") + think("12"): (1, 0),
                 "<think><answer>12</answer></think><answer></answer>": (0, 0), think("") + "12": (0, 0)},
    "easy_r1": {"<think>a</think>\\boxed{12}": (1, 1), "<think>a</think> so \\boxed{12}.": (1, 1),
                "\\boxed{12}": (1, 0), "<think>\\boxed{12}</think>": (0, 0), "<think>\\boxed{12}": (0, 0),
                "<think>a</think>12": (0, 0),
                "<think>a</think>\\boxed{12}\\boxed{13}": (0, 0), "<think>a</think>\\boxed{12}\\boxed{12}": (1, 0)},
    "mm_eureka": {think("$12$"): (1, 1), think("12"): (1, 1), "$12$": (1, 0)},
    "glm_v_rlcs": {glm("12"): (1, 1), glm(" 12 "): (1, 1), glm("12").replace("think", "THINK"): (1, 1),
                   glm("112"): (0, 1), think("12"): (0, 0), glm("12") + "!": (0, 0),
                   "<|begin_of_box|>12<|end_of_box|>": (0, 0),
                   think("\\boxed{12}"): (0, 0), glm("\\boxed{12}"): (0, 0), glm("12<|end_of_box|>"): (0, 0),
                   think("<|begin_of_box|>12<|end_of_box|><|begin_of_box|>13<|end_of_box|>"): (0, 0),
                   glm("12").replace("so", "<answer>"): (0, 0), glm(""): (0, 1), "": (0, 0),
                   glm("12").replace("so", "看" * 60 + "\n" + "look " * 60): (0, 0),
                   glm("12").replace("so", "看" * 40 + "\n" + "look " * 60): (1, 1)},
    "sari_structured": {f"<think>{STAGES}</think><answer>12</answer>": (1, 1), think("12"): (1, 0),
                        f"<think>{STAGES} so</think><answer>12</answer>": (1, 0),
                        f"<think>{STAGES.replace('r<', 'r<caption><')}</think><answer>12</answer>": (1, 0),
                        f"<think>{STAGES * 2}</think><answer>12</answer>": (1, 0),
                        f"<think>{STAGES.replace('<caption>c', '<caption> ')}</think><answer>12</answer>": (1, 0),
                        f"<think>{STAGES[21:]}</think><answer>12</answer>": (1, 0), STAGES + "12": (1, 0)}}


@each("recipe", FORMS)
def test_forms_by_hand(recipe):
    found = scored(COUNT, *FORMS[recipe], recipe=recipe, services=NEVER)
    assert [(s.parts["accuracy"], s.parts["format"]) for s in found] == list(FORMS[recipe].values())


def test_a_judge_lifts_what_the_rule_does_not_pay():
    asked = []

    def judge(questions):
        asked.extend(questions)
        return ["I think 0.0", "So 0.0, no: 1.0", "1"][:len(questions)]
    texts = [glm("12"), glm("a dozen"), glm("a dozen eggs"), think("a dozen"), glm("many")]
    services, options = Services(given={"judge": judge}), {"recipe": "glm_v_rlcs"}
    found = scored(COUNT, *texts, services=services, **options)
    assert [s.parts["judge"] for s in found] == [0, 0, 1, 0, 0] and [s.reward for s in found] == [1, 0, 0, 0, 0]
    assert len(asked) == 3 and "Reference answer: 12\nGiven answer: a dozen\n" in asked[0]
    task = load("qa", {**options, "rewards": {"judge": 1.0}})
    found = score_group(task, sample_of(task, COUNT), [parse_answer(text) for text in texts], 0, services)
    assert [s.reward for s in found] == [1, 0, 1, 0, 0]


def test_forms_of_an_item():
    def asked(row, form, number=0):
        return load("qa", {"form": form}).sample_from_row({"id": f"r{number}", **row}).row
    yes_no = [asked(CHOICE, "yes_no", i) for i in range(40)]
    for row in yes_no:
        assert row["answer_type"] == "yes_no"
        assert ("Proposed answer: a dog\n" in row["question"]) == (row["answer"] == "yes")
    assert 10 < sum(row["answer"] == "yes" for row in yes_no) < 30
    assert asked(CHOICE, "choice")["answer"] == "B" and asked(CHOICE, "own")["options"] == CHOICE["options"]
    assert asked(CHOICE, "open") | {"asked": 0} == {**CHOICE, "id": "r0", "answer": "a dog", "answer_type": "text",
                                                    "options": None, "kind": "a short text", "asked": 0}
    assert asked({**CHOICE, "options": ["1", "2", "3"]}, "open")["answer_type"] == "number"
    for row, right in ((COUNT, "12"), ({**COUNT, "answer": 0}, "0"), (NUMBER, "3.14")):
        made = asked(row, "choice")
        assert len({*made["options"]}) == 4 and made["options"]["ABCD".index(made["answer"])] == right
        assert not any(option.startswith("-") for option in made["options"])
    assert {asked(COUNT, "choice", i)["answer"] for i in range(30)} == {*"ABCD"}
    assert asked(YES, "choice")["options"] in (["yes", "no"], ["no", "yes"]) and asked(YES, "open")["answer"] == "yes"
    for form, row, words in (("choice", TEXT, "answer_type=text"), ("open", SEVERAL, "is not exactly one of"),
                             ("yes_no", {**CHOICE, "options": None}, "is not exactly one of")):
        with pytest.raises(DataError, match=f"row 'r0': .*{words}"):
            asked(row, form)


test_rows_that_cannot_be_used = refused(DataError, lambda change: sample_of(qa(), {**CHOICE, **change}), [
    ({"question": " "}, "question= "), ({"question": None}, "question=None"), ({"answer_type": "sum"}, "one of choice"),
    ({"answer_type": None}, "; or set data.format=qa, which"), ({"answer_type": ["count"]}, "one of choice"),
    ({"answer": {"a": 1}}, "must be a string"),
    ({"answer": "D"}, "answer='D' cannot be read as the letter of the right option of a cat, a dog"),
    ({"answer": None}, "must be a string, a number, or a list"), ({"answer": True}, "must be a string, a number"),
    ({"answer": []}, "must be a string, a number, or a list"), ({"options": ["x"]}, "1 options"),
    ({"options": "A B"}, "a list"),
    ({"options": ["x", " "]}, "a list of strings"), ({"options": ["x", "x "]}, "two options have the text 'x'"),
    ({"answer_type": "number"}, "answer='B' cannot be read as a number"), ({"tolerance": -1}, "tolerance=-1"),
    ({"tolerance": "5"}, "tolerance='5'"), ({"answer_type": "yes_no", "answer": "maybe"}, "as yes or no"),
    ({"answer_type": "yes_no", "answer": "yes, no"}, "as yes or no"),
    ({"question": "<image>?"}, "placeholders for 1 images.* the row has 0"),
    ({"answer_type": "math", "answer": "the half"}, "as one mathematical expression"),
    ({"answer_type": "math", "answer": "\\frac{1}{"}, "as one mathematical expression, so no"),
    ({"answer_type": "count", "answer": 2.5}, "answer='2.5'"),
    ({"answer_type": "text", "answer": ""}, "is empty")], start="row 'r1': .*")


def test_math_rows_need_the_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        sample_of(qa(), MATH)


def test_questions_with_images_and_accuracy_by_type(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    row = {**CHOICE, "id": "r1", "images": ["a.png", "b.png"]}
    task = qa()
    plain = task.messages(task.sample_from_row(row, tmp_path))[-1]["content"]
    assert [c["type"] for c in plain] == ["image", "image", "text"]
    assert plain[2]["text"].startswith("Which?\nA. a cat\nB. a dog\nC. a black dog\nAnswer with the letter")
    mixed = task.messages(task.sample_from_row({**row, "question": "<image>Then <image>?"}, tmp_path))[-1]["content"]
    assert [c.get("text", "-")[:8] for c in mixed] == ["-", "Then ", "-", "?\nA. a c"]
    records = [{"sample": {"answer_type": kind, "category": c}, "parts": {"accuracy": v}}
               for kind, c, v in (("math", "geo", 1.0), ("math", None, 0.0), ("count", "geo", 0.0), ("ocr", "x", None))]
    assert qa().summarize(records) == {"accuracy/count": 0, "accuracy/geo": 0.5, "accuracy/math": 0.5}


def test_the_verifier_sees_mathematical_answers_only(monkeypatch):
    """No recipe of another task and no other answer type asks math-verify, whatever the answer."""
    monkeypatch.setattr(verifier, "_verdict", lambda *asked: pytest.fail(f"asked about {asked}"))
    others = [*OTHERS.items(), ("classification", {"label": "cat", "labels": ["cat", "dog"]}),
              ("driving", {"plan": {"speed": "KEEP", "path": "STRAIGHT"}}), ("video", {**CHOICE, "duration": 9}),
              ("video", {"question": "When?", "answer_type": "span", "spans": [[1, 2]], "duration": 9})]
    texts = ["[20, 10, 60, 50]", "<answer>\\frac{1}{2}</answer>", "$x=1$", glm("1+1"), think("yes"), "\\boxed{cat}"]
    tried = set()
    for name, row in others:
        for recipe in getattr(load(name), "_recipes", {"": None}):
            task = load(name, {"recipe": recipe} if recipe else {})
            with contextlib.suppress(DataError, AbsentService):  # a recipe of other rows, or with a service
                score_group(task, sample_of(task, row), [parse_answer(t) for t in texts], 0)
                tried.add(name)
    assert tried == {name for name, _ in others}
    for row in ROWS:
        assert all(s.error is None for s in scored(row, *texts))
    with pytest.raises(pytest.fail.Exception):
        scored(MATH, "1/3")


def test_fractions_signs_and_places():
    rows = [({"question": "What is 3*4+5?", "answer": 17, "answer_type": "math"}, "3*4+5"),
            ({"question": "Simplify 2x+3x.", "answer": "5x", "answer_type": "math"}, "2x+3x"),
            ({"question": "Solve x+1=3.", "answer": "2", "answer_type": "math"}, "3=2")]
    for row, text in rows:
        assert [scored(row, text, **rule)[0].parts["accuracy"] for rule in ({}, {"math_rule": "math_verify"})] == [0, 1]
    texts = {"1/2": 1, "1 / 2.": 1, "-1/2": 0, "2/4": 0, "0.5": 1, "1/0": 0, "1/2 or 1": 0}
    row = {**NUMBER, "answer": 0.5, "tolerance": 0}
    assert [s.parts["accuracy"] for s in scored(row, *texts)] == list(texts.values())
    assert scored({**row, "answer": "-3/4"}, "\u22123/4")[0].parts["accuracy"] == 1
    assert not list(field_problems({**row, "answer": "-3/4"})) and list(field_problems({**row, "answer": "6/8"}))
    for right, same in (("145\u00b0", "145"), ("10\u221a3", "\\sqrt{300}")):
        row = {"question": "How much?", "answer": right, "answer_type": "math"}
        assert [s.parts["accuracy"] for s in scored(row, right, same, "144")] == [1, 1, 0]
    row = {"question": "How long?", "answer": "1.2", "answer_type": "number", "precision": 1.0}
    assert [s.parts["accuracy"] for s in scored(row, "1.22", "1.2", "1.16", "1.26", "1.3")] == [1, 1, 1, 0, 0]
    with pytest.raises(DataError, match=r"precision=-1 must be a whole number of places"):
        sample_of(qa(), {**row, "precision": -1})


UNSURE = {**CHOICE, "options": ["a cat", "a dog", "not enough data"]}


@each("row text read ignored", [
    (CHOICE, "not B", 0, 1), (CHOICE, "It isn't B.", 0, 1), (CHOICE, "It is not a dog", 0, 1), (CHOICE, "B", 1, 1),
    (NUMBER, "not 3.14", 0, 1), (COUNT, "There are not 12", 0, 1), (GUESS, "not 40", 0, 1), (YES, "not no", 0, 0),
    ({**UNSURE, "answer": "C"}, "Not enough data", 1, 1), (UNSURE, "not B", 0, 1), (YES, "not correct", 0, 0),
    ({**YES, "answer": "no"}, "not correct", 1, 1), (OCR, "NO PARKING\nany time", 1, 1)])
def test_what_is_not_so_is_no_answer(row, text, read, ignored):
    assert [scored(row, text, **rule)[0].parts["accuracy"] for rule in ({}, {"negation": "ignored"})] == [read, ignored]


def test_no_verdict_never_pays(monkeypatch):
    def failing(*_):
        raise verifier.VerifierError("math-verify returned no verdict within 5 s")
    monkeypatch.setattr(verifier, "verified", failing)
    right, hung = scored(MATH, think("$\\frac{1}{2}$"), think("9^{9^{9}}"), recipe="kimi_k1_5", lengths=(5, 9))
    assert (right.reward, right.error, right.parts["length"]) == (1, None, 0.5)
    assert hung.reward is None and hung.error.startswith("VerifierError: math-verify returned no verdict")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_contract(recipe, tmp_path):
    assert_contract("qa", {"recipe": recipe}, [*ROWS, MATH], tmp_path)


KINDS_OF_3 = [{"answer_type": kind, "answer": "3"} for kind in (
    "number", "count", "math", "text", "chart", "ocr", "regression")]


@each("row", KINDS_OF_3)
@each("recipe", ["thinking", "mm_eureka", "vision_r1_ptst", "noisy_rollout"])
def test_report_17_nothing_readable_earns_nothing(row, recipe):
    """ms-swift#3130: accuracy and format were both paid for a row with the solution 3 when nothing could be parsed."""
    texts = ["", "abc", "<answer></answer>", "<answer>33</answer>", "<answer>abc</answer>"]
    texts += [think(""), think("33"), think("3")]
    found = scored({"question": "How many?", **row}, *texts, recipe=recipe)
    paid = [s.parts["accuracy"] for s in found]
    assert paid[-1] == 1 and paid[:3] == [0, 0, 0] and paid[5] == 0, paid
    assert max(paid[3], paid[4], paid[6]) <= (0.5 if row["answer_type"] == "ocr" else 0), paid
    assert [s.parts["format"] for s in found[:5]] == [0] * 5


@each("row right wrong", [
    ({"answer": "\\frac{1}{2}", "answer_type": "math"}, ["\\boxed{\\frac{1}{2}}", "$\\frac{1}{2}$", "\\(.5\\)"], ["2"]),
    ({"answer": "5", "answer_type": "number"},
     ["\\boxed{5}", "5 cm", "\\boxed{5\\text{ cm}}", "5\\,\\mathrm{cm}", "\\[5\\]"],
     ["\\boxed{15}", "\\frac{5}{2}", "5\\pi"]),
    ({"answer": 12.5, "answer_type": "number"}, ["\\frac{25}{2}", "12,5 kg", "$\\dfrac{25}{2}$"], ["\\frac{2}{25}"]),
    ({"answer": "5", "answer_type": "count"}, ["\\boxed{5}", "\\boxed{five}"], ["\\boxed{5}\\boxed{6}"]),
    ({"answer": "red", "answer_type": "text"}, ["\\boxed{red}", "\\boxed{\\text{red}}"], ["\\boxed{blue}"]),
    ({"answer": "B", "answer_type": "choice", "options": ["x", "y"]}, ["\\boxed{B}", "\\boxed{\\text{y}}"],
     ["\\boxed{A}"]),
    ({"answer": "yes", "answer_type": "yes_no"}, ["\\boxed{yes}"], ["\\boxed{no}", "\\boxed{yes} \\boxed{no}"])])
def test_report_16_latex_units_and_boxes_inside_the_answer(row, right, wrong):
    """trl#3903, VLM-R1#163, R1-V#106: the format was learned while no right answer was paid."""
    found = scored({"question": "Which?", **row}, *map(think, [*right, *wrong]), recipe="thinking")
    assert [(s.parts["accuracy"], s.parts["format"]) for s in found] == [(1, 1)] * len(right) + [(0, 1)] * len(wrong)


@each("row right wrong", [
    (CHOICE, ["I have no doubt it is a dog", "I see no rain, so B", "B because a cat is missing"],
     ["a dog is not there", "there is no dog here", "a dog isn't there", "B is wrong", "I don't see a dog", "B不对",
      "B. a cat"]),
    ({**CHOICE, "options": ["no dog", "a dog"], "answer": "A"}, ["no dog", "A", "I think there is no dog"], ["B"]),
    (COUNT, ["12", "there are 12, not many"], ["12%", "12 is wrong", "12 is not correct", "12^2", "3*4", "12/1"]),
    (NUMBER, ["3.14", "\uff13\uff0e\uff11\uff14", "3,14"], ["3.14%", "3.14 is false", "3.14\\pi", "\\sqrt{3.14}"]),
    ({**NUMBER, "question": "What percent?"}, ["3.14%", "3.14"], ["31.4%"]),
    ({"question": "?", "answer": "0.25", "answer_type": "number"}, ["25%", "1/4", "\\frac14"], ["0.25%", "4/1"]),
    ({"question": "?", "answer": 18885550142, "answer_type": "number"}, ["18885550142"], ["18885550143"]),
    ({"question": "?", "answer": 10**17 + 1, "answer_type": "number"}, ["100000000000000001"], ["100000000000000002"])])
def test_what_an_answer_takes_back_or_leaves_to_be_worked_out(row, right, wrong):
    found = scored(row, *right, *wrong, recipe="direct")
    assert [s.parts["accuracy"] for s in found] == [1] * len(right) + [0] * len(wrong)
