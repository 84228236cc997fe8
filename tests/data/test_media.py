import base64
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import sets
from tests.data.sets import bomb
from tests.tables import each, refused
from vlrl.app.asking import _DATA
from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.data.media import VideoSampling, as_rgb, load, resolve
from vlrl.data.row_samples import sample_from_row
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.errors import DataError
from vlrl.task import load as load_task
from vlrl.types import Media

LIMITS = LimitsSettings()


def picture(width=6, height=4, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(path: Path, image: Image.Image, **options) -> Media:
    image.save(path, **options)
    return Media(source=path)


def seen(path: Path, image: Image.Image) -> list:
    """The pixels of the first row of an image that is written and loaded."""
    frame = load(saved(path, image), LIMITS).frames[0]
    assert frame.mode == "RGB"
    return [frame.getpixel((x, 0)) for x in range(frame.width)]


def broken_files():
    png = io.BytesIO()
    picture(64, 64).save(png, "PNG")
    whole = png.getvalue()
    return {"cut short": whole[:len(whole) // 2], "header only": whole[:20], "empty": b"", "text": b"hello",
            "flipped": whole[:60] + bytes(b ^ 0xFF for b in whole[60:]), "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n"}


@each("suffix", ["png", "bmp", "webp", "gif", "tiff", "ppm"])
def test_a_file_becomes_one_rgb_frame(tmp_path, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    loaded = load(saved(tmp_path / f"a.{suffix}", picture(), **options), LIMITS)
    assert loaded.kind == "image" and len(loaded.frames) == 1
    assert loaded.frames[0].mode == "RGB" and loaded.size == (6, 4) and loaded.timestamps == ()
    assert loaded.path == tmp_path / f"a.{suffix}"
    if suffix != "gif":
        assert loaded.frames[0].tobytes() == picture().tobytes()


def test_the_hash_names_the_bytes_or_the_pixels(tmp_path):
    a, b = load(saved(tmp_path / "a.png", picture()), LIMITS), load(saved(tmp_path / "b.bmp", picture()), LIMITS)
    drawn, again = load(Media(source=picture()), LIMITS), load(Media(source=picture()), LIMITS)
    turned = load(Media(source=picture().resize((4, 6))), LIMITS)
    assert drawn.sha256 == again.sha256 and drawn.path is None
    assert len({a.sha256, b.sha256, drawn.sha256, turned.sha256}) == 4
    black = [load(Media(source=Image.new("RGB", size)), LIMITS).sha256 for size in ((2, 6), (6, 2), (3, 4))]
    assert len(set(black)) == 3  # the same bytes in another shape
    image = picture(8, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    loaded = load(saved(tmp_path / "a.png", image, exif=exif), LIMITS)
    assert loaded.size == (4, 8)
    assert loaded.frames[0].tobytes() == image.rotate(-90, expand=True).tobytes()


def test_a_photo_on_its_side_is_turned_wherever_it_comes_from(tmp_path):
    """sglang#33464, mistral-common#330: the sampler saw the photo as it is stored. One that a task has opened counts
    too, and so does what is sent to a vLLM server."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(tmp_path / "a.jpg", picture(32, 16), exif=exif, quality=95).source
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    rows = ("a.jpg", data, {"bytes": data, "path": None}, text, f"data:image/jpeg;base64,{text}")
    sources = [sample_from_row({"id": "r", "image": value}, tmp_path).media[0] for value in rows]
    with Image.open(path) as opened:
        turned = np.asarray(opened.convert("RGB").rotate(-90, expand=True))
    for media in (*sources, Media(source=Image.open(path)), Media(source=pickle.loads(pickle.dumps(Image.open(path))))):
        (frame,) = load(media, LIMITS).frames
        for seen in (frame, vllm_wire.unpack(vllm_wire.pack(frame)), as_rgb(frame)):
            assert np.array_equal(np.asarray(seen), turned) and 0x0112 not in seen.getexif()
    with Image.open(path) as opened:
        assert np.array_equal(np.asarray(as_rgb(opened)), turned)  # what an environment's process sends


def test_other_modes_and_pictures_of_numbers(tmp_path):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    for mode in ("RGBA", "LA", "P"):  # transparency is laid over white
        assert seen(tmp_path / "a.png", image.convert(mode)) == [(0, 0, 0), (255, 255, 255)], mode
    for mode in ("L", "1", "CMYK"):
        assert len(seen(tmp_path / "a.tiff", Image.new(mode, (2, 1)))) == 2
    for values, kind, greys in (
            ([0, 256 * 100], np.uint16, (0, 100)), ([0, 0.5, 1], np.float32, (0, 127, 255)),
            ([0, 40.0, 255], np.float32, (0, 40, 255)), ([0, 256, 65535], np.int32, (0, 1, 255)),
            ([0, 1, 200], np.int32, (0, 1, 200))):
        assert seen(tmp_path / "a.tiff", Image.fromarray(np.array([values], kind))) == [(g, g, g) for g in greys]
    for values, kind in (([0, 2**31 - 1], np.int32), ([-1, 2], np.int32), ([-0.5, 1], np.float32),
                         ([0, np.nan], np.float32)):
        with pytest.raises(DataError, match=r"a\.tiff.* has pixel values from .*8 or 16 bits per pixel"):
            seen(tmp_path / "a.tiff", Image.fromarray(np.array([values], kind)))


@each("mode", "1 L LA La P PA RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV I F I;16 I;16B I;16L".split())
def test_a_drawn_picture_of_any_mode_is_the_same_here_and_in_another_process(mode):
    image = Image.new(mode, (3, 2))
    here, there = (load(Media(source=i), LIMITS).frames[0] for i in (image, pickle.loads(pickle.dumps(image))))
    assert here.mode == "RGB" and here.tobytes() == there.tobytes() == as_rgb(image).tobytes()


def bad_pictures():
    lazy, gone = (Image.open(io.BytesIO(broken_files()["cut short"])), Image.open(io.BytesIO(bomb(4, 4))))
    closed = Image.new("RGB", (3, 3))
    closed.close()
    return {"truncated": lazy, "nothing in it": gone, "closed": closed, "0-size": Image.new("RGB", (0, 4)),
            "no palette": Image.new("P", (3, 3), 7), "no palette, alpha": Image.new("PA", (3, 3), (7, 255)),
            "nan": Image.fromarray(np.full((2, 2), np.nan, np.float32)), "pickled": pickle.loads(
                pickle.dumps(Image.new("P", (3, 3), 7)))}


@each("name", bad_pictures())
def test_whatever_is_wrong_with_a_drawn_picture_is_an_error_of_the_data(name):
    image = bad_pictures()[name]
    for source in (image, [image]):
        with pytest.raises(DataError, match=r"drawn image|video"):
            load(Media(source=source, kind="video" if source is not image else "image", fps=1.0), LIMITS)


@each("name", broken_files())
def test_a_broken_image_names_its_file(tmp_path, name):
    path = tmp_path / "bad.png"
    path.write_bytes(broken_files()[name])
    with pytest.raises(DataError, match=r"bad\.png"):
        load(Media(source=path), LIMITS)


def test_missing_files_folders_and_other_sources(tmp_path):
    with pytest.raises(DataError, match=r"none\.png does not exist.*data\.root"):
        load(Media(source=tmp_path / "none.png"), LIMITS)
    os.mkfifo(tmp_path / "pipe.png")
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "pipe.png", "is not a regular file")):
        with pytest.raises(DataError, match=f"{path.name} {said}"):
            load(Media(source=path), LIMITS)
    with pytest.raises(DataError, match="URL"):
        load(Media(source="https://example.org/a.png"), LIMITS)
    with pytest.raises(DataError, match="type int"):
        load(Media(source=3), LIMITS)


def test_limits_refuse_before_decoding(tmp_path):
    path = tmp_path / "bomb.png"
    for side in (20_000, 60_000):  # above Pillow's own limit
        path.write_bytes(bomb(side, side))
        with pytest.raises(DataError, match=r"bomb\.png has more pixels than limits\.image_pixels=64000000, or"):
            load(Media(source=path), LIMITS)
    path.write_bytes(bomb(9_000, 9_000))  # below Pillow's own limit, above ours
    with pytest.raises(DataError, match=r"bomb\.png is 9000x9000 = 81000000 pixels.*limits\.image_pixels=64000000"):
        load(Media(source=path), LIMITS)
    with pytest.raises(DataError, match=r"limits\.image_pixels=23"):
        load(Media(source=picture()), LimitsSettings(image_pixels=23))
    assert load(Media(source=picture()), LimitsSettings(image_pixels=24)).size == (6, 4)
    media = saved(tmp_path / "a.png", picture())
    with pytest.raises(DataError, match=r"a\.png has \d+ bytes, more than limits\.media_bytes=10"):
        load(media, LimitsSettings(media_bytes=10))


def test_resolve_stays_under_its_root(tmp_path):
    root = tmp_path / "data"
    (root / "img").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"")
    assert resolve("img/a.png", root) == root / "img" / "a.png"
    assert resolve("img/../b.png", root) == root / "b.png"
    assert resolve(str(root / "c.png"), root) == root / "c.png"
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "folder").symlink_to(tmp_path)
    for path in ("../secret.png", "img/../../secret.png", str(tmp_path / "secret.png"), "/etc/passwd", "link.png",
                 "folder/secret.png"):
        with pytest.raises(DataError, match=r"lies outside.*data\.root"):
            resolve(path, root)
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    assert resolve("img/a.png", linked) == root / "img" / "a.png"


@each("path words", [
    *((url, "download the file") for url in ("http://x/a.png", "HTTPS://x/a.png", "ftp://x/a", "s3://b/a", "file:///a",
                                             "data:x")), *((path, "media path") for path in ("", None, 3, "a\0b"))])
def test_resolve_refuses_urls(tmp_path, path, words):
    with pytest.raises(DataError, match=words):
        resolve(path, tmp_path)


@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_further_roots_let_in_what_lies_in_them_alone(tmp_path, index):
    """rows/ holds the file, shared/ may be allowed by data.media_roots, secret/ is not."""
    for name in ("rows", "shared", "secret"):
        (tmp_path / name).mkdir()
        picture().save(tmp_path / name / "a.png")
    shared, right = tmp_path / "shared", tmp_path / "shared" / "a.png"
    (shared / "out.png").symlink_to(tmp_path / "secret" / "a.png")
    (tmp_path / "link").symlink_to(shared)
    roots = {"media_roots": (str(tmp_path / "link"),)}

    def read(image, record=None, task=None, **more):
        file = sets.save(tmp_path / "rows" / "a.jsonl", [record or {"id": "r", "image": str(image)}])
        return sets.read(file, index, task=task, **more)[0].media[0].source
    for path in (right, tmp_path / "link" / "a.png", "../shared/a.png"):
        assert read(path, **roots) == right
        with pytest.raises(DataError, match=r"row 'r': media path .* lies outside .*data\.media_roots"):
            read(path)
    for path in (tmp_path / "secret" / "a.png", "../secret/a.png", "../shared/out.png", "../shared/../secret/a.png",
                 f"{shared}x/a.png", "/etc/passwd", shared / ".." / "secret" / "a.png"):
        with pytest.raises(DataError, match=r"lies outside .*media_roots"):
            read(path, **roots)
    # absolute paths of other formats are looked for under the root, unless they lie in a further one
    other = right.rename(shared / "b.png")
    record = {"image": str(other), "problem": "What?", "solution": "<answer>x</answer>"}
    assert read(other, record, load_task("qa"), **roots) == other
    with pytest.raises(DataError, match="does not exist"):
        read(other, record, load_task("qa"))


def test_the_playground_takes_no_roots_of_a_run():
    """What it takes over from a run's config is listed, and these are not among it."""
    unsafe = {"media_roots", "urls", "cache"}
    assert set(DataSettings.model_fields) >= unsafe and not unsafe & {*_DATA}


def grey(count: int, size=(4, 4)):
    return [Image.new("RGB", size, (i, i, i)) for i in range(count)]


def test_frames_are_sampled_by_their_rate(tmp_path):
    loaded = load(Media(kind="video", source=grey(10), fps=5.0), LIMITS, VideoSampling(fps=2, max_frames=64))
    assert [f.getpixel((0, 0))[0] for f in loaded.frames] == [0, 3, 6, 9]
    assert loaded.timestamps == pytest.approx((0, 0.6, 1.2, 1.8))
    assert loaded.metadata == {"fps": 5.0, "total_num_frames": 10, "duration": 2.0, "frames_indices": [0, 3, 6, 9],
                               "video_backend": "frames"}
    assert loaded.sha256 == load(Media(kind="video", source=grey(10), fps=5.0), LIMITS).sha256
    for i, frame in enumerate(grey(2)):
        frame.save(tmp_path / f"{i}.png")
    loaded = load(Media(kind="video", source=[tmp_path / "0.png", tmp_path / "1.png"], fps=1.0), LIMITS)
    assert [f.getpixel((0, 0))[0] for f in loaded.frames] == [0, 1]


test_bad_frames = refused(DataError, lambda media: load(media, LIMITS, VideoSampling(fps=2)), [
    (Media(kind="video", source=grey(2)), "fps=None"), (Media(kind="video", source=grey(2), fps=0.0), "fps=0.0"),
    (Media(kind="video", source=grey(2), fps="1"), "fps='1'"),
    (Media(kind="video", source=[], fps=1.0), "has no frame"),
    (Media(kind="video", source=[*grey(1), *grey(1, (2, 2))], fps=1.0), "differ in size")])
