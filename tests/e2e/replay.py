"""Run under torchrun: the gradient of the same rollouts, each process training on its share; rank 0 saves it."""

import sys

import torch

from tests.helpers import credited_groups, load, settings
from tests.test_update import Recorder
from vlrl import dist
from vlrl.update import update


def main(folder: str, out: str, **more) -> None:
    """Rank r trains on groups r, r + world, ...; with two processes one has images and the other mostly text."""
    config = settings(folder, **more)
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    recorder = Recorder(policy)
    stats, _ = update(policy, recorder, groups[dist.rank()::dist.world()], config, step=0)
    if dist.is_main():
        torch.save({"gradients": recorder.steps[0], "loss": stats["loss"]}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
