"""Numbered requests and replies over a connection, used by worker.py. This file imports nothing from vlrl, because the
math-verify process loads it without the package."""

import contextlib
import os
import struct

_NUMBER = struct.Struct("<Q")


def numbered_message(number, message):
    """The bytes to send: the number in 8 bytes, followed by the message."""
    return _NUMBER.pack(number) + message


def split_message(sent):
    """Splits received bytes into (number, message). Raises OSError if they are too short to contain a number."""
    if len(sent) < _NUMBER.size:
        raise OSError("the received message is too short to contain its number")
    return _NUMBER.unpack_from(sent)[0], sent[_NUMBER.size:]


def serve(connection, reply_to):
    """Receives requests, calls `reply_to(request_bytes)` for each and sends back the bytes it returns, until the
    connection closes."""
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
    """A context manager around foreign code that may call os.fork. A forked child that leaves the `with` block is ended
    at once; otherwise it would go on as a second copy of this process."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
