"""The built-in tasks, imported as vlrl.tasks.<name>: each has a prompt, data and rewards. No torch, no model names.

A module with an underscore holds recipes, formats and rules of the task it is named after. A user's own tasks.py cannot
shadow these."""
