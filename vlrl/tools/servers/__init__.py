"""The model of a config behind HTTP: `vlrl serve`."""
