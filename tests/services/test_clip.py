"""services.clip against transformers' own similarity, of tiny CLIP and SigLIP models of the real classes."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

from tests.conftest import noise
from tests.tables import each
from vlrl.config.services import ClipSettings
from vlrl.errors import ConfigError
from vlrl.services.clip import Clip
from vlrl.services.service_set import ServiceSet
from vlrl.task.services import ServiceContext

WORDS = "the road is clear with no car accidents two cars have collided each other on a cat dog picture of".split()
TEXTS = ["the road is clear with no car accidents", "a cat", "two cars have collided with each other on the road"]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGHT = {**SMALL, "image_size": 32, "patch_size": 8}


def _tokenizer(length):
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", model_max_length=length)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each kind, with its processor."""
    root = tmp_path_factory.mktemp("clip")
    torch.manual_seed(7)
    text = {**SMALL, "vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3,
            "pad_token_id": 0}
    size = {"height": 32, "width": 32}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=SIGHT, projection_dim=24))
    siglip = SiglipModel(SiglipConfig(text_config=text, vision_config=SIGHT))
    pictures = (CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size), SiglipImageProcessor(size=size))
    for name, model, picture, kind in zip(("clip", "siglip"), (clip, siglip), pictures,
                                          (CLIPProcessor, SiglipProcessor), strict=True):
        model.save_pretrained(root / name)
        kind(image_processor=picture, tokenizer=_tokenizer(16)).save_pretrained(root / name)
    return root


def own_cosines(folder, kind, images, texts):
    """transformers' own logits, less scale and bias."""
    processor = (CLIPProcessor if kind is CLIPModel else SiglipProcessor).from_pretrained(folder)
    model = kind.from_pretrained(folder)
    padding = {"padding": True} if kind is CLIPModel else {"padding": "max_length", "max_length": 16}
    inputs = processor(text=texts, images=images, return_tensors="pt", truncation=True, **padding)
    with torch.no_grad():
        logits = model(**inputs).logits_per_image
    bias = model.logit_bias if kind is SiglipModel else 0.0
    return ((logits - bias) / model.logit_scale.exp()).detach().numpy()


@each("name kind", [("clip", CLIPModel), ("siglip", SiglipModel)])
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
