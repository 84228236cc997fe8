"""services.reward_model with a sequence classifier: transformers' own logits, of a tiny model of the real class."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.services.test_clip import SMALL, _tokenizer
from tests.services.test_parts import ROW, task_of
from tests.tables import each
from vlrl import config as configs
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.services.judge_prompts import question_text
from vlrl.services.reward_model import RewardModel
from vlrl.services.service_set import ServiceSet
from vlrl.task.scoring import score_group
from vlrl.task.services import ServiceContext, Services

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
ANSWERS = ["a cat", "a dog on the road", "two cars", "a cat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two random classifiers, the second with a chat template, and one with two labels."""
    root = tmp_path_factory.mktemp("scores")
    for name, seed, labels in (("plain", 1, 1), ("chat", 2, 1), ("two", 3, 2)):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(LlamaConfig(**SMALL, vocab_size=40, pad_token_id=0, num_labels=labels,
                                                           max_position_embeddings=24))
        torch.nn.init.normal_(model.score.weight, std=0.5)
        model.save_pretrained(root / name)
        tokenizer = _tokenizer(24)
        if name == "chat":
            tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(root / name)
    return root


def scorer(*names, batch=0, keep=100):
    return RewardModel(configs.validate({
        "task": "qa", "model": {"name": "none"},
        "services": {"reward_model": {"name": [*map(str, names)], "batch": batch, "keep": keep}}}))


def own(folder, texts, special):
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(folder), _tokenizer(24)
    with torch.no_grad():
        return [float(model(**tokenizer([text], return_tensors="pt", add_special_tokens=special)).logits[0, 0])
                for text in texts]


@each("batch", [0, 3])
def test_scores_are_the_logits_of_transformers(folders, batch):
    found = scorer(folders / "plain", folders / "chat", batch=batch)("the picture", (), ANSWERS)
    plain = own(folders / "plain", [f"the picture\n{a}" for a in ANSWERS], True)
    chat = own(folders / "chat", [f"user the picture assistant {a} " for a in ANSWERS], False)
    assert np.allclose([s[0] for s in found], plain, atol=1e-5) and np.std(plain) > 1e-3
    assert np.allclose([s[1] for s in found], chat, atol=1e-5)


def test_a_text_is_scored_once(folders, monkeypatch):
    made = scorer(folders / "plain", keep=2)
    (model,) = made.models
    seen, real = [], model._scored
    monkeypatch.setattr(model, "_scored", lambda texts: seen.extend(texts) or real(texts))
    first = made("the picture", (), ANSWERS)
    assert len(seen) == 3 and first[0] == first[3] and len(model._known) == 2
    assert made("the picture", (), ["a cat"]) == first[:1] and len(seen) == 3
    assert made("the picture", (), ["a dog on the road"]) == first[1:2] and len(seen) == 4  # it was forgotten


@each("pairs", [False, True])
def test_the_process_of_an_answer_is_scored_step_by_step(folders, pairs):
    """Texts up to the end of each step; or steps and pairs by themselves (HRM). The part is their mean; they stay."""
    task = task_of({"name": "process", "pairs": pairs}, rewards={"accuracy": 0, "format": 0})
    texts = ["a cat\n\ntwo cars\n\n on the road", "a dog", ""]
    given = ServiceSet({"reward_model": scorer(folders / "chat")}).at(ServiceContext("train", 2, 2))
    sample = task.sample_from_row(ROW)
    found = score_group(task, sample, [parse_answer(t) for t in texts], 2, Services(given=given.services))

    def one(text):
        return own(folders / "chat", [f"user {question_text(task, sample)} assistant {text} "], False)[0]
    if pairs:
        steps, both = [one(t) for t in ("a cat", "two cars", " on the road")], [
            one("a cat\n\ntwo cars"), one("two cars\n\n on the road")]
        wanted = [(steps[0] + both[0]) / 2, (steps[1] + both[1]) / 2, steps[2]]
    else:
        wanted = [one(texts[0][:end]) for end in (5, 15, 29)]
    ends, values = zip(*found[0].steps, strict=True)
    assert values == pytest.approx(wanted, abs=1e-5) and ends == (5, 15, 29)
    assert found[0].reward == found[0].parts["process"] == pytest.approx(np.mean(wanted), abs=1e-5)
    assert [value for _, value in found[1].steps] == pytest.approx([one("a dog")], abs=1e-5) and np.std(wanted) > 1e-3
    assert found[2].steps == () and found[2].parts["process"] == 0


def test_what_has_no_score_is_said_and_counted(folders):
    task = task_of({"name": "process"}, rewards={"accuracy": 0, "format": 0})
    given = ServiceSet({"reward_model": scorer(folders / "plain")}).at(ServiceContext("train", 2, 2))
    found = score_group(task, task.sample_from_row(ROW), [parse_answer("a cat\n\n" + "a dog " * 30)], 2,
                        Services(given=given.services))
    assert found[0].reward is None and found[0].steps == () and given.problem.startswith("service: reward_model:")
    task = task_of({"name": "reward_model", "combine": "min"}, rewards={"accuracy": 0, "format": 0})
    provided = ServiceSet({"reward_model": scorer(folders / "plain", folders / "chat")})
    long = "a cat on the road " * 5
    for texts, lost in ((["a cat", "two cars"], False), (["a cat", long], True)):
        given = provided.at(ServiceContext("train", 2, 2))
        found = score_group(task, task.sample_from_row(ROW), [parse_answer(t) for t in texts], 2,
                            Services(given=given.services))
        assert [s.reward is None for s in found] == [lost] * 2
        assert (given.problem or "").startswith("service: reward_model: an answer and its question" if lost else "")
        assert lost or all(s.parts["reward_model"] == s.reward and s.parts["reward_spread"] > 0 for s in found)
    assert provided.metrics("train", 2) == {"reward_model/scored": 4, "reward_model/failed": 2}


@each("name said", [("two", "has 2 labels instead of one: set it to a run of vlrl"), ("nowhere", "cannot be loaded")])
def test_what_gives_no_score_is_refused(folders, name, said):
    with pytest.raises(ConfigError, match=said):
        scorer(folders / name)


def test_a_model_without_a_head_is_refused(tiny_models):
    with pytest.raises(ConfigError, match=r"services\.reward_model\.name=.*(cannot be loaded|lacks)"):
        scorer(tiny_models["qwen3_vl"])
