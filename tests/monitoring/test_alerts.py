"""Alerts: when a rule is told, what is written, and a webhook of a real server that answers, hangs or fails."""

import json
import time
from contextlib import contextmanager

import pytest

from tests.evaluation.http_stand_in import served
from tests.tables import each
from vlrl import config
from vlrl.config.alerts import AlertSettings
from vlrl.errors import ConfigError
from vlrl.monitoring import alerts as alerts_module
from vlrl.monitoring.alerts import RULES, Alerts, resolved_alerts


@contextmanager
def hook(answer=200):
    """A server that takes what is posted, and answers with a status or as a function of its handler does."""
    with served(lambda body, number: answer) as server:
        yield server


def come(seen, count):
    end = time.monotonic() + 60
    while len(seen) < count and time.monotonic() < end:
        time.sleep(0.01)
    return seen


def alerts(folder, said, before=(), **settings):
    return Alerts(AlertSettings(**settings), folder, said.append, before)


def posted(folder, url, value=2.0, step=0):
    """What one alert is told as, and what it says; it has been posted when this returns."""
    said = []
    found = alerts(folder, said, kl_above=1, webhook=url)
    names = found.check({"step": step, "kl": value})
    found.close()
    return names, said


def steps(found, rows):
    """The names of what is told at each step."""
    return [sorted(name.removeprefix("alerts/") for name in found.check({"step": i, **row}))
            for i, row in enumerate(rows)]


def rewards(*values, std=0.1):
    return [{"reward/mean": v, "reward/std": std} for v in values]


@pytest.mark.parametrize("settings, rows, told", [
    ({"window": 2, "reward_drop": 0.5}, rewards(.1, .8, .8, .7, .2, .2, .2, .8, .8, .1, .1), [5, 10]),
    ({"window": 2, "reward_drop": 0.5}, rewards(.1, .2, .3, .4, .5, .4, .3, .3), []),  # it only wavers
    ({"window": 2, "reward_drop": 0.5}, rewards(-.5, -.5, -.6, -.9, -.9), [4]),  # below 0 too
    ({"window": 2, "reward_drop": 0.5}, rewards(0.0, .01, -.01, 0.0, .02, -.02, std=0.3), []),  # noise around 0
    ({"window": 2, "reward_drop": 0.5}, rewards(.8, .8, None, .8, .8), []),
    ({"window": 2, "reward_drop": 0.5}, rewards(None, -.5, -.5, None, -.5, None, None, -.9, -.9), [8]),
    ({"window": 2, "reward_drop": None}, rewards(.8, .8, 0, 0, 0), []),
    ({"kl_above": 1}, [{"kl": v} for v in (0.0, 0.9, 1.1, 3, 0.5, 2, None)], [2, 5]),
    ({"entropy_below": 0.1}, [{"entropy": v} for v in (0.9, 0.05, 0.01, None)], [1]),
    ({"entropy_drop": 0.9}, [{"entropy": v} for v in (2.0, 2.6, None, 0.3, 0.25, 0.07)], [4]),
    ({"constant_rewards": 2}, rewards(0, 0, 0, .1, .1, .1, std=0), [1, 4]),
    ({"constant_rewards": 2}, rewards(0.5, 0.5, 0.5, 0.5), []),  # equal means of differing rewards
    ({"zero_variance_above": 0.9}, [{"groups/zero_variance_frac": v} for v in (1, .2, .9, 1, 1, 1, .95, .6)], [6]),
    ({"mismatch_above": 1e-4}, [{"mismatch/kl": v} for v in (1e-9, 2e-4, 5e-4, 1e-6, float("nan"), 0.3)], [1, 5]),
    ({"mismatch_gap_above": 0.1}, [{"mismatch/gap_max": v} for v in (0.09, 0.11)], [1]),
    ({"unreadable_above": 0.2}, [{"unreadable_frac": v} for v in (0.2, 0.3, 1.0, 0.0, 0.5)], [1, 4]),
    ({"truncated_above": 0.5}, [{"completion/truncated_frac": v} for v in (0.5, 0.75)], [1]),
    ({"skipped_above": 1, "window": 3}, [{"skipped": v} for v in (0, 2, 0, 0, 1, 1, 0)], [5]),
    ({}, [{"kl": 0.0, "skipped": 0.0, "entropy": 0.0, "completion/truncated_frac": 1.0}] * 3, [])])
