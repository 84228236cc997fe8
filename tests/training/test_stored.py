"""Stored rollouts in the update: their own gradient beside the objective's; which groups can be used, and how."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.conftest import SAMPLES, TWO
from tests.e2e.runs import assert_same_run, finished, write_config
from tests.helpers import Vowels, credited_groups, load, settings
from tests.training.test_update import Recorder, assert_close, norm, scarce, taken
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.methods.replay import draw
from vlrl.methods.replay.draw import ReplaySampler
from vlrl.models.packing import make_batch, pieces_of
from vlrl.store import RunFolder
from vlrl.task.scoring import score_all
from vlrl.training.advantages import credit_alone
from vlrl.training.loop import train
from vlrl.training.update import update

TRUNCATED = {"rule": {"name": "truncated", "cap": 2.0}}


@pytest.fixture(scope="module")
def scene(tiny_models):
    """Groups of answers of the policy, and the same with log-probabilities that other weights would give."""
    folder = tiny_models[TWO[0]]
    policy, encode = load(settings(folder))
    groups = credited_groups(policy, encode, settings(folder))
    rng = np.random.default_rng(0)
    moved = [replace(g, rollouts=tuple(replace(r, completion=replace(
        r.completion, logprobs=r.completion.logprobs + rng.normal(0, 0.3, len(r.completion.tokens)).astype("f4")))
        for r in g.rollouts)) for g in groups]
    return policy, encode, groups, moved, folder


def of(folder, stored, train=None, algo=None, **rollout):
    return settings(folder, algo={**({"stored": stored} if stored is not None else {}), **(algo or {})},
                    train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6, **(train or {})},
                    rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, **rollout})


def stepped(policy, groups, past, config, algorithm=None, step=0):
    """Gradients of each optimizer step, and metrics."""
    recorder = Recorder(policy)
    stats, _ = update(policy, recorder, groups, config, step, algorithm or Algorithm(config),
                      own_groups={"algo.stored": past})
    return recorder.steps, stats


def truncated(policy, groups, cap=2.0):
    """Gradient of - sum min(w, cap) A logp / tokens, an answer at a time; w of each answer."""
    total, weights = sum(r.completion.loss_mask.sum() for g in groups for r in g.rollouts), []
    for g in groups:
        for r in g.rollouts:
            batch = make_batch(pieces_of([g.prompt], [r.completion.tokens], 10**6))
            logprobs = policy.logprobs(batch, 1.0).logprobs
            told = torch.from_numpy(r.completion.logprobs)
            weights.append((logprobs.detach() - told).mean().exp().item())
            (-min(weights[-1], cap) * r.advantage * logprobs.sum() / total).backward()
    return taken(policy), weights


def test_the_gradient_is_the_sum_of_both(scene):
    policy, _, groups, moved, folder = scene
    (both,), stats = stepped(policy, groups[:3], moved, of(folder, {**TRUNCATED, "coef": 0.5}))
    (rl,), _ = stepped(policy, groups[:3], (), of(folder, None))
    past, weights = truncated(policy, moved)
    assert_close(both, {n: rl.get(n, torch.zeros_like(g)) + 0.5 * past.get(n, torch.zeros_like(g))
                        for n, g in both.items()})
    a, b = 0.5 * norm(past), norm(rl)
    assert stats["stored/grad_norm"] == pytest.approx(a, rel=1e-4)
    assert 0.05 < stats["stored/grad_share"] == pytest.approx(a / (a + b), rel=1e-4)
    assert stats["stored/answers"] == 18 and stats["stored/applied"] == stats["stored/kept_frac"] == 1
    assert stats["stored/tokens"] == sum(len(r.completion.tokens) for g in moved for r in g.rollouts)
    for q in (10, 50, 90):
        assert stats[f"stored/ratio_q{q}"] == pytest.approx(np.quantile(weights, q / 100), rel=1e-4)
    assert stats["stored/drift"] == pytest.approx(np.mean(np.log(weights)), rel=1e-3)


@pytest.mark.parametrize("rule", ["truncated", "clipped"])
def test_answers_of_the_policy_itself_have_the_on_policy_gradient(scene, rule):
    policy, _, groups, moved, folder = scene
    (rl,), _ = stepped(policy, groups, (), of(folder, None, algo={"loss": "reinforce"}))
    (past,), _ = stepped(policy, [], groups, of(folder, {"rule": rule}))
    assert_close(past, rl)
    (own,), stats = stepped(policy, [], moved, of(folder, {"rule": rule, "logprobs": "own"}))
    assert_close(own, rl)
    assert stats["stored/ratio_q10"] == stats["stored/ratio_q90"] == 1


def test_without_weight_or_without_answers_it_is_the_objective_bit_for_bit(scene):
    policy, encode, groups, _, folder = scene
    (plain,), stats = stepped(policy, groups, (), of(folder, None))
    (same,), again = stepped(policy, groups, (), of(folder, TRUNCATED))
    assert plain.keys() == same.keys() and all(torch.equal(plain[n], same[n]) for n in plain)
    assert again == stats | {"stored/applied": 0.0}
    config = of(folder, {"coef": 0.0})
    show = ReplaySampler(config, Vowels(), encode, [], score_all, None, policy, Algorithm(config).methods[0].parts)
    assert show(3, lambda: 1 / 0) == [] and show.metrics() == {}


def test_the_gradient_does_not_depend_on_micro_batches(scene, monkeypatch):
    policy, _, groups, moved, folder = scene
    policy.keep_reference(str(folder))
    for rule in ("truncated", "copg"):
        config, small = of(folder, {"rule": rule}), of(folder, {"rule": rule}, {"tokens_per_batch": 60})
        (whole,), stats = stepped(policy, groups, moved, config)
        (parts,), again = stepped(policy, groups, moved[::-1], small)
        assert_close(parts, whole)
        assert again["stored/loss"] == pytest.approx(stats["stored/loss"], abs=1e-6)
    # in the first gradient of the stored answers, after the objective's
    scarce(monkeypatch, policy, 2, torch.is_grad_enabled)
    (halved,), short = stepped(policy, groups, moved, config)
    assert short["memory/halved"] == 1
    assert_close(halved, whole)


def test_each_optimizer_step_has_its_groups(scene):
    policy, _, groups, moved, folder = scene
    config = of(folder, TRUNCATED, minibatches=2)
    found = Algorithm(config).methods[0].passes(policy, [], moved, 0)
    assert [[*dict.fromkeys(t.group.id for t in a.part.rollouts)] for a in found] == [["0", "1", "2"], ["3", "4", "5"]]
    steps, stats = stepped(policy, groups, moved, config)
    assert len(steps) == 2 and stats["stored/applied"] == 1


def test_answers_of_other_weights_are_left_out(scene):
    """Log-probabilities that no weights near the policy's would give; all of them, or those of one group."""
    policy, _, groups, moved, folder = scene
    planted = [replace(g, rollouts=tuple(replace(r, completion=replace(
        r.completion, logprobs=r.completion.logprobs - 1.5)) for r in g.rollouts)) for g in moved[:1]]
    (some,), stats = stepped(policy, [], [*planted, *moved[1:]], of(folder, TRUNCATED))
    assert stats["stored/stale_frac"] == pytest.approx(1 / 6) and stats["stored/answers"] == 15
    (rest,), _ = stepped(policy, [], moved[1:], of(folder, TRUNCATED))
    assert_close(some, rest)
    (all_,), stats = stepped(policy, groups, planted, of(folder, TRUNCATED))
    (rl,), _ = stepped(policy, groups, (), of(folder, None))
    assert all(torch.equal(all_[n], rl[n]) for n in rl) and stats["stored/stale_frac"] == 1
    assert stats["stored/answers"] == 0
    _, stats = stepped(policy, groups, planted, of(folder, {**TRUNCATED, "max_drift": 9.0}))
    assert stats["stored/stale_frac"] == 0


