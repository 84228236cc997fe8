"""Training methods of papers, one folder per method. Methods with a section of the config are listed in
config/sections.py, functions of the objective in algo/tables.py, and curriculum samplers in curriculum.SAMPLERS."""
