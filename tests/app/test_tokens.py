"""tokens.py: what each token shows, and how it is coloured."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

import vlrl
from tests.app.markup import Markup
from tests.tables import each
from vlrl.app import tokens
from vlrl.app.details import RolloutView
from vlrl.app.index import RolloutKey
from vlrl.app.tokens import Texts, answer, numbers

FILE = f"{vlrl.__path__[0]}/assets/tiny-qwen3-vl/tokenizer.json"


@pytest.fixture(scope="module")
def texts():
    return Texts.read(FILE)


@pytest.fixture(scope="module")
def encode():
    tokenizer = Tokenizer.from_file(FILE)
    return lambda text: tokenizer.encode(text).ids


def rollout(ids=(5, 6, 7, 8), **more):
    ids = np.asarray(ids, np.int32)
    fields = {"key": RolloutKey("r", "train", "train", 0, "g", 0), "schema": 1, "policy_step": 0, "completion": "text",
              "token_ids": ids, "loss_mask": np.array([1, 1, 0, 1], bool), "clipped": np.array([0, 1, 0, 0], bool),
              "logprobs": np.array([-0.5, -1, -2, -9], np.float32),
              "trainer_logprobs": np.array([-0.4, -1, -2, -9.3], np.float32),
              "entropies": np.array([0, 0.6, 1.5, 9], np.float32), "ratio": np.array([1.1, 1, 1, 0.5], np.float32),
              "top_ids": None, "top_logprobs": None, "parts": {}, "weights": {}, "metrics": {}, "reward": 1.0,
              "correct": None, "advantage": -2.0, "parsed": None, "error": None, "finish_reason": "stop",
              "truncated": False, "turns": (), "episode_id": None, "variant": None, "marks": None}
    return RolloutView(**(fields | more))


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
    n = numbers(rollout())
    np.testing.assert_allclose(n.gap, [0.1, 0, 0, -0.3], atol=1e-6)
    np.testing.assert_allclose(n.contribution, [-2.2, 0, 0, -1.0], atol=1e-6)  # clipped and masked pull nothing
    without = numbers(rollout(ratio=None, clipped=None, loss_mask=None))
    np.testing.assert_allclose(without.contribution, [-2] * 4)
    assert np.isnan(numbers(rollout(advantage=None, loss_mask=None, clipped=None)).contribution).all()
    assert strengths(answer(rollout(), "logprob")) == [8, 17, 33, 100]  # -logprob / 6
    assert strengths(answer(rollout(), "entropy")) == [0, 20, 50, 100]  # entropy / 3
    gap = spans(answer(rollout(), "gap"))
    assert "v-neg" in gap[3]["class"] and "v-neg" not in gap[0]["class"]
    classes = [a["class"] for a in spans(answer(rollout(), "state"))]
    assert classes == ["v-tok", "v-tok v-clipped", "v-tok v-masked", "v-tok"]
    ids = encode("<b>a")[:4]
    tops = tuple(np.array([ids[0], 10 ** 6]) for _ in ids), tuple(np.array([-0.1, -3.0]) for _ in ids)
    count = len(ids)
    found = spans(answer(rollout(ids, loss_mask=np.ones(count, bool), clipped=np.zeros(count, bool), top_ids=tops[0],
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
            made = answer(rollout(**columns, **tops, advantage=advantage), by, texts)
            assert len(spans(made)) == 4 and not Markup(made).odd
    assert "no tokens" in answer(rollout(()), by) and "no tokenizer.json" in answer(rollout(), by)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_MOST_TOKENS", 3)
        made = answer(rollout(), "nonsense")
    assert len(spans(made)) == 3 and "1 more tokens" in made
