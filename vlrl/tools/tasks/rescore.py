"""Scores the stored rollouts of a run again and compares the rewards, which shows the effect of an edited reward on the
same answers.

    comparison = compare(task, RunFolder("runs/quickstart"), steps=range(0, 20))

Samples are read from the rollout files. Data files, models and images are not read, so a reward that uses
`sample.media` finds it empty. Reward parts that need a training-time service are left out of the new reward."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.config.registry import prints_aside
from vlrl.errors import RunError
from vlrl.rewards.text import EnvironmentAction, parse_answer
from vlrl.store import RunFolder
from vlrl.task import Task, fill
from vlrl.task.scoring import score_group, without_score
from vlrl.task.services import Services, without_absent_parts
from vlrl.types import Answer, Parts, PastAction, Sample

_COLUMNS = ("group_id", "sample_id", "task", "index", "step", "prompt", "completion", "token_ids", "parts", "reward",
            "sample", "truncated", "error", "variant", "advantage", "turns", "episode_id", "opened")


@dataclass(frozen=True)
class RescoredGroup:
    """The stored and the new scores of one group. Lists have one entry per rollout."""

    group_id: str
    sample_id: str
    step: int
    texts: list[str]
    old: list[float | None]
    new: list[float | None]
    old_parts: list[Parts]
    new_parts: list[Parts]
    errors: list[str | None]  # the error raised by the new reward for each rollout, or None
    skipped: list[str]  # reward parts that were left out because they need a service
    template_known: bool  # whether the stored prompt contains one of the task's templates

    @property
    def order(self) -> tuple[float, float | None]:
        """Returns (change, tau), two measures of how much the ranking of the group's answers changed between the old
        and the new reward.

        The change is the mean over pairs of answers: 1 for a swapped pair, 1/2 for a tie made or broken. Tau is
        Kendall's tau-b; it is None if all answers have the same old or the same new reward. Unscorable answers are left
        out."""
        both = [(a, b) for a, b in zip(self.old, self.new, strict=True) if a is not None and b is not None]
        if len(both) < 2:
            return 0.0, None
        old, new = (np.greater.outer(v, v).astype(int) - np.less.outer(v, v) for v in np.asarray(both).T)
        change = float(np.abs(old - new).sum()) / 2 / (len(both) * (len(both) - 1))
        norm = math.sqrt((old * old).sum() * (new * new).sum())
        return change, float((old * new).sum() / norm) if norm else None


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class RewardComparison:
    """The old and the new reward, compared over all groups. `means` maps "reward" and each "part <name>" to (old mean,
    new mean)."""

    rollouts: int = 0
    groups: int = 0
    changed: int = 0  # number of rollouts whose reward changed, or that became scorable or unscorable
    errors: int = 0
    first_error: str | None = None
    reordered: int = 0  # number of groups in which at least one pair of answers was swapped, or a tie made or broken
    flat: list[int] = field(default_factory=lambda: [0, 0])
    """Number of groups in which all answers have the same reward: (under the old reward, under the new reward)."""
    taus: _Mean = field(default_factory=_Mean)
    """Mean of Kendall's tau-b over groups, without groups whose answers all have the same old or new reward."""
    means: dict[str, tuple[_Mean, _Mean]] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    unknown_templates: int = 0
    """Number of groups whose prompt contains none of the task's templates; they are scored with the first template."""
    most_changed: list[tuple[float, int, RescoredGroup]] = field(default_factory=list)
    """Heap of (change of the ranking, negative number of the group, group) for the groups whose ranking changed most;
    see `top`."""

    def add(self, group: RescoredGroup, keep: int) -> None:
        """Adds one group to the counts, and keeps the group if its ranking is among the `keep` that changed most."""
        self.rollouts, self.groups = self.rollouts + len(group.old), self.groups + 1
        self.changed += sum(a != b for a, b in zip(group.old, group.new, strict=True))
        errors = [e for e in group.errors if e]
        self.errors, self.first_error = self.errors + len(errors), self.first_error or next(iter(errors), None)
        for i, rewards in enumerate((group.old, group.new)):
            self.flat[i] += len({r for r in rewards if r is not None}) < 2
        change, tau = group.order
        self.taus.add(tau)
        self.reordered += change > 0
        self._add_means(group)
        self.skipped.update(group.skipped)
        self.unknown_templates += not group.template_known
        if change > 0 and keep:
            add = heapq.heappush if len(self.most_changed) < keep else heapq.heappushpop
            add(self.most_changed, (change, -self.groups, group))

    def _add_means(self, group: RescoredGroup) -> None:
        for side, (rewards, parts) in enumerate(((group.old, group.old_parts), (group.new, group.new_parts))):
            for reward, own in zip(rewards, parts, strict=True):
                for name, value in {"reward": reward, **{f"part {k}": v for k, v in own.items()}}.items():
                    if name not in self.means:
                        self.means[name] = (_Mean(), _Mean())
                    self.means[name][side].add(value)

    @property
    def top(self) -> list[RescoredGroup]:
        """The groups whose ranking changed most, the largest change first."""
        return [group for _, _, group in sorted(self.most_changed, key=lambda entry: entry[:2], reverse=True)]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as a JSON object. `parts` has {"old", "new"} with the mean of each part; a mean is null if the
        part is missing in that reward."""
        means = {name: {"old": old.value, "new": new.value} for name, (old, new) in self.means.items()}
        groups = [{"group_id": g.group_id, "sample_id": g.sample_id, "step": g.step, "change": g.order[0],
                   "tau": g.order[1], "answers": [
                       {"text": text, "old": old, "new": new, "old_parts": before, "new_parts": after}
                       for text, old, new, before, after in zip(g.texts, g.old, g.new, g.old_parts, g.new_parts,
                                                                strict=True)]} for g in self.top]
        return {"rollouts": self.rollouts, "changed": self.changed, "reward": means.get("reward"),
                "parts": {name.removeprefix("part "): m for name, m in means.items() if name != "reward"},
                "errors": self.errors, "first_error": self.first_error, "skipped": sorted(self.skipped),
                "unknown_templates": self.unknown_templates,
                "groups": {"total": self.groups, "reordered": self.reordered, "tau_mean": self.taus.value,
                           "flat_old": self.flat[0], "flat_new": self.flat[1], "most_changed": groups}}


def compare(task: Task, run: RunFolder, *, steps: range | None = None, split: str | None = None, keep: int = 3,
            progress: Callable[[int, int], None] = lambda done, total: None) -> RewardComparison:
    """Compares the stored rewards of a run with newly computed ones. By default, all training rollouts are compared;
    `steps` selects some of their steps, and `split` selects the evaluations of this split instead. The result
    contains the `keep` groups whose ranking changed most.

    `progress` is called with the number of finished steps and their total number. Raises RunError if the run has no
    such rollouts."""
    stored = stored_steps(run, split)
    wanted = [step for step in stored if steps is None or step in steps]
    if not wanted:
        what = f"evaluations of split {split!r}" if split else "rollouts"
        known = f" It has steps {stored[0]} to {stored[-1]}." if stored else ""
        there = " of the chosen steps" if stored else ""
        skipped = "".join(f" {note}." for note in run.notes[:3])
        raise RunError(f"{run.path} holds no {what}{there}.{known}{skipped}")
    out = RewardComparison()
    for done, step in enumerate(wanted):
        progress(done, len(wanted))
        for rows in _groups(run, step, split):
            out.add(rescore(task, rows), keep)
    progress(len(wanted), len(wanted))
    return out


def stored_steps(run: RunFolder, split: str | None = None) -> list[int]:
    """The steps with stored rollouts, in order. Raises RunError if there is no run folder."""
    if not os.path.isdir(run.path):
        what = "is a file" if os.path.exists(run.path) else "does not exist"
        raise RunError(f"{str(run.path)!r} is not a run folder: it {what}. Give the run.dir of a run, e.g. "
                       "runs/quickstart")
    steps = run.rollouts(split=split, columns=["step"])["step"].unique()
    return sorted(step for step in steps.to_pylist() if step is not None)


@prints_aside()
def rescore(task: Task, rows: Sequence[Mapping[str, Any]]) -> RescoredGroup:
    """Scores one stored group again; `rows` are its stored rollouts. Rollouts with an answer to a variant of the prompt
    (e.g. with other media) that were not trained on are only passed to the task's score_group."""
    aside = [row for row in rows if row["variant"] and row["advantage"] is None]
    rows = [row for row in rows if not (row["variant"] and row["advantage"] is None)]
    first = rows[0]
    task = task.of(Sample(id=first["sample_id"] or "", task=first["task"] or ""))
    sample, known = _sample(task, first)
    answers = [_answer(row) for row in rows]
    others: dict[str, list[Answer]] = {}
    for row in aside:
        others.setdefault(row["variant"], []).append(_answer(row))
    services = Services(others)
    reduced, skipped = without_absent_parts(task, sample, answers, services)
    scored = [without_score(s, next((turn.error for turn in a.turns if turn.error), None))
              for a, s in zip(answers, score_group(reduced, sample, answers, first["step"], services), strict=True)]
    return RescoredGroup(
        group_id=first["group_id"], sample_id=sample.id, step=first["step"], texts=[a.text for a in answers],
        old=[row["reward"] for row in rows], new=[s.reward for s in scored],
        old_parts=[dict(row["parts"] or ()) for row in rows], new_parts=[s.parts for s in scored],
        errors=[s.error for s in scored], skipped=skipped, template_known=known)


