"""Tools: schema, calls as models write them, what becomes of results and faults, and whole episodes of a scripted
policy with everything else real."""

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import TWO
from tests.helpers import load, settings
from vlrl import Media, Observation, Sample, Task, Tool
from vlrl.config.schema import EnvironmentSettings
from vlrl.engine.base import Request, Sampling, reset_sample
from vlrl.environments.episodes import EpisodeEngine
from vlrl.environments.host import Environments
from vlrl.environments.tools import ToolEnvironment, environment_of, task_tools
from vlrl.errors import TaskError
from vlrl.monitoring.metrics import Clock, group_metrics
from vlrl.rollout.generate import make_group
from vlrl.task.tool_calls import MOST_CALLS, calls_of
from vlrl.types import Completion

RED = Image.new("RGB", (8, 8), "red")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def zoom(box: tuple[int, int, int, int], schema: str = "a", *, times: float = 1.0):
    """Returns a part of the picture,
    enlarged.

    box: left, top, right, bottom."""
    return f"{box} {schema} {times}"


def test_the_schema_is_that_of_the_signature():
    number = {"type": "integer"}
    assert Tool(zoom).schema == {"type": "function", "function": {
        "name": "zoom", "description": "Returns a part of the picture, enlarged.", "parameters": {
            "type": "object", "additionalProperties": False, "required": ["box"], "properties": {
                "box": {"type": "array", "prefixItems": [number] * 4, "minItems": 4, "maxItems": 4,
                        "description": "left, top, right, bottom."},
                "schema": {"type": "string", "default": "a"}, "times": {"type": "number", "default": 1.0}}}}}
    results = [("yes", "yes", 0), (RED, "", 1), (Media(source=RED), "", 1), ([RED, "two", RED], "two", 2),
               (Observation("a", [Media(source=RED)]), "a", 1), ({"a": [1, None]}, '{"a": [1, null]}', 0),
               (None, "null", 0), ([], "[]", 0), (["a", 1], '["a", 1]', 0)]

    def look(i: int):
        """Looks."""
        return results[i][0]

    for i, (_, text, media) in enumerate(results):
        step = ToolEnvironment([Tool(look)]).step(call("look", i=i))
        assert step.info["calls"][0]["error"] is None, text
        assert (step.observation.text, len(step.observation.media)) == (text, media)


