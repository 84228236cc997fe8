"""The page of runs in a real browser."""

import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import opened, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PLOTTED = "#v-curves .v-plot .v-drawn"
DATA = "document.querySelector('.v-chart').plot.figure.data"


def test_the_list_tells_how_each_run_stands(page, runs, served):
    made_runs.beat(runs / "sweep/clips")
    page.goto(served)
    rows = page.locator("#v-runs tbody tr")
    expect(rows).to_have_count(5)
    for name, state in (("boxes", "finished"), ("sweep/clips", "running"), ("sweep/points", "interrupted"),
                        ("sweep/paths", "failed")):
        row = rows.filter(has=page.get_by_role("link", name=name, exact=True))
        expect(row.locator(".v-chip").first).to_have_text(state)
    expect(page.locator(".v-tab[aria-current]")).to_have_text("Runs")


def test_many_runs_are_found_and_sorted(chromium, tmp_path):
    made_runs.write(tmp_path / "one", steps=1, prompts=1, evaluate=False, state="running", planned=90)
    config = (tmp_path / "one/config.yaml").read_text()
    for i in range(60):
        run = made_runs.RunFolder(tmp_path / f"small-{i:02}")
        run.create(config.replace("seed: 0", f"seed: {i + 1}"), 0)
        run.append_metrics({"step": 0, "reward/mean": (i * 7 % 60) / 60})
    with serving(tmp_path) as address, opened(chromium) as page:
        made_runs.beat(tmp_path / "one")
        page.goto(f"{address}?page=runs&runs=one")
        rows = page.locator("#v-runs tbody tr")
        expect(page.locator("#v-wrong")).to_contain_text(
            re.compile(r"About \d+:\d\d:\d\d remain: 1 of 90 steps are done\."))
        expect(rows).to_have_count(61)
        above = page.evaluate("document.querySelector('#v-runs-form input').getBoundingClientRect().bottom")
        assert above <= page.evaluate("document.querySelector('#v-runs table').getBoundingClientRect().top") < 900
        page.get_by_role("link", name="reward", exact=True).click()
        expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "descending")
        page.wait_for_function("""(values => values.length > 50 && values.every((v, i) => !i || v <= values[i - 1]))(
            [...document.querySelectorAll('#v-runs tbody td:nth-child(7)')].map(e => parseFloat(e.textContent))
            .filter(v => !isNaN(v)))""")
        page.get_by_role("link", name="reward ↓", exact=True).click()
        expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "ascending")
        page.get_by_label("Find a run").fill("small-17")
        expect(rows).to_have_count(2)  # and the chosen one
        page.get_by_role("checkbox", name="curves of small-17").click()
        expect(page.locator("#v-wrong")).to_contain_text("the previous run of this task: ")


def test_chosen_runs_are_laid_over_each_other_and_smoothed(page, served):
    page.goto(f"{served}?page=runs&runs=boxes")
    expect(page.locator(PLOTTED).first).to_be_visible()
    page.get_by_role("checkbox", name="curves of boxes-slow").click()
    expect(page.get_by_role("checkbox", name="curves of boxes-slow")).to_have_attribute("aria-checked", "true")
    assert page.url.endswith("runs=boxes%2Cboxes-slow")
    expect(page.locator("#v-diff")).to_contain_text("train.lr")
    page.wait_for_function(f"{DATA}.filter(t => t.name === 'boxes-slow').length === 2")
    colours = page.evaluate(f"[...new Set({DATA}.map(t => t.line.color))]")
    assert len(colours) == 2  # one a run
    bars = page.evaluate(f"{DATA}.filter(t => t.error_y).map(t => t.error_y.array)")
    assert bars and all(len(lengths) == 2 for lengths in bars)  # evaluations before and after, with intervals
    titles = page.locator(".v-chart figcaption").all_text_contents()
    for wanted in ("Reward", "Reward part: iou", "Answer length (tokens)", "Entropy (nats a token)", "Tokens a second",
                   "KL to the reference", "Mismatch of sampler and trainer (KL)", "Share of groups without variance"):
        assert wanted in titles
    page.goto(f"{served}?page=runs&runs=boxes")
    expect(page.locator(PLOTTED).first).to_be_visible()
    page.locator("input[name=smooth]").fill("0")
    page.wait_for_function(f"{DATA}.filter(t => !t.error_y).length === 1")
    assert page.evaluate(f"{DATA}.filter(t => !t.error_y)[0].y.length") == 4


