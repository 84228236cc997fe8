"""Faults that the tests must see: each is put into a module as it is imported, and one of its tests has to fail.

    python -m tests.mutants [--area packing] [-j 2]     a line per mutant; exit code 1 when one lives

`tests.algo.mutants` does the same for the functions of the objective, several hundred small ones.
"""