def test_calls_are_run_in_order_and_the_others_refused():
    step = ToolEnvironment([Tool(zoom)]).step(
        f"<think>{call('no')}</think>{call('zoom', box=[1, 2, 3, 4])} {call('zoom', box=[0, 0, 1, 1], times=2)}")
    assert not step.done and step.observation.text == "(1, 2, 3, 4) a 1.0\n(0, 0, 1, 1) a 2.0"
    assert step.info == {"calls": [{"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}, "error": None},
                                   {"name": "zoom", "arguments": {"box": [0, 0, 1, 1], "times": 2}, "error": None}]}
    many = ToolEnvironment([Tool(zoom)]).step(call("zoom", box=[1, 2, 3, 4]) * 500)
    errors = [entry["error"] for entry in many.info["calls"]]
    assert errors[:-1] == [None] * MOST_CALLS and "500 calls in one turn; the last 492 were not run" in errors[-1]
    end = ToolEnvironment([Tool(zoom)]).step("It is red.")
    assert end.done and end.info == {"calls": []} and not end.observation.results


def test_a_sample_with_tools_is_played_by_them_and_told_whether_calls_succeeded():
    class Zooming(Task):
        def tools(self, sample):
            return [zoom, lambda: RED] if sample.id == "bad" else [zoom] if sample.id else []

    assert isinstance(environment_of(Zooming(), Sample(id="a")), ToolEnvironment)
    assert environment_of(Zooming(), Sample(id="")) is None
    with pytest.raises(Exception, match=r"tool '<lambda>': a model cannot write this name"):
        environment_of(Zooming(), Sample(id="bad"))
    Zooming.rewards = {"correct": 1.0, "tool_success": 0.0}
    played, good, bad = environment_of(Zooming(), Sample(id="a")), call("zoom", box=[1, 2, 3, 4]), call("zoom")
    assert [played.step(text).parts for text in (good, good + bad, bad, "red")] == [
        {"tool_success": 1.0}, {"tool_success": 0.0}, {"tool_success": 0.0}, {}]
    assert ToolEnvironment([Tool(zoom)]).step(good).parts == {}


def test_wrong_arguments_and_calls_that_are_none_are_named_to_the_model():
    for arguments, says in (
            ({"box": ["3", 1, 1, 1]}, "zoom: box.0: Input should be a valid integer"),
            ({"box": [1, 2, 3]}, "zoom: box.3: Field required"), ({}, "zoom: box: Field required"),
            ({"box": [1, 2, 3, 4], "x": 1}, "zoom: x: Extra inputs are not permitted"),
            ({"box": [1, 2, 3, 4], "schema": None}, "zoom: schema: Input should be a valid string"),
            ({"box": [True, 2, 3, 4]}, "zoom: box.0: Input should be a valid integer")):
        step = ToolEnvironment([Tool(zoom)]).step(call("zoom", **arguments))
        assert step.info["calls"] == [{"name": "zoom", "arguments": arguments, "error": says}], says
        assert step.observation.text == f"Error: {says}" and not step.done
    for text, says in (
            ("", "no JSON"), ('{"name": "zoom", "arguments": {"box": NaN}}', "NaN is no finite number"),
            ('{"name": "zoom", "arguments": {"box": [1e999]}}', "1e999 is no finite number"),
            ('{"name": "zoom", "arguments": {"box": ' + "9" * 5000 + "}}", "no JSON"), ("[" * 19_000, "no JSON"),
            ('{"name": "zoom", "arguments": {"box": ' + "[" * 30 + "]" * 30 + "}}", "nest deeper than 20 levels"),
            ("x" * 10_000_000, "10000000 characters; at most 20000"), ('{"name": 1}', "must hold name and arguments"),
            ("[]", "must hold name and arguments"), ('{"name": "zoom", "arguments": "box"}', "must be an object"),
            ('{"name": "zoom", "arguments": {}, "id": 1}', "must hold name and arguments"),
            ('{"name": "zoomx"}', "no tool 'zoomx'; there are zoom"), ("<tool_call>{}", "a call is not closed")):
        step = ToolEnvironment([Tool(zoom)]).step(f"<tool_call>{text}</tool_call>")
        assert says in step.info["calls"][0]["error"] and not step.done, says
        assert step.observation.text.startswith("Error: ") and len(step.observation.text) < 1200, says


def test_a_tool_that_fails_or_returns_what_cannot_be_shown():
    lazy = io.BytesIO()
    Image.effect_noise((64, 64), 40).save(lazy, "PNG")
    cut = io.BytesIO(lazy.getvalue()[:1000])

    def bad(kind: str):
        """Fails."""
        if kind == "raise":
            raise KeyError("lost")
        if kind == "exit":
            raise SystemExit(3)
        return {"set": {1}, "nan": float("nan"), "bomb": Image.new("1", (10_000, 10_000)),
                "media": Observation(media=[1]), "cut": Image.open(cut), "text": "x" * 50_000}[kind]

    tools = ToolEnvironment([Tool(bad)])
    for kind, says in {"raise": "bad: KeyError: 'lost'", "exit": "bad: SystemExit: 3", "set": "bad returned set, which",
                       "nan": "bad returned float", "bomb": "an image of 10000x10000 pixels",
                       "cut": "bad returned an image that cannot be shown",
                       "media": "something other than text and Media"}.items():
        step = tools.step(call("bad", kind=kind) + call("bad", kind="text"))
        assert says in step.info["calls"][0]["error"] and step.info["calls"][1]["error"] is None, kind
        assert step.observation.text.endswith("[cut: 10000 of 50000 characters are shown]")


def untyped(box):
    """Has no type."""


def undocumented(box: int):
    return box


def starred(*box: int):
    """Takes any number."""


def pictured(box: Image.Image):
    """Takes what JSON cannot hold."""


def test_functions_that_are_no_tools_and_names_there_twice():
    for function, says in (
            (untyped, "'untyped': the argument 'box' has no type"), (undocumented, "'undocumented' has no docstring"),
            (starred, "'starred': the argument 'box' cannot be passed by name"), (pictured, "tool 'pictured': ")):
        with pytest.raises(TaskError, match=re.escape(says)):
            Tool(function)
    class Twice(Task):
        def tools(self, sample):
            return [zoom, Tool(zoom)]

    with pytest.raises(TaskError, match="two tools of sample 's' are named 'zoom'"):
        task_tools(Twice(), Sample(id="s"))


ZOOM = ToolEnvironment([Tool(zoom)])
PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "</think>", '{"name": "zoom", "arguments": {"box": [1]}}',
                          '{"name":', "[", "{", '"a"', "NaN", "\ud800", "1e999", "\0", " "])


@given(st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_any_text_is_read(text):
    calls = calls_of(text)
    assert len(calls) <= MOST_CALLS + 1
    step = ZOOM.step(text)
    assert len(step.info["calls"]) == len(calls) == len(step.observation.results) and step.done == (not calls)
    assert len(json.dumps(step.info)) < 100_000 and len(step.observation.text) < 20_000


ACTIONS = [call("look", width=96) + call("look", width="96"), call("look", width=3000), "It is red."]


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
