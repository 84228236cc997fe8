"""services.clip and services.reward_model against transformers, by tiny models of the real classes."""

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.conftest import noise
from tests.services.test_parts import ROW, task_of
from tests.tables import each
from vlrl import config as configs
from vlrl.config.services import ClipSettings
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.services.clip import Clip
from vlrl.services.judge_prompts import question_text
from vlrl.services.reward_model import RewardModel
from vlrl.services.service_set import ServiceSet
from vlrl.task.scoring import score_group
from vlrl.task.services import ServiceContext, Services

WORDS = "the road is clear with no car accidents two cars have collided each other on a cat dog picture of".split()
TEXTS = ["the road is clear with no car accidents", "a cat", "two cars have collided with each other on the road"]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGHT = {**SMALL, "image_size": 32, "patch_size": 8}


def _tokenizer(length):
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", model_max_length=length)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each kind, with its processor."""
    root = tmp_path_factory.mktemp("clip")
    torch.manual_seed(7)
    text = {**SMALL, "vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3,
            "pad_token_id": 0}
    size = {"height": 32, "width": 32}
    clip = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=SIGHT, projection_dim=24))
    siglip = hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=SIGHT))
    pictures = (hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size), hf.SiglipImageProcessor(size=size))
    for name, model, picture, kind in zip(("clip", "siglip"), (clip, siglip), pictures,
                                          (hf.CLIPProcessor, hf.SiglipProcessor), strict=True):
        model.save_pretrained(root / name)
        kind(image_processor=picture, tokenizer=_tokenizer(16)).save_pretrained(root / name)
    return root


def own_cosines(folder, kind, images, texts):
    """transformers' own logits, less scale and bias."""
    processor = (hf.CLIPProcessor if kind is hf.CLIPModel else hf.SiglipProcessor).from_pretrained(folder)
    model = kind.from_pretrained(folder)
    padding = {"padding": True} if kind is hf.CLIPModel else {"padding": "max_length", "max_length": 16}
    inputs = processor(text=texts, images=images, return_tensors="pt", truncation=True, **padding)
    with torch.no_grad():
        logits = model(**inputs).logits_per_image
    bias = model.logit_bias if kind is hf.SiglipModel else 0.0
    return ((logits - bias) / model.logit_scale.exp()).detach().numpy()


@each("name kind", [("clip", hf.CLIPModel), ("siglip", hf.SiglipModel)])
@each("batch", [0, 3])
def test_cosines_are_those_of_transformers(folders, name, kind, batch):
    images = [noise(i, 40 + 8 * i, 56) for i in range(5)] + [Image.new("L", (32, 32), 90)]
    clip = Clip(ClipSettings(name=str(folders / name), batch=batch))
    found = clip(images, TEXTS)
    assert found.shape == (6, 3) and found.std() > 1e-3
    assert np.allclose(found, own_cosines(folders / name, kind, [i.convert("RGB") for i in images], TEXTS), atol=1e-5)


def test_a_picture_is_embedded_once_and_alone_of_the_others(folders, monkeypatch):
    clip, seen = Clip(ClipSettings(name=str(folders / "clip"), keep=6)), []
    real = clip._of_pictures
    monkeypatch.setattr(clip, "_of_pictures", lambda pictures: seen.append(len(pictures)) or real(pictures))
    images = [noise(i, 40, 40) for i in range(3)]
    first = clip([images[0], images[1], images[0]], TEXTS)
    assert seen == [1, 1] and np.array_equal(first[0], first[2])
    assert np.array_equal(clip([images[2], images[1].copy()], TEXTS)[1], first[1]) and seen == [1, 1, 1]
    fresh = Clip(ClipSettings(name=str(folders / "clip")))  # as after a resume: other pictures were seen before
    assert np.array_equal(fresh(images[::-1], TEXTS)[1:], first[[1, 0]])
    clip([noise(9, 40, 40)], ["a dog"])
    assert len(clip._known) == 6 and clip([], TEXTS).shape == (0, 3)


