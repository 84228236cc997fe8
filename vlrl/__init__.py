"""vlrl: fine-tune vision-language models by reinforcement learning with verifiable rewards.

Importing this package loads no torch. It prepares the process, and through inherited environment variables its
child processes, for three traps of the stack: OpenMP workers that spin while they wait, tokenizers' fork warning,
and a torchvision wheel built for CUDA beside a CPU-only torch.
"""

import os
from pathlib import Path

from vlrl import _torchvision

__version__ = "0.1.0"

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning workers are 20x slower beside another busy process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_torchvision.install()

# In a checkout tasks/, app/ and configs/ lie beside vlrl/; a wheel carries them inside. Either way they are
# vlrl.tasks, vlrl.app and vlrl.configs, so a user's own tasks.py can never shadow the built-in ones.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "tasks").is_dir() and (_CHECKOUT / "train.py").is_file():
    __path__.append(str(_CHECKOUT))
