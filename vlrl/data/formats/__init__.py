"""Annotation formats of other projects, converted to canonical rows."""
