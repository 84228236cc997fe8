"""Numbered requests and replies over a connection, as worker.py sends them. Imports nothing of vlrl: the process that
runs math-verify reads it as a file beside its own."""

import contextlib
import os
import struct

_NUMBER = struct.Struct("<Q")


def numbered_message(number, message):
    """Returns the bytes of a message behind its number."""
    return _NUMBER.pack(number) + message


def split_message(sent):
    """Returns number and message. Raises OSError for what is too short to hold one."""
    if len(sent) < _NUMBER.size:
        raise OSError("a message without a number")
    return _NUMBER.unpack_from(sent)[0], sent[_NUMBER.size:]


def serve(connection, reply_to):
    """Answers each request by `reply_to(bytes) -> bytes`, until nobody asks any more."""
    while True:
        try:
            number, request = split_message(connection.recv_bytes())
        except EOFError:
            return
        with ending_forked_copies():
            reply = reply_to(request)
        connection.send_bytes(numbered_message(number, reply))


@contextlib.contextmanager
def ending_forked_copies():
    """Runs code of others, of which only this process comes back: a copy that it forks, and which returns or raises
    instead of ending, would go on as if it were this one."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
