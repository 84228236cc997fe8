"""Environments of gymnasium: real ones, their actions, frames and pay."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from vlrl.environments.actions import read_action
from vlrl.environments.episode_reward import EpisodeReward
from vlrl.environments.gym import GymEnvironment
from vlrl.environments.images import image_of_array
from vlrl.environments.validation import ProtocolError
from vlrl.errors import ConfigError

NAMES = ("left", "down", "right", "up")
WAY = "down down right down right right".split()
ALL = ("return", "success", "progress", "illegal")


def played(environment, actions, seed=3):
    first = environment.reset(seed)
    return first, [environment.step(action) for action in actions]


def summed(steps):
    return {name: sum(step.parts.get(name, 0.0) for step in steps) for name in ALL}


def test_a_perfect_walk_over_ice(closing):
    environment = closing(GymEnvironment("FrozenLake-v1", actions=NAMES, parts=ALL, is_slippery=False))
    first, steps = played(environment, WAY)
    assert first.text == "Actions: left, down, right, up." and first.media[0].source.size == (256, 256)
    assert summed(steps) == {"return": 1.0, "success": 1.0, "progress": 1.0, "illegal": 0.0}
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert all(step.observation.media[0].source.mode == "RGB" for step in steps)
    own = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    own.reset(seed=3)
    for action in (1, 1, 2, 1, 2, 2):
        own.step(action)
    assert np.array_equal(np.asarray(steps[-1].observation.media[0].source), own.render())
    slippery = [played(GymEnvironment("FrozenLake-v1", actions=NAMES), ["right"] * 4, seed) for seed in (1, 1)]
    assert [s.state for s in slippery[0][1]] == [s.state for s in slippery[1][1]]
    assert len({played(GymEnvironment("Taxi-v4"), [], seed)[0].media[0].source.tobytes() for seed in range(6)}) > 1
    environment = GymEnvironment("FrozenLake-v1", actions=NAMES, is_slippery=False)
    _, (away, back, wall) = played(environment, ["down", "up", "up"])
    assert back.state == wall.state != away.state


def test_what_is_no_action_is_told_and_a_function_may_read_actions():
    environment = GymEnvironment("FrozenLake-v1", actions=NAMES, parts=ALL, is_slippery=False)
    _, steps = played(environment, ["jump", "<think>up?</think><answer>Down.</answer>", "", "9" * 50, "1"])
    assert steps[0].observation.text == "Error: 'jump' is not a valid action; write one of left, down, right, up"
    assert [step.parts["illegal"] for step in steps] == [1, 0, 1, 1, 0]
    shown = [step.observation.media[0].source.tobytes() for step in steps]
    assert shown[0] != shown[1] == shown[2] == shown[3] and steps[1].info == {"action": "1", "truncated": False}
    _, steps = played(environment, ["down", "down", "down", "left"])  # one into a hole
    assert summed(steps)["return"] == 0 and steps[2].info["action"] == "1"
    environment = GymEnvironment("FrozenLake-v1", act=only_left, parts=ALL)
    first, steps = played(environment, ["go", "left"])
    assert first.text == "" and steps[0].info["action"] == "0" and steps[1].observation.text == "Error: write go"


def test_ends_and_goals():
    _, steps = played(GymEnvironment("FrozenLake-v1", actions=NAMES, parts=ALL, is_slippery=False),
                      ["down", "right", "up"])
    assert steps[1].done and summed(steps)["success"] == 0 and steps[2].done and steps[2].parts["illegal"] == 1
    _, steps = played(GymEnvironment("FrozenLake-v1", actions=NAMES, is_slippery=False, max_episode_steps=2),
                      ["up", "up"])
    assert steps[1].done and steps[1].info["truncated"] and steps[1].parts["success"] == 0
    way = ["up", *["right"] * 11, "down"]
    for goal, success in ((None, 0), (-13, 1), (-12, 0)):
        _, steps = played(GymEnvironment("CliffWalking-v1", actions=("up", "right", "down", "left"), goal=goal), way)
        assert steps[-1].done and summed(steps)["return"] == -13 and summed(steps)["success"] == success


class Said(gymnasium.Env):
    """Shows texts, and says how far it is."""

    metadata = {"render_modes": []}
    action_space = spaces.Text(10)
    observation_space = spaces.Dict({"mission": spaces.Text(100), "place": spaces.Discrete(9)})

    def __init__(self, said=None, reward=0.0, shape=None):
        self.said, self.given, self.at = said or {}, reward, 0
        if shape:
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def found(self):
        if isinstance(self.observation_space, spaces.Box):
            return np.full(self.observation_space.shape, self.at, np.uint8)
        return {"mission": f"go to {self.at}", "place": self.at}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.found(), {}

    def step(self, action):
        self.at += 1
        return self.found(), self.given, self.at == 3, False, {k: v[self.at] for k, v in self.said.items()}


gymnasium.register("vlrl/Said-v0", Said, disable_env_checker=True)


class Counted(Said):
    """Knows how many are open."""

    metadata = {"render_modes": ["human"]}
    open = 0

    def __init__(self, **given):
        self.render_mode = given.pop("render_mode", None)
        super().__init__(**given)
        Counted.open += 1

    def close(self):
        Counted.open -= 1


gymnasium.register("vlrl/Counted-v0", lambda **given: Counted(**given), disable_env_checker=True)


def test_texts_and_frames_are_shown_and_what_is_refused_is_closed():
    said = {"progression": [0, 0.25, 0.2, 0.75], "success": [0, False, False, True]}
    first, steps = played(GymEnvironment("vlrl/Said-v0", said=said, parts=ALL), ["a", "b", "c"])
    assert first.text == "mission: go to 0" and not first.media
    assert [step.parts["progress"] for step in steps] == pytest.approx([0.25, -0.05, 0.55])
    assert summed(steps)["success"] == 1 and steps[2].parts["success"] == 1
    assert json.loads(GymEnvironment("vlrl/Said-v0", show="text").reset(0).text) == {"mission": "go to 0", "place": 0}
    first, (step,) = played(GymEnvironment("vlrl/Said-v0", shape=(10, 20, 3)), ["a"])
    assert first.media[0].source.size == (20, 10) and step.observation.media[0].source.getpixel((0, 0)) == (1, 1, 1)
    environment = GymEnvironment("vlrl/Counted-v0")
    assert Counted.open == 1
    environment.close()
    with pytest.raises(ConfigError, match="names need a Discrete action space"):
        GymEnvironment("vlrl/Counted-v0", actions=["a"])
    with pytest.raises(ConfigError, match="render_mode='human'"):
        GymEnvironment("vlrl/Counted-v0", render_mode="human")
    assert Counted.open == 0


def test_settings_and_rewards_that_cannot_act():
    with pytest.raises(ConfigError, match=r"actions=\['a'\] must name all 4 actions of FrozenLake-v1"):
        GymEnvironment("FrozenLake-v1", actions=["a"])
    with pytest.raises(ConfigError, match="show='picture'"):
        GymEnvironment("FrozenLake-v1", show="picture")
    for wrong in ("left", 5, [False]):
        with pytest.raises(ConfigError, match="actions"):
            GymEnvironment("FrozenLake-v1", actions=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"parts='return' must be a list: write parts=\[return\]"):
        GymEnvironment("FrozenLake-v1", parts="return")
    with pytest.raises(TypeError, match="slippery"):
        GymEnvironment("FrozenLake-v1", slippery=False)
    for reward in (float("nan"), float("inf"), "1", [1, 2], object()):
        environment = GymEnvironment("vlrl/Said-v0", reward=reward)
        environment.reset(0)
        with pytest.raises(ProtocolError, match=r"the environment's reward is .*, not a finite number"):
            environment.step("a")


def only_left(text, space):
    if text != "go":
        raise ValueError("write go")
    return 0


SPACES = [spaces.Discrete(4), spaces.Discrete(3, start=-1), spaces.Box(-1, 1, (2,), np.float32), spaces.Text(5),
          spaces.MultiDiscrete([2, 3]), spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 9, (1,), np.int64)}),
          spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)])]


def test_texts_become_actions():
    for space, text, action in (
            (SPACES[0], " 3 ", 3), (SPACES[1], "-1", -1), (SPACES[2], "[0.5, -1]", [0.5, -1]),
            (SPACES[2], "0.25 1e-1", [.25, .1]), (SPACES[3], "abc", "abc"), (SPACES[4], "[1, 2]", [1, 2]),
            (SPACES[5], '{"a": 1, "b": [9]}', {"a": 1, "b": [9]}), (SPACES[6], "[1, [0, 1]]", (1, [0, 1]))):
        found = read_action(text, space)
        assert space.contains(found), (space, text, action)
        for one, other in zip(*([f.values() if isinstance(f, dict) else f if isinstance(f, tuple) else [f]
                                 for f in (found, action)]), strict=True):
            assert np.allclose(one, other) if not isinstance(one, str) else one == other, (space, text, action)
    for space, text in (
            (SPACES[0], "4"), (SPACES[0], "1 2"), (SPACES[1], "2"), (SPACES[2], "0.5"), (SPACES[2], "2 0"),
            (SPACES[2], "x 0 1"), (SPACES[2], "nan 0"), (SPACES[4], "[1, 3]"), (SPACES[4], "[" * 5000),
            (SPACES[5], '{"a": 1}'), (SPACES[5], "[NaN]"), (SPACES[6], "[true, [0, 1]]"), (SPACES[3], "too long"),
            (SPACES[0], "1" * 30_000)):
        with pytest.raises(ValueError):
            read_action(text, space)


@given(st.text() | st.text(alphabet="0123456789.,-+e[]{}\": \n"), st.sampled_from(SPACES))
def test_any_text_is_an_action_or_a_value_error(text, space):
    try:
        assert space.contains(read_action(text, space, ()))
    except ValueError as error:
        assert len(str(error)) < 1000


@given(st.lists(st.tuples(st.floats(-10, 10), st.none() | st.floats(-1, 2)), max_size=8))
def test_parts_add_up(turns):
    paid = EpisodeReward(ALL, None)
    parts = [paid.step(reward, False, {} if told is None else {"progress": told}) for reward, told in turns]
    assert sum(p["return"] for p in parts) == pytest.approx(sum(reward for reward, _ in turns))
    last = next((told for _, told in reversed(turns) if told is not None), 0.0)
    assert sum(p["progress"] for p in parts) == pytest.approx(min(1, max(0, last)))


def test_what_is_no_picture_is_wrong():
    for values in (
            [[1, 2], [3]], np.zeros((2, 2, 2)), np.zeros((0, 3, 3)), [[300]], [[-1]], [[float("nan")]], "text", None,
            {"a": 1}, np.zeros((9000, 9000))):
        with pytest.raises(ProtocolError, match="the environment's frame is not an image"):
            image_of_array(values, "frame")
    with pytest.raises(ProtocolError,
                       match=r"the environment's frame would be black: fractions from 0\.25 to 1, .* 0 to 255"):
        image_of_array(np.array([[0.25, 1.0]]), "frame")
    assert image_of_array(np.array([[0.0, 2.0]]), "frame").getpixel((1, 0)) == (2, 2, 2)
    assert image_of_array(np.array([[0, 1]]), "frame").getpixel((1, 0)) == (1, 1, 1)
    assert image_of_array(np.zeros((1, 2)), "frame").getpixel((0, 0)) == (0, 0, 0)
