"""tools/evaluation/settings.py: which combinations are drawn, and which would not act."""

import pytest

from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.tools.evaluation.settings import Grid, seeds_of

CONFIG = validate({"task": "x", "model": {"name": "x"}, "seed": 3})


def names(**asked):
    return [(d.name, d.seeds, d.answers) for d in Grid(**asked).settings(CONFIG)]


def test_combinations_and_seeds():
    assert names() == [("greedy", (3,), 1)]
    assert names(answers=4) == [("temperature 1", (3,), 4)]
    assert names(seeds=(1, 2)) == [("temperature 1", (1, 2), 1)]
    assert names(answers=4, temperatures=(0.0, 0.5), top_ps=(0.9, 1.0), max_new_tokens=(8,)) == [
        ("greedy, 8 tokens", (3,), 1), ("temperature 0.5, top_p 0.9, 8 tokens", (3,), 4),
        ("temperature 0.5, top_p 1, 8 tokens", (3,), 4)]
    assert names(wordings=2) == [("greedy, wording 1", (3,), 1), ("greedy, wording 2", (3,), 1)]
    assert names(temperatures=(0.0,), seeds=(1, 2), repeats_differ=True) == [("greedy", (1, 2), 1)]
    probed = Grid(probes=("reworded",), max_new_tokens=(8, 9)).settings(CONFIG)
    assert [(d.name, d.probe, d.plain) for d in probed] == [
        ("greedy, 8 tokens", "", ""), ("greedy, 8 tokens, reworded", "reworded", "greedy, 8 tokens"),
        ("greedy, 9 tokens", "", ""), ("greedy, 9 tokens, reworded", "reworded", "greedy, 9 tokens")]
    warm = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"temperature": 0.4})})
    assert Grid(answers=2).settings(warm)[0].temperature == 0.4
    sampling = Grid(temperatures=(0.7,), top_ps=(0.9,), max_new_tokens=(5,)).settings(CONFIG)[0].sampling(CONFIG)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.7, 0.9, 5)
    for asked, said in (
            ({"answers": 4, "temperatures": (0.0,)}, "--answers 4 with --temperature 0"),
            ({"seeds": (1, 2), "temperatures": (0.0,)}, "--seeds 1,2 with --temperature 0"),
            ({"top_ps": (0.9,), "temperatures": (0.0,)}, "--top-p 0.9 with --temperature 0"),
            ({"temperatures": (1.0, 1.0)}, "--temperature: 1.0 is given twice"),
            ({"seeds": (1, 1)}, "--seeds: 1 is given twice"),
            ({"probes": ("blank",)}, "--probe 'blank' is not known. Did you mean 'blank_media'"),
            ({"probes": ("reworded", "reworded")}, "--probe: reworded is given twice")):
        with pytest.raises(ConfigError, match=said):
            names(**asked)
    assert seeds_of(None, 4) == () and seeds_of("3", 4) == (4, 5, 6) and seeds_of("9,2", 4) == (9, 2)
    assert seeds_of("9,", 4) == (9,)
    for wrong in ("x", "0", "1.5", "-1,2", ",", "9999"):
        with pytest.raises(ConfigError, match="--seeds"):
            seeds_of(wrong, 4)