def test_a_run_that_goes_on_is_followed(chromium, tmp_path):
    made_runs.write(tmp_path / "one", steps=2, planned=9, state="running")
    script = ("import sys; from pathlib import Path; from tests.app.made_runs import write_step; "
              "from vlrl.store import RunFolder; run = RunFolder(Path(sys.argv[1])); write_step(run, 'boxes', 2); "
              "run.heartbeat({'step': 3, 'steps': 9, 'state': 'running', 'reward': 0.5, 'eta_s': 1})")
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(f"{address}?page=runs&runs=one")
        expect(page.locator("#v-runs")).to_contain_text("2/9")
        expect(page.locator(PLOTTED).first).to_be_visible()
        page.evaluate("for (const e of [document.querySelector('#v-runs table'), document.querySelector('.v-plot')]) "
                      "e.same = 1")
        page.locator("input[name=find]").fill("on")
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "one")], check=True)
        expect(page.locator("#v-runs")).to_contain_text("3/9", timeout=20_000)
        page.wait_for_function(f"{DATA}[0].x.length === 3")
        same = page.evaluate("[document.querySelector('#v-runs table').same, document.querySelector('.v-plot').same]")
        assert same == [1, 1]  # nothing was put there anew: no flicker
        assert page.locator("input[name=find]").input_value() == "on"
        expect(page.get_by_role("checkbox", name="curves of one")).to_have_attribute("aria-checked", "true")
        page.goto(f"{address}?page=rollouts&run=one")
        expect(page.locator("#v-list .v-count")).to_contain_text("12 groups")
        made_runs.write_step(made_runs.RunFolder(tmp_path / "one"), "boxes", 3)
        expect(page.locator("#v-list .v-count")).to_contain_text("16 groups", timeout=20_000)


def test_an_empty_folder_says_what_to_do_and_shows_the_first_run(chromium, tmp_path):
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(address)
        expect(page.locator("#v-runs")).to_contain_text("vlrl train configs/quickstart.yaml")
        made_runs.write(tmp_path / "first", steps=1)
        expect(page.locator("#v-runs tbody tr")).to_have_count(1, timeout=20_000)


def test_tags_find_runs_and_archived_ones_are_hidden_unless_asked(chromium, tmp_path):
    for name in ("old", "new"):
        made_runs.write(tmp_path / name, steps=1, prompts=1, evaluate=False)
    config = (tmp_path / "old/config.yaml").read_bytes()
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(f"{address}?page=runs&runs=old")
        rows, label = page.locator("#v-runs tbody tr"), page.locator("form.v-labels")
        label.locator("input").fill(f"base line, {made_runs.SCRIPT[:40]}")
        label.locator("input").press("Enter")
        expect(rows.locator("a.v-chip")).to_have_text(["base line", made_runs.SCRIPT[:40]])
        label.get_by_role("button", name="archive").click()
        expect(label.get_by_role("button")).to_have_attribute("aria-pressed", "true")
        expect(rows).to_have_count(2)  # it is chosen
        page.goto(address)
        expect(rows).to_have_count(1)
        expect(page.locator("#v-runs")).to_contain_text("1 archived, not listed")
        page.get_by_label("archived").check()
        expect(rows).to_have_count(2)
        page.get_by_label("Find a run").fill("base line")
        expect(rows.filter(has_text="base line")).to_have_count(1)
        page.goto(f"{address}?page=rollouts")
        expect(page.locator("#v-list .v-count")).to_contain_text("1 group")  # of the other run
        assert page.evaluate("window.hacked") is None and (tmp_path / "old/config.yaml").read_bytes() == config


def test_two_annotators_flag_the_same_answers_and_see_how_far_they_agree(chromium, tmp_path):
    made_runs.write(tmp_path / "boxes", "boxes", steps=1, evaluate=False)
    with serving(tmp_path) as address, opened(chromium) as page:
        for name, keys in (("anna", "ggb"), ("ben", "gbb")):
            page.goto(f"{address}?page=rollouts&run=boxes&step=0&group=train-0-0&by={name}")
            expect(page.locator(".v-card")).to_have_count(4)
            assert page.locator("button[data-flag][aria-pressed=true]").count() == 0  # not the other's flags
            page.keyboard.type(keys)
            expect(page.locator("#v-list .v-row.v-open")).to_contain_text(f"{keys.count('b')} bad")
            expect(page.locator(".v-chosen")).to_have_id("v-answer-3")
        page.goto(f"{address}?page=notes")
        line = page.locator("#v-notes section tbody tr")
        expect(line.locator("td")).to_have_text(["anna", "ben", "3", "67%", "0.4"])
