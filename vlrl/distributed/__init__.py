"""Several processes: collectives, a watch over the ranks, and the guard of a hanging launcher.

- Every collective is made in comm.py, which names it for those who wait. All functions are no-ops for one process.
- An error that a user can mend on one rank is raised on all (comm.together, comm.on_main).
- What rank 0 does alone and may take long, such as saving, is `comm.on_main(call, "saving")`: no timeout applies while
  it lives."""
