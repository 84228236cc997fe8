"""A reward model learned from pairs of answers: its gradient, its runs, and the service that it becomes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import noise
from tests.e2e.runs import assert_same_run, metrics
from tests.helpers import load, settings
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.curriculum import Draw
from vlrl.errors import ConfigError, DataError
from vlrl.methods.preferences.pairs import pair_groups
from vlrl.models import packing
from vlrl.models.heads import HEAD
from vlrl.models.sharding.launch import check
from vlrl.rewards.text import parse_answer
from vlrl.rollout.generate import AcceptedDraw
from vlrl.services.reward_model import RewardModel
from vlrl.services.service_set import provide
from vlrl.task import load_class
from vlrl.task.scoring import score_group
from vlrl.task.services import ServiceContext, Services
from vlrl.tools.hub.export import export
from vlrl.training.build_task import make_task
from vlrl.training.loop import train as train_loop
from vlrl.training.sft import supervised_config, train
from vlrl.training.update import make_optimizer, update
from vlrl.types import Media

FAMILY = "qwen3_vl"
WORDS = ("red", "blue", "green", "grey", "pink", "white", "black", "brown")


def row(i, answer=None):
    """The longer one of two answers is better."""
    pair = [" ".join(WORDS[(i + k) % 8] for k in range(n)) for n in (1 + i % 2, 4 + i % 3)]
    answer = answer or 1 + i % 2
    return {"id": str(i), "question": f"Which colours has picture {i % 5}?", "answer": answer,
            "responses": pair[::-1] if answer == 1 else pair}


def write(folder, counts=(24, 12)):
    folder.mkdir(parents=True, exist_ok=True)
    for name, start, count in zip(("train", "heldout"), (0, 500), counts, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(start + i)) + "\n" for i in range(count)))
    return folder


def words(folder, model, *more):
    return [f"model.name={model}", "model.train=[language]", "model.lora.rank=0", f"run.dir={folder}/run", "steps=4",
            "save.every=2", "eval.every=2", f"data.train={folder}/train.jsonl", f"data.heldout={folder}/heldout.jsonl",
            "rollout.prompts_per_step=4", "eval.samples=12", "train.lr=1e-3", "train.tokens_per_batch=400", *more]


def config_of(folder, model, *more):
    return configs.load("configs/preference/reward_model.yaml", words(write(folder), model, *more))


def groups_of(policy, encode, count=5):
    task = load_class("preference")(recipe="respond")
    samples = [task.sample_from_row(row(i)) for i in range(count)]
    asked = [AcceptedDraw(i, Draw(i, 0), s, encode(task, s)) for i, s in enumerate(samples)]
    return pair_groups(task, encode, asked, 0)


@pytest.fixture(scope="module")
def made(tiny_models):
    config = supervised_config(settings(tiny_models[FAMILY], algo={"loss": "bradley_terry"}))
    policy, encode = load(config)
    torch.manual_seed(5)
    torch.nn.init.normal_(policy.head.layer.weight, std=0.3)
    return policy, encode, config


def test_a_pair_is_the_better_answer_and_the_other(made):
    _, encode, _ = made
    first, second = groups_of(made[0], encode, 2)
    assert [r.reward for r in first.rollouts] == [1, 0] and [r.correct for r in first.rollouts] == [True, False]
    assert first.rollouts[0].completion.text == "red blue green grey"
    assert second.rollouts[1].completion.text == "blue green"
    assert encode.processor.tokenizer.decode(first.prompt.ids).count("Which colours has picture 0?") == 1
    task = load_class("preference")()
    sample = task.sample_from_row(row(0))
    with pytest.raises(DataError, match=r"sample '0' has no pair of answers to learn from.*task\.recipe=respond"):
        pair_groups(task, encode, [AcceptedDraw(0, Draw(0, 0), sample, encode(task, sample))], 0)


def gradient(made, tokens, order=1, **train_):
    policy, encode, config = made
    config = config.model_copy(update={"train": config.train.model_copy(update={"tokens_per_batch": tokens, **train_})})
    optimizer = make_optimizer(policy, config)
    seen = {}
    learned = (*policy.trainable(), *((f"head.{n}", p) for n, p in policy.head.named_parameters()))
    optimizer.step = lambda *a: seen.update({n: p.grad.clone() for n, p in learned if p.grad is not None})
    stats, _ = update(policy, optimizer, groups_of(policy, encode)[::order], config, 0, Algorithm(config))
    return seen, stats


def test_the_gradient_is_that_of_a_plain_forward_and_of_no_packing(made):
    """One answer at a time: the hidden state at its last word, the layer, the softplus of the difference."""
    policy, encode, _ = made
    parameters = dict(policy.trainable())
    head = policy.head.layer
    policy.model.eval()
    total = torch.zeros(())
    groups = groups_of(policy, encode)
    for group in groups:
        scores = []
        for r in group.rollouts:
            piece = packing.Piece(group.prompt, (r.completion.tokens,), (0,))
            inputs = policy.inputs(packing.make_batch([piece], "padded").inputs)
            hidden = policy.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
            state = hidden[len(group.prompt) + len(r.completion.tokens) - 2]
            scores.append((state * head.weight[0]).sum() + head.bias[0])
        total = total + torch.nn.functional.softplus(scores[1] - scores[0]) / len(groups)
    wanted = torch.autograd.grad(total, [*parameters.values(), head.weight], allow_unused=True)
    policy.model.train()
    for tokens, order, more in ((10**6, 1, {}), (150, -1, {}), (300, 1, {"packing": "padded"}), (1, 1, {})):
        seen, stats = gradient(made, tokens, order, **more)
        assert stats["pairs/loss"] == pytest.approx(total.item(), abs=1e-5)
        assert 0 <= stats["pairs/accuracy"] <= 1 and stats["loss"] == 0
        for name, value in zip([*parameters, "head.layer.weight"], wanted, strict=True):
            if value is None:
                continue
            assert (seen[name] - value).abs().max() <= 1e-4 * value.abs().max() + 1e-7, (tokens, name)


def test_what_does_not_go_together(tmp_path, tiny_models):
    config = config_of(tmp_path, tiny_models[FAMILY])
    with pytest.raises(ConfigError, match=r"algo\.loss=bradley_terry trains on pairs.*vlrl sft"):
        train_loop(config)
    assert supervised_config(config).save.best == "accuracy"
    with pytest.raises(ConfigError, match=r"train\.sharding=zero2 cannot be combined with algo\.loss=bradley_terry"):
        check(config.model_copy(update={"train": config.train.model_copy(update={"sharding": "zero2"})}))


@pytest.mark.slow
def test_it_learns_resumes_and_scores(tmp_path, tiny_models):
    """Longer answers were better: held-out pairs too are told apart. A run that stops and goes on is the same run."""
    model = tiny_models[FAMILY]
    more = ("steps=30", "train.lr=3e-3", "eval.every=15", "save.every=15")
    session = train(config_of(tmp_path / "a", model, *more))
    lines = metrics(session.folder.path)
    assert lines[-1]["pairs/accuracy"] > 0.9 and lines[-1]["pairs/loss"] < lines[0]["pairs/loss"] - 0.2
    first, _, last = metrics(session.folder.path, "eval.jsonl")
    assert first["accuracy"] == 0.5 and first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["accuracy"] > 0.9 and last["n"] == 12 and last["accuracy/ci95_low"] <= last["accuracy"]
    assert ((session.folder.path / "checkpoints" / "step-000030") / HEAD).is_file()
    train(config_of(tmp_path / "b", model, *more, "steps=15"))
    train(config_of(tmp_path / "b", model, *more))
    assert_same_run(tmp_path / "b" / "run", session.folder.path, steps=30)
    serve = configs.validate({"task": {"name": "qa", "parts": ["reward_model"]}, "model": {"name": str(model)},
                              "services": {"reward_model": {"name": str(session.folder.path)}}})
    found = RewardModel(serve)("Which colours has picture 3?", (), ["red", "red blue green grey pink"])
    assert found[1][0] > found[0][0]


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    """The folder of a model with a head, as a checkpoint has it."""
    policy, *_ = made
    folder = tmp_path_factory.mktemp("scores") / "model"
    policy.save(folder)
    return folder


@pytest.mark.parametrize("shown", [(), (Media(source=noise(3, 64, 48)),)], ids=["text", "image"])
def test_the_service_scores_as_the_run_does(made, saved, tmp_path, shown):
    """Of an answer the value at its last token, read by a plain forward."""
    policy, encode, _ = made
    config = configs.validate({"task": {"name": "qa", "parts": ["reward_model"]}, "model": {"name": "none"},
                               "services": {"reward_model": {"name": [str(saved), str(saved)]}},
                               "run": {"dir": str(tmp_path)}})
    scorer, task = RewardModel(config), load_class("preference")(recipe="respond")
    sample = replace(task.sample_from_row(row(0)), media=shown)
    prompt, wanted = encode(task, sample), []
    for text in sample["responses"]:
        tokens = encode.answer_ids(text)
        inputs = policy.inputs(packing.make_batch([packing.Piece(prompt, (tokens,), (0,))], "padded").inputs)
        with torch.no_grad(), policy.evaluating():
            hidden = policy.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
            state = hidden[len(prompt) + len(tokens) - 2]
            wanted.append(float(state @ policy.head.layer.weight[0] + policy.head.layer.bias[0]))
    found = scorer(sample["question"], shown, sample["responses"])
    assert [one[0] for one in found] == pytest.approx(wanted, abs=1e-5) and all(a == b for a, b in found)
    alone = [scorer(sample["question"], shown, [text])[0][0] for text in sample["responses"]]
    assert alone == pytest.approx(wanted, abs=1e-5) and abs(wanted[0] - wanted[1]) > 1e-3
    assert scorer("x", (), []) == []


def test_an_exported_one_keeps_what_scores(saved, tmp_path):
    export(saved, tmp_path / "out")
    assert (tmp_path / "out" / HEAD).read_bytes() == (saved / HEAD).read_bytes()


def test_failures_are_counted_and_never_paid(saved, tmp_path):
    config = configs.validate({
        "task": {"name": "qa", "parts": ["reward_model"], "rewards": {"accuracy": 0, "format": 0}},
        "model": {"name": "none"}, "limits": {"prompt_tokens": 60}, "run": {"dir": str(tmp_path)},
        "services": {"reward_model": {"name": str(saved)}}})
    task = make_task(config)
    provided = provide(config, task)
    for question, failed in (("2 + 2?", 0), ("why? " * 80, 2)):
        sample = task.sample_from_row({"id": "1", "question": question, "answer": "4", "answer_type": "text"})
        given = provided.at(ServiceContext("train", 3, 3))
        found = score_group(task, sample, [parse_answer("<answer>4</answer>"), parse_answer("5")], 3,
                            Services(given=given.services))
        assert [s.reward is None for s in found] == [bool(failed)] * 2
        assert len(given._asked["reward_model"].failures) == failed
        assert (given.problem or "").startswith("service: reward_model: sample 'asked': the prompt" if failed else "")
    assert provided.metrics("train", 3) == {"reward_model/scored": 4, "reward_model/failed": 2}
    assert provided.metrics("train", 3) == {"reward_model/scored": 0, "reward_model/failed": 0}
