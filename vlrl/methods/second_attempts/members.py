"""Functions that decide how retries change their group (algo.guided.use): each maps a Group to a Group, after all
statistics of its first completions and before its advantages are computed.

Retries are in `Group.aside`, and those that may be trained on have trained=True. A retry that becomes a member of its
group is trained under the prompt without guidance (`train_prompt`), except with `hinted`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vlrl.config.sections import GUIDED, REPLACED
from vlrl.types import Group, Rollout


def second_attempts(group: Group) -> list[Rollout]:
    """The retries in the group's `aside` that may be trained on."""
    return [r for r in group.beside if r.variant == GUIDED]


def mark_moved(group: Group) -> Group:
    """Sets `moved` on retries that became members of the group, and on the completions that these retries replaced.
    Group.plain uses this to find the group's first completions."""
    return replace(group, rollouts=tuple(replace(r, moved=True) if r.variant == GUIDED else r for r in group.rollouts),
                   aside=tuple(replace(r, moved=True) if r.variant == REPLACED else r for r in group.aside))


def beside(group: Group) -> Group:
    """Returns the group unchanged: its retries are trained by the separate loss algo.guided.loss."""
    return group


def join(group: Group) -> Group:
    """Adds the first kept retry to the members; advantages are computed over all members.

    Critique-GRPO (arXiv 2506.03106), which adds one refinement per prompt."""
    attempts = second_attempts(group)[:1]
    return replace(group, rollouts=(*group.rollouts, *attempts), aside=_untrained_aside(group, attempts))


def replace_wrong(group: Group) -> Group:
    """Replaces the last wrong completion of the group by the first kept retry. EGSR (arXiv 2505.08364)."""
    attempts = second_attempts(group)[:1]
    wrong = [i for i, r in enumerate(group.rollouts) if r.correct is False]
    if not attempts or not wrong:
        return replace(group, aside=_untrained_aside(group, ()))
    members = [*group.rollouts]
    out, members[wrong[-1]] = _as_replaced(members[wrong[-1]], group), attempts[0]
    return replace(group, rollouts=tuple(members), aside=(*_untrained_aside(group, attempts), out))


def hinted(group: Group) -> Group:
    """Replaces all members by the retries of the first round that has a kept retry, trained with the hint of that round
    in the prompt. Without a kept retry the members stay as they are, which is our choice.

    GHPO (arXiv 2507.10628)."""
    attempts = second_attempts(group)[:1]
    if not attempts:
        return replace(group, aside=_untrained_aside(group, ()))
    prompt = attempts[0].train_prompt
    assert prompt is not None
    members = [r for r in group.aside if r.variant == GUIDED and r.train_prompt is prompt]
    rest = [*_untrained_aside(group, members), *(_as_replaced(r, group) for r in group.rollouts)]
    return replace(group, prompt=prompt, aside=tuple(rest),
                   rollouts=tuple(replace(r, train_prompt=None, trained=True) for r in members))


def _as_replaced(rollout: Rollout, group: Group) -> Rollout:
    return replace(rollout, variant=REPLACED, trained=False, sampled_prompt=rollout.sampled_prompt or group.prompt.text)


def _untrained_aside(group: Group, taken: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The group's `aside` without the retries in `taken`. The remaining retries are marked as not trained."""
    rest = (r for r in group.aside if not any(r is one for one in taken))
    return tuple(replace(r, trained=False) if r.variant == GUIDED else r for r in rest)


USES: dict[str, Callable[[Group], Group]] = {"beside": beside, "join": join, "replace": replace_wrong, "hinted": hinted}