class Rows(Vowels):
    def samples(self, split):
        return [*SAMPLES.values()]


def one_each(groups):
    """One group of each row."""
    return [*{g.sample.id: g for g in groups}.values()]


@pytest.fixture
def folders(scene, tmp_path):
    """Run folders `own` and `other` with the same rollouts, as step 0."""
    _, _, groups, _, _ = scene
    for name in ("own", "other"):
        RunFolder(tmp_path / name).write_rollouts(0, 0, one_each(groups))
    return tmp_path


def rewrite(folder, change):
    """Changes each row of the rollout files of a folder."""
    for path in (folder / "rollouts").iterdir():
        table = pq.read_table(path)
        pq.write_table(pa.Table.from_pylist([change(r) for r in table.to_pylist()], table.schema), path)


def drawn(scene, folders, step=1, samples=None, **more):
    policy, encode, _, _, folder = scene
    config = of(folder, {"runs": [str(folders / "other")], "groups": 99, **more})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folders / "own")})})
    shutil.rmtree(folders / "own" / "stored", ignore_errors=True)
    task = Rows()
    show = ReplaySampler(config, task, encode, task.samples("train") if samples is None else samples,
                         score_all, None, policy, Algorithm(config).methods[0].parts)
    return show(step, lambda: None), show


def facts(groups):
    return {g.sample.id: [(r.reward, round(float(r.advantage), 5), tuple(r.completion.tokens)) for r in g.rollouts]
            for g in groups}


