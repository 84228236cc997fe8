"""Methods of papers, a folder each. Those with a section of the config: config/sections.py; functions of the objective:
algo/tables.py; samplers: curriculum.SAMPLERS."""
