"""The playground in a real browser, on the embedded model."""

import itertools
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect

from tests.app.conftest import opened, serving
from tests.app.test_playground import save_checkpoint, write_run

pytestmark = [pytest.mark.browser,
              *(pytest.mark.filterwarnings(f"ignore:{said}") for said in (  # Gradio's queue with pandas 3
                  "'future.no_silent_downcasting' is deprecated", "The copy keyword is deprecated"))]
SLOW = 180_000
"""Milliseconds; the first answer waits for torch to be imported."""
WATCH = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const text = document.querySelector("#v-play-answer .v-live")?.innerText;
        if (text !== undefined && window.seen.at(-1) !== text) window.seen.push(text);
    }).observe(document.querySelector("#v-page-playground"), {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("playground")
    save_checkpoint(write_run(root, "quickstart"), 80)
    with serving(root) as address:
        yield address


def visit(page: Page, address: str, query: str = "") -> None:
    page.goto(f"{address}?page=playground{query}")
    expect(page.locator("#v-play-preview img")).to_be_visible()
    page.evaluate(WATCH)


def choose(page: Page, box: str, words: str) -> None:
    page.locator(f"{box} input").click()
    page.get_by_role("option", name=words).click()


def fill(page: Page, box: str, value: str) -> None:
    place = page.locator(f"{box} input, {box} textarea").first
    place.fill(value)
    place.press("Tab")


def status(page: Page, phase: str) -> None:
    expect(page.locator(f"#v-play-status [data-phase={phase}]")).to_be_visible(timeout=SLOW)


def test_answers_stream_and_show_rewards_and_boxes(page, address):
    visit(page, address)
    choose(page, "#v-play-model", "tiny-qwen3-vl, as shipped")
    choose(page, "#v-play-task", "grounding, as in run quickstart")
    expect(page.locator("#v-play-preview")).to_contain_text("heldout-000000")
    page.locator("#v-play-next").click()
    expect(page.locator("#v-play-preview")).to_contain_text("heldout-000001")
    expect(page.locator("#v-play-most input")).to_have_value("24")  # as in the run
    page.locator("#v-play-ask").click()
    status(page, "done")
    cards = page.locator("#v-play-answer .v-card")
    expect(cards).to_have_count(4)
    texts = [card.locator(".v-final").inner_text() for card in cards.all()]
    seen = [text for text in page.evaluate("window.seen") if text != "…"]
    assert seen and all(texts[0].startswith(text) for text in seen)
    expect(cards.first.locator(".v-reward")).not_to_have_text("–")
    expect(cards.first).to_contain_text("iou")
    marks = page.locator("#v-play-answer .v-marks")
    expect(marks.locator("[data-v-mark=t]")).to_have_count(1)
    expect(marks.locator("g[data-v-mark]")).to_have_count(1 + sum(text.startswith("[") for text in texts))
    first = page.locator("#v-play-answer").get_by_text("Tokens of answer #0")
    first.click()
    expect(page.locator("#v-play-answer .v-tokens").first).to_be_visible()


def test_text_grows_until_it_is_stopped_while_a_second_tab_waits(chromium, page, address, tiny_models):
    visit(page, address, f"&model={quote(str(tiny_models['qwen3_vl']))}")  # random: it hardly ever ends an answer
    fill(page, "#v-play-most", "8000")
    fill(page, "#v-play-temperature", "0")  # it goes in a circle, and writes on for a minute
    with opened(chromium) as other:
        visit(other, address)
        page.locator("#v-play-ask").click()
        # neither waits for a frame to be drawn, which takes long beside a writing model on a busy machine
        page.wait_for_function("window.seen.filter(text => text !== '…').length > 4", timeout=SLOW, polling=50)
        other.locator("#v-play-ask").click()
        status(other, "waiting")
        expect(other.locator("#v-play-status")).to_contain_text("another tab")
        page.locator("#v-play-stop").dispatch_event("click")
        status(page, "stopped")
        seen = [text for text in page.evaluate("window.seen") if text != "…"]
        assert len({len(text) for text in seen}) > 3 and all(b.startswith(a[:20]) for a, b in itertools.pairwise(seen))
        expect(page.locator("#v-play-answer .v-live")).to_have_count(1)  # what was written stays
        status(other, "done")


def test_an_upload_has_boxes_and_no_rewards(page, address, tmp_path: Path):
    image = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(image).ellipse((30, 20, 70, 60), fill="red")
    image.save(tmp_path / "a<b>.png")
    visit(page, address)
    page.get_by_label("An upload").click()
    page.locator("#v-play-ask").click()
    expect(page.locator("#v-play-status")).to_contain_text("Choose an image or a video first")
    page.locator("#v-play-file input[type=file]").set_input_files(tmp_path / "a<b>.png")
    expect(page.locator("#v-play-file")).to_contain_text(".png")
    page.locator("#v-play-ask").click()
    expect(page.locator("#v-messages-playground")).to_contain_text("needs a question")
    fill(page, "#v-play-question", "Locate the red circle. Answer with its box as [x1, y1, x2, y2].")
    page.locator("#v-play-ask").click()
    status(page, "done")
    expect(page.locator("#v-play-answer")).to_contain_text("No rewards: an upload has no target")
    expect(page.locator("#v-play-answer .v-marks g[data-v-mark]").first).to_be_attached()
    expect(page.locator("#v-play-answer .v-reward").first).to_have_text("–")


def test_a_checkpoint_by_link_and_one_that_is_gone(phone, address):
    visit(phone, address, "&run=quickstart&sample=%235&split=train")
    expect(phone.locator("#v-play-model input")).to_have_value("quickstart, step 80")
    expect(phone.locator("#v-play-preview")).to_contain_text("train-000005")
    assert phone.evaluate("document.documentElement.scrollWidth") == 400
    choose(phone, "#v-play-task", "qa, by its defaults")
    expect(phone.locator("#v-play-preview")).to_contain_text("data.train is not set")
    phone.goto(f"{address}?page=playground&model=quickstart/checkpoints/step-000079")
    expect(phone.locator("#v-play-preview img")).to_be_visible()
    phone.locator("#v-play-ask").click()
    expect(phone.locator("#v-play-status")).to_contain_text("was deleted", timeout=SLOW)
