"""Drive: the same for the same scene and decisions; what is paid follows from what happened."""

from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tables import each
from tests.tasks.scaffold import assert_ok, played, scored_episode
from vlrl import config as configs
from vlrl.errors import ConfigError, DataError
from vlrl.rewards import closed_loop as rules
from vlrl.task import load
from vlrl.task.services import Services, drop_unserved_parts
from vlrl.testing.texts import hostile_texts
from vlrl.training.build_task import make_task

pytest.importorskip("highway_env")
from vlrl.tasks._drive_world import Decision, World  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
from vlrl.tasks.drive import decision_text, read_decision  # pyright: ignore[reportMissingImports]  # likewise

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ("highway", "merge", "intersection", "roundabout")


def drive(**given) -> Any:
    return load("drive", {"width": 64, "seconds": 6, **given})


def frames(observations):
    return [sha256(o.media[0].source.tobytes() + o.text.encode()).hexdigest() for o in observations]


@pytest.mark.slow
def test_the_same_scene_and_decisions_show_the_same_pictures():
    task = drive()
    actions = ["ACCELERATE, STRAIGHT", "no decision", "DECELERATE, LEFT_CHANGE"]
    for place in range(4):
        sample, other = task.samples("train")[place], task.samples("heldout")[place]
        first, again, apart = (frames(played(drive(), s, actions)[0]) for s in (sample, sample, other))
        assert first == again and len(set(first)) == len(first) and not set(first) & set(apart)
        assert played(task, sample, actions)[0][0].media[0].source.size == (64, 32)


