"""Evaluations of models: settings, answers, metrics."""
