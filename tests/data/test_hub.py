"""Data sets of the Hub by name, against a Hub on this machine: files, commits, and no request without a name."""

import io
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.data import sets
from tests.data.hub_server import hub as serving
from tests.data.hub_server import use
from tests.data.sets import picture, save
from vlrl.cli.main import app
from vlrl.data.sources import hub
from vlrl.data.sources.hub import NoSuchSplit, is_data, selected
from vlrl.errors import ConfigError, RunError
from vlrl.store.files import cache_folder
from vlrl.store.run_folder import PINS


def parquet(*answers) -> bytes:
    rows = [{"images": [{"bytes": picture(i), "path": None}], "problem": f"<image>Which is {i}?", "answer": a}
            for i, a in enumerate(answers)]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def here(monkeypatch, tmp_path):
    with serving() as served:
        use(monkeypatch, served.url)
        monkeypatch.chdir(tmp_path)
        yield served


def read(tmp_path, name, split="train", index="auto"):
    return sets.read(name, index, split, tmp_path / "cache")


def answers(*which, **how):
    return [s["answer"] for s in read(*which, **how)]


@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_a_split_of_a_data_set(here, tmp_path, index):
    here.put("org/geo", {"README.md": b"#", "geo.py": b"raise SystemExit", "data/train-00000-of-00002.parquet":
                         parquet("a", "b"), "data/train-00001-of-00002.parquet": parquet("c"),
                         "data/test-00000-of-00001.parquet": parquet("z")})
    assert answers(tmp_path, "org/geo@train", index=index) == ["a", "b", "c"]
    assert answers(tmp_path, "org/geo@test", "heldout", index=index) == ["z"]
    assert not any(".py" in asked or "README" in asked for asked in here.asked)
    before = len(here.asked)
    assert answers(tmp_path, "org/geo@train", index=index) == ["a", "b", "c"]
    assert [asked for asked in here.asked[before:] if "/resolve/" in asked] == []  # what is there is not fetched anew


def test_the_card_tells_configurations_and_files(here, tmp_path):
    card = {"configs": [{"config_name": "easy", "data_files": [{"split": "train", "path": "one/x-*"}]},
                        {"config_name": "hard", "data_files": [{"split": "train", "path": ["two/**"]}]}]}
    files = {"one/x-1.parquet": parquet("a"), "two/deep/y.parquet": parquet("b")}
    here.put("org/two", files, card)
    assert answers(tmp_path, "org/two/hard@train") == ["b"]
    with pytest.raises(ConfigError, match=r"data\.train='org/two@train'.*name one, as in.*easy, hard"):
        read(tmp_path, "org/two@train")
    with pytest.raises(ConfigError, match=r"no configuration 'hart'. Did you mean 'hard'"):
        read(tmp_path, "org/two/hart@train")
    with pytest.raises(ConfigError, match=r"no split 'test'.* There are: train"):
        read(tmp_path, "org/two/easy@test")
    here.put("org/script", {f"{config}/{split}/0000.parquet": parquet(config + split) for config in ("a", "b")
                            for split in ("train", "test")}, revision="refs/convert/parquet")
    assert answers(tmp_path, "org/script/b@test#refs/convert/parquet", "heldout") == ["btest"]
    with pytest.raises(ConfigError, match=r"name one, as in.*a, b"):
        read(tmp_path, "org/script@test#refs/convert/parquet", "heldout")
    here.put("org/default", files, {"configs": [*card["configs"][:1], {**card["configs"][1], "default": True}]})
    assert answers(tmp_path, "org/default@train") == ["b"]


def test_lines_pictures_and_data_check(here, tmp_path):
    rows = json.dumps({"id": "1", "image": "img/a.png", "question": "What?", "answer": "a"}).encode()
    here.put("org/lines", {"train.jsonl": rows, "img/a.png": picture(), "run.sh": b"rm"})
    (sample,) = read(tmp_path, "org/lines@train")
    assert sample.media[0].source.read_bytes() == picture()
    here.put("org/pets", {f"{side}/{kind}/1.png": picture() for side in ("train", "test") for kind in ("cat", "dog")})
    assert sorted(s["label"] for s in read(tmp_path, "org/pets@train")) == ["cat", "dog"]
    meta = b'{"file_name": "1.png", "question": "What?", "answer": "cat"}'
    here.put("org/meta", {"train/metadata.jsonl": meta, "train/1.png": picture()})
    here.put("org/flat", {"metadata.jsonl": meta, "1.png": picture()})
    for name in ("org/meta@train", "org/flat@train"):
        (sample,) = read(tmp_path, name)
        assert sample["answer"] == "cat" and sample.media[0].source.read_bytes() == picture()
    here.put("org/geo", {"train.parquet": parquet("a", "b")})
    found = CliRunner().invoke(app, ["data", "check", "org/geo@train", "--json"], env={"XDG_CACHE_HOME": "cache"})
    assert found.exit_code == 0 and json.loads(found.stdout)["media"]["images"] == 2, found.output


