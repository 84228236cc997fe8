"""From drawn prompts to scored groups: generation, filters and refills, partial and asynchronous rollouts.

- Services that need a model run once for all groups of a round, after generation, before scoring, on all ranks.
- A task's code is never called from two threads at once. Threads that encode ahead only run media loading, processor
  and positions; an error of theirs is raised where the prompt is used.
- A greedy baseline is sampled apart from its group, kept in `Group.aside` as variant `greedy`, and in no statistic.
- Completions of variants are generated separately from those of the unmodified samples, which are the same bits with
  and without variants. Trained variants are members of the group under the unchanged prompt (Rollout.train_prompt; the
  mismatch of sampler and trainer is not computed where prompts differ); the others are in `Group.aside`.
- What a method adds to a scored group is in no statistic: outcomes, filters and the reported rewards use only the
  completions of the prompt itself (`Group.plain`).
- A completion generated in pieces equals the uninterrupted one: token t takes draw t of its stream, whatever call
  generates it. All ranks know all groups that are carried over; a step distributes them with its draws; each is scored
  and observed once, when complete.
- Generation during the update does not depend on speed: the engine takes new weights when the queue is used up, not
  when it is idle.
"""
