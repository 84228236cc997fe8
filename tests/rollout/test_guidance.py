"""What second attempts are told, which are kept, and what becomes of their groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.helpers import credited_groups, load, settings
from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.config.sections import GUIDED, REPLACED
from vlrl.errors import ConfigError
from vlrl.methods.second_attempts.guidance import (
    WORDS,
    FirstAnswers,
    critique,
    hint,
    solution,
    task_guidance,
    true_answer,
)
from vlrl.methods.second_attempts.members import (
    RetryGroup,
    answer_start,
    correct,
    explains,
    hinted,
    join,
    mark_moved,
    replace_wrong,
    second_attempts,
)
from vlrl.models.packing import make_batch, pieces_of
from vlrl.rewards.text import answer_offset, parse_answer
from vlrl.task import Task
from vlrl.types import Answer, Sample

GIVEN = "<think>Two rows of four.</think><answer>8</answer>"


def tried(level=0, row=None, answers=("<answer>7</answer>",), correct=(False,), task=None):
    return FirstAnswers(task or Task(), Sample(id="a", row={"solution": GIVEN} if row is None else row),
                 [parse_answer(a) for a in answers], correct, level)


def test_a_hint_grows_and_ends_before_the_answer():
    said = [hint(tried(level)) for level in range(4)]
    begun = [s.split("\n", 1)[1] for s in said[:3]]
    assert begun == [
        GIVEN[:int(share * len(GIVEN))].rstrip() if share < 0.75 else "<think>Two rows of four.</think>"
        for share in (0.25, 0.5, 0.75)]
    assert said[3] is None and hint(tried(0), shares=(1.0,)).endswith("four.</think>")
    assert hint(tried(row={})) is None and hint(tried(row={"solution": "<answer>8</answer>"})) is None


@hypothesis_settings(max_examples=12)
@given(st.text(max_size=40), st.text(min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_the_final_answer_is_in_no_hint(before, final, share):
    text = f"<think>{before}</think><answer>{final}</answer>"
    said = hint(tried(row={"solution": text}), shares=(share,))
    assert said is None or text.startswith(said.split("\n", 1)[1])
    assert said is None or "<answer>" not in said.split("\n", 1)[1] or "<answer>" in before
    assert answer_offset(text) >= len("<think></think>") + len(before)


def test_the_other_words():
    class Known(Task):
        def oracle(self, sample):
            return "<answer>9</answer>"
        def guidance(self, sample, answers):
            return f"not {answers[0].final}"
    assert "is: 8\n" in true_answer(tried()) and "is: 9\n" in true_answer(tried(row={}, task=Known()))
    assert GIVEN in solution(tried()) and solution(tried(row={})) is None and true_answer(tried(row={})) is None
    said = critique(tried(answers=("right", "<answer>6</answer>", "<answer>5</answer>"), correct=(True, False, False)))
    assert "<answer>6</answer>" in said and "answer is: 8" in said and "5" not in said
    assert "correct answer" not in critique(tried(row={}))
    assert critique(tried(correct=(True,))) is None and critique(tried(correct=(None,))) is None
    assert task_guidance(tried(task=Known())) == "not 7"
    assert tried(answers=("x", "y"), correct=(None, False)).wrong == Answer(text="y", final="y")
    for options, why in (({"shares": [0.5, 1.5]}, "shares"), ({"shares": []}, "shares"), ({"share": 1}, "no option")):
        with pytest.raises(ConfigError, match=why):
            bind("algo.guided.words", Named(name="hint", **options), WORDS)
    assert all(WORDS[name](tried(1, task=Known())) is None for name in ("task", "answer", "solution", "critique"))


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    return policy, encode, credited_groups(policy, encode, config)


def group_of(scene, right=(False, True), firsts=(False, False, False), under=None):
    """A group with these first answers and attempts beside them."""
    group = scene[2][0]
    members = [replace(group.rollouts[0], index=i, correct=c) for i, c in enumerate(firsts)]
    aside = [replace(group.rollouts[1], index=len(firsts) + i, variant=GUIDED, correct=c, trained=c,
                     train_prompt=(under or [group.prompt] * len(right))[i], sampled_prompt=f"told {i}")
             for i, c in enumerate(right)]
    return replace(group, rollouts=tuple(members), aside=tuple(aside))


def test_one_kept_attempt_joins(scene):
    group = group_of(scene, (False, True, True))
    out = mark_moved(join(group))
    assert [r.index for r in out.rollouts] == [0, 1, 2, 4] and out.rollouts[3].train_prompt is group.prompt
    assert [(r.index, r.trained) for r in out.aside] == [(3, False), (5, False)] and not second_attempts(out)
    assert [r.index for r in out.plain] == [0, 1, 2] and out.prompt is group.prompt
    none = join(group_of(scene, (False,)))
    assert len(none.rollouts) == 3 and [r.trained for r in none.aside] == [False]


def test_one_kept_attempt_takes_the_place_of_the_last_wrong_answer(scene):
    out = mark_moved(replace_wrong(group_of(scene, (True, True), firsts=(False, False, None))))
    assert [r.index for r in out.rollouts] == [0, 3, 2] and out.rollouts[1].variant == GUIDED
    gone = out.aside[-1]
    assert (gone.index, gone.variant, gone.trained) == (1, REPLACED, False) and gone.sampled_prompt == out.prompt.text
    assert sorted(r.index for r in out.plain) == [0, 1, 2] and not second_attempts(out)
    right = replace_wrong(group_of(scene, firsts=(True, None, None)))
    assert [r.index for r in right.rollouts] == [0, 1, 2] and not second_attempts(right)


def test_the_hinted_group_takes_the_place_of_the_group(scene):
    first, second = scene[2][1].prompt, scene[2][2].prompt
    group = group_of(scene, (False, False, True, False), under=[first, first, second, second])
    out = mark_moved(hinted(group))
    assert out.prompt is second and [r.index for r in out.rollouts] == [5, 6]
    assert all(r.train_prompt is None and r.trained and r.variant == GUIDED for r in out.rollouts)
    assert sorted((r.index, r.variant, r.trained) for r in out.aside) == [
        (0, REPLACED, False), (1, REPLACED, False), (2, REPLACED, False), (3, GUIDED, False), (4, GUIDED, False)]
    assert [r.index for r in out.plain] == [0, 1, 2]
    helpless = hinted(group_of(scene, (False, False), under=[first, second]))
    assert helpless.prompt is group.prompt and [r.index for r in helpless.rollouts] == [0, 1, 2]


def test_the_answer_starts_at_its_tag(scene):
    _, encode, _ = scene
    decode = encode.processor.tokenizer.decode
    for text, before in (("a b<answer>8</answer>", "a b"), ("<think>né 漢</think><answer>x</answer>", None), ("8", "")):
        tokens = encode.answer_ids(text)
        at = answer_start(tokens, decode)
        place = text.find("<answer>") if "<answer>" in text else 0
        assert len(decode(tokens[:at])) <= place < len(decode(tokens[:at + 1]))
        assert before is None or decode(tokens[:at]) == before


def planted(scene, solution_mean, behind, alone, right=True):
    """One attempt of known log-probabilities -0.5 before its answer, `behind` on it; `alone` on it without the rest."""
    _, encode, groups = scene
    tokens = encode.answer_ids("why<answer>8</answer>")
    at = answer_start(tokens, encode.processor.tokenizer.decode)
    attempt = replace(groups[0].rollouts[0], correct=right,
                      completion=replace(groups[0].rollouts[0].completion, tokens=tokens))
    sample = Sample(id="a", row={"solution": "z"} if solution_mean is not None else {})
    asked = RetryGroup(Task(), sample, groups[0].prompt, [attempt], encode)
    seen = []

    def read(prompts, rows):
        seen.extend((p, len(r)) for p, r in zip(prompts, rows, strict=True))
        whole, rest, given = rows
        return [np.where(np.arange(len(whole)) < at, -0.5, behind), np.full(len(rest), alone),
                np.full(len(given), 0.0 if solution_mean is None else solution_mean)]

    kept = explains([asked], read)
    assert [n for _, n in seen[:2]] == [len(tokens), len(tokens) - at] and all(p is groups[0].prompt for p, _ in seen)
    return kept


def test_what_explains_is_kept(scene):
    assert planted(scene, -0.9, -0.5, -0.6) == [[True]]
    assert planted(scene, -0.4, -0.5, -0.6) == [[False]]  # less likely than the given solution
    assert planted(scene, -0.9, -0.5, -0.5) == [[False]]  # the answer is no likelier than without it
    assert planted(scene, None, -0.5, -0.6) == [[True]]  # nothing to compare with
    assert planted(scene, -0.9, -0.5, -0.6, right=False) == [[False]]
    assert explains([], lambda prompts, rows: []) == []
    _, encode, groups = scene  # `correct` reads nothing
    attempts = [replace(groups[0].rollouts[0], correct=c) for c in (True, None, False)]
    assert correct([RetryGroup(Task(), groups[0].sample, groups[0].prompt, attempts, encode)], None) == [
        [True, False, False]]


def test_the_policy_is_read_as_it_is(scene):
    """Against one answer at a time, on real attempts."""
    policy, encode, groups = scene
    sample, prompt = Sample(id="a", row={"solution": "a b c"}), groups[0].prompt
    texts = ("e e<answer>8</answer>", "zz q<answer>8</answer>", "<answer>8</answer>")
    attempts = [replace(groups[0].rollouts[0], correct=True, completion=replace(
        groups[0].rollouts[0].completion, tokens=encode.answer_ids(t))) for t in texts]
    def one(prompt, tokens):
        with torch.no_grad():
            return policy.logprobs(make_batch(pieces_of([prompt], [tokens], 10**6)), 1.0).logprobs.numpy()
    found = explains([RetryGroup(Task(), sample, prompt, attempts, encode)],
                     lambda prompts, rows: [one(p, r) for p, r in zip(prompts, rows, strict=True)])
    wanted = []
    for r in attempts:
        tokens = r.completion.tokens
        at = answer_start(tokens, encode.processor.tokenizer.decode)
        whole = one(prompt, tokens)
        wanted.append(bool(whole.mean() > one(prompt, encode.answer_ids("a b c")).mean()
                           and whole[at:].sum() > one(prompt, tokens[at:]).sum()))
    assert found == [wanted] and not wanted[2]  # without an explanation it is compared with itself
