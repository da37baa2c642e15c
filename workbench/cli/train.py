"""train: a recipe in, a checkpoint of the published format out."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, command
from workbench.cli.show import show


def add(commands: Commands) -> None:
    train = command(commands, "train", _train, "train a model from a recipe and export it in the published format")
    train.add_argument("recipe", type=Path, help="TOML file, for example data/train/k3-nano.toml")
    train.add_argument("--out", type=Path, required=True, help="folder for states, metrics and the exported model")
    train.add_argument("--resume", action="store_true", help="go on from the last saved state in --out")


def _train(args: argparse.Namespace) -> int:
    from workbench.training.launch import train

    show(args, train(args.recipe, args.out, resume=args.resume))
    return 0
