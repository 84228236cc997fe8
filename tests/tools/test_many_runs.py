"""`vlrl sweep` and `vlrl compare --sequential`: which runs are started, what is read of them, and going on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, FEW, ROOT, write_config
from vlrl.cli.main import main
from vlrl.errors import ConfigError, RunError, TrainingError
from vlrl.store import RunFolder
from vlrl.store.files import write_text
from vlrl.tools.experiments import many_runs, sequential_runs, sweep
from vlrl.tools.experiments.many_runs import Job, check_plan, final_score, run_jobs
from vlrl.tools.experiments.request import SweepRequest
from vlrl.tools.experiments.sweep import swept_settings, trials

CONFIG = "configs/quickstart.yaml"


def done(folder, value, split="heldout"):
    run = RunFolder(folder)
    run.append_eval({"step": 0, "split": split, "reward/mean": 0.0, "reward/mean/ci95_low": 0.0})
    run.append_eval({"step": 9, "split": split, "reward/mean": value, "reward/mean/ci95_low": 0.0, "mAP": None})
    write_text(folder / "heartbeat.json", '{"state": "finished"}')


@pytest.fixture
def instant(monkeypatch):
    """Runs that take no time: a run's score is `instant.of` of its words; which were started is `instant.started`."""
    found = SimpleNamespace(of=lambda words, seed: 0.0, started=[])

    def run(jobs, parallel=1, progress=None, what="runs"):
        for place, job in enumerate(jobs):
            if progress:
                progress(what, place, len(jobs))
            if not many_runs.finished(job.folder):
                found.started.append(job.folder.name)
                words = dict(w.split("=", 1) for w in job.words if "=" in w)
                done(job.folder, found.of(words, int(words["seed"])))

    for module in (sweep, sequential_runs):
        monkeypatch.setattr(module, "run_jobs", run)
    return found


def test_the_score_is_that_of_the_last_evaluation_and_a_plan_stays(tmp_path):
    done(tmp_path / "a", 0.75)
    assert final_score(tmp_path / "a", "heldout", "reward/mean") == 0.75
    with pytest.raises(RunError, match="no evaluation of 'other'"):
        final_score(tmp_path / "a", "other", "reward/mean")
    with pytest.raises(RunError, match=r"'reward/men' of 'heldout' is missing. Did you mean 'reward/mean'"):
        final_score(tmp_path / "a", "heldout", "reward/men")
    with pytest.raises(RunError, match="'mAP' of 'heldout' is missing"):
        final_score(tmp_path / "a", "heldout", "mAP")
    plan = {"n": 5, "settings": {"lr": 1e-5}}
    for _ in range(2):
        check_plan(tmp_path / "s" / "plan.json", plan)
    with pytest.raises(ConfigError, match="was started with n=5, not 6: use the same value to resume, or name another"):
        check_plan(tmp_path / "s" / "plan.json", {**plan, "n": 6})
    job = Job(tmp_path / "begun", ("train",))
    assert many_runs._completed_share(job.folder) == 0.0
    job.folder.mkdir()
    write_text(job.folder / "heartbeat.json", '{"state": "running", "step": 3, "steps": 12}')
    assert many_runs._completed_share(job.folder) == 0.25


@pytest.mark.slow
def test_what_is_finished_is_not_run_again_and_a_failure_shows_its_output(tmp_path):
    done(tmp_path / "a", 0.5)
    run_jobs([Job(tmp_path / "a", ("no-such-command",))])
    told = []
    with pytest.raises(TrainingError, match=r"(?s)run .*/b ended with exit code 2 before.*No such command"):
        run_jobs([Job(tmp_path / "a", ("x",)), Job(tmp_path / "b", ("no-such-command",))],
               progress=lambda *words: told.append(words))
    assert ("runs", 1, 2) in told and "No such command" in (tmp_path / "b.log").read_text()


