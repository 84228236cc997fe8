"""cards.py and forms.py: the answers of a group side by side, and what is wrong with their form."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.app.made_runs import made_group
from tests.app.markup import Markup
from tests.app.test_html import TEXTS
from tests.app.views import Plain, group, mark, rollout
from vlrl.app import cards, forms, in_memory
from vlrl.rewards.text import parse_answer

GOOD = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(("text", "prompt", "problems"), [
    (GOOD, "", ()), ("[1, 2]", "", ()), ("", "", ()), (GOOD + "<glue>[(1, 2)]</glue>", "", ()),
    ("a</think><answer>b</answer>", "", ("<think> is missing",)),
    ("[1]", "Use <think></think>.", ("<think> is missing", "</think> is missing")),
    (GOOD + " bye", "", ("text after the answer",)), ("Hi " + GOOD, "", ("text before <think>",)),
    ("<think>a</think>x<answer>b</answer>", "", ("text between the tags",)),
    (GOOD + "<answer>c</answer>", "", ("<answer> 2 times", "</answer> 2 times")),
    ("<answer>b</answer><think>a</think>", "", ("<think> after <answer>",)),
    ("<think>a<answer>b</answer></think>", "", ("<answer> inside <think>", "</answer> inside <think>")),
    ("<think>a", "", ("</think> is missing",)),
    ("a</answer>", "", ("<answer> is missing", "</answer> without an opening tag", "text before </answer>")),
])
def test_forms_by_hand(text, prompt, problems):
    assert forms.read(text, prompt).problems == problems
    assert forms.read(text, prompt, truncated=True).problems == (*problems, "cut off before its end")


@pytest.mark.parametrize(("opened", "text", "problems"), [
    ("<think>\n", "a</think><answer>b</answer>", ()), ("<think>\n", "<answer>b</answer>", ("</think> is missing",
                                                                                     "<answer> inside <think>")),
    ("<think>\n", "<think>a</think><answer>b</answer>", ("<think> 2 times", "<think> inside <think>")),
    ("<think>\n\n</think>\n\n", "<answer>b</answer>", ()), ("<think>\n\n</think>\n\n", GOOD, ())])
def test_what_the_prompt_has_opened_is_read_with_the_answer(opened, text, problems):
    prompt = "Write <answer></answer>.<|assistant|>" + opened
    found = forms.read(text, prompt, opened=opened)
    assert {*problems} <= {*found.problems} and bool(problems) == bool(found.problems)
    made = Markup(cards.group(group(rollout(0, completion=text, opened=opened)), Plain()))
    assert made.text.count("<think>") >= 1


def test_tags_that_the_other_answers_have_are_expected():
    assert forms.common_tags([GOOD, GOOD, "7"]) == {"think", "answer"} and forms.common_tags(["7", "8", GOOD]) == set()
    assert "<answer> is missing" in forms.read("7", others={"answer"}).problems
    made = Markup(cards.group(group(rollout(0), rollout(1), rollout(2, completion="7")), Plain()))
    assert made.text.count("<think> is missing") == 1


@settings(max_examples=60)
@example("</think><think>a")
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<glue>", "</glue>", "a", " ", "\n"]),
                max_size=9).map("".join))
def test_pieces_make_the_text_again(text):
    form = forms.read(text)
    assert "".join(p.text for p in form.pieces) == text
    if not form.problems and "<think>" in text:
        assert form.reasoning == parse_answer(text).reasoning
    assert all(p.text in ("<think>", "</think>", "<answer>", "</answer>", "<glue>", "</glue>")
               for p in form.pieces if p.tag)


def one(**more):
    """The card of one answer."""
    view = group(rollout(0, **more))
    return Markup(cards.card(view, view.rollouts[0]))


def test_a_card_by_hand():
    made = one(parts={"iou": 0.5, "format": 1.0, "safe": None, "length": -4.0}, error="TaskError: x", truncated=True,
               weights={"iou": 1.0, "format": 0.1, "length": 0.5}, finish_reason="length", variant="noisy")
    for words in ("#0", "0.6", "A +0.25", "3 tokens", "token limit", "policy 3", "variant noisy",
                  "cut off before its end", "iou0.5 × 1", "format1 × 0.1", "safenone", "length−4 × 0.5",
                  "Scorer: TaskError: x", "Reasoning"):
        assert words in made.text, words
    bars = [a for a in made.all("i") if "v-fill" in a.get("class", "")]
    assert [b["style"] for b in bars] == ["width:50.0%", "width:100.0%", "width:0.0%", "width:100.0%"]
    assert "v-minus" in bars[3]["class"] and "v-minus" not in bars[0]["class"]
    blocks = [a["class"] for a in made.all("details") + made.all("div") if "class" in a]
    assert "v-think" in blocks and "v-text v-final" in blocks
    assert made.all("a")[0]["href"] == "?page=rollouts&run=run&source=train&split=train&step=3&group=g&rollout=0"


def test_links_keep_the_place_in_a_list():
    made = Markup(cards.group(group(rollout(0)), Plain(), links={"from": "3", "run": "other"}))
    assert all("from=3" in a["href"] and "run=run" in a["href"] for a in made.all("a"))


def test_read_beside_target():
    assert "Read same" in one().text and "Read same" not in one(parsed=[1]).text
    assert "nothing could be read" in one(parsed=None).text and "The answer is empty" in one(completion="").text


def test_heads():
    made = Markup(cards.head(group(rollout(0), rollout(1), zero_variance=True, notes=("one file skipped",))))
    for words in ("0.6 ± 0.1", "zero variance", "cats", "difficulty 0.5", "step 3", "one file skipped"):
        assert words in made.text, words
    assert made.all("a")[0]["href"] == "?page=history&run=run&sample=s-1"
    assert "zero variance" not in cards.head(group(rollout(0), zero_variance=True))
    aside = group(rollout(0), rollout(1, variant="noisy", advantage=None))
    assert "beside the group1" in Markup(cards.head(aside)).text
    assert "no answers" in cards.strip(dataclasses.replace(group(), rollouts=()))


def test_many_answers_are_bounded():
    made = Markup(cards.strip(group(*(rollout(i) for i in range(80)))))
    assert len(made.all("article")) == 64 and "16 more answers" in made.text


def test_the_chosen_one_of_many_answers_is_shown():
    view = group(*(rollout(index=i) for i in range(150)))
    said = str(cards.strip(view, 70))
    assert 'id="v-answer-70"' in said and 'id="v-answer-64"' in said and 'id="v-answer-63"' not in said
    assert "86 more answers" in said and ">from #0 on<" in said and ">from #128 on<" in said
    assert "from #64 on" in cards.strip(view, None) and "from #" not in cards.strip(view, 70, links=False)


@pytest.mark.parametrize(("kind", "number"), [("boxes", 4), ("points", 2), ("clips", 2), ("paths", 3)])
def test_groups_of_every_task(kind, number):
    made = made_group(kind, number, 0)
    view = in_memory.group_view(made, "run")
    found = Markup(cards.group(view, in_memory.InlineImages(made.prompt.media), chosen=1))
    assert not found.odd and len(found.all("article")) == 4
    assert next(a for a in found.all("article") if "v-chosen" in a["class"])["id"] == "v-answer-1"
    assert all(i["src"].startswith("data:image/") for i in found.all("img")) and found.all("img")
    assert len([g for g in found.all("g") if "v-target" in g["class"]]) >= 1
    assert not Markup(cards.group(view, in_memory.InlineImages(()), links=False)).all("a")


VALUES = st.one_of(TEXTS, st.none(), st.floats(), st.lists(TEXTS, max_size=2),
                   st.dictionaries(TEXTS, TEXTS, max_size=2))
TAGS = set("section header article div span b i a p pre code h4 h5 details summary input label figure figcaption img "
           "h3 svg g title rect text style".split())


@settings(max_examples=20)
@given(TEXTS, VALUES, st.one_of(st.none(), st.floats()))
def test_hostile_groups_stay_text(text, value, number):
    answer = rollout(0, [mark("box", [1, 2, 3, 4], label=text), value], completion=text, parts={text: number},
                     error=text, weights={text: number}, parsed=value, reward=number, advantage=number,
                     finish_reason=text, variant=text, truncated=True)
    view = group(answer, rollout(1), sample_id=text, category=text, prompt=text, target=value, sample={text: value},
                 mean=number, difficulty=number, notes=(text,), task=text)
    made = Markup(cards.group(view, Plain()))
    assert not made.odd
    assert set(made.tags) <= TAGS
    assert not any(name.startswith("on") for a in made.attributes for name in a)
