"""Groups of a tiny model judged by a critic, and one update that leaves all gradients. Also run by several ranks:
`python -m tests.training.critic_scene FILE`, with a list of (folder, out, how, settings)."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from tests import once
from tests.environments.acting import played
from tests.helpers import Vowels, credited_groups, load, settings
from vlrl.algo.algorithm import Algorithm
from vlrl.distributed import comm
from vlrl.models.sharding import fsdp
from vlrl.training.advantages import Credit
from vlrl.training.update import update
from vlrl.types import Media, Sample

CRITIC = {"advantage": "gae", "critic": {"lr": 1e-3, "coef": 0.5, "lam": 0.9}}


def scene(folder, **more):
    """Policy, groups and config; the critic is not 0, so that advantages depend on it."""
    more.setdefault("algo", CRITIC)
    config = settings(folder, **more)
    torch.manual_seed(0)  # fresh adapters
    policy, encode = load(config)
    wake(policy)
    return policy, encode, config


def wake(policy):
    """Gives the critic values of some size."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        policy.head.layer.weight.copy_(0.1 * torch.randn(policy.head.layer.weight.shape, generator=g))


class Recorder(torch.optim.SGD):
    """Keeps each step's gradients by parameter, sharded ones whole, those of the critic too; changes nothing."""

    def __init__(self, policy):
        self.named = [*policy.trainable(), *((f"critic.{n}", p) for n, p in policy.head.named_parameters())]
        super().__init__([{"params": [p for _, p in self.named], "ratio": 1.0}], lr=0.0)
        self.steps = []

    def step(self, closure=None):
        self.steps.append({n: comm.full_tensor(p.grad).clone() for n, p in self.named if p.grad is not None})


def learned(policy, groups, config, step=0):
    """(gradients of each optimizer step, metrics, credited groups) of one update."""
    algorithm, recorder = Algorithm(config), Recorder(policy)
    credit = Credit(algorithm, config, policy)
    credited = credit(groups, step)
    stats, _ = update(policy, recorder, credited, config, step, algorithm)
    return recorder.steps, {**stats, **credit.metrics()}, credited


def main(folder, out, how, more):
    """One of two processes has the images, the other the texts; "sharded": by FSDP2; "episodes": of several turns;
    "idle": the second one has none."""
    policy, encode, config = scene(folder, **json.loads(more))
    groups = mine = (played(policy, encode, config, 3) if "episodes" in how
                     else credited_groups(policy, encode, config))
    groups = mine = [replace(g, rollouts=tuple(replace(r, advantage=0.0) for r in g.rollouts)) for g in groups]
    if comm.world() > 1:
        mine = [[g for g in groups if bool(g.prompt.mm) == first] for first in (True, False)][comm.rank()]
        if "episodes" in how:
            mine = [groups[:1], groups[1:]][comm.rank()]
        if "idle" in how:
            mine = [groups, []][comm.rank()]
    if "sharded" in how and comm.world() > 1:
        picture = Media(source=Image.new("RGB", (32, 32)))
        fsdp.shard(policy, encode(Vowels(), Sample(id="idle", row={"q": ""}, media=(picture,))))
    steps, stats, _ = learned(policy, mine, config)
    if comm.is_main():
        torch.save({"gradients": steps, "stats": stats}, out)


if __name__ == "__main__":
    once.install()
    for words in json.loads(Path(sys.argv[1]).read_text()):
        main(*words)
