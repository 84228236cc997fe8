"""Agreement between annotators, by hand and by scikit-learn; whose flags they are; tags of runs and the archive."""

import json
import math
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from vlrl.app import AppError, agreement, flagging, notes
from vlrl.app.agreement import Pair
from vlrl.app.notes import FLAGS, Label, Note, Notes
from vlrl.app.queries import RolloutKey

KEY = RolloutKey("quickstart", "train", "train", 12, "00000384", 3)


def test_kappa_by_hand():
    both = [("good", "good")] * 20 + [("good", "bad")] * 5 + [("bad", "good")] * 10 + [("bad", "bad")] * 15
    assert agreement.kappa(both) == pytest.approx(0.4, abs=1e-5)  # 0.7 observed; 0.5 * 0.6 + 0.5 * 0.4 by chance
    assert agreement.kappa([("good", "bad"), ("bad", "good")]) == -1
    assert agreement.kappa([]) is None and agreement.kappa([("good", "good")] * 3) is None


@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(FLAGS)), min_size=1, max_size=30))
def test_kappa_is_that_of_scikit_learn(both):
    found = agreement.kappa(both)
    if found is None:
        assert len({flag for pair in both for flag in pair}) == 1
    else:
        assert math.isclose(found, cohen_kappa_score(*zip(*both, strict=True)), abs_tol=1e-9)


def test_pairs_count_what_both_flagged():
    verdicts = [{"anna": "good", "ben": "good"}, {"anna": "bad", "ben": "good", "": "bad"}, {"anna": "good"}]
    assert agreement.pairs(verdicts) == [Pair("anna", "ben", 2, 1, 0.0), Pair("", "anna", 1, 1, None),
                                         Pair("", "ben", 1, 0, 0.0)]


# --- whose flags ------------------------------------------------------------------------------------------------------


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


def test_a_file_of_the_first_version_is_read_and_grows_with_the_next_note(tmp_path):
    base = sqlite3.connect(tmp_path / notes.FILE)
    base.execute(notes._TABLE)
    base.execute("INSERT INTO notes VALUES ('a', 'train', 'train', 1, 'g', 0, 'look', '', 's', 0.5, 1.0)")
    base.execute("INSERT INTO notes VALUES ('a', 'train', 'train', 1, 'g', 1, '', 'words', 's', 0.5, 1.0)")
    base.execute("PRAGMA user_version = 1")
    base.commit()
    base.close()
    kept, old = Notes(tmp_path), RolloutKey("a", "train", "train", 1, "g", 0)
    assert kept.get(old) == Note(old, "unsure", "", "s", 0.5, 1.0) and kept.verdicts() == {} == kept.labels()
    kept.put(KEY, flag="good", by="anna")
    assert kept.verdicts() == {old: {"": "unsure"}, KEY: {"anna": "good"}} and len(kept.all()) == 3


# --- runs -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("asked", [{"key": "none", "n": 1, "tags": "x"}, {"key": "a", "n": 1, "tags": "x" * 99},
                                   {"key": "a", "n": 1, "archived": []}, {"key": "a", "n": 1, "tags": [1] * 5000}, [],
                                   {}])
def test_a_label_that_cannot_be_written_is_said(tmp_path, asked):
    from vlrl.app.index import Index
    from vlrl.app.library import Library
    from vlrl.app.site import Site

    (tmp_path / "a/rollouts").mkdir(parents=True)
    (tmp_path / "a/config.yaml").write_text("steps: 1")
    library = Library(tmp_path)
    site = Site(library, Index(library), None, Notes(tmp_path))
    said, number = flagging.save_label(site, json.dumps(asked))
    assert 'role="alert"' in said and number.endswith("failed") and not site.notes.labels()
    site.index.close()
