"""The page of rollouts in a real browser."""

import contextlib

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import Gate, opened, serving
from vlrl.app.notes import Notes

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SORTED = "(values = [...document.querySelectorAll('.v-row .v-value b')].map(b => parseFloat(b.textContent)))"
"""The rewards in the list, top down, as `values`."""


def counted(page, words: str) -> None:
    expect(page.locator("#v-list .v-count")).to_contain_text(words)


def test_a_link_fills_the_fields_and_opens_the_group(page, served):
    kind, run = page.locator("select[name=kind]"), page.locator("#v-context select[name=run]")
    page.goto(f"{served}?page=rollouts&run=boxes&kind=train&order=step")
    expect(kind).to_have_value("train")
    expect(page.locator("select[name=order]")).to_have_value("step")
    page.goto(f"{served}?page=runs&run=gone")
    expect(run.locator(":checked")).to_have_text("gone (not there)")
    expect(page.locator("#v-diff")).to_contain_text("there is no run 'gone'")
    run.select_option("boxes")
    expect(run.get_by_text("gone")).to_have_count(0)
    page.goto(f"{served}?run=boxes&step=1&group=train-1-5&rollout=2")
    expect(page.locator(".v-card")).to_have_count(4)
    expect(kind).to_have_value("train")
    expect(page.locator(".v-chosen")).to_have_id("v-answer-2")
    expect(page.locator("#v-tokens h3")).to_have_text("Tokens of #2")
    expect(page.locator("#v-list .v-open")).to_contain_text("boxes-5")
    page.goto(f"{served}?run=boxes&step=2")
    counted(page, "4 groups")
    expect(page.locator("input[name=from]")).to_have_value("2")
    page.goto(f"{served}?page=rollouts&run=boxes&source=eval&split=heldout&step=4")
    counted(page, "6 groups")


def test_filter_and_sort(page, served):
    page.goto(f"{served}?page=rollouts&run=boxes")
    for kind, count in (("train", 16), ("all", 28), ("train", 16)):
        page.locator("select[name=kind]").select_option(kind)
        counted(page, f"{count} groups")
    page.locator("select[name=order]").select_option("worst")
    page.wait_for_function("location.search.includes('order=worst')")
    page.wait_for_function(f"{SORTED} && values.length === 16 && values.every((v, i) => !i || v >= values[i - 1])")
    page.get_by_text("More filters").click()
    page.locator("input[name=rmin]").fill("0.9")
    page.wait_for_function("location.search.includes('rmin=0.9')")
    page.locator("select[name=view]").select_option("rollouts")
    counted(page, "rollouts")
    page.locator("select[name=sort]").select_option("reward")
    page.wait_for_function(f"{SORTED} && values.length > 5 && "
                           "values.every((v, i) => v >= 0.9 && (!i || v <= values[i - 1]))")
    page.get_by_role("link", name="reward ≥ 0.9 ×").click()
    counted(page, "64 rollouts")
    expect(page.locator("input[name=rmin]")).to_have_value("")


def test_run_split_and_steps_are_kept_by_every_page(page, served):
    page.goto(served)
    bar = page.locator("#v-context")
    bar.get_by_label("Run", exact=True).select_option("boxes")
    bar.get_by_label("Steps from").fill("2")
    page.wait_for_function("location.search.includes('from=2')")
    expect(page.get_by_role("checkbox", name="curves of boxes", exact=True)).to_have_attribute("aria-checked", "true")
    for name, shown in (("History", "Prompts whose answers differ most"), ("Compare", "heldout after step"),
                        ("Curriculum", "groups drawn"), ("Rollouts", "8 groups")):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.locator(f"#v-page-{name.lower()}")).to_contain_text(shown)
        assert "run=boxes" in page.url and "from=2" in page.url
        expect(bar.get_by_label("Run", exact=True)).to_have_value("boxes")
    page.locator(".v-row").first.click()
    expect(page.locator(".v-card")).to_have_count(4)
    page.locator(".v-facts a").first.click()  # its history
    expect(page.locator("#v-page-history .v-tile, #v-page-history .v-list").first).to_be_visible()
    page.get_by_role("link", name="Rollouts", exact=True).click()
    counted(page, "groups")
    page.get_by_role("link", name="steps ≥ 2 ×").click() if "from=2" in page.url else None
    bar.get_by_label("Run", exact=True).select_option("")
    counted(page, "groups")
    page.wait_for_function("!location.search.includes('run=')")


