"""`services.reward_model`: scores answers by trained reward models.

    scorer = RewardModel(config)
    scorer("Is it a cat?", media, ["yes", "no"])    # per answer: (score of each model, ...), or why there is none

A reward model is either a vision-language model with a scoring head (reward_head.safetensors, as `vlrl sft` writes it
with algo.loss=bradley_terry), or a transformers sequence classifier with one label, which reads only text. Which it is
depends on the model's files. A question and an answer, in the model's chat template, are scored together."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from vlrl.config.schema import Config, LoraSettings
from vlrl.config.services import RewardModelSettings
from vlrl.distributed import comm
from vlrl.engine.base import unsampled_completion
from vlrl.errors import ConfigError, DataError
from vlrl.models import loading
from vlrl.models.families import family_of, sync_tilings
from vlrl.models.heads import HEAD, RewardHead
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.models.reference import read_tokens
from vlrl.rewards.text import completion_for
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.task.services import ServiceContext
from vlrl.types import Media, Sample

_WAY = "set it to a run of vlrl sft with algo.loss=bradley_terry, or to a sequence classifier with one label"


class _Scorer(Protocol):
    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[float]: ...


class GroupRewardModel:
    """The reward model for one group: a callable that returns for each answer a tuple with the score of each model, or
    None. `failures` collects the reasons why answers have no score."""

    def __init__(self, scorer: Callable[..., list[tuple[float, ...] | str]], context: ServiceContext):
        self._scorer, self.context = scorer, context
        self.scored = 0  # number of answers so far, including answers without a score
        self.failures: list[str] = []

    def __call__(self, question: str, media: Sequence[Any], answers: Sequence[str]) -> list[tuple[float, ...] | None]:
        scores = self._scorer(question, media, answers)
        self.scored += len(scores)
        self.failures += [one for one in scores if isinstance(one, str)]
        return [None if isinstance(one, str) else one for one in scores]


def of_run(config: Config, folder: Path) -> RewardModel:
    """Creates the service for a run. `folder` is not used, because the service stores nothing."""
    return RewardModel(config)


class RewardModel:
    """The models in services.reward_model.name, on this process's GPU if it has one. Raises ConfigError if a model
    cannot be loaded or is not a reward model."""

    def __init__(self, config: Config):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.models: list[_Scorer] = [_loaded(name, config, device) for name in config.services.reward_model.name]
        self._asked: list[GroupRewardModel] = []

    concurrency = 1

    def at(self, context: ServiceContext) -> GroupRewardModel:
        """Returns the reward model for one group. Its answers are counted under split and step of `context`."""
        self._asked.append(GroupRewardModel(self, context))
        return self._asked[-1]

    def problem(self) -> str:
        return ""

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Numbers of scored and unscored answers of a split since the last call, in steps up to `step`, over all
        processes."""
        done = [s for s in self._asked if s.context.split == split and s.context.step <= step]
        self._asked = [s for s in self._asked if s not in done]
        scored, failed = comm.total(sum(s.scored for s in done), sum(len(s.failures) for s in done))
        return {"reward_model/scored": scored, "reward_model/failed": failed}

    def close(self) -> None:
        pass

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[tuple[float, ...] | str]:
        """Returns for each answer a tuple with the score of each model, or a string that says why there is none."""
        if not answers:
            return []
        try:
            columns = [model(question, media, answers) for model in self.models]
        except DataError as error:
            return [str(error)] * len(answers)
        rows = [*zip(*columns, strict=True)]
        return [row if all(map(math.isfinite, row)) else f"the score {row} is not finite" for row in rows]


def _loaded(name: str, config: Config, device: torch.device) -> _Scorer:
    folder = Path(checkpoint.model_folder(name))
    if (folder / HEAD).is_file():
        return HeadScorer(folder, config, device)
    return ClassifierScorer(name, config.services.reward_model, device)


class _Asks(Task):

    prompt = "{question}"


