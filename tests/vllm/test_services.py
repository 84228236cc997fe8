"""Models that runs ask, behind `vlrl serve` with a real vLLM (its CPU build): a judge (`--judge`) of whole runs, and a
teacher of algo.distillation, whose numbers are those of that teacher from a folder."""

import json
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest

from tests.e2e import forked, runs
from tests.e2e.runs import ROOT
from tests.helpers import credited_groups, load
from tests.training.test_distillation import moved, of
from tests.vllm.conftest import trainer_logprobs
from tests.vllm.serve import PATIENT, Serve, free_ports, until
from vlrl.config.services import JudgeSettings
from vlrl.methods.distillation import teacher
from vlrl.rewards.verdicts import read_fields
from vlrl.services.judge import Judge
from vlrl.store import RunFolder
from vlrl.task import load_class
from vlrl.task.services import Question, ServiceContext
from vlrl.training.minibatch import make_minibatch, split

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


class Server(Serve):
    def __init__(self, root, config, model):
        self.model, self.address = str(model), f"http://127.0.0.1:{free_ports()}"
        self.words = (f"services.judge.url={self.address}/v1", f"services.judge.model={self.model}")
        further = [word for name in ("max-model-len=1024", "dtype=float32", "max-num-seqs=8", *TERSE)
                   for word in ("--vllm", name)]
        super().__init__(root, "judge", config, "--judge", *further, *self.words)

    def there(self):
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
        assert server.process.poll() is None, server.said()
        assert server.close() == (130, 0), server.said()


def counts(folder, name):
    return sum(line[f"judge/{name}"] for file in ("metrics.jsonl", "eval.jsonl") for line in runs.metrics(folder, file))


def test_a_run_is_paid_by_what_the_model_says(judged):
    """Each question is one request; its verdict, within its schema, is what the answer was paid."""
    assert counts(judged.whole, "calls") == judged.asked > 10 and counts(judged.whole, "failed") == 0
    assert counts(judged.whole, "tokens_in") > 20 * judged.asked and counts(judged.whole, "tokens_out") > judged.asked
    assert f"ready: {judged.server.address}/v1" in judged.server.said()
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
    assert "the server is started again" in judged.server.said()
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


@pytest.fixture(scope="module")
def teaching(installed, tiny_models, tmp_path_factory):
    root, folder = tmp_path_factory.mktemp("teacher"), tiny_models["qwen3_vl"]
    away, _ = load(of(folder))
    moved(away, 0.05)
    away.save(root / "model")
    (root / "model" / "trainer_state.safetensors").write_bytes(b"of a checkpoint; no weights of the model")
    config, port = runs.write_config(root, folder), free_ports()
    serve = Serve(root, "servers", config, "--port", port, "--weights", root / "model", f"model.name={root / 'model'}",
                  "model.dtype=float32", "engine.max_seqs=32")
    try:
        serve.ready()
        yield SimpleNamespace(root=root, folder=folder, config=config, serve=serve, settings={
            "loss": "sampled_kl", "server": f"http://127.0.0.1:{port}", "key_file": serve.key_file})
    finally:
        serve.close()


def test_log_probabilities_of_a_teacher_are_those_of_its_folder(teaching):
    """Of answers to pictures, videos and texts, by choices that temperature and banned ids change."""
    config = of(teaching.folder, teaching.root / "model", rollout={"max_new_tokens": 24}, **teaching.settings)
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    assert {m.kind for g in groups for m in g.prompt.media} >= {"image"}
    rows = make_minibatch(policy, split(groups, 1)[0], config).rollouts
    found, model = teacher.connect(config, policy), teacher.load(config, policy)
    for temperature in (0.8, 1.0, 1.7):
        pairs = [(row.group.prompt, row.row) for row in rows]
        wanted = trainer_logprobs(policy, pairs, temperature, model)
        values = np.concatenate(found(rows, temperature))
        mask = np.concatenate([row.mask for row in rows])
        assert np.abs(values - wanted)[mask].max() < 1e-4 and mask.sum() > 100
        assert np.abs(wanted - trainer_logprobs(policy, pairs, temperature))[mask].max() > 0.01


def test_a_run_learns_the_same_from_a_teacher_that_is_served(teaching):
    chosen = {"teacher": str(teaching.root / "model"), "objective": 0.5, "loss": "sampled_kl"}

    def kl(name, processes=1, **more):
        words = [f"algo.distillation={json.dumps({**chosen, **more})}", "steps=2", "eval.samples=0",
                 "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.temperature=0.8"]
        done = runs.run(teaching.config, teaching.root / name, *words, processes=processes, timeout=PATIENT)
        assert done.returncode == 0, done.stdout + done.stderr + teaching.serve.said()
        return [line["distillation/kl"] for line in runs.metrics(teaching.root / name)]

    whole = kl("folder")
    assert len(whole) == 2 and all(abs(value) > 1e-3 for value in whole)
    for server in psutil.Process(teaching.serve.process.pid).children():
        server.kill()
    assert kl("served", processes=2, **teaching.settings) == pytest.approx(whole, abs=1e-4)
    assert "the server is started again" in teaching.serve.said()
