"""A teacher of algo.distillation behind a real `vlrl serve`: its numbers are those of that teacher from a folder."""

import json
import signal
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tests.e2e import forked, runs
from tests.e2e.runs import ROOT
from tests.helpers import credited_groups, load
from tests.training.test_distillation import moved, of
from tests.vllm.conftest import trainer_logprobs
from tests.vllm.test_server import FORKED, PATIENT, free_ports, serving, serving_environment, until
from vlrl.methods.distillation import teacher
from vlrl.training.minibatch import make_minibatch, split

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def served(installed, tiny_models, tmp_path_factory):
    root, folder = tmp_path_factory.mktemp("teacher"), tiny_models["qwen3_vl"]
    away, _ = load(of(folder))
    moved(away, 0.05)
    away.save(root / "model")
    (root / "model" / "trainer_state.safetensors").write_bytes(b"of a checkpoint; no weights of the model")
    config, port = runs.write_config(root, folder), free_ports()
    words = [serving(root, FORKED), "serve", config, "--port", port, "--folder", root / "servers", "--weights",
             root / "model", f"model.name={root / 'model'}", "model.dtype=float32", "engine.max_seqs=32"]
    with (root / "serve.log").open("w") as log:
        process = forked.Process(words, serving_environment(), ROOT, log, log)
    said = (root / "serve.log").read_text
    about = root / "servers" / "servers.json"
    try:
        until(lambda: about.exists() or process.poll() is not None, said)
        assert process.poll() is None, said()
        yield SimpleNamespace(root=root, folder=folder, config=config, process=process, said=said, settings={
            "loss": "sampled_kl", "server": f"http://127.0.0.1:{port}", "key_file": str(root / "servers" / "key")})
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENT)
        psutil.wait_procs(left, timeout=60)


def test_log_probabilities_are_those_of_the_folder(served):
    """Of answers to pictures, videos and texts, by choices that temperature and banned ids change."""
    config = of(served.folder, served.root / "model", rollout={"max_new_tokens": 24}, **served.settings)
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


def test_a_run_learns_the_same(served):
    chosen = {"teacher": str(served.root / "model"), "objective": 0.5, "loss": "sampled_kl"}

    def kl(name, processes=1, **more):
        words = [f"algo.distillation={json.dumps({**chosen, **more})}", "steps=2", "eval.samples=0",
                 "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.temperature=0.8"]
        done = runs.run(served.config, served.root / name, *words, processes=processes, timeout=PATIENT)
        assert done.returncode == 0, done.stdout + done.stderr + served.said()
        return [line["distillation/kl"] for line in runs.metrics(served.root / name)]

    whole = kl("folder")
    assert len(whole) == 2 and all(abs(value) > 1e-3 for value in whole)
    for server in psutil.Process(served.process.pid).children():
        server.kill()
    assert kl("served", processes=2, **served.settings) == pytest.approx(whole, abs=1e-4)
    assert "the server is started again" in served.said()
