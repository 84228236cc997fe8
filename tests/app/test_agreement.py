"""Agreement between annotators, by hand and by scikit-learn; whose flags they are; tags of runs and the archive."""

import json
import math
import re
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from tests.app import made_runs
from tests.app.views import words
from vlrl.app import AppError, controls, filters, flagging, notes
from vlrl.app.index import Index, Query
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import FLAGS, Label, Notes, Pair
from vlrl.app.queries import RolloutKey
from vlrl.app.site import Site, location

KEY = RolloutKey("quickstart", "train", "train", 12, "00000384", 3)


def test_pairs_count_what_both_flagged():
    verdicts = [{"anna": "good", "ben": "good"}, {"anna": "bad", "ben": "good", "": "bad"}, {"anna": "good"}]
    assert notes.pairs(verdicts) == [Pair("anna", "ben", 2, 1, 0.0), Pair("", "anna", 1, 1, None),
                                     Pair("", "ben", 1, 0, 0.0)]
    assert notes.kappa([]) is None


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(FLAGS)), min_size=1, max_size=30))
def test_kappa_is_that_of_scikit_learn(both):
    found = notes.kappa(both)
    if found is None:
        assert len({flag for pair in both for flag in pair}) == 1
    else:
        assert math.isclose(found, cohen_kappa_score(*zip(*both, strict=True)), abs_tol=1e-9)


def test_each_annotator_has_a_flag_and_the_note_says_the_last(tmp_path):
    kept = Notes(tmp_path)
    kept.put(KEY, flag="good", by="anna")
    kept.put(KEY, flag="bad", comment="why", by="ben")
    assert kept.get(KEY).flag == "bad" and kept.verdicts() == {KEY: {"anna": "good", "ben": "bad"}}
    assert [note.flag for note in kept.all(by="anna")] == ["good"] and kept.all(by="carl") == []
    assert kept.all(by="anna", flag="bad") == [] and kept.flagged("ben") == (KEY,) and kept.flagged("") == (KEY,)
    kept.put(KEY, flag="", by="ben")
    assert kept.get(KEY).flag == "good" and kept.verdicts("quickstart") == {KEY: {"anna": "good"}}
    kept.put(KEY, flag="", comment="", by="anna")
    assert kept.all() == [] and kept.verdicts() == {}
    with pytest.raises(AppError, match="annotator's name has 61 characters; the limit is 60"):
        kept.put(KEY, flag="good", by="x" * 61)


def test_tags_and_the_archive_are_kept_apart_from_the_run(tmp_path):
    kept = Notes(tmp_path)
    assert kept.labels() == {} and not kept.path.exists()
    assert kept.label("a", tags=[" base  line ", "x", "x", ""]) == Label(("base line", "x"))
    assert kept.label("a", archived=True) == Label(("base line", "x"), True)
    kept.label("b", archived=True)
    assert kept.label("b", archived=False) == Label() and set(kept.labels()) == {"a"}
    for tags in (["x" * 61], [str(i) for i in range(21)]):
        with pytest.raises(AppError, match="at most 20 tags of at most 60 characters"):
            kept.label("a", tags=tags)


IN_BOXES = RolloutKey("boxes", "train", "train", 0, "train-0-1", 2)


@pytest.fixture
def site(tmp_path):
    made_runs.write(tmp_path / "boxes", "boxes", steps=1, evaluate=False)
    library = Library(tmp_path)
    index = Index(library)
    yield Site(library, index, MediaStore(library), Notes(tmp_path))
    index.close()


def asked(**more) -> str:
    return json.dumps({"key": controls.packed(IN_BOXES), "n": 7, **more})


def test_a_flag_and_a_comment_are_written_one_by_one(site):
    assert flagging.save_note(site, asked(flag="good")) == ("", "7")
    assert flagging.save_note(site, asked(comment="<b>")) == ("", "7")
    [found] = site.notes.all()
    assert (found.key, found.flag, found.comment, found.sample) == (IN_BOXES, "good", "<b>", "boxes-1")
    assert flagging.save_note(site, asked(flag="")) == ("", "7") and site.notes.all()[0].flag == ""
    query = filters.query_of({"flag": "no"}, [IN_BOXES])
    assert (site.index.rollouts(query).total, site.index.rollouts(Query()).total) == (15, 16)
    assert site.index.rollouts(filters.query_of({"flag": "yes"}, [IN_BOXES])).rows[0].key == IN_BOXES
    assert site.index.rollouts(filters.query_of({"flag": "no"}, [])).total == 16


def test_what_cannot_be_written_is_said(site):
    for text in ("", "[]", "{}", "null", "[" * 100_000, asked(flag=["good"]), asked(flag="great"),
                 asked(comment="x" * 20_000), *(
                     json.dumps({"key": controls.packed(IN_BOXES._replace(**wrong)), "n": 1, "flag": "bad"})
                     for wrong in ({"run": "../etc"}, {"index": 99}))):
        said, number = flagging.save_note(site, text)
        assert 'role="alert"' in said and re.fullmatch(r"\d+ failed", number) and not site.notes.all(), text[:90]
    for label in ({"key": "none", "n": 1, "tags": "x"}, {"key": "boxes", "n": 1, "tags": "x" * 99}, [], {},
                  {"key": "boxes", "n": 1, "archived": []}):
        said, number = flagging.save_label(site, json.dumps(label))
        assert 'role="alert"' in said and number.endswith("failed") and not site.notes.labels(), label


def test_each_filter_is_a_chip_and_presets_lead_back():
    where = {"run": "a", "rmin": "0.5", "rmax": "0.5", "from": "3", "alike": "yes", "part": "iou", "pmax": "1",
             "at": "4", "step": "1", "group": "g", "text": "<b>"}
    found = {words(chip): location(unescape(re.search('href="([^"]+)"', chip)[1])) for chip in filters.chips(where)}
    assert set(found) == {"reward 0.5 ×", "steps ≥ 3 ×", "zero variance ×", "part iou ×", "iou ≤ 1 ×", "text <b> ×"}
    assert found["reward 0.5 ×"] == {"page": "rollouts", "run": "a", "from": "3", "alike": "yes", "part": "iou",
                                     "pmax": "1", "text": "<b>"}
    where = {"run": "a", "set": "train", "cut": "yes", "rmin": "1"}
    links = {words(a): location(unescape(re.search('href="([^"]+)"', a)[1]))
             for a in re.findall("<a.*?</a>", filters.presets(where))}
    assert links["cut off"] == {"page": "rollouts", "run": "a", "set": "train"}
    assert links["tool errors"] == {"page": "rollouts", "run": "a", "set": "train", "tool": "yes", "view": "rollouts"}
    assert filters.presets(where).count("aria-current") == 1
    where = {"run": "a", "in": "all", "group": "g", "from": "2", "split": "train"}
    assert controls.selection(where) == {"from": "2"}
    assert controls.selection({**where, "in": ""}) == {"run": "a", "from": "2"}


@given(st.dictionaries(st.sampled_from(["run", "set", "from", "to", "rmin", "part", "text", "alike", "end", "flag"]),
                       st.text(max_size=20)))
@settings(max_examples=15)
def test_chips_and_presets_are_safe_for_any_text(where):
    shown = "".join([*filters.chips(where), filters.presets(where)])
    assert re.sub(r"</?(?:a|nav)(?: [\w-]+=\"[^\"<>]*\"| [\w-]+)*>", "", shown).count("<") == 0
