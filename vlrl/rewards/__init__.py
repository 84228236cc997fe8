"""Pure scoring functions: numbers and text in, a number out. No torch, no model names, no exceptions on model text.

- What single tasks pay (driving, spans, tracks, ...) is imported by tasks, services and checks, never by the trunk.
- math-verify runs in a process of its own and sees answers of type math only, through math.verified; never boxes,
  points or labels. A timeout or an exception of it is a stored error and pays 0.
"""
