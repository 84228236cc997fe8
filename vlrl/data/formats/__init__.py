"""The ways in which other people write annotations, a module each; known.py lists them."""
