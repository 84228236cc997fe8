"""From drawn prompts to scored groups: generation, filters and refills, partial and asynchronous rollouts.

- Services that need a model run on all ranks, once for all groups that were generated together, before scoring.
- A task's code is never called from two threads at once. Threads that encode prompts ahead only load media, run the
  processor and compute position ids. An error in such a thread is raised when its prompt is used.
- A greedy baseline is generated separately from its group, stored in `Group.aside` as variant `greedy`, and excluded
  from all statistics.
- Completions of variants are generated separately, so that the completions of unmodified samples are bitwise identical
  with and without variants. Completions of trained variants join the group, and are trained on under the unmodified
  prompt (Rollout.train_prompt); the mismatch of engine and trainer is not computed for them. Completions of other
  variants are in `Group.aside`.
- Rollouts that a method (vlrl/methods) adds to a scored group are excluded from all statistics: outcomes, filters and
  the reported rewards only use completions of the prompt itself (`Group.plain`).
- A completion generated over several calls equals an uninterrupted completion: token t uses random number t of the
  completion's stream in any call. All ranks know all groups carried over to the next step; that step distributes these
  groups over the ranks together with its new draws. A group is scored once, when it is complete.
- Asynchronous generation does not depend on speed: the engine gets new weights when the queue of completions is used
  up, not when the engine is idle."""