def _answer(row: Mapping[str, Any]) -> Answer:
    opened, turns = row["opened"] or "", row["turns"] or ()
    acted = [t["text"] or "" for t in turns if t["role"] == "assistant"] if row["episode_id"] else []
    parsed = parse_answer([row["completion"] or "", *acted][-1], row["n_tokens"] or 0, bool(row["truncated"]),
                          row["step"], opened)
    return replace(parsed, variant=row["variant"] or "", turns=_past_actions(turns, opened) if acted else ())


def _past_actions(turns: Sequence[Mapping[str, Any]], opened: str) -> tuple[PastAction, ...]:
    """The actions of a stored episode, with the texts of the observations but not their images. `opened` is the text
    that the chat template puts before each action."""
    after = [*(t["text"] or "" for t in turns[1:]), ""]
    return tuple(PastAction(action=EnvironmentAction(t["text"] or "", opened), observation=shown,
                       parts=dict(t["parts"] or ()), state=t["state"], done=bool(t["done"]), error=t["error"])
                 for t, shown in zip(turns, after, strict=True) if t["role"] == "assistant")


def _groups(run: RunFolder, step: int, split: str | None) -> Iterator[list[dict[str, Any]]]:
    table = run.rollouts(step, split=split, columns=_COLUMNS)
    lengths = table["token_ids"].combine_chunks().value_lengths()
    table = table.drop_columns("token_ids").append_column("n_tokens", lengths)
    rows = sorted(table.to_pylist(), key=lambda row: (row["group_id"] or "", row["index"] or 0))
    for _, group in itertools.groupby(rows, key=lambda row: row["group_id"]):
        yield list(group)


def _sample(task: Task, row: Mapping[str, Any]) -> tuple[Sample, bool]:
    """Returns (the sample rebuilt from a stored row, whether the stored prompt contains a template of the task)."""
    try:
        fields = dict(json.loads(row["sample"]))
    except (ValueError, TypeError, RecursionError):
        raise RunError(f"rollout of group {row['group_id']!r}, step {row['step']}: the stored sample is not a "
                       "JSON object") from None
    prompt = row["prompt"] or ""
    templates = task.templates_for(Sample(id=row["sample_id"] or "", row=fields))
    fitting = templates if len(templates) == 1 else [t for t in templates if fill(t, fields) in prompt]
    template = max(fitting, key=len, default=templates[0])
    return Sample(id=row["sample_id"] or "", row=fields, prompt=template), bool(fitting)
