"""What the subcommands of `vlrl` do: one module a job, usable without the command line."""
