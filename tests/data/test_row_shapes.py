"""Rows as other projects hand them over: the prompt has the tokens and pixels of one built by hand with the processor,
and copies with a fault end in an error that names the row."""

import copy
import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from tests.conftest import TWO, noise
from tests.tables import each
from vlrl.config import validate
from vlrl.config.schema import DataSettings
from vlrl.data import FIELDS
from vlrl.data.formats.known import FORMATS, PROJECTS, shape_of
from vlrl.data.sources.reading import recognised_format, rows_in
from vlrl.errors import DataError
from vlrl.models import policy as policies
from vlrl.models.processing import Encoder
from vlrl.task import load, task_samples

SIZES = {"a.png": (84, 112), "b.png": (112, 56), "c.png": (56, 56)}
A, B, C = (Path(name) for name in SIZES)
"""Where one of the images stands in a turn that is written by hand; texts stand for themselves."""


def said(*words: str, keys=("role", "content"), speakers=("user", "assistant")) -> list[dict]:
    return [{keys[0]: speakers[n % 2], keys[1]: text} for n, text in enumerate(words)]


def human(*words: str, speakers=("human", "gpt")) -> list[dict]:
    return said(*words, keys=("from", "value"), speakers=speakers)


def parts(*content, image="image", text="text") -> list[dict]:
    """Content parts; a path is an image that the part names."""
    return [{"type": text, "text": c} if isinstance(c, str) else
            {"type": image, image: {"url": str(c)} if image == "image_url" else str(c)} for c in content]


