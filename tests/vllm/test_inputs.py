"""What is said to vLLM and made of its answers, without vLLM: against what the HF engine gives."""

import dataclasses
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES, TWO
from tests.helpers import Vowels, load, settings
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.engine.vllm.engine import _blamed, options
from vlrl.engine.vllm.inputs import (
    Draft,
    SamplingRules,
    check_lengths,
    check_prompt,
    checked_completions,
    measuring_options,
    prompt_input,
    sampling_options,
    seed_of,
)
from vlrl.errors import ConfigError, TrainingError
from vlrl.types import Turn

PLAIN = Sampling(max_new_tokens=24)


@pytest.fixture(scope="module", params=TWO)
def tiny(request, tiny_models):
    config = settings(tiny_models[request.param])
    policy, encode = load(config)
    prompts = {kind: encode(Vowels(), sample) for kind, sample in SAMPLES.items()}
    return SimpleNamespace(policy=policy, config=config, prompts=prompts, rules=SamplingRules.of(policy))


def test_media_go_in_raw_beside_unexpanded_ids(tiny):
    two, video, text = (tiny.prompts[kind] for kind in ("two images", "video", "text"))
    given = prompt_input(two, np.array([7, 8]))
    assert given["prompt_token_ids"] == [*two.raw_ids.tolist(), 7, 8] and len(two.raw_ids) < len(two.ids)
    assert given["multi_modal_data"] == {"image": [m.frames[0] for m in two.media]}
    assert prompt_input(text) == {"prompt_token_ids": text.ids.tolist()}
    ((frames, metadata),) = prompt_input(video)["multi_modal_data"]["video"]
    assert frames.shape == (4, 64, 64, 3) and frames.dtype == np.uint8 and metadata["do_sample_frames"] is False
    assert [i / metadata["fps"] for i in metadata["frames_indices"]] == list(video.media[0].timestamps)


def test_other_ids_are_refused(tiny):
    prompt = tiny.prompts["image"]
    check_prompt(prompt, prompt.ids.tolist())
    check_prompt(prompt, [*prompt.ids.tolist(), 1, 2], written=2)
    for wrong, at in (([*prompt.ids.tolist(), 1], len(prompt)), (prompt.ids.tolist()[:-1], len(prompt) - 1),
                      ([0, *prompt.ids.tolist()[1:]], 0)):
        with pytest.raises(TrainingError, match=f"^sample 'image': .* differ from token {at} on.*engine.name=hf"):
            check_prompt(prompt, wrong)
    turns = [Turn(start=0, end=2), Turn(start=2, end=5, role="observation", media=("ab" * 32,))]
    whole = prompt.followed_by(np.arange(5))
    for at, named in ((3, "turn 1 (observation), token 1 of 3, media abababababab"), (0, "turn 0 (assistant), token 0"),
                      (-1, "")):
        ids = whole.ids.copy()
        ids[len(prompt) + at] += 1
        said = f"from token {len(prompt) + at} {'(' if named else ''}{named}"
        with pytest.raises(TrainingError, match=re.escape(said)):
            check_prompt(whole, ids.tolist(), turns=turns)


def test_an_answer_must_have_room_and_be_one_to_train_on(tiny):
    prompt = tiny.prompts["image"]
    wanted = len(prompt) + 24
    requests = [Request(prompt=prompt, n=1, sampling=PLAIN)]
    check_lengths(requests, wanted, given=True)
    with pytest.raises(ConfigError, match=rf"engine\.max_model_len={wanted - 1} is too small.*Set it to {wanted}"):
        check_lengths(requests, wanted - 1, given=True)
    with pytest.raises(ConfigError, match=rf"max_model_len=null \(here {wanted - 1}\) is too small"):
        check_lengths(requests, wanted - 1, given=False)
    prompt, banned = tiny.prompts["text"], int(tiny.policy.banned[0])
    draft = Draft(PLAIN, tiny.rules, 0)
    draft.add([5], [float("nan")])
    with pytest.raises(TrainingError, match=r"not finite.*engine\.dtype"):
        checked_completions([draft], prompt)
    draft = Draft(PLAIN, tiny.rules, 0)
    draft.add([banned], [-1.0])
    with pytest.raises(TrainingError, match=f"sampled the banned token {banned}"):
        checked_completions([draft], prompt)


def test_sampling_means_what_it_means_to_the_hf_engine(tiny):
    rules = dataclasses.replace(tiny.rules, top_p=0.9, top_k=40)
    said = sampling_options(dataclasses.replace(PLAIN, temperature=0.7, stop=("x",)), 5, 11, rules)
    assert said["n"] == 5 and said["seed"] == 11 and said["max_tokens"] == 24 and said["temperature"] == 0.7
    assert (said["top_p"], said["top_k"], said["logprobs"]) == (0.9, 40, 0)
    assert said["stop"] == ["x"] and said["include_stop_str_in_output"] and not said["skip_special_tokens"]
    assert set(said["stop_token_ids"]) == tiny.policy.eos and said["ignore_eos"]
    assert said["logit_bias"] == dict.fromkeys(tiny.policy.banned.tolist(), float("-inf"))
    assert sampling_options(PLAIN, 1, 0, rules, room=3)["max_tokens"] == 3
    with pytest.raises(ConfigError, match=r"temperature is 2\.5, and vLLM's maximum is 2.*rollout\.temperature"):
        sampling_options(dataclasses.replace(PLAIN, temperature=2.5), 1, 0, rules)
    said = measuring_options(dataclasses.replace(PLAIN, temperature=0.7, stop=("x",)), 17, rules)
    assert (said["top_p"], said["top_k"], said["temperature"]) == (1.0, -1, 0.7)
    assert (said["n"], said["max_tokens"], said["logprob_token_ids"], said["stop"]) == (1, 1, [17], [])
    assert said["logit_bias"] == sampling_options(PLAIN, 1, 0, rules)["logit_bias"]
    seeds, again = ([seed_of(3, (0, 5)), seed_of(3, (0, 6)), seed_of(4, (0, 5)), seed_of(3, (5, 5)),
                     *(seed_of(3, (0, 5), i, t) for i in range(4) for t in (0, 4, 9))] for _ in range(2))
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**62 for s in seeds) and seeds == again


