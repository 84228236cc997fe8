"""Flags where the answers are, filters as chips, and the bar above all pages, without a browser."""

import contextlib
import json
import re
import sqlite3
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl.app import context, controls, filters, flagging
from vlrl.app.index import Index, Query
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import Notes
from vlrl.app.queries import RolloutKey
from vlrl.app.site import Site, location

KEY = RolloutKey("boxes", "train", "train", 0, "train-0-1", 2)


@pytest.fixture
def site(tmp_path):
    made_runs.write(tmp_path / "boxes", "boxes", steps=1, evaluate=False)
    library = Library(tmp_path)
    index = Index(library)
    yield Site(library, index, MediaStore(library), Notes(tmp_path))
    index.close()


def asked(**more) -> str:
    return json.dumps({"key": controls.packed(KEY), "n": 7, **more})


def test_a_flag_and_a_comment_are_written_one_by_one(site):
    assert flagging.save_note(site, asked(flag="good")) == ("", "7")
    assert flagging.save_note(site, asked(comment="<b>")) == ("", "7")
    [found] = site.notes.all()
    assert (found.key, found.flag, found.comment, found.sample) == (KEY, "good", "<b>", "boxes-1")
    assert flagging.save_note(site, asked(flag="")) == ("", "7") and site.notes.all()[0].flag == ""


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "null", "[" * 100_000, asked(flag=["good"]), asked(flag="great"), asked(comment="x" * 20_000),
    json.dumps({"key": controls.packed(KEY._replace(run="../etc")), "n": 1, "flag": "bad"}),
    json.dumps({"key": controls.packed(KEY._replace(index=99)), "n": 1, "flag": "bad"})])
def test_what_cannot_be_written_is_said(site, text):
    said, number = flagging.save_note(site, text)
    assert 'role="alert"' in said and re.fullmatch(r"\d+ failed", number) and not site.notes.all()


def test_reviewing_leaves_out_what_has_a_note(site):
    query = filters.query_of({"flag": "no"}, [KEY])
    assert (site.index.rollouts(query).total, site.index.rollouts(Query()).total) == (15, 16)
    assert site.index.rollouts(filters.query_of({"flag": "yes"}, [KEY])).rows[0].key == KEY
    assert site.index.rollouts(filters.query_of({"flag": "no"}, [])).total == 16


def test_notes_of_earlier_versions_are_unsure(site):
    site.notes.put(KEY, flag="bad")
    with contextlib.closing(sqlite3.connect(site.notes.path)) as base, base:
        base.execute("UPDATE notes SET flag = 'look'")
    assert [note.flag for note in site.notes.all(flag="unsure")] == ["unsure"]
    assert site.notes.all(flag="bad") == [] and site.notes.all()[0].flag == "unsure"


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_each_filter_is_a_chip_that_takes_it_away():
    where = {"run": "a", "rmin": "0.5", "rmax": "0.5", "from": "3", "alike": "yes", "part": "iou", "pmax": "1",
             "at": "4", "step": "1", "group": "g", "text": "<b>"}
    found = {words(chip): location(unescape(re.search('href="([^"]+)"', chip)[1])) for chip in filters.chips(where)}
    assert set(found) == {"reward 0.5 ×", "steps ≥ 3 ×", "zero variance ×", "part iou ×", "iou ≤ 1 ×", "text <b> ×"}
    assert found["reward 0.5 ×"] == {"page": "rollouts", "run": "a", "from": "3", "alike": "yes", "part": "iou",
                                     "pmax": "1", "text": "<b>"}


def test_a_preset_in_view_leads_back_to_everything():
    where = {"run": "a", "set": "train", "cut": "yes", "rmin": "1"}
    links = {words(a): location(unescape(re.search('href="([^"]+)"', a)[1]))
             for a in re.findall("<a.*?</a>", filters.presets(where))}
    assert links["cut off"] == {"page": "rollouts", "run": "a", "set": "train"}
    assert links["tool errors"] == {"page": "rollouts", "run": "a", "set": "train", "tool": "yes", "view": "rollouts"}
    assert filters.presets(where).count("aria-current") == 1


def test_the_run_of_a_group_opened_from_all_is_not_the_context():
    where = {"run": "a", "in": "all", "group": "g", "from": "2", "split": "train"}
    assert context.selection(where) == {"from": "2"}
    assert context.selection({**where, "in": ""}) == {"run": "a", "from": "2"}


@given(st.dictionaries(st.sampled_from(["run", "set", "from", "to", "rmin", "part", "text", "alike", "end", "flag"]),
                       st.text(max_size=20)))
@settings(max_examples=50)
def test_chips_and_presets_are_safe_for_any_text(where):
    shown = "".join([*filters.chips(where), filters.presets(where)])
    assert re.sub(r"</?(?:a|nav)(?: [\w-]+=\"[^\"<>]*\"| [\w-]+)*>", "", shown).count("<") == 0
