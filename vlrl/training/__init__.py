"""The training loop and its surroundings: building a run, advantages, updates, checkpoints, supervised fine-tuning.

- session.py holds what surrounds the loop: lock, resume, evaluation, signals. It saves with run_checkpoints.py and
  reports with run_log.py. build.py makes the parts of a run from its config; sft.py runs the same loop on given
  answers.
- Inputs of advantages are gathered in the order of group numbers, so the number of ranks does not change them.
- Gradients are summed once per optimizer step, in buckets (comm.sum_gradients), without DDP's hooks: ranks may run
  different numbers of micro-batches, or leave the vision tower unused, and nothing hangs.
- An overflow in float16 skips the optimizer step on every rank and halves the loss scale.
- A completion is sampled with the seed (seed, group number, index in the group), an evaluation with (seed, split,
  sample number), the data order with (seed, epoch), dropout with (seed, step, rank). No RNG state is saved. With
  another number of ranks a resumed run has the same prompts and random numbers; only float sums and dropout differ.
- On resume those settings of `engine.*` that name locations and limits may change (`servers`, `key_file`, `timeout_s`,
  `retries`, `scratch`, `sleep`, `proof`); those that affect the completions may not.
- A checkpoint of n steps is made after the rollouts of these steps are on disk, on every rank. The background writer
  works on a copy made between two steps, or by a signal handler during generation (docs/long-runs.md).
- The weights are those of the completed steps until the optimizer steps; a hook of the optimizer marks that moment.
  What sampling changes is copied after every step, so an error before the optimizer step still leaves a checkpoint. A
  copy of the weights for errors after it would cost 12 bytes per trainable parameter."""