class HeadScorer:
    """A vision-language model with a scoring head, in float32 on a CPU and bfloat16 on a GPU."""

    def __init__(self, folder: Path, config: Config, device: torch.device):
        settings = config.model.model_copy(update={
            "name": str(folder), "lora": LoraSettings(), "max_pixels": None, "min_pixels": None,
            "chat_template_kwargs": {}, "feature_cache_mib": 0})
        dtype = loading.compute_dtype(settings)
        model = loading.load_model(folder, dtype, f"services.reward_model.name={str(folder)!r}", device=device)
        family = family_of(model.config)
        processor = loading.load_processor(settings, family)
        sync_tilings(model, processor)
        accelerator: Any = SimpleNamespace(device=device)
        self._policy = Policy(model.requires_grad_(False).to(device).eval(), processor, family, accelerator, dtype)
        self._head = RewardHead.of(load_file(folder / HEAD), device)
        self._encode = Encoder(processor, family, self._policy.positions, config.model_copy(update={"model": settings}))
        self._train = config.train

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[float]:
        """The score of each answer. Raises DataError for unreadable media, and for a prompt that is too long."""
        prompt = self._encode(_Asks(), Sample(id="asked", row={"question": question}, media=tuple(media)))
        texts = [completion_for(answer, prompt.opened) for answer in answers]
        rows = [unsampled_completion(self._encode.answer_ids(text), text) for text in texts]
        outputs = read_tokens(self._policy, [prompt] * len(rows), rows, self._train,
                              lambda batch: self._head(self._policy.states(batch)))
        return [float(values[-1]) for values in outputs]


class ClassifierScorer:
    """A transformers sequence classifier with one label, in float32. It ignores images."""

    def __init__(self, name: str, settings: RewardModelSettings, device: torch.device):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._keep, self._device = settings.keep, device
        self._batch = settings.batch or (32 if device.type == "cuda" else 1)
        self._known: OrderedDict[str, float] = OrderedDict()
        loading.check_hub(name)
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=torch.float32, use_safetensors=True, output_loading_info=True)
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"services.reward_model.name={name!r} cannot be loaded ({str(error)[:300]}): {_WAY}"
                              ) from None
        if report["missing_keys"] or model.config.num_labels != 1:
            what = f"lacks {', '.join(sorted(report['missing_keys'])[:3])}" if report["missing_keys"] else (
                f"has {model.config.num_labels} labels instead of one")
            raise ConfigError(f"services.reward_model.name={name!r} {what}: {_WAY}")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(device).eval()
        self._longest = min(int(getattr(model.config, "max_position_embeddings", 10**6)),
                            self._tokenizer.model_max_length)

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[float]:
        """The score of each answer. Raises DataError for a text that is too long; texts are never truncated."""
        texts = [self._text(question, answer) for answer in answers]
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        scores = {text: self._known[text] for text in texts if text in self._known}
        for start in range(0, len(new), self._batch):
            some = new[start:start + self._batch]
            scores |= zip(some, self._scored(some), strict=True)
        for text in texts:
            self._known[text] = scores[text]
            self._known.move_to_end(text)
        while len(self._known) > self._keep:
            self._known.popitem(last=False)
        return [scores[text] for text in texts]

    def _text(self, question: str, answer: str) -> str:
        if self._tokenizer.chat_template is None:
            return f"{question}\n{answer}"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False))

    def _scored(self, texts: Sequence[str]) -> list[float]:
        special = self._tokenizer.chat_template is None  # a template adds its own
        inputs = self._tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=special)
        if inputs["input_ids"].shape[1] > self._longest:
            raise DataError(f"an answer and its question have {inputs['input_ids'].shape[1]} tokens, more than the "
                            f"{self._longest} that the reward model can read")
        with torch.no_grad():
            return self._model(**inputs.to(self._device)).logits[:, 0].float().cpu().tolist()
