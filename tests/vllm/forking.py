"""`vlrl.engine.vllm.process` whose engine and worker are forked from the server rather than spawned.

vLLM's CPU platform spawns them, and each then imports torch and vLLM again: a third of what a test with servers takes.
Where it matters how they come about (who ends with whom), tests start servers as users do."""

import multiprocessing

from vllm.utils import system_utils

from vlrl.engine.vllm import process as vllm_process

if __name__ == "__main__":
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # before vLLM's other modules take it
    vllm_process.main()
