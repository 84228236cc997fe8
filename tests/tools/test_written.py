"""Prompts that a generator behind a real HTTP server writes: good, dead, slow and lying ones, and who says what is
right."""

import json
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from tests.evaluation.http_stand_in import reply, served
from vlrl import config as configs
from vlrl.cli.main import main
from vlrl.data import read_rows, write_rows
from vlrl.errors import ConfigError
from vlrl.store import SCHEMA
from vlrl.task import Task
from vlrl.task.interface import generated
from vlrl.tools.evaluation.grid import Server
from vlrl.tools.synthesis import synthesize
from vlrl.tools.synthesis.near_duplicates import HeldOutRows, SignatureReader, distinct
from vlrl.tools.synthesis.prompt_writer import PromptWriter, WriterSettings, check, read_reply, request_text
from vlrl.tools.synthesis.proposals import Candidate, Search, propose
from vlrl.tools.synthesis.row_export import MediaLocation
from vlrl.tools.synthesis.seed_rows import SeedSettings, search_of
from vlrl.training.build_task import make_task

TASK = '''
from vlrl.errors import DataError
from vlrl.task import Task


class Quiz(Task):
    """Rows of a question, which a teacher has to answer."""
    prompt = "{question}"
    rewards = outcome = {"right": 1.0}

    def score(self, sample, answer):
        return {"right": float(answer.final.strip() == str(sample["answer"]))}


class Sums(Quiz):
    """Rows that the task can work out: n + 1."""
    prompt = "What is {n} + 1?"
    written_fields = ("n", "answer")

    def solved(self, row):
        if row["n"] > 1000:
            raise DataError("too large")
        return {**row, "answer": str(row["n"] + 1)}
'''
TELL = lambda *_: None  # noqa: E731


@pytest.fixture
def quiz(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"id": f"t{i}", "question": f"How much is {i} and {i}?", "answer": str(2 * i), "category": "sums"}
            for i in range(4)]
    for i in (2, 3):
        Image.fromarray(rng.integers(0, 255, (5, 5, 3), np.uint8)).resize((80, 80)).save(tmp_path / f"{i}.png")
        rows[i]["image"] = f"{i}.png"
    write_rows(tmp_path / "rows.jsonl", rows)
    return make_config(tmp_path, "Quiz", f"data: {{train: {tmp_path}/rows.jsonl}}")


def make_config(tmp_path, name, more):
    (tmp_path / "quiz.py").write_text(TASK)
    file = tmp_path / "quiz.yaml"
    file.write_text(f"task: {tmp_path}/quiz.py:{name}\nmodel: {{name: embedded/tiny-qwen3-vl}}\n"
                    f"run: {{dir: {tmp_path}/r}}\n{more}\n")
    return configs.load(file)


def said(body):
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def asks_generator(body):
    return said(body).startswith("Problems for a model")


def paid(text, **more):
    return reply(text) | {"usage": {"prompt_tokens": 20, "completion_tokens": 3}} | more


def tagged(answer):
    return f"<think>hm</think><answer>{answer}</answer>"


def writing(config, tmp_path, url, count=4, new="new", **order):
    task, out = make_task(config), tmp_path / f"{new}.jsonl"
    where = MediaLocation.for_file(config, out)
    search = search_of(config, task, where, SeedSettings(candidates=count, written=True))
    known = {"retries": 0, "timeout_s": 20.0, "concurrency": order.pop("concurrency", 2),
             **({"timeout_s": order.pop("timeout_s")} if "timeout_s" in order else {})}
    return PromptWriter(config=config, task=task, search=search, location=where, progress=TELL,
                        settings=WriterSettings(generator=Server(url=url, **known), **order),
                        files=synthesize.SynthesisFiles(out=out).replies, known=synthesize.facts(config, search))


def all_of(work):
    rows, counts = distinct(work.candidates(), HeldOutRows.read(work.config, work.task), work.task,
                            SignatureReader(work.config, work.task, work.location.root), work.search.parents)
    done, refused = work.verified(rows)
    return done, dict(counts + refused)


def honest(body, number):
    text = said(body)
    if asks_generator(body):
        i = json.loads(text[text.index("A problem:\n") + 11:].split("\n")[0])["answer"]
        return paid(json.dumps({"question": f"What do {i} apples and {number} make?", "answer": "?"}))
    a, b = (int(word) for word in text.split() if word.isdigit())
    return paid(tagged(a + b))


