"""The commands behind `train.py` and `python -m vlrl.sft`: arguments, errors as messages, and the last words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vlrl.errors import VlrlError

if TYPE_CHECKING:
    from vlrl.config import Config

EPILOG = """\
examples:
  python train.py configs/quickstart.yaml                       five minutes on a laptop CPU
  python train.py configs/quickstart.yaml steps=200 train.lr=1e-4 run.dir=runs/longer
  torchrun --nproc_per_node 2 train.py configs/quickstart.yaml

A run goes on from its newest checkpoint by default: start the same command again after Ctrl-C or a crash.
resume=never starts over (the old run is moved aside), resume=must fails without a checkpoint.

touch first: train.lr, rollout.group_size, steps. All settings: --settings
"""


def train(argv: Sequence[str]) -> int:
    """`train.py`: trains, prints the table before/after and where things lie. Returns the exit code."""
    def run(config: Config) -> int:
        from vlrl.loop import train as run_training
        from vlrl.session import last_words

        return last_words(run_training(config))

    return command(argv, "train.py", "Train a vision-language model by reinforcement learning with verifiable "
                   "rewards.", run, EPILOG)


def command(argv: Sequence[str], name: str, description: str, run: Callable[[Config], int], epilog: str) -> int:
    """Parses CONFIG and key=value words and runs; the exit code is 0 only on success.

    A VlrlError becomes one message and 1; a run that Ctrl-C stopped gives 130.
    """
    parser = argparse.ArgumentParser(prog=name, description=description, epilog=epilog,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that override the file")
    parser.add_argument("--settings", action="store_true", dest="show", help="list every setting with its default")
    args = parser.parse_args(list(argv))
    from vlrl import config

    if args.show:
        for setting, _kind, default, text in config.describe():
            print(f"{setting} = {default!r}\n    {text}")
        return 0
    if not args.config:
        parser.error("name a config, e.g. configs/quickstart.yaml")
    try:
        return run(config.load(args.config, args.settings))
    except VlrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
