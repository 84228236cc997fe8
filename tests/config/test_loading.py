"""Settings that would be misread are refused, by name and value, and say what to write; paths go by the config."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.tables import each
from vlrl import config, task
from vlrl.algo.algorithm import Algorithm
from vlrl.config import Config, config_of, derived, differences, dump, loading, shipped_configs, stages_of, validate
from vlrl.config import load as load_config
from vlrl.config.base import Named
from vlrl.config.paths import searched_in, split_of_folder
from vlrl.config.plain import plain
from vlrl.config.presets import shipped
from vlrl.config.registry import failure, resolve
from vlrl.errors import ConfigError, RunError
from vlrl.methods.preferences.dpo import preference_config
from vlrl.store import RunFolder, checkpoint
from vlrl.task import Task
from vlrl.training.build_task import make_task
from vlrl.training.resume import refuse_other_settings
from vlrl.training.sft import supervised_config

ROOT = Path(__file__).parents[2]
BASE = "task: grounding\nmodel: {name: m}\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(BASE)
    return path


@each("word says", [
    ("train.lr=.nan", "train.lr=nan: .*finite number"), ("train.lr=.inf", "train.lr=inf: .*finite number"),
    ("train.part_lr.language=.inf", "train.part_lr.language=inf: .*finite"),
    ("train.part_lr.language=0", "train.part_lr.language=0: .*greater than 0"),
    ("train.part_lr={vision: true}", "train.part_lr.*give a number, not true or false"),
    ("train.betas=[0.9, 1]", "train.betas.1=1: .*less than 1"),
    ("train.betas=[-0.1, 0.9]", "train.betas.0=-0.1: .*greater than or equal to 0"),
    ("train.betas=[true, 0.9]", "train.betas=.*not true or false"),
    ("steps=true", "steps=True: give a number, not true or false"), ("train.lr=yes", "train.lr=True: give a number"),
    ("model.max_pixels=true", "model.max_pixels=True: give a number"),
    ("seed=9223372036854775808", "seed=9223372036854775808: .*less than 9223372036854775808"),
    ("data.seed=-9223372036854775809", "data.seed=-9223372036854775809"),
    ("steps=9223372036854775808", "steps=9223372036854775808"),
    ("model.train=[]", r"model.train=\[\] trains nothing.*model.lora.rank"),
    ("model={min_pixels: 9, max_pixels: 8}", "model.min_pixels=9 is more than model.max_pixels=8"),
    ("eval.splits=[heldout, train, heldout]", "eval.splits=.*'heldout' is given twice"),
    ("seed=2020-13-45", "seed: cannot read the value '2020-13-45': ValueError: month must be in 1..12"),
    ("seed={a: 1, a: 2}", "seed: cannot read the value .*line 1: the key 'a'"),
    ("seed=!!bool maybe", "seed: cannot read the value"), ("seed=[", "seed: cannot read the value"),
    ("=1", "'=1' is not a setting")])
def test_bad_words(file, word, says):
    with pytest.raises(ConfigError, match=says) as error:
        loading.load(file, [word])
    assert "Value error" not in str(error.value)


@each("words", [
    ["extends=[curricula/time_r1.yaml,curricula/adcl.yaml]"], ["extends=curricula/time_r1.yaml", "curriculum=adcl"],
    ["curriculum={name: gaussian, std: 0.1, pass_at: 0.7}", "curriculum={name: adcl}"],
    ["extends=curricula/time_r1.yaml", "curriculum.name=adcl"]])
def test_another_sampler_drops_the_options_of_the_old_one(file, words):
    found = loading.load(file, words).curriculum
    assert found.name == "adcl" and {*found.sampler.options} <= {"batches", "probe_size"} and found.pass_at == 0.7


def test_values_at_the_edge_and_names_alone(file):
    file.write_text(BASE + "curriculum: sec")
    assert loading.load(file).curriculum.sampler == Named(name="sec")
    words = ["curriculum.keep.low=0.1", "curriculum.tau=2", "curriculum.keep=pass_range"]
    found = loading.load(file, words).curriculum  # options stay under the same name
    assert found.sampler.options == {"tau": 2} and found.keep.options == {"low": 0.1}
    assert loading.load(file, ["curriculum.alpha=0.1", "curriculum=dump"]).curriculum.sampler.options == {"alpha": 0.1}
    assert loading.load(file, ["curriculum.window=9", "curriculum=dump"]).curriculum.sampler.options == {"window": 9}
    found = loading.load(file, ["train.betas=[0, 0.999]", "seed=9223372036854775807", "steps=0", "train.lr=1e-4",
                               "model={train: [], lora: {rank: 4}, min_pixels: 8, max_pixels: 8}", "data.seed=-1",
                               "curriculum.keep=mixed", "store.rollouts=false", "train.part_lr={vision: 1e-6}"])
    assert (found.train.betas, found.model.train, found.train.part_lr) == ((0, 0.999), (), {"vision": 1e-6})
    assert not found.store.rollouts and found.model.min_pixels == 8
    assert config.validate(yaml.safe_load(config.dump(found))) == found


@each("text says", [
    ("steps: 1\nseed: 2\nsteps: 3\n", "line 5: the key 'steps' is already in line 3"),
    ("train:\n  lr: 1\n  betas: [0, 0]\n  lr: 2\n", "line 6: the key 'lr' is already in line 4"),
    ("seed: 2020-13-45\n", "ValueError: month must be in 1..12"), ("seed: !!timestamp soon\n", "cannot read config"),
    ("seed: \x01\n", "cannot read config"), ("? [a]\n: 1\n", "cannot read config"),
    ("a: " + "[" * 1200, "cannot read config"), ("1: 2\n", "1"), ("extends: " + "x" * 5000, "does not exist")])
def test_bad_files(file, text, says):
    file.write_text(BASE + text)
    with pytest.raises(ConfigError, match=says) as error:
        loading.load(file)
    assert "a.yaml" in str(error.value) or text.startswith("1")


def test_anchors_and_merges_are_no_duplicates(file):
    file.write_text(BASE + "train: &a {lr: 1.0, warmup: 0.5}\neval: {samples: 1}\ncurriculum: {}\n")
    assert loading.load(file).train.lr == 1
    assert loading._parse("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}")["c"] == {"x": 2, "y": 3}
    two = loading._parse("a: &a {x: 1, z: 1}\nb: &b {x: 2, y: 2}\nc: {y: 3, <<: [*a, *b]}")
    assert two["c"] == {"x": 1, "y": 3, "z": 1}  # the first of several wins, and a mapping's own over all
    with pytest.raises(ValueError, match=r"line 1: a merge key \(<<\) must have a mapping or a list"):
        loading._parse("a: {<<: [1]}")


def test_a_file_of_vlrl_or_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("extends: classification/digits.yaml\nsteps: 3\n")
    loaded = loading.load("own.yaml")
    assert (loaded.steps, loaded.task.name, loaded.model.name) == (3, "digits", "embedded/tiny-qwen3-vl")
    (tmp_path / "classification").mkdir()
    (tmp_path / "classification" / "digits.yaml").write_text(BASE + "seed: 7\n")
    assert loading.load("own.yaml").seed == 7  # a file beside it comes first
    (tmp_path / "own.yaml").write_text("extends: tinny.yaml\n")
    with pytest.raises(ConfigError, match=r"own\.yaml: extends: 'tinny.yaml' does not exist.*Did you mean 'tiny.yaml'"):
        loading.load("own.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        loading.load("x" * 5000 + ".yaml")


def test_own_code_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_variant.py").write_text("def f(x): return x\nnumber = 3\n")
    (tmp_path / "own_broken.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "own_exit.py").write_text("raise SystemExit(0)\n")
    assert resolve("algo.loss", "own_variant:f", {})(5) == 5
    for name, says in (("own_variant:number", "is of type int, not a function or class"),
                       ("own_variant:g", "has no attribute 'g'"), ("own_variant:", "has no attribute ''"),
                       ("own_broken:f", r"own_broken.py:2: ZeroDivisionError"), ("own_exit:f", "SystemExit"),
                       (":f", "ValueError: Empty module name"), ("..:f", "TypeError"), ("no.such:f", "No module named"),
                       ("nope", "is not known")):
        with pytest.raises(ConfigError, match=f"algo.loss={re.escape(repr(name))}.*{says}"):
            resolve("algo.loss", name, {})
    try:
        import json

        json.loads("{")
    except ValueError as error:
        assert re.match(r".*test_loading.py:\d+: JSONDecodeError: ", failure(error))
    assert failure(KeyError("k")) == "KeyError: 'k'"


def test_names_of_other_trainers_are_answered_with_ours(file):
    with pytest.raises(ConfigError, match=r"'train.learning_rate' \(value 1e-05\)\. Here it is train.lr "):
        loading.load(file, ["train.learning_rate=1.0e-5"])
    with pytest.raises(ConfigError, match=r"Here it is rollout.group_size "):
        loading.load(file, ["num_generations=4"])
    for words, here in ((["worker.actor.optim.lr=1", "worker.rollout.n=5"],
                         "Here worker.actor.optim.lr is train.lr, worker.rollout.n is rollout.group_size "),
                        (["trainer.total_epochs=3"], r"Did you mean 'train'\? Here trainer.total_epochs is epochs "),
                        (["algorithm.adv_estimator=rloo"], "Here algorithm.adv_estimator is algo.advantage ")):
        with pytest.raises(ConfigError, match=here):
            loading.load(file, words)


def test_kinds_and_references_of_runs(file):
    rl = loading.load(file)
    supervised = loading.load(file, ["algo.loss=supervised"])
    with pytest.raises(RunError, match=r"runs/a contains a supervised run .* this is an RL run .*model.name=runs/a "):
        loading.refuse_other_kind(supervised, rl, "runs/a")
    loading.refuse_other_kind(rl, loading.load(file, ["algo.loss=cispo"]), "runs/a")
    def reference(*words):
        found = loading.load(ROOT / "configs" / "quickstart.yaml", [*words]).algo.reference
        return found.name, dict(found.options)
    assert reference("services.reference=ema") == ("ema", {})
    assert reference("services.reference=start") == ("frozen", {})
    assert reference("services.reference=ema", "algo.reference.every=2") == ("ema", {"every": 2})
    assert reference("services.reference=ema", "algo.reference={name: ema, decay: 0.5}") == ("ema", {"decay": 0.5})
    with pytest.raises(ConfigError, match=r"services\.reference=start and algo\.reference=ema"):
        reference("services.reference=start", "algo.reference=ema")


def test_files_that_are_refused(tmp_path):
    levels = "\n".join(f"m{i}: &m{i} {{{', '.join(['<<: [' + ', '.join([f'*m{i - 1}'] * 10) + ']', f'k{i}: 1'])}}}"
                       for i in range(1, 50))
    file = tmp_path / "many.yaml"
    file.write_text(f"m0: &m0 {{k0: 1, j0: 1}}\n{levels}\n")
    with pytest.raises(ConfigError, match=r"many\.yaml: the merge keys \(<<\) add more than 10,000 settings"):
        loading.load(file)
    file = tmp_path / "off.yaml"
    file.write_text("extends: tiny.yaml\ntask: grounding\nrun: {dir: no}\n")
    with pytest.raises(ConfigError, match=r"run\.dir=False: a string is needed, but YAML reads no.*in quotes"):
        loading.load(file)


def test_an_empty_dictionary_of_own_keys_clears_it_and_an_empty_section_changes_nothing(tmp_path):
    (tmp_path / "base.yaml").write_text("task: world\nmodel: {name: a}\n"
                                        "environment: {name: 'gym:A-v1', options: {goal: 1, size: 4}}\n"
                                        "train: {lr: 0.5, part_lr: {vision: 0.1}}\n")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\nenvironment: {options: {}}\ntrain: {}\n")
    assert not loading.load(tmp_path / "base.yaml", ["environment.options={}"]).environment.options
    assert loading.load(tmp_path / "base.yaml", ["environment.options={goal: 2}"]).environment.options == {
        "goal": 2, "size": 4}
    loaded = loading.load(tmp_path / "run.yaml", ["train={}"])
    assert loaded.environment.options == {} and loaded.train.lr == 0.5 and loaded.train.part_lr == {"vision": 0.1}


@each("words found", [
    (["algo.demonstrations.mix=relift", "algo.demonstrations.mix.size=3"], {"name": "relift", "size": 3}),
    (["extends=algorithms/chord.yaml", "algo.demonstrations.mix.peak=0.5"],
     {"name": "chord", "peak": 0.5, "valley": 0.05, "warmup": 0, "decay": 200}),
    (["extends=algorithms/chord.yaml", "algo.demonstrations.mix=sasr"], {"name": "sasr"})])
def test_names_below_a_setting_that_may_be_null_are_merged(words, found):
    """As any other name: an option stays with its name, and another name drops the options of the old one."""
    mix = loading.load("configs/quickstart.yaml", words).algo.demonstrations.mix
    assert {"name": mix.name, **mix.options} == found


class Own(Task):
    """Given as a class, where a name is asked for."""


TREE = {"task": {"name": "grounding"}, "model": {"name": "x"}}


@each("tree said", [
    ({"task": Own}, r"task=tests\.config\.test_loading:Own"), ({"model": "x"}, r"write model\.name=x"),
    ({"data": {"train": object()}}, r"vlrl\.train\(data=dataset"),
    ({"task": {"name": "grounding", "prompt": {"question": None}}}, r"quotes, 'task\.prompt=\"\{question\}\"'"),
    ({"algo": {"kl": 0.04}}, r"algo\.kl_coef=0\.04"),
    ({"task": {"name": "grounding", "part": "x"}}, "Did you mean 'parts'"),
    ({"task": {"name": "grounding", "rewards": {"short": 1}}}, r"task\.parts=\[path/file\.py:name\]"),
    ({"algo": {"loss": "grpo"}}, r"extends=algorithms/grpo\.yaml"), ({"algo": {"loss": "gsqo"}}, "Did you mean 'gspo'"),
    ({"reward_funcs": "f"}, r"Here it is task\.parts \(docs/coming-from\.md\)")])
def test_the_message_says_what_to_write(tree, said):
    with pytest.raises(ConfigError, match=said):
        found = config.validate({**TREE, **tree})
        make_task(found)
        Algorithm(found)


TASK = """
from vlrl.task import Task
from neighbour_of_ours import WEIGHT

