"""checkpoint.py: exact, whole or not at all, whatever is killed, damaged or full."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from vlrl.errors import RunError, TrainingError
from vlrl.store import checkpoint, trainer_state


def model(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"weights" * 100)
    (path / "processor").mkdir()
    (path / "processor" / "config.json").write_text("{}")


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)  # of floats the shortest text that gives the same bits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def state(step: int = 0) -> dict:
    base = torch.arange(6, dtype=torch.float32)
    return {
        "step": step, "lr": 0.1 + 0.2, "tiny": 5e-324, "minus": -0.0, "inf": float("inf"), "nan": float("nan"),
        "big": 2**80, "text": "ü\ud800\x00", "none": None, "flag": True, "empty": {}, "bytes": b"\x00\xff",
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 2)}, 1: {}},
                      "param_groups": [{"params": [0, 1], "betas": (0.9, 0.999)}]},
        "dtypes": [torch.tensor([1.5, float("nan")], dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64)],
        "whole": [torch.tensor([2**62, -1]), torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(7)],
        "rng": {"torch": torch.get_rng_state(), "python": random.Random(1).getstate(),
                "numpy": np.random.RandomState(1).get_state(), "array": np.array([2**32 - 1], np.uint32)},
        "shared": [base, base[2:4], base.view(2, 3).t()],
        "a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "keys": {1: torch.tensor(3), "1": torch.tensor(4)},
        "odd": {"$tensor": "mine", (1, "x"): 2, 0.5: 3}, "$array": {"$dict": []},
    }


def test_state_round_trip_is_exact_and_its_files_are_listed(tmp_path):
    torch.manual_seed(0)
    before = state()
    path = checkpoint.save(tmp_path, 50, model, before, keep=2)
    after = checkpoint.load_state(path)
    wrong = [key for key in before if not same(before[key], after[key])]
    assert not wrong and list(after) == list(before)
    tensors = [*after["optimizer"]["state"][0].values(), *after["dtypes"], *after["whole"], *after["shared"]]
    assert [t for t in tensors if t.data_ptr() % 64] == []  # kernels of CPUs answer otherwise at other addresses
    path = checkpoint.save(tmp_path, 50, model, {}, keep=2)
    assert path == tmp_path / "step-000050"
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(files) == ["model.safetensors", "processor/config.json", "trainer_state.json",
                             "trainer_state.safetensors"]
    assert files["model.safetensors"]["size"] == 700 and checkpoint.problems(path) == []
    live = trainer_state.view({"algorithm": {"reference": torch.ones(2)}, "optimizer": {"lr": 0.5}})
    joined = trainer_state.merge(live, trainer_state.freeze({"algorithm": {"kl_coef": torch.tensor(3.0)}}))
    names = {name: f"state.algorithm.{name}" for name in ("reference", "kl_coef")}
    assert joined.tree == {"optimizer": {"lr": 0.5}, "algorithm": {k: {"$tensor": v} for k, v in names.items()}}
    assert {name: t.tolist() for name, t in joined.tensors.items()} == {
        names["reference"]: [1.0, 1.0], names["kl_coef"]: 3.0}


def test_optimizer_and_rng_go_on_as_if_nothing_had_happened(tmp_path):
    def run(weight, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (weight * torch.randn(4)).sum().square().backward()
            optimizer.step()

    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    run(weight, optimizer, 2)
    path = checkpoint.save(tmp_path, 2, model, {"w": weight, "opt": optimizer.state_dict(),
                                                "rng": torch.get_rng_state()}, keep=1)
    run(weight, optimizer, 3)
    saved = checkpoint.load_state(path)
    again = torch.nn.Parameter(saved["w"].clone())
    optimizer = torch.optim.AdamW([again], lr=9.0)
    optimizer.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    run(again, optimizer, 3)
    assert torch.equal(weight, again)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_which_checkpoints_are_kept(tmp_path):
    (tmp_path / ".tmp-step-000010-99").mkdir()
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, model, {"step": step}, keep=2)
    assert names(tmp_path) == ["step-000030", "step-000040"]
    checkpoint.mark_best(tmp_path, 30, {"mean": 1.0}, keep=1)
    assert names(tmp_path) == ["best.json", "step-000030", "step-000040"]
    (tmp_path / "best.json").unlink()
    checkpoint.save(tmp_path, 35, model, {"step": 35}, keep=2)  # the run went back; step 40 is of a past that is gone
    assert names(tmp_path) == ["step-000030", "step-000035"]
    (tmp_path / "step-000035/model.safetensors").write_bytes(b"")  # a damaged one takes no place of a whole one
    for value in (1, 2):  # a step again replaces it
        path = checkpoint.save(tmp_path, 36, model, {"value": value}, keep=2)
    assert "step-000030" in names(tmp_path) and checkpoint.load_state(path) == {"value": 2}
    for step in (999_999, 1_000_000):  # the newest is that of the last step, whatever its name is
        checkpoint.save(tmp_path, step, model, {}, keep=2)
    assert checkpoint.latest(tmp_path).step == 1_000_000
    assert [checkpoint.step_of(path) for path in checkpoint.complete_checkpoints(tmp_path)] == [999_999, 1_000_000]


def test_a_folder_of_weights_alone_is_a_checkpoint(tmp_path):
    with pytest.raises(RunError, match="is neither a run folder nor a checkpoint"):
        checkpoint.find(tmp_path)
    model(tmp_path)
    assert checkpoint.find(tmp_path).path == tmp_path


def test_a_checkpoint_that_stepped_aside_still_counts(tmp_path):
    checkpoint.save(tmp_path, 10, model, {"value": 1}, keep=1)
    os.rename(tmp_path / "step-000010", tmp_path / ".old-step-000010")  # killed between the two renames
    found = checkpoint.latest(tmp_path)
    assert found.step == 10 and checkpoint.load_state(found.path) == {"value": 1}
    checkpoint.save(tmp_path, 20, model, {}, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000020"]


def test_everything_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, disk):
    path = checkpoint.save(tmp_path, 10, model, {"w": torch.ones(3)}, keep=1)
    everything = {p.stat().st_ino for p in (path, *path.rglob("*"))}
    renamed = disk.index(("rename", path.stat().st_ino))
    assert {inode for _, inode in disk[:renamed]} == everything and len(everything) == 7
    assert disk[renamed + 1:] == [("sync", tmp_path.stat().st_ino)]


def test_an_error_while_saving_leaves_what_was_there(tmp_path):
    """A disk error is one whatever its class, as tokenizers raises it; other errors stay what they are."""
    checkpoint.save(tmp_path, 10, model, {"value": 1}, keep=1)

    def fails(path, error):
        model(path)
        raise error

    for words in ("No space left on device (os error 28)", "File too large (os error 27)", "Disk quota exceeded"):
        with pytest.raises(RunError, match=r"cannot save checkpoint .*step-000020.*bytes"):
            checkpoint.save(tmp_path, 20, partial(fails, error=Exception(words)), {}, keep=1)
    for error in (ZeroDivisionError(), TrainingError("disk quota of the user"), ValueError("a mistake in the code")):
        with pytest.raises(type(error)) as raised:
            checkpoint.save(tmp_path, 20, partial(fails, error=error), {}, keep=1)
        assert raised.value is error
    with pytest.raises(TypeError, match=r"state\.curriculum\.seen is a set"):
        checkpoint.save(tmp_path, 20, model, {"curriculum": {"seen": {1}}}, keep=1)
    assert names(tmp_path) == ["step-000010"]


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name, damage, full, seen", [
    ("model.safetensors", shorten, False, "699 bytes instead of 700"),
    ("model.safetensors", Path.unlink, False, "missing"),
    ("manifest.json", shorten, False, None),  # only the last newline
    ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:50]), False, "manifest.json"),
    ("manifest.json", Path.unlink, False, "manifest.json"),
    ("manifest.json", lambda path: path.write_text('{"files": []}'), False, "manifest.json"),
    ("model.safetensors", flip, False, None),  # the size tells nothing
    ("model.safetensors", flip, True, "sha256"),
    ("trainer_state.safetensors", flip, True, "sha256"),
])
def test_latest_falls_back_and_says_so(tmp_path, name, damage, full, seen):
    for step in (10, 20):
        checkpoint.save(tmp_path, step, model, {"step": step, "w": torch.ones(3)}, keep=2)
    damage(tmp_path / "step-000020" / name)
    found = checkpoint.latest(tmp_path, full)
    assert found.step == (10 if seen else 20)
    if seen:
        assert len(found.warnings) == 1 and seen in found.warnings[0] and "step-000020" in found.warnings[0]
        with pytest.raises(RunError, match="step-000020 is damaged"):
            checkpoint.load_state(tmp_path / "step-000020")
    else:
        assert not found.warnings


def test_a_manifest_of_anything_is_passed_over(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, model, state(step), keep=2)
    for manifest in (b"[" * 100_000, b'{"files": {}, "seconds": 1}', b'{"seconds": 1, "files": {"a": {}}}',
                     b'{"seconds": 1, "files": {"a": 3}}', b"\xff", b""):
        (tmp_path / "step-000002" / "manifest.json").write_bytes(manifest)
        for full in (False, True):
            found = checkpoint.latest(tmp_path, full)
            assert found.step == 1 and "step-000002 is damaged" in found.warnings[0], manifest[:20]
    assert checkpoint.write_speed(tmp_path)


def test_a_checkpoint_that_was_moved_away_and_linked_stays_where_it_is(tmp_path):
    folder = tmp_path / "checkpoints"
    assert checkpoint.latest(folder) == (None, ())
    checkpoint.save(folder, 1, model, state(), keep=1)
    (folder / "step-000001").rename(tmp_path / "elsewhere")
    (folder / "step-000001").symlink_to(tmp_path / "elsewhere")
    assert checkpoint.latest(folder).step == 1
    checkpoint.save(folder, 2, model, state(), keep=1)
    assert os.listdir(folder) == ["step-000002"] and checkpoint.problems(tmp_path / "elsewhere") == []
    for name in ("step-final", "step-000010"):
        (tmp_path / name).mkdir()
    found = checkpoint.latest(tmp_path)
    assert found.path is None and found.step == 0 and len(found.warnings) == 1


def save_twice(folder: Path, limit: int, by: str, told: int) -> None:
    def large(path):
        if by == "write":
            (path / "model.bin").write_bytes(bytes(2_000_000))
        if by == "tokenizer":
            words = {f"word{i}": i for i in range(100_000)}
            Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(path / "tokenizer.json"))

    checkpoint.save(folder, 10, lambda path: (path / "model.bin").write_bytes(b"small"), {"step": 10}, keep=2)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoint.save(folder, 20, large, {"w": torch.ones(500_000 if by == "state" else 1)}, keep=2)
    except RunError as error:
        os.write(told, str(error).encode())


def forked(target, *args) -> tuple[multiprocessing.process.BaseProcess, IO[str]]:
    """A process that calls it with these and a file descriptor, and the file of what it writes there."""
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(*args, writer))
    process.start()
    os.close(writer)
    return process, open(reader, encoding="utf-8")


def check_full(folder: Path, limit: int, by: str) -> None:
    process, file = forked(save_twice, folder, limit, by)
    with file:
        said = file.read()
    process.join()
    assert process.exitcode == 0
    for words in ("step-000020", "bytes", "are free", "step-000010 is intact", "save.keep"):
        assert words in said
    assert names(folder) == ["step-000010"]
    assert checkpoint.load_state(checkpoint.latest(folder, full=True).path) == {"step": 10}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["write", "state", "tokenizer"])
def test_a_limit_of_file_sizes_and_a_full_disk(tmp_path, by):
    check_full(tmp_path, 100_000, by)
    mount, small = shutil.which("mount"), tmp_path / "small"
    small.mkdir()
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False,
                                   capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        check_full(small / "checkpoints", 0, by)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def write(path: Path, step: int) -> None:
    for i in range(4):
        (path / f"model-{i}.bin").write_bytes(step.to_bytes(4, "little") * 20_000)


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path):
    """Steps are saved one after another, each twice, and told of through a pipe, until the process is killed."""
    def save_for_ever(told):
        step = checkpoint.latest(tmp_path, full=True).step
        os.write(told, b"ready\n")
        while True:
            step += 1
            for _ in range(2):
                checkpoint.save(tmp_path, step, partial(write, step=step),
                                {"step": step, "w": torch.full((2000,), step)}, keep=2)
            os.write(told, b"%d\n" % step)

    rng, reported = random.Random(0), 0
    for i in range(20):  # a busy machine may save nothing in the time of a later one
        process, told = forked(save_for_ever)
        with told:
            assert told.readline() == "ready\n"
            lines = [told.readline()] if i == 0 else []
            time.sleep(rng.uniform(0, 0.25))
            process.kill()
            lines += told.read().split("\n")[:-1]
        process.join()
        reported = max(reported, *map(int, lines), 0)
        found = checkpoint.latest(tmp_path, full=True)
        assert found.warnings == () and found.step in (reported, reported + 1)
        reported = found.step
        if found.path:
            saved = checkpoint.load_state(found.path)
            assert saved["step"] == found.step and (saved["w"] == found.step).all()
            assert (found.path / "model-3.bin").read_bytes() == found.step.to_bytes(4, "little") * 20_000
        assert not any(checkpoint.problems(path) for path in tmp_path.glob("step-*"))
    assert reported > 0
