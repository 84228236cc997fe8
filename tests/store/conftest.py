"""What reaches the disk."""

import os

import pytest


@pytest.fixture
def disk(monkeypatch):
    """The list of what is synced or renamed from here on, in order: ("sync" or "rename", number of the inode)."""
    calls = []
    fsync = os.fsync

    def synced(descriptor):
        calls.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def noting(rename):
        def renamed(source, target, **more):
            calls.append(("rename", os.stat(source).st_ino))
            rename(source, target, **more)
        return renamed

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", noting(os.rename))
    monkeypatch.setattr(os, "replace", noting(os.replace))
    return calls
