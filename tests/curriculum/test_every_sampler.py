"""Every sampler alike: a resumed one draws the same, options out of range are refused by name."""

import pytest

from tests.curriculum.drives import drive, resumed
from tests.curriculum.test_staged import CARRYING, FORMS
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import SAMPLERS, Prompts, make
from vlrl.errors import ConfigError

FIELDS = {"category": list("abc" * 20), "task": list("abc" * 20), "level": list("a" * 30 + "b" * 30),
          "difficulty": [None if i % 3 else i / 60 for i in range(60)],
          "angle": [i * 7 % 60 / 30 - 1 for i in range(60)], "form": ["yes_no", "choice", "text", "number"] * 15}
CASES = [("sec", {}), ("dump", {}), ("domain_weighted", {}), ("recap", {}), ("sws", {}),
         ("prioritised", {"by": "level"}), ("rlcs", {"by": "level"}), ("replay", {"buffer": 8}),
         ("lifecycle", {"rest": 2}), ("limr", {"epochs": 2}), ("gaussian", {"solved": 0.6}), ("easy_to_hard", {}),
         ("adcl", {"batches": 3}), ("adcl", {"batches": 2, "by": None}), ("hard_focus", {"after": 3, "share": 0.3}),
         ("staged", {"stages": FORMS}), ("staged", {"stages": CARRYING, "window": 3}),
         ("retrospective", {"carry": 0.4}),
         ("gain_rl", {"spread": 4.0}), ("gvm", {}), ("uniform", {}), ("alp_gmm", {"fit_every": 12, "components": 3}),
         ("weakness", {})]
DISTINCT = ("prioritised", "rlcs", "replay", "lifecycle", "limr")


def prompts():
    return Prompts(60, 5, lambda name: FIELDS.get(name, [None] * 60), RolloutSettings(prompts_per_step=4),
                   {"count": (1.0, 5.0), "size": (0.0, 1.0)})


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_resumed_sampler_goes_on_exactly(name, options, tmp_path):
    number, count, ends = (8, 6, (5,)) if name in ("alp_gmm", "weakness") else (14, 16, (4, 11))
    whole = drive(SAMPLERS[name], prompts, options, number, count)
    for at in ends:
        assert resumed(SAMPLERS[name], prompts, options, number, count, tmp_path / str(at), at) == whole, at
    for call in whole[::2] if name in DISTINCT else ():
        assert len({d.index for d in call[:count]}) == count


WRONG = [
    ("sec", "alpha", 1.5), ("sec", "tau", 0), ("sec", "bins", 1), ("sec", "by", ""), ("sec", "alhpa", 0.2),
    ("dump", "window", 0), ("dump", "window", 10**6), ("domain_weighted", "epsilon", -1), ("sws", "floor", 2),
    ("recap", "fast", 0.95), ("recap", "target", 0), ("prioritised", "prior", 2), ("prioritised", "strength", 1e7),
    ("replay", "share", -0.1), ("replay", "buffer", 0), ("rlcs", "tier_by", "level"), ("rlcs", "decay", 1),
    ("lifecycle", "patience", 0), ("limr", "epochs", 21), ("limr", "threshold", 1), ("gaussian", "std", 0.0),
    ("gaussian", "mean", "x"), ("gaussian", "solved", 1.5), ("gaussian", "by", 1.0), ("adcl", "probe_size", 0),
    ("hard_focus", "share", 0), ("hard_focus", "share", 1.1), ("hard_focus", "after", -1),
    ("hard_focus", "group_size", 1), ("retrospective", "carry", 2), ("alp_gmm", "fit_every", 3),
    ("alp_gmm", "components", 1), ("alp_gmm", "explore", 1.5), ("alp_gmm", "memory", 0), ("weakness", "rate", 0),
    ("weakness", "explore", -0.1), ("easy_to_hard", "descending", "x"), ("gain_rl", "spread", 0),
    ("gain_rl", "target", 1.1), ("gain_rl", "sensitivity", -1), ("gain_rl", "spread", True), ("gvm", "least", 0),
    ("gvm", "prior", 2), ("gvm", "probe", -1), ("gvm", "alpha", -1)]


def test_an_option_out_of_range_is_refused():
    for name, option, value in WRONG:
        more = ".*Did you mean 'alpha'" if option == "alhpa" else ""
        with pytest.raises(ConfigError, match=rf"curriculum\.{option}={value!r}{more}"):
            make(CurriculumSettings.model_validate({"name": name, option: value}), prompts())
