"""Dry runs, memory estimates, profiles, and checks of this machine."""
