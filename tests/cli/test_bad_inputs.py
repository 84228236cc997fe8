"""What a user gets wrong, over every command and train.py: one message on stderr, the exit code, nothing written."""

import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import noise
from tests.e2e.runs import TASK as SHADES
from tests.e2e.runs import metrics, write_config
from tests.tables import each
from vlrl.cli.main import main, train_script
from vlrl.models import loading
from vlrl.store import RunFolder, checkpoint

TASK = """
from vlrl.task import Task
from vlrl.types import Sample
class Yes(Task):
    prompt = "Say yes."
    rewards = {"correct": 1.0}
    def samples(self, split): return [Sample(id=f"{split}-{i}", row={"answer": "yes", "n": f"{split}{i}"})
                                      for i in range(4)]
    def score(self, sample, answer): return {"correct": float(answer.final == sample["answer"])}
    def oracle(self, sample): return "yes"
"""
BROKEN = {
    "raises": "1 / 0", "exits": "import sys\nsys.exit(0)", "odd": "class Odd(BaseException): pass\nraise Odd('end')",
    "two": TASK + "class No(Yes): pass", "none": "x = 1",
    "leaves": TASK + "    def samples(self, split): raise SystemExit(0)\n",
    "target": TASK + "    def target(self, sample): return {}[0]\n",
    "content": TASK + "    def messages(self, sample): return [{'role': 'user'}]\n",
    "number": TASK + "    def oracle(self, sample): return 5\n",
    "dies": TASK + "    def weights_at(self, step): raise SystemExit(0)\n",
}
CONFIGS = {
    "yes": "extends: tiny.yaml\ntask: yes.py", "list": "- steps", "twice": "steps: 1\nsteps: 2",
    "tab": "train:\n\tlr: 1", "compose": "services: {web: {image: nginx}}",
    "empty_section": "extends: tiny.yaml\ntrain:", "number": "1: 2", "words": "only words",
    "code": "a: !!python/object/apply:os.system [ls]", "deep": "a: " + "[" * 500, "lost": "extends: quikstart.yaml",
}
ROW = '{"sample": {"id": "a", "answer": "yes"}, "completions": ["yes"]}'
LONG = "x" * 300

