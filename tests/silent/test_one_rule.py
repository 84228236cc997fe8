"""One fault of rows has one message, whoever finds it: `data check`, `tasks check`, `data convert`, a start."""

import pytest

from tests.data.test_formats import make_video
from tests.silent.test_checks import box, picture, rows_file, started
from vlrl.cli.main import main
from vlrl.task import load
from vlrl.testing.findings import Findings
from vlrl.testing.samples import check_samples

SPAN = {"video": "a.mp4", "question": "When?", "answer_type": "span", "duration": 20}
FAULTS = {
    # task, rows, what is said with {folder}, whether rows can be converted all the same: their media come later
    "an id twice": ("grounding", [box("r", "a.png"), box("r", "a.png", expression="the cup")],
                    "id 'r' is already used in {folder}/train.jsonl:1: ids must be unique", False),
    "no such file": ("grounding", [box("r", "none.png")],
                     "media file {folder}/none.png does not exist; check the path and data.root", True),
    "a box outside": ("grounding", [box("r", "a.png", boxes=[{"box": [10, 10, 140, 30]}])],
                      "box [10, 10, 140, 30] extends beyond the image of 96x64 pixels", False),
    "another column": ("qa", [{"id": "r", "photo": "a.png", "question": "How many?", "answer": 2,
                               "answer_type": "count"}], "the column 'photo' names media ('a.png'): media are read",
                       False),
    "a label of none": ("classification", [{"id": "r", "image": "a.png", "label": "dgo", "labels": ["Cat", "dog"]}],
                        "label='dgo' is not among labels=['Cat', 'dog']. Did you mean 'dog'?", False),
    "the third response": ("preference", [{"id": "r", "image": "a.png", "question": "Best?", "answer": 3,
                                           "responses": ["a", "b"]}],
                           "answer=3 must say which response is better: 1 or 2", False),
    "a span that ends first": ("video", [{"id": "r", **SPAN, "spans": [[9, 4]]}],
                               "span [9, 4] must start at 0 or later and end after its start", False),
    "tracks of no box": ("video", [{"id": "r", **SPAN, "answer_type": "track", "width": 9, "height": 9,
                                    "tracks": [{"boxes": [None]}]}],
                         "a track of 1 frames needs a box in at least one of them", False),
}


def plain(text):
    return "".join(text.split())  # whatever the width of the terminal


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_rows_is_said_alike_by_every_command(tmp_path, capsys, name):
    task, rows, says, moves = FAULTS[name]
    picture(tmp_path, "a.png")
    make_video(tmp_path / "a.mp4", 20)
    file = str(rows_file(tmp_path, "train.jsonl", rows))
    words = [f"data.train={file}", f"run.dir={tmp_path}/run", "eval.samples=0", "model.name=/nowhere"]
    for command in (["data", "check", file], ["tasks", "check", task, *words, "--processes", "0", "--samples", "2"],
                    ["data", "convert", file, "-o", str(tmp_path / "new.jsonl")],
                    ["train", "configs/tiny.yaml", f"task.name={task}", *words, "--dry-run"]):
        if command[1] == "convert" and moves:
            continue
        assert main(command) != 0
        out, err = capsys.readouterr()
        assert plain(says.format(folder=tmp_path)) in plain(out + err), (command[:2], out, err)


def test_what_is_held_out_is_said_alike_and_a_label_in_other_capitals_is_among_its_labels(tmp_path, capsys):
    picture(tmp_path, "a.png")
    picture(tmp_path, "b.png", seed=1)
    files = [str(rows_file(tmp_path, f"{split}.jsonl", [box(f"{split}{i}", name) for i, name in enumerate(names)]))
             for split, names in (("train", ["a.png"]), ("heldout", ["b.png", "a.png"]))]
    words = [f"data.train={files[0]}", f"data.heldout={files[1]}", f"run.dir={tmp_path}/run"]
    says = plain(f"what it asks is in train too, in {files[0]}:1; held-out data must not be trained on")
    for command in (["data", "check", *files], ["train", "configs/tiny.yaml", "task.name=grounding", *words,
                                               "--dry-run"],
                    ["tasks", "check", "grounding", *words, "--processes", "0", "--samples", "1"]):
        main(command)
        out, err = capsys.readouterr()
        assert says in plain(out + err) and "heldout1" in out + err, (command[:2], out, err)
        assert len([line for line in (out + err).splitlines() if "what it asks" in line]) == 1
    file = rows_file(tmp_path, "rows.jsonl", [{"id": "r", "image": "a.png", "label": "cat", "labels": ["Cat", "dog"]}])
    assert main(["data", "check", str(file)]) == 0


def test_ids_leaks_and_prompts_of_samples_that_code_makes(tmp_path):
    for n, (prompt, id, rules) in enumerate((
            ("{split} {n}: how many?", "{split}-{i}", set()), ("{split} {n}: how many?", "{i}", {"id"}),
            ("{n}: how many?", "{split}-{i}", {"leak"}), ("How many?", "{split}-{i}", {"leak/prompt"}))):
        own = tmp_path / f"own{n}.py"
        shift = 0 if "leak" in rules else "50 * (split == 'train')"
        own.write_text(
            f"from vlrl import Sample, Task\nclass Own(Task):\n    prompt = {prompt!r}\n    rewards = {{'n': 1.0}}\n"
            f"    def samples(self, split):\n        return [Sample(id=f'{id}', row={{'n': i + {shift}, "
            "'split': split}) for i in range(8)]\n    def oracle(self, sample):\n        return str(sample['n'])\n"
            "    def score(self, sample, answer):\n        return {'n': float(answer.text == str(sample['n']))}\n")
        findings = Findings()
        check_samples(load(str(own)), findings, 4, 0)
        said = started(tmp_path, "data.train=", "data.heldout=", task=own)
        assert findings.by_rule.keys() == rules, (prompt, findings)
        for rule in rules - {"leak/prompt"}:  # all prompts are made in a check alone
            message = findings.by_rule[rule][0].message
            assert message in said and "in samples('train')[0]" in message, said
        assert bool(said) == bool(rules - {"leak/prompt"}), said
