"""What `accelerate launch` asks for, as settings; sharded runs are in tests/e2e/test_sharding.py."""

import pytest
from torch.distributed.distributed_c10d import Backend, BackendConfig

from tests.helpers import settings
from vlrl.errors import ConfigError
from vlrl.models.shards import backend, resolve_sharding

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@pytest.mark.parametrize("environ, given, found", [
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
    ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "model.gradient_checkpointing=false"),
    ({}, {"train": {"cpu_offload": True}}, "train.cpu_offload=true .* nothing is sharded"),
    (FSDP, {"model": {"name": "m", "lora": {"rank": 4, "quantize": "nf4"}}}, "model.lora.quantize=nf4"),
    (FSDP, {"model": {"name": "m", "feature_cache_mib": 8}}, "model.feature_cache_mib=8")]


def test_what_is_refused_names_the_setting():
    for environ, given, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            resolve_sharding(settings("m", **given), dict(environ))


@pytest.mark.parametrize("environ, given, device, found", [
    ({}, {"sharding": "fsdp2", "cpu_offload": True}, "cuda", {"cuda": "nccl", "cpu": "gloo"}),
    ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {}, "cuda", {"cuda": "nccl", "cpu": "gloo"}),
    ({}, {"sharding": "fsdp2"}, "cuda", None),
    ({}, {}, "cuda", None),
    ({}, {"sharding": "fsdp2", "cpu_offload": True}, "cpu", None),
])
def test_shards_in_main_memory_beside_a_gpu_have_collectives_there(environ, given, device, found):
    chosen = backend(resolve_sharding(settings("m", train=given), dict(environ)), device)
    assert (BackendConfig(Backend(chosen)).get_device_backend_map() if chosen else None) == found
