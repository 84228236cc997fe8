"""What the checks of the first samples say of broken tasks and rows, and that they are silent about sound ones."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.test_recipes_run import NAMES, ROOT, ROWS, TYPES
from vlrl import config as configs
from vlrl.checks import preflight
from vlrl.checks.answers import is_mentioned, without_tag
from vlrl.cli.main import main
from vlrl.config.schema import Config, DataSettings
from vlrl.data import read_samples
from vlrl.data.row_media import media_names, unshown_columns
from vlrl.errors import DataError, TaskError
from vlrl.task import Task, task_samples
from vlrl.training.build_task import make_task
from vlrl.types import Media, Sample

IMAGE = Image.new("RGB", (64, 48))


class Count(Task):
    """Sound: a number in a tag that the prompt names."""

    name = "count"
    prompt = "How many? Put the number in <answer></answer>."
    rewards = {"correct": 1.0, "format": 0.1}

    def score(self, sample, answer):
        tagged = "<answer>" in answer.text
        return {"correct": float(tagged and answer.final == str(sample["n"])), "format": float(tagged)}

    def oracle(self, sample):
        return f"<answer>{sample['n']}</answer>"


def fails_on_the_right(self, sample, answer):
    return {"correct": 1 / (answer.final != str(sample["n"])), "format": 1.0}


def never_right(self, sample, answer):
    return {"correct": float(answer.final == "many"), "format": 1.0}


def half(self, sample, answer):
    return {"correct": 0.5 * (answer.final == str(sample["n"])), "format": 1.0}


def short(self, sample, answer):
    return {"correct": float(answer.final == str(sample["n"])), "format": max(0.0, 1 - answer.n_tokens / 50)}


def penalty(self, sample, answer):
    return {"correct": float(answer.final == str(sample["n"])), "format": float("<answer>" in answer.text) - 1}


def of_the_group(self, sample, answers, services):
    return [{"format": 0.2} for _ in answers]


def made(**changes) -> Task:
    return type("Count", (Count,), changes)()


def samples(count: int = 4, **row) -> list[Sample]:
    return [Sample(id=f"s{i}", row={"n": i, **row}, media=(Media(source=IMAGE),)) for i in range(count)]


def config(**run) -> Config:
    return Config.model_validate({"task": {"name": "x"}, "model": {"name": "x"}, "run": run})


BROKEN = {
    "no score": ({"score": Task.score}, {}, "has no `score`"),
    "no weight": ({"rewards": {"correct": 0.0, "format": 0.0}}, {}, "every part has the weight 0"),
    "placeholder": ({"prompt": "Up to {maximum}. <answer>"}, {}, r"'s0': the prompt asks for \{maximum\}.*has n"),
    "format": ({"prompt": "How many? Answer with a number."}, {}, "'s0': .*without <answer>.*never mentions"),
    "boxed": ({"prompt": "How many?", "oracle": lambda self, sample: f"\\boxed{{{sample['n']}}}",
               "score": lambda self, s, a: {"correct": float(f"\\boxed{{{s['n']}}}" in a.text), "format": 1.0}}, {},
              r"without \\boxed\{\}"),
    "raises": ({"score": fails_on_the_right}, {}, "'s0': scoring the perfect answer .* fails: ZeroDivisionError"),
    "never right": ({"score": never_right}, {}, r"earns 0.1, but the maximum is 1.1 \(correct 0, format 1\)"),
    "half": ({"score": half}, {}, "earns 0.6, but the maximum is 1.1"),
    "oracle raises": ({"oracle": lambda self, sample: sample["absent"]}, {}, "oracle of sample 's0' failed.*absent"),
    "part left out": ({"score": lambda self, s, a: {"correct": 1.0}}, {}, "left out the part 'format'"),
    "no place": ({"messages": lambda self, s: [{"role": "user", "content": "<answer>"}]}, {}, r"show \[\], but"),
}
SOUND = {
    "plain": {},
    "no perfect answer": {"oracle": lambda self, sample: None, "score": never_right},
    "format in the system prompt": {"prompt": "How many?", "system": "Reply inside answer tags."},
    "literal braces": {"prompt": "Write { number } as \\boxed{number} in <answer>"},
    "a part by length": {"rewards": {"correct": 1.0, "format": 1.0}, "score": short},
    "a part below 0": {"rewards": {"correct": 1.0, "format": 1.0}, "score": penalty},
    "a part of the group": {"rewards": {"correct": 1.0, "format": 1.0}, "score_group": of_the_group},
    "a weight that rises": {"rewards": {"correct": 1.0, "format": [[0, 0], [10, 1]]}},
    "environment": {"score": Task.score, "environment": lambda self, sample: None},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tasks_stop(name):
    changes, row, says = BROKEN[name]
    with pytest.raises(TaskError, match=f"(?s)^task 'count': .*{says}.*run.checks=warn"):
        preflight.check(made(**changes), samples(**row), config())
    assert len(preflight.check(made(**changes), samples(**row), config(checks="warn"))) >= 1


def test_sound_tasks_pass():
    for name, changes in SOUND.items():
        assert preflight.check(made(**changes), samples(), config()) == [], name
    assert preflight.check(made(score=Task.score), samples(), config(), scored=False) == []  # of a supervised run


def test_a_mixed_row_is_a_warning_with_quarantine_and_a_missing_think_tag_warns():
    task = made(score=lambda self, s, a: {"correct": float(s["n"] != 2), "format": 1.0})
    kept = config().model_copy(update={"data": DataSettings(quarantine=True)})
    with pytest.raises(TaskError, match="'s2'"):
        preflight.check(task, samples(), config())
    (warning,) = preflight.check(task, samples(), kept)
    assert "sample 's2'" in warning
    def score(self, sample, answer):
        return {"correct": float(answer.final == str(sample["n"])), "format": float("<think>" in answer.text)}
    task = made(score=score, oracle=lambda self, s: f"<think>x</think><answer>{s['n']}</answer>")
    (warning,) = preflight.check(task, samples(), config())
    assert "without <think>" in warning


def test_a_task_that_pays_less_behind_what_the_template_begins_is_warned_of():
    exact = made(score=lambda self, sample, answer: {
        "correct": float(answer.text.strip() == self.oracle(sample)), "format": 1.0})
    bare = made(score=exact.score.__func__, oracle=lambda self, sample: str(sample["n"]))
    raises = made(score=lambda self, sample, answer: {"correct": 1 / ("<think>" not in answer.text), "format": 1.0})
    for opened, warned in (("", 0), ("<think>\n", 1), ("<think>\n\n</think>\n\n", 0)):
        warnings = preflight.check_opened(bare, samples(), config(), opened)
        assert len(warnings) == warned and all(repr(opened) in w and "chat_template_kwargs" in w for w in warnings)
        assert preflight.check_opened(made(), samples(), config(), opened) == []
    assert len(preflight.check_opened(exact, samples(), config(), "<think>\n\n</think>\n\n")) == 1
    assert len(preflight.check_opened(raises, samples(), config(), "<think>\n")) == 1


def test_ways_to_mention_a_tag():
    for words in ("<answer>", "end with </answer>", "in answer tags", "in `answer` XML tags", "the tag answer",
                  "the tags think and answer", "an ANSWER tag"):
        assert is_mentioned("answer", f"How many? Put it {words}."), words
    for words in ("Answer the question.", "Give your answer.", "<answers>", "a tag. The answer"):
        assert not is_mentioned("answer", words), words
    assert without_tag("<answer>3</answer>", "answer") == "3"


def test_columns_of_media_that_are_shown_or_not(tmp_path):
    for name in ("there", "a b.png"):
        (tmp_path / name).write_bytes(b"x")
    for column, value in (
            ("photo", "a.png"), ("src", "x/b.JPEG"), ("clip", "c.mp4"), ("pictures", ["a.webp"]),
            ("file", "http://h/a.jpg?x=1"), ("photo", {"bytes": b"\x89PNG\r\n", "path": None}),
            ("x", "data:image/png;base64,AA"), ("photo", "there"), ("caption", "a b.png")):
        assert unshown_columns(Sample(id="1", row={column: value}), (), (), tmp_path) == [column]
    for column, value in (("note", "See figure.png for more"), ("n", 3), ("photo", None), ("photo", "a cat"),
                          ("text", "x.y"), ("question", "What is in a.png?"), ("caption", "the sign says go.to")):
        assert not [*media_names(column, value, tmp_path)], value
    shown = Media(source=tmp_path / "x" / "a.png")
    row = {"image": "x/a.png", "image_path": "./x/a.png", "meta": {"photo": "b.png"}}
    assert unshown_columns(Sample(id="1", row=row, media=(shown,)), ("meta",), ("image",)) == []
    more = Sample(id="1", row={**row, "second": "b.png"}, media=(shown,))
    assert unshown_columns(more, ("meta",), ("image",)) == ["second"]
    assert unshown_columns(Sample(id="1", row=row, media=(Media(source=IMAGE),)), ("meta",), ("image",)) == []


def rows_file(folder: Path, rows: list[dict]) -> Path:
    for i in range(len(rows)):
        IMAGE.save(folder / f"{i}.png")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(rows)))
    return path


@pytest.mark.slow
def test_a_wrong_column_stops_training_dry_run_and_data_check(tmp_path, capsys):
    path = rows_file(tmp_path, [{"photo": f"{i}.png", "question": "How many?", "answer": i, "answer_type": "count"}
                                for i in range(3)])
    words = ["configs/tiny.yaml", "task.name=qa", f"data.train={path}", "eval.samples=0", f"run.dir={tmp_path / 'run'}"]
    for command in (["train", *words], ["train", *words, "--dry-run"], ["data", "check", str(path)]):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert "'photo'" in out + err and "image, images, video" in " ".join((out + err).split()), command


def test_a_second_picture_and_a_label_that_is_not_offered(tmp_path):
    path = rows_file(tmp_path, [{"image": "0.png", "image2": "1.png", "question": "Alike?", "answer": "yes",
                                 "answer_type": "yes_no"} for _ in range(2)])
    task = make_task(configs.load(ROOT / "configs/tiny.yaml", ["task.name=qa", f"data.train={path}"]))
    (warning,) = preflight.check(task, task_samples(task, "train"), config())
    assert "'image2'" in warning
    path = rows_file(tmp_path, [{"image": "0.png", "label": label, "labels": ["Cat", "dog"]}
                                for label in ("cat", "dgo")])
    task = make_task(configs.load(ROOT / "configs/tiny.yaml", ["task.name=classification", f"data.train={path}"]))
    with pytest.raises(DataError, match=r"rows.jsonl:2.*'dgo' is not among.*Did you mean 'dog'"):
        read_samples(task, "train")


@pytest.mark.slow
def test_every_recipe_passes(tmp_path):
    for name in NAMES:
        task, _, recipe = name.partition("/")
        folder = tmp_path / recipe
        folder.mkdir()
        kind = TYPES.get(recipe, "choice")
        rows = [{"id": str(i), **ROWS[task](folder, i)} for i in range(2)]
        rows = [{"answer_type": kind, **row} if "answer" in row else row for row in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = configs.load(ROOT / "configs" / f"{name}.yaml", [f"data.train={folder / 'rows.jsonl'}"])
        one = make_task(loaded)
        found = preflight.check(one, task_samples(one, "train"), loaded)
        assert not [warning for warning in found if ": unread: " not in warning], name  # rows serve several recipes


@pytest.mark.parametrize("name", ["quickstart", "classification/digits", "mixture", "grounding/tiny"])
def test_shipped_configs_pass(name):
    loaded = configs.load(ROOT / "configs" / f"{name}.yaml")
    task = make_task(loaded)
    assert preflight.check(task, task_samples(task, "train"), loaded) == []
