"""Dry runs, estimates of memory, profiles, and checks of this machine."""
