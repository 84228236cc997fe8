"""Pure scoring functions: they take text and numbers and return a score. They import no torch, know no model names, and
never raise on text that a model wrote.

- Rewards of a single task (driving, spans, tracks, ...) are imported by tasks, services and checks, but not by the
training loop.
- math-verify runs in a separate process and is only used for answers of type `math`, through math.verified; never for
boxes, points or labels. If it times out or raises, the error is stored and the answer scores 0."""
