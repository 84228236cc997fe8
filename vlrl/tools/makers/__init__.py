"""Rows drawn by code, from pages, simulators and films."""
