"""A judge that decides by rule, behind real HTTP: what the tests of rewards compare with figures by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.evaluation.http_stand_in import StandIn, served
from vlrl.config.services import JudgeSettings
from vlrl.services.judge import Judge
from vlrl.task.services import ServiceContext

QUOTED = re.compile(r"<(\w+)-([0-9a-f]{12})>\n(.*?)\n</\1-\2>", re.DOTALL)
PLACE = ServiceContext("train", 3, 2)


def text_of(body: dict[str, Any]) -> str:
    """What is asked, without pictures."""
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def quotes(body: dict[str, Any]) -> dict[str, str]:
    """What a question quotes, by name."""
    return {name: text for name, _, text in QUOTED.findall(text_of(body))}


def says(decide: Callable[[dict[str, str], dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any], int], Any]:
    """A script that replies with the fields that `decide(quotes, body)` gives."""
    return lambda body, number: json.dumps(decide(quotes(body), body))


@contextmanager
def judging(script: Any, folder: Path, wait_s: float = 0.0, **settings: Any) -> Iterator[tuple[StandIn, Judge]]:
    """A server and a judge that asks it."""
    with served(script, models=("critic",)) as server:
        judge = Judge(JudgeSettings(**{"url": server.url, "model": "critic", "retries": 2, **settings}), folder,
                      wait_s=wait_s)
        try:
            yield server, judge
        finally:
            judge.close()


def count_of(server: StandIn) -> int:
    return len(server.asked)
