"""vLLM as the sampler: in the training process (engine), or as servers beside it (server, launch, replicas)."""
