"""The built-in tasks, imported as vlrl.tasks.<name>: each has a prompt, data and rewards. They import no torch and name
no model.

A module whose name begins with an underscore belongs to the task that it is named after, and holds recipes, formats or
rules of that task. A user's own tasks.py cannot shadow these modules."""