def test_rows_say_how_they_were_made_and_who_verified_them(quiz, tmp_path):
    with served(honest) as server:
        work = writing(quiz, tmp_path, server.url, votes=3, concurrency=1, price_in=1.0)
        rows, counts = all_of(work)
    assert counts == {} and len(rows) == 4 and len(server.asked) == 16
    assert rows[1] == {"id": "t1~1", "question": "What do 2 apples and 1 make?", "answer": "3", "category": "sums",
                       "generator": "only: similar", "parent": "t1", "verifier": "3 of 3 answers of only"}
    assert rows[2]["image"] == "2.png" and rows[0]["answer"] == "0"
    shown = [p for _, _, body in server.asked if asks_generator(body) for p in body["messages"][-1]["content"]
             if p["type"] == "image_url"]
    assert len(shown) == 2
    assert work.costs["generator"]["tokens_in"] == 80 and work.costs["teacher"]["replies"] == 12
    assert work.costs["teacher"]["price"] == pytest.approx(12 * 20 / 1e6) and work.unanswered == 0


def test_more_than_half_of_the_answers_have_to_agree(quiz, tmp_path):
    for votes, answer in (
            (["7", "7", "7", "5"], "7"), (["7", "7", "5", "5"], None), (["7", "7", "5", "6"], None),
            (["5", "7", "7", "7"], "7"), (["a", "b", "c", "d"], None), (["7"] * 4, "7")):
        given = iter(votes)
        with served(lambda body, n, given=given: honest(body, n) if asks_generator(body) else paid(
                tagged(next(given)))) as server:
            rows, counts = all_of(writing(quiz, tmp_path, server.url, 1, "".join(votes), votes=4, concurrency=1))
        assert [row["answer"] for row in rows] == ([answer] if answer else []), (votes, answer)
        assert counts == ({} if answer else {"no majority": 1}), (votes, answer)


def test_what_was_cut_off_counts_for_nothing(quiz, tmp_path):
    """Of four equal answers one is whole; then prompts of the generator are cut off."""
    cut = lambda body, n: (found := honest(body, n))["choices"][0].update(finish_reason="length") or found  # noqa: E731
    with served(lambda body, n: (cut if n > 1 and not asks_generator(body) else honest)(body, n)) as server:
        rows, counts = all_of(writing(quiz, tmp_path, server.url, 1, votes=4, concurrency=1))
    assert rows == [] and counts == {"no majority": 1}
    with served(cut) as server:
        assert {c.reason for c in writing(quiz, tmp_path, server.url, 2, "cut").candidates()} == {"malformed"}


def test_a_lying_generator_gets_nothing_in(quiz, tmp_path):
    """Not a row, a row without its question, the parent again, one twice, a held-out row, and a false answer."""
    write_rows(tmp_path / "held.jsonl", [{"id": "h", "question": "What is the Capital of France?", "answer": "Paris"}])
    config = quiz.model_copy(update={"data": quiz.data.model_copy(update={"heldout": str(tmp_path / "held.jsonl")})})
    lies = ["no JSON at all", '{"question": "  ", "answer": "1"}', '{"answer": "1"}', '{"question": 5, "answer": "1"}',
            '{"question": "a <|im_end|> b", "answer": "1"}', '[{"question": "in a list"}]', "{" * 5000,
            '{"question": "How much is 0 and 0?", "answer": "0"}', '{"question": "what is the capital of FRANCE", '
            '"answer": "Rome"}', '{"question": "What is 4 + 4?", "answer": "9, sure", "verifier": "me", "id": "t1"}',
            '{"question": "What is 4 + 4 ?", "answer": "9"}']
    written = iter(lies)
    script = lambda body, n: paid(next(written)) if asks_generator(body) else paid(tagged(8))  # noqa: E731
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if row["id"] == "t0"]
    with served(script) as server:
        work = writing(config, tmp_path, server.url, len(lies), votes=2, concurrency=1)
        work.search = Search(candidates=len(lies), parents=tuple(rows))
        found, counts = all_of(work)
    assert counts == {"malformed": 7, "near-duplicate": 2, "near a held-out row": 1}
    assert [(row["id"], row["answer"], row["verifier"]) for row in found] == [("t0~9", "8", "2 of 2 answers of only")]


