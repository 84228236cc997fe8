"""Run folders for tests of the inspector, written by the real store: what a training run leaves, without a model.

    make(root)                  five finished, running, failed and interrupted runs below `root`
    write(root / "one", "boxes", steps=3)
    hostile(root)               a run whose texts, names and files attack the reader, and five corrupt files

Pictures are drawn, texts are tokenized by the embedded model's tokenizer, and everything comes from a seed."""

import atexit
import functools
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

import vlrl
from vlrl import config
from vlrl.rewards.boxes import iou
from vlrl.store import PER_TOKEN, RunFolder, files, lock
from vlrl.types import Completion, Group, LoadedMedia, Prompt, Rollout, Sample, Turn

G = 4
"""Answers of a group."""
SIZE = (160, 120)
COLOURS = {"red": "#e03c31", "green": "#3a9d5d", "blue": "#2f6fde", "yellow": "#e8c02d"}
_ASSETS = Path(vlrl.__file__).parent / "assets" / "tiny-qwen3-vl"


class Scene(NamedTuple):
    """One sample and how its answers are made: `answer(rng, skill)`, skill in [0, 1], gives what the model said, what
    was read of it, parts and marks."""

    question: str
    target: Any
    media: tuple[LoadedMedia, ...]
    category: str
    answer: Callable[[random.Random, float], tuple[str, Any, dict[str, float | None], list[dict[str, Any]]]]


def _picture(seed: int, boxes: Mapping[str, list[float]], ground: int = 235) -> Image.Image:
    image = Image.new("RGB", SIZE, (ground, ground, 225))
    pen, rng = ImageDraw.Draw(image), random.Random(seed)
    for _ in range(12):
        x, y = rng.randrange(SIZE[0]), rng.randrange(SIZE[1])
        pen.line((x, y, x + rng.randrange(-40, 40), y + rng.randrange(-40, 40)), fill=(205, 205, 200))
    for i, (colour, box) in enumerate(boxes.items()):
        (pen.ellipse if i % 2 else pen.rectangle)(tuple(box), fill=COLOURS[colour])
    return image


def _media(image: Image.Image) -> LoadedMedia:
    return LoadedMedia(kind="image", frames=(image,), sha256=hashlib.sha256(image.tobytes()).hexdigest())


def _box(rng: random.Random) -> list[float]:
    x, y, w, h = rng.randrange(5, 90), rng.randrange(5, 60), rng.randrange(20, 60), rng.randrange(20, 50)
    return [float(v) for v in (x, y, x + w, y + h)]


def _near(values: list[float], rng: random.Random, skill: float, by: float = 30) -> list[float]:
    return [round(v + (1 - skill) * rng.uniform(-by, by), 1) for v in values]


def _marked(kind: str, found: Any, label: str, target: Any, name: str, **more: Any) -> list[dict[str, Any]]:
    """The marks of an answer and of its target."""
    return [{"kind": kind, "at": at, "label": words, "role": role, **more}
            for at, words, role in ((found, label, "answer"), (target, name, "target"))]


def _boxes(number: int) -> Scene:
    rng = random.Random(number)
    colours = rng.sample(list(COLOURS), 2)
    boxes = {colour: _box(rng) for colour in colours}
    target = boxes[colours[-1]]
    images = (_media(_picture(number, boxes)),)
    if number % 5 == 4:  # some prompts show two images
        images = (_media(_picture(number + 1000, {colours[0]: _box(rng)}, 180)), *images)

    def answer(rng, skill):
        found = _near(target, rng, skill)
        score = iou(found, target)
        marks = _marked("box", found, f"{colours[-1]} {score:.2f}", target, colours[-1], media=len(images) - 1)
        return json.dumps({"bbox_2d": found}), found, {"iou": score}, marks

    return Scene(f"Where is the {colours[-1]} shape? Give its box.", {"box": target}, images, colours[-1], answer)