def test_scenes_and_successes_by_scenario():
    task, other = drive(count=50), drive(count=50)
    other.seed = 1
    names = [{s["scene"] for s in t.samples(split)} for t in (task, other) for split in ("train", "heldout")]
    assert len(set.union(*names)) == 200
    assert Counter(s.category for s in task.samples("train")) == {"highway": 13, "merge": 13, "intersection": 12,
                                                                  "roundabout": 12}
    with pytest.raises(ConfigError, match="train and heldout"):
        task.samples("test")
    samples = drive().samples("heldout")
    parts = [{"success": 1.0, "collision": 0.0}, {"success": 0.0, "collision": 1.0}, {}, {"success": 0.0}]
    records = [{"sample": samples[4 * (i // 2) + i % 2], "parts": p} for i, p in enumerate(parts)]
    assert drive().summarize(records) == {"success/highway": 0.5, "collision/highway": 0.0, "success/merge": 0.0,
                                          "collision/merge": 0.5}


@each("actions text expected", [
    ("meta", "KEEP, STRAIGHT", Decision("KEEP", "STRAIGHT")),
    ("meta", "<think>STOP</think> ACCELERATE, LEFT_CHANGE", Decision("ACCELERATE", "LEFT_CHANGE")),
    ("meta", "<answer>DECELERATE, RIGHT_CHANGE</answer>", Decision("DECELERATE", "RIGHT_CHANGE")),
    ("meta", "I STOP, going STRAIGHT.", Decision("STOP", "STRAIGHT")), ("meta", "KEEP", None),
    ("meta", "STRAIGHT", None), ("meta", "", None), ("meta", "KEEP, STOP, STRAIGHT", None),
    ("meta", "KEEP, LEFT_TURN", None), ("meta", "keep, straight", None), ("meta", "do not STOP, STRAIGHT", None),
    ("waypoints", "[[5, 0, 1], [10, -1.5, 2]]", Decision(way=[[5, 0, 1], [10, -1.5, 2]])), ("waypoints", "[]", None),
    ("waypoints", "[[5, 0, 0]]", None), ("waypoints", "[[5, 0]]", None), ("waypoints", "[[1e999, 0, 1]]", None),
    ("waypoints", "KEEP, STRAIGHT", None)])
def test_decisions_that_are_read(actions, text, expected):
    read = read_decision(text, actions)
    assert read == expected and (not read or read_decision(decision_text(read), actions) == read)


@each("actions", ["meta", "waypoints"])
def test_hostile_texts_brake_the_vehicle(actions):
    task = drive(actions=actions, traffic=0, seconds=20)
    _, steps = played(task, task.samples("train")[0], list(hostile_texts("", long=False))[:12])
    assert len(steps) == 12 and not any(s.done for s in steps)
    assert steps[-1].info["speed"] < 0.1 and not any(s.parts["format"] for s in steps)


@pytest.mark.slow
def test_its_config_pays_less_for_a_brake_that_is_no_decision():
    """Else misspelt words become the brake, as they did in runs (benchmarks/results/drive_cpu.md)."""
    task = make_task(configs.load(ROOT / "configs" / "drive.yaml"))
    for sample in [task.samples("train")[i] for i in range(4)]:
        said, misspelt = (scored_episode(task, sample, [text] * 6) for text in ("STOP, STRAIGHT", "STRAIGHT, STOOP"))
        assert said.parts["completion"] == misspelt.parts["completion"] > 0
        assert said.reward - misspelt.reward == pytest.approx(1)


def test_what_ends_the_drive():
    world = World("highway", "behind", 12)
    seconds = []
    while world.left and not (seconds and seconds[-1].ended):
        seconds.append(world.drive(Decision("ACCELERATE" if world.ego.speed < world.limit else "KEEP")))
    assert seconds[-1].collision and not seconds[-1].off_road and seconds[-1].now < 1
    assert not any(s.collision for s in seconds[:-1]) and min(s.ttc for s in seconds) < 0.1
    assert world.left > 0
    task = drive(actions="waypoints", traffic=0)
    for place in range(4):
        _, steps = played(task, task.samples("train")[place], ["[[6, 8, 1], [8, 30, 3]]"] * 4)
        assert steps[-1].done and steps[-1].parts["off_road"] == 1 and not steps[-1].parts["collision"]
        assert steps[-1].parts["success"] == 0
    task = drive()
    for place in range(4):
        result = scored_episode(task, task.samples("train")[place], ["STOP, STRAIGHT"] * 9)
        assert result.parts["success"] == 0 and result.correct is False
        assert 0 <= result.reward <= result.parts["completion"] < 0.5
    _, steps = played(drive(traffic=0), task.samples("train")[0], ["STOP, STRAIGHT"] * 9)
    assert len(steps) == 6 and steps[-1].done


def test_way_points_are_followed():
    """To within half a metre: straight on, and into the lane to the left."""
    world = World("highway", "follow", 12, traffic=0)
    speed, start = world.ego.speed, world.ego.position.copy()
    for _ in range(3):
        world.drive(Decision(way=[[speed * t, 0.0, t] for t in (1.0, 2.0)]))
    assert np.allclose(world.ego.position - start, [3 * speed, 0], atol=0.5)
    lane = world.ego.lane_index[2]
    side = 4.0 if lane > 0 else -4.0
    world.drive(Decision(way=[[speed, side / 2, 1], [2 * speed, side, 2], [3 * speed, side, 3]]))
    turned = world.ego.heading
    world.drive(Decision(way=[[speed, side / 2, 1], [2 * speed, side / 2, 2]]))
    assert turned * side < 0 and world.ego.lane_index[2] == lane - np.sign(side)


@each("word low high", [("KEEP", -0.01, 0.01), ("ACCELERATE", 1.5, 3), ("DECELERATE", -3, -1.5), ("STOP", -6.1, -4)])
def test_words_of_speed(word, low, high):
    world = World("highway", "words", 12, traffic=0)
    before = world.ego.speed
    world.drive(Decision(word))
    assert low <= world.ego.speed - before <= high


def test_paths_and_copies_of_a_drive():
    for path, by in (("LEFT_CHANGE", -1), ("RIGHT_CHANGE", 1), ("STRAIGHT", 0)):
        world = World("highway", "lanes", 12, traffic=0)
        lane = world.ego.lane_index[2]
        seconds = [world.drive(Decision("KEEP", path if i == 0 else "STRAIGHT")) for i in range(4)]
        assert world.ego.lane_index[2] == min(2, max(0, lane + by)) and not any(s.ended for s in seconds)
        assert all(abs(a) <= rules.SIDEWAYS for s in seconds for a in s.across)  # nobody is shaken
    for scenario in SCENARIOS:
        world = World(scenario, "copied", 6)
        world.drive(Decision("ACCELERATE"))
        other = world.copy()
        other.drive(Decision("STOP"))
        again = world.copy()
        ends = [w.drive(Decision()) for w in (world, again)]
        assert np.array_equal(world.ego.position, again.ego.position) and ends[0] == ends[1]
        assert world.picture(64).tobytes() == again.picture(64).tobytes() != other.picture(64).tobytes()


def test_what_is_paid_follows_from_what_happened():
    task = drive()
    sample = task.samples("train")[0]
    actions = list(task.oracle_actions(sample) or ())
    _, steps = played(task, sample, actions)
    result = scored_episode(task, sample, actions)
    assert result.correct and result.parts["success"] == 1 and result.parts["completion"] == pytest.approx(1)
    assert result.reward == pytest.approx(sum(s.parts["carl"] for s in steps)) and 0 < result.reward <= 1
    assert result.parts["format"] == 1 and not result.parts["collision"]
    assert result.parts["comfort"] == np.mean([s.parts["comfort"] for s in steps])
    shaped = scored_episode(drive(reward="shaped"), sample, actions)
    assert shaped.reward == pytest.approx(sum(s.parts["shaped"] for s in steps))
    own = scored_episode(drive(rewards={"carl": 0, "completion": 2.0, "collision": -1.0}), sample, actions)
    assert own.reward == pytest.approx(2.0)


def test_solvable_scenes_are_those_in_which_the_expert_arrives(monkeypatch):
    """Another scene takes the place of one in which it does not; the same at every call."""
    from vlrl.tasks import _drive_expert  # pyright: ignore[reportMissingImports]  # likewise

    monkeypatch.setattr(_drive_expert, "demonstration",
                        lambda scenario, scene, *_: (Decision(),) if scene in ("0/train/0", "0/train/1/2") else None)
    task = drive(solvable=True)
    assert [task.samples("train")[i]["scene"] for i in (0, 1, 1)] == ["0/train/0", *["0/train/1/2"] * 2]
    with pytest.raises(DataError, match=r"'train-000002': .* in none of 100 scenes of intersection: .*task.seconds"):
        task.samples("train")[2]
    assert drive().samples("train")[1]["scene"] == "0/train/1"


class Cosines:
    """A clip service that finds all pictures equally near."""

    def __init__(self, negative, positive):
        self.row, self.asked = [negative, positive], []

    def __call__(self, images, texts):
        self.asked += [(len(images), list(texts))]
        return np.array([self.row] * len(images))


def test_the_contrast_part_and_its_service():
    task = drive(reward="contrast")
    with pytest.raises(ConfigError, match=r"'contrast' needs the service 'clip'.*rewards\.contrast=0"):
        drop_unserved_parts(task, (), task.samples("train"))
    assert "contrast" not in drop_unserved_parts(drive(), (), task.samples("train")).weights
    task, clip = drive(reward="contrast", traffic=0, actions="waypoints"), Cosines(0.2, 0.3)
    way, services = "[[6, 8, 1], [8, 30, 3]]", Services({}, {"clip": clip})
    result = scored_episode(task, task.samples("train")[0], [way] * 4, services)
    assert result.parts["off_road"] == 1 and result.reward < 1 / 6


@each("cosines clear", [((0.2, 0.3), 1.0), ((0.315, 0.3), 0.5), ((0.4, 0.3), 0.0)])
def test_the_contrast_part(cosines, clear):
    """1 - |speed - clear|, times how near the middle of the lane is, over the seconds."""
    task, clip = drive(reward="contrast", traffic=0), Cosines(*cosines)
    sample = task.samples("train")[0]
    actions = ["KEEP, STRAIGHT"] * 3
    result = scored_episode(task, sample, actions, Services({}, {"clip": clip}))
    _, steps = played(task, sample, actions)
    expected = sum((1 - abs(s.parts["speed"] - clear)) * s.parts["centring"] for s in steps) / 6
    assert result.reward == pytest.approx(expected, abs=1e-9)
    assert clip.asked == [(3, [task.goal_negative, task.goal_positive])]


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"highway-env, which is not installed: pip install 'vlrl\[driving\]'"):
        drive().samples("train")
    for wrong in ({"reward": "best"}, {"scenarios": ["moon"]}, {"scenarios": []}, {"width": 65}):
        with pytest.raises(ConfigError, match=f"task.{next(iter(wrong))}"):
            drive(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("actions", "each", "least"), [("meta", 2, 9), ("waypoints", 1, 7)])
def test_the_expert_arrives_in_most_scenes(actions, each, least):
    task = drive(seconds=10, actions=actions)
    samples = task.samples("train")[:12]
    arrived = Counter(s["scenario"] for s in samples if task.oracle_actions(s) is not None)
    assert all(arrived[scenario] >= each for scenario in SCENARIOS) and arrived.total() >= least


@pytest.mark.slow
def test_the_contract_in_traffic():
    assert_ok(drive(actions="waypoints"), samples=2)
