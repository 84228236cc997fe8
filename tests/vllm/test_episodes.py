"""Episodes with vLLM, in this process and in a server: every turn is the trainer's, images of later turns included."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
from PIL import Image

from benchmarks.episodes_exact import per_turn, playing, settings
from tests.environments.test_episodes import TASK, actions, run
from tests.vllm.serve import Serve, free_ports
from tests.vllm.test_turns import windowed
from vlrl.engine.vllm.episode_check import first_difference
from vlrl.errors import TrainingError

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
EXACT = 1e-4
SMALL = ("eval.samples=0", "engine.max_seqs=8", "limits.prompt_tokens=512", "episode.max_tokens=512")


def test_a_run_with_a_server(tiny_models, tmp_path):
    """`vlrl serve` makes room for whole episodes by itself; its processes, started as a user's, end with it. In every
    action the trainer has the engine's log-probabilities."""
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"task": TASK, "model": {"name": str(tiny_models["qwen2_5_vl"])},
                                  "engine": "vllm_server", "rollout": {"max_new_tokens": 6},
                                  "run": {"dir": str(tmp_path / "run")}}))
    serve = Serve(tmp_path, "servers", config, "--port", free_ports(), *SMALL[1:], settings="")
    try:
        folder = run(tmp_path / "run", tiny_models["qwen2_5_vl"], "engine=vllm_server", *SMALL, *serve.ready())
        family = psutil.Process(serve.process.pid).children(recursive=True)
    finally:
        serve.process.kill()
    assert len(family) > 1 and not psutil.wait_procs(family, timeout=120)[1]
    rows = folder.rollouts().to_pylist()
    assert len(rows) == 8 and all(r["error"] is None and len(actions(r)) == 3 for r in rows)
    for row in rows:
        gaps, mask = np.abs(np.subtract(row["logprobs"], row["trainer_logprobs"])), np.array(row["loss_mask"])
        assert mask.any() and gaps[mask].max() < EXACT and {m["kind"] for m in row["media"]} == {"image"}


@pytest.fixture(scope="module", params=[("qwen3_vl", "full"), ("qwen2_5_vl", "LoRA")], ids="-".join)
def play(request, tiny_models, tmp_path_factory):
    family, mode = request.param
    with playing(settings(tiny_models[family], mode, "vllm"), tmp_path_factory.mktemp("play")) as made:
        yield made


def test_every_turn_agrees_after_each_sync(play, monkeypatch):
    """No cache is left of images seen with other weights; ids of earlier turns are the sampled ones (sglang#12383)."""
    for _ in range(2):
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
    with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities"):
        proof.check(play.policy, lambda prompt, answer: read(replace(proof.prompt, media=(first, turned)), answer))
    assert proof.check(play.policy, read) < EXACT
