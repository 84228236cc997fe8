"""The built-in tasks, imported as vlrl.tasks.<name>: each has a prompt, data and rewards. They do not import torch and
do not depend on a particular model.

Modules whose names begin with an underscore hold parts of tasks, such as recipes, formats and rules. A user's own file
tasks.py does not shadow vlrl.tasks."""
