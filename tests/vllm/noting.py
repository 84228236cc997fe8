"""`train.py` that also notes, for every process, which weights it and its engine end with; started by torchrun too."""

import functools
import hashlib
import json
import sys
from typing import Any

import torch

from vlrl.cli import main
from vlrl.distributed import comm
from vlrl.engine.vllm.sync_check import counted_differences
from vlrl.training import loop
from vlrl.training.session import Session


class Noting(Session):
    """Writes `<run folder>-noted-<rank>.json` when the last step is saved and evaluated."""

    def finish(self) -> None:
        super().finish()
        policy: Any = self.parts.policy
        engine: Any = self.parts.engine
        digest = hashlib.sha256()
        for name, tensor in sorted(policy.model.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        noted: dict[str, Any] = {"weights": digest.hexdigest()}
        if self.config.engine.name == "vllm":
            noted["differing"] = counted_differences(engine.weights.compare(policy))[1]
            noted["compared"] = sum(1 for _ in engine.weights.compare(policy))
        else:
            noted |= {"way": engine.way, "version": engine._target.version, "adapter": bool(engine._target.adapter),
                      "asked": {r.address: r.requests for r in engine.pool.replicas}}
        path = self.folder.path
        path.with_name(f"{path.name}-noted-{comm.rank()}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    loop.train = functools.partial(loop.train, make_session=Noting)
    sys.exit(main.train_script(sys.argv[1:]))
