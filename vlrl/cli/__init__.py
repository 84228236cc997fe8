"""The `vlrl` command and its subcommands: arguments, help and printed text; vlrl/tools does the work.

The app is imported only inside the commands that open it.
"""
