"""From drawn prompts to scored groups: generation, filters and refills, partial and asynchronous rollouts.

- Services that need a model run once for all groups of a round, after generation, before scoring, on all ranks.
- A task's code is never called from two threads at once. Threads that encode ahead run media, processor and positions
  alone; an error of theirs is raised where the prompt is used.
- A greedy baseline is drawn apart from the group, kept in `Group.aside` as variant `greedy`, and in no statistic.
- Answers of variants are generated apart from those to the samples as they are, which are the same bits with and
  without them. Trained variants are members of the group under the unchanged prompt (Rollout.train_prompt; mismatch
  between sampler and trainer is skipped where prompts differ); the others are in `Group.aside` and in no statistic.
- What a method adds to a scored group is in no statistic: what is observed, filtered and told of rewards are the
  answers to the question alone (`Group.plain`).
- An answer in pieces is the unbroken answer: token t takes draw t of its stream, whatever call writes it. All ranks
  know all groups that are carried over; a step deals them out with its draws; each is scored and observed once, when
  whole.
- Generation beside the update depends on no speed: the engine takes new weights when the queue is used up, not when it
  is idle.
"""
