"""Pure scoring functions: text and numbers in, a score out. No torch, no model names, no exceptions on model text.

- Rewards of single tasks (driving, spans, tracks, ...) are imported by tasks, services and checks, never by the trunk.
- math-verify runs in its own process and sees only answers of type math, through math.verified; never boxes, points or
  labels. If it times out or raises, the error is stored and the answer scores 0."""
