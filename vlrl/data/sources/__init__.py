"""Rows in files of many kinds, and what they name elsewhere: imported where a task reads files."""
