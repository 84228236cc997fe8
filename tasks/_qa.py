"""Recipes of the qa task: prompts, answer formats, and reward parts in addition to accuracy."""

import math as floats
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlrl.rewards.math import VerifierError, boxed
from vlrl.rewards.text import between, denies, said, think_answer_format
from vlrl.task import Weight
from vlrl.task.recipes import Recipe
from vlrl.types import Answer, Parts, Sample, Variant

from . import _qa_kinds as kinds
from ._shared import think_answer

_TAGS = "Output the thinking process in <think> </think> and the final answer ({kind}) in <answer> </answer> tags."
_LONGEST_LINE = 200
_FOUR_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BOX = ("<|begin_of_box|>", "<|end_of_box|>")
_GATE = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_STAGES = ("planning", "caption", "reasoning", "summary")
_STRUCTURE = "".join(f"<{stage}>I look at the picture.</{stage}>" for stage in _STAGES)


@dataclass(frozen=True, kw_only=True)
class QaRecipe(Recipe):
    """A recipe whose completions state one final answer, in a format that the recipe defines."""

    form: Callable[[str], float]
    """Returns 1 for a text in the right format, else 0."""
    thinks: bool = True
    """Whether the format includes the thinking. If not, only the text after the thinking is checked, because the chat
    template may open a <think> tag."""
    find: Callable[[Answer], str]
    """Returns the part of an answer that is scored; "" if there is none."""
    say: Callable[[str], str]
    """Writes a text in the right format."""
    combine: str = "sum"
    """How the reward parts are combined with `task.combine=auto`."""


def _read(task: Any, sample: Sample, answer: Answer) -> Any:
    text, negations = task.used.find(answer), task.negation == "read"
    if kinds.kind_of(sample.row).names and negations and denies(text) and not _says_so(text, sample.row):
        return None
    return kinds.read(text, sample.row, negations)


def _says_so(text: str, row: Mapping[str, Any]) -> bool:
    """Whether a text contains a right answer or an option of the row that itself starts with a negation ("not enough
    data"). Such a text may start with a negation without denying its answer."""
    known = [*kinds.right_answers(row), *kinds.options_of(row)]
    return any(denies(name) and name.strip().casefold() in text.casefold() for name in known)


def _score(task: Any, sample: Sample, answer: Answer) -> Parts:
    return {"accuracy": kinds.score(task, sample.row, _read(task, sample, answer)),
            "format": task.used.form(answer.text if task.used.thinks else said(answer))}


def _recipe(prompt: str, rewards: Mapping[str, Weight], *, form: Callable[[str], float] = think_answer_format,
            find: Callable[[Answer], str] = lambda answer: answer.final,
            say: Callable[[str], str] = think_answer,
            **other: Any) -> QaRecipe:
    return QaRecipe(prompt=prompt, rewards=rewards, form=form, find=find, say=say, read=_read, score=_score,
                    target=lambda _task, sample: right[0] if len(right := kinds.target(sample.row)) == 1 else right,
                    oracle=lambda task, sample: say(kinds.perfect_answer(sample)), **other)


# --- plain, R1-V, Vision-R1, MM-Eureka, View-R1 -----------------------------------------------------------------------


_IN_DOLLARS = ("You should first think about the reasoning process in the mind and then provide the user with the "
               "answer. The reasoning process and the answer ({kind}) are enclosed within <think> </think> and "
               "<answer> </answer> tags, i.e., <think> Since $1+1=2$, so the answer is $2$. </think><answer> $2$ "
               "</answer>, which means your output should start with <think> and end with </answer>.\n"
               "Question:\n{asked}")

DIRECT = _recipe("{asked}\nAnswer with {kind} only.", {"accuracy": 1.0, "format": 0.1}, thinks=False,
                 form=lambda text: float(0 < len(text.strip()) <= _LONGEST_LINE and not {"\n", "<"} & {*text.strip()}),
                 say=lambda text: " ".join(text.splitlines()))
THINKING = _recipe("{asked}\n" + _TAGS, {"accuracy": 1.0, "format": 1.0})
VISION_R1 = _recipe("{asked}\n" + _TAGS, {"accuracy": 1.0, "format": 1.0}, combine="product")
MM_EUREKA = _recipe(_IN_DOLLARS, {"accuracy": 1.0, "format": 0.5})


