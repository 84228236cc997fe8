from dataclasses import replace

import pytest

from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load

ROW = {"id": "r1", "label": "Tabby cat", "labels": ["Tabby cat", "dog"], "synonyms": ["tabby"]}


def score(mode, text, **row):
    task = load("classification", {"thinking": mode})
    return task.score(task.sample_from_row({**ROW, **row}), parse_answer(text))


@pytest.mark.parametrize(("text", "accuracy", "format"), [
    ("Tabby cat", 1, 1),
    ("tabby", 1, 1),  # a synonym
    ("dog", 0, 1),
    ("tabby cat", 0, 0),  # exact, as CLS-RL compares
    ("Tabby cat.", 0, 0),
    ("<answer>Tabby cat</answer>", 0, 0),
    ("Tabby cat dog", 0, 0),
    ("", 0, 0),
])
def test_without_thinking_the_whole_text_is_compared(text, accuracy, format):
    assert score("no_thinking", text) == {"accuracy": accuracy, "format": format}


@pytest.mark.parametrize(("text", "accuracy", "format"), [
    ("<think>stripes</think><answer>Tabby cat</answer>", 1, 1),
    ("<think>stripes</think>\n<answer> tabby CAT. </answer>", 1, 1),
    ("<think>stripes</think><answer>tabby</answer>", 1, 1),
    ("<think>stripes</think><answer>dog</answer>", 0, 1),
    ("<think>Tabby cat</think><answer>a pet</answer>", 0, 1),  # named in the thinking only
    ("<answer>Tabby cat</answer>", 1, 0),
    ("<think>a</think><answer>dog</answer><answer>Tabby cat</answer>", 1, 0),
    ("<think>a</think><answer>Tabby cat, dog</answer>", 0, 1),  # all the names
    ("Tabby cat", 0, 0),
    ("<think>a</think>Tabby cat", 0, 0),
    ("", 0, 0),
])
def test_with_thinking_the_answer_tag_is_compared(text, accuracy, format):
    assert score("thinking", text) == {"accuracy": accuracy, "format": format}


def test_without_candidates_the_format_is_one_plain_line():
    for text, format in (("anything", 1), ("two\nlines", 0), ("<think>a", 0), (" ", 0)):
        assert score("no_thinking", text, labels=None, synonyms=None)["format"] == format


def test_both_templates_are_scored_as_they_ask():
    task = load("classification", {"thinking": "both"})
    sample = task.sample_from_row(ROW)
    assert len(task.templates) == 2
    for template in task.templates:
        visit = replace(sample, prompt=template)
        assert task.thinks(visit) is ("<think>" in template)
        assert task.score(visit, parse_answer(task.oracle(visit))) == {"accuracy": 1, "format": 1}
        text = task.messages(visit)[0]["content"][-1]["text"]
        assert text.startswith("What does the image show? Choose from: Tabby cat, dog.")


def test_own_question_and_own_prompt():
    task = load("classification", {"prompt": "Name it: {question}"})
    sample = task.sample_from_row({**ROW, "question": "What?"})
    assert task.messages(sample)[0]["content"][-1]["text"] == "Name it: What?"
    assert task.thinks(task.sample_from_row(ROW)) is False


@pytest.mark.parametrize(("change", "words"), [
    ({"label": None}, "label=None"), ({"label": ["a", "b"]}, "lists of labels"), ({"label": ""}, "label=''"),
    ({"labels": "a"}, "labels='a'"), ({"synonyms": [None]}, "synonyms"), ({"id": None}, "id=None")])
def test_bad_rows_are_named(change, words):
    with pytest.raises(DataError, match=words):
        load("classification").sample_from_row({**ROW, **change})


def test_an_unknown_mode():
    with pytest.raises(ConfigError, match=r"task\.thinking='maybe'"):
        load("classification", {"thinking": "maybe"})
