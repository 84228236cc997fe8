"""Numbered requests and replies over a connection, used by worker.py. Imports nothing of vlrl, because the math-verify
process loads this file on its own."""

import contextlib
import os
import struct

_NUMBER = struct.Struct("<Q")


def numbered_message(number, message):
    """The bytes of a message after its number."""
    return _NUMBER.pack(number) + message


def split_message(sent):
    """Number and message. Raises OSError for input too short to hold a number."""
    if len(sent) < _NUMBER.size:
        raise OSError("a message without a number")
    return _NUMBER.unpack_from(sent)[0], sent[_NUMBER.size:]


def serve(connection, reply_to):
    """Answers each request with `reply_to(bytes) -> bytes` until the connection closes."""
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
    """Runs foreign code and ends any forked copy of this process that leaves the block: such a copy would otherwise
    continue as if it were this process."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
