"""Files of rows: checking, conversion, splitting, measurement. Torch is loaded only to query a model."""