class Mine(Task):
    rewards = {"right": WEIGHT}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
    (folder / "rows.jsonl").write_text("")
    (folder / "more-1.jsonl").write_text("")
    (folder / "mine.py").write_text(TASK)
    (folder / "neighbour_of_ours.py").write_text("WEIGHT = 2.5\n")
    (folder / "base.yaml").write_text("model: {name: m}\ndata: {train: rows.jsonl}\n")
    (elsewhere / "rows.jsonl").write_text("")
    monkeypatch.chdir(elsewhere)
    return folder


def load(project, text, *words):
    (project / "a.yaml").write_text(f"extends: base.yaml\n{text}\n")
    return loading.load(project / "a.yaml", words)


def test_paths_go_by_the_file_then_by_the_working_directory(project, tmp_path):
    loaded = load(project, "task: mine.py:Mine\nalgo: {loss: 'mine.py:Mine'}\ndata: {heldout: 'more-*.jsonl'}")
    assert loaded.data.train == str(project / "rows.jsonl")  # both folders have it
    assert loaded.data.heldout == str(project / "more-*.jsonl")
    assert loaded.algo.loss.name == f"{project / 'mine.py'}:Mine"
    assert task.load(loaded.task.name).weights == {"right": 2.5}  # which its neighbour says
    loaded = load(project, "tasks: [{name: mine.py, data: {train: other.jsonl}}]", "data.train=rows.jsonl")
    assert loaded.data.train == "rows.jsonl" and loaded.tasks[0].data.train == "other.jsonl"
    assert loaded.tasks[0].name == str(project / "mine.py")
    loaded = load(project, "task: qa\ndata: {train: /rows.jsonl}\nmodel: {name: Qwen/Qwen2.5-VL-3B-Instruct}")
    assert loaded.data.train == "/rows.jsonl" and loaded.model.name == "Qwen/Qwen2.5-VL-3B-Instruct"
    (project / "shards").mkdir()
    loaded = load(project, "task: mine.py:Mine\ndata: {train: shards@train, heldout: 'org/name@test'}")
    assert (loaded.data.train, loaded.data.heldout) == (str(project / "shards@train"), "org/name@test")
    (tmp_path / "a@b").mkdir()
    (tmp_path / "a").mkdir()
    assert split_of_folder(str(tmp_path / "a@b/rows.jsonl")) is None
    assert split_of_folder(str(tmp_path / "a@b.jsonl")) is None
    assert split_of_folder(str(tmp_path / "a@b")) == (str(tmp_path / "a"), "b")
    loaded = load(project, "task: no.py:Mine\ndata: {train: no.jsonl}")
    both = rf"looked for as {project}/no\.py and {tmp_path}/elsewhere/no\.py"
    with pytest.raises(ConfigError, match=both):
        task.load(loaded.task.name)
    assert f"{project}/no.jsonl" in searched_in("no.jsonl") and not searched_in("rows.jsonl")
    checkpoints = project / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with pytest.raises(RunError, match="has no complete checkpoint"):
        load(project, "task: qa\nmodel: {name: run}")
    for step in (1, 12):
        checkpoint.save(checkpoints, step, lambda folder: (folder / "w").write_text("x"), {}, 9)
    assert load(project, "task: qa\nmodel: {name: run}").model.name == str(checkpoints / "step-000012")
    (project / "yaml.py").write_text("raise SystemExit('the wrong one')\n")
    (project / "other.py").write_text(TASK.replace("from neighbour", "import yaml\nfrom neighbour"))
    assert task.load(f"{project}/other.py").weights == {"right": 2.5}


