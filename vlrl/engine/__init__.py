"""Engines that generate completions: with the training model (hf), with vLLM in this process, and on vLLM servers.

- A request is (prompt, n, sampling); a greedy baseline is one more request. What other modules need is in base.py.
- An engine with weights of its own gets them by `sync` alone: before every step and evaluation, and before the first
  answer of a resumed run. Whoever makes it closes it, also after an error; its files lie in a folder of the process
  (training.build_engine.engine_folder) that goes with it.
- The hf engine may be watched (`watch`): called after every token with the texts so far; no bit of the answers
  changes, and what it raises ends the generation. A setting of another engine is refused, another name drops it:
  `engine=vllm` is the whole change.
- An engine tells requests that are whole while others are written (`done`); results never depend on it. The automatic
  batch size follows the device's whole memory, never what is free: the last bits of logits depend on the batch.
- While generating, the rows of a group share one copy of their prompt's keys (cache.SharedRows); a model without that
  attention, or with layers of special kinds, copies the cache per row (CopiedRows).
- vllm_server speaks routes of vlrl's own, behind a key (vllm_server.py says why).
"""
