"""The benchmarks run, and say what they measured; how fast anything is, is not tested."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from vlrl import config as configs
from vlrl.data import coordinates
from vlrl.task import load_class
from vlrl.task.asked import task_messages

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(name):
    """A benchmark as a module; task files find their classes by its path."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ):  # they set variables for their own process
        spec.loader.exec_module(made)
    return made


@pytest.fixture
def gpu_update():
    return module("gpu_update")


@pytest.fixture
def scaling():
    threads = torch.get_num_threads()
    yield module("scaling")
    torch.set_num_threads(threads)


def test_scaling_fits_lines(scaling):
    chosen = scaling.series((2, 3), (64, 80), (2, 3), (2, 4))
    found = {"update": {case: scaling.Seconds(cpu=[1.0 + 0.001 * case.group * case.answer + 0.002 * case.text
                                                   + 0.004 * case.visual] * 3, wall=[5.0])
                        for s in chosen for case in s.cases}}
    operations = {case: float(case.text + case.visual) for case in found["update"]}
    lines = [line.split(" | ") for line in scaling.report(chosen, found, operations) if line.startswith("| update")]
    assert [line[3].split()[0] for line in lines] == ["1000", "1000", "2000", "2000", "4000", "4000"]
    assert {line[5] for line in lines} == {"1.0000"}
    said = [line for line in scaling.report(chosen, found, operations) if line.startswith("- ")]
    assert "1000 us when it comes with another answer, 1000 us" in said[0]
    assert all("1.00 x (1.00 x by least values; 1.00 x" in line for line in said[1:])


@pytest.mark.slow
def test_draws_of_stored_rollouts(tmp_path, monkeypatch):
    out = tmp_path / "draws.json"
    monkeypatch.setattr(sys, "argv", ["stored_draws.py", "--rollouts", "512", "--tokens", "8", "--json", str(out)])
    module("stored_draws").main()
    lines = json.loads(out.read_text())
    assert [line["rollouts"] for line in lines] == [64 * i for i in range(1, 9)] + [512]
    assert all(line["draw_ms"] > 0 and line["memory_mib"] > 0 for line in lines)


def test_scaling_measures_cases_in_turns(scaling, tmp_path):
    case = scaling.Case(group=2, text=20, visual=4, answer=3)
    bench = scaling.Bench(str(tmp_path), largest=4)
    found = scaling.measure(bench, [case], rounds=1)
    assert len(bench.given(case).prompt) in range(22, 27)
    for seconds in (found["update"][case], found["step"][case]):
        assert len(seconds.cpu) == len(seconds.wall) == 1 and seconds.cpu[0] > 0
    assert bench.operations(case) < bench.operations(replace(case, group=3)) < 1.5 * bench.operations(case)


