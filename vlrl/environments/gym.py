"""Runs any gymnasium environment that renders frames or has observations that can be shown as text.

    class Ice(Task):
        rewards = {"return": 1.0, "success": 0.0}
        def environment(self, sample):
            return GymEnvironment("FrozenLake-v1", actions=("left", "down", "right", "up"), is_slippery=False)"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.config.registry import resolve
from vlrl.environments.actions import read_action
from vlrl.environments.episode_reward import PARTS, EpisodeReward, truth
from vlrl.environments.images import image_of_array
from vlrl.environments.tools import MOST_TEXT, shorten
from vlrl.environments.validation import ProtocolError, checked_names
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task.environment import Environment
from vlrl.types import Media, Observation, Step

SHOW = ("auto", "image", "text", "both")


class GymEnvironment(Environment):
    """A gymnasium environment. Frames become images, strings in observations become text, and the model's text becomes
    an action.

    name: id for `gymnasium.make` (`module:Id` imports a module first).
    actions: names of the actions of a Discrete space, in order; () = the names that the environment defines, or else
        numbers.
    act: a function (text, space) -> action that replaces the default conversion of the text, and raises ValueError for
        an invalid action; or its address `path/file.py:function`.
    show: image = only the frame; text = the observation as text; both = the frame and the text; auto = the frame, and
        the strings in the observation. With image or auto, an observation that has neither is written as text.
    goal, parts: see EpisodeReward. arguments: further arguments of `gymnasium.make`."""

    def __init__(self, name: str, *, actions: Sequence[str] = (), act: str | Callable[[str, Any], Any] | None = None,
                 show: str = "auto", goal: float | None = None, parts: Collection[str] = PARTS, **arguments: Any):
        if show not in SHOW:
            raise ConfigError(f"show={show!r}: choose one of {', '.join(SHOW)}")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames are drawn into memory, on hosts without a screen too
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        self.show, self.rewards = show, EpisodeReward(parts, goal)
        self._read = resolve("environment.options.act", act, {}) if isinstance(act, str) else act
        actions = checked_names(actions, "actions")
        self.world, self.frames = _make(name, arguments)
        try:
            self.names = self._named(actions)
        except BaseException:
            self.world.close()
            raise
        self._ended = False

    def reset(self, seed: int) -> Observation:
        observation, _ = self.world.reset(seed=seed)
        self.state = _digest(observation)
        shown = self._shown(observation)
        return Observation("\n".join(filter(None, (self._legend(), shown.text))), shown.media)

    def step(self, action: str) -> Step:
        if self._ended:
            return Step(Observation("The episode has ended."), self.rewards.illegal(), done=True, state=self.state)
        try:
            text, space = parse_answer(action).final.strip(), self.world.action_space
            own = self._read(text, space) if self._read else read_action(text, space, self.names)
        except ValueError as error:
            return Step(Observation(shorten(f"Error: {error}"), self._media), self.rewards.illegal(), state=self.state,
                        info={"error": shorten(str(error), 1000)})
        observation, reward, terminated, truncated, info = self.world.step(own)
        ended, cut_short = truth(terminated, "terminated"), truth(truncated, "truncated")
        self.state, self._ended = _digest(observation), ended or cut_short
        parts = self.rewards.step(reward, ended, info if isinstance(info, Mapping) else {})
        return Step(self._shown(observation), parts, done=self._ended, state=self.state,
                    info={"action": shorten(str(own), 200), "truncated": cut_short})

    def close(self) -> None:
        self.world.close()

    def _named(self, given: Sequence[str]) -> tuple[str, ...]:
        from gymnasium.spaces import Discrete

        space, own = self.world.action_space, self.world.unwrapped
        if not isinstance(space, Discrete):
            if given:
                raise ConfigError(f"actions={list(given)}: names need a Discrete action space, but "
                                  f"{self.world.spec.id} has {space}")
            return ()
        names = tuple(map(str, given or getattr(own, "get_action_meanings", tuple)()))
        if names and len(names) != space.n:
            raise ConfigError(f"actions={list(names)} must name all {space.n} actions of {self.world.spec.id}")
        return names

    def _legend(self) -> str:
        if self._read or not hasattr(self.world.action_space, "n"):
            return ""
        start, n = int(self.world.action_space.start), int(self.world.action_space.n)
        return "Actions: " + ", ".join(self.names or map(str, range(start, start + n))) + "." if n <= 100 else ""

    def _shown(self, observation: Any) -> Observation:
        frame = observation if self.frames == "observation" else self.world.render() if self.frames else None
        drawn = frame is not None and self.show != "text"
        self._media = media = [Media(source=image_of_array(frame, "frame"))] if drawn else []
        if self.show in ("text", "both"):
            text = _written(observation)
        else:
            text = _texts(observation)
            text = _written(observation) if not (text or media) else text if self.show == "auto" else ""
        return Observation(shorten(text), media)


def check(name: str) -> None:
    """Raises ConfigError if gymnasium does not know an environment of this name."""
    from gymnasium.error import Error

    try:
        _spec(name)
    except (Error, ImportError) as error:
        raise ConfigError(f"environment.name='gym:{name}': {type(error).__name__}: {error}. For an environment of "
                          "another package write gym:package:Id") from None


def _spec(name: str) -> Any:
    import gymnasium

    module, colon, own = name.rpartition(":")
    if colon:
        importlib.import_module(module)
    return gymnasium.spec(own)


def _make(name: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """Creates the gymnasium environment `name`. Returns (environment, source of its frames). The source is "render",
    "observation", or "" if the environment has no frames."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    entry = _spec(name).entry_point
    metadata = getattr(load_env_creator(entry) if isinstance(entry, str) else entry, "metadata", None)
    if not isinstance(metadata, Mapping):  # the entry point is a factory function
        probe = gymnasium.make(name, **arguments)
        metadata = probe.unwrapped.metadata
        probe.close()
    if "render_mode" in arguments or "rgb_array" in (metadata.get("render_modes") or ()):
        world = gymnasium.make(name, **{"render_mode": "rgb_array", **arguments})
        if world.render_mode != "rgb_array":
            world.close()
            raise ConfigError(f"render_mode={world.render_mode!r}: frames can only be read with render_mode=rgb_array")
        return world, "render"
    world = gymnasium.make(name, **arguments)
    shape = world.observation_space.shape or ()
    drawn = len(shape) == 3 and shape[2] in (1, 3, 4) and world.observation_space.dtype == np.uint8
    return world, "observation" if drawn else ""


def _digest(observation: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(f"{key}=".encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for inner in value:
                add(inner)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            digest.update(f"{value};".encode("utf-8", "replace"))

    add(observation)
    return digest.hexdigest()[:16]


def _texts(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {value}" for key, value in observation.items() if isinstance(value, str) and value)
    return ""


def _written(observation: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [*map(plain, value)]
        if isinstance(value, (np.ndarray, np.generic)):
            if value.size > MOST_TEXT:
                raise ProtocolError(f"an observation of {value.size} numbers cannot be shown as text: set "
                                    "show=image")
            return value.tolist()
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

    return observation if isinstance(observation, str) else json.dumps(plain(observation), ensure_ascii=False)