CONFIGS = Path(__file__).parents[2] / "configs"


def runs_of(found: Config) -> Iterator[tuple[str, Config]]:
    """Yields what may run with some settings."""
    for name, own in [("", found), *((stage.name, own) for stage, own in stages_of(found))]:
        yield name, own
        yield f"{name} sft", supervised_config(own)
        yield f"{name} dpo", preference_config(own, Named(name="dpo"))


def assert_read_back(found: Config) -> None:
    for name, own in runs_of(found):
        read = validate(plain(own))
        assert read == own and not differences(read, own), name
    written = dump(found)
    read = validate(yaml.load(written, yaml.CSafeLoader))
    assert read == found and dump(read) == written


@pytest.mark.slow
@each("name word", [*product(
    ["quickstart.yaml", "preference/reward_model.yaml"],
    ["eval.samples=0", "eval.splits=[]", "save.best=", "save.best=accuracy", "services.reference=start",
     "services.reference=ema", "algo.critic={}", "engine=vllm", "algo.guided={}", "task.extra=null"]),
    ("mixture.yaml", "eval.samples=0"), ("quickstart.yaml", "extends=stages/kimi_long2short.yaml")])
def test_settings_of_every_kind_of_run(name, word):
    assert_read_back(load_config(CONFIGS / name, ["model.name=m", word]))


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(CONFIGS) for path in shipped_configs()}), ids=str)
def test_settings_of_every_shipped_config(folder):
    tasks = {p.name: p.task for p in shipped() if p.group == str(folder)}
    for path in sorted((CONFIGS / folder).glob("*.yaml")):
        bare = path.parent.name in ("models", "engines") or path == CONFIGS / "tiny.yaml"
        base = CONFIGS / tasks.get(path.stem, "quickstart.yaml" if bare else path)
        assert_read_back(load_config(base, ["model.name=m", *([f"extends={path}"] if base != path else [])]))


