"""Reading answers in a real browser: Markdown and LaTeX, order, copying; pictures that zoom; grids; patience."""

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import Gate, opened, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = ("<think># Way\n\n<img src=x onerror=\"window.hacked=1\"> [here](http://127.0.0.2/a) "
           "![p](http://127.0.0.2/p.png) <javascript:window.hacked=1>\n\n$\\href{javascript:window.hacked=1}{x}$ "
           "$\\text{<script>window.hacked=1</script>}$</think>\n<answer>**$\\frac{1}{2}$**</answer>")
TEXTS = ("<think>a</think><answer>low</answer>",
         "<think>## Steps\n\n1. *left* of `b`\n2. so $x^2$\n\n| a | b |\n|---|---|\n| 1 | 2 |</think>\n"
         "<answer>$$\\sqrt{2}$$</answer>", HOSTILE, "<think>b</think><answer>high</answer>")
MANY = "page=rollouts&run=many&step=0&group=many-1"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The address of an inspector over a group of twelve pictures whose rewards rise, and one of a single picture."""
    root = tmp_path_factory.mktemp("reading") / "runs"
    made_runs.write(root / "boxes", "boxes", steps=2, evaluate=False)
    made_runs.write(root / "clips", "clips", steps=1, evaluate=False)
    made_runs.RunFolder(root / "clips").write_rollouts(1, 0, [made_runs.tracked()])
    made_runs.RunFolder(root / "many").write_rollouts(0, 0, [made_runs.with_many_images(1, texts=TEXTS)])
    with serving(root) as address:
        yield address


def test_an_answer_is_read_as_written_and_as_meant(mine, page):
    page.goto(f"{mine}?{MANY}&rollout=1")
    expect(page.locator(".v-card")).to_have_count(4)
    page.keyboard.press("r")
    expect(page.locator(".v-card")).to_have_count(1)
    assert not page.locator("#v-list").is_visible()
    written, meant = page.locator(".v-both > section").all()
    expect(written).to_contain_text("## Steps")
    assert [meant.locator(tag).count() for tag in ("ol li", "em", "td", "code:not(.v-tag)")] == [2, 1, 2, 1]
    assert "Steps" in meant.locator(".v-head-h2").inner_text() and "##" not in meant.inner_text()
    sizes = meant.locator("math").evaluate_all(
        "all => all.map(m => [m.localName, m.getBoundingClientRect().width > 5])")
    assert sizes == [["math", True]] * 2 and meant.locator("msqrt, msup").count() == 2
    width = page.locator(".v-both").evaluate("e => e.getBoundingClientRect().width")
    assert width > 1100 or page.locator(".v-many").count()
    page.keyboard.press("l")  # the next answer, read as well
    expect(page.locator("#v-answer-2 .v-both")).to_be_visible()
    page.keyboard.press("r")
    expect(page.locator(".v-card")).to_have_count(4)


def test_what_a_model_wrote_loads_and_runs_nothing_and_twelve_pictures_stand_in_a_grid(mine, page):
    page.goto(f"{mine}?{MANY}&rollout=2&read=yes")
    meant = page.locator(".v-both > section").nth(1)
    expect(meant.locator("mfrac")).to_have_count(1)
    assert meant.locator("img, a, script, [href], [src], [onerror]").count() == 0
    expect(meant).to_contain_text("[here](http://127.0.0.2/a)")
    expect(meant).to_contain_text("<script>window.hacked=1</script>")
    assert page.evaluate("window.hacked") is None
    page.goto(f"{mine}?{MANY}")
    expect(page.locator(".v-pic")).to_have_count(12)
    page.locator(".v-pic img").last.evaluate("i => i.decode()")
    boxes = page.locator(".v-pic .v-frame").evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
    assert all(b["top"] > 0 and b["bottom"] < 900 and b["width"] > 80 for b in boxes)
    assert len({round(b["left"]) for b in boxes}) >= 3 and len({round(b["top"]) for b in boxes}) >= 3
    answers = page.locator(".v-card .v-reward").evaluate_all("all => all.map(e => e.getBoundingClientRect().bottom)")
    assert len(answers) == 4 and max(answers) < 900


def test_copy_order_and_the_way_to_the_answer(mine, chromium):
    allowed = ("clipboard-read", "clipboard-write")
    with opened(chromium, permissions=allowed, height=500) as page:
        page.goto(f"{mine}?{MANY}&rollout=1&read=yes")
        picks = page.locator(".v-reads .v-pick")
        expect(picks).to_have_text(["#0 0", "#1 0.25", "#2 0.5", "#3 0.75"])
        page.keyboard.press("y")
        expect(page.locator(".v-tools [role=status]")).to_have_text("copied")
        assert page.evaluate("navigator.clipboard.readText()") == TEXTS[1]
        page.evaluate("scrollTo(0, 0)")
        page.get_by_role("button", name="to the answer").click()
        page.wait_for_function("""(r => r.top >= 0 && r.bottom <= innerHeight)(
            document.querySelector('.v-card .v-final').getBoundingClientRect())""")
        page.keyboard.press("o")
        expect(picks.first).to_have_text("#3 0.75")  # the best
        page.keyboard.press("h")  # before #1 stands #2 now
        expect(page.locator("#v-answer-2 .v-both")).to_be_visible()
        page.keyboard.press("o")
        expect(picks.first).to_have_text("#0 0")  # the worst
        page.keyboard.press("r")
        expect(page.locator(".v-strip .v-card .v-reward").first).to_have_text("0")


def test_a_picture_zooms_by_wheel_about_the_pointer_moves_and_fits(mine, page):
    page.goto(f"{mine}?page=rollouts&run=boxes&step=1&group=train-1-5")
    box, frame = page.locator(".v-pic .v-zoom").first, page.locator(".v-pic .v-frame").first
    expect(frame).to_be_visible()
    frame.scroll_into_view_if_needed()
    before = frame.bounding_box()
    x, y = before["x"] + before["width"] * 0.7, before["y"] + before["height"] * 0.4
    page.mouse.move(x, y)
    page.mouse.wheel(0, -500)
    page.wait_for_function("document.querySelector('.v-pic .v-zoom').dataset.scale > 1.5")
    now = frame.bounding_box()
    assert now["width"] > 1.5 * before["width"] and abs(box.bounding_box()["height"] - before["height"]) < 4
    assert (x - now["x"]) / now["width"] == pytest.approx(0.7, abs=0.02)  # what lies under the pointer stays there
    assert (y - now["y"]) / now["height"] == pytest.approx(0.4, abs=0.02)
    assert page.locator(".v-pic .v-marks").first.bounding_box()["width"] == pytest.approx(now["width"], abs=1)
    page.mouse.down()
    page.mouse.move(x - 40, y - 20, steps=4)
    page.mouse.up()
    moved = frame.bounding_box()
    assert now["x"] - moved["x"] == pytest.approx(40, abs=2) and now["y"] - moved["y"] == pytest.approx(20, abs=2)
    page.get_by_role("button", name="fit").click()
    assert frame.bounding_box()["width"] == pytest.approx(before["width"], abs=2)
    assert page.get_by_role("button", name="fit").count() == 0
    page.mouse.move(5, 5)
    page.mouse.wheel(0, 200)  # the page scrolls, and what comes under the pointer with it does not zoom
    assert page.locator("[data-scale]").count() == 0


def test_a_request_that_is_lost_is_said_and_the_page_can_be_loaded_again(mine, page):
    gate = Gate(page)
    page.goto(f"{mine}?page=rollouts&run=boxes&kind=train")
    page.locator(".v-row").first.click()
    expect(page.locator(".v-card")).to_have_count(4)
    shown, before = page.url, page.locator(".v-card").all_inner_texts()
    gate.close()
    page.keyboard.press("j")
    page.keyboard.press("l")  # waits for the group
    late = page.locator("#v-late")
    expect(late).to_contain_text("has not answered for 10 s")
    page.keyboard.press("l")  # follows the link in view
    assert page.url == f"{shown}&rollout=0" and gate.held
    gate.release()
    expect(page.locator(".v-chosen")).to_have_id("v-answer-0")
    expect(late).to_have_count(0)
    gate.close()
    page.keyboard.press("j")
    again = page.get_by_role("button", name="Load again")
    expect(again).to_be_visible()
    gate.open()
    again.click()
    expect(page.locator(".v-card")).not_to_have_text(before, use_inner_text=True)
    expect(page.locator(".v-card")).to_have_count(4)
    assert gate.held and late.count() == 0


@pytest.mark.parametrize("group", ["step=1&group=tracked", "step=0&group=train-0-1"])
def test_a_clip_is_led_by_its_timeline_spans_and_frames(mine, page, group):
    page.goto(f"{mine}?page=rollouts&run=clips&{group}")
    expect(page.locator(".v-clip video").first).to_be_visible()
    page.wait_for_function("document.querySelector('.v-clip video').readyState >= 1")
    expect(page.locator(".v-still img").first).to_have_js_property("complete", True)
    assert page.evaluate("[...document.querySelectorAll('.v-still img')].every(i => !i.complete || i.naturalWidth)")
    seek = page.locator(".v-seek").nth(2)
    seek.click()
    at = float(seek.get_attribute("data-at"))
    page.wait_for_function(f"Math.abs(document.querySelector('.v-clip video').currentTime - {at}) < 1e-3")
    (boxes_follow if "tracked" in group else along)(page, at)


def along(page, at):
    """The playhead stands at the time, a span and a place of a lane lead there."""
    whole = float(page.locator(".v-timeline").get_attribute("data-v-seconds"))
    head = "parseFloat(document.querySelector('.v-timeline').style.getPropertyValue('--v-at'))"
    page.wait_for_function(f"Math.abs({head} - {100 * at / whole}) < .1")
    bar = page.locator(".v-bar-span").first
    bar.click()
    start = float(bar.get_attribute("data-at"))
    page.wait_for_function(f"Math.abs(document.querySelector('.v-clip video').currentTime - {start}) < 1e-3")
    ticks = page.locator(".v-ticks")
    ticks.click(position={"x": ticks.bounding_box()["width"] / 4, "y": 3})
    page.wait_for_function(f"Math.abs({head} - 25) < 1")


def boxes_follow(page, at):
    """The box of the target over the clip is that of the frame at this time, and moves with it."""
    box = page.locator(".v-player g.v-of-t rect.v-line").first
    still = page.locator(".v-still").nth(2).locator("g.v-of-t rect").first
    at_two = "([box, still]) => ['x', 'y', 'width', 'height'].every(n => Math.abs(box.getAttribute(n) - still" \
             ".getAttribute(n)) < .01)"
    page.wait_for_function(at_two, arg=[box.element_handle(), still.element_handle()])
    page.locator(".v-seek").nth(5).click()
    other = page.locator(".v-still").nth(5).locator("g.v-of-t rect").first
    page.wait_for_function(at_two, arg=[box.element_handle(), other.element_handle()])
    assert box.get_attribute("x") != still.get_attribute("x")
