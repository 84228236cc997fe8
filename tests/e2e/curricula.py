"""Short runs with a curriculum on a tiny model; under torchrun all of them, one after another."""

import contextlib
import sys
from pathlib import Path

from tests import once
from tests.curriculum import sourced
from tests.e2e.runs import write_config
from vlrl import config as configs
from vlrl.rollout.group_source import GroupSource
from vlrl.training.loop import train
from vlrl.training.session import Session

LEVELS = '''
SOLUTION = "<think>aeiou aeiou</think><answer>a</answer>"


class Levels(Shades):
    """Samples with a category and a difficulty; one is broken."""

    def samples(self, split):
        found = super().samples(split)[:12]
        return [Sample(id=s.id, row={**s.row, "category": "ab"[i % 2], "difficulty": i % 5 / 4, "solution": SOLUTION},
                       media=(Media(source="gone.png"),) if i == 7 else s.media) for i, s in enumerate(found)]

    def guidance(self, sample, answers):
        return f"Vowels, not {len(answers)} times {answers[0].n_tokens} tokens."


class World(Environment):
    def reset(self, seed):
        self.seed, self.turn = seed % 1000, 0
        return Observation(f"World {self.seed}.")

    def step(self, action):
        self.turn += 1
        return Step(Observation(f"{self.turn}: {len(action)}."), {"vowels": sum(c in "aeiou" for c in action) / 8},
                    done=self.turn == 3)


class Acted(Levels):
    """The same in a world of three turns."""
    score = Task.score

    def environment(self, sample):
        return World()
'''
FILTERS = "curriculum.keep=mixed curriculum.oversample=1.5 curriculum.select=most_varied curriculum.max_refills=1"
CASES = {
    "partial": "rollout.step_tokens=3 rollout.stop=[e]",
    "gain_rl": f"curriculum.name=gain_rl {FILTERS}",
    "adcl": f"curriculum.name=adcl curriculum.probe_size=2 rollout.step_tokens=3 rollout.stop=[e] {FILTERS}",
    "shares": f"curriculum.name=gvm curriculum.probe=2 rollout.step_tokens=3 rollout.stop=[e] {FILTERS}",
    "guided": "algo.guided.answers=2 algo.guided.loss=dpo rollout.minibatches=2 curriculum.pass_at=0.3",
    "hinted": "algo.guided.words=hint algo.guided.use=hinted curriculum.pass_at=0.3",
    "joined": "algo.guided.words=critique algo.guided.use=join algo.guided.groups=wrong algo.guided.answers=2 "
              "algo.loss=critique_grpo rollout.minibatches=2 curriculum.pass_at=0.3",
    "relift": "algo.demonstrations.mix=relift algo.demonstrations.mix.size=3 algo.demonstrations.mix.lr=1e-3 "
              "curriculum.pass_at=0.4",
    "acted": "rollout.branch.roots=2 rollout.group_size=5 algo.advantage=rose curriculum.pass_at=0.3",
    "branch": "rollout.branch.roots=1 rollout.branch.tokens=20 rollout.group_size=5 algo.advantage=treerl",
    "meaning": "rollout.branch.roots=1 rollout.group_size=4 algo.advantage=rose "
               "rollout.branch.at=meaning rollout.branch.at.continuations=3 rollout.branch.at.tokens=4 "
               "rollout.branch.at.candidates=3 rollout.branch.at.root=0.2",
    "search": "rollout.branch.search.width=2 rollout.branch.search.depth=3 rollout.branch.search.hard=0.7 "
              "rollout.branch.tokens=60 algo.advantage=deepsearch rollout.stop=[e] curriculum.pass_at=0.4",
}
WORDS = ("steps=5", "save.every=2", "eval.samples=0", "log.samples_every=0", "rollout.group_size=3",
         "rollout.prompts_per_step=4", "data.quarantine=true", "limits.rejected=0.6", "curriculum.pass_at=0.15")


class Killed(BaseException):
    """Ends a run as a kill does, except that what is being written still is."""


def prepare(folder: Path, model: Path) -> None:
    """Writes the config of each case."""
    file = write_config(folder, model)
    task = folder / "shades.py"
    task.write_text(task.read_text() + LEVELS)
    tasks = f"tasks: [{{name: '{task}:Levels', weight: 3}}, {{name: '{task}:Shades', label: others}}]"
    text = file.read_text()
    for case in CASES:
        asked = tasks if case == "shares" else f"task: {task}:{'Acted' if case == 'acted' else 'Levels'}"
        (folder / f"{case}.yaml").write_text(text.replace(f"task: {task}:Shades", asked))


def go(folder: Path, case: str, name: str, killed_at: int | None = None) -> Session:
    """The run of a case in `folder`/`case`-`name`; it goes on from a checkpoint that lies there."""
    class Source(GroupSource):
        def next_groups(self, count, step):
            if step == killed_at:
                raise Killed
            return super().next_groups(count, step)

    words = [*WORDS, f"run.dir={folder / f'{case}-{name}'}", *CASES[case].split()]
    return train(configs.load(folder / f"{case}.yaml", words), Source)


def main(folder: str) -> None:
    sourced.main(Path(folder) / "sourced.json")
    for case in CASES:
        with contextlib.suppress(Killed):
            go(Path(folder), case, "two", 2)  # two steps are looked at


if __name__ == "__main__":
    once.install()
    main(*sys.argv[1:])
