"""Training in several processes: collectives, a monitor of the ranks, and a guard against a launcher that hangs.

- Every collective is called through comm.py, which gives it a name for messages about waiting ranks. With a single
  process, all functions do nothing.
- An error of one rank that the user can fix is raised on all ranks (comm.together, comm.on_main).
- Slow work that only rank 0 does, such as saving, runs as `comm.on_main(call, "saving")`. The other ranks wait for it
  without a timeout as long as rank 0 is alive."""
