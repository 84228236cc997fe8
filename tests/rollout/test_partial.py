"""Partial rollouts: answers that go on in later steps become what they would have become unbroken.

Runs that are killed, and of two processes: tests/e2e/test_curricula.py."""

import dataclasses

import numpy as np
import pytest

from tests.conftest import SAMPLES
from tests.e2e.runs import metrics, write_config
from tests.helpers import Vowels, load, settings
from tests.rollout.test_group_source import BAD, Number, source
from vlrl.config import load as load_config
from vlrl.config import validate
from vlrl.curriculum import Draw
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.capacity import batches
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, DataError
from vlrl.rollout import partial
from vlrl.store.checkpoint import load_state, save
from vlrl.tools.experiments.report import print_summary
from vlrl.training import sft
from vlrl.training.advantages import _written
from vlrl.training.loop import train
from vlrl.types import Completion, Prompt, Turn

LONG = Sampling(max_new_tokens=20)
KINDS = ("text", "image", "two images", "video")


@pytest.fixture(scope="module")
def parts(tiny_models):
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    return policy, {kind: encode(Vowels(), SAMPLES[kind]) for kind in KINDS}


def requests(prompts, sampling, n=5):
    return [Request(prompt=p, n=n, sampling=sampling, key=(0, i)) for i, p in enumerate(prompts)]


def pieced(engine, whole, borders):
    """The answers to requests, written up to each border in a call of its own; finished ones take no part."""
    made = [[None] * r.n for r in whole]
    for most in (*borders, whole[0].sampling.max_new_tokens):
        asked, places = [], []
        for i, r in enumerate(whole):
            limit = dataclasses.replace(r.sampling, max_new_tokens=most)
            begun = tuple(AnswerPrefix(index=k, written=c) for k, c in enumerate(made[i]) if c is not None
                          and c.truncated)
            if begun or made[i][0] is None:
                asked.append(dataclasses.replace(r, sampling=limit, begun=begun, n=len(begun) or r.n))
                places.append([(i, b.index) for b in begun] or [(i, k) for k in range(r.n)])
        for own, answers in zip(places, engine.generate(asked), strict=True):
            for (i, k), c in zip(own, answers, strict=True):
                made[i][k] = c
    return made


def assert_same(found, whole):
    assert len(found) == len(whole)
    for c, expected in zip([c for g in found for c in g], [c for g in whole for c in g], strict=True):
        assert c.tokens.tolist() == expected.tokens.tolist() and c.text == expected.text
        assert np.abs(c.logprobs - expected.logprobs).max() < 2e-5
        assert c.loss_mask.tolist() == expected.loss_mask.tolist() and c.finish_reason == expected.finish_reason
        assert [t.start for t in c.turns[1:]] == [t.end for t in c.turns[:-1]] and c.turns[-1].end == len(c.tokens)


RULES = {"plain": {}, "stop": {"stop": ("e", "il")}, "budget": {"thinking_budget": 5},
         "both": {"thinking_budget": 4, "stop": ("k>\n",)}}


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
def test_pieces_are_the_unbroken_answer(parts, rules):
    """Whatever the borders cut: a stop string, the forced end of thinking; texts and images side by side."""
    policy, prompts = parts
    whole = requests(prompts.values(), dataclasses.replace(LONG, **RULES[rules]))
    unbroken = HFEngine(policy, 3).generate(whole)
    forced = {int(t) for g in unbroken for c in g for t in np.flatnonzero(~c.loss_mask)}
    for borders in ((5, 7), (1, 3, 6, 9, 19)):
        found = pieced(HFEngine(policy, 3), whole, borders)
        assert_same(found, unbroken)
        longest = max(len(c.tokens) for g in unbroken for c in g)
        assert max(len(c.turns) for g in found for c in g) == 1 + sum(border < longest for border in borders)
    assert not forced or any({border - 1, border} <= forced for border in (3, 5, 6, 7, 9))  # cut in the middle
    assert ("stop" in RULES[rules]) == any(c.finish_reason == "stop" for g in unbroken for c in g)


