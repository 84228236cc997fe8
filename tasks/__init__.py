"""The built-in tasks, imported as vlrl.tasks.<name>: each has a prompt, data and rewards. They do not import torch and
do not depend on a particular model.

A module whose name begins with an underscore holds recipes, formats or rules of the task in its name. Even if the user
has a file tasks.py, `vlrl.tasks` means this package."""