def test_groups_come_back_as_they_were_whatever_rewards_are_forged(scene, folders):
    groups = one_each(scene[2])
    expected = {k: v for k, v in facts(groups).items() if len({r for r, *_ in v}) > 1}
    found, show = drawn(scene, folders, runs=[])
    assert facts(found) == expected and len(expected) > 2
    by_id = {g.sample.id: g for g in groups}
    assert all(g.prompt.ids.tolist() == by_id[g.sample.id].prompt.ids.tolist() for g in found)
    assert all((r.completion.logprobs == by_id[g.sample.id].rollouts[r.index].completion.logprobs).all()
               for g in found for r in g.rollouts)
    assert show.metrics()["stored/unused_frac"] == 0 and show.metrics()["stored/held"] == 12
    plain, _ = drawn(scene, folders, own=False)
    rewrite(folders / "other", lambda r: {**r, "reward": 5.0 + r["index"], "correct": True,
                                          "parts": [("vowels", 9.0)], "advantage": 3.0})
    forged, _ = drawn(scene, folders, own=False)
    assert facts(forged) == facts(plain) and len(plain) > 2
    assert all(r.reward <= 1 for g in forged for r in g.rollouts)


def test_groups_of_other_prompts_rows_and_media_are_not_used(scene, folders):
    plain, _ = drawn(scene, folders, own=False)
    kept = [s for s in Rows().samples("train") if s.id != plain[0].sample.id]
    found, show = drawn(scene, folders, own=False, samples=kept)
    assert len(found) == len(plain) - 1 and show.unused["unknown row"] == 1
    shown = {r["sample_id"] for r in RunFolder(folders / "other").rollouts().to_pylist() if r["media"]}
    rewrite(folders / "other", lambda r: {**r, "media": [{**m, "hash": "0" * 64} for m in r["media"]]})
    found, show = drawn(scene, folders, own=False)
    assert not shown & {g.sample.id for g in found} and show.unused["different prompt"] == len(shown) > 0
    rewrite(folders / "other", lambda r: {**r, "prompt": r["prompt"] + " "})
    found, show = drawn(scene, folders, own=False)
    assert not found and show.metrics()["stored/unused_frac"] == 1