def written(draft, source, more=()):
    """The completion of a draft that is fed the tokens of another engine's, part by part; `more` comes behind them."""
    tokens, logprobs = [*source.tokens.tolist(), *more], [*source.logprobs.tolist(), *([-1.0] * len(more))]
    while True:
        for place in draft.force():
            assert np.isnan(draft.logprobs[place])
            draft.logprobs[place] = logprobs[place]
        if draft.ended:
            return draft.completion()
        start, room = len(draft.tokens), draft.room()
        assert room > 0
        part = tokens[start:start + room]
        assert part, "the draft wants more than the answer has"
        draft.add(part, logprobs[start:start + room])


def same(a, b):
    assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
    assert a.loss_mask.tolist() == b.loss_mask.tolist() and (a.tokens.dtype, a.logprobs.dtype) == (np.int64, np.float32)
    assert (a.text, a.finish_reason, a.turns) == (b.text, b.finish_reason, b.turns)


def test_a_draft_becomes_what_the_hf_engine_gives(tiny):
    """Whatever an engine wrote behind the end is dropped."""
    for sampling in (
            {}, {"max_new_tokens": 2}, {"thinking_budget": 5}, {"thinking_budget": 5, "max_new_tokens": 7},
            {"thinking_budget": 2, "stop": ("</think>",)}, {"stop": ("e", "ing", " a")},
            {"thinking_budget": 6, "stop": ("a",), "thinking_end": "</think><answer>"}):
        sampling = dataclasses.replace(PLAIN, **sampling)
        request = Request(prompt=tiny.prompts["text"], n=12, sampling=sampling)
        (answers,) = HFEngine(tiny.policy, 2, 64).generate([request])
        behind = [int(tiny.rules.texts.ids("one more").tolist()[0])] * 30
        for c in answers:
            same(written(Draft(sampling, tiny.rules, 0), c, behind if c.finish_reason == "stop" else ()), c)
        assert not sampling.stop or any(c.finish_reason == "stop" and int(c.tokens[-1]) not in tiny.policy.eos
                                        for c in answers)


def test_a_begun_draft_becomes_what_the_hf_engine_gives(tiny):
    """Before, within and behind the closing text; a stop string may reach back into what was written before."""
    for first in (3, 6, 9):
        sampling = dataclasses.replace(PLAIN, thinking_budget=5, stop=("qu", "er"))
        short = dataclasses.replace(sampling, max_new_tokens=first)
        engine = HFEngine(tiny.policy, 2, 64)
        (parts,) = engine.generate([Request(prompt=tiny.prompts["text"], n=12, sampling=short)])
        begun = tuple(AnswerPrefix(index=i, written=c) for i, c in enumerate(parts) if c.truncated)
        (grown,) = engine.generate([Request(prompt=tiny.prompts["text"], n=len(begun), sampling=sampling, begun=begun)])
        assert len(begun) > 3, first
        for b, c in zip(begun, grown, strict=True):
            same(written(Draft(sampling, tiny.rules, b.index, b.written), c), c)


def test_options_of_a_gpu_are_left_out_on_a_cpu(tiny, tmp_path):
    config = settings("x", engine={"name": "vllm", "memory": 0.4, "dtype": "bfloat16", "max_seqs": 9}, seed=6)
    cpu = options(tiny.policy, config, tmp_path, 128)
    assert (cpu["gpu_memory_utilization"], cpu["dtype"], cpu["max_num_seqs"], cpu["seed"]) == (0.4, "bfloat16", 9, 6)
    assert cpu["enforce_eager"] and "enable_sleep_mode" not in cpu and "distributed_executor_backend" not in cpu
    assert cpu["logprobs_mode"] == "processed_logprobs" and cpu["enable_prefix_caching"] and cpu["max_model_len"] == 128
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    gpu = options(on_gpu, settings("x", engine={"name": "vllm", "sleep": False}), tmp_path, 128)
    assert not gpu["enforce_eager"] and gpu["enable_sleep_mode"] is False and gpu["dtype"] == "float16"
    for text, setting in (
            ("Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization",
            "memory=0.3"),
            ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "memory=0.3"),
            ("To serve at least one request with the models's max seq len (9000), 1 GiB KV cache is needed",
            "max_model_len="),
            ("User-specified max_model_len (9) is greater than the derived max_model_len", "max_model_len="),
            ("World size (2) is larger than the number of available GPUs: tensor_parallel_size", "tensor_parallel=1"),
            ("Model architectures ['X'] are not supported for now", "name=vllm")):
        assert _blamed(settings("x", engine={"name": "vllm"}), ValueError(text)).startswith(f"engine.{setting}")


def test_a_torchcodec_that_cannot_be_loaded_is_hidden(tmp_path, monkeypatch):
    from vlrl import _torchcodec

    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec/__init__.py").write_text("from . import broken\n")
    (tmp_path / "torchcodec/broken.py").write_text("raise OSError('no CUDA')\n")
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "torchcodec"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        _torchcodec.hide_broken()
        with pytest.raises(ImportError):
            import torchcodec  # noqa: F401  # pyright: ignore[reportMissingImports]
        _torchcodec.hide_broken()  # once more
    finally:
        sys.modules.pop("torchcodec", None)
