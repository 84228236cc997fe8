"""Answers drawn with other media: edits of frames, and groups that hold or are compared with such answers."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import SAMPLES, noise
from tests.e2e.runs import ROOT, metrics, write_config
from tests.e2e.runs import run as start
from tests.helpers import Vowels, load, settings
from tests.rollout.test_group_source import Number
from tests.rollout.test_group_source import source as scripted
from tests.tables import each, refused
from vlrl import config as configs
from vlrl.algo.advantage import dr_grpo
from vlrl.config.schema import LimitsSettings
from vlrl.curriculum import Prompts, Sequential
from vlrl.data.media import load as load_media
from vlrl.data.media_edits import shuffle
from vlrl.engine.hf import HFEngine
from vlrl.errors import DataError, TaskError
from vlrl.models.packing import make_batch, pieces_of
from vlrl.monitoring.metrics import Clock
from vlrl.rewards.text import parse_answer
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.prefetch import Prefetcher
from vlrl.store import RunFolder
from vlrl.task import load_class
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.task.variants import same_pixels, variants_of, with_media_of
from vlrl.tools.tasks.rescore import compare
from vlrl.training.advantages import credit
from vlrl.training.loop import train
from vlrl.training.update import make_optimizer, update
from vlrl.types import LoadedMedia, Media, Sample, Variant

LIMITS = LimitsSettings()


def clip(colours, **more):
    return Media(kind="video", source=[Image.new("RGB", (8, 8), (c, c, c)) for c in colours], fps=2.0, **more)


def shown(frames):
    return [int(np.asarray(frame)[0, 0, 0]) for frame in frames]


@given(st.lists(st.sampled_from([0, 90, 200]), min_size=1, max_size=7), st.integers(0, 2**32))
def test_shuffled_frames_are_the_same_ones_in_an_order_that_differs(colours, seed):
    frames = tuple(Image.new("RGB", (2, 2), (c, 0, 0)) for c in colours)
    found = shown(shuffle(frames, seed))
    assert sorted(found) == sorted(colours) and (found != colours) == (len(set(colours)) > 1)
    assert found == shown(shuffle(frames, seed))


def test_a_shuffled_video_keeps_its_times_and_has_a_name_of_its_own():
    colours = [0, 50, 100, 150, 200, 250]
    plain, first, again, other = (load_media(clip(colours, edits=e), LIMITS) for e in
                                  ((), (("shuffle", 1),), (("shuffle", 1),), (("shuffle", 2),)))
    order = shown(first.frames)
    assert shown(plain.frames) == colours == sorted(order) != order == shown(again.frames) != shown(other.frames)
    assert plain.timestamps == first.timestamps and plain.metadata["fps"] == first.metadata["fps"]
    assert len({plain.sha256, first.sha256, other.sha256}) == 3 and first.sha256 == again.sha256


def test_noise_is_that_of_forward_diffusion(tmp_path):
    path = tmp_path / "grey.png"
    Image.new("RGB", (128, 128), (191, 191, 191)).save(path)

    def pixels(*arguments) -> tuple[np.ndarray, LoadedMedia]:
        found = load_media(Media(source=path, edits=(("noise", *arguments),)), LIMITS)
        return np.asarray(found.frames[0], float), found
    # two betas, 1e-4 and 1e-4 + 0.0199 / 999: abar = 0.9999 * 0.99988008 = 0.99978009
    values, media = pixels(2, 7)
    assert values.std() == pytest.approx(127.5 * (1 - 0.99978009) ** 0.5, rel=0.05) and media.path is None
    assert (pixels(2, 7)[0] == values).all() and (pixels(2, 8)[0] != values).any()
    assert (pixels(0, 7)[0] == 191).all()
    # all 1000: abar = 4.04e-5, so nothing of the picture is left; N(0, 1) clipped to [-1, 1] has std 0.7184
    assert pixels(1000, 7)[0].mean() == pytest.approx(127.5, abs=2)
    assert pixels(1000, 7)[0].std() == pytest.approx(127.5 * 0.7184, rel=0.02)


test_bad_edits_are_named = refused(DataError, lambda edit: load_media(clip([0, 200], edits=(edit,)), LIMITS), [
    (("shufle", 1), "'shufle' is not known. Did you mean 'shuffle'"), (("shuffle",), "missing 1 required"),
    (("shuffle", "x"), "shuffle"), (("noise", 0.3, 1), "integer from 0 to 1000"), (("noise", 1001, 1), "1001")])


V = Variant(name="v", media=(), n=1)


@each("variants says", [
    ([1], "returned int"), ([replace(V, name="")], "the name ''"), ([replace(V, n=-1)], "n=-1"), ([V, V], "'v' more"),
    ([replace(V, n=True)], "n=True"), ([replace(V, media=(Media(source=noise(0, 8, 8)),))], r"\['image'\], but"),
    ([replace(V, media=(1,))], "expected a tuple of Media"), ([replace(V, n=3, trained=True)], "rollout.group_size=3"),
    (None, "variants of sample 'text' failed: TypeError")])
def test_bad_variants_are_named(variants, says):
    class Bad(Number):
        def variants(self, sample, n, step) -> Any:
            return variants
    with pytest.raises(TaskError, match=says):
        variants_of(Bad(), SAMPLES["text"], 3, 0)


class Beside(Number):
    """Each answer to the sample as it is must beat those that saw other media."""

    rewards = {"right": 1.0, "ahead": 0.5}
    seen = None

    def variants(self, sample, n, step):
        return [replace(V, name="other", n=2), replace(V, name="none", n=0),
                replace(V, name="mixed", n=1, trained=True)]

    def score_group(self, sample, answers, services):
        self.seen = [a.variant for a in answers], {k: [a.variant for a in v] for k, v in services.variants.items()}
        others = [self.score(sample, a)["right"] for a in services.variants.get("other", ())]
        return [{"ahead": float(self.score(sample, a)["right"] > max(others, default=0))} for a in answers]


@each("ahead", [True, False])
def test_answers_of_variants_join_the_group_or_are_handed_over(ahead):
    s = scripted(lambda prompt, i: prompt.text if i else "wrong", rollout={"group_size": 3, "score_ahead": ahead})
    s.task = s.generator.task = s.encoder.task = Beside()
    s.encoder.varies = True
    groups = credit(s.next_groups(2, 0), dr_grpo)
    assert s.task.seen == (["", "", "mixed"], {"other": ["other", "other"]})
    for group in groups:
        assert [(r.index, r.variant, r.reward) for r in group.rollouts] == [(0, "", 0), (1, "", 1), (2, "mixed", 0)]
        assert [r.train_prompt for r in group.rollouts] == [None, None, group.prompt]
        assert [(r.index, r.variant, r.parts) for r in group.aside] == [
            (3, "other", {"right": 0}), (4, "other", {"right": 1})]
        assert [r.advantage for r in group.rollouts] == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    found = s.metrics()
    assert {k: v for k, v in found.items() if "variants" in k} == {
        "variants/mixed/reward": 0, "variants/mixed/share": 0.2, "variants/other/reward": 0.5,
        "variants/other/share": 0.4}


def test_the_task_on_the_page_does_what_the_page_says():
    page = (ROOT / "docs" / "write-a-task.md").read_text(encoding="utf-8")
    (body,) = [b for b in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "Variant(" in b]
    names: dict[str, Any] = {}
    exec(body, names)
    task, sample = names["Motion"](), Sample(id="1", row={"answer": "left"}, media=(clip([0, 200]),))
    (shuffled,) = variants_of(task, sample, 4, 7)
    assert (shuffled.n, shuffled.trained, shown(load_media(shuffled.media[0], LIMITS).frames)) == (2, False, [200, 0])
    answers = [parse_answer(text) for text in ("left", "right")]
    for other, order in ((answers[1:], 1.0), (answers, 0.0), ((), 1.0)):
        services = Services({"shuffled": other} if other else {})
        found = [s.parts for s in score_group(task, sample, answers, 0, services)]
        assert found == [{"correct": 1.0, "order": order}, {"correct": 0.0, "order": order}]


class Looking(Vowels):
    """A tiny model's answers, with noisy ones among them and shuffled or noisy ones beside."""

    kinds = ("noisy", "other")
    rewards = {"vowels": 1.0, "ahead": 0.5}

    def samples(self, split):
        return [SAMPLES["image"], SAMPLES["video"], SAMPLES["text"]]

    def variants(self, sample, n, step):
        edit = {"image": ("noise", 500 - step, 3), "video": ("shuffle", 3 + step)}
        media = tuple(replace(m, edits=(edit[m.kind],)) for m in sample.media)
        both = [Variant(name="noisy", media=media, n=n // 2, trained=True), Variant(name="other", media=media, n=2)]
        return [v for v in both if v.name in self.kinds and media]

    def score_group(self, sample, answers, services):
        bar = max((self.score(sample, a)["vowels"] for a in services.variants.get("other", ())), default=0)
        return [{"ahead": float(self.score(sample, a)["vowels"] > bar)} for a in answers]


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = settings(tiny_models["qwen3_vl"], rollout={"group_size": 4, "max_new_tokens": 6, "prompts_per_step": 3})
    return config, *load(config)


def looking(scene, size=4, kinds=("noisy", "other"), workers=0):
    config, policy, encode = scene
    task = Looking()
    task.kinds = kinds
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": size})})
    samples = task.samples("train")
    with Prefetcher(encode, task, workers) as prefetch:
        generator = RolloutGenerator(config, task, HFEngine(policy, 5, 16), Clock())
        return GroupSource(generator, encode, Sequential(Prompts(3, 0)), samples, prefetch).next_groups(3, 0)


def drawn(groups, variant=""):
    return [(c.tokens.tolist(), c.logprobs.tolist()) for g in groups for r in (*g.rollouts, *g.aside)
            if r.variant == variant for c in [r.completion]]


def test_plain_answers_are_the_same_bits_with_and_without_variants(scene):
    alone, beside, among = looking(scene, kinds=()), looking(scene, kinds=("other",)), looking(scene, workers=2)
    assert drawn(alone) == drawn(beside) != drawn(among)
    # beside other answers the last bits of log-probabilities differ, the random numbers do not
    assert [tokens for tokens, _ in drawn(beside, "other")] == [tokens for tokens, _ in drawn(among, "other")]
    assert [len(g.rollouts) for g in among] == [4, 4, 4] and [len(g.aside) for g in among] == [2, 2, 0]
    assert [[r.variant for r in g.rollouts] for g in among] == [["", "", "noisy", "noisy"]] * 2 + [[""] * 4]
    assert len(drawn(among, "noisy")) == 4 and drawn(among, "noisy") != drawn(among, "other")


def test_both_branches_of_t_grpo_show_other_pixels_and_a_still_clip_has_one_branch(scene):
    """Video-R1#72: the shuffled branch had the plain video."""
    config, policy, encode = scene
    task = load_class("video")(recipe="video_r1", prompt="{question}")

    def seen(colours):
        sample = Sample(id="1", row={"question": "Which way?", "answer": "A", "answer_type": "choice"},
                        media=(clip(colours),))
        generator = RolloutGenerator(config, task, HFEngine(policy, 5, 16), Clock())
        with Prefetcher(encode, task, 0) as prefetch:
            source = GroupSource(generator, encode, Sequential(Prompts(1, 0)), [sample], prefetch)
            (group,) = source.next_groups(1, 0)
            shown = prefetch.take("shuffled", lambda: with_media_of(sample, variants_of(task, sample, 4, 0)[0]))[1]
        return group, same_pixels(shown, group.prompt)
    moving, same = seen([0, 90, 200])
    assert [r.variant for r in moving.aside] == ["shuffled"] * 2 and not same
    still, same = seen([90, 90, 90])
    assert still.aside == () and same and {r.parts["temporal"] for r in still.rollouts} == {0.0}


def test_trained_variants_learn_under_the_unchanged_prompt(scene, tmp_path):
    config, policy, _ = scene
    groups = credit(looking(scene), dr_grpo)
    answers = [r for g in groups for r in g.rollouts]
    prompts = [g.prompt for g in groups for _ in g.rollouts]
    pieces = pieces_of(prompts, [r.completion.tokens for r in answers], 10**6)
    with torch.no_grad():
        batch = make_batch(pieces, "shared")
        values = policy.logprobs(batch, 1.0).logprobs
    clean = {i: values[batch.rollout_id == i].numpy() for i in range(len(answers))}
    stats, per_token = update(policy, make_optimizer(policy, config), groups, config, 0)
    gaps = []
    for i, rollout in enumerate(answers):
        found = per_token["trainer_logprobs"][i]
        assert found is not None and np.allclose(found, clean[i], atol=1e-5)
        gaps.append((rollout.variant, float(np.abs(found - rollout.completion.logprobs).max())))
    # what a noisy picture gave is another distribution, and is not mistaken for a sampler that differs
    assert max(gap for name, gap in gaps if not name) < 1e-4 < max(gap for name, gap in gaps if name)
    assert 0 <= stats["mismatch/kl"] < 1e-8 and stats["grad_norm"] > 0
    folder = RunFolder(tmp_path)
    folder.write_rollouts(0, 0, groups, per_token)
    rows = folder.rollouts(0).to_pylist()
    assert [row["variant"] for row in rows] == [r.variant or None for r in answers] + ["other"] * 4
    assert [row["advantage"] is None for row in rows] == [False] * 12 + [True] * 4
    again = compare(Looking(), folder)
    assert again.rollouts == 12 and again.changed == 0


TASK = '''
from dataclasses import replace
from vlrl.types import Variant
PLAIN

class Seen(Plain):
    rewards = {"vowels": 1.0, "short": 0.1, "sure": 0.5}
    needs = {"reference_logprobs"}

    def variants(self, sample, n, step):
        media = tuple(replace(m, edits=(("noise", 400 - 50 * step, step),)) for m in sample.media)
        return [Variant(name="noisy", media=media, n=n // 2, trained=True), Variant(name="other", media=media, n=1)]

    def score_group(self, sample, answers, services):
        sure = services.reference_logprobs(answers)
        bar = max((len(a.text) for a in services.variants.get("other", ())), default=0)
        return [{"sure": float(len(a.text) > bar) + len(v)} for a, v in zip(answers, sure)]
'''


@pytest.fixture
def seen(tiny_models, tmp_path):
    """A config of a task with variants of both kinds and a service, and settings for it."""
    path = write_config(tmp_path, tiny_models["qwen3_vl"])
    (tmp_path / "seen.py").write_text(TASK.replace("PLAIN", (tmp_path / "shades.py").read_text()
                                                   .replace("class Shades", "class Plain")))
    return path, (f"task.name={tmp_path}/seen.py:Seen", "train.schedule=constant", "train.warmup=0", "eval.samples=4",
                  "log.samples_every=0")


@pytest.mark.slow
def test_a_run_with_variants_goes_on_exactly(seen, tmp_path):
    path, words = seen

    def run(name, *rest):
        return train(configs.load(path, [f"run.dir={tmp_path}/{name}", *words, *rest, "model.lora.rank=4",
                                          "curriculum.keep=mixed"]))
    whole = run("whole", "steps=4", "data.workers=0", "rollout.score_ahead=false")
    run("broken", "steps=2", "data.workers=2")
    broken = run("broken", "steps=4", "data.workers=2")
    assert broken.start == 2
    for a, b in zip(*(s.parts.policy.trainable() for s in (whole, broken)), strict=True):
        assert torch.equal(a[1], b[1])
    found, table = metrics(whole.folder.path), whole.folder.rollouts()
    assert table.equals(broken.folder.rollouts()) and found == metrics(broken.folder.path)
    assert {"variants/noisy/reward", "variants/other/share", "reward/sure"} <= found[0].keys()
    assert table.num_rows == table.group_by("variant").aggregate([("index", "count")])["index_count"].to_numpy().sum()


@pytest.mark.slow
def test_a_run_with_variants_on_two_processes(seen, tmp_path):
    path, words = seen
    names = {"one": 1, "two": 2}
    for name, processes in names.items():
        done = start(path, tmp_path / name, *words, "steps=3", processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (metrics(tmp_path / name) for name in names)
    for key in ("reward/mean", "reward/sure", "loss", "grad_norm", "variants/noisy/reward", "variants/other/share"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-3, abs=1e-5), key
    found = [sorted((r["group_id"], r["index"], r["variant"] or "", *r["token_ids"])
                    for r in RunFolder(tmp_path / name).rollouts(0).to_pylist()) for name in names]
    assert found[0] == found[1] and len(found[0]) == 4 * 5
