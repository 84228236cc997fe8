"""hidden.py: what a page for others must not tell."""

import html
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from vlrl.app.redaction import Redactor

RUN = Path("/data/jo smith/runs/it's \"a\" run")


@pytest.fixture(scope="module")
def hide():
    return Redactor(RUN, ["gpu-box-7", "ante", ""], [], {"HF_TOKEN": "t0psecret&<x>", "JUDGE_API_KEY": "k3y-of-judge",
                                                   "EDITOR": "emacs-nox", "SHORT_KEY": "abc"})


@each("text left", [
    ("cannot read /data/me/a.png: gone", "cannot read …/a.png: gone"),
    ("in '/home/jo/x.py', line 3", "in '…/x.py', line 3"),
    ("~/data/rows.jsonl and C:\\Users\\jo\\rows.jsonl", "…/rows.jsonl and …/rows.jsonl"),
    ("file:///home/jo/q.png", "…/q.png"),
    ("no answer of http://10.0.0.3:8000/v1 on gpu-box-7", "no answer of http://… on …"),
    ("ante up: hf_abcdefghijklmnopqrst", "… up: …"),
    ("3/4 of a/b, km/h, </answer>, tasks/mine.py:Count", "3/4 of a/b, km/h, </answer>, tasks/mine.py:Count"),
])
def test_messages_lose_paths_addresses_and_keys(hide, text, left):
    assert hide.words(text) == left


def test_content_and_data_rows_stay_but_for_what_only_this_machine_has(hide):
    said = "the ante is /etc/passwd, ls /usr/bin; emacs-nox, abc; http://example.org/a/b"
    assert hide.text(said) == said
    for secret in (str(RUN), "/data/jo smith/runs", "t0psecret&<x>", "k3y-of-judge", "gpu-box-7"):
        for form in (secret, html.escape(secret), json.dumps(secret)[1:-1], json.dumps(html.escape(secret))[1:-1]):
            assert hide.text(f"a {form} b") == "a … b"
    assert hide.text("not-gpu-box-7 gpu-box-70") == "not-gpu-box-7 gpu-box-70"
    row = {"image": "/data/me/a.png", "url": "https://jo:pw@example.org/a/b.png", "key": "B", "api_key": "x", "n": 3,
           "boxes": [[1, 2.5]], "more": {"file": ["/mnt/set one/b.png"], "none": None}}
    assert hide.value(row) == {"image": "…/a.png", "url": "https://example.org/a/b.png", "key": "B", "api_key": "…",
                               "n": 3, "boxes": [[1, 2.5]], "more": {"file": ["…/set one/b.png"], "none": None}}
    deep = None
    for _ in range(200):
        deep = [deep]
    assert "…" not in json.dumps(hide.value(deep))
    settings = {"run.dir": "/data/jo/runs/a", "x.api_key": "v", "log.webhook": "hook", "rollout.max_new_tokens": 64,
                "services.judge.url": "http://10.0.0.3:8000/v1", "task.name": "tasks/mine.py:Count",
                "data.rows": ["/data/a.jsonl", {"token": "t", "path": "/data/me/b.jsonl"}], "algo.kl_coef": 0.1}
    assert hide.settings(settings) == {
        "run.dir": "…/a", "x.api_key": "…", "log.webhook": "…", "rollout.max_new_tokens": 64,
        "services.judge.url": "http://…", "task.name": "tasks/mine.py:Count",
        "data.rows": ["…/a.jsonl", {"token": "…", "path": "…/b.jsonl"}], "algo.kl_coef": 0.1}


PIECES = ["/data/jo smith/runs", "t0psecret&<x>", "/", "a", " ", "\\", "'", "…", "file://", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_nothing_of_the_machine_survives(text):
    hide = Redactor(RUN, [], [], {"HF_TOKEN": "t0psecret&<x>"})
    for left in (hide.text(text), hide.words(text), hide.value(text), json.loads(hide.text(json.dumps(text)))):
        assert "/data/jo smith" not in left and "t0psecret" not in left
