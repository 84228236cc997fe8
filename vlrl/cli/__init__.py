"""The `vlrl` command and its subcommands: arguments, help texts and printed output. The work is done in vlrl/tools.

vlrl/app (the inspector) is imported only inside the commands that use it."""
