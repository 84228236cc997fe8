"""Several training processes (torchrun, gloo) with vLLM: one engine in each, or servers that all of them share.

Two processes give what one gives: the same groups under the same ids, the same answers, from the policy that learns."""

import json
import re
import shutil
from importlib.util import find_spec
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, TASK, metrics, weights
from tests.vllm.noting import Noting
from tests.vllm.serve import PATIENT, Serve, free_ports
from vlrl import config as configs
from vlrl.engine.vllm.client import ServerClient
from vlrl.engine.vllm.server import read_key
from vlrl.training.loop import train

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
PROMPTS, GROUP, STEPS = 5, 3, 3
"""An odd number of prompts: one process has more than the other."""
LEARNS = {"full": (), "lora": ("model.lora.rank=4", "model.lora.target=language", "model.train=[]")}
FAULTY = '''
import os
import re
import signal

_FAULT, _RANK = os.environ.get("FAULT"), os.environ.get("RANK")
_TRAINER = os.getpid()  # a reward runs in a process of its own


class Faulty(Shades):
    """The second process meets what `FAULT` says in its second step: an overlong prompt, or its own death."""

    def messages(self, sample):
        found = super().messages(sample)
        if _FAULT == "long" and sample.id == "train-6":  # drawn second in the second step
            found[-1]["content"][-1]["text"] *= 300
        return found

    def score(self, sample, answer):
        if _FAULT == "kill" and _RANK == "1" and answer.step == 1:
            os.kill(_TRAINER, signal.SIGKILL)
        return super().score(sample, answer)
'''


def write_config(folder, model, engine):
    """A short run whose pictures differ in size; samples are drawn in order."""
    (folder / "shades.py").write_text(TASK.replace('(64, 64)', '(64, 64) if i % 3 else (128, 96)') + FAULTY)
    config = folder / "run.json"  # JSON is YAML
    config.write_text(json.dumps({
        "steps": STEPS, "task": f"{folder}/shades.py:Faulty", "seed": 5,
        "model": {"name": str(model), "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": 8},
        "train": {"lr": 1e-3, "tokens_per_batch": 400}, "eval": {"every": STEPS, "samples": 5},
        "save": {"every": 1, "keep": 5}, "curriculum": {"name": "sequential"},
        "engine": {"max_model_len": 256, "max_seqs": 32, **engine}, "run": {"dir": str(folder / "run")}}))
    return config.rename(folder / "run.yaml")


def one(config, folder, *words):
    loaded = configs.load(str(config), [*words, f"run.dir={folder}", "log.samples_every=0"])
    return ran(train(loaded, make_session=Noting).folder.path, 1)


def program(config, folder, *words):
    return [str(ROOT / "tests/vllm/noting.py"), str(config), f"run.dir={folder}", *words, "log.samples_every=0"]


def two(config, folder, *words):
    """A run of two processes, with no launcher."""
    done = forked.run(program(config, folder, *words), ENV, folder.parent, PATIENT, processes=2)
    assert done.returncode == 0, done.stderr
    return ran(folder, 2)


def failing(config, folder, *words, fault):
    done = forked.run(program(config, folder, *words), {**ENV, "FAULT": fault}, folder.parent, PATIENT, processes=2)
    assert done.returncode != 0 and "loop.py" not in done.stderr, done.stderr  # no traceback of vlrl's
    return done.stderr


def ran(folder, world):
    """A finished run: the rows of each of its files, its metrics, and what each process noted."""
    def files(name):
        return [pq.read_table(path).to_pylist() for path in sorted((folder / name).glob("*.parquet"))]

    noted = [json.loads(folder.with_name(f"{folder.name}-noted-{rank}.json").read_text()) for rank in range(world)]
    return SimpleNamespace(folder=folder, files=files("rollouts"), evals=files("eval-rollouts"), noted=noted,
                           metrics=metrics(folder))


def rows(files, *columns):
    return sorted([r["step"], r["group_id"], r["index"], *(r[c] for c in columns)] for part in files for r in part)