@each("value", [
    "2024-01-01", "2024-01-01 10:00:00", "{1: a, true: {1.5: b}}", ".inf", ".nan", "1e-7", "!!set {a, b}",
    "!!binary aGVsbG8=", "'1e3'", "'2024-01-01'", "'a: b # c'", "null", "[[1], {}]", '"\\x85\\u2028\\0"'])
def test_values_of_every_kind(value):
    for word in ("task.extra={}", "algo.loss={{name: cispo, x: {}}}", "environment.options={{x: [{}]}}"):
        found = load_config(CONFIGS / "quickstart.yaml", [word.format(value)])
        assert repr(validate(yaml.safe_load(dump(found)))) == repr(found)


def test_values_of_python_and_derived_settings():
    found = config_of(CONFIGS / "quickstart.yaml", task={"cap": np.float32(0.5), "most": np.int64(3), "at": Path("a")})
    assert repr(found.task.model_extra) == "{'drawn': True, 'cap': 0.5, 'most': 3, 'at': 'a'}"
    assert validate(yaml.safe_load(dump(found))) == found
    with pytest.raises(ConfigError, match=r"task\.f=<built-in.*: a setting must be a string, .* a builtin_function"):
        config_of(CONFIGS / "quickstart.yaml", task={"f": print})
    found = load_config(CONFIGS / "quickstart.yaml", ["eval.samples=0"])
    with pytest.raises(ConfigError, match=r"save\.best='accuracy' keeps the checkpoint of the best evaluation"):
        derived(found, save=found.save.model_copy(update={"best": "accuracy"}))


def test_a_supervised_run_without_evaluations_goes_on(tmp_path):
    words = [f"run.dir={tmp_path}", "model.name=m", "eval.samples=0", "services.reference=start"]
    own = supervised_config(load_config(CONFIGS / "preference/reward_model.yaml", words))
    RunFolder(tmp_path).create(dump(own), own.seed)
    assert refuse_other_settings(RunFolder(tmp_path), own) == own
