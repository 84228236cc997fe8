"""Evaluation of models: sampling settings, answers, metrics."""