def assert_alike(single, double):
    """Two processes drew and answered what one does, each group whole and once, from the policy that learned."""
    assert len(double.files) == 2 * STEPS and all(double.files)
    for part in double.files:
        blocks = [[r["index"] for r in block] for _, block in groupby(part, lambda r: r["group_id"])]
        assert blocks == [[*range(GROUP)]] * len(blocks)
    assert rows(double.files, "sample_id") == rows(single.files, "sample_id")
    assert len(rows(double.files)) == STEPS * PROMPTS * GROUP
    first = [[r for r in rows(run.files, "token_ids", "reward") if r[0] == 0] for run in (single, double)]
    assert first[0] == first[1]
    assert rows(single.evals, "completion", "token_ids") == rows(double.evals, "completion", "token_ids")
    for part in double.files:
        for row in part:
            assert np.abs(np.array(row["logprobs"]) - row["trainer_logprobs"]).max() < 1e-5
            assert row["policy_step"] == row["step"]
    for a, b in zip(single.metrics, double.metrics, strict=True):
        assert 0 <= b["mismatch/kl"] < 1e-9 and b["mismatch/gap_max"] < 1e-5
        assert b["reward/mean"] == pytest.approx(a["reward/mean"], rel=0 if b["step"] == 0 else 1e-3)
    assert len({noted["weights"] for noted in double.noted}) == 1


@pytest.fixture(scope="module")
def inside(installed, tiny_models, tmp_path_factory):
    """The config, and the finished run of two processes with a vLLM in each."""
    root = tmp_path_factory.mktemp("inside")
    config = write_config(root, tiny_models["qwen3_vl"], {"name": "vllm"})
    return config, two(config, root / "two")


def test_an_engine_in_each_process(inside):
    config, double = inside
    assert_alike(one(config, config.parent / "one"), double)
    for noted in double.noted:
        assert noted["compared"] > 20 and not noted["differing"]
    assert not (double.folder / "engine").exists()


def test_processes_with_engines_resume(inside):
    """From the second step on, as if the run had ended there."""
    config, double = inside
    broken = config.parent / "broken"
    shutil.copytree(double.folder, broken)
    shutil.rmtree(broken / "checkpoints" / f"step-{STEPS:06d}")
    again = two(config, broken, "resume=must")
    assert weights(broken, STEPS) == weights(double.folder, STEPS) != weights(double.folder, 1)
    assert again.metrics == double.metrics and again.noted == double.noted
    assert again.files == double.files and again.evals == double.evals


@pytest.fixture(scope="module")
def served(installed, tiny_models, tmp_path_factory):
    """Two servers, and the config of runs that share them; they have room for adapters."""
    root = tmp_path_factory.mktemp("served")
    config = write_config(root, tiny_models["qwen3_vl"], {"name": "vllm_server"})
    serve = Serve(root, "servers", config, *LEARNS["lora"], "--replicas", 2, "--port", free_ports())
    try:
        words = (*serve.ready(), f"engine.timeout_s={PATIENT}")
        client = ServerClient(read_key(serve.key_file), PATIENT)
        yield SimpleNamespace(config=config, root=root, words=words, servers=serve.servers,
                              state=lambda address: client.get(address, "/vlrl/state"))
        client.close()
    finally:
        assert serve.close()[0] == 130


@pytest.fixture(scope="module", params=LEARNS)
def shared(request, served):
    """The finished run of two processes that shared two servers, by what learns, and its settings."""
    words = (*served.words, *LEARNS[request.param])
    double = two(served.config, served.root / f"{request.param}-two", *words)
    return double, words, request.param, [served.state(address)["version"] for address in served.servers]


def test_two_processes_share_two_servers(served, shared):
    double, words, learns, versions = shared
    assert_alike(one(served.config, served.root / f"{learns}-one", *words), double)
    for noted in double.noted:
        assert (noted["way"], noted["adapter"]) == (("adapter", True) if learns == "lora" else ("full", False))
        assert noted["version"] == versions[0] == versions[1]
        assert {*noted["asked"]} == {*served.servers} and all(noted["asked"].values())
    assert [*double.noted[0]["asked"]] == [*reversed(double.noted[1]["asked"])]  # not all begin with the same server


def test_processes_that_failed_or_died_go_on_with_the_same_servers(served, shared):
    """A row stops one of them, then a signal; in the end the run is the unbroken one."""
    double, words, learns, _ = shared
    if learns == "lora":
        pytest.skip("once is enough")
    broken = served.root / "broken"
    said = failing(served.config, broken, *words, fault="long")
    assert said.count("error: engine.max_model_len=256 is too small for sample 'train-6'") == 2, said
    assert checkpoints(broken) == ["step-000001"]
    said = failing(served.config, broken, *words, fault="kill")
    assert re.search(r"rank 0 waited .* for rank 1", said), said
    assert checkpoints(broken) == ["step-000001"]
    again = two(served.config, broken, *words, "resume=must")
    assert weights(broken, STEPS) == weights(double.folder, STEPS)
    assert rows(again.files, "token_ids", "reward") == rows(double.files, "token_ids", "reward")
    assert again.noted[0]["weights"] == double.noted[0]["weights"] == again.noted[1]["weights"]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))
