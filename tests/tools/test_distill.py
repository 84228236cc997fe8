"""vlrl data distill against a real HTTP server: a good teacher, and a dead, slow and lying one."""

import base64
import io
import json
import threading

import pytest
from PIL import Image

from tests.evaluation.http_stand_in import reply, served
from vlrl import config as configs
from vlrl.cli.main import main
from vlrl.config import stages_of
from vlrl.config.base import Named
from vlrl.data import write_rows
from vlrl.data.sources.solutions import read_solutions
from vlrl.errors import ConfigError, TrainingError
from vlrl.task import task_samples
from vlrl.tools.clients.replies import Replies, has_failed_requests
from vlrl.tools.evaluation.grid import Server
from vlrl.tools.synthesis import distill
from vlrl.tools.synthesis.distill import DistillFiles, DistillSettings, distill_answers
from vlrl.training.build_task import make_task

TASK = '''
from PIL import Image
from vlrl.task import Task
from vlrl.types import Media, Sample

class Sums(Task):
    """Three rows, of which the last has a picture."""
    prompt = "What is {n} + 1?"
    rewards = outcome = {"right": 1.0}

    def samples(self, split):
        picture = Media(source=Image.new("RGB", (32, 32), (200, 10, 10)))
        return [Sample(id=f"{split}-{n}", row={"n": n}, media=(picture,) if n == 2 else ()) for n in range(3)]

    def score(self, sample, answer):
        return {"right": float(answer.final == str(sample["n"] + 1))}
'''


@pytest.fixture
def config(tmp_path):
    (tmp_path / "sums.py").write_text(TASK)
    file = tmp_path / "sums.yaml"
    file.write_text(f"task: {tmp_path}/sums.py:Sums\nmodel: {{name: embedded/tiny-qwen3-vl}}\n"
                    f"run: {{dir: {tmp_path}/r}}\n")
    return configs.load(file)


def said(body):
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def number(body):
    return int(said(body).split()[2])


def right(body, *_, tokens=(20, 3)):
    text = f"<think>counted on</think><answer>{number(body) + 1}</answer>"
    return reply(text) | {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}}


def read_lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ask(config, tmp_path, script, order=None, progress=lambda *_: None, **more):
    with served(script) as server:
        known = {"retries": 1, "timeout_s": 20.0, **more}
        found = distill_answers(config, Server(url=server.url, **known), order or DistillSettings(),
                                DistillFiles(tmp_path / "a.jsonl"), progress)
        return found, read_lines(tmp_path / "a.jsonl"), server.asked


def test_right_answers_are_kept_for_data_solutions(config, tmp_path):
    told = []
    found, rows, asked = ask(config, tmp_path, right, DistillSettings(price_in=1.0, price_out=10.0),
                             progress=lambda *one: told.append(one))
    assert [(r["number"], r["id"], r["solution"][-18:]) for r in rows] == [
        (n, f"train-{n}", f"<answer>{n + 1}</answer>") for n in range(3)]
    assert [s.text for s in read_solutions(str(tmp_path / "a.jsonl"))] == [r["solution"] for r in rows]
    assert rows[0]["teacher"] == "only" and all(r["correct"] and r["reward"] == 1.0 for r in rows)
    assert {k: v for k, v in found.items() if k != "cost"} == {
        "prompts": 3, "answers": 3, "right": 3, "solved": 3, "kept": 3, "unanswered": 0, "left_out": 0}
    assert found["cost"] == {"replies": 3, "retries": 0, "tokens_in": 60, "tokens_out": 9,
                             "price": pytest.approx((60 * 1.0 + 9 * 10.0) / 1e6)}
    assert ("asking the teacher", 0, 3) in told and ("asking the teacher", 3, 3) in told and len(asked) == 3
    (picture,) = [p["image_url"]["url"] for _, _, body in asked for p in body["messages"][-1]["content"]
                  if isinstance(p, dict) and p["type"] == "image_url"]
    seen = Image.open(io.BytesIO(base64.b64decode(picture.split(",", 1)[1])))
    assert seen.size == (32, 32) and seen.convert("RGB").getpixel((3, 3))[0] > 150
    about = json.loads((tmp_path / "a.about.json").read_text())
    assert about["kept"] == 3 and about["facts"]["teacher"] == "only"
    assert not has_failed_requests(DistillFiles(tmp_path / "a.jsonl").about)