CASES = [
    # configs
    ("score folder", 1, "config 'folder' is a folder: name a YAML file"),
    ("score /dev/null", 1, "config '/dev/null' is not a regular file"),
    ("score quickstrat.yaml", 1, "Did you mean 'configs/quickstart.yaml'"), (f"score {LONG}.yaml", 1, "does not exist"),
    ("score list.yaml", 1, "list.yaml must contain settings as 'key: value', not a list"),
    ("score words.yaml", 1, "not a text"), ("score bytes.yaml", 1, "bytes.yaml: it is not UTF-8. Save it as UTF-8"),
    ("score twice.yaml", 1, "twice.yaml: line 2: the key 'steps' is already in line 1"),
    ("score tab.yaml", 1, r"tab.yaml: line 2: found character '\\t'"),
    ("score code.yaml", 1, "line 1: could not determine a constructor for the tag.*os.system"),
    ("score deep.yaml", 1, "deep.yaml: (the text is nested too deeply|line 1: )"),
    ("score number.yaml", 1, "unknown setting '1': the name of a setting must be a string"),
    ("score compose.yaml", 1, "unknown setting 'services.web' .value {'image': 'nginx'}.. Known here: reference"),
    ("score empty_section.yaml", 1, "train=None: write the settings of this section below it.*Known: lr"),
    ("score lost.yaml", 1, "extends: 'quikstart.yaml' does not exist.*Did you mean 'quickstart.yaml'"),
    ("train", 2, "Missing argument 'CONFIG'"),
    # tasks
    ("tasks check raises.py", 1, "task.name='raises.py': .*raises.py:1: ZeroDivisionError"),
    ("tasks check exits.py", 1, "exits.py:2: SystemExit: 0"), ("tasks check odd.py", 1, "odd.py:2: Odd: end"),
    ("tasks check two.py", 1, "the module defines 2 Task classes, Yes and No; select one, e.g. two.py:Yes"),
    ("tasks check none.py", 1,
     "the module defines no Task class. Write one .`class Mine.Task.`., or create one with `vlrl tasks new`"),
    ("tasks check yes.py:Yess", 1, "yes.py has no Task class 'Yess'. Did you mean 'Yes'"),
    ("tasks check yes.py:Task", 1, "yes.py has no Task class 'Task'.$"),
    ("tasks check leaves.py --processes 0", 1, "leaves.py:.*SystemExit: 0"),
    ("tasks new pens --dir rows.jsonl", 1, "--dir 'rows.jsonl' cannot be written: File exists"),
    ("tasks lst", 2, "No such command 'lst'. Did you mean 'list'"),
    # play and score
    ("play yes.yaml task=target.py --answer x", 1, "target of sample 'train-0' failed: .*target.py:11: KeyError: 0"),
    ("play yes.yaml task=content.py --answer x", 1, "messages of sample 'train-0' contains .*expected {\"role\""),
    ("play yes.yaml task=number.py --answer x", 1, "oracle of sample 'train-0' returned int, expected an answer"),
    ("play yes.yaml task=dies.py --answer x", 1, "dies.py:11: SystemExit: 0"),
    ("score yes.yaml loop.jsonl", 1, "input 'loop.jsonl' cannot be read: Too many levels of symbolic links"),
    ("score yes.yaml rows.jsonl -o /dev/full", 1, "No space left on device. Free space"),
    # data
    ("data check latin.jsonl", 1, "latin.jsonl cannot be read: it is not UTF-8 text .*at byte 11.. Save it as UTF-8"),
    ("data check looping.jsonl", 1, "media path 'loop.jsonl' is not a path: Symlink loop|loop.jsonl does not exist"),
    (f"data convert good.jsonl -o {LONG}.jsonl", 1, "File name too long. Give another path"),
    (f"data split good.jsonl -o {LONG} --root .", 1, "File name too long|leaves no rows to train on"),
    # runs, checkpoints and models
    (f"status {LONG}", 1, "is not a run folder"), ("doctor runs", 2, "unexpected extra argument"),
    ("eval yes.yaml -o link.jsonl", 1, "link.jsonl exists already, and nothing is overwritten"),
    ("export runs", 2, "name the folder to write to with -o, or a model of the Hub with --push"),
    ("export runs -o out --public", 2, "needs --push"), ("export runs --push a/b --with-media", 2, "needs --rollouts"),
    ("export runs --push a/b", 1, "runs is neither a run folder nor a checkpoint"),
    ("tiny -o out --seed 99999999999999999999 --random", 2, "--seed"),
    ("tiny -o out --max-pixels 4096", 2, "needs --random"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, text in {**BROKEN, "yes": TASK}.items():
        (root / f"{name}.py").write_text(text)
    for name, text in CONFIGS.items():
        (root / f"{name}.yaml").write_text(text)
    (root / "bytes.yaml").write_bytes(b"\xff\xfe\0")
    (root / "rows.jsonl").write_text(ROW + "\n")
    (root / "good.jsonl").write_text('{"id": "a"}\n')
    (root / "latin.jsonl").write_bytes('{"id": "caf\xe9"}'.encode("latin-1"))
    (root / "looping.jsonl").write_text('{"id": "a", "image": "loop.jsonl"}\n')
    (root / "loop.jsonl").symlink_to("loop.jsonl")
    (root / "link.jsonl").symlink_to("nothing.jsonl")
    for folder in ("folder/full", "runs"):
        (root / folder).mkdir(parents=True)
    return root


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "300")


@each("words code says", CASES)
def test_message_and_exit_code(place, capsys, words, code, says):
    before = sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts)
    assert main(shlex.split(words)) == code
    out, err = capsys.readouterr()
    assert re.search(says, " ".join((err if err else out).split())), (out, err)
    assert "Traceback" not in out + err
    assert code == 2 or err.startswith("error: ") or re.match("(data|tasks) check", words)
    assert sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts) == before


def test_a_scorer_that_exits_is_an_error_of_the_answer(place, capsys):
    (place / "quits.py").write_text(TASK.replace("return {\"correct\": float", "raise SystemExit(3) or {\"c\": float"))
    assert main(["score", "yes.yaml", "rows.jsonl", "task=quits.py"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"][0]["error"].startswith("SystemExit: 3")
    (place / "noisy.py").write_text(TASK.replace("def score(self, sample, answer): ", "def score(self, sample, answer):"
                                                 "\n        print('NOISE')\n        ") + "\nprint('NOISE')\n")
    (place / "noisy.yaml").write_text("extends: tiny.yaml\ntask: noisy.py")
    for words in ("play noisy.yaml --answer yes --json", "score noisy.yaml rows.jsonl",
                  "tasks check noisy.py --samples 2 --json", "data check good.jsonl --config noisy.yaml --json"):
        main(words.split())
        out, err = capsys.readouterr()
        assert all(isinstance(json.loads(line), dict) for line in out.splitlines()) and out and "NOISE" in err, words


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "says"), [
    ("score yes.yaml rows.jsonl >&-", 0, "^$"),
    ("tasks list --json > /dev/full", 1, "^error: cannot write to stdout: No space left on device")])
