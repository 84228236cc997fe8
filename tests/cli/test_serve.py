"""What `vlrl serve` starts, and what several training processes may ask of an engine; no vLLM is needed."""

import itertools
import socket
import stat

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers import settings
from vlrl.cli.serve import _episodes
from vlrl.engine.vllm.launch import further_arguments, prepare, write_key
from vlrl.errors import ConfigError
from vlrl.training.build_engine import check_engine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_servers_take_further_arguments_but_not_what_vlrl_sets_itself(tiny_models, tmp_path):
    config = settings(tiny_models["qwen3_vl"], engine={"name": "vllm_server", "tensor_parallel": 4},
                      run={"dir": str(tmp_path / "run")})
    further = ["distributed-executor-backend=ray", "--pipeline_parallel_size=2", "disable-log-stats"]
    (server,) = prepare(config, tmp_path / "servers", port=free_port(), further=further).servers
    pairs = {*itertools.pairwise(server.command)}
    assert {("--distributed-executor-backend", "ray"), ("--pipeline-parallel-size", "2"),
            ("--tensor-parallel-size", "4")} <= pairs
    assert "--disable-log-stats" in server.command and "" not in server.command
    assert {"--enable-prefix-caching", "--no-enable-chunked-prefill"} <= {*server.command}  # on a CPU
    for given, way_out in (("tensor-parallel-size=2", r"set engine\.tensor_parallel"), ("host=0.0.0.0", "set --host"),
                           ("--max_model_len=9", r"set engine\.max_model_len"),
                           ("logprobs-mode=raw_logprobs", "the value that trainers need. Remove the argument")):
        with pytest.raises(ConfigError, match=f"--vllm {given}: vlrl sets .*{way_out}"):
            further_arguments([given], ["--logprobs-mode", "processed_logprobs"])


def test_servers_of_several_hosts_take_one_key(tmp_path):
    """Who comes later takes the key that is there, also when it was not there a moment ago."""
    shared = tmp_path / "shared" / "key"
    first = write_key(tmp_path / "a" / "key", str(shared))
    key = first.read_text()
    assert write_key(tmp_path / "b" / "key", str(shared)) == first == shared and shared.read_text() == key
    assert stat.S_IMODE(shared.stat().st_mode) == 0o600 and len(key.strip()) > 30
    assert [*shared.parent.iterdir()] == [shared]
    own = tmp_path / "own" / "key"
    assert write_key(own).read_text() == write_key(own).read_text() != key  # stays: a run goes on after a restart


def test_engines_fit_the_processes_and_what_the_task_needs(tiny_models, capsys):
    config = settings(tiny_models["qwen3_vl"], engine={"name": "vllm", "tensor_parallel": 2})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2 with 2 training processes: .*vllm_server"):
            check_engine(config)
    finally:
        dist.destroy_process_group()
    # also on a host that has neither the task nor its data: it says what it counts with
    def of(task, **engine):
        return _episodes(settings(tiny_models["qwen3_vl"], task=task, engine={"name": "vllm_server", **engine}))

    assert of({"name": "recall"}) and not of({"name": "digits"})
    assert capsys.readouterr().out == ""
    assert not of({"name": "elsewhere.py:Task"})
    said = capsys.readouterr().out
    assert "elsewhere.py" in said and "engine.max_model_len" in said
    assert not of({"name": "elsewhere.py:Task"}, max_model_len=256) and capsys.readouterr().out == ""
