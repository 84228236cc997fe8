"""What becomes of a group with second attempts (algo.guided.use): `Group -> Group`, once all statistics of its own
answers are taken and before its advantages.

Attempts are aside, those that may be learned from with `trained`. What they were told is prompt; an attempt that
becomes a member is read under the prompt without it (`train_prompt`), but for `hinted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vlrl.config.sections import GUIDED, REPLACED
from vlrl.types import Group, Rollout


def second_attempts(group: Group) -> list[Rollout]:
    """Returns the second attempts beside a group that are learned from."""
    return [r for r in group.beside if r.variant == GUIDED]


def mark_moved(group: Group) -> Group:
    """Returns a group that algo.guided.use has made, with second attempts among its members and the answers that they
    replace marked as moved (Group.plain)."""
    return replace(group, rollouts=tuple(replace(r, moved=True) if r.variant == GUIDED else r for r in group.rollouts),
                   aside=tuple(replace(r, moved=True) if r.variant == REPLACED else r for r in group.aside))


def beside(group: Group) -> Group:
    """Returns the group as it is: its attempts have a loss of their own, algo.guided.loss."""
    return group


def join(group: Group) -> Group:
    """Returns the group with the first attempt that is kept among its members; advantages are those of all of them.

    Critique-GRPO (arXiv 2506.03106), which takes one refinement of each prompt.
    """
    attempts = second_attempts(group)[:1]
    return replace(group, rollouts=(*group.rollouts, *attempts), aside=_resting(group, attempts))


def replace_wrong(group: Group) -> Group:
    """Returns the group with the first attempt that is kept in place of the last wrong answer.

    EGSR (arXiv 2505.08364).
    """
    attempts = second_attempts(group)[:1]
    wrong = [i for i, r in enumerate(group.rollouts) if r.correct is False]
    if not attempts or not wrong:
        return replace(group, aside=_resting(group, ()))
    members = [*group.rollouts]
    out, members[wrong[-1]] = _out(members[wrong[-1]], group), attempts[0]
    return replace(group, rollouts=tuple(members), aside=(*_resting(group, attempts), out))


def hinted(group: Group) -> Group:
    """Returns the group of the first hint under which an answer is kept: all attempts under it, with its prompt, which
    they are trained under; the group as it is where there is none, which is our choice.

    GHPO (arXiv 2507.10628).
    """
    attempts = second_attempts(group)[:1]
    if not attempts:
        return replace(group, aside=_resting(group, ()))
    prompt = attempts[0].train_prompt
    assert prompt is not None
    members = [r for r in group.aside if r.variant == GUIDED and r.train_prompt is prompt]
    rest = [*_resting(group, members), *(_out(r, group) for r in group.rollouts)]
    return replace(group, prompt=prompt, aside=tuple(rest),
                   rollouts=tuple(replace(r, train_prompt=None, trained=True) for r in members))


def _out(rollout: Rollout, group: Group) -> Rollout:
    return replace(rollout, variant=REPLACED, trained=False, sampled_prompt=rollout.sampled_prompt or group.prompt.text)


def _resting(group: Group, taken: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Returns what stays aside, where no attempt is learned from."""
    rest = (r for r in group.aside if not any(r is one for one in taken))
    return tuple(replace(r, trained=False) if r.variant == GUIDED else r for r in rest)


USES: dict[str, Callable[[Group], Group]] = {"beside": beside, "join": join, "replace": replace_wrong, "hinted": hinted}
