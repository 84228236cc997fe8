"""The pages of runs, History, Compare, Curriculum and Notes in a real browser: what they show, lead to and keep."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect

from app.notes import Notes
from app.queries import RolloutKey
from tests.app import made_runs
from tests.app.conftest import opened, serving

pytestmark = pytest.mark.browser
SAMPLE = "boxes-1"
AT = """(card, [trace, point]) => {
    const box = card.querySelector(".v-plot").getBoundingClientRect(), {plot} = card;
    const [x, y] = plot.pixel(plot.drawn.series[trace].points[point]);
    return [box.left + x, box.top + y]; }"""
"""Where a point of a plot is in the window."""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The address of an inspector over two runs and a hostile one, whose notes may be written; and the folder."""
    root = tmp_path_factory.mktemp("pages") / "runs"
    made_runs.write(root / "boxes", "boxes", steps=4)
    made_runs.write(root / "slow", "boxes", steps=4, seed=1, gain=0.2)
    made_runs.hostile(root)
    with serving(root) as address:
        Notes(root).put(RolloutKey("slow", "train", "train", 0, "train-0-0", 1), flag="bad", sample=SAMPLE)
        yield address, root
    shutil.rmtree(root)


def drawn(page, name):
    figure = page.locator(f'.v-chart[data-id="{name}"]')
    figure.scroll_into_view_if_needed()
    figure.locator(".v-drawn").first.wait_for()
    return figure


def test_history_shows_a_prompt_over_runs_and_leads_to_its_groups(mine, page):
    page.goto(f"{mine[0]}?page=history&sample={SAMPLE}")
    below = page.locator("#v-page-history")
    below.get_by_role("heading", name="Two answers side by side").wait_for()
    traces = drawn(page, "history-reward").evaluate(
        "card => card.plot.figure.data.map(trace => [trace.name, trace.mode, trace.x.length])")
    assert ["boxes, mean", "lines+markers", 2] in traces and ["slow", "markers", 8] in traces
    assert below.locator("ins").count() and below.locator("del").count()
    below.get_by_label("Second answer").select_option(index=1)  # another answer: the address says which
    page.wait_for_url("**b=*")
    page.locator("#v-context").get_by_label("Run", exact=True).select_option("slow")
    page.wait_for_url("**run=slow*")
    below.locator("td", has_text="boxes").first.wait_for(state="detached")
    below.locator("tbody a.go").first.click()
    page.wait_for_url("**page=rollouts**group=**")
    page.locator("#v-page-rollouts .v-card").first.wait_for()
    page.go_back()
    below.get_by_role("heading", name=f"Sample {SAMPLE}").wait_for()
    page.goto(f"{mine[0]}?page=history&sample={SAMPLE}&run=boxes")
    x, y = drawn(page, "history-reward").evaluate(AT, [0, 0])
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    page.wait_for_url("**page=rollouts&run=boxes&source=train&split=train&step=**")


def test_a_note_is_kept_listed_found_and_exported(mine, page, tmp_path):
    address, root = mine
    place = "run=boxes&source=train&split=train&step=1&group=train-1-5&rollout=2"
    page.goto(f"{address}?page=notes&{place}")
    here = page.locator("#v-page-notes")
    here.get_by_label("good", exact=True).check()
    here.get_by_label("Comment", exact=True).fill("<b>bold</b> & right")
    page.get_by_role("button", name="Save the note").click()
    here.get_by_text("Saved.").wait_for()
    line = here.locator("#v-notes tbody tr", has_text="bold")
    assert line.locator("td").nth(1).inner_text() == "<b>bold</b> & right" and line.count() == 1
    page.goto(f"{address}?page=notes")  # without a rollout there is nothing to edit
    line.wait_for()
    assert not here.get_by_label("Comment", exact=True).is_visible()
    here.get_by_label("Find in comments").fill("nothing like it")
    here.get_by_text("No note fits these filters.").wait_for()
    here.get_by_label("Find in comments").fill("bold")
    line.wait_for()
    line.get_by_role("link", name="open #2").click()
    page.wait_for_url("**page=rollouts**rollout=2")
    page.goto(f"{address}?page=rollouts&view=rollouts&flag=yes&run=boxes")
    page.locator("#v-list").get_by_text("1 rollout").wait_for()
    page.goto(f"{address}?page=notes")
    here.get_by_role("button", name="Export").click()
    here.get_by_label("Find in comments").fill("bold")  # a filter leaves the fold as the user set it
    page.wait_for_url("**find=bold**")
    here.locator("#v-notes tbody tr", has_text="slow").wait_for(state="detached")
    for form, name in (("JSON lines", "rollouts.jsonl"), ("A set for vlrl sft", "sft.zip")):
        here.get_by_label(form).check()
        here.get_by_role("button", name="Make the file").click()
        with page.expect_download() as download:
            here.get_by_role("button", name=f"Download {name}").click()
        download.value.save_as(tmp_path / name)
    record = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert (record["comment"], record["group_id"], record["index"]) == ("<b>bold</b> & right", "train-1-5", 2)
    assert zipfile.ZipFile(tmp_path / "sft.zip").namelist()[-2:] == ["rows.jsonl", "README.txt"]
    assert (root / "notes.sqlite").exists()


