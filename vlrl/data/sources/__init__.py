"""Rows in files of many kinds, on the Hub and behind URLs; imported only when a task reads files."""
