"""Engines that generate completions: with the training model (hf), with vLLM in this process, and on vLLM servers."""
