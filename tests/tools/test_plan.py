"""`vlrl plan`: its arithmetic by hand, parameter counts of released models, that its advice holds, and episodes."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.cli.test_playing_episodes import TASK
from vlrl import config as configs
from vlrl.cli.main import main
from vlrl.config.episodes import EpisodeSettings
from vlrl.errors import ConfigError, DataError
from vlrl.tools.machine import dryrun, memory, plan
from vlrl.tools.machine import plan_advice as planadvice
from vlrl.tools.machine.gpu_specs import CARDS, card_of
from vlrl.tools.play import episode_lengths
from vlrl.tools.play.episode_lengths import EpisodeLength, ObservationStats

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
THREE, SEVEN = (str(CONFIGS / "models" / f"qwen2_5_vl_{size}.yaml") for size in ("3b", "7b"))
WORDS = ["task=digits"]
GIB = memory.GIB
H100, RTX_4090, L4 = (card for name in ("H100", "RTX 4090", "L4") if (card := card_of(name)))


@cache
def made(path, words=(), gpus=1, card=H100, gib=None, **more):
    return plan.plan(configs.load(path, [*WORDS, *words]), gpus, card, gib, **more)


def test_adapters_by_name_and_epochs_are_in_the_plan():
    named = made(THREE, ("model.lora.target=[q_proj, down_proj]", "epochs=2"))
    hidden, inner, layers, rank = 2048, 11008, 36, 32
    tower = 32 * rank * (3420 + 1280)  # its down_proj: 32 blocks
    assert named.parameters[0] == layers * rank * (2 * hidden + inner + hidden) + tower
    assert named.memory.trained == 4 * named.parameters[0]
    said = " ".join(plan.render(named))
    assert "note: epochs=2: ceil(2 x rows / 32) steps" in said
    assert "down_proj names layers of language and vision" in said
    assert not made(THREE, ("model.lora.target=q_proj",)).notes  # its tower has a qkv
    with pytest.raises(ConfigError, match=r"q_prooj.*Did you mean 'q_proj'"):
        made(THREE, ("model.lora.target=q_prooj",))


def test_a_card_is_found_by_its_name():
    for said, name in (
            ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200"),
            ("NVIDIA H20", "H20"), ("NVIDIA GH200 480GB", "GH200"), ("rtx4090", "RTX 4090"),
            ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A10G", "A10G"), ("NVIDIA L40S", "L40S")):
        found = card_of(said)
        assert found and found.name == name, (said, name)
    for name in ("Riva 128", "NVIDIA RTX A4000", "RTX A3000", "NVIDIA RTX A1000 Laptop GPU", "A1"):  # no A40, A30, A100
        assert card_of(name) is None, name
    assert all(card_of(card.name) is card for card in CARDS)


def test_shapes_have_the_published_number_of_parameters(tmp_path):
    for name, parameters in (
            ("Qwen/Qwen2.5-VL-32B-Instruct", 33_452_718_336), ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032)):
        shape = plan.architecture(name)
        model = memory._built(type(shape), shape.to_json_string(use_diff=False))
        assert sum(p.numel() for p in model.parameters()) == parameters, (name, parameters)
    shape = plan.architecture("Qwen/Qwen2.5-VL-3B-Instruct")
    shape.save_pretrained(tmp_path)
    assert plan.architecture(str(tmp_path)).text_config.hidden_size == 2048
    with pytest.raises(plan.ConfigError, match=r"model\.name=.*nowhere.*config\.json"):
        plan.architecture(str(tmp_path / "nowhere"))


def test_the_peak_is_the_estimate_and_what_cuda_takes():
    found = made(THREE)
    config = configs.load(THREE, WORDS)
    told = memory.estimate(config, plan.architecture(config.model.name), device="cuda")
    assert found.peak == told.total + GIB and found.engine == 0
    assert found.fits and not found.tight
    asleep, awake = made(THREE, ("engine=vllm",)), made(THREE, ("engine=vllm", "engine.sleep=false"))
    assert asleep.engine == awake.engine == 24 * GIB  # 0.3 of 80
    assert awake.peak == awake.memory.total + 25 * GIB
    assert asleep.peak == max(asleep.memory.total, asleep.memory.resident + 24 * GIB) + GIB
    assert asleep.memory.cache == 0
    assert made(THREE, gpus=8).peak == made(THREE).peak
    short = made(THREE, prompt_tokens=400)
    assert (short.prompt, short.visual) == (400, 400)
    with pytest.raises(plan.ConfigError, match=r"--visual-tokens 500.*--prompt-tokens 400"):
        made(THREE, prompt_tokens=400, visual_tokens=500)
    # 3B: 36 layers x 2 heads x 128 x (key + value) x 2 bytes = 36,864 bytes a token; a group of 8 shares 1,536 tokens
    room = 0.1 * 80 * GIB - 3_754_622_976 * 2 - 1.5 * GIB
    assert room < 0 and made(THREE, ("engine=vllm", "engine.memory=0.1")).side_by_side == 0
    assert not made(THREE, ("engine=vllm", "engine.memory=0.1")).fits
    found = made(THREE, ("engine=vllm", "engine.memory=0.15", "engine.max_seqs=10000"))
    weights = found.parameters[1] * 2
    assert found.side_by_side == int((0.15 * 80 * GIB - weights - 1.5 * GIB) // (36_864 * (1536 / 8 + 512)))


def test_shards_by_hand():
    words = ("model.lora.rank=0", "engine=vllm_server", "train.sharding=fsdp2")
    whole, one = made(SEVEN, words[:2], gpus=8), made(SEVEN, words, gpus=8)
    for name in ("trained", "frozen", "optimizer", "gradients"):
        assert getattr(one.memory, name) == -(-getattr(whole.memory, name) // 8)
    assert one.memory.activations == whole.memory.activations
    # outside the layers: two matrices of 152,064 x 3,584, the last norm and the vision tower; a layer is 233,057,792
    total, layer = 8_292_166_656, 233_057_792
    gathered = (total - 28 * layer + 2 * layer) / total
    held = whole.memory.trained + whole.memory.frozen
    assert one.memory.block - whole.memory.block == pytest.approx(held * gathered, rel=1e-6)
    assert not whole.fits and one.fits
    half = made(SEVEN, (*words, "train.gather=compute"), gpus=8)
    assert half.memory.block < one.memory.block
    assert made(SEVEN, (*words, "train.cpu_offload=true"), gpus=8).memory.resident == 0
    words = ("model.lora.rank=0", "train.sharding=fsdp2")
    alone, one = made(SEVEN, words[:1], gpus=8).memory, made(SEVEN, words, gpus=8).memory
    assert one.token - alone.token == one.prefill - alone.prefill == alone.trained + alone.frozen
    words = ("model.lora.rank=0", "engine=vllm_server")
    assert made(SEVEN, (*words, "train.sharding=fsdp2")).memory == made(SEVEN, words).memory


def test_deepspeed_by_hand():
    """AdamW holds a copy of its share of the trainable parameters, and a bucket has 2**26 numbers."""
    bucket = 4 * 2**26
    alone = made(SEVEN, ("model.lora.rank=0",), gpus=8).memory
    two = made(SEVEN, ("model.lora.rank=0", "train.sharding=zero2"), gpus=8).memory
    three = made(SEVEN, ("model.lora.rank=0", "train.sharding=zero3"), gpus=8).memory
    frozen, learn = alone.frozen, alone.trained
    assert learn == 4 * 7_615_616_512 and frozen > 0
    assert (two.trained, two.optimizer, two.gradients) == (learn + learn / 8, learn / 4, learn / 4 + bucket)
    assert (three.trained, three.optimizer, three.gradients) == (learn / 4, learn / 4, learn / 4 + bucket)
    assert (two.frozen, three.frozen) == (frozen, frozen / 8)
    assert two.token == alone.token and three.token == alone.token + learn + frozen
    fsdp = made(SEVEN, ("model.lora.rank=0", "train.sharding=fsdp2"), gpus=8).memory
    assert three.block == fsdp.block and three.casts == fsdp.casts
    words = ("model.lora.rank=0", "algo.kl_coef=0.1")
    alone, three = (made(SEVEN, (*words, *more), gpus=8).memory for more in ((), ("train.sharding=zero3",)))
    assert three.reference == alone.reference > 0


@pytest.mark.slow
def test_every_change_it_names_fits_when_it_is_made():
    words = [*WORDS, "model.lora.rank=0"]
    before = plan.plan(configs.load(SEVEN, words), 1, H100)
    assert not before.fits
    found = planadvice.changes(SEVEN, words, before)
    assert found
    for change in found:
        assert plan.plan(configs.load(SEVEN, [*words, *change.words]), 1, H100).fits, change.words
    words = [*WORDS, "model.lora.rank=0", "model.gradient_checkpointing=false"]
    before = plan.plan(configs.load(SEVEN, words), 1, RTX_4090)
    (found,) = planadvice.changes(SEVEN, words, before)
    assert len(found.words) > 1 and found.plan.fits
    assert plan.plan(configs.load(SEVEN, [*words, *found.words]), 1, RTX_4090).fits
    words = [*WORDS]
    before = plan.plan(configs.load(SEVEN, words), 1, L4, 2.0)
    assert not before.fits and planadvice.changes(SEVEN, words, before) == []
    assert "smaller model" in planadvice.render_changes([])[0]


@pytest.mark.slow
def test_no_advice_that_the_run_would_refuse():
    words = [*WORDS, "model.name=Qwen/Qwen2.5-VL-32B-Instruct", "model.lora.rank=0", "train.sharding=fsdp2"]
    before = plan.plan(configs.load(SEVEN, words), 8, H100)
    found = planadvice.changes(SEVEN, words, before)
    assert [c.words for c in found] == [  # and nothing that is not needed
        ("model.lora.rank=32", "engine=vllm_server", "engine.memory=0.9")]
    words = [*WORDS, "engine=vllm", "engine.memory=0.05"]
    found = planadvice.changes(THREE, words, plan.plan(configs.load(THREE, words), 8, H100))
    assert found and not any("tensor_parallel" in word for change in found for word in change.words)
    shards, spread = ("train.sharding=fsdp2", "model.lora.quantize=nf4"), ("engine=vllm", "engine.tensor_parallel=2")
    for words in (
            shards, spread, ("train.sharding=zero3", "engine=vllm_server"),
            ("train.sharding=zero2", "train.cpu_offload=true")):
        with pytest.raises(plan.ConfigError, match=words[1].split("=")[0]):
            made(THREE, words, gpus=2)
        assert made(THREE, words).side_by_side  # on one GPU nothing is sharded, and an engine may have a second one
    with pytest.raises(plan.ConfigError, match="16 attention heads"):
        made(THREE, ("engine=vllm_server", "engine.tensor_parallel=3"))


def test_the_files_of_the_launcher_are_its_own():
    for path in sorted((CONFIGS / "accelerate").glob("*.yaml")):
        found = load_config_from_file(str(path))
        machines, each = re.search(r"(?:nodes_(\d)x)?(\d)", path.stem).groups()
        assert (found.num_machines, found.num_processes) == (int(machines or 1), int(machines or 1) * int(each)), path
        assert found.mixed_precision == "no" and path not in configs.shipped_configs(), path


def run(capsys, *words):
    code = main(["plan", *words])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_the_command_says_whether_it_fits_and_what_is_wrong(capsys):
    code, out, _ = run(capsys, THREE, *WORDS, "--gpus", "8", "--gpu-memory", "80")
    assert code == 0 and "of 80: fits" in out and "8 x H100" in out
    code, out, _ = run(capsys, THREE, *WORDS, "--gpu-memory", "8", "--json")
    found = json.loads(out)
    assert code == 1 and not found["fits"] and found["peak"] > 8 * GIB
    assert all(change["fits"] and change["peak"] <= 8 * GIB for change in found["changes"])
    code, _, err = run(capsys, THREE, *WORDS, "--card", "Riva 128")
    assert code == 1 and "Riva 128" in err and "H100" in err and "--gpu-memory" in err
    code, _, err = run(capsys, THREE, *WORDS, "model.name=/nowhere")
    assert code == 1 and "model.name='/nowhere'" in err


SEEN = ObservationStats(episodes=2, observations=6, oracle=True, tokens=100, visual=64, pictures=1)
TINY = "configs/quickstart.yaml"


def limits(**more):
    return EpisodeSettings(**{"max_turns": 4, "max_tokens": 10_000, "max_media": 32, **more})


def test_lengths_by_hand():
    for more, action, length in [
        ({}, 50, EpisodeLength(turns=4, tokens=500, visual=192, written=200, pictures=3)),
        ({"max_turns": 1}, 50, EpisodeLength(turns=1, tokens=50, visual=0, written=50, pictures=0)),
        ({"max_media": 1}, 50, EpisodeLength(turns=2, tokens=200, visual=64, written=100, pictures=1)),
        ({"max_tokens": 220}, 50, EpisodeLength(turns=2, tokens=200, visual=64, written=100, pictures=1)),
         # no room for a third
        ({"max_tokens": 170}, 50, EpisodeLength(turns=2, tokens=170, visual=64, written=70, pictures=1)),
         # the second is cut
        ({"max_tokens": 30}, 50, EpisodeLength(turns=1, tokens=30, visual=0, written=30, pictures=0))]:
        assert SEEN.length(limits(**more), action) == length, (more, action, length)


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "lamp.py"
    file.write_text(TASK)
    return [f"task={file}:Lamp", "episode.max_turns=4"]


@pytest.mark.slow
def test_an_environment_is_played(words, tmp_path):
    """Pictures of 32 x 32 are 2 tokens of 28 x 28; "\\x1b[2JLevel 1." has 12 characters."""
    found = plan.observe(configs.load(THREE, words))
    assert found == ObservationStats(episodes=3, observations=9, oracle=True, tokens=10 + 4 + 2, visual=2, pictures=1)
    empty = plan.observe(configs.load(THREE, [*words, "task.perfect=false"]))
    assert empty and not empty.oracle and empty.observations == 12
    assert "empty actions" in empty.words() and "12 in 3 episodes" in empty.words()
    assert plan.observe(configs.load(THREE, ["task=digits"])) is None
    (tmp_path / "broken.py").write_text(TASK.replace('["up"] * sample["goal"]', '["up", "break"]'))
    found = plan.observe(configs.load(THREE, [*words, f"task={tmp_path / 'broken.py'}:Lamp"]))
    assert found and "an episode failed: step: " in found.words() and found.observations == 3
    (tmp_path / "other.py").write_text(TASK.replace('["up"] * sample["goal"]', '["break"]'))
    words = [f"task={tmp_path / 'other.py'}:Lamp"]
    with pytest.raises(DataError, match=r"no environment returned an observation.*broken"):
        plan.observe(configs.load(THREE, words))


def test_a_plan_counts_turns():
    small = ["task=digits", "rollout.max_new_tokens=64"]
    config = configs.load(TINY, [*small, "episode.max_turns=4"])
    single, four = plan.plan(config, 1, H100), plan.plan(config, 1, H100, observed=SEEN)
    assert four.episode == SEEN.length(config.episode, 64) and single.episode is None
    assert four.peak > single.peak
    lines = "\n".join(plan.render(four))
    assert "episodes of 556 tokens in 4 turns, 64 an action and 192 visual in 3 images" in lines
    assert "played with the perfect actions" in lines and "answers of 64" in "\n".join(plan.render(single))
    one = plan.plan(configs.load(TINY, [*small, "episode.max_turns=1"]), 1, H100, observed=SEEN)
    assert one.memory.training == single.memory.training
    config = configs.load(THREE, ["task=digits", "rollout.max_new_tokens=100"])
    shape = plan.architecture(config.model.name)
    length = SEEN.length(limits(), 100)
    long = configs.load(THREE, ["task=digits", f"rollout.max_new_tokens={length.tokens}"])
    answers = memory.estimate(long, shape, 400, 256, "cuda")
    texts = memory.estimate(config, shape, 400, 256, "cuda", replace(length, visual=0))
    assert (texts.activations, texts.logits) == (answers.activations, answers.logits)
    pictures = memory.estimate(config, shape, 400, 256, "cuda", length)
    assert pictures.activations > texts.activations and pictures.training > texts.training
    assert texts.prefill > answers.prefill  # each turn is read with all before it
    assert texts.resident == memory.estimate(config, shape, 400, 256, "cuda").resident


def test_a_dry_run_counts_episodes(words, tmp_path):
    config = configs.load(TINY, [*words, f"run.dir={tmp_path / 'run'}"])
    report = dryrun.check(config)
    assert not report.problems and report.observed and report.episode and report.step
    assert report.observed.visual > 0 and report.observed.tokens > report.observed.visual
    assert report.episode.turns == 4 and report.step.largest > 4 * config.rollout.max_new_tokens
    assert "The lamp is off." in report.sample.text and report.sample.media[0].original == (32, 32)
    assert not any("environment" in warning for warning in report.warnings)
    plain = dryrun.check(configs.load(TINY, [f"run.dir={tmp_path / 'run'}"]), samples=4)
    assert plain.episode is None and plain.lengths and plain.lengths.samples == 4
    assert episode_lengths.as_answers(config, report.episode).rollout.max_new_tokens == report.episode.tokens
