"""Five jobs by keys alone, and plots; what has the focus is to be seen."""

import json
import re
import zipfile

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import opened, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MOST_TABS = 120
SEEN = """() => {
  const at = document.activeElement, shown = [at, at.closest("label")].filter(Boolean).map(e => getComputedStyle(e));
  return at.matches(":focus-visible") && shown.some(
    s => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0 || s.boxShadow !== "none"); }"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    root = tmp_path_factory.mktemp("keys")
    run = made_runs.write(root / "boxes", "boxes", steps=4)
    record = {"alert": "zero_variance_above", "step": 1, "value": 0.95, "limit": 0.9,
              "text": "at step 1: 95% of the groups have equal rewards"}
    (run.path / "alerts.jsonl").write_text(json.dumps(record) + "\n")
    with serving(root) as address:
        yield address


@pytest.fixture
def keys(chromium, mine):
    """The first page, in a window without a pointer."""
    with opened(chromium) as page:
        page.goto(mine)
        expect(page.locator("#v-runs tbody tr")).to_have_count(1)
        expect(page.locator("#v-curves .v-drawn").first).to_be_visible()
        yield page


def reach(page, wanted, key="Tab"):
    expect(wanted).to_be_visible()
    for _ in range(MOST_TABS):
        page.keyboard.press(key)
        if wanted.evaluate("e => e === document.activeElement"):
            assert page.evaluate(SEEN), f"the focus is not to be seen on {wanted}"
            return
    raise AssertionError(f"{MOST_TABS} times {key} do not reach {wanted}")


def follow(page, wanted):
    reach(page, wanted)
    page.keyboard.press("Enter")


def open_run(page):
    follow(page, page.locator("#v-runs td.v-name a"))
    expect(page.locator("#v-list .v-row").first).to_be_visible()


def test_why_does_this_run_stall_and_a_prompt_before_and_after(keys):
    follow(keys, keys.locator("#v-wrong .v-finding", has_text="equal rewards").get_by_role("link"))
    keys.wait_for_url("**alike=yes**")
    expect(keys.locator("#v-list .v-row").first).to_be_visible()
    follow(keys, keys.locator(".v-tab-compare"))
    expect(keys.locator("#v-before-after .v-side .v-frame").first).to_be_visible()
    follow(keys, keys.locator("#v-page-compare .v-halves a").first)
    keys.wait_for_url("**pair=**")


@pytest.mark.parametrize(("preset", "asks"), [("full reward, but unusual", "odd"), ("zero variance", "alike")])
def test_answers_that_cheat_and_groups_without_variance(keys, preset, asks):
    open_run(keys)
    follow(keys, keys.get_by_role("link", name=preset, exact=True))
    keys.wait_for_url(f"**{asks}=yes**")
    expect(keys.locator("#v-list .v-count")).to_be_visible()


def test_flag_five_answers_and_export_the_good_ones(keys, tmp_path):
    open_run(keys)
    keys.keyboard.press("j")
    assert keys.evaluate(SEEN)
    keys.keyboard.press("Enter")
    expect(keys.locator(".v-card").first).to_be_visible()
    keys.keyboard.type("ggggg")  # a group has four
    expect(keys.locator("#v-list .v-row.v-open")).to_contain_text(re.compile("boxes-1.*good"))
    follow(keys, keys.locator(".v-tab-notes"))
    expect(keys.locator("#v-notes tbody tr")).to_have_count(5)
    page = keys.locator("#v-page-notes")
    follow(keys, page.get_by_role("button", name="Export"))
    reach(keys, page.get_by_label("JSON lines"))
    keys.keyboard.press("ArrowDown")
    keys.keyboard.press("ArrowDown")
    expect(page.get_by_label("A set for vlrl sft")).to_be_checked()
    follow(keys, page.get_by_role("button", name="Make the file"))
    save = page.get_by_role("button", name="Download sft.zip")
    with keys.expect_download() as saved:
        follow(keys, save)
    saved.value.save_as(tmp_path / "sft.zip")
    rows = zipfile.ZipFile(tmp_path / "sft.zip").read("rows.jsonl").decode().splitlines()
    expect(page.locator("p[role=status]")).to_contain_text(f"{len(rows)} of 5 rollouts")  # some are cut off
    assert rows


def test_a_plot_is_read_zoomed_and_opened(keys):
    card = keys.locator(".v-chart[data-id='entropy']")
    card.locator(".v-drawn").wait_for()
    reach(keys, card.locator(".v-plot"))
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):  # the first point, the second, that of the mean
        keys.keyboard.press(key)
    expect(card.locator(".v-tip")).to_contain_text("smoothed")
    expect(card.locator(".v-tip")).to_contain_text("step 1")
    ticks = card.locator(".v-xtick")
    before = ticks.all_text_contents()
    for _ in range(2):
        keys.keyboard.press("+")
    assert card.evaluate("card => card.plot.space.x.high - card.plot.space.x.low") == pytest.approx(3.12 / 4)
    keys.keyboard.press("0")
    assert ticks.all_text_contents() == before
    follow(keys, card.locator("summary"))
    first = card.locator("tbody tr").first
    expect(first).to_contain_text("step 0")
    expect(first).to_contain_text("raw 0.6")
    reach(keys, card.locator(".v-plot"), "Shift+Tab")
    keys.keyboard.press("End")
    keys.keyboard.press("Enter")
    keys.wait_for_url("**from=3&to=3")
