"""`vlrl serve --judge`: a real vLLM (its CPU build) with a tiny model judges whole runs. One server for all tests."""

import json
import signal
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tests.e2e import forked, runs
from tests.e2e.runs import ROOT
from tests.vllm.test_server import FORKED, PATIENT, free_ports, serving, serving_environment, until
from vlrl.config.services import JudgeSettings
from vlrl.rewards.verdicts import read_fields
from vlrl.services.judge import Judge
from vlrl.store import RunFolder
from vlrl.task import load_class
from vlrl.task.services import Question, ServiceContext

pytestmark = pytest.mark.vllm

GRADES = "abcdefghij"
FIELDS = {"grade": tuple(GRADES)}
JUDGED = f'''
    needs = {{"judge": ("grade",)}}

    def score_group(self, sample, answers, services):
        fields = {{"grade": tuple({GRADES!r})}}
        replies = services.judge([Question(f"How good is {{a.text!r}}?", sample.media, fields) for a in answers])
        found = [None if r is None else read_fields(r, fields) for r in replies]
        return [{{"grade": None if f is None else {GRADES!r}.index(f["grade"]) / 9}} for f in found]
'''
TERSE = ("structured-outputs-config.backend=xgrammar", "structured-outputs-config.disable_any_whitespace=true")
"""A random model would fill its reply with spaces, which JSON allows."""


