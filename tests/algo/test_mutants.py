"""The goldens of the objective see every mistake of a list."""

import subprocess
import sys

import pytest

from tests.algo import mutants


def test_mutants_are_mistakes_that_can_be_made():
    assert all(mutants.mutated(*row) for row in mutants.MUTANTS)


def test_it_is_noted_which_test_saw_each():
    """The slow test takes three times as long where it is not."""
    assert mutants.read_killers().keys() == {mutants.line_of(row) for row in mutants.MUTANTS}, \
        "run python -m tests.algo.mutants --write"


@pytest.mark.long
@pytest.mark.slow
def test_every_mutant_dies():
    done = subprocess.run([sys.executable, "-m", "tests.algo.mutants"], capture_output=True, text=True,
                          cwd=mutants.ROOT, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
