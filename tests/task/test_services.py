"""Services of score_group: answers of variants, the reference policy, and what is not there."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.e2e.runs import write_config
from tests.helpers import load, settings
from tests.rollout.test_group_source import Number
from tests.rollout.test_group_source import source as scripted
from vlrl import config as configs
from vlrl.errors import ConfigError, TaskError
from vlrl.models.packing import pack, pieces_of
from vlrl.models.reference import Reference, answer_span
from vlrl.rollout.generate import make_group
from vlrl.task.scoring import score_group
from vlrl.task.services import AbsentService, Services, less, unserved_parts, without_absent
from vlrl.training.loop import train
from vlrl.types import Answer, Completion, Sample

# --- what is not there ------------------------------------------------------------------------------------------------


class Judged(Number):
    rewards = {"right": 1.0, "quality": 0.5, "order": 0.25}
    needs = {"judge": ("quality",)}

    def score_group(self, sample, answers, services):
        order = [{"order": float(i)} for i, _ in enumerate(answers)]
        if "judge" not in services:
            return order
        said = services.judge([a.text for a in answers])
        return [{**parts, "quality": float(text == "good")} for parts, text in zip(order, said, strict=True)]


class Misspelt(Judged):
    needs = frozenset({"jugde"})


class Asking(Judged):
    needs = frozenset({"judge"})

    def score_group(self, sample, answers, services):
        return [{"quality": float(services.judge([a.text])[0]), "order": 0.0} for a in answers]


class Unnamed(Asking):
    """Asks for what it does not name."""

    needs = frozenset()


SEVEN = Sample(id="7", row={"n": 7, "answer": "7"})


def test_a_service_is_an_attribute_and_its_absence_is_named():
    services = Services(given={"judge": len})
    assert services.judge([1, 2]) == 2 and "judge" in services and "clip" not in services and services.variants == {}
    assert not hasattr(services, "clip")
    with pytest.raises(AbsentService, match="the service 'clip' is not there"):
        _ = services.clip
    with pytest.raises(TaskError, match="the service 'judge' is not there"):
        score_group(Unnamed(), SEVEN, [Answer(text="7")], 0)


@pytest.mark.parametrize(("task", "skipped", "parts"), [
    (Judged(), ["quality"], {"right": 1.0, "order": 0.0}), (Asking(), ["quality", "order"], {"right": 1.0})])
def test_parts_without_their_service_are_left_out(task, skipped, parts):
    answers = [Answer(text="7")]
    reduced, found = without_absent(task, SEVEN, answers, Services())
    assert found == skipped and score_group(reduced, SEVEN, answers, 0, Services())[0].parts == parts
    assert score_group(task, SEVEN, answers, 0)[0].parts == parts
    assert without_absent(task, SEVEN, answers, Services(given={"judge": len}))[0] is task


def test_a_run_leaves_out_what_weighs_nothing_and_refuses_the_rest():
    names = [SEVEN]
    assert unserved_parts(Judged(), {"judge"}, names) == [] == unserved_parts(Number(), (), names)
    for task in (Judged(), Asking(), Judged(rewards={"quality": [[0, 0], [9, 1]]})):
        with pytest.raises(ConfigError, match=r"part 'quality' needs the service 'judge'.*task\.rewards\.quality=0"):
            unserved_parts(task, ("reference_logprobs",), names)
    without = Judged(rewards={"quality": 0.0})
    assert unserved_parts(without, (), names) == ["quality"]
    assert unserved_parts(Asking(rewards={"quality": 0, "order": 0}), (), names) == ["quality", "order"]
    s = scripted(lambda prompt, i: prompt.text)
    s.task = s.answering.task = less(without, ["quality"])
    (group,) = s.next_groups(1, 0)
    assert group.weights == {"right": 1.0, "order": 0.25} and group.rewards == [1.0, 1.25, 1.5]
    with pytest.raises(ConfigError, match=r"'jugde', which is not known\. Did you mean 'judge'"):
        unserved_parts(Misspelt(), (), names)


def test_training_stops_at_its_start(tmp_path):
    path = write_config(tmp_path, tmp_path / "no-model")
    text = (tmp_path / "shades.py").read_text()  # before the model, which is not there, is loaded
    (tmp_path / "shades.py").write_text(text.replace("    rewards", '    needs = {"clip": ["short"]}\n    rewards'))
    with pytest.raises(ConfigError, match=r"'Shades'|'shades'.*'short' needs the service 'clip'.*task.rewards.short=0"):
        train(configs.load(path, [f"run.dir={tmp_path}/run"]))


# --- the reference policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "content"), [
    ("<think>a</think><answer>no</answer><answer>cat</answer> end", "cat"), ("<answer>cat", "cat"), ("cat", ""),
    ("<answer></answer>x", ""), ("<answer>", ""), ("</answer><answer>ü b</answer>", "ü b"), ("", "")])
def test_the_tokens_of_the_last_answer(text, content):
    tokens = np.frombuffer(text.encode(), np.uint8)

    def decode(ids):
        return bytes(ids).decode("utf-8", "replace")

    start, end = answer_span(tokens, decode)
    assert decode(tokens[start:end]) == content


@pytest.mark.parametrize("more", [{}, pytest.param({"lora": {"rank": 4}}, marks=pytest.mark.slow)])
def test_reference_logprobs_are_those_of_the_frozen_policy(tiny_models, more):
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), **more}, train={"tokens_per_batch": 60})
    policy, encode = load(config)
    policy.keep_reference()
    task = Number()
    prompts = [encode(task, replace(SAMPLES[kind], row={"n": kind})) for kind in ("image", "text")]
    texts = ["<think>no</think><answer>a cat</answer>", "none", "<answer>two dogs"]

    def completion(text):
        ids = encode.answer_ids(text)
        return Completion(tokens=ids, logprobs=np.zeros(len(ids)), loss_mask=np.ones(len(ids), bool), text=text,
                          finish_reason="stop")

    made = [completion(text) for text in texts]
    whole = pieces_of([prompts[0]] * 3 + [prompts[1]], [c.tokens for c in [*made, made[0]]], 10**6)
    with torch.no_grad():
        (batch,) = pack(whole, 10**6, "padded")
        values = policy.logprobs(batch, 1.0).logprobs
        for _, parameter in policy.trainable():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the policy moves away, the reference stays
    found = Reference(policy, config)([(prompts[0], made), (prompts[1], made[:1])])
    decode = encode.processor.tokenizer.decode
    for i, (value, c) in enumerate(zip([*found[0], *found[1]], [*made, made[0]], strict=True)):
        start, end = answer_span(c.tokens[:-1], decode)
        assert np.allclose(value, values[batch.rollout_id == i].numpy()[start:end], atol=1e-5), i
        assert len(value) == end - start
    assert [len(v) > 0 for v in found[0]] == [True, False, True]
    assert decode(made[2].tokens[-1 - len(found[0][2]):-1]) == "two dogs"


class Sure(Number):
    rewards = {"right": 1.0, "sure": 0.5}
    needs = {"reference_logprobs"}
    copies = False

    def score_group(self, sample, answers, services):
        given = [replace(a) for a in answers] if self.copies else answers[::-1]
        return [{"sure": float(np.exp(v.mean()))} for v in services.reference_logprobs(given)[::-1]]


def test_the_group_is_handed_its_own_answers_values():
    task = Sure()
    made = [Completion(tokens=np.arange(3), logprobs=np.zeros(3), loss_mask=np.ones(3, bool), text=text,
                       finish_reason="stop") for text in ("7", "8")]
    prompt = scripted(lambda prompt, i: "").encode(task, SEVEN)

    def group(reference):
        return make_group(task, SEVEN, prompt, made, group_id="0", split="train", step=0, reference=reference)

    found = group([np.log([0.25, 1.0]), np.log([0.5])])
    assert [r.parts["sure"] for r in found.rollouts] == pytest.approx([0.5, 0.5])
    assert group(None).weights == {"right": 1.0}  # an evaluation without the service
    task.copies = True
    with pytest.raises(TaskError, match="none of a variant aside and no copies"):
        group([np.zeros(1), np.zeros(1)])