def _points(number: int) -> Scene:
    rng = random.Random(number + 500)
    colour, box = rng.choice(list(COLOURS)), _box(rng)
    at = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]

    def answer(rng, skill):
        x, y = _near(at, rng, skill)
        hit = float(box[0] <= x <= box[2] and box[1] <= y <= box[3])
        marks = [{"kind": "point", "at": [x, y], "label": "click", "role": "answer"},
                 {"kind": "box", "at": box, "label": "button", "role": "target"}]
        return f"click({x}, {y})", {"action": "click", "at": [x, y]}, {"hit": hit}, marks

    image = _media(_picture(number, {colour: box}))
    return Scene(f"Click the {colour} button.", {"box": box}, (image,), "button", answer)


_FPS, _FRAMES = 2, 8
_CLIPS = Path(tempfile.mkdtemp(prefix="vlrl-clips-"))
atexit.register(shutil.rmtree, _CLIPS, ignore_errors=True)


def _frame_box(i: int) -> list[float]:
    return [10.0 + 14 * i, 40.0, 40.0 + 14 * i, 75.0]


@functools.cache
def _clip(number: int) -> LoadedMedia:
    """A moving shape: 8 frames in 4 s; every second clip lies in a WebM file, the others are frames alone."""
    colour = list(COLOURS)[number % 4]
    frames = tuple(_picture(number, {colour: _frame_box(i)}) for i in range(_FRAMES))
    times = tuple(i / _FPS for i in range(_FRAMES))
    path = webm(_CLIPS / f"{number}.webm", frames) if number % 2 else None
    data = path.read_bytes() if path else b"".join(f.tobytes() for f in frames)
    return LoadedMedia(kind="video", frames=frames, sha256=hashlib.sha256(data).hexdigest(), path=path,
                       timestamps=times)


def webm(path: Path, frames: tuple[Image.Image, ...], fps: int = _FPS) -> Path:
    import av
    with av.open(str(path), "w", format="webm") as container:
        stream: Any = container.add_stream("libvpx-vp9", rate=Fraction(fps),
                                           options={"deadline": "realtime", "cpu-used": "8"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return path


def _spans(number: int) -> Scene:
    target = [0.5 + number % 3 / 2, 2.5 + number % 2]

    def answer(rng, skill):
        start, end = sorted(_near(target, rng, skill, 1.5))
        score = iou([start, 0, end, 1], [target[0], 0, target[1], 1])
        marks = _marked("span", [start, end], f"{score:.2f}", target, "moves", media=0)
        return f"{start:.1f} to {end:.1f}", [start, end], {"span": score}, marks

    return Scene("When does the shape move?", {"span": target}, (_clip(number),), "span", answer)


def _tracks(number: int) -> Scene:
    target = [[i / _FPS, _frame_box(i)] for i in range(_FRAMES)]

    def answer(rng, skill):
        found = [[t, _near(list(box), rng, skill, 12)] for t, box in target]
        score = sum(iou(a, b) for (_, a), (_, b) in zip(found, target, strict=True)) / len(target)
        marks = _marked("track", found, f"{score:.2f}", target, "shape", media=0)
        return json.dumps(found), found, {"track": score}, marks

    return Scene("Follow the shape.", {"track": target}, (_clip(number),), "track", answer)


def _paths(number: int) -> Scene:
    rng = random.Random(number + 900)
    way = [[80.0, 118.0], [80.0 + rng.randrange(-15, 15), 80.0], [80.0 + rng.randrange(-40, 40), 45.0]]
    image = _picture(number, {"green": [30.0, 20.0, 50.0, 35.0]}, 150)

    def answer(rng, skill):
        found = [_near(p, rng, skill) for p in way]
        away = sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in zip(found, way, strict=True)) / 3
        marks = _marked("path", found, "plan", way, "driven")
        return json.dumps(found), {"plan": found}, {"plan": max(0.0, 1 - away / 40), "safe": None}, marks

    return Scene("Plan the next three seconds.", {"path": way}, (_media(image),), "merge", answer)


SCENES: dict[str, tuple[str, Callable[[int], Scene]]] = {
    "boxes": ("grounding", _boxes), "points": ("gui", _points), "paths": ("driving", _paths),
    "clips": ("video", lambda number: (_spans if number % 2 else _tracks)(number))}
"""Kind of run -> (task, scene of a sample)."""


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_ASSETS / "tokenizer.json"))