def _boxed_thinking(text: str) -> float:
    text = text.strip()
    once = text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1
    return float(once and len(boxed(text.partition("</think>")[2])) == 1)


def _in_box(answer: Answer) -> str:
    r"""The content of \boxed{} after the thinking. "" if several boxes differ, or if the thinking never ends."""
    _, closed, rest = answer.text.rpartition("</think>")
    contents = set(boxed(rest)) if closed or "<think>" not in rest else set()
    return contents.pop() if len(contents) == 1 else ""


EASY_R1 = _recipe(
    "{asked}\nYou FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer ({kind}) MUST BE put in "
    "\\boxed{}.", {"accuracy": 0.9, "format": 0.1}, form=_boxed_thinking, find=_in_box,
    say=lambda text: f"<think>I look at the picture.</think>\\boxed{{{text}}}")


# --- GLM-4.1V: a gate, then a rule or a judge -------------------------------------------------------------------------


def glm_answer(text: str) -> str | None:
    r"""The answer between <|begin_of_box|> and <|end_of_box|> in a text that passes GLM-4.1V's format check
    (2507.01006), else None. The check requires thinking and answer in tags with nothing around them, exactly one such
    box, no LaTeX \boxed{}, no nested tags, and no mix of languages in the thinking."""
    lowered, text = text.lower(), text.strip()
    framed = _GATE.fullmatch(text) if all(lowered.count(tag) == 1 for tag in _FOUR_TAGS) else None
    if not framed:
        return None
    thinking, answer = framed.groups()
    once = all(text.count(mark) == 1 for mark in _BOX) and "\\boxed{" not in answer
    inside = between(answer, *_BOX) if once else None
    return None if inside is None or mixes_languages(thinking) else inside


def mixes_languages(text: str) -> bool:
    """Whether one paragraph of a text is Chinese (at least 50 Chinese characters, more than 80 % of the paragraph) and
    another is English (at least 200 letters, more than 70 %)."""
    chinese = english = False
    for paragraph in text.split("\n"):
        signs = sum(not c.isspace() for c in paragraph) or 1
        hanzi = sum("\u4e00" <= c <= "\u9fff" for c in paragraph)
        latin = sum(c.isascii() and c.isalpha() for c in paragraph)
        chinese |= hanzi >= 50 and hanzi > 0.8 * signs
        english |= latin >= 200 and latin > 0.7 * signs
    return chinese and english


