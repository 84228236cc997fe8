"""Episodes with vLLM, in this process and in a server: every turn is the trainer's, images of later turns included."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from benchmarks.episodes_exact import SYNCS, per_turn, playing, settings
from tests.e2e import forked
from tests.e2e.runs import ROOT
from tests.environments.test_episodes import TASK, actions, run
from tests.vllm.test_server import FORKED, free_ports, serving, serving_environment, until
from tests.vllm.test_turns import windowed
from vlrl.engine.vllm.episode_check import first_difference
from vlrl.errors import TrainingError

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
EXACT = 1e-4
SMALL = ("eval.samples=0", "engine.max_seqs=8", "limits.prompt_tokens=512", "episode.max_tokens=512")


def check(folder):
    """The rows of a run: in every action the trainer has the engine's log-probabilities."""
    rows = folder.rollouts().to_pylist()
    assert len(rows) == 8 and all(r["error"] is None and len(actions(r)) == 3 for r in rows)
    for row in rows:
        gaps = np.abs(np.array(row["logprobs"]) - np.array(row["trainer_logprobs"]))
        mask = np.array(row["loss_mask"])
        assert mask.any() and gaps[mask].max() < EXACT and {m["kind"] for m in row["media"]} == {"image"}


def test_a_run_with_a_server(tiny_models, tmp_path):
    """`vlrl serve` makes room for whole episodes by itself."""
    config, port = tmp_path / "serve.yaml", free_ports()
    config.write_text(json.dumps({"task": TASK, "model": {"name": str(tiny_models["qwen2_5_vl"])},
                                  "engine": "vllm_server", "rollout": {"max_new_tokens": 6},
                                  "run": {"dir": str(tmp_path / "run")}}))
    about = tmp_path / "run-servers" / "servers.json"
    with (tmp_path / "log").open("w") as log:
        serve = forked.Process([serving(tmp_path, FORKED), "serve", config, "--port", port, *SMALL[1:]],
                               serving_environment(), ROOT, log, log)
    try:
        until(lambda: about.exists() or serve.poll() is not None, "the server does not start")
        assert about.exists(), (tmp_path / "log").read_text()
        found = json.loads(about.read_text())
        check(run(tmp_path / "run", tiny_models["qwen2_5_vl"], "engine=vllm_server", *SMALL,
                  f"engine.servers=[{found['servers'][0]}]", f"engine.key_file={found['key_file']}"))
    finally:
        serve.terminate()
        serve.wait(120)


@pytest.fixture(scope="module", params=[("qwen3_vl", "full"), ("qwen2_5_vl", "LoRA")], ids="-".join)
def play(request, tiny_models, tmp_path_factory):
    family, mode = request.param
    with playing(settings(tiny_models[family], mode, "vllm"), tmp_path_factory.mktemp("play")) as made:
        yield made


def test_every_turn_agrees_after_each_sync(play, monkeypatch):
    """No cache is left of images seen with other weights; ids of earlier turns are the sampled ones (sglang#12383)."""
    for _ in range(SYNCS):
        play.sync()
        for prompt, completion in play.episodes():
            assert len(completion.observed_media) == 4 and max(per_turn(play, prompt, completion)) < EXACT
            assert first_difference(play.policy, play.encode, prompt, completion, EXACT) is None
    for prompt, completion in windowed(play, monkeypatch):
        assert len(completion.windows) == 4
        assert first_difference(play.policy, play.encode, prompt, completion, EXACT) is None


def test_other_ids_in_a_later_turn_are_named_with_it(play, monkeypatch):
    engine, asked = play.engine.engine, []
    monkeypatch.setattr(play.engine, "engine", type("", (), {
        "generate": lambda self, requests: asked.extend(requests) or engine.generate(requests)})())
    play.episodes(1)
    request = next(r for r in asked if len(r.turns) == 4)
    first, observed = len(request.prompt) - request.turns[-1].end, request.turns[1]
    ids = request.prompt.ids.copy()
    ids[[first + observed.start + 2, -1]] += 1
    with pytest.raises(TrainingError, match=r"turn 1 \(observation\), token 2 of \d+, media [0-9a-f]{12}\) on"):
        engine.generate([replace(request, prompt=replace(request.prompt, ids=ids))])


def test_the_proof_of_a_sync_reads_an_image_of_a_second_turn(play):
    engine = play.engine.engine
    proof, read = engine._proof, engine.weights.logprobs
    first, second = proof.prompt.media
    turned = replace(second, frames=tuple(f.transpose(Image.Transpose.ROTATE_180) for f in second.frames))
    other = replace(proof.prompt, media=(first, turned))
    with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities"):
        proof.check(play.policy, lambda prompt, answer: read(other, answer))
    assert proof.check(play.policy, read) < EXACT
