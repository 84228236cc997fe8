"""Loading, sharding as the launcher asks for it, the reference, saving: adapters, broken folders, pixel limits."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import Backend, BackendConfig
from transformers import AutoProcessor

from tests.conftest import SAMPLES, TWO, noise, noise_video
from tests.helpers import Vowels, credited_groups, load, settings
from tests.tables import each
from vlrl.errors import ConfigError
from vlrl.models import policy as policies
from vlrl.models.families import FAMILIES
from vlrl.models.loading import check_processor
from vlrl.models.processing import Encoder
from vlrl.models.shards import backend, resolve_sharding
from vlrl.training.update import make_optimizer, update
from vlrl.types import Media, Sample


def model(name, **more):
    return {"model": {"name": str(name), **more}}


def weights(policy):
    return {n: p.detach().clone() for n, p in policy.base.named_parameters()}


def logits(policy, encode):
    prompt = encode(Vowels(), SAMPLES["text"])
    with torch.no_grad(), policy.evaluating():
        return policy.model(input_ids=torch.from_numpy(prompt.ids)[None]).logits


def train(policy, encode, config, steps=1):
    groups = credited_groups(policy, encode, config, ("image", "text"))
    optimizer = make_optimizer(policy, config)
    return [update(policy, optimizer, groups, config, step)[0] for step in range(steps)]


@pytest.fixture(scope="module")
def adapter(tiny_models, tmp_path_factory):
    """A trained LoRA checkpoint and what its policy computes."""
    config = settings(tiny_models["qwen3_vl"], **model(tiny_models["qwen3_vl"], lora={"rank": 4}))
    policy, encode = load(config)
    train(policy, encode, config, 2)
    folder = tmp_path_factory.mktemp("adapter") / "step-000002"
    policy.save(folder)
    return folder, logits(policy, encode)


@pytest.mark.slow
def test_full_fine_tuning_of_an_adapter_trains_and_saves_the_whole_model(adapter, tmp_path):
    folder, expected = adapter
    config = settings(folder, algo={"kl_coef": 0.1})
    policy, encode = load(config)
    assert not policy.lora and torch.allclose(logits(policy, encode), expected, atol=1e-5)
    policy.keep_reference(config.model.name)
    start = weights(policy)
    assert train(policy, encode, config)[0]["kl"] == 0
    policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved/adapter_config.json").exists()
    again, _ = load(settings(tmp_path / "saved"))
    for name, value in weights(again).items():
        assert torch.equal(value, dict(policy.base.named_parameters())[name]), name
    assert any(not torch.equal(value, start[name]) for name, value in weights(again).items())


def test_lora_on_an_adapter_is_refused(adapter):
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=8.*step-000002.*itself a LoRA adapter.*resume.*qwen3_vl"
                                          r".*merge first.*model\.lora\.rank=0 steps=0"):
        load(settings(adapter[0], **model(adapter[0], lora={"rank": 8})))


def test_an_adapter_names_the_embedded_model_as_the_settings_do(tmp_path):
    policy, encode = load(settings("x", **model("embedded/tiny-qwen3-vl", lora={"rank": 2})))
    train(policy, encode, settings("x"))
    policy.save(tmp_path / "a")
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"] == (
        "embedded/tiny-qwen3-vl")
    assert not any("assets/tiny" in f.read_text() for f in tmp_path.glob("a/*") if f.suffix in (".json", ".md"))
    merged, _ = load(settings(tmp_path / "a"))
    assert torch.allclose(logits(merged, encode), logits(policy, encode), atol=1e-4)


@pytest.mark.parametrize("base, error", [
    (None, "is an adapter, but .*adapter_config.json names no base model"),
    ("no/such", "'no/such', the base model of the adapter model.name='.*broken', cannot be loaded"),
])
def test_an_adapter_without_its_base_model(adapter, tmp_path, base, error):
    broken = shutil.copytree(adapter[0], tmp_path / "broken")
    path = broken / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
    with pytest.raises(ConfigError, match=error):
        load(settings(broken))


def changed(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return apply


@changed
def without_a_layer(tensors):
    for name in [n for n in tensors if "language_model.layers.1." in n]:
        del tensors[name]


@changed
def other_shape(tensors):
    name = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name][:-64].clone()


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def no_image_processor(folder):
    (folder / "processor_config.json").unlink()


def raising_template(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only plain text') }}")


@pytest.mark.parametrize("damage, error", [
    (without_a_layer, r"lacks weights .*layers\.1\.\S+ is missing, .* and \d+ more\. These weights would be random"),
    (other_shape, r"lacks weights .*embed_tokens.weight is \[\d+, 96\] instead of \[\d+, 96\]\. These"),
    (cut, r"cannot be loaded: SafetensorError: .*\. Give the folder"),
    (lambda f: (f / "config.json").write_text("{"), "cannot be loaded: .*Give the folder"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be loaded: .*Give the folder"),
    (no_image_processor, "cannot be loaded: .*image processor"),
    (lambda f: (f / "chat_template.jinja").unlink(), "no usable chat template: .*chat_template"),
    (lambda f: (f / "chat_template.jinja").write_text("hello"), "no usable chat template.*renders .* as 'hello'"),
    (raising_template, "no usable chat template: .*only plain text. Copy"),
])
def test_a_broken_folder_is_one_line(tiny_models, tmp_path, damage, error):
    folder = shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "broken")
    damage(folder)
    with pytest.raises(ConfigError, match=error) as raised:
        load(settings(folder))
    assert "\n" not in str(raised.value) and "model.name=" in str(raised.value) and str(folder) in str(raised.value)


def test_a_text_model_has_no_processor(tiny_models):
    tokenizer = load(settings(tiny_models["qwen3_vl"]))[0].processor.tokenizer
    with pytest.raises(ConfigError, match="has no tokenizer and no image_processor"):
        check_processor(tokenizer, "x", FAMILIES["qwen3_vl"])


@pytest.mark.parametrize("family", TWO)
def test_a_tied_head_need_not_be_in_the_file_and_limits_that_are_not_given_stay(tiny_models, family):
    policy, _ = load(settings(tiny_models[family]))
    assert "lm_head.weight" not in load_file(tiny_models[family] / "model.safetensors")
    assert policy.base.lm_head.weight is policy.base.get_input_embeddings().weight
    own = AutoProcessor.from_pretrained(tiny_models[family])
    policy, _ = load(settings(tiny_models[family]))
    for unit in ("image_processor", "video_processor"):
        assert getattr(policy.processor, unit).to_dict() == getattr(own, unit).to_dict()


@pytest.mark.parametrize("lora", [0, 2])
def test_saved_files_hold_nothing_of_vlrl(tiny_models, tmp_path, lora):
    name = tiny_models["qwen3_vl"]
    policy, _ = load(settings(name, **model(name, lora={"rank": lora})))
    policy.save(tmp_path)
    texts = {f.name: f.read_text() for f in tmp_path.iterdir() if f.suffix in (".json", ".jinja")}
    assert ("adapter_config.json" if lora else "config.json") in texts
    assert not [n for n, text in texts.items() if "vlrl" in text]
    if lora:  # of a set each process would write its own order
        targets = json.loads(texts["adapter_config.json"])["target_modules"]
        assert targets == sorted(targets) and len(targets) > 5


@pytest.fixture
def bf16():
    """An accelerator in bfloat16; the process's own state comes back afterwards."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_kl_in_bfloat16_starts_at_zero(tiny_models, bf16):
    name = tiny_models["qwen3_vl"]
    config = settings(name, **model(name, dtype="bfloat16", train=["language", "merger", "vision"]),
                      algo={"kl_coef": 0.1})
    policy = policies.load(config, bf16)
    policy.keep_reference(config.model.name)
    first, second = train(policy, Encoder(policy.processor, policy.family, policy.positions, config), config, 2)
    assert first["kl"] == 0 and second["kl"] > 0
    dtypes = [{n: p.dtype for n, p in m.named_parameters()} for m in (policy.model, policy._reference)]
    assert dtypes[0] == dtypes[1]
    assert not any(p.requires_grad for p in policy._reference.parameters())


