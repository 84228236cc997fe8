"""Driving data made here: plans read off trajectories, and pictures, trajectories and obstacles that agree."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlrl.cli.main import main
from vlrl.config.schema import LimitsSettings
from vlrl.data import read_rows
from vlrl.errors import ConfigError, DataError
from vlrl.tools.datasets.check import check
from vlrl.tools.makers import driving as makedriving
from vlrl.tools.makers.driving import SHARES, WHERE, make_driving, plan_of, quotas

TIMES = np.linspace(0, 3, 31)


def plan(before: float, after: float, aside: float = 0.0, turn: float = 0.0) -> tuple[str, str] | None:
    """The plan of a smooth drive: speeds in m/s, metres to the left and degrees to the left at its end."""
    share = TIMES / 3
    places = np.stack([(before + after) / 2 * TIMES, aside * share], axis=1)
    found = plan_of(places, np.radians(turn) * share, before + (after - before) * share)
    return (found.speed, found.path) if found else None


def test_the_plan_of_a_drive():
    for driven, expected in (
            ((8, 8), ("KEEP", "STRAIGHT")), ((8, 8.7), ("KEEP", "STRAIGHT")), ((8, 9.2), None),
            ((8, 9.6), ("ACCELERATE", "STRAIGHT")), ((8, 6.4), ("DECELERATE", "STRAIGHT")), ((8, 6.8), None),
            ((8, 0.4), ("STOP", "STRAIGHT")), ((8, 0.8), None), ((0, 0), ("STOP", "STRAIGHT")),
            ((0, 2), ("ACCELERATE", "STRAIGHT")), ((0.9, 0.9), None), ((8, 8, 3.5), ("KEEP", "LEFT_CHANGE")),
            ((8, 8, -3.5), ("KEEP", "RIGHT_CHANGE")), ((8, 8, 1.6), None), ((8, 8, 2, 40), ("KEEP", "LEFT_TURN")),
            ((8, 5, -2, -40), ("DECELERATE", "RIGHT_TURN")), ((8, 8, 1, 18), None)):
        assert plan(*driven) == expected, (driven, expected)
    straight = np.stack([8 * TIMES, 0 * TIMES], axis=1)

    def margin(after: float) -> float:
        found = plan_of(straight, 0 * TIMES, np.linspace(8, after, 31))
        assert found
        return found.margin

    assert margin(8.0) == 1.0 and margin(8.4) == 0.5 and margin(9.5) == 0.0 and margin(11.0) == 1.0


def test_plans_have_their_shares(tmp_path, monkeypatch):
    for count in (0, 1, 7, 100, 3000):
        wanted = quotas(count)
        assert sum(wanted.values()) == count and abs(sum(SHARES.values()) - 1) < 1e-9, count
        assert all(abs(wanted[key] - count * share) < 1 + 1e-6 for key, share in SHARES.items()), count
        assert {path for _, path in SHARES} == set(WHERE), count
    for wrong, message in (({"history": 3}, "--history 3"), ({"width": 65}, "--width 65")):
        with pytest.raises(ConfigError, match=message):
            make_driving(tmp_path / "x", **wrong)
    monkeypatch.setattr(makedriving.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"highway_env is not installed: pip install 'vlrl\[driving\]'"):
        make_driving(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    pytest.importorskip("highway_env")
    pytest.importorskip("shapely")
    out = tmp_path_factory.mktemp("driving") / "made"
    make_driving(out, 1, 5, heldout=1, history=1)
    return out


def test_rows_are_canonical_and_agree_with_their_pictures(made):
    rows = {split: read_rows(made / f"{split}.jsonl") for split in ("train", "heldout")}
    for split, found in rows.items():
        checked = check(made / f"{split}.jsonl", None, LimitsSettings())
        assert checked.problems == () and checked.rows == len(found) == {"train": 4, "heldout": 1}[split]
    assert not {r["group_key"] for r in rows["train"]} & {r["group_key"] for r in rows["heldout"]}
    for row in (row for found in rows.values() for row in found):
        assert row["frames"] == [-0.5, 0.0] and len(row["images"]) == 2
        assert row["category"] in WHERE[row["plan"]["path"]]
        assert [point[2] for point in row["trajectory"]] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
        with Image.open(made / row["images"][-1]) as image:
            assert image.size == (row["width"], row["height"]) == (128, 64)
            seen = np.asarray(image.convert("RGB")).astype(int)
        assert close(seen, row, [0.0, 0.0]) in ("ego", "lamp")
        bar = int((np.abs(seen[-2] - KNOWN["ego"]).max(axis=-1) < 30).sum())
        assert abs(bar - row["speed_mps"] / 20 * 128) < 5  # the mark of the limit may cover some
        for thing in row["obstacles"]:
            assert close(seen, row, thing["center"]) in ("car", "standing", "lamp", "barrier", "streak", None)
        about = json.loads((made / "made_by.json").read_text())
    assert about["rows"] == {"train": 4, "heldout": 1} and about["real"] == "nothing"
    with pytest.raises(DataError, match="is not an empty folder"):
        make_driving(made, 1, 5)


KNOWN = {"ego": (70, 235, 110), "car": (80, 150, 255), "standing": (255, 150, 40), "lamp": (255, 20, 20),
         "barrier": (255, 235, 0), "streak": (190, 225, 255), "road": (98, 98, 104), "ground": (38, 56, 40)}


def close(seen: np.ndarray, row: dict, place: list[float]) -> str | None:
    """What the pixel at a place in metres shows; None outside the picture."""
    x, y, _ = np.array(row["to_pixels"]) @ [*place, 1.0]
    if not (1 < x < row["width"] - 2 and 1 < y < row["height"] - 8):
        return None
    colour = seen[int(y), int(x)]
    return min(KNOWN, key=lambda name: np.abs(np.array(KNOWN[name]) - colour).max())


def test_a_row_is_kept_only_if_its_trajectory_is_safe():
    for obstacles, road, expected in (
            ([], 4, True), ([{"center": [9, 1], "size": [2, 2]}], 4, False),
            ([{"center": [9, 4], "size": [2, 2]}], 4, True),
            ([{"center": [9, 6], "size": [2, 2], "velocity": [0, -4]}], 4, False), ([], 0.8, False)):
        pytest.importorskip("shapely")
        row = {"trajectory": [[4 * t, 0.0, t] for t in makedriving.FUTURE], "ego_size": [5, 2], "obstacles": obstacles,
               "drivable": [[[-9, -road], [40, -road], [40, road], [-9, road]]]}
        assert makedriving._is_safe(row) is expected, (obstacles, road, expected)


def test_places_and_scenes():
    pytest.importorskip("highway_env")
    from vlrl.environments.roadview import Frame, corners, to_pixels
    frame = Frame(10.0, 20.0, np.pi / 2)  # heading down the screen: its left is the screen's right
    assert np.allclose(frame.places(np.array([[10.0, 25.0], [13.0, 20.0]])), [[5, 0], [0, 3]])
    assert np.allclose(frame.headings(np.array([np.pi / 2, 0.0, np.pi])), [0, np.pi / 2, -np.pi / 2])
    matrix = np.array(to_pixels(128))
    assert np.allclose(matrix @ [0, 0, 1], [32, 29, 1]) and np.allclose(matrix @ [10, 5, 1], [52, 19, 1])
    assert np.allclose(sorted(map(tuple, corners((1, 1), 0.0, (4, 2)))), [[-1, 0], [-1, 2], [3, 0], [3, 2]])
    from vlrl.tools.makers.driving_scenes import drive, scene

    first, again, other = (drive(scene("merge", seed, ("KEEP", "LEFT_CHANGE"))) for seed in "aab")
    assert np.array_equal(first.states, again.states) and first.decisions == again.decisions
    assert first.states.shape != other.states.shape or not np.array_equal(first.states, other.states)


def test_the_expert_overtakes_where_a_lane_is_free_and_brakes_where_none_is():
    pytest.importorskip("highway_env")
    from vlrl.environments import traffic
    from vlrl.tools.makers import driving_scenes as scenes
    for lane, beside, expected in ((2, (), 1), (0, (), 1), (1, (0, 2), 1), (1, (2,), 0)):
        road = traffic.empty_road("highway", 0)
        assert all(traffic.place_vehicle(road, ("0", "1", lane), *at) for at in ((100, 10.0), (126, 5.0)))
        assert all(traffic.place_vehicle(road, ("0", "1", other), 101, 10.0) for other in beside)
        assert traffic.place_vehicle(road, ("0", "1", lane), 128, 5.0) is None  # no room there
        driven = scenes.drive(scenes.Scene(road, "Follow the road.", 10.0, True))
        assert road.vehicles[0].lane_index[2] == expected and not driven.crashed and driven.decisions[0] == 10
        assert (driven.states[40, 0, 3] < 7) == (len(beside) == 2), (lane, beside, expected)
        assert (driven.states[:, :, 3] >= 0).all() and driven.states.shape[1] == 2 + len(beside)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_files(tmp_path, capsys):
    pytest.importorskip("highway_env")
    for name in "ab":
        assert main(["data", "make", "driving", "-o", str(tmp_path / name), "--samples", "60", "--heldout", "20",
                     "--seed", "4"]) == 0
    assert "train.jsonl: 40 rows" in capsys.readouterr().out
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 60 + 3
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    rows = read_rows(tmp_path / "a" / "train.jsonl")
    assert Counter((row["plan"]["speed"], row["plan"]["path"]) for row in rows) == {
        key: count for key, count in quotas(40).items() if count}
    assert {row["category"] for row in rows} == {"highway", "merge", "exit", "intersection", "roundabout"}
