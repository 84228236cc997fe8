"""Pure scoring functions: numbers and text in, a number out. No torch, no model names, no exceptions on model text."""