def test_what_the_task_works_out_needs_no_teacher(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"id": "t0", "n": 3, "answer": "4"}])
    config = make_config(tmp_path, "Sums", f"data: {{train: {tmp_path}/rows.jsonl}}")
    written = iter(['{"n": 10, "answer": "999"}', '{"n": 2000, "answer": "2001"}', '{"n": 10, "answer": "11"}'])
    with served(lambda body, n: paid(next(written))) as server:
        rows, counts = all_of(writing(config, tmp_path, server.url, 3, concurrency=1))
    assert len(server.asked) == 3 and counts == {"refused by the task": 1}
    assert [(row["n"], row["answer"], row["verifier"]) for row in rows] == [(10, "11", "worked out by task quiz")] * 2


def test_a_dead_generator_is_asked_again_and_paid_once(quiz, tmp_path):
    dead = threading.Event()
    dead.set()
    script = lambda body, n: 500 if dead.is_set() and n else honest(body, n)  # noqa: E731
    with served(script) as server:
        work = writing(quiz, tmp_path, server.url, votes=2, concurrency=1)
        assert [c.reason for c in work.candidates()] == ["", *["not answered"] * 3] and work.unanswered == 3
        dead.clear()
        before = len(server.asked)
        work = writing(quiz, tmp_path, server.url, votes=2, concurrency=1)
        rows, counts = all_of(work)
        assert len(rows) == 4 and counts == {} and work.unanswered == 0 and len(server.asked) == before + 3 + 8
        assert work.costs["generator"]["tokens_in"] == 80 and work.costs["teacher"]["tokens_in"] == 160
        again, _ = all_of(writing(quiz, tmp_path, server.url, votes=2, concurrency=1))
        assert again == rows and len(server.asked) == before + 11
        with pytest.raises(ConfigError, match="with other settings:\n  temperature was 1"):
            writing(quiz, tmp_path, server.url, temperature=0.5).candidates()


def test_a_row_whose_votes_are_not_all_there_is_not_verified(quiz, tmp_path):
    """Both of two answers agree, and the third was never given: it enters once the third has come."""
    script = lambda body, n: 500 if n == 3 else honest(body, n)  # noqa: E731
    with served(script) as server:
        work = writing(quiz, tmp_path, server.url, 1, votes=4, concurrency=1)
        rows, counts = all_of(work)
        assert [row["verifier"] for row in rows] == ["3 of 4 answers of only"] and work.unanswered == 1
    dropped = tmp_path / "new.votes.jsonl"
    dropped.write_text("".join(line + "\n" for line in dropped.read_text().splitlines()[:3]))  # facts and two votes
    with served(lambda body, n: 500 if not asks_generator(body) else honest(body, n)) as server:
        rows, counts = all_of(writing(quiz, tmp_path, server.url, 1, votes=4, concurrency=1))
        assert rows == [] and counts == {"not all votes": 1}


class Plain(Task):
    prompt = "{question}"


PARENT = {"id": "t", "question": "Which?", "options": ["a", "b"], "answer": 3, "box": [1, 2, 3, 4]}
_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
                     | st.dictionaries(st.sampled_from(["question", "options", "answer", "id", "box"]), inner),
                     max_leaves=12)


@settings(max_examples=60)
@given(st.text() | _JSON.map(json.dumps) | st.tuples(st.text(), _JSON.map(json.dumps)).map("".join))
def test_any_reply_is_read_or_refused(text):
    found = read_reply(text, Plain(), PARENT)
    if found is not None:
        assert {*found} == {"question", "options", "answer"}
        assert isinstance(found["question"], str) and found["question"].strip()
        assert all(isinstance(one, str) and one.strip() for one in found["options"]) and found["options"]
        assert isinstance(found["answer"], (int, float)) and abs(found["answer"]) < float("inf")
        json.dumps(found, allow_nan=False)


@settings(max_examples=60)
@given(st.text("abc 12?", min_size=1).filter(str.strip), st.lists(st.sampled_from(["x", "y z"]), min_size=1,
                                                                    max_size=9), st.integers(-10**6, 10**6))
def test_a_row_of_the_right_form_is_read_back(question, options, answer):
    row = {"question": question, "options": options, "answer": answer}
    assert read_reply(f"Here: ```json\n{json.dumps(row | {'id': 'mine'})}\n```", Plain(), PARENT) == row


