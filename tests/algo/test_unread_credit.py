"""Which shapings act on the gradient, under which advantage and policy term, and that the others are named."""

import pytest

from tests.algo.test_preset_gradients import FOLDER, apart, slope
from vlrl import config
from vlrl.algo.tables import ADVANTAGES, LOSSES
from vlrl.training import inert

SHAPES = ["{name: overlong, limit: 8, buffer: 4}", "cosine"]
"""Two that change some reward, and take some across 0.4 and across the mean of its group."""
SOLVED = "{name: oreal, weighted: false, negative: 0}"
NEEDS = {**{name: ["algo.critic={}"] for name in ("gae", "turn_gae", "bilevel_gae", "macro_gae")},
         "deepsearch": ["rollout.branch.search={}"]}
COMBINATIONS = [
    *[([f"algo.advantage={name}", *NEEDS.get(name, ())], getattr(ADVANTAGES[name], "alone", None) is None)
      for name in ADVANTAGES if name != "gdpo"],
    *[([f"algo.loss={name}"], name not in ("nft", "pacs")) for name in LOSSES if name != "supervised"],
    (["algo.advantage={name: nsr, part: iou}"], False), (["algo.advantage={name: w_reinforce, correct: 0.4}"], True),
    (["algo.advantage=nsr", "algo.batch=rorecomp"], False),
    (["algo.advantage=nsr", "algo.batch={name: rorecomp, correct: 0.4}"], True),
    (["algo.loss=oreal", "algo.advantage=nsr"], False), ([f"algo.loss={SOLVED}"], False),
    (["algo.loss={name: oreal, weighted: false}"], True), (["algo.loss={name: oreal, negative: 0}"], True),
    (["algo.loss=nft", "algo.weights=[stcr, difficulty, top_entropy]"], False),
    *[([f"algo.loss={loss}", f"algo.weights=[{name}]"], True) for loss in ("nft", "pacs")
      for name in ("hicra", "dads", "off_policy_sequence_mask")],
    (["algo.loss=pacs", "algo.kl_coef=0.1", "algo.kl_weights=[dads]"], True),
    (["algo.loss=nft", "algo.advantage=nsr", "algo.weights=[hicra]"], False),
    (["algo.loss=nft", "algo.batch=rorecomp"], False), (["algo.loss=nft", "algo.batch=pf_ppo"], True),
    (["algo.loss=nft", "algo.batch={name: rorecomp, correct: 0.4}"], True)]


def test_a_shaping_acts_or_is_named():
    for words, acts in COMBINATIONS:
        for shape in SHAPES:
            shaped = (*words, f"algo.shaping=[{shape}]")
            assert (apart(slope(shaped, False), slope((*words,), False)) > 1e-12) == acts, shaped
            found = inert.find(config.load(FOLDER / "quickstart.yaml", shaped))
            assert ("algo.shaping.0" not in {one.setting for one in found}) == acts, shaped


@pytest.mark.parametrize("words", [["algo.loss=nft"], ["algo.loss=pacs"], [f"algo.loss={SOLVED}"]])
def test_an_advantage_that_nothing_reads_is_named(words):
    more = (*words, "algo.advantage=maxrl")
    assert apart(slope(more, False), slope((*words,), False)) == 0
    found = inert.find(config.load(FOLDER / "quickstart.yaml", more))
    assert "algo.advantage" in {one.setting for one in found}


@pytest.mark.parametrize(("last", "replaces"), [("cosine", True), ("{name: cosine, part: iou}", True),
                                                ("{name: cosine, correct: 0.4}", False), ("dast", False)])
def test_cosine_puts_a_reward_of_its_own_in_the_place_of_others(last, replaces):
    both = f"algo.shaping=[{SHAPES[0]}, {last}]"
    assert (apart(slope((both,), False), slope((f"algo.shaping=[{last}]",), False)) < 1e-12) == replaces
    found = inert.find(config.load(FOLDER / "quickstart.yaml", [both]))
    assert ("algo.shaping.0" in {one.setting for one in found}) == replaces
