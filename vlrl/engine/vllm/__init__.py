"""vLLM as the sampler: inside the training process (engine.py), or on separate servers (server.py, launch.py,
replicas.py)."""