def test_what_a_generator_is_asked_and_what_cannot_be_verified():
    text = request_text(Plain(), PARENT, "combined", {**PARENT, "question": "Why?"})
    assert '{"question": "Which?", "options": ["a", "b"], "answer": 3}' in text and '"Why?"' in text
    assert "combines the concepts" in text and "same picture" not in text and "box" not in text
    assert "same picture" in request_text(Plain(), {**PARENT, "image": "a.png"}, "harder")
    with pytest.raises(ConfigError, match="none of the fields that may be written"):
        check(Plain(), [{"id": "a", "n": 1}])
    with pytest.raises(ConfigError, match=r"no `answer`.*Task.solved or Task.answered"):
        check(Plain(), [{"id": "a", "question": "?"}])
    check(Plain(), [{"id": "a", "question": "?", "answer": 1}])


def test_a_picture_of_a_heldout_row_is_refused(quiz, tmp_path):
    """The same picture, smaller; the other one is let through."""
    with Image.open(tmp_path / "2.png") as image:
        image.resize((50, 50)).save(tmp_path / "held.png")
    write_rows(tmp_path / "held.jsonl", [{"id": "h", "question": "Else?", "answer": "1", "image": "held.png"}])
    config = quiz.model_copy(update={"data": quiz.data.model_copy(update={"heldout": str(tmp_path / "held.jsonl")})})
    task = make_task(config)
    rows = [{"id": f"n{i}", "question": f"New {i}?", "answer": "1", "image": f"{i}.png"} for i in (2, 3)]
    found, counts = distinct([Candidate(number=i, row=row) for i, row in enumerate(rows)],
                             HeldOutRows.read(config, task), task, SignatureReader(config, task, tmp_path))
    assert [row["id"] for row in found.values()] == ["n3"] and counts == {"near a held-out row": 1}


def test_knobs_anywhere_and_near_to_a_parent(tmp_path):
    config = configs.load(ROOT / "configs/quickstart.yaml", [f"run.dir={tmp_path}/r", "task.drawn=true"])
    task, where = make_task(config), MediaLocation(root=tmp_path, folder=tmp_path / "new_media")
    made = [propose(task, n, location=where).row for n in range(40)]
    assert all((tmp_path / row["image"]).is_file() and row["generator"] == "knobs" for row in made)
    assert made[3] == propose(task, 3, location=where).row and made[3]["boxes"]
    low, high = np.array([*task.knobs.values()]).T
    spread = (np.array([[*row["knobs"].values()] for row in made]) - low) / (high - low)
    assert spread.min() >= 0 and spread.max() <= 1 and (spread.std(0) > 0.2).all()
    near = [propose(task, n, (made[3],), where).row for n in range(40)]
    assert {row["parent"] for row in near} == {made[3]["id"]} and {row["generator"] for row in near} == {"vary-knobs"}
    middle = np.array([*made[3]["knobs"].values()])
    away = (np.array([[*row["knobs"].values()] for row in near]) - middle) / (high - low)
    assert 0.03 < away.std() < 0.15
    with pytest.raises(ConfigError, match="'x' was not generated with the knobs of task 'grounding'"):
        propose(task, 0, ({"id": "x"},), where)
    sample = generated(task, 7, {name: low for name, (low, _) in task.knobs.items()})
    rows = [{"schema": 1, "step": 0, "group_id": "g", "index": i, "sample_id": sample.id, "split": "train", "reward":
             float(i), "correct": bool(i), "sample": json.dumps(dict(sample.row))} for i in range(2)]
    (tmp_path / "run/rollouts").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "run/rollouts/step-000000-rank-00000.parquet")
    search = search_of(config, task, where, SeedSettings(recipe="eva", source=tmp_path / "run"))
    assert search.candidates == 4 and [row["id"] for row in search.parents] == [sample.id]
    made = propose(task, 1, search.parents, where).row
    assert made["parent"] == sample.id and made["generator"] == "vary-knobs" and (tmp_path / made["image"]).is_file()


