"""History, Compare, Curriculum and Notes in a real browser: what they show, where they lead, what they keep."""

import json
import shutil
import zipfile
from urllib.parse import urlencode

import pytest

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
    """Waits until the plot of this id has its marks."""
    figure = page.locator(f'.v-chart[data-id="{name}"]')
    figure.scroll_into_view_if_needed()
    figure.locator(".v-drawn").first.wait_for()
    return figure


def overflow(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


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


def test_a_point_of_the_history_opens_its_rollout(mine, page):
    page.goto(f"{mine[0]}?page=history&sample={SAMPLE}&run=boxes")
    x, y = drawn(page, "history-reward").evaluate(AT, [0, 0])
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    page.wait_for_url("**page=rollouts&run=boxes&source=train&split=train&step=**")


def test_compare_tells_wins_and_links_both_groups(mine, page):
    page.goto(f"{mine[0]}?page=compare&a=boxes&b=slow")
    here = page.locator("#v-page-compare")
    here.get_by_text("B is worse: the interval of the gain leaves out 0.").wait_for()
    assert here.locator(".v-tile", has_text="samples on both sides").locator("b").inner_text() == "6"
    drawn(page, "compare-pairs")
    losses = here.locator("section", has=page.get_by_role("heading", name="Biggest losses"))
    sides = [link.get_attribute("href") for link in losses.locator("tbody tr").first.locator("a.go").all()[1:]]
    assert "run=boxes" in sides[0] and "run=slow" in sides[1] and all("source=eval" in side for side in sides)
    here.get_by_label("Compare", exact=True).select_option("train")  # by keyboard it is the same event
    here.get_by_label("from step").first.wait_for()
    here.get_by_text("training steps 0 to the last").first.wait_for()
    here.get_by_label("to step").first.fill("0")
    here.get_by_label("from step").nth(1).fill("1")
    here.get_by_label("to step").nth(1).fill("1")
    here.get_by_text("No sample is in both").wait_for()
    assert here.get_by_text("Widen both spans").is_visible()
    page.go_back()


def test_curriculum_draws_and_its_heat_map_leads_to_the_rollouts(mine, page):
    page.goto(f"{mine[0]}?page=curriculum&run=boxes")
    here = page.locator("#v-page-curriculum")
    here.get_by_role("heading", name="Categories").wait_for()
    heat = drawn(page, "curriculum-heat")
    shades = heat.locator("g .v-cell").evaluate_all(
        "cells => cells.map(cell => [cell.getAttribute('x'), Number(cell.getAttribute('fill-opacity'))])")
    for place in {x for x, _ in shades}:
        assert sum(share for x, share in shades if x == place) == pytest.approx(1, abs=0.02)
    assert len({x for x, _ in shades}) == 4
    heat.locator(".v-plot").focus()
    page.keyboard.press("ArrowRight")
    heat.get_by_text("pass rate of a group: 0", exact=True).wait_for()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    heat.get_by_text("step 1", exact=True).wait_for()
    here.get_by_label("An answer passes from reward").fill("0.2")
    page.wait_for_url("**threshold=0.2")
    here.locator(".v-tile", has_text="passes").get_by_text("from reward 0.2", exact=True).wait_for()


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


def test_the_filtered_list_is_exported(mine, page, tmp_path):
    page.goto(f"{mine[0]}?page=rollouts&run=boxes&kind=train&from=2&to=2&rmin=0.5")
    page.locator("#v-list").get_by_role("link", name="export").click()
    page.wait_for_url("**page=notes**")
    here = page.locator("#v-page-notes")
    here.get_by_label("what the filters").and_(page.locator(":checked")).wait_for()
    here.get_by_role("button", name="Make the file").click()
    with page.expect_download() as download:
        here.get_by_role("button", name="Download rollouts.jsonl").click()
    download.value.save_as(tmp_path / "rows.jsonl")
    records = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert records and all(r["run"] == "boxes" and r["step"] == 2 and r["reward"] >= 0.5 for r in records)


def test_two_tabs_do_not_overwrite_each_other(mine, page, chromium):
    url = f"{mine[0]}?page=notes&run=slow&source=train&split=train&step=0&group=train-0-1&rollout=0"
    with opened(chromium) as other:
        for tab in (page, other):
            tab.goto(url)
            tab.get_by_label("unsure", exact=True).wait_for()
        page.get_by_label("unsure", exact=True).check()
        page.get_by_role("button", name="Save the note").click()
        page.get_by_text("Saved.").wait_for()
        other.get_by_label("Comment", exact=True).fill("from the other tab")
        other.get_by_role("button", name="Save the note").click()
        other.get_by_text("Saved.").wait_for()
        line = other.locator("#v-notes tbody tr", has_text="from the other tab")
        assert line.locator("td").first.inner_text() == "unsure"


def test_hostile_runs_stay_text_on_every_page(mine, page):
    address, root = mine
    run = next(path.name for path in root.iterdir() if path.name.startswith("evil"))
    for where in ({"page": "history", "sample": made_runs.SCRIPT}, {"page": "curriculum", "run": run},
                  {"page": "history", "sample": "boxes-1", "run": run}, {"page": "compare", "a": run, "b": "boxes"},
                  {"page": "notes", "find": made_runs.SCRIPT, "run": run},
                  {"page": "history", "a": "[1,2]", "sample": "x"}, {"page": "curriculum", "threshold": "1e999"},
                  {"page": "compare", "a": "../..", "b": "/etc"}, {"page": "compare", "a_step": "-1"},
                  {"page": "notes", "run": "../x", "step": "1", "group": "g", "rollout": "9" * 30}):
        page.goto(f"{address}?{urlencode(where)}")
        page.locator(f"#v-page-{where['page']} :is(.v-empty, .v-tiles, .v-list, .v-note)").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked === undefined")


@pytest.mark.parametrize("query", ["page=history&sample=boxes-1", "page=history", "page=compare&a=boxes&b=slow",
                                   "page=curriculum&run=boxes", "page=notes"])
def test_pages_fit_a_narrow_screen(mine, phone, query):
    phone.goto(f"{mine[0]}?{query}")
    phone.locator(f"#v-page-{query[5:].partition('&')[0]} :is(h3, .v-tiles, .v-table)").first.wait_for()
    phone.wait_for_timeout(500)
    assert overflow(phone) <= 0


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
