"""Episodes in `vlrl plan` and the dry run: their lengths by hand, and what a task's environment shows."""

from dataclasses import replace

import pytest

from tests.cli.test_playing_episodes import TASK
from tests.tools.test_plan import H100, THREE
from vlrl import config as configs
from vlrl.config.episodes import EpisodeSettings
from vlrl.errors import DataError
from vlrl.tools.machine import dryrun, memory, plan
from vlrl.tools.play import episode_lengths
from vlrl.tools.play.episode_lengths import EpisodeLength, ObservationStats

SEEN = ObservationStats(episodes=2, observations=6, oracle=True, tokens=100, visual=64, pictures=1)
TINY = "configs/quickstart.yaml"


def limits(**more):
    return EpisodeSettings(**{"max_turns": 4, "max_tokens": 10_000, "max_media": 32, **more})


def test_lengths_by_hand():
    for more, action, length in [
        ({}, 50, EpisodeLength(turns=4, tokens=500, visual=192, written=200, pictures=3)),
        ({"max_turns": 1}, 50, EpisodeLength(turns=1, tokens=50, visual=0, written=50, pictures=0)),
        ({"max_media": 1}, 50, EpisodeLength(turns=2, tokens=200, visual=64, written=100, pictures=1)),
        ({"max_tokens": 220}, 50, EpisodeLength(turns=2, tokens=200, visual=64, written=100, pictures=1)),
         # no room for a third
        ({"max_tokens": 170}, 50, EpisodeLength(turns=2, tokens=170, visual=64, written=70, pictures=1)),
         # the second is cut
        ({"max_tokens": 30}, 50, EpisodeLength(turns=1, tokens=30, visual=0, written=30, pictures=0))]:
        assert SEEN.length(limits(**more), action) == length, (more, action, length)


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "lamp.py"
    file.write_text(TASK)
    return [f"task={file}:Lamp", "episode.max_turns=4"]


def test_an_environment_is_played(words, tmp_path):
    """Pictures of 32 x 32 are 2 tokens of 28 x 28; "\\x1b[2JLevel 1." has 12 characters."""
    found = plan.observe(configs.load(THREE, words))
    assert found == ObservationStats(episodes=3, observations=9, oracle=True, tokens=10 + 4 + 2, visual=2, pictures=1)
    empty = plan.observe(configs.load(THREE, [*words, "task.perfect=false"]))
    assert empty and not empty.oracle and empty.observations == 12
    assert "empty actions" in empty.words() and "12 in 3 episodes" in empty.words()
    assert plan.observe(configs.load(THREE, ["task=digits"])) is None
    (tmp_path / "broken.py").write_text(TASK.replace('["up"] * sample["goal"]', '["up", "break"]'))
    found = plan.observe(configs.load(THREE, [*words, f"task={tmp_path / 'broken.py'}:Lamp"]))
    assert found and "an episode failed: step: " in found.words() and found.observations == 3
    (tmp_path / "other.py").write_text(TASK.replace('["up"] * sample["goal"]', '["break"]'))
    words = [f"task={tmp_path / 'other.py'}:Lamp"]
    with pytest.raises(DataError, match=r"no environment returned an observation.*broken"):
        plan.observe(configs.load(THREE, words))


def test_a_plan_counts_turns():
    small = ["task=digits", "rollout.max_new_tokens=64"]
    config = configs.load(TINY, [*small, "episode.max_turns=4"])
    single, four = plan.plan(config, 1, H100), plan.plan(config, 1, H100, observed=SEEN)
    assert four.episode == SEEN.length(config.episode, 64) and single.episode is None
    assert four.peak > single.peak
    lines = "\n".join(plan.render(four))
    assert "episodes of 556 tokens in 4 turns, 64 an action and 192 visual in 3 images" in lines
    assert "played with the perfect actions" in lines and "answers of 64" in "\n".join(plan.render(single))
    one = plan.plan(configs.load(TINY, [*small, "episode.max_turns=1"]), 1, H100, observed=SEEN)
    assert one.memory.training == single.memory.training
    config = configs.load(THREE, ["task=digits", "rollout.max_new_tokens=100"])
    shape = plan.architecture(config.model.name)
    length = SEEN.length(limits(), 100)
    long = configs.load(THREE, ["task=digits", f"rollout.max_new_tokens={length.tokens}"])
    answers = memory.estimate(long, shape, 400, 256, "cuda")
    texts = memory.estimate(config, shape, 400, 256, "cuda", replace(length, visual=0))
    assert (texts.activations, texts.logits) == (answers.activations, answers.logits)
    pictures = memory.estimate(config, shape, 400, 256, "cuda", length)
    assert pictures.activations > texts.activations and pictures.training > texts.training
    assert texts.prefill > answers.prefill  # each turn is read with all before it
    assert texts.resident == memory.estimate(config, shape, 400, 256, "cuda").resident


def test_a_dry_run_counts_episodes(words, tmp_path):
    config = configs.load(TINY, [*words, f"run.dir={tmp_path / 'run'}"])
    report = dryrun.check(config)
    assert not report.problems and report.observed and report.episode and report.step
    assert report.observed.visual > 0 and report.observed.tokens > report.observed.visual
    assert report.episode.turns == 4 and report.step.largest > 4 * config.rollout.max_new_tokens
    assert "The lamp is off." in report.sample.text and report.sample.media[0].original == (32, 32)
    assert not any("environment" in warning for warning in report.warnings)
    plain = dryrun.check(configs.load(TINY, [f"run.dir={tmp_path / 'run'}"]), samples=4)
    assert plain.episode is None and plain.lengths and plain.lengths.samples == 4
    assert episode_lengths.as_answers(config, report.episode).rollout.max_new_tokens == report.episode.tokens