def test_a_lying_teacher_gets_nothing_in(config, tmp_path):
    def lies(body, n):
        cut = right(body)
        cut["choices"][0]["finish_reason"] = "length"
        return (reply("<answer>99</answer> (verified, correct: true, reward: 1.0)", correct=True, reward=1.0), cut,
                reply(""), reply("<answer>98</answer>") | {"usage": {"prompt_tokens": "many", "completion_tokens": -7}}
                )[n % 4]

    found, rows, _ = ask(config, tmp_path, lies, DistillSettings(answers=4), concurrency=1)
    assert rows == [] and found["right"] == found["kept"] == found["solved"] == 0 and found["answers"] == 12
    assert found["cost"]["replies"] == 12 and found["cost"]["replies_without_tokens"] > 0
    assert found["cost"]["tokens_out"] >= 0 and found["cost"]["tokens_in"] >= 0


def test_the_shortest_of_the_right_ones_and_only_from_a_reward_on(config, tmp_path):
    def some(body, n):
        long = "hm " * (n % 3)
        return reply(f"<think>{long}</think><answer>{number(body) + 1}</answer>") | {
            "usage": {"prompt_tokens": 5, "completion_tokens": 5 + len(long)}}

    found, rows, _ = ask(config, tmp_path, some, DistillSettings(answers=3, rows=2), concurrency=1)
    assert [r["number"] for r in rows] == [0, 1] and all("hm" not in r["solution"] for r in rows)
    assert found["right"] == 6 and all(r["of"] == 3 and r["tokens"] == 5 for r in rows)
    with served(some) as server:
        again = distill_answers(config, Server(url=server.url), DistillSettings(rows=2, least=1.5),
                                DistillFiles(tmp_path / "b.jsonl"), lambda *_: None)
    assert again["kept"] == 0 and again["answers"] == 2


def test_a_dead_teacher_is_asked_again_and_counted_once(config, tmp_path):
    """It answers one request and then none; the next command asks for what is missing alone."""
    places, dead = DistillFiles(tmp_path / "a.jsonl"), threading.Event()

    def dying(body, n):
        return 500 if dead.is_set() and number(body) else right(body)

    with served(dying) as server:
        dead.set()
        teacher = Server(url=server.url, retries=0, timeout_s=5.0, concurrency=1)
        found = distill_answers(config, teacher, DistillSettings(), places, lambda *_: None)
        assert (found["kept"], found["unanswered"], found["cost"]["tokens_in"]) == (1, 2, 20)
        assert has_failed_requests(places.about)
        dead.clear()
        before = len(server.asked)
        found = distill_answers(config, teacher, DistillSettings(), places, lambda *_: None)
        assert (found["kept"], found["unanswered"], found["cost"]["tokens_in"]) == (3, 0, 60)
        assert len(server.asked) == before + 2 and not has_failed_requests(places.about)
        distill_answers(config, teacher, DistillSettings(), places, lambda *_: None)
        assert len(server.asked) == before + 2
        found = distill_answers(config, teacher, DistillSettings(answers=2), places, lambda *_: None)  # more of them
        assert len(server.asked) == before + 5 and found["cost"]["replies"] == 6
        with pytest.raises(ConfigError, match=r"holds answers of a teacher with other settings:\n  temperature was 1"):
            distill_answers(config, teacher, DistillSettings(temperature=0.5), places, lambda *_: None)


