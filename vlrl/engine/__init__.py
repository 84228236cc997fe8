"""Engines that generate completions: with the training model (hf), with vLLM in this process, and on vLLM servers.

- A request is (prompt, n, sampling); a greedy baseline is one more request. The interface is in base.py.
- An engine with weights of its own gets them only by `sync`: before every step and evaluation, and before the first
  completion of a resumed run. Its creator closes it, also after an error; its files lie in a folder of the process
  (training.build_engine.engine_folder) that is removed with it.
- The hf engine can be watched: `watch` is called after every token with the texts so far. It never changes a
  completion, and an exception in it ends the generation. A setting of another engine is refused, and another engine
  name drops it: `engine=vllm` is the whole change.
- An engine reports requests that are complete while others are being decoded (`done`); results never depend on it. The
  automatic batch size follows the device's total memory, never the free memory: the last bits of logits depend on the
  batch.
- While generating, the rows of a group share one copy of their prompt's keys and values (cache.SharedRows); a model
  without that attention, or with layers of special kinds, copies the cache per row (CopiedRows).
- vllm_server uses routes of vlrl's own, protected by a key (vllm/server.py explains why).
"""