def test_rules(tmp_path, settings, rows, told):
    said = []
    found = steps(alerts(tmp_path, said, **{**(dict.fromkeys(RULES, None) if settings else {}), **settings}), rows)
    assert [i for i, names in enumerate(found) if names] == told
    path = tmp_path / "alerts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if told else []
    assert [line["step"] for line in lines] == told == [int(s.split("step ")[1].split(":")[0]) for s in said]
    assert path.exists() == bool(told)


def test_a_resumed_run_and_one_of_given_answers(tmp_path):
    rows = [{"step": i, **row} for i, row in enumerate(rewards(.8, .8, .1, .1, .1, .1, .8, .8, .1, .1))]
    settings = {"window": 2}
    whole = [list(alerts(tmp_path, [], rows[:i], **settings).check(rows[i])) for i in range(len(rows))]
    assert [i for i, names in enumerate(whole) if names] == [3, 9]
    base = {"task": "x", "model": {"name": "x"}}
    assert resolved_alerts(config.validate(base)) == AlertSettings(mismatch_above=1e-4, mismatch_gap_above=0.1)
    given = resolved_alerts(config.validate({**base, "algo": {"loss": {"name": "supervised"}}}))
    assert given.entropy_drop is None is given.constant_rewards and given.heldout_drop == 0.1


def evaluations(*values, split="heldout", half=0.05):
    return [{"step": 10 * i, "split": split, "acc": v, "acc/ci95_low": v - half, "acc/ci95_high": v + half}
            for i, v in enumerate(values)]


@pytest.mark.parametrize("lines, told", [
    (evaluations(.41, .45, .2, .1, .44, .1), [20, 50]),  # told once, and again after it has ceased
    (evaluations(.41, .38, .39), []),  # within a tenth
    (evaluations(.41, .3, half=.1), []),  # within the intervals
    (evaluations(-.4, -.3, -.6), [20]),
    ([{"step": 0, "split": "a", "acc": .9}, {"step": 0, "split": "b", "acc": .2}, {"step": 5, "split": "b", "acc": .2},
      {"step": 5, "split": "a", "acc": .2}], [5]),  # splits apart, without intervals
    ([{"step": 0, "split": "a", "acc": None}, {"step": 5, "split": "a", "acc": .2}], [])])
def test_a_fall_of_the_held_out_result(tmp_path, lines, told):
    said = []
    found = [alerts(tmp_path, said).evaluated(lines[:i + 1], "acc") for i in range(len(lines))]
    assert [line["step"] for line, names in zip(lines, found, strict=True) if names] == told == [
        json.loads(line)["step"] for line in ((tmp_path / "alerts.jsonl").read_text().splitlines() if told else [])]
    assert all("(alerts.heldout_drop)" in s for s in said)
    assert not alerts(tmp_path, said, heldout_drop=None).evaluated(lines, "acc")


def test_a_part_that_is_never_paid_is_told(tmp_path):
    """VLM-R1#163, trl#3903: the format is learned, and the accuracy is 0 in every answer of the run."""
    said = []
    found = Alerts(AlertSettings(unpaid_part=3), tmp_path, said.append, paid=("accuracy", "format"))
    rows = [{"reward/mean": v, "reward/std": 0.1, "reward/format": v, "reward/accuracy": 0.0, "reward/overlong": 0.0}
            for v in (0.1, 0.2, 0.3, 0.4)]
    assert steps(found, [*rows, {**rows[0], "reward/accuracy": 0.5}]) == [[], [], ["unpaid_part"], [], []]
    assert len(said) == 1 and "reward part accuracy is 0 in all answers of 3 steps" in said[0]


