"""The training loop and what surrounds it: building a run, advantages, updates, checkpoints, supervised fine-tuning.

- session.py surrounds the loop: lock, resume, evaluation and signals would hide the ten lines that matter; it saves
  with run_checkpoints.py and shows with run_log.py. build.py makes the parts of a run from its config; sft.py is the
  same loop with given answers.
- What an advantage looks at is gathered in the order of group numbers, so any number of ranks gives the same.
- Gradients are summed once per optimizer step, in buckets (comm.sum_gradients), without DDP's hooks: ranks may run
  different numbers of micro-batches, or leave the vision tower unused, and nothing hangs.
- An overflow in float16 skips the optimizer step on every rank and halves the loss scale.
- An answer draws from (seed, number of the group, index in it), an evaluation from (seed, split, number of the
  sample), the data order from (seed, epoch), dropout from (seed, step, rank). No RNG state is saved. With another
  number of ranks a resumed run has the same prompts and random numbers; only sums of floats, and dropout, differ.
- On resume the settings of `engine.*` that are places and limits may change too (`servers`, `key_file`, `timeout_s`,
  `retries`, `scratch`, `sleep`, `proof`); those that decide which answers come out may not.
- A checkpoint of n steps is made after the rollouts of those steps are on disk, on every rank. What is written in the
  background is a copy made between two steps, or by a signal handler while answers are drawn (docs/long-runs.md).
- Weights are those of the completed steps until the optimizer steps: a hook of the optimizer says when, and what
  drawing changes is copied after every step, so an error before that leaves a checkpoint. A copy of the weights for
  the moments after it would cost 12 bytes a trained parameter."""
