"""`vlrl data difficulty`: pass rates per prompt as columns, going on after a kill, and prompts.parquet of a run."""

import json
import logging

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from tests.engine.scripted import ScriptedEngine
from tests.rollout.test_group_source import BAD, Number, encode
from vlrl import curriculum
from vlrl.cli.main import main
from vlrl.config import validate
from vlrl.curriculum import Draw, Outcome, Prompts
from vlrl.curriculum.history import History
from vlrl.curriculum.visited import write_visited
from vlrl.data import read_rows
from vlrl.errors import ConfigError, DataError, TrainingError, VlrlError
from vlrl.models.processing import PromptTooLong
from vlrl.rollout.prefetch import Prefetcher
from vlrl.tools.datasets import difficulty
from vlrl.tools.datasets.difficulty import MeasurementScope, measure
from vlrl.tools.datasets.prompt_table import MeasuredPrompt, MeasurementFiles, joined, summary
from vlrl.tools.evaluation.measure import EvalRuntime, ModelChoice
from vlrl.types import Sample

TELL = lambda *_: None  # noqa: E731
SCOPE = MeasurementScope(answers=4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(difficulty, "_TOGETHER", 8)
    BAD.clear()


def answer(prompt, i):
    """Prompt n is right in n of 4 answers, from 4 on always."""
    return prompt.text if i < int(prompt.text) else "wrong"


def ready(script=answer, **settings):
    config = validate({"task": "x", "model": {"name": "x"}, "rollout": {"group_size": 3}, **settings})
    task = Number()
    task.name = "number"
    return EvalRuntime(config=config, task=task, prefetch=Prefetcher(encode, task, 0), engine=ScriptedEngine(script))


def facts(r, asked=SCOPE):
    return difficulty.facts(r.config, ModelChoice(name="x", config=r.config), asked)


def test_golden_pass_rates_and_columns_beside_rows(tmp_path):
    r = ready()
    found = measure(r, SCOPE, tmp_path / "part", facts(r), TELL)
    assert [m.columns()["pass_at_k"] for m in found] == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    assert found[1].columns() == {"pass_at_k": 0.25, "difficulty": 0.75, "reward_mean": 0.25, "answers_scored": 4}
    numbers = summary(found, 4)
    assert numbers.histogram == {"0": 1, "0-25": 0, "25-50": 1, "50-75": 1, "75-100": 1, "100": 6}
    assert numbers.answers_drawn == 40 and numbers.measured == 10 and numbers.categories == {}
    # pass@2 of 1 of 4: 1 - 3/6, of 2 of 4: 1 - 1/6, of 3 of 4: 1
    assert numbers.pass_at == pytest.approx({"1": 0.75, "2": (0.5 + 5 / 6 + 7) / 10, "4": 0.9}, abs=1e-12)
    r.task.override_outcome(None, 2.0)
    assert all(m.columns()["pass_at_k"] == 0 for m in measure(r, SCOPE, tmp_path / "part2", facts(r), TELL))
    found = [MeasuredPrompt(number=0, id="a", passed=(True, False), rewards=(1.0, 0.0)),
             MeasuredPrompt(number=1, id="b", passed=(None, True), rewards=(None, 1.0)),
             MeasuredPrompt(number=2, id="c", passed=(None,), rewards=(None,))]
    rows = [{"id": "a", "difficulty": 0.9}, {"id": "b"}, {"id": "c", "difficulty": 0.2}, {"id": 4}]
    once, whole = joined(rows, found)
    assert whole and once == [
        {"id": "a", "pass_at_k": 0.5, "difficulty": 0.5, "reward_mean": 0.5, "answers_scored": 2,
         "difficulty_given": 0.9},
        {"id": "b", "pass_at_k": 1.0, "difficulty": 0.0, "reward_mean": 1.0, "answers_scored": 1}, *rows[2:]]
    assert joined(once, found) == (once, True)  # measured again: what was given stays what was given
    assert joined(once, found[1:])[0][0] == rows[0]  # not measured again: nothing of the first time is left
    lines, whole = joined(rows[1:], found)
    assert not whole and [line["id"] for line in lines] == ["a", "b"]  # rows of other prompts


def test_a_measurement_goes_on_after_a_kill_and_no_other_one_does(tmp_path):
    r = ready()
    whole = measure(r, SCOPE, tmp_path / "whole", facts(r), TELL)
    part, asked = tmp_path / "part", []

    def dying(prompt, i):
        asked.append(prompt.text)
        if prompt.text == "5":
            raise KeyboardInterrupt
        return answer(prompt, i)

    with pytest.raises(KeyboardInterrupt):
        measure(ready(dying), SCOPE, part, facts(r), TELL)
    with open(part, "a") as file:
        file.write('{"prompts": [{"number": 4, "id": "tr')  # half a line
    asked.clear()
    again = ready(lambda prompt, i: asked.append(prompt.text) or answer(prompt, i))
    assert measure(again, SCOPE, part, facts(r), TELL) == whole
    assert asked == [str(n) for n in range(4, 10) for _ in range(4)]
    asked.clear()
    assert measure(again, SCOPE, part, facts(r), TELL) == whole and asked == []
    part = tmp_path / "other"
    short = MeasurementScope(answers=4, limit=3)
    assert len(measure(r, short, part, facts(r, short), TELL)) == 3
    assert len(measure(r, SCOPE, part, facts(r), TELL)) == 10  # a limit may change
    for other in (ready(rollout={"temperature": 0.5}), ready(curriculum={"pass_at": 1}), ready(model={"name": "y"})):
        with pytest.raises(ConfigError, match=r"a measurement with other settings:\n  (rollout|curriculum|model)"):
            measure(other, SCOPE, part, facts(other), TELL)
    for text in ('{"id": 1}\n', '{"facts": ' + json.dumps(facts(r)) + '}\n{"prompts": [{"number": 1}]}\n'):
        part.write_text(text)
        with pytest.raises(ConfigError, match=r"is not a file of a measurement|cannot be read"):
            measure(r, SCOPE, part, facts(r), TELL)


def test_prompts_that_cannot_be_asked_are_listed(tmp_path):
    r = ready()
    BAD[3] = PromptTooLong("sample 'train-3' has 900 tokens")
    found = measure(r, SCOPE, tmp_path / "a", facts(r), TELL)
    numbers = summary(found, 4)
    assert numbers.left_out == [{"id": "train-3", "reason": "sample 'train-3' has 900 tokens"}]
    assert numbers.prompts == 10 and numbers.measured == 9 and sum(numbers.histogram.values()) == 9
    assert [row["id"] for row in joined([], found)[0]] == [f"train-{n}" for n in range(10) if n != 3]
    BAD[4] = DataError("broken")
    with pytest.raises(DataError, match="broken"):
        measure(r, SCOPE, tmp_path / "b", facts(r), TELL)
    patient = ready(data={"quarantine": True})
    assert len(summary(measure(patient, SCOPE, tmp_path / "c", facts(patient), TELL), 4).left_out) == 2
    with pytest.raises(TrainingError, match="8 of 8 rollouts failed to score"):
        measure(ready(lambda prompt, i: "-"), SCOPE, tmp_path / "d", facts(r), TELL)
    with pytest.raises(DataError, match=r"no prompt could be measured\. The reason for the first prompt, 'x': lost"):
        left_out = [MeasuredPrompt(number=0, id="x", left_out="lost")]
        difficulty.write(MeasurementFiles(out=tmp_path / "e.jsonl"), [], left_out, facts(r))


def test_a_sampler_reads_the_columns_by_id(tmp_path, caplog):
    r = ready()
    found = measure(r, SCOPE, tmp_path / "part", facts(r), TELL)
    places = MeasurementFiles(out=tmp_path / "x.difficulty.jsonl")
    numbers, whole = difficulty.write(places, [], found[::-1], facts(r))
    assert not whole and sorted(p.name for p in tmp_path.iterdir()) == [
        "part", "x.difficulty.about.json", "x.difficulty.jsonl", "x.difficulty.png"]
    about = json.loads(places.about.read_text())
    assert about["histogram"] == numbers.histogram and about["measured_with"]["answers"] == 4
    samples = [*r.task.samples("train"), Sample(id="more", row={"difficulty": 0.125, "pass_at_k": 1})]
    prompts = Prompts.of(samples, 0, str(places.out))
    with caplog.at_level(logging.WARNING):
        hard, rate = prompts.numbers("difficulty"), prompts.numbers("pass_at_k")
    assert hard.tolist() == [1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0, 0, 0.125] and rate[1] == 0.25
    assert [s for s in caplog.messages if "1 of 11 training samples have no line in this file, and 0 of its" in s] == \
        caplog.messages
    assert prompts.field("n") == [*range(10), None] and samples[1].row == {"n": 1, "answer": "1"}
    sampler = curriculum.make(validate({"task": "x", "model": {"name": "x"}, "curriculum": {"name": "easy_to_hard"}}
                                       ).curriculum, Prompts.of(samples[:4], 0, str(places.out)))
    assert [d.index for d in sampler.next(4, 0)] == [3, 2, 1, 0]
    for lines, says in (
            ('{"id": "other", "pass_at_k": 1}', "none of its 1 ids"), ('{"pass_at_k": 1}', "needs the 'id'"),
            ('{"id": 1}\n{"id": "1"}', "'1' occurs in an earlier line"), ("[", "not JSON"), ("", "none of its 0 ids")):
        (tmp_path / "x.jsonl").write_text(lines)
        with pytest.raises(VlrlError, match=says):
            Prompts.of(Number().samples("train"), 0, str(tmp_path / "x.jsonl")).field("pass_at_k")
        with pytest.raises(ConfigError, match="does not exist"):
            Prompts.of([], 0, str(tmp_path / "y.jsonl"))


@pytest.fixture
def words(tmp_path):
    rows = [{"id": str(i), "image": "a.png", "width": 64, "height": 64, "expression": "red", "boxes": [
        {"box": [1, 2, 60, 50]}], "category": "a名"[i % 2], "difficulty": 0.5} for i in range(4)]
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["configs/quickstart.yaml", "task.drawn=false", f"data.train={tmp_path}/rows.jsonl", "data.workers=0",
            "rollout.max_new_tokens=6", f"run.dir={tmp_path}/run"]


@pytest.mark.slow
def test_the_command_writes_rows_that_train(words, tmp_path, capsys):
    assert main(["data", "difficulty", *words, "--answers", "2"]) == 0
    said, out = capsys.readouterr().out, tmp_path / "rows.difficulty.jsonl"
    assert "8 answers drawn, 2 to a prompt: pass@1" in said and f"{out}: 4 prompts with columns" in said
    assert f"next: vlrl train configs/quickstart.yaml data.train={out} curriculum.name=rlcs " in said
    assert {*json.loads((tmp_path / "rows.difficulty.about.json").read_text())["categories"]} == {"a", "名"}
    rows, before = read_rows(out), read_rows(tmp_path / "rows.jsonl")
    Image.new("RGB", (9, 9)).save(tmp_path / "mine.png")
    assert [{k: v for k, v in row.items() if k in before[0]} | {"difficulty": 0.5} for row in rows] == before
    assert all(row["difficulty"] == 1 - row["pass_at_k"] and row["difficulty_given"] == 0.5 for row in rows)
    for more, says in (((), "exists already: replace"), (("--out", tmp_path / "rows.jsonl", "--force"), "is never"),
                       (("--out", tmp_path / "rows.csv"), "rows are written as"),
                       (("--out", tmp_path / "b.jsonl", "--temperature", "0"), "rollout.temperature"),
                       (("--out", tmp_path / "b.jsonl", "curriculum.part=iuo"), "is not a reward part of grounding"),
                       (("--out", tmp_path / "mine.jsonl"), "mine.png exists already"),
                       (("--out", tmp_path / "b.jsonl", "--checkpoint", tmp_path), "checkpoint")):
        assert main(["data", "difficulty", *map(str, (*words, *more))]) == 1
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_give_what_one_gives(words, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    command = ["data", "difficulty", *words, "--answers", "128", "--json", "--out"]  # two prompts at a time
    (tmp_path / "1.jsonl").touch()
    assert main([*command, str(tmp_path / "1.jsonl"), "--force"]) == 0
    one = json.loads(capsys.readouterr().out)
    done = forked.run(["-m", "vlrl", *command, tmp_path / "2.jsonl"], ENV, ROOT, 300, processes=2)
    assert done.returncode == 0, done.stderr
    (two,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert one["answers_drawn"] == two["answers_drawn"] == 512 and one["histogram"] == two["histogram"]
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "2.jsonl").read_text()


def outcome(index, *rewards):
    return Outcome(Draw(index, 0), rewards, tuple(r >= 0.5 for r in rewards))


def test_prompts_that_were_drawn(tmp_path):
    drawn = []

    class Samples(list):
        def __getitem__(self, i):
            drawn.append(i)
            return Sample(id=f"s{i}", row={"category": None if i % 2 else "even"}, task="t")

    history, file, samples = History(10), tmp_path / "prompts.parquet", Samples(range(10))
    write_visited(file, history, samples)
    assert pq.read_table(file).to_pylist() == []
    history.visit([4, 1, 4])
    history.note([outcome(4, 1.0, 0.0)], 7)
    write_visited(file, history, samples)
    expected = [
        {"index": 1, "sample_id": "s1", "category": None, "task": "t", "visits": 1, "last_step": None,
         "pass_rate": None, "reward": None},
        {"index": 4, "sample_id": "s4", "category": "even", "task": "t", "visits": 2, "last_step": 7, "pass_rate": 0.5,
         "reward": 0.5}]
    assert pq.read_table(file).to_pylist() == expected
    history.visit([0])
    drawn.clear()
    write_visited(file, history, samples)
    assert drawn == [0] and pq.read_table(file).to_pylist()[1:] == expected  # known names are not asked again
    again = History(10)
    again.load_state_dict(history.state_dict())
    before = pq.read_table(file)
    for spoil in (lambda: file.write_bytes(b"broken"), file.unlink):
        spoil()
        write_visited(file, again, samples)
        assert pq.read_table(file).equals(before)
    again.visits[4] = 0
    write_visited(file, again, samples)  # gone back to an earlier checkpoint
    assert pq.read_table(file)["index"].to_pylist() == [0, 1]
