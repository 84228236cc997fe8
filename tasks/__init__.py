"""The built-in tasks, imported as vlrl.tasks.<name>: a prompt, data and rewards each. No torch, no model names."""
