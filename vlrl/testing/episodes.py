"""Checks of episodes: the same seed and actions give the same episode, no action makes the environment fail, and the
perfect episode earns the most.

Environments and tools run as in training: in a separate process, with a time limit for each step."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from vlrl.config.schema import EnvironmentSettings, LimitsSettings
from vlrl.data import media as loader
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.tools import schemas
from vlrl.environments.validation import same
from vlrl.errors import DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task
from vlrl.task.scoring import AnswerScore, score_group
from vlrl.task.tool_calls import CLOSE, OPEN
from vlrl.testing.findings import Findings
from vlrl.testing.texts import hostile_texts
from vlrl.types import Observation, PastAction, Sample, Step

STEP_S = 10.0
"""Maximum seconds for one step."""
_HOSTILE_S = 60.0  # seconds spent on hostile actions of a sample
_TURNS = 50
_MORE = 3  # further episodes played if processes are left over
_LEAVE_S = 2.0  # seconds within which everything an episode has started must end after it was closed
_END_S = 30.0  # seconds within which processes shared by environments must end after the environment process
_SEED = 17


def check_episodes(task: Task, samples: Sequence[Sample], findings: Findings) -> None:
    """Plays the perfect episode of every sample twice, and plays hostile actions on the first and the last sample."""
    host = Environments(lambda _: task, EnvironmentSettings(workers=1, step_s=STEP_S))
    try:
        rewards = [_check_perfect(host, task, sample, findings) for sample in samples]
        most = []
        for place in dict.fromkeys((0, len(samples) - 1)):
            actions = [*hostile_texts("", long=place == 0), *hostile_calls(task, samples[place])]
            most.append(_check_hostile(host, task, samples[place], actions, rewards[place], findings))
        remaining = _check_left(host, task, samples[0], findings)
    finally:
        host.close()
    for process in psutil.wait_procs(remaining, timeout=_END_S)[1]:
        findings.add("close", f"the process {_name(process)!r} keeps running after the environment process that "
                     "started it has ended")
    known = [reward for reward in rewards if reward is not None]
    if known:
        findings.note(f"perfect episodes earn {sum(known) / len(known):.4g} on average over {len(known)} samples, "
                      f"hostile actions at most {max(most):.4g}")


def hostile_calls(task: Task, sample: Sample) -> list[str]:
    """Tool calls that are malformed or have arguments that may break a careless tool; [] if the sample has no tools."""
    tools = [schema["function"] for schema in schemas(task, sample)]
    values: list[Any] = [None, True, -1, 0, 10**30, 1e300, "", "\ud800", "x" * 5000, [], [[]], {}, [0] * 4]
    calls = [{"name": tool["name"], "arguments": dict.fromkeys(tool["parameters"].get("properties", ()), value)}
             for tool in tools for value in values]
    odd = ["", "NaN", "[" * 5000, '{"name": 1}', '{"name": "no_such_tool"}', OPEN]
    texts = [*map(json.dumps, calls), *odd] if tools else []
    return [*(f"{OPEN}{text}{CLOSE}" for text in texts), *([OPEN * 500] if tools else ())]


def _check_left(host: Environments, task: Task, sample: Sample, findings: Findings) -> list[psutil.Process]:
    """Returns the processes that the `host` of environments still runs after all episodes, such as a browser that all
    episodes share. If every episode leaves another process running, adds a finding and returns []."""
    shared = _left(host)
    if shared:
        for _ in range(_MORE):
            play(host, task, sample, ["", "1"], findings)
        left = _left(host)
        if len(left) >= len(shared) + _MORE:
            findings.add("close", f"the process {_name(left[-1])!r} keeps running after all environments were closed, "
                         "and each episode leaves one more such process: end it in close()")
            return []
    return shared


def _left(host: Environments) -> list[psutil.Process]:
    started: list[psutil.Process] = []
    for number in host.processes:
        with suppress(psutil.Error):
            started += psutil.Process(number).children(recursive=True)
    return psutil.wait_procs(started, timeout=_LEAVE_S)[1]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return "unknown"


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode as it was played: the first observation, and the steps up to the action that ended it."""

    first: Observation | None
    """The first observation; None if the sample has no environment or its reset failed."""
    steps: tuple[Step, ...] = ()
    error: str = ""
    scored: AnswerScore | None = None

    @property
    def done(self) -> bool:
        return bool(self.steps) and self.steps[-1].done


def play(host: Environments, task: Task, sample: Sample, actions: Sequence[str], findings: Findings) -> PlayedEpisode:
    """Plays an episode with these actions and returns it. Adds a finding if the environment cannot be closed."""
    episode = host.open(sample, _SEED)
    try:
        (first,) = host.reset([episode])
        if first is None or isinstance(first, EnvironmentFailure):
            return PlayedEpisode(None, error=first.reason if first else "")
        steps: list[Step] = []
        for action in actions:
            (step,) = host.step([episode], [action])
            if isinstance(step, EnvironmentFailure):
                return PlayedEpisode(first, tuple(steps), step.reason)
            steps.append(step)
            if step.done:
                break
    finally:
        for failed in filter(None, host.close_episodes([episode])):
            findings.add("close", failed.reason, sample.id)
    turns = tuple(PastAction(action=action, observation=s.observation.text, media=tuple(s.observation.media),
                             parts=s.parts, state=s.state, done=s.done)
                  for action, s in zip(actions, steps, strict=False))
    if not turns:
        return PlayedEpisode(first)
    answer = replace(parse_answer(turns[-1].action), turns=turns)
    return PlayedEpisode(first, tuple(steps), scored=score_group(task, sample, [answer], 0)[0])


