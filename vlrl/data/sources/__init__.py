"""Reads rows from files, Hub data sets and URLs; imported only when a task reads files."""
