"""Files of rows: checked, converted, split, measured. No torch but where a model is asked."""