def test_words_that_are_swept():
    found, fixed = swept_settings(["train.lr=1e-5,3e-5", "steps=5", "algo.clip_high=.2..0.4", "rollout.group_size=4..8",
                           "model.train=[language,merger]", "data.root=../rows", "algo.kl_coef=0,0.1"])
    assert fixed == ["steps=5", "model.train=[language,merger]", "data.root=../rows"]
    lr, clip, size, kl = found
    assert lr.values == (1e-5, 3e-5) and kl.values == (0, 0.1) and clip.values == () == size.values
    assert (clip.low, clip.high, clip.integers, size.integers) == (0.2, 0.4, False, True)
    rng = np.random.default_rng(0)
    drawn = [size.draw(rng) for _ in range(200)]
    assert set(drawn) == {4, 5, 6, 7, 8} and all(isinstance(v, int) for v in drawn)
    doubled = swept_settings(["rollout.group_size=1..16"])[0][0]
    sizes = np.array([doubled.draw(rng) for _ in range(3000)])
    assert set(sizes.tolist()) == set(range(1, 17))  # both ends are drawn, and doublings evenly
    for low, high in ((1, 2), (2, 4), (4, 8), (8, 16)):
        share = ((low <= sizes) & (sizes < high)).mean()
        assert share == pytest.approx(np.log(2) / np.log(17), abs=0.035)
    wide = swept_settings(["train.lr=1e-6..1e-3"])[0][0]
    logs = np.log10([wide.draw(rng) for _ in range(500)])
    assert logs.min() >= -6 and logs.max() <= -3 and abs(logs.mean() + 4.5) < 0.15
    for words, said in (
            (["a=1..x"], "a range must be two numbers"), (["a=3..1"], "lo below hi"),
            (["a=1,2", "a=3..4"], "each setting can be swept only once"),
            (["a=1,1"], "values of a sweep must be different"), (["a=1,"], "must be different and not empty")):
        with pytest.raises(ConfigError, match=said):
            swept_settings(words)


def test_choices_of_settings():
    lists, mixed = swept_settings(["a=1,2", "b=x,y"])[0], swept_settings(["a=1,2", "b=0..1.5"])[0]
    assert trials(lists, "grid", 2, 0) == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    assert len(trials(lists, "random", 3, 0)) == 3 and len(trials(lists, "random", 9, 0)) == 4  # no more are there
    drawn = trials(mixed, "random", 5, 0)
    assert drawn == trials(mixed, "random", 5, 0) != trials(mixed, "random", 5, 1) and len(drawn) == 5
    with pytest.raises(ConfigError, match="--method grid needs a list of values, but b has a range"):
        trials(mixed, "grid", 5, 0)
    with pytest.raises(ConfigError, match="no setting is swept"):
        trials([], "grid", 5, 0)


