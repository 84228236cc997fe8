"""The subcommands of `vlrl`: arguments and printed words. The work is done by modules of the library."""
