"""Second attempts under guidance: who is asked again, with what words, and where the answers are kept."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.environments.acting import Acting, engine_of
from tests.helpers import load, settings, started
from tests.rollout.test_branching import Counting
from tests.tables import each
from vlrl.algo.algorithm import Algorithm
from vlrl.config import validate
from vlrl.config.sections import GUIDED
from vlrl.curriculum import Draw
from vlrl.engine.base import reset_sample
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TaskError
from vlrl.methods.second_attempts import method as guided
from vlrl.methods.second_attempts.guidance import guidance_of
from vlrl.methods.second_attempts.members import second_attempts
from vlrl.methods.second_attempts.method import all_wrong
from vlrl.models.packing import training_rows
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import AcceptedDraw, RolloutGenerator
from vlrl.store import RunFolder
from vlrl.task import Task, with_guidance
from vlrl.task.base import fill
from vlrl.types import Media, Sample

GUIDED_ALGO = {"guided": {"answers": 3}}


class Marks(Task):
    """Answers of train-0 are right by chance, all others wrong; with guidance every answer is right."""

    prompt, rewards, outcome = "Say {id}.", {"said": 1.0}, {"said": 1.0}
    told: str = "Look {twice}."

    def samples(self, split):
        picture = Media(source=Image.new("RGB", (64, 64), (9, 80, 120)))
        return [Sample(id=f"{split}-{i}", row={"id": i}, media=(picture,)) for i in range(4)]

    def score(self, sample, answer):
        return {"said": float(sample["id"] == 0)}

    def guidance(self, sample, answers):
        self.seen = [*answers]
        return self.told if sample["id"] != 3 else None


class Right(Marks):
    """Second attempts are right where they are longer than one token."""

    def score(self, sample, answer):
        return {"said": float(sample["id"] == 0 or (getattr(self, "seen", None) is not None and len(answer.text) > 3))}


@pytest.fixture(scope="module")
def tiny(tiny_models):
    config = settings(tiny_models["qwen3_vl"], algo=GUIDED_ALGO)
    return *load(config), config


def drawn(tiny, task, config=None, calls=None):
    """Groups and what guided them; `calls` takes what was asked of the engine."""
    _, encode, own = tiny
    config, engine = config or own, Counting(HFEngine(tiny[0], seed=5, batch_rollouts=16))
    engine.calls = engine.calls if calls is None else calls
    algorithm = started(config, tiny[0], encode)
    guide = next((method.guiding for method in algorithm.methods), None)
    generator = RolloutGenerator(config, task, engine, Clock(), algorithm, methods=algorithm.methods)
    asked = [AcceptedDraw(i, Draw(i, 0), s, encode(task, s)) for i, s in enumerate(task.samples("train"))]
    return generator.groups(asked, 0), guide


def test_groups_without_a_correct_answer_are_asked_again(tiny):
    calls = []
    groups, guide = drawn(tiny, Marks(), calls=calls)
    without, _ = drawn(tiny, Marks(), settings(tiny[0].model.config._name_or_path))
    for a, b in zip(groups, without, strict=True):  # what groups hold does not depend on it
        assert [r.completion.tokens.tolist() for r in a.rollouts] == [r.completion.tokens.tolist() for r in b.rollouts]
        assert a.rewards == b.rewards and not b.aside
    # in random streams of their own, drawn together once all groups are scored
    assert [[(r.key, r.n) for r in call] for call in calls] == [
        [((0, i), 3) for i in range(4)], [((10, 1), 3), ((10, 2), 3)]]
    assert [[r.variant for r in g.aside] for g in groups] == [[], ["guided"] * 3, ["guided"] * 3, []]
    for g in groups[1:3]:
        assert [r.index for r in g.aside] == [3, 4, 5] and all(r.train_prompt is g.prompt for r in g.aside)
        assert all(r.sampled_prompt == g.aside[0].sampled_prompt for r in g.aside)
        # the guidance stands as it is, no field of the row in it, and behind the question
        assert "Say " in g.aside[0].sampled_prompt and ".\n\nLook {twice}.<|im_end|>" in g.aside[0].sampled_prompt
        assert g.prompt.text.replace("<|im_end|>\n<|im_start|>assistant", "") in g.aside[0].sampled_prompt.replace(
            "\n\nLook {twice}.<|im_end|>\n<|im_start|>assistant", "")
        assert len({r.completion.tokens.tobytes() for r in (*g.rollouts, *g.aside)}) > 1
        assert not second_attempts(g)  # none is right
    assert guide.metrics() == {"guided/groups_frac": 0.5, "guided/rejected": 0, "guided/success": 0.0,
                               "guided/kept": 0.0, "guided/level_0_frac": 0.0}
    assert guide.metrics() == {"guided/groups_frac": 0.0, "guided/rejected": 0}


def test_correct_ones_are_learned_from_and_first_answers_are_told(tiny):
    task = Right()
    groups, guide = drawn(tiny, task)
    taught = [r for g in groups for r in second_attempts(g)]
    assert taught and all(r.correct and r.variant == GUIDED for r in taught)
    assert len(task.seen) == 3 and all(a.text is not None for a in task.seen)
    assert guide.metrics()["guided/success"] == len(taught) / len([r for g in groups for r in g.aside])


class Explained(Right):
    """Wrong at first; answers have no tag."""

    prompt = "Say {id}."

    def score(self, sample, answer):
        return {"said": float(getattr(self, "seen", None) is not None)}

    def oracle(self, sample):
        return "5"


def test_explanations_that_no_answer_has_are_counted_and_told_once(tiny, caplog):
    more = {"keep": "explains", "loss": "expo", "answers": 2}
    config = settings(tiny[0].model.config._name_or_path, algo={"guided": more})
    _, guide = drawn(tiny, Explained(), config)
    found = guide.metrics()
    assert found["guided/bare_frac"] == 1 and found["guided/kept"] == 0
    _, again = drawn(tiny, Explained(), config)
    guide.counts = again.counts
    guide.metrics()
    assert [r.message.partition(":")[0] for r in caplog.records] == ["algo.guided.keep=explains keeps nothing"]


def test_a_prompt_that_grows_too_long_is_left_out_and_counted(tiny):
    policy, encode, config = tiny
    most = len(encode(Marks(), Marks().samples("train")[1])) + 8
    config = settings(policy.model.config._name_or_path, algo=GUIDED_ALGO, limits={"prompt_tokens": most})
    short = (policy, type(encode)(policy.processor, policy.family, policy.positions, config), config)
    groups, guide = drawn(short, Marks(told="Look at it again and again and again, at every corner."))
    assert not any(g.aside for g in groups)
    assert guide.metrics() == {"guided/groups_frac": 0.5, "guided/rejected": 2}


def test_failed():
    for rewards, again in (([False, False], True), ([False, None], True), ([False, True], False), ([None, None], False),
                           ([], False)):
        found = type("Found", (), {"rollouts": [type("R", (), {"correct": c}) for c in rewards]})
        assert all_wrong(found) is again, rewards


def test_hints_of_rows_are_guidance_and_guidance_follows_the_last_text():
    sample = Sample(id="a", row={"hints": ["weak", "strong"]})
    assert guidance_of(Task(), sample, []) == "weak"
    assert guidance_of(Task(), Sample(id="a", row={}), []) is None
    assert guidance_of(Task(), Sample(id="a", row={"hints": []}), []) is None
    messages = [{"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}]
    kept = [dict(m) for m in messages]
    assert with_guidance(messages, "There.")[1]["content"] == [{"type": "image"},
                                                                 {"type": "text", "text": "Where?\n\nThere."}]
    assert messages == kept and messages[1]["content"][1]["text"] == "Where?"
    assert with_guidance([{"role": "user", "content": "Where?"}], "There.")[0]["content"] == [
        {"type": "text", "text": "Where?\n\nThere."}]
    assert with_guidance([{"role": "user", "content": [{"type": "image"}]}], "x")[0]["content"] == [
        {"type": "image"}, {"type": "text", "text": "\n\nx"}]
    assert fill("{a}", {"a": "{b}"}) == "{b}"
    class Odd(Task):
        name = "odd"
        def guidance(self, sample, answers):
            return 3 if sample.id == "a" else {}["no"]
    for name, said in (("a", "returned int for sample 'a'"), ("b", "failed for sample 'b': .*KeyError: 'no'")):
        with pytest.raises(TaskError, match=rf"task 'odd': guidance\(\) {said}"):
            guidance_of(Odd(), Sample(id=name, row={}), [])


def config_of(**more):
    return validate({"task": "x", "model": {"name": "y"}, "algo": {"guided": {}}, **more})


@each("more said", [
    ({"rollout": {"step_tokens": 4, "max_new_tokens": 9}}, "algo.guided .* rollout.step_tokens=4"),
    ({"async": {"max_staleness": 1}, "algo": {"guided": {}, "correction": "token_truncate"}},
     "algo.guided .* async.max_staleness=1"),
    ({"curriculum": {"keep": "mixed"}}, "curriculum.keep=mixed drops groups without a correct answer"),
    ({"curriculum": {"keep": {"name": "pass_range", "low": 0.1}}}, "curriculum.keep=pass_range drops"),
])
def test_settings_that_cannot_go_with_it_are_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        config_of(**more)


def test_a_task_without_guidance_is_refused():
    class Bare(Task):
        def samples(self, split):
            return [Sample(id="a", row={}), Sample(id="b", row={"hints": ["x"]})]
    rows = Bare().samples("train")
    with pytest.raises(ConfigError, match=r"algo\.guided retries failed groups .*: define guidance"):
        guided.check(config_of(), Bare(), rows[:1])
    guided.check(config_of(), Bare(), rows)
    guided.check(config_of(), Marks(), rows[:1])
    with pytest.raises(ConfigError, match=r"algo\.guided\.loss='other' is not known"):
        Algorithm(config_of(algo={"guided": {"loss": "other"}}))


class Told(Acting):
    """No episode is right."""

    outcome = {"vowels": 99.0}

    def guidance(self, sample, answers):
        assert all(len(a.turns) == 3 for a in answers)
        return "Write vowels."


def test_episodes_are_played_again_from_the_same_start(tiny):
    policy, encode, _ = tiny
    config = settings(policy.model.config._name_or_path, algo=GUIDED_ALGO, episode={"history": "last:1"})
    with engine_of(policy, encode, config, Told(rewards={"vowels": 1.0})) as (engine, task):
        samples = [reset_sample(engine, task, sample, i) for i, sample in enumerate(task.samples("train")[1:3])]
        asked = [AcceptedDraw(i, Draw(i, 0), sample, encode(task, sample)) for i, sample in enumerate(samples)]
        algorithm = started(config, policy, encode)
        groups = RolloutGenerator(config, task, engine, Clock(), algorithm, methods=algorithm.methods).groups(asked, 0)
    for group in groups:
        assert len(group.aside) == 3 and all(len(r.completion.actions) == 3 for r in group.aside)
        assert all(r.completion.error is None for r in group.aside)
        for r in group.aside:
            mine, first = r.completion, group.rollouts[0].completion
            assert mine.observed_media[0].sha256 == first.observed_media[0].sha256  # the same world
            assert mine.loss_mask.sum() == sum(t.end - t.start for t in mine.actions) < len(mine.tokens)
            for other in (first, mine):  # positions count from the end of the plain prompt
                for _, row in training_rows(other):
                    assert row.shown is None or row.shown.positions.min() == group.prompt.next_position
            assert "Write vowels." in r.sampled_prompt and "Write vowels." not in group.prompt.text


def test_the_stored_prompt_is_the_sampled_one(tiny, tmp_path):
    groups, _ = drawn(tiny, Marks())
    groups = [replace(g, aside=tuple(replace(r, advantage=0.0) for r in g.aside)) for g in groups]
    folder = RunFolder(tmp_path)
    folder.write_rollouts(0, 0, groups)
    rows = folder.rollouts().to_pylist()
    assert {("Look" in r["prompt"], r["variant"], r["advantage"] is None) for r in rows} == {
        (False, None, False), (True, "guided", True)}
    assert np.isclose(sum(r["variant"] == "guided" for r in rows), 6)


class Given(Marks):
    """Rows have a solution; with the second hint of it every answer is right."""

    def samples(self, split):
        return [replace(s, row={**s.row, "solution": "<think>abcdefgh</think><answer>x</answer>"})
                for s in super().samples(split)]

    def score(self, sample, answer):
        return {"said": float(sample["id"] == 0 or (getattr(self, "hinted", 0) > 1 and sample["id"] == 1))}


def test_hints_grow_until_one_helps(tiny):
    """Group 0 is right at once, 1 under the second hint, 2 and 3 never."""
    policy, encode, _ = tiny
    config = settings(policy.model.config._name_or_path, algo={"guided": {
        "words": {"name": "hint", "shares": [0.3, 0.5, 0.6]}, "use": "hinted"}})
    task, calls = Given(), []
    algorithm = started(config, policy, encode)
    guide = algorithm.methods[0].guiding
    engine = Counting(HFEngine(policy, seed=5, batch_rollouts=16))
    engine.calls, before = calls, engine.generate

    def generate(requests, done=None):
        task.hinted = len(calls)
        return before(requests, done)

    engine.generate = generate
    generator = RolloutGenerator(config, task, engine, Clock(), algorithm, methods=algorithm.methods)
    asked = [AcceptedDraw(i, Draw(i, 0), s, encode(task, s)) for i, s in enumerate(task.samples("train"))]
    groups = generator.groups(asked, 0)
    assert [[(r.key, r.n) for r in call] for call in calls] == [
        [((0, i), 3) for i in range(4)], [((10, i), 3) for i in (1, 2, 3)], [((10, i, 1), 3) for i in (1, 2, 3)],
        [((10, i, 2), 3) for i in (2, 3)]]
    for call, begun in zip(calls[1:], ("<think>abcd", "<think>abcdefgh</th", "<think>abcdefgh</think"), strict=True):
        assert all(f"Go on from there:\n{begun}" in r.prompt.text and "<answer>x" not in r.prompt.text for r in call)
    taught = [guide.trained_form(g) for g in groups]
    assert [t.prompt is g.prompt for t, g in zip(taught, groups, strict=True)] == [True, False, True, True]
    assert taught[1].prompt is calls[2][0].prompt and all(r.correct for r in taught[1].rollouts)
    # statistics are those of the plain answers
    assert [r.correct for r in taught[1].plain] == [False] * 3 and len(taught[1].aside) == 6
    found = guide.metrics()
    assert found["guided/groups_frac"] == 0.75 and found["guided/members"] == 3 and 0 < found["guided/tokens_frac"] < 1
    assert (found["guided/level_0_frac"], found["guided/level_1_frac"]) == (0, pytest.approx(1 / 3))


def test_a_wrong_answer_is_criticised(tiny):
    """Groups with an answer that is known to be wrong are asked, the critique shows it."""
    policy, encode, _ = tiny
    config = settings(policy.model.config._name_or_path, algo={"guided": {
        "words": "critique", "use": "join", "groups": "wrong"}})
    algorithm = started(config, policy, encode)
    guide = algorithm.methods[0].guiding
    task = Given()
    task.hinted = 0
    generator = RolloutGenerator(config, task, HFEngine(policy, seed=5, batch_rollouts=16), Clock(), algorithm,
                                 methods=algorithm.methods)
    asked = [AcceptedDraw(i, Draw(i, 0), s, encode(task, s)) for i, s in enumerate(task.samples("train"))]
    groups = generator.groups(asked, 0)
    assert [len(g.aside) for g in groups] == [0, 1, 1, 1]
    for g in groups[1:]:
        text = g.aside[0].sampled_prompt
        assert "the correct answer is: x" in text and g.rollouts[0].completion.text.split("\n")[0] in text
    assert [len(guide.trained_form(g).rollouts) for g in groups] == [3, 3, 3, 3]  # no refinement is right
