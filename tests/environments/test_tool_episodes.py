"""Episodes with tools: a scripted policy, everything else real."""

import pytest
from PIL import Image

from tests.conftest import TWO
from tests.helpers import load, settings
from vlrl import Sample, Task
from vlrl.config.schema import EnvironmentSettings
from vlrl.engine.base import Request, Sampling, reset_sample
from vlrl.environments.episodes import EpisodeEngine
from vlrl.environments.host import Environments
from vlrl.monitoring.metrics import Clock, group_metrics
from vlrl.rollout.generate import make_group
from vlrl.types import Completion

LOOK = '<tool_call>{{"name": "look", "arguments": {{"width": {}}}}}</tool_call>'
ACTIONS = [LOOK.format(96) + LOOK.format('"96"'), LOOK.format(3000), "It is red."]


class Looking(Task):
    prompt = "Which colour?"
    rewards = {"correct": 1.0, "tool_success": 0.0}

    def tools(self, sample):
        def look(width: int):
            """Shows a picture."""
            return [Image.new("RGB", (width, 10), "red"), f"{width} wide"]

        return [look]

    def score(self, sample, answer):
        return {"correct": float("red" in answer.text and len(answer.turns) == 3)}


class Scripted:
    """Writes ACTIONS, one a turn."""

    def __init__(self, encode):
        self.encode, self.prompts = encode, []

    def generate(self, requests, done=None):
        return [[self.written(r) for _ in range(r.n)] for r in requests]

    def written(self, request):
        self.prompts.append(request.prompt)
        text = ACTIONS[request.key[-1] if request.key[0] == 7 else 0]
        tokens = self.encode.answer_ids(text)
        return Completion(tokens=tokens, logprobs=0.0 * tokens, loss_mask=tokens >= 0, text=text, finish_reason="stop")

    def close(self):
        pass


@pytest.mark.parametrize("family", TWO)
def test_calls_are_answered_and_counted(tiny_models, family):
    config = settings(tiny_models[family])
    policy, encode = load(config)
    task, script = Looking(), Scripted(encode)
    environments = Environments(lambda _: task, EnvironmentSettings(workers=1))
    engine = EpisodeEngine(script, encode, environments, config, Clock())
    try:
        sample = reset_sample(engine, task, Sample(id="s"), 0)
        prompt = encode(task, sample)
        request = Request(prompt=prompt, n=2, sampling=Sampling(max_new_tokens=200), key=(0, 0), sample=sample)
        (completions,) = engine.generate([request])
    finally:
        engine.close()
    assert "Shows a picture." in prompt.text
    for done in completions:
        assert done.finish_reason == "stop" and done.error is None and len(done.observed_media) == 1
        acted, shown = done.turns[::2], done.turns[1::2]
        assert [t.text for t in acted] == ACTIONS and [len(t.media) for t in shown] == [1, 0, 0]
        assert acted[0].info == {"calls": [
            {"name": "look", "arguments": {"width": 96}, "error": None},
            {"name": "look", "arguments": {"width": "96"}, "error": "look: width: Input should be a valid integer"}]}
        (refused,) = acted[1].calls  # a picture that the model's processor does not take ends no episode
        assert "the processor refuses it" in refused["error"] and shown[1].text == f"Error: {refused['error']}"
        assert [turn.parts for turn in acted] == [{"tool_success": 0.0}, {"tool_success": 0.0}, {}]
        assert acted[2].info == {"calls": []} and acted[2].done
        text = policy.processor.tokenizer.decode(done.tokens[acted[0].end:acted[1].start])
        assert text.count("<tool_response>") == 2 and "96 wide\n</tool_response>\n<tool_response>\nError: look" in text
        pads = (done.tokens == policy.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum()
        assert pads == script.prompts[-1].visual_tokens[0] > 0
    group = make_group(task, sample, prompt, completions, group_id="g", split="train", step=0)
    assert [r.reward for r in group.rollouts] == [1, 1]
    found = group_metrics([group], ())
    assert found["episode/tool_calls_mean"] == 3 and found["episode/tool_errors_frac"] == pytest.approx(2 / 3)
