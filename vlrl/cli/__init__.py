"""The `vlrl` command and its subcommands: arguments, help and printed words. The work is done by the packages below.

The app is imported only inside the commands that open it.
"""
