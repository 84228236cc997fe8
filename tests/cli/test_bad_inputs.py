"""What a user gets wrong, over every subcommand: one message on stderr, the right exit code, nothing written."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import each
from vlrl.cli.main import main
from vlrl.models import loading

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
    ("score quickstrat.yaml", 1, "Did you mean 'configs/quickstart.yaml'"),
    (f"score {LONG}.yaml", 1, "does not exist"),
    ("score list.yaml", 1, "list.yaml must contain settings as 'key: value', not a list"),
    ("score words.yaml", 1, "not a text"),
    ("score bytes.yaml", 1, "bytes.yaml: it is not UTF-8. Save it as UTF-8"),
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
    ("tasks check exits.py", 1, "exits.py:2: SystemExit: 0"),
    ("tasks check odd.py", 1, "odd.py:2: Odd: end"),
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
    (f"data convert good.jsonl -o {LONG}.jsonl", 1, "File name too long. Name another"),
    (f"data split good.jsonl -o {LONG} --root .", 1, "File name too long|leaves no rows to train on"),
    # runs, checkpoints and models
    (f"status {LONG}", 1, "is not a run folder"),
    ("doctor runs", 2, "unexpected extra argument"),
    ("eval yes.yaml -o link.jsonl", 1, "link.jsonl exists already, and nothing is overwritten"),
    ("export runs", 2, "name the folder to write to with -o, or a model of the Hub with --push"),
    ("export runs -o out --public", 2, "needs --push"),
    ("export runs --push a/b --with-media", 2, "needs --rollouts"),
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