# project: (record, turns by hand, answer that is compared, path of an image, path of a text that asks, of the answer)
SHAPES: dict[str, tuple] = {
    "TRL: prompt as messages, images, solution": (
        {"prompt": said("Which colour?"), "images": ["a.png"], "solution": "red"},
        [("user", A, "Which colour?")], "red", ("images", 0), ("prompt", 0, "content"), ("solution",)),
    "TRL: prompt and completion as messages": (
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " like "}, {"type": "image"},
            {"type": "text", "text": "?"}]}], "completion": [{"role": "assistant", "content": "yes"}],
         "images": ["a.png", "b.png"]},
        [("system", "Be brief."), ("user", "Is ", A, " like ", B, "?")], "yes", ("images", 1),
        ("prompt", 1, "content", 0, "text"), ("completion", 0, "content")),
    "TRL: messages of several turns": (
        {"messages": said("Which colour?", "red", "And the shape?", "round"), "images": ["a.png"]},
        [("user", A, "Which colour?"), ("assistant", "red"), ("user", "And the shape?")], "round", ("images", 0),
        ("messages", 0, "content"), ("messages", 3, "content")),
    "EasyR1: problem, answer, images": (
        {"problem": "<image>In the figure, find x.", "answer": "48", "images": ["b.png"]},
        [("user", B, "In the figure, find x.")], "48", ("images", 0), ("problem",), ("answer",)),
    "verl: geo3k": (
        {"data_source": "hiyouga/geometry3k", "prompt": said("<image>Find x. Put it in \\boxed{}."),
         "images": ["a.png"], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "48"},
         "extra_info": {"split": "train", "index": 0, "answer": "48", "question": "<image>Find x."}},
        [("user", A, "Find x. Put it in \\boxed{}.")], "48", ("images", 0), ("prompt", 0, "content"),
        ("reward_model", "ground_truth")),
    "ms-swift: messages, images, solution": (
        {"messages": said("<image>Is it like <image>?"), "images": ["a.png", "c.png"], "solution": "yes",
         "system": "Look twice."},
        [("system", "Look twice."), ("user", A, "Is it like ", C, "?")], "yes", ("images", 1),
        ("messages", 0, "content"), ("solution",)),
    "ms-swift: query, response, history": (
        {"query": "<image>And this?", "response": "blue", "history": [["<image>Which colour?", "red"]],
         "images": ["a.png", "b.png"]},
        [("user", A, "Which colour?"), ("assistant", "red"), ("user", B, "And this?")], "blue", ("images", 0),
        ("query",), ("response",)),
    "LLaMA-Factory: sharegpt": (
        {"conversations": human("<image>Who are they?", "Two men.", "What do they do? <image>", "play"),
         "images": ["a.png", "b.png"], "system": "Be kind."},
        [("system", "Be kind."), ("user", A, "Who are they?"), ("assistant", "Two men."),
         ("user", "What do they do? ", B)], "play", ("images", 1), ("conversations", 2, "value"),
        ("conversations", 3, "value")),
    "LLaMA-Factory: alpaca": (
        {"instruction": "Name the colour.", "input": "In one word.", "output": "green", "images": ["c.png"],
         "history": [["Hello", "Hi"]], "system": "Be brief."},
        [("system", "Be brief."), ("user", C, "Hello"), ("assistant", "Hi"),
         ("user", "Name the colour.\nIn one word.")], "green", ("images", 0), ("instruction",), ("output",)),
    "LLaVA: conversations": (
        {"id": "000000033471", "image": "a.png", "conversations": human(
            "<image>\nWhat are the colours of the bus?", "white and red", "What is on its back?", "an advertisement")},
        [("user", A, "What are the colours of the bus?"), ("assistant", "white and red"),
         ("user", "What is on its back?")], "an advertisement", ("image",), ("conversations", 0, "value"),
        ("conversations", 3, "value")),
    "OpenAI: chat, image_url": (
        {"messages": [{"role": "developer", "content": "Be brief."},
                      {"role": "user", "content": parts("Is ", A, " old?", image="image_url")},
                      {"role": "assistant", "content": "no"}]},
        [("system", "Be brief."), ("user", "Is ", A, " old?")], "no",
        ("messages", 1, "content", 1, "image_url", "url"), ("messages", 1, "content", 0, "text"),
        ("messages", 2, "content")),
    "OpenAI: responses, input_text and input_image": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Which animal?"},
                                                {"type": "input_image", "image_url": "b.png"}]}],
         "output": [{"role": "assistant", "content": [{"type": "output_text", "text": "a cat"}]}]},
        [("user", "Which animal?", B)], "a cat", ("input", 0, "content", 1, "image_url"),
        ("input", 0, "content", 0, "text"), ("output", 0, "content", 0, "text")),
    "R1-V, Open-R1-Multimodal: image, problem, solution": (
        {"image": "a.png", "problem": "How many are there?", "solution": "<answer> 3 </answer>"},
        [("user", A, "How many are there?")], 3, ("image",), ("problem",), ("solution",)),
    "VLM-R1: jsonl": (
        {"id": 1, "image": "a.png", "conversations": human("<image>How many dogs?", "<answer> 2 </answer>"),
         "accu_reward_method": "numeric"},
        [("user", A, "How many dogs?")], "2", ("image",), ("conversations", 0, "value"),
        ("conversations", 1, "value")),
    "LMMs-Lab: multimodal-open-r1-8k-verified": (
        {"image": "c.png", "problem": "Find the angle.", "solution": "<think>x</think>\n\n<answer>B</answer>",
         "original_question": "Find the angle.", "original_answer": "It is B."},
        [("user", C, "Find the angle.")], "B", ("image",), ("problem",), ("solution",)),
    "MM-Eureka: conversations as JSON, image_urls": (
        {"id": "0", "conversations": json.dumps([{"role": "system", "content": "Think."}, *said("<image>\nFind y.")]),
         "answer": "2", "image_urls": ["file:///data/a.png"]},
        [("system", "Think."), ("user", A, "Find y.")], "2", ("image_urls", 0), ("conversations",), ("answer",)),
    "The Cauldron: images, texts": (
        {"images": ["a.png", "b.png"], "texts": [
            {"user": "Which has more?", "assistant": "The first.", "source": "x"},
            {"user": "How many more?", "assistant": "4", "source": "x"}]},
        [("user", A, B, "Which has more?"), ("assistant", "The first."), ("user", "How many more?")], "4",
        ("images", 1), ("texts", 0, "user"), ("texts", 1, "assistant")),
    "Qwen-VL: <img> in the text": (
        {"id": "identity_1", "conversations": human(
            "Picture 1: <img>a.png</img>\nWhich breed?", "a labrador", "Picture 2: <img>b.png</img>\nAnd this?",
            "a poodle", speakers=("user", "assistant"))},
        [("user", "Picture 1: ", A, "\nWhich breed?"), ("assistant", "a labrador"),
         ("user", "Picture 2: ", B, "\nAnd this?")], "a poodle", None, ("conversations", 0, "value"),
        ("conversations", 3, "value")),
    "M3IT: instruction, inputs, outputs": (
        {"instruction": "Answer the question.", "inputs": "Who is it?", "outputs": "a nurse", "image": "a.png"},
        [("user", A, "Answer the question.\nWho is it?")], "a nurse", ("image",), ("inputs",), ("outputs",))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    for n, (name, size) in enumerate(SIZES.items()):
        noise(n, *size).save(root / name)
    return root


