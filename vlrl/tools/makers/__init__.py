"""Makers of data sets: they generate rows from drawings, web pages, simulators and films."""