def completion(text: str, rng: np.random.Generator, *, cut: bool = False) -> Completion:
    tokens = np.asarray(_tokenizer().encode(text).ids, np.int64)
    mask = np.ones(len(tokens), bool)
    if len(tokens) > 6:
        mask[3] = False
    return Completion(tokens=tokens, logprobs=-rng.exponential(0.5, len(tokens)).astype(np.float32), loss_mask=mask,
                      text=text, finish_reason="length" if cut else "stop", turns=(Turn(start=0, end=len(tokens)),))


def _rollout(scene: Scene, group: str, index: int, step: int, skill: float, seed: int) -> Rollout:
    rng = random.Random(seed)
    final, parsed, own, marks = scene.answer(rng, skill)
    thought = f"I look at the picture and guess, try {index}." + " It could be further left." * rng.randrange(4)
    text, parts, error = f"<think>{thought}</think>\n<answer>{final}</answer>", {**own, "format": 1.0}, None
    cut = rng.random() < 0.08
    if cut or rng.random() < 0.1:  # no answer tags
        text, parts = f"<think>{thought}" if cut else final, {**own, "format": 0.0}
    if rng.random() < 0.04:
        error, parts = "TaskError: grounding.score: no number in the answer", dict.fromkeys(parts, 0.0)
    scored = [v for v in parts.values() if v is not None]
    reward = None if rng.random() < 0.02 else round(0.1 * parts["format"] + sum(scored[:-1]), 6)
    return Rollout(group_id=group, index=index, completion=completion(text, np.random.default_rng(seed), cut=cut),
                   policy_step=step, parts=parts, reward=reward, parsed=parsed, error=error, marks=marks)


def made_group(kind: str, number: int, step: int, *, split: str = "train", skill: float = 0.5, seed: int = 0,
               size: int = G) -> Group:
    """The group of sample `number` at `step`; every fourth one has no variance."""
    task, make_scene = SCENES[kind]
    scene, name = make_scene(number), f"{split}-{step}-{number}"
    row = {"id": f"{kind}-{number}", "question": scene.question, "target": scene.target, "category": scene.category,
           "difficulty": round(number % 10 / 10, 1)}
    same = number % 4 == 3
    rollouts = [_rollout(scene, name, i, step, 1.0 if same else skill,
                         abs(hash((seed, step, number, 0 if same else i))))
                for i in range(size)]
    mean = np.mean([r.reward for r in rollouts if r.reward is not None] or [0.0])
    rollouts = [replace(r, advantage=0.0 if r.reward is None else float(r.reward - mean)) for r in rollouts]
    ids = np.arange(4, dtype=np.int64)
    prompt = Prompt(sample_id=row["id"], text=f"<|im_start|>user\n<|image_pad|>{scene.question}<|im_end|>\n", ids=ids,
                    raw_ids=ids, positions=ids[None], media=scene.media,
                    processed_sizes=((168, 112),) * len(scene.media), visual_tokens=(24,) * len(scene.media))
    return Group(id=name, task=task, split=split, sample=Sample(id=row["id"], row=row), prompt=prompt,
                 rollouts=tuple(rollouts), weights={**dict.fromkeys(rollouts[0].parts, 1.0), "format": 0.1},
                 target=scene.target)


def with_many_images(number: int, images: int = 12, texts: Sequence[str] = ()) -> Group:
    """A group whose prompt shows many pictures; `texts` are what its answers say."""
    group = made_group("boxes", number, 0)
    shown = tuple(_media(_picture(300 + i, {"red": _box(random.Random(i))})) for i in range(images))
    prompt = replace(group.prompt, media=shown, processed_sizes=((168, 112),) * images, visual_tokens=(24,) * images)
    said = [replace(r, completion=completion(text, np.random.default_rng(0)), reward=i / 4, error=None)
            for i, (r, text) in enumerate(zip(group.rollouts, texts, strict=False))]
    return replace(group, id=f"many-{number}", prompt=prompt, rollouts=(*said, *group.rollouts[len(said):]))


