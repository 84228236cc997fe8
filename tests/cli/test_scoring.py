"""`vlrl score` and `vlrl play`: rows through a pipe, saved rollouts again, and a person's answers."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.stats import kendalltau

from tests.e2e.runs import ENV, ROOT
from vlrl import config as configs
from vlrl.cli.main import main
from vlrl.data.sources.dataset import sample_from
from vlrl.rollout.generate import make_group
from vlrl.store import RunFolder
from vlrl.tools.tasks import rescore
from vlrl.tools.tasks.score_rows import score_lines
from vlrl.training import build_task
from vlrl.types import Completion, Prompt

QUICKSTART = "configs/quickstart.yaml"
MUG = {"id": "7", "image": "gone/7.jpg", "width": 640, "height": 480, "expression": "mug",
       "boxes": [{"box": [64, 48, 320, 240], "label": "mug"}]}
PARTS = '''
from vlrl.task import Task

class Echo(Task):
    """Parts that show what an answer carries."""
    prompt = "{id}"
    rewards = {"tokens": 1.0, "cut": [[0, 0.0], [10, 1.0]], "rank": 0.5}

    def score(self, sample, answer):
        return {"tokens": answer.n_tokens, "cut": float(answer.truncated)}

    def score_group(self, sample, answers, services):
        return [{"rank": sum(len(b.text) < len(a.text) for b in answers)} for a in answers]

    def parse(self, sample, answer):
        return {3: (float("nan"), float("inf")), "set": {answer.final}}
'''
JUDGED = '''
from vlrl.task import Task

class Judged(Task):
    """One part by rule, one by a judge."""
    prompt = "{id}"
    rewards = {"length": 1.0, "consistency": 0.5}
    needs = frozenset({"judge"})

    def score(self, sample, answer):
        return {"length": len(answer.text) / 10}

    def score_group(self, sample, answers, services):
        return [{"consistency": services.judge(a.text)} for a in answers]
'''


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


def task_words(folder: Path, body: str) -> list[str]:
    file = folder / f"{re.search(r'class (.+)[(]', body)[1].lower()}.py"
    file.write_text(body)
    return ["configs/tiny.yaml", f"task={file}", "model.name=no/such-model"]


def call(capsys, monkeypatch, words, data: bytes | str = b"") -> tuple[int, str, str]:
    data = data.encode() if isinstance(data, str) else data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    capsys.readouterr()
    code = main([str(w) for w in words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def scored(capsys, monkeypatch, words, *rows: dict) -> list[dict]:
    code, out, err = call(capsys, monkeypatch, ["score", *words], "\n".join(json.dumps(r) for r in rows))
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_a_row_gives_the_documented_line_and_its_media_need_not_exist(capsys, monkeypatch):
    row = {"sample": MUG, "completions": ["[100, 100, 500, 500]", "Here: [0, 0, 1, 1]"], "variants": {"v": ["none"]}}
    (line,) = scored(capsys, monkeypatch, [QUICKSTART, "task.rewards.format=0.5"], row)
    assert line["rewards"] == [
        {"parts": {"iou": 1.0, "format": 1.0}, "reward": 1.5, "parsed": [64.0, 48.0, 320.0, 240.0], "error": None},
        {"parts": {"iou": 0.0, "format": 0.0}, "reward": 0.0, "parsed": [0.0, 0.0, 0.64, 0.48], "error": None}]
    assert line["weights"] == {"iou": 1.0, "format": 0.5} and line["skipped"] == []
    assert line["variants"] == {"v": [{"parts": {"iou": 0.0, "format": 0.0}, "reward": 0.0, "parsed": None,
                                       "error": None}]}
    for image in ("gone.png", "/gone/7.png", "../gone.png"):
        (line,) = scored(capsys, monkeypatch, [QUICKSTART], {"sample": {**MUG, "image": image}, "completions": ["x"]})
        assert line["rewards"][0]["error"] is None
    assert sample_from(build_task.make_task(configs.load(QUICKSTART)), {**MUG, "image": "/etc/passwd"},
                               ROOT).media == ()


def test_completions_are_one_group_and_parts_that_need_a_service_are_left_out(capsys, monkeypatch, tmp_path):
    row = {"sample": {"id": 1}, "step": 5, "completions": ["a", {"text": "bbb", "n_tokens": 3, "truncated": True}],
           "variants": {"other": ["cc", "d"]}}
    (line,) = scored(capsys, monkeypatch, task_words(tmp_path, PARTS), row)
    assert line["weights"] == {"tokens": 1.0, "cut": 0.5, "rank": 0.5}
    assert [r["parts"] for r in line["rewards"]] == [{"tokens": 0.0, "cut": 0.0, "rank": 0.0},
                                                     {"tokens": 3.0, "cut": 1.0, "rank": 1.0}]
    assert [r["reward"] for r in line["rewards"]] == [0.0, 4.0]
    assert line["rewards"][0]["parsed"] == {"3": [None, None], "set": "{'a'}"}
    assert [r["parts"] for r in line["variants"]["other"]] == [{"tokens": 0.0, "cut": 0.0}] * 2
    row = {"sample": {"id": 1}, "completions": ["12345", "1234567890"]}
    (line,) = scored(capsys, monkeypatch, task_words(tmp_path, JUDGED), row)
    assert line["skipped"] == ["consistency"] and line["weights"] == {"length": 1.0}
    assert [(r["parts"], r["reward"], r["error"]) for r in line["rewards"]] == [
        ({"length": 0.5}, 0.5, None), ({"length": 1.0}, 1.0, None)]


def test_coordinates_of_the_row_the_setting_and_the_models_family(capsys, monkeypatch, tmp_path):
    def parsed(row, *words):
        given = {"sample": row, "completions": ["[0, 0, 500, 500]"]}
        (line,) = scored(capsys, monkeypatch, [QUICKSTART, *words], given)
        return line["rewards"][0]["parsed"]

    unknown = "model.name=no/such-model"
    assert parsed({**MUG, "coordinates": "original"}, unknown) == [0, 0, 500, 500]
    assert parsed(MUG, unknown, "task.coordinates=norm1") == [0, 0, 320_000, 240_000]
    processed = {**MUG, "processed_size": [1000, 1000]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    assert parsed(processed, f"model.name={tmp_path}") == [0, 0, 320, 240]
    tmp_path = tmp_path / "adapter"
    tmp_path.mkdir()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "embedded/tiny-qwen3-vl"}))
    assert parsed(MUG, f"model.name={tmp_path}") == [0, 0, 320, 240]
    row = json.dumps({"sample": MUG, "completions": ["[0, 0, 500, 500]"]})
    code, out, err = call(capsys, monkeypatch, ["score", QUICKSTART, unknown], row)
    assert code == 1 and out == "" and "line 1: task.coordinates=auto: model.name='no/such-model'" in err
    code, out, _ = call(capsys, monkeypatch, ["score", QUICKSTART, unknown], row.replace("[0, 0, 500, 500]", "nothing"))
    assert code == 0 and json.loads(out)["rewards"][0]["reward"] == 0


def test_a_row_without_processed_size_is_named(capsys, monkeypatch):
    for recipe in ("gui/gui_g1", "gui/gui_rcpo", "gui/ui_r1", "grounding/vlm_r1_rec"):
        row = {"id": "r7", "image": "x.png", "width": 640, "height": 480, "instruction": "open", "expression": "mug"}
        row |= {"box": [1, 2, 30, 40]} if recipe.startswith("gui") else {"boxes": [{"box": [1, 2, 30, 40]}]}
        for text in ("[1, 2, 3, 4]", "nothing"):
            given = {"sample": row, "completions": [text]}
            code, out, err = call(capsys, monkeypatch, ["score", f"configs/{recipe}.yaml"], json.dumps(given))
            assert code == 1 and out == "" and "line 1: row 'r7': processed_size=None" in err
            words = [f"configs/{recipe}.yaml", "task.coordinates=original"]
            assert scored(capsys, monkeypatch, words, given)[0]["rewards"][0]["error"] is None
    row = {"id": 1, "image": "x.png", "width": 640, "height": 480, "question": "A mug?", "answer": "yes"}
    (line,) = scored(capsys, monkeypatch, ["configs/grounding/curr_reft_binary.yaml"],
                     {"sample": row, "completions": ["<think>a</think><answer>yes</answer>"]})
    assert line["rewards"][0]["parts"] == {"accuracy": 1.0, "format": 1.0}


def test_a_bad_line_is_named(capsys, monkeypatch):
    good, sample = json.dumps({"sample": MUG, "completions": ["x"]}).encode(), '{"sample": {"id": 1}, '
    for bad, says in (
            ("{", "not JSON"), ("[1]", "must be a JSON object, not a list"), ('{"sample": {}}', "no 'completions'"),
            (sample + '"completions": "x"}', "completions='x' must be a list"),
            ('{"sample": [], "completions": []}', r"sample=\[\] must be a JSON object"),
            (sample + '"completions": []}', "row '1': width=None"),
            (sample + '"completion": []}', "Did you mean 'completions'"),
            (sample + '"completions": [3]}', r"completions\[0\]=3 must be a string"),
            (sample + '"completions": [{"text": "", "n_tokens": -1}]}', r"completions\[0\]: n_tokens=-1"),
            (sample + '"completions": [{"text": "", "truncated": 1}]}', r"completions\[0\]: truncated=1"),
            (sample + '"completions": [], "step": 1e999}', "step=inf"),
            (sample + '"completions": [], "variants": [1]}', r"variants=\[1\] must be an object"),
            (sample + '"completions": [], "variants": {"a": 1}}', r"variants\['a'\]=1 must be a list"),
            ('{"sample": {"id": 1, "width": -1}, "completions": []}', "row '1': width=-1"),
            ("[" * 100_000, "not JSON|nested"), (b"\xff\xfe", "not JSON: 'utf-8'")):
        data = b"\n".join([good, b"  ", bad if isinstance(bad, bytes) else bad.encode(), good])
        code, out, err = call(capsys, monkeypatch, ["score", QUICKSTART], data)
        assert code == 1 and len(out.splitlines()) == 1 and err.startswith("error: line 3: ")
        assert re.search(says, err), err
        code, kept, err = call(capsys, monkeypatch, ["score", QUICKSTART, "--keep-going"], data)
        lines = [json.loads(line) for line in kept.splitlines()]
        assert code == 1 and len(lines) == 3 and lines[0] == lines[2] and list(lines[1]) == ["error"]
        assert lines[1]["error"].startswith("line 3: ") and "1 of 3 rows" in err


_CONFIG = configs.load(ROOT / QUICKSTART)
_leaves = st.none() | st.booleans() | st.integers(-10**30, 10**30) | st.floats() | st.text(max_size=8)
_json_values = st.recursive(_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=6), inner, max_size=3), max_leaves=6)
_texts = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["", "[" * 50_000, "[1e999, 0, 1, 1]", "<think>", "\ud800", "\0\x1b[31m", "[9, 9, 1, 1]",
     "<answer>[1,2,3,4]</answer>"])


@pytest.mark.slow
@examples(max_examples=50)
@given(_texts, st.sampled_from([*MUG, "coordinates", "processed_size", "meta", "weight"]), _json_values)
def test_hostile_rows_and_texts_give_valid_json(text, field, value):
    rows = [{"sample": MUG, "completions": [text, {"text": text}]},
            {"sample": {**MUG, field: value}, "completions": [text], "variants": {str(value): [text]}},
            {"sample": MUG, "completions": [value]}, {"sample": value, "completions": []}]
    lines, task = [json.dumps(row).encode() for row in rows], build_task.make_task(_CONFIG)
    out = [line for line, _ in score_lines(task, lines, ROOT)]

    def refuse(constant):
        raise AssertionError(constant)
    found = [json.loads(line, parse_constant=refuse) for line in out]
    assert len(found) == 4 and found[0]["rewards"][0] == found[0]["rewards"][1]
    assert out == [line for line, _ in score_lines(task, lines, ROOT)] and "\n" not in "".join(out)


def test_files_in_and_out(capsys, monkeypatch, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_bytes(b"\xef\xbb\xbf" + json.dumps({"sample": MUG, "completions": ["x"]}).encode() + b"\r\n\r\n")
    for words, says in (([rows, "-o", out], ""), ([rows, "-o", out], "out.jsonl: this file exists"),
                        ([tmp_path / "none.jsonl"], "none.jsonl' cannot be read"), ([tmp_path], "Is a directory"),
                        ([rows, "-o", tmp_path], "cannot be written"), ([rows, "-o", tmp_path / "no" / "x"], "No such"),
                        ([rows, "steps=x"], "steps='x'")):
        code, _, err = call(capsys, monkeypatch, ["score", QUICKSTART, *words])
        assert code == (1 if says else 0) and says in err, err
    assert len(json.loads(out.read_text())["rewards"]) == 1
    rows.write_text("{")
    assert "rows.jsonl: line 1: not JSON" in call(capsys, monkeypatch, ["score", QUICKSTART, rows])[2]
    for words in ([rows, "-"], [rows, "--run", tmp_path], ["--steps", "1:2"], ["--run", tmp_path, "--steps", "1-2"],
                  ["--run", tmp_path, "--step", "1", "--steps", "1:2"]):
        assert call(capsys, monkeypatch, ["score", QUICKSTART, *words])[0] == 2


def test_each_line_is_answered_at_once_without_torch():
    code = ("import sys; from vlrl.cli.main import main; code = main(sys.argv[1:]); "
            "print('torch' in sys.modules or 'transformers' in sys.modules, file=sys.stderr); sys.exit(code)")
    process = subprocess.Popen([sys.executable, "-c", code, "score", QUICKSTART], stdin=subprocess.PIPE,
                               env={**ENV, "PYTHONUNBUFFERED": ""},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdin and process.stdout
    for text in ("[100, 100, 500, 500]", "none"):
        process.stdin.write(json.dumps({"sample": MUG, "completions": [text]}).encode() + b"\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 60)[0], "the answer is held back"
        line = json.loads(process.stdout.readline())
        assert line["rewards"][0]["reward"] == float(text != "none")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err.split() == [b"False"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from vlrl.training.loop import train
    folder = tmp_path_factory.mktemp("run")
    words = ["steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=2", "log.samples_every=0",
             "task.rewards.format=0.1"]
    train(configs.load(ROOT / QUICKSTART, [f"run.dir={folder}", *words]))
    return folder


def test_the_comparison_says_what_an_edited_reward_changes(trained, capsys, monkeypatch):
    words = ["score", trained / "config.yaml", "--run", trained]
    code, out, _ = call(capsys, monkeypatch, [*words, "--json"])
    same = json.loads(out)
    assert code == 0 and same["rollouts"] == 32 and same["changed"] == same["groups"]["reordered"] == 0
    assert same["reward"]["old"] == same["reward"]["new"] and same["groups"]["total"] == 8
    assert all(part["old"] == part["new"] for part in same["parts"].values())
    assert same["groups"]["tau_mean"] == pytest.approx(1) and same["groups"]["most_changed"] == []
    code, out, _ = call(capsys, monkeypatch, [*words, "--json", "--show", "2", "task.rewards.iou=-1"])
    other = json.loads(out)
    assert other["changed"] > 16 and other["parts"] == same["parts"]
    iou, form = (other["parts"][p]["new"] for p in ("iou", "format"))
    assert other["reward"]["new"] == pytest.approx(-iou + 0.1 * form)
    first, second = other["groups"]["most_changed"]
    assert first["change"] >= second["change"] > 0 and first["tau"] < 1 and len(first["answers"]) == 4
    table = {(r["group_id"], r["completion"]): r for r in RunFolder(trained).rollouts().to_pylist()}
    for answer in first["answers"]:
        stored = table[first["group_id"], answer["text"]]
        assert stored["reward"] == answer["old"] and stored["sample_id"] == first["sample_id"]
    code, out, _ = call(capsys, monkeypatch, [*words, "--show", "1", "task.rewards.iou=-1"])
    assert code == 0 and f"sample {first['sample_id']}" in out and "order changed" in out and "tau-b" in out
    counts = [json.loads(call(capsys, monkeypatch, [*words, "--json", *more])[1])["rollouts"] for more in
              (["--step", "1"], ["--steps", "1:"], ["--steps", ":1"], ["--split", "heldout"], ["--split", "heldout",
                                                                                              "--step", "2"])]
    assert counts == [16, 16, 16, 4, 2]


def test_runs_that_cannot_be_scored_again(trained, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "bad" / "rollouts").mkdir(parents=True)
    (tmp_path / "bad" / "rollouts" / "step-000000-rank-00000.parquet").write_bytes(b"junk")
    for words, says in (([tmp_path / "none"], "does not exist"), ([tmp_path / "file"], "it is a file"),
                        ([tmp_path], "holds no rollouts"), ([tmp_path / "bad"], "skipped .*rank-00000.parquet"),
                        ([trained, "--step", "9"], "no rollouts of the chosen steps. It has steps 0 to 1"),
                        ([trained, "--split", "test"], "no evaluations of split 'test'"),
                        (["a\0b"], "not a run folder")):
        code, out, err = call(capsys, monkeypatch, ["score", QUICKSTART, "--run", *words])
        assert code == 1 and out == "" and re.search(says, err), err


def test_the_template_of_a_visit_is_read_off_the_stored_prompt(tmp_path):
    task = build_task.make_task(configs.load("configs/classification/digits.yaml"))
    run, samples = RunFolder(tmp_path, media="none"), task.samples("train")
    groups = []
    for i, template in enumerate([*task.templates, "Something else"]):
        sample = type(samples[i])(id=samples[i].id, row=samples[i].row, prompt=template)
        prompt = Prompt(sample_id=sample.id, text=f"<|im_start|>{template}<|im_end|>", ids=np.arange(2),
                        raw_ids=np.arange(2), positions=np.zeros((1, 2), int))
        texts = [sample["label"], f"<think>x</think><answer>{sample['label']}</answer>", "\x1b[2J"]
        done = [Completion(tokens=np.arange(3), logprobs=np.zeros(3, np.float32), loss_mask=np.ones(3, bool), text=text,
                           finish_reason="stop") for text in texts]
        groups.append(make_group(task, sample, prompt, done, group_id=str(i), split="train", step=0))
    run.write_rollouts(0, 0, groups)
    found = rescore.compare(task, run)
    assert found.changed == 0 and found.rollouts == 9 and found.unknown_templates == 1
    assert len({tuple(g.rewards) for g in groups}) > 1


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0, 1e308]), st.sampled_from([0.0, -1e308, 1.0, None])),
                min_size=2, max_size=7))
@examples(max_examples=60)
def test_rank_correlation_is_kendalls_tau_b(pairs):
    old, new = zip(*pairs, strict=True)
    group = rescore.RescoredGroup("g", "s", 0, [""] * len(pairs), list(old), list(new), [], [], [], [], True)
    change, tau = group.order
    both = [(a, b) for a, b in pairs if b is not None]
    if len({a for a, _ in both}) < 2 or len({b for _, b in both}) < 2:
        assert tau is None
        return
    assert tau == pytest.approx(kendalltau(*zip(*both, strict=True))[0])
    moved = [abs((a > b) - (a < b) - (x > y) + (x < y)) / 2 for i, (a, x) in enumerate(both) for b, y in both[i + 1:]]
    assert change == pytest.approx(np.mean(moved))


def test_the_groups_whose_order_changed_most_come_first():
    news = {"same": [0, 1, 2], "tie": [0, 1, 1], "swapped": [2, 1, 0], "some": [0, 2, 1], "last": [2, 1, 0]}
    found = rescore.RewardComparison()
    for name, new in news.items():
        found.add(rescore.RescoredGroup(name, name, 0, ["x"] * 3, [0.0, 1.0, 2.0], [float(v) for v in new],
                                   [{}] * 3, [{}] * 3, [None] * 3, [], True), keep=3)
    assert [g.group_id for g in found.top] == ["swapped", "last", "some"]
    assert found.reordered == 4 and found.groups == 5 and found.changed == 1 + 2 + 2 + 2


def test_an_answer_is_judged_beside_the_oracle_also_from_a_pipe(capsys, monkeypatch):
    words = ["play", QUICKSTART, "--index", "7", "--answer", "[100, 100, 500, 500]"]
    code, out, _ = call(capsys, monkeypatch, [*words, "--json"])
    found = json.loads(out)
    assert code == 0 and found["id"] == "train-000007" and found["index"] == 7 and "yellow circle" in found["prompt"]
    assert found["parsed"] == [12.8, 12.8, 64.0, 64.0] and found["target"] == [64.0, 52.0, 107.0, 95.0]
    assert found["parts"] == {"iou": 0.0, "format": 1.0} and found["weights"] == {"iou": 1.0, "format": 0.0}
    assert found["oracle"]["reward"] > 0.99 and found["complaints"] == []
    assert found["media"][0]["size"] == [128, 128] and Path(found["media"][0]["path"]).is_file()
    code, out, _ = call(capsys, monkeypatch, words)
    assert code == 0 and all(word in out for word in ("yellow circle", "iou", "target", "oracle", "0 to 1000"))
    words = ["play", "configs/classification/digits.yaml", "--id", "digit-0041"]
    code, out, _ = call(capsys, monkeypatch, [*words, "--json"], "4\n")
    found = json.loads(out)
    assert code == 0 and found["answer"] == "4" and found["reward"] == found["oracle"]["reward"] == 1.1
    _, out, _ = call(capsys, monkeypatch, [*words, "--json", "task.thinking=thinking"], "<think>\x1b[2J four\n")
    assert json.loads(out)["complaints"] == ["<think> occurs 1 times, </think> 0 times",
                                             "the prompt asks for <answer>, but the answer does not contain it"]
    _, out, _ = call(capsys, monkeypatch, words, "\x1b[2J\n")
    assert "\x1b" not in out and "format" in out


def typed(monkeypatch, capsys, words, text: str) -> tuple[int, str]:
    outer, inner = pty.openpty()
    try:
        os.write(outer, text.encode() + b"\x04\x04")  # ends, so that nothing can wait for ever
        with open(inner, encoding="utf-8", closefd=False) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            capsys.readouterr()
            return main(words), capsys.readouterr().out
    finally:
        os.close(outer)
        os.close(inner)


def test_a_session(monkeypatch, capsys, tmp_path):
    three = tmp_path / "rows.jsonl"
    rows = [{**MUG, "id": str(i), "image": "gone.png", "expression": f"mug {i}"} for i in range(2)]
    (tmp_path / "gone.png").write_bytes(b"no picture")
    three.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["play", QUICKSTART, "task.drawn=false", f"data.train={three}"]
    code, out = typed(monkeypatch, capsys, words, "\nI think\n[100, 100, 500, 500]\n\n:oracle\n:again\n\n:next\n")
    assert code == 0 and "no more samples" in out
    assert out.count("Locate the mug 0") == 2 and out.count("Locate the mug 1") == 1
    assert out.count("oracle   [100, 100, 500, 500]") == 2 and "1.000" in out and "not readable" in out
    for text in (":quit\n", "", "half an answer\n"):
        code, out = typed(monkeypatch, capsys, words, text)
        assert code == 0 and "mug 1" not in out and ("target" in out) == text.startswith("half")


def test_play_refuses_what_is_not_there(capsys, monkeypatch, tmp_path):
    for words, says in ((["--index", "99999"], "has the samples 0 to 59"), (["--id", "train-00007"], "Did you mean"),
                        (["--split", "test"], "split 'test'"), (["model.name=no/such"], "task.coordinates=auto"),
                        (["task.drawn=false"], "data.train is not set")):
        words = ["play", QUICKSTART, "task.count=60", *words, "--answer", "[1, 2, 3, 4]"]
        code, _, err = call(capsys, monkeypatch, words)
        assert code == 1 and says in err, err
    assert call(capsys, monkeypatch, ["play", QUICKSTART, "--index", "1", "--random"])[0] == 2
    words = ["play", QUICKSTART, "--random", "--answer", "x", "task.count=5", "--json"]
    code, out, _ = call(capsys, monkeypatch, words)
    assert code == 0 and json.loads(out)["index"] in range(5)
