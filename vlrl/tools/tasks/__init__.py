"""Jobs on tasks that need no model: create a task, list tasks, score answers."""
