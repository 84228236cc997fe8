"""The section `preset` of a preset's file, `vlrl presets`, and what a run says of needs that are not met."""

import json
from pathlib import Path

import pytest

from tests.tables import by_hand, each
from vlrl import config
from vlrl.cli.main import main
from vlrl.config import presets
from vlrl.config.schema import resumable
from vlrl.errors import ConfigError
from vlrl.tools.machine import needs
from vlrl.training.build_task import make_task

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(f"{folder}/{path.name}" for folder in presets.KINDS
               for path in (ROOT / "configs" / folder).glob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def unmet(path, *words: str) -> list[str]:
    found = config.load(ROOT / "configs" / path, words)
    return [one.need for one in needs.find(found, make_task(found))]


def test_every_file_and_need_is_known():
    assert [presets.name_of(ROOT / "configs" / name) for name in FILES] == FILES
    for name in FILES:
        found = presets.find_preset(name)
        assert found and (ROOT / "configs" / found.task).is_file(), name
        assert {need.partition(" ")[0] for need in found.needs} <= {*presets.NEEDS}
    laid = config.load(QUICKSTART, ["extends=[algorithms/gspo.yaml, algorithms/tis.yaml, curricula/sec.yaml]"])
    assert laid.presets == ("algorithms/gspo.yaml", "algorithms/tis.yaml", "curricula/sec.yaml")
    assert "preset" not in laid.model_dump() and config.validate(laid.model_dump(mode="json")) == laid
    assert resumable("presets")
    assert {*needs.CHECKS} == {*presets.NEEDS}


@each("section said", [
    ("{for: quickstart.yaml, cost: none}", "preset.paper"), ("{for: 3, cost: none, paper: x}", "preset.for=3"),
    ("{for: a, cost: none, paper: x, needs: {epsodes: why}}", "Did you mean 'episodes'?"),
    ("{for: a, cost: none, paper: x, needs: {part: why}}", "takes an argument"),
    ("{for: a, cost: none, paper: x, needs: {tokens many: why}}", "takes a number"),
    ("{for: a, cost: none, paper: x, price: 3}", "preset.price")])
def test_a_section_that_says_something_else_is_refused(tmp_path, section, said):
    (tmp_path / "own.yaml").write_text(f"preset: {section}\nalgo: {{loss: gspo}}\n")
    with pytest.raises(ConfigError, match=r"own\.yaml") as refused:
        config.load(QUICKSTART, [f"extends={tmp_path / 'own.yaml'}"])
    assert said in str(refused.value)


test_what_is_not_given_is_named = by_hand(lambda path, words: unmet(path, *words), [
    ("recall.yaml", ["extends=algorithms/gigpo.yaml"], []),
    ("quickstart.yaml", ["extends=algorithms/gigpo.yaml"], ["episodes"]),
    ("recall.yaml", ["extends=algorithms/webrl.yaml"], ["answers", "unbuilt replay of episodes"]),
    ("recall.yaml", ["extends=algorithms/g_ra.yaml"], ["gate"]),
    ("recall.yaml", ["extends=algorithms/g_ra.yaml", "task.combine=gate:accuracy>=0.5"], []),
    ("recall.yaml", ["extends=algorithms/himac.yaml"], ["prompt <plan>"]),
    ("recall.yaml", ["extends=algorithms/himac.yaml", "task.system=Write a <plan>."], []),
    ("zoom.yaml", ["extends=algorithms/thor.yaml"], ["part tool_success"]),
    ("zoom.yaml", ["extends=algorithms/thor.yaml", "task.rewards.tool_success=0"], []),
    ("quickstart.yaml", ["extends=algorithms/gdpo.yaml"], ["parts 2"]),
    ("quickstart.yaml", ["extends=algorithms/gdpo.yaml", "task.rewards.format=0.1"], []),
    ("quickstart.yaml", ["extends=algorithms/ema_grpo.yaml"], ["tasks"]),
    ("mixture.yaml", ["extends=algorithms/ema_grpo.yaml"], []),
    ("quickstart.yaml", ["extends=algorithms/tis.yaml"], ["mismatch"]),
    ("quickstart.yaml", ["extends=algorithms/tis.yaml", "model.dtype=bfloat16"], []),
    ("quickstart.yaml", ["extends=algorithms/decoupled_ppo.yaml"], ["setting async.max_staleness"]),
    ("quickstart.yaml", ["extends=algorithms/decoupled_ppo.yaml", "async.max_staleness=1"], []),
    ("quickstart.yaml", ["extends=algorithms/expo.yaml"], ["writes <answer>"])])


def test_needs_of_stages_and_a_preset_of_before(tmp_path):
    path = ROOT / "configs" / "stages" / "vision_r1.yaml"
    assert [one.need for one in needs.of_stages(config.load(path))] == ["setting stages.0.data.train"]
    assert needs.of_stages(config.load(path, ["stages.0.data.train=cold.jsonl"])) == []
    with pytest.raises(ConfigError, match=r"It is now algorithms/rorecomp\.yaml, which has the buffer"):
        config.load(QUICKSTART, ["extends=algorithms/rorecomp_buffer.yaml"])


def test_the_command_lists_and_filters_them(capsys):
    def rows(*words: str):
        assert main(["presets", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)
    every = rows()
    assert len(every) == len(FILES) and {*every[0]} == {"name", "kind", "for", "idea", "needs", "cost", "paper"}
    assert all(row["idea"] for row in every)
    assert {row["kind"] for row in every} == {"algorithm", "curriculum", "stages"}
    assert [row["name"] for row in rows("gspo")] == ["gspo", "gspo_token", "luspo"]
    assert {row["for"] for row in rows("--for", "recall")} == {"recall.yaml"}
    assert rows("--for", "recall") == rows("--for", "recall.yaml")
    assert main(["presets", "--for", "recal"]) == 1 and "Did you mean 'recall'?" in capsys.readouterr().err