def zoomed(number: int, *, turns: int = 3, text: str = "look", calls: Any = None, size: int = 2) -> Group:
    """A group of episodes: actions that call zoom(box), each answered with a picture; one ends at a limit."""
    group = made_group("boxes", number, 0, size=size)
    calls = calls or [{"name": "zoom", "arguments": {"box": [250, 250, 500, 750]}, "error": None}]

    def episode(rollout: Rollout) -> Rollout:
        shown = [_media(_picture(100 * number + 10 * rollout.index + t, {"red": [t, 20.0, t + 40.0, 60.0]}))
                 for t in range(turns)]
        made = completion("up " * 2 * turns, np.random.default_rng(number))
        done: list[Turn] = []
        for t in range(turns):
            failed = rollout.index == 1 and t == turns - 1
            called = [{**c, "error": "no such box"} if failed else c for c in calls]
            done += [Turn(start=2 * t, end=2 * t + 1, text=f"{text} {t}", parts={"nearer": t - 1.0}, state=f"s{t}",
                          done=t == turns - 1, seconds=0.25, info={"calls": called, "level": t}),
                     Turn(start=2 * t + 1, end=2 * t + 2, role="observation", text=f"{text} shown {t}",
                          media=(shown[t].sha256,))]
        reason: Any = "turns" if rollout.index == 1 else "stop"
        return replace(rollout, completion=replace(made, turns=tuple(done), observed_media=tuple(shown),
                                                   finish_reason=reason, episode_id=f"e-{rollout.index}"), error=None)

    return replace(group, id=f"zoomed-{number}", rollouts=tuple(map(episode, group.rollouts)))


def _per_token(groups: list[Group], seed: int) -> dict[str, list[np.ndarray | None]]:
    rng = np.random.default_rng(seed)
    out: dict[str, list[np.ndarray | None]] = {name: [] for name in PER_TOKEN}
    for rollout in (r for g in groups for r in g.rollouts):
        size, sampled = len(rollout.completion.tokens), rollout.completion.logprobs
        gap = rng.normal(0, 0.05, size).astype(np.float32)
        top = np.sort(rng.exponential(1.0, (size, 3)).astype(np.float32), axis=1)
        values = {"top_ids": rng.integers(20, 200, (size, 3)), "top_logprobs": -top,
                  "trainer_logprobs": sampled + gap, "entropies": rng.exponential(0.6, size).astype(np.float32),
                  "ratio": np.exp(gap), "clipped": np.abs(gap) > 0.1}
        for name in out:
            out[name].append(values.get(name))
    return out


_environment = functools.cache(files.environment)


def tracked() -> Group:
    group = made_group("clips", 0, 0)
    return replace(group, id="tracked", prompt=replace(group.prompt, media=(_clip(1),)))


