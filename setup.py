"""Carries the top-level folders tasks/, app/ and configs/ into the wheel, under vlrl. Everything else: pyproject.toml.

An editable install is left alone: in a checkout vlrl/__init__.py finds the three folders beside itself.
"""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("tasks", "app", "configs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


class BuildPy(build_py):
    """The stock command, and then the three folders."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in filter(os.path.isdir, FOLDERS):  # app/ may not be there yet
                target = Path(self.build_lib) / "vlrl" / folder
                shutil.rmtree(target, ignore_errors=True)  # a file deleted since the last build must not live on
                shutil.copytree(folder, target, ignore=LEFT_OUT)


setup(cmdclass={"build_py": BuildPy})
