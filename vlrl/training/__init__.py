"""The training loop and its surroundings: building a run, advantages, updates, checkpoints, supervised fine-tuning.

- session.py holds everything around the loop: lock, resume, evaluation, signals. It saves with checkpointing.py and
  reports with run_log.py. build.py makes the objects of a run from its config. sft.py runs the same loop on answers
  from the data set.
- The inputs of advantages are gathered in the order of group numbers, so the number of ranks does not change
  advantages.
- Gradients are summed over ranks once per optimizer step, in buckets (comm.sum_gradients), without DDP's hooks. So
  ranks may run different numbers of micro-batches or leave the vision tower unused without a deadlock.
- An overflow in float16 skips the optimizer step on every rank and halves the loss scale.
- Random numbers are keyed, and no RNG state is saved: a completion is sampled with the seed (seed, group number, index
  in the group), an evaluation with (seed, split, sample number), the data order with (seed, epoch), dropout with (seed,
  step, rank). A run resumed with another number of ranks has the same prompts and random numbers; only the order of
  float sums and dropout differ.
- On resume only those settings of `engine.*` that name locations and limits may change (`servers`, `key_file`,
  `timeout_s`, `retries`, `scratch`, `sleep`, `proof`). Settings that affect the completions may not change.
- A checkpoint of n steps is made only after every rank has written the rollouts of these steps to disk. The background
  writer works on a copy that is made between two steps, or by a signal handler during generation (docs/long-runs.md).
- Until the first optimizer step of an update, the weights are those of the completed steps; an optimizer hook marks
  that moment. The state that sampling changes is copied after every step, so that an error before the optimizer step
  still leaves a checkpoint. An error after it leaves none, because a copy of weights and optimizer would cost 12 bytes
  per trainable parameter."""