def cut(c, length):
    """The completion as it was after some tokens."""
    return dataclasses.replace(c, tokens=c.tokens[:length], logprobs=c.logprobs[:length], finish_reason="length",
                               loss_mask=c.loss_mask[:length], turns=(Turn(start=0, end=length),))


def test_answers_of_any_length_go_on_beside_new_ones(parts):
    policy, prompts = parts
    fresh, *others = whole = requests(prompts.values(), dataclasses.replace(LONG, thinking_budget=6))
    unbroken = HFEngine(policy, 3).generate(whole)
    order, cuts = (4, 0, 3, 1), ((1, 7, 19, 4), (2, 2, 2, 2), (6, 12, 7, 8))
    begun = [tuple(AnswerPrefix(index=k, written=cut(answers[k], n)) for k, n in zip(order, lengths, strict=True))
             for answers, lengths in zip(unbroken[1:], cuts, strict=True)]
    asked = [dataclasses.replace(r, begun=b, n=len(b)) for r, b in zip(others, begun, strict=True)]
    wanted = [unbroken[0], *([answers[k] for k in order] for answers in unbroken[1:])]
    for rows in (64, 3):
        assert_same(HFEngine(policy, 3, rows).generate([fresh, *asked]), wanted)


def test_log_probabilities_of_the_earlier_part_stay(parts):
    policy, prompts = parts
    (request,) = requests([prompts["text"]], LONG, n=1)
    ((c,),) = HFEngine(policy, 3).generate([request])
    told = dataclasses.replace(cut(c, 9), logprobs=np.full(9, -7, np.float32))
    begun = dataclasses.replace(request, begun=(AnswerPrefix(index=0, written=told),))
    ((found,),) = HFEngine(policy, 3).generate([begun])
    assert (found.logprobs[:9] == -7).all() and np.abs(found.logprobs[9:] - c.logprobs[9:]).max() < 2e-5


def test_an_answer_that_goes_on_is_a_prompt_with_it():
    prompt = Prompt(sample_id="a", text="", ids=np.arange(5), raw_ids=np.arange(5), positions=np.arange(5)[None])
    whole = Completion(tokens=np.zeros(9, int), logprobs=np.zeros(9), loss_mask=np.ones(9, bool), text="",
                       finish_reason="length")
    begun = tuple(AnswerPrefix(index=i, written=cut(whole, n)) for i, n in ((0, 9), (2, 4)))
    asked = [Request(prompt=prompt, n=2, sampling=LONG, begun=begun), Request(prompt=prompt, n=2, sampling=LONG)]
    sizes = []
    (jobs,) = batches(asked, lambda *size: not sizes.append(size))
    assert jobs == [(0, [0, 1]), (1, [0, 1])]
    assert sizes == [(2, 14, 2, 16), (3, 14, 3, 20), (3, 14, 4, 20)]  # prompts, the widest, answers, the longest
    prompt = Prompt(sample_id="a", text="", ids=np.array([5, 6]), raw_ids=np.array([5]), aligned={"kind": np.ones(2)},
                    positions=np.array([[0, 1], [0, 4], [0, 2]]), aligned_answer={"kind": 3})
    longer = prompt.followed_by(np.array([8, 9, 7]))
    assert longer.ids.tolist() == [5, 6, 8, 9, 7] and longer.raw_ids.tolist() == [5, 8, 9, 7]
    assert longer.positions.tolist() == [[0, 1, 5, 6, 7], [0, 4, 5, 6, 7], [0, 2, 5, 6, 7]]
    assert longer.aligned["kind"].tolist() == [1, 1, 3, 3, 3] and longer.next_position == 8


MOST = 11


def length(n, i):
    return 1 + (3 * n + 4 * i) % 14


def partial_source(**more):
    rollout = {"group_size": 3, "max_new_tokens": MOST, "step_tokens": 4}
    return source(lambda prompt, i: "x" * length(int(prompt.text), i), rollout=rollout, **more)


