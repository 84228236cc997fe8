"""A setting that names a function: its options, from the command line to the call."""

from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from tests.tables import each
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.named import bind
from vlrl.algo.objective import Objective
from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Named
from vlrl.errors import ConfigError

BASE = "task: grounding\nmodel: {name: x}\n"


def plain(x, cap: float = 5.0, side: Literal["low", "high"] = "low", count: Annotated[int, Field(ge=1)] = 1,
          clip_high: float = 0.2):
    return x, cap, side, count, clip_high


class Stateful:
    requires = frozenset({"stat:top:{k}"})

    def __init__(self, k: int, width: float = 1.0):
        if width == 7:
            raise ValueError("a width of 7 brings bad luck")
        self.k, self.seen = k, 0

    def __call__(self, x):
        self.seen += 1
        return x * self.k

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


TABLE = {"plain": plain, "stateful": Stateful}


def test_options_reach_the_function():
    assert bind("algo.loss", Named(name="plain"), TABLE)(3) == (3, 5.0, "low", 1, 0.2)
    assert bind("algo.loss", Named(name="plain", cap=2, side="high"), TABLE, clip_high=0.3)(3) == (3, 2, "high", 1, 0.3)
    assert bind("algo.loss", Named(name="plain", clip_high=1), TABLE, clip_high=0.3, clip_low=0.5)(3)[-1] == 1
    bound = bind("algo.loss", Named(name="stateful", k=3), TABLE)
    assert bound(2) == 6 and bound.requires == {"stat:top:3"} and bound.state_dict() == {"seen": 1}
    bound.load_state_dict({"seen": 8})
    bound.load_state_dict({})
    assert bound.function.seen == 8 and bind("x", Named(name="plain"), TABLE).state_dict() == {}


@each("named says", [
    (Named(name="plane"), "algo.loss='plane' is not known. Did you mean 'plain'"),
    (Named(name="plain", cpa=3), "algo.loss.cpa=3: 'plain' has no option 'cpa'. Did you mean 'cap'.*cap, side, count"),
    (Named(name="plain", cap="much"), "algo.loss.cap='much': Input should be a valid number"),
    (Named(name="plain", cap=True), "algo.loss.cap=True: give a number, not true or false"),
    (Named(name="plain", cap=float("nan")), "algo.loss.cap=nan: Input should be a finite number"),
    (Named(name="plain", side="left"), "algo.loss.side='left': Input should be 'low' or 'high'"),
    (Named(name="plain", count=0), "algo.loss.count=0: Input should be greater than or equal to 1"),
    (Named(name="plain", x=0), "has no option 'x'"),
    (Named(name="stateful"), "algo.loss='stateful' needs a value for algo.loss.k"),
    (Named(name="stateful", k=1, width=7), "algo.loss='stateful': a width of 7 brings bad luck"),
])
def test_what_cannot_be_bound(named, says):
    with pytest.raises(ConfigError, match=says):
        bind("algo.loss", named, TABLE)


@pytest.fixture
def loaded(tmp_path):
    """algo of a config made of files, one extending the next, and words."""
    def load(*texts, words=()):
        for i, text in enumerate(texts):
            first = f"extends: {i - 1}.yaml\n" if i else BASE
            (tmp_path / f"{i}.yaml").write_text(first + text)
        return config.load(tmp_path / f"{len(texts) - 1}.yaml", words)
    return load


GSPO = "algo: {loss: {name: gspo, clip_high: 4.0e-4}}\n"


@each("texts words loss", [
    (["algo: {loss: cispo}\n"], [], "cispo"),
    ([GSPO], [], {"name": "gspo", "clip_high": 4e-4}),
    ([GSPO, "algo: {loss: {clip_low: 0.1}}\n"], [], {"name": "gspo", "clip_high": 4e-4, "clip_low": 0.1}),
    ([GSPO, "algo: {loss: cispo}\n"], [], "cispo"),
    ([GSPO, "algo: {loss: {name: cispo, cap: 3}}\n"], [], {"name": "cispo", "cap": 3}),
    (["algo: {loss: gspo}\n", "algo: {loss: {clip_low: 0.1}}\n"], [], {"name": "gspo", "clip_low": 0.1}),
    ([GSPO], ["algo.loss.name=cispo", "algo.loss.cap=5"], {"name": "cispo", "cap": 5}),
    ([GSPO], ["algo.loss.cap=5", "algo.loss=cispo"], {"name": "cispo", "cap": 5}),
    ([GSPO], ["algo.loss.clip_high=1"], {"name": "gspo", "clip_high": 1}),
    ([""], ["algo.loss.dual_clip=3"], {"name": "ppo_clip", "dual_clip": 3}),
    ([""], ["algo.loss={name: cispo, cap: 5}"], {"name": "cispo", "cap": 5}),
])
def test_names_and_options_are_merged(loaded, texts, words, loss):
    found = loaded(*texts, words=words)
    assert found.algo.model_dump()["loss"] == loss
    assert config.validate(yaml.safe_load(config.dump(found))) == found


