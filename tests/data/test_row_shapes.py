"""Rows as other projects hand them over: the prompt has the tokens and pixels of one built by hand with the processor,
and copies with a fault end in an error that names the row."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.conftest import noise
from tests.data.sets import save
from tests.models.test_packing import shared
from tests.tables import each
from vlrl.config.schema import DataSettings
from vlrl.data import FIELDS
from vlrl.data.formats.known import shape_of
from vlrl.data.sources.reading import recognised_format, rows_in
from vlrl.errors import DataError
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


# project: (record, turns by hand, answer that is compared)
SHAPES: dict[str, tuple] = {
    "TRL: prompt as messages, images, solution": (
        {"prompt": said("Which colour?"), "images": ["a.png"], "solution": "red"},
        [("user", A, "Which colour?")], "red"),
    "TRL: prompt and completion as messages": (
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " like "}, {"type": "image"},
            {"type": "text", "text": "?"}]}], "completion": [{"role": "assistant", "content": "yes"}],
         "images": ["a.png", "b.png"]},
        [("system", "Be brief."), ("user", "Is ", A, " like ", B, "?")], "yes"),
    "TRL: messages of several turns": (
        {"messages": said("Which colour?", "red", "And the shape?", "round"), "images": ["a.png"]},
        [("user", A, "Which colour?"), ("assistant", "red"), ("user", "And the shape?")], "round"),
    "EasyR1: problem, answer, images": (
        {"problem": "<image>In the figure, find x.", "answer": "48", "images": ["b.png"]},
        [("user", B, "In the figure, find x.")], "48"),
    "verl: geo3k": (
        {"data_source": "hiyouga/geometry3k", "prompt": said("<image>Find x. Put it in \\boxed{}."),
         "images": ["a.png"], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "48"},
         "extra_info": {"split": "train", "index": 0, "answer": "48", "question": "<image>Find x."}},
        [("user", A, "Find x. Put it in \\boxed{}.")], "48"),
    "ms-swift: messages, images, solution": (
        {"messages": said("<image>Is it like <image>?"), "images": ["a.png", "c.png"], "solution": "yes",
         "system": "Look twice."},
        [("system", "Look twice."), ("user", A, "Is it like ", C, "?")], "yes"),
    "ms-swift: query, response, history": (
        {"query": "<image>And this?", "response": "blue", "history": [["<image>Which colour?", "red"]],
         "images": ["a.png", "b.png"]},
        [("user", A, "Which colour?"), ("assistant", "red"), ("user", B, "And this?")], "blue"),
    "LLaMA-Factory: sharegpt": (
        {"conversations": human("<image>Who are they?", "Two men.", "What do they do? <image>", "play"),
         "images": ["a.png", "b.png"], "system": "Be kind."},
        [("system", "Be kind."), ("user", A, "Who are they?"), ("assistant", "Two men."),
         ("user", "What do they do? ", B)], "play"),
    "LLaMA-Factory: alpaca": (
        {"instruction": "Name the colour.", "input": "In one word.", "output": "green", "images": ["c.png"],
         "history": [["Hello", "Hi"]], "system": "Be brief."},
        [("system", "Be brief."), ("user", C, "Hello"), ("assistant", "Hi"),
         ("user", "Name the colour.\nIn one word.")], "green"),
    "LLaVA: conversations": (
        {"id": "000000033471", "image": "a.png", "conversations": human(
            "<image>\nWhat are the colours of the bus?", "white and red", "What is on its back?", "an advertisement")},
        [("user", A, "What are the colours of the bus?"), ("assistant", "white and red"),
         ("user", "What is on its back?")], "an advertisement"),
    "OpenAI: chat, image_url": (
        {"messages": [{"role": "developer", "content": "Be brief."},
                      {"role": "user", "content": parts("Is ", A, " old?", image="image_url")},
                      {"role": "assistant", "content": "no"}]},
        [("system", "Be brief."), ("user", "Is ", A, " old?")], "no"),
    "OpenAI: responses, input_text and input_image": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Which animal?"},
                                                {"type": "input_image", "image_url": "b.png"}]}],
         "output": [{"role": "assistant", "content": [{"type": "output_text", "text": "a cat"}]}]},
        [("user", "Which animal?", B)], "a cat"),
    "R1-V, Open-R1-Multimodal: image, problem, solution": (
        {"image": "a.png", "problem": "How many are there?", "solution": "<answer> 3 </answer>"},
        [("user", A, "How many are there?")], 3),
    "VLM-R1: jsonl": (
        {"id": 1, "image": "a.png", "conversations": human("<image>How many dogs?", "<answer> 2 </answer>"),
         "accu_reward_method": "numeric"},
        [("user", A, "How many dogs?")], "2"),
    "LMMs-Lab: multimodal-open-r1-8k-verified": (
        {"image": "c.png", "problem": "Find the angle.", "solution": "<think>x</think>\n\n<answer>B</answer>",
         "original_question": "Find the angle.", "original_answer": "It is B."},
        [("user", C, "Find the angle.")], "B"),
    "MM-Eureka: conversations as JSON, image_urls": (
        {"id": "0", "conversations": json.dumps([{"role": "system", "content": "Think."}, *said("<image>\nFind y.")]),
         "answer": "2", "image_urls": ["file:///data/a.png"]},
        [("system", "Think."), ("user", A, "Find y.")], "2"),
    "The Cauldron: images, texts": (
        {"images": ["a.png", "b.png"], "texts": [
            {"user": "Which has more?", "assistant": "The first.", "source": "x"},
            {"user": "How many more?", "assistant": "4", "source": "x"}]},
        [("user", A, B, "Which has more?"), ("assistant", "The first."), ("user", "How many more?")], "4"),
    "Qwen-VL: <img> in the text": (
        {"id": "identity_1", "conversations": human(
            "Picture 1: <img>a.png</img>\nWhich breed?", "a labrador", "Picture 2: <img>b.png</img>\nAnd this?",
            "a poodle", speakers=("user", "assistant"))},
        [("user", "Picture 1: ", A, "\nWhich breed?"), ("assistant", "a labrador"),
         ("user", "Picture 2: ", B, "\nAnd this?")], "a poodle"),
    "M3IT: instruction, inputs, outputs": (
        {"instruction": "Answer the question.", "inputs": "Who is it?", "outputs": "a nurse", "image": "a.png"},
        [("user", A, "Answer the question.\nWho is it?")], "a nurse")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    for n, (name, size) in enumerate(SIZES.items()):
        noise(n, *size).save(root / name)
    return root


def read(record: dict, root: Path):
    """The only sample of a file with this record, as training reads it; its error names the place or the row."""
    task = load("qa", {"prompt": "{question}"})
    task.data = DataSettings(train=str(save(root / "rows.jsonl", [record])))
    (sample,) = task_samples(task, "train")
    return task, sample


def by_hand(processor, turns: list[tuple], root: Path):
    messages = [{"role": role, "content": [
        {"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": Image.open(root / c)}
        for c in content]} for role, *content in turns]
    return processor.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True,
                                         return_tensors="pt")


@each("project", SHAPES)
def test_the_prompt_is_the_one_built_by_hand(project, folder, tiny_models):
    """And its row is canonical, and its shape is named with the project."""
    record, turns, answer = SHAPES[project]
    task, sample = read(record, folder)
    _, encoder = shared(tiny_models["qwen3_vl"])
    prompt, expected = encoder(task, sample), by_hand(encoder.processor, turns, folder)
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.mm["pixel_values"], expected["pixel_values"])
    names = [c for _, *content in turns for c in content if isinstance(c, Path)]
    assert [m.sha256 for m in prompt.media] == [hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names]
    assert sample["answer"] == answer
    ((_, row),) = rows_in(folder / "rows.jsonl")
    assert set(row) - {"data_source", "ability", "extra_info"} <= FIELDS  # verl's own stay as they are
    assert project.partition(":")[0].split(",")[0] in shape_of(record, recognised_format(record) or "canonical")


@each("project", SHAPES)
def test_a_fault_is_an_error_that_names_the_row(project, folder):
    record, turns, answer = SHAPES[project]
    text, asked = json.dumps(record), [c for c in turns[-1] if isinstance(c, str)][-1].split("\n")[-1]
    faults = {"no answer": re.sub(rf'"([^"]*<answer> ?)?{answer}( ?</answer>)?"', '" "', text),
              "too many marks": text.replace(json.dumps(asked)[1:-1], f"{'<image>' * 3} x"),
              "a missing image": re.sub(r'"([^"<]*/)?[abc]\.png"', '"gone.png"', text),
              "a stranger": re.sub(r'"(role|from)": "\w+"', r'"\1": "critic"', text, count=1)}
    if "<image>" in text:  # without a mark it is a question about text
        faults["no image"] = re.sub(r'"[^"]*[abc]\.png"', "null", text)
    assert faults["no answer"] != text != faults["too many marks"]
    for fault, broken in faults.items():
        if broken != text:  # some have no role, or name their images within the text
            with pytest.raises(DataError) as error:
                read(json.loads(broken), folder)
                pytest.fail(f"{project}: {fault} passed")
            assert "rows.jsonl:1" in str(error.value), f"{fault}: {error.value}"