def test_the_service_counts_pictures_and_names_other_models(folders, tiny_models, tmp_path):
    with pytest.raises(ConfigError, match=r"services\.clip\.name='.*nowhere' cannot be loaded"):
        Clip(ClipSettings(name=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"services\.clip\.name=.*does not embed images and texts"):
        Clip(ClipSettings(name=str(tiny_models["qwen3_vl"])))
    services = ServiceSet({"clip": Clip(ClipSettings(name=str(folders / "siglip")))})
    for step, count in ((0, 2), (0, 1), (1, 1)):
        services.at(ServiceContext("train", step, step)).services["clip"]([noise(0, 32, 32)] * count, TEXTS)
    assert services.metrics("train", 0) == {"clip/images": 3} and services.threads == 1
    assert services.metrics("train", 1) == {"clip/images": 1}


@pytest.mark.slow
def test_the_contrast_reward_of_drive_trains(folders, tmp_path):
    """VLM-RL's reward in a run: the part is what the stored pictures' cosines give by hand."""
    pytest.importorskip("highway_env")
    from vlrl import config as configs
    from vlrl.rewards.contrast import contrast_goal, vlm_rl_reward
    from vlrl.store import RunFolder
    from vlrl.training.loop import train

    settings = [f"run.dir={tmp_path}/run", "steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2",
                "task.seconds=2", "episode.max_turns=2", "eval.samples=0", "task.reward=contrast", "task.goal_span=2",
                f"services.clip.name={folders / 'clip'}"]
    session = train(configs.load("configs/drive.yaml", settings))
    (line,) = session.folder.metrics()
    assert line["clip/images"] >= 2 and line["service_errors"] == 0
    clip = Clip(ClipSettings(name=str(folders / "clip")))
    task = session.parts.task
    rows = RunFolder(session.folder.path).rollouts().to_pylist()
    assert len(rows) == 2
    for row in rows:
        acted, paid = [t for t in row["turns"] if t["role"] == "assistant"], 0.0
        shown = [t for t in row["turns"] if t["role"] == "observation"]
        for turn, after in zip(acted, shown, strict=True):
            (path,) = (session.folder.path / "media").glob(f"{after['media'][0]}.*")
            ((bad, good),) = clip([Image.open(path)], [task.goal_negative, task.goal_positive])
            parts = dict(turn["parts"])
            ended = parts.get("collision", 0.0) + parts.get("off_road", 0.0)
            paid += vlm_rl_reward(-ended, parts.get("speed", 0.0), contrast_goal(float(bad), float(good), 2), 1.0,
                                parts.get("centring", 0.0))
        assert dict(row["parts"])["contrast"] == pytest.approx(paid / 2, abs=1e-5)


TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
ANSWERS = ["a cat", "a dog on the road", "two cars", "a cat"]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Two random classifiers, the second with a chat template, and one with two labels."""
    root = tmp_path_factory.mktemp("scores")
    for name, seed, labels in (("plain", 1, 1), ("chat", 2, 1), ("two", 3, 2)):
        torch.manual_seed(seed)
        model = hf.LlamaForSequenceClassification(hf.LlamaConfig(
            **SMALL, vocab_size=40, pad_token_id=0, num_labels=labels, max_position_embeddings=24))
        torch.nn.init.normal_(model.score.weight, std=0.5)
        model.save_pretrained(root / name)
        tokenizer = _tokenizer(24)
        if name == "chat":
            tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(root / name)
    return root


def scorer(*names, batch=0, keep=100):
    return RewardModel(configs.validate({
        "task": "qa", "model": {"name": "none"},
        "services": {"reward_model": {"name": [*map(str, names)], "batch": batch, "keep": keep}}}))


def own(folder, texts, special):
    model, tokenizer = hf.LlamaForSequenceClassification.from_pretrained(folder), _tokenizer(24)
    with torch.no_grad():
        return [float(model(**tokenizer([text], return_tensors="pt", add_special_tokens=special)).logits[0, 0])
                for text in texts]


@each("batch", [0, 3])
def test_scores_are_the_logits_of_transformers(classifiers, batch):
    found = scorer(classifiers / "plain", classifiers / "chat", batch=batch)("the picture", (), ANSWERS)
    plain = own(classifiers / "plain", [f"the picture\n{a}" for a in ANSWERS], True)
    chat = own(classifiers / "chat", [f"user the picture assistant {a} " for a in ANSWERS], False)
    assert np.allclose([s[0] for s in found], plain, atol=1e-5) and np.std(plain) > 1e-3
    assert np.allclose([s[1] for s in found], chat, atol=1e-5)


def test_a_text_is_scored_once(classifiers, monkeypatch):
    made = scorer(classifiers / "plain", keep=2)
    (model,) = made.models
    seen, real = [], model._scored
    monkeypatch.setattr(model, "_scored", lambda texts: seen.extend(texts) or real(texts))
    first = made("the picture", (), ANSWERS)
    assert len(seen) == 3 and first[0] == first[3] and len(model._known) == 2
    assert made("the picture", (), ["a cat"]) == first[:1] and len(seen) == 3
    assert made("the picture", (), ["a dog on the road"]) == first[1:2] and len(seen) == 4  # it was forgotten


@each("pairs", [False, True])
def test_the_process_of_an_answer_is_scored_step_by_step(classifiers, pairs):
    """Texts up to the end of each step; or steps and pairs by themselves (HRM). The part is their mean; they stay."""
    task = task_of({"name": "process", "pairs": pairs}, rewards={"accuracy": 0, "format": 0})
    texts = ["a cat\n\ntwo cars\n\n on the road", "a dog", ""]
    given = ServiceSet({"reward_model": scorer(classifiers / "chat")}).at(ServiceContext("train", 2, 2))
    sample = task.sample_from_row(ROW)
    found = score_group(task, sample, [parse_answer(t) for t in texts], 2, Services(given=given.services))

    def one(text):
        return own(classifiers / "chat", [f"user {question_text(task, sample)} assistant {text} "], False)[0]
    if pairs:
        steps, both = [one(t) for t in ("a cat", "two cars", " on the road")], [
            one("a cat\n\ntwo cars"), one("two cars\n\n on the road")]
        wanted = [(steps[0] + both[0]) / 2, (steps[1] + both[1]) / 2, steps[2]]
    else:
        wanted = [one(texts[0][:end]) for end in (5, 15, 29)]
    ends, values = zip(*found[0].steps, strict=True)
    assert values == pytest.approx(wanted, abs=1e-5) and ends == (5, 15, 29)
    assert found[0].reward == found[0].parts["process"] == pytest.approx(np.mean(wanted), abs=1e-5)
    assert [value for _, value in found[1].steps] == pytest.approx([one("a dog")], abs=1e-5) and np.std(wanted) > 1e-3
    assert found[2].steps == () and found[2].parts["process"] == 0


def test_what_has_no_score_is_said_and_counted(classifiers):
    task = task_of({"name": "process"}, rewards={"accuracy": 0, "format": 0})
    given = ServiceSet({"reward_model": scorer(classifiers / "plain")}).at(ServiceContext("train", 2, 2))
    found = score_group(task, task.sample_from_row(ROW), [parse_answer("a cat\n\n" + "a dog " * 30)], 2,
                        Services(given=given.services))
    assert found[0].reward is None and found[0].steps == () and given.problem.startswith("service: reward_model:")
    task = task_of({"name": "reward_model", "combine": "min"}, rewards={"accuracy": 0, "format": 0})
    provided = ServiceSet({"reward_model": scorer(classifiers / "plain", classifiers / "chat")})
    long = "a cat on the road " * 5
    for texts, lost in ((["a cat", "two cars"], False), (["a cat", long], True)):
        given = provided.at(ServiceContext("train", 2, 2))
        found = score_group(task, task.sample_from_row(ROW), [parse_answer(t) for t in texts], 2,
                            Services(given=given.services))
        assert [s.reward is None for s in found] == [lost] * 2
        assert (given.problem or "").startswith("service: reward_model: an answer and its question" if lost else "")
        assert lost or all(s.parts["reward_model"] == s.reward and s.parts["reward_spread"] > 0 for s in found)
    assert provided.metrics("train", 2) == {"reward_model/scored": 4, "reward_model/failed": 2}


@each("name said", [("two", "has 2 labels instead of one: set it to a run of vlrl"), ("nowhere", "cannot be loaded")])
def test_what_gives_no_score_is_refused(classifiers, tiny_models, name, said):
    with pytest.raises(ConfigError, match=said):
        scorer(classifiers / name)
    with pytest.raises(ConfigError, match=r"services\.reward_model\.name=.*(cannot be loaded|lacks)"):
        scorer(tiny_models["qwen3_vl"])