def test_a_clip_on_the_command_line_holds_over_the_preset(tmp_path):
    words = ["algo.clip_low=0.01", "algo.clip_high=0.02"]
    for preset in ("dapo", "gspo", "gmpo"):
        for text, more in ((BASE, [f"extends=algorithms/{preset}.yaml"]),
                           (f"extends: [algorithms/{preset}.yaml]\n{BASE}", [])):
            (tmp_path / "run.yaml").write_text(text)
            found = config.load(tmp_path / "run.yaml", [*words, *more])
            options = Objective.of(found.algo).term.options
            assert (options["clip_low"], options["clip_high"]) == (0.01, 0.02), (preset, more)
            assert config.validate(yaml.safe_load(config.dump(found))) == found


def test_of_two_words_for_a_bound_the_later_holds_and_two_values_in_one_place_are_refused(loaded):
    found = loaded("algo: {clip_low: 0.1, clip_high: 0.3}\n", GSPO, words=["algo.loss.clip_low=0.5"])
    assert Objective.of(found.algo).term.options == {"clip_low": 0.5, "clip_high": 4e-4}
    assert (found.algo.clip_low, found.algo.clip_high) == (None, None)
    values = {"clip_low": 0.1, "loss": {"name": "gspo", "clip_low": 0.2}}
    with pytest.raises(ConfigError, match=r"algo.clip_low=0.1 and algo.loss.clip_low=0.2 set the same bound"):
        Objective.of(AlgoSettings.model_validate(values))


@each("preset", ["opo", "sapo", "dppo", "vespo", "kimi", "nft", "pacs", "oreal", "kl_cov"])
def test_a_clip_is_refused_where_the_term_has_none(loaded, preset):
    found = loaded("", words=["algo.clip_high=0.3", f"extends=algorithms/{preset}.yaml"])
    with pytest.raises(ConfigError, match=r"algo.clip_high=0.3.*algo.loss='\w+' does not clip.*ppo_clip, .*gspo"):
        Objective.of(found.algo)


def test_a_list_of_parents_and_lists_of_names(loaded, tmp_path):
    loaded(GSPO)
    (tmp_path / "other.yaml").write_text("algo: {loss: cispo, weights: top_entropy}\n")
    (tmp_path / "own.yaml").write_text("extends: [0.yaml, other.yaml]\nsteps: 3\n")
    found = config.load(tmp_path / "own.yaml", ["algo.shaping=[overlong, {name: kimi_length, weight: 2}]"])
    assert found.algo.loss.name == "cispo" and found.steps == 3 and [w.name for w in found.algo.weights] == [
        "top_entropy"]
    assert found.algo.shaping == (Named(name="overlong"), Named(name="kimi_length", weight=2))
    assert config.load(tmp_path / "0.yaml", [f"extends={tmp_path}/other.yaml"]).algo.loss.name == "cispo"
    with pytest.raises(ConfigError, match=r"'nope.yaml' does not exist"):
        config.load(tmp_path / "0.yaml", ["extends=[nope.yaml]"])
    a, b = loaded(GSPO), loaded(GSPO, words=["algo.loss.clip_high=1", "algo.advantage=rloo"])
    assert config.differences(a, b) == ["algo.advantage: 'grpo' -> 'rloo'", "algo.loss.clip_high: 0.0004 -> 1"]


def test_what_is_no_name_and_a_whole_algorithm_are_checked_before_anything_is_loaded(loaded):
    for word, says in (
            ("algo.loss=3", "algo.loss=3: give a name, or a mapping with 'name' and its options"),
            ("algo.weights=[3]", r"algo.weights.0=3: give a name"),
            ("algo.los=cispo", "unknown setting 'algo.los'.*Did you mean 'loss'"),
            ("algo.loss.name=", "algo.loss.name=''"),
            ("algo.weights=[top_entropi]", "algo.weights.0='top_entropi' is not known. Did you mean 'top_entropy'"),
            ("algo.correction=token_mak", "algo.correction='token_mak' is not known. Did you mean 'token_mask'"),
            ("algo.entropy={name: bonus, coeff: 3}", "algo.entropy.coeff=3: 'bonus' has no option.*Did you mean"),
            ("algo.reference={name: reset, every: 0}", "algo.reference='reset': with every=0 and without kl")):
        with pytest.raises(ConfigError, match=says):
            Algorithm(loaded("", words=[word]))
