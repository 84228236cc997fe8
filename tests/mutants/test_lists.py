"""The lists of mutants do not rot: each fault can still be put into its file, and its tests are there."""

import pytest

from tests.mutants.lists import AREAS
from tests.mutants.running import ROOT, mutated

ROWS = [m for rows in AREAS.values() for m in rows]


@pytest.mark.parametrize("area", AREAS)
def test_every_text_stands_once_in_its_file(area):
    for m in AREAS[area]:
        compile(mutated(ROOT / m.file, m.text, m.replacement), m.file, "exec")


def test_every_test_is_there():
    for name in {name for m in ROWS for name in m.tests}:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "\ndef test_" + function.partition("[")[0].removeprefix("test_") in text, name


def test_no_mutant_comes_twice():
    assert len({(m.file, m.text, m.replacement) for m in ROWS}) == len(ROWS)
