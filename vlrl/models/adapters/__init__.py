"""LoRA adapters and frozen weights in 4 bits; models/loading.py imports them where settings or model need them."""