def test_a_group_with_its_boxes_and_tokens(page, served):
    page.goto(f"{served}?page=rollouts&run=boxes&order=mixed&kind=train")
    page.locator(".v-row").first.click()
    expect(page.locator(".v-card")).to_have_count(4)
    assert "group=" in page.url and "order=mixed" in page.url
    expect(page.locator(".v-group .v-facts")).to_contain_text("grounding")
    expect(page.locator(".v-frame").first.locator("img")).to_have_js_property("complete", True)
    marks = page.locator(".v-marks g:not(.v-of-t)")
    pairs = marks.evaluate_all("""all => all.map(g => [getComputedStyle(g.querySelector('.v-line')).stroke, (probe => {
        probe.style.color = getComputedStyle(document.getElementById('v-answer-' + g.dataset.vMark))
            .getPropertyValue('--v-c');
        document.body.append(probe);
        return getComputedStyle(probe).color; })(document.createElement('i'))])""")
    assert pairs and all(line == card for line, card in pairs)  # one colour a rollout
    for box in page.locator(".v-draw input[type=checkbox]").all():
        box.uncheck()
    assert not any(mark.is_visible() for mark in marks.all())
    page.locator("a.v-pick", has_text="Entropy").click()
    expect(page.locator("a.v-pick[aria-current]")).to_have_text("Entropy")
    label = page.locator(".v-tokens .v-tok").nth(4).get_attribute("aria-label")
    assert "log p" in label and "entropy" in label
    page.locator(".v-tokens .v-tok").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.v-tokens .v-tok')[1]")


