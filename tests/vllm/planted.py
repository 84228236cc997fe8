"""A worker extension that keeps a stale weight: of what the file in VLRL_PLANTED names, the old numbers stay."""

import os
from pathlib import Path
from unittest import mock

from vllm.lora.lora_model import LoRAModel

from vlrl.engine.vllm import worker as vllm_worker

HEAD = "head"
"""Plants a head that still computes with its packed copy of the embedding before."""


def planted() -> str:
    path = Path(os.environ["VLRL_PLANTED"])
    return path.read_text() if path.exists() else ""


_seen = {}
"""The numbers that each weight had last."""


def _behind(pairs):
    """A weight left out would be no stale one: vLLM makes a layer anew, from whatever its memory holds."""
    for name, tensor in pairs:
        _seen[name] = _seen.get(name, tensor) if name == planted() else tensor
        yield name, _seen[name]


class Extension(vllm_worker.Extension):
    def vlrl_reload(self, path):
        whole, pack = vllm_worker.read_weights, vllm_worker.repack_heads
        with (mock.patch.object(vllm_worker, "read_weights", lambda folder: _behind(whole(folder))),
              mock.patch.object(vllm_worker, "repack_heads", lambda m: [] if planted() == HEAD else pack(m))):
            return super().vlrl_reload(path)


_from_tensors = LoRAModel.from_lora_tensors.__func__


def _stale(cls, *args, tensors, **kwargs):
    return _from_tensors(cls, *args, tensors={name: tensor * 0.5 if name == planted() else tensor
                                              for name, tensor in tensors.items()}, **kwargs)


LoRAModel.from_lora_tensors = classmethod(_stale)