def test_closed_and_full_streams(words, code, says):
    done = subprocess.run(f"exec {shlex.quote(sys.executable)} -m vlrl {words}", shell=True, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == code and re.search(says, done.stderr) and "Traceback" not in done.stderr


def test_a_terminal_without_unicode(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    for words in ("play yes.yaml --answer é", "status --help"):
        written = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
            assert main(words.split()) == 0 and written.getvalue().isascii()
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_working_directory_that_is_gone(tmp_path):
    script = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -m vlrl"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(f"{script} status", shell=True, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and done.stderr.startswith("error: the working directory does not exist any more")


@pytest.mark.slow
def test_light_commands_import_no_torch():
    code = ("import sys; from vlrl.cli.main import main; "
            "[main(w.split()) for w in ('--help', 'tasks list', 'status none', "
            "'score none.yaml', 'export none -o x', 'eval yes.yaml --checkpoint none')]; "
            "sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unreachable_hub_is_asked_once(monkeypatch, caplog):
    from huggingface_hub import constants
    loading._check_hub.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    loading.check_hub("some/model")
    loading.check_hub("other/model")
    assert constants.HF_HUB_OFFLINE and len(caplog.records) == 1
    assert "the model hub http://127.0.0.1:9 cannot be reached" in caplog.text
    loading._check_hub.cache_clear()


def test_packages_of_another_environment_are_not_the_users_code(tmp_path):
    """Such as those that a virtual environment takes from the system, typer's own way to end among them."""
    from vlrl.config.registry import place
    for folder, own in (("lib/site-packages/other", False), ("dist-packages", False), ("mine", True)):
        file = tmp_path / folder / "code.py"
        file.parent.mkdir(parents=True)
        file.write_text("raise SystemExit(0)")
        with pytest.raises(SystemExit) as stop:
            exec(compile(file.read_text(), str(file), "exec"))
        here = str(Path(__file__))
        assert (place(stop.value).startswith(str(file)) is own) and (own or place(stop.value).startswith(here))


@pytest.fixture
def config(tiny_models, tmp_path):
    return write_config(tmp_path, tiny_models["qwen3_vl"], "log: {samples_every: 0}")


SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4")


def fails(capsys, says: str, *words) -> str:
    """Runs train.py with words, expects exit code 1 and one message; returns it."""
    capsys.readouterr()
    assert train_script([str(w) for w in words]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    assert re.search(says, message, re.DOTALL), message
    return message


def task_file(folder: Path, body: str) -> str:
    file = folder / f"task_{abs(hash(body))}.py"
    start, _ = SHADES.split("    def score(")
    file.write_text(f"{start}    def score(self, sample, answer):\n        {body}\n")
    return f"{file}:Shades"


@each("word says", [
    ("trian.lr=1", "unknown setting 'trian'.*Did you mean 'train'"), ("train.lr=fast", "train.lr='fast'.*valid number"),
    ("train.lr=-1", "train.lr=-1.*greater than 0"),
    ("rollout.group_size=1", "rollout.group_size=1.*greater than or equal to 2"),
    ("task.rewards.vowel=1", "task.rewards.vowel.*Did you mean 'vowels'"),
    ("model.name=no/such-model", "model.name='no/such-model' is not in the local Hub cache.*give the folder"),
    ("model.name=embedded/tiny", "no such embedded model"),
    ("algo.loss=my.module:loss", "algo.loss='my.module:loss'.*No module named"),
    ("log.trackers=[trackio]", "trackio.*pip install trackio"),
])
def test_settings(config, tmp_path, capsys, word, says):
    fails(capsys, says, config, f"run.dir={tmp_path}/run", word)


def rows(folder: Path, *lines: dict | str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


@pytest.mark.slow
def test_data_files(config, tmp_path, capsys):
    words = (config, f"run.dir={tmp_path}/run", "task={name: grounding}", "eval.samples=0", "steps=1")
    good = {"id": "a", "image": "a.png", "width": 64, "height": 64, "expression": "dot",
            "boxes": [{"box": [1, 1, 9, 9], "label": "dot"}]}
    noise(0, 64, 64).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    fails(capsys, "data.train", *words)
    fails(capsys, "none.jsonl", *words, f"data.train={tmp_path}/none.jsonl")
    for row, says in (("{", "rows.jsonl.*1"), ({**good, "image": "gone.png"}, "gone.png"),
                      ({**good, "image": "../../etc/passwd"}, "passwd"),
                      ({**good, "image": "broken.png"}, "broken.png"),
                      ({**good, "image": "http://example.com/a.png"}, "http"), ({**good, "id": None}, "id"),
                      ({**good, "boxes": [{"box": [9, 9, 1, 1]}]}, "'a'.*box")):
        fails(capsys, says, *words, f"data.train={rows(tmp_path, row)}")
    (tmp_path / "rows.jsonl").write_text("")
    fails(capsys, "has no usable row", *words, f"data.train={tmp_path}/rows.jsonl")


def test_long_prompts_are_rejected_and_help_teaches(config, tmp_path, capsys):
    fails(capsys, r"drawn prompts were rejected.*sample 'train-\d+': the prompt has \d+ tokens, .*"
          r"limits.prompt_tokens=5", config, f"run.dir={tmp_path}/run", "limits.prompt_tokens=5", "eval.samples=0")
    assert train_script(["--help"]) == 0 and "resume=never" in capsys.readouterr().out
    assert train_script(["--settings"]) == 0
    listed = capsys.readouterr().out
    assert "rollout.group_size = 8" in listed and "train.lr" in listed
    assert train_script(["--help"]) == 0 and logging.lastResort
    record = logging.LogRecord("x", logging.WARNING, "", 0, "row '%s' left out", ("\x1b[31mred\u202e\né",), None)
    assert logging.lastResort.format(record) == "row '?[31mred?\né' left out"


@pytest.mark.slow
def test_scores(config, tmp_path, capsys):
    def words(body):
        return config, f"run.dir={tmp_path}/run", "resume=never", f"task={task_file(tmp_path, body)}", "steps=2"
    fails(capsys, "returned the part 'bonus'", *words("return {'vowels': 1.0, 'short': 0.0, 'bonus': 1.0}"))
    fails(capsys, "left out the part 'short'", *words("return {'vowels': 1.0}"))
    fails(capsys, "heldout at step 0: 8 of 8 rollouts failed.*limits.score_errors.*'vowels' was nan.*rollouts are in",
          *words("return {'vowels': float('nan'), 'short': 0.0}"), "run.checks=warn")
    fails(capsys, "failed to score.*KeyError: 'shade'", *words("return {'vowels': sample['shade'], 'short': 0.0}"),
          "run.checks=warn")
    body = "return {'vowels': 1 / (len(answer.text) % 3), 'short': 0.0}"
    assert train_script([str(w) for w in (*words(body), "steps=1", "limits.score_errors=1", "eval.samples=0")]) == 0
    table = RunFolder(tmp_path / "run").rollouts().to_pylist()
    errors = [r for r in table if r["error"]]
    assert errors and all(r["reward"] is None and "ZeroDivisionError" in r["error"] for r in errors)
    assert any((r["reward"] or 0) > 0 for r in table)
    assert metrics(tmp_path / "run")[0]["score_errors"] > 0


@pytest.mark.slow
def test_what_was_scored_is_kept_when_scoring_fails(config, tmp_path, capsys):
    words = (config, f"run.dir={tmp_path}/run", "steps=2", "run.checks=warn")
    broken = task_file(tmp_path, "raise KeyError('shade')")
    for keep in ("all", "mixed"):
        message = fails(capsys, "step 0: (16 of 16|64 of 64) rollouts failed.*KeyError", *words, f"task={broken}",
                        "eval.samples=0", f"curriculum.keep={keep}")
        (file,) = (tmp_path / "run" / "failed" / "rollouts").iterdir()
        assert str(file) in message
    only_heldout = task_file(tmp_path, "return {'vowels': 1.0 if sample.id[0] == 't' else {}[0], 'short': 0.0}")
    fails(capsys, "8 of 8 rollouts failed.*KeyError", *words, f"task={only_heldout}")


@pytest.mark.slow
def test_an_evaluation_of_another_start_does_not_stay(config, tmp_path, capsys):
    """Of a start that ended before its first step: a run that has completed one is not begun anew."""
    words = [str(config), f"run.dir={tmp_path}/run", "steps=1", "run.checks=warn", *SMALL]
    only_heldout = task_file(tmp_path, "return {'vowels': 0.0 if sample.id[0] == 'h' else {}[0], 'short': 0.0}")
    fails(capsys, "step 0: 4 of 4 rollouts failed.*KeyError", *words, f"task={only_heldout}")
    assert [line["vowels"] for line in metrics(tmp_path / "run", "eval.jsonl")] == [0]
    assert train_script(words) == 0
    first = metrics(tmp_path / "run", "eval.jsonl")[0]
    assert first["step"] == 0 and first["vowels"] > 0


@pytest.mark.slow
def test_steps_without_a_mixed_group_are_still_counted(config, tmp_path):
    task = task_file(tmp_path, "return {'vowels': 0.5, 'short': 0.0}")
    words = (config, f"run.dir={tmp_path}/run", f"task={task}", "steps=1", "eval.samples=0", "curriculum.keep=mixed",
             "curriculum.max_refills=1")
    assert train_script([str(w) for w in words]) == 0
    (line,) = metrics(tmp_path / "run")
    assert line["reward/mean"] == 0.5 and line["groups/zero_variance_frac"] == 1 and line["groups/wasted"] == 8
    assert RunFolder(tmp_path / "run").rollouts().num_rows == 32


@pytest.mark.slow
def test_rejected_prompts_are_named(config, tmp_path, capsys):
    file = tmp_path / "long.py"
    file.write_text(SHADES.replace('f"picture {i}"', 'f"picture {i} " * (1 + 20 * (i % 8 == 0))'))
    assert train_script([str(config), f"run.dir={tmp_path}/run", f"task={file}:Shades", "limits.prompt_tokens=80",
                         "steps=3", "eval.samples=0"]) == 0
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert reasons and all("limits.prompt_tokens=80" in r for r in reasons)
    assert reasons[0] in capsys.readouterr().out.replace("\n", " ")
    assert metrics(tmp_path / "run")[-1]["prompts/rejected"] == len(reasons)


@pytest.mark.slow
def test_resume_with_other_settings(config, tmp_path, capsys, tiny_models):
    words = [str(config), f"run.dir={tmp_path}/run", "steps=1", "eval.samples=0", *SMALL]
    assert train_script(words) == 0
    fails(capsys, r"train.lr: 0.001 -> 0.002.*resume=never", *words, "train.lr=0.002")
    fails(capsys, r"model.name: '\S*qwen3_vl' -> '\S*qwen2_5_vl'", *words, f"model.name={tiny_models['qwen2_5_vl']}")
    assert train_script([*words, "save.keep=3", "eval.every=7", "steps=2"]) == 0  # these may change
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").step == 2
    assert train_script([*words, "train.lr=0.002", "resume=never"]) == 0
    aside = RunFolder(tmp_path / "run.before-1")  # the old run is moved, not deleted
    assert checkpoint.latest(aside.checkpoints).step == 2 and len(aside.metrics()) == 2


@pytest.mark.slow
def test_other_rows_at_a_resume_are_refused_and_rows_left_out_are_kept(config, tmp_path, capsys):
    file, rows = tmp_path / "asked.py", tmp_path / "rows.jsonl"
    code = SHADES.replace('"How bright is {id}?"', '"{question}"')
    file.write_text(code[:code.index("    def samples")] + code[code.index("    def score"):])
    entries = [{"id": i, "question": f"What is {i}?"} for i in range(8)] + [{"question": "no id"}]
    rows.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = [str(config), f"run.dir={tmp_path}/run", f"task={file}:Shades", f"data.train={rows}", "eval.samples=0",
             "data.quarantine=true", "rollout.prompts_per_step=1", "rollout.group_size=2", "run.checks=warn"]
    assert train_script([*words, "steps=1"]) == 0
    (left,) = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert left["step"] == 0 and "rows.jsonl:9: the row has id=None" in left["reason"]
    rows.write_text(rows.read_text().replace("What is 3?", "Who is 3?"))
    fails(capsys, r"data\.train=.*rows\.jsonl' differ from those of the checkpoint: 1 rows changed, '3' \(row 4\)",
          *words, "steps=2")
