"""`vlrl serve --chat` and `--record`: the model of a config behind an OpenAI-compatible HTTP server."""