@pytest.mark.slow
def test_scaling_writes_its_report(scaling, tmp_path):
    scaling.run(scaling.series((2, 3), (64, 80), (2, 3), (2, 4)), 1, tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text()
    assert text.count("| step |") == 6 and "--rounds 1" in text and torch.__version__ in text


@pytest.mark.slow
def test_the_true_value_of_every_state_leaves_the_least_noise():
    """Of all rules of credit on the chain; and it is right wherever the turn that decides is paid."""
    chain = module("turn_credit")
    for world in ("outcome", "step"):
        noise = {name: chain.noise(rule, chain.WORLDS[world], 0.5, seed=0, groups=60)
                 for name, rule in chain.RULES.items()}
        least, cosine = noise.pop("gae, lambda 0")
        assert least < min(variance for variance, _ in noise.values()) and cosine > 0.98


def test_the_credit_of_the_chain_is_known():
    """[right] - p on the turn that decides, 0 on all others; a policy learns from it, and the page has a row a rule."""
    chain = module("turn_credit")
    for world in ("outcome", "step"):
        played = chain.play(chain.start(0.5), 3, [np.random.default_rng(0)], chain.WORLDS[world])
        found = torch.stack(chain.gae(played, played.scores())).numpy()[:, 1::2]
        assert found == pytest.approx(np.outer(played.right - 0.5, np.arange(5) == 2), abs=1e-12)
    rewards = chain.play(chain.start(0.5), 3, [np.random.default_rng(0)], chain.WORLDS["gated"]).scores().rewards
    assert set(rewards[rewards < 1].tolist()) == {0.0}
    needed = chain.answers_needed(chain.gae, chain.WORLDS["outcome"], [1.0, 16.0], range(3))
    assert needed.shape == (2, 3) and (needed[1] < needed[0]).all() and (needed[0] < chain.MOST).all()
    page = (FOLDER / "results" / "turn_credit.md").read_text()
    assert [page.count(f"| {name} |") for name in chain.RULES] == [4] * 6 + [3] * 2


def test_a_missing_gpu_is_said(gpu_update, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_update.py"])
    assert gpu_update.main() == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_update_on_a_cpu(gpu_update, tmp_path, monkeypatch):
    size = replace(gpu_update.TINY, packed=(2,))
    monkeypatch.setattr(gpu_update, "peak_of", lambda *_: gpu_update.Peak(0.01, "said so"))
    monkeypatch.setattr(gpu_update, "bandwidth", lambda device: 1e9)
    assert gpu_update.build(tmp_path, size, torch.device("cpu")) == "that of the tiny models"
    bench = gpu_update.Bench(gpu_update.settings("lora", size, tmp_path), size)
    assert {len(g.prompt) for g in bench.groups} == {8 + 30}  # visual and text tokens
    assert {len(r.completion.tokens) for g in bench.groups for r in g.rollouts} == {6}
    sides = bench.sides()
    assert [side.name for side in sides] == ["padded", "packed, masked", "packed, merged"]
    for side in sides:
        bench.choose(side)
    broken = gpu_update.Side("broken", [bench.config.model_copy(update={"rollout": None})])
    bench.choose(broken)
    assert broken.config is None and "AttributeError" in broken.error
    bench.measure(sides, 1)
    lines = [*gpu_update.table(bench, [*sides, broken])]
    assert len(lines) == 6 and "failed: AttributeError" in lines[5]
    for side, line in zip(sides, lines[2:], strict=False):
        assert len(side.seconds) == 1 and line.startswith(f"| {side.name} |")
        assert abs(side.logprobs - sides[0].logprobs).max() < 0.02  # bfloat16
        assert side.grad_norm == pytest.approx(sides[0].grad_norm, rel=0.02)
    once = bench.useful()
    assert once < bench.useful(per_answer=True) < size.group * once
    speed, bound = bench.decode(3)
    assert speed > 0 and bound > 0


@pytest.mark.slow
def test_gpu_update_tiny_from_the_command_line(gpu_update, tmp_path, monkeypatch):
    out = tmp_path / "out.md"
    words = ["--tiny", "--mode", "full", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_update.py", *words])
    monkeypatch.setattr(subprocess, "run", forked.in_place_of_subprocess_run)
    assert gpu_update.main() == 0
    text = out.read_text()
    for said in ("## full", "| padded |", "| packed, merged |", "aten::mm", torch.__version__, "MFU over"):
        assert said in text
    assert "failed" not in text and "exit code" not in text


@pytest.mark.slow
def test_engines_are_compared_and_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    engines = module("engines")
    words = ["--engines", "hf", "--seeds", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.md"),
             "steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=4"]
    monkeypatch.setattr(sys, "argv", ["engines.py", *words])
    monkeypatch.setattr(subprocess, "run", forked.in_place_of_subprocess_run)
    with patch.dict(os.environ):
        engines.main()
        first = (tmp_path / "out.md").read_text()
        monkeypatch.setattr(engines, "run", lambda *_: pytest.fail("a finished run is not repeated"))
        engines.main()
    assert (tmp_path / "out.md").read_text() == first
    row, single = (line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| hf "))
    assert len(row) == 9 and float(row[4]) >= float(row[5]) > 0 and float(row[8]) < 1e-6
    assert single[:3] == ["hf", "0", "4"]
    assert engines.command(engines.argparse.Namespace(config="c", settings=[], runs=Path("r")), "vllm", 3, ["a=1"])[
        2:] == ["c", "engine=vllm", "a=1", "seed=3", "log.samples_every=0", "run.dir=r/vllm-3"]


@pytest.mark.slow
def test_a_soak_shows_what_grows(tmp_path, monkeypatch, capsys):
    soak = module("soak")
    monkeypatch.setattr(soak, "EVERY_S", 0.3)
    monkeypatch.setattr(soak, "FIRST", 2)
    out = tmp_path / "soak.md"
    monkeypatch.setattr(sys, "argv", ["soak.py", str(FOLDER.parent / "configs/quickstart.yaml"), "eval.samples=4",
                                      "rollout.prompts_per_step=4", "--hours", "0.006", "--folder",
                                      str(tmp_path / "run"), "--out", str(out)])
    forked.run(["-m", "platform"], ENV, ROOT, 600)  # what it forks from is there before the clock of --hours starts
    monkeypatch.setattr(soak, "subprocess", Namespace(Popen=lambda command, stdout, stderr, cwd, env: forked.Process(
        command[1:], env, cwd, stdout, stderr)))
    soak.main()
    page = out.read_text()
    assert all(f"| {name}" in page for name in ("memory, MiB", "file handles", "threads", "processes"))
    assert "processor time a step" in page and out.with_suffix(".png").exists()
    samples = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert samples[-1]["steps"] > samples[0]["steps"] and all(s["memory_mb"] > 100 for s in samples)
    growing = soak.line([{"at_s": s["at_s"], "x": 7 + s["at_s"] / 1800} for s in samples], "x")
    assert growing.slope == pytest.approx(2, abs=1e-6)  # an hour


def test_gradients_are_compared_by_angle_and_norm():
    compare = module("presets").compare
    default = torch.tensor([3.0, 4.0])
    assert compare(2 * default, default) == pytest.approx((1.0, 2.0))
    assert compare(torch.tensor([-4.0, 3.0]), default) == pytest.approx((0.0, 1.0))
    cosine, norm = compare(torch.zeros(2), default)
    assert cosine != cosine and norm == 0


def test_presets_are_sorted_by_where_they_differ():
    found = module("presets").where({"a": (True, True), "b": (False, True), "c": (False, True), "d": (False, False)})
    assert found[2:] == ["- on-policy and off-policy (1): a", "- on-policy alone (0): none",
                         "- off-policy alone (2): b, c", "- nowhere on this batch (1): d"]


@pytest.mark.slow
def test_gradients_of_presets(tmp_path, monkeypatch, capsys):
    presets = module("presets")
    monkeypatch.setattr(sys, "argv", ["presets.py", "--presets", "gspo", "dr_grpo", "hold_entropy", "--prompts", "3",
                                      "--out", str(tmp_path / "out.md")])
    presets.main()
    cells = {row[1]: row[2:-1] for line in (tmp_path / "out.md").read_text().splitlines()
             if len(row := [cell.strip() for cell in line.split("|")]) == 8}
    assert cells["gspo"][:2] == ["4", "1.0000"] and float(cells["gspo"][3]) < 0.99
    assert float(cells["dr_grpo"][2]) < 0.5
    assert cells["hold_entropy"] == ["1", "1.0000", "1", "1.0000", "1"]


@pytest.mark.slow
def test_planted_faults_of_environments_are_counted(tmp_path):
    """200 episodes of which 2 hang and 2 end their process: no group is lost, and no process is left."""
    episodes = module("episodes")
    page = "\n".join(episodes.faults(Namespace(folder=str(tmp_path), episodes=200, step_s=10.0)))
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in page.splitlines() if line.startswith("|")][2:]
    assert rows == [["25"] * 2, ["2"] * 2, ["2"] * 2, ["196"] * 2, ["0"] * 2, ["4"] * 2, ["0"] * 2]


@pytest.mark.slow
def test_episodes_are_measured_into_sections_of_a_page(tmp_path):
    episodes, out = module("episodes"), tmp_path / "page.md"
    words = ["cache", "arrival", "--waiting", "4", "--wait-s", "0.02", "--rounds", "1", "--sizes", "1"]
    forked.run([FOLDER / "episodes.py", *words, "--words", "4", "--out", out], ENV, ROOT, 600).check_returncode()
    page = out.read_text()
    places = [page.index(f"## {episodes.TITLES[name]}\n") for name in ("arrival", "cache")]
    assert places == sorted(places) and "32 of 32 episodes are alike" in page
    assert episodes.put(page, "arrival", "## x\n\nnew\n").count("\n## ") == 2


@pytest.mark.slow
def test_services_are_measured_both_ways(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # one benchmark uses the other's server
    services, out = module("services"), tmp_path / "services.md"
    monkeypatch.setattr(services, "CASES", {"beside generation": ()})
    words = "--rounds 1 --group 2 --seconds 0.1 --steps 2 --out".split()
    monkeypatch.setattr(sys, "argv", ["services.py", *words, str(out)])
    threads = torch.get_num_threads()
    services.main()
    torch.set_num_threads(threads)
    text = out.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert [row[1] for row in rows if "reward model" in row[0] or "log-prob" in row[0]] == ["2", "2", "8"]
    asked = next(row for row in rows if row[0] == "| beside generation")
    assert 0 < int(asked[1]) <= 64 and float(asked[3].split()[0]) > 0 and "--seconds 0.1" in text


@pytest.mark.slow
def test_arms_of_given_answers_are_configs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    made = module("demonstrations")
    monkeypatch.setattr(made, "heeding", lambda family, runs: "embedded/tiny-qwen3-vl")
    found = {name: list(made.experiments(name, tmp_path)) for name in ("mixing", "shots", "jitter")}
    assert {name: [len(one.arms) for one in each] for name, each in found.items()} == {
        "mixing": [11, 11], "shots": [3, 3], "jitter": [5, 5]}
    for one in (one for each in found.values() for one in each):
        for words in one.arms.values():
            configs.load(one.config, [*words, *one.settings])


@pytest.mark.slow
def test_boxes_that_are_off_are_so_by_their_share(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    made = module("demonstrations")
    texts = {share: made.jittered("configs/quickstart.yaml", share, tmp_path / "rows.jsonl").read_text()
             for share in (0.0, 0.3)}
    true, off = ([json.loads(json.loads(line)["solution"]) for line in text.splitlines()] for text in texts.values())
    gaps = np.abs(np.array(true) - np.array(off)) / np.tile(np.diff(np.array(true).reshape(-1, 2, 2), axis=1)[:, 0], 2)
    assert len(true) == made.STEPS * made.PROMPTS and 0.1 < gaps.mean() < 0.2 and gaps.max() < 0.32


@pytest.mark.parametrize("name", ["ToldDigits", "ToldGrounding"])
def test_told_prompts_hold_what_a_second_attempt_is_told_and_no_picture(name):
    task = load_class(f"{FOLDER / 'heeding.py'}:{name}")(**({"drawn": True} if "Grounding" in name else {}))
    task.coordinates = coordinates.make("norm1000")
    samples = [task.samples("train")[i] for i in range(40)]
    texts = [task_messages(task, sample)[-1]["content"] for sample in samples]
    said = ["".join(part.get("text", "") for part in text) for text in texts]
    assert sum("correct answer is" in text for text in said) > 4 and sum("This answer was given" in t for t in said) > 4
    assert {sample.media[0].source.getcolors()[0][1] for sample in samples} == {(128, 128, 128)}
