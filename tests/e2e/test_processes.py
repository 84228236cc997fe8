"""Several processes give what one gives (gloo)."""

import pytest

from tests.conftest import TWO
from tests.e2e.replay import replayed
from tests.e2e.runs import FEW, finished, metrics, run, write_config
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow


SEVERAL = {"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, "minibatches": 2}
SMALL = {"tokens_per_batch": 120, "max_grad_norm": 1e9}
EPISODES = {"limits": {"environment_errors": 1.0}, "train": {"tokens_per_batch": 300, "max_grad_norm": 1e9}}
VISION = {"lora": {"rank": 4, "target": "vision_language"}}
REPLAYS = {
    "the other family": ("dealt", {}),  # that of this one: tests/algo/test_invariance.py
    "episodes": ("episodes", {"episode": {"history": "last:1"}, **EPISODES}),
    "sharded episodes": ("sharded episodes", {"episode": {"history": "full"}, **EPISODES}),
    "a rank without a group": ("idle", {}),
    "images on one rank, text on the other": ("unequal", {"train": SMALL}),
    "all answers of a rank cut off": ("truncated", {"algo": {"mask_truncated": True, "kl_coef": 0.1},
                                                    "rollout": SEVERAL}),
    "adapters of the vision tower unused on a rank": ("unequal", {"model": VISION}),
    "balanced": ("balanced", {"rollout": SEVERAL}),
    # prime-rl#1959 and #1918, miles#2406, ms-swift#9655, transformers#37186: the shards of the vision tower were asked
    # for by one rank alone, and all waited
    "sharded, several rows": ("sharded", {"train": SMALL, "model": {
        "train": ["language", "merger", "vision"], "gradient_checkpointing": True}}),
    "sharded, padded": ("sharded", {"train": {"packing": "padded", "tokens_per_batch": 300, "max_grad_norm": 1e9}}),
    "sharded, lora, kl": ("sharded", {"model": VISION, "algo": {"kl_coef": 0.1}, "rollout": SEVERAL})}


@pytest.fixture(scope="module")
def found(tiny_models, tmp_path_factory):
    """What one process and what two find in each case."""
    cases = {}
    for case, (how, more) in REPLAYS.items():
        model = str(tiny_models[TWO[case == "the other family"]])
        cases[case] = model, how, more | {"model": {"name": model, **more["model"]}} if "model" in more else more
    return replayed(tmp_path_factory.mktemp("replays"), cases)


def assert_equal(one, two):
    gaps = {name for name in one["stats"] if name.startswith("mismatch/")}  # rounding of log-probabilities, some 1e-6
    assert {k: two["stats"][k] for k in gaps} == pytest.approx({k: one["stats"][k] for k in gaps}, abs=1e-5)
    one, two = ({**run, "stats": {k: v for k, v in run["stats"].items() if k not in gaps}} for run in (one, two))
    assert two["stats"] == pytest.approx(one["stats"], rel=1e-5, abs=1e-7)
    assert len(one["gradients"]) == len(two["gradients"])
    for whole, of_two in zip(one["gradients"], two["gradients"], strict=True):
        assert whole.keys() == of_two.keys()
        for name, gradient in whole.items():
            assert (of_two[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-9, name


@pytest.mark.parametrize("case", REPLAYS)
def test_gradients_of_one_and_two_processes(found, case):
    assert_equal(*found[case])


def test_groups_move_until_the_loads_are_even(found):
    """All images on one process, all texts on the other: every rollout is trained on once."""
    one, two = found["balanced"]
    before = two["before"]
    assert two["balance/imbalance"] < 1.25 < 1.5 < max(before) / (sum(before) / 2)
    assert all(two["kept"]) and sorted([*two["kept"][0], *two["kept"][1]]) == sorted(one["kept"][0])
    lengths = dict(zip(one["kept"][0], one["lengths"][0], strict=True))
    for kept, of_two in zip(two["kept"], two["lengths"], strict=True):
        assert [lengths[key] for key in kept] == of_two


def test_a_whole_run_with_two_processes(pair, tmp_path):
    """Same groups, same rewards, nearly the same numbers; one run folder."""
    finished(pair.config, tmp_path / "one", *FEW)
    one, two = metrics(tmp_path / "one"), metrics(pair.whole)
    assert [m["step"] for m in two] == list(range(5))
    for name in ("reward/mean", "loss", "grad_norm", "entropy", "completion/length_mean"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-3, abs=1e-5), name
    assert len(list((pair.whole / "rollouts").glob("step-*-rank-*.parquet"))) == 10
    evals = metrics(pair.whole, "eval.jsonl")
    assert [(e["step"], e["n"]) for e in evals] == [(0, 2), (2, 2), (4, 2), (5, 2)]


def test_unequal_prompts_are_stored_once_by_who_trains_on_them(tiny_models, tmp_path):
    """Every second picture is large, so one process draws all of these."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    task.write_text(task.read_text().replace("(64, 64)", "(64, 64) if i % 2 else (128, 128)"))
    words = ("steps=2", "curriculum.name=sequential", "eval.samples=0", "rollout.prompts_per_step=6")
    for name, more in (("two", ()), ("off", ("train.balance=false",))):
        finished(config, tmp_path / name, *words, *more, processes=2)
    found, plain = (RunFolder(tmp_path / name).rollouts(0).to_pylist() for name in ("two", "off"))
    keys = [(r["group_id"], r["index"]) for r in found]
    assert sorted(keys) == sorted((r["group_id"], r["index"]) for r in plain) and len(set(keys)) == len(keys) == 24
    assert all(len(r["trainer_logprobs"]) == len(r["token_ids"]) and r["media"][0]["hash"] for r in found)
    two, off = metrics(tmp_path / "two"), metrics(tmp_path / "off")
    assert 1 <= two[0]["balance/imbalance"] < 1.35 and "balance/imbalance" not in off[0]
    assert two[0]["grad_norm"] == pytest.approx(off[0]["grad_norm"], rel=1e-4)


def test_an_error_on_one_process_ends_all_with_its_message(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    task.write_text(task.read_text().replace("Media(source=", "Media(source='gone.png' if i == 1 else "))
    done = run(config, tmp_path / "run", "curriculum.name=sequential", "eval.samples=0", processes=2)
    assert done.returncode != 0
    assert done.stderr.count("error: ") >= 2 and "gone.png" in done.stderr
    assert "closed by peer" not in done.stderr and "gloo" not in done.stderr


def test_fewer_prompts_than_processes_nothing_kept_and_a_tracker(tiny_models, tmp_path):
    """A tracker ends no process before what is closed after it, which asks the group of the processes."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    finished(config, tmp_path / "run", "steps=2", "rollout.prompts_per_step=1", "curriculum.keep=mixed",
             "curriculum.max_refills=1", "eval.samples=1", "log.trackers=[tensorboard]", processes=2)
    assert [m["step"] for m in metrics(tmp_path / "run")] == [0, 1]
    assert RunFolder(tmp_path / "run").last_heartbeat()["state"] == "finished"
    assert [*(tmp_path / "run").rglob("events.out.tfevents*")]