def test_hostile_runs_stay_text_on_every_page(mine, page):
    address, root = mine
    run = next(path.name for path in root.iterdir() if path.name.startswith("evil"))
    for where in ({"page": "history", "sample": made_runs.SCRIPT}, {"page": "curriculum", "run": run},
                  {"page": "history", "sample": "boxes-1", "run": run}, {"page": "compare", "a": run, "b": "boxes"},
                  {"page": "notes", "find": made_runs.SCRIPT, "run": run},
                  {"page": "history", "a": "[1,2]", "sample": "x"}, {"page": "curriculum", "threshold": "1e999"},
                  {"page": "compare", "a": "../..", "b": "/etc"}, {"page": "compare", "a_step": "-1"},
                  {"page": "notes", "run": "../x", "step": "1", "group": "g", "rollout": "9" * 30},
                  {"page": "runs", "runs": run}, {"page": "rollouts", "run": run, "view": "rollouts"},
                  {"page": "rollouts", "run": "boxes", "step": "1", "group": "../../etc/passwd", "split": "<script>"},
                  *({"page": "rollouts", "run": run, "order": "best", "row": n} for n in range(3))):
        row = where.pop("row", None)
        page.goto(f"{address}?{urlencode(where)}")
        page.locator(f"#v-page-{where['page']} :is(.v-empty, .v-tiles, .v-list, .v-note, .v-row, .v-table)"
                     ).first.wait_for()
        if row is not None:
            page.locator(".v-row").nth(row).click()
            page.locator(".v-group, #v-group [role=alert]").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked === undefined") and "TOP-SECRET" not in page.content(), where


def test_both_answers_stand_on_their_pictures_and_the_pair_stays_in_the_link(mine, page):
    page.goto(f"{mine[0]}?page=compare&a=boxes")
    pair = page.locator("#v-before-after")
    pair.locator(".v-side").nth(1).wait_for()
    assert pair.locator(".v-side").count() == 2 and pair.locator(".v-question").count() == 1
    for side in (0, 1):  # its own answer and the target alone
        marks = pair.locator(".v-side").nth(side).locator(".v-marks g")
        assert sorted(set(marks.evaluate_all("all => all.map(g => g.dataset.vMark)"))) in (["0", "t"], ["t"])
        image = pair.locator(".v-side").nth(side).locator("img").first
        assert image.evaluate("i => i.decode().then(() => i.naturalWidth)")
    assert pair.locator(".v-marks g[data-v-mark='0']").count()
    sample = page.locator("#v-page-compare .v-halves table").last.locator("a.go").first
    name = sample.inner_text()
    sample.click()
    page.wait_for_url("**pair=**")
    pair.locator("h3", has_text=name).wait_for()
    page.reload()
    pair.locator("h3", has_text=name).wait_for()
    pair.locator("h3 a").click()
    here = page.locator("#v-page-history")
    here.locator(".v-side").nth(1).wait_for()
    assert here.locator(".v-side .v-frame").count() >= 2 and here.locator(".v-question").count() == 1


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


def test_an_empty_folder_says_what_to_do_and_two_annotators_of_its_first_run_see_how_far_they_agree(chromium, tmp_path):
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(address)
        expect(page.locator("#v-runs")).to_contain_text("vlrl train configs/quickstart.yaml")
        made_runs.write(tmp_path / "boxes", "boxes", steps=1, evaluate=False)
        expect(page.locator("#v-runs tbody tr")).to_have_count(1, timeout=20_000)
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
