"""Rows generated from drawings, web pages, simulators and films."""