def test_a_reply_that_stands_twice_counts_once(tmp_path):
    line = {"number": 0, "answer": 0, "text": "a", "finish_reason": "stop", "tokens_in": 5, "tokens_out": 2, "tries": 1}
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in ({"facts": {"x": 1}}, line, {**line, "text": "b"}))
                    + '{"number": 1, "ans')  # half a line of a killed process
    found = Replies.open(path, {"x": 1})
    assert found.replies == {(0, 0): line} and found.cost()["tokens_in"] == 5
    assert found.cost(price_out=2e6)["price"] == pytest.approx(4.0)


def test_what_cannot_be_asked_and_a_teacher_that_answers_nothing(config, tmp_path):
    (tmp_path / "sums.py").write_text(TASK.replace("range(3)", "range(40)"))
    with pytest.raises(TrainingError, match="answered none of 16 requests"):
        ask(config, tmp_path, lambda *_: 400, concurrency=1)
    with pytest.raises(ConfigError, match="refuses the key"):
        ask(config, tmp_path, lambda *_: 401)
    assert not (tmp_path / "a.jsonl").exists()
    greedy = DistillSettings(answers=2, temperature=0.0)
    for more, order, name, message in (
            ([], greedy, "a.jsonl", "--temperature 0 with --answers 2: the answers to a row would all be the same"),
            ([], DistillSettings(), "a.json", r"ends in \.jsonl"),
            (["data.solutions=x.jsonl"], DistillSettings(), "a.jsonl", "provides answers"),
            ([], DistillSettings(choose=Named(name="longest")), "a.jsonl", "--choose='longest' is not known")):
        known = configs.load(tmp_path / "sums.yaml", more)
        with pytest.raises(ConfigError, match=message):
            distill.check(known, order, DistillFiles(tmp_path / name))


def test_the_command(config, tmp_path, capsys):
    """A kill: test_written.py, whose replies are kept in the same way."""
    with served(right) as server:
        words = ["data", "distill", str(tmp_path / "sums.yaml"), "-o", str(tmp_path / "a.jsonl"), "--concurrency", "2",
                 "--json", "--price-in", "1", "--endpoint", server.url]
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kept"] == found["cost"]["replies"] == 3 and found["cost"]["tokens_in"] == 60
        assert found["next"].endswith(f"data.solutions={tmp_path / 'a.jsonl'}")
        assert main(words) == 1 and "exists already" in capsys.readouterr().err and len(server.asked) == 3


def test_critiques_of_answers_to_one_problem(tmp_path):
    """Critique fine-tuning: of each proposed answer only critiques that end in the right verdict are kept."""
    proposed = {"12": "yes", "13": "no", "14": "no"}
    write_rows(tmp_path / "proposed.jsonl", [
        {"id": f"a{i}", "answer_type": "yes_no", "answer": right,
         "question": f"5 + 7?\n\nAnswer: {answer}\n\nIs it right?"}
        for i, (answer, right) in enumerate(proposed.items())])
    config = configs.load("configs/stages/cft.yaml", [f"data.train={tmp_path}/proposed.jsonl"])

    def critic(body, n):
        answer = said(body).split("Answer: ")[1].split()[0]
        return reply(f"<think>5 + 7 is 12, and it says {answer}.</think><answer>{'yes' if n % 2 else 'no'}</answer>")

    found, rows, _ = ask(config, tmp_path, critic, DistillSettings(answers=2, choose=Named(name="all")), concurrency=1)
    assert [(r["id"], r["solution"][-13:-9]) for r in rows] == [("a0", ">yes"), ("a1", "r>no"), ("a2", "r>no")]
    assert found["right"] == 3 and found["answers"] == 6
    ((stage, learning),) = stages_of(configs.load("configs/stages/cft.yaml", [
        f"data.train={tmp_path}/proposed.jsonl", f"data.solutions={tmp_path}/a.jsonl"]))
    samples = task_samples(make_task(learning), "train")
    assert stage.kind == "sft" and [s["solution"] for s in samples] == [r["solution"] for r in rows]