def test_an_alert_is_posted(tmp_path, monkeypatch):
    with hook() as server:
        names, said = posted(tmp_path, server.url, 2.5, 7)
    ((path, headers, body),) = server.asked
    assert (path, headers["Content-Type"]) == ("/v1", "application/json")
    assert names == {"alerts/kl_above": 2.5} and said == ["ALERT " + body["text"]]
    assert body == json.loads((tmp_path / "alerts.jsonl").read_text())
    assert (body["alert"], body["step"], body["value"], body["limit"]) == ("kl_above", 7, 2.5, 1)
    assert str(tmp_path) == body["run"] and "2.5" in body["text"] and "alerts.kl_above" in body["text"]
    with hook() as server:
        posted(tmp_path, server.url, float("inf"), 7)
    ((_, _, body),) = server.asked

    def refuse(text):
        raise AssertionError(text)
    _, line = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == body and body["value"] is None and "inf" in body["text"]
    with hook() as server, hook() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        posted(tmp_path, server.url)
        assert len(server.asked) == 1 and not proxy.asked
    assert any("refused" in s for s in posted(tmp_path, server.url)[1])  # that server has ended


def test_what_is_kept_and_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(alerts_module.RULES, "kl_above", lambda columns, settings: asked.append(len(columns["kl"])))
    alerts(tmp_path, [], [{"step": i, "kl": 0.0} for i in range(1000)])
    assert asked == [20]  # the window, and not after each of them
    found = alerts(tmp_path, [], window=4)
    rows = rewards(*[.9] * 4, *[.8] * 1000, *[.4] * 4)
    assert [i for i, names in enumerate(steps(found, rows)) if names] == [1007]  # .4 is less than half of .9
    assert all(len(column) <= 4 for column in found._columns.values())


@each("how reason", [
    (lambda handler: time.sleep(2), "timed out"), (500, "HTTP 500"),
    (lambda handler: handler.send(307, b"", Location="/other"), "HTTP 307")])
def test_a_webhook_that_fails_is_told_once_and_harms_nothing(tmp_path, how, reason):
    said = []
    with hook(how) as server:
        found = alerts(tmp_path, said, kl_above=1, webhook=server.url, webhook_timeout_s=0.2)
        for step in range(4):
            found.check({"step": step, "kl": 2.0 * (step % 2 == 0)})
        assert {path for path, *_ in come(server.asked, 2)} == {"/v1"}
        come(said, 3)
        found.close()
    assert [s for s in said if s.startswith("warning")] == [s for s in said if reason in s]
    assert len([s for s in said if s.startswith("ALERT")]) == 2 and len(said) == 3


@pytest.mark.parametrize("url, problem", [
    ("http://example.com/x", "https"), ("ftp://example.com", "https"), ("file:///etc/passwd", "https"),
    ("https://", "host"), ("http://127.0.0.1.example.com/", "https"), ("https://a:b", "not valid"),
    ("https://user:S3CRET@127.0.0.1/x", "password"), ("https://127.0.0.1/S3CRET x", "not valid"),
    ("https://127.0.0.1:S3CRET/", "not valid"), ("https://127.0.0.1/\u00fc/S3CRET", "not valid")])
def test_urls_that_are_refused(url, problem, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=f"alerts.webhook.*{problem}"):
        config.validate({"task": "x", "model": {"name": "x"}, "alerts": {"webhook": url}})
    monkeypatch.setenv("HOOK", url)
    with pytest.raises(ConfigError, match=f"alerts.webhook.*HOOK.*{problem}") as told:
        alerts(tmp_path, [], webhook="env:HOOK")
    assert "S3CRET" not in str(told.value)


def test_a_url_from_the_environment(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="environment variable NO_HOOK is not set"):
        alerts(tmp_path, [], webhook="env:NO_HOOK")
    with hook() as server:
        monkeypatch.setenv("HOOK", server.url + "\n")
        posted(tmp_path, "env:HOOK")
    assert len(server.asked) == 1
    for url in ("https://hooks.example.com/T/secret", "http://localhost:1/x", "http://[::1]:8/"):
        assert config.validate({"task": "x", "model": {"name": "x"}, "alerts": {"webhook": url}}).alerts.webhook == url