def test_planted_rows_are_counted_and_nothing_of_them_is_learned(scene, folders):
    def change(r):
        planted = {0: {"logprobs": [x - 1 for x in r["logprobs"]], "trainer_logprobs": r["logprobs"]},
                   1: {"token_ids": [*r["token_ids"][1:], r["token_ids"][0]]}}
        return {**r, **planted.get(r["index"], {})}
    rewrite(folders / "other", change)
    found, show = drawn(scene, folders, own=False)
    assert not found
    assert show.buffer.refused["log-probabilities from other weights"] == 4
    refused = show.buffer.refused
    assert refused["token ids that do not decode to the text"] + refused["only row of its group"] == 8
    assert show.metrics()["stored/refused"] == 12


def test_which_answers_are_learned_from(scene, folders):
    whole, _ = drawn(scene, folders, runs=[])
    found, _ = drawn(scene, folders, runs=[], batch={"name": "pf_ppo", "policy": "best_worst", "keep": 1.0})
    for g, part in zip(whole, found, strict=True):
        rewards = [r.reward for r in g.rollouts]
        assert [r.index for r in part.rollouts] == [r.index for r in g.rollouts if r.reward in (max(rewards),
                                                                                                min(rewards))]
        assert {r.index: r.advantage for r in part.rollouts}.items() <= {r.index: r.advantage
                                                                         for r in g.rollouts}.items()
    assert drawn(scene, folders, runs=[], every={"name": "constant", "k": 3})[0] == []
    assert drawn(scene, folders, runs=[], every={"name": "constant", "k": 2})[0]


def test_raft_pp_learns_right_answers_alone_each_with_weight_one(scene, folders):
    stored = configs.load("configs/quickstart.yaml", ["extends=algorithms/raft_pp.yaml"]).algo.stored
    more = {name: getattr(stored, name).model_dump() for name in ("advantage", "batch", "rule")}
    def judged(row):
        first = row["index"] == min(r.index for g in scene[2] if g.sample.id == row["sample_id"] for r in g.rollouts)
        right = {"image": True, "two": True, "text": first, "video": False}[row["sample_id"]]
        graded = 1 - row["index"] / 8 if row["sample_id"] == "image" else float(right)
        return {**row, "reward": graded, "correct": right}
    rewrite(folders / "own", judged)
    found, _ = drawn(scene, folders, runs=[], **more)
    size = len(scene[2][0].rollouts)
    assert {g.sample.id: [r.advantage for r in g.rollouts] for g in found} == {
        "image": [1.0] * size, "two": [1.0] * size, "text": [1.0], **({} if len(found) == 3 else {"video": []})}


@pytest.mark.parametrize(("more", "message"), [
    ({"algo": {"stored": {}, "guided": {}}}, "algo.stored and algo.guided both"),
    ({"algo": {"stored": {}, "demonstrations": {}}}, "algo.stored and algo.demonstrations both"),
    ({"algo": {"stored": {"own": False}}}, "algo.stored.own=false and algo.stored.runs names no other"),
    ({"algo": {"stored": {}}, "store": {"rollouts": False}}, "store.rollouts=false writes none"),
    ({"algo": {"stored": {"groups": 1}}, "rollout": {"minibatches": 2}}, "algo.stored.groups=1 leaves"),
    ({"algo": {"stored": {}}, "async": {"max_staleness": 1}}, "async.max_staleness=1")])
def test_settings_that_do_not_go_together(more, message):
    with pytest.raises(ConfigError, match=message):
        configs.validate({"task": "digits", "model": {"name": "m"}, **more})


def test_what_cannot_be_is_refused(scene, monkeypatch):
    *_, folder = scene
    with pytest.raises(ConfigError, match=r"algo\.stored\.advantage='tempo' computes an advantage per token"):
        parts = Algorithm(of(folder, {"advantage": "tempo"})).methods[0].parts
        credit_alone(scene[2][0], parts.advantage, parts.batch, 0, 0, "algo.stored")
    monkeypatch.setattr(draw.shards, "is_sharded", lambda config: True)
    with pytest.raises(ConfigError, match=r"algo\.stored needs the gradient norm of its loss.*train\.sharding=none"):
        Algorithm(of(folder, TRUNCATED)).methods[0].check(Vowels(), [], True)