def test_recipes_over_a_file_of_pass_rates(quiz, tmp_path):
    rows = read_rows(tmp_path / "rows.jsonl")
    measured = [{**row, "pass_at_k": i / 3, "answers_scored": 3} for i, row in enumerate(rows)]
    write_rows(tmp_path / "file.jsonl", measured)
    wanted = SeedSettings(recipe="synthetic_data_rl", source=tmp_path / "file.jsonl")
    search = search_of(quiz, make_task(quiz), MediaLocation.for_file(quiz, tmp_path / "new.jsonl"), wanted)
    ways = {row["id"]: variation for row, (variation, _) in zip(search.parents, search.variations, strict=True)}
    assert ways == {"t0": "easier", "t1": "easier", "t2": "harder", "t3": "harder"}
    assert search.keep == 500 and search.candidates == 64 and "pass_at_k" not in search.parents[0]
    for wanted, message in (
            (SeedSettings(recipe="sws"), "can only be given together"),
            (SeedSettings(source="runs/a"), "can only be given together"),
            (SeedSettings(recipe="sws", source="file"), "a file of pass rates is not enough"),
            (SeedSettings(recipe="synthetic_data_rl", source="file", failed="file"), "both choose the rows to vary"),
            (SeedSettings(least=0.9, most=0.1), "no pass rate lies between")):
        rows = read_rows(tmp_path / "rows.jsonl")
        write_rows(tmp_path / "file.jsonl", [{**row, "pass_at_k": i / 3} for i, row in enumerate(rows)])
        paths = {name: tmp_path / "file.jsonl" for name in ("source", "failed") if getattr(wanted, name) == "file"}
        known = SeedSettings(**{**vars(wanted), **paths})
        with pytest.raises(ConfigError, match=message):
            search_of(quiz, make_task(quiz), MediaLocation.for_file(quiz, tmp_path / "new.jsonl"), known)


LUCK = '''
from vlrl.task import Task


class Luck(Task):
    """Whatever the row says is right: an answer of even length, so that a model is right at times."""
    prompt = "{question}"
    rewards = outcome = {"right": 1.0}

    def score(self, sample, answer):
        return {"right": float(len(answer.text) % 2 == 0)}
'''


@pytest.mark.slow
def test_a_killed_command_goes_on_and_pays_once(tmp_path):
    """kill -9 while the generator writes; then again while the teacher answers; then it ends, with rows that train."""
    (tmp_path / "luck.py").write_text(LUCK)
    write_rows(tmp_path / "rows.jsonl", [{"id": f"t{i}", "question": f"Say {i}.", "answer": "1"} for i in range(3)])
    config = tmp_path / "luck.yaml"
    config.write_text(f"extends: quickstart.yaml\ntask: {tmp_path}/luck.py:Luck\n")
    words = [str(config), "rollout.max_new_tokens=6", f"run.dir={tmp_path}/run", "data.workers=0",
             f"data.train={tmp_path}/rows.jsonl", "rollout.group_size=4", "rollout.prompts_per_step=2"]
    hold, gate, said_in = threading.Event(), {"after": 3}, tmp_path / "said.txt"

    def script(body, number):
        if number >= gate["after"]:
            hold.wait(600)
        if asks_generator(body):
            return paid(json.dumps({"question": f"Say the word number {number} of {len(said(body))}.", "answer": "1"}))
        return paid(tagged("no"))

    with served(script) as server:
        command = ["-m", "vlrl", "data", "synthesize", *words, "--endpoint", server.url, "--candidates",
                   "6", "--votes", "2", "--answers", "8", "-o", str(tmp_path / "new.jsonl"), "--concurrency", "1",
                   "--json", "--price-out", "1"]
        for file, lines, after in (("new.written.jsonl", 4, 9), ("new.votes.jsonl", 3, 10**9)):
            with said_in.open("w") as printed:
                process = forked.Process(command, ENV, ROOT, printed, printed)
            end = time.monotonic() + 600
            while process.poll() is None and time.monotonic() < end and not (
                    (tmp_path / file).exists() and len((tmp_path / file).read_bytes().splitlines()) >= lines):
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL and time.monotonic() < end, said_in.read_text()
            assert not (tmp_path / "new.jsonl").exists()
            gate["after"] = after
            hold.set()
            time.sleep(0.3)
            hold.clear()
        done = forked.run(command, ENV, ROOT, 900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cost"]["generator"]["replies"] == 6 and found["cost"]["teacher"]["replies"] == 12
    assert found["cost"]["generator"]["tokens_in"] == 120 and found["cost"]["teacher"]["price"] == pytest.approx(36e-6)
    rows = read_rows(tmp_path / "new.jsonl")
    assert rows and all(0 < row["pass_at_k"] < 1 and row["verifier"] == "2 of 2 answers of only" for row in rows)
    assert found["gates"]["verified"] == 6 and found["gates"]["kept"] == len(rows) == found["kept"]
    assert {path.name for path in tmp_path.glob("new.*")} == {
        f"new.{end}" for end in ("jsonl", "about.json", "refused.jsonl", "votes.jsonl", "written.jsonl")}
    assert main(["train", *words, "steps=1", f"data.train={tmp_path}/new.jsonl", "data.own_samples=false",
                 "eval.samples=0"]) == 0