def test_keys(page, served):
    page.goto(f"{served}?page=rollouts&run=boxes&kind=train")
    counted(page, "16 groups")
    names = page.locator(".v-row .v-line1").all_text_contents()
    for key in ("j", "ArrowDown", "k", "j"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.querySelector('.v-line1').textContent") == names[1]
    for key, place in (("Enter", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(page.locator(".v-row.v-open .v-line1")).to_have_text(names[place])
    for key, answer in (("ArrowRight", 0), ("l", 1), ("h", 0)):
        page.keyboard.press(key)
        expect(page.locator(".v-chosen")).to_have_id(f"v-answer-{answer}")
    page.keyboard.press("?")
    expect(page.locator("#v-keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#v-keys")).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("j")  # into the field
    expect(page.locator("input[name=text]")).to_have_value("j")
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(page.locator("#v-group")).to_be_hidden()


@contextlib.contextmanager
def locations_held(gate):
    """Holds back what asks for a location, but no tick; yields the requests. They go on at the end."""
    gate.close(lambda request: request.post_data_json.get("event_data") is None)
    yield gate.held
    gate.release()


def test_keys_pressed_before_the_answer_are_meant_for_it(page, served):
    gate = Gate(page)
    page.goto(f"{served}?page=rollouts&run=boxes&kind=train")
    counted(page, "16 groups")
    names = page.locator(".v-row .v-line1").all_text_contents()
    page.locator(".v-row").nth(1).click()
    expect(page.locator(".v-card")).to_have_count(4)
    opened_row = page.locator(".v-row.v-open .v-line1")
    with locations_held(gate) as kept:
        page.keyboard.press("j")
        expect(opened_row).to_have_text(names[2])  # a tick brought the list; the group beside it is still the old one
        page.keyboard.press("k")
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert len(kept) == 1
    expect(opened_row).to_have_text(names[3])
    expect(page.locator("#v-group .v-facts")).to_contain_text(names[3].split()[0])
    with locations_held(gate):
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("u")  # away at once, and nothing that waited comes after it
        assert "group=" not in page.url
    expect(page.locator("#v-group")).to_be_hidden()
    counted(page, "16 groups")
    expect(opened_row).to_have_count(0)
    assert "group=" not in page.url


def test_a_key_flags_an_answer_and_an_episode_is_walked_with_the_arrow_keys(chromium, tmp_path):
    made_runs.write(tmp_path / "boxes", "boxes", steps=2, evaluate=False)
    made = made_runs.zoomed(1, turns=64, text="<img src=x onerror=alert(1)>\u202e</article>" * 100)
    made_runs.RunFolder(tmp_path / "a").write_rollouts(0, 0, [made])
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(f"{address}?page=rollouts&run=boxes")
        counted(page, "8 groups")
        page.locator(".v-row").first.click()
        expect(page.locator(".v-card")).to_have_count(4)
        flags = page.locator(".v-flags")
        expect(flags).to_have_count(1)  # on the first card, as none is chosen
        for key in "gbsgb":  # as fast as they come
            page.keyboard.press(key)
        expect(page.locator(".v-chosen")).to_have_id("v-answer-1")
        expect(page.locator("#v-list .v-row").first).to_contain_text("2 good")
        expect(page.locator("#v-list .v-row").nth(1)).to_contain_text("bad")
        page.keyboard.press("k")
        expect(page.locator("#v-answer-1 > .v-chips").first).to_have_text("bad")
        expect(page.locator("#v-answer-0 button[data-flag=good]")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("c")
        page.keyboard.type("good <b>one</b>")
        page.keyboard.press("Enter")
        expect(flags.locator("input")).to_have_attribute("data-note", "good <b>one</b>")
        page.keyboard.press("g")  # once more takes it away, and stays
        expect(page.locator("#v-answer-0 button[data-flag=good]")).to_have_attribute("aria-pressed", "false")
        found = {note.key[3:]: (note.flag, note.comment) for note in Notes(tmp_path).all()}
        step, group = next(key[:2] for key, (_, words) in found.items() if words)
        assert sorted(found[step, group, i] for i in range(4)) == [
            ("", "good <b>one</b>"), ("bad", ""), ("good", ""), ("unsure", "")] and len(found) == 5
        page.get_by_role("link", name="to review", exact=True).click()
        counted(page, "7 groups")  # not the one whose four answers all have a flag or a comment
        expect(page.locator("#v-list .v-row", has_text="3 of 4 fit")).to_have_count(1)
        page.goto(f"{address}?page=rollouts&run=a&step=0&group={made.id}&rollout=1")
        turns = page.locator(".v-turns .v-turn")
        expect(turns).to_have_count(65)
        page.keyboard.press("t")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        expect(turns.nth(2)).to_be_focused()
        expect(turns.nth(2).locator("img")).to_have_js_property("complete", True)
        expect(page.locator(".v-chosen")).to_have_id("v-answer-1")  # the keys did not leave the answer
        for kind, begins in (("gif", b"GIF8"), ("mp4", b"\0\0\0\x20ftyp")):
            with page.expect_download() as saved:
                page.get_by_role("link", name=f"as {kind.upper()}").click()
            assert saved.value.path().read_bytes().startswith(begins)
            assert saved.value.suggested_filename.endswith(f"-1.{kind}")
        page.goto(f"{address}?page=rollouts&run=a&view=rollouts&tool=yes&tmin=64&end=limit")
        counted(page, "1 rollout")
        expect(page.locator(".v-row")).to_contain_text("tool errors: 1")
        for words in ("tool errors ×", "turns ≥ 64 ×", "ended by limit ×"):
            expect(page.get_by_role("link", name=words)).to_be_visible()


def test_reading_an_answer(page, served):
    page.goto(f"{served}?page=rollouts&run=boxes&text=could%20be%20(further|a)%20left&step=3&group=train-3-0")
    expect(page.locator(".v-card")).to_have_count(4)
    page.wait_for_function("CSS.highlights.get('v-found')?.size > 0")
    hits = page.evaluate("[...CSS.highlights.get('v-found')].map(range => range.toString().toLowerCase())")
    assert set(hits) == {"could be further left"}
    marks = page.locator(".v-marks g:not(.v-of-t)")
    own = marks.first.get_attribute("data-v-mark")
    faint = "all => all.filter(g => getComputedStyle(g).opacity < .5).map(g => g.dataset.vMark)"
    assert marks.evaluate_all(faint) == []
    page.locator(f"#v-answer-{own}").hover()
    others = set(marks.evaluate_all("all => all.map(g => g.dataset.vMark)")) - {own}
    assert others and set(marks.evaluate_all(faint)) == others  # its own mark alone is bright
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("a")
    page.wait_for_function("""(r => r.top >= 0 && r.bottom <= innerHeight)(
        document.querySelector('.v-card .v-final').getBoundingClientRect())""")


def test_back_and_forward_and_a_click_is_one_round_trip(page, served):
    page.goto(f"{served}?page=rollouts&run=boxes&kind=train")
    counted(page, "16 groups")
    asked = []
    page.on("request", lambda request: asked.append(request) if request.method == "POST" and
            "tick" not in (request.post_data or "") else None)
    page.locator(".v-row").nth(3).click()
    expect(page.locator(".v-card")).to_have_count(4)
    queries = [r.post_data_json["data"][0] for r in asked]
    assert sum("group=" in query for query in queries) <= 2  # the click, and at most one look at what is new
    first = page.locator(".v-facts").text_content()
    page.locator(".v-row").nth(5).click()
    expect(page.locator(".v-facts")).not_to_have_text(first)
    page.go_back()
    expect(page.locator(".v-facts")).to_have_text(first)
    page.go_back()
    expect(page.locator("#v-group")).to_be_hidden()
    page.go_forward()
    expect(page.locator(".v-facts")).to_have_text(first)
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("#v-page-runs")).to_be_visible()
    page.go_back()
    expect(page.locator(".v-facts")).to_have_text(first)


def test_a_phone_shows_the_list_or_a_group(phone, served):
    phone.goto(f"{served}?page=rollouts&run=boxes")
    counted(phone, "16 groups")
    phone.locator(".v-row").nth(3).click()
    expect(phone.locator(".v-card")).to_have_count(4)
    expect(phone.locator("#v-list")).to_be_hidden()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 400
    phone.get_by_role("link", name="‹ list").click()
    counted(phone, "16 groups")