def sizes(encode, *media):
    return encode(Vowels(), Sample(id="x", media=media, row={"q": "?"})).processed_sizes


@pytest.mark.parametrize("family, side", [("qwen3_vl", 128), ("qwen2_5_vl", 112)])
def test_max_pixels_is_of_an_image_or_a_frame(tiny_models, family, side):
    """Also a short video gets no larger frames, whatever a long one may spend."""
    name = tiny_models[family]
    _, encode = load(settings(name, **model(name, max_pixels=side * side)))
    for frames in (4, 16):
        for shown in (side, 4 * side, 2 * side):
            image = Media(source=noise(0, shown, shown))
            assert sizes(encode, image, noise_video(1, frames, shown, shown)) == ((side, side),) * 2
        ((width, height),) = sizes(encode, noise_video(1, frames, 4 * side, side))
        assert width * height <= side * side


@pytest.mark.parametrize("family", TWO)
@pytest.mark.parametrize("given, shown", [("max_pixels", 400), ("min_pixels", 30)])
def test_one_limit_moves_the_other_of_the_processor(tiny_models, tmp_path, family, given, shown):
    """A processor's own lower limit may lie above max_pixels, or its upper one below min_pixels."""
    name, area = tiny_models[family], 112 * 112
    own = {"shortest_edge": 4 * area, "longest_edge": 8 * area} if given == "max_pixels" else {
        "shortest_edge": 784, "longest_edge": area // 4}
    folder = shutil.copytree(name, tmp_path / "m")
    path = folder / "processor_config.json"
    saved = json.loads(path.read_text())
    for unit in ("image_processor", "video_processor"):
        saved[unit]["size"] = own
    path.write_text(json.dumps(saved))
    _, encode = load(settings(folder, **model(folder, **{given: area})))
    image, video = sizes(encode, Media(source=noise(0, shown, shown)), noise_video(1, 4, shown, shown))
    if given == "max_pixels":
        assert image[0] * image[1] <= area and video[0] * video[1] <= area
    else:
        assert image[0] * image[1] >= area


def misplaced(named):
    """Names of tensors that do not start where PyTorch's allocator puts them."""
    return [name for name, tensor in named if tensor.data_ptr() % 64]


@pytest.mark.slow
def test_what_comes_from_files_has_memory_as_what_is_made(tiny_models, tmp_path):
    """Kernels of CPUs answer differently in the last bits at other addresses."""
    folder = tiny_models["qwen3_vl"]
    full = policies.load(settings(folder), Accelerator(cpu=True), folder)
    tied = full.model.get_input_embeddings().weight is full.model.get_output_embeddings().weight
    assert tied == full.model.config.tie_word_embeddings
    full.keep_reference(folder)
    for module in (full.model, full._reference):
        assert misplaced([*module.named_parameters(), *module.named_buffers()]) == []
    config = settings(folder, **model(folder, lora={"rank": 3}))
    policies.load(config, Accelerator(cpu=True)).save(tmp_path)
    adapted = policies.load(config, Accelerator(cpu=True), tmp_path)
    assert misplaced([*adapted.model.named_parameters(), *adapted.model.named_buffers()]) == []
    assert misplaced(policies.load_model(tmp_path, torch.float32, merge=False).named_parameters()) == []


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@each("environ given found", [
    ({}, {}, ("none", False)),
    ({}, {"sharding": "fsdp2", "cpu_offload": True}, ("fsdp2", True)),
    (FSDP, {}, ("fsdp2", False)),
    ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {"sharding": "fsdp2"}, ("fsdp2", True)),
    ({"FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "true"}, {}, ("none", False)),
    ({**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}, {}, ("zero3", False)),
    ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, {"sharding": "zero2"}, ("zero2", False)),
])
def test_the_launcher_settles_what_is_automatic(environ, given, found):
    environ = dict(environ)
    train = resolve_sharding(settings("m", train=given), environ).train
    assert (train.sharding, train.cpu_offload) == found
    assert all(environ.get(f"ACCELERATE_USE_{name}") in (None, "false") for name in ("FSDP", "DEEPSPEED"))


REFUSED = [
    ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {}, "--zero_stage 1: vlrl supports stages 2 and 3"),
    ({**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "z.json"}, {}, "z.json: vlrl does not read such files"),
    ({**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {}, "--offload_optimizer_device: "),
    (ZERO, {"train": {"sharding": "zero2"}}, "--zero_stage 3, but train.sharding=zero2"),
    (ZERO, {"train": {"cpu_offload": True}}, "train.sharding=zero3 cannot be combined with train.cpu_offload=true"),
    (ZERO, {"train": {"gather": "compute"}}, "cannot be combined with train.gather=compute"),
    (ZERO, {"model": {"name": "m", "dtype": "float16"}}, "cannot be combined with model.dtype=float16"),
    (ZERO, {"model": {"name": "m", "lora": {"rank": 4, "quantize": "nf4"}}}, "sharding=zero3: .* model.lora.quantize"),
    (ZERO, {"algo": {"reference": "ema", "kl_coef": 0.1}}, "cannot be combined with algo.reference=ema"),
    (ZERO, {"engine": {"name": "vllm_server"}}, "train.sharding=zero3 cannot be combined with engine.name=vllm_server"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "--use_megatron_lm: .* train.sharding=fsdp2"),
    ({**FSDP, "FSDP_VERSION": "1"}, {}, "--fsdp_version 1: vlrl only supports FSDP2"),
    (FSDP, {"train": {"sharding": "none"}}, "but train.sharding=none"),
    ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
     {"model": {"name": "m", "gradient_checkpointing": False}}, "model.gradient_checkpointing=false"),
    ({}, {"train": {"cpu_offload": True}}, "train.cpu_offload=true .* nothing is sharded"),
    (FSDP, {"model": {"name": "m", "lora": {"rank": 4, "quantize": "nf4"}}}, "model.lora.quantize=nf4"),
    (FSDP, {"model": {"name": "m", "feature_cache_mib": 8}}, "model.feature_cache_mib=8")]


def test_what_is_refused_names_the_setting():
    for environ, given, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            resolve_sharding(settings("m", **given), dict(environ))


@each("environ given device found", [
    ({}, {"sharding": "fsdp2", "cpu_offload": True}, "cuda", {"cuda": "nccl", "cpu": "gloo"}),
    ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {}, "cuda", {"cuda": "nccl", "cpu": "gloo"}),
    ({}, {"sharding": "fsdp2"}, "cuda", None),
    ({}, {}, "cuda", None),
    ({}, {"sharding": "fsdp2", "cpu_offload": True}, "cpu", None),
])
def test_shards_in_main_memory_beside_a_gpu_have_collectives_there(environ, given, device, found):
    chosen = backend(resolve_sharding(settings("m", train=given), dict(environ)), device)
    assert (BackendConfig(Backend(chosen)).get_device_backend_map() if chosen else None) == found