def write(path: Path, kind: str = "boxes", *, steps: int = 4, prompts: int = 4, state: str = "finished",
          planned: int | None = None, seed: int = 0, gain: float = 0.6, settings: Mapping[str, Any] | None = None,
          evaluate: bool = True) -> RunFolder:
    """A run of `steps` steps with `prompts` groups each, evaluated before and after; answers get better by `gain`."""
    run, task = RunFolder(path), SCENES[kind][0]
    planned = planned or steps
    tree = {"task": {"name": task}, "steps": planned, "seed": seed,
            "model": {"name": "embedded/tiny-qwen3-vl"}, "run": {"dir": str(path)}, **(settings or {})}
    files.write_text(path / "config.yaml", config.dump(config.validate(tree)))
    started = {"seed": seed, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    files.write_text(path / "env.json", json.dumps(_environment(0) | started))  # as RunFolder.create, looked up once
    shutil.copyfile(_ASSETS / "tokenizer.json", path / "tokenizer.json")
    beat = {"steps": planned, "eta_s": 0.0}
    if evaluate:
        _evaluate(run, kind, 0, 0.3, seed)
    for step in range(steps):
        write_step(run, kind, step, prompts, 0.3 + gain * step / max(1, steps - 1), seed)
        run.heartbeat({**beat, "step": step + 1, "state": "running", "reward": 0.5})
    if evaluate and state == "finished":
        _evaluate(run, kind, steps, 0.3 + gain, seed)
    run.heartbeat({**beat, "step": steps, "state": state, "reward": 0.5})
    if state == "running":  # this process holds it
        files.write_text(path / "run.lock", json.dumps(lock.this_process()))
    return run


def beat(path: Path) -> None:
    """A sign of life of a run that goes on: after a minute without one it counts as stale."""
    RunFolder(path).heartbeat(json.loads((path / "heartbeat.json").read_text()))


def write_step(run: RunFolder, kind: str, step: int, prompts: int = 4, skill: float = 0.5, seed: int = 0) -> Path:
    groups = [made_group(kind, (step * prompts + i) % (3 * prompts), step, skill=skill, seed=seed)
              for i in range(prompts)]
    path = run.write_rollouts(step, 0, groups, _per_token(groups, seed + step))
    run.append_metrics(_metrics(step, groups))
    return path


def _metrics(step: int, groups: list[Group]) -> dict[str, float]:
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [len(r.completion.tokens) for r in rollouts]
    parts = {k for r in rollouts for k in r.parts}
    means = {f"reward/{k}": float(np.mean([r.parts.get(k) or 0.0 for r in rollouts])) for k in sorted(parts)}
    return {"step": step, "reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards)), **means,
            "completion/length_mean": float(np.mean(lengths)), "completion/length_max": max(lengths),
            "completion/truncated_frac": float(np.mean([r.completion.truncated for r in rollouts])),
            "groups/zero_variance_frac": float(np.mean([g.zero_variance for g in groups])),
            "groups/count": len(groups), "groups/wasted": float(step % 2), "tokens/completion": sum(lengths),
            "tokens_per_s": 900.0 + 10 * step, "loss": -0.01 / (step + 1), "lr": 1e-4, "grad_norm": 1.0,
            "clip_frac": 0.02, "kl": 0.001 * step, "entropy": 0.6 - 0.02 * step, "mismatch/kl": 1e-5, "score_errors": 0,
            "curriculum/epoch": step / 3, "time/rollout_s": 0.6, "time/train_s": 0.4, "time/total_s": 1.1,
            "memory/peak_gib": 0.8}


def _evaluate(run: RunFolder, kind: str, done: int, skill: float, seed: int, samples: int = 6) -> None:
    groups = [made_group(kind, 100 + i, done, split="heldout", skill=skill, seed=seed, size=1) for i in range(samples)]
    run.write_rollouts(done, 0, groups, split="heldout")
    mean = float(np.mean([g.rollouts[0].reward or 0.0 for g in groups]))
    run.append_eval({"step": done, "split": "heldout", "n": samples, "rejected": 0, "reward/mean": mean,
                     "reward/mean/ci95_low": mean - 0.1, "reward/mean/ci95_high": mean + 0.1})


def make(root: Path, steps: int = 4) -> Path:
    """Five runs below `root`: "boxes" and "boxes-slow" (the same samples, another rate, less gain), "sweep/points"
    (interrupted), "sweep/clips" (running, by this process) and "sweep/paths" (failed)."""
    write(root / "boxes", "boxes", steps=steps)
    write(root / "boxes-slow", "boxes", steps=steps, seed=1, gain=0.2, settings={"train": {"lr": 3e-5}})
    write(root / "sweep/points", "points", steps=steps, planned=2 * steps, state="interrupted")
    write(root / "sweep/clips", "clips", steps=steps, planned=2 * steps, state="running")
    write(root / "sweep/paths", "paths", steps=steps, planned=2 * steps, state="failed")
    return root


SCRIPT = "<script>window.hacked=1</script><img src=x onerror=\"window.hacked=1\">"
"""In every text of the hostile run. A page on which window.hacked is set has run it."""


def hostile(path: Path) -> Path:
    """Writes `path`/evil<…>: script in texts, ids and names, media paths that lead out, and corrupt files.

    `path`/secret.png and `path`/secret.txt lie outside the run and must never be shown."""
    run = write(path / f"evil {SCRIPT.replace('/', '∕')}", steps=2, state="failed")
    Image.new("RGB", (8, 8), "magenta").save(path / "secret.png")
    (path / "secret.txt").write_text("TOP-SECRET")
    _hostile_texts(run)
    _hostile_media(run, path)
    _corrupt(run)
    return run.path


def _hostile_texts(run: RunFolder) -> None:
    bad = f"{SCRIPT}'; DROP TABLE rollouts; --\u202e\x00\x1b[31m\"&amp;{{}}${{x}}"
    group = made_group("boxes", 1, 2)
    rollouts = tuple(replace(r, completion=replace(r.completion, text=f"</pre></textarea>{bad}"), error=bad,
                             parsed={bad: bad}, parts={bad: 1.0}, group_id=bad) for r in group.rollouts)
    row = {**group.sample.row, bad: bad, "category": bad, "url": "javascript:alert(1)"}
    run.write_rollouts(2, 0, [replace(group, id=bad, rollouts=rollouts, target={bad: bad}, weights={bad: 1.0},
                                      sample=Sample(id=bad, row=row), prompt=replace(group.prompt, text=bad))])
    run.append_metrics({"step": 2, "reward/mean": float("nan"), f"reward/{bad}": 1.0})


def _hostile_media(run: RunFolder, outside: Path) -> None:
    """Step 3: one answer for every media path that must not be followed, or whose file is none."""
    media = run.path / "media"
    (media / "page.png").write_text(SCRIPT)
    (media / "link.png").symlink_to(outside / "secret.txt")
    (media / "linked.png").symlink_to(outside / "secret.png")
    (media / "a\"onerror=alert(1) x.png").write_bytes((outside / "secret.png").read_bytes())
    names = ["../secret.txt", "media/../../secret.png", "/etc/passwd", str(outside / "secret.png"), "media/page.png",
             "media/link.png", "media/linked.png", "media/missing.png", "media/a\"onerror=alert(1) x.png",
             "config.yaml", "file:///etc/passwd", "http://127.0.0.1:9/x.png", "media/\x00.png", "media/" + "a" * 5000]
    table = run.rollouts(0).slice(0, 1)
    entry = table["media"][0].as_py()[0]
    rows = [{**table.to_pylist()[0], "step": 3, "group_id": f"media-{i}", "media": [{**entry, "path": name}]}
            for i, name in enumerate(names)]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), run.path / "rollouts/step-000003-rank-00000.parquet")


def _corrupt(run: RunFolder) -> None:
    """Half a parquet file, none at all, a newer schema, a broken heartbeat, broken lines; and one missing image."""
    folder = run.path / "rollouts"
    good = (folder / "step-000000-rank-00000.parquet").read_bytes()
    (folder / "step-000010-rank-00000.parquet").write_bytes(good[:len(good) // 2])
    (folder / "step-000011-rank-00000.parquet").write_bytes(b"")
    newer = run.rollouts(0)
    newer = newer.set_column(0, "schema", pa.array([99] * len(newer), pa.int32()))
    pq.write_table(newer, folder / "step-000012-rank-00000.parquet")
    (run.path / "heartbeat.json").write_text('{"step": 3, "sta')
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write("[1, 2]\nnot json\n" + "[" * 100000 + '\n{"step": "x"}\n{"step": 1e400}\n{"step": 4, "rew')
    (run.path / "eval.jsonl").write_bytes(b"\xff\xfe\x00broken")
    (run.path / "config.yaml").write_text("steps: [1, 2\n  task: {")
    next(p for p in (run.path / "media").iterdir() if len(p.stem) == 64).unlink()
