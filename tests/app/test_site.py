"""What a page sends to a browser that already shows something."""

from __future__ import annotations

import gradio as gr

from vlrl.app.site import same


class Browser:
    """What a browser shows, and the digests that it sends with the next request."""

    def __init__(self, number):
        self.shown, self.digests = [""] * number, [""] * number

    def take(self, results):
        number = len(self.shown)
        for i, value in enumerate(results):
            if value != gr.skip():
                (self.shown if i < number else self.digests)[i % number] = value


def test_only_what_changed_is_sent():
    browser = Browser(2)
    browser.take(same(browser.digests, ("list", "group 0")))
    assert browser.shown == ["list", "group 0"]
    sent = same(browser.digests, ("list", "group 1"))
    assert [value == gr.skip() for value in sent] == [True, False, True, False]
    browser.take(sent)
    assert browser.shown == ["list", "group 1"]


def test_a_tick_answered_during_a_location_loses_no_later_location():
    """A tick asks for the list, beside a location that asks for the list and the group."""
    browser = Browser(2)
    browser.take(same(browser.digests, ("list", "group 0")))
    tick = [same(browser.digests[:1], ["list"])[0], gr.skip(), same(browser.digests[:1], ["list"])[1], gr.skip()]
    browser.take(same(browser.digests, ("list", "group 1")))
    browser.take(tick)
    browser.take(same(browser.digests, ("list", "group 0")))  # back again
    assert browser.shown == ["list", "group 0"]


def test_an_empty_digest_sends_in_any_case():
    assert same([""], [""])[0] == ""