@pytest.mark.slow
def test_what_chooses_does_not_test(tmp_path, instant, capsys):
    """Settings that are all alike, with luck on the tuning seeds: the test seeds say that they are no better."""
    luck = np.random.default_rng(0).random((8, 20))

    def of(words, seed):
        lr = float(words.get("train.lr", 0))
        return 0.5 if seed >= 3 else 0.3 + 0.4 * luck[round(1e4 * lr), seed]

    instant.of = of
    words = ["train.lr=1e-4,2e-4,3e-4,4e-4", "--seeds", "3", "--test-seeds", "5", "-o", str(tmp_path / "s")]
    assert main(["sweep", CONFIG, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["tuning"]["mean"] > 0.51 and found["best"]["test"]["mean"]["mean"] == 0.5
    assert found["probability_of_improvement"]["mean"] == 0.5 and found["runs"] == 4 * 3 + 2 * 5
    assert {int(s) for s in found["tests"]["best"]} == {3, 4, 5, 6, 7} and not {
        int(s) for t in found["trials"] for s in t["scores"]} & {int(s) for s in found["tests"]["best"]}
    assert found["best"]["test"]["optimality_gap"]["mean"] == 0.5 and found["best"]["test"]["iqm"]["mean"] == 0.5
    assert found["profile"]["best"][49] == 1 and found["profile"]["best"][50] == 0
    assert json.loads((tmp_path / "s" / "sweep.json").read_text()) == found
    assert (tmp_path / "s" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert len(instant.started) == 22
    assert main(["sweep", CONFIG, *words]) == 0  # again: nothing is left to run
    out = capsys.readouterr().out
    assert len(instant.started) == 22 and "best on the tuning seeds" in out and "optimality gap" in out
    assert main(["sweep", CONFIG, *words[1:], "train.lr=1e-4,2e-4"]) == 1
    assert "was started with trials=" in capsys.readouterr().err


def test_a_sweep_tells_how_far_it_is_and_whether_a_difference_was_shown(tmp_path, instant, capsys):
    for best, said in (
            (0.2, r"difference shown: the best settings are better \(best minus base 0\.200 \[0\.\d+, 0\.\d+\], 95 %"),
            (0.0, r"no difference shown \(best minus base 0\.000 \[-0\.\d+, 0\.\d+\], 95 % interval over 3 test s"),
            (-0.2, r"difference shown: the best settings are worse \(best minus base -0\.200 ")):
        instant.of = lambda words, seed, best=best: (
            0.5 + best * (seed >= 2) * ("train.lr" in words) + 0.01 * ((seed + 2 * ("train.lr" in words)) % 3))
        words = ["train.lr=1e-4,2e-4", "--seeds", "2", "--test-seeds", "3", "-o", str(tmp_path / f"s{best}")]
        assert main(["sweep", CONFIG, *words]) == 0
        out, err = capsys.readouterr()
        assert re.fullmatch(said + r".*", out.splitlines()[-1]), out
        counts = re.findall(r"^runs (\d+)/10  ETA", err, re.M)  # 2 x 2 that choose, 2 x 3 that test
        assert counts == [str(n) for n in range(10)]


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_counted_before_the_first(tmp_path, instant):
    instant.of = lambda words, seed: float(words.get("train.lr", 0))
    for method, eta, n in (("halving", 2, 5), ("halving", 3, 4), ("random", None, 3)):
        told = []
        found = sweep.run_sweep(CONFIG, ["train.lr=1e-5..1e-3"], tmp_path / f"{method}{n}", SweepRequest(
            method=method, n=n, test_seeds=2, eta=eta), lambda *words, told=told: told.append(words))
        assert {total for *_, total in told} == {found.runs} and [done for _, done, _ in told] == [*range(found.runs)]
    instant.of = lambda words, seed: float(words.get("train.lr", 0)) * 1e3
    for name, more, said in (("one", {"test_seeds": 1}, "one test seed cannot show a difference"),
                             ("alone", {"base": False}, "not compared with the unchanged config")):
        found = sweep.run_sweep(CONFIG, ["train.lr=1e-4,2e-4"], tmp_path / name, SweepRequest(seeds=1, **more))
        stored = (tmp_path / name / "sweep.json").read_text()
        assert said in found.verdict == json.loads(stored)["verdict"] and "NaN" not in stored


@pytest.mark.slow
def test_halving_gives_worse_settings_fewer_seeds(tmp_path, instant):
    instant.of = lambda words, seed: float(words.get("train.lr", 0)) * 1e3
    found = sweep.run_sweep(CONFIG, ["train.lr=1e-4,2e-4,3e-4,4e-4"], tmp_path, SweepRequest(
        method="halving", seeds=3, test_seeds=1, base=False))
    assert [(t.settings["train.lr"], len(t.scores)) for t in found.trials] == [
        (4e-4, 3), (3e-4, 2), (2e-4, 1), (1e-4, 1)]
    assert found.runs == 4 + 2 + 1 + 1 == len(instant.started) and found.improvement is None
    (lr,) = found.sensitivities
    assert lr.spread == pytest.approx(0.3) and lr.share == pytest.approx(1)


def test_sweeps_that_make_no_sense_and_options_that_cannot_act(tmp_path, instant):
    for words, said in (
            (["seed=1,2"], "the command sets seed"), (["train.lr=1e-5,1e-4", "run.dir=x"], "sets seed and run.dir of"),
            (["data.seed=1,2"], "different held-out"), (["train.lrr=1,2"], "train.lr"),
            (["steps=5"], "no setting is swept"), (["steps=5,6", "eval.samples=0"], "do not evaluate the split")):
        with pytest.raises(ConfigError, match=said):
            sweep.run_sweep(CONFIG, words, tmp_path / "s")
        assert not instant.started and not (tmp_path / "s").exists(), (words, said)
    for words, options, said in (
            (["train.lr=1e-5,3e-5"], {"n": 4}, "--trials 4 has no effect with --method grid"),
            (["train.lr=1e-5,3e-5"], {"seed": 1}, "--seed 1 has no effect with --method grid"),
            (["train.lr=1e-5..3e-5"], {"eta": 2}, "--eta 2 has no effect with --method random.* use --method halving")):
        with pytest.raises(ConfigError, match=said):
            sweep.run_sweep(CONFIG, words, tmp_path / "s", SweepRequest(**options))
        assert not instant.started and not (tmp_path / "s").exists(), (words, options, said)


def two_configs(folder):
    for name, lr in (("a", "1e-4"), ("b", "2e-4")):
        (folder / f"{name}.yaml").write_text(f"extends: {os.path.abspath(CONFIG)}\ntrain: {{lr: {lr}}}\n")
    return [str(folder / f"{name}.yaml") for name in "ab"]


@pytest.mark.slow
def test_seeds_are_added_until_it_is_decided(tmp_path, instant, capsys):
    a, b = two_configs(tmp_path)
    noise = np.random.default_rng(0).normal(size=(2, 99))
    calls = iter(range(10 ** 6))
    instant.of = lambda words, seed: float(noise[next(calls) % 2, seed] + 1.2 * (len(instant.started) % 2 == 0))
    folder = tmp_path / "s"
    assert main(["compare", "--sequential", a, b, "--seeds", "5", "-o", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decisions"] == [{"a": "a", "b": "b", "higher": "b"}] and 1 <= len(found["looks"]) < 5
    assert found["runs"] == len(instant.started) == 10 * len(found["looks"])
    assert json.loads((folder / "sequential.json").read_text()) == found
    assert sorted(instant.started[:10]) == [f"{n}-{s}" for n in "ab" for s in range(5)]
    assert main(["compare", "--sequential", a, b, "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "b is higher than a (alpha 0.05)" in out and "block 1 of at most 5" in out
    assert len(instant.started) == found["runs"]


@pytest.mark.slow
def test_no_difference_is_said_after_the_last_block(tmp_path, instant, capsys):
    a, b = two_configs(tmp_path)
    instant.of = lambda words, seed: seed % 3 / 3
    assert main(["compare", "--sequential", a, b, "--blocks", "2", "-o", str(tmp_path / "s")]) == 0
    assert "no difference shown between a and b after 2 blocks" in capsys.readouterr().out
    assert len(instant.started) == 20
    assert main(["compare", "--sequential", a, b, "--blocks", "3", "-o", str(tmp_path / "s")]) == 1
    assert "was started with blocks=2, not 3" in capsys.readouterr().err


def test_comparisons_that_make_no_sense(tmp_path, instant, capsys):
    for words, said in (
            ([], "two or more different configs"), (["seed=3"], "seed=3: the command sets seed and run.dir"),
            (["run.dir=x"], "the command sets seed and"), (["data.seed=3"], ""),
            (["eval.samples=0"], "do not evaluate the split")):
        a, b = two_configs(tmp_path)
        if said:
            with pytest.raises(ConfigError, match=said):
                sequential_runs.run_sequential([a, b] if words else [a, a], words, tmp_path / "s")
        else:
            (tmp_path / "b.yaml").write_text(f"extends: {os.path.abspath(CONFIG)}\ndata: {{seed: 9}}\n")
            with pytest.raises(ConfigError, match="different held-out samples"):
                sequential_runs.run_sequential([a, b], [], tmp_path / "s")
        assert not instant.started, (words, said)
    for words, name in (
            (["a", "b", "--seeds", "3"], "--seeds"), (["a", "b", "--blocks", "3"], "--blocks"),
            (["a", "b", "--alpha", "0.1"], "--alpha"), (["a", "b", "--jobs", "2"], "--jobs"),
            (["a", "b", "-o", "x"], "-o"), (["--sequential", "a.yaml", "vs", "b.yaml"], "vs separates the runs"),
            (["--sequential", "a.yaml", "b.yaml", "--show", "3"], "--show")):
        assert main(["compare", *words]) == 2, (words, name)
        assert name in " ".join(capsys.readouterr().err.split()), (words, name)


def finish_forked(jobs, parallel=1, progress=None, what="runs"):
    """As many_runs.run_jobs, which the killed sweep and the comparison below use, but the imports are done."""
    for job in jobs:
        if not many_runs.finished(job.folder):
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            done = forked.run(["-m", "vlrl", *job.words, f"run.dir={job.folder}"], ENV, ROOT, 600)
            assert done.returncode == 0, done.stderr
            job.log.write_text(done.stdout)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tiny_models, tmp_path, monkeypatch, capsys):
    """Killed with -9 in the middle of a run, which dies with it; begun again, it ends as one that was left alone."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    given = ["sweep", str(config), "train.lr=1e-3,1e-2", *FEW, "steps=4", "save.every=1", "--seeds", "1",
             "--test-seeds", "1", "--metric", "reward/mean"]
    monkeypatch.setattr(sweep, "run_jobs", finish_forked)
    assert main([*given, "-o", str(tmp_path / "whole"), "--json"]) == 0
    whole = capsys.readouterr().out.splitlines()[-1]  # after what an import may print
    broken = subprocess.Popen([sys.executable, "-m", "vlrl", *given, "-o", str(tmp_path / "broken")], env=ENV)
    first = tmp_path / "broken" / "tuning" / "0000-0"
    end = time.monotonic() + 900
    while len(RunFolder(first).metrics()) < 2:
        assert broken.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    (child,) = psutil.Process(broken.pid).children()
    broken.kill()
    assert broken.wait(60) == -signal.SIGKILL
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "its run goes on"
        time.sleep(0.05)
    assert main([*given, "-o", str(tmp_path / "broken"), "--json"]) == 0
    assert "resuming from" in (tmp_path / "broken" / "tuning" / "0000-0.log").read_text()
    one, other = json.loads(whole), json.loads(capsys.readouterr().out)
    assert {**one, "folder": ""} == {**other, "folder": ""} and one["runs"] == 4


@pytest.mark.slow
def test_an_interrupted_sequential_comparison_goes_on(tiny_models, tmp_path, monkeypatch, capsys):
    first = write_config(tmp_path, tiny_models["qwen3_vl"])
    (tmp_path / "other.yaml").write_text(first.read_text().replace("lr: 1.0e-3", "lr: 1.0e-2"))
    words = ["compare", "--sequential", str(first), str(tmp_path / "other.yaml"), *FEW, "steps=3", "--seeds", "2",
             "--blocks", "1", "-o", str(tmp_path / "s")]
    with (tmp_path / "log").open("w") as log:
        stopped = forked.Process(["-m", "vlrl", *words], ENV, ROOT, log, log)
    end = time.monotonic() + 900
    while not RunFolder(tmp_path / "s" / "shades-0").metrics():
        assert stopped.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(600) == 130 and "The same command continues" in (tmp_path / "log").read_text()
    assert RunFolder(tmp_path / "s" / "shades-0").last_heartbeat()["state"] == "interrupted"
    monkeypatch.setattr(sequential_runs, "run_jobs", finish_forked)
    assert main([*words, "--jobs", "2"]) == 0 and "4 runs in" in capsys.readouterr().out
