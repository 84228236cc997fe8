#!/usr/bin/env python3
"""Trains a vision-language model by reinforcement learning: python train.py CONFIG [key=value ...]

The same file runs under python, `torchrun --nproc_per_node N` and `accelerate launch`.
"""

import sys

from vlrl.cli.main import train_script

if __name__ == "__main__":
    sys.exit(train_script(sys.argv[1:]))
