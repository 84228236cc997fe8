"""`vlrl status` on real runs and real processes, and `vlrl doctor` on this machine."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.panel import Panel

from tests.tables import each
from vlrl.checks.finding import Finding
from vlrl.cli.main import main
from vlrl.monitoring.progress import Progress
from vlrl.store import RunFolder
from vlrl.tools.experiments import status
from vlrl.tools.experiments.report import summary_table
from vlrl.tools.experiments.status import read_status
from vlrl.tools.machine import doctor, machine_checks
from vlrl.tools.run import Run

# holds the lock of a run folder and reports as a training run does, until it is killed or told to end
WORKER = """
import sys
from vlrl.store import RunFolder
run = RunFolder(sys.argv[1])
with run.lock():
    if "quiet" not in sys.argv:
        run.heartbeat({"step": 3, "steps": 10, "state": "running"})
    print("ready", flush=True)
    sys.stdin.readline()
"""


def metrics(run: RunFolder, steps: int, seconds: float = 2.0, start: int = 0) -> RunFolder:
    for step in range(start, start + steps):
        run.append_metrics({"step": step, "reward/mean": step / 10, "time/total_s": seconds, "tokens_per_s": 100.0})
    return run


def finished(path: Path, state: str = "finished") -> RunFolder:
    run = metrics(RunFolder(path), 6)
    run.append_eval({"step": 0, "split": "heldout", "n": 8, "iou": 0.25, "iou/ci95_low": 0.0, "iou/ci95_high": 0.5})
    run.append_eval({"step": 6, "split": "heldout", "n": 8, "iou": 0.5, "iou/ci95_low": 0.25, "iou/ci95_high": 0.75})
    run.heartbeat({"step": 6, "steps": 6, "state": state})
    return run


@pytest.fixture
def worker(tmp_path):
    started = []

    def start(*words: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "run"), *words], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline() == "ready\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def shown(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["status", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_running_stale_dead(tmp_path, worker):
    path = tmp_path / "run"
    process = worker()
    metrics(RunFolder(path), 3)
    now = read_status(path)
    assert (now.state, now.step, now.steps, now.eta_s, now.pid) == ("running", 3, 10, 14.0, process.pid)
    assert read_status(path, now=time.time() + 50).state == "running"  # never before a minute
    late = read_status(path, now=time.time() + 70)
    assert late.state == "stale" and late.eta_s is None and 60 < (late.heartbeat_age_s or 0) < 80
    metrics(RunFolder(path), 1, seconds=30.0, start=3)  # a long step, an evaluation in it: three of those are waited
    assert [read_status(path, now=time.time() + age).state for age in (70, 100)] == ["running", "stale"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (path / "run.lock").exists() and read_status(path).state == "dead"
    (path / "run.lock").unlink()
    assert read_status(path).state == "dead"


def test_a_new_process_on_an_old_run_is_starting_and_watched_until_it_ends(tmp_path, worker, capsys):
    finished(tmp_path / "run", "interrupted")
    assert read_status(tmp_path / "run").state == "interrupted"
    process = worker("quiet")
    found = read_status(tmp_path / "run")
    assert found.state == "starting" and found.pid == process.pid
    process.communicate("end\n")
    assert read_status(tmp_path / "run").state == "interrupted" and not (tmp_path / "run" / "run.lock").exists()
    (tmp_path / "run/heartbeat.json").unlink()
    process = worker()
    assert process.stdin
    process.stdin.write("end\n")
    process.stdin.flush()
    code, out, _ = shown(capsys, tmp_path / "run", "--watch", "--every", "0.1", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["state"] == "dead"  # it never said that it had finished


def test_a_lock_of_another_host_is_judged_by_its_heartbeat(tmp_path):
    run = metrics(RunFolder(tmp_path), 2)
    run.heartbeat({"step": 2, "steps": 9, "state": "running"})
    beat = json.loads((tmp_path / "heartbeat.json").read_text()) | {"host": "elsewhere"}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    (tmp_path / "run.lock").write_text(json.dumps({"pid": beat["pid"], "host": "elsewhere", "process": "x/1"}))
    assert read_status(tmp_path).state == "running" and read_status(tmp_path, now=time.time() + 3600).state == "stale"


def test_many_runs_take_one_line_each_and_one_many(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    finished(tmp_path / "a")
    finished(tmp_path / "deep" / "b", "failed")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "heartbeat.json").write_text('{"step": 1, "st')  # half-written
    code, out, _ = shown(capsys, tmp_path)
    lines = [line.split() for line in out.splitlines() if "/" in line and "steps/min" not in line]
    assert code == 0 and [line[:3] for line in lines] == [
        ["a", "finished", "6/6"], ["c", "unknown", "?/?"], ["deep/b", "failed", "6/6"]]
    code, out, _ = shown(capsys, tmp_path, "--json", "--watch")  # nothing works on them, so it ends
    assert code == 0 and [r["state"] for r in json.loads(out)] == ["finished", "unknown", "failed"]
    finished(tmp_path / "run")
    code, out, _ = shown(capsys, tmp_path / "run")
    assert code == 0 and re.search(r"state +finished \(process \d+ on .*last heard of 0:00:0\d ago", out)
    assert re.search(r"step +6/6\n", out) and "30.0 steps/min, 100 tokens/s" in out and re.search(r"ETA +-\n", out)
    assert "reward     0.500 (trend +0.300)" in out and "heldout @ 6: iou 0.500 [0.250, 0.750]" in out
    code, out, _ = shown(capsys, tmp_path / "run", "--json")
    found = json.loads(out)
    assert code == 0 and found["state"] == "finished" and found["step"] == 6 and found["eta_s"] is None
    assert found["steps_per_minute"] == 30 and found["evals"]["heldout"]["step"] == 6


def test_half_written_and_odd_files_do_not_break_it(tmp_path, capsys):
    for broken in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000,
                   b'{"step": 1e999, "split": "heldout", "iou": NaN}\n',
                   b'{"step": "x", "steps": true, "time": "now", "state": 7, "pid": [], "host": {}}'):
        for name in ("heartbeat.json", "run.lock", "eval.jsonl"):
            (tmp_path / name).write_bytes(broken)
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "reward/mean": null, "time/total_s": 0}\n'
                                                 b'{"step": 1, "reward/mean": 0.5}\n[1]\n' + broken)
        code, out, _ = shown(capsys, tmp_path)
        assert code == 0 and re.search(r"step +2/\?", out)
        out = shown(capsys, tmp_path, "--json")[1]
        assert json.loads(out)["reward"] in (0.5, None) and "NaN" not in out and "Infinity" not in out


def test_only_the_end_of_long_files_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_BYTES", 1000)
    metrics(RunFolder(tmp_path), 100)
    found = read_status(tmp_path)
    assert found.step == 100 and found.reward == 9.9 and found.steps_per_minute == 30


@each("words code says", [
    ("nowhere", 1, "nowhere is not a run folder"), ("runz", 1, "Did you mean 'runs'"),
    ("file.txt", 1, "file.txt is not a run folder"), ("empty", 1, "no run in empty: a run folder holds heartbeat.json"),
    ("deep/er/nowhere", 1, "is not a run folder"), ("runs --every 0", 2, "--every"),
    ("runs --every soon", 2, "--every"), ("runs more", 2, "unexpected extra argument"), ("", 1, "no run in runs"),
])
def test_bad_input(tmp_path, capsys, monkeypatch, words, code, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("runs", "empty"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "file.txt").write_text("x")
    found, out, err = shown(capsys, *words.split())
    assert found == code and re.search(says, " ".join((out + err).split())), (found, out, err)


@pytest.mark.slow
def test_what_works_here_is_tried():
    found = {f.rule: f for f in doctor.examine()}
    assert not [f for f in found.values() if f.level == "error" or f.message.startswith("does not work")]
    for name in ("training", "video by PyAV", "bfloat16"):
        assert found[f"usable/{name}"].level == "ok", found[f"usable/{name}"]
    assert found["usable/training"].message.startswith("one step of the embedded model on ")
    assert found["versions/torch"].message[0].isdigit() and "GiB free" in found["devices/memory"].message
    assert all(f.fix for f in found.values() if f.level == "missing")


def only(monkeypatch, folder, *names):
    chosen = [check for check in doctor.checks(folder) if check.name in names]
    monkeypatch.setattr(doctor, "checks", lambda runs: chosen)


def test_doctor_prints_json_and_fails_only_when_nothing_can_run(tmp_path, capsys, monkeypatch):
    light = {"versions/python", "versions/torch", "versions/vllm", "devices/memory", "devices/disk",
             "usable/video by PyAV", "usable/video by decord"}
    only(monkeypatch, tmp_path, *light)
    good = doctor.examine(tmp_path)
    assert {f.rule: f.level for f in good} | {"versions/vllm": "ok"} == dict.fromkeys(light, "ok")
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] and {"group", "name", "verdict", "detail", "fix"} == set(printed["findings"][0])
    bad = Finding(rule="usable/training", level="error", message="does not work", fix="pip install torch")
    monkeypatch.setattr(doctor, "examine", lambda runs, progress: [*good, bad])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "training cannot run: fix training first" in out and "pip install torch" in out


def test_a_version_is_ok_only_when_its_package_works_and_a_check_that_fails_names_the_fix(tmp_path, monkeypatch):
    """PyAV as it is when it cannot open a clip, scipy as it is when it cannot be imported."""
    import av
    monkeypatch.setattr(av, "open", lambda *args, **more: 1 / 0)
    monkeypatch.setitem(sys.modules, "scipy", None)
    only(monkeypatch, tmp_path, "versions/av", "versions/scipy", "versions/rapidfuzz", "usable/video by PyAV")
    found = {f.rule.partition("/")[2]: f for f in doctor.examine(tmp_path)}
    assert [found[name].level for name in ("av", "rapidfuzz", "scipy")] == ["warning", "ok", "error"]
    assert re.search(r"^\d.*, but video by PyAV: does not work: ZeroDivisionError", found["av"].message)
    assert found["av"].fix == "pip install --force-reinstall av"
    def checked(run, level="missing"):
        return doctor.run_check(doctor.Check("usable/x", run, level, "pip install x"))

    gone = checked(lambda: doctor.importlib.import_module("no_such_package_anywhere"))
    assert (gone.level, gone.fix) == ("missing", "pip install x")
    assert gone.message == "no_such_package_anywhere is not installed"
    broken = checked(lambda: str(1 / 0), "error")
    assert broken.level == "error" and "ZeroDivisionError" in broken.message
    assert checked(lambda: sys.exit("no GPU")).message == "does not work: SystemExit: no GPU"
    monkeypatch.setattr(machine_checks, "LEAST_DISK", 2**60)
    monkeypatch.setattr(machine_checks, "usable_cpus", lambda: 0.5)
    for run in (lambda: machine_checks.disk(tmp_path / "a" / "b"), machine_checks.threads):
        trap = checked(run)
        assert trap.level == "warning" and trap.fix != "pip install x"
    need = next(need for name, (need, _) in doctor.requirements().items() if name == "torch")
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "1.0")
    old = checked(lambda: doctor.version_of("torch", need))
    assert old.level == "warning" and f"1.0 is outside the range that vlrl requires ({need.specifier})" in old.message


@pytest.mark.slow
def test_a_terminal_of_few_columns(tmp_path, monkeypatch, capsys):
    """Rich's tables and panels raise below some ten columns, which must not end a run at its closing table."""
    run = finished(tmp_path / "run")
    for width in ("1", "4"):
        monkeypatch.setenv("COLUMNS", width)
        with Progress(3) as progress:
            progress.print(Panel("an answer", title="sample 7"))
            progress.update(3, {"reward/mean": 0.5, "time/total_s": 1.0, "tokens_per_s": 3.0})
        progress.print(summary_table(run))
        Run(run.path).show()
        assert capsys.readouterr().out.count("[low, high]") == 2
        for words in (["status", str(run.path)], ["presets"], ["tasks", "list"], ["train", "--help"]):
            monkeypatch.setenv("COLUMNS", width)
            assert main(words) == 0, capsys.readouterr().err
