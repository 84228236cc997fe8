"""Every page, light and dark, under axe-core's rules of accessibility, narrow and enlarged; five jobs by keys alone."""

import json
import re
import zipfile

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import opened, serving
from tests.app.test_browser_reading import TEXTS

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.slow]
GROUP = "page=rollouts&run=boxes&step=1&group=train-1-5"
PAGES = {
    "runs": ("page=runs&runs=boxes,slow", "#v-curves .v-chart"),
    "list": ("page=rollouts&kind=all", "#v-list .v-row"),
    "nothing": ("page=rollouts&rmin=99", "#v-list .v-empty"),
    "group": (GROUP, ".v-card"),
    "answer": (f"{GROUP}&rollout=2", ".v-chosen"),
    "pictures": ("page=rollouts&run=many&step=0&group=many-1", ".v-many .v-pic"),
    "reading": ("page=rollouts&run=many&step=0&group=many-1&rollout=1&read=yes", ".v-both"),
    "episode": ("page=rollouts&run=film&step=0&group=zoomed-1&rollout=1", ".v-turns .v-turn"),
    "clip": ("page=rollouts&run=clips&step=1&group=train-1-5", ".v-timeline"),
    "history": ("page=history&sample=boxes-100", "#v-page-history .v-side"),
    "compare": ("page=compare&a=boxes", "#v-before-after .v-side"),
    "curriculum": ("page=curriculum&run=boxes", "#v-page-curriculum .v-chart"),
    "playground": ("page=playground&run=boxes", "#v-page-playground button"),
    "notes": ("page=notes", "#v-notes tbody tr"),
    "note": (f"page=notes&source=train&split=train&{GROUP[14:]}&rollout=1", "#v-note-save"),
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The address of an inspector over runs of pictures, clips and an episode, with a note."""
    from vlrl.app.notes import Notes
    from vlrl.app.queries import RolloutKey
    root = tmp_path_factory.mktemp("axe") / "runs"
    made_runs.write(root / "clips", "clips", steps=2)
    made_runs.RunFolder(root / "film").write_rollouts(0, 0, [made_runs.zoomed(1, turns=4)])
    made_runs.RunFolder(root / "many").write_rollouts(0, 0, [made_runs.with_many_images(1, texts=TEXTS)])
    made_runs.write(root / "slow", "boxes", steps=2, seed=1)
    made_runs.write(root / "boxes", "boxes", steps=2)
    notes, key = Notes(root), RolloutKey("boxes", "train", "train", 1, "train-1-5", 1)
    for name in ("anna", "ben"):
        notes.put(key, flag="good", comment="so it is", sample="boxes-5", by=name)
    notes.label("boxes", tags=("baseline",), archived=True)
    with serving(root) as address:
        yield address


def lasting(page, scheme) -> list[str]:
    """What axe-core finds against WCAG 2.2 (A, AA) and its own best practices, a line each; in the dark only what goes
    by colours. Not what is wrong of a colour that is fading."""
    by_colour = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
    for _ in range(4):
        page.wait_for_timeout(300)
        if not (found := axe.Axe().run(page, options=by_colour if scheme == "dark" else {}).response["violations"]):
            break
    return [f"{scheme}, {rule['id']}: {node['target']} {node['html'][:200]} {node['failureSummary'][:300]!r}"
            for rule in found for node in rule["nodes"][:4]]


@pytest.mark.parametrize("name", PAGES)
def test_no_page_violates_a_rule_of_axe_or_scrolls_sideways(mine, page, name):
    query, shown = PAGES[name]
    page.goto(f"{mine}?{query}")
    page.locator(shown).first.scroll_into_view_if_needed()
    expect(page.locator(shown).first).to_be_visible()
    if "chart" in shown:
        expect(page.locator(".v-drawn").first).to_be_visible()  # plots are drawn as they come into view
    if name == "list":
        page.get_by_text("More filters").click()
    for scheme in ("light", "dark"):  # which the page follows while it is open
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"document.body.classList.contains('dark') === {str(scheme == 'dark').lower()}")
        if name == "list":
            page.keyboard.press("?")
            assert lasting(page, scheme) == []
            page.keyboard.press("Escape")
        page.evaluate("scrollTo(0, 0)")
        assert lasting(page, scheme) == []
    for width in (640, 390):  # 1280 pixels at 200 % leave 640; 390 are a phone's
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


MOST_TABS = 120
SEEN = """() => {
  const at = document.activeElement, shown = [at, at.closest("label")].filter(Boolean).map(e => getComputedStyle(e));
  return at.matches(":focus-visible") && shown.some(
    s => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0 || s.boxShadow !== "none"); }"""


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("keys")
    run = made_runs.write(root / "boxes", "boxes", steps=4)
    record = {"alert": "zero_variance_above", "step": 1, "value": 0.95, "limit": 0.9,
              "text": "at step 1: 95% of the groups have equal rewards"}
    (run.path / "alerts.jsonl").write_text(json.dumps(record) + "\n")
    with serving(root) as address:
        yield address


@pytest.fixture
def keys(chromium, one_run):
    """The first page, in a window without a pointer."""
    with opened(chromium) as page:
        page.goto(one_run)
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


def test_answers_that_cheat(keys):
    open_run(keys)
    follow(keys, keys.get_by_role("link", name="full reward, but unusual", exact=True))
    keys.wait_for_url("**odd=yes**")
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