def run(file, folder, steps, *words):
    train(configs.load(file, [f"run.dir={folder}", f"steps={steps}", "save.every=2", "eval.samples=0",
                              "train.schedule=constant", "train.warmup=0", "rollout.prompts_per_step=2", *words]))


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_while_another_run_goes_on(tiny_models, tmp_path):
    file = write_config(tmp_path, tiny_models[TWO[0]], "log: {samples_every: 0}\nalgo: {stored: {groups: 4}}")
    run(file, tmp_path / "whole-source", 4, "seed=5", "algo.stored=null")
    whole, source = tmp_path / "whole", tmp_path / "source"
    shutil.copytree(tmp_path / "whole-source", source)
    for path in sorted((source / "rollouts").iterdir())[2:]:
        path.unlink()
    run(file, whole, 5, f"algo.stored.runs=[{source}]")
    broken = tmp_path / "broken"
    run(file, broken, 3, f"algo.stored.runs=[{source}]")
    for path in (tmp_path / "whole-source" / "rollouts").iterdir():  # it goes on, after the steps that were drawn
        if not (source / "rollouts" / path.name).exists():
            shutil.copy(path, source / "rollouts" / path.name)
    late = sorted((source / "rollouts").iterdir())[2:]
    taken = [json.loads(x) for x in (broken / "stored" / "taken.jsonl").read_text().splitlines()]
    for line in (json.loads(x) for x in (whole / "stored" / "taken.jsonl").read_text().splitlines()[len(taken):]):
        with open(broken / "stored" / "taken.jsonl", "a") as out:  # as of a run that was killed after these steps
            out.write(json.dumps(line) + "\n")
    for path in (whole / "stored").glob("*.arrow"):
        shutil.copy(path, broken / "stored" / path.name)
    assert late
    run(file, broken, 5, f"algo.stored.runs=[{source}]")
    assert_same_run(broken, whole)
    applied = [line["stored/grad_share"] for line in RunFolder(whole).metrics() if line["stored/applied"]]
    assert len(applied) >= 4 and all(share > 0 for share in applied)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [
    "{rule: clipped, logprobs: own}", "{rule: a_lol, advantage: dr_grpo, draw: by_advantage}", "{rule: copg}",
    "{rule: {name: webrl, low: 0.0, high: 1.0}, advantage: dr_grpo, batch: right}",
    "{rule: truncated, batch: rest, every: {name: growing, first: 1, last: 2, over: 20}}"])
def test_steps_in_which_it_acts(tiny_models, tmp_path, rule):
    file = write_config(tmp_path, tiny_models[TWO[0]], f"log: {{samples_every: 0}}\nalgo: {{stored: {rule}}}")
    run(file, tmp_path / "run", 9, "save.every=0", "algo.stored.groups=2", "curriculum.part=vowels",
        "curriculum.pass_at=0.25", "rollout.stop=[e]")  # so that answers are of different lengths
    acted = [line for line in RunFolder(tmp_path / "run").metrics()[1:] if line["stored/applied"]]
    assert len(acted) >= 6 or (len(acted) > 1 and ("growing" in rule or "webrl" in rule))
    assert all(line["stored/grad_share"] > 0 and line["stored/answers"] > 0 for line in acted)


@pytest.mark.slow
def test_two_processes_are_one(tiny_models, tmp_path):
    """The same draws, and the same loss and gradient of them, in two optimizer steps a batch."""
    file = write_config(tmp_path, tiny_models[TWO[0]], "log: {samples_every: 0}\nalgo: {stored: {groups: 4}}")
    words = ("steps=2", "eval.samples=0", "save.every=0", "train.warmup=0", "train.lr=1e-7", "rollout.minibatches=2")
    lines = []
    for count in (1, 2):
        finished(file, tmp_path / f"of-{count}", *words, processes=count)
        lines.append(RunFolder(tmp_path / f"of-{count}").metrics()[1])
    one, two = ({k: v for k, v in line.items() if k.startswith("stored/")} for line in lines)
    assert one["stored/groups"] == 4 and one["stored/grad_norm"] > 0
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