def _judged(task: Any, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
    """The part `judge` of each answer in a group: 1 if the judge accepts an answer that passes the format check but
    does not get full accuracy from the rule-based verifier. None if the judge failed; 0 for all other answers."""
    given = [glm_answer(answer.text) for answer in answers]
    unsolved = [i for i, answer in enumerate(answers) if given[i] and _safely(task, sample, answer) < 1]
    replies = services.judge([_question(sample, given[i] or "") for i in unsolved])
    verdicts = {i: None if reply is None else float(re.findall(r"[01]\.0", reply)[-1:] == ["1.0"])
                for i, reply in zip(unsolved, replies, strict=True)}
    return [{"judge": verdicts.get(i, 0.0)} for i in range(len(answers))]


def _question(sample: Sample, given: str) -> str:
    right = " or ".join(kinds.right_answers(sample.row))
    return (f"Question: {sample['question'][:4000]}\nReference answer: {right[:1000]}\nGiven answer: {given[:1000]}\n"
            "Does the given answer mean the same as the reference answer? Reply with 1.0 for yes or 0.0 for no.")


def _safely(task: Any, sample: Sample, answer: Answer) -> float:
    """The accuracy of an answer; 0 if the verifier fails, so that the other answers of the group keep their scores."""
    try:
        return _score(task, sample, answer)["accuracy"] or 0.0
    except VerifierError:
        return 0.0


GLM_V = _recipe(
    "{asked}\nThink in <think> </think> first, then write the final answer ({kind}) in <answer> </answer>, itself "
    f"between {_BOX[0]} and {_BOX[1]}.", {"accuracy": 1.0, "judge": 0.0, "format": 0.0},
    form=lambda text: float(glm_answer(text) is not None), find=lambda answer: glm_answer(answer.text) or "",
    say=lambda text: think_answer(f"{_BOX[0]}{text}{_BOX[1]}"),
    group=_judged, needs=frozenset({"judge"}), combine="max:accuracy,judge")


# --- Kimi k1.5: shorter is better -------------------------------------------------------------------------------------


def length_rewards(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward (2501.12599, section 2.3.3) of each answer in a group, in [-0.5, 0.5]. The value is .5
    - (length - min) / (max - min), where min and max are the shortest and the longest length in the group. For a
    wrong answer, positive values become 0. All values are 0 if all lengths are equal."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    shorter = [0.5 - (length - low) / (high - low) for length in lengths]
    return [v if ok else min(0.0, v) for v, ok in zip(shorter, right, strict=True)]


KIMI_K1_5 = _recipe("{asked}\n" + _TAGS, {"accuracy": 1.0, "format": 0.0, "length": [[99, 0.0], [100, 1.0]]},
                    group=lambda task, sample, answers, _services: [
        {"length": value} for value in length_rewards([answer.n_tokens for answer in answers], [
            _safely(task, sample, answer) >= 0.5 for answer in answers])])


# --- NoisyRollout: half of a group sees a noisy picture ---------------------------------------------------------------


def noise_step(step: int, first: float, over: int) -> int:
    """The number of diffusion steps of noise at a training step, as in NoisyRollout (2504.13055): `first` * (1 -
    sigmoid(30 (step - 40) / over)). The number is nearly `first` at the start and half of `first` at step 40. `over`
    is the number of training steps over which the noise decreases."""
    return round(first / (1 + floats.exp(min(30 * (step - 40) / over, 700))))


def _noisy(task: Any, sample: Sample, n: int, step: int) -> Sequence[Variant]:
    """Returns one prompt variant, for half of the `n` completions of the group. These completions are sampled with
    noise on every image, but trained with the clean images. Returns () if there is no noise at this step or no
    image."""
    amount = noise_step(step, task.noise, task.noise_steps)
    if not amount or n < 2 or not any(m.kind == "image" for m in sample.media):
        return ()
    seed = zlib.crc32(f"{task.seed}/{sample.id}/{step}".encode("utf-8", "backslashreplace"))
    media = tuple(replace(m, edits=(*m.edits, ("noise", amount, seed + i))) if m.kind == "image" else m
                  for i, m in enumerate(sample.media))
    return (Variant(name="noisy", media=media, n=n // 2, trained=True),)


NOISY_ROLLOUT = _recipe("{asked}\n" + _TAGS, {"accuracy": 0.5, "format": 0.5}, variants=_noisy)


# --- SARI: structured thinking ----------------------------------------------------------------------------------------


def structured_format(text: str) -> float:
    """Returns 1 for thinking in the stages planning, caption, reasoning and summary, each once and in this order,
    followed by the answer; else 0."""
    if not think_answer_format(text):
        return 0.0
    thinking, at = (between(text, "<think>", "</think>") or "").strip(), 0
    for stage in _STAGES:
        opening, closing = f"<{stage}>", f"</{stage}>"
        end = thinking.find(closing, at)
        if not thinking.startswith(opening, at) or end < 0 or text.count(opening) + text.count(closing) != 2 or (
                not thinking[at + len(opening):end].strip()):
            return 0.0
        at = end + len(closing)
        at += len(thinking[at:]) - len(thinking[at:].lstrip())
    return float(at == len(thinking))


SARI = _recipe(
    "{asked}\nThink in <think> </think>, in four parts: <planning> what to look for </planning> <caption> what there "
    "is to see </caption> <reasoning> step by step </reasoning> <summary> in short </summary>. Then give the final "
    "answer ({kind}) in <answer> </answer>.", {"accuracy": 1.0, "format": 1.0}, form=structured_format,
    say=lambda text: think_answer(text, _STRUCTURE))

RECIPES: dict[str, Recipe] = {
    "direct": DIRECT, "thinking": THINKING, "easy_r1": EASY_R1, "vision_r1_ptst": VISION_R1, "apo_view_r1": MM_EUREKA,
    "mm_eureka": MM_EUREKA, "glm_v_rlcs": GLM_V, "kimi_k1_5": KIMI_K1_5, "noisy_rollout": NOISY_ROLLOUT,
    "sari_structured": SARI}