def test_revisions_and_commits(here, tmp_path):
    first = here.put("org/geo", {"train.parquet": parquet("old")})
    here.put("org/geo", {"train.parquet": parquet("of the tag")}, revision="v1/x")
    assert answers(tmp_path, "org/geo@train") == ["old"]
    run, cache, names = tmp_path / "run", cache_folder(str(tmp_path / "cache")), ["org/geo@train", "rows.jsonl"]
    run.mkdir()
    hub.pin(names, run, cache, resumed=False)
    here.put("org/geo", {"train.parquet": parquet("new")})
    assert answers(tmp_path, "org/geo@train") == ["new"]
    assert answers(tmp_path, "org/geo@train#v1/x") == ["of the tag"]
    assert answers(tmp_path, f"org/geo@train#{first}") == ["old"]
    hub.pin(names, run, cache, resumed=True)
    assert json.loads((run / PINS).read_text()) == {"org/geo@train": first}
    before = len(here.asked)
    assert answers(tmp_path, hub.pinned("org/geo@train", run)) == ["old"] and len(here.asked) == before
    hub.pin(names, run, cache, resumed=False)
    assert answers(tmp_path, hub.pinned("org/geo@train", run)) == ["new"]
    with pytest.raises(ConfigError, match=r"has no revision 'v9'"):
        read(tmp_path, "org/geo@train#v9")


@pytest.mark.slow
def test_without_a_network_what_is_kept_is_used(here, tmp_path, monkeypatch, caplog):
    here.put("org/geo", {"train.parquet": parquet("a"), "test.parquet": parquet("b")})
    assert answers(tmp_path, "org/geo@train") == ["a"]
    before = len(here.asked)
    for url, offline, why in ((here.url, True, "HF_HUB_OFFLINE"), ("http://127.0.0.1:9", False, "cannot be reached")):
        use(monkeypatch, url, offline)
        with caplog.at_level(logging.WARNING):
            assert answers(tmp_path, "org/geo@train") == ["a"]
        assert why in caplog.text and "are used" in caplog.text
        with pytest.raises(RunError, match="not cached in"):
            read(tmp_path, "org/geo@test")
        with pytest.raises(RunError, match="download the data set once"):
            read(tmp_path, "org/other@train")
        caplog.clear()
    assert len(here.asked) == before


@pytest.mark.parametrize(("status", "code", "words"), [
    (404, "RepoNotFound", "does not exist, or is private.*HF_TOKEN"), (401, "", "HF_TOKEN"),
    (403, "GatedRepo", "accept its terms")])
def test_what_may_not_be_read(here, tmp_path, status, code, words):
    here.refusals["org/geo"] = (status, code)
    with pytest.raises(ConfigError, match=rf"data\.train='org/geo@train'.*{words}"):
        read(tmp_path, "org/geo@train")


def test_no_request_unless_a_hub_name_is_given(here, tmp_path, caplog):
    rows = json.dumps({"id": "1", "question": "What?", "answer": "a"})
    (tmp_path / "org/local").mkdir(parents=True)
    for name in ("rows.jsonl", "org/here@train", "org/local/train.jsonl"):
        save(tmp_path / name, rows)
    read(tmp_path, "rows.jsonl")
    for name in ("gone.jsonl", "org/gone.jsonl", "data/rows@2.jsonl", "org/name", "a/b/c/d@train", "../x@train"):
        with pytest.raises(ConfigError, match="does not exist"):
            read(tmp_path, name)
    with caplog.at_level(logging.INFO):
        assert len(read(tmp_path, "org/local@train")) == 1
    assert "not the Hub data set" in caplog.text and here.asked == []


def test_hostile_names_are_never_chosen(here, tmp_path):
    here.put("org/bad", {"../../out.parquet": b"", "train/../x.parquet": b"", "/etc/a.parquet": b"", "run.py": b"",
                         ".git/train.parquet": b"", "train.parquet": parquet("a")},
             {"configs": [{"config_name": "default", "data_files": "**/**/**/**/**/**/**/*a*a*a*a*a*"}, 7]})
    with pytest.raises(ConfigError, match="no split"):
        read(tmp_path, "org/bad@train")
    assert [name for name in here.commits["org/bad"].popitem()[1][0] if is_data(name)] == ["train.parquet"]


@pytest.mark.slow
@given(st.lists(st.text(max_size=30)), st.recursive(st.none() | st.text(max_size=9), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.sampled_from(["config_name", "data_files", "split", "path", "data_dir"]),
                                         inner, max_size=4)), st.text(max_size=8), st.text(max_size=8))
def test_any_listing_and_any_card(files, configs, config, split):
    try:
        found = selected(files, configs if isinstance(configs, list) else [configs], config, split)
    except NoSuchSplit:
        return
    assert {*found.fetch} <= {*files} and all(map(is_data, found.fetch))
