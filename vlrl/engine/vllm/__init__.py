"""vLLM as the sampler: in the training process (engine.py), or on separate servers (server.py, launch.py)."""