class Server:
    def __init__(self, root, config, model):
        self.log, self.model, self.address = root / "serve.log", str(model), f"http://127.0.0.1:{free_ports()}"
        further = [word for name in ("max-model-len=1024", "dtype=float32", "max-num-seqs=8", *TERSE)
                   for word in ("--vllm", name)]
        with self.log.open("w") as log:
            self.process = forked.Process(
                [serving(root, FORKED), "serve", config, "--judge", "--folder", root / "judge", *further, *self.words],
                serving_environment(), ROOT, log, log)

    @property
    def words(self):
        return (f"services.judge.url={self.address}/v1", f"services.judge.model={self.model}")

    def ready(self):
        until(lambda: self.answers() or self.process.poll() is not None, "the server does not start")
        assert self.process.poll() is None, self.log.read_text()
        return self

    def answers(self):
        try:
            return httpx.get(f"{self.address}/v1/models", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def vllm(self):
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def replies(self):
        """How many it has given since it was started, by its own count."""
        text = httpx.get(f"{self.address}/metrics", timeout=30, trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
                   if line.startswith("vllm:request_success_total"))


@pytest.fixture(scope="module")
def judged(installed, tiny_models, tmp_path_factory):
    """The server, and a run of five steps that asked it."""
    root = tmp_path_factory.mktemp("judged")
    config = runs.write_config(root, tiny_models["qwen3_vl"])
    task = (root / "shades.py").read_text().replace('"short": 0.1}', '"short": 0.1, "grade": 1.0}')
    task = "from vlrl.rewards.verdicts import read_fields\nfrom vlrl.task.services import Question\n" + task
    (root / "shades.py").write_text(task + JUDGED)
    server = Server(root, config, tiny_models["qwen3_vl"])
    try:
        server.ready()
        asked = server.replies()
        done = runs.run(config, root / "whole", *runs.FEW, *server.words)
        assert done.returncode == 0, done.stdout + done.stderr
        yield SimpleNamespace(root=root, config=config, server=server, whole=root / "whole",
                              asked=server.replies() - asked)
    finally:
        assert server.process.poll() is None, server.log.read_text()
        left = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(PATIENT)
        _, orphans = psutil.wait_procs(left, timeout=60)
        assert code == 130 and not orphans, server.log.read_text()


def counts(folder, name):
    return sum(line[f"judge/{name}"] for file in ("metrics.jsonl", "eval.jsonl") for line in runs.metrics(folder, file))


def test_a_run_is_paid_by_what_the_model_says(judged):
    """Each question is one request; its verdict, within its schema, is what the answer was paid."""
    assert counts(judged.whole, "calls") == judged.asked > 10 and counts(judged.whole, "failed") == 0
    assert counts(judged.whole, "tokens_in") > 20 * judged.asked and counts(judged.whole, "tokens_out") > judged.asked
    assert f"ready: {judged.server.address}/v1" in judged.server.log.read_text()
    table = RunFolder(judged.whole).rollouts().to_pylist()
    grades = [dict(row["parts"])["grade"] for row in table]
    assert len(table) == 20 and len({*grades}) > 1 and all(row["reward"] is not None for row in table)
    kept = [json.loads(line) for line in (judged.whole / "services/judge-rank-00000.jsonl").read_text().splitlines()]
    said = {read_fields(one["text"], FIELDS)["grade"] for one in kept}
    assert {GRADES.index(grade) / 9 for grade in said} >= {*grades} and len(kept) == judged.asked


def test_a_killed_run_goes_on_bit_for_bit_and_asks_nothing_twice(judged):
    before, folder = judged.server.replies(), judged.root / "killed"
    runs.kill_after(judged.config, folder, 3, *runs.FEW, *judged.server.words)
    done = runs.run(judged.config, folder, *runs.FEW, *judged.server.words)
    assert done.returncode == 0, done.stdout + done.stderr
    runs.assert_same_run(folder, judged.whole)
    assert judged.server.replies() - before == judged.asked


def test_what_a_random_model_says_unasked_for_is_unpaid_counted_and_listed(judged):
    """Without the schema it writes no JSON: the run goes on with what else pays."""
    folder = judged.root / "garbage"
    done = runs.run(judged.config, folder, *runs.FEW, *judged.server.words, "services.judge.json_schema=false",
                    "services.judge.retries=1", "services.judge.max_tokens=16", "limits.service_errors=1", "steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts(folder, "calls") == counts(folder, "failed") == counts(folder, "retries") > 4
    rows = RunFolder(folder).rollouts().to_pylist()
    assert len(rows) == 8 and all(row["reward"] is None and row["advantage"] == 0 for row in rows)
    assert all(row["error"].startswith("service: judge: the reply does not say grade:") for row in rows)
    assert [line["service_errors"] for line in runs.metrics(folder)] == [1, 1]
    failed = (folder / "services/judge-failed-rank-00000.jsonl").read_text().splitlines()
    assert len(failed) == counts(folder, "calls") and not (folder / "services/judge-rank-00000.jsonl").exists()


def test_a_run_outlives_its_judge(judged, tmp_path):
    """vLLM is killed while it owes the third step an answer; `vlrl serve` starts it again, and the run is the same."""
    known = [line for line in (judged.whole / "services/judge-rank-00000.jsonl").read_text().splitlines()
             if json.loads(line)["split"] == "train" and json.loads(line)["step"] < 2]
    (tmp_path / "judge-rank-00000.jsonl").write_text("".join(f"{line}\n" for line in known))
    vllm, port = judged.server.vllm(), int(judged.server.address.rpartition(":")[2])
    for process in vllm.children(recursive=True):
        process.suspend()
    words = (*judged.server.words, f"services.judge.cache={tmp_path}", "services.judge.retries=20", "eval.samples=0")
    folder = judged.root / "outlives"
    with (judged.root / "outlives.log").open("w") as log:
        run = forked.Process([ROOT / "train.py", judged.config, f"run.dir={folder}", *runs.FEW, *words], runs.ENV,
                             judged.root, log, log)
    try:
        runs.wait_for(folder, 2, [run], lambda: (judged.root / "outlives.log").read_text())
        until(lambda: any(c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port
                          for c in psutil.Process(run.pid).net_connections("tcp")), "nothing is asked")
        vllm.kill()
        assert run.wait(PATIENT) == 0, (judged.root / "outlives.log").read_text()
    finally:
        run.kill()
    assert "the server is started again" in judged.server.log.read_text()
    assert counts(folder, "failed") == 0 and counts(folder, "retries") > 0
    assert runs.weights(folder, 5) == runs.weights(judged.whole, 5)
    assert RunFolder(folder).rollouts().equals(RunFolder(judged.whole).rollouts())


def test_the_server_says_again_what_the_run_was_told(judged, tmp_path):
    """With the picture of each question, before the run as after it was killed and started again."""
    judged.server.ready()
    task = load_class(f"{judged.root}/shades.py:Shades")()
    shown, rows = {s.id: s.media for s in task.samples("train")}, RunFolder(judged.whole).rollouts().to_pylist()[:4]
    judge = Judge(JudgeSettings(url=f"{judged.server.address}/v1", model=judged.server.model), tmp_path)
    try:
        assert judge.problem() == ""
        questions = [Question(f"How good is {row['completion']!r}?", shown[row["sample_id"]], FIELDS) for row in rows]
        replies, failures = judge.ask(questions, ServiceContext("train", 0, 0))
    finally:
        judge.close()
    grades = [GRADES.index(read_fields(text, FIELDS)["grade"]) / 9 for text in replies]
    assert grades == [dict(row["parts"])["grade"] for row in rows] and not failures
