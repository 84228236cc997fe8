"""LoRA adapters and frozen 4-bit weights. models/loading.py imports these modules only when the settings or the model
need them."""
