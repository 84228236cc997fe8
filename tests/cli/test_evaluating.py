"""`vlrl eval` at length and `vlrl judge check` through the command line's own entry: a server, a tiny model, a kill."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cli.test_training import call
from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, write_config
from tests.evaluation.http_stand_in import served
from tests.services.stub import quotes, text_of
from vlrl.services.judge_prompts import _TASKS
from vlrl.tools.evaluation.rows import read_rows

TASK = '''
from vlrl.task import Task
from vlrl.types import Sample

class Sums(Task):
    """Text alone, so that a stand-in can answer."""
    prompt = "{question} Answer with a number."
    prompts = ("{question} Answer with a number.", "Work out: {question}")
    rewards = {"accuracy": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"question": f"{i}+1?", "answer": str(i + 1)}) for i in range(12)]

    def score(self, sample, answer):
        return {"accuracy": float(answer.final == sample["answer"])}
'''


@pytest.fixture
def sums(tmp_path):
    (tmp_path / "sums.py").write_text(TASK)
    config = tmp_path / "sums.yaml"
    config.write_text(json.dumps({"task": f"{tmp_path}/sums.py:Sums", "model": {"name": "x"}, "seed": 5,
                                  "run": {"dir": str(tmp_path / "run")}, "eval": {"samples": 12}}))
    return [str(config)]


def worked_out(body, number):
    """Right at temperature 0, else right for one seed in two."""
    content = body["messages"][-1]["content"]
    question = content if isinstance(content, str) else content[-1]["text"]
    n = int(re.search(r"(\d+)\+1", question)[1])
    return str(n + 1 if body["temperature"] == 0 or body["seed"] % 2 == 0 else n)


@pytest.mark.slow
def test_a_server_at_several_settings(sums, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "key-of-the-server")
    with served(worked_out) as server:
        words = ["eval", *sums, "--endpoint", server.url, "--key-env", "A_KEY", "--answers", 4, "--seeds", "2",
                 "--temperature", 0, "--temperature", 1, "-o", tmp_path / "out"]
        found = json.loads(call(capsys, *words, "--json")[0])
        count = len(server.asked)
        assert count == 12 * 4 * 2 * 2 and {h["Authorization"] for _, h, _ in server.asked} == {
            "Bearer key-of-the-server"}
        assert found["model"] == "only" and found["splits"]["heldout"]["metrics"]["accuracy"]["mean"] == 1.0
        warm = found["results"][1]
        assert (warm["setting"], warm["seeds"], warm["n"], warm["answers"]) == ("temperature 1", [5, 6], 12, 4)
        rows = [r for r in read_rows(tmp_path / "out" / "answers.jsonl") if r["setting"] == "temperature 1"]
        right = {(r["seed"], r["number"]): 0 for r in rows}
        for r in rows:
            right[r["seed"], r["number"]] += r["answer"] == r["target"]
        by_seed = [sum(c > 0 for (s, _), c in right.items() if s == seed) / 12 for seed in (5, 6)]
        assert warm["metrics"]["pass@4"]["by_seed"] == pytest.approx(by_seed)
        again, err = call(capsys, *words)
        assert len(server.asked) == count and "evaluation.png" in again and "key-of" not in again + err
    folder = tmp_path / "out"
    assert json.loads((folder / "evaluation.json").read_text())["results"] == found["results"]
    written = json.loads((folder / "evaluation.json").read_text())
    assert written["environment"]["packages"]["numpy"] and written["environment"]["seed"] == 5
    facts = json.loads((folder / "answers.jsonl").read_text().splitlines()[0])["facts"]
    assert written["facts"] == facts and facts["model"]["name"] == "only" and facts["model"]["endpoint"] == server.url
    assert {"prompt_tokens", "image_pixels", "video_pixels", "media_bytes"} == facts["limits"].keys()
    assert facts["environment"] == {"name": [], "options": {}}
    assert (folder / "evaluation.png").read_bytes()[:4] == b"\x89PNG" and "key-of" not in "".join(
        p.read_text() for p in folder.iterdir() if p.suffix != ".png")


@pytest.mark.slow
def test_each_wording_and_what_a_server_did_not_answer(sums, tmp_path, capsys):
    with served(lambda body, n: 400 if "9+1" in str(body["messages"]) else worked_out(body, n)) as server:
        words = ["eval", *sums, "--endpoint", server.url, "--each-wording", "-o", tmp_path / "out"]
        out, err = call(capsys, *words)
        assert "did not answer 2 requests" in err and "wording 1" in out and "wording 2" in out
        asked = {body["messages"][-1]["content"][-1]["text"] for *_, body in server.asked}
        assert {"0+1? Answer with a number.", "Work out: 0+1?"} <= asked and len(asked) == 24
        found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        for r in found["results"]:
            assert (r["n"], r["unanswered"], r["metrics"]["accuracy"]["mean"]) == (11, 1, 1)
        server.script, server.asked[:] = worked_out, []
        _, err = call(capsys, *words)
        assert len(server.asked) == 2 and "no answer" not in err


@pytest.mark.slow
def test_what_the_answers_depend_on_may_not_change(sums, tmp_path, capsys):
    """Another limit, another environment, another model of the server: refused by name, and nothing is asked."""
    with served(worked_out) as server:
        words = ["eval", *sums, "--endpoint", server.url, "-o", tmp_path / "out"]
        call(capsys, *words)
        server.asked.clear()
        server.models = ("another",)
        _, err = call(capsys, *words, code=1)
        assert 'model.name was "only", is "another"' in err
        server.models = ("only",)
        for setting, said in (("limits.image_pixels=777", "limits.image_pixels was"),
                              ('task.prompts=["{question}"]', "task.prompts was"),
                              ("environment.options={size: 3}", "environment.options")):
            _, err = call(capsys, *words, setting, code=1)
            assert said in err and not server.asked


def test_keys_with_spaces_and_line_ends(sums, tmp_path, capsys, monkeypatch):
    with served(worked_out) as server:
        words = ["eval", *sums, "--endpoint", server.url, "--key-env", "A_KEY", "-o", tmp_path / "out"]
        for key, sent in (("abc defgh", None), ("abc\ndefgh", None), ("abc\u00e9defgh", None), (" \n ", None),
                          ("  abcdefgh\n", "abcdefgh")):
            monkeypatch.setenv("A_KEY", key)
            out, err = call(capsys, *words, code=0 if sent else 1)
            assert {h["Authorization"] for _, h, _ in server.asked} == ({f"Bearer {sent}"} if sent else set())
            assert "efgh" not in out + err and (sent or "A_KEY" in err)


def test_a_key_that_the_server_repeats_is_neither_printed_nor_stored(sums, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-0123456789")
    words = ["eval", *sums, "--key-env", "A_KEY", "-o", tmp_path / "out"]

    def repeating(status):
        return lambda body, n: ((lambda h: h.send(status, h.headers["Authorization"].encode())) if n else "1")

    with served(repeating(400)) as server:
        out, err = call(capsys, *words, "--endpoint", server.url, "--concurrency", 1)
        assert "did not answer 11 requests" in err and "sk-01" not in out + err
        assert "Bearer ***" in (tmp_path / "out" / "answers.jsonl").read_text()
        server.script = repeating(401)
        out, err = call(capsys, *words, "--endpoint", server.url, code=1)
        assert "refuses the key" in err and "sk-01" not in out + err
    assert "sk-01" not in "".join(p.read_text() for p in (tmp_path / "out").iterdir() if p.suffix != ".png")


def test_what_does_not_go_together(sums, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("")
    url = ("--endpoint", "http://127.0.0.1:1/v1")
    for words, said, code in (
            (("--answers", 2, "--temperature", 0), "greedy answers would all be the same", 1),
            (("--seeds", "x"), "--seeds 'x'", 1), (("--top-p", 2), "at most 1", 2),
            (("--key-env", "X"), "--endpoint", 2), (("--concurrency", 8), "needs --endpoint", 2),
            (("--timeout", 300), "needs --endpoint", 2), (("--retries", 4), "needs --endpoint", 2),
            (("--answers", 2, "-o", tmp_path / "b.jsonl"), "one answer per sample", 1),
            (("--answers", 2, "--rollouts", tmp_path / "b"), "one answer per sample", 1),
            ((*url, "--checkpoint", tmp_path), "has its own weights", 2),
            ((*url, "--key-env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE: this environment variable", 1),
            (("--endpoint", "127.0.0.1"), "is not the address of a server", 1), ((*url, "--answers", 2), "--model", 1),
            ((*url, "--model", "m", "--each-wording", "task.prompts=[]"), "has only one prompt template", 1),
            (("--temperature", 1, "--temperature", 1), "is given twice", 1)):
        _, err = call(capsys, "eval", *sums, *words, code=code)
        assert said in err, err
    with served(worked_out) as server:
        words = ["eval", *sums, "--endpoint", server.url, "-o", tmp_path / "out"]
        call(capsys, *words)
        _, err = call(capsys, *words, "--samples", 3, code=1)
        assert "samples was 12, is 3" in err and "with --out" in err


@pytest.mark.slow
def test_a_model_at_length_is_the_model_of_a_plain_evaluation(tiny_models, tmp_path, capsys):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = ["eval", config, f"run.dir={tmp_path}/run", "--model", tiny_models["qwen3_vl"]]
    plain = json.loads(call(capsys, *words, "--json")[0])
    at_length = json.loads(call(capsys, *words, "--json", "-o", tmp_path / "out")[0])
    shown, own = (found["splits"]["heldout"] for found in (plain, at_length))
    assert shown["n"] == own["n"] == 8
    for name, metric in shown["metrics"].items():
        assert {k: own["metrics"][name][k] for k in ("mean", "low", "high")} == metric
    narrow = json.loads(call(capsys, *words, "--json", "--answers", 2, "--top-p", 1e-6, "--top-p", 1)[0])
    assert Path(narrow["folder"]).parent == tmp_path / "run-eval"
    rows = read_rows(Path(narrow["folder"]) / "answers.jsonl")
    greedy = {r["number"]: r["answer"] for r in read_rows(tmp_path / "out" / "answers.jsonl")}
    kept = [r for r in rows if r["setting"] == "temperature 1, top_p 1e-06"]
    assert len(kept) == 16 and all(r["answer"] == greedy[r["number"]] for r in kept)  # only the likeliest token is left
    free = [r for r in rows if r["setting"] == "temperature 1, top_p 1"]
    assert sum(r["answer"] != greedy[r["number"]] for r in free) > 8


@pytest.mark.slow
def test_killed_and_begun_again_it_asks_for_the_rest_alone(sums, tmp_path, capsys):
    with served(worked_out) as server:
        words = [*sums, "--endpoint", server.url, "--answers", "32", "--concurrency", "4"]
        server.script = held_after(server, 300)
        with Path(os.devnull).open("w") as nothing:
            process = forked.Process(["-m", "vlrl", "eval", *words, "-o", str(tmp_path / "out")], ENV, ROOT, nothing,
                                     nothing)
        path, end = tmp_path / "out" / "answers.jsonl", time.monotonic() + 300
        while not (path.exists() and len(path.read_bytes().splitlines()) > 200):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        kept = len(read_rows(path))
        assert 200 <= kept < 12 * 32
        server.script, server.asked[:] = worked_out, []
        killed = json.loads(call(capsys, "eval", *words, "-o", tmp_path / "out", "--json")[0])
        assert len(server.asked) == 12 * 32 - kept
        whole = json.loads(call(capsys, "eval", *words, "-o", tmp_path / "whole", "--json")[0])
    assert killed["results"] == whole["results"]
    assert path.read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()


def held_after(server, most):
    """A script that answers so many requests and then waits until it is replaced."""
    def script(body, number):
        while number >= most and server.script is script:
            time.sleep(0.05)
        return worked_out(body, number)

    return script


SAMPLE = {"id": "1", "question": "2 + 2?", "answer": "4", "answer_type": "text"}
ANSWERS = [("4", True), ("four", True), ("vier", True), ("5", False), ("6", False), ("seven", False), ("8", False)]
SAID = {"4": "yes", "four": "yes", "vier": "no", "5": "no", "6": "yes", "seven": "no", "8": None}
"""By the judge: one of three right ones is missed, one of four wrong ones accepted, one has no verdict."""


def script(body, n):
    said = quotes(body)
    if "first" in said:  # the larger number, and whatever is first where one is "x"
        first = said["second"] != "x" and (said["first"] == "x" or int(said["first"]) > int(said["second"]))
        return json.dumps({"better": "first" if first or "x" in said.values() else "second"})
    verdict = SAID[said["answer"].split("\n")[0]]
    if text_of(body).startswith(_TASKS[1]) and said["answer"] == "5":
        verdict = "yes"  # one wording of three changes one verdict
    return 400 if verdict is None else json.dumps({"verdict": verdict})


@pytest.fixture
def files(tmp_path):
    rows = [{"sample": SAMPLE, "answer": f"<answer>{text}</answer>", "correct": right} for text, right in ANSWERS]
    rows += [{"sample": SAMPLE, "responses": ["9", "1"], "better": 1},
             {"sample": SAMPLE, "responses": ["2", "3"], "better": 1},
             {"sample": SAMPLE, "responses": ["x", "3"], "better": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qa.yaml").write_text("task: {name: qa}\nmodel: {name: none}\n")
    return tmp_path


def test_a_judge_and_a_rule_against_labels(files, capsys):
    with served(script, models=("critic",)) as server:
        words = ["judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml",
                 f"services.judge.url={server.url}", "services.judge.model=critic",
                 "services.judge.retries=0", "services.judge.price_out=1e6"]
        found = json.loads(call(capsys, *words, "--json")[0])
        assert found["judge"] == {
            "answers": 7, "unanswered": 1, "agreement": pytest.approx(4 / 6), "false_positives": 1,
            "false_positive_rate": pytest.approx(1 / 3), "false_negatives": 1,
            "false_negative_rate": pytest.approx(1 / 3)}
        assert found["rule"]["false_negatives"] == 2 and found["rule"]["false_positives"] == 0  # "four" and "vier"
        assert found["reworded"] == pytest.approx(1 / 12)
        assert found["injected_accepted"] == pytest.approx(1 / 3)  # the one that it accepts anyway
        # orders: 9 > 1 right twice; 3 > 2 wrong twice; of "x" the first place decides: once right
        assert found["pairs"] == {"pairs": 3, "unanswered": 0, "agreement": pytest.approx(3 / 6),
                                  "order_decides": pytest.approx(1 / 3), "position_bias": pytest.approx(4 / 6 - 0.5)}
        assert found["cost"]["calls"] == len(server.asked) == 7 * 3 + 4 + 6
        assert found["cost"]["price"] == found["cost"]["tokens_out"] == 3 * (len(server.asked) - 4)
        text, _ = call(capsys, *words)
        assert "33.3%" in text and "the order decides 33.3%, first place +16.7%" in text
    text, _ = call(capsys, "judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml")
    assert "rule" in text and "2 (66.7%)" in text and "cost" not in text


def test_bad_rows_are_named(files, capsys):
    for row, said in (
            ({"sample": SAMPLE, "answer": "4"}, "row 1: correct=None must be true or false"),
            ({"sample": SAMPLE, "answer": 4, "correct": True}, "row 1: answer='4' must be a string"),
            ({"sample": SAMPLE, "responses": ["4"], "better": 1}, "responses must be two strings"),
            ({"sample": SAMPLE, "responses": ["4", "5"], "better": True}, "better=True must be 1 or 2"),
            ({"id": "none", "answer": "4", "correct": True}, "is not a sample of train or heldout")):
        (files / "rows.jsonl").write_text(json.dumps(row) + "\n")
        _, error = call(capsys, "judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml", code=1)
        assert said in error