def parts_of(n, i):
    return -(-min(length(n, i), MOST) // 4)


def simulated(steps, count):
    """(samples whose groups are whole, groups held over) after each step, by the definition."""
    held, following, out = {}, 0, []
    for step in range(steps):
        for _ in range(count - len(held)):
            held[following] = step + max(parts_of(following % 10, i) for i in range(3))
            following += 1
        whole = [g for g, due in held.items() if due == step + 1]
        held = {g: due for g, due in held.items() if g not in whole}
        out.append(([g % 10 for g in whole], len(held)))
    return out


def test_groups_wait_until_all_answers_have_ended():
    s, seen = partial_source(), []
    s.sampler.observe = lambda outcomes, step: seen.extend((o.draw.visit, o.draw.index) for o in outcomes)
    expected = simulated(7, 4)
    for step, (whole, held) in enumerate(expected):
        groups = s.next_groups(4, step)
        assert [g.sample["n"] for g in groups] == whole and len(s.carried_over) == held == s.metrics()["partial/held"]
        for g in groups:
            needed = [parts_of(g.sample["n"], r.index) for r in g.rollouts]
            begun = step + 1 - max(needed)
            assert [r.policy_step for r in g.rollouts] == [begun + n - 1 for n in needed]
            for r, n in zip(g.rollouts, needed, strict=True):
                c, tokens = r.completion, min(length(g.sample["n"], r.index), MOST)
                assert len(c.tokens) == tokens and len(c.turns) == n
                assert c.loss_mask.tolist() == [False] * 4 * (n - 1) + [True] * (tokens - 4 * (n - 1))
                assert _written(c) == tokens and c.truncated == (length(g.sample["n"], r.index) > MOST)
        if groups:
            made = [len(r.completion.turns) for g in groups for r in g.rollouts]
            assert s.metrics()["partial/segments_mean"] == pytest.approx(np.mean(made))
    assert any(not whole for whole, _ in expected) and any(held == 0 or len(whole) == 4 for whole, held in expected[1:])
    assert len(seen) == len(set(seen)) == sum(len(whole) for whole, _ in expected)  # each draw is observed once


def test_groups_that_are_not_kept_are_refilled_and_short_answers_are_never_held_over():
    s = source(lambda prompt, i: "xxxx", rollout={"group_size": 3, "max_new_tokens": 12, "step_tokens": 4})
    assert len(s.next_groups(4, 0)) == 4 and s.metrics()["partial/held"] == 0
    assert s.metrics()["partial/segments_mean"] == 1
    assert "partial/held" not in source(lambda prompt, i: "x").metrics()
    # keep=mixed drops what is whole; what is underway is not drawn for again in the same step.
    s = partial_source(curriculum={"keep": "mixed", "max_refills": 2})
    assert s.next_groups(4, 0) == [] and len(s.carried_over) + len(s.dropped) == s.drawn
    assert len(s.carried_over) == 4 or s.tally.metrics()["curriculum/refills"] == 2


def test_what_is_held_over_is_in_the_checkpoint(tmp_path):
    for stop in range(1, 6):
        a, b = partial_source(), partial_source()
        for step in range(stop):
            a.next_groups(4, step)
        path = save(tmp_path / str(stop), stop, lambda folder: None, {"source": a.state_dict()}, 1)
        b.load_state_dict(load_state(path)["source"])
        assert list(b.carried_over) == list(a.carried_over)
        for step in range(stop, stop + 3):
            for g, h in zip(a.next_groups(4, step), b.next_groups(4, step), strict=True):
                assert (g.id, g.sample.id, g.rewards) == (h.id, h.sample.id, h.rewards)
                for r, q in zip(g.rollouts, h.rollouts, strict=True):
                    assert (r.policy_step, r.completion.text, r.completion.turns) == (
                        q.policy_step, q.completion.text, q.completion.turns)
                    for name in ("tokens", "logprobs", "loss_mask"):
                        x, y = getattr(r.completion, name), getattr(q.completion, name)
                        assert x.dtype == y.dtype and x.tolist() == y.tolist()
    draw = Draw(3, 1, 5, 99, 4, 0.5, (("size", 0.5), ("hue", 2.0)), (("told", True), ("words", "few")))
    assert partial.PartialGroup.of(partial.PartialGroup(7, draw, (), (), 9).state_dict()).draw == draw
    masked = dataclasses.replace(r.completion, loss_mask=np.arange(len(r.completion.tokens)) % 2 > 0)
    assert partial.completion_of(**partial.completion_state(masked)).loss_mask.tolist() == masked.loss_mask.tolist()


def test_a_sample_that_is_gone_leaves_its_group_out():
    s = partial_source(data={"quarantine": True})
    s.next_groups(4, 0)
    number, lost = next((k, h) for k, h in s.carried_over.items())
    BAD[lost.draw.index] = DataError("gone.png cannot be read")
    for step in range(1, 5):
        assert f"{number:08d}" not in [g.id for g in s.next_groups(4, step)]
    assert s.metrics()["prompts/rejected"] >= 1 and number not in s.carried_over


def test_settings_that_cannot_work_are_named():
    for rollout, says in (
            ({"step_tokens": 512}, r"step_tokens=512 is not below rollout\.max_new_tokens=512.*lower"),
            ({"step_tokens": 8, "forget": {"lr": 1e-3}}, r"step_tokens=8 .*rollout\.forget\.lr=0\.001.*default"),
            ({"step_tokens": 0}, r"rollout\.step_tokens")):
        with pytest.raises(ConfigError, match=says):
            validate({"task": "x", "model": {"name": "x"}, "rollout": rollout})


class Shuffled(Number):
    def variants(self, sample, n, step):
        return []


def test_runs_that_cannot_hold_answers_over_are_refused():
    config = validate({"task": "x", "model": {"name": "x"}, "rollout": {"step_tokens": 8}})
    for task, requires, generates, says in (
            (Shuffled(), frozenset(), True, "has variants"), (Number(), frozenset(), False, "supervised fine-tuning"),
            (Number(), frozenset(["greedy"]), True, "choose another algo")):
        with pytest.raises(ConfigError, match=rf"rollout\.step_tokens=8: .*{says}.*leave rollout\.step_tokens out"):
            partial.check(config, task, requires, generates)
        partial.check(validate({"task": "x", "model": {"name": "x"}}), task, requires, generates)
    partial.check(config, Number(), frozenset(["reference"]), True)


def test_vlrl_sft_refuses_it(tiny_models, tmp_path):
    config = load_config(write_config(tmp_path, tiny_models["qwen3_vl"]),
                         [f"run.dir={tmp_path / 'run'}", "rollout.step_tokens=3"])
    with pytest.raises(ConfigError, match=r"rollout\.step_tokens=3: supervised fine-tuning samples no completions"):
        sft.train(config)


@pytest.mark.slow
def test_steps_without_a_whole_group_go_by(tiny_models, tmp_path):
    """The weights stay as they are, and what is held over at the end is counted."""
    config = load_config(write_config(tmp_path, tiny_models["qwen3_vl"]), [
        f"run.dir={tmp_path / 'run'}", "rollout.step_tokens=3", "steps=4", "eval.samples=0", "save.every=2",
        "rollout.prompts_per_step=2", "rollout.group_size=2"])
    session = train(config)
    lines = metrics(session.folder.path)
    assert [m["partial/held"] for m in lines] == [2, 2, 0, 2] and lines[2]["partial/segments_mean"] == 3
    assert ["reward/mean" in m for m in lines] == [False, False, True, False]
    assert [m["grad_norm"] > 0 for m in lines] == [False, False, True, False] and lines[-1]["rollouts/total"] == 4
    rows = session.folder.rollouts().to_pylist()
    assert len(rows) == 4 and {r["policy_step"] for r in rows} == {2} and {len(r["token_ids"]) for r in rows} == {8}
    print_summary(session.folder, session.done, print)
