"""The built-in tasks, imported as vlrl.tasks.<name>: a prompt, data and rewards each. No torch, no model names.

A module with an underscore holds the recipes, forms and rules of the task it is named for. A user's own tasks.py cannot
shadow these.
"""