@pytest.fixture(scope="module", params=TWO)
def encoder(request, tiny_models) -> Encoder:
    return encoder_of(str(tiny_models[request.param]))


@cache
def encoder_of(name: str) -> Encoder:
    config = validate({"task": "qa", "model": {"name": name}})
    policy = policies.load(config, Accelerator(cpu=True))
    return Encoder(policy.processor, policy.family, policy.positions, config)


def read(record: dict, root: Path, name: str = "qa", **settings):
    """The only sample of a file with this record, as training reads it; its error names the place or the row."""
    file = root / "rows.jsonl"
    file.write_text(json.dumps(record))
    task = load(name, {"prompt": "{question}", **settings})
    task.data = DataSettings(train=str(file))
    (sample,) = task_samples(task, "train")
    return task, sample


def by_hand(processor, turns: list[tuple], root: Path, **options):
    messages = [{"role": role, "content": [
        {"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": Image.open(root / c)}
        for c in content]} for role, *content in turns]
    return processor.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True,
                                         return_tensors="pt", **options)


@pytest.mark.parametrize("project", SHAPES)
def test_the_prompt_is_the_one_built_by_hand(project, folder, encoder):
    record, turns, answer, *_ = SHAPES[project]
    task, sample = read(record, folder)
    prompt, expected = encoder(task, sample), by_hand(encoder.processor, turns, folder)
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.mm["pixel_values"], expected["pixel_values"])
    names = [c for _, *content in turns for c in content if isinstance(c, Path)]
    assert [m.sha256 for m in prompt.media] == [hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names]
    assert sample["answer"] == answer


def at(record: dict, path: tuple, change):
    """A copy of the record in which the value at a path is another; JSON written as text is changed inside."""
    record = copy.deepcopy(record)
    *way, last = path
    inner = record
    for step in way:
        inner = inner[step]
    inner[last] = change(inner[last])
    return record


def _turns(record: dict) -> tuple | None:
    return next(((name, 0) for name in ("messages", "prompt", "input", "conversations")
                 if isinstance(record.get(name), list)), None)


@each("project", SHAPES)
def test_a_fault_is_an_error_that_names_the_row(project, folder):
    record, _, _, image, asks, answer = SHAPES[project]
    many = "<image>" * 3
    faults = {"no answer": at(record, answer, lambda text: " "), "too many marks": at(
        record, asks, lambda text: text.replace('"}]', f'{many}"}}]') if text[:1] == "[" else f"{text} {many}")}
    if image:
        faults["a missing image"] = at(record, image, lambda path: "gone.png")
    if image and "<image>" in json.dumps(record):  # without a mark it is a question about text
        faults["no image"] = at(record, image, lambda path: None)
    if place := _turns(record):
        role = "from" if "from" in record[place[0]][0] else "role"
        faults["a stranger"] = at(record, (*place, role), lambda who: "critic")
    for fault, broken in faults.items():
        with pytest.raises(DataError) as error:
            read(broken, folder)
            pytest.fail(f"{project}: {fault} passed")
        assert "rows.jsonl:1" in str(error.value), f"{fault}: {error.value}"


def test_a_row_of_every_shape_is_canonical(folder):
    for record, *_ in SHAPES.values():
        (folder / "rows.jsonl").write_text(json.dumps(record))
        ((_, row),) = rows_in(folder / "rows.jsonl")
        assert set(row) - {"data_source", "ability", "extra_info"} <= FIELDS  # verl's own stay as they are
    assert set(PROJECTS) == set(FORMATS)


@each("project", SHAPES)
def test_the_shape_is_named_with_its_project(project):
    record = SHAPES[project][0]
    assert project.partition(":")[0].split(",")[0] in shape_of(record, recognised_format(record) or "canonical")
