"""turns.py, tokens.py and what the index knows of turns: episodes and tokens shown, filtered, and hostile ones."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import vlrl
from tests.app import made_runs
from tests.app.test_prose import TEXTS
from tests.app.views import Markup, Plain, group, image, rollout
from tests.tables import each
from vlrl.app import cards, details, tokens, turns
from vlrl.app.html import MOST
from vlrl.app.index import Index, Query
from vlrl.app.library import Library
from vlrl.app.tokens import Texts, answer, numbers
from vlrl.store import RunFolder

ACTION = {"start": 0, "end": 2, "role": "assistant", "media": [], "text": "up", "parts": [("nearer", 1.0)],
          "state": "s1", "done": False, "seconds": 0.5, "error": None, "info": None}
SHOWN = {**ACTION, "role": "observation", "media": ["b"], "text": "You moved.", "parts": None, "state": None,
         "seconds": None}


def episode(*given, **more):
    return rollout(**{"turns": given, "episode_id": "e", "media": (image(name="b.png", hash="b"),), **more})


def shown(one, **more):
    view = group(one, **more)
    return Markup(turns.strip(view, one, turns.read(view, one), Plain()))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("episodes")
    run = RunFolder(root / "a")
    run.write_rollouts(0, 0, [made_runs.zoomed(1), made_runs.zoomed(2, turns=5), made_runs.made_group("boxes", 3, 0)])
    return Library(root)


def test_an_episode_as_the_store_has_it_with_the_box_of_a_call_on_the_picture_before_it(stored):
    view = details.group(stored, "a", "train", 0, "zoomed-1")
    first = turns.read(view, view.rollouts[0], "norm1000")
    assert [t.action for t in first] == [None, "look 0", "look 1", "look 2"]
    assert [t.observation for t in first] == ["", "look shown 0", "look shown 1", "look shown 2"]
    assert [len(t.media) for t in first] == [1, 1, 1, 1] and len(view.media) == 1
    assert all((stored.root / "a" / m.name).is_file() for t in first for m in t.media)
    assert [t.parts for t in first[1:]] == [{"nearer": -1.0}, {"nearer": 0.0}, {"nearer": 1.0}]
    assert (first[1].state, first[1].seconds, first[1].done, first[3].done) == ("s0", 0.25, False, True)
    assert first[1].info == {"level": 0} and first[1].calls[0].name == "zoom"
    # in thousandths of 160 x 120 pixels; the last picture was taken from by no call
    found = turns.read(view, view.rollouts[1], "norm1000")
    assert [[s.at for s in t.marks] for t in found] == [[(40.0, 30.0, 80.0, 90.0)]] * 3 + [[]]
    assert [t.marks[0].label for t in found[:3]] == ["zoom", "zoom", "zoom failed"]
    html = Markup(turns.strip(view, view.rollouts[1], found, Plain()))
    assert html.odd == [] and len(html.all("img")) == 4
    assert [r["x"] for r in html.all("rect") if r["class"] == "v-line"] == ["40"] * 3 and "no such box" in html.text


def test_boxes_in_the_conventions_of_models():
    for box, convention, row, at in (
            ([10, 20, 60, 80], "original", {}, (10, 20, 60, 80)), ([60, 80, 10, 20], "original", {}, (10, 20, 60, 80)),
            ([0.1, 0.2, 0.5, 0.5], "norm1", {}, (20, 20, 100, 50)), (["a", 2, 3, 4], "original", {}, None),
            ([98, 56, 196, 112], "processed", {}, (100, 50, 200, 100)), ([1, 2, 3], "original", {}, None),
            ([0.1, 0.2, 0.5, 0.5], "norm1000", {"coordinates": "norm1"}, (20, 20, 100, 50)),
            ([10, 20, 60, 80], "norm1000", {"coordinates": "none"}, None), ([1e99, 2, 3, 4], "original", {}, None),
            ("1,2,3,4", "original", {}, None)):
        info = json.dumps({"calls": [{"name": "zoom", "arguments": {"bbox_2d": box, "factor": 2}}]})
        one = episode({**ACTION, "info": info})
        marks = turns.read(group(one, sample=row), one, convention)[0].marks
        assert [m.at for m in marks] == ([] if at is None else [pytest.approx(at)]), (box, convention)


def test_parts_advantages_errors_and_cards_of_episodes():
    made = (ACTION, SHOWN, {**ACTION, "parts": None, "error": "step: ValueError: x", "state": None, "seconds": None})
    one = episode(*made, turn_advantages=np.array([0.5, np.nan], np.float32))
    html = shown(one)
    for words in ("nearer 1", "A +0.5", "state s1", "0.5 s", "You moved.", "step: ValueError: x"):
        assert words in html.text, words
    assert html.text.count("A +") == 1 and html.odd == []
    assert "A +" not in shown(replace(one, turn_advantages=None)).text
    assert "A +" not in shown(replace(one, turn_advantages=np.zeros(0, np.float32))).text
    assert "not among the rollout's media" in shown(replace(one, media=())).text
    one = episode(ACTION, SHOWN, *[{**ACTION, "text": f"go {i}"} for i in range(20)], finish_reason="turns")
    text = Markup(cards.card(group(one), one)).text
    assert "21 turns" in text and "13 more turns" in text and "go 6" in text and "go 7" not in text
    assert "limit of turns" in text and "is missing" not in text and "You moved." not in text
    plain = Markup(cards.card(group(), rollout())).text
    assert "Reasoning" in plain and "turns" not in plain
    at = [{**ACTION, "text": None, "parts": None, "info": json.dumps({"value": v, "visits": 2})} for v in (0.25, -1.0)]
    card = cards.card(group(), rollout(turns=tuple(at), variant="kept"))
    text = Markup(card).text
    assert "2 nodes" in text and "turns" not in text and "variant kept" in text
    assert "their values: 0.25, −1" in str(card) and "found by a search at an earlier visit" in str(card)
    for info in ("{", "[1]", '{"value": "x", "visits": 2}', '{"value": 1}', None):
        odd = Markup(cards.card(group(), rollout(turns=({**ACTION, "info": info},) * 2)))
        assert "2 turns" in odd.text and odd.odd == []


def test_a_long_episode_is_cut_and_says_so():
    """64 turns of 200,000 characters: no more than a page can hold, each text with its beginning."""
    many = [t for i in range(64) for t in ({**ACTION, "text": f"<{i}>" + "a" * 200_000},
                                           {**SHOWN, "text": f"[{i}]" + "b" * 200_000})]
    one = episode(*many)
    view = group(one)
    html = turns.strip(view, one, turns.read(view, one), Plain())
    assert len(html) < 3 * MOST and "the first 1,550 here" in html
    text = Markup(html).text
    assert all(f"<{i}>" in text and f"[{i}]" in text for i in range(64))
    more = episode(*many[:2] * 300)
    assert f"{300 - turns.MOST_TURNS} more turns" in shown(more).text and len(cards.card(group(one), one)) < 10_000


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8)
INFO = TEXTS | JSON.map(json.dumps) | st.builds(
    lambda name, value, error: json.dumps({"calls": [{"name": name, "arguments": {"box": value}, "error": error},
                                                     value]}), JSON, JSON, JSON)
ANY_TURN = st.fixed_dictionaries({
    "start": st.none() | st.integers(), "end": st.none() | st.integers(), "role": st.none() | TEXTS |
    st.sampled_from(["assistant", "observation"]), "media": st.none() | st.lists(st.none() | TEXTS | st.just("b")),
    "text": st.none() | TEXTS, "parts": st.none() | st.lists(st.tuples(TEXTS, st.none() | st.floats())),
    "state": st.none() | TEXTS, "done": st.none() | st.booleans(), "seconds": st.none() | st.floats(),
    "error": st.none() | TEXTS, "info": st.none() | INFO})


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(ANY_TURN, min_size=1, max_size=4), st.sampled_from(["original", "processed", "norm1"]))
def test_nothing_in_turns_breaks_a_page_or_becomes_a_tag(given, convention):
    one = episode(*given)
    view = group(one)
    for html in (turns.strip(view, one, turns.read(view, one, convention), Plain()), cards.card(view, one)):
        found = Markup(html)
        assert found.odd == [] and not {"script", "b onx", "iframe"} & set(found.tags)
        assert not [a for attributes in found.attributes for a in attributes if a.startswith("on")]


def test_filters_on_episodes_and_their_turns_and_tool_errors_in_the_list(stored):
    index = Index(stored)
    for query, hits in (
            ({}, 8), ({"turns": (5, None)}, 2), ({"turns": (None, 3)}, 2), ({"turns": (1, 9)}, 4),
            ({"tool_errors": True}, 2), ({"tool_errors": False}, 2), ({"ended": "limit"}, 2), ({"ended": "turns"}, 2),
            ({"ended": "media"}, 0)):
        page = index.rollouts(Query(**query))
        assert page.total == hits and page.notes == () and (not query or {r.turns for r in page.rows} <= {3, 5}), query
    rows = {r.key[4:]: (r.turns, r.tool_errors) for r in index.rollouts(Query()).rows}
    assert rows[("zoomed-2", 0)] == (5, 0) and rows[("zoomed-2", 1)] == (5, 1)
    assert {v for (name, _), v in rows.items() if name.startswith("train")} == {(None, None)}
    index.close()


def test_files_without_turns_or_with_others_are_read(tmp_path):
    run = RunFolder(tmp_path / "a")
    table = pq.read_table(run.write_rollouts(0, 0, [made_runs.zoomed(1, size=5)]))
    infos = ["[" * 100_000, '{"calls": 3}', '{"calls": [3, {"error": {}}, {"error": "x"}]}', None]
    rows = table.to_pylist()
    for row, info in zip(rows, ["", *infos], strict=False):
        for turn in row["turns"]:
            turn["info"] = info
    pq.write_table(pa.Table.from_pylist(rows, table.schema), run.path / "rollouts/step-000001-rank-00000.parquet")
    pq.write_table(table.drop_columns(["turns"]), run.path / "rollouts/step-000002-rank-00000.parquet")
    index = Index(Library(tmp_path))
    page = index.rollouts(Query())
    assert page.total == 15 and page.notes == ()
    assert sorted(-1 if r.tool_errors is None else r.tool_errors for r in page.rows) == [-1] * 5 + [0] * 8 + [1] + [3]
    assert sum(r.turns is None for r in page.rows) == 5
    index.close()


FILE = f"{vlrl.__path__[0]}/assets/tiny-qwen3-vl/tokenizer.json"


@pytest.fixture(scope="module")
def texts():
    return Texts.read(FILE)


@pytest.fixture(scope="module")
def encode():
    tokenizer = Tokenizer.from_file(FILE)
    return lambda text: tokenizer.encode(text).ids


def of_tokens(ids=(5, 6, 7, 8), **more):
    fields = {"clipped": np.array([0, 1, 0, 0], bool), "entropies": np.array([0, 0.6, 1.5, 9], np.float32),
              "loss_mask": np.array([1, 1, 0, 1], bool), "logprobs": np.array([-0.5, -1, -2, -9], np.float32),
              "trainer_logprobs": np.array([-0.4, -1, -2, -9.3], np.float32), "advantage": -2.0,
              "ratio": np.array([1.1, 1, 1, 0.5], np.float32)}
    return rollout(token_ids=np.asarray(ids, np.int32), **fields | more)


def spans(html):
    return [a for a in Markup(html).all("span") if "v-tok" in (a.get("class") or "").split()]


def strengths(html):
    return [int((a.get("style") or "0%").split(":")[-1].rstrip("%")) for a in spans(html)]


def test_pieces_of_other_vocabularies_and_of_no_whole_characters(texts, encode):
    assert texts.show(encode("Hé 日\n")) == ["H", "⟨C3⟩", "é", " ", "⟨E6⟩", "⟨97⟩", "日", "\n"]
    ids = encode("日")
    assert texts.show([ids[0], 10 ** 9, *ids[1:]])[:2] == ["⟨E6⟩", "⟨#1000000000⟩"]  # cut through by an unknown id
    assert texts.show([ids[1], *encode("a")]) == ["⟨97⟩", "a"] and texts.show([-1]) == ["⟨#-1⟩"]
    assert "".join(texts.show(encode("<answer>[1, 2]</answer><|im_end|>"))) == "<answer>[1, 2]</answer><|im_end|>"
    vocabulary = {"<unk>": 0, "▁cat": 1, "s": 2, "<0xC3>": 3, "<0xA9>": 4, "<0xZZ>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.decoder = decoders.Replace("▁", " ")
    assert Texts(tokenizer).show([1, 2, 3, 4, 5]) == [" cat", "s", "⟨C3⟩", "é", "<0xZZ>"]


def test_a_broken_or_huge_tokenizer_is_none(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    for data in (b"", b"{}", b"[[[[", b'{"model": {"type": "BPE"}}', b"\xff\xfe"):
        path.write_bytes(data)
        assert Texts.read(path) is None, data
    assert Texts.read(tmp_path / "none.json") is None and Texts.read(None) is None
    monkeypatch.setattr(tokens, "_MOST_BYTES", 10)
    path.write_text('{"model": 0}')
    assert Texts.read(path) is None


def test_numbers_colours_and_what_pointing_shows(texts, encode):
    n = numbers(of_tokens())
    np.testing.assert_allclose(n.gap, [0.1, 0, 0, -0.3], atol=1e-6)
    np.testing.assert_allclose(n.contribution, [-2.2, 0, 0, -1.0], atol=1e-6)  # clipped and masked pull nothing
    np.testing.assert_allclose(numbers(of_tokens(ratio=None, clipped=None, loss_mask=None)).contribution, [-2] * 4)
    assert np.isnan(numbers(of_tokens(advantage=None, loss_mask=None, clipped=None)).contribution).all()
    assert strengths(answer(of_tokens(), "logprob")) == [8, 17, 33, 100]  # -logprob / 6
    assert strengths(answer(of_tokens(), "entropy")) == [0, 20, 50, 100]  # entropy / 3
    gap = spans(answer(of_tokens(), "gap"))
    assert "v-neg" in gap[3]["class"] and "v-neg" not in gap[0]["class"]
    classes = [a["class"] for a in spans(answer(of_tokens(), "state"))]
    assert classes == ["v-tok", "v-tok v-clipped", "v-tok v-masked", "v-tok"]
    ids = encode("<b>a")[:4]
    tops = tuple(np.array([ids[0], 10 ** 6]) for _ in ids), tuple(np.array([-0.1, -3.0]) for _ in ids)
    count = len(ids)
    found = spans(answer(of_tokens(ids, loss_mask=np.ones(count, bool), clipped=np.zeros(count, bool), top_ids=tops[0],
                                 top_logprobs=tops[1], logprobs=np.full(count, -0.5)), "logprob", texts))
    tip = found[0]["aria-label"]
    assert tip.splitlines()[:2] == [f"token 1 of {count} · id {ids[0]} · “<”", "log p −0.5000 (p 0.607)"]
    assert "likeliest:\n  “<”  −0.100 (p 0.905)\n  “⟨#1000000⟩”" in tip
    assert [a["tabindex"] for a in found] == ["0"] + ["-1"] * (count - 1)


ODD = [np.array([np.nan] * 4), np.array([np.inf, -np.inf, 1e308, -1e308]), np.zeros(3), np.zeros((2, 2)), None,
       np.array([]), ["a", None, 1, 2], 5, np.array([1e-320] * 4)]


@each("by", tokens.VIEWS)
def test_odd_columns_raise_nothing_and_long_answers_are_cut(by, texts, monkeypatch):
    for odd in ODD:
        for advantage in (None, 0.0, float("nan"), 1e308):
            columns = dict.fromkeys(("logprobs", "trainer_logprobs", "entropies", "ratio", "clipped", "loss_mask"), odd)
            tops = {"top_ids": (np.arange(4), np.arange(2)), "top_logprobs": (None, odd)}
            made = answer(of_tokens(**columns, **tops, advantage=advantage), by, texts)
            assert len(spans(made)) == 4 and not Markup(made).odd
    assert "no tokens" in answer(of_tokens(()), by) and "no tokenizer.json" in answer(of_tokens(), by)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_MOST_TOKENS", 3)
        made = answer(of_tokens(), "nonsense")
    assert len(spans(made)) == 3 and "1 more tokens" in made
