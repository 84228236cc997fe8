"""What a judge is shown of episodes: turns and pictures, in order and within bounds."""

import re

from PIL import Image

from vlrl import Media, Observation, Sample, Task
from vlrl.config.schema import LimitsSettings
from vlrl.data.media import load
from vlrl.rewards.verdicts import MOST_SHOWN, quoted
from vlrl.services.chat import data_urls
from vlrl.services.judge_prompts import MOST_PICTURES, MOST_PIXELS, judge_view
from vlrl.types import Answer, PastAction


class Doors(Task):
    prompt, rewards = "Open the door.", {"judge": 1.0}


def picture(grey, side=4):
    return Media(source=Image.new("L", (side, side), grey))


def episode(count, text="It is stuck.", side=4):
    turns = [PastAction(action=f"push {i}", observation=f"{text} {i}", media=(picture(i, side),)) for i in range(count)]
    return Answer(text="pull", final="pull", turns=tuple(turns))


def test_what_is_shown_stands_in_order():
    sample = Sample(id="a", media=(picture(1),))
    assert judge_view(Doors(), sample, [Answer(text="x")]) == ("Open the door.", sample.media)
    assert judge_view(Doors(), sample, [Answer(text="x")], media=False) == ("Open the door.", ())
    sample = Sample(id="a", media=(picture(1),), opening=Observation("A door.", [picture(2)]))
    question, shown = judge_view(Doors(), sample, [episode(2)])
    assert question == ("Open the door.A door.\n\nShown at the beginning: [picture 2]\n\nAction 1: push 0\n\n"
                        "Observation: It is stuck. 0 [picture 3]\n\nAction 2: push 1\n\n"
                        "Observation: It is stuck. 1 [picture 4]")
    assert [m.source.getpixel((0, 0)) for m in shown] == [1, 2, 0, 1]
    question, shown = judge_view(Doors(), sample, [episode(1), episode(1)], media=False)
    assert shown == () and "Action 1 of answer 2: push 0" in question and "[picture" not in question


def test_what_is_sent_is_bounded():
    sample = Sample(id="a", media=(picture(1),))
    question, shown = judge_view(Doors(), sample, [episode(40, "x" * 50_000, side=1400)])
    assert len(question) < 1.2 * MOST_SHOWN and len(quoted("question", question)) < MOST_SHOWN + 200
    assert len(shown) == MOST_PICTURES and question.count("that is not shown") == 40 - MOST_PICTURES + 1
    assert [int(n) for n in re.findall(r"\[picture (\d+)\]", question)] == [*range(2, MOST_PICTURES + 1)]
    loaded = load(shown[-1], LimitsSettings())
    assert 0.9 * MOST_PIXELS < loaded.size[0] * loaded.size[1] <= MOST_PIXELS and data_urls(loaded)
    assert shown[-1].source.getpixel((0, 0)) == 39  # the last ones
