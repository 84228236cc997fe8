"""The faults, by area. The tests of each are the fast ones that are meant to see it."""

from tests.mutants.core import CURRICULUM, ENGINE, PACKING, RESUME, STORE
from tests.mutants.methods import ATTEMPTS, CREDIT, SCORES, STAGES, STORED

AREAS = {"packing": PACKING, "engine": ENGINE, "curriculum": CURRICULUM, "resume": RESUME, "store": STORE,
         "credit": CREDIT, "attempts": ATTEMPTS, "stages": STAGES, "scores": SCORES, "stored": STORED}
