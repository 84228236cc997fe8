"""Several processes: collectives, a monitor of the ranks, and a guard against a hanging launcher.

- Every collective is in comm.py, which names it for ranks that wait. All functions are no-ops for one process.
- An error on one rank that the user can fix is raised on all (comm.together, comm.on_main).
- Slow work of rank 0 alone, such as saving, is `comm.on_main(call, "saving")`: no timeout applies while it is alive."""
