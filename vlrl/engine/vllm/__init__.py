"""vLLM as the sampler: inside the training process (engine.py), or as separate servers (server.py, launch.py,
replicas.py)."""
