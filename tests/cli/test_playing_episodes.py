"""`vlrl play` where a task has an environment or tools: a person's actions, turn by turn."""

import json
from pathlib import Path

import pytest

from tests.cli.test_scoring import QUICKSTART, call, typed

TASK = '''
from PIL import Image
from vlrl import Environment, Media, Observation, Sample, Step, Task


class Dial(Environment):
    def __init__(self, goal):
        self.goal, self.level = goal, 0

    def shown(self, text):
        return Observation(text, [Media(source=Image.new("RGB", (32, 32), (60 * self.level, 0, 0)))])

    def reset(self, seed):
        return self.shown("The lamp is off.")

    def step(self, action):
        if "break" in action:
            raise ValueError("broken")
        self.level += "up" in action
        return Step(self.shown(f"\\x1b[2JLevel {self.level}."), {"nearer": 1.0 if "up" in action else -0.5},
                    done=self.level == self.goal, state=self.level, info={"level": self.level})


class Lamp(Task):
    prompt = "Bring the lamp to {goal}."
    rewards = {"nearer": 1.0}
    perfect: bool = True

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"goal": 2 + i, "plain": i == 3}) for i in range(4)]

    def environment(self, sample):
        return None if sample["plain"] else Dial(sample["goal"])

    def oracle_actions(self, sample):
        return ["up"] * sample["goal"] if self.perfect else None


class Tooled(Task):
    prompt = "How bright is it?"
    rewards = {"right": 1.0}

    def samples(self, split):
        return [Sample(id="a", media=(Media(source=Image.new("RGB", (32, 32), "white")),), row={})]

    def score(self, sample, answer):
        return {"right": float("white" in answer.text)}

    def tools(self, sample):
        def zoom(box: tuple[int, int, int, int]) -> Image.Image:
            """Returns a part of the picture."""
            return Image.new("RGB", (16, 16), "white")
        return [zoom]
'''
CALL = '<tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 8, 8]}}</tool_call>'


@pytest.fixture
def lamp(tmp_path):
    file = tmp_path / "lamp.py"
    file.write_text(TASK)
    return ["play", QUICKSTART, f"task={file}:Lamp"]


def played(capsys, monkeypatch, words, text=None) -> dict:
    code, out, err = call(capsys, monkeypatch, [*words, "--json"], text)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_actions_from_a_pipe_perfect_ones_and_tools_as_text(lamp, capsys, monkeypatch):
    found = played(capsys, monkeypatch, lamp, "go\nup\n\nwait\n\n\nup\n\nnever\n")
    assert [t["action"] for t in found["turns"]] == ["go\nup", "wait", "up"] and found["ended"] == "stop"
    assert found["parts"] == {"nearer": 1.5} and found["reward"] == 1.5 and found["prompt"].endswith("The lamp is off.")
    assert [t["state"] for t in found["turns"]] == ["1", "1", "2"] and found["turns"][0]["info"] == {"level": 1}
    files = [m["path"] for t in (found, *found["turns"]) for m in t["media"]]
    assert len(set(files)) == 4 and all(Path(file).is_file() for file in files)
    code, out, _ = call(capsys, monkeypatch, lamp, "up\n\nup\n\nnever\n")
    assert code == 0 and "\x1b" not in out and "1 actions after its end" in out
    assert "the environment ended the episode" in out
    assert all(word in out for word in ("turn 2 of 8", "Level 2", "nearer 1", "turn-1-0.png", "2.000"))
    found = played(capsys, monkeypatch, [*lamp, "--oracle", "--index", "1"])
    assert found["ended"] == "stop" and found["reward"] == 3.0
    code, _, err = call(capsys, monkeypatch, [*lamp, "--oracle", "task.perfect=false"])
    assert code == 1 and "oracle_actions" in err
    assert played(capsys, monkeypatch, ["play", QUICKSTART, "--oracle"])["reward"] > 0.99
    assert call(capsys, monkeypatch, [*lamp, "--oracle", "--answer", "up"])[0] == 2
    words = [*lamp[:2], lamp[2].replace("Lamp", "Tooled")]
    found = played(capsys, monkeypatch, words, f"{CALL}\n\n{CALL.replace('zoom', 'enhance')}\n\nIt is white.")
    assert found["ended"] == "stop" and found["reward"] == 1.0 and len(found["turns"][0]["media"]) == 1
    assert found["turns"][1]["info"]["calls"][0]["error"] and "no tool 'enhance'" in found["turns"][1]["observation"]
    _, out, _ = call(capsys, monkeypatch, words, CALL)
    assert "zoom(box): Returns a part of the picture." in out
    found = played(capsys, monkeypatch, lamp, "up\n\nbreak it")
    assert found["ended"] == "error" and found["reward"] is None and "broken" in found["turns"][1]["error"]
    assert "turns" not in played(capsys, monkeypatch, [*lamp, "--index", "3"], "up\n\nup")


@pytest.mark.slow
def test_limits_end_an_episode_of_a_session(lamp, capsys, monkeypatch):
    found = played(capsys, monkeypatch, [*lamp, "episode.max_turns=2", "--index", "1"], "up\n\nup\n\nup")
    assert found["ended"] == "turns" and len(found["turns"]) == 2 and found["reward"] == 2.0
    found = played(capsys, monkeypatch, [*lamp, "episode.max_media=1", "--index", "1"], "up\n\nup\n\nup")
    assert found["ended"] == "media" and len(found["turns"]) == 2
    assert played(capsys, monkeypatch, lamp, "up")["ended"] is None
    text = "up\n\n:again\n:oracle\nup\n\nup\n\n\nup\n\n:quit\n"
    code, out = typed(monkeypatch, capsys, lamp, text)
    assert code == 0 and out.count("Bring the lamp to 2") == 2 and out.count("Bring the lamp to 3") == 1
    assert out.count("the environment ended the episode") == 1 and "oracle 2 up" in out
    for text in (":quit\n", "", "half an action\n"):
        code, out = typed(monkeypatch, capsys, lamp, text)
        assert code == 0 and "lamp to 3" not in out and ("Level 0" in out) == text.startswith("half")
