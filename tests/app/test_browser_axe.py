"""Every page, light and dark, under axe-core's rules of accessibility; by keyboard alone, narrow, and enlarged."""

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import serving
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


def violations(page) -> list[str]:
    """What axe-core finds against WCAG 2.2 (A, AA) and its own best practices: rule, and where, a line each."""
    found = axe.Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['target']} {node['html'][:200]} {node['failureSummary'][:300]!r}"
            for rule in found for node in rule["nodes"][:4]]


def lasting(page) -> list[str]:
    """Violations, but for those of a colour that is fading."""
    for _ in range(4):
        page.wait_for_timeout(300)
        if not (found := violations(page)):
            break
    return found


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
            assert lasting(page) == [], scheme
            page.keyboard.press("Escape")
        page.evaluate("scrollTo(0, 0)")
        assert lasting(page) == [], scheme
    for width in (640, 390):  # 1280 pixels at 200 % leave 640; 390 are a phone's
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
