"""Run by several ranks: gradients of the same rollouts, each process training on its share; rank 0 saves them."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests import once
from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from tests.environments.acting import played
from tests.helpers import Vowels, credited_groups, load, settings
from tests.training.test_update import Recorder
from vlrl.algo.advantage import grpo
from vlrl.distributed import comm
from vlrl.models import cost
from vlrl.models.sharding import fsdp
from vlrl.training.advantages import credit
from vlrl.training.update import update
from vlrl.types import Group, Media, Sample


class Whole(Recorder):
    """Also of sharded gradients."""

    def step(self, closure=None):
        self.steps.append({name: comm.full_tensor(p.grad).clone() for name, p in self.policy.trainable()
                           if p.grad is not None})


def main(folder: str, out: str, how: str = "dealt", more: str = "{}") -> None:
    """Rank r trains on groups r, r + world, ...: with two processes one has images and the other mostly text.

    unequal: rank 0 has all groups with media, the other those of text. truncated: these, and every answer of rank 1 was
    cut off. idle: rank 1 has no group. balanced: as unequal, after some have moved. sharded: as unequal, by FSDP.
    episodes: of several turns, the first one by rank 0, the others by rank 1; sharded episodes: by FSDP.
    objectives: `more` is a list of algo settings, and each has its gradient, of one model."""
    torch.manual_seed(0)  # fresh adapters
    if how == "objectives":
        return objectives(folder, out, json.loads(more))
    config = settings(folder, **json.loads(more))
    policy, encode = load(config)
    groups = mine = (credit(played(policy, encode, config, 3), grpo) if "episodes" in how
                     else credited_groups(policy, encode, config))
    if how == "truncated":
        groups = mine = [g if g.prompt.mm else cut_off(g) for g in groups]
    if comm.world() > 1:
        unequal = [[g for g in groups if g.prompt.mm], [g for g in groups if not g.prompt.mm]]
        mine = {"dealt": groups[comm.rank()::comm.world()], "idle": [groups, []][comm.rank()]}.get(
            how, [groups[:1], groups[1:]][comm.rank()] if "episodes" in how else unequal[comm.rank()])
    before = comm.gather(sum(cost.group_cost(g, policy.cost) for g in mine))
    loads = {}
    if how == "balanced":
        mine, loads = cost.share_out(mine, policy.cost, config)
    if "sharded" in how and comm.world() > 1:
        picture = Media(source=Image.new("RGB", (32, 32)))
        fsdp.shard(policy, encode(Vowels(), Sample(id="idle", row={"q": ""}, media=(picture,))))
    recorder = Whole(policy)
    stats, per_token = update(policy, recorder, mine, config, step=0)
    kept = comm.gather([(g.id, r.index) for g in mine for r in g.rollouts])
    lengths = comm.gather([0 if a is None else len(a) for a in per_token["trainer_logprobs"]])
    if comm.is_main():
        torch.save({"gradients": recorder.steps, "stats": stats, "kept": kept, "lengths": lengths, "before": before,
                    **loads}, out)


def replayed(root: Path, cases: dict[str, tuple[str, str, Any]], main: Callable[..., None] = main,
             module: str = "tests.e2e.replay") -> dict[str, list[Any]]:
    """What one process, and what two find, in each case: (folder, how, more)."""
    given = {name: [(str(folder), str(root / f"{case} {name}"), how, json.dumps(more))
                    for case, (folder, how, more) in cases.items()] for name in ("one", "two")}
    for words in given["one"]:
        main(*words)
    (root / "runs.json").write_text(json.dumps(given["two"]))
    forked.run(["-m", module, str(root / "runs.json")], ENV, ROOT, 600, 2).check_returncode()
    return {case: [torch.load(root / f"{case} {name}", weights_only=True) for name in ("one", "two")] for case in cases}


def cut_off(group: Group) -> Group:
    """The group, as if none of its answers had come to its end."""
    return replace(group, rollouts=tuple(
        replace(r, completion=replace(r.completion, finish_reason="length")) for r in group.rollouts))


def objectives(folder: str, out: str, algos: list[dict]) -> None:
    """Gradient and metrics of the same rollouts under each objective."""
    policy, encode = load(settings(folder))
    policy.keep_reference(folder)
    mine = credited_groups(policy, encode, settings(folder))[comm.rank()::comm.world()]
    found = []
    for algo in algos:
        recorder = Whole(policy)
        stats, _ = update(policy, recorder, mine, settings(folder, algo=algo), step=0)
        found.append({"gradients": recorder.steps, "stats": stats})
    if comm.is_main():
        torch.save(found, out)


if __name__ == "__main__":
    once.install()
    for words in json.loads(Path(sys.argv[1]).read_text()):
        main(*words)
