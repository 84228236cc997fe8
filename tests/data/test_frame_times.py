"""A video given as frames at times of their own: what a row tells is read, checked, converted and told a model."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data import films
from tests.tables import each, refused
from vlrl.config.schema import LimitsSettings
from vlrl.data.media import VideoSampling, load
from vlrl.data.row_samples import sample_from_row
from vlrl.data.sources.reading import canonical_rows
from vlrl.data.video.sampling import frame_times
from vlrl.environments.validation import fingerprint
from vlrl.errors import DataError
from vlrl.tools.datasets.check import check
from vlrl.tools.datasets.convert import convert
from vlrl.types import Media, Observation

LIMITS = LimitsSettings()
TIMES = [0.5, 1.0, 4.0, 4.5]
NAMES = [f"{i}.png" for i in range(4)]
ANSWERED = {"role": "assistant", "content": "2"}


def drawn(count, size=(4, 4)):
    return [Image.new("RGB", size, (i % 256, i // 256, 9)) for i in range(count)]


def clip(times, **more):
    return Media(kind="video", source=drawn(len(times)), times=times, **more)


@pytest.fixture
def folder(tmp_path):
    for name, frame in zip(NAMES, drawn(4, (64, 64)), strict=True):
        frame.save(tmp_path / name)
    return tmp_path


@settings(max_examples=40)
@given(gaps=st.lists(st.integers(1, 5_000_000), min_size=1, max_size=20), first=st.integers(0, 10**7),
       wanted=st.sampled_from([0.1, 2.0, 30.0]), most=st.integers(2, 64), start=st.none() | st.floats(0, 20))
def test_every_frame_is_shown_at_its_own_time(gaps, first, wanted, most, start):
    times = ((first + np.cumsum([0, *gaps[1:]])) / 1e6).tolist()
    media, sampling = clip(times, start=start), VideoSampling(wanted, most)
    assume((start or 0) <= times[-1])
    loaded = load(media, LIMITS, sampling)
    shown = [times[i] - (start or 0) for i in loaded.metadata["frames_indices"]]
    assert loaded.timestamps == pytest.approx(shown, abs=1.1e-3)  # a frame a millisecond before `start` belongs to it
    assert start is not None or loaded.timestamps == tuple(np.round(shown, 6))
    assert [f.getpixel((0, 0))[0] for f in loaded.frames] == loaded.metadata["frames_indices"]
    assert load(loaded.as_media(), LIMITS) is loaded
    assert load(clip(np.array(times), start=start), LIMITS, sampling).sha256 == loaded.sha256


def test_times_beside_a_rate_are_kept(folder):
    by_rate = load(Media(kind="video", source=drawn(6), fps=2.0), LIMITS)
    by_times = load(clip([0, 0.5, 1, 1.5, 2, 2.5]), LIMITS)
    assert by_times.timestamps == by_rate.timestamps and by_times.metadata == by_rate.metadata
    assert load(clip([0, 0.5, 1, 1.5, 2, 3]), LIMITS).sha256 != by_times.sha256
    one, other = ([Observation(media=[replace(clip([0, 1]), source=drawn(2), times=t)])] for t in ([0, 1], [0, 2]))
    assert fingerprint(*one) != fingerprint(*other)
    (image,) = drawn(1)
    assert load(load(Media(source=image), LIMITS).as_media(), LIMITS).frames == (image,)
    assert frame_times(4, 0.75, TIMES)[1] == frame_times(4, None, TIMES)[1] == 0.75
    assert frame_times(4, 3, [0, 0.33, 0.67, 1.0])[1] == 3 and frame_times(1, None, [7.0])[1] == 1
    row = {"id": "r", "video": [NAMES, "a.mp4", NAMES], "frame_times": [TIMES, None, [0, 1, 2, 3]]}
    assert [m.times for m in sample_from_row(row, folder).media] == row["frame_times"]
    part = {"type": "video", "video": NAMES, "timestamps": TIMES}
    with pytest.raises(DataError, match=r"the conversation says frame_times=.* but a separate field says"):
        raise canonical_rows({"id": "r", "messages": [{"role": "user", "content": [part, "When?"]}, ANSWERED],
                         "frame_times": [0, 1, 2, 3]})[0]
    frames = [{"bytes": (folder / name).read_bytes(), "path": None} for name in NAMES]
    asks = {"video": frames, "question": "When?", "answer": "2"}
    pq.write_table(pa.Table.from_pylist([{"id": "a", **asks, "frame_times": TIMES}]), folder / "good.parquet")
    pq.write_table(pa.Table.from_pylist([{"id": "a", **asks, "frame_times": TIMES[::-1]}]), folder / "bad.parquet")
    assert check(folder / "good.parquet", None, LIMITS).bad == 0
    found = check(folder / "bad.parquet", None, LIMITS)
    assert found.bad == 1 and "must be later than 4.5" in found.problems[0].message
    convert(folder / "good.parquet", folder / "new.jsonl")
    row = json.loads((folder / "new.jsonl").read_text())
    assert load(sample_from_row(row, folder).media[0], LIMITS).timestamps == tuple(TIMES)


@each("times words", [
    ([0, 1, 2], r"frame_times=\[0, 1, 2\]: it must be a list of 4 numbers"),
    ([], "must be a list of 4 numbers"), ("0 1 2 3", "must be a list of 4 numbers"), (2.0, "must be a list of 4"),
    ([0, 1, 1, 2], "the time 1 of frame 3 must be later than 1, the time of the previous frame: sort the frames"),
    ([0, 2, 1, 3], "the time 1 of frame 3 must be later than 2"),
    ([0, 1e-9, 1, 2], "time 1e-09 of frame 2 must be later than 0"),
    ([0, float("nan"), 1, 2], "the time nan of frame 2 must be a number of seconds of at least 0"),
    ([0, 1, 2, float("inf")], "time inf of frame 4 must be"), ([0, 1, 2, 1e300], r"1e\+300 of frame 4 must be"),
    ([-1, 0, 1, 2], "the time -1 of frame 1 must be a number of seconds of at least 0"),
    ([False, 1, 2, 3], "False of frame 1 must be"), ([0, "1", 2, 3], "'1' of frame 2 must be"),
    ([[0, 1, 2, 3], [0, 1]], "one list per video; the row has 1 videos")])
def test_times_that_are_none_of_these_frames(times, words):
    with pytest.raises(DataError, match=f"^row 'r': .*{words}"):
        sample_from_row({"id": "r", "video": NAMES, "frame_times": times})
    if "one list per video" not in words:
        with pytest.raises(DataError, match=words):
            load(replace(clip(TIMES), times=times), LIMITS)


test_times_that_contradict_the_rest_of_the_row = refused(DataError, lambda row: sample_from_row({"id": "r", **row}), [
    ({"video": NAMES, "frame_times": TIMES, "fps": 2}, r"fps=2, but frame_times=\[.* result in 0.75 frames per second"),
    ({"video": NAMES, "frame_times": TIMES, "fps": -1}, "fps=-1 must be a number above 0"),
    ({"video": "a.mp4", "frame_times": TIMES}, r"frame_times=\[.*the row's video is a file, which has its own"),
    ({"image": "a.png", "frame_times": TIMES}, "the row has 0 videos"),
    ({"video": [NAMES, NAMES], "frame_times": TIMES}, "one list per video; the row has 2 videos"),
    ({"video": NAMES}, "fps=None must be .* or frame_times must hold the time of each")], start="^row 'r': .*")


@each("told fps times", [
    ({"times": TIMES}, None, TIMES), ({"timestamps": TIMES}, None, TIMES),
    ({"frame_times": TIMES, "fps": 0.75}, 0.75, TIMES), ({"fps": 4}, 4, None), ({"sample_fps": 4}, 4, None)])
def test_parts_of_a_conversation_tell_the_times_of_their_frames(told, fps, times):
    part = {"type": "video", "video": NAMES, **told}
    asked = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, part, {"type": "text", "text": "When?"}]}]
    (row,) = canonical_rows({"id": "r", "messages": [*asked, ANSWERED]})
    assert (row.get("fps"), row.get("frame_times"), row["question"]) == (fps, times, "Look: <video>When?")
    (media,) = sample_from_row(row).media
    assert (media.fps, media.times) == (fps, times)


@each("record", [
    {"messages": [{"role": "user", "content": "<video>When?"}, ANSWERED], "videos": [NAMES]},
    {"problem": "When?", "data_type": "video", "problem_type": "free-form", "solution": "<answer>2</answer>",
     "path": NAMES},
    {"question": "When?", "answer": "2", "options": ["1", "2"], "video": NAMES},
    {"question": "When?", "answer": "2", "video": NAMES}])
@each("written", [TIMES, json.dumps(TIMES), [str(t) for t in TIMES]])
def test_other_formats_keep_the_times_of_frames(record, written):
    if record.keys() == {"question", "answer", "video"} and written != TIMES:
        return  # a canonical row holds numbers
    (row,) = canonical_rows({"id": "r", **record, "frame_times": written})
    assert sample_from_row(row).media[0].times == TIMES


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_model_is_told_the_times_of_the_frames(tiny_models, folder, family):
    """ms-swift#6523: a video given as frames was always taken as two a second, and Qwen3-VL was told wrong times. As
    text before each pair of frames, or as temporal positions, evenly spaced; and packed rows equal padded ones."""
    from tests.models.test_packing import Ask, assert_equal, load, random_answers

    policy, encode = load(tiny_models[family], train=["language", "merger", "vision"], video_max_frames=8)
    tokenizer = policy.processor.tokenizer

    def told(row, times=None):
        prompt = encode(Ask(), sample_from_row({"id": "r", "q": "When?", **row}, folder))
        found = np.array(prompt.media[0].timestamps)
        assert times is None or found == pytest.approx(np.array(times))
        pairs = found.reshape(-1, 2)
        if family == "qwen3_vl":
            parts = tokenizer.decode(prompt.ids).split(" seconds>")[:-1]
            assert [float(p.rpartition("<")[2]) for p in parts] == pytest.approx(pairs.mean(1), abs=0.051)
        else:
            rows = prompt.positions[0][prompt.ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")]
            even = np.arange(len(pairs)) * 2 * (found[-1] - found[0]) / (len(found) - 1)
            ticks = policy.base.config.vision_config.tokens_per_second
            assert sorted(set(rows - rows.min())) == np.floor(even * ticks + 1e-5).tolist()
        return prompt
    told({"video": NAMES, "frame_times": TIMES}, TIMES)
    said = [{"role": "user", "content": "<video>When?"}, ANSWERED]
    for fps in (1.0, 0.25, 4):
        (row,) = canonical_rows({"id": "r", "messages": said, "videos": [NAMES], "fps": fps})
        for one in ({"video": NAMES, "fps": fps}, row):
            told(one, [n / fps for n in range(4)])
    film = films.FILES["part.mp4"]
    films.make(folder / "part.mp4", film)
    prompt = told({"video": "part.mp4", "video_start": film.span[0], "video_end": film.span[1]})
    answers = random_answers(0, 3, len(tokenizer), set(policy.banned.tolist()))
    assert_equal(policy, [prompt] * 3, answers)
