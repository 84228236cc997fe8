"""History, Compare, Curriculum and Notes in a real browser: what they show, where they lead, what they keep."""

import json
import shutil
import zipfile
from urllib.parse import urlencode

import pytest

from app.notes import Notes
from app.queries import RolloutKey
from tests.app import made_runs
from tests.app.conftest import serving

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
