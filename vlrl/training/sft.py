"""Supervised fine-tuning with the data, encoder, packing, update, evaluation and checkpoints of RL.

`vlrl sft CONFIG [key=value ...]` trains on answers of the data set (rollout/demonstrations.py). The loss is the
cross-entropy of the answer's tokens; algo.loss=bradley_terry trains a reward model on pairs of answers instead
(methods/preferences). The config is the config of an RL run; its settings of sampling, group filters and engine are
ignored. Completions are generated only in evaluations, by the training model; evaluations of a reward model generate
none."""

from vlrl.config.base import Named
from vlrl.config.loading import derived
from vlrl.config.registry import Table
from vlrl.config.schema import (
    AlgoSettings,
    AsyncSettings,
    Config,
    CurriculumSettings,
    EngineSettings,
    SaveSettings,
)
from vlrl.config.sections import PAIRS
from vlrl.rollout.demonstrations import demonstrated
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.partial import PartialGroup
from vlrl.training.loop import train as train_loop
from vlrl.training.session import Session
from vlrl.training.start import Start
from vlrl.types import Group


class SupervisedSource(GroupSource):
    """A GroupSource whose groups have a single completion: the data set's answer instead of a sampled completion."""

    generates = False

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        groups = demonstrated(self.task, self.encode, self.engine, self.config, drawn.accepted, self.step)
        return {a.number: group for a, group in zip(drawn.accepted, groups, strict=True)}


_SOURCES = Table({PAIRS: "vlrl.methods.preferences.pairs:PairSource"})
"""Value of algo.loss -> the source of groups that replaces SupervisedSource."""


def train(config: Config, make_session: type[Session] = Session, start: Start | None = None) -> Session:
    """Runs supervised training up to `config.steps` steps of rollout.prompts_per_step samples; see loop.train."""
    source = _SOURCES.get(config.algo.loss.name, SupervisedSource)
    return train_loop(supervised_config(config), source, make_session, start)


def supervised_config(config: Config) -> Config:
    """The settings of a supervised run: those of the RL run, with cross-entropy as the loss. If algo.loss is a pairwise
    loss, it is kept."""
    pairs = config.algo.loss.name == PAIRS
    algo = AlgoSettings(advantage=Named(name="dr_grpo"), aggregation=config.algo.aggregation,
                        loss=config.algo.loss if pairs else Named(name="supervised"))
    usual = config.save.best == SaveSettings.model_fields["best"].default
    measured = pairs and usual and config.eval.samples and config.eval.splits
    save = config.save.model_copy(update={"best": "accuracy"}) if measured else config.save
    everything = {name: CurriculumSettings.model_fields[name].default for name in ("keep", "oversample", "select")}
    curriculum = config.curriculum.model_copy(update=everything)  # a group of one right answer is never mixed
    engine = config.engine if config.engine.name == "hf" else EngineSettings()
    return derived(config, algo=algo, curriculum=curriculum, engine=engine, asynchronous=AsyncSettings(), save=save)