def _check_perfect(host: Environments, task: Task, sample: Sample, findings: Findings) -> float | None:
    actions = _perfect_actions(task, sample, findings)
    with findings.guard("score", "score", sample.id):
        played, again = (play(host, task, sample, actions or ["", "1"], findings) for _ in range(2))
        if played.error:
            findings.add("environment", played.error, sample.id)
        elif played.first is None:
            findings.note("some samples have no environment; how their answers are scored was not checked")
        elif not _same(played, again):
            findings.add("deterministic", "the same seed and actions gave another observation or reward the second "
                         "time", sample.id)
        elif actions and played.scored:
            _check_shown(played, sample, findings)
            return _check_reward(task, sample, actions, played, played.scored, findings)
    return None


def _perfect_actions(task: Task, sample: Sample, findings: Findings) -> list[str]:
    with findings.guard("oracle_actions", "oracle_actions", sample.id):
        actions = task.of(sample).oracle_actions(sample)
        if actions is None:
            findings.note("some samples have no perfect episode (oracle_actions returned None), so its reward was not "
                          "checked")
        elif isinstance(actions, str) or not actions or not all(isinstance(action, str) for action in actions):
            findings.add("oracle_actions", f"oracle_actions returned {str(actions)[:80]!r}, expected a list of strings",
                         sample.id)
        else:
            return list(actions)
    return []


def _check_reward(task: Task, sample: Sample, actions: Sequence[str], played: PlayedEpisode, scored: AnswerScore,
                  findings: Findings) -> float | None:
    last = actions[len(played.steps) - 1]
    if scored.reward is None:
        findings.add("score", f"the perfect episode cannot be scored: {scored.error}", sample.id, last)
    elif not scored.correct or scored.reward <= 0:
        findings.add("oracle_actions", f"the perfect episode earns {scored.reward:.4g} with the parts {scored.parts}; "
                     f"it must earn more than 0 and be correct, by {dict(task.of(sample).criterion)}", sample.id, last)
    if len(played.steps) < len(actions):
        findings.add("oracle_actions", f"the perfect episode ends after {len(played.steps)} of its {len(actions)} "
                     "actions", sample.id, last)
    if not played.done:
        findings.note("some perfect episodes do not end by themselves (done is never true): in training a limit of "
                      "episode.* ends them, and they count as truncated")
    return scored.reward


def _check_shown(played: PlayedEpisode, sample: Sample, findings: Findings) -> None:
    limits = LimitsSettings()
    for observation in (played.first, *(step.observation for step in played.steps)):
        for media in observation.media if observation else ():
            try:
                loader.load(media, limits)
            except DataError as error:
                findings.add("media", f"an observation has media that cannot be read: {error}", sample.id)


def _same(a: PlayedEpisode, b: PlayedEpisode) -> bool:
    def alike(one: Step, other: Step) -> bool:
        return (one.parts, one.done, one.state) == (other.parts, other.done, other.state) and same(
            one.observation, other.observation)

    return (a.first is not None and b.first is not None and not b.error and len(a.steps) == len(b.steps)
            and same(a.first, b.first) and all(map(alike, a.steps, b.steps)))


def _check_hostile(host: Environments, task: Task, sample: Sample, actions: Sequence[str], best: float | None,
                   findings: Findings) -> float:
    began, left, most = time.monotonic(), list(actions), 0.0
    while left and time.monotonic() - began < _HOSTILE_S and len(findings.by_rule.get("environment", ())) < 3:
        with findings.guard("score", "score", sample.id, left[0]):
            played = play(host, task, sample, left[:_TURNS], findings)
            if played.first is None:
                return most
            if played.error:
                findings.add("environment", played.error, sample.id, left[len(played.steps)])
            last = left[max(0, len(played.steps) - 1)]
            if played.scored and played.scored.error:
                findings.add("score", played.scored.error, sample.id, last)
            elif played.scored and played.scored.reward is not None:
                most = max(most, played.scored.reward)
                if best is not None and played.scored.reward >= best - 1e-6:
                    findings.add("hostile", f"hostile actions earn {played.scored.reward:.4g}, not less than the "
                                 f"perfect episode ({best:.4g})", sample.id, last)
            del left[:max(1, len(played.steps) + bool(played.error))]
            continue
        left.pop(0)  # scoring raised
    if left:
        findings.note(f"{len(left)} of {len(actions)} hostile actions were not tried on sample {sample.id!r}: its "
                      f"environment took more than {_HOSTILE_S:g} s for the other actions, or failed")
    return most
