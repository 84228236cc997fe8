"""How retries change their group (algo.guided.use): `Group -> Group`, after all statistics of its own completions and
before its advantages.

Retries are in `aside`; those that may be trained on have `trained`. Their guidance belongs to the prompt; a retry that
becomes a member is trained under the prompt without it (`train_prompt`), except with `hinted`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vlrl.config.sections import GUIDED, REPLACED
from vlrl.types import Group, Rollout


def second_attempts(group: Group) -> list[Rollout]:
    """The retries beside a group that are trained on."""
    return [r for r in group.beside if r.variant == GUIDED]


def mark_moved(group: Group) -> Group:
    """Marks retries among the members, and the completions that they replaced, as moved (Group.plain)."""
    return replace(group, rollouts=tuple(replace(r, moved=True) if r.variant == GUIDED else r for r in group.rollouts),
                   aside=tuple(replace(r, moved=True) if r.variant == REPLACED else r for r in group.aside))


def beside(group: Group) -> Group:
    """The group unchanged: its retries have their own loss, algo.guided.loss."""
    return group


def join(group: Group) -> Group:
    """Adds the first kept retry to the members; advantages are computed over all of them.

    Critique-GRPO (arXiv 2506.03106), which takes one refinement of each prompt."""
    attempts = second_attempts(group)[:1]
    return replace(group, rollouts=(*group.rollouts, *attempts), aside=_resting(group, attempts))


def replace_wrong(group: Group) -> Group:
    """Replaces the last wrong completion by the first kept retry. EGSR (arXiv 2505.08364)."""
    attempts = second_attempts(group)[:1]
    wrong = [i for i, r in enumerate(group.rollouts) if r.correct is False]
    if not attempts or not wrong:
        return replace(group, aside=_resting(group, ()))
    members = [*group.rollouts]
    out, members[wrong[-1]] = _out(members[wrong[-1]], group), attempts[0]
    return replace(group, rollouts=tuple(members), aside=(*_resting(group, attempts), out))


def hinted(group: Group) -> Group:
    """Replaces the members by all retries under the first hint with a kept retry, trained with that hint in the prompt.
    Without a kept retry the group stays as it is, which is our choice.

    GHPO (arXiv 2507.10628)."""
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
    """`aside` without the retries in `taken`; none of the rest is trained on."""
    rest = (r for r in group.aside if not any(r is one for one in taken))
    return tuple(replace(r, trained=False) if r.variant == GUIDED else r for r in rest)


USES: dict[str, Callable[[Group], Group]] = {"beside": beside, "join": join, "replace": replace_wrong, "hinted": hinted}
