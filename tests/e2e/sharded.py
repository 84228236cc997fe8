"""Run by several ranks: runs of a task with images on some prompts alone, one after another, as a JSON file says."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tests import once
from vlrl.config import validate
from vlrl.distributed import comm
from vlrl.models import shards
from vlrl.models.token_text import TokenTexts
from vlrl.rollout.group_source import GroupSource
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.loop import train
from vlrl.types import Completion, Media, Sample, Turn


class Mixed(Task):
    """Two prompts of text, then one with an image: one process of two has the images, and of four one has no group."""

    prompt = "How bright is {id}?"
    rewards = {"vowels": 1.0}

    def samples(self, split):
        # pictures of one color would leave queries and keys of the tower without a gradient
        noise = np.random.default_rng(0).integers(0, 256, (30, 64, 64, 3), np.uint8)
        pictures = [Media(source=Image.fromarray(pixels)) for pixels in noise]
        return [Sample(id=f"{split}-{i}", row={"id": f"picture {i}"}, media=(picture,) if i % 3 == 2 else ())
                for i, picture in enumerate(pictures)]

    def score(self, sample, answer):
        return {"vowels": sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)}


class Spoiled(Mixed):
    """The second three samples have rewards that tests.huge drives beyond float32."""

    def score(self, sample, answer):
        found = super().score(sample, answer)
        return {"vowels": found["vowels"] * (1e11 if sample.id in ("train-3", "train-4", "train-5") else 1)}


class StoredEngine:
    """Gives each group the answers that belong to its number, whatever the weights and the process."""

    def __init__(self, engine):
        self.policy, self.engine = engine.policy, engine
        self._texts = TokenTexts(engine.policy)
        left_out = {*engine.policy.banned.tolist(), *engine.policy.eos}
        self._ids = [i for i in range(len(engine.policy.processor.tokenizer)) if i not in left_out]

    def sync(self, policy, step):
        self.engine.sync(policy, step)

    def close(self):
        self.engine.close()

    def generate(self, requests, done=None):
        return [[self._answer(np.random.default_rng([*r.key, i])) for i in range(r.n)] for r in requests]

    def _answer(self, draw):
        tokens = draw.choice(self._ids, draw.integers(2, 9))
        return Completion(tokens=tokens, logprobs=draw.normal(-7, 0.1, len(tokens)).astype(np.float32),
                          loss_mask=np.ones(len(tokens), bool), text=self._texts.decode(tokens),
                          finish_reason="stop", turns=(Turn(start=0, end=len(tokens)),))


class Stored(GroupSource):
    def __init__(self, generator, *more):
        super().__init__(replace(generator, engine=StoredEngine(generator.engine)), *more)


def resave(config, path: Path) -> None:
    """Loads a checkpoint and saves it again, into the run folder of the config."""
    config = shards.resolve_sharding(config)
    parts = assemble(config, make_accelerator(config), path)
    shards.load_optimizer(parts.policy, parts.optimizer, checkpoint.load_state(path)["optimizer"])
    state = shards.state(parts.policy, {"optimizer": parts.optimizer.state_dict()})
    weights = shards.weights(parts.policy)
    comm.on_main(lambda: checkpoint.save(
        Path(config.run.dir), 1, lambda folder: parts.policy.save(folder, weights), state, 1) and None)
    if parts.scorer:
        parts.scorer.close()


def copy(source: str, folder: Path, without: int) -> None:
    """Copies a run folder; `without` the checkpoint of that step, so that the run goes on from an earlier one."""
    shutil.copytree(source, folder)
    if without:
        shutil.rmtree(folder / "checkpoints" / f"step-{without:06d}")


def main(listed: str) -> None:
    for run in json.loads(Path(listed).read_text()):
        config = validate(run["config"])
        if "copy" in run:
            comm.on_main(lambda run=run, config=config: copy(run["copy"], Path(config.run.dir), run.get("without", 0)))
        if "resave" in run:
            resave(config, Path(run["resave"]))
        else:
            train(config, Stored if run.get("stored") else GroupSource)


if __name__ == "__main__":
    once.install()
    main(*sys.argv[1:])
