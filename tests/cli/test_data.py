"""`vlrl data check`, `convert` and `split` on real files, through the command itself where words matter."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.test_formats import make_video
from tests.tables import each
from vlrl.checks.image_similarity import image_signature
from vlrl.cli.main import main
from vlrl.data import read_rows
from vlrl.errors import DataError
from vlrl.tools.datasets.convert import UsableRow
from vlrl.tools.datasets.split import near_pairs, split
from vlrl.types import Media


def picture(seed: int, size=(160, 120)) -> Image.Image:
    """A picture with structure: soft blobs of colour."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def row(id: str, **more) -> dict:
    return {"id": id, "image": f"img/{id}.png", "width": 160, "height": 120, "expression": "mug",
            "boxes": [{"box": [1, 2, 60, 50]}], **more}


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "img").mkdir()
    for i in range(6):
        picture(i).save(tmp_path / "img" / f"{i}.png")
    (tmp_path / "grounding.yaml").write_text("task: grounding\nmodel: {name: embedded/tiny-qwen3-vl}\n")
    return tmp_path


def run(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["data", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_a_sound_file(folder, capsys):
    make_video(folder / "a.mp4", frames=4)
    rows = [row("0", category="cup"), row("1", category="cup", shade=3), row("2", category="jug"),
            {**row("v", width=64, height=32, boxes=[]), "image": None, "video": "a.mp4"}]
    file = write(folder / "rows.jsonl", *rows)
    before = sorted(folder.rglob("*"))
    code, out, _ = run(capsys, "check", file, "--config", folder / "grounding.yaml")
    assert code == 0 and "4 rows, 3 images, 1 videos; 0 bad rows" in out
    assert "category: cup 2, jug 1" in out and re.search(r"image +3 +75.0%", out)
    assert re.search(r"shade +1 +25.0% +not canonical", out)
    code, out, _ = run(capsys, "check", file, "--config", folder / "grounding.yaml", "--json")
    found = json.loads(out)
    assert found["rows"] == 4 and found["bad"] == 0 and found["problems"] == [] and found["unlabelled"] == 0
    fine = write(folder / "fine.jsonl", row("0", boxes=[{"box": [10.4, 20.3, 60.7, 80.6], "label": "the mug"}]))
    for recipe in ("vlm_r1_rec", "visual_rft_detection"):  # boxes between whole pixels where answers are in whole ones
        assert run(capsys, "check", fine, "--config", f"configs/grounding/{recipe}.yaml")[0] == 0
    fine.unlink()
    assert found["media"] == {"images": 3, "videos": 1, "unusable": 0} and found["counts"] == {
        "category": {"cup": 2, "jug": 1}}
    assert sorted(folder.rglob("*")) == before  # nothing was written


def test_the_shape_and_one_row_as_the_model_sees_it_are_shown(folder, capsys):
    talk = [{"role": "user", "content": "<image>Colour?"}, {"role": "assistant", "content": "red"},
            {"role": "user", "content": "Is <image> like it?"}]
    record = {"prompt": talk, "images": ["img/0.png", "img/1.png"], "reward_model": {"ground_truth": "yes"}}
    lost = [{**record, "images": images} for images in (["img/0.png"], ["img/0.png"], ["img/0.png", "img/gone.png"])]
    file = write(folder / "rows.jsonl", record, *lost)
    (folder / "qa.yaml").write_text("task: qa\nmodel: {name: embedded/tiny-qwen3-vl}\n")
    code, out, _ = run(capsys, "check", file, "--config", folder / "qa.yaml")
    said = " ".join(out.split())
    assert code == 1 and "recognised as: prompt as messages, with reward_model (verl) 4" in said
    assert "Is <|vision_start|><|image_pad|><|vision_end|> like it? Answer with yes or no only.<|im_end|>" in said
    assert re.search(r"tokens \d+ = \d+ \+ \d+ visual \+ \d+ text image 160 x 120 pixels -> \d+ x \d+ for", said)
    assert "target yes" in said and "oracle yes" in said and "the maximum" in said
    assert "bad rows by kind of problem: row 2, media 1" in said
    said = run(capsys, "check", file, "--config", folder / "qa.yaml", "model.name=no/such-model")[1]
    assert "tokens not known without the model" in " ".join(said.split()) and "Is <image> like it?" in said
    code, out, _ = run(capsys, "check", file, "--json")
    found = json.loads(out)
    assert found["shapes"] == {"prompt as messages, with reward_model (verl)": 4}
    assert found["example"]["text"] == "user: <image>Colour?\nassistant: red\nuser: Is <image> like it?"
    assert found["example"]["target"] == "yes" and found["example"]["tokens"] is None
    assert "Colour?" not in run(capsys, "check", file, "--no-show")[1]


def test_what_all_rows_have_in_common_is_said_once(folder, capsys):
    file = folder / "wrong.csv"
    file.write_text("picture,mark\n" + "".join(f"img/{n}.png,cup\n" for n in range(5)) + "a,b,c\n")
    code, out, _ = run(capsys, "check", file)
    assert code == 1 and out.count("the columns match no known format") == 1 and "(and 4 rows more)" in out
    assert "wrong.csv:7: (no id): row: the line has more values" in out and "6 bad rows" in out
    rows = [row(str(n), image="../x.png") for n in range(3)]
    code, out, _ = run(capsys, "convert", write(folder / "r.jsonl", *rows, row("9")), "-o", folder / "o.jsonl",
                       "--keep-going")
    assert code == 0 and out.count("left out") == 2 and "r.jsonl:1: row '0': media path '../x.png'" in out
    assert "(and 2 rows more)" in out


def test_control_characters_of_names_reach_no_terminal(folder, capsys):
    for name in ("0", "a\x1b[31m"):
        (folder / "img" / f"{name}.png").write_bytes((folder / "img" / "1.png").read_bytes())
    file = write(folder / "r.jsonl", row("0"), row("1", image="img/a\x1b[31m.png"))
    _, out, _ = run(capsys, "check", file)
    assert "same content" in out and "a?[31m.png" in out and "\x1b" not in out
    file = write(folder / "rows.jsonl", '{"id": "\\ud800", "\\ud801": 1}', {"id": "\x1b[31mred", "weight": -1})
    for words in ((), ("--json",)):
        code, out, _ = run(capsys, "check", file, *words)
        assert code == 1 and "\x1b" not in out


def test_every_problem_is_listed_with_line_and_id(folder, capsys):
    (folder / "img" / "cut.png").write_bytes((folder / "img" / "0.png").read_bytes()[:300])
    (folder / "img" / "copy.png").write_bytes((folder / "img" / "0.png").read_bytes())
    file = write(
        folder / "rows.jsonl", row("0"), "{broken", row("0", image="img/1.png", boxes=[{"box": [1, 2, 900, 50]}]),
        row("2", width=90, image="img/none.png"), row("3", width=90), row("cut"), row("copy"),
        row("4", boxes=[{"box": [9, 9, 9, 20]}], image="../x.png"), row("5", points=[[3, 4], [3, 400]]), "[1]")
    code, out, _ = run(capsys, "check", file, "--config", folder / "grounding.yaml", "--json")
    found = json.loads(out)
    listed = [(p["where"].rpartition(":")[2], p["id"], p["kind"]) for p in found["problems"]]
    assert code == 1 and listed == [
        ("2", "", "row"), ("3", "0", "id"), ("3", "0", "box"), ("4", "2", "media"), ("5", "3", "size"),
        ("6", "cut", "media"), ("8", "4", "row"), ("8", "4", "box"), ("9", "5", "box"), ("10", "", "row")]
    assert found["bad"] == 8 and found["media"]["unusable"] == 2
    assert found["copies"] == [[str(folder / "img" / n) for n in ("0.png", "copy.png")]]
    says = {(p["kind"], p["id"]): p["reason"] for p in found["problems"]}
    assert "rows.jsonl:1: ids must be unique" in says["id", "0"] and "none.png does not exist" in says["media", "2"]
    assert says["size", "3"].startswith("width and height are 90x120 pixels, but 3.png has 160x120")
    assert says["box", "0"].startswith("box [1, 2, 900, 50] extends beyond the image of 160x120 pixels. If coord")
    assert says["box", "5"] == "point [3, 400] lies outside the image of 160x120 pixels"
    _, out, _ = run(capsys, "check", file, "--max", 2)
    assert len(re.findall(r"rows\.jsonl:\d+: ", out)) >= 2 and "more (--max 0 lists all)" in out
    assert f"{file}:2: (no id): row: not JSON" in out


def test_without_opening_media_or_without_pictures(folder, capsys):
    (folder / "img" / "cut.png").write_bytes(b"x")
    file = write(folder / "rows.jsonl", row("cut"), row("none"))
    code, out, _ = run(capsys, "check", file, "--no-media", "--json")
    assert code == 1 and [p["id"] for p in json.loads(out)["problems"]] == ["none"]
    file = write(folder / "rows.jsonl", row("0"))
    code, out, _ = run(capsys, "check", file, "--config", folder / "grounding.yaml", "limits.image_pixels=100")
    assert code == 1 and "limits.image_pixels=100" in out
    steps = [{"image": "img/0.png", "gt": {"action_type": "click", "x": 150, "y": 20}, "task": "Open it"},
             {"image": "img/none.png", "gt": {"action_type": "click", "x": 900, "y": 20}, "task": "Close it"}]
    file = write(folder / "steps.json", json.dumps(steps))
    config = write(folder / "gui.yaml", "task: {name: gui, recipe: ui_r1}\nmodel: {name: embedded/tiny-qwen3-vl}")
    code, out, _ = run(capsys, "check", file, "--config", config, "--allow-missing", "--json")
    assert code == 0 and json.loads(out)["media"] == {"images": 1, "videos": 0, "unusable": 0}
    code, out, _ = run(capsys, "check", file, "--config", config, "--json")
    assert code == 1 and [p["kind"] for p in json.loads(out)["problems"]] == ["media"]
    file = write(folder / "steps.json", json.dumps([{**steps[0], "gt": {**steps[0]["gt"], "x": 900}}]))
    code, out, _ = run(capsys, "check", file, "--config", config)  # the header of the picture says how large it is
    assert code == 1 and "point [900, 20] lies outside the image of 160x120 pixels" in out


def test_a_table_with_own_columns_or_columns_that_could_be_either(folder, capsys):
    file = folder / "table.csv"
    file.write_text("photo,image,x1,y1,x2,y2,caption,text\nimg/0.png,000,1,2,30,40,a mug,said\n")
    code, out, _ = run(capsys, "check", file)
    assert code == 1 and "table.csv:2:" in out and "columns caption and text may each be the expression" in out
    options = ("--columns", "image=photo", "--columns", "expression=text")
    assert run(capsys, "check", file, *options)[0] == 0
    assert run(capsys, "convert", file, "-o", folder / "rows.jsonl", *options)[0] == 0
    assert read_rows(folder / "rows.jsonl") == [
        {"id": "table-2", "image": "img/0.png", "width": 160, "height": 120, "expression": "said",
         "boxes": [{"box": [1, 2, 30, 40], "label": "said"}]}]
    code, out, err = run(capsys, "check", file, "--columns", "image")
    assert code == 2 and "write NAME=COLUMN" in out + err
    lines = "".join(f"img/{n}.png,{n % 2}\n" for n in range(4))
    (folder / "t.csv").write_text(f"photo,kind\n{lines}")
    code, _, err = run(capsys, "split", folder / "t.csv", "-o", folder, "--columns", "image=photo", "--columns",
                         "label=kind", "--no-near-duplicates", "--heldout", 1)
    assert code == 0, err
    assert [json.loads(line)["image"][:4] for line in (folder / "train.jsonl").read_text().splitlines()] == ["img/"] * 3


def test_an_oracle_below_the_maximum(folder, capsys):
    (folder / "shapes.py").write_text("""
from vlrl.task import Task
class Shapes(Task):
    rewards = {"right": 1.0, "long": -1.0}
    def score(self, sample, answer):
        return {"right": float(answer.final in sample["options"]), "long": 0.0}
    def oracle(self, sample):
        return sample.get("answer")
""")
    config = write(folder / "shapes.yaml", f"task: {folder}/shapes.py:Shapes\nmodel: {{name: x}}")
    file = write(folder / "rows.jsonl", {"id": "a", "answer": "A", "options": ["A"]},
                 {"id": "b", "answer": "C", "options": ["A"]}, {"id": "c", "options": []}, {"id": "d", "answer": "x"})
    code, out, _ = run(capsys, "check", file, "--config", config)
    assert code == 1 and "without a label: 1 rows" in out and "2 bad rows" in out
    assert "rows.jsonl:2: b: oracle: the perfect answer 'C' earns 0, but the maximum is 1 (right 0, long 0)" in out
    assert re.search(r"rows\.jsonl:4: d: oracle: .*KeyError: 'options' \(.*shapes\.py:6\)", out)


def test_convert_keeps_media_valid_and_stops_or_leaves_bad_rows_out(folder, capsys):
    rows = [row("0"), row("1", images=["img/2.png"], note="ü")]
    file = write(folder / "rows.jsonl", *rows)
    assert run(capsys, "convert", file, "-o", folder / "same.json")[0] == 0
    assert read_rows(folder / "same.json") == rows
    assert run(capsys, "convert", file, "-o", folder / "img" / "inside.jsonl")[0] == 0
    assert [r["image"] for r in read_rows(folder / "img" / "inside.jsonl")] == ["0.png", "1.png"]
    assert read_rows(folder / "img" / "inside.jsonl")[1]["images"] == ["2.png"]
    assert run(capsys, "check", folder / "img" / "inside.jsonl")[0] == 0
    code, _, err = run(capsys, "convert", file, "-o", folder / "else" / "rows.jsonl")
    assert code == 1 and "rows.jsonl:1: row '0': 'img/0.png' would lie outside" in err and "--root" in err
    assert not (folder / "else").exists()
    assert run(capsys, "convert", file, "-o", folder / "else" / "rows.jsonl", "--root", folder)[0] == 0
    assert read_rows(folder / "else" / "rows.jsonl") == rows
    file = write(folder / "rows.jsonl", row("0"), row("1", boxes="none"), '{"id": "n", "x": NaN}', row("0"), row("2"))
    out, config = folder / "out.jsonl", folder / "grounding.yaml"
    code, _, err = run(capsys, "convert", file, "-o", out, "--config", config)
    assert code == 1 and "rows.jsonl:2: row '1': boxes='none'" in err and "--keep-going" in err and not out.exists()
    code, text, _ = run(capsys, "convert", file, "-o", out, "--config", config, "--keep-going")
    assert code == 0 and text.count("left out") == 4 and f"{out}: 2 rows, 3 left out" in text
    assert [r["id"] for r in read_rows(out)] == ["0", "2"]
    code, _, err = run(capsys, "convert", file, "-o", out, "--keep-going")
    assert code == 1 and "out.jsonl exists; --force replaces it" in err
    code, text, _ = run(capsys, "convert", file, "-o", out, "--keep-going", "--force", "--json")
    assert code == 0 and json.loads(text)["rows"] == 2 and len(json.loads(text)["left_out"]) == 3
    assert not [p for p in folder.iterdir() if p.name.endswith(".tmp")]


def plain(id: str, *media: str, **fields) -> UsableRow:
    files = tuple(Media(source=Path("/nowhere") / name) for name in media)
    return UsableRow(f"rows.jsonl:{id}", id, {"id": id, **fields}, files)


KEYS = st.one_of(st.none(), st.integers(0, 30))
ROWS = st.lists(st.tuples(KEYS, KEYS, KEYS, st.sampled_from("abc")), min_size=2, max_size=60)


@settings(max_examples=50)
@given(ROWS, st.floats(0.05, 0.5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_group_and_no_file_is_on_both_sides(drawn, share, seed, rng: random.Random):
    rows = [plain(f"r{i}", *(f"{m}.png" for m in {a, b} - {None}), category=c, group_key=g)
            for i, (g, a, b, c) in enumerate(drawn)]
    try:
        found = split(rows, share, seed=seed, near_duplicates=False)
    except DataError as error:
        assert "one group holds" in str(error)
        return
    held, train = {r.id for r in found.heldout}, {r.id for r in found.train}
    assert held and train and not held & train and len(held) + len(train) == len(rows)
    for value in (lambda r: {r.row["group_key"]} - {None}, lambda r: {m.source for m in r.media}):
        sides = [set().union(*(value(r) for r in side)) for side in (found.train, found.heldout)]
        assert not sides[0] & sides[1]
    rng.shuffle(rows)
    assert {r.id for r in split(rows, share, seed=seed, near_duplicates=False).heldout} == held


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=12, unique=True), st.integers(0, 8), st.data())
def test_near_pairs_are_those_of_brute_force(hashes, distance, data):
    for _ in range(12):  # neighbours of what is there, a few bits away
        bits = data.draw(st.lists(st.integers(0, 63), max_size=10))
        hashes.append(data.draw(st.sampled_from(hashes)) ^ sum({1 << b for b in bits}))
    found = {tuple(sorted(pair)) for pair in near_pairs(np.array(hashes, np.uint64), distance)}
    assert found == {(a, b) for a in range(len(hashes)) for b in range(a + 1, len(hashes))
                     if (hashes[a] ^ hashes[b]).bit_count() <= distance}


def test_each_category_keeps_its_share_and_the_seed_counts():
    rows = [plain(f"r{i}", category="abc"[i % 3], group_key=None if i % 2 else i // 4) for i in range(600)]
    found = split(rows, 0.1)
    assert len(found.heldout) == found.wanted == 60
    assert all(held == 20 for _, held in found.shares().values())
    assert {r.id for r in split(rows, 0.1, seed=1).heldout} != {r.id for r in found.heldout}
    assert len(split(rows, 7).heldout) == 7
    rare = split([plain(f"r{i}", category=str(i // 3)) for i in range(300)], 0.1)  # a tenth of three rows is no row
    assert len(rare.heldout) == 30


@pytest.mark.slow
def test_near_duplicates_are_found_and_different_pictures_are_not(folder, capsys):
    photos = [Image.fromarray(a[::2, ::2]) for a in pytest.importorskip("sklearn.datasets").load_sample_images().images]
    for i, image in enumerate([*photos, *(picture(i) for i in range(20, 38))]):
        image.save(folder / "img" / f"o{i}.png", compress_level=1)
        image.resize((image.width // 2, image.height // 2)).save(folder / "img" / f"s{i}.jpg", quality=70)
        image.save(folder / "img" / f"q{i}.jpg", quality=50)
    for i, shade in enumerate(((255, 0, 0), (0, 0, 255), (9, 9, 9))):  # without structure: alike to any hash
        Image.new("RGB", (64, 64), shade).save(folder / "img" / f"flat{i}.png")
    files = sorted(p for p in (folder / "img").iterdir() if p.name[0] in "osqf")
    file = write(folder / "rows.jsonl", *({"id": p.stem, "image": f"img/{p.name}"} for p in files))
    code, out, _ = run(capsys, "split", file, "-o", folder, "--heldout", 18, "--json")
    found = json.loads(out)
    assert code == 0 and found["groups"] == 20 + 3 and found["largest_group"] == 3 and found["heldout"] == 18
    stems = sorted(sorted(Path(name).stem for name in cluster) for cluster in found["near_duplicates"])
    assert stems == sorted(sorted((f"o{i}", f"s{i}", f"q{i}")) for i in range(20))
    assert run(capsys, "check", folder / "train.jsonl")[0] == 0
    held = {r["id"][1:] for r in read_rows(folder / "heldout.jsonl")}
    assert not held & {r["id"][1:] for r in read_rows(folder / "train.jsonl")}
    assert image_signature("a", "", Image.new("RGB", (8, 8))).hashes is None


def test_copies_stay_together_and_one_group_with_nearly_everything_is_named(folder, capsys):
    rows = [row(str(i), image="img/0.png", group_key="home") for i in range(9)]
    file = write(folder / "rows.jsonl", *rows, row("1x"))
    code, _, err = run(capsys, "split", file, "-o", folder, "--no-near-duplicates")
    assert code == 1 and 'one group holds 9 of 10 rows' in err and 'group_key="home" is in 9 of them' in err
    assert "img/0.png is shown by 9" in err and "--by" in err and not (folder / "train.jsonl").exists()
    (folder / "img" / "copy.png").write_bytes((folder / "img" / "0.png").read_bytes())
    make_video(folder / "a.mp4", frames=2)
    (folder / "b.mp4").write_bytes((folder / "a.mp4").read_bytes())
    file = write(folder / "rows.jsonl", *(row(str(i), category="ab"[i % 2], meta={"app": i // 2}) for i in range(6)),
                 row("copy"), {"id": "v", "video": "a.mp4"}, {"id": "w", "video": "b.mp4"})
    code, out, _ = run(capsys, "split", file, "-o", folder, "--no-near-duplicates", "--heldout", 2)
    assert code == 0 and "9 rows in 7 groups, the largest with 2 rows" in out and "heldout.jsonl: 2 rows, 22.2%" in out
    for pair in ({"0", "copy"}, {"v", "w"}):
        assert len(pair & {r["id"] for r in read_rows(folder / "train.jsonl")}) in (0, 2)
    code, _, err = run(capsys, "split", file, "-o", folder)
    assert code == 1 and "train.jsonl exists; --force" in err
    assert run(capsys, "split", file, "-o", folder / "sub", "--root", folder, "--by", "app", "--heldout", 0.3)[0] == 0
    held = {r["id"] for r in read_rows(folder / "sub" / "heldout.jsonl")}
    assert all(len(held & {str(i), str(i + 1)}) in (0, 2) for i in (0, 2, 4))
    assert read_rows(folder / "sub" / "train.jsonl")[-1].get("image", "img/").startswith("img/")


@each("words code says", [
    ("check none.jsonl", 1, "none.jsonl cannot be read: .*No such file"),
    ("check img", 1, "img: the folder holds no rows. It may hold a folder of images for each class"),
    ("check img.jsonl", 1, "img.jsonl: the folder holds no rows"),
    ("check bytes.jsonl", 1, "bytes.jsonl cannot be read: .*UTF-8"),
    ("check object.json", 1, "object.json must hold a list of rows, not a dict"),
    ("check good.jsonl --format coco_", 1, "data.format='coco_' is not known"),
    ("check good.jsonl --format canonica", 1, "Did you mean 'canonical'"),
    ("check good.jsonl --config none.yaml", 1, "config file .*none.yaml' does not exist"),
    ("check good.jsonl steps=1", 2, "name the config with --config"), ("check good.jsonl --max -1", 2, "--max"),
    ("check", 2, "Missing argument 'FILE'"), ("check empty.jsonl", 1, "no rows"),
    ("convert good.jsonl -o out.csv", 1, r"out.csv: rows are written as \.jsonl"),
    ("convert good.jsonl -o img.jsonl --force", 1, "img.jsonl is a folder"),
    ("convert good.jsonl -o good.jsonl/x.jsonl --root .", 1, "cannot write .*x.jsonl: .*Give another path"),
    ("convert empty.jsonl -o out.jsonl", 1, "empty.jsonl has no usable row"),
    ("convert good.jsonl", 2, "Missing option '--output'"),
    ("convert bad.jsonl -o out.jsonl --keep-going", 1, "has no usable row; .*difficulty=2"),
    ("split good.jsonl -o . --heldout 0", 1, "--heldout 0 must be a share"),
    ("split good.jsonl -o . --heldout 1.5", 1, "--heldout 1.5 must be a share such as 0.1 or a number"),
    ("split good.jsonl -o . --heldout nan", 1, "--heldout nan must be"),
    ("split good.jsonl -o . --heldout 2", 1, "--heldout 2 of 2 rows leaves no rows to train on"),
    ("split good.jsonl -o . --heldout many", 2, "Invalid value for '--heldout'"),
    ("split good.jsonl -o . --distance 40", 1, "--distance 40 must be a number of bits from 0 to 16"),
    ("split good.jsonl -o . --by expresion", 1, "no row has this field. Did you mean 'expression'"),
    ("split good.jsonl -o good.jsonl", 1, "good.jsonl is a file. Give a folder"),
    ("split broken.jsonl -o .", 1, "broken.jsonl:2: not JSON.*vlrl data check"),
    ("split lost.jsonl -o .", 1, "lost.jsonl:2: row 'lost': media file .*lost.png does not exist"),
    ("split empty.jsonl -o .", 1, "empty.jsonl has no usable row"), ("chek good.jsonl", 2, "No such command 'chek'"),
])
def test_bad_input(folder, capsys, monkeypatch, words, code, says):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    write(Path("good.jsonl"), row("0"), row("1"))
    write(Path("broken.jsonl"), row("0"), "{")
    write(Path("lost.jsonl"), row("0"), row("lost"))
    write(Path("empty.jsonl"))
    write(Path("bad.jsonl"), {"id": 1, "difficulty": 2})
    Path("object.json").write_text('{"id": 1}')
    Path("bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    Path("img.jsonl").mkdir(exist_ok=True)
    found, out, err = run(capsys, *words.split())
    assert found == code and re.search(says, " ".join((out + err).split())), (found, out, err)
    assert not Path("train.jsonl").exists() and not Path("out.jsonl").exists()
